//! How an engine trains, what it calls its units, and what it reports of a step.

use serde::{Deserialize, Serialize};
use shardwise_core::{GatherPolicy, MixedPrecision, Offload, PlanError, ShardingStrategy, WireConfig};

use crate::Result;
use crate::error::EngineError;
use crate::norm::Norm;
use crate::optimizer::{DecayRule, OptimizerConfig};
use crate::scale::LossScale;

/// Names a unit of an engine: the root, or one of the module walk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UnitId(usize);

impl UnitId {
    /// The parameters outside every unit.
    pub const ROOT: UnitId = UnitId(0);

    /// The `index`-th unit of the module walk.
    pub fn unit(index: usize) -> Self {
        Self(index + 1)
    }

    /// The `index`-th of all units, the root counted.
    pub(crate) fn at(index: usize) -> Self {
        Self(index)
    }

    /// The place among all units, the root counted.
    pub(crate) fn index(self) -> usize {
        self.0
    }

    /// Whether this is the root.
    pub fn is_root(self) -> bool {
        self == Self::ROOT
    }
}

/// How an engine trains.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EngineConfig {
    /// How state is spread over ranks.
    pub strategy: ShardingStrategy,
    /// Ranks of one group, for a hybrid strategy: neighbours share one copy of the model, and the groups are replicas.
    pub shard_group: Option<usize>,
    /// What travels in less than f32.
    pub precision: MixedPrecision,
    /// What travels quantised, and through which groups of ranks.
    pub wire: WireConfig,
    /// What rests elsewhere than in memory.
    pub offload: Offload,
    /// What the loss is multiplied by before its backward.
    pub loss_scale: LossScale,
    /// What the sum of the micro-batches' gradients is divided by.
    pub divisor: Divisor,
    /// Where the gradients of several rounds add up.
    pub accumulation: Accumulation,
    /// What a gradient that is NaN or infinite leads to.
    pub non_finite: NonFinite,
    /// The update rule.
    pub optimizer: OptimizerConfig,
    /// Which parameters decay.
    pub decay: DecayRule,
    /// The norm that a gradient is cut down to; `None` leaves it as it is.
    pub clip_norm: Option<f64>,
    /// Which norm that is.
    pub norm: Norm,
    /// Whether units are gathered while others compute.
    pub prefetch: bool,
    /// How far ahead, and how long units stay.
    pub gather: GatherPolicy,
    /// The part of their average that the weights keep at each step: see [`crate::Engine::swap_averages`]. `None` keeps
    /// none.
    pub ema_decay: Option<f64>,
    /// Whether each unit is updated as soon as its gradient is summed, inside backward: one gradient shard serves all units.
    /// For steps of one round without clipping, with parameters that travel in less than f32 or on one rank. A gradient
    /// that is not finite is found when other units have been updated already, and ends the run.
    pub step_in_backward: bool,
}

impl Default for EngineConfig {
    /// `full_shard`, f32, AdamW with PyTorch's constants, no clipping, prefetch.
    fn default() -> Self {
        Self {
            strategy: ShardingStrategy::FullShard,
            shard_group: None,
            precision: MixedPrecision::default(),
            wire: WireConfig::default(),
            offload: Offload::default(),
            loss_scale: LossScale::None,
            divisor: Divisor::MicroBatches,
            accumulation: Accumulation::Sharded,
            non_finite: NonFinite::Error,
            optimizer: OptimizerConfig::ADAMW,
            decay: DecayRule::MatricesOnly,
            clip_norm: None,
            norm: Norm::L2,
            prefetch: true,
            gather: GatherPolicy::default(),
            ema_decay: None,
            step_in_backward: false,
        }
    }
}

impl EngineConfig {
    /// How many of `ranks` share one copy of the model.
    ///
    /// # Errors
    /// When strategy and groups do not fit.
    pub fn shard_group_size(&self, ranks: usize) -> Result<usize> {
        Ok(self.strategy.shard_group_size(ranks, self.shard_group)?)
    }

    /// The policy of gathers as `prefetch` leaves it.
    pub fn gather_policy(&self) -> GatherPolicy {
        if self.prefetch { self.gather } else { self.gather.without_prefetch() }
    }

