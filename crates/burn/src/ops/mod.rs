//! Fused autodiff operations for the CPU, each with Burn's own as its fallback.
