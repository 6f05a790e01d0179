//! Training, in Rust, of models that do not fit one worker.
//!
//! Shardwise shards a Burn model's parameters, gradients and optimizer state over ranks: a layer's full parameters exist
//! only while the layer computes. As a library it works with any Burn module; the `shardwise` program trains GPT-2 and
//! Llama models from a configuration file.
//!
//! ```no_run
//! use burn::nn::{Linear, LinearConfig};
//! use burn::tensor::{Device, Tensor};
//! use shardwise::prelude::*;
//!
//! fn main() -> Result<(), RunError> {
//!     // Two processes: this one starts itself twice and waits.
//!     shardwise::run(2, |group| {
//!         let device = Device::flex().autodiff();
//!         let layer = LinearConfig::new(8, 1).init(&device);
//!         let mut model = ShardedModel::new(group, layer, ShardConfig::default(), &())?;
//!         for _ in 0..100 {
//!             model.step(2, 0.01, |layer: &Linear, micro_batch| {
//!                 let x = Tensor::<2>::ones([4, 8], &device) * (micro_batch as f64);
//!                 layer.forward(x).square().mean()
//!             })?;
//!         }
//!         Ok(())
//!     })
//! }
//! ```

#![forbid(unsafe_code)]

pub mod bench;
mod bounds;
mod claim;
pub mod cli;
pub mod config;
pub mod data;
mod dataset;
pub mod error;
mod export;
pub mod generate;
mod interrupt;
pub mod memory;
pub mod output;
pub mod plan;
pub mod report;
mod suggest;
mod tiers;
mod traffic;
pub mod train;
pub mod world;

pub use world::run;

/// What a program that shards its own model needs.
pub mod prelude {
    pub use shardwise_burn::{
        Ignored, Init, InitialValues, ParamSource, Persistence, ShardConfig, ShardError, Sharded,
        ShardedModel, StepOutcome, SummonOptions, Which, WrapPolicy, ops,
    };
    pub use shardwise_comm::ProcessGroup;
    pub use shardwise_core::ShardingStrategy;
    pub use shardwise_engine::{
        DecayRule, EngineConfig, GroupLr, GroupRule, LrSchedule, MuonScale, Norm, OptimizerConfig,
        ParamGroups,
    };

    pub use crate::error::RunError;
    pub use crate::world::run;
}
