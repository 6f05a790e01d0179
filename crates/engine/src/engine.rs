//! One rank's part of a model, and the step that trains it.
//!
//! A step is `begin_step`, then for each round of micro-batches `begin_round`, forward and backward of the units,
//! `end_round`, and at last `end_step`, which clips and updates. Calls inside a round come from the middle of a tensor
//! library's graph and cannot return errors there: the first failure is kept, what follows computes with zeros, and
//! `end_step` returns it and applies nothing.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

use shardwise_comm::quantise::QuantisationError;
use shardwise_comm::{Loan, PendingReduce, ProcessGroup, SharedBuffer};
use shardwise_core::{BackwardPrefetch, GatherPolicy, RoundAssignment, StepSchedule, Traffic, max_partials};

use crate::Result;
use crate::across::Across;
use crate::config::{Accumulation, EngineConfig, StepReport, UnitId};
use crate::coordinator::Coordinator;
use crate::error::EngineError;
use crate::events::{Event, EventKind, EventLog};
use crate::handle::FlatParamHandle;
use crate::hops::Hops;
use crate::in_backward::InBackward;
use crate::ledger::Ledger;
use crate::norm::clip_coefficient;
use crate::optimizer::StepUpdate;
use crate::pass::ForwardPass;
use crate::pool::Pools;
use crate::scale::LossScaler;
use crate::swap::Swap;
use crate::swap::gather::Stages;
use crate::swap::reload::Workroom;
use crate::unit::{Place, Units};
use crate::uses::{Use, Uses};
use crate::whole::Whole;

/// What the engine is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    Idle,
    Step { schedule: StepSchedule, round: usize },
    Round { schedule: StepSchedule, round: usize },
    Evaluation,
}

impl Phase {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Phase::Idle => "Idle",
            Phase::Step { .. } => "Step",
            Phase::Round { .. } => "Round",
            Phase::Evaluation => "Evaluation",
        }
    }
}

/// One rank's part of a model.
#[derive(Debug)]
pub struct Engine {
    pub(crate) group: ProcessGroup,
    /// The ranks that share one copy of the model: all, or a group of a hybrid layout.
    pub(crate) shards: ProcessGroup,
    /// The second hop of reductions, over the groups of a hybrid layout or over nodes.
    pub(crate) across: Option<Across>,
    /// With nodes, the way of parameters through them.
    pub(crate) hops: Option<Hops>,
    /// All ranks, with an order of operations of its own for reductions: ranks may use different units.
    pub(crate) reductions: ProcessGroup,
    pub(crate) config: EngineConfig,
    /// Every flat parameter's owned elements, one after another.
    pub(crate) params: SharedBuffer,
    /// Raised with every change of the parameters, for copies derived from them.
    pub(crate) version: u64,
    /// The parameters as they travel, those that do not travel in f32 or rest so, and the version of the former.
    pub(crate) low: Option<SharedBuffer>,
    pub(crate) low_version: Option<u64>,
    /// Whether the gathers under way are of the masters, whatever else travels.
    pub(crate) gathers_masters: bool,
    /// While units are gathered: the right to read the peers' parameters.
    pub(crate) loan: Option<Loan>,
    /// The same for those that travel encoded.
    pub(crate) low_loan: Option<Loan>,
    /// Flat parameters whose reductions are under way, in the order in which they were started.
    pub(crate) reducing: VecDeque<Place>,
    /// What ends the reductions of a round, if nothing else does.
    pub(crate) end_of_round: Option<PendingReduce>,
    /// Whether ranks have used different units in the current round.
    pub(crate) diverged: bool,
    pub(crate) units: Units,
    pub(crate) coordinator: Coordinator,
    pub(crate) uses: Uses,
    pub(crate) policy: GatherPolicy,
    /// The units that are gathered ahead of their use.
    pub(crate) ahead: Vec<UnitId>,
    pub(crate) pools: Pools,
    pub(crate) ledger: Ledger,
    pub(crate) events: EventLog,
    pub(crate) phase: Phase,
    pub(crate) step: u64,
    /// Steps that have updated the parameters.
    pub(crate) updates: u64,
    /// Steps in a row that have not, up to now.
    pub(crate) skips: u32,
    pub(crate) scaler: LossScaler,
    /// The sum of this rank's weights of the step.
    pub(crate) weight: f64,
    pub(crate) unsharded_reserved: bool,
    /// What optimizers need that look at whole parameters.
    pub(crate) whole: Whole,
    /// What rests elsewhere, the group in which it is gathered, and where it is on its way.
    pub(crate) swap: Option<Swap>,
    pub(crate) staged: ProcessGroup,
    pub(crate) stages: Stages,
    pub(crate) workroom: Workroom,
    pub(crate) in_backward: Option<InBackward>,
    /// Steps that the averages of the weights have seen, and whether they have changed places with the weights.
    pub(crate) averaged: u64,
    pub(crate) averages_swapped: bool,
    pub(crate) sent: Traffic,
    pub(crate) gathered_bytes: u64,
    pub(crate) gathered_bytes_peak: u64,
    pub(crate) failure: Arc<OnceLock<EngineError>>,
}

