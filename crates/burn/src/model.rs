//! A Burn module taken apart into shards, and its training step.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};

use burn::module::Module;
use burn::tensor::Tensor;
use shardwise_comm::{CommError, ProcessGroup};
use shardwise_core::{FlatLayout, RoundAssignment};
use shardwise_engine::{
    EngineConfig, Event, FileAccess, Ledger, ParamGroups, StateSlice, StepReport, TierTraffic,
};

use crate::access::OpenScopes;
use crate::assemble::RootParam;
use crate::error::ShardError;
use crate::init::Init;
use crate::params::Params;
use crate::source::ParamSource;
use crate::unit::{SharedEngine, WeakEngine, primitive};

/// How a model is sharded and trained.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ShardConfig {
    /// Strategy, optimizer, clipping, prefetch.
    pub engine: EngineConfig,
    /// Whether a unit keeps only its input and computes its forward again in backward.
    pub recompute: bool,
    /// The seed of initial values: each parameter draws from a stream of its own, keyed by its path.
    pub seed: u64,
}

impl Default for ShardConfig {
    /// `full_shard`, AdamW with PyTorch's constants, no clipping, prefetch, no recomputation.
    fn default() -> Self {
        Self { engine: EngineConfig::default(), recompute: false, seed: 0 }
    }
}

/// What a step did.
#[derive(Debug, Clone, PartialEq)]
pub struct StepOutcome {
    /// The mean loss over the step's micro-batches, equal on all ranks.
    pub loss: f64,
    /// Norm, clipping and bytes.
    pub report: StepReport,
}

/// Takes the weights of a step's micro-batches ([`ShardedModel::weights`]), for as long as the model lives.
#[derive(Debug, Clone)]
pub struct StepWeights(Arc<Mutex<WeakEngine>>);

impl StepWeights {
    fn of(engine: &SharedEngine) -> Self {
        Self(Arc::new(Mutex::new(engine.downgrade())))
    }

    /// Adds the weight of a micro-batch. Without the model there is no step that it could count in.
    pub fn add(&self, weight: f64) {
        let engine = self.0.lock().unwrap_or_else(PoisonError::into_inner).upgrade();
        if let Some(engine) = engine {
            engine.lock().add_weight(weight);
        }
    }

    /// Feeds `engine` from now on.
    fn point_to(&self, engine: &SharedEngine) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = engine.downgrade();
    }
}

/// One rank's part of a model.
#[derive(Debug)]
pub struct ShardedModel<M> {
    /// The module as a training step sees it: the root's parameters are leaves of the graph.
    training: M,
    /// The module as an evaluation sees it: without autodiff.
    evaluation: M,
    pub(crate) engine: SharedEngine,
    /// The handles that were given out share it; it follows the model from engine to engine.
    weights: StepWeights,
    root: Vec<RootParam>,
    group: ProcessGroup,
    pub(crate) params: Params,
    init: Init,
    pub(crate) scopes: OpenScopes,
}

impl<M: Module> ShardedModel<M> {
    /// Takes `module` apart: each rank of `group` keeps its shard of every parameter. Values come from `source` where it
    /// has them, otherwise from the module (its initialisers, seeded by path, or the values it already has); one
    /// parameter at a time is whole.
    ///
    /// # Errors
    /// When the module's parameters cannot be sharded, ranks disagree about them, or values cannot be had.
    pub fn new(
        group: ProcessGroup,
        module: M,
        config: ShardConfig,
        source: &dyn ParamSource,
    ) -> Result<Self, ShardError> {
        Init::new(config).shard(group, module, source)
    }

    /// As [`ShardedModel::new`], with update rules of their own for some parameters; tied parameters are known by the path
    /// that is met first.
    ///
    /// # Errors
    /// As [`ShardedModel::new`], and when a rule is impossible or ranks disagree about it.
    pub fn with_groups(
        group: ProcessGroup,
        module: M,
        config: ShardConfig,
        source: &dyn ParamSource,
        groups: &ParamGroups,
    ) -> Result<Self, ShardError> {
        Init::new(config).groups(groups.clone()).shard(group, module, source)
    }

    pub(crate) fn assemble(
        (training, evaluation): (M, M),
        engine: SharedEngine,
        root: Vec<RootParam>,
        params: Params,
        init: Init,
    ) -> Self {
        let group = engine.lock().group().clone();
        let (weights, scopes) = (StepWeights::of(&engine), OpenScopes::default());
        Self { training, evaluation, engine, weights, root, group, params, init, scopes }
    }

