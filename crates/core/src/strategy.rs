//! When a unit's full parameters exist, and what each rank keeps.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::PlanError;

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
    /// As [`ShardingStrategy::FullShard`] inside groups of ranks; the groups are replicas of each other, whose gradients
    /// are summed across (FSDP's `HYBRID_SHARD`, MiCS).
    HybridShard,
    /// As [`ShardingStrategy::ShardGradOp`] inside groups that are replicas of each other.
    HybridShardZero2,
}

impl ShardingStrategy {
    /// Whether each rank keeps only its shard of the parameters and of the optimizer state.
    pub fn is_sharded(self) -> bool {
        self != ShardingStrategy::NoShard
    }

    /// Whether a unit's full parameters are freed between its forward and its backward.
    pub fn reshards_after_forward(self) -> bool {
        matches!(self, ShardingStrategy::FullShard | ShardingStrategy::HybridShard)
    }

    /// Whether ranks fall into groups that are replicas of each other.
    pub fn is_hybrid(self) -> bool {
        matches!(self, ShardingStrategy::HybridShard | ShardingStrategy::HybridShardZero2)
    }

    /// How many of `ranks` share one copy of the model: all of them, or with a hybrid strategy `shard_group`. Groups are
    /// of neighbouring ranks.
    ///
    /// # Errors
    /// When a hybrid strategy lacks the size of its groups, another one has it, or it does not divide the ranks.
    pub fn shard_group_size(self, ranks: usize, shard_group: Option<usize>) -> Result<usize, PlanError> {
        match (self.is_hybrid(), shard_group) {
            (false, None) => Ok(ranks),
            (false, Some(shard_group)) => Err(PlanError::NotHybrid { shard_group, strategy: self }),
            (true, None) => Err(PlanError::NoShardGroup { strategy: self, ranks }),
            (true, Some(size)) if size > 0 && ranks.is_multiple_of(size) => Ok(size),
            (true, Some(shard_group)) => {
                let suggestion = (1..=shard_group.min(ranks)).rev().find(|d| ranks.is_multiple_of(*d));
                Err(PlanError::ShardGroupDoesNotDivide {
                    shard_group,
                    ranks,
                    suggestion: suggestion.unwrap_or(1),
                })
            }
        }
    }

    /// The name used in configurations and reports.
    pub fn name(self) -> &'static str {
        match self {
            ShardingStrategy::FullShard => "full_shard",
            ShardingStrategy::ShardGradOp => "shard_grad_op",
            ShardingStrategy::NoShard => "no_shard",
            ShardingStrategy::HybridShard => "hybrid_shard",
            ShardingStrategy::HybridShardZero2 => "hybrid_shard_zero2",
        }
    }
}

impl fmt::Display for ShardingStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
