//! One rank's part of a model, and the step that trains it.
//!
//! A step is `begin_step`, then for each round of micro-batches `begin_round`, forward and backward of the units,
//! `end_round`, and at last `end_step`, which clips and updates. Calls inside a round come from the middle of a tensor
//! library's graph and cannot return errors there: the first failure is kept, what follows computes with zeros, and
//! `end_step` returns it and applies nothing.

use std::sync::{Arc, OnceLock};

use shardwise_comm::ProcessGroup;
use shardwise_core::{FlatLayout, Purpose, RoundAssignment, ShardingStrategy, StepSchedule, max_partials};

use crate::Result;
use crate::coordinator::Coordinator;
use crate::error::EngineError;
use crate::events::{Event, EventKind, EventLog};
use crate::handle::{FlatParamHandle, HandleConfig, ParamState};
use crate::ledger::Ledger;
use crate::norm::{Norm, clip_coefficient};
use crate::optimizer::{DecayRule, OptimizerConfig, Update};
use crate::pool::{GatherPool, GradientPool};

/// Names one flat parameter of an engine: the root's or a unit's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UnitId(usize);

impl UnitId {
    /// The parameters outside every unit.
    pub const ROOT: UnitId = UnitId(0);

    /// The `index`-th unit of the module walk.
    pub fn unit(index: usize) -> Self {
        Self(index + 1)
    }

    /// The place in the module walk; meaningless for the root.
    pub(crate) fn index(self) -> usize {
        self.0.wrapping_sub(1)
    }

    /// Whether this is the root.
    pub fn is_root(self) -> bool {
        self == Self::ROOT
    }
}

/// How an engine trains.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EngineConfig {
    /// How state is spread over ranks.
    pub strategy: ShardingStrategy,
    /// The update rule.
    pub optimizer: OptimizerConfig,
    /// Which parameters decay.
    pub decay: DecayRule,
    /// The norm that a gradient is cut down to; `None` leaves it as it is.
    pub clip_norm: Option<f64>,
    /// Which norm that is.
    pub norm: Norm,
    /// Whether the next unit is gathered while one computes.
    pub prefetch: bool,
}

/// What a step did.
#[derive(Debug, Clone, PartialEq)]
pub struct StepReport {
    /// The step, counted from 1.
    pub step: u64,
    /// The norm of the whole gradient before clipping, equal on all ranks.
    pub grad_norm: f64,
    /// What the gradient was multiplied by.
    pub clip_coefficient: f32,
    /// Bytes of parameters and gradients that this rank sent to others.
    pub bytes_sent: u64,
    /// The most bytes of full parameters (root and units) that this rank held at a time.
    pub gathered_bytes_peak: u64,
}

/// What the engine is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    Idle,
    Step { schedule: StepSchedule, round: usize },
    Round { schedule: StepSchedule, round: usize },
    Evaluation,
}

impl Phase {
    fn name(self) -> &'static str {
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
    pub(crate) config: EngineConfig,
    /// The root first; without parameters it has no handle.
    pub(crate) root: Option<FlatParamHandle>,
    pub(crate) units: Vec<FlatParamHandle>,
    pub(crate) coordinator: Coordinator,
    pub(crate) gather_pool: GatherPool,
    pub(crate) root_pool: GatherPool,
    pub(crate) gradient_pool: GradientPool,
    pub(crate) root_gradient_pool: GradientPool,
    pub(crate) ledger: Ledger,
    pub(crate) events: EventLog,
    pub(crate) phase: Phase,
    pub(crate) step: u64,
    pub(crate) bytes_sent: u64,
    pub(crate) gathered_bytes: u64,
    pub(crate) gathered_bytes_peak: u64,
    pub(crate) failure: Arc<OnceLock<EngineError>>,
}

