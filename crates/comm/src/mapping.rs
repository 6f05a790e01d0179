//! Mapped memory that is unmapped when dropped.
//!
//! Invariant: `ptr` points to `len` mapped bytes for as long as the value lives, page-aligned, and only this value
//! unmaps them. What may be read or written when is decided one level up (`buffer`, `board`).

use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use crate::error::CommError;

/// A mapping of at least one page.
#[derive(Debug)]
pub(crate) struct Mapping {
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread; access rules are those of `buffer` and `board`.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Zeroed private memory.
    pub(crate) fn anonymous(len: usize) -> Result<Self, CommError> {
        let len = round_to_pages(len);
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice aliases nothing.
        let ptr = unsafe {
            mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        };
        Self::from_raw(ptr, len, "mapping memory")
    }

    /// `len` bytes at `offset` (a multiple of the page size) of a shared file.
    pub(crate) fn shared(
        fd: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        writable: bool,
    ) -> Result<Self, CommError> {
        let len = round_to_pages(len);
        let prot = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing in this process.
        let ptr = unsafe { mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, fd, offset) };
        Self::from_raw(ptr, len, "mapping shared memory")
    }

    fn from_raw(ptr: rustix::io::Result<*mut c_void>, len: usize, what: &str) -> Result<Self, CommError> {
        let ptr = ptr.map_err(|e| CommError::system(format!("{what} of {len} bytes"), e))?;
        let ptr = NonNull::new(ptr.cast()).ok_or_else(|| CommError::system(what, "null address"))?;
        Ok(Self { ptr, len })
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the invariant: these bytes are mapped and only this value unmaps them.
        let unmapped = unsafe { munmap(self.ptr.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "munmap: {unmapped:?}");
    }
}

/// The least multiple of the page size that holds `len` bytes, and at least one page.
pub(crate) fn round_to_pages(len: usize) -> usize {
    len.max(1).next_multiple_of(rustix::param::page_size())
}
