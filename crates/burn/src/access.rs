//! Scopes in which parameters are whole: to read them, or to change them on every rank.
//!
//! A scope holds copies of just the parameters that were asked for, taken from one gathered unit after another; nothing
//! stays gathered behind it, so scopes nest freely and what they show cannot move. Opening one is a collective that ends
//! with the same verdict on every rank. The names are DeepSpeed's (`GatheredParameters`, `modifier_rank`) and PyTorch
//! FSDP's (`summon_full_params`).

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{Device, Tensor, TensorData};
use shardwise_engine::EngineError;

use crate::agree::{Request, agree};
use crate::error::{ParamSummary, ShardError};
use crate::model::ShardedModel;
use crate::params::ParamKey;
use crate::walk;

/// Which parameters a scope gathers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Which<'a> {
    /// All of the model's.
    All,
    /// Those of one unit, by its path; `root` names the root.
    Unit(&'a str),
    /// Those with these paths. Duplicates count once, and paths of one tied parameter are one.
    Paths(&'a [&'a str]),
    /// None: the scope does nothing and costs nothing.
    Nothing,
}

impl Which<'_> {
    /// The same when `enabled`, otherwise none.
    #[must_use]
    pub fn enabled(self, enabled: bool) -> Self {
        if enabled { self } else { Which::Nothing }
    }
}

/// What [`ShardedModel::summon_full_params`] does beside showing every parameter. There is no `offload_to_cpu` as in FSDP: what
/// a scope holds is always a copy of its own in memory of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SummonOptions {
    /// Edits are kept: when the scope ends, rank 0's values are sharded back.
    pub writeback: bool,
    /// Only rank 0 holds full parameters; the others take part and keep their shards only.
    pub rank0_only: bool,
    /// Shows the full gradients of the last step too.
    pub with_grads: bool,
}

/// The open scopes of a model on this rank.
#[derive(Debug, Default)]
pub(crate) struct OpenScopes(Mutex<(u64, Vec<OpenScope>)>);

#[derive(Debug)]
struct OpenScope {
    id: u64,
    writes: bool,
    params: Vec<ParamKey>,
}

impl OpenScopes {
    fn lock(&self) -> MutexGuard<'_, (u64, Vec<OpenScope>)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Those of `params` that another scope holds, if either of the two writes.
    fn overlaps(&self, params: &[ParamKey], writes: bool) -> Vec<ParamKey> {
        let open = self.lock();
        let held = |key: &&ParamKey| {
            open.1.iter().any(|scope| (writes || scope.writes) && scope.params.contains(key))
        };
        params.iter().filter(held).copied().collect()
    }

    fn open(&self, params: Vec<ParamKey>, writes: bool) -> u64 {
        let mut open = self.lock();
        open.0 += 1;
        let id = open.0;
        open.1.push(OpenScope { id, writes, params });
        id
    }

    fn close(&self, id: u64) {
        self.lock().1.retain(|scope| scope.id != id);
    }
}

/// A parameter of a scope.
#[derive(Debug)]
struct Held {
    key: ParamKey,
    path: String,
    shape: Vec<usize>,
    /// The values; `None` where this rank holds its shard only.
    values: Option<Vec<f32>>,
    gradient: Option<Vec<f32>>,
}

/// A scope in which parameters can be read whole. Changing one does not compile:
///
/// ```compile_fail,E0594
/// fn edit<M: burn::module::Module>(scope: &mut shardwise_burn::Gathered<'_, M>) {
///     scope.values("head.weight").expect("gathered")[0] = 1.0;
/// }
/// ```
///
/// In a scope for writing ([`ShardedModel::gather_mut`]) it does:
///
/// ```
/// fn edit<M: burn::module::Module>(scope: &mut shardwise_burn::GatheredMut<'_, M>) {
///     scope.values_mut("head.weight").expect("gathered")[0] = 1.0;
/// }
/// ```
#[derive(Debug)]
pub struct Gathered<'a, M: Module> {
    model: &'a ShardedModel<M>,
    /// `None` for a scope that does nothing, and once it is closed.
    id: Option<u64>,
    params: Vec<Held>,
    /// Whose values are sharded again when the scope ends.
    modifier_rank: Option<usize>,
}

/// A scope in which parameters can be read and changed. When it ends, in whatever way, the modifier's values are sharded
/// again on every rank; every rank must end its scopes in the same order.
#[derive(Debug)]
pub struct GatheredMut<'a, M: Module>(Gathered<'a, M>);

