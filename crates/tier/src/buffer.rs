//! Page-aligned buffers, their pool, and the parts of a buffer that a disk works on.
//!
//! Invariant: the bytes of a [`Mapping`] are mapped for as long as any handle on it lives, and at any moment they belong
//! to one of: nobody (in the pool), one [`Memory`] (through `&` and `&mut` as usual), or one [`Cut`] and the [`Part`]s cut
//! from it. The parts of a cut for reading from disk are disjoint, and each is the only way to its bytes; those of a cut
//! for writing to disk are read only. A cut becomes a memory again only when no part of it is left. All bytes are
//! initialised: the mapping begins as zeros.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::slice;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Mapped memory, unmapped when dropped.
#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread; who may touch its bytes is the invariant above.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(bytes: usize) -> Result<Self, Errno> {
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice aliases nothing.
        let start = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )?
        };
        let mapping = Self { start: NonNull::new(start.cast()).ok_or(Errno::NOMEM)?, bytes };
        // Large pages make a transfer one run of memory; without them it only has more runs.
        // SAFETY: the range is this mapping, and the advice changes no byte of it.
        let _ = unsafe { madvise(start, bytes, Advice::LinuxHugepage) };
        Ok(mapping)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `new`, only this value unmaps it, and no handle on it is left.
        let _ = unsafe { munmap(self.start.as_ptr().cast::<c_void>(), self.bytes) };
    }
}

/// A whole mapping that nobody else can reach.
#[derive(Debug)]
pub(crate) struct Memory(Arc<Mapping>);

impl Memory {
    /// `bytes` zeros; `bytes` is not 0.
    pub(crate) fn new(bytes: usize) -> Result<Self, Errno> {
        Ok(Self(Arc::new(Mapping::new(bytes)?)))
    }

    pub(crate) fn as_slice(&self) -> &[u8] {
        // SAFETY: all bytes are mapped and initialised, and this is the only handle (module invariant).
        unsafe { slice::from_raw_parts(self.0.start.as_ptr(), self.0.bytes) }
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, and it is borrowed exclusively.
        unsafe { slice::from_raw_parts_mut(self.0.start.as_ptr(), self.0.bytes) }
    }

    /// Gives the first `bytes` to a disk to fill.
    pub(crate) fn fill(self, bytes: usize) -> Cut {
        Cut { end: bytes.min(self.0.bytes), mapping: self.0, next: 0, fills: true }
    }

    /// Gives the first `bytes` to a disk to read.
    pub(crate) fn store(self, bytes: usize) -> Cut {
        Cut { end: bytes.min(self.0.bytes), mapping: self.0, next: 0, fills: false }
    }
}

/// A memory that is cut into parts, from its start to its end.
#[derive(Debug)]
pub(crate) struct Cut {
    mapping: Arc<Mapping>,
    next: usize,
    end: usize,
    fills: bool,
}

impl Cut {
    /// The next part, of at most `most` bytes; none when all is cut.
    pub(crate) fn next(&mut self, most: usize) -> Option<Part> {
        let bytes = most.min(self.end - self.next);
        if bytes == 0 {
            return None;
        }
        let part = Part { mapping: self.mapping.clone(), start: self.next, bytes, fills: self.fills };
        self.next += bytes;
        Some(part)
    }

    /// Where the next part begins.
    pub(crate) fn position(&self) -> usize {
        self.next
    }

    /// Whether nothing is left to cut.
    pub(crate) fn is_done(&self) -> bool {
        self.next == self.end
    }

    /// Cuts no more.
    pub(crate) fn stop(&mut self) {
        self.end = self.next;
    }

    /// The bytes to store; none while they are filled.
    pub(crate) fn stored(&self) -> Option<&[u8]> {
        // SAFETY: all bytes are mapped and initialised, and while a cut is not one that fills, nobody writes to them.
        (!self.fills)
            .then(|| unsafe { slice::from_raw_parts(self.mapping.start.as_ptr(), self.mapping.bytes) })
    }

    /// The whole memory again; the cut itself while parts of it are left.
    pub(crate) fn join(mut self) -> Result<Memory, Cut> {
        if Arc::get_mut(&mut self.mapping).is_some() { Ok(Memory(self.mapping)) } else { Err(self) }
    }
}

/// A range of a memory that is being read from or written to a disk.
#[derive(Debug)]
pub(crate) struct Part {
    mapping: Arc<Mapping>,
    start: usize,
    bytes: usize,
    fills: bool,
}

