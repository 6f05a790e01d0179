//! A unit's parameters as one flat parameter: row-major data one after another, cut into equal shards.
//!
//! The layout is that of PyTorch FSDP's flat parameter without alignment gaps: offsets are sums of element counts,
//! the shard of every rank has `ceil(numel / world_size)` elements, and only the end of the last shards is padding.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;

use crate::error::LayoutError;
use crate::precision::Precision;
use crate::shard::ShardMetadata;

/// The element type of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE single precision.
    F32,
    /// bfloat16.
    BF16,
    /// IEEE half precision.
    F16,
    /// IEEE double precision.
    F64,
    /// Any integer or boolean type: never flattened.
    Int,
}

impl DType {
    /// Whether it is narrower than f32.
    pub fn is_low(self) -> bool {
        self.low().is_some()
    }

    /// The type as numbers of it travel, if it is narrower than f32.
    pub fn low(self) -> Option<Precision> {
        match self {
            DType::BF16 => Some(Precision::Bf16),
            DType::F16 => Some(Precision::F16),
            DType::F32 | DType::F64 | DType::Int => None,
        }
    }

    /// Whether a parameter of this type can be trained.
    pub fn is_float(self) -> bool {
        self != DType::Int
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::F32 => "f32",
            DType::BF16 => "bf16",
            DType::F16 => "f16",
            DType::F64 => "f64",
            DType::Int => "an integer type",
        })
    }
}

/// One parameter as a walk over the module meets it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParamSpec {
    /// Its path in the model: the stable name of the parameter.
    pub path: String,
    /// Equal for two paths that reach the same parameter (a tie); otherwise different.
    pub identity: u64,
    /// Its whole shape.
    pub shape: Vec<usize>,
    /// Its element type.
    pub dtype: DType,
    /// Whether it is trained.
    pub requires_grad: bool,
    /// The unit whose flat parameter it is part of already, if any.
    pub owner: Option<String>,
}

impl ParamSpec {
    /// A trainable f32 parameter of its own.
    pub fn f32(path: impl Into<String>, identity: u64, shape: impl Into<Vec<usize>>) -> Self {
        Self {
            path: path.into(),
            identity,
            shape: shape.into(),
            dtype: DType::F32,
            requires_grad: true,
            owner: None,
        }
    }

    /// The number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }
}

/// A parameter's place in its flat parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParamInfo {
    /// Its path in the model.
    pub path: String,
    /// Its whole shape.
    pub shape: Vec<usize>,
    /// The number of elements.
    pub numel: usize,
    /// The first element's index in the flat parameter.
    pub offset: usize,
}

impl ParamInfo {
    /// The elements of the flat parameter that belong to this parameter.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.numel
    }
}

/// A further path to a parameter that is stored once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedParamInfo {
    /// This path.
    pub path: String,
    /// The path that was met first, under which the parameter is stored.
    pub primary_path: String,
    /// The index of the parameter in [`FlatLayout::params`].
    pub param_index: usize,
}

/// The flat parameter of one unit over `world_size` ranks. Immutable: a checkpoint replaces data, never this.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlatLayout {
    unit: String,
    params: Vec<ParamInfo>,
    shared: Vec<SharedParamInfo>,
    dtype: DType,
    requires_grad: bool,
    numel: usize,
    world_size: usize,
    replicated: bool,
}

impl FlatLayout {
    /// Lays out the parameters of `unit` in the given (module-walk) order.
    ///
    /// # Errors
    /// When the list is empty, a parameter is not a float or is part of a flat parameter already, or two parameters
    /// differ in dtype or `requires_grad`; [`FlatLayout::build_groups`] splits mixed lists instead.
    pub fn build(
        unit: impl Into<String>,
        specs: &[ParamSpec],
        world_size: usize,
    ) -> Result<Self, LayoutError> {
        let unit = unit.into();
        if world_size == 0 {
            return Err(LayoutError::NoRanks { unit });
        }
        let Some(first) = specs.first() else { return Err(LayoutError::Empty { unit }) };
        let mut primary_of: HashMap<u64, usize> = HashMap::new();
        let mut by_path: HashMap<&str, u64> = HashMap::new();
        let mut params: Vec<ParamInfo> = Vec::new();
        let mut shared = Vec::new();
        let mut offset = 0;
        for spec in specs {
            check_spec(&unit, first, spec)?;
            if by_path.insert(&spec.path, spec.identity).is_some() {
                return Err(LayoutError::DuplicatePath { unit, path: spec.path.clone() });
            }
            if let Some(&param_index) = primary_of.get(&spec.identity) {
                shared.push(SharedParamInfo {
                    path: spec.path.clone(),
                    primary_path: params[param_index].path.clone(),
                    param_index,
                });
                continue;
            }
            primary_of.insert(spec.identity, params.len());
            let numel = spec.numel();
            params.push(ParamInfo { path: spec.path.clone(), shape: spec.shape.clone(), numel, offset });
            offset += numel;
        }
        let (dtype, requires_grad) = (first.dtype, first.requires_grad);
        Ok(Self { unit, params, shared, dtype, requires_grad, numel: offset, world_size, replicated: false })
    }

