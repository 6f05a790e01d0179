//! Taking modules apart while the model is still being built, piece by piece.
//!
//! Burn's modules are lazy, so a model that fits nowhere can be built whole and then sharded. A model whose pieces are built
//! or loaded one after another holds their values meanwhile; an [`InitContext`] takes those values into shards as soon as a
//! piece is there (DeepSpeed's `zero.Init`). Where parameters are to rest in files the shards do so from then on.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{Device, Tensor};
use shardwise_comm::ProcessGroup;
use shardwise_core::DType;
use shardwise_engine::{FlatView, ShardStore, StoredShard};

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
    shard: Shard,
    /// A window onto nothing: shape and type are there, and reading it is noticed.
    view: ParamView,
}

/// Where a shard is.
#[derive(Debug)]
enum Shard {
    Here(Vec<f32>),
    Stored(StoredShard),
}

/// This rank's part of a parameter's elements, and how many it is with its padding.
fn part_of(whole: &[f32], group: &ProcessGroup) -> (Range<usize>, usize) {
    let part = whole.len().div_ceil(group.size());
    let start = (group.rank() * part).min(whole.len());
    (start..(start + part).min(whole.len()), part)
}

impl Kept {
    /// What takes the place of `param`: trained or frozen as it is.
    fn placeholder<const D: usize>(&self, param: &Param<Tensor<D>>) -> Param<Tensor<D>> {
        let tensor = from_primitive(constant(self.view.tensor()));
        Param::initialized(param.id, tensor.set_require_grad(requires_grad(param)))
    }

    /// All elements. A collective, for a rank that cannot read its shard too.
    pub(crate) fn whole(
        &self,
        group: &ProcessGroup,
        store: Option<&mut ShardStore>,
        path: &str,
    ) -> Result<Vec<f32>, ShardError> {
        let (mut own, mut read) = (Vec::new(), Ok(()));
        let shard = match (&self.shard, store) {
            (Shard::Here(shard), _) => shard,
            (Shard::Stored(stored), store) => {
                own.resize(stored.numel(), 0.0);
                read = store.map_or(Ok(()), |store| store.read(stored, &mut own));
                &own
            }
        };
        let mut whole = vec![0.0; shard.len() * group.size()];
        group.all_gather(path, shard, &mut whole)?;
        whole.truncate(self.numel);
        Ok(read.map(|()| whole)?)
    }

    fn bytes_in_memory(&self) -> usize {
        match &self.shard {
            Shard::Here(shard) => size_of_val(shard.as_slice()),
            Shard::Stored(_) => 0,
        }
    }
}

/// Partitions the pieces of a model as they are built, and then makes the model of them.
#[derive(Debug)]
pub struct InitContext {
    init: Init,
    group: ProcessGroup,
    kept: HashMap<ParamId, Kept>,
    /// Where shards rest, once there are some that do not rest in memory.
    store: Option<ShardStore>,
    /// Where in it go those that are being partitioned.
    room: HashMap<ParamId, StoredShard>,
    paused: bool,
    /// The first read of a parameter that is partitioned.
    failure: Failure,
}

impl InitContext {
    pub(crate) fn new(init: Init, group: ProcessGroup) -> Self {
        Self {
            init,
            group,
            kept: HashMap::new(),
            store: None,
            room: HashMap::new(),
            paused: false,
            failure: Failure::default(),
        }
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

    /// Bytes of the shards of partitioned parameters that are in this rank's memory: none of those that rest on nvme.
    pub fn bytes_in_memory(&self) -> usize {
        self.kept.values().map(Kept::bytes_in_memory).sum()
    }

    /// Takes the values of `module`'s parameters into shards: each rank keeps its part of every parameter, and one
    /// parameter at a time is whole. The parts go where parameters are to rest ([`Init::remote_device`]); on the host that is
    /// this rank's memory. What is partitioned already is left alone, so modules may be nested and attached in
    /// any order. `prefix` is the path at which the module will lie in the model; values are drawn for the path. A
    /// collective.
    ///
    /// # Errors
    /// When values cannot be had on any rank, or are not f32, bf16 or f16 on Burn's CPU backend with autodiff; when parts
    /// cannot be put where they are to rest.
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
        let room = self.make_room(&module);
        let values = self.init.values(&self.group, source);
        if let Err(error) = room {
            // The others learn of it at the end of their part.
            values.agree(Some(error))?;
            return Ok(module);
        }
        let (kept, store) = (std::mem::take(&mut self.kept), self.store.take());
        let left_alone = walk::buffers(&module);
        let (init, failure) = (&self.init, &self.failure);
        let room = std::mem::take(&mut self.room);
        let mut partition =
            Partition { init, values, kept, store, room, failure, left_alone, path, error: None };
        let module = module.map(&mut partition);
        let Partition { values, kept, store, error, .. } = partition;
        (self.kept, self.store) = (kept, store);
        values.agree(error)?;
        Ok(module)
    }

    /// Makes room for the shards of what `module` has that is not partitioned yet, where shards rest in files.
    fn make_room<M: Module>(&mut self, module: &M) -> Result<(), ShardError> {
        if self.store.is_none() {
            self.store = self.init.open_store(&self.group)?;
        }
        let Some(store) = &mut self.store else { return Ok(()) };
        let mut new = walk::numels(module);
        new.retain(|id, _| !self.kept.contains_key(id));
        if new.is_empty() {
            return Ok(());
        }
        let (ids, numels): (Vec<ParamId>, Vec<usize>) =
            new.into_iter().map(|(id, numel)| (id, numel.div_ceil(self.group.size()))).unzip();
        self.room = ids.into_iter().zip(store.reserve(&numels)?).collect();
        Ok(())
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
        let before = Before { store: self.store, dtypes, kept: self.kept };
        self.init.shard_with(self.group, module, source, before)
    }
}

struct Partition<'a> {
    init: &'a Init,
    values: Values<'a>,
    kept: HashMap<ParamId, Kept>,
    store: Option<ShardStore>,
    room: HashMap<ParamId, StoredShard>,
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
        let shard = self.keep(param.id, &whole)?;
        Ok(Kept { numel: whole.len(), dtype, shard, view })
    }

    /// Puts this rank's part of a parameter where it is to rest.
    fn keep(&mut self, id: ParamId, whole: &[f32]) -> Result<Shard, ShardError> {
        let (mine, padded) = part_of(whole, self.values.group());
        let mut shard = whole[mine].to_vec();
        shard.resize(padded, 0.0);
        match (&mut self.store, self.room.get(&id)) {
            (Some(store), Some(room)) => {
                store.write(room, &shard)?;
                Ok(Shard::Stored(*room))
            }
            _ => Ok(Shard::Here(shard)),
        }
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
