//! How ranks fall into groups: those that share one copy of the model, those of one node, and those with the same place.

use std::ops::Range;

use shardwise_comm::ProcessGroup;
use shardwise_core::PlanError;

use crate::Result;
use crate::config::EngineConfig;
use crate::error::EngineError;

/// The groups that one rank is in.
#[derive(Debug)]
pub(crate) struct Groups {
    /// The ranks that share one copy of the model: all, or a group of a hybrid layout.
    pub(crate) shards: ProcessGroup,
    /// With nodes, the ranks of this one's.
    pub(crate) node: Option<ProcessGroup>,
    /// The ranks with the same place, one of each group of a hybrid layout or of each node; `None` where there is but one.
    pub(crate) across: Option<ProcessGroup>,
    /// The ranks whose full gradients this one sums, of all.
    pub(crate) summed: Range<usize>,
}

impl Groups {
    /// Splits the ranks as `config` says. Every rank must call it.
    ///
    /// # Errors
    /// When sizes do not fit, or a peer is lost or late.
    pub(crate) fn split(group: &ProcessGroup, config: &EngineConfig) -> Result<Self> {
        let (ranks, rank) = (group.size(), group.rank());
        let sharers = config.shard_group_size(ranks)?;
        let node = config.node_size(ranks)?;
        let split = |color: usize| {
            let split = group.split(color as u64, rank as u64);
            split.map_err(|source| EngineError::Comm { rank, source })
        };
        // Also without groups in an order of operations of its own: parameters are lent for a whole step, and an order holds
        // a bounded number of operations that are not finished.
        let shards = split(rank / sharers)?;
        let size = node.unwrap_or(sharers);
        let across = if size < ranks { Some(split(rank % size)?) } else { None };
        let first = rank / size * size;
        let node = node.map(|size| split(rank / size)).transpose()?;
        Ok(Self { shards, node, across, summed: first..first + size })
    }
}

impl EngineConfig {
    /// The ranks of one node, if one copy of the model is spread over several.
    ///
    /// # Errors
    /// When sizes do not divide the `ranks`, contradict each other, or differ from the groups of a hybrid strategy.
    pub fn node_size(&self, ranks: usize) -> Result<Option<usize>> {
        let (node, sharers) = (self.wire.node(ranks)?, self.shard_group_size(ranks)?);
        match node {
            // Everything but the sums across stays inside a group, so the groups are the nodes already.
            Some(node) if self.strategy.is_hybrid() && node == sharers => Ok(None),
            Some(node) if self.strategy.is_hybrid() => Err(EngineError::Plan(PlanError::Wire(format!(
                "nodes have {node} ranks, but strategy {} shards inside groups of {sharers}; make node_size (or \
                 secondary_partition_size) equal to shard_group, or leave it out",
                self.strategy
            )))),
            node => Ok(node),
        }
    }
}
