//! One rank's tier: its buffers, and the tiles that pass through them.

use std::fmt;
use std::sync::{Arc, PoisonError};

use crate::Result;
use crate::buffer::{Buffer, Pool};
use crate::config::{Place, TierConfig};
use crate::disk::{Abandoned, Disk};
use crate::error::TierError;
use crate::host::Host;
use crate::object::ObjectId;
use crate::stats::TierStats;
use crate::testing::Faults;

/// Where one rank's bytes rest. It is used by one thread at a time.
///
/// Dropping it waits for what is in flight, for some seconds at most, and removes its files and its folder.
pub struct Tier {
    rank: usize,
    pool: Arc<Pool>,
    store: Store,
}

enum Store {
    Host { host: Host, stats: TierStats },
    Disk(Box<Disk>),
}

/// A tile that is being read. Dropping it lets go of the tile; its buffer goes back to the pool once the read has ended.
#[derive(Debug)]
#[must_use = "a tile is there once it was waited for"]
pub struct Reading {
    state: State,
    pool: Arc<Pool>,
}

#[derive(Debug)]
enum State {
    /// Nothing had to be read.
    Ready(Buffer),
    Flying {
        key: usize,
        abandoned: Abandoned,
    },
    Taken,
}

impl Drop for Reading {
    fn drop(&mut self) {
        if let State::Flying { key, abandoned } = &self.state {
            abandoned.lock().unwrap_or_else(PoisonError::into_inner).push(*key);
        }
    }
}

impl fmt::Debug for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tier")
            .field("rank", &self.rank)
            .field("method", &self.method())
            .finish_non_exhaustive()
    }
}

impl Tier {
    /// Allocates the buffers, and takes the folder of the rank if there is one: its method is chosen by trying it, and
    /// files of a dead process are removed.
    ///
    /// # Errors
    /// If a setting cannot work; if memory or the folder cannot be had, or io_uring was asked for and is forbidden.
    pub fn open(config: TierConfig) -> Result<Self> {
        Self::open_inner(config, None)
    }

