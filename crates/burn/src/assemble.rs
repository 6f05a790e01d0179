//! How a module is taken apart: its layouts, and the windows that take the parameters' places.

use std::collections::HashMap;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{Device, Tensor};
use shardwise_core::{DType, FlatLayout, LayoutError};
use shardwise_engine::{Engine, EngineConfig, UnitId};

use crate::error::ShardError;
use crate::model::ShardConfig;
use crate::params::ParamKey;
use crate::sink::{self, SinkGuard};
use crate::unit::{
    AdTensor, ParamSink, SharedEngine, UnitLink, UnitParam, constant, from_primitive, untracked,
};
use crate::view::ParamView;
use crate::walk::{Found, FoundParam};
use crate::wrap::{Keep, Wrapping};

/// The flat parameters that `module` has over `world_size` ranks: the root's first, if it has any, then the units' in the
/// order of the module walk; what is frozen is a flat parameter of its own. Nothing is initialised.
///
/// # Errors
/// When the module's parameters cannot be sharded.
pub fn model_layouts<M: Module>(module: &M, world_size: usize) -> Result<Vec<FlatLayout>, ShardError> {
    let found = Found::in_module(module, &Wrapping::default(), HashMap::new())?;
    let (root, units) = layouts(&found, world_size)?;
    Ok(root.into_iter().chain(units.into_iter().flatten()).collect())
}

/// The root's flat parameters, and those of each unit. What every rank keeps whole is the root's.
pub(crate) fn layouts(
    found: &Found,
    world_size: usize,
) -> Result<(Vec<FlatLayout>, Vec<Vec<FlatLayout>>), ShardError> {
    check_params(found)?;
    let groups = |owner: Option<usize>, keep: Keep, name: &str| -> Result<Vec<FlatLayout>, LayoutError> {
        let own = found.params.iter().filter(|p| (p.owner, p.keep) == (owner, keep)).map(|p| p.spec.clone());
        match own.collect::<Vec<_>>() {
            // A layer without parameters, or a model that has all of them in units.
            none if none.is_empty() => Ok(Vec::new()),
            specs => FlatLayout::build_groups(name, &specs, world_size),
        }
    };
    let units = found.units.iter().enumerate();
    let units = units.map(|(index, unit)| groups(Some(index), Keep::Sharded, &unit.name));
    let units = units.collect::<Result<Vec<_>, _>>()?;
    let mut root = groups(None, Keep::Sharded, "root")?;
    root.extend(groups(None, Keep::Replicated, "root")?.into_iter().map(FlatLayout::replicated));
    Ok((root, units))
}

fn check_params(found: &Found) -> Result<(), ShardError> {
    for param in found.params.iter().filter(|p| p.keep != Keep::Local && p.spec.dtype.is_float()) {
        let path = param.spec.path.clone();
        if param.spec.dtype == DType::F64 {
            return Err(ShardError::Type { path, dtype: param.spec.dtype });
        }
        if param.device.clone().without_autodiff() != Device::flex() || !param.device.is_autodiff() {
            return Err(ShardError::Device { path, device: format!("{:?}", param.device) });
        }
    }
    Ok(())
}

/// What every rank must agree on: each parameter's unit, path, shape and type, and the strategy.
pub(crate) fn describe<'a>(
    layouts: impl Iterator<Item = &'a FlatLayout>,
    config: &ShardConfig,
) -> Vec<(String, String)> {
    let EngineConfig { strategy, offload, wire, .. } = config.engine;
    let mut settings = vec![
        ("strategy".to_string(), strategy.to_string()),
        ("offload".to_string(), format!("{offload:?}")),
        ("wire".to_string(), format!("{wire:?}")),
    ];
    for layout in layouts {
        let frozen = if layout.requires_grad() { "" } else { ", frozen" };
        let kept = if layout.is_replicated() { ", replicated" } else { "" };
        for param in layout.params() {
            let value =
                format!("{:?} {} in unit {}{frozen}{kept}", param.shape, layout.dtype(), layout.unit());
            settings.push((format!("parameter {}", param.path), value));
        }
    }
    settings
}

/// Where a parameter lies: its unit, which of its flat parameters, the index there, and its window.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) unit: UnitId,
    pub(crate) part: usize,
    pub(crate) index: usize,
    pub(crate) path: String,
    pub(crate) shape: Vec<usize>,
    trainable: bool,
    pub(crate) view: ParamView,
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
    for FoundParam { id, spec, owner, .. } in found.params.iter().filter(|p| p.keep != Keep::Local) {
        let unit = owner.map_or(UnitId::ROOT, UnitId::unit);
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

/// Tells every unit's wrapper how to gather what it uses: its own parameters, and those that others own.
pub(crate) fn link_units(
    found: &Found,
    engine: &SharedEngine,
    places: &HashMap<ParamId, Place>,
    recompute: bool,
) {
    for (index, met) in found.units.iter().enumerate() {
        let unit = UnitId::unit(index);
        let mut used: Vec<(ParamId, &Place)> = Vec::new();
        for param in found.params.iter().filter(|p| p.unit == Some(index)) {
            if let Some(place) = places.get(&param.id)
                && used.iter().all(|(id, _)| *id != param.id)
            {
                used.push((param.id, place));
            }
        }
        used.sort_by_key(|(_, place)| place.key());
        // The root is gathered for the whole step.
        let mut owners: Vec<UnitId> = used.iter().map(|(_, place)| place.unit).collect();
        owners.retain(|owner| *owner != unit && !owner.is_root());
        owners.dedup();
        let param = |(id, place): (ParamId, &Place)| UnitParam {
            id,
            view: place.view.clone(),
            sink: place.sink(engine),
        };
        let params = used.into_iter().map(param).collect();
        let engine = engine.clone();
        met.slot.set_link(Arc::new(UnitLink { engine, unit, owners, params, recompute }));
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
    root.sort_by_key(|param| (param.sink.part, param.sink.index));
    (module, root)
}

struct RootLeaves<'a> {
    engine: &'a SharedEngine,
    places: &'a HashMap<ParamId, Place>,
    leaves: HashMap<ParamId, RootParam>,
}

impl ModuleMapper for RootLeaves<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let place = match self.places.get(&param.id) {
            Some(place) if place.unit.is_root() => place,
            // A unit's; its calls put leaves in the window's place.
            Some(_) => return param,
            None => return untracked(param),
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
