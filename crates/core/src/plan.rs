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
//! Variations. Parameters that are bf16 or f16 in the model are gathered in that, beside the others. Gradients that are
//! accumulated unsharded take one full gradient of every unit, and `L` is that of one round. With a `param_dtype` below
//! f32 a rank holds `2 S` of low-precision parameters where it gathers from peers, and gathers even where it has all
//! parameters, to round them. Quantised parameters do the same with [`crate::Quantization::bytes`] of each shard; frozen
//! ones that rest in int8 take those bytes instead of `4 S`. A hybrid strategy has the formulas of its groups, with `W`
//! their size, and one sum of the largest part for the way across. With the step inside backward partial sums take one
//! part of the largest flat parameter.
//!
//! With `G` nodes of `k` ranks: `4 G` bytes for each element of the largest trained part, on its way across, and `G` times
//! the bytes of the largest part as it travels, on its way in. With hpZ instead of the latter `G` times the bytes of every
//! part: a whole copy in a node. Quantised gradients: [`crate::Quantization::bytes`] of each part behind full gradients and
//! behind the relay; with error feedback `4` bytes for each trained element, padding included, and across `1/k` of that.

mod purpose;
mod sizes;

pub use purpose::Purpose;
use sizes::Sizes;

use crate::gather::GatherPolicy;
use crate::layout::FlatLayout;
use crate::offload::{Offload, Placement, RestingPart};
use crate::precision::{MixedPrecision, Precision};
use crate::schedule::StepSchedule;
use crate::statistics::OptimizerPlan;
use crate::strategy::ShardingStrategy;
use crate::traffic::Traffic;
use crate::wire::{Travel, WireConfig};

/// Bytes of an f32, the type of every master weight, gradient sum and optimizer statistic.
const F32: u64 = 4;

/// Elements of a unit's flat parameters, without padding.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UnitSize {
    /// Those that are trained.
    pub trainable: usize,
    /// Those that are frozen: sharded and gathered, but without gradient and statistics.
    pub frozen: usize,
    /// Those that are trained, of parameters that are bf16 or f16 in the model.
    pub low_trainable: usize,
    /// Those that are frozen, of such parameters.
    pub low_frozen: usize,
}

/// Staging buffers of gathers from what rests elsewhere: one is filled while peers read the other.
pub const STAGES: u64 = 2;

/// Kinds of flat parameter: trained, frozen, and the same in less than f32.
const KINDS: usize = 4;
/// The kinds that are trained.
const TRAINED: [usize; 2] = [0, 2];
/// The kinds that are bf16 or f16 in the model.
const LOW: [usize; 2] = [2, 3];

impl UnitSize {
    /// The size of the flat parameters of one unit.
    pub fn of<'a>(layouts: impl IntoIterator<Item = &'a FlatLayout>) -> Self {
        layouts.into_iter().fold(Self::default(), |mut size, layout| {
            let part = match (layout.dtype().is_low(), layout.requires_grad()) {
                (false, true) => &mut size.trainable,
                (false, false) => &mut size.frozen,
                (true, true) => &mut size.low_trainable,
                (true, false) => &mut size.low_frozen,
            };
            *part += layout.numel();
            size
        })
    }

    /// Elements of all kinds, each padded for `ranks`.
    pub fn padded(self, ranks: usize) -> usize {
        self.parts().iter().map(|numel| numel.div_ceil(ranks) * ranks).sum()
    }

    fn parts(self) -> [usize; KINDS] {
        [self.trainable, self.frozen, self.low_trainable, self.low_frozen]
    }
}

