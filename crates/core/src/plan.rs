//! The memory a rank needs and the bytes it sends, known before anything is allocated.
//!
//! With `S` the elements of all shards of a rank (padding included), `P_r` those of the root's padded flat parameter,
//! `P_u` those of the largest unit's, `n` units, `W` ranks, `K` rounds of micro-batches and `L = floor(log2(K + 1))`,
//! a rank holds at its peak, in bytes and for f32:
//!
//! | purpose | `full_shard`, `W >= 2` | `shard_grad_op`, `W >= 2` | `no_shard`, `W >= 2` | `W = 1` |
//! |---|---|---|---|---|
//! | parameters | `4 S` | `4 S` | `4` x all | `4 S` |
//! | optimizer state (AdamW, Adam; SGD with momentum and Lion half, SGD without none) | `8 S` | `8 S` | `8` x all | `8 S` |
//! | averages of the weights, if asked for | `4 S` | `4 S` | `4` x all | `4 S` |
//! | partial gradient sums | `4 L S` | `4 L S` | `4 L S` | `4 L S` |
//! | gathered root | `4 P_r` | `4 P_r` | 0 | 0 |
//! | gathered units | `4 P_u min(n, 1 + prefetch)`; with other policies [`GatherPolicy::slots`] | `4` x all units | 0 | 0 |
//! | full gradient of the root | `4 P_r` | `4 P_r` | `4 P_r` | `4 P_r` |
//! | full gradient of one unit | `4 P_u` | `4 P_u` | `4 P_u` | `4 P_u` |
//!
//! Adafactor, Muon and parameter groups: [`crate::statistics`]. Frozen parameters count for parameters and gathers only.
//!
//! Variations. Gradients that are accumulated unsharded take one full gradient of every unit, and `L` is that
//! of one round. With a `param_dtype` below f32 a rank holds `2 S` of low-precision parameters where it gathers from
//! peers, and gathers even where it has all parameters, to round them. A hybrid strategy has the formulas of its groups,
//! with `W` their size, and one sum of the largest part for the way across. With the step inside
//! backward partial sums take one part of the largest flat parameter.

use std::fmt;

use crate::gather::GatherPolicy;
use crate::layout::FlatLayout;
use crate::precision::MixedPrecision;
use crate::reduction::max_partials;
use crate::schedule::StepSchedule;
use crate::statistics::{OptimizerPlan, PlannedStatistics};
use crate::strategy::ShardingStrategy;

/// Bytes of an f32, the type of every master weight, gradient sum and optimizer statistic.
const F32: u64 = 4;

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
}

impl Purpose {
    /// Every purpose, in the order of reports.
    pub const ALL: [Purpose; 11] = [
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
        }
    }
}

impl fmt::Display for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Elements of a unit's flat parameters, without padding.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UnitSize {
    /// Those that are trained.
    pub trainable: usize,
    /// Those that are frozen: sharded and gathered, but without gradient and statistics.
    pub frozen: usize,
}

impl UnitSize {
    /// The size of the flat parameters of one unit.
    pub fn of<'a>(layouts: impl IntoIterator<Item = &'a FlatLayout>) -> Self {
        layouts.into_iter().fold(Self::default(), |mut size, layout| {
            *if layout.requires_grad() { &mut size.trainable } else { &mut size.frozen } += layout.numel();
            size
        })
    }

    /// Elements of both, each padded for `ranks`.
    pub fn padded(self, ranks: usize) -> usize {
        self.parts().iter().map(|numel| numel.div_ceil(ranks) * ranks).sum()
    }

    fn parts(self) -> [usize; 2] {
        [self.trainable, self.frozen]
    }
}

/// Everything the plan depends on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanInput {
    /// Each unit, the root not among them.
    pub units: Vec<UnitSize>,
    /// The root; empty when every parameter is in a unit.
    pub root: UnitSize,
    /// How state is spread.
    pub strategy: ShardingStrategy,
    /// What the update keeps and needs.
    pub optimizer: OptimizerPlan,
    /// Micro-batches and ranks of a step.
    pub schedule: StepSchedule,
    /// Which units are gathered ahead of their use, and which stay.
    pub gather: GatherPolicy,
    /// Ranks that share one copy of the model: all, or those of one group of a hybrid strategy.
    pub shard_group: usize,
    /// What is narrower than f32.
    pub precision: MixedPrecision,
    /// Whether the rounds' full gradients are added up before one reduction.
    pub unsharded_accumulation: bool,
}

impl PlanInput {
    /// Ranks whose copies of a parameter are replicas of each other.
    fn replicas(&self) -> u64 {
        (self.schedule.ranks() / self.shard_group.max(1)) as u64
    }

    /// Whether parameters are read from peers.
    fn gathers_from_peers(&self) -> bool {
        self.strategy.is_sharded() && self.shard_group > 1
    }

    /// How often a step reduces.
    fn reductions(&self) -> usize {
        if self.unsharded_accumulation { 1 } else { self.schedule.rounds() }
    }
}

/// The bytes of a rank by purpose, and what it sends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryPlan {
    bytes: Vec<(Purpose, u64)>,
    sent_per_step: u64,
}

impl MemoryPlan {
    /// Computes the plan; equal for every rank.
    pub fn new(input: &PlanInput) -> Self {
        let sizes = Sizes::new(input);
        let bytes_of = |purpose: Purpose| {
            let width = match purpose {
                Purpose::LowPrecisionParameters => input.precision.param_dtype.bytes() as u64,
                _ => F32,
            };
            (purpose, width * sizes.elements(purpose, input))
        };
        Self {
            bytes: Purpose::ALL.into_iter().map(bytes_of).collect(),
            sent_per_step: sizes.sent_bytes(input),
        }
    }