    /// How the model was taken apart.
    pub(crate) fn init(&self) -> &Init {
        &self.init
    }

    /// Becomes `new`, a model of the same parameters.
    pub(crate) fn replace_with(&mut self, new: Self) {
        self.weights.point_to(&new.engine);
        *self = Self { weights: self.weights.clone(), ..new };
    }

    /// The module with windows in the parameters' places, without autodiff.
    pub(crate) fn evaluation(&self) -> &M {
        &self.evaluation
    }

    /// The ranks that share the model.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Bytes held by the engine.
    pub fn ledger(&self) -> Ledger {
        self.engine.lock().ledger().clone()
    }

    /// How what rests in files is read and written; `None` when nothing does.
    pub fn file_access(&self) -> Option<FileAccess> {
        self.engine.lock().file_access()
    }

    /// What this rank has moved to and from where it rests, since the model was made.
    pub fn tier_traffic(&self) -> TierTraffic {
        self.engine.lock().tier_traffic()
    }

    /// The flat parameters: the root's first, if it has any, then the units'. What is frozen is one of its own.
    pub fn layouts(&self) -> Vec<FlatLayout> {
        let engine = self.engine.lock();
        engine.ids().flat_map(|id| engine.parts(id)).map(|part| part.layout().clone()).collect()
    }

    /// Switches the event log on (empty) or off.
    pub fn log_events(&mut self, on: bool) {
        self.engine.lock().log_events(on);
    }

    /// Adds to the weight of this rank's micro-batches of the step, for `Divisor::Weights`: call it in the loss, with the
    /// number of tokens that the loss sums over.
    pub fn weights(&self) -> StepWeights {
        self.weights.clone()
    }

    /// Takes the events since the last call.
    pub fn take_events(&mut self) -> Vec<Event> {
        self.engine.lock().take_events()
    }

    /// Trains one step of `micro_batches` micro-batches over all ranks. `loss(module, m)` computes the mean loss of
    /// micro-batch `m`; it is called for those that fall to this rank. Ranks may use different units in it, unless gathers
    /// take all ranks: with nodes, and where parameters rest elsewhere. There a rank that leaves a unit out, or calls another,
    /// is an error on all that names both sides.
    ///
    /// # Errors
    /// When communication fails on any rank, what rests elsewhere cannot be moved, or the gradient is not finite; nothing is
    /// updated then.
    pub fn step(
        &mut self,
        micro_batches: usize,
        lr: f64,
        mut loss: impl FnMut(&M, usize) -> Tensor<1>,
    ) -> Result<StepOutcome, ShardError> {
        match self.try_step(micro_batches, lr, |module, m| Ok::<_, Infallible>(loss(module, m))) {
            Ok(outcome) => Ok(outcome),
            Err(StepError::Shard(error)) => Err(error),
            Err(StepError::Loss(never)) => match never {},
        }
    }

    /// As [`ShardedModel::step`], for a loss that can fail; a failure ends the step on every rank.
    ///
    /// # Errors
    /// As [`ShardedModel::step`], and whatever `loss` returns.
    pub fn try_step<E: std::fmt::Display>(
        &mut self,
        micro_batches: usize,
        lr: f64,
        mut loss: impl FnMut(&M, usize) -> Result<Tensor<1>, E>,
    ) -> Result<StepOutcome, StepError<E>> {
        let schedule = self.engine.lock().begin_step_at(micro_batches, lr)?;
        let mut losses = Vec::new();
        for _ in 0..schedule.rounds() {
            let assignment = self.engine.lock().begin_round()?;
            match assignment {
                RoundAssignment::Idle => self.engine.lock().idle_round()?,
                RoundAssignment::Compute(m) => {
                    let value = loss(&self.training, m).map_err(|error| {
                        self.tell_others(&error.to_string());
                        StepError::Loss(error)
                    })?;
                    losses.push(self.backward(value)?);
                }
            }
        }
        let report = self.engine.lock().end_step(lr)?;
        let loss = self.mean_loss(&losses, schedule.micro_batches())?;
        Ok(StepOutcome { loss, report })
    }

