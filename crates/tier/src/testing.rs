//! A disk that fails on demand: what a piece of a file came to is changed when it is done.
//!
//! [`Tier::open_with_faults`](crate::Tier::open_with_faults) puts this layer over io_uring and threads alike. Faults may
//! be armed before and while the tier is used.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::io::Errno;

use crate::method::Piece;

/// One thing that goes wrong. Pieces are counted from the moment when the fault is armed; `nth` 0 is the next one. A fault
/// that names a piece goes off once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The nth piece that is read fails (EIO).
    ReadError {
        /// Pieces before it.
        nth: u64,
    },
    /// The nth piece that is written fails (EIO).
    WriteError {
        /// Pieces before it.
        nth: u64,
    },
    /// After so many bytes were written, every write finds the disk full (ENOSPC).
    DiskFull {
        /// Bytes that still fit.
        after_bytes: u64,
    },
    /// Reserving space finds the disk full (ENOSPC).
    NoReserve,
    /// The nth piece that is read comes back with at most so many bytes, and reading on works.
    ShortRead {
        /// Pieces before it.
        nth: u64,
        /// Bytes that it brings.
        bytes: usize,
    },
    /// The nth piece that is written takes at most so many bytes, and writing on works.
    ShortWrite {
        /// Pieces before it.
        nth: u64,
        /// Bytes that it takes.
        bytes: usize,
    },
    /// The nth piece that is read finds the end of the file.
    EndOfFile {
        /// Pieces before it.
        nth: u64,
    },
    /// One bit of the nth piece that is read is flipped.
    FlipBit {
        /// Pieces before it.
        nth: u64,
        /// The bit, counted from the piece's start, modulo its length.
        bit: usize,
    },
}

/// Faults of one tier. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    shared: Arc<Shared>,
    no_uring: bool,
    no_direct: bool,
}

#[derive(Debug, Default)]
struct Shared {
    armed: Mutex<Vec<Fault>>,
    delays: Mutex<Option<Delays>>,
    reads: AtomicU64,
    writes: AtomicU64,
}

#[derive(Debug, Clone, Copy)]
struct Delays {
    state: u64,
    most: Duration,
}

impl Faults {
    /// No faults so far.
    pub fn new() -> Self {
        Self::default()
    }

    /// A system that forbids io_uring, as containers do.
    pub fn without_uring(mut self) -> Self {
        self.no_uring = true;
        self
    }

    /// A file system that does not know `O_DIRECT`.
    pub fn without_direct(mut self) -> Self {
        self.no_direct = true;
        self
    }

    /// Every piece begins up to `most` later, by random times: so pieces end in another order.
    pub fn with_delays(self, seed: u64, most: Duration) -> Self {
        *lock(&self.shared.delays) = Some(Delays { state: seed, most });
        self
    }

    /// Lets a fault happen.
    pub fn arm(&self, fault: Fault) {
        lock(&self.shared.armed).push(fault);
    }

    /// Lets no fault happen that has not happened yet.
    pub fn disarm(&self) {
        lock(&self.shared.armed).clear();
    }

    /// Faults that are armed and have not gone off.
    pub fn armed(&self) -> usize {
        lock(&self.shared.armed).len()
    }

    /// Pieces that were read.
    pub fn reads(&self) -> u64 {
        self.shared.reads.load(Ordering::Relaxed)
    }

    /// Pieces that were written.
    pub fn writes(&self) -> u64 {
        self.shared.writes.load(Ordering::Relaxed)
    }

    pub(crate) fn no_uring(&self) -> bool {
        self.no_uring
    }

    pub(crate) fn no_direct(&self) -> bool {
        self.no_direct
    }

    /// Whether reserving space fails.
    pub(crate) fn reserve(&self) -> Result<(), Errno> {
        let full = lock(&self.shared.armed).contains(&Fault::NoReserve);
        if full { Err(Errno::NOSPC) } else { Ok(()) }
    }

    /// How much later a piece begins.
    pub(crate) fn delay(&self) -> Option<Duration> {
        let mut delays = lock(&self.shared.delays);
        let delays = delays.as_mut()?;
        // xorshift64*: enough to shuffle.
        let mut x = delays.state | 1;
        x ^= x >> 12;
        x ^= x << 25;
        x ^= x >> 27;
        delays.state = x;
        let share = (x.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 40) as f64 / (1u64 << 24) as f64;
        Some(delays.most.mul_f64(share))
    }

    /// What a piece came to, once the faults have seen it.
    pub(crate) fn completed(
        &self,
        piece: &mut Piece,
        mut result: Result<usize, Errno>,
    ) -> Result<usize, Errno> {
        let reads = piece.part.fills();
        if reads { &self.shared.reads } else { &self.shared.writes }.fetch_add(1, Ordering::Relaxed);
        lock(&self.shared.armed).retain_mut(|fault| {
            let (left, of_reads) = match fault {
                Fault::ReadError { nth }
                | Fault::ShortRead { nth, .. }
                | Fault::EndOfFile { nth }
                | Fault::FlipBit { nth, .. } => (nth, true),
                Fault::WriteError { nth } | Fault::ShortWrite { nth, .. } => (nth, false),
                Fault::DiskFull { after_bytes } => {
                    if !reads {
                        result = fill_up(after_bytes, result);
                    }
                    return true;
                }
                Fault::NoReserve => return true,
            };
            if of_reads != reads {
                return true;
            }
            if *left > 0 {
                *left -= 1;
                return true;
            }
            result = go_off(*fault, piece, result);
            false
        });
        result
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn fill_up(left: &mut u64, result: Result<usize, Errno>) -> Result<usize, Errno> {
    let bytes = (result? as u64).min(*left);
    *left -= bytes;
    if bytes == 0 { Err(Errno::NOSPC) } else { Ok(bytes as usize) }
}

fn go_off(fault: Fault, piece: &mut Piece, result: Result<usize, Errno>) -> Result<usize, Errno> {
    match fault {
        Fault::ReadError { .. } | Fault::WriteError { .. } => Err(Errno::IO),
        Fault::ShortRead { bytes, .. } | Fault::ShortWrite { bytes, .. } => result.map(|n| n.min(bytes)),
        Fault::EndOfFile { .. } => Ok(0),
        Fault::FlipBit { bit, .. } => {
            if let Some(bytes) = piece.part.space()
                && !bytes.is_empty()
            {
                let bit = bit % (bytes.len() * 8);
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
            result
        }
        Fault::DiskFull { .. } | Fault::NoReserve => result,
    }
}
