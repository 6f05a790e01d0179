//! The formulas of the plan, over element counts by kind of flat parameter.

use super::{F32, KINDS, PlanInput, Purpose, STAGES, TRAINED, UnitSize};
use crate::offload::{Offload, Placement, Tier};
use crate::reduction::max_partials;
use crate::statistics::PlannedStatistics;
use crate::traffic::Traffic;

/// Element counts that the formulas share, by kind of flat parameter.
#[derive(Default)]
pub(super) struct Sizes {
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
    pub(super) fn new(input: &PlanInput) -> Self {
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

    pub(super) fn bytes(&self, purpose: Purpose, input: &PlanInput) -> u64 {
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

    pub(super) fn sent(&self, input: &PlanInput) -> Traffic {
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
