//! Tiles on their way: each is cut into pieces, of which as many are in flight as the method takes.
//!
//! A transfer owns its buffer from start to end. Pieces that move less than they should are continued; the first failure
//! of a transfer ends it once its pieces in flight have ended.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use shardwise_core::IO_ALIGNMENT;

use crate::buffer::Cut;
use crate::error::{Access, TierError};
use crate::method::{Done, Method, OpenFile, Piece, Wait};
use crate::object::ObjectId;
use crate::open::free_bytes;
use crate::testing::Faults;

/// How often a transfer may make no progress before that is its end.
const MOST_STALLS: usize = 8;

/// A tile on its way.
#[derive(Debug)]
pub(crate) struct Transfer {
    pub(crate) access: Access,
    pub(crate) object: ObjectId,
    pub(crate) tile: usize,
    pub(crate) file: Arc<OpenFile>,
    /// Where the tile begins in the file.
    pub(crate) offset: u64,
    pub(crate) cut: Cut,
    /// Bytes of the tile, without padding.
    pub(crate) len: usize,
    /// Of what was written; of a read, what is expected.
    pub(crate) hash: u64,
    /// Whether nobody wants what is read.
    pub(crate) abandoned: bool,
    pub(crate) progress: Progress,
}

/// How far a transfer is.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// Pieces that were cut and have not ended.
    out: usize,
    stalls: usize,
    pub(crate) failure: Option<Failure>,
}

/// Why a transfer failed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Failure {
    /// Where in the file the piece lies.
    pub(crate) offset: u64,
    /// Bytes that it still had to move.
    pub(crate) bytes: usize,
    pub(crate) cause: Cause,
}

/// What a failed piece came to.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Cause {
    System(Errno),
    /// So many bytes and then nothing, several times.
    End(usize),
}

impl Transfer {
    pub(crate) fn is_finished(&self) -> bool {
        self.cut.is_done() && self.progress.out == 0
    }

    /// What its failure means, if it has failed.
    pub(crate) fn error(&self, rank: usize) -> Option<TierError> {
        let failure = self.progress.failure?;
        let file = self.file.path.clone();
        let (offset, bytes) = (failure.offset, failure.bytes as u64);
        Some(match (failure.cause, self.access) {
            (Cause::End(found), Access::Read) => TierError::Truncated {
                rank,
                file,
                offset: self.offset,
                expected: self.len as u64,
                found: (offset - self.offset + found as u64).min(self.len as u64),
            },
            (Cause::System(Errno::NOSPC | Errno::DQUOT), Access::Write) => {
                TierError::Full { rank, file, offset, needed: bytes, free: free_bytes(&self.file.fd) }
            }
            (Cause::End(found), access) => {
                let cause = format!("the system took only {found} of them, several times");
                TierError::Io { rank, file, access, offset, bytes, cause }
            }
            (Cause::System(errno), access) => {
                TierError::Io { rank, file, access, offset, bytes, cause: errno.to_string() }
            }
        })
    }
}

/// The transfers of a tier.
pub(crate) struct Queue {
    method: Box<dyn Method>,
    faults: Option<Faults>,
    block_bytes: usize,
    transfers: Vec<Option<Transfer>>,
    empty: Vec<usize>,
    /// Transfers that are not wholly cut, in order.
    backlog: VecDeque<usize>,
    /// Pieces to continue.
    again: VecDeque<Piece>,
    done: Vec<Done>,
    /// Pieces that a delay holds back.
    held: Vec<(Instant, Piece)>,
    /// Transfers that have ended and that nobody has been told of.
    finished: Vec<usize>,
    unfinished: usize,
    busy: Duration,
    busy_since: Option<Instant>,
}

impl Queue {
    pub(crate) fn new(method: Box<dyn Method>, faults: Option<Faults>, block_bytes: usize) -> Self {
        Self {
            method,
            faults,
            block_bytes,
            transfers: Vec::new(),
            empty: Vec::new(),
            backlog: VecDeque::new(),
            again: VecDeque::new(),
            done: Vec::new(),
            held: Vec::new(),
            finished: Vec::new(),
            unfinished: 0,
            busy: Duration::ZERO,
            busy_since: None,
        }
    }