impl Engine {
    /// The ranks that share the model.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// How it trains.
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Whether an evaluation is under way.
    pub fn is_evaluating(&self) -> bool {
        self.phase == Phase::Evaluation
    }

    /// The step that runs or ran last, counted from 1; 0 before the first.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Changes how far gathers run ahead and how long units stay, from the next step on. Ranks may differ in it, unless
    /// gathers are collectives: those through nodes, and of what rests elsewhere.
    ///
    /// # Errors
    /// In the middle of a step, or when a limit is 0.
    pub fn set_gather_policy(&mut self, policy: GatherPolicy) -> Result<()> {
        self.expect_idle("set_gather_policy")?;
        policy.check()?;
        self.policy = policy;
        Ok(())
    }

    /// How many forward calls of training have come out of the order that was recorded before: each costs a prefetch.
    pub fn deviations(&self) -> u64 {
        self.coordinator.deviations()
    }

    /// What is held.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Switches the event log on (empty) or off.
    pub fn log_events(&mut self, on: bool) {
        self.events.switch(on);
    }

    /// Takes the events since the last call.
    pub fn take_events(&mut self) -> Vec<Event> {
        self.events.take()
    }

    /// The first failure, shared with whoever may meet one outside the engine.
    pub fn failure(&self) -> &Arc<OnceLock<EngineError>> {
        &self.failure
    }

    /// Every unit with parameters, in the order of collectives: the root, then the others.
    pub fn ids(&self) -> impl Iterator<Item = UnitId> + use<> {
        self.units.ids()
    }

    /// A unit's flat parameters, in the order of its layouts; none for the root of a model that has all in units.
    pub fn parts(&self, unit: UnitId) -> &[FlatParamHandle] {
        &self.units[unit].parts
    }

    /// Begins a step of `micro_batches` micro-batches over all ranks: gathers the root.
    ///
    /// # Errors
    /// When there are fewer micro-batches than ranks, in the middle of a step, after a failure, or when a peer is lost.
    pub fn begin_step(&mut self, micro_batches: usize) -> Result<StepSchedule> {
        self.expect_idle("begin_step")?;
        self.expect_weights()?;
        let schedule = StepSchedule::of_micro_batches(micro_batches, self.group.size())?;
        self.begin_in_backward(schedule)?;
        let reductions = match self.config.accumulation {
            Accumulation::Sharded => schedule.rounds(),
            Accumulation::Unsharded => 1,
        };
        let partials = max_partials(reductions);
        self.reserve_unsharded_gradients()?;
        let scale = self.scaler.scale();
        for at in self.units.places() {
            self.units[at].begin_step(self.step + 1, scale);
            let reserved = self.units[at].reserve_away(partials, self.swap.as_mut());
            self.comm(reserved)?;
            if self.in_backward.is_none() {
                let reserved = self.units[at].reserve_partials(partials, &self.group, &mut self.ledger);
                self.comm(reserved)?;
            }
        }
        self.step += 1;
        (self.sent, self.gathered_bytes_peak, self.whole.bytes_sent) = (Traffic::default(), 0, 0);
        self.weight = 0.0;
        self.phase = Phase::Step { schedule, round: 0 };
        self.gather_ahead_of_round(false)?;
        Ok(schedule)
    }

    /// What the loss of the next backward must be multiplied by ([`EngineConfig::loss_scale`]); 1 without a scale.
    pub fn loss_scale(&self) -> f64 {
        self.scaler.scale()
    }

    /// Adds to the weight of this rank's part of the step, for [`crate::Divisor::Weights`].
    pub fn add_weight(&mut self, weight: f64) {
        self.weight += weight;
    }

    /// Starts what the first unit needs along with the root, then waits for the root.
    pub(crate) fn gather_ahead_of_round(&mut self, full: bool) -> Result<()> {
        self.begin_loan(full)?;
        self.start_unshard(UnitId::ROOT)?;
        self.prefetch_forward()?;
        self.unshard(UnitId::ROOT)
    }

