//! Memory that ranks lend each other: heap pages between threads, one memfd between processes.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rustix::fs::{FallocateFlags, fallocate};

use crate::error::CommError;
use crate::mapping::{Mapping, round_to_pages};

/// Where a region lies, in words that every rank of the world understands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct RegionId {
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

/// A store of regions that every rank of the world can look into.
#[derive(Debug)]
pub(crate) enum SharedMemory {
    /// One process: a table of mappings.
    Threads(Mutex<ThreadRegions>),
    /// Processes of one host: ranges of one anonymous file.
    File(FileRegions),
}

#[derive(Debug, Default)]
pub(crate) struct ThreadRegions {
    next: u64,
    regions: HashMap<RegionId, Arc<Mapping>>,
}

/// The anonymous file as one rank sees it.
#[derive(Debug)]
pub(crate) struct FileRegions {
    file: OwnedFd,
    own: Mutex<OwnRange>,
    /// Peers' regions that this rank has looked at.
    peers: Mutex<HashMap<RegionId, Arc<Mapping>>>,
}

/// The part of the file in which this rank allocates.
#[derive(Debug)]
struct OwnRange {
    next: u64,
    end: u64,
    /// Freed regions by length: their pages are given back, their addresses are used again.
    free: BTreeMap<u64, Vec<u64>>,
    /// Where this rank has mapped what it has allocated, so that it need not map it again to read what it lends itself.
    mapped: HashMap<RegionId, Weak<Mapping>>,
}

/// How many mappings of peers' regions a rank keeps; beyond it the table starts afresh.
const MAX_PEER_MAPPINGS: usize = 1024;

impl SharedMemory {
    pub(crate) fn for_threads() -> Self {
        SharedMemory::Threads(Mutex::default())
    }

    /// Allocates from `range` of `file`.
    pub(crate) fn for_file(file: OwnedFd, range: std::ops::Range<u64>) -> Self {
        SharedMemory::File(FileRegions {
            file,
            own: Mutex::new(OwnRange {
                next: range.start,
                end: range.end,
                free: BTreeMap::new(),
                mapped: HashMap::new(),
            }),
            peers: Mutex::default(),
        })
    }

    pub(crate) fn allocate(&self, bytes: usize) -> Result<(RegionId, Arc<Mapping>), CommError> {
        let len = round_to_pages(bytes) as u64;
        match self {
            SharedMemory::Threads(regions) => {
                let mapping = Arc::new(Mapping::anonymous(bytes)?);
                let mut regions = lock(regions);
                let id = RegionId { offset: regions.next, len };
                regions.next += len;
                regions.regions.insert(id, mapping.clone());
                Ok((id, mapping))
            }
            SharedMemory::File(file) => {
                let id = RegionId { offset: file.reserve(len)?, len };
                let mapping = Arc::new(Mapping::shared(file.file.as_fd(), id.offset, bytes, true)?);
                lock(&file.own).mapped.insert(id, Arc::downgrade(&mapping));
                Ok((id, mapping))
            }
        }
    }

    /// Gives a region back; peers that still look at it keep their view.
    pub(crate) fn free(&self, id: RegionId) {
        match self {
            SharedMemory::Threads(regions) => {
                lock(regions).regions.remove(&id);
            }
            SharedMemory::File(file) => {
                let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                // Without the hole the pages stay until the world ends; nothing else depends on it.
                let _ = fallocate(&file.file, hole, id.offset, id.len);
                let mut own = lock(&file.own);
                own.mapped.remove(&id);
                own.free.entry(id.len).or_default().push(id.offset);
            }
        }
    }

    /// A view of a region that a rank lends.
    pub(crate) fn view(&self, id: RegionId) -> Result<Arc<Mapping>, CommError> {
        match self {
            SharedMemory::Threads(regions) => lock(regions)
                .regions
                .get(&id)
                .cloned()
                .ok_or_else(|| CommError::system("looking at a peer's buffer", "the peer has freed it")),
            SharedMemory::File(file) => file.view(id),
        }
    }
}

impl FileRegions {
    fn reserve(&self, len: u64) -> Result<u64, CommError> {
        let mut own = lock(&self.own);
        if let Some(offset) = own.free.get_mut(&len).and_then(Vec::pop) {
            return Ok(offset);
        }
        let offset = own.next;
        if len > own.end - offset {
            return Err(CommError::system(
                format!("allocating {len} bytes of shared memory"),
                format!("this rank's range has {} bytes left", own.end - offset),
            ));
        }
        own.next += len;
        Ok(offset)
    }

    fn view(&self, id: RegionId) -> Result<Arc<Mapping>, CommError> {
        if let Some(mapping) = lock(&self.own).mapped.get(&id).and_then(Weak::upgrade) {
            return Ok(mapping);
        }
        let mut peers = lock(&self.peers);
        if let Some(mapping) = peers.get(&id) {
            return Ok(mapping.clone());
        }
        if peers.len() >= MAX_PEER_MAPPINGS {
            peers.clear();
        }
        let mapping = Arc::new(Mapping::shared(self.file.as_fd(), id.offset, id.len as usize, false)?);
        peers.insert(id, mapping.clone());
        Ok(mapping)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
