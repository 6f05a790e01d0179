//! Pieces through io_uring.
//!
//! Invariant: whatever a submitted entry points to (the bytes of its part, its open file) is owned by the piece in the
//! slot that the entry names, and a slot is emptied only when the entry's completion has been taken from the queue. If the
//! ring goes while entries are in flight and their completions do not come, their pieces are leaked, not freed.

use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, Probe, opcode};
use rustix::io::Errno;

use crate::method::{Done, Method, Piece, Wait};

/// How long a ring that is dropped waits for what it has in flight.
const LAST_WAIT: Duration = Duration::from_secs(10);

pub(crate) struct Uring {
    ring: IoUring,
    slots: Vec<Option<Piece>>,
    empty: Vec<usize>,
    /// Entries in the queue that the kernel has not taken.
    queued: usize,
}

impl Uring {
    /// A ring for `depth` pieces at once.
    pub(crate) fn new(depth: usize) -> std::io::Result<Self> {
        let entries = u32::try_from(depth).map_err(std::io::Error::other)?.next_power_of_two();
        let ring = IoUring::new(entries)?;
        if !ring.params().is_feature_ext_arg() {
            return Err(std::io::Error::other(
                "this kernel's io_uring cannot wait with a limit (it is older than 5.11)",
            ));
        }
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if !probe.is_supported(opcode::Read::CODE) || !probe.is_supported(opcode::Write::CODE) {
            return Err(std::io::Error::other(
                "this kernel's io_uring cannot read and write (it is older than 5.6)",
            ));
        }
        Ok(Self {
            ring,
            slots: (0..depth).map(|_| None).collect(),
            empty: (0..depth).rev().collect(),
            queued: 0,
        })
    }

    fn take_completed(&mut self, done: &mut Vec<Done>) -> usize {
        let before = done.len();
        for entry in self.ring.completion() {
            let slot = entry.user_data() as usize;
            let Some(piece) = self.slots.get_mut(slot).and_then(Option::take) else { continue };
            self.empty.push(slot);
            let result = entry.result();
            let result = usize::try_from(result).map_err(|_| Errno::from_raw_os_error(-result));
            done.push(Done { piece, result });
        }
        done.len() - before
    }

    /// Submits what is queued, and waits for a completion if `wait` says so.
    fn enter(&mut self, wait: Wait) -> Result<(), Errno> {
        let submitter = self.ring.submitter();
        let entered = match wait {
            Wait::No => submitter.submit(),
            Wait::Until(end) => {
                let time = Timespec::from(end.saturating_duration_since(Instant::now()));
                submitter.submit_with_args(1, &SubmitArgs::new().timespec(&time))
            }
        };
        let result = match entered {
            Ok(_) => Ok(()),
            // Interrupted, out of time, or out of some resource that completions will free: the caller looks again.
            Err(e) => match e.raw_os_error().map(Errno::from_raw_os_error) {
                Some(Errno::INTR | Errno::TIME | Errno::AGAIN | Errno::BUSY) => Ok(()),
                Some(errno) => Err(errno),
                None => Err(Errno::IO),
            },
        };
        self.queued = self.ring.submission().len();
        result
    }
}

impl Method for Uring {
    fn name(&self) -> &'static str {
        "io_uring"
    }

    fn has_room(&self) -> bool {
        !self.empty.is_empty()
    }

    fn in_flight(&self) -> usize {
        self.slots.len() - self.empty.len()
    }

    fn begin(&mut self, piece: Piece) -> Result<(), Piece> {
        let Some(slot) = self.empty.pop() else { return Err(piece) };
        let fd = Fd(piece.file.fd.as_raw_fd());
        // At most 1 GiB, see `TierConfig::check`.
        let bytes = piece.part.bytes() as u32;
        let entry = if piece.part.fills() {
            opcode::Read::new(fd, piece.part.address(), bytes).offset(piece.offset).build()
        } else {
            opcode::Write::new(fd, piece.part.address().cast_const(), bytes).offset(piece.offset).build()
        };
        let entry = entry.user_data(slot as u64);
        // SAFETY: the piece owns the file and the bytes that the entry points to; it goes into the slot that the entry
        // names and stays there until the completion is reaped. The part is exclusive if the kernel writes to it.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        if pushed.is_err() {
            self.empty.push(slot);
            return Err(piece);
        }
        self.slots[slot] = Some(piece);
        self.queued += 1;
        Ok(())
    }

    fn reap(&mut self, wait: Wait, done: &mut Vec<Done>) -> Result<(), Errno> {
        let mut found = self.take_completed(done);
        let wait = if found > 0 || self.in_flight() == 0 { Wait::No } else { wait };
        if self.queued > 0 || wait != Wait::No {
            self.enter(wait)?;
            found += self.take_completed(done);
        }
        while found == 0 && wait != Wait::No && self.in_flight() > 0 {
            if let Wait::Until(end) = wait
                && Instant::now() >= end
            {
                break;
            }
            self.enter(wait)?;
            found += self.take_completed(done);
        }
        Ok(())
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        let end = Instant::now() + LAST_WAIT;
        let mut done = Vec::new();
        while self.in_flight() > 0 && Instant::now() < end {
            if self.reap(Wait::Until(end), &mut done).is_err() {
                break;
            }
        }
        for piece in self.slots.drain(..).flatten() {
            // The kernel may still write to it.
            std::mem::forget(piece);
        }
    }
}
