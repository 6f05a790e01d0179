//! Optimizers that look at more than single elements: what rests elsewhere of one flat parameter is in memory for the time
//! of its update.

use shardwise_comm::{HostBuffer, SharedBuffer};

use super::{Moved, Swap};
use crate::Result;
use crate::engine::Engine;
use crate::handle::FlatParamHandle;
use crate::optimizer::{StateSlice, StepUpdate};
use crate::trouble::Trouble;
use crate::unit::Place;

/// Where one flat parameter at a time is when it is in memory.
#[derive(Debug, Default)]
pub(crate) struct Workroom {
    /// The sum of a gradient shard: peers read it.
    pub(crate) stage: Option<SharedBuffer>,
    /// Its statistics, by slot.
    pub(crate) slots: Vec<HostBuffer>,
    /// Where its parameters are, among those of the engine.
    pub(crate) window: usize,
}

impl FlatParamHandle {
    /// Brings the statistics into `slots`.
    fn load_statistics(&mut self, swap: &mut Swap, mut slots: Vec<HostBuffer>) -> Moved<()> {
        let sections = self.away.state.as_ref().map_or(&[][..], |state| &state.slots);
        let loaded =
            slots.iter_mut().zip(sections).try_for_each(|(slot, s)| swap.read(s, slot.as_mut_slice()));
        self.state_of_update.slots = slots;
        loaded
    }

    /// Takes them back, and returns the buffers.
    fn unload_statistics(&mut self, swap: &mut Swap, mut result: Moved<()>) -> (Vec<HostBuffer>, Moved<()>) {
        let slots = std::mem::take(&mut self.state_of_update.slots);
        if let (Ok(()), Some(state)) = (&result, &self.away.state) {
            let mut pairs = slots.iter().zip(&state.slots);
            result = pairs.try_for_each(|(slot, section)| swap.write(section, slot.as_slice()));
        }
        (slots, result)
    }
}

impl Engine {
    /// Updates a flat parameter with what rests elsewhere of it in memory.
    pub(crate) fn update_reloaded(&mut self, at: Place, update: StepUpdate) -> Result<()> {
        let span = self.units[at].span();
        let loaded = self.load(at);
        self.comm(loaded)?;
        let updated = self.update_whole_of(&[at], update).and_then(|()| self.update(at, update));
        let unloaded = self.unload(at);
        self.units[at].set_span(span);
        updated?;
        self.comm(unloaded)?;
        self.units[at].use_up_gradient();
        Ok(())
    }

    fn load(&mut self, at: Place) -> Moved<()> {
        let Some(swap) = self.swap.as_mut() else { return Ok(()) };
        let handle = &mut self.units[at];
        if let Some(section) = handle.away.params {
            let window = self.workroom.window..self.workroom.window + section.numel();
            swap.read(&section, &mut self.params.writable()?[window.clone()])?;
            handle.set_span(window);
        }
        let Some(state) = &handle.away.state else { return Ok(()) };
        if let (Some(section), Some(mut stage)) = (state.gradient(), self.workroom.stage.take()) {
            let (scaling, numel) = (state.scaling, handle.shard.len());
            let read: Moved<()> = stage.writable().map_err(Trouble::from).and_then(|sum| {
                swap.read(&section, &mut sum[..section.numel()])?;
                scaling.scale(&mut sum[..numel]);
                Ok(())
            });
            handle.sum = Some(stage);
            read?;
        }
        handle.load_statistics(swap, std::mem::take(&mut self.workroom.slots))
    }

    fn unload(&mut self, at: Place) -> Moved<()> {
        let Some(swap) = self.swap.as_mut() else { return Ok(()) };
        let handle = &mut self.units[at];
        let mut result = Ok(());
        if let Some(section) = handle.away.params {
            let window = handle.span();
            result = swap.write(&section, &self.params.as_slice()[window]);
        }
        if handle.away.state.is_some() {
            self.workroom.stage = handle.sum.take();
            (self.workroom.slots, result) = handle.unload_statistics(swap, result);
        }
        result
    }

    /// Shows the statistics of a flat parameter that rest elsewhere, and takes changes back.
    pub(crate) fn each_state_away(&mut self, at: Place, see: &mut dyn FnMut(StateSlice<'_>)) -> Result<()> {
        let Some(swap) = self.swap.as_mut() else { return Ok(()) };
        let handle = &mut self.units[at];
        // Few look at statistics, and not during a step: no buffers are kept for it.
        let sections = handle.away.state.as_ref().map_or(&[][..], |state| &state.slots);
        let slots: shardwise_comm::Result<Vec<HostBuffer>> =
            sections.iter().map(|section| HostBuffer::new(section.numel())).collect();
        let moved = slots.map_err(Into::into).and_then(|slots| {
            handle.load_statistics(swap, slots)?;
            handle.each_state(see);
            handle.unload_statistics(swap, Ok(())).1
        });
        self.comm(moved)
    }
}
