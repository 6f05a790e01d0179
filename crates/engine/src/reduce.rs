//! Reductions, the norm and the update: the part of the engine that moves gradients.

use shardwise_comm::CommError;

use crate::Result;
use crate::engine::{Engine, Phase, UnitId};
use crate::error::EngineError;
use crate::events::EventKind;
use crate::handle::{FlatParamHandle, GradientState};
use crate::norm::PartialNorm;
use crate::optimizer::Update;

impl Engine {
    /// Makes sure that `unit` has a full gradient to write to. Reductions of other units are finished first, so that
    /// one buffer serves all of them.
    pub(crate) fn prepare_gradient(&mut self, id: UnitId) -> Result<()> {
        let Some(handle) = self.handle(id) else { return Ok(()) };
        if matches!(handle.gradient, GradientState::Writing { .. }) {
            return Ok(());
        }
        let (numel, params) = (handle.layout().padded_numel(), handle.layout().params().len());
        if id.is_root() {
            self.finish_reduce(id)?
        } else {
            self.finish_unit_reductions()?
        }
        let rank = self.group.rank();
        let comm = |source| EngineError::Comm { rank, source };
        let pool = if id.is_root() { &mut self.root_gradient_pool } else { &mut self.gradient_pool };
        let mut buffer =
            pool.take(numel, &mut self.ledger, |numel| self.group.allocate(numel)).map_err(comm)?;
        let released = buffer.writable().map(drop).map_err(comm);
        if let Some(handle) = self.handle_mut(id) {
            handle.gradient = GradientState::Writing { buffer, written: vec![false; params] };
        }
        released
    }

    pub(crate) fn start_reduce(&mut self, id: UnitId) -> Result<()> {
        self.prepare_gradient(id)?;
        let (group, rank) = (self.group.clone(), self.group.rank());
        let Some(handle) = self.handle_mut(id) else { return Ok(()) };
        handle.start_reduce(&group).map_err(|source| EngineError::Comm { rank, source })?;
        let sent = handle.part_bytes_to_peers();
        self.bytes_sent += sent;
        self.note(id, EventKind::ReduceStarted);
        Ok(())
    }

    pub(crate) fn finish_reduce(&mut self, id: UnitId) -> Result<()> {
        let rank = self.group.rank();
        let comm = |source| EngineError::Comm { rank, source };
        let handle = if id.is_root() { self.root.as_mut() } else { self.units.get_mut(id.index()) };
        let Some(handle) = handle.filter(|h| matches!(h.gradient, GradientState::Reducing(_))) else {
            return Ok(());
        };
        handle.reserve_next_partial(&self.group, &mut self.ledger).map_err(comm)?;
        let Some((buffer, result)) = handle.finish_reduce() else { return Ok(()) };
        if id.is_root() {
            self.root_gradient_pool.give(buffer)
        } else {
            self.gradient_pool.give(buffer)
        }
        self.note(id, EventKind::Reduced);
        result.map_err(comm)
    }

    pub(crate) fn finish_unit_reductions(&mut self) -> Result<()> {
        (0..self.units.len()).try_for_each(|i| self.finish_reduce(UnitId::unit(i)))
    }

    pub(crate) fn finish_reductions(&mut self) -> Result<()> {
        self.finish_unit_reductions()?;
        self.finish_reduce(UnitId::ROOT)
    }

    /// Merges and averages every unit's gradient and returns the norm of the whole.
    pub(crate) fn finish_gradients(&mut self, micro_batches: usize) -> Result<f64> {
        let rank = self.group.rank();
        let comm = |source: CommError| EngineError::Comm { rank, source };
        let norm = self.config.norm;
        let mut own = PartialNorm::default();
        for handle in self.root.iter_mut().chain(&mut self.units) {
            if let Some(part) = handle.finish_gradient(micro_batches as f32, norm).map_err(comm)? {
                own = norm.join(own, part);
            }
        }
        let all = self.group.all_gather_bytes("gradient norm", &own.to_bytes()).map_err(comm)?;
        let norm = norm.of_parts(all.iter().map(|bytes| PartialNorm::from_bytes(bytes)));
        if norm.is_finite() { Ok(norm) } else { Err(self.non_finite()?) }
    }

    /// Finds, with the other ranks, the first element that is not finite, and drops the step's gradient.
    pub(crate) fn non_finite(&mut self) -> Result<EngineError> {
        let own = self.root.iter().chain(&self.units).find_map(FlatParamHandle::first_non_finite);
        let message = own.map(|(path, value)| format!("{value}\u{1f}{path}")).unwrap_or_default();
        let rank = self.group.rank();
        let all = self
            .group
            .all_gather_varied("gradient check", message.as_bytes())
            .map_err(|source| EngineError::Comm { rank, source })?;
        for handle in self.root.iter_mut().chain(&mut self.units) {
            handle.discard_gradient();
        }
        self.phase = Phase::Idle;
        let found = all.iter().enumerate().find_map(|(rank, bytes)| {
            let text = String::from_utf8_lossy(bytes).into_owned();
            let (value, path) = text.split_once('\u{1f}')?;
            Some((rank, path.to_string(), value.parse().unwrap_or(f32::NAN)))
        });
        let (rank, path, value) = found.unwrap_or((rank, "the sum of squares".into(), f32::INFINITY));
        Ok(EngineError::NonFinite { step: self.step, rank, path, value })
    }

    pub(crate) fn update(&mut self, id: UnitId, update: Update) -> Result<()> {
        let (group, rank) = (self.group.clone(), self.group.rank());
        let comm = |source: CommError| EngineError::Comm { rank, source };
        let whole = !self.config.strategy.is_sharded() && group.size() > 1;
        let Some(handle) = self.handle(id).filter(|h| h.sum.is_some()) else { return Ok(()) };
        let numel = handle.layout().padded_numel();
        if !whole {
            let updated = self.handle_mut(id).map_or(Ok(()), |h| h.update(update, None));
            self.note(id, EventKind::Updated);
            return updated.map_err(comm);
        }
        let pool = if id.is_root() { &mut self.root_gradient_pool } else { &mut self.gradient_pool };
        let dest = pool.take(numel, &mut self.ledger, |numel| group.allocate(numel)).map_err(comm)?;
        let Some(handle) = self.handle_mut(id) else { return Ok(()) };
        let (gradient, gathered) = handle.gather_gradient(&group, dest);
        let sent = handle.part_bytes_to_peers();
        let updated = gathered.and_then(|()| handle.update(update, Some(&gradient)));
        self.bytes_sent += sent;
        if id.is_root() {
            self.root_gradient_pool.give(gradient)
        } else {
            self.gradient_pool.give(gradient)
        }
        self.note(id, EventKind::Updated);
        updated.map_err(comm)
    }
}
