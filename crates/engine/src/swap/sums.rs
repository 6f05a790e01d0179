//! Partial sums of a gradient shard that rest elsewhere between the rounds of a step.
//!
//! They merge like those in memory ([`crate::partial`]): the same additions in the same order. The newest sum is in the
//! staging buffer in which it was made; older ones come in tile by tile and are added to it.

use shardwise_comm::reduce::add_into;
use shardwise_core::{CarryCounter, Tier as Resting};

use super::{Moved, Section, Swap};
use crate::trouble::Trouble;

/// The partial sums of one flat parameter, and the sections in which they rest. A sum without a section is zero.
#[derive(Debug)]
pub(crate) struct AwaySums {
    resting: Resting,
    name: String,
    numel: usize,
    counter: CarryCounter<Option<usize>>,
    sections: Vec<Section>,
    free: Vec<usize>,
}

impl AwaySums {
    /// For sums of `numel` elements that rest under `name`.
    pub(crate) fn new(resting: Resting, name: String, numel: usize) -> Self {
        Self {
            resting,
            name,
            numel,
            counter: CarryCounter::default(),
            sections: Vec::new(),
            free: Vec::new(),
        }
    }

    /// Makes sure that there is room for `partials` sums.
    pub(crate) fn reserve(&mut self, swap: &mut Swap, partials: usize) -> Moved<()> {
        while self.sections.len() < partials {
            let name = format!("{}.{}", self.name, self.sections.len());
            let section = swap.create(self.resting, &name, &[self.numel])?;
            self.free.push(self.sections.len());
            self.sections.extend(section);
        }
        Ok(())
    }

    /// Where a sum rests.
    pub(crate) fn section(&self, index: usize) -> Section {
        self.sections[index]
    }

    /// Whether one sum holds all that the step has summed.
    pub(crate) fn is_single(&self) -> bool {
        self.counter.partials() == 1
    }

    /// Takes in the sum over ranks of one micro-batch each, which `sum_into(buffer, add)` puts into `stage` or adds to what
    /// it holds. `stage` holds the newest partial sum afterwards.
    pub(crate) fn take_in(
        &mut self,
        swap: &mut Swap,
        stage: &mut [f32],
        sum_into: impl FnOnce(&mut [f32], bool) -> Moved<()>,
    ) -> Moved<()> {
        let older = self.counter.take_lowest();
        let items = 1 + usize::from(older.is_some());
        let older = older.flatten();
        if let Some(index) = older {
            swap.read(&self.sections[index], stage)?;
        }
        sum_into(stage, older.is_some())?;
        let index = match older {
            Some(index) => index,
            None => self.free_section(swap)?,
        };
        self.push(swap, index, items, stage)
    }

    fn free_section(&mut self, swap: &mut Swap) -> Moved<usize> {
        if self.free.is_empty() {
            self.reserve(swap, self.sections.len() + 1)?;
        }
        Ok(self.free.pop().unwrap_or_default())
    }

    /// Counts the sum in `stage`, which belongs into section `index`.
    fn push(&mut self, swap: &mut Swap, index: usize, items: usize, stage: &mut [f32]) -> Moved<()> {
        let (sections, free) = (&self.sections, &mut self.free);
        let mut result = Ok(());
        self.counter.push(Some(index), items, |older, newer| {
            // An older sum that is zero adds nothing.
            if let Some(older) = older {
                result = result.clone().and_then(|()| add_section(swap, &sections[older], stage));
                free.push(older);
            }
            newer
        });
        result?;
        swap.write(&self.sections[index], stage)
    }

    /// Takes in a round in which no rank used the unit.
    pub(crate) fn take_in_zero(&mut self, swap: &mut Swap) -> Moved<()> {
        let (item, items) = match self.counter.take_lowest() {
            Some(older) => (older, 2),
            None => (None, 1),
        };
        let (sections, free) = (&self.sections, &mut self.free);
        let mut result = Ok(());
        self.counter
            .push(item, items, |older, newer| merge(swap, (sections, free), (older, newer), &mut result));
        result
    }

    /// The sum over the step's micro-batches, `None` when no rank used the unit; the counter starts afresh.
    pub(crate) fn finish(&mut self, swap: &mut Swap) -> Moved<Option<usize>> {
        let (sections, free) = (&self.sections, &mut self.free);
        let mut result = Ok(());
        let sum = self
            .counter
            .finish(|larger, smaller| merge(swap, (sections, free), (larger, smaller), &mut result));
        result.map(|()| sum.flatten())
    }

    /// Gives a sum's section back.
    pub(crate) fn give_back(&mut self, index: usize) {
        self.free.push(index);
    }

    /// Forgets what the step has summed.
    pub(crate) fn abandon(&mut self) {
        self.counter = CarryCounter::default();
        self.free = (0..self.sections.len()).collect();
    }
}

/// `stage += section`.
fn add_section(swap: &mut Swap, section: &Section, stage: &mut [f32]) -> Moved<()> {
    swap.read_tiles(section, |start, tile| {
        add_into(&mut stage[start..start + tile.len()], tile);
        Ok(())
    })
}

fn merge(
    swap: &mut Swap,
    (sections, free): (&[Section], &mut Vec<usize>),
    (older, newer): (Option<usize>, Option<usize>),
    result: &mut Result<(), Trouble>,
) -> Option<usize> {
    let (sum, newer) = match (older, newer) {
        (Some(older), Some(newer)) => (older, newer),
        (one, other) => return one.or(other),
    };
    if result.is_ok() {
        *result = swap.edit_tiles(&[(sections[sum], true), (sections[newer], false)], |_, tiles| {
            if let [sum, newer] = tiles {
                add_into(sum, newer);
            }
            Ok(())
        });
    }
    free.push(newer);
    Some(sum)
}
