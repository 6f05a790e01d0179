//! What a tier has done so far.

use std::time::Duration;

/// Counts since the tier was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TierStats {
    /// Bytes of tiles that were read (without padding; tiles that were never written cost nothing).
    pub read_bytes: u64,
    /// Bytes of tiles that were written.
    pub written_bytes: u64,
    /// Tiles read.
    pub reads: u64,
    /// Tiles written.
    pub writes: u64,
    /// Time that the rank stood still for the disk.
    pub wait: Duration,
    /// Time with at least one operation in flight. An operation ends when the rank learns that it has ended, at its next
    /// call, so this is an upper bound.
    pub busy: Duration,
}

impl TierStats {
    /// The share of the time in flight that the rank did not wait for, from 0 to 1; 1 where nothing was in flight.
    pub fn overlap(&self) -> f64 {
        if self.busy.is_zero() {
            return 1.0;
        }
        (1.0 - self.wait.as_secs_f64() / self.busy.as_secs_f64()).clamp(0.0, 1.0)
    }
}
