//! What can be wrong with a layout or a plan, in words that name the parameters.

use crate::precision::Precision;
use crate::strategy::ShardingStrategy;
use thiserror::Error;

use crate::layout::DType;

/// Why a list of parameters cannot become one flat parameter.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum LayoutError {
    /// No parameter was given.
    #[error("unit `{unit}` has no parameters: a flat parameter cannot be built from an empty list")]
    Empty {
        /// The unit that was to be flattened.
        unit: String,
    },
    /// Two parameters of one flat parameter have different dtypes.
    #[error(
        "unit `{unit}`: a flat parameter has one dtype, but `{first}` is {first_dtype} and `{other}` is {other_dtype}; \
         convert one of them or put them into units of their own"
    )]
    MixedDTypes {
        /// The unit that was to be flattened.
        unit: String,
        /// The parameter that set the dtype.
        first: String,
        /// Its dtype.
        first_dtype: DType,
        /// The parameter that differs.
        other: String,
        /// Its dtype.
        other_dtype: DType,
    },
    /// A parameter is not a floating-point tensor.
    #[error(
        "unit `{unit}`: `{path}` is {dtype}, and integer parameters are unsupported; make it a buffer or ignore it"
    )]
    NotFloat {
        /// The unit that was to be flattened.
        unit: String,
        /// The parameter.
        path: String,
        /// Its dtype.
        dtype: DType,
    },
    /// Frozen and trainable parameters were asked to share one flat parameter.
    #[error(
        "unit `{unit}`: one flat parameter is frozen or trainable as a whole, but `{trainable}` requires a gradient and \
         `{frozen}` does not; build one flat parameter for each"
    )]
    MixedRequiresGrad {
        /// The unit that was to be flattened.
        unit: String,
        /// A parameter that requires a gradient.
        trainable: String,
        /// A parameter that does not.
        frozen: String,
    },
    /// A parameter is part of a flat parameter already.
    #[error(
        "unit `{unit}`: `{path}` already belongs to the flat parameter of unit `{owner}`; flat parameters do not nest"
    )]
    AlreadyFlat {
        /// The unit that was to be flattened.
        unit: String,
        /// The parameter.
        path: String,
        /// The unit that holds it.
        owner: String,
    },
    /// Two different parameters have the same path.
    #[error("unit `{unit}`: two parameters have the path `{path}`; a path must name one parameter")]
    DuplicatePath {
        /// The unit that was to be flattened.
        unit: String,
        /// The path that names both.
        path: String,
    },
    /// The number of ranks is zero.
    #[error("a world of 0 ranks cannot hold unit `{unit}`; use at least 1")]
    NoRanks {
        /// The unit that was to be flattened.
        unit: String,
    },
}

/// Why a step cannot be planned.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PlanError {
    /// The micro-batch does not divide the global batch.
    #[error(
        "train.micro_batch = {micro_batch} does not divide train.global_batch = {global_batch}; \
         choose a micro_batch that divides it, such as {suggestion}"
    )]
    MicroBatchDoesNotDivide {
        /// Samples in a step.
        global_batch: usize,
        /// Samples in a micro-batch.
        micro_batch: usize,
        /// The largest divisor of the global batch that is at most the micro-batch.
        suggestion: usize,
    },
    /// There are fewer micro-batches than ranks.
    #[error(
        "{micro_batches} micro-batches a step (train.global_batch / train.micro_batch) cannot feed {ranks} ranks; \
         use at most {micro_batches} ranks, a smaller micro_batch or a larger global_batch"
    )]
    TooFewMicroBatches {
        /// Micro-batches in a step.
        micro_batches: usize,
        /// Ranks that want one each.
        ranks: usize,
    },
    /// A count that must be positive is zero.
    #[error("{name} is 0; it must be at least 1")]
    Zero {
        /// The setting.
        name: &'static str,
    },
    /// f16 gradients overflow and underflow without a loss scale.
    #[error(
        "reduce_dtype is f16, whose smallest number is 6e-8, but there is no loss_scale: small gradients would vanish; set \
         loss_scale = \"dynamic\" (or a number), or use bf16, which needs none"
    )]
    UnscaledF16,
    /// There is no low precision to keep.
    #[error(
        "keep_low_precision_grads is set but reduce_dtype is {reduce_dtype}; set reduce_dtype to bf16 or f16, or leave it out"
    )]
    NothingLowToKeep {
        /// The type of the reductions.
        reduce_dtype: Precision,
    },
    /// A hybrid strategy does not say how large its groups are.
    #[error(
        "strategy {strategy} shards inside groups of ranks and replicates across them, but shard_group is not set; set it to \
         a divisor of the {ranks} ranks"
    )]
    NoShardGroup {
        /// The strategy.
        strategy: ShardingStrategy,
        /// All ranks.
        ranks: usize,
    },
    /// The ranks do not fall into groups of one size.
    #[error(
        "shard_group = {shard_group} does not divide the {ranks} ranks; choose a divisor, such as {suggestion}"
    )]
    ShardGroupDoesNotDivide {
        /// Ranks of one group.
        shard_group: usize,
        /// All ranks.
        ranks: usize,
        /// The largest divisor that is at most the group's size.
        suggestion: usize,
    },
    /// Groups were asked for with a strategy that has none.
    #[error(
        "shard_group = {shard_group} is set but strategy {strategy} has no groups; use hybrid_shard or hybrid_shard_zero2, \
         or leave shard_group out"
    )]
    NotHybrid {
        /// Ranks of one group.
        shard_group: usize,
        /// The strategy.
        strategy: ShardingStrategy,
    },
    /// A setting of where state rests cannot work.
    #[error("offload: {0}")]
    Offload(String),
    /// A setting of what travels cannot work.
    #[error("{0}")]
    Wire(String),
}
