//! The collectives of a group of ranks.

mod split;
mod staged;

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use shardwise_core::{Precision, Quantization};

use crate::Result;
use crate::buffer::SharedBuffer;
use crate::error::CommError;
use crate::fingerprint::{Fingerprint, OpKind, Wire};
use crate::pending::{GatherTarget, Loan, Parts, PendingGather, PendingReduce, Started};
use crate::reduce::sum_windows;
use crate::transport::{Channel, Transport, Window};
use split::{Lease, leave_out};
use staged::pick;

/// How gradients are summed.
#[derive(Debug, Clone)]
pub struct ReduceScatter<'a> {
    /// What they are gradients of, for messages.
    pub label: &'a str,
    /// Elements of one part.
    pub part_numel: usize,
    /// Parts of every source, one behind another.
    pub parts: usize,
    /// The type in which they travel: the source holds them packed ([`crate::codec::pack`]). Sums are f32.
    pub precision: Precision,
    /// What f32 elements are quantised to: behind all parts the source holds them once more, quantised part by part, and
    /// only what cannot be quantised is read in f32 ([`ReduceScatter::words`]).
    pub quantised: Option<Quantization>,
    /// The members (this rank among them) whose buffers this rank sums. The others take part without being read here.
    pub summed: Range<usize>,
}

impl ReduceScatter<'_> {
    /// f32 words that a source needs.
    pub fn words(&self) -> usize {
        self.parts().bytes().div_ceil(size_of::<f32>())
    }

    /// Where, among the source's bytes, the quantised elements of a part lie; none when nothing is quantised.
    pub fn quantised_range(&self, part: usize) -> Range<usize> {
        self.parts().quantised_range(part)
    }

    fn parts(&self) -> Parts {
        let (numel, count, summed) = (self.part_numel, self.parts, self.summed.clone());
        Parts { numel, count, precision: self.precision, quantised: self.quantised, summed }
    }

    fn fingerprint(&self) -> Fingerprint {
        let wire = self.quantised.map_or_else(|| self.precision.into(), Wire::from);
        let kind = if self.parts == 1 { OpKind::AllReduce } else { OpKind::ReduceScatter };
        Fingerprint::new(kind, self.label, self.part_numel * self.parts, wire)
    }
}

/// Ranks that communicate with each other, and this rank's seat among them.
///
/// Collectives are issued by one thread of each member, in the same order by all. Those that take a [`SharedBuffer`]
/// need no copy before the receiver's; those that take slices travel in pieces through a staging buffer.
#[derive(Debug, Clone)]
pub struct ProcessGroup {
    transport: Arc<dyn Transport>,
    channel: Arc<Channel>,
    staging: Arc<Mutex<Option<SharedBuffer>>>,
    /// The right to the channel's number; the group of all ranks needs none.
    lease: Option<Arc<Lease>>,
}

impl ProcessGroup {
    /// The group of all ranks.
    pub fn world(transport: Arc<dyn Transport>) -> Self {
        let (rank, ranks) = (transport.rank(), transport.world_size());
        Self::over(transport, Channel::new(0, (0..ranks).collect(), rank))
    }

    fn over(transport: Arc<dyn Transport>, channel: Channel) -> Self {
        Self { transport, channel: Arc::new(channel), staging: Arc::default(), lease: None }
    }

    /// This rank's place in the group.
    pub fn rank(&self) -> usize {
        self.channel.index()
    }

    /// The number of ranks in the group.
    pub fn size(&self) -> usize {
        self.channel.members().len()
    }

    /// World ranks of the members, by group rank.
    pub fn members(&self) -> &[usize] {
        self.channel.members()
    }

    /// The transport below.
    pub fn transport(&self) -> &Arc<dyn Transport> {
        &self.transport
    }

    /// Bytes of the staging buffer, if it has been needed.
    pub fn staging_bytes(&self) -> u64 {
        let staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        staging.as_ref().map_or(0, |buffer| (buffer.numel() * size_of::<f32>()) as u64)
    }

