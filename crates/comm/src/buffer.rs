//! Flat buffers: private to a rank, or lent to peers.
//!
//! Invariants. A [`HostBuffer`] is ordinary owned memory. A [`SharedBuffer`] may be read by peers from the moment it is
//! lent in an operation until all of them have finished that operation; its owner gets `&mut` access only through
//! [`SharedBuffer::writable`], which waits for that, so no one writes what another reads.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use crate::Result;
use crate::mapping::Mapping;
use crate::memory::{RegionId, SharedMemory};
use crate::transport::{Channel, Transport};

/// Page-aligned private memory for f32 elements, zeroed at first.
pub struct HostBuffer {
    memory: Mapping,
    numel: usize,
}

impl HostBuffer {
    /// Memory for `numel` elements.
    ///
    /// # Errors
    /// When the system has none.
    pub fn new(numel: usize) -> Result<Self> {
        Ok(Self { memory: Mapping::anonymous(numel * size_of::<f32>())?, numel })
    }

    /// The number of elements.
    pub fn numel(&self) -> usize {
        self.numel
    }

    /// The elements.
    pub fn as_slice(&self) -> &[f32] {
        // SAFETY: the mapping holds `numel` elements, is page-aligned, and any bits are an f32; `&self` forbids writes.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast(), self.numel) }
    }

    /// The elements, to write.
    pub fn as_mut_slice(&mut self) -> &mut [f32] {
        // SAFETY: as in `as_slice`; `&mut self` makes this the only access.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_ptr().cast(), self.numel) }
    }

    /// The first element's address, stable for the buffer's life.
    pub fn as_ptr(&self) -> *const f32 {
        self.memory.as_ptr().cast::<f32>().cast_const()
    }
}

impl fmt::Debug for HostBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostBuffer").field("numel", &self.numel).finish()
    }
}

/// The identity of shared memory, for operations that lend it.
#[derive(Debug)]
pub struct RegionHandle {
    pub(crate) id: RegionId,
    pub(crate) memory: Arc<Mapping>,
    store: Arc<SharedMemory>,
    /// Set when a peer may still read the region as its owner goes: then it stays until the world ends.
    keep: bool,
}

impl Drop for RegionHandle {
    fn drop(&mut self) {
        if !self.keep {
            self.store.free(self.id);
        }
    }
}

/// An operation in which a buffer was lent.
struct Loan {
    transport: Arc<dyn Transport>,
    channel: Arc<Channel>,
    seq: u64,
}

/// Memory for f32 elements that peers can read in place, zeroed at first.
///
/// Dropped while peers still read it, its memory is given back only when the world ends.
pub struct SharedBuffer {
    region: RegionHandle,
    numel: usize,
    loans: Mutex<Vec<Loan>>,
}

impl SharedBuffer {
    pub(crate) fn allocate(store: &Arc<SharedMemory>, numel: usize) -> Result<Self> {
        let (id, memory) = store.allocate(numel * size_of::<f32>())?;
        let region = RegionHandle { id, memory, store: store.clone(), keep: false };
        Ok(Self { region, numel, loans: Mutex::default() })
    }

    /// The number of elements.
    pub fn numel(&self) -> usize {
        self.numel
    }

    /// The handle to lend the buffer by.
    pub fn handle(&self) -> &RegionHandle {
        &self.region
    }

    /// The elements.
    pub fn as_slice(&self) -> &[f32] {
        // SAFETY: the region holds `numel` elements, is page-aligned and lives as long as `self`; only the owner writes,
        // and `&self` forbids that now.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.numel) }
    }

    /// The first element's address, stable for the buffer's life.
    pub fn as_ptr(&self) -> *const f32 {
        self.region.memory.as_ptr().cast::<f32>().cast_const()
    }

    /// The elements, to write, once every peer has finished with what was lent.
    ///
    /// # Errors
    /// When a peer is lost or late.
    pub fn writable(&mut self) -> Result<&mut [f32]> {
        let loans = self.loans.get_mut().unwrap_or_else(PoisonError::into_inner);
        while let Some(loan) = loans.last() {
            loan.transport.wait_released(&loan.channel, loan.seq)?;
            loans.pop();
        }
        // SAFETY: as in `as_slice`; `&mut self` makes this the only access of this process, and no peer reads any more.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.as_ptr().cast_mut(), self.numel) })
    }

    /// The elements' bytes.
    pub fn as_bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self.as_slice())
    }

    /// The elements' bytes, to write.
    ///
    /// # Errors
    /// As [`SharedBuffer::writable`].
    pub fn writable_bytes(&mut self) -> Result<&mut [u8]> {
        self.writable().map(bytemuck::cast_slice_mut)
    }

    /// Remembers that the buffer is lent in operation `seq` of `channel`.
    pub(crate) fn lent(&self, transport: &Arc<dyn Transport>, channel: &Arc<Channel>, seq: u64) {
        let mut loans = self.loans.lock().unwrap_or_else(PoisonError::into_inner);
        loans.retain(|loan| !loan.transport.is_released(&loan.channel, loan.seq));
        loans.push(Loan { transport: transport.clone(), channel: channel.clone(), seq });
    }
}

impl Drop for SharedBuffer {
    fn drop(&mut self) {
        let loans = self.loans.get_mut().unwrap_or_else(PoisonError::into_inner);
        // Waiting for peers here could wait for ever: they may need this rank to go on first. What they may still read
        // stays as it is until the world ends.
        self.region.keep = !loans.iter().all(|loan| loan.transport.is_released(&loan.channel, loan.seq));
    }
}

impl fmt::Debug for SharedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedBuffer").field("numel", &self.numel).finish()
    }
}
