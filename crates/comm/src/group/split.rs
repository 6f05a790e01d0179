//! Groups of some of a group's ranks, and the channel numbers that they use for as long as they live.

use std::ops::Range;
use std::sync::Arc;

use super::ProcessGroup;
use crate::Result;
use crate::board::{CHANNELS, SLOTS};
use crate::error::CommError;
use crate::transport::{Channel, Transport};

/// What a rank that uses a channel says of it when it splits a group.
const IN_USE: u64 = u64::MAX;

/// A channel number in use: given back with the last handle of the group.
#[derive(Debug)]
pub(super) struct Lease {
    transport: Arc<dyn Transport>,
    channel: Arc<Channel>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        let next = self.channel.upcoming();
        let mut last = next.saturating_sub(SLOTS as u64)..next;
        // A number whose last operations peers may still look at stays in use.
        if last.all(|seq| self.transport.is_released(&self.channel, seq)) {
            self.transport.give_channel(self.channel.id(), next);
        }
    }
}

impl ProcessGroup {
    /// Splits the group: members that pass the same `color` form a group of their own, ordered by `key`, then by rank.
    /// Every member must call it.
    ///
    /// # Errors
    /// When a peer is lost or late, or the world has no group left to give.
    pub fn split(&self, color: u64, key: u64) -> Result<ProcessGroup> {
        // A rank's own key, then the state of every channel that it knows.
        let mut own = Vec::with_capacity((2 + CHANNELS) * size_of::<u64>());
        own.extend([color, key].into_iter().flat_map(u64::to_le_bytes));
        let channels = self.transport.free_channels();
        own.extend(channels.iter().flat_map(|next| next.unwrap_or(IN_USE).to_le_bytes()));
        let all = self.all_gather_bytes("split", &own)?;
        let word = |bytes: &[u8], at: usize| {
            bytes.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(IN_USE, u64::from_le_bytes)
        };
        // The first number that no member uses, and the same for every color: groups of different colors have no member in
        // common, so they may share it. Its operations go on where those of earlier groups have ended.
        let next_of = |id: usize| all.iter().map(|b| word(b, 16 + 8 * id)).max().unwrap_or(IN_USE);
        let found = (0..channels.len()).map(|id| (id, next_of(id))).find(|(_, next)| *next != IN_USE);
        let Some((id, next)) = found else {
            let message = format!("a world can hold {CHANNELS} groups at a time, and all are in use");
            return Err(CommError::Usage { rank: self.transport.rank(), message });
        };
        self.transport.take_channel(id);
        let mut members: Vec<(u64, usize)> = all
            .iter()
            .enumerate()
            .filter(|(_, b)| word(b, 0) == color)
            .map(|(rank, b)| (word(b, 8), rank))
            .collect();
        members.sort_unstable();
        let index = members.iter().position(|(_, rank)| *rank == self.rank()).unwrap_or(0);
        let world_ranks = members.iter().map(|(_, rank)| self.channel.members()[*rank]).collect();
        let channel = Channel::from(id, world_ranks, index, next);
        leave_out(&*self.transport, &channel, channels[id].unwrap_or(next)..next);
        let mut group = Self::over(self.transport.clone(), channel);
        group.lease =
            Some(Arc::new(Lease { transport: group.transport.clone(), channel: group.channel.clone() }));
        Ok(group)
    }
}

/// Finishes operations that this rank does not start, so that peers do not wait for it. Only the last ones have a place on
/// the board that is looked at again.
pub(super) fn leave_out(transport: &dyn Transport, channel: &Channel, operations: Range<u64>) {
    let first = operations.start.max(operations.end.saturating_sub(SLOTS as u64));
    (first..operations.end).for_each(|seq| transport.finish(channel, seq));
}