impl Engine {
    /// Allocates the shards of `root` (if it has parameters) and of `units`, all zero.
    ///
    /// # Errors
    /// When memory cannot be had.
    pub fn new(
        group: ProcessGroup,
        root: Option<FlatLayout>,
        units: Vec<FlatLayout>,
        config: EngineConfig,
    ) -> Result<Self> {
        let mut ledger = Ledger::default();
        let handle_config =
            HandleConfig { strategy: config.strategy, optimizer: config.optimizer, decay: config.decay };
        let rank = group.rank();
        let mut handle = |layout| {
            FlatParamHandle::new(layout, &group, &handle_config, &mut ledger)
                .map_err(|source| EngineError::Comm { rank, source })
        };
        let root = root.map(&mut handle).transpose()?;
        let units = units.into_iter().map(&mut handle).collect::<Result<Vec<_>>>()?;
        let largest = units.iter().map(|u| u.layout().padded_numel()).max().unwrap_or(0);
        // Freed after each use, any unit may need any slot; kept until backward, each unit keeps its own.
        let least_slot = if config.strategy.reshards_after_forward() { largest } else { 0 };
        Ok(Self {
            config,
            coordinator: Coordinator::new(units.len()),
            gather_pool: GatherPool::new(Purpose::GatheredUnits, least_slot),
            root_pool: GatherPool::new(Purpose::GatheredRoot, 0),
            gradient_pool: GradientPool::new(Purpose::UnitGradient, largest),
            root_gradient_pool: GradientPool::new(Purpose::RootGradient, 0),
            group,
            root,
            units,
            ledger,
            events: EventLog::default(),
            phase: Phase::Idle,
            step: 0,
            bytes_sent: 0,
            gathered_bytes: 0,
            gathered_bytes_peak: 0,
            failure: Arc::default(),
        })
    }

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

    /// Every flat parameter, in the order of collectives: the root, then the units.
    pub fn ids(&self) -> impl Iterator<Item = UnitId> + use<> {
        let root = self.root.as_ref().map(|_| UnitId::ROOT);
        root.into_iter().chain((0..self.units.len()).map(UnitId::unit))
    }

    /// A flat parameter; `None` for the root of a model that has all parameters in units.
    pub fn handle(&self, id: UnitId) -> Option<&FlatParamHandle> {
        if id.is_root() { self.root.as_ref() } else { self.units.get(id.index()) }
    }

    pub(crate) fn handle_mut(&mut self, id: UnitId) -> Option<&mut FlatParamHandle> {
        if id.is_root() { self.root.as_mut() } else { self.units.get_mut(id.index()) }
    }

    /// The owned parameters of a unit, to initialise or load them: elements [`FlatParamHandle::owned`].
    ///
    /// # Errors
    /// In the middle of a step, and when a peer is lost or late.
    pub fn owned_params(&mut self, id: UnitId) -> Result<&mut [f32]> {
        self.expect_idle("owned_params")?;
        let rank = self.group.rank();
        let Some(handle) = self.handle_mut(id) else { return Ok(&mut []) };
        let owned = handle.owned().len();
        let params = handle.params.writable().map_err(|source| EngineError::Comm { rank, source })?;
        Ok(&mut params[..owned])
    }

    /// Lets `read` see the whole flat parameter of a unit. A collective: every rank must call it.
    ///
    /// # Errors
    /// In the middle of a step, and when a peer is lost or late.
    pub fn with_full_params<T>(&mut self, id: UnitId, read: impl FnOnce(&[f32]) -> T) -> Result<T> {
        self.expect_idle("with_full_params")?;
        self.unshard(id)?;
        let Some(handle) = self.handle(id) else { return Ok(read(&[])) };
        let numel = handle.layout().numel();
        let result = match &handle.state {
            ParamState::Gathered(buffer) => read(&buffer.as_slice()[..numel]),
            _ => read(&handle.params.as_slice()[..numel]),
        };
        self.reshard(id);
        Ok(result)
    }

