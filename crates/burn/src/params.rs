//! The parameters of a sharded model by path and by Burn's id.

use std::collections::HashMap;
use std::ops::Range;

use burn::module::ParamId;
use shardwise_core::{DType, FlatLayout, ParamInfo};
use shardwise_engine::{Engine, UnitId};

use crate::error::ShardError;

/// Names one parameter: its unit, which of the unit's flat parameters, and the index there. Ordered as the model is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct ParamKey {
    pub(crate) unit: UnitId,
    pub(crate) part: usize,
    pub(crate) index: usize,
}

/// Every parameter of a model.
#[derive(Debug, Default)]
pub(crate) struct Params {
    /// The flat parameters of each unit with parameters, in the model's order.
    units: Vec<(UnitId, Vec<FlatLayout>)>,
    by_path: HashMap<String, ParamKey>,
    by_id: HashMap<ParamId, ParamKey>,
}

impl Params {
    /// Those of `engine`; `ids` says where the module's parameters are.
    pub(crate) fn new(engine: &Engine, ids: impl Iterator<Item = (ParamId, ParamKey)>) -> Self {
        let layouts = |id| engine.parts(id).iter().map(|part| part.layout().clone()).collect();
        let units: Vec<(UnitId, Vec<FlatLayout>)> = engine.ids().map(|id| (id, layouts(id))).collect();
        let mut by_path = HashMap::new();
        for (unit, parts) in &units {
            for (part, layout) in parts.iter().enumerate() {
                let key = |index| ParamKey { unit: *unit, part, index };
                let own = layout.params().iter().enumerate().map(|(i, p)| (p.path.clone(), key(i)));
                let tied = layout.shared_params().iter().map(|s| (s.path.clone(), key(s.param_index)));
                by_path.extend(own.chain(tied));
            }
        }
        Self { units, by_path, by_id: ids.collect() }
    }

    /// The parameter at `path`, tied paths included.
    pub(crate) fn find(&self, path: &str) -> Result<ParamKey, ShardError> {
        self.by_path.get(path).copied().ok_or_else(|| {
            let last = path.rsplit('.').next().unwrap_or(path);
            let mut similar: Vec<&String> =
                self.by_path.keys().filter(|p| p.rsplit('.').next() == Some(last)).collect();
            similar.sort_unstable();
            ShardError::UnknownParameter {
                path: path.to_string(),
                similar: similar.into_iter().take(3).cloned().collect(),
            }
        })
    }

    /// Where the module's parameter `id` is.
    pub(crate) fn key_of(&self, id: ParamId) -> Option<ParamKey> {
        self.by_id.get(&id).copied()
    }

    /// The types of the module's parameters.
    pub(crate) fn dtypes(&self) -> HashMap<ParamId, DType> {
        self.by_id.iter().map(|(id, key)| (*id, self.layout(*key).dtype())).collect()
    }

    /// All of them.
    pub(crate) fn all(&self) -> Vec<ParamKey> {
        self.units.iter().flat_map(|(unit, parts)| keys(*unit, parts)).collect()
    }

    /// Those of the unit with this name.
    pub(crate) fn of_unit(&self, name: &str) -> Result<Vec<ParamKey>, ShardError> {
        let is_it = |(_, parts): &&(UnitId, Vec<FlatLayout>)| parts.iter().any(|p| p.unit() == name);
        let found = self.units.iter().find(is_it);
        found.map(|(unit, parts)| keys(*unit, parts)).ok_or_else(|| ShardError::UnknownUnit {
            name: name.to_string(),
            units: self.units.iter().filter_map(|(_, p)| p.first()).map(|p| p.unit().to_string()).collect(),
        })
    }

    /// Path, shape and place in the flat parameter.
    ///
    /// # Panics
    /// When the key is another model's.
    pub(crate) fn info(&self, key: ParamKey) -> &ParamInfo {
        match self.layout(key).params().get(key.index) {
            Some(info) => info,
            None => unreachable!("keys come from this table: {key:?}"),
        }
    }

    /// The flat parameter that it is part of.
    fn layout(&self, key: ParamKey) -> &FlatLayout {
        let unit = self.units.iter().find(|(unit, _)| *unit == key.unit);
        match unit.and_then(|(_, parts)| parts.get(key.part)) {
            Some(layout) => layout,
            None => unreachable!("keys come from this table: {key:?}"),
        }
    }

    /// How many of the parameter's elements lie in `owned` of its flat parameter.
    pub(crate) fn owned_numel(&self, key: ParamKey, owned: Range<usize>) -> usize {
        let range = self.info(key).range();
        range.end.min(owned.end).saturating_sub(range.start.max(owned.start))
    }
}

fn keys(unit: UnitId, parts: &[FlatLayout]) -> Vec<ParamKey> {
    let of_part = |(part, layout): (usize, &FlatLayout)| {
        (0..layout.params().len()).map(move |index| ParamKey { unit, part, index })
    };
    parts.iter().enumerate().flat_map(of_part).collect()
}