impl Part {
    /// Whether the disk fills it; otherwise the disk stores it.
    pub(crate) fn fills(&self) -> bool {
        self.fills
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The address, for the kernel; valid for as long as the part lives.
    pub(crate) fn address(&self) -> *mut u8 {
        // SAFETY: `start` is at most the mapping's length, so the sum stays inside it.
        unsafe { self.mapping.start.as_ptr().add(self.start) }
    }

    pub(crate) fn as_slice(&self) -> &[u8] {
        // SAFETY: the range lies in the mapping; it is this part's alone, or read only (module invariant).
        unsafe { slice::from_raw_parts(self.address(), self.bytes) }
    }

    /// The bytes to fill; none where they are to be stored.
    pub(crate) fn space(&mut self) -> Option<&mut [u8]> {
        // SAFETY: the range lies in the mapping, and a part that fills is the only way to its bytes.
        self.fills.then(|| unsafe { slice::from_raw_parts_mut(self.address(), self.bytes) })
    }

    /// Leaves out the first `bytes`, which are done.
    pub(crate) fn advance(&mut self, bytes: usize) {
        let bytes = bytes.min(self.bytes);
        self.start += bytes;
        self.bytes -= bytes;
    }
}

/// The buffers of a tier that nobody uses at the moment.
#[derive(Debug)]
pub(crate) struct Pool {
    free: Mutex<Vec<Memory>>,
    count: usize,
    bytes: usize,
}

impl Pool {
    /// `count` buffers of `bytes`.
    pub(crate) fn new(count: usize, bytes: usize) -> Result<Arc<Self>, Errno> {
        let free = (0..count).map(|_| Memory::new(bytes)).collect::<Result<Vec<_>, _>>()?;
        Ok(Arc::new(Self { free: Mutex::new(free), count, bytes }))
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn free(&self) -> usize {
        self.lock().len()
    }

    pub(crate) fn take(self: &Arc<Self>) -> Option<Buffer> {
        let memory = self.lock().pop()?;
        Some(self.wrap(memory, self.bytes))
    }

    /// A buffer around a memory of this pool.
    pub(crate) fn wrap(self: &Arc<Self>, memory: Memory, len: usize) -> Buffer {
        Buffer { memory: Some(memory), len, pool: self.clone() }
    }

    pub(crate) fn put(&self, memory: Memory) {
        self.lock().push(memory);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Memory>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A buffer from a tier's pool, aligned to a page; it goes back when it is dropped. What it holds at first is arbitrary.
#[derive(Debug)]
pub struct Buffer {
    /// There until the buffer is taken apart.
    memory: Option<Memory>,
    len: usize,
    pool: Arc<Pool>,
}

impl Buffer {
    /// Bytes that are used; at first all of them.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Bytes that it can hold.
    pub fn capacity(&self) -> usize {
        self.pool.bytes
    }

    /// Uses the first `bytes`. Bytes that come into use are whatever was there before.
    ///
    /// # Panics
    /// If `bytes` is more than [`Self::capacity`]: the caller has cut its tiles by another length than the pool's.
    pub fn set_len(&mut self, bytes: usize) {
        assert!(bytes <= self.pool.bytes, "a buffer of {} bytes cannot hold {bytes}", self.pool.bytes);
        self.len = bytes;
    }

    /// The bytes in use.
    pub fn as_slice(&self) -> &[u8] {
        self.memory.as_ref().map_or(&[], |m| &m.as_slice()[..self.len])
    }

    /// The bytes in use.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        let len = self.len;
        self.memory.as_mut().map_or(&mut [], |m| &mut m.as_mut_slice()[..len])
    }

    /// The bytes in use as numbers, `len() / 4` of them.
    pub fn f32s(&self) -> &[f32] {
        let Some(memory) = &self.memory else { return &[] };
        // SAFETY: the start is aligned to a page, `len / 4` numbers lie in the memory, which is borrowed with `self`, and
        // every pattern of bits is a number.
        unsafe { slice::from_raw_parts(memory.as_slice().as_ptr().cast(), self.len / size_of::<f32>()) }
    }

    /// The bytes in use as numbers, `len() / 4` of them.
    pub fn f32s_mut(&mut self) -> &mut [f32] {
        let Some(memory) = &mut self.memory else { return &mut [] };
        // SAFETY: as above, and it is borrowed exclusively.
        unsafe {
            slice::from_raw_parts_mut(memory.as_mut_slice().as_mut_ptr().cast(), self.len / size_of::<f32>())
        }
    }

    pub(crate) fn is_of(&self, pool: &Arc<Pool>) -> bool {
        Arc::ptr_eq(&self.pool, pool)
    }

    /// Its memory, which the caller gives back to the pool.
    pub(crate) fn into_memory(mut self) -> Option<Memory> {
        self.memory.take()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.pool.put(memory);
        }
    }
}
