//! The first values of parameters, on their way into the shards.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, PoisonError};

use burn::backend::Flex;
use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::Tensor;
use shardwise_core::seed_for;
use shardwise_engine::Engine;

use crate::assemble::Place;
use crate::error::ShardError;
use crate::source::ParamSource;

/// Burn draws initial values from one generator for the whole process: ranks that are threads take turns.
static INITIALISING: Mutex<()> = Mutex::new(());

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
        if self.error.is_some() {
            return param;
        }
        // One that is left alone keeps its value.
        let Some(place) = self.places.get(&param.id) else { return plain(param) };
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

/// The same parameter without autodiff.
fn plain<const D: usize>(param: Param<Tensor<D>>) -> Param<Tensor<D>> {
    Param::initialized(param.id, param.val().without_autodiff())
}