    /// Memory that peers can read in place.
    ///
    /// # Errors
    /// When the system has none.
    pub fn allocate(&self, numel: usize) -> Result<SharedBuffer> {
        self.transport.allocate(numel)
    }

    fn begin(
        &self,
        fingerprint: Fingerprint,
        lend: Option<(&SharedBuffer, Range<usize>)>,
    ) -> Result<Started> {
        let (buffer, bytes) = lend.unzip();
        let lent = buffer.map(SharedBuffer::handle).zip(bytes);
        let seq = self.transport.start(&self.channel, &fingerprint, lent)?;
        if let Some(buffer) = buffer {
            buffer.lent(&self.transport, &self.channel, seq);
        }
        Ok(Started {
            transport: self.transport.clone(),
            channel: self.channel.clone(),
            fingerprint,
            seq,
            finished: false,
        })
    }

    /// Starts gathering every rank's `part` (all equally long) into `dest`, in rank order. The parts are copied when the
    /// result is waited for; until every rank has done so, `part` must not be written, which
    /// [`SharedBuffer::writable`] sees to. A group of one copies at once.
    ///
    /// # Panics
    /// When `dest` is shorter than all parts.
    pub fn start_all_gather<T: GatherTarget>(
        &self,
        label: &str,
        part: &SharedBuffer,
        dest: T,
    ) -> PendingGather<T> {
        self.start_all_gather_of(label, (part, part.numel()), dest)
    }

    /// As [`ProcessGroup::start_all_gather`], of the first elements of a buffer that may be longer.
    ///
    /// # Panics
    /// When `dest` is shorter than all parts, or the buffer than its part.
    pub fn start_all_gather_of<T: GatherTarget>(
        &self,
        label: &str,
        (part, part_numel): (&SharedBuffer, usize),
        dest: T,
    ) -> PendingGather<T> {
        assert!(part.numel() >= part_numel, "the buffer holds the part");
        assert!(dest.numel() >= part_numel * self.size(), "the gathered buffer holds every part");
        let mut pending = PendingGather { started: None, dest, part_numel, error: None };
        if self.size() == 1 {
            let copied = pending
                .dest
                .target()
                .map(|dest| dest[..part_numel].copy_from_slice(&part.as_slice()[..part_numel]));
            pending.error = copied.err();
            return pending;
        }
        let fingerprint = Fingerprint::new(OpKind::AllGather, label, part_numel * self.size(), Wire::F32);
        match self.begin(fingerprint, Some((part, 0..part_numel * size_of::<f32>()))) {
            Ok(started) => pending.started = Some(started),
            Err(error) => pending.error = Some(error),
        }
        pending
    }

    /// Lends the first `bytes` of `buffer` to the peers, and theirs to this rank, until every rank has finished its loan.
    /// They must not be written before, which [`SharedBuffer::writable`] sees to.
    ///
    /// # Errors
    /// When the world has failed.
    ///
    /// # Panics
    /// When the buffer is shorter.
    pub fn lend(&self, label: &str, buffer: &SharedBuffer, bytes: usize) -> Result<Loan> {
        self.lend_range(label, buffer, 0..bytes)
    }

    /// As [`ProcessGroup::lend`], of a range of the buffer's bytes.
    ///
    /// # Errors
    /// When the world has failed.
    ///
    /// # Panics
    /// When the buffer is shorter.
    pub fn lend_range(&self, label: &str, buffer: &SharedBuffer, bytes: Range<usize>) -> Result<Loan> {
        assert!(bytes.end <= buffer.numel() * size_of::<f32>(), "the buffer holds what is lent");
        let fingerprint = Fingerprint::new(OpKind::AllGather, label, bytes.len() * self.size(), Wire::Bytes);
        Ok(Loan { started: self.begin(fingerprint, Some((buffer, bytes)))? })
    }