    /// Begins a step of `micro_batches` micro-batches over all ranks: gathers the root.
    ///
    /// # Errors
    /// When there are fewer micro-batches than ranks, in the middle of a step, after a failure, or when a peer is lost.
    pub fn begin_step(&mut self, micro_batches: usize) -> Result<StepSchedule> {
        self.expect_idle("begin_step")?;
        let schedule = StepSchedule::of_micro_batches(micro_batches, self.group.size())?;
        let partials = max_partials(schedule.rounds());
        let rank = self.group.rank();
        for handle in self.root.iter_mut().chain(&mut self.units) {
            handle
                .reserve_partials(partials, &self.group, &mut self.ledger)
                .map_err(|source| EngineError::Comm { rank, source })?;
        }
        self.step += 1;
        (self.bytes_sent, self.gathered_bytes_peak) = (0, 0);
        self.phase = Phase::Step { schedule, round: 0 };
        self.gather_ahead_of_round()?;
        Ok(schedule)
    }

    /// Starts what the first unit needs along with the root, then waits for the root.
    fn gather_ahead_of_round(&mut self) -> Result<()> {
        self.start_unshard(UnitId::ROOT)?;
        if let Some(first) = self.coordinator.first() {
            self.prefetch(first)?;
        }
        self.unshard(UnitId::ROOT)
    }