/// Everything the plan depends on.
#[derive(Debug, Clone, PartialEq)]
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
    /// What is quantised, and the nodes that everything travels through.
    pub wire: WireConfig,
    /// Whether the rounds' full gradients are added up before one reduction.
    pub unsharded_accumulation: bool,
    /// What rests elsewhere.
    pub offload: Offload,
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

    /// Whether flat parameters of a kind are gathered at all: from peers, from this rank's own to round them, or because
    /// they rest elsewhere.
    fn gathers(&self, kind: usize, placement: Placement) -> bool {
        self.gathers_from_peers() || !self.travel(kind).is_exact() || placement.parameters
    }

    /// What of each flat parameter rests elsewhere: the root's by kind, then each unit's.
    fn placements(&self) -> Vec<[Placement; KINDS]> {
        let keeps = |numel: usize| {
            if self.strategy.is_sharded() { numel.div_ceil(self.shard_group.max(1)) } else { numel }
        };
        let units = || std::iter::once(&self.root).chain(&self.units);
        let part = |(kind, numel): (usize, usize)| RestingPart {
            numel: keeps(numel),
            trainable: TRAINED.contains(&kind),
            stays: self.rests_quantised(kind),
        };
        let parts: Vec<RestingPart> =
            units().flat_map(|unit| unit.parts().into_iter().enumerate().map(part)).collect();
        let placed = self.offload.placement(&parts);
        let (of_units, _) = placed.as_chunks::<KINDS>();
        of_units.to_vec()
    }

    /// How flat parameters of a kind travel to a computation.
    fn travel(&self, kind: usize) -> Travel {
        // The two types that are narrower in the model take as many bytes.
        let precision = if LOW.contains(&kind) { Precision::Bf16 } else { self.precision.param_dtype };
        self.wire.travel(precision, TRAINED.contains(&kind))
    }

    /// Whether flat parameters of a kind rest as they travel.
    fn rests_quantised(&self, kind: usize) -> bool {
        self.wire.rests_quantised(TRAINED.contains(&kind))
    }

    /// Ranks that sum each other's full gradients, and how many such groups there are.
    fn groups(&self) -> (u64, u64) {
        let near = self.node().unwrap_or(self.shard_group).max(1);
        (near as u64, (self.schedule.ranks() / near) as u64)
    }

    /// The ranks of one node, if one copy of the model is spread over several.
    fn node(&self) -> Option<usize> {
        let node = self.wire.node(self.schedule.ranks()).ok().flatten();
        node.filter(|_| !self.strategy.is_hybrid())
    }

    /// Whether nodes keep a second copy of the parameters.
    fn keeps_secondary(&self) -> bool {
        self.wire.keeps_secondary() && self.node().is_some() && self.strategy.is_sharded()
    }

    /// Every flat parameter, as a rank's part of it travels.
    fn parts(&self) -> impl Iterator<Item = Part> + '_ {
        let units = self.units.iter().map(|unit| (false, unit)).chain([(true, &self.root)]);
        units.flat_map(move |(is_root, unit)| {
            unit.parts().into_iter().enumerate().map(move |(kind, numel)| {
                let numel = numel.div_ceil(self.shard_group.max(1));
                let bytes = self.travel(kind).bytes(numel) as u64;
                Part { is_root, bytes, trained: if TRAINED.contains(&kind) { numel } else { 0 } }
            })
        })
    }

    /// How often a step reduces.
    fn reductions(&self) -> usize {
        if self.unsharded_accumulation { 1 } else { self.schedule.rounds() }
    }
}

/// A rank's part of one flat parameter.
struct Part {
    is_root: bool,
    /// As it travels.
    bytes: u64,
    /// Its elements, if they are trained.
    trained: usize,
}

/// The bytes of a rank by purpose, and what it sends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryPlan {
    bytes: Vec<(Purpose, u64)>,
    sent: Traffic,
}

impl MemoryPlan {
    /// Computes the plan; equal for every rank.
    pub fn new(input: &PlanInput) -> Self {
        let sizes = Sizes::new(input);
        let bytes_of = |purpose: Purpose| (purpose, sizes.bytes(purpose, input));
        Self { bytes: Purpose::ALL.into_iter().map(bytes_of).collect(), sent: sizes.sent(input) }
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
        self.sent.total()
    }

    /// Those of them that leave the rank's node, or its group of a hybrid strategy.
    pub fn sent_across_per_step(&self) -> u64 {
        self.sent.across
    }
}
