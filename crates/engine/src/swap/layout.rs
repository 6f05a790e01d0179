//! What rests elsewhere in an engine, and the memory that its way takes.

use shardwise_comm::HostBuffer;
use shardwise_core::statistics::STATISTIC_SLOTS;
use shardwise_core::{FlatLayout, Placement, PlanError, Purpose, RestingPart};

use super::gather::{Stage, Stages};
use super::name_of;
use super::parts::{AwayState, NewState};
use crate::Result;
use crate::config::EngineConfig;
use crate::engine::Engine;
use crate::error::EngineError;
use crate::handle::{FlatParamHandle, HandleConfig, kept_numel};
use crate::pool::PartKind;
use crate::unit::Units;

/// Staging buffers of gathers: one is filled while peers read the other.
const STAGES: usize = shardwise_core::plan::STAGES as usize;

/// What of each flat parameter rests elsewhere; each unit's follow each other, the root's are the first.
pub(crate) fn placements(config: &EngineConfig, sharers: usize, layouts: &[&FlatLayout]) -> Vec<Placement> {
    let mut order = Vec::with_capacity(layouts.len());
    for unit in layouts.chunk_by(|a, b| a.unit() == b.unit()) {
        let first = order.len();
        // Bounds are used up by kind, as the plan does, whatever the order in which a unit's parameters were met.
        let mut indices: Vec<usize> = (first..first + unit.len()).collect();
        indices.sort_by_key(|i| (layouts[*i].is_replicated(), PartKind::of(layouts[*i]).index()));
        order.extend(indices);
    }
    let parts: Vec<RestingPart> = order.iter().map(|i| resting(layouts[*i], sharers, config)).collect();
    let mut placements = vec![Placement::default(); layouts.len()];
    for (index, placement) in order.into_iter().zip(config.offload.placement(&parts)) {
        placements[index] = placement;
    }
    placements
}

fn resting(layout: &FlatLayout, sharers: usize, config: &EngineConfig) -> RestingPart {
    RestingPart {
        numel: kept_numel(layout, sharers, config.strategy),
        trainable: layout.requires_grad(),
        stays: layout.is_replicated() || config.wire.rests_quantised(layout.requires_grad()),
    }
}

/// Elements of the memory in which a flat parameter that rests elsewhere is updated as a whole.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ReloadedSize {
    pub(crate) params: usize,
    slots: [usize; STATISTIC_SLOTS],
}

impl ReloadedSize {
    pub(crate) fn of(config: &EngineConfig, units: &Units) -> Self {
        let mut size = Self::default();
        if !config.offload.is_any() {
            return size;
        }
        for handle in units.handles().filter(|handle| !handle.state_of_update.is_streamable()) {
            if handle.placement.parameters {
                size.params = size.params.max(handle.kept_numel());
            }
            if handle.placement.optimizer {
                let slots = size.slots.iter_mut().zip(handle.state_of_update.slot_numel);
                slots.for_each(|(most, numel)| *most = numel.max(*most));
            }
        }
        size
    }
}

impl Engine {
    /// Makes the sections of what rests elsewhere.
    pub(crate) fn place_away(&mut self, config: &HandleConfig) -> Result<()> {
        let offload = self.config.offload;
        for at in self.units.places() {
            let handle = &mut self.units[at];
            let (Some(swap), placement) = (self.swap.as_mut(), handle.placement) else { continue };
            let placed = (|| {
                if placement.parameters {
                    let name = name_of(at.unit, at.part, &handle.layout, "parameters");
                    let sections = swap.create(offload.parameters, &name, &[handle.kept_numel()])?;
                    handle.away.params = sections.into_iter().next();
                }
                if placement.optimizer {
                    let new = NewState {
                        resting: offload.optimizer,
                        name: &name_of(at.unit, at.part, &handle.layout, "state"),
                        slots: handle.state_of_update.slot_numel,
                        average: config.average.then(|| handle.kept_numel()),
                        sum: handle.layout.shard_numel(),
                    };
                    handle.away.state = Some(AwayState::new(swap, &new)?);
                }
                Ok(())
            })();
            self.comm::<(), crate::trouble::Trouble>(placed)?;
        }
        Ok(())
    }

    /// Allocates the memory through which it passes.
    pub(crate) fn allocate_away(&mut self, reloaded: &ReloadedSize) -> Result<()> {
        let Some(swap) = &self.swap else { return Ok(()) };
        let offload = self.config.offload;
        let lanes = self.units.handles().map(|handle| handle.away_lanes()).max().unwrap_or(0);
        if offload.buffer_count < lanes {
            let message = format!(
                "buffer_count is {}, but a step of this optimizer has {lanes} tiles in hand at a time; it must be at least \
                 {lanes}, and {} lets it read, compute and write at the same time (of {} elements each: {} and {} bytes a \
                 rank)",
                offload.buffer_count,
                3 * lanes,
                offload.buffer_numel,
                lanes * offload.buffer_bytes(),
                3 * lanes * offload.buffer_bytes(),
            );
            return Err(EngineError::Plan(PlanError::Offload(message)));
        }
        let pools = swap.pools() * offload.buffer_count * offload.buffer_numel;
        self.ledger.add(Purpose::TierBuffers, pools);
        let most = |numel: &dyn Fn(&FlatParamHandle) -> Option<usize>| {
            self.units.handles().filter_map(numel).max().unwrap_or(0)
        };
        let staged = most(&|handle| {
            let gathered = handle.away.params.is_some() && !handle.is_whole();
            gathered.then(|| handle.layout().shard_numel())
        });
        let gradient = most(&|handle| handle.away.state.as_ref().map(|_| handle.layout().shard_numel()));
        let encoded = most(&|handle| {
            let gathered = handle.away.params.is_some() && !handle.is_whole() && !handle.travel().is_exact();
            gathered.then(|| handle.travel().bytes(handle.layout().shard_numel()))
        });
        if staged > 0 {
            let words = encoded.div_ceil(size_of::<f32>());
            let stage = |_| {
                let encoded = (words > 0).then(|| self.group.allocate(words)).transpose()?;
                Ok(Stage::new(self.group.allocate(staged)?, encoded))
            };
            let stages: shardwise_comm::Result<Vec<Stage>> = (0..STAGES).map(stage).collect();
            self.stages = Stages::new(self.comm(stages)?);
            let bytes = STAGES * (staged * size_of::<f32>() + encoded);
            self.ledger.add_bytes(Purpose::StagedParameters, bytes);
        }
        if gradient > 0 {
            self.workroom.stage = Some(self.comm(self.group.allocate(gradient))?);
            self.ledger.add(Purpose::StagedGradient, gradient);
        }
        let slots = reloaded.slots.iter().take_while(|numel| **numel > 0);
        let slots: shardwise_comm::Result<Vec<HostBuffer>> =
            slots.map(|numel| HostBuffer::new(*numel)).collect();
        self.workroom.slots = self.comm(slots)?;
        let numel = reloaded.params + reloaded.slots.iter().sum::<usize>();
        if numel > 0 {
            self.ledger.add(Purpose::ReloadedState, numel);
        }
        Ok(())
    }
}

impl FlatParamHandle {
    /// Tiles that are in hand at a time when it is updated or its average is taken.
    fn away_lanes(&self) -> usize {
        let params = usize::from(self.away.params.is_some());
        let Some(state) = &self.away.state else { return params };
        // Two sums are merged at a time, whatever an update reads.
        (params + 1 + state.slots.len()).max(2)
    }
}
