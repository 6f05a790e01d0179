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

use std::fmt;

use crate::gather::GatherPolicy;
use crate::layout::FlatLayout;
use crate::offload::{Offload, Placement, RestingPart, Tier};
use crate::precision::{MixedPrecision, Precision};
use crate::reduction::max_partials;
use crate::schedule::StepSchedule;
use crate::statistics::{OptimizerPlan, PlannedStatistics};
use crate::strategy::ShardingStrategy;
use crate::traffic::Traffic;
use crate::wire::{Travel, WireConfig};

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

/// Element counts that the formulas share, by kind of flat parameter.
#[derive(Default)]
struct Sizes {
    /// Kept by a rank, of parameters that rest in memory.
    params_here: [u64; KINDS],
    /// Kept by a rank, where the optimizer's state rests in memory; and of its shards of gradients.
    state_here: [u64; KINDS],
    sums_here: [u64; KINDS],
    /// Of the root and of all units, padding included, as far as they are gathered.
    gathered_root: u64,
    gathered_units: u64,
    /// Whether each unit's part is gathered.
    gathers: Vec<[bool; KINDS]>,
    /// The largest shard of parameters, and of gradients, that rests elsewhere; and of parameters, in bytes, as it travels.
    staged_params: u64,
    staged_bytes: u64,
    staged_gradient: u64,
    /// Of the root, padding included.
    root: [u64; KINDS],
    /// Of all units, padding included.
    units: [u64; KINDS],
    /// Of the largest unit, padding included.
    largest: [u64; KINDS],
    /// Bytes, not elements, of what a rank keeps, as it travels.
    kept: [u64; KINDS],
}

fn sum(kinds: impl IntoIterator<Item = usize>, of: &[u64; KINDS]) -> u64 {
    kinds.into_iter().map(|kind| of[kind]).sum()
}

impl Sizes {
    fn new(input: &PlanInput) -> Self {
        let w = input.shard_group;
        let padded = |numel: usize| (numel.div_ceil(w) * w) as u64;
        let mut sizes = Self::default();
        for kind in 0..KINDS {
            let units = || input.units.iter().map(|unit| unit.parts()[kind]);
            let root = input.root.parts()[kind];
            sizes.root[kind] = padded(root);
            sizes.units[kind] = units().map(padded).sum();
            sizes.largest[kind] = units().map(padded).max().unwrap_or(0);
        }
        for (index, placed) in input.placements().into_iter().enumerate() {
            let unit = if index == 0 { &input.root } else { &input.units[index - 1] };
            sizes.place(input, (index == 0, unit), placed);
        }
        sizes
    }

    /// Counts one unit, of which `placed` rests elsewhere.
    fn place(&mut self, input: &PlanInput, (is_root, unit): (bool, &UnitSize), placed: [Placement; KINDS]) {
        let w = input.shard_group.max(1);
        let mut gathers = [false; KINDS];
        for (kind, (numel, placement)) in unit.parts().into_iter().zip(placed).enumerate() {
            let (shard, padded) = (numel.div_ceil(w) as u64, (numel.div_ceil(w) * w) as u64);
            let kept = if input.strategy.is_sharded() { shard } else { numel as u64 };
            let travel = input.travel(kind);
            if placement.parameters {
                let from_peers = u64::from(input.gathers_from_peers());
                self.staged_params = self.staged_params.max(from_peers * shard);
                if !travel.is_exact() {
                    let bytes = travel.bytes(shard as usize) as u64;
                    self.staged_bytes = self.staged_bytes.max(from_peers * bytes);
                }
            } else {
                self.params_here[kind] += kept;
                self.kept[kind] += travel.bytes(kept as usize) as u64;
            }
            if placement.optimizer {
                self.staged_gradient = self.staged_gradient.max(shard);
            } else {
                self.state_here[kind] += kept;
                self.sums_here[kind] += shard;
            }
            gathers[kind] = numel > 0 && input.gathers(kind, placement);
            if gathers[kind] {
                *(if is_root { &mut self.gathered_root } else { &mut self.gathered_units }) += padded;
            }
        }
        if !is_root {
            self.gathers.push(gathers);
        }
    }

