//! Tiles in memory of the host: copied in and out, allocated when they are first written.

use crate::Result;
use crate::error::TierError;
use crate::object::{ObjectId, Objects};

/// A tier's tiles in memory.
#[derive(Debug)]
pub(crate) struct Host {
    rank: usize,
    objects: Objects<Vec<Option<Vec<u8>>>>,
    held: u64,
}

impl Host {
    pub(crate) fn new(rank: usize) -> Self {
        Self { rank, objects: Objects::new(rank), held: 0 }
    }

    pub(crate) fn create(&mut self, id: &str, tiles: usize) -> Result<ObjectId> {
        self.objects.check_new(id)?;
        Ok(self.objects.insert(id, vec![None; tiles]))
    }

    /// A tile's bytes; none if it was never written.
    pub(crate) fn read(&mut self, object: ObjectId, tile: usize) -> Result<Option<&[u8]>> {
        Ok(self.tile(object, tile)?.as_deref())
    }

    pub(crate) fn write(&mut self, object: ObjectId, tile: usize, bytes: &[u8]) -> Result<()> {
        let rank = self.rank;
        let place = self.tile(object, tile)?;
        let before = place.as_ref().map_or(0, Vec::capacity);
        // What is stored stays until there is room for what replaces it.
        let mut stored = place.take_if(|old| old.capacity() >= bytes.len()).unwrap_or_default();
        stored.clear();
        stored.try_reserve_exact(bytes.len()).map_err(|e| TierError::Memory {
            rank,
            bytes: bytes.len() as u64,
            what: format!("tile {tile} in memory"),
            cause: e.to_string(),
        })?;
        stored.extend_from_slice(bytes);
        let stored = place.insert(stored);
        let after = stored.capacity();
        self.held += after as u64;
        self.held -= before as u64;
        Ok(())
    }

    pub(crate) fn remove(&mut self, object: ObjectId) {
        let tiles = self.objects.remove(object).unwrap_or_default();
        self.held -= tiles.iter().flatten().map(|t| t.capacity() as u64).sum::<u64>();
    }

    /// Bytes of tiles.
    pub(crate) fn held(&self) -> u64 {
        self.held
    }

    fn tile(&mut self, object: ObjectId, tile: usize) -> Result<&mut Option<Vec<u8>>> {
        let rank = self.rank;
        let (id, tiles) = self.objects.named(object)?;
        let count = tiles.len();
        if tile >= count {
            return Err(crate::object::no_tile(rank, id, tile, count));
        }
        Ok(&mut tiles[tile])
    }
}
