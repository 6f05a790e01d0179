//! When a unit's full parameters exist, and what each rank keeps.

use std::fmt;

use serde::{Deserialize, Serialize};

/// How a unit's parameters, gradients and optimizer state are spread over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ShardingStrategy {
    /// Everything is sharded; a unit is gathered for forward, freed, and gathered again for backward (ZeRO-3).
    #[default]
    FullShard,
    /// Everything is sharded; a unit is gathered for forward and kept until its backward is done (ZeRO-2).
    ShardGradOp,
    /// Every rank holds all parameters and optimizer state; gradients are all-reduced (DDP).
    NoShard,
}

impl ShardingStrategy {
    /// Whether each rank keeps only its shard of the parameters and of the optimizer state.
    pub fn is_sharded(self) -> bool {
        self != ShardingStrategy::NoShard
    }

    /// Whether a unit's full parameters are freed between its forward and its backward.
    pub fn reshards_after_forward(self) -> bool {
        self == ShardingStrategy::FullShard
    }

    /// The name used in configurations and reports.
    pub fn name(self) -> &'static str {
        match self {
            ShardingStrategy::FullShard => "full_shard",
            ShardingStrategy::ShardGradOp => "shard_grad_op",
            ShardingStrategy::NoShard => "no_shard",
        }
    }
}

impl fmt::Display for ShardingStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
