//! Evaluations of what rests elsewhere: ranks evaluate each at its own pace, though every gather takes all of them.
//!
//! Before a gather each rank says what it wants. The ranks are served in turns: all bring in what one of them wants, those who
//! want the same take it, and the others go on saying what they want. A rank that has no more batches goes on serving until
//! nobody wants anything. Ranks that evaluate alike want alike, so that one gather serves all of them.

use shardwise_comm::CommError;

use super::Moved;
use crate::engine::{Engine, Phase};
use crate::unit::Place;

/// Where a rank says that it wants nothing.
const NOTHING: u32 = 0;

impl Engine {
    /// Whether there are gathers of what rests elsewhere in which peers must take part.
    pub(crate) fn takes_turns(&self) -> bool {
        self.units.handles().any(|handle| handle.away.params.is_some() && !handle.is_whole())
    }

    /// In an evaluation, waits until it is the turn of the gather `at`; brings in what comes before it for others.
    pub(crate) fn take_turn(&mut self, at: Place) -> Moved<()> {
        if self.phase != Phase::Evaluation {
            return Ok(());
        }
        while let Some(next) = self.next_turn(Some(at))? {
            if next == at {
                return Ok(());
            }
            self.serve(next)?;
        }
        Ok(())
    }

    /// Ends this rank's evaluation: brings in what others want until nobody wants anything.
    pub(crate) fn serve_others(&mut self) -> Moved<()> {
        if self.failure.get().is_some() || !self.takes_turns() {
            return Ok(());
        }
        while let Some(next) = self.next_turn(None)? {
            self.serve(next)?;
        }
        Ok(())
    }

    /// What is gathered next, now that this rank wants `wanted`; nothing when no rank wants anything.
    fn next_turn(&mut self, wanted: Option<Place>) -> Moved<Option<Place>> {
        let places = self.units.places();
        let own = wanted.map_or(NOTHING, |at| self.units.index_of(at) as u32 + 1);
        let all = self.staged.all_gather_bytes("turn of an evaluation", &own.to_le_bytes())?;
        let first = self.stages.turn;
        for rank in (0..all.len()).map(|i| (first + i) % all.len()) {
            let wanted = all[rank].as_slice().try_into().map_or(NOTHING, u32::from_le_bytes);
            if wanted == NOTHING {
                continue;
            }
            self.stages.turn = (rank + 1) % all.len();
            let at = places.get(wanted as usize - 1).copied();
            return at.map(Some).ok_or_else(|| {
                let message =
                    format!("rank {rank} of the group wants flat parameter {wanted}, which there is not");
                CommError::Usage { rank: self.group.rank(), message }.into()
            });
        }
        self.stages.turn = 0;
        Ok(None)
    }

    /// Takes part in a gather for others.
    fn serve(&mut self, at: Place) -> Moved<()> {
        let travel = self.gather_travel(at);
        self.stage_params(at, travel)?;
        let (loan, raw) = self.lend_staged(at, travel)?;
        [Some(loan), raw].into_iter().flatten().for_each(shardwise_comm::Loan::finish);
        self.sent += self.units[at].gather_traffic(travel);
        Ok(())
    }
}