    /// Refuses what cannot work.
    ///
    /// # Errors
    /// Naming the setting, what it is and what it may be.
    pub fn check(&self) -> Result<()> {
        self.precision.check(self.loss_scale.is_scaled())?;
        self.wire.check()?;
        if let (Some(how), true) = (self.wire.gradients, self.precision.reduce_dtype.is_low()) {
            return Err(EngineError::Plan(PlanError::Wire(format!(
                "quantized_gradients is {how}, but reduce_dtype is {}; gradients are quantised from f32, which takes fewer \
                 bytes than either type: leave one of them out",
                self.precision.reduce_dtype
            ))));
        }
        self.offload.check()?;
        self.loss_scale.check().map_err(EngineError::Usage)?;
        self.gather.check()?;
        self.optimizer.check().map_err(|message| EngineError::Usage(format!("the optimizer: {message}")))?;
        crate::average::check_decay(self.ema_decay)?;
        match self.divisor {
            Divisor::Custom(divisor) if !(divisor as f32).is_finite() || divisor as f32 == 0.0 => {
                Err(EngineError::Usage(format!(
                    "the gradient's divisor is {divisor}; it must be a number other than 0"
                )))
            }
            _ => Ok(()),
        }
    }
}

/// What the sum of all micro-batches' gradients is divided by, once.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Divisor {
    /// Their number: the gradient of the mean of their losses.
    #[default]
    MicroBatches,
    /// This.
    Custom(f64),
    /// The sum over all ranks of what [`crate::Engine::add_weight`] has been given in the step: with losses that are sums
    /// over tokens, and their numbers as weights, the gradient of the mean over all tokens.
    Weights,
}

/// Where the gradients of several rounds add up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Accumulation {
    /// Each round is reduced, and each rank adds up its shard: little memory, and the same bits for every number of ranks.
    #[default]
    Sharded,
    /// Each rank adds up its full gradients, and the last round reduces them (FSDP's `no_sync`): one reduction a step, one
    /// full gradient of every unit, and sums that agree with the other way to rounding.
    Unsharded,
}

/// What a gradient that is NaN or infinite leads to. A dynamic loss scale takes it for an overflow and skips the step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NonFinite {
    /// The step fails; nothing is updated.
    #[default]
    Error,
    /// The step is skipped: nothing is updated, and the report says so.
    Skip,
    /// Such elements count as zero.
    Zero,
}

/// Skipped steps in a row after which a run is taken for broken.
pub const MAX_SKIPS: u32 = 50;

/// An element of a gradient that is NaN or infinite.
#[derive(Debug, Clone, PartialEq)]
pub struct NonFiniteElement {
    /// The rank that owns it.
    pub rank: usize,
    /// Its parameter.
    pub path: String,
    /// What it is.
    pub value: f32,
}

/// What a step did.
#[derive(Debug, Clone, PartialEq)]
pub struct StepReport {
    /// The step, counted from 1; skipped ones count.
    pub step: u64,
    /// How many steps have updated the parameters so far, this one included: what a learning rate schedule should follow.
    pub updates: u64,
    /// The norm of the whole gradient before clipping, equal on all ranks.
    pub grad_norm: f64,
    /// What the gradient was multiplied by: below 1 when it was clipped.
    pub clip_coefficient: f32,
    /// Why nothing was updated: the first element that was not finite.
    pub skipped: Option<NonFiniteElement>,
    /// What the losses of this step were multiplied by.
    pub loss_scale: f64,
    /// Bytes of parameters and gradients that this rank sent to others.
    pub bytes_sent: u64,
    /// Those of them that left this rank's node, or its group of a hybrid strategy.
    pub bytes_sent_across: u64,
    /// Bytes that it sent for optimizers that look at whole parameters.
    pub update_bytes_sent: u64,
    /// What quantisation has taken from this rank's parameters on their way to the computation: the root of the mean squared
    /// error, relative to that of the parameters. 0 when they travel otherwise; what rests in int8 does not count.
    pub weight_error: f64,
    /// The same of what this rank has shown of gradients in both hops of their reductions.
    pub gradient_error: f64,
    /// The most bytes of full parameters (root and units) that this rank held at a time.
    pub gathered_bytes_peak: u64,
}

impl StepReport {
    /// Whether the gradient was cut down.
    pub fn is_clipped(&self) -> bool {
        self.clip_coefficient < 1.0
    }
}