    /// Starts summing the ranks' `source` buffers so that each rank gets the sum of its part: elements
    /// `[rank * part_numel, (rank + 1) * part_numel)`. The buffer stays lent until every rank has read its part. A rank
    /// without a source contributes zeros.
    ///
    /// # Panics
    /// When `source` is shorter than all parts.
    pub fn start_reduce_scatter(
        &self,
        label: &str,
        source: impl Into<Option<SharedBuffer>>,
        part_numel: usize,
    ) -> PendingReduce {
        let (parts, summed) = (self.size(), 0..self.size());
        let precision = Precision::F32;
        let how = ReduceScatter { label, part_numel, parts, precision, quantised: None, summed };
        self.start_reduction(&how, source.into())
    }

    /// As [`ProcessGroup::start_reduce_scatter`], over some of the members, in any precision, and of any number of parts:
    /// which of them a rank sums it says when it waits.
    ///
    /// # Panics
    /// When `source` is shorter than all parts.
    pub fn start_reduction(&self, how: &ReduceScatter<'_>, source: Option<SharedBuffer>) -> PendingReduce {
        let parts = how.parts();
        assert!(
            source.as_ref().is_none_or(|s| s.numel() * size_of::<f32>() >= parts.bytes()),
            "the source holds every part"
        );
        let own_part = self.rank().saturating_sub(how.summed.start);
        let mut pending = PendingReduce { started: None, source, parts, own_part, error: None };
        if self.size() > 1 {
            let lent = pending.source.as_ref().map(|s| (s, 0..pending.parts.bytes()));
            match self.begin(how.fingerprint(), lent) {
                Ok(started) => pending.started = Some(started),
                Err(error) => pending.error = Some(error),
            }
        }
        pending
    }

    /// As [`ProcessGroup::start_reduction`], at once: puts the sum of the members' `part`-th parts into `dst`, or adds it
    /// to what `dst` holds. The source stays lent until every member has read it.
    ///
    /// # Errors
    /// When a peer is lost, late, or calls something else.
    ///
    /// # Panics
    /// When `source` is shorter than all parts, or `dst` not as long as one.
    pub fn reduce(
        &self,
        how: &ReduceScatter<'_>,
        source: &SharedBuffer,
        part: usize,
        dst: &mut [f32],
        add: bool,
    ) -> Result<()> {
        let parts = how.parts();
        assert!(source.numel() * size_of::<f32>() >= parts.bytes(), "the source holds every part");
        assert_eq!(dst.len(), parts.numel, "the sum has the length of a part");
        let mut started = self.begin(how.fingerprint(), Some((source, 0..parts.bytes())))?;
        parts.sum(&started, part, dst, add)?;
        started.finish();
        Ok(())
    }

    /// Brings this group's order of operations together again after its members have started different ones: all go on
    /// with the same number. The numbers are exchanged `through` another group with the same members.
    ///
    /// # Errors
    /// When a peer is lost, late, or calls something else.
    pub fn realign(&self, through: &ProcessGroup) -> Result<()> {
        let upcoming = self.channel.upcoming();
        let all = through.all_gather_bytes("realign", &upcoming.to_le_bytes())?;
        let number = |bytes: &Vec<u8>| bytes.as_slice().try_into().map_or(0, u64::from_le_bytes);
        let next = all.iter().map(number).max().unwrap_or(upcoming);
        leave_out(&*self.transport, &self.channel, upcoming..next);
        self.channel.skip_to(next);
        Ok(())
    }

    /// Waits until every rank has come here.
    ///
    /// # Errors
    /// When a peer is lost, late, or calls something else.
    pub fn barrier(&self, label: &str) -> Result<()> {
        let mut started = self.begin(Fingerprint::new(OpKind::Barrier, label, 0, Wire::Bytes), None)?;
        started.wait_for_all()?;
        started.finish();
        Ok(())
    }