    /// The bytes for one purpose.
    pub fn bytes(&self, purpose: Purpose) -> u64 {
        self.bytes.iter().find(|(p, _)| *p == purpose).map_or(0, |(_, b)| *b)
    }

    /// Purposes with their bytes, in the order of reports.
    pub fn by_purpose(&self) -> &[(Purpose, u64)] {
        &self.bytes
    }

    /// The peak: everything at once, which happens in the backward of a unit.
    pub fn total(&self) -> u64 {
        self.bytes.iter().map(|(_, b)| b).sum()
    }

    /// Bytes of parameters and gradients that the rank sends in one step: what its peers take from it.
    pub fn sent_per_step(&self) -> u64 {
        self.sent_per_step
    }
}

/// Element counts that the formulas share. A pair holds the trainable and the frozen ones.
struct Sizes {
    /// Without padding.
    all: [u64; 2],
    /// Of one rank's shards, padding included.
    shards: [u64; 2],
    /// Of the root, padding included.
    root: [u64; 2],
    /// Of all units, padding included.
    units: [u64; 2],
    /// Of the largest unit, padding included.
    largest: [u64; 2],
}

impl Sizes {
    fn new(input: &PlanInput) -> Self {
        let w = input.shard_group;
        let padded = |numel: usize| (numel.div_ceil(w) * w) as u64;
        let of = |part: usize| {
            let units: Vec<u64> = input.units.iter().map(|u| padded(u.parts()[part])).collect();
            let plain: usize = input.units.iter().map(|u| u.parts()[part]).sum();
            let root = input.root.parts()[part];
            let (sum, largest) = (units.iter().sum::<u64>(), units.iter().copied().max().unwrap_or(0));
            ((plain + root) as u64, padded(root), sum, largest)
        };
        let [t, f] = [of(0), of(1)];
        let shard = |(_, root, units, _): (u64, u64, u64, u64)| (root + units) / w as u64;
        Self {
            all: [t.0, f.0],
            shards: [shard(t), shard(f)],
            root: [t.1, f.1],
            units: [t.2, f.2],
            largest: [t.3, f.3],
        }
    }

    fn elements(&self, purpose: Purpose, input: &PlanInput) -> u64 {
        let both = |pair: [u64; 2]| pair[0] + pair[1];
        let kept = if input.strategy.is_sharded() { self.shards } else { self.all };
        let gathers = input.gathers_from_peers() || input.precision.param_dtype.is_low();
        match purpose {
            Purpose::Parameters => both(kept),
            Purpose::OptimizerState => match input.optimizer.statistics {
                PlannedStatistics::PerElement(states) => kept[0] * states as u64,
                PlannedStatistics::Elements(numel) => numel as u64,
            },
            Purpose::WeightAverages => kept[0] * u64::from(input.optimizer.average),
            Purpose::OptimizerScratch => input.optimizer.scratch as u64,
            Purpose::GradientShards if input.optimizer.in_backward => {
                self.largest[0].max(self.root[0]) / input.shard_group as u64
            }
            Purpose::GradientShards => self.shards[0] * max_partials(input.reductions()) as u64,
            Purpose::GatheredRoot => u64::from(gathers) * both(self.root),
            Purpose::GatheredUnits if !gathers => 0,
            Purpose::GatheredUnits if input.strategy.reshards_after_forward() => {
                let sizes: Vec<usize> =
                    input.units.iter().map(|unit| unit.padded(input.shard_group)).collect();
                both(self.largest) * input.gather.slots(&sizes, input.schedule.rounds()) as u64
            }
            Purpose::GatheredUnits => both(self.units),
            Purpose::RootGradient => self.root[0],
            Purpose::UnitGradient if input.unsharded_accumulation => self.units[0],
            Purpose::UnitGradient => self.largest[0],
            Purpose::LowPrecisionParameters => {
                let travels = input.gathers_from_peers() && input.precision.param_dtype.is_low();
                u64::from(travels) * both(kept)
            }
            Purpose::ReplicaSum => {
                let across = input.replicas() > 1 && input.strategy.is_hybrid();
                u64::from(across) * self.largest[0].max(self.root[0]) / input.shard_group as u64
            }
        }
    }

    fn sent_bytes(&self, input: &PlanInput) -> u64 {
        let (w, rounds) = (input.shard_group as u64, input.schedule.rounds() as u64);
        let (params, gradients) = (input.precision.param_dtype, input.precision.reduce_dtype);
        let sharded = input.strategy.is_sharded();
        let gathered = match (sharded, input.strategy.reshards_after_forward()) {
            (false, _) => 0,
            (true, reshards) => {
                let passes = rounds * (1 + u64::from(reshards));
                self.root[0] + self.root[1] + passes * (self.units[0] + self.units[1])
            }
        };
        let (once, reductions) = (self.root[0] + self.units[0], input.reductions() as u64);
        // Without sharding the summed gradient is gathered once, for every rank to update all parameters.
        let summed = u64::from(!sharded) * once;
        let across = if input.strategy.is_hybrid() { input.replicas() - 1 } else { 0 };
        let part = |elements: u64| elements / w;
        (w - 1)
            * (part(gathered) * params.bytes() as u64
                + part(once * reductions) * gradients.bytes() as u64
                + part(summed) * F32)
            + across * part(once * reductions) * F32
    }
}
