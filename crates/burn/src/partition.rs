//! Taking modules apart while the model is still being built, piece by piece.
//!
//! Burn's modules are lazy, so a model that fits nowhere can be built whole and then sharded. A model whose pieces are built
//! or loaded one after another holds their values meanwhile; an [`InitContext`] takes those values into shards as soon as a
//! piece is there (DeepSpeed's `zero.Init`).

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{Device, Tensor};
use shardwise_comm::ProcessGroup;
use shardwise_core::DType;
use shardwise_engine::FlatView;

use crate::error::ShardError;
use crate::init::{Before, Init};
use crate::model::ShardedModel;
use crate::source::ParamSource;
use crate::unit::{constant, from_primitive};
use crate::values::Values;
use crate::view::{Failure, ParamView};
use crate::walk::{self, requires_grad};
use crate::wrap::Ignored;

/// This rank's part of a parameter that has been partitioned by itself: `ceil(numel / ranks)` elements, the end padded.
#[derive(Debug)]
pub(crate) struct Kept {
    numel: usize,
    /// What the values were given in; they are kept in f32, which holds them exactly.
    dtype: DType,
    shard: Vec<f32>,
    /// A window onto nothing: shape and type are there, and reading it is noticed.
    view: ParamView,
}

impl Kept {
    fn of(whole: &[f32], dtype: DType, group: &ProcessGroup, view: ParamView) -> Self {
        let part = whole.len().div_ceil(group.size());
        let mut shard = vec![0.0; part];
        let mine = (group.rank() * part).min(whole.len())..((group.rank() + 1) * part).min(whole.len());
        shard[..mine.len()].copy_from_slice(&whole[mine]);
        Self { numel: whole.len(), dtype, shard, view }
    }

    /// What takes the place of `param`: trained or frozen as it is.
    fn placeholder<const D: usize>(&self, param: &Param<Tensor<D>>) -> Param<Tensor<D>> {
        let tensor = from_primitive(constant(self.view.tensor()));
        Param::initialized(param.id, tensor.set_require_grad(requires_grad(param)))
    }

    /// All elements. A collective.
    pub(crate) fn whole(&self, group: &ProcessGroup, path: &str) -> Result<Vec<f32>, ShardError> {
        let mut whole = vec![0.0; self.shard.len() * group.size()];
        group.all_gather(path, &self.shard, &mut whole)?;
        whole.truncate(self.numel);
        Ok(whole)
    }
}

/// Partitions the pieces of a model as they are built, and then makes the model of them.
#[derive(Debug)]
pub struct InitContext {
    init: Init,
    group: ProcessGroup,
    kept: HashMap<ParamId, Kept>,
    paused: bool,
    /// The first read of a parameter that is partitioned.
    failure: Failure,
}

impl InitContext {
    pub(crate) fn new(init: Init, group: ProcessGroup) -> Self {
        Self { init, group, kept: HashMap::new(), paused: false, failure: Failure::default() }
    }

    /// Lets [`InitContext::partition`] return modules as they are, at no cost, until [`InitContext::resume`].
    pub fn pause(&mut self) {
        self.paused = true;
    }

    /// Ends a pause.
    pub fn resume(&mut self) {
        self.paused = false;
    }

    /// How many parameters are partitioned.
    pub fn num_partitioned(&self) -> usize {
        self.kept.len()
    }

    /// Takes the values of `module`'s parameters into shards: each rank keeps its part of every parameter, and one
    /// parameter at a time is whole. What is partitioned already is left alone, so modules may be nested and attached in
    /// any order. `prefix` is the path at which the module will lie in the model; values are drawn for the path. A
    /// collective.
    ///
    /// # Errors
    /// When values cannot be had on any rank, or are not f32, bf16 or f16 on Burn's CPU backend with autodiff.
    pub fn partition<M: Module>(
        &mut self,
        prefix: &str,
        module: M,
        source: &dyn ParamSource,
    ) -> Result<M, ShardError> {
        if self.paused {
            return Ok(module);
        }
        let path = prefix.split('.').filter(|name| !name.is_empty()).map(str::to_string).collect();
        let values = self.init.values(&self.group, source);
        let kept = std::mem::take(&mut self.kept);
        let left_alone = walk::buffers(&module);
        let (init, failure) = (&self.init, &self.failure);
        let mut partition = Partition { init, values, kept, failure, left_alone, path, error: None };
        let module = module.map(&mut partition);
        let Partition { values, kept, error, .. } = partition;
        self.kept = kept;
        values.agree(error)?;
        Ok(module)
    }

    /// Makes the sharded model of `module`, whose parameters are partitioned or not. A collective.
    ///
    /// # Errors
    /// As [`Init::shard`]; and when a parameter was read while it was partitioned.
    pub fn shard<M: Module>(
        self,
        module: M,
        source: &dyn ParamSource,
    ) -> Result<ShardedModel<M>, ShardError> {
        let read = self.failure.get().map(|error| ShardError::Engine(error.clone()));
        self.init.values(&self.group, source).agree(read)?;
        let dtypes = self.kept.iter().map(|(id, kept)| (*id, kept.dtype)).collect();
        self.init.shard_with(self.group, module, source, &Before { dtypes, kept: self.kept })
    }
}

struct Partition<'a> {
    init: &'a Init,
    values: Values<'a>,
    kept: HashMap<ParamId, Kept>,
    failure: &'a Failure,
    /// Running statistics.
    left_alone: HashSet<ParamId>,
    path: Vec<String>,
    error: Option<ShardError>,
}

impl Partition<'_> {
    fn partition<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Result<Kept, ShardError> {
        let path = self.path.join(".");
        let (shape, dtype) = (param.lazy_shape().as_slice().to_vec(), walk::dtype_of(param));
        let allowed = check(&path, &param.lazy_device(), dtype);
        if !self.values.travel() {
            allowed.clone()?;
        }
        // Ranks that send each other values all do, also where the parameter is then refused.
        let whole = self.values.whole(param, &path, &shape);
        let whole = allowed.and(whole)?;
        let nowhere = Arc::new(FlatView::new("a partitioned module", whole.len()));
        let view = ParamView::new(&nowhere, 0..whole.len(), &path, &shape, self.failure);
        Ok(Kept::of(&whole, dtype, self.values.group(), view))
    }
}

/// Whether a parameter can be partitioned.
fn check(path: &str, device: &Device, dtype: DType) -> Result<(), ShardError> {
    let path = path.to_string();
    if !matches!(dtype, DType::F32 | DType::BF16 | DType::F16) {
        return Err(ShardError::Type { path, dtype });
    }
    if device.clone().without_autodiff() != Device::flex() || !device.is_autodiff() {
        return Err(ShardError::Device { path, device: format!("{device:?}") });
    }
    Ok(())
}

impl ModuleMapper for Partition<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let left_alone = self.left_alone.contains(&param.id)
            || self.init.ignored(&self.path.join(".")) == Some(Ignored::Local);
        if left_alone || (self.error.is_some() && !self.values.travel()) {
            return param;
        }
        if !self.kept.contains_key(&param.id) {
            match self.partition(&param) {
                Ok(kept) => drop(self.kept.insert(param.id, kept)),
                Err(error) => drop(self.error.get_or_insert(error)),
            }
        }
        // A clone of one that is partitioned lets go of the whole value too.
        self.kept.get(&param.id).map_or(param.clone(), |kept| kept.placeholder(&param))
    }
}
