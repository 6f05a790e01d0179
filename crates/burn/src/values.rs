//! Where a parameter's first values come from, and how ranks make sure that they have the same.

use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

use burn::module::Param;
use burn::tensor::kind::Basic;
use burn::tensor::{Tensor, TensorData};
use shardwise_comm::ProcessGroup;
use shardwise_core::seed::SplitMix64;
use shardwise_core::{DType, seed_for};

use crate::error::ShardError;
use crate::source::ParamSource;

/// Burn draws initial values from one generator for the whole process: ranks that are threads take turns.
static INITIALISING: Mutex<()> = Mutex::new(());

/// What is done about first values that ranks might not share, such as those of a module that each rank has built for
/// itself, or what a module does not draw from the seed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum InitialValues {
    /// They are taken to be the same: each rank takes its shard of its own.
    #[default]
    Trusted,
    /// Rank 0's reach all (FSDP's `sync_module_states`): those of every parameter, trained, frozen or left alone.
    Synced,
    /// They are compared, and the first parameter that differs is an error.
    Checked,
}

/// The source of first values of a model.
pub(crate) struct Values<'a> {
    group: &'a ProcessGroup,
    source: &'a dyn ParamSource,
    seed: u64,
    policy: InitialValues,
    /// Whether the module's own initialisers may be asked.
    asks_module: bool,
    /// Of every value that was compared: the path, and a hash of the bytes.
    hashes: Vec<(String, u64)>,
}

impl<'a> Values<'a> {
    pub(crate) fn new(
        group: &'a ProcessGroup,
        source: &'a dyn ParamSource,
        seed: u64,
        (policy, asks_module): (InitialValues, bool),
    ) -> Self {
        Self { group, source, seed, policy, asks_module, hashes: Vec::new() }
    }

    pub(crate) fn group(&self) -> &ProcessGroup {
        self.group
    }

    /// Whether ranks send each other values.
    pub(crate) fn travel(&self) -> bool {
        self.policy == InitialValues::Synced
    }

    /// Writes elements `elements` of the parameter at `path` to `out`.
    pub(crate) fn write<const D: usize>(
        &mut self,
        param: &Param<Tensor<D>>,
        path: &str,
        shape: &[usize],
        elements: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), ShardError> {
        if self.policy != InitialValues::Trusted {
            out.copy_from_slice(&self.whole(param, path, shape)?[elements]);
            return Ok(());
        }
        if self.ask_source(path, shape, elements.clone(), out)? {
            return Ok(());
        }
        self.ask_module(param, path, shape, |values| out.copy_from_slice(&values[elements]))
    }

    /// All elements of the parameter at `path`, the same on every rank if the policy says so.
    pub(crate) fn whole<const D: usize>(
        &mut self,
        param: &Param<Tensor<D>>,
        path: &str,
        shape: &[usize],
    ) -> Result<Vec<f32>, ShardError> {
        let numel = shape.iter().product();
        if self.policy != InitialValues::Synced {
            let whole = self.own(param, path, shape, numel)?;
            self.compare(path, bytemuck::cast_slice(&whole));
            return Ok(whole);
        }
        let own =
            if self.group.rank() == 0 { self.own(param, path, shape, numel) } else { Ok(vec![0.0; numel]) };
        // A rank 0 without values sends zeros: the others wait for it, and learn of its failure in the end.
        let (mut values, result) = match own {
            Ok(values) => (values, Ok(())),
            Err(error) => (vec![0.0; numel], Err(error)),
        };
        self.group.broadcast(path, bytemuck::cast_slice_mut(&mut values), 0)?;
        result.map(|()| values)
    }

    /// This rank's own values.
    fn own<const D: usize>(
        &self,
        param: &Param<Tensor<D>>,
        path: &str,
        shape: &[usize],
        numel: usize,
    ) -> Result<Vec<f32>, ShardError> {
        let mut whole = vec![0.0; numel];
        if !self.ask_source(path, shape, 0..numel, &mut whole)? {
            self.ask_module(param, path, shape, |values| whole.copy_from_slice(values))?;
        }
        Ok(whole)
    }

    /// Lets `take` see the module's own values.
    fn ask_module<const D: usize>(
        &self,
        param: &Param<Tensor<D>>,
        path: &str,
        shape: &[usize],
        take: impl FnOnce(&[f32]),
    ) -> Result<(), ShardError> {
        let value = self.initial(param, path)?;
        if value.dims().as_slice() != shape {
            let (path, stored, used) = (path.to_string(), shape.to_vec(), value.dims().to_vec());
            return Err(ShardError::Transposed { path, stored, used });
        }
        // What is narrower than f32 passes through it unchanged.
        if value.dtype() == burn::tensor::DType::F64 {
            return Err(ShardError::Type { path: path.to_string(), dtype: DType::F64 });
        }
        let data = value.into_data().convert::<f32>();
        let values = data
            .as_slice::<f32>()
            .map_err(|error| ShardError::Load { path: path.to_string(), message: format!("{error:?}") })?;
        take(values);
        Ok(())
    }

