//! How an engine trains, what it calls its units, and what it reports of a step.

use shardwise_core::ShardingStrategy;

use crate::norm::Norm;
use crate::optimizer::{DecayRule, OptimizerConfig};

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
    /// The update rule.
    pub optimizer: OptimizerConfig,
    /// Which parameters decay.
    pub decay: DecayRule,
    /// The norm that a gradient is cut down to; `None` leaves it as it is.
    pub clip_norm: Option<f64>,
    /// Which norm that is.
    pub norm: Norm,
    /// Whether the next unit is gathered while one computes.
    pub prefetch: bool,
}

/// What a step did.
#[derive(Debug, Clone, PartialEq)]
pub struct StepReport {
    /// The step, counted from 1.
    pub step: u64,
    /// The norm of the whole gradient before clipping, equal on all ranks.
    pub grad_norm: f64,
    /// What the gradient was multiplied by.
    pub clip_coefficient: f32,
    /// Bytes of parameters and gradients that this rank sent to others.
    pub bytes_sent: u64,
    /// The most bytes of full parameters (root and units) that this rank held at a time.
    pub gathered_bytes_peak: u64,
}
