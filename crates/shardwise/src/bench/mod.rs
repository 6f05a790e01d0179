//! Benchmarks that anyone can run: `bench comm`, `bench step`, `bench optimizer`, `bench disk` and `bench quantize`.

pub mod comm;
pub mod disk;
pub mod optimizer;
pub mod quantize;
pub mod step;
