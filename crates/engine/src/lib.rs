//! The life of sharded parameters, gradients and optimizer state, for any tensor library.
//!
//! An [`Engine`] holds one rank's part of a model: a [`handle::FlatParamHandle`] for each unit and one for the root. An
//! adapter calls it around each unit's forward and backward; the engine gathers, frees, reduces and, at the end of a
//! step, clips and updates. It knows flat f32 buffers, not tensors.
//!
//! - [`engine`]: the step, and which call is allowed when.
//! - [`handle`]: one unit's buffers and their states.
//! - [`coordinator`]: the order of units, and what is gathered ahead.
//! - [`pass`]: what a unit's forward is for.
//! - [`optimizer`], [`lr`], [`norm`]: the update.
//! - [`scale`]: the loss scale.
//! - [`ledger`], [`events`]: what is held, and what happened.
//! - `swap`: what rests elsewhere than in memory.

mod access;
mod across;
mod average;
mod build;
pub mod config;
pub mod coordinator;
pub mod engine;
pub mod error;
pub mod events;
mod failure;
mod gradient_wire;
pub mod handle;
mod hierarchy;
mod hops;
mod in_backward;
pub mod ledger;
pub mod lr;
pub mod norm;
pub mod optimizer;
mod partial;
pub mod pass;
mod pool;
mod reduce;
mod rest;
pub mod scale;
mod swap;
mod trouble;
mod unit;
mod unshard;
mod uses;
pub mod view;
mod whole;
mod wire;

pub use config::{
    Accumulation, Divisor, EngineConfig, MAX_SKIPS, NonFinite, NonFiniteElement, StepReport, UnitId,
};
pub use engine::Engine;
pub use error::EngineError;
pub use events::{Event, EventKind};
pub use handle::{FlatParamHandle, ParamStatus};
pub use ledger::Ledger;
pub use lr::LrSchedule;
pub use norm::Norm;
pub use optimizer::{
    DecayRule, GroupLr, GroupRule, MuonScale, OptimizerConfig, ParamGroups, ParamRule, StateSlice,
};
pub use pass::ForwardPass;
pub use scale::{DynamicScale, LossScale, LossScaler};
pub use swap::{FileAccess, ShardStore, StoredShard, SwapPlace, TierTraffic};
pub use view::FlatView;

/// The result of an engine call.
pub type Result<T> = std::result::Result<T, EngineError>;
