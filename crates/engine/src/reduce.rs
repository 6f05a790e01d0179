//! Reductions, the norm and the update: the part of the engine that moves gradients.

use crate::Result;
use crate::config::UnitId;
use crate::engine::{Engine, Phase};
use crate::error::EngineError;
use crate::events::EventKind;
use crate::handle::{FlatParamHandle, GradientState};
use crate::norm::PartialNorm;
use crate::optimizer::Update;
use crate::unit::Place;

impl Engine {
    /// Makes sure that the flat parameter at `at` has a full gradient to write to. Reductions of other units are finished
    /// first, so that one buffer serves all of them.
    pub(crate) fn prepare_gradient(&mut self, at: Place) -> Result<()> {
        let handle = &self.units[at];
        if !handle.is_trainable() || matches!(handle.gradient, GradientState::Writing { .. }) {
            return Ok(());
        }
        let (numel, params) = (handle.layout().padded_numel(), handle.layout().params().len());
        if at.unit.is_root() {
            self.finish_reduce(at.unit)?;
        } else {
            self.finish_unit_reductions()?;
        }
        let pool = self.pools.gradient(at.unit.is_root());
        let taken = pool.take(numel, &mut self.ledger, |numel| self.group.allocate(numel));
        let mut buffer = self.comm(taken)?;
        let released = buffer.writable().map(drop);
        self.units[at].gradient = GradientState::Writing { buffer, written: vec![false; params] };
        self.comm(released)
    }

    /// Lends the full gradients of `unit` to the peers.
    pub(crate) fn start_reduce(&mut self, unit: UnitId) -> Result<()> {
        for at in self.parts_of(unit) {
            if !self.units[at].is_trainable() {
                continue;
            }
            self.prepare_gradient(at)?;
            let started = self.units[at].start_reduce(&self.group);
            self.comm(started)?;
            self.bytes_sent += self.units[at].part_bytes_to_peers();
            self.note(unit, EventKind::ReduceStarted);
        }
        Ok(())
    }

    /// Sums this rank's part of the reductions of `unit` that are under way.
    pub(crate) fn finish_reduce(&mut self, unit: UnitId) -> Result<()> {
        for at in self.parts_of(unit) {
            let handle = &mut self.units[at];
            if !matches!(handle.gradient, GradientState::Reducing(_)) {
                continue;
            }
            let reserved = handle.reserve_next_partial(&self.group, &mut self.ledger);
            self.comm(reserved)?;
            let Some((buffer, result)) = self.units[at].finish_reduce() else { continue };
            self.pools.gradient(unit.is_root()).give(buffer);
            self.note(unit, EventKind::Reduced);
            self.comm(result)?;
        }
        Ok(())
    }

    fn finish_unit_reductions(&mut self) -> Result<()> {
        self.units.ids_without_root().try_for_each(|unit| self.finish_reduce(unit))
    }

    pub(crate) fn finish_reductions(&mut self) -> Result<()> {
        self.finish_unit_reductions()?;
        self.finish_reduce(UnitId::ROOT)
    }

    /// Merges and averages every unit's gradient and returns the norm of the whole.
    pub(crate) fn finish_gradients(&mut self, micro_batches: usize) -> Result<f64> {
        let norm = self.config.norm;
        let mut own = PartialNorm::default();
        for at in self.units.places() {
            let measured = self.units[at].finish_gradient(micro_batches as f32, norm);
            if let Some(part) = self.comm(measured)? {
                own = norm.join(own, part);
            }
        }
        let all = self.group.all_gather_bytes("gradient norm", &own.to_bytes());
        let norm = norm.of_parts(self.comm(all)?.iter().map(|bytes| PartialNorm::from_bytes(bytes)));
        if norm.is_finite() { Ok(norm) } else { Err(self.non_finite()?) }
    }

    /// Finds, with the other ranks, the first element that is not finite, and drops the step's gradient.
    fn non_finite(&mut self) -> Result<EngineError> {
        let own = self.units.handles().find_map(FlatParamHandle::first_non_finite);
        let message = own.map(|(path, value)| format!("{value}\u{1f}{path}")).unwrap_or_default();
        let all = self.comm(self.group.all_gather_varied("gradient check", message.as_bytes()))?;
        self.units.handles_mut().for_each(FlatParamHandle::discard_gradient);
        self.phase = Phase::Idle;
        let found = all.iter().enumerate().find_map(|(rank, bytes)| {
            let text = String::from_utf8_lossy(bytes).into_owned();
            let (value, path) = text.split_once('\u{1f}')?;
            Some((rank, path.to_string(), value.parse().unwrap_or(f32::NAN)))
        });
        let (rank, path, value) =
            found.unwrap_or((self.group.rank(), "the sum over all of them".into(), f32::INFINITY));
        Ok(EngineError::NonFinite { step: self.step, rank, path, value })
    }

    /// Updates one flat parameter that has a gradient.
    pub(crate) fn update(&mut self, at: Place, update: Update) -> Result<()> {
        if self.units[at].sum.is_none() {
            return Ok(());
        }
        let whole = !self.config.strategy.is_sharded() && self.group.size() > 1;
        let updated =
            if whole { self.update_whole(at, update)? } else { self.units[at].update(update, None) };
        self.note(at.unit, EventKind::Updated);
        self.comm(updated)
    }

    /// Gathers the summed gradient, for every rank to update all parameters.
    fn update_whole(&mut self, at: Place, update: Update) -> Result<shardwise_comm::Result<()>> {
        let numel = self.units[at].layout().padded_numel();
        let pool = self.pools.gradient(at.unit.is_root());
        let taken = pool.take(numel, &mut self.ledger, |numel| self.group.allocate(numel));
        let dest = self.comm(taken)?;
        let handle = &mut self.units[at];
        let (gradient, gathered) = handle.gather_gradient(&self.group, dest);
        let updated = gathered.and_then(|()| handle.update(update, Some(&gradient)));
        self.bytes_sent += handle.part_bytes_to_peers();
        self.pools.gradient(at.unit.is_root()).give(gradient);
        Ok(updated)
    }
}
