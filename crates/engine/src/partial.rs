//! Partial sums of a gradient shard over the micro-batches of a step, merged like the carries of a binary counter.

use shardwise_comm::reduce::add_into;
use shardwise_comm::{CommError, SharedBuffer};
use shardwise_core::CarryCounter;

/// The partial sums of one flat parameter and the free buffers for more. A sum without a buffer is zero: that of rounds in
/// which no rank used the unit.
#[derive(Debug, Default)]
pub(crate) struct PartialSums {
    counter: CarryCounter<Option<SharedBuffer>>,
    in_use: usize,
    free: Vec<SharedBuffer>,
}

impl PartialSums {
    /// How many buffers there are, in use or free.
    pub(crate) fn buffers(&self) -> usize {
        self.free.len() + self.in_use
    }

    /// Adds a free buffer.
    pub(crate) fn give(&mut self, buffer: SharedBuffer) {
        self.free.push(buffer);
    }

    /// Takes a buffer back that [`PartialSums::finish`] has handed out.
    pub(crate) fn give_back(&mut self, buffer: SharedBuffer) {
        self.in_use -= 1;
        self.free.push(buffer);
    }

    /// The buffer that was given back last, with what was summed in it, until the next sum begins.
    pub(crate) fn last(&self) -> Option<&SharedBuffer> {
        self.free.last()
    }

    /// Takes a free buffer away.
    pub(crate) fn take_free(&mut self) -> Option<SharedBuffer> {
        self.free.pop()
    }

    /// Whether the next sum needs a buffer that is not there.
    pub(crate) fn needs_buffer(&self) -> bool {
        self.free.is_empty() && self.counter.lowest().is_none_or(Option::is_none)
    }

    /// Takes in the sum over ranks of one micro-batch each, which `sum_into(buffer, add)` puts or adds into a buffer. There
    /// is one ([`PartialSums::needs_buffer`]).
    pub(crate) fn take_in(
        &mut self,
        sum_into: impl FnOnce(&mut [f32], bool) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        let older = self.counter.take_lowest();
        let items = 1 + usize::from(older.is_some());
        let (buffer, add) = match older.flatten() {
            Some(older) => (Some(older), true),
            None => {
                let free = self.free.pop();
                self.in_use += usize::from(free.is_some());
                (free, false)
            }
        };
        let Some(mut buffer) = buffer else { unreachable!("a buffer is reserved before every sum") };
        let summed = buffer.writable().and_then(|sum| sum_into(sum, add));
        let mut result = Ok(());
        self.push(Some(buffer), items, &mut result);
        summed.and(result)
    }

    /// Takes in a round in which no rank used the unit.
    pub(crate) fn take_in_zero(&mut self) -> Result<(), CommError> {
        let mut result = Ok(());
        match self.counter.take_lowest() {
            Some(older) => self.push(older, 2, &mut result),
            None => self.push(None, 1, &mut result),
        }
        result
    }

    fn push(&mut self, item: Option<SharedBuffer>, items: usize, result: &mut Result<(), CommError>) {
        let (free, in_use) = (&mut self.free, &mut self.in_use);
        self.counter.push(item, items, |older, newer| merge(older, newer, (free, in_use), result));
    }

    /// The sum over the step's micro-batches, `None` when no rank used the unit; the counter starts afresh.
    pub(crate) fn finish(&mut self) -> Result<Option<SharedBuffer>, CommError> {
        let mut result = Ok(());
        let (free, in_use) = (&mut self.free, &mut self.in_use);
        let sum = self.counter.finish(|larger, smaller| merge(larger, smaller, (free, in_use), &mut result));
        result.map(|()| sum.flatten())
    }
}

fn merge(
    older: Option<SharedBuffer>,
    newer: Option<SharedBuffer>,
    (free, in_use): (&mut Vec<SharedBuffer>, &mut usize),
    result: &mut Result<(), CommError>,
) -> Option<SharedBuffer> {
    let (mut sum, newer) = match (older, newer) {
        (Some(older), Some(newer)) => (older, newer),
        // A zero adds nothing.
        (one, other) => return one.or(other),
    };
    match sum.writable() {
        Ok(sum) => add_into(sum, newer.as_slice()),
        Err(error) => *result = Err(error),
    }
    free.push(newer);
    *in_use -= 1;
    Some(sum)
}
