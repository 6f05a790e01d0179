//! Gathering and freeing of units: the part of the engine that moves parameters.

use shardwise_comm::HostBuffer;
use shardwise_comm::codec::encode_packed;
use shardwise_core::Precision;

use crate::Result;
use crate::config::UnitId;
use crate::engine::Engine;
use crate::error::EngineError;
use crate::events::EventKind;
use crate::handle::{GatherFrom, ParamState};
use crate::unit::Place;

impl Engine {
    /// The places of one unit's flat parameters.
    pub(crate) fn parts_of(&self, unit: UnitId) -> impl Iterator<Item = Place> + use<> {
        (0..self.units[unit].parts.len()).map(move |part| Place { unit, part })
    }

    /// Lets the peers read this rank's parameters, and this rank theirs, until [`Engine::end_loan`]: the masters when `full`
    /// says so, otherwise as they are rounded for the computation.
    pub(crate) fn begin_loan(&mut self, full: bool) -> Result<()> {
        self.gather_precision = if full { Precision::F32 } else { self.config.precision.param_dtype };
        if self.config.strategy.is_sharded() && self.shards.size() > 1 {
            self.round_params()?;
            let lent = self.low.as_ref().filter(|_| self.gather_precision.is_low());
            let buffer = lent.unwrap_or(&self.params);
            let numel = self.params.numel();
            let lent = self.shards.lend("parameters", buffer, numel, self.gather_precision);
            self.loan = Some(self.comm(lent)?);
        }
        Ok(())
    }

    /// Brings the rounded parameters up to the masters' version, if they are to be gathered.
    fn round_params(&mut self) -> Result<()> {
        if self.gather_precision.is_low() && self.low_version != Some(self.version) {
            let rank = self.group.rank();
            if let Some(low) = &mut self.low {
                let low = low.writable().map_err(|source| EngineError::Comm { rank, source })?;
                encode_packed(self.params.as_slice(), low, self.gather_precision);
            }
            self.low_version = Some(self.version);
        }
        Ok(())
    }

    pub(crate) fn end_loan(&mut self) {
        if let Some(loan) = self.loan.take() {
            loan.finish();
        }
    }

    pub(crate) fn start_unshard(&mut self, unit: UnitId) -> Result<()> {
        self.parts_of(unit).try_for_each(|at| self.start_unshard_part(at))
    }

    fn start_unshard_part(&mut self, at: Place) -> Result<()> {
        if !self.units[at].needs_unshard() {
            return Ok(());
        }
        let numel = self.units[at].layout().padded_numel();
        let dest = self.gather_buffer(at, numel)?;
        let handle = &mut self.units[at];
        handle.start_unshard(dest);
        self.bytes_sent += handle.gather_bytes_sent(self.gather_precision);
        self.gathered_bytes += (numel * size_of::<f32>()) as u64;
        self.gathered_bytes_peak = self.gathered_bytes_peak.max(self.gathered_bytes);
        self.note(at.unit, EventKind::GatherStarted);
        Ok(())
    }

    /// Gathers a unit, or waits for its gather that is under way.
    pub(crate) fn unshard(&mut self, unit: UnitId) -> Result<()> {
        self.start_unshard(unit)?;
        // Every part is waited for, so that a failure leaves zeros and not a hole.
        let mut result = Ok(());
        for at in self.parts_of(unit) {
            if matches!(self.units[at].state, ParamState::InFlight(_)) {
                let handle = &mut self.units[at];
                let from = match &self.loan {
                    _ if handle.is_whole() => {
                        GatherFrom::Own(&self.params.as_slice()[handle.span()], self.gather_precision)
                    }
                    Some(loan) => GatherFrom::Peers(loan),
                    None => GatherFrom::Nowhere,
                };
                let arrived = handle.wait_for_unshard(from);
                self.note(unit, EventKind::Gathered);
                result = result.and(self.comm(arrived));
            }
        }
        result
    }

    pub(crate) fn prefetch(&mut self, unit: UnitId) -> Result<()> {
        if self.config.prefetch { self.start_unshard(unit) } else { Ok(()) }
    }

    /// A buffer for a gather: a free one, that of a prefetch which nobody has used, or a new one.
    fn gather_buffer(&mut self, at: Place, numel: usize) -> Result<HostBuffer> {
        let (root, trainable) = (at.unit.is_root(), self.units[at].is_trainable());
        if !root
            && self.config.strategy.reshards_after_forward()
            && !self.pools.params(root, trainable).has(numel)
        {
            self.drop_unused_gathers(Some(at.unit));
        }
        let taken = self.pools.params(root, trainable).take(numel, &mut self.ledger, HostBuffer::new);
        self.comm(taken)
    }

    /// Frees units that are gathered or in flight while nobody computes with them and no backward will, but for `keep`.
    pub(crate) fn drop_unused_gathers(&mut self, keep: Option<UnitId>) {
        let until_backward = !self.config.strategy.reshards_after_forward();
        for id in self.units.ids_without_root() {
            let unit = &self.units[id];
            if unit.users == 0 && !(until_backward && unit.calls > 0) && Some(id) != keep {
                self.reshard(id);
            }
        }
    }

    /// Ends one use; true when it was the last.
    pub(crate) fn release_use(&mut self, unit: UnitId) -> bool {
        let unit = &mut self.units[unit];
        unit.users = unit.users.saturating_sub(1);
        unit.users == 0
    }

    pub(crate) fn reshard(&mut self, unit: UnitId) {
        for at in self.parts_of(unit) {
            let handle = &mut self.units[at];
            let (bytes, trainable) =
                (handle.layout().padded_numel() * size_of::<f32>(), handle.is_trainable());
            if let Some(buffer) = handle.reshard() {
                self.pools.params(unit.is_root(), trainable).give(buffer);
                self.gathered_bytes -= bytes as u64;
                self.note(unit, EventKind::Released);
            }
        }
    }
}
