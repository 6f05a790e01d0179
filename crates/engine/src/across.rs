//! The second hop of a reduction: what a group of ranks has summed meets the sums of the other groups.
//!
//! In a hybrid layout the groups are replicas of each other: each rank shows its group's sum of its part, and adds up
//! everyone's. With nodes, one copy of the model is spread over all of them: each rank shows its node's sums of the parts of
//! all ranks that have its place in their nodes, and adds up its own part of everyone's. So what is summed enters a node
//! once, and not once for each of its ranks.

use std::ops::Range;

use shardwise_comm::{CommError, PendingReduce, ProcessGroup, ReduceScatter, SharedBuffer};
use shardwise_core::{Precision, Purpose, Quantization, Traffic};

use crate::gradient_wire::{GradientWire, Hop};
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

/// How large the parts of a relay are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RelaySize {
    /// Elements of the largest.
    pub(crate) numel: usize,
    /// What they are quantised to besides.
    pub(crate) quantised: Option<Quantization>,
}

impl RelaySize {
    fn allocate(
        self,
        group: &ProcessGroup,
        parts: usize,
        (purpose, ledger): (Purpose, &mut Ledger),
    ) -> Result<SharedBuffer, CommError> {
        let codes = parts * self.quantised.map_or(0, |how| how.bytes(self.numel));
        let relay = group.allocate(parts * self.numel + codes / size_of::<f32>())?;
        ledger.add(purpose, parts * self.numel);
        if codes > 0 {
            ledger.add_bytes(Purpose::QuantisedGradients, codes);
        }
        Ok(relay)
    }
}

impl Across {
    /// For replicas: this rank keeps the `part`-th of the parts of its group.
    pub(crate) fn replicas(
        group: ProcessGroup,
        part: usize,
        size: RelaySize,
        ledger: &mut Ledger,
    ) -> Result<Self, CommError> {
        let relay = size.allocate(&group, 1, (Purpose::ReplicaSum, ledger))?;
        Ok(Self { group, parts: vec![part], own: 0, relay })
    }

    /// For nodes of `near` ranks, of which this is the one at `place`.
    pub(crate) fn nodes(
        group: ProcessGroup,
        (near, place): (usize, usize),
        size: RelaySize,
        ledger: &mut Ledger,
    ) -> Result<Self, CommError> {
        let parts: Vec<usize> = (0..group.size()).map(|node| node * near + place).collect();
        let relay = size.allocate(&group, parts.len(), (Purpose::HierarchyRelay, ledger))?;
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
        wire: Option<&mut GradientWire>,
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
            quantised: wire.as_ref().and_then(|wire| wire.quantised(Hop::Across)),
            summed: 0..self.group.size(),
        };
        if let Some(wire) = wire {
            wire.encode(Hop::Across, &how, relay);
            // Of several parts, each is read by its owner; of one, by all others.
            let (parts, others, own) = (self.parts.len(), self.group.size() - 1, self.own);
            let readers = |slot| if parts == 1 { others } else { usize::from(slot != own) };
            wire.commit(Hop::Across, &how, relay, |slot| Traffic::of(0, readers(slot)))?;
        }
        self.group.reduce(&how, &self.relay, self.own, sum, add)
    }
}

fn slot_range(slot: usize, numel: usize) -> Range<usize> {
    slot * numel..(slot + 1) * numel
}
