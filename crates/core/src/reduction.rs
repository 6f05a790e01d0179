//! The one order in which partial sums are added, over ranks and over micro-batches.
//!
//! Items arrive in order and merge like the carries of a binary counter: two partial sums of equal weight become one
//! of twice the weight, and what is left at the end merges smallest first. Over `W` ranks (a power of two) and then
//! over `K` rounds this is the balanced binary tree over the `W * K` micro-batches, so the result does not depend on `W`.

/// A binary counter of partial sums: says which sums to add when an item arrives.
///
/// `T` is whatever holds a partial sum (a buffer, an index of one).
#[derive(Debug, Clone)]
pub struct CarryCounter<T> {
    /// The partial sum of weight `2^level`, if the counter's bit is set.
    levels: Vec<Option<T>>,
}

impl<T> Default for CarryCounter<T> {
    fn default() -> Self {
        Self { levels: Vec::new() }
    }
}

impl<T> CarryCounter<T> {
    /// Takes the partial sum of weight one, if there is one: the next item is added to it. [`CarryCounter::push`] must
    /// follow.
    pub fn take_lowest(&mut self) -> Option<T> {
        self.levels.first_mut().and_then(Option::take)
    }

    /// What [`CarryCounter::take_lowest`] would take.
    pub fn lowest(&self) -> Option<&T> {
        self.levels.first().and_then(Option::as_ref)
    }

    /// Puts back a sum that holds `items` (1, or 2 after a successful [`CarryCounter::take_lowest`]) items, merging
    /// `(older, newer) -> sum` for as long as the place is taken.
    pub fn push(&mut self, item: T, items: usize, mut merge: impl FnMut(T, T) -> T) {
        debug_assert!(items == 1 || items == 2);
        let mut sum = item;
        for level in items - 1.. {
            if self.levels.len() <= level {
                self.levels.resize_with(level + 1, || None);
            }
            match self.levels[level].take() {
                None => {
                    self.levels[level] = Some(sum);
                    return;
                }
                Some(older) => sum = merge(older, sum),
            }
        }
    }

    /// The number of partial sums held.
    pub fn partials(&self) -> usize {
        self.levels.iter().flatten().count()
    }

    /// Merges what is left, smallest first, and empties the counter; `None` when nothing arrived.
    pub fn finish(&mut self, mut merge: impl FnMut(T, T) -> T) -> Option<T> {
        self.levels.drain(..).flatten().reduce(|smaller, larger| merge(larger, smaller))
    }
}

/// The most partial sums that [`CarryCounter`] holds while `items` arrive: `floor(log2(items + 1))`.
pub fn max_partials(items: usize) -> usize {
    (items + 1).ilog2() as usize
}