    pub(crate) fn method(&self) -> &'static str {
        self.method.name()
    }

    /// Time with at least one transfer that had not ended.
    pub(crate) fn busy(&self) -> Duration {
        self.busy + self.busy_since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    pub(crate) fn unfinished(&self) -> usize {
        self.unfinished
    }

    /// Adds a transfer; [`Self::pump`] begins it.
    pub(crate) fn add(&mut self, transfer: Transfer) -> usize {
        let key = self.empty.pop().unwrap_or_else(|| {
            self.transfers.push(None);
            self.transfers.len() - 1
        });
        self.transfers[key] = Some(transfer);
        self.backlog.push_back(key);
        self.unfinished += 1;
        self.busy_since.get_or_insert_with(Instant::now);
        key
    }

    pub(crate) fn get(&mut self, key: usize) -> Option<&mut Transfer> {
        self.transfers.get_mut(key).and_then(Option::as_mut)
    }

    pub(crate) fn is_finished(&self, key: usize) -> bool {
        self.transfers.get(key).and_then(Option::as_ref).is_none_or(Transfer::is_finished)
    }

    /// Takes out a transfer that has ended.
    pub(crate) fn take(&mut self, key: usize) -> Option<Transfer> {
        let slot = self.transfers.get_mut(key)?;
        if !slot.as_ref()?.is_finished() {
            return None;
        }
        self.empty.push(key);
        slot.take()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (usize, &Transfer)> {
        self.transfers.iter().enumerate().filter_map(|(key, t)| t.as_ref().map(|t| (key, t)))
    }

    /// The transfers that have ended since the last call, into `into`.
    pub(crate) fn drain_finished(&mut self, into: &mut Vec<usize>) {
        into.append(&mut self.finished);
    }

    /// Begins what there is room for and learns what has ended; with `wait`, waits for at least one piece if nothing has.
    pub(crate) fn pump(&mut self, wait: Wait) -> Result<(), Errno> {
        let mut settled = self.pass(Wait::No)?;
        if settled == 0 && wait != Wait::No && self.unfinished > 0 {
            settled = self.pass(wait)?;
        }
        // Room that has become free is used at once.
        while settled > 0 && (!self.backlog.is_empty() || !self.again.is_empty()) {
            settled = self.pass(Wait::No)?;
        }
        Ok(())
    }

    fn pass(&mut self, wait: Wait) -> Result<usize, Errno> {
        self.feed();
        if wait != Wait::No && self.method.in_flight() == 0 && self.unfinished > 0 {
            let Some(due) = self.next_held() else { return Err(Errno::BUSY) };
            let until = if let Wait::Until(end) = wait { due.min(end) } else { due };
            sleep(until.saturating_duration_since(Instant::now()));
            self.feed();
        }
        let wait = match (wait, self.next_held()) {
            (Wait::Until(end), Some(due)) => Wait::Until(end.min(due)),
            (wait, _) => wait,
        };
        let mut done = std::mem::take(&mut self.done);
        let reaped = self.method.reap(wait, &mut done);
        let settled = done.len();
        for done in done.drain(..) {
            self.settle(done);
        }
        self.done = done;
        reaped.map(|()| settled)
    }

    fn next_held(&self) -> Option<Instant> {
        self.held.iter().map(|(due, _)| *due).min()
    }

    /// Begins pieces while there is room: first those that a delay has held back for long enough, then those to continue,
    /// then new ones, in order.
    fn feed(&mut self) {
        while self.method.has_room() {
            let now = Instant::now();
            let piece = match self.held.iter().position(|(due, _)| *due <= now) {
                Some(index) => self.held.swap_remove(index).1,
                None => {
                    let Some(piece) = self.again.pop_front().or_else(|| self.cut_next()) else { return };
                    if let Some(delay) = self.faults.as_ref().and_then(Faults::delay) {
                        self.held.push((now + delay, piece));
                        continue;
                    }
                    piece
                }
            };
            if let Err(piece) = self.method.begin(piece) {
                self.again.push_front(piece);
                return;
            }
        }
    }

    fn cut_next(&mut self) -> Option<Piece> {
        while let Some(&key) = self.backlog.front() {
            let most = self.block_bytes;
            if let Some(transfer) = self.get(key) {
                let offset = transfer.offset + transfer.cut.position() as u64;
                if let Some(part) = transfer.cut.next(most) {
                    transfer.progress.out += 1;
                    return Some(Piece { transfer: key, file: transfer.file.clone(), offset, part });
                }
            }
            self.backlog.pop_front();
        }
        None
    }

    fn settle(&mut self, done: Done) {
        let Done { mut piece, mut result } = done;
        if let Some(faults) = &self.faults {
            result = faults.completed(&mut piece, result);
        }
        let key = piece.transfer;
        let Some(transfer) = self.transfers.get_mut(key).and_then(Option::as_mut) else { return };
        let progress = &mut transfer.progress;
        let bytes = piece.part.bytes();
        let cause = match result {
            Ok(moved) if moved >= bytes => None,
            // The file ends here, and will the next time.
            Ok(0) if transfer.access == Access::Read => {
                progress.stalls = MOST_STALLS;
                Some(Cause::End(0))
            }
            Ok(moved) => {
                // Direct transfers go on at a whole block.
                let whole = moved - moved % IO_ALIGNMENT;
                piece.part.advance(whole);
                piece.offset += whole as u64;
                progress.stalls += usize::from(whole == 0);
                Some(Cause::End(moved - whole))
            }
            // io_uring cancels what a thread has begun and not finished when the thread ends; the tier may live on.
            Err(errno @ (Errno::INTR | Errno::AGAIN | Errno::CANCELED)) => {
                // Many pieces are cancelled at once; the deadline ends what is cancelled again and again.
                progress.stalls += usize::from(errno != Errno::CANCELED);
                Some(Cause::System(errno))
            }
            Err(errno) => {
                progress.stalls = MOST_STALLS;
                Some(Cause::System(errno))
            }
        };
        if let Some(cause) = cause {
            if progress.stalls < MOST_STALLS && progress.failure.is_none() {
                self.again.push_back(piece);
                return;
            }
            let failure = Failure { offset: piece.offset, bytes: piece.part.bytes(), cause };
            // The same failure is told whatever ended first.
            if progress.failure.is_none_or(|first| failure.offset < first.offset) {
                progress.failure = Some(failure);
            }
            transfer.cut.stop();
        }
        transfer.progress.out -= 1;
        drop(piece);
        if transfer.is_finished() {
            self.finished.push(key);
            self.unfinished -= 1;
            if self.unfinished == 0
                && let Some(since) = self.busy_since.take()
            {
                self.busy += since.elapsed();
            }
        }
    }
}