    /// Lays out a mixed list as one flat parameter for each (dtype, `requires_grad`) it contains, in the order in which
    /// the combinations are first met.
    ///
    /// # Errors
    /// As [`FlatLayout::build`], except that mixed lists are allowed.
    pub fn build_groups(
        unit: impl Into<String>,
        specs: &[ParamSpec],
        world_size: usize,
    ) -> Result<Vec<Self>, LayoutError> {
        let unit = unit.into();
        if specs.is_empty() {
            return Err(LayoutError::Empty { unit });
        }
        let mut groups: Vec<((DType, bool), Vec<ParamSpec>)> = Vec::new();
        for spec in specs {
            let key = (spec.dtype, spec.requires_grad);
            match groups.iter_mut().find(|(k, _)| *k == key) {
                Some((_, members)) => members.push(spec.clone()),
                None => groups.push((key, vec![spec.clone()])),
            }
        }
        groups.iter().map(|(_, members)| Self::build(unit.clone(), members, world_size)).collect()
    }

    /// The unit's name.
    pub fn unit(&self) -> &str {
        &self.unit
    }

    /// The parameters, each once, in order.
    pub fn params(&self) -> &[ParamInfo] {
        &self.params
    }

    /// The further paths of tied parameters.
    pub fn shared_params(&self) -> &[SharedParamInfo] {
        &self.shared
    }

    /// The dtype of every parameter.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Whether the parameters are trained.
    pub fn requires_grad(&self) -> bool {
        self.requires_grad
    }

    /// The same, kept whole by every rank whatever the strategy: never gathered, its gradient reduced all the same, and
    /// updated alike by all.
    #[must_use]
    pub fn replicated(self) -> Self {
        Self { replicated: true, ..self }
    }

    /// Whether every rank keeps the whole.
    pub fn is_replicated(&self) -> bool {
        self.replicated
    }

    /// The number of ranks that share the flat parameter.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Elements without padding.
    pub fn numel(&self) -> usize {
        self.numel
    }

    /// Elements of every rank's shard, padding included: `ceil(numel / world_size)`.
    pub fn shard_numel(&self) -> usize {
        self.numel.div_ceil(self.world_size)
    }

    /// Elements with padding: `world_size * shard_numel`.
    pub fn padded_numel(&self) -> usize {
        self.shard_numel() * self.world_size
    }

    /// The elements of the flat parameter that `rank` owns, without padding; empty at the end for a rank that owns
    /// only padding.
    ///
    /// # Panics
    /// When `rank` is not below the world size.
    pub fn shard_range(&self, rank: usize) -> Range<usize> {
        assert!(rank < self.world_size, "rank {rank} of {}", self.world_size);
        let s = self.shard_numel();
        (rank * s).min(self.numel)..((rank + 1) * s).min(self.numel)
    }

    /// Which elements of which parameters `rank` owns.
    pub fn shard_metadata(&self, rank: usize) -> ShardMetadata {
        ShardMetadata::of_range(&self.params, self.shard_range(rank))
    }

    /// The parameter under a path, tied paths included.
    pub fn find(&self, path: &str) -> Option<&ParamInfo> {
        self.params.iter().find(|p| p.path == path).or_else(|| {
            self.shared.iter().find(|s| s.path == path).and_then(|s| self.params.get(s.param_index))
        })
    }
}

fn check_spec(unit: &str, first: &ParamSpec, spec: &ParamSpec) -> Result<(), LayoutError> {
    let unit = unit.to_string();
    if !spec.dtype.is_float() {
        return Err(LayoutError::NotFloat { unit, path: spec.path.clone(), dtype: spec.dtype });
    }
    if let Some(owner) = &spec.owner {
        return Err(LayoutError::AlreadyFlat { unit, path: spec.path.clone(), owner: owner.clone() });
    }
    if spec.dtype != first.dtype {
        return Err(LayoutError::MixedDTypes {
            unit,
            first: first.path.clone(),
            first_dtype: first.dtype,
            other: spec.path.clone(),
            other_dtype: spec.dtype,
        });
    }
    if spec.requires_grad != first.requires_grad {
        let (trainable, frozen) = if spec.requires_grad { (spec, first) } else { (first, spec) };
        return Err(LayoutError::MixedRequiresGrad {
            unit,
            trainable: trainable.path.clone(),
            frozen: frozen.path.clone(),
        });
    }
    Ok(())
}
