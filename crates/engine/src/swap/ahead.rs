//! Parameters on their way in before they are needed: reads that have been started for gathers to come.

use std::collections::VecDeque;

use shardwise_tier::Reading;

use super::{Moved, RESERVED_BUFFERS, Section, Swap};
use crate::unit::Place;

/// The first tiles of a flat parameter, being read.
#[derive(Debug)]
pub(crate) struct Ahead {
    at: Place,
    section: Section,
    readings: VecDeque<Reading>,
}

impl Swap {
    /// Starts to read a flat parameter, as far as buffers allow that nobody else needs. True if anything was started.
    pub(crate) fn read_ahead(&mut self, at: Place, section: Section) -> Moved<bool> {
        if !self.pipeline || self.ahead.iter().any(|ahead| ahead.at == at) {
            return Ok(false);
        }
        let held: usize = self.ahead.iter().map(|ahead| ahead.readings.len()).sum();
        let spare = self.buffer_count.saturating_sub(RESERVED_BUFFERS + held);
        let mut readings = VecDeque::new();
        for tile in 0..self.tiles(&section).min(spare) {
            let Some(buffer) = self.tier(section.resting)?.try_buffer()? else { break };
            readings.push_back(self.start_read(&section, tile, buffer)?);
        }
        let started = !readings.is_empty();
        if started {
            self.ahead.push(Ahead { at, section, readings });
        }
        Ok(started)
    }

    /// Lets `see(start, tile)` look at every tile of a flat parameter, in order; what has been read ahead comes first.
    pub(crate) fn take_in(
        &mut self,
        at: Place,
        section: &Section,
        mut see: impl FnMut(usize, &[f32]) -> Moved<()>,
    ) -> Moved<()> {
        let mut readings = match self.ahead.iter().position(|ahead| ahead.at == at) {
            Some(index) => self.ahead.swap_remove(index).readings,
            None => VecDeque::new(),
        };
        let tiles = self.tiles(section);
        let mut started = readings.len();
        for tile in 0..tiles {
            if readings.is_empty() {
                let buffer = self.buffer(section.resting)?;
                readings.push_back(self.start_read(section, tile, buffer)?);
                started += 1;
            }
            while self.pipeline && started < tiles {
                let Some(buffer) = self.tier(section.resting)?.try_buffer()? else { break };
                readings.push_back(self.start_read(section, started, buffer)?);
                started += 1;
            }
            let Some(reading) = readings.pop_front() else { break };
            let buffer = self.wait(section, reading)?;
            see(tile * self.tile_numel, buffer.f32s())?;
            self.give(section, buffer)?;
        }
        Ok(())
    }

    /// Gives up on reads for a flat parameter that nobody needs after all.
    pub(crate) fn cancel_ahead_of(&mut self, at: Place) {
        while let Some(index) = self.ahead.iter().position(|ahead| ahead.at == at) {
            let ahead = self.ahead.swap_remove(index);
            self.cancel(ahead);
        }
    }

    /// Gives up on all of them.
    pub(crate) fn cancel_ahead(&mut self) {
        while let Some(ahead) = self.ahead.pop() {
            self.cancel(ahead);
        }
    }

    fn cancel(&mut self, ahead: Ahead) {
        if let Ok(tier) = self.tier(ahead.section.resting) {
            ahead.readings.into_iter().for_each(|reading| tier.cancel(reading));
        }
    }
}
