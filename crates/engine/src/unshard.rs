//! Gathering and freeing of units: the part of the engine that moves parameters.

use shardwise_comm::HostBuffer;

use crate::Result;
use crate::engine::{Engine, UnitId};
use crate::error::EngineError;
use crate::events::EventKind;
use crate::handle::ParamState;

impl Engine {
    pub(crate) fn start_unshard(&mut self, id: UnitId) -> Result<()> {
        let Some(handle) = self.handle(id).filter(|h| h.needs_unshard()) else { return Ok(()) };
        let numel = handle.layout().padded_numel();
        let dest = self.gather_buffer(id, numel)?;
        let group = self.group.clone();
        let Some(handle) = self.handle_mut(id) else { return Ok(()) };
        handle.start_unshard(&group, dest);
        let sent = handle.part_bytes_to_peers();
        self.bytes_sent += sent;
        self.gathered_bytes += (numel * size_of::<f32>()) as u64;
        self.gathered_bytes_peak = self.gathered_bytes_peak.max(self.gathered_bytes);
        self.note(id, EventKind::GatherStarted);
        Ok(())
    }

    pub(crate) fn unshard(&mut self, id: UnitId) -> Result<()> {
        self.start_unshard(id)?;
        let rank = self.group.rank();
        let Some(handle) = self.handle_mut(id) else { return Ok(()) };
        if matches!(handle.state, ParamState::InFlight(_)) {
            let result = handle.wait_for_unshard().map_err(|source| EngineError::Comm { rank, source });
            self.note(id, EventKind::Gathered);
            return result;
        }
        Ok(())
    }

    pub(crate) fn prefetch(&mut self, id: UnitId) -> Result<()> {
        if self.config.prefetch { self.start_unshard(id) } else { Ok(()) }
    }

    /// A buffer for a gather: a free one, that of a prefetch which nobody has used, or a new one.
    pub(crate) fn gather_buffer(&mut self, id: UnitId, numel: usize) -> Result<HostBuffer> {
        if !id.is_root() && !self.gather_pool.has(numel) && self.config.strategy.reshards_after_forward() {
            self.drop_unused_gathers();
        }
        let rank = self.group.rank();
        let pool = if id.is_root() { &mut self.root_pool } else { &mut self.gather_pool };
        pool.take(numel, &mut self.ledger, HostBuffer::new)
            .map_err(|source| EngineError::Comm { rank, source })
    }

    /// Frees units that are gathered or in flight while nobody computes with them and no backward will.
    pub(crate) fn drop_unused_gathers(&mut self) {
        let keeps = !self.config.strategy.reshards_after_forward();
        let unused: Vec<UnitId> = (0..self.units.len())
            .filter(|i| self.units[*i].users == 0 && !(keeps && self.units[*i].calls > 0))
            .map(UnitId::unit)
            .collect();
        unused.into_iter().for_each(|id| self.reshard(id));
    }

    /// Ends one use; true when it was the last.
    pub(crate) fn release_use(&mut self, id: UnitId) -> bool {
        let Some(handle) = self.handle_mut(id) else { return false };
        handle.users = handle.users.saturating_sub(1);
        handle.users == 0
    }

    pub(crate) fn reshard(&mut self, id: UnitId) {
        let Some(handle) = self.handle_mut(id) else { return };
        let numel = handle.layout().padded_numel();
        if let Some(buffer) = handle.reshard() {
            if id.is_root() {
                self.root_pool.give(buffer)
            } else {
                self.gather_pool.give(buffer)
            }
            self.gathered_bytes -= (numel * size_of::<f32>()) as u64;
            self.note(id, EventKind::Released);
        }
    }
}
