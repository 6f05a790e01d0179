//! Reductions, the norm and the update: the part of the engine that moves gradients.

use shardwise_comm::{PendingReduce, SharedBuffer};
use shardwise_core::pre_divisor;

use crate::Result;
use crate::config::{Accumulation, Divisor, MAX_SKIPS, NonFinite, NonFiniteElement, UnitId};
use crate::engine::{Engine, Phase};
use crate::error::EngineError;
use crate::events::EventKind;
use crate::handle::{FlatParamHandle, GradientState};
use crate::norm::PartialNorm;
use crate::optimizer::StepUpdate;
use crate::swap::Moved;
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
        let pre_divisor = self.pre_divisor();
        if self.units[at].is_deferred() {
            let resumed = self.units[at].resume_deferred(pre_divisor);
            return self.comm(resumed);
        }
        let pool = self.pools.gradient(at.unit.is_root(), self.units[at].kind());
        let taken = pool.take(numel, &mut self.ledger, |numel| self.group.allocate(numel));
        let mut buffer = self.comm(taken)?;
        let released = buffer.writable().map(drop);
        self.units[at].gradient = GradientState::Writing { buffer, written: vec![false; params] };
        self.comm(released)
    }

    /// Lends the full gradients of `unit` to the peers, unless they are to be kept for the step's last round.
    pub(crate) fn start_reduce(&mut self, unit: UnitId) -> Result<()> {
        if !self.reduces_this_round() {
            return Ok(());
        }
        self.units[unit].complete = true;
        let pre_divisor = self.pre_divisor();
        for at in self.parts_of(unit) {
            if !self.units[at].is_trainable() {
                continue;
            }
            self.prepare_gradient(at)?;
            let started = self.units[at].start_reduce(&self.reductions, pre_divisor, self.diverged);
            self.comm(started)?;
            self.reducing.push_back(at);
            self.sent += self.units[at].reduce_traffic();
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
            if let Some(pending) = self.units[at].take_reduction() {
                self.sum_part(at, pending)?;
            }
        }
        if let Some(end) = self.end_of_round.take()
            && !self.diverged
        {
            self.diverged = !self.comm(end.agrees())?;
        }
        Ok(())
    }

    /// Marks the end of a round among the reductions where the root's does not: so ranks notice that one of them has used
    /// fewer units, although all it has reduced is alike.
    pub(crate) fn mark_end_of_round(&mut self) {
        let root_is_reduced = self.units[UnitId::ROOT].parts.iter().any(FlatParamHandle::is_trainable);
        if self.reduces_this_round() && !root_is_reduced {
            self.end_of_round = Some(self.reductions.start_reduce_scatter("end of round", None, 0));
        }
    }

    /// Sums this rank's part of a reduction, in memory or on the way to where it rests.
    fn sum_part(&mut self, at: Place, pending: PendingReduce) -> Result<()> {
        let (buffer, result) = if self.units[at].away.state.is_some() {
            self.sum_away(at, pending)
        } else {
            self.reserve_next_partial(at)?;
            self.units[at].sum_part(pending, self.across.as_mut(), None)
        };
        self.take_in(at, buffer, result)
    }

    fn reserve_next_partial(&mut self, at: Place) -> Result<()> {
        if self.lend_gradient_shard(at)? {
            return Ok(());
        }
        let reserved = self.units[at].reserve_next_partial(&self.group, &mut self.ledger);
        self.comm(reserved)
    }

    /// Puts the full gradient's buffer away after its reduction.
    fn take_in(&mut self, at: Place, buffer: Option<SharedBuffer>, result: Moved<()>) -> Result<()> {
        if let Some(buffer) = buffer {
            self.pools.gradient(at.unit.is_root(), self.units[at].kind()).give(buffer);
        }
        self.note(at.unit, EventKind::Reduced);
        self.sent += self.units[at].raw_traffic();
        self.comm(result)?;
        self.update_in_backward(at)
    }

    /// Finishes every reduction of the last round, at a place in the program that all ranks reach alike: in the round
    /// itself a rank that computes writes the root's gradient before its units' backward, and one that idles after it.
    pub(crate) fn settle_round(&mut self) -> Result<()> {
        self.finish_reductions()?;
        if std::mem::take(&mut self.diverged) {
            self.reduce_deferred()?;
        }
        for at in self.units.places() {
            let ended = self.units[at].end_round(self.swap.as_mut());
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
            self.sum_part(at, pending)?;
        }
        self.comm(self.reductions.realign(&self.group))
    }

    /// Drops what a step has summed, after it could not be ended: the next one starts afresh.
    pub(crate) fn abandon_step(&mut self) {
        for handle in self.units.handles_mut() {
            handle.abandon_gradient();
        }
        self.phase = Phase::Idle;
    }

    /// Whether gradients of the current round travel in it.
    fn reduces_this_round(&self) -> bool {
        match self.phase {
            Phase::Round { schedule, round } => {
                self.config.accumulation == Accumulation::Sharded || round + 1 == schedule.rounds()
            }
            _ => true,
        }
    }

    /// Starts the reductions of units whose gradients earlier rounds have left and the last one has not used.
    pub(crate) fn start_left_over_reductions(&mut self) -> Result<()> {
        if self.config.accumulation == Accumulation::Unsharded && self.reduces_this_round() {
            for unit in self.units.ids_without_root() {
                let left = |part: &FlatParamHandle| matches!(part.gradient, GradientState::Writing { .. });
                if self.units[unit].parts.iter().any(left) {
                    self.start_reduce(unit)?;
                }
            }
        }
        Ok(())
    }

    /// Makes sure that every unit can keep a full gradient over the rounds of a step.
    pub(crate) fn reserve_unsharded_gradients(&mut self) -> Result<()> {
        if self.config.accumulation == Accumulation::Sharded || self.unsharded_reserved {
            return Ok(());
        }
        for at in self.units.places() {
            if !at.unit.is_root() && self.units[at].is_trainable() {
                let (numel, kind) = (self.units[at].layout().padded_numel(), self.units[at].kind());
                let pool = self.pools.gradient(false, kind);
                let added = pool.add(numel, &mut self.ledger, |numel| self.group.allocate(numel));
                self.comm(added)?;
            }
        }
        self.unsharded_reserved = true;
        Ok(())
    }

    /// What each rank's gradient is divided by before its reduction.
    fn pre_divisor(&self) -> f32 {
        match self.phase {
            Phase::Round { schedule, .. } | Phase::Step { schedule, .. }
                if self.config.precision.reduce_dtype.is_low() =>
            {
                pre_divisor(schedule.micro_batches()) as f32
            }
            _ => 1.0,
        }
    }

    /// What the sum of the gradients is divided by: the denominator and the loss scale, less what has been divided before.
    pub(crate) fn post_divisor(&mut self, micro_batches: usize) -> Result<f32> {
        let denominator = match self.config.divisor {
            Divisor::MicroBatches => micro_batches as f64,
            Divisor::Custom(divisor) => divisor,
            Divisor::Weights => self.total_weight()?,
        };
        let divisor = (denominator * self.scaler.scale() / f64::from(self.pre_divisor())) as f32;
        if divisor.is_finite() && divisor != 0.0 {
            return Ok(divisor);
        }
        Err(EngineError::Usage(format!(
            "the gradient of step {} would be divided by {denominator} times a loss scale of {}, which is no f32 above 0; use \
             another divisor or a smaller loss_scale",
            self.step,
            self.scaler.scale()
        )))
    }

    /// The sum of all ranks' weights of this step.
    fn total_weight(&mut self) -> Result<f64> {
        let own = std::mem::take(&mut self.weight);
        let all = self.comm(self.group.all_gather_bytes("weights", &own.to_le_bytes()))?;
        let weights = all.iter().map(|w| w.as_slice().try_into().map_or(f64::NAN, f64::from_le_bytes));
        let total: f64 = weights.sum();
        if total.is_finite() && total > 0.0 {
            return Ok(total);
        }
        Err(EngineError::Usage(format!(
            "the weights of step {} add up to {total} over all ranks; give every micro-batch its weight, such as its number \
             of tokens, with add_weight",
            self.step
        )))
    }

    /// Merges and averages every unit's gradient and returns the norm of the whole.
    pub(crate) fn finish_gradients(&mut self, micro_batches: usize) -> Result<f64> {
        let divisor = self.post_divisor(micro_batches)?;
        self.norm_of_all(|engine, at| engine.finish_gradient_of(at, divisor))
    }

    /// The norm over all ranks of what `measure` finds in this rank's parts.
    fn norm_of_all(
        &mut self,
        measure: impl Fn(&mut Self, Place) -> Result<Option<PartialNorm>>,
    ) -> Result<f64> {
        let norm = self.config.norm;
        let mut own = self.norm_in_backward();
        for at in self.units.places() {
            if let Some(part) = measure(self, at)? {
                own = norm.join(own, part);
            }
        }
        let all = self.comm(self.shards.all_gather_bytes("gradient norm", &own.to_bytes()))?;
        Ok(norm.of_parts(all.iter().map(|bytes| PartialNorm::from_bytes(bytes))))
    }

    /// Decides, alike on all ranks, what becomes of a step whose gradient has this norm: the norm to clip by, or the element
    /// for which the step is skipped.
    pub(crate) fn judge(&mut self, norm: f64) -> Result<(f64, Option<NonFiniteElement>)> {
        self.scaler.learn(norm.is_finite());
        if norm.is_finite() {
            self.skips = 0;
            return Ok((norm, None));
        }
        let adapts = self.scaler.adapts();
        if self.config.non_finite == NonFinite::Zero && !adapts {
            return Ok((self.norm_of_all(Self::zero_non_finite_of)?, None));
        }
        let element = self.non_finite()?;
        self.skips += 1;
        self.units.handles_mut().for_each(FlatParamHandle::forget_errors);
        if self.config.non_finite == NonFinite::Skip || adapts {
            if self.skips < MAX_SKIPS {
                return Ok((norm, Some(element)));
            }
            let NonFiniteElement { rank, path, value } = element;
            let (step, skips, scale) = (self.step, self.skips, self.scaler.scale());
            return Err(EngineError::TooManySkips { step, skips, scale, rank, path, value });
        }
        let NonFiniteElement { rank, path, value } = element;
        if self.in_backward.is_some() {
            let error = EngineError::NonFiniteInBackward { step: self.step, rank, path, value };
            self.keep_failure(Err(error.clone()));
            return Err(error);
        }
        Err(EngineError::NonFinite { step: self.step, rank, path, value })
    }

    /// Finds, with the other ranks, the first element that is not finite, and drops the step's gradient.
    fn non_finite(&mut self) -> Result<NonFiniteElement> {
        let own = self.first_non_finite()?;
        let own = self.bad_in_backward().or(own);
        let message = own.map(|(path, value)| format!("{value}\u{1f}{path}")).unwrap_or_default();
        let all = self.comm(self.shards.all_gather_varied("gradient check", message.as_bytes()))?;
        self.units.handles_mut().for_each(FlatParamHandle::discard_gradient);
        self.phase = Phase::Idle;
        let found = all.iter().zip(self.shards.members()).find_map(|(bytes, rank)| {
            let text = String::from_utf8_lossy(bytes).into_owned();
            let (value, path) = text.split_once('\u{1f}')?;
            Some(NonFiniteElement {
                rank: *rank,
                path: path.to_string(),
                value: value.parse().unwrap_or(f32::NAN),
            })
        });
        // Finite elements can have a norm that is not.
        Ok(found.unwrap_or_else(|| NonFiniteElement {
            rank: self.group.rank(),
            path: "the sum over all of them".into(),
            value: f32::INFINITY,
        }))
    }

    /// Updates one flat parameter that has a gradient.
    pub(crate) fn update(&mut self, at: Place, update: StepUpdate) -> Result<()> {
        if self.units[at].sum.is_none() {
            return Ok(());
        }
        let whole = self.units[at].is_whole() && self.shards.size() > 1;
        let gradient = if whole { Some(self.gather_gradient(at)?) } else { None };
        let rank = self.group.rank();
        let handle = &mut self.units[at];
        let params = self.params.writable().map_err(|source| EngineError::Comm { rank, source })?;
        handle.update(update, &mut params[handle.span()], gradient.as_ref());
        if handle.away.state.is_none() {
            handle.use_up_gradient();
        }
        if let Some(gradient) = gradient {
            self.pools.gradient(at.unit.is_root(), self.units[at].kind()).give(gradient);
        }
        self.note(at.unit, EventKind::Updated);
        Ok(())
    }

    /// Gathers the summed gradient, for every rank to update all parameters.
    pub(crate) fn gather_gradient(&mut self, at: Place) -> Result<SharedBuffer> {
        let numel = self.units[at].layout().padded_numel();
        let pool = self.pools.gradient(at.unit.is_root(), self.units[at].kind());
        let taken = pool.take(numel, &mut self.ledger, |numel| self.group.allocate(numel));
        let mut dest = self.comm(taken)?;
        if self.units[at].sum.is_none() {
            self.stage_gradient(at, false)?;
        }
        if self.hops.is_some() {
            let staged = self.units[at].sum.is_none();
            let sum = if staged { self.workroom.stage.take() } else { self.units[at].sum.take() };
            let gathered = match &sum {
                Some(sum) => self.gather_sum_in_hops(at, sum, &mut dest),
                None => Ok(()),
            };
            *(if staged { &mut self.workroom.stage } else { &mut self.units[at].sum }) = sum;
            return gathered.map(|()| dest);
        }
        let handle = &self.units[at];
        let sum = handle.sum.as_ref().or(self.workroom.stage.as_ref());
        let (gradient, gathered) = handle.gather_gradient(sum, &self.shards, dest);
        self.sent += self.comm(gathered)?;
        Ok(gradient)
    }
}