    /// Begins the next round and says what this rank computes in it.
    ///
    /// # Errors
    /// Outside a step, or when all rounds are done.
    pub fn begin_round(&mut self) -> Result<RoundAssignment> {
        match self.phase {
            Phase::Step { schedule, round } if round < schedule.rounds() => {
                // A rank that computes writes the root's gradient before its units' backward, one that idles after it.
                // Only here do all ranks finish the last round's reduction at the same place in their order.
                self.finish_reduce(UnitId::ROOT)?;
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
        let result = self.unshard(unit);
        self.keep_failure(result);
        let next = self.coordinator.forward(unit);
        if let Some(handle) = self.handle_mut(unit) {
            handle.users += 1;
            handle.calls += usize::from(training);
        }
        self.note(unit, EventKind::Forward);
        if let Some(next) = next.filter(|next| *next != unit) {
            let result = self.prefetch(next);
            self.keep_failure(result);
        }
    }

    /// Frees `unit` after its forward if the strategy says so, and starts the first gather of backward after the last.
    pub fn leave_forward(&mut self, unit: UnitId) {
        let training = matches!(self.phase, Phase::Round { .. });
        if self.release_use(unit) && (self.config.strategy.reshards_after_forward() || !training) {
            self.reshard(unit);
        }
        if training {
            if let Some(first) = self.coordinator.turning_point() {
                let result = self.prefetch(first);
                self.keep_failure(result);
            }
        } else if self.coordinator.is_complete() {
            self.coordinator.end_round();
        }
    }

    /// Gathers `unit` again for the backward of one of its calls and starts what is expected next.
    pub fn enter_backward(&mut self, unit: UnitId) {
        let result = self.unshard(unit);
        self.keep_failure(result);
        if let Some(handle) = self.handle_mut(unit) {
            handle.users += 1;
        }
        self.note(unit, EventKind::Backward);
        if let Some(next) = self.coordinator.backward(unit).filter(|next| *next != unit) {
            let result = self.prefetch(next);
            self.keep_failure(result);
        }
    }

    /// Lets parameter `index` of `unit` write its gradient: `write(window, overwrite)`, where `overwrite` says that the
    /// window's contents are stale.
    pub fn write_gradient(&mut self, unit: UnitId, index: usize, write: impl FnOnce(&mut [f32], bool)) {
        let result = self.prepare_gradient(unit).and_then(|()| {
            let rank = self.group.rank();
            let Some(handle) = self.handle_mut(unit) else { return Ok(()) };
            handle.write_gradient(index, write).map_err(|source| EngineError::Comm { rank, source })
        });
        self.keep_failure(result);
    }

    /// Ends the backward of one call of `unit`; after the last, lends its full gradient and frees its parameters.
    pub fn leave_backward(&mut self, unit: UnitId) {
        let Some(handle) = self.handle_mut(unit) else { return };
        handle.calls = handle.calls.saturating_sub(1);
        let last = handle.calls == 0;
        if last {
            let result = self.start_reduce(unit);
            self.keep_failure(result);
        }
        if self.release_use(unit) && (last || self.config.strategy.reshards_after_forward()) {
            self.reshard(unit);
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
        let leftover: Vec<UnitId> =
            self.ids().filter(|id| self.handle(*id).is_some_and(|h| h.calls > 0)).collect();
        for unit in leftover {
            if let Some(handle) = self.handle_mut(unit) {
                handle.calls = 0;
            }
            self.start_reduce(unit)?;
            self.reshard(unit);
        }
        if self.root.is_some() {
            self.start_reduce(UnitId::ROOT)?;
        }
        self.coordinator.end_round();
        self.drop_unused_gathers();
        self.phase = Phase::Step { schedule, round: round + 1 };
        if round + 1 < schedule.rounds()
            && let Some(first) = self.coordinator.first()
        {
            self.prefetch(first)?;
        }
        self.check_failure()
    }

    /// Takes part in a round without computing: walks the expected order and contributes zeros.
    ///
    /// # Errors
    /// Outside a round, or the first failure of the step.
    pub fn idle_round(&mut self) -> Result<()> {
        let order = self.coordinator.expected().to_vec();
        for unit in &order {
            self.enter_forward(*unit);
            self.leave_forward(*unit);
        }
        for unit in order.iter().rev() {
            self.enter_backward(*unit);
            self.leave_backward(*unit);
        }
        self.end_round()
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
        self.reshard(UnitId::ROOT);
        self.finish_reductions()?;
        let grad_norm = self.finish_gradients(schedule.micro_batches())?;
        let clip = clip_coefficient(grad_norm, self.config.clip_norm);
        let update = Update { config: self.config.optimizer, lr, count: 0, clip, decay: false };
        for id in self.ids() {
            self.update(id, update)?;
        }
        self.phase = Phase::Idle;
        Ok(StepReport {
            step: self.step,
            grad_norm,
            clip_coefficient: clip,
            bytes_sent: self.bytes_sent,
            gathered_bytes_peak: self.gathered_bytes_peak,
        })
    }

    /// Begins an evaluation: gathers the root; units are gathered for their calls and freed after them.
    ///
    /// # Errors
    /// In the middle of a step, after a failure, or when a peer is lost.
    pub fn begin_evaluation(&mut self) -> Result<()> {
        self.expect_idle("begin_evaluation")?;
        self.phase = Phase::Evaluation;
        self.gather_ahead_of_round()
    }

    /// Ends an evaluation and frees everything gathered.
    ///
    /// # Errors
    /// The first failure, or outside an evaluation.
    pub fn end_evaluation(&mut self) -> Result<()> {
        if self.phase != Phase::Evaluation {
            return Err(self.wrong_state(UnitId::ROOT, "end_evaluation", "begin an evaluation first"));
        }
        self.coordinator.end_round();
        self.drop_unused_gathers();
        self.reshard(UnitId::ROOT);
        self.phase = Phase::Idle;
        self.check_failure()
    }

    pub(crate) fn note(&mut self, unit: UnitId, kind: EventKind) {
        let round = match self.phase {
            Phase::Round { round, .. } | Phase::Step { round, .. } => round,
            Phase::Idle | Phase::Evaluation => 0,
        };
        self.events.push(Event { step: self.step, round, unit, kind });
    }

    fn wrong_state(&self, unit: UnitId, call: &'static str, remedy: &'static str) -> EngineError {
        let unit = self.handle(unit).map_or("root".to_string(), FlatParamHandle::summary);
        EngineError::State { unit, state: self.phase.name(), call, remedy }
    }

    fn expect_idle(&self, call: &'static str) -> Result<()> {
        self.check_failure()?;
        if self.phase == Phase::Idle {
            return Ok(());
        }
        Err(self.wrong_state(UnitId::ROOT, call, "end the step or the evaluation first"))
    }

    fn check_failure(&self) -> Result<()> {
        self.failure.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    pub(crate) fn keep_failure(&mut self, result: Result<()>) {
        if let Err(error) = result {
            // Only the first counts: later ones follow from it.
            let _ = self.failure.set(error);
        }
    }
}
