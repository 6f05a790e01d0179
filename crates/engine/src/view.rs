//! The address of a unit's full parameters while they exist.
//!
//! Invariant: the pointer is null, or points to `numel` initialised f32 elements that nobody writes. The engine sets it
//! when a unit is gathered and clears it before the memory is freed, reused or updated, and it does either only while
//! the rank that owns the engine runs engine code, never in the middle of a tensor operation of that rank.

use std::ops::Range;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Where the elements of one flat parameter are now, if they are anywhere.
#[derive(Debug)]
pub struct FlatView {
    unit: String,
    numel: usize,
    start: AtomicPtr<f32>,
}

impl FlatView {
    /// The elements of no flat parameter yet: nothing is present.
    pub fn new(unit: &str, numel: usize) -> Self {
        Self { unit: unit.to_string(), numel, start: AtomicPtr::new(null_mut()) }
    }

    /// The unit's name.
    pub fn unit(&self) -> &str {
        &self.unit
    }

    /// The number of elements, without padding.
    pub fn numel(&self) -> usize {
        self.numel
    }

    /// Whether the unit's full parameters exist now.
    pub fn is_present(&self) -> bool {
        !self.start.load(Ordering::Acquire).is_null()
    }

    /// Elements of the flat parameter, or `None` while the unit is sharded.
    ///
    /// # Safety
    /// The slice must not be used after the engine has gone on (released the unit or updated its parameters): use it
    /// within one tensor operation of the rank that owns the engine.
    ///
    /// # Panics
    /// When the range exceeds the flat parameter.
    pub unsafe fn slice(&self, range: Range<usize>) -> Option<&[f32]> {
        assert!(range.start <= range.end && range.end <= self.numel, "{range:?} of {} elements", self.numel);
        let start = self.start.load(Ordering::Acquire);
        if start.is_null() {
            return None;
        }
        // SAFETY: the invariant of this module, the range check above, and the caller's promise.
        Some(unsafe { std::slice::from_raw_parts(start.add(range.start), range.len()) })
    }

    /// Publishes the elements' address. The memory must hold `numel` elements and stay as it is until [`Self::clear`].
    pub(crate) fn set(&self, start: *const f32) {
        self.start.store(start.cast_mut(), Ordering::Release);
    }

    pub(crate) fn clear(&self) {
        self.start.store(null_mut(), Ordering::Release);
    }
}