    /// As [`Self::open`], on a disk that fails on demand; tiles in memory do not.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_with_faults(config: TierConfig, faults: Faults) -> Result<Self> {
        Self::open_inner(config, Some(faults))
    }

    fn open_inner(config: TierConfig, faults: Option<Faults>) -> Result<Self> {
        config.check()?;
        let rank = config.rank;
        let pool =
            Pool::new(config.buffer_count, config.buffer_bytes).map_err(|errno| TierError::Memory {
                rank,
                bytes: (config.buffer_count * config.buffer_bytes) as u64,
                what: format!("{} buffers", config.buffer_count),
                cause: errno.to_string(),
            })?;
        let store = match &config.place {
            Place::Memory => Store::Host { host: Host::new(rank), stats: TierStats::default() },
            Place::Folder(path) => Store::Disk(Box::new(Disk::open(&config, path, pool.clone(), faults)?)),
        };
        Ok(Self { rank, pool, store })
    }

    /// How bytes are moved: "memory", "io_uring" or "threads".
    pub fn method(&self) -> &'static str {
        match &self.store {
            Store::Host { .. } => "memory",
            Store::Disk(disk) => disk.method(),
        }
    }

    /// Whether files are read and written past the page cache.
    pub fn is_direct(&self) -> bool {
        match &self.store {
            Store::Host { .. } => false,
            Store::Disk(disk) => disk.is_direct(),
        }
    }

    /// Why the method is not io_uring, or not direct, where that was allowed.
    pub fn why(&self) -> Option<String> {
        match &self.store {
            Store::Host { .. } => None,
            Store::Disk(disk) => disk.why().map(str::to_string),
        }
    }

    /// Makes an object of `tiles` tiles, each at most a buffer long. They read as zeros until they are written, and cost
    /// nothing until then. `id` is its name, unique in the tier; its file is named after it.
    ///
    /// # Errors
    /// If the name is taken or the file cannot be made.
    pub fn create(&mut self, id: &str, tiles: usize) -> Result<ObjectId> {
        match &mut self.store {
            Store::Host { host, .. } => host.create(id, tiles),
            Store::Disk(disk) => disk.create(id, tiles),
        }
    }

    /// A buffer, if one is free now. It is as long as buffers are and holds anything.
    ///
    /// # Errors
    /// If a write has failed.
    pub fn try_buffer(&mut self) -> Result<Option<Buffer>> {
        if let Store::Disk(disk) = &mut self.store {
            disk.look()?;
        }
        Ok(self.pool.take())
    }

    /// A buffer; waits for writes in flight, and for reads that nobody wants, if none is free.
    ///
    /// # Errors
    /// [`TierError::NoBuffer`] if all buffers are held by the caller or by reads that it has yet to take; if a write has
    /// failed.
    pub fn buffer(&mut self) -> Result<Buffer> {
        loop {
            if let Some(buffer) = self.try_buffer()? {
                return Ok(buffer);
            }
            match &mut self.store {
                Store::Disk(disk) => disk.wait_for_buffer()?,
                Store::Host { .. } => {
                    let (count, bytes) = (self.pool.count(), self.pool.bytes());
                    let rank = self.rank;
                    return Err(TierError::NoBuffer { rank, count, bytes, reading: 0, held: count });
                }
            }
        }
    }

    /// Gives back a buffer. (Dropping it does the same.)
    pub fn give(&mut self, buffer: Buffer) {
        drop(buffer);
    }

    /// Begins to read a tile into `buffer`. A tile whose write is in flight is waited for first. A tile that was never
    /// written comes back as zeros, as many as the buffer's length is now.
    ///
    /// # Errors
    /// If the object, the tile or the buffer is not this tier's; if the file was deleted; if a write has failed.
    pub fn start_read(&mut self, object: ObjectId, tile: usize, mut buffer: Buffer) -> Result<Reading> {
        self.check_own(&buffer)?;
        let state = match &mut self.store {
            Store::Host { host, stats } => {
                match host.read(object, tile)? {
                    Some(bytes) => {
                        buffer.set_len(bytes.len());
                        buffer.as_mut_slice().copy_from_slice(bytes);
                        stats.reads += 1;
                        stats.read_bytes += bytes.len() as u64;
                    }
                    None => buffer.as_mut_slice().fill(0),
                }
                State::Ready(buffer)
            }
            Store::Disk(disk) => {
                disk.look()?;
                match disk.start_read(object, tile, buffer)? {
                    Ok(key) => State::Flying { key, abandoned: disk.abandoned().clone() },
                    Err(buffer) => State::Ready(buffer),
                }
            }
        };
        Ok(Reading { state, pool: self.pool.clone() })
    }

    /// Waits for a tile and checks it; the buffer has the length that was written.
    ///
    /// # Errors
    /// If it cannot be read, is shorter than it was, or is not what was written; if a write has failed.
    pub fn wait(&mut self, mut reading: Reading) -> Result<Buffer> {
        self.check_reading(&reading)?;
        if let Store::Disk(disk) = &mut self.store {
            disk.look()?;
        }
        match (std::mem::replace(&mut reading.state, State::Taken), &mut self.store) {
            (State::Ready(buffer), _) => Ok(buffer),
            (State::Flying { key, .. }, Store::Disk(disk)) => disk.wait_read(key),
            _ => Err(self.foreign("a read")),
        }
    }

    /// Lets go of a tile that is being read. (Dropping it does the same.)
    pub fn cancel(&mut self, reading: Reading) {
        drop(reading);
    }

    /// Begins to write `buffer.len()` bytes as a tile. The buffer goes back to the pool when they are written. Reads of the
    /// tile that have begun bring what was there before.
    ///
    /// An error of the write itself is returned by the next call that can, and by every read of the tile until it is
    /// written again.
    ///
    /// # Errors
    /// If the object, the tile or the buffer is not this tier's; if the disk is full; if the file was deleted; if a write
    /// has failed.
    pub fn start_write(&mut self, object: ObjectId, tile: usize, buffer: Buffer) -> Result<()> {
        self.check_own(&buffer)?;
        match &mut self.store {
            Store::Host { host, stats } => {
                host.write(object, tile, buffer.as_slice())?;
                stats.writes += 1;
                stats.written_bytes += buffer.len() as u64;
                Ok(())
            }
            Store::Disk(disk) => {
                disk.look()?;
                disk.start_write(object, tile, buffer)
            }
        }
    }

    /// Waits for all writes.
    ///
    /// # Errors
    /// If a write has failed.
    pub fn flush(&mut self) -> Result<()> {
        match &mut self.store {
            Store::Host { .. } => Ok(()),
            Store::Disk(disk) => {
                disk.flush()?;
                disk.look()
            }
        }
    }

    /// Waits for all writes, and until they would outlast a failure of power.
    ///
    /// # Errors
    /// If a write has failed, or the system cannot do that.
    pub fn sync(&mut self) -> Result<()> {
        self.flush()?;
        match &mut self.store {
            Store::Host { .. } => Ok(()),
            Store::Disk(disk) => disk.sync(),
        }
    }

    /// Removes an object and its file, once what is in flight in it has ended. Reads of it that have begun stay valid. An
    /// object that is not there is none.
    pub fn remove(&mut self, object: ObjectId) {
        match &mut self.store {
            Store::Host { host, .. } => host.remove(object),
            Store::Disk(disk) => disk.remove(object),
        }
    }

    /// What was done since the tier was opened.
    pub fn stats(&self) -> TierStats {
        match &self.store {
            Store::Host { stats, .. } => *stats,
            Store::Disk(disk) => disk.stats(),
        }
    }

    /// Bytes of memory that tiles take; 0 if they rest in files. Buffers are not among them.
    pub fn held_bytes(&self) -> u64 {
        match &self.store {
            Store::Host { host, .. } => host.held(),
            Store::Disk(_) => 0,
        }
    }

    /// Buffers that are in the pool at the moment.
    pub fn free_buffers(&self) -> usize {
        self.pool.free()
    }

    fn check_own(&self, buffer: &Buffer) -> Result<()> {
        if buffer.is_of(&self.pool) { Ok(()) } else { Err(self.foreign("a buffer")) }
    }

    fn check_reading(&self, reading: &Reading) -> Result<()> {
        if Arc::ptr_eq(&reading.pool, &self.pool) { Ok(()) } else { Err(self.foreign("a read")) }
    }

    fn foreign(&self, what: &str) -> TierError {
        TierError::Usage { rank: self.rank, message: format!("{what} of another tier was given to this one") }
    }
}
