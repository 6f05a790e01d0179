//! What can go wrong in a step; messages name the unit, the state and the call.

use shardwise_comm::CommError;
use shardwise_core::{LayoutError, PlanError};
use shardwise_tier::TierError;
use thiserror::Error;

/// A failed engine call. Once a collective has failed the engine stays failed: every later step returns the same error.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum EngineError {
    /// Communication failed.
    #[error("rank {rank}: {source}")]
    Comm {
        /// The reporting rank.
        rank: usize,
        /// What happened.
        source: CommError,
    },
    /// The parameters cannot be laid out.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The step cannot be scheduled.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A call that the engine's state does not allow.
    #[error("{call} of unit {unit} is not allowed in state {state}; {remedy}")]
    State {
        /// The unit with its summary, or `root`.
        unit: String,
        /// The state.
        state: &'static str,
        /// The call.
        call: &'static str,
        /// What to do instead.
        remedy: &'static str,
    },
    /// A parameter was read while its unit was not gathered.
    #[error(
        "parameter `{path}` of unit `{unit}` was read while its unit is sharded; read it inside the unit's call, or gather \
         it first"
    )]
    NotGathered {
        /// The parameter.
        path: String,
        /// Its unit.
        unit: String,
    },
    /// A gradient is NaN or infinite, and the step was taken inside backward.
    #[error(
        "the gradient of step {step} is not finite: the first such element is {value} in parameter `{path}` (found on rank \
         {rank}); with step_in_backward other parameters have been changed already: go back to saved weights, and lower \
         train.lr, leave step_in_backward out, or look at the data of this step"
    )]
    NonFiniteInBackward {
        /// The step, counted from 1.
        step: u64,
        /// The rank that owns the element.
        rank: usize,
        /// The parameter.
        path: String,
        /// The value.
        value: f32,
    },
    /// A gradient is NaN or infinite.
    #[error(
        "the gradient of step {step} is not finite: the first such element is {value} in parameter `{path}` (found on rank \
         {rank}); no parameter was changed; lower train.lr, set train.clip_norm, or look at the data of this step"
    )]
    NonFinite {
        /// The step, counted from 1.
        step: u64,
        /// The rank that owns the element.
        rank: usize,
        /// The parameter.
        path: String,
        /// The value.
        value: f32,
    },
    /// Too many steps in a row had a gradient that is NaN or infinite.
    #[error(
        "{skips} steps in a row, up to step {step}, were skipped for a gradient that is not finite (loss scale {scale}): the \
         first such element is {value} in parameter `{path}` (found on rank {rank}); lower train.lr, set train.clip_norm, or \
         look at the data"
    )]
    TooManySkips {
        /// The last of them, counted from 1.
        step: u64,
        /// How many.
        skips: u32,
        /// The loss scale that they have led to.
        scale: f64,
        /// The rank that owns the element.
        rank: usize,
        /// The parameter.
        path: String,
        /// The value.
        value: f32,
    },
    /// What rests elsewhere could not be moved.
    #[error("{source}")]
    Tier {
        /// The reporting rank.
        rank: usize,
        /// What happened.
        source: TierError,
    },
    /// A frozen parameter that rests in int8 was given a number that has no place there.
    #[error(
        "rank {rank}: element {index} of the frozen parameter `{path}` of unit `{unit}` would be {value}, and frozen \
         parameters rest in int8, which holds finite numbers only; correct the value, or set quantized_nontrainable_weights to \
         false"
    )]
    FrozenNotFinite {
        /// The rank that owns the element.
        rank: usize,
        /// The unit.
        unit: String,
        /// The parameter.
        path: String,
        /// The element, row-major.
        index: usize,
        /// What was given.
        value: f32,
    },
    /// The caller passed something impossible.
    #[error("{0}")]
    Usage(String),
}
