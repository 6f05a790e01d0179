//! The second hop of a reduction: what a group of ranks has summed meets the sums of the other groups.
//!
//! In a hybrid layout the groups are replicas of each other: each rank shows its group's sum of its part, and adds up
//! everyone's. With nodes, one copy of the model is spread over all of them: each rank shows its node's sums of the parts of
//! all ranks that have its place in their nodes, and adds up its own part of everyone's. So what is summed enters a node
//! once, and not once for each of its ranks.

use std::ops::Range;

use shardwise_comm::{CommError, PendingReduce, ProcessGroup, ReduceScatter, SharedBuffer};
use shardwise_core::{Precision, Purpose};

use crate::ledger::Ledger;

/// The ranks that have the same place in their groups, and the sums that this one shows to the others.
#[derive(Debug)]
pub(crate) struct Across {
    group: ProcessGroup,
    /// The parts that are summed inside this rank's group, in the order of the groups that keep them.
    parts: Vec<usize>,
    /// Which of them this rank keeps.
    own: usize,
    relay: SharedBuffer,
}

impl Across {
    /// For replicas: this rank keeps the `part`-th of the parts of its group, of at most `numel` elements.
    pub(crate) fn replicas(
        group: ProcessGroup,
        part: usize,
        numel: usize,
        ledger: &mut Ledger,
    ) -> Result<Self, CommError> {
        let relay = group.allocate(numel)?;
        ledger.add(Purpose::ReplicaSum, numel);
        Ok(Self { group, parts: vec![part], own: 0, relay })
    }

    /// For nodes of `size` ranks, of which this is the one at `place`; parts have at most `numel` elements.
    pub(crate) fn nodes(
        group: ProcessGroup,
        (size, place): (usize, usize),
        numel: usize,
        ledger: &mut Ledger,
    ) -> Result<Self, CommError> {
        let parts: Vec<usize> = (0..group.size()).map(|node| node * size + place).collect();
        let relay = group.allocate(parts.len() * numel)?;
        ledger.add(Purpose::HierarchyRelay, relay.numel());
        Ok(Self { own: group.rank(), group, parts, relay })
    }

    /// Sums inside this rank's group, then over the groups in their order, into `sum` or onto what it holds. Every replica
    /// gets the same bits. Groups of neighbours whose size is a power of two give the bits of one large group.
    pub(crate) fn sum(
        &mut self,
        label: &str,
        pending: &mut PendingReduce,
        sum: &mut [f32],
        add: bool,
    ) -> Result<(), CommError> {
        let numel = sum.len();
        let relay = self.relay.writable()?;
        for (slot, part) in self.parts.iter().enumerate() {
            pending.sum_part_into(*part, &mut relay[slot_range(slot, numel)], false)?;
        }
        pending.finish();
        let how = ReduceScatter {
            label,
            part_numel: numel,
            parts: self.parts.len(),
            precision: Precision::F32,
            summed: 0..self.group.size(),
        };
        self.group.reduce(&how, &self.relay, self.own, sum, add)
    }
}

fn slot_range(slot: usize, numel: usize) -> Range<usize> {
    slot * numel..(slot + 1) * numel
}