    /// Gathers every rank's `part` (all equally long) into `dest`.
    ///
    /// # Errors
    /// When a peer is lost, late, or calls something else, or `dest` has another length than all parts.
    pub fn all_gather(&self, label: &str, part: &[f32], dest: &mut [f32]) -> Result<()> {
        let n = part.len();
        self.check(dest.len() == n * self.size(), || {
            format!(
                "all_gather of `{label}`: dest has {} elements, all parts have {}",
                dest.len(),
                n * self.size()
            )
        })?;
        let fingerprint = Fingerprint::new(OpKind::AllGather, label, n * self.size(), Wire::F32);
        self.staged(
            &fingerprint,
            n,
            |piece, buffer| buffer.copy_from_slice(&part[piece]),
            |piece, started| {
                for peer in started.peers() {
                    let at = peer * n;
                    dest[at + piece.start..at + piece.end]
                        .copy_from_slice(started.window(peer, None)?.f32s());
                }
                Ok(())
            },
        )
    }

    /// Sums the ranks' `source` so that each rank gets the sum of its part in `dest`.
    ///
    /// # Errors
    /// When a peer is lost, late, or calls something else, or `source` has another length than all parts.
    pub fn reduce_scatter(&self, label: &str, source: &[f32], dest: &mut [f32]) -> Result<()> {
        let (n, w) = (dest.len(), self.size());
        self.check(source.len() == n * w, || {
            format!(
                "reduce_scatter of `{label}`: source has {} elements, all parts have {}",
                source.len(),
                n * w
            )
        })?;
        let fingerprint = Fingerprint::new(OpKind::ReduceScatter, label, n * w, Wire::F32);
        // A piece carries the same range of every rank's part, so each piece is a reduce-scatter of its own.
        self.staged_by(
            &fingerprint,
            n,
            w,
            |piece, buffer| pick(source, n, &piece, buffer),
            |piece, started| {
                let bytes = piece.len() * size_of::<f32>();
                let own = self.rank() * bytes..(self.rank() + 1) * bytes;
                let windows = (0..w)
                    .map(|peer| started.window(peer, Some(own.clone())))
                    .collect::<Result<Vec<Window>>>()?;
                let slices: Vec<&[f32]> = windows.iter().map(Window::f32s).collect();
                sum_windows(&mut dest[piece], &slices, false);
                Ok(())
            },
        )
    }

    /// Sums `buffer` over the ranks, in place: a reduce-scatter and an all-gather, so that every element is added once
    /// and every rank has the same bits.
    ///
    /// # Errors
    /// When a peer is lost, late, or calls something else.
    pub fn all_reduce(&self, label: &str, buffer: &mut [f32]) -> Result<()> {
        let part_numel = buffer.len().div_ceil(self.size());
        let mut padded = buffer.to_vec();
        padded.resize(part_numel * self.size(), 0.0);
        let mut part = vec![0.0; part_numel];
        self.reduce_scatter(label, &padded, &mut part)?;
        self.all_gather(label, &part, &mut padded)?;
        buffer.copy_from_slice(&padded[..buffer.len()]);
        Ok(())
    }

    /// Sends `source` in equal parts: part `r` goes to rank `r`, whose `dest` gets one part from every rank.
    ///
    /// # Errors
    /// When a peer is lost, late, or calls something else, or the lengths differ or are no multiple of the group's size.
    pub fn all_to_all(&self, label: &str, source: &[f32], dest: &mut [f32]) -> Result<()> {
        let w = self.size();
        self.check(source.len() == dest.len() && source.len().is_multiple_of(w), || {
            format!(
                "all_to_all of `{label}`: source has {} and dest {} elements; both must be one multiple of {w}",
                source.len(),
                dest.len()
            )
        })?;
        let n = source.len() / w;
        let fingerprint = Fingerprint::new(OpKind::AllToAll, label, source.len(), Wire::F32);
        self.staged_by(
            &fingerprint,
            n,
            w,
            |piece, buffer| pick(source, n, &piece, buffer),
            |piece, started| {
                let bytes = piece.len() * size_of::<f32>();
                let own = self.rank() * bytes..(self.rank() + 1) * bytes;
                for peer in started.peers() {
                    let window = started.window(peer, Some(own.clone()))?;
                    dest[peer * n + piece.start..peer * n + piece.end].copy_from_slice(window.f32s());
                }
                Ok(())
            },
        )
    }