    /// Begins the next round and says what this rank computes in it.
    ///
    /// # Errors
    /// Outside a step, or when all rounds are done.
    pub fn begin_round(&mut self) -> Result<RoundAssignment> {
        match self.phase {
            Phase::Step { schedule, round } if round < schedule.rounds() => {
                if round > 0 && self.config.accumulation == Accumulation::Sharded {
                    self.settle_round()?;
                }
                self.phase = Phase::Round { schedule, round };
                Ok(schedule.assignment(round, self.group.rank()))
            }
            _ => Err(self.wrong_state(
                UnitId::ROOT,
                "begin_round",
                "begin a step first, with as many micro-batches as it has",
            )),
        }
    }

    /// Gathers `unit` (or takes the prefetched) and starts what is expected next. Evaluation works alike.
    ///
    /// # Panics
    /// Outside a round and an evaluation: a unit was called where its parameters cannot be gathered.
    pub fn enter_forward(&mut self, unit: UnitId) {
        self.enter_forward_in(unit, ForwardPass::First);
    }

    /// As [`Engine::enter_forward`], for a call that is part of `pass`.
    ///
    /// # Panics
    /// As [`Engine::enter_forward`].
    pub fn enter_forward_in(&mut self, unit: UnitId, pass: ForwardPass) {
        let training = match self.phase {
            Phase::Round { .. } => true,
            Phase::Evaluation => false,
            _ => panic!(
                "{}",
                self.wrong_state(
                    unit,
                    "forward",
                    "call it inside a training step or an evaluation, where it can be gathered"
                )
            ),
        };
        self.note_use(Use::EnterForward(unit, pass));
        let result = self.unshard_for_use(unit);
        self.keep_failure(result);
        if pass.is_new() {
            self.coordinator.forward(unit);
        }
        self.units[unit].users += 1;
        self.units[unit].calls += usize::from(training && pass.is_new());
        self.note(unit, EventKind::Forward);
        if pass.is_new() {
            let result = self.prefetch_forward();
            self.keep_failure(result);
        }
    }

    /// Frees `unit` after its forward if the strategy says so, and starts the first gather of backward after the last.
    pub fn leave_forward(&mut self, unit: UnitId) {
        self.leave_forward_in(unit, ForwardPass::First);
    }

    /// As [`Engine::leave_forward`], for a call that is part of `pass`.
    pub fn leave_forward_in(&mut self, unit: UnitId, pass: ForwardPass) {
        self.note_use(Use::LeaveForward(unit, pass));
        let training = matches!(self.phase, Phase::Round { .. });
        if self.release_use(unit) && (self.config.strategy.reshards_after_forward() || !training) {
            self.reshard_after_forward(unit, training);
        }
        if !pass.is_new() {
            return;
        }
        if training && self.coordinator.turns() {
            let result = self.prefetch_backward();
            self.keep_failure(result);
        } else if !training && self.coordinator.is_complete() {
            self.coordinator.end_round();
        }
    }

    /// Gathers `unit` again for the backward of one of its calls and starts what is expected next.
    pub fn enter_backward(&mut self, unit: UnitId) {
        self.note_use(Use::EnterBackward(unit));
        let result = self.unshard_for_use(unit);
        self.keep_failure(result);
        self.units[unit].users += 1;
        self.note(unit, EventKind::Backward);
        self.coordinator.backward(unit);
        if self.policy.backward_prefetch == BackwardPrefetch::Pre {
            let result = self.prefetch_backward();
            self.keep_failure(result);
        }
    }

    /// Lets parameter `index` of a unit's part write its gradient: `write(window, overwrite)`, where `overwrite` says that
    /// the window's contents are stale. Frozen parameters have no window.
    pub fn write_gradient(
        &mut self,
        unit: UnitId,
        part: usize,
        index: usize,
        write: impl FnOnce(&mut [f32], bool),
    ) {
        let at = Place { unit, part };
        self.note_gradient(at);
        let result = self.prepare_gradient(at).and_then(|()| {
            let written = self.units[at].write_gradient(index, write);
            self.comm(written)
        });
        self.keep_failure(result);
    }

    /// Ends the backward of one call of `unit`; after the last, lends its full gradient and frees its parameters.
    pub fn leave_backward(&mut self, unit: UnitId) {
        self.note_use(Use::LeaveBackward(unit));
        let Some(calls) = self.units[unit].calls.checked_sub(1) else {
            // None is due: the unit has had its last, or no forward at all.
            if self.release_use(unit) {
                self.reshard(unit);
            }
            return;
        };
        self.units[unit].calls = calls;
        let last = calls == 0;
        if last {
            let result = self.start_reduce(unit);
            self.keep_failure(result);
        }
        if self.release_use(unit) && (last || self.config.strategy.reshards_after_forward()) {
            self.reshard_after_backward(unit);
        }
        if self.policy.backward_prefetch == BackwardPrefetch::Post {
            let result = self.prefetch_backward();
            self.keep_failure(result);
        }
    }