impl<M: Module> ShardedModel<M> {
    /// Opens a scope in which the parameters `which` are whole, to be read. Such scopes nest and overlap freely. The scope
    /// holds its parameters' elements, f32, on every rank. A collective: every rank must call it with the same list.
    ///
    /// # Errors
    /// The same on all ranks: a path or unit that does not exist, lists that differ, a parameter that a write scope holds;
    /// and when communication fails.
    pub fn gather(&self, which: Which<'_>) -> Result<Gathered<'_, M>, ShardError> {
        let ask = Ask { which, modifier_rank: None, options: SummonOptions::default(), call: "gather" };
        self.open_scope(ask)
    }

    /// Opens a scope in which the parameters `which` can be changed. When it ends, the values of `modifier_rank` are sent
    /// to all and sharded again; changes of other ranks are lost. A collective, its end too.
    ///
    /// # Errors
    /// As [`ShardedModel::gather`]; and, on all ranks, when any of the parameters is held by another scope on any rank, or
    /// `modifier_rank` is not a rank.
    pub fn gather_mut(
        &self,
        which: Which<'_>,
        modifier_rank: usize,
    ) -> Result<GatheredMut<'_, M>, ShardError> {
        let modifier_rank = Some(modifier_rank);
        let ask = Ask { which, modifier_rank, options: SummonOptions::default(), call: "gather_mut" };
        self.open_scope(ask).map(GatheredMut)
    }

    /// Opens a scope with every parameter of the model, in full precision, as [`SummonOptions`] say. Without `writeback`
    /// edits are lost. A collective, and with `writeback` its end too.
    ///
    /// # Errors
    /// As [`ShardedModel::gather_mut`]; and when options differ, or `rank0_only` and `writeback` are both asked for.
    pub fn summon_full_params(&self, options: SummonOptions) -> Result<GatheredMut<'_, M>, ShardError> {
        let ask = Ask {
            which: Which::All,
            modifier_rank: options.writeback.then_some(0),
            options,
            call: "summon_full_params",
        };
        self.open_scope(ask).map(GatheredMut)
    }

    /// What is known of the parameter at `path` without gathering it.
    ///
    /// # Errors
    /// When there is none.
    pub fn parameter(&self, path: &str) -> Result<ParamSummary, ShardError> {
        Ok(self.summary(self.params.find(path)?))
    }

    /// How often parameters have changed, by a step or by a write scope.
    pub fn version(&self) -> u64 {
        self.engine.lock().version()
    }

    pub(crate) fn summary(&self, key: ParamKey) -> ParamSummary {
        let engine = self.engine.lock();
        let handle = &engine.parts(key.unit)[key.part];
        let param = self.params.info(key);
        ParamSummary {
            path: param.path.clone(),
            unit: handle.name().to_string(),
            status: handle.status(),
            shape: param.shape.clone(),
            shard_numel: self.params.owned_numel(key, handle.owned()),
            requires_grad: handle.is_trainable(),
            persisted: handle.layout().is_replicated(),
        }
    }

    fn open_scope(&self, ask: Ask<'_>) -> Result<Gathered<'_, M>, ShardError> {
        let mut scope = Gathered { model: self, id: None, params: Vec::new(), modifier_rank: None };
        if matches!(ask.which, Which::Nothing | Which::Paths([])) {
            return Ok(scope);
        }
        let (keys, problem) = match self.select(ask) {
            Ok(keys) => (keys, None),
            Err(problem) => (Vec::new(), Some(problem)),
        };
        let writes = ask.modifier_rank.is_some();
        let path = |key: &ParamKey| self.params.info(*key).path.clone();
        agree(
            self.group(),
            Request {
                call: ask.call,
                modifier_rank: ask.modifier_rank,
                options: ask.options,
                paths: keys.iter().map(path).collect(),
                overlaps: self.scopes.overlaps(&keys, writes).iter().map(path).collect(),
                problem,
            },
        )?;
        scope.id = Some(self.scopes.open(keys.clone(), writes));
        scope.params = keys.into_iter().map(|key| self.held(key)).collect();
        scope.fill(ask)?;
        // From here on, leaving the scope shards the values again.
        scope.modifier_rank = ask.modifier_rank;
        Ok(scope)
    }

    /// The parameters that are asked for, each once, in the model's order.
    fn select(&self, ask: Ask<'_>) -> Result<Vec<ParamKey>, ShardError> {
        if ask.options.rank0_only && ask.options.writeback {
            return Err(ShardError::Rank0OnlyWriteback);
        }
        let ranks = self.group().size();
        if let Some(rank) = ask.modifier_rank.filter(|rank| *rank >= ranks) {
            return Err(ShardError::NoSuchRank { call: ask.call, rank, ranks });
        }
        let mut keys = match ask.which {
            Which::All => self.params.all(),
            Which::Unit(unit) => self.params.of_unit(unit)?,
            Which::Paths(paths) => {
                paths.iter().map(|path| self.params.find(path)).collect::<Result<_, _>>()?
            }
            Which::Nothing => Vec::new(),
        };
        keys.sort_unstable();
        keys.dedup();
        Ok(keys)
    }

    fn held(&self, key: ParamKey) -> Held {
        let info = self.params.info(key);
        Held { key, path: info.path.clone(), shape: info.shape.clone(), values: None, gradient: None }
    }
}

