//! The notice board of a world: what each rank has posted, read and finished, in memory that all ranks map.
//!
//! For every channel (group) each rank has a ring of slots, one for each of its last operations. A rank *posts* an
//! operation by filling its slot and then raising `posted`; peers that see it may read the slot and the bytes it lends.
//! A rank raises `read` when it has finished with every peer's bytes; once all have, the lender may write again.
//!
//! Invariant: the mapped bytes start zeroed, are only ever accessed as the atomics below, and a slot's descriptor is
//! written only by its rank, before the `Release` store to `posted`, after every peer's `read` has passed the slot's
//! last operation. Zero bytes are a valid, empty board.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use rustix::thread::futex;

use crate::error::CommError;
use crate::fingerprint::{Fingerprint, OpKind, Wire};
use crate::mapping::Mapping;
use crate::memory::RegionId;

/// Groups that one world can hold at a time.
pub(crate) const CHANNELS: usize = 64;
/// Operations of one group that may be unfinished at a time.
pub(crate) const SLOTS: usize = 32;

const MAGIC: u64 = u64::from_le_bytes(*b"shardws1");
const TEXT_BYTES: usize = 3072;

/// States of [`RankCell::state`].
pub(crate) mod rank_state {
    /// The rank has not come yet.
    pub(crate) const ABSENT: u32 = 0;
    /// It takes part.
    pub(crate) const JOINED: u32 = 1;
    /// It has ended as it should.
    pub(crate) const LEFT: u32 = 2;
    /// Its thread panicked.
    pub(crate) const PANICKED: u32 = 3;
}

#[repr(C)]
struct Header {
    magic: AtomicU64,
    ranks: AtomicU64,
    /// 0: no failure; otherwise the number + 1 of the [`Note`] that tells the first one.
    failure: AtomicU32,
}

/// A failure as one writer tells it. Everyone writes a note of its own and only then points at it, so that there is
/// never a first failure that cannot be read, not even when its writer dies half-way.
#[repr(C, align(128))]
struct Note {
    /// 0: empty; 1: being written; 2: written, and never changed again.
    state: AtomicU32,
    kind: AtomicU32,
    rank: AtomicU32,
    len: AtomicU32,
    text: [AtomicU8; TEXT_BYTES],
}

/// What a rank shows of itself.
#[repr(C, align(128))]
pub(crate) struct RankCell {
    /// Raised at every change; the word that waiters sleep on.
    pub(crate) event: AtomicU32,
    /// How many sleep on it.
    pub(crate) waiters: AtomicU32,
    pub(crate) pid: AtomicU32,
    pub(crate) state: AtomicU32,
}

/// One operation of one rank on one channel.
#[repr(C, align(64))]
pub(crate) struct Slot {
    /// Sequence number + 1 of the operation described below.
    posted: AtomicU64,
    /// Sequence number + 1 of the last operation whose bytes this rank has finished reading.
    read: AtomicU64,
    kind: AtomicU8,
    wire: AtomicU8,
    label_len: AtomicU8,
    root: AtomicU32,
    elements: AtomicU64,
    region_offset: AtomicU64,
    region_len: AtomicU64,
    start: AtomicU64,
    end: AtomicU64,
    label: [AtomicU8; Fingerprint::LABEL_BYTES],
}

/// A posted operation as a peer reads it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Posted {
    pub(crate) fingerprint: Fingerprint,
    pub(crate) region: RegionId,
    /// The bytes of the region that are lent.
    pub(crate) lent: std::ops::Range<u64>,
}

/// The board, over mapped memory.
#[derive(Debug, Clone)]
pub(crate) struct Board {
    memory: Arc<Mapping>,
    ranks: usize,
}

const CELLS_OFFSET: usize = size_of::<Header>().next_multiple_of(128);

const fn notes_offset(ranks: usize) -> usize {
    CELLS_OFFSET + ranks * size_of::<RankCell>()
}

