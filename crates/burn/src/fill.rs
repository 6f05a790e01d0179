//! The first values of parameters, on their way into the shards: one parameter at a time is whole.

use std::collections::{HashMap, HashSet};

use burn::backend::Flex;
use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{Bool, Int, Tensor};
use shardwise_engine::Engine;

use crate::assemble::Place;
use crate::error::ShardError;
use crate::init::Before;
use crate::values::Values;

/// Moves every parameter's first values into the shards and returns the module with windows in the parameters' places.
/// `before` has those that have been partitioned already. A collective.
pub(crate) fn fill<M: Module>(
    module: M,
    engine: &mut Engine,
    places: &HashMap<ParamId, Place>,
    values: Values<'_>,
    before: &mut Before,
) -> Result<M, ShardError> {
    let done = HashSet::new();
    let mut fill = Fill { engine, places, values, before, done, path: Vec::new(), error: None };
    let module = module.map(&mut fill);
    let Fill { values, error, .. } = fill;
    values.agree(error)?;
    Ok(module)
}

struct Fill<'a> {
    engine: &'a mut Engine,
    places: &'a HashMap<ParamId, Place>,
    values: Values<'a>,
    before: &'a mut Before,
    done: HashSet<ParamId>,
    path: Vec<String>,
    error: Option<ShardError>,
}

impl Fill<'_> {
    /// Whether to go on: where ranks send each other values, or gather what has been partitioned, all do until the end.
    fn goes_on(&self) -> bool {
        self.error.is_none() || self.values.travel() || !self.before.kept.is_empty()
    }

    fn note<T>(&mut self, result: Result<T, ShardError>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                // Only the first counts.
                self.error.get_or_insert(error);
                None
            }
        }
    }

    fn fill<const D: usize>(&mut self, param: &Param<Tensor<D>>, place: &Place) -> Result<(), ShardError> {
        let handle = &self.engine.parts(place.unit)[place.part];
        let (owned, range) = (handle.owned(), handle.layout().params()[place.index].range());
        let mine = range.start.max(owned.start)..range.end.min(owned.end);
        let mine = if mine.start < mine.end { mine } else { range.start..range.start };
        let elements = mine.start - range.start..mine.end - range.start;
        let start = mine.start.saturating_sub(owned.start).min(owned.len());
        let here = start..start + elements.len();
        let (Before { kept, store, .. }, values) = (&mut *self.before, &mut self.values);
        self.engine.edit_owned(place.unit, place.part, here, |out| match kept.get(&param.id) {
            Some(kept) => {
                out.copy_from_slice(&kept.whole(values.group(), store.as_mut(), &place.path)?[elements]);
                Ok(())
            }
            None => values.write(param, &place.path, &place.shape, elements, out),
        })?
    }

    fn left_alone(&self) -> String {
        self.path.join(".")
    }
}

impl ModuleMapper for Fill<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !self.goes_on() {
            return param;
        }
        let (id, path, places) = (param.id, self.left_alone(), self.places);
        let Some(place) = places.get(&id) else {
            // One that is left alone keeps its value, or takes rank 0's.
            let value = self.values.initial_shared(&param, &path);
            return match self.note(value) {
                Some(value) => Param::initialized(id, value.without_autodiff()),
                None => param,
            };
        };
        // A tied parameter is met again under another path.
        if self.done.insert(id) {
            let filled = self.fill(&param, place);
            self.note(filled);
        }
        // The whole value goes with `param`; only the shard is kept.
        Param::initialized(id, Tensor::from_primitive::<Flex>(place.view.tensor()))
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        if !self.goes_on() {
            return param;
        }
        let shared = self.values.shared(param.val(), &self.left_alone());
        self.note(shared).map_or(param.clone(), |value| Param::initialized(param.id, value))
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<D, Bool>>) -> Param<Tensor<D, Bool>> {
        if !self.goes_on() {
            return param;
        }
        let shared = self.values.shared(param.val(), &self.left_alone());
        self.note(shared).map_or(param.clone(), |value| Param::initialized(param.id, value))
    }
}
