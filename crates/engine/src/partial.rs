//! Partial sums of a gradient shard over the micro-batches of a step, merged like the carries of a binary counter.

use shardwise_comm::reduce::add_into;
use shardwise_comm::{CommError, PendingReduce, SharedBuffer};
use shardwise_core::CarryCounter;

/// The partial sums of one unit and the free buffers for more.
#[derive(Debug, Default)]
pub(crate) struct PartialSums {
    counter: CarryCounter<SharedBuffer>,
    free: Vec<SharedBuffer>,
}

impl PartialSums {
    /// How many buffers there are, in use or free.
    pub(crate) fn buffers(&self) -> usize {
        self.free.len() + self.counter.partials()
    }

    /// Adds a free buffer.
    pub(crate) fn give(&mut self, buffer: SharedBuffer) {
        self.free.push(buffer);
    }

    /// Whether the next sum needs a buffer that is not there.
    pub(crate) fn needs_buffer(&self) -> bool {
        self.free.is_empty() && !self.counter.has_lowest()
    }

    /// Takes in the sum over ranks of one micro-batch each.
    pub(crate) fn take_in(&mut self, reduce: &mut PendingReduce) -> Result<(), CommError> {
        let (mut buffer, items) = match (self.counter.take_lowest(), self.free.pop()) {
            (Some(older), free) => {
                self.free.extend(free);
                (older, 2)
            }
            (None, Some(free)) => (free, 1),
            (None, None) => unreachable!("a buffer is reserved before every sum"),
        };
        reduce.sum_into(buffer.writable()?, items == 2)?;
        let mut result = Ok(());
        let free = &mut self.free;
        self.counter.push(buffer, items, |older, newer| merge(older, newer, free, &mut result));
        result
    }

    /// The sum over the step's micro-batches; the counter starts afresh.
    pub(crate) fn finish(&mut self) -> Result<Option<SharedBuffer>, CommError> {
        let mut result = Ok(());
        let free = &mut self.free;
        let sum = self.counter.finish(|larger, smaller| merge(larger, smaller, free, &mut result));
        result.map(|()| sum)
    }
}

fn merge(
    mut older: SharedBuffer,
    newer: SharedBuffer,
    free: &mut Vec<SharedBuffer>,
    result: &mut Result<(), CommError>,
) -> SharedBuffer {
    match older.writable() {
        Ok(sum) => add_into(sum, newer.as_slice()),
        Err(error) => *result = Err(error),
    }
    free.push(newer);
    older
}