    /// Ends a round: units whose output the loss did not need contribute zeros, and the root's gradient is lent.
    ///
    /// # Errors
    /// Outside a round, or the first failure of the step.
    pub fn end_round(&mut self) -> Result<()> {
        let Phase::Round { schedule, round } = self.phase else {
            return Err(self.wrong_state(UnitId::ROOT, "end_round", "begin a round first"));
        };
        for unit in self.units.ids_without_root() {
            if std::mem::take(&mut self.units[unit].calls) > 0 {
                self.start_reduce(unit)?;
                self.reshard(unit);
            }
        }
        self.start_left_over_reductions()?;
        self.start_reduce(UnitId::ROOT)?;
        self.mark_end_of_round();
        self.coordinator.end_round();
        self.end_uses();
        self.ahead.clear();
        self.drop_unused_gathers(None);
        self.phase = Phase::Step { schedule, round: round + 1 };
        if round + 1 < schedule.rounds() {
            self.prefetch_forward()?;
        }
        self.check_failure()
    }

    /// Ends a step: sums what is left, clips by the global norm, updates the owned parameters with learning rate `lr`.
    ///
    /// # Errors
    /// The first failure of the step (nothing is updated then), a gradient that is not finite, or rounds left over.
    pub fn end_step(&mut self, lr: f64) -> Result<StepReport> {
        let schedule = match self.phase {
            Phase::Step { schedule, round } if round == schedule.rounds() => schedule,
            _ => {
                return Err(self.wrong_state(
                    UnitId::ROOT,
                    "end_step",
                    "finish every round of the step first",
                ));
            }
        };
        self.check_failure()?;
        self.release_kept();
        self.reshard(UnitId::ROOT);
        self.settle_round()?;
        self.end_loan();
        let report = self.apply(schedule, lr);
        if report.is_err() {
            self.abandon_step();
        }
        report
    }

    /// Judges the summed gradient and updates the parameters.
    fn apply(&mut self, schedule: StepSchedule, lr: f64) -> Result<StepReport> {
        self.end_in_backward(lr)?;
        let loss_scale = self.scaler.scale();
        let grad_norm = self.finish_gradients(schedule.micro_batches())?;
        let (grad_norm, skipped) = self.judge(grad_norm)?;
        let clip = clip_coefficient(grad_norm, self.config.clip_norm);
        if skipped.is_none() {
            let update = StepUpdate { lr, clip };
            self.update_whole(update)?;
            let (away, here): (Vec<Place>, Vec<Place>) =
                self.units.places().into_iter().partition(|at| self.units[*at].is_away());
            for at in here {
                self.update(at, update)?;
            }
            self.update_away(&away, update)?;
            self.average()?;
            self.version += 1;
            self.updates += 1;
        }
        self.phase = Phase::Idle;
        Ok(StepReport {
            step: self.step,
            updates: self.updates,
            grad_norm,
            clip_coefficient: clip,
            skipped,
            loss_scale,
            bytes_sent: self.sent.total(),
            bytes_sent_across: self.sent.across,
            update_bytes_sent: self.whole.bytes_sent,
            weight_error: self.weight_error(),
            gradient_error: self.gradient_error(),
            gathered_bytes_peak: self.gathered_bytes_peak,
        })
    }

    /// What quantisation has taken from this rank's parameters in the step.
    fn weight_error(&self) -> f64 {
        let mut all = QuantisationError::default();
        self.units.handles().for_each(|handle| all.merge(handle.encoded.error));
        all.relative()
    }

    /// What quantisation has taken from the gradients that this rank has shown to others in the step.
    fn gradient_error(&self) -> f64 {
        let mut all = QuantisationError::default();
        let wires = self.units.handles().filter_map(|handle| handle.gradient_wire.as_ref());
        wires.for_each(|wire| all.merge(wire.error()));
        all.relative()
    }

    pub(crate) fn note(&mut self, unit: UnitId, kind: EventKind) {
        let round = match self.phase {
            Phase::Round { round, .. } | Phase::Step { round, .. } => round,
            Phase::Idle | Phase::Evaluation => 0,
        };
        self.events.push(Event { step: self.step, round, unit, kind });
    }
}
