//! A Burn module taken apart into shards, and its training step.

use std::collections::{HashMap, HashSet};
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::Flex;
use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{Device, Tensor};
use shardwise_comm::{CommError, ProcessGroup};
use shardwise_core::{FlatLayout, RoundAssignment, ShardingStrategy, seed_for};
use shardwise_engine::{
    DecayRule, Engine, EngineConfig, Event, Ledger, Norm, OptimizerConfig, StepReport, UnitId,
};

use crate::error::ShardError;
use crate::sink::{self, SinkGuard};
use crate::source::ParamSource;
use crate::unit::{AdTensor, ParamSink, SharedEngine, UnitLink, constant, from_primitive, primitive};
use crate::view::ParamView;
use crate::walk::{Found, FoundParam};

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
        let optimizer = OptimizerConfig::AdamW { betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.01 };
        Self {
            engine: EngineConfig {
                strategy: ShardingStrategy::FullShard,
                optimizer,
                decay: DecayRule::MatricesOnly,
                clip_norm: None,
                norm: Norm::L2,
                prefetch: true,
            },
            recompute: false,
            seed: 0,
        }
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

/// One rank's part of a model.
#[derive(Debug)]
pub struct ShardedModel<M> {
    /// The module as a training step sees it: the root's parameters are leaves of the graph.
    training: M,
    /// The module as an evaluation sees it: without autodiff.
    evaluation: M,
    engine: SharedEngine,
    root: Vec<RootParam>,
    group: ProcessGroup,
}

/// A parameter of the root: a leaf for the whole run.
#[derive(Debug)]
struct RootParam {
    leaf: AdTensor,
    sink: Arc<ParamSink>,
    _registered: SinkGuard,
}