/// What a scope was asked for.
#[derive(Clone, Copy)]
struct Ask<'a> {
    which: Which<'a>,
    modifier_rank: Option<usize>,
    options: SummonOptions,
    call: &'static str,
}

impl<M: Module> Gathered<'_, M> {
    /// The paths of the scope's parameters, in the model's order.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        self.params.iter().map(|held| held.path.as_str())
    }

    /// The whole shape of a parameter of the scope.
    ///
    /// # Errors
    /// When the parameter is not in this scope, or does not exist.
    pub fn shape(&self, path: &str) -> Result<&[usize], ShardError> {
        Ok(&self.params[self.find(path)?].shape)
    }

    /// All elements of a parameter of the scope, row-major.
    ///
    /// # Errors
    /// When the parameter is not in this scope, or does not exist, or only rank 0 holds it.
    pub fn values(&self, path: &str) -> Result<&[f32], ShardError> {
        let held = &self.params[self.find(path)?];
        held.values.as_deref().ok_or_else(|| self.not_gathered(held.key))
    }

    /// A parameter of the scope as a tensor of its own, without autodiff.
    ///
    /// # Errors
    /// As [`Gathered::values`], and when the parameter has another number of dimensions than `D`.
    pub fn tensor<const D: usize>(&self, path: &str) -> Result<Tensor<D>, ShardError> {
        let shape = self.shape(path)?.to_vec();
        if shape.len() != D {
            return Err(ShardError::Shape { path: path.to_string(), shape, given: vec![0; D] });
        }
        let values = self.values(path)?.to_vec();
        Ok(Tensor::from_data(TensorData::new(values, shape), &Device::flex()))
    }

    /// The whole gradient of a parameter in the last step: the mean over the micro-batches, before clipping; `None` for one
    /// that is frozen, was not used, or shares its flat parameter with a matrix of Muon, which needs the gradient's place.
    ///
    /// # Errors
    /// As [`Gathered::values`].
    pub fn gradient(&self, path: &str) -> Result<Option<&[f32]>, ShardError> {
        let held = &self.params[self.find(path)?];
        match &held.values {
            Some(_) => Ok(held.gradient.as_deref()),
            None => Err(self.not_gathered(held.key)),
        }
    }

    /// The model as a plain module, without autodiff and without sharding: the scope's parameters are whole in it and its
    /// own. What is not in the scope cannot be read in it.
    pub fn module(&self) -> M {
        let by_key: HashMap<ParamKey, &Held> = self.params.iter().map(|held| (held.key, held)).collect();
        let mut whole = Whole { model: self.model, by_key };
        walk::renew_slots(|| self.model.evaluation().clone().map(&mut whole)).0
    }

    /// Ends the scope, which dropping it does too, and says whether that succeeded.
    ///
    /// # Errors
    /// When values had to be sharded again and communication failed.
    pub fn close(mut self) -> Result<(), ShardError> {
        self.end()
    }

    fn find(&self, path: &str) -> Result<usize, ShardError> {
        let key = self.model.params.find(path)?;
        self.params.iter().position(|held| held.key == key).ok_or_else(|| self.not_gathered(key))
    }

    fn not_gathered(&self, key: ParamKey) -> ShardError {
        ShardError::NotInScope { summary: Box::new(self.model.summary(key)), held: self.params.len() }
    }

    /// Copies the values, and the gradients if they are asked for, from one gathered unit after another.
    fn fill(&mut self, ask: Ask<'_>) -> Result<(), ShardError> {
        let keep = !ask.options.rank0_only || self.model.group().rank() == 0;
        let mut engine = self.model.engine.lock();
        let mut units: Vec<_> = self.params.iter().map(|held| held.key.unit).collect();
        units.dedup();
        for unit in units {
            let params = &mut self.params;
            let mut part = 0;
            engine.with_full_params(unit, |layout, flat| {
                let own = params.iter_mut().filter(|h| (h.key.unit, h.key.part) == (unit, part) && keep);
                own.for_each(|h| h.values = Some(flat[layout.params()[h.key.index].range()].to_vec()));
                part += 1;
            })?;
            if ask.options.with_grads {
                engine.with_full_gradients(unit, |part, layout, flat| {
                    let own = params.iter_mut().filter(|h| (h.key.unit, h.key.part) == (unit, part) && keep);
                    own.for_each(|h| h.gradient = Some(flat[layout.params()[h.key.index].range()].to_vec()));
                })?;
            }
        }
        Ok(())
    }

    fn end(&mut self) -> Result<(), ShardError> {
        let Some(id) = self.id.take() else { return Ok(()) };
        let result = match self.modifier_rank.take() {
            Some(modifier) => self.shard_again(modifier),
            None => Ok(()),
        };
        self.model.scopes.close(id);
        result
    }

    /// Sends the modifier's values to all and keeps what this rank owns of them.
    fn shard_again(&mut self, modifier: usize) -> Result<(), ShardError> {
        let group = self.model.group();
        for held in &mut self.params {
            let Some(values) = &mut held.values else { continue };
            group.broadcast(&held.path, bytemuck::cast_slice_mut(values), modifier)?;
            let ParamKey { unit, part, index } = held.key;
            self.model.engine.lock().write_param(unit, part, index, values)?;
        }
        Ok(())
    }
}

