//! Fused autodiff operations for training on the CPU, each with Burn's own as its fallback.
//!
//! An operation runs fused when all its float inputs are f32 on the Flex backend, with or without `Autodiff` around it;
//! otherwise it is composed of Burn's operations ([`mod@reference`]). Fused, it
//! - computes the same bits whether its inputs are tracked, untracked, or outside autodiff, and records a step only
//!   where an input needs a gradient;
//! - writes a parameter's gradient through the sink registered for it ([`crate::sink`]) and then registers nothing with
//!   Burn; without a sink it registers the gradient as any operation does;
//! - writes into a tensor it was given only where no one else holds its storage.
//!
//! Inputs need not be contiguous, and their storage need not be aligned beyond an `f32`. The arithmetic is in
//! [`crate::kernels`].

mod activation;
mod attention;
mod embedding;
mod fused;
mod linear;
mod loss;
mod norm;
pub mod reference;
mod rotary;

pub use activation::{gelu_tanh, silu_mul};
pub use attention::{causal_attention, causal_attention_packed};
pub use embedding::{embedding, embedding_with_positions};
pub use linear::{linear, linear_residual, linear_transposed};
pub use loss::cross_entropy;
pub use norm::{layer_norm, rms_norm};
pub use rotary::rotary;

pub use crate::kernels::attention::AttentionHeads;