/// Behind one note for each rank and one for the launcher.
const fn slots_offset(ranks: usize) -> usize {
    notes_offset(ranks) + (ranks + 1) * size_of::<Note>()
}

impl Board {
    /// Bytes that a board for `ranks` needs.
    pub(crate) fn bytes(ranks: usize) -> usize {
        slots_offset(ranks) + CHANNELS * ranks * SLOTS * size_of::<Slot>()
    }

    /// A board over zeroed or already initialised memory.
    pub(crate) fn over(memory: Arc<Mapping>, ranks: usize) -> Result<Self, CommError> {
        if memory.len() < Self::bytes(ranks) {
            return Err(CommError::Rendezvous(format!(
                "shared memory of {} bytes is too small for {ranks} ranks",
                memory.len()
            )));
        }
        let board = Self { memory, ranks };
        let header = board.header();
        let (magic, count) =
            (header.magic.swap(MAGIC, Ordering::AcqRel), header.ranks.load(Ordering::Acquire));
        if magic != 0 && magic != MAGIC {
            return Err(CommError::Rendezvous(
                "the inherited shared memory is not one of this version of Shardwise; start all ranks with one program"
                    .into(),
            ));
        }
        if count != 0 && count != ranks as u64 {
            return Err(CommError::Rendezvous(format!(
                "this rank was started for a world of {ranks} ranks, but its peers for one of {count}"
            )));
        }
        header.ranks.store(ranks as u64, Ordering::Release);
        Ok(board)
    }

    pub(crate) fn ranks(&self) -> usize {
        self.ranks
    }

    fn header(&self) -> &Header {
        // SAFETY: the mapping is page-aligned, at least `bytes()` long (checked in `over`), lives as long as `self`, and
        // holds only atomics here, for which every bit pattern is valid.
        unsafe { &*self.memory.as_ptr().cast::<Header>() }
    }

    pub(crate) fn cell(&self, rank: usize) -> &RankCell {
        assert!(rank < self.ranks, "rank {rank} of {}", self.ranks);
        let offset = CELLS_OFFSET + rank * size_of::<RankCell>();
        // SAFETY: as in `header`; the offset is a multiple of the cell's alignment and inside `bytes()` as rank < ranks.
        unsafe { &*self.memory.as_ptr().add(offset).cast::<RankCell>() }
    }

    fn note(&self, writer: usize) -> &Note {
        assert!(writer <= self.ranks, "writer {writer} of {} ranks and their launcher", self.ranks);
        let offset = notes_offset(self.ranks) + writer * size_of::<Note>();
        // SAFETY: as in `header`; the offset is a multiple of the note's alignment and inside `bytes()` as there are
        // ranks + 1 notes.
        unsafe { &*self.memory.as_ptr().add(offset).cast::<Note>() }
    }

    /// The number under which the launcher, which is no rank, writes its note.
    pub(crate) fn launcher(&self) -> usize {
        self.ranks
    }

    fn slot(&self, channel: usize, rank: usize, seq: u64) -> &Slot {
        assert!(channel < CHANNELS && rank < self.ranks);
        let index = (channel * self.ranks + rank) * SLOTS + (seq % SLOTS as u64) as usize;
        let offset = slots_offset(self.ranks) + index * size_of::<Slot>();
        // SAFETY: as in `header`; the index is below CHANNELS * ranks * SLOTS by the assertion and the modulus.
        unsafe { &*self.memory.as_ptr().add(offset).cast::<Slot>() }
    }

    /// Wakes the ranks that wait for a change by `rank`.
    pub(crate) fn ring(&self, rank: usize) {
        let cell = self.cell(rank);
        cell.event.fetch_add(1, Ordering::SeqCst);
        if cell.waiters.load(Ordering::SeqCst) > 0 {
            // A failed wake-up only delays the sleeper until its next look.
            let _ = futex::wake(&cell.event, futex::Flags::empty(), i32::MAX as u32);
        }
    }

