//! What can go wrong between a Burn module and the engine.

use shardwise_comm::CommError;
use shardwise_core::{DType, LayoutError};
use shardwise_engine::EngineError;
use thiserror::Error;

/// Why a module cannot be sharded, or a step failed.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum ShardError {
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
    /// A parameter is tied across units.
    #[error(
        "`{first}` and `{second}` are one parameter, but they lie in different units (`{first_unit}` and `{second_unit}`); \
         move the tie out of the units, so that the root owns it"
    )]
    TiedAcrossUnits {
        /// The path met first.
        first: String,
        /// Its unit.
        first_unit: String,
        /// The other path.
        second: String,
        /// Its unit.
        second_unit: String,
    },
    /// A parameter is not of the type that is trained.
    #[error("parameter `{path}` is {dtype}; parameters are trained in f32: convert it")]
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
    /// Values for a parameter could not be had.
    #[error("loading parameter `{path}`: {message}")]
    Load {
        /// The parameter.
        path: String,
        /// What is wrong.
        message: String,
    },
}
