//! How a module is taken apart: its layouts, its first values, and the windows that take the parameters' places.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::Flex;
use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{Device, Tensor};
use shardwise_core::{DType, FlatLayout, LayoutError, seed_for};
use shardwise_engine::{Engine, UnitId};

use crate::error::ShardError;
use crate::model::ShardConfig;
use crate::params::ParamKey;
use crate::sink::{self, SinkGuard};
use crate::source::ParamSource;
use crate::unit::{
    AdTensor, ParamSink, SharedEngine, UnitLink, UnitParam, constant, from_primitive, primitive,
};
use crate::view::ParamView;
use crate::walk::{Found, FoundParam};

/// Burn draws initial values from one generator for the whole process: ranks that are threads take turns.
static INITIALISING: Mutex<()> = Mutex::new(());

/// The flat parameters that `module` has over `world_size` ranks: the root's first, if it has any, then the units' in the
/// order of the module walk; what is frozen is a flat parameter of its own. Nothing is initialised.
///
/// # Errors
/// When the module's parameters cannot be sharded.
pub fn model_layouts<M: Module>(module: &M, world_size: usize) -> Result<Vec<FlatLayout>, ShardError> {
    let (root, units) = layouts(&Found::in_module(module)?, world_size)?;
    Ok(root.into_iter().chain(units.into_iter().flatten()).collect())
}

/// The root's flat parameters, and those of each unit.
pub(crate) fn layouts(
    found: &Found,
    world_size: usize,
) -> Result<(Vec<FlatLayout>, Vec<Vec<FlatLayout>>), ShardError> {
    check_params(found)?;
    let groups = |unit: Option<usize>, name: &str| -> Result<Vec<FlatLayout>, LayoutError> {
        let own = found.params.iter().filter(|p| p.unit == unit).map(|p| p.spec.clone());
        match own.collect::<Vec<_>>() {
            // A layer without parameters, or a model that has all of them in units.
            none if none.is_empty() => Ok(Vec::new()),
            specs => FlatLayout::build_groups(name, &specs, world_size),
        }
    };
    let units = found.units.iter().enumerate().map(|(index, unit)| groups(Some(index), &unit.name));
    let units = units.collect::<Result<Vec<_>, _>>()?;
    Ok((groups(None, "root")?, units))
}