    /// Ends the world: `writer` (a rank, or [`Board::launcher`]) writes the failure down and wakes everyone. Afterwards
    /// [`Board::failure`] tells the world's first failure, which need not be this one.
    pub(crate) fn fail(&self, writer: usize, error: &CommError) {
        self.write_note(writer, error);
        let first = &self.header().failure;
        // Losing means that another has failed before.
        let _ = first.compare_exchange(0, writer as u32 + 1, Ordering::AcqRel, Ordering::Acquire);
        (0..self.ranks).for_each(|rank| self.ring(rank));
    }

    /// Whether `rank` has posted operation `seq` (or a later one).
    pub(crate) fn has_posted(&self, channel: usize, rank: usize, seq: u64) -> bool {
        self.slot(channel, rank, seq).posted.load(Ordering::Acquire) > seq
    }

    /// Whether `rank` has finished reading in operation `seq` (or a later one of the same slot).
    pub(crate) fn has_read(&self, channel: usize, rank: usize, seq: u64) -> bool {
        self.slot(channel, rank, seq).read.load(Ordering::Acquire) > seq
    }

    /// Fills the slot of operation `seq`. The caller has made sure that no peer still reads the slot.
    pub(crate) fn post(&self, channel: usize, rank: usize, seq: u64, posted: &Posted) {
        let slot = self.slot(channel, rank, seq);
        let fp = &posted.fingerprint;
        slot.kind.store(fp.kind as u8, Ordering::Relaxed);
        slot.wire.store(fp.wire as u8, Ordering::Relaxed);
        slot.root.store(fp.root, Ordering::Relaxed);
        slot.elements.store(fp.elements, Ordering::Relaxed);
        let label = &fp.label.as_bytes()[..fp.label.len().min(Fingerprint::LABEL_BYTES)];
        for (cell, byte) in slot.label.iter().zip(label) {
            cell.store(*byte, Ordering::Relaxed);
        }
        slot.label_len.store(label.len() as u8, Ordering::Relaxed);
        slot.region_offset.store(posted.region.offset, Ordering::Relaxed);
        slot.region_len.store(posted.region.len, Ordering::Relaxed);
        slot.start.store(posted.lent.start, Ordering::Relaxed);
        slot.end.store(posted.lent.end, Ordering::Relaxed);
        slot.posted.store(seq + 1, Ordering::Release);
    }

    /// What `rank` posted as operation `seq`; `None` while it has not, or when the slot is unreadable.
    pub(crate) fn posted(&self, channel: usize, rank: usize, seq: u64) -> Option<Posted> {
        let slot = self.slot(channel, rank, seq);
        if slot.posted.load(Ordering::Acquire) <= seq {
            return None;
        }
        let len = usize::from(slot.label_len.load(Ordering::Relaxed)).min(Fingerprint::LABEL_BYTES);
        let label: Vec<u8> = slot.label[..len].iter().map(|c| c.load(Ordering::Relaxed)).collect();
        Some(Posted {
            fingerprint: Fingerprint {
                kind: OpKind::from_code(slot.kind.load(Ordering::Relaxed))?,
                wire: Wire::from_code(slot.wire.load(Ordering::Relaxed))?,
                label: String::from_utf8_lossy(&label).into_owned(),
                elements: slot.elements.load(Ordering::Relaxed),
                root: slot.root.load(Ordering::Relaxed),
            },
            region: RegionId {
                offset: slot.region_offset.load(Ordering::Relaxed),
                len: slot.region_len.load(Ordering::Relaxed),
            },
            lent: slot.start.load(Ordering::Relaxed)..slot.end.load(Ordering::Relaxed),
        })
    }

    /// Notes that `rank` has finished reading in operation `seq`.
    pub(crate) fn mark_read(&self, channel: usize, rank: usize, seq: u64) {
        self.slot(channel, rank, seq).read.fetch_max(seq + 1, Ordering::AcqRel);
    }

