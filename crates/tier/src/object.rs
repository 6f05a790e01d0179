//! What a tier stores, by name: objects, each a row of tiles.

use std::collections::HashSet;

use crate::Result;
use crate::error::TierError;

/// An object of one tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ObjectId {
    index: usize,
    /// Which of the objects that had this index.
    generation: u64,
}

#[derive(Debug)]
struct Slot<T> {
    generation: u64,
    object: Option<(String, T)>,
}

/// The objects of a tier, each with its name.
#[derive(Debug)]
pub(crate) struct Objects<T> {
    rank: usize,
    slots: Vec<Slot<T>>,
    empty: Vec<usize>,
    names: HashSet<String>,
}

impl<T> Objects<T> {
    pub(crate) fn new(rank: usize) -> Self {
        Self { rank, slots: Vec::new(), empty: Vec::new(), names: HashSet::new() }
    }

    /// Refuses a name that is taken.
    pub(crate) fn check_new(&self, id: &str) -> Result<()> {
        if self.names.contains(id) {
            let message =
                format!("{id} is already stored in this tier; remove it before it is created again");
            return Err(TierError::Usage { rank: self.rank, message });
        }
        Ok(())
    }

    pub(crate) fn insert(&mut self, id: &str, object: T) -> ObjectId {
        self.names.insert(id.to_string());
        let index = self.empty.pop().unwrap_or_else(|| {
            self.slots.push(Slot { generation: 0, object: None });
            self.slots.len() - 1
        });
        let slot = &mut self.slots[index];
        slot.object = Some((id.to_string(), object));
        ObjectId { index, generation: slot.generation }
    }

    pub(crate) fn get(&mut self, id: ObjectId) -> Result<&mut T> {
        self.named(id).map(|(_, object)| object)
    }

    pub(crate) fn named(&mut self, id: ObjectId) -> Result<(&str, &mut T)> {
        let rank = self.rank;
        self.slots
            .get_mut(id.index)
            .filter(|slot| slot.generation == id.generation)
            .and_then(|slot| slot.object.as_mut())
            .map(|(name, object)| (name.as_str(), object))
            .ok_or_else(|| TierError::Usage {
                rank,
                message: "an object was used that is not stored in this tier: it was removed, or belongs to another".into(),
            })
    }

    pub(crate) fn remove(&mut self, id: ObjectId) -> Option<T> {
        self.get(id).ok()?;
        let slot = &mut self.slots[id.index];
        slot.generation += 1;
        self.empty.push(id.index);
        let (name, object) = slot.object.take()?;
        self.names.remove(&name);
        Some(object)
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.slots.iter_mut().filter_map(|s| s.object.as_mut()).map(|(_, object)| object)
    }

    pub(crate) fn drain(&mut self) -> impl Iterator<Item = T> {
        self.slots.drain(..).filter_map(|s| s.object).map(|(_, object)| object)
    }
}

/// The error for a tile that an object does not have.
pub(crate) fn no_tile(rank: usize, id: &str, tile: usize, tiles: usize) -> TierError {
    TierError::Usage { rank, message: format!("{id} has {tiles} tiles; there is no tile {tile}") }
}
