//! Benchmarks that anyone can run: `bench comm` and `bench step`.

pub mod comm;
pub mod step;
