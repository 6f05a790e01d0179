//! The second hop of a hybrid reduction: groups that are replicas of each other add their sums.

use shardwise_comm::{CommError, PendingReduce, ProcessGroup, SharedBuffer};
use shardwise_core::Purpose;

use crate::ledger::Ledger;

/// The ranks that keep the same elements, one of each group, and the sum that this one shows to the others.
#[derive(Debug)]
pub(crate) struct Replicas {
    group: ProcessGroup,
    own: SharedBuffer,
}

impl Replicas {
    /// For parts of at most `numel` elements.
    pub(crate) fn new(group: ProcessGroup, numel: usize, ledger: &mut Ledger) -> Result<Self, CommError> {
        let own = group.allocate(numel)?;
        ledger.add(Purpose::ReplicaSum, numel);
        Ok(Self { group, own })
    }

    /// Sums a part inside this rank's group, then over the groups in their order, into `sum` or onto what it holds. Every
    /// replica gets the same bits. Groups of neighbours whose size is a power of two give the bits of one large group.
    pub(crate) fn sum_across(
        &mut self,
        label: &str,
        pending: &mut PendingReduce,
        sum: &mut [f32],
        add: bool,
    ) -> Result<(), CommError> {
        pending.sum_into(&mut self.own.writable()?[..sum.len()], false)?;
        self.group.sum_lent(label, &self.own, sum, add)
    }
}
