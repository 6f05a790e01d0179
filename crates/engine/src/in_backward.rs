//! The step inside backward: a unit is updated as soon as its gradient is summed, and one gradient shard serves all.
//!
//! A rank's parameters may change only when no peer reads them any more. In f32 the shards themselves are lent for the
//! whole step, so this works where something else is lent (parameters that travel in less than f32) or nothing (one rank).
//! The unit itself is not used again in the step: its last backward call has been, and another call is an error.

use shardwise_comm::SharedBuffer;
use shardwise_core::{OptimizerKind, Purpose, StepSchedule};

use crate::Result;
use crate::config::{Divisor, EngineConfig, NonFinite, UnitId};
use crate::engine::{Engine, Phase};
use crate::error::EngineError;
use crate::handle::FlatParamHandle;
use crate::norm::PartialNorm;
use crate::optimizer::StepUpdate;
use crate::scale::LossScale;
use crate::unit::{Place, Units};

/// What a step inside backward keeps until the step's end.
#[derive(Debug, Default)]
pub(crate) struct InBackward {
    lr: Option<f64>,
    /// This rank's part of the norm.
    norm: PartialNorm,
    /// The first element that is not finite.
    bad: Option<(String, f32)>,
    /// The gradient shard, between two units.
    shard: Option<SharedBuffer>,
}

impl InBackward {
    /// The state of an engine that is configured so.
    ///
    /// # Errors
    /// When the configuration forbids it, naming the setting.
    pub(crate) fn new(config: &EngineConfig, sharers: usize, units: &Units) -> Result<Option<Self>> {
        if !config.step_in_backward {
            return Ok(None);
        }
        config.check_step_in_backward(sharers)?;
        let mut states = units.handles().map(|handle| &handle.state_of_update);
        if states.any(|state| !state.factored.is_empty() || !state.matrices.is_empty()) {
            return Err(refusal(WHOLE));
        }
        let replicated = |handle: &&FlatParamHandle| handle.is_trainable() && handle.layout().is_replicated();
        if sharers > 1 && units.handles().any(|handle| replicated(&handle)) {
            return Err(refusal(
                "ranks gather the gradients of parameters that they all keep whole (ignored or persistent ones): shard them",
            ));
        }
        Ok(Some(Self::default()))
    }
}

/// Why some optimizers cannot step inside backward.
const WHOLE: &str = "Adafactor and Muon look at whole parameters: choose another optimizer";

fn refusal(why: &str) -> EngineError {
    EngineError::Usage(format!("step_in_backward cannot be had: {why}"))
}

impl EngineConfig {
    /// Refuses [`EngineConfig::step_in_backward`] where it cannot be had, with `sharers` ranks to one copy of the model.
    ///
    /// # Errors
    /// Naming the setting that forbids it.
    pub fn check_step_in_backward(&self, sharers: usize) -> Result<()> {
        let whole = matches!(self.optimizer.kind(), OptimizerKind::Adafactor | OptimizerKind::Muon);
        let refusals = [
            (
                self.clip_norm.is_some(),
                "a gradient is clipped by the norm of all units, which is known at the end only: leave clip_norm out",
            ),
            (
                matches!(self.loss_scale, LossScale::Dynamic(_)),
                "a dynamic loss scale skips steps, which is decided at the end: use a fixed loss_scale, or bf16",
            ),
            (
                self.non_finite != NonFinite::Error,
                "what becomes of a gradient that is not finite is decided at the end: set non_finite to \"error\"",
            ),
            (
                self.divisor == Divisor::Weights,
                "the sum of weights is known at the end only: divide by a number",
            ),
            (whole, WHOLE),
            (
                self.offload.is_any(),
                "what rests elsewhere is updated tile by tile at the end of a step: set offload.parameters and \
                 offload.optimizer to \"none\"",
            ),
            (
                sharers > 1 && !self.strategy.is_sharded(),
                "no_shard gathers gradients to update all parameters: choose a strategy that shards them",
            ),
            (
                sharers > 1 && self.wire.weights.is_some(),
                "peers read in f32, for the whole step, what cannot be quantised: leave quantized_weights out",
            ),
            (
                sharers > 1 && !self.precision.param_dtype.is_low(),
                "peers read parameters in place for the whole step when they travel in f32: set param_dtype to bf16 or f16",
            ),
        ];
        match refusals.into_iter().find(|(applies, _)| self.step_in_backward && *applies) {
            Some((_, why)) => Err(refusal(why)),
            None => Ok(()),
        }
    }
}

