//! Index arithmetic and policy of sharded training, as plain data: no I/O, no threads, no `unsafe`.
//!
//! - [`layout`]: the parameters of a unit as one flat parameter, cut into equal shards.
//! - [`shard`]: which elements of which parameters a rank owns.
//! - [`reduction`]: the one order in which partial sums are added, over ranks and over micro-batches.
//! - [`schedule`]: which rank computes which micro-batch, and how many collectives a step takes.
//! - [`plan`]: the memory a rank needs and the bytes it sends, known before anything is allocated.
//! - [`gather`]: which units are gathered ahead, and which stay.
//! - [`precision`]: in which type numbers travel.
//! - [`wire`]: what travels in fewer bits still, and through which groups of ranks.
//! - [`offload`]: where state rests between its uses.
//! - [`statistics`]: what optimizers keep and need beside parameters and gradients.
//! - [`traffic`]: bytes sent, by the kind of link.
//! - [`seed`]: random numbers keyed by names, not by the order in which they are drawn.

#![forbid(unsafe_code)]

pub mod error;
pub mod gather;
pub mod layout;
pub mod offload;
pub mod plan;
pub mod precision;
pub mod reduction;
pub mod schedule;
pub mod seed;
pub mod shard;
pub mod statistics;
pub mod strategy;
pub mod traffic;
pub mod wire;

pub use error::{LayoutError, PlanError};
pub use gather::{BackwardPrefetch, GatherPolicy};
pub use layout::{DType, FlatLayout, ParamInfo, ParamSpec, SharedParamInfo};
pub use offload::{IO_ALIGNMENT, Offload, Placement, RestingPart, Tier};
pub use plan::{MemoryPlan, PlanInput, Purpose, UnitSize};
pub use precision::{MixedPrecision, Precision, pre_divisor};
pub use reduction::{CarryCounter, max_partials};
pub use schedule::{RoundAssignment, StepSchedule};
pub use seed::seed_for;
pub use shard::{ShardMetadata, ShardedParam};
pub use statistics::{OptimizerKind, OptimizerPlan, ScratchSize, StatisticsSize};
pub use strategy::ShardingStrategy;
pub use traffic::Traffic;
pub use wire::{ErrorFeedback, QUANTISATION_BLOCK, Quantization, Rounding, Travel, WireConfig};