    fn ask_source(
        &self,
        path: &str,
        shape: &[usize],
        elements: Range<usize>,
        out: &mut [f32],
    ) -> Result<bool, ShardError> {
        let filled = self.source.fill(path, shape, elements, out);
        let filled = filled.map_err(|message| ShardError::Load { path: path.to_string(), message })?;
        if filled || self.asks_module {
            return Ok(filled);
        }
        Err(ShardError::Uninitialised {
            path: path.to_string(),
            message: "the source has no values for it, and the module's own initialiser is not to be used"
                .into(),
        })
    }

    /// The module's own value, drawn for `path` if there is none yet.
    fn initial<const D: usize>(&self, param: &Param<Tensor<D>>, path: &str) -> Result<Tensor<D>, ShardError> {
        let _turn = INITIALISING.lock().unwrap_or_else(PoisonError::into_inner);
        param.lazy_device().seed(seed_for(self.seed, path));
        // A module that must be loaded has initialisers that panic.
        catch_unwind(AssertUnwindSafe(|| param.val())).map_err(|panic| ShardError::Uninitialised {
            path: path.to_string(),
            message: format!("the module's own initialiser failed: {}", message_of(&*panic)),
        })
    }

    /// The module's own value of a parameter that is left alone, rank 0's if the policy says so.
    pub(crate) fn initial_shared<const D: usize>(
        &mut self,
        param: &Param<Tensor<D>>,
        path: &str,
    ) -> Result<Tensor<D>, ShardError> {
        let (shape, device) = (param.lazy_shape(), param.lazy_device());
        match self.initial(param, path) {
            Ok(value) => self.shared(value, path),
            Err(error) => {
                // As in `whole`: the others wait for this rank, and learn of its failure in the end.
                if self.travel() {
                    self.shared(Tensor::<D>::zeros(shape, &device), path)?;
                }
                Err(error)
            }
        }
    }

    /// The value of something that is left alone, rank 0's if the policy says so.
    pub(crate) fn shared<const D: usize, K: Basic>(
        &mut self,
        value: Tensor<D, K>,
        path: &str,
    ) -> Result<Tensor<D, K>, ShardError> {
        if self.policy == InitialValues::Trusted {
            return Ok(value);
        }
        let device = value.device();
        let data = value.clone().into_data();
        if self.policy == InitialValues::Checked {
            self.compare(path, data.as_bytes());
            return Ok(value);
        }
        let mut bytes = data.as_bytes().to_vec();
        self.group.broadcast(path, &mut bytes, 0)?;
        let dtype = data.dtype();
        let data = TensorData::from_bytes_vec(bytes, data.shape().clone(), dtype);
        Ok(Tensor::from_data(data, (&device, dtype)))
    }

    fn compare(&mut self, path: &str, bytes: &[u8]) {
        if self.policy == InitialValues::Checked {
            let chunk = |chunk: &[u8]| {
                let mut word = [0; 8];
                word[..chunk.len()].copy_from_slice(chunk);
                u64::from_le_bytes(word)
            };
            let mix = |hash: u64, bytes: &[u8]| SplitMix64::new(hash ^ chunk(bytes)).next_u64();
            self.hashes.push((path.to_string(), bytes.chunks(8).fold(bytes.len() as u64, mix)));
        }
    }

    /// Ends the filling: a failure of any rank, or a difference that was found, is an error on all of them.
    pub(crate) fn agree(self, own: Option<ShardError>) -> Result<(), ShardError> {
        let text = own.as_ref().map(ToString::to_string).unwrap_or_default();
        let all = self.group.all_gather_varied("initial values", text.as_bytes())?;
        if let Some(own) = own {
            return Err(own);
        }
        if let Some((rank, message)) = all.iter().enumerate().find(|(_, message)| !message.is_empty()) {
            let message = String::from_utf8_lossy(message).into_owned();
            return Err(ShardError::InitOfPeer { rank: self.group.members()[rank], message });
        }
        if self.policy != InitialValues::Checked {
            return Ok(());
        }
        let own: Vec<u8> = self.hashes.iter().flat_map(|(_, hash)| hash.to_le_bytes()).collect();
        let all = self.group.all_gather_varied("hashes of initial values", &own)?;
        for (index, (path, _)) in self.hashes.iter().enumerate() {
            let at = index * size_of::<u64>()..(index + 1) * size_of::<u64>();
            let differs = |rank: &usize| all[*rank].get(at.clone()) != all[0].get(at.clone());
            let ranks: Vec<usize> =
                (0..all.len()).filter(differs).map(|rank| self.group.members()[rank]).collect();
            if !ranks.is_empty() {
                let (path, first) = (path.clone(), self.group.members()[0]);
                return Err(ShardError::ValuesDiffer { path, first, ranks });
            }
        }
        Ok(())
    }
}

/// The words of a panic.
fn message_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "without a message".into())
}
