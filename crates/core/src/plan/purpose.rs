//! What a rank holds memory for: the lines of the plan and of the ledger.

use std::fmt;

/// What a rank holds memory for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Purpose {
    /// The rank's part of the parameters (all of them without sharding).
    Parameters,
    /// The optimizer's statistics for them.
    OptimizerState,
    /// The average of the weights over steps.
    WeightAverages,
    /// Where optimizers that look at whole parameters work.
    OptimizerScratch,
    /// Partial sums of the gradient's shard.
    GradientShards,
    /// The root unit's full parameters, gathered for a step.
    GatheredRoot,
    /// Full parameters of the units gathered at a time.
    GatheredUnits,
    /// The root unit's full gradient.
    RootGradient,
    /// The full gradient of the unit whose backward runs.
    UnitGradient,
    /// The rank's part of the parameters, rounded to the type in which they are gathered.
    LowPrecisionParameters,
    /// A group's sum of one part of a gradient, on its way to the other groups.
    ReplicaSum,
    /// Parts on their way into a node, and a node's sums of parts on their way to the other nodes.
    HierarchyRelay,
    /// Buffers through which passes what rests elsewhere.
    TierBuffers,
    /// Shards that rest elsewhere, on their way into a gather.
    StagedParameters,
    /// The sum of one gradient shard that rests elsewhere.
    StagedGradient,
    /// What rests elsewhere of one flat parameter, for the update by an optimizer that needs all of it at once.
    ReloadedState,
    /// hpZ: a rank's part of its node's second copy of the parameters.
    SecondaryParameters,
    /// Gradients and their sums, quantised for their way to other ranks.
    QuantisedGradients,
    /// LoCo: what quantisation has taken from gradients.
    ErrorFeedback,
}

impl Purpose {
    /// Every purpose, in the order of reports.
    pub const ALL: [Purpose; 19] = [
        Purpose::Parameters,
        Purpose::OptimizerState,
        Purpose::WeightAverages,
        Purpose::OptimizerScratch,
        Purpose::GradientShards,
        Purpose::GatheredRoot,
        Purpose::GatheredUnits,
        Purpose::RootGradient,
        Purpose::UnitGradient,
        Purpose::LowPrecisionParameters,
        Purpose::ReplicaSum,
        Purpose::HierarchyRelay,
        Purpose::TierBuffers,
        Purpose::StagedParameters,
        Purpose::StagedGradient,
        Purpose::ReloadedState,
        Purpose::SecondaryParameters,
        Purpose::QuantisedGradients,
        Purpose::ErrorFeedback,
    ];

    /// The name used in reports.
    pub fn name(self) -> &'static str {
        match self {
            Purpose::Parameters => "parameters",
            Purpose::OptimizerState => "optimizer state",
            Purpose::WeightAverages => "weight averages",
            Purpose::OptimizerScratch => "optimizer scratch",
            Purpose::GradientShards => "gradient shards",
            Purpose::GatheredRoot => "gathered root",
            Purpose::GatheredUnits => "gathered units",
            Purpose::RootGradient => "root gradient",
            Purpose::UnitGradient => "unit gradient",
            Purpose::LowPrecisionParameters => "low-precision parameters",
            Purpose::ReplicaSum => "sum across replicas",
            Purpose::TierBuffers => "tier buffers",
            Purpose::StagedParameters => "staged parameters",
            Purpose::StagedGradient => "staged gradient",
            Purpose::ReloadedState => "reloaded state",
            Purpose::HierarchyRelay => "relays between nodes",
            Purpose::SecondaryParameters => "secondary parameters",
            Purpose::QuantisedGradients => "quantised gradients",
            Purpose::ErrorFeedback => "error feedback",
        }
    }
}

impl fmt::Display for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
