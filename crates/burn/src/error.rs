//! What can go wrong between a Burn module and the engine.

use std::fmt;

use shardwise_comm::CommError;
use shardwise_core::{DType, LayoutError, Tier};
use shardwise_engine::{EngineError, ParamStatus};
use thiserror::Error;

/// What a message says of a parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParamSummary {
    /// Its path.
    pub path: String,
    /// The unit that owns it.
    pub unit: String,
    /// Where its full values are.
    pub status: ParamStatus,
    /// Its whole shape.
    pub shape: Vec<usize>,
    /// How many of its elements this rank keeps.
    pub shard_numel: usize,
    /// Whether it is trained.
    pub requires_grad: bool,
    /// Whether every rank keeps it whole, whatever the strategy.
    pub persisted: bool,
}

impl ParamSummary {
    /// The number of elements of the whole parameter.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }
}

impl fmt::Display for ParamSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, unit, status, shape, shard_numel, requires_grad, persisted } = self;
        write!(
            f,
            "parameter `{path}` of unit `{unit}` ({status:?}, shape {shape:?}, {} elements, {shard_numel} of them here, \
             requires_grad {requires_grad}, persisted {persisted})",
            self.numel()
        )
    }
}

/// Why a module cannot be sharded, or a step failed.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum ShardError {
    /// Where parameters rest was said twice, and differently.
    #[error(
        "remote_device is \"{remote_device}\", but offload.parameters is \"{parameters}\"; both say where the shards of \
         parameters rest: make them equal, or leave one out"
    )]
    RemoteDevice {
        /// What was asked of the `Init`.
        remote_device: Tier,
        /// What the configuration says.
        parameters: Tier,
    },
    /// The engine reported it.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// Communication outside a step failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The parameters cannot be laid out.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A parameter does not live where it can be trained.
    #[error("parameter `{path}` is on {device}; build the model on `Device::flex().autodiff()` to shard it")]
    Device {
        /// The parameter.
        path: String,
        /// Its device.
        device: String,
    },
    /// A tied parameter is trained under one path and frozen under another.
    #[error(
        "`{trained}` and `{frozen}` are one parameter, but it is trained under the first path and frozen under the second; \
         freeze or train both"
    )]
    TieHalfFrozen {
        /// A path under which it is trained.
        trained: String,
        /// A path under which it is frozen.
        frozen: String,
    },
    /// A wrapping policy names a type of which no layer is wrapped.
    #[error(
        "wrapping policy: no layer in a `Sharded` wrapper is a `{name}` (there are: {there:?}); name one of these, or wrap \
         the layer"
    )]
    NoSuchContainer {
        /// The name.
        name: String,
        /// The types of the wrapped layers.
        there: Vec<String>,
    },
    /// A registration of an external parameter does not fit the model.
    #[error("external parameter `{path}` of unit `{unit}`: {message}")]
    External {
        /// The unit that uses it.
        unit: String,
        /// The parameter.
        path: String,
        /// What is wrong and what would be right.
        message: String,
    },
    /// A parameter is not of the type that is trained.
    #[error(
        "parameter `{path}` is {dtype}; parameters are trained in f32, and gathered in f32, bf16 or f16: convert it"
    )]
    Type {
        /// The parameter.
        path: String,
        /// Its type.
        dtype: DType,
    },
    /// A parameter is stored in another layout than it is used in.
    #[error(
        "parameter `{path}` is stored as {stored:?} but used as {used:?}; use a layer that stores it as it uses it (for \
         `Linear`: `LinearLayout::Row`)"
    )]
    Transposed {
        /// The parameter.
        path: String,
        /// The stored shape.
        stored: Vec<usize>,
        /// The shape in use.
        used: Vec<usize>,
    },
    /// A path that names no parameter.
    #[error("there is no parameter `{path}`; similar: {similar:?}")]
    UnknownParameter {
        /// The path.
        path: String,
        /// Paths that end alike.
        similar: Vec<String>,
    },
    /// A name that names no unit.
    #[error("there is no unit `{name}` with parameters; there are: {units:?}")]
    UnknownUnit {
        /// The name.
        name: String,
        /// The units with parameters.
        units: Vec<String>,
    },
    /// A parameter was read through a scope that does not hold it.
    #[error(
        "{summary} is not among the {held} parameters that this scope holds on this rank; open a scope that names it or its \
         unit, with `gather` to read it or with `gather_mut` to change it"
    )]
    NotInScope {
        /// The parameter.
        summary: Box<ParamSummary>,
        /// How many parameters the scope has.
        held: usize,
    },
    /// A scope was refused because another holds one of its parameters, and one of the two writes.
    #[error(
        "{call}: {paths:?} are held by another open scope (on ranks {ranks:?}), and a scope that writes must be alone; end \
         the other scope first"
    )]
    ScopeOverlap {
        /// The call.
        call: &'static str,
        /// The parameters that both want.
        paths: Vec<String>,
        /// The ranks on which the other scope is open.
        ranks: Vec<usize>,
    },
    /// Ranks opened different scopes.
    #[error(
        "ranks open different scopes: rank {} calls {}, rank {} calls {}; every rank must open the same",
        ranks[0],
        asked[0],
        ranks[1],
        asked[1]
    )]
    ScopesDiffer {
        /// Two ranks.
        ranks: [usize; 2],
        /// What each asked for.
        asked: [String; 2],
    },
    /// Another rank could not open a scope.
    #[error("{call}: rank {rank} could not: {message}")]
    ScopeOfPeer {
        /// The call.
        call: &'static str,
        /// That rank.
        rank: usize,
        /// Its error.
        message: String,
    },
    /// A modifier that is not a rank.
    #[error("{call}: modifier_rank {rank} is not one of the {ranks} ranks; name one below {ranks}")]
    NoSuchRank {
        /// The call.
        call: &'static str,
        /// The rank.
        rank: usize,
        /// How many there are.
        ranks: usize,
    },
    /// Values that only one rank has cannot be written back by all.
    #[error(
        "summon_full_params: rank0_only and writeback exclude each other, because the other ranks hold no values to write \
         back; drop one of them, or use `gather_mut`"
    )]
    Rank0OnlyWriteback,
    /// A value of another shape than its parameter.
    #[error("parameter `{path}` has shape {shape:?}, not {given:?}; use its own shape")]
    Shape {
        /// The parameter.
        path: String,
        /// Its shape.
        shape: Vec<usize>,
        /// The other shape; zeros stand for sizes that are not known.
        given: Vec<usize>,
    },
    /// Parameters cannot be frozen or unfrozen any more.
    #[error(
        "set_trainable: the optimizer keeps statistics of parameters that it has updated, and those would start afresh; \
         choose before the first update, or export the model and shard it anew"
    )]
    StatisticsInUse,
    /// A parameter that no one gives a first value.
    #[error("parameter `{path}` is initialised by no one: {message}; give its values with a `ParamSource`")]
    Uninitialised {
        /// The parameter.
        path: String,
        /// Who was asked.
        message: String,
    },
    /// Ranks have different first values.
    #[error(
        "the first values of parameter `{path}` differ: those of ranks {ranks:?} are not those of rank {first}; build the same \
         module everywhere, or use `InitialValues::Synced` to send rank {first}'s to all"
    )]
    ValuesDiffer {
        /// The first such parameter.
        path: String,
        /// The rank that the others are compared with.
        first: usize,
        /// The ranks that differ from it.
        ranks: Vec<usize>,
    },
    /// Another rank could not fill its shards.
    #[error("rank {rank} could not initialise its part of the model: {message}")]
    InitOfPeer {
        /// That rank.
        rank: usize,
        /// Its error.
        message: String,
    },
    /// Values for a parameter could not be had.
    #[error("loading parameter `{path}`: {message}")]
    Load {
        /// The parameter.
        path: String,
        /// What is wrong.
        message: String,
    },
}