/// Burn draws initial values from one generator for the whole process: ranks that are threads take turns.
static INITIALISING: Mutex<()> = Mutex::new(());

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
        let found = Found::in_module(&module)?;
        check_params(&found)?;
        let world = group.size();
        let specs = |unit: Option<usize>| -> Vec<_> {
            found.params.iter().filter(|p| p.unit == unit).map(|p| p.spec.clone()).collect()
        };
        let root_specs = specs(None);
        let root =
            if root_specs.is_empty() { None } else { Some(FlatLayout::build("root", &root_specs, world)?) };
        let units = (0..found.units.len())
            .map(|i| FlatLayout::build(found.units[i].name.clone(), &specs(Some(i)), world))
            .collect::<Result<Vec<_>, _>>()?;
        group.check_agreement("models", &describe(root.iter().chain(&units), &config))?;
        let engine = Engine::new(group.clone(), root, units, config.engine)?;
        Self::assemble(group, module, &found, engine, config, source)
    }

    fn assemble(
        group: ProcessGroup,
        module: M,
        found: &Found,
        mut engine: Engine,
        config: ShardConfig,
        source: &dyn ParamSource,
    ) -> Result<Self, ShardError> {
        let places = places(found, &engine);
        let done = HashSet::new();
        let mut fill =
            Fill { engine: &mut engine, places: &places, source, seed: config.seed, done, error: None };
        let evaluation = module.map(&mut fill);
        if let Some(error) = fill.error {
            return Err(error);
        }
        let shared = SharedEngine::new(engine);
        let anchor_value = burn::tensor::Tensor::<1>::zeros([1], &Device::flex().autodiff());
        let anchor = primitive(anchor_value.require_grad());
        for (index, unit) in found.units.iter().enumerate() {
            let link = link(&shared, UnitId::unit(index), &places, config.recompute, &anchor);
            unit.slot.set_link(Arc::new(link));
        }
        let mut leaves = RootLeaves { engine: &shared, places: &places, leaves: HashMap::new() };
        let training = evaluation.clone().map(&mut leaves);
        let mut root: Vec<RootParam> = leaves.leaves.into_values().collect();
        root.sort_by_key(|param| param.sink.index);
        Ok(Self { training, evaluation, engine: shared, root, group })
    }

    /// The ranks that share the model.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Bytes held by the engine.
    pub fn ledger(&self) -> Ledger {
        self.engine.lock().ledger().clone()
    }

    /// The layouts of the root (first, if it has parameters) and the units.
    pub fn layouts(&self) -> Vec<FlatLayout> {
        let engine = self.engine.lock();
        engine.ids().filter_map(|id| engine.handle(id)).map(|handle| handle.layout().clone()).collect()
    }

    /// Switches the event log on (empty) or off.
    pub fn log_events(&mut self, on: bool) {
        self.engine.lock().log_events(on);
    }

    /// Takes the events since the last call.
    pub fn take_events(&mut self) -> Vec<Event> {
        self.engine.lock().take_events()
    }

    /// Trains one step of `micro_batches` micro-batches over all ranks. `loss(module, m)` computes the mean loss of
    /// micro-batch `m`; it is called for those that fall to this rank.
    ///
    /// # Errors
    /// When communication fails on any rank, or the gradient is not finite; nothing is updated then.
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
        let schedule = self.engine.lock().begin_step(micro_batches)?;
        let mut losses = Vec::with_capacity(schedule.rounds());
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
            let mut gradients = primitive(loss).backward();
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

    /// Computes with the full parameters and without autodiff. A collective: every rank must call it, and call the same
    /// units in it.
    ///
    /// # Errors
    /// When communication fails on any rank.
    pub fn evaluate<T>(&mut self, compute: impl FnOnce(&M) -> T) -> Result<T, ShardError> {
        self.engine.lock().begin_evaluation()?;
        let result = compute(&self.evaluation);
        self.engine.lock().end_evaluation()?;
        Ok(result)
    }

    /// Shows every parameter whole, one unit at a time, in the order of the module walk: `see(path, shape, values)`. A
    /// collective: every rank must call it, and sees the same.
    ///
    /// # Errors
    /// When communication fails on any rank.
    pub fn export(&mut self, mut see: impl FnMut(&str, &[usize], &[f32])) -> Result<(), ShardError> {
        let mut engine = self.engine.lock();
        for id in engine.ids().collect::<Vec<_>>() {
            let params = engine.handle(id).map(|h| h.layout().params().to_vec()).unwrap_or_default();
            engine.with_full_params(id, |flat| {
                params.iter().for_each(|param| see(&param.path, &param.shape, &flat[param.range()]));
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

/// The flat parameters that `module` has over `world_size` ranks: the root's first, if it has parameters, then the units'
/// in the order of the module walk. Nothing is initialised.
///
/// # Errors
/// When the module's parameters cannot be sharded.
pub fn model_layouts<M: Module>(module: &M, world_size: usize) -> Result<Vec<FlatLayout>, ShardError> {
    let (root, units) = layouts(&Found::in_module(module)?, world_size)?;
    Ok(root.into_iter().chain(units).collect())
}

fn layouts(found: &Found, world_size: usize) -> Result<(Option<FlatLayout>, Vec<FlatLayout>), ShardError> {
    check_params(found)?;
    let specs = |unit: Option<usize>| -> Vec<_> {
        found.params.iter().filter(|p| p.unit == unit).map(|p| p.spec.clone()).collect()
    };
    let root_specs = specs(None);
    let root =
        if root_specs.is_empty() { None } else { Some(FlatLayout::build("root", &root_specs, world_size)?) };
    let units = (0..found.units.len())
        .map(|i| FlatLayout::build(found.units[i].name.clone(), &specs(Some(i)), world_size))
        .collect::<Result<Vec<_>, _>>()?;
    Ok((root, units))
}

/// Where a parameter lies: its unit, its index there, its window.
#[derive(Debug)]
struct Place {
    unit: UnitId,
    index: usize,
    path: String,
    shape: Vec<usize>,
    view: ParamView,
}

fn places(found: &Found, engine: &Engine) -> HashMap<ParamId, Place> {
    let mut places = HashMap::new();
    for FoundParam { id, spec, unit, .. } in &found.params {
        let unit = unit.map_or(UnitId::ROOT, UnitId::unit);
        let Some(handle) = engine.handle(unit) else { continue };
        let params = handle.layout().params();
        let Some(index) = params.iter().position(|p| p.path == spec.path) else { continue };
        let info = &params[index];
        let view = ParamView::new(handle.view(), info.range(), &info.path, &info.shape, engine.failure());
        places.insert(*id, Place { unit, index, path: info.path.clone(), shape: info.shape.clone(), view });
    }
    places
}

fn check_params(found: &Found) -> Result<(), ShardError> {
    let unit_name = |unit: Option<usize>| unit.map_or("root".to_string(), |i| found.units[i].name.clone());
    let mut first_seen: HashMap<ParamId, &FoundParam> = HashMap::new();
    for param in &found.params {
        let path = param.spec.path.clone();
        if !param.spec.dtype.is_float() {
            continue; // The layout says so, with the unit's name.
        }
        if param.device.clone().without_autodiff() != Device::flex() || !param.device.is_autodiff() {
            return Err(ShardError::Device { path, device: format!("{:?}", param.device) });
        }
        if !param.spec.requires_grad {
            return Err(ShardError::Frozen { path });
        }
        match first_seen.get(&param.id) {
            Some(first) if first.unit != param.unit => {
                return Err(ShardError::TiedAcrossUnits {
                    first: first.spec.path.clone(),
                    first_unit: unit_name(first.unit),
                    second: path,
                    second_unit: unit_name(param.unit),
                });
            }
            Some(_) => {}
            None => {
                first_seen.insert(param.id, param);
            }
        }
    }
    Ok(())
}

/// What every rank must agree on: each parameter's unit, path, shape and type, and the strategy.
fn describe<'a>(
    layouts: impl Iterator<Item = &'a FlatLayout>,
    config: &ShardConfig,
) -> Vec<(String, String)> {
    let mut settings = vec![("strategy".to_string(), config.engine.strategy.to_string())];
    for layout in layouts {
        for param in layout.params() {
            let value = format!("{:?} {} in unit {}", param.shape, layout.dtype(), layout.unit());
            settings.push((format!("parameter {}", param.path), value));
        }
    }
    settings
}

fn link(
    engine: &SharedEngine,
    unit: UnitId,
    places: &HashMap<ParamId, Place>,
    recompute: bool,
    anchor: &AdTensor,
) -> UnitLink {
    let mut own: Vec<(&ParamId, &Place)> = places.iter().filter(|(_, place)| place.unit == unit).collect();
    own.sort_by_key(|(_, place)| place.index);
    UnitLink {
        engine: engine.clone(),
        unit,
        views: own.iter().map(|(_, place)| place.view.clone()).collect(),
        sinks: own
            .iter()
            .map(|(_, place)| Arc::new(ParamSink { engine: engine.clone(), unit, index: place.index }))
            .collect(),
        index_of: own.iter().map(|(id, place)| (**id, place.index)).collect(),
        recompute,
        anchor: anchor.clone(),
    }
}

/// Moves each parameter's values into the shards, and leaves the window in its place.
struct Fill<'a> {
    engine: &'a mut Engine,
    places: &'a HashMap<ParamId, Place>,
    source: &'a dyn ParamSource,
    seed: u64,
    done: HashSet<ParamId>,
    error: Option<ShardError>,
}

impl Fill<'_> {
    fn fill<const D: usize>(&mut self, param: &Param<Tensor<D>>, place: &Place) -> Result<(), ShardError> {
        let Some(handle) = self.engine.handle(place.unit) else { return Ok(()) };
        let (owned, range) = (handle.owned(), handle.layout().params()[place.index].range());
        let mine = range.start.max(owned.start)..range.end.min(owned.end);
        let mine = if mine.start < mine.end { mine } else { range.start..range.start };
        let elements = mine.start - range.start..mine.end - range.start;
        let start = mine.start.saturating_sub(owned.start).min(owned.len());
        let out = &mut self.engine.owned_params(place.unit)?[start..start + elements.len()];
        let load = |message| ShardError::Load { path: place.path.clone(), message };
        if self.source.fill(&place.path, &place.shape, elements.clone(), out).map_err(load)? {
            return Ok(());
        }
        let guard = INITIALISING.lock().unwrap_or_else(PoisonError::into_inner);
        param.lazy_device().seed(seed_for(self.seed, &place.path));
        let value = param.val();
        drop(guard);
        if value.dims().as_slice() != place.shape {
            let used = value.dims().to_vec();
            return Err(ShardError::Transposed {
                path: place.path.clone(),
                stored: place.shape.clone(),
                used,
            });
        }
        let data = value.into_data();
        let values = data.as_slice::<f32>().map_err(|error| load(format!("{error:?}")))?;
        out.copy_from_slice(&values[elements]);
        Ok(())
    }
}

impl ModuleMapper for Fill<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(place) = self.places.get(&param.id).filter(|_| self.error.is_none()) else { return param };
        // A tied parameter is met again under another path.
        if self.done.insert(param.id)
            && let Err(error) = self.fill(&param, place)
        {
            self.error = Some(error);
            return param;
        }
        // The whole value goes with `param`; only the shard is kept.
        Param::initialized(param.id, Tensor::from_primitive::<Flex>(place.view.tensor()))
    }
}

/// Makes the root's parameters leaves of the training graph, with their sinks.
struct RootLeaves<'a> {
    engine: &'a SharedEngine,
    places: &'a HashMap<ParamId, Place>,
    leaves: HashMap<ParamId, RootParam>,
}

impl ModuleMapper for RootLeaves<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(place) = self.places.get(&param.id).filter(|place| place.unit.is_root()) else {
            return param;
        };
        let root = self.leaves.entry(param.id).or_insert_with(|| {
            let leaf = constant(place.view.tensor()).require_grad();
            let sink =
                Arc::new(ParamSink { engine: self.engine.clone(), unit: UnitId::ROOT, index: place.index });
            let registered = sink::register(leaf.id(), sink.clone());
            RootParam { leaf, sink, _registered: registered }
        });
        Param::initialized(param.id, from_primitive(root.leaf.clone()))
    }
}
