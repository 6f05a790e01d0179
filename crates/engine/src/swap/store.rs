//! Shards that rest in files before there is an engine for them: those of a model that is taken apart while it is built.

use shardwise_comm::ProcessGroup;
use shardwise_core::{Offload, Tier as Resting};

use super::{Moved, Section, Swap, SwapPlace};
use crate::Result;

/// Buffers through which shards pass: one is filled while others are written.
const BUFFERS: usize = 4;

/// One rank's shards in files, in a folder that goes with the store.
#[derive(Debug)]
pub struct ShardStore {
    swap: Swap,
    rank: usize,
    /// How many times room was made.
    reserved: usize,
}

/// A shard in a [`ShardStore`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredShard(Section);

impl StoredShard {
    /// Its elements.
    pub fn numel(&self) -> usize {
        self.0.numel()
    }
}

impl ShardStore {
    /// Opens a store at `place`, with buffers as long as `offload` says and no more of them. A collective of `group`.
    ///
    /// # Errors
    /// When there is no place, or it cannot be used; a place that cannot be claimed is an error on all ranks.
    pub fn open(group: &ProcessGroup, offload: &Offload, place: Option<&SwapPlace>) -> Result<Self> {
        let offload = Offload {
            parameters: Resting::Nvme,
            optimizer: Resting::None,
            buffer_count: offload.buffer_count.min(BUFFERS),
            ratio: 1.0,
            ..*offload
        };
        offload.check()?;
        let swap = Swap::open(group, &offload, place)?;
        Ok(Self { swap, rank: group.rank(), reserved: 0 })
    }

    /// Makes room for shards of `numels` elements, each in a file of its own; they are zero until they are written.
    ///
    /// # Errors
    /// When a file cannot be made.
    pub fn reserve(&mut self, numels: &[usize]) -> Result<Vec<StoredShard>> {
        let name = format!("partitioned.{}", self.reserved);
        self.reserved += 1;
        let sections = self.swap.create(Resting::Nvme, &name, numels);
        Ok(self.named(sections)?.into_iter().map(StoredShard).collect())
    }

    /// Replaces all of a shard.
    ///
    /// # Errors
    /// When it cannot be written.
    ///
    /// # Panics
    /// When there are fewer `values` than the shard has.
    pub fn write(&mut self, shard: &StoredShard, values: &[f32]) -> Result<()> {
        let written = self.swap.write(&shard.0, values);
        self.named(written)
    }

    /// Reads the first elements of a shard, as many as `dest` has.
    ///
    /// # Errors
    /// When it cannot be read, or is not what was written.
    pub fn read(&mut self, shard: &StoredShard, dest: &mut [f32]) -> Result<()> {
        let read = self.swap.read(&shard.0, dest);
        self.named(read)
    }

    fn named<T>(&self, moved: Moved<T>) -> Result<T> {
        moved.map_err(|trouble| trouble.on(self.rank))
    }
}
