//! The update of what rests elsewhere: tile by tile, the next read and the last written while one computes.

use shardwise_comm::SharedBuffer;

use super::{Section, TileJob};
use crate::Result;
use crate::engine::Engine;
use crate::events::EventKind;
use crate::handle::FlatParamHandle;
use crate::optimizer::StepUpdate;
use crate::unit::Place;

impl FlatParamHandle {
    /// Whether anything of it rests elsewhere.
    pub(crate) fn is_away(&self) -> bool {
        self.away.params.is_some() || self.away.state.is_some()
    }

    /// Whether the step has left it a gradient, wherever that is.
    pub(crate) fn has_gradient(&self) -> bool {
        self.sum.is_some() || self.away.state.as_ref().is_some_and(|state| state.sum.is_some())
    }

    /// What an update reads of it, and whether it is written back: parameters, gradient, statistics.
    fn lanes(&self, gradient_is_here: bool) -> Vec<(Section, bool)> {
        let mut lanes: Vec<(Section, bool)> =
            self.away.params.iter().map(|section| (*section, true)).collect();
        if let Some(state) = &self.away.state {
            lanes.extend(state.gradient().filter(|_| !gradient_is_here).map(|section| (section, false)));
            lanes.extend(state.slots.iter().map(|section| (*section, true)));
        }
        lanes
    }

    /// Updates the owned elements from `start` on of which `tiles` holds what rests elsewhere, in the order of
    /// [`FlatParamHandle::lanes`]; `params` are all that are in memory, `whole` is the full gradient where it is here.
    fn update_tile(
        &mut self,
        update: StepUpdate,
        (start, tiles): (usize, &mut [&mut [f32]]),
        params: &mut [f32],
        whole: Option<&[f32]>,
    ) {
        let span = self.span();
        let end = tiles.first().map_or(start, |tile| start + tile.len()).min(self.owned.len());
        // The last tile may hold nothing but padding.
        let start = start.min(end);
        let numel = end - start;
        let mut tiles = tiles.iter_mut();
        let params = match self.away.params {
            Some(_) => tiles.next().map_or(&mut [] as &mut [f32], |tile| &mut tile[..numel]),
            None => &mut params[span.start + start..span.start + end],
        };
        let gradient = match (&self.away.state, whole, &self.sum) {
            (_, Some(whole), _) => &whole[start..end],
            (Some(state), ..) => tiles.next().map_or(&[] as &[f32], |tile| {
                state.scaling.scale(&mut tile[..numel]);
                &tile[..numel]
            }),
            (None, None, Some(sum)) => &sum.as_slice()[start..end],
            (None, None, None) => return,
        };
        if self.away.state.is_some() {
            let mut slots: Vec<&mut [f32]> = tiles.map(|tile| &mut tile[..numel]).collect();
            self.state_of_update.update_tile(update, start, params, gradient, &mut slots);
        } else {
            self.state_of_update.update_tile_here(update, start, params, gradient);
        }
    }
}

impl Engine {
    /// Updates flat parameters of which something rests elsewhere, as far as they have a gradient.
    pub(crate) fn update_away(&mut self, places: &[Place], update: StepUpdate) -> Result<()> {
        let mut streamed = Vec::new();
        for at in places.iter().copied() {
            let handle = &self.units[at];
            if !handle.has_gradient() {
                continue;
            }
            if !handle.state_of_update.is_streamable() {
                self.update_reloaded(at, update)?;
            } else if handle.is_whole() && self.shards.size() > 1 {
                let gradient = self.gather_gradient(at)?;
                let updated = self.stream_update(&[at], update, Some(&gradient));
                self.pools.gradient(at.unit.is_root(), self.units[at].kind()).give(gradient);
                updated?;
            } else {
                streamed.push(at);
            }
        }
        self.stream_update(&streamed, update, None)
    }

    fn stream_update(
        &mut self,
        places: &[Place],
        update: StepUpdate,
        whole: Option<&SharedBuffer>,
    ) -> Result<()> {
        let Some(swap) = self.swap.as_mut() else { return Ok(()) };
        let (mut jobs, mut here) = (Vec::new(), Vec::new());
        for at in places {
            let handle = &mut self.units[*at];
            let lanes = handle.lanes(whole.is_some());
            if let (Some(whole), true) = (whole, lanes.is_empty()) {
                // All that is read and written is here: there are no statistics.
                here.push((*at, whole));
                continue;
            }
            handle.state_of_update.count_update();
            let tiles = lanes.first().map_or(0, |(section, _)| swap.tiles(section));
            jobs.extend((0..tiles).map(|tile| TileJob { lanes: lanes.clone(), tile, what: *at }));
        }
        let units = &mut self.units;
        let moved = self.params.writable().map_err(Into::into).and_then(|params| {
            for (at, gradient) in here {
                let handle = &mut units[at];
                let (owned, span) = (handle.owned(), handle.span());
                handle.state_of_update.update(update, &owned, &mut params[span], gradient.as_slice());
            }
            swap.stream(&jobs, |at: &Place, start, tiles| {
                units[*at].update_tile(update, (start, tiles), params, whole.map(SharedBuffer::as_slice));
                Ok(())
            })
        });
        self.comm(moved)?;
        for at in places {
            self.units[*at].use_up_gradient();
            self.note(at.unit, EventKind::Updated);
        }
        Ok(())
    }
}
