//! Reductions, the norm and the update: the part of the engine that moves gradients.

use shardwise_comm::SharedBuffer;

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
        if !at.unit.is_root() {
            self.finish_reductions()?;
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
            let started = self.units[at].start_reduce(&self.reductions, self.diverged);
            self.comm(started)?;
            self.reducing.push_back(at);
            self.bytes_sent += self.units[at].part_bytes_to_peers();
            self.note(unit, EventKind::ReduceStarted);
        }
        Ok(())
    }

    /// Sums this rank's part of every reduction that is under way, in the order in which they were started: with the first
    /// that not every rank has started, they begin to be kept until the end of the round.
    fn finish_reductions(&mut self) -> Result<()> {
        while let Some(at) = self.reducing.pop_front() {
            if !self.diverged {
                self.diverged = !self.comm(self.units[at].peers_agree())?;
            }
            if self.diverged {
                self.units[at].defer_reduce();
                continue;
            }
            self.reserve_next_partial(at)?;
            let Some((buffer, result)) = self.units[at].finish_reduce() else { continue };
            self.take_in(at, buffer, result)?;
        }
        Ok(())
    }

    fn reserve_next_partial(&mut self, at: Place) -> Result<()> {
        let reserved = self.units[at].reserve_next_partial(&self.group, &mut self.ledger);
        self.comm(reserved)
    }

    /// Puts the full gradient's buffer away after its reduction.
    fn take_in(
        &mut self,
        at: Place,
        buffer: Option<SharedBuffer>,
        result: shardwise_comm::Result<()>,
    ) -> Result<()> {
        if let Some(buffer) = buffer {
            self.pools.gradient(at.unit.is_root()).give(buffer);
        }
        self.note(at.unit, EventKind::Reduced);
        self.comm(result)
    }

    /// Finishes every reduction of the last round, at a place in the program that all ranks reach alike: in the round
    /// itself a rank that computes writes the root's gradient before its units' backward, and one that idles after it.
    pub(crate) fn settle_round(&mut self) -> Result<()> {
        self.finish_reductions()?;
        if std::mem::take(&mut self.diverged) {
            self.reduce_deferred()?;
        }
        for at in self.units.places() {
            let ended = self.units[at].end_round();
            self.comm(ended)?;
        }
        Ok(())
    }

    /// Reduces what ranks have kept because they have used different units: every unit that any rank has used, in the
    /// order of the model. A rank without a gradient contributes zeros.
    fn reduce_deferred(&mut self) -> Result<()> {
        let places = self.units.places();
        let own = |at: &Place| u8::from(matches!(self.units[*at].gradient, GradientState::Deferred(_)));
        let own: Vec<u8> = places.iter().map(own).collect();
        let all = self.comm(self.group.all_gather_bytes("units used", &own))?;
        for (index, at) in places.into_iter().enumerate() {
            if all.iter().all(|used| used.get(index) != Some(&1)) {
                continue;
            }
            let source = self.units[at].take_deferred();
            let pending = self.units[at].reduction(&self.group, source);
            self.reserve_next_partial(at)?;
            let (buffer, result) = self.units[at].sum_part(pending);
            self.take_in(at, buffer, result)?;
        }
        self.comm(self.reductions.realign(&self.group))
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
        let gradient = if whole { Some(self.gather_gradient(at)?) } else { None };
        let rank = self.group.rank();
        let handle = &mut self.units[at];
        let params = self.params.writable().map_err(|source| EngineError::Comm { rank, source })?;
        handle.update(update, &mut params[handle.span()], gradient.as_ref());
        if let Some(gradient) = gradient {
            self.pools.gradient(at.unit.is_root()).give(gradient);
        }
        self.note(at.unit, EventKind::Updated);
        Ok(())
    }

    /// Gathers the summed gradient, for every rank to update all parameters.
    fn gather_gradient(&mut self, at: Place) -> Result<SharedBuffer> {
        let numel = self.units[at].layout().padded_numel();
        let pool = self.pools.gradient(at.unit.is_root());
        let taken = pool.take(numel, &mut self.ledger, |numel| self.group.allocate(numel));
        let dest = self.comm(taken)?;
        let handle = &mut self.units[at];
        let (gradient, gathered) = handle.gather_gradient(&self.group, dest);
        self.bytes_sent += handle.part_bytes_to_peers();
        self.comm(gathered)?;
        Ok(gradient)
    }
}
