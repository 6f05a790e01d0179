//! The Burn adapter: a Burn module in, a sharded module out.
//!
//! - [`Sharded`] around a layer makes it a unit; parameters outside every unit belong to the root.
//! - [`ShardedModel`] takes a module apart into shards and trains it, one step at a time.
//! - [`ops`] are the operations that models should compute with: fused where they can be, Burn's own otherwise.
//! - [`sink`] is how their gradients reach the flat gradient without a detour.

mod assemble;
pub mod error;
mod evaluate;
pub mod kernels;
pub mod model;
pub mod ops;
mod sharded;
pub mod sink;
pub mod source;
mod unit;
mod view;
mod walk;

pub use assemble::model_layouts;
pub use error::ShardError;
pub use model::{ShardConfig, ShardedModel, StepError, StepOutcome, StepWeights};
pub use sharded::{Constants, Sharded};
pub use source::ParamSource;
