//! The Burn adapter: a Burn module in, a sharded module out.
//!
//! - [`Sharded`] around a layer makes it a unit; parameters outside every unit belong to the root.
//! - [`ShardedModel`] takes a module apart into shards and trains it, one step at a time.
//! - [`ops`] are the operations that models should compute with: fused where they can be, Burn's own otherwise.
//! - [`sink`] is how their gradients reach the flat gradient without a detour.
//!
//! Parameters and what the optimizer keeps may rest on the host or in files ([`Init::remote_device`], [`Init::swap_at`], which
//! has an example); the bits are the same. A tier that fails ends the step on every rank, with the file and the rank.

mod access;
mod agree;
mod assemble;
pub mod error;
mod evaluate;
mod fill;
mod init;
pub mod kernels;
pub mod model;
pub mod ops;
mod params;
mod partition;
mod retrain;
mod sharded;
pub mod sink;
pub mod source;
mod unit;
mod values;
mod view;
mod walk;
mod wrap;

pub use access::{Gathered, GatheredMut, SummonOptions, Which};
pub use assemble::model_layouts;
pub use error::{ParamSummary, ShardError};
pub use init::Init;
pub use model::{ShardConfig, ShardedModel, StepError, StepOutcome, StepWeights};
pub use partition::InitContext;
pub use sharded::{Constants, Sharded};
pub use source::ParamSource;
pub use values::InitialValues;
pub use wrap::{Candidate, Ignored, Persistence, WrapPolicy};