    /// Runs the backward of one micro-batch and returns its loss.
    fn backward(&self, loss: Tensor<1>) -> Result<f32, ShardError> {
        let value = loss.clone().into_data().iter::<f32>().next().unwrap_or(f32::NAN);
        if loss.is_tracked() {
            let scale = self.engine.lock().loss_scale();
            let scaled = if scale == 1.0 { loss } else { loss.mul_scalar(scale) };
            let mut gradients = primitive(scaled).backward();
            for param in &self.root {
                if let Some(gradient) = param.leaf.grad_remove(&mut gradients) {
                    param.sink.take_in(gradient);
                }
            }
        }
        self.engine.lock().end_round()?;
        Ok(value)
    }

    /// The mean of the micro-batches' losses, added in their order.
    fn mean_loss(&self, own: &[f32], micro_batches: usize) -> Result<f64, ShardError> {
        let rounds = micro_batches.div_ceil(self.group.size());
        let mut bytes: Vec<u8> = own.iter().flat_map(|loss| loss.to_le_bytes()).collect();
        bytes.resize(rounds * size_of::<f32>(), 0);
        let all = self.group.all_gather_bytes("losses", &bytes)?;
        let loss_of = |m: usize| {
            let at = m / self.group.size() * size_of::<f32>();
            let bytes = all[m % self.group.size()].get(at..at + size_of::<f32>());
            bytes.and_then(|b| b.try_into().ok()).map_or(f64::NAN, |b| f64::from(f32::from_le_bytes(b)))
        };
        Ok((0..micro_batches).map(loss_of).sum::<f64>() / micro_batches as f64)
    }

    /// Lets the other ranks fail too, instead of waiting for this one.
    fn tell_others(&self, message: &str) {
        let transport = self.group.transport();
        transport.fail(&CommError::Peer { rank: transport.rank(), message: message.to_string() });
    }

    /// Computes with the full parameters and without autodiff. A collective: every rank must call it. In it ranks call
    /// units each at its own pace, different ones or none. Where parameters rest elsewhere
    /// ([`shardwise_core::Offload::parameters`]) each gather takes all ranks, so they wait for each other's calls: a rank that
    /// is done serves the others until the last one is, and the slowest sets the pace.
    ///
    /// # Errors
    /// When communication fails on any rank.
    pub fn evaluate<T>(&mut self, compute: impl FnOnce(&M) -> T) -> Result<T, ShardError> {
        self.engine.lock().begin_evaluation()?;
        let result = compute(&self.evaluation);
        self.engine.lock().end_evaluation()?;
        Ok(result)
    }

    /// Lets `work` see the averages of the weights in their place: [`EngineConfig::ema_decay`]. It may evaluate and
    /// export, but not train. Every rank must call it.
    ///
    /// # Errors
    /// After a failure, when a peer is lost or late, and whatever `work` returns.
    pub fn with_averages<T, E: From<ShardError>>(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<T, E>,
    ) -> Result<T, E> {
        self.engine.lock().swap_averages().map_err(ShardError::from)?;
        let result = work(self);
        let back = self.engine.lock().swap_averages().map_err(ShardError::from);
        let value = result?;
        back?;
        Ok(value)
    }

    /// Shows every optimizer statistic of what this rank keeps, to save or to load it: each names its parameter by path.
    ///
    /// # Errors
    /// After a failure.
    pub fn each_state(&mut self, see: impl FnMut(StateSlice<'_>)) -> Result<(), ShardError> {
        Ok(self.engine.lock().each_state(see)?)
    }

    /// Shows every parameter whole, one unit at a time, in the order of the module walk: `see(path, shape, values)`. A
    /// collective: every rank must call it, and sees the same.
    ///
    /// # Errors
    /// When communication fails on any rank.
    pub fn export(&mut self, mut see: impl FnMut(&str, &[usize], &[f32])) -> Result<(), ShardError> {
        let mut engine = self.engine.lock();
        for id in engine.ids().collect::<Vec<_>>() {
            engine.with_full_params(id, |layout, flat| {
                layout.params().iter().for_each(|param| see(&param.path, &param.shape, &flat[param.range()]));
            })?;
        }
        Ok(())
    }
}

/// Why a step failed: in the sharded run, or in the caller's loss.
#[derive(Debug, thiserror::Error)]
pub enum StepError<E> {
    /// The sharded run.
    #[error(transparent)]
    Shard(#[from] ShardError),
    /// The caller's loss.
    #[error("{0}")]
    Loss(E),
}

impl<E> From<shardwise_engine::EngineError> for StepError<E> {
    fn from(error: shardwise_engine::EngineError) -> Self {
        StepError::Shard(error.into())
    }
}