    /// Gives every rank the bytes of group rank `root`. All must pass the same length.
    ///
    /// # Errors
    /// When a peer is lost, late, or calls something else, or `root` is not in the group.
    pub fn broadcast(&self, label: &str, bytes: &mut [u8], root: usize) -> Result<()> {
        self.check(root < self.size(), || {
            format!("broadcast of `{label}` from rank {root} of {}", self.size())
        })?;
        let n = bytes.len().div_ceil(size_of::<f32>());
        let mut words = vec![0.0f32; n];
        bytemuck::cast_slice_mut::<f32, u8>(&mut words)[..bytes.len()].copy_from_slice(bytes);
        let fingerprint =
            Fingerprint::new(OpKind::Broadcast, label, bytes.len(), Wire::Bytes).from_root(root);
        let source = words.clone();
        self.staged(
            &fingerprint,
            n,
            |piece, buffer| buffer.copy_from_slice(&source[piece]),
            |piece, started| {
                // A rank that sends to itself alone would not notice that its peers wait for another.
                started.wait_for_all()?;
                words[piece].copy_from_slice(started.window(root, None)?.f32s());
                Ok(())
            },
        )?;
        bytes.copy_from_slice(&bytemuck::cast_slice::<f32, u8>(&words)[..bytes.len()]);
        Ok(())
    }

    /// Every rank's `part`, by rank; all must pass the same length.
    ///
    /// # Errors
    /// When a peer is lost, late, or calls something else.
    pub fn all_gather_bytes(&self, label: &str, part: &[u8]) -> Result<Vec<Vec<u8>>> {
        let n = part.len().div_ceil(size_of::<f32>());
        let mut words = vec![0.0f32; n];
        bytemuck::cast_slice_mut::<f32, u8>(&mut words)[..part.len()].copy_from_slice(part);
        let fingerprint = Fingerprint::new(OpKind::AllGather, label, part.len() * self.size(), Wire::Bytes);
        let mut parts = vec![Vec::with_capacity(part.len()); self.size()];
        self.staged(
            &fingerprint,
            n,
            |piece, buffer| buffer.copy_from_slice(&words[piece]),
            |_, started| {
                for peer in started.peers() {
                    parts[peer].extend_from_slice(started.window(peer, None)?.bytes());
                }
                Ok(())
            },
        )?;
        parts.iter_mut().for_each(|p| p.truncate(part.len()));
        Ok(parts)
    }

    /// Every rank's `part`, by rank, of any lengths.
    ///
    /// # Errors
    /// When a peer is lost, late, or calls something else.
    pub fn all_gather_varied(&self, label: &str, part: &[u8]) -> Result<Vec<Vec<u8>>> {
        let lengths = self.all_gather_bytes(label, &(part.len() as u64).to_le_bytes())?;
        let lengths: Vec<usize> = lengths
            .iter()
            .map(|l| l.as_slice().try_into().map_or(0, |bytes| u64::from_le_bytes(bytes) as usize))
            .collect();
        let mut padded = part.to_vec();
        padded.resize(lengths.iter().copied().max().unwrap_or(0), 0);
        let mut parts = self.all_gather_bytes(label, &padded)?;
        parts.iter_mut().zip(lengths).for_each(|(p, n)| p.truncate(n));
        Ok(parts)
    }

    fn check(&self, right: bool, message: impl FnOnce() -> String) -> Result<()> {
        if right { Ok(()) } else { Err(CommError::Usage { rank: self.transport.rank(), message: message() }) }
    }
}