fn check_params(found: &Found) -> Result<(), ShardError> {
    let unit_name = |unit: Option<usize>| unit.map_or("root".to_string(), |i| found.units[i].name.clone());
    let mut first_seen: HashMap<ParamId, &FoundParam> = HashMap::new();
    for param in &found.params {
        let path = param.spec.path.clone();
        if !param.spec.dtype.is_float() {
            continue; // The layout says so, with the unit's name.
        }
        if param.spec.dtype != DType::F32 {
            return Err(ShardError::Type { path, dtype: param.spec.dtype });
        }
        if param.device.clone().without_autodiff() != Device::flex() || !param.device.is_autodiff() {
            return Err(ShardError::Device { path, device: format!("{:?}", param.device) });
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
pub(crate) fn describe<'a>(
    layouts: impl Iterator<Item = &'a FlatLayout>,
    config: &ShardConfig,
) -> Vec<(String, String)> {
    let mut settings = vec![("strategy".to_string(), config.engine.strategy.to_string())];
    for layout in layouts {
        let frozen = if layout.requires_grad() { "" } else { ", frozen" };
        for param in layout.params() {
            let value = format!("{:?} {} in unit {}{frozen}", param.shape, layout.dtype(), layout.unit());
            settings.push((format!("parameter {}", param.path), value));
        }
    }
    settings
}

/// Where a parameter lies: its unit, which of its flat parameters, the index there, and its window.
#[derive(Debug)]
pub(crate) struct Place {
    unit: UnitId,
    part: usize,
    index: usize,
    path: String,
    shape: Vec<usize>,
    trainable: bool,
    view: ParamView,
}

impl Place {
    pub(crate) fn key(&self) -> ParamKey {
        ParamKey { unit: self.unit, part: self.part, index: self.index }
    }

    /// Where the gradient goes; `None` for a frozen parameter.
    fn sink(&self, engine: &SharedEngine) -> Option<Arc<ParamSink>> {
        let Place { unit, part, index, .. } = *self;
        self.trainable.then(|| Arc::new(ParamSink { engine: engine.clone(), unit, part, index }))
    }
}

/// The place of every parameter of the walk.
pub(crate) fn places(found: &Found, engine: &Engine) -> HashMap<ParamId, Place> {
    let mut places = HashMap::new();
    for FoundParam { id, spec, unit, .. } in &found.params {
        let unit = unit.map_or(UnitId::ROOT, UnitId::unit);
        for (part, handle) in engine.parts(unit).iter().enumerate() {
            let params = handle.layout().params();
            let Some(index) = params.iter().position(|p| p.path == spec.path) else { continue };
            let info = &params[index];
            let view = ParamView::new(handle.view(), info.range(), &info.path, &info.shape, engine.failure());
            let (path, shape, trainable) = (info.path.clone(), info.shape.clone(), handle.is_trainable());
            places.insert(*id, Place { unit, part, index, path, shape, trainable, view });
        }
    }
    places
}

/// Moves every parameter's first values into the shards, from `source` or drawn from `seed`, and returns the module with
/// windows in the parameters' places.
pub(crate) fn fill<M: Module>(
    module: M,
    engine: &mut Engine,
    places: &HashMap<ParamId, Place>,
    (source, seed): (&dyn ParamSource, u64),
) -> Result<M, ShardError> {
    let mut fill = Fill { engine, places, source, seed, done: HashSet::new(), error: None };
    let module = module.map(&mut fill);
    fill.error.map_or(Ok(module), Err)
}

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
        let handle = &self.engine.parts(place.unit)[place.part];
        let (owned, range) = (handle.owned(), handle.layout().params()[place.index].range());
        let mine = range.start.max(owned.start)..range.end.min(owned.end);
        let mine = if mine.start < mine.end { mine } else { range.start..range.start };
        let elements = mine.start - range.start..mine.end - range.start;
        let start = mine.start.saturating_sub(owned.start).min(owned.len());
        let out = &mut self.engine.owned_params(place.unit, place.part)?[start..start + elements.len()];
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

/// Tells every unit's wrapper how to gather it.
pub(crate) fn link_units(
    found: &Found,
    engine: &SharedEngine,
    places: &HashMap<ParamId, Place>,
    recompute: bool,
) {
    let anchor = primitive(Tensor::<1>::zeros([1], &Device::flex().autodiff()).require_grad());
    for (index, found) in found.units.iter().enumerate() {
        let unit = UnitId::unit(index);
        let mut own: Vec<(&ParamId, &Place)> = places.iter().filter(|(_, p)| p.unit == unit).collect();
        own.sort_by_key(|(_, place)| (place.part, place.index));
        let param = |(id, place): (&ParamId, &Place)| UnitParam {
            id: *id,
            view: place.view.clone(),
            sink: place.sink(engine),
        };
        let params = own.into_iter().map(param).collect();
        let (engine, anchor) = (engine.clone(), anchor.clone());
        found.slot.set_link(Arc::new(UnitLink { engine, unit, params, recompute, anchor }));
    }
}

/// A trained parameter of the root: a leaf for the whole run.
#[derive(Debug)]
pub(crate) struct RootParam {
    pub(crate) leaf: AdTensor,
    pub(crate) sink: Arc<ParamSink>,
    _registered: SinkGuard,
}

/// Makes the root's parameters leaves of the training graph, with their sinks; frozen ones become constants.
pub(crate) fn root_leaves<M: Module>(
    module: M,
    engine: &SharedEngine,
    places: &HashMap<ParamId, Place>,
) -> (M, Vec<RootParam>) {
    let mut leaves = RootLeaves { engine, places, leaves: HashMap::new() };
    let module = module.map(&mut leaves);
    let mut root: Vec<RootParam> = leaves.leaves.into_values().collect();
    root.sort_by_key(|param| param.sink.index);
    (module, root)
}

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
        let tensor = constant(place.view.tensor());
        let Some(sink) = place.sink(self.engine) else {
            return Param::initialized(param.id, from_primitive(tensor));
        };
        let root = self.leaves.entry(param.id).or_insert_with(|| {
            let leaf = tensor.require_grad();
            let registered = sink::register(leaf.id(), sink.clone());
            RootParam { leaf, sink, _registered: registered }
        });
        Param::initialized(param.id, from_primitive(root.leaf.clone()))
    }
}