    fn bytes(&self, purpose: Purpose, input: &PlanInput) -> u64 {
        let resting = (0..KINDS).filter(|kind| input.rests_quantised(*kind));
        match purpose {
            Purpose::Parameters => F32 * self.elements(purpose, input) + sum(resting, &self.kept),
            Purpose::LowPrecisionParameters if input.gathers_from_peers() => {
                let derived = |kind: &usize| !input.rests_quantised(*kind) && !input.travel(*kind).is_exact();
                sum((0..KINDS).filter(derived), &self.kept)
            }
            Purpose::HierarchyRelay => self.relay_bytes(input),
            Purpose::SecondaryParameters => secondary_bytes(input),
            Purpose::StagedParameters => STAGES * (F32 * self.staged_params + self.staged_bytes),
            Purpose::QuantisedGradients => self.quantised_bytes(input),
            _ => F32 * self.elements(purpose, input),
        }
    }

    fn elements(&self, purpose: Purpose, input: &PlanInput) -> u64 {
        match purpose {
            Purpose::Parameters => {
                sum((0..KINDS).filter(|kind| !input.rests_quantised(*kind)), &self.params_here)
            }
            Purpose::OptimizerState => match input.optimizer.statistics {
                PlannedStatistics::PerElement(states) => sum(TRAINED, &self.state_here) * states as u64,
                PlannedStatistics::Elements(numel) => numel as u64,
            },
            Purpose::WeightAverages => sum(TRAINED, &self.state_here) * u64::from(input.optimizer.average),
            Purpose::OptimizerScratch => input.optimizer.scratch as u64,
            Purpose::GradientShards if input.optimizer.in_backward => self.largest_part(input),
            Purpose::GradientShards => {
                sum(TRAINED, &self.sums_here) * max_partials(input.reductions()) as u64
            }
            Purpose::GatheredRoot => self.gathered_root,
            Purpose::GatheredUnits if input.strategy.reshards_after_forward() => {
                (0..KINDS).map(|kind| self.slots(kind, input)).sum()
            }
            Purpose::GatheredUnits => self.gathered_units,
            Purpose::RootGradient => sum(TRAINED, &self.root),
            Purpose::UnitGradient if input.unsharded_accumulation => sum(TRAINED, &self.units),
            Purpose::UnitGradient => sum(TRAINED, &self.largest),
            Purpose::LowPrecisionParameters => 0,
            Purpose::ReplicaSum => {
                let across = input.replicas() > 1 && input.strategy.is_hybrid();
                u64::from(across) * self.largest_part(input)
            }
            Purpose::TierBuffers => {
                let Offload { parameters, optimizer, buffer_count, buffer_numel, .. } = input.offload;
                let pools = [Tier::Host, Tier::Nvme].into_iter();
                let pools = pools.filter(|tier| [parameters, optimizer].contains(tier)).count();
                (pools * buffer_count * buffer_numel) as u64
            }
            Purpose::StagedGradient => self.staged_gradient,
            Purpose::ReloadedState => input.optimizer.reloaded as u64,
            // Counted in bytes.
            Purpose::HierarchyRelay
            | Purpose::SecondaryParameters
            | Purpose::StagedParameters
            | Purpose::QuantisedGradients => 0,
            Purpose::ErrorFeedback if input.wire.error_feedback.is_some() => {
                let (near, groups) = input.groups();
                let all = sum(TRAINED, &self.root) + sum(TRAINED, &self.units);
                u64::from(near > 1) * all + u64::from(groups > 1) * all / near
            }
            Purpose::ErrorFeedback => 0,
        }
    }

    /// Elements of the largest shard of a trained flat parameter.
    fn largest_part(&self, input: &PlanInput) -> u64 {
        let largest = TRAINED.map(|kind| self.largest[kind].max(self.root[kind]));
        largest[0].max(largest[1]) / input.shard_group as u64
    }

