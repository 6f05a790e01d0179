//! Benchmarks that anyone can run: `bench comm`, `bench step` and `bench optimizer`.

pub mod comm;
pub mod optimizer;
pub mod step;