impl Engine {
    /// As [`Engine::begin_step`], with the learning rate that [`Engine::end_step`] will be given: a step inside backward
    /// needs it.
    ///
    /// # Errors
    /// As [`Engine::begin_step`].
    pub fn begin_step_at(&mut self, micro_batches: usize, lr: f64) -> Result<StepSchedule> {
        if let Some(state) = &mut self.in_backward {
            state.lr = Some(lr);
        }
        self.begin_step(micro_batches)
    }

    /// Refuses a step that cannot be taken inside backward.
    pub(crate) fn begin_in_backward(&mut self, schedule: StepSchedule) -> Result<()> {
        let Some(state) = &mut self.in_backward else { return Ok(()) };
        if state.lr.is_none() {
            return Err(EngineError::Usage(
                "step_in_backward needs the learning rate before the backward; begin the step with begin_step_at".into(),
            ));
        }
        if schedule.rounds() > 1 {
            return Err(EngineError::Usage(format!(
                "step_in_backward needs one micro-batch a rank and step, but there are {} on {} ranks; make micro-batches \
                 larger, or leave step_in_backward out",
                schedule.micro_batches(),
                schedule.ranks()
            )));
        }
        (state.norm, state.bad) = (PartialNorm::default(), None);
        self.units.begin_step();
        Ok(())
    }

    /// Ends what began with [`Engine::begin_in_backward`].
    pub(crate) fn end_in_backward(&mut self, lr: f64) -> Result<()> {
        match self.in_backward.as_mut().and_then(|state| state.lr.take()) {
            Some(begun) if begun != lr => Err(EngineError::Usage(format!(
                "the step began with learning rate {begun} and was to end with {lr}; step_in_backward has used the first"
            ))),
            _ => Ok(()),
        }
    }

    /// Gives the one gradient shard to the flat parameter whose gradient is summed next; false without a step inside
    /// backward.
    pub(crate) fn lend_gradient_shard(&mut self, at: Place) -> Result<bool> {
        if self.in_backward.is_none() {
            return Ok(false);
        }
        if !self.units[at].partials.needs_buffer() {
            return Ok(true);
        }
        let buffer = match self.in_backward.as_mut().and_then(|state| state.shard.take()) {
            Some(buffer) => buffer,
            None => {
                let trained = self.units.handles().filter(|handle| handle.is_trainable());
                let numel = trained.map(|handle| handle.layout().shard_numel()).max().unwrap_or(0);
                self.ledger.add(Purpose::GradientShards, numel);
                let buffer = self.group.allocate(numel);
                self.comm(buffer)?
            }
        };
        self.units[at].partials.give(buffer);
        Ok(true)
    }

    /// Updates a flat parameter whose gradient has just been summed, if steps are taken inside backward.
    pub(crate) fn update_in_backward(&mut self, at: Place) -> Result<()> {
        let (Phase::Round { schedule, .. } | Phase::Step { schedule, .. }) = self.phase else {
            return Ok(());
        };
        let Some(mut state) = self.in_backward.take() else { return Ok(()) };
        let result = self.update_now(at, schedule.micro_batches(), &mut state);
        self.in_backward = Some(state);
        result
    }

    fn update_now(&mut self, at: Place, micro_batches: usize, state: &mut InBackward) -> Result<()> {
        let (norm, divisor) = (self.config.norm, self.post_divisor(micro_batches)?);
        let measured = self.units[at].finish_gradient(divisor, norm);
        if let Some(part) = self.comm(measured)? {
            state.norm = norm.join(state.norm, part);
            if norm.of_parts([part]).is_finite() && state.bad.is_none() {
                let lr = state.lr.unwrap_or_default();
                self.update(at, StepUpdate { lr, clip: 1.0 })?;
            } else if state.bad.is_none() {
                state.bad = self.units[at].first_non_finite();
            }
            self.units[at].discard_gradient();
        }
        state.shard = self.units[at].partials.take_free();
        Ok(())
    }

    /// This rank's part of the norm of what has been updated already.
    pub(crate) fn norm_in_backward(&mut self) -> PartialNorm {
        self.in_backward.as_mut().map(|state| std::mem::take(&mut state.norm)).unwrap_or_default()
    }

    /// The first element that was not finite and is gone already.
    pub(crate) fn bad_in_backward(&mut self) -> Option<(String, f32)> {
        self.in_backward.as_mut().and_then(|state| state.bad.take())
    }

    /// Refuses the use of a unit that is or will be updated in this round.
    pub(crate) fn expect_not_updated(&self, unit: UnitId) -> Result<()> {
        if self.in_backward.is_none()
            || !self.units[unit].complete
            || !matches!(self.phase, Phase::Round { .. })
        {
            return Ok(());
        }
        Err(self.wrong_state(
            unit,
            "use after its update",
            "with step_in_backward a unit's calls must all come before its backward: leave step_in_backward out",
        ))
    }
}