    /// Writes a writer's first failure down; its later ones are dropped.
    fn write_note(&self, writer: usize, error: &CommError) {
        let note = self.note(writer);
        if note.state.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Acquire).is_err() {
            // Only another thread of this very process can be writing it: it will be done, or all of us are gone.
            while note.state.load(Ordering::Acquire) != 2 {
                std::thread::yield_now();
            }
            return;
        }
        let (kind, rank, text) = encode(error);
        let mut len = text.len().min(TEXT_BYTES);
        while !text.is_char_boundary(len) {
            len -= 1;
        }
        for (cell, byte) in note.text.iter().zip(&text.as_bytes()[..len]) {
            cell.store(*byte, Ordering::Relaxed);
        }
        note.kind.store(kind, Ordering::Relaxed);
        note.rank.store(rank, Ordering::Relaxed);
        note.len.store(len as u32, Ordering::Relaxed);
        note.state.store(2, Ordering::Release);
    }

    /// The world's first failure.
    pub(crate) fn failure(&self) -> Option<CommError> {
        let first = self.header().failure.load(Ordering::Acquire) as usize;
        let note = self.note(first.checked_sub(1)?.min(self.ranks));
        let len = (note.len.load(Ordering::Relaxed) as usize).min(TEXT_BYTES);
        let text: Vec<u8> = note.text[..len].iter().map(|c| c.load(Ordering::Relaxed)).collect();
        let text = String::from_utf8_lossy(&text).into_owned();
        let rank = note.rank.load(Ordering::Relaxed) as usize;
        Some(decode(note.kind.load(Ordering::Relaxed), rank, text))
    }
}

/// The kinds of failure that keep their type on the way to other ranks.
fn encode(error: &CommError) -> (u32, u32, String) {
    match error {
        CommError::Mismatch(text) => (1, 0, text.clone()),
        CommError::RankLost { rank, how } => (2, *rank as u32, how.clone()),
        CommError::Disagreement(text) => (3, 0, text.clone()),
        CommError::Peer { rank, message } => (4, *rank as u32, message.clone()),
        CommError::Timeout { rank, .. } | CommError::Usage { rank, .. } => {
            (4, *rank as u32, error.to_string())
        }
        other => (5, 0, other.to_string()),
    }
}

fn decode(kind: u32, rank: usize, text: String) -> CommError {
    match kind {
        1 => CommError::Mismatch(text),
        2 => CommError::RankLost { rank, how: text },
        3 => CommError::Disagreement(text),
        4 => CommError::Peer { rank, message: text },
        _ => CommError::Rendezvous(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whoever has failed can read at once which failure was the first, and all read the same.
    #[test]
    fn of_failures_at_once_all_read_the_same_first_one() {
        const RANKS: usize = 4;
        for round in 0..2_000 {
            let memory = Arc::new(Mapping::anonymous(Board::bytes(RANKS)).expect("memory"));
            let board = Board::over(memory, RANKS).expect("a board");
            let told: Vec<Option<CommError>> = std::thread::scope(|scope| {
                let fail = |writer: usize| {
                    let board = board.clone();
                    scope.spawn(move || {
                        let message = format!("round {round}, {writer}").repeat(20);
                        board.fail(writer, &CommError::Peer { rank: writer, message });
                        board.failure()
                    })
                };
                let all: Vec<_> = (0..=RANKS).map(fail).collect();
                all.into_iter().map(|thread| thread.join().expect("no panic")).collect()
            });
            let first = told[0].clone().expect("a failure");
            let CommError::Peer { rank, message } = &first else { panic!("{first:?}") };
            assert_eq!(*message, format!("round {round}, {rank}").repeat(20));
            assert!(told.iter().all(|t| t.as_ref() == Some(&first)), "{told:?}");
        }
    }
}