    /// Elements of the buffers that units share for flat parameters of one kind.
    fn slots(&self, kind: usize, input: &PlanInput) -> u64 {
        let sizes: Vec<usize> = input.units.iter().map(|unit| unit.padded(input.shard_group)).collect();
        let has: Vec<bool> = self.gathers.iter().map(|gathers| gathers[kind]).collect();
        if !has.contains(&true) {
            return 0;
        }
        self.largest[kind] * input.gather.slots(&sizes, &has, input.schedule.rounds()) as u64
    }

    /// What passes through nodes: sums on their way out of one, and parts that are not kept on their way into it.
    fn relay_bytes(&self, input: &PlanInput) -> u64 {
        if input.node().is_none() {
            return 0;
        }
        let nodes = input.groups().1;
        let sums = F32 * self.largest_part(input);
        let gathered = if !input.strategy.is_sharded() {
            sums
        } else if input.keeps_secondary() {
            0
        } else {
            input.parts().map(|part| part.bytes).max().unwrap_or(0)
        };
        nodes * (sums + gathered)
    }

    /// Codes and scales behind full gradients, and behind relays.
    fn quantised_bytes(&self, input: &PlanInput) -> u64 {
        let Some(how) = input.wire.gradients else { return 0 };
        let (sharers, (near, groups)) = (input.shard_group as u64, input.groups());
        let whole = |padded: u64| sharers * how.bytes((padded / sharers) as usize) as u64;
        let units = |kind: usize| -> u64 {
            if input.unsharded_accumulation {
                let padded = |unit: &UnitSize| (unit.parts()[kind] as u64).next_multiple_of(sharers);
                input.units.iter().map(|unit| whole(padded(unit))).sum()
            } else {
                whole(self.largest[kind])
            }
        };
        let full: u64 = TRAINED.into_iter().map(|kind| whole(self.root[kind]) + units(kind)).sum();
        let relay = sharers / near * how.bytes(self.largest_part(input) as usize) as u64;
        u64::from(near > 1) * full + u64::from(groups > 1) * relay
    }

    fn sent(&self, input: &PlanInput) -> Traffic {
        let mut sent = Traffic::default();
        for part in input.parts() {
            sent += reduce_traffic(part.trained, input) * input.reductions() as u64;
        }
        if input.strategy.is_sharded() {
            let passes =
                input.schedule.rounds() as u64 * (1 + u64::from(input.strategy.reshards_after_forward()));
            for part in input.parts() {
                let gathers = if part.is_root { 1 } else { passes };
                let fills = if input.keeps_secondary() { 1 } else { gathers };
                sent += gather_traffic(part.bytes, (gathers, fills), input);
            }
        } else {
            // The summed gradient is gathered once, for every rank to update all parameters.
            let once = sum(TRAINED, &self.root) + sum(TRAINED, &self.units);
            sent += gather_traffic(once * F32 / input.shard_group as u64, (1, 1), input);
        }
        sent
    }
}

/// hpZ: of every flat parameter, the parts of as many ranks as there are nodes.
fn secondary_bytes(input: &PlanInput) -> u64 {
    let parts = input.parts().map(|part| part.bytes).sum::<u64>();
    u64::from(input.keeps_secondary()) * input.groups().1 * parts
}

/// What a rank sends when it and its peers gather parts of `part` bytes so many times, of which some fill the nodes.
fn gather_traffic(part: u64, (gathers, fills): (u64, u64), input: &PlanInput) -> Traffic {
    let (near, groups) = input.groups();
    match input.node() {
        Some(_) => {
            Traffic { inside: gathers * (near - 1) * groups * part, across: fills * (groups - 1) * part }
        }
        None => Traffic { inside: gathers * (input.shard_group as u64 - 1) * part, across: 0 },
    }
}

/// What a rank sends when the full gradients of a flat parameter are summed, of which a rank keeps a part of `numel`
/// elements.
fn reduce_traffic(numel: usize, input: &PlanInput) -> Traffic {
    let (near, groups) = input.groups();
    let bytes = |width: usize| input.wire.gradients.map_or(width * numel, |how| how.bytes(numel)) as u64;
    let parts = input.shard_group as u64 / near;
    Traffic {
        inside: (near - 1) * parts * bytes(input.precision.reduce_dtype.bytes()),
        across: (groups - 1) * bytes(F32 as usize),
    }
}