impl<M: Module> Drop for Gathered<'_, M> {
    /// Ends the scope. A failure is kept, and returned by the model's next call.
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            let rank = self.model.group().rank();
            let error = match error {
                ShardError::Engine(error) => error,
                ShardError::Comm(source) => EngineError::Comm { rank, source },
                other => EngineError::Usage(other.to_string()),
            };
            // Only the first failure counts.
            let _ = self.model.engine.lock().failure().set(error);
        }
    }
}

impl<'a, M: Module> Deref for GatheredMut<'a, M> {
    type Target = Gathered<'a, M>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl<M: Module> GatheredMut<'_, M> {
    /// All elements of a parameter of the scope, row-major, to change.
    ///
    /// # Errors
    /// As [`Gathered::values`].
    pub fn values_mut(&mut self, path: &str) -> Result<&mut [f32], ShardError> {
        let index = self.0.find(path)?;
        let key = self.0.params[index].key;
        if self.0.params[index].values.is_none() {
            return Err(self.0.not_gathered(key));
        }
        Ok(self.0.params[index].values.as_deref_mut().unwrap_or_default())
    }

    /// Replaces a parameter of the scope.
    ///
    /// # Errors
    /// As [`Gathered::values`], and when `tensor` has another shape or is not f32.
    pub fn set<const D: usize>(&mut self, path: &str, tensor: Tensor<D>) -> Result<(), ShardError> {
        let shape = self.shape(path)?.to_vec();
        let given = tensor.dims().to_vec();
        if shape != given {
            return Err(ShardError::Shape { path: path.to_string(), shape, given });
        }
        let data = tensor.into_data();
        let values = data.as_slice::<f32>().map_err(|error| ShardError::Load {
            path: path.to_string(),
            message: format!("{error:?}; give f32 values"),
        })?;
        self.values_mut(path)?.copy_from_slice(values);
        Ok(())
    }

    /// Ends the scope, which dropping it does too, and says whether that succeeded.
    ///
    /// # Errors
    /// As [`Gathered::close`].
    pub fn close(self) -> Result<(), ShardError> {
        self.0.close()
    }
}

/// Puts whole tensors in the places of a scope's parameters.
struct Whole<'a, M: Module> {
    model: &'a ShardedModel<M>,
    by_key: HashMap<ParamKey, &'a Held>,
}

impl<M: Module> Whole<'_, M> {
    fn values(&self, id: ParamId) -> Option<(Vec<f32>, Vec<usize>)> {
        let held = self.by_key.get(&self.model.params.key_of(id)?)?;
        Some((held.values.clone()?, held.shape.clone()))
    }
}

impl<M: Module> ModuleMapper for Whole<'_, M> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.values(param.id) {
            Some((values, shape)) => {
                let tensor = Tensor::from_data(TensorData::new(values, shape), &Device::flex());
                Param::initialized(param.id, tensor)
            }
            None => param,
        }
    }
}
