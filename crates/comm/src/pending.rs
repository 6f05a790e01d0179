//! Collectives in flight. Each owns its buffers until it is waited for; dropping one releases the peers and never panics.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use shardwise_core::{Precision, Quantization};

use crate::Result;
use crate::buffer::{HostBuffer, SharedBuffer};
use crate::codec::take;
use crate::error::CommError;
use crate::fingerprint::Fingerprint;
use crate::quantise::{has_raw, sum_quantised};
use crate::reduce::sum_encoded;
use crate::transport::{Channel, Transport, Window};

/// One started operation of a group, finished when dropped.
#[derive(Debug)]
pub(crate) struct Started {
    pub(crate) transport: Arc<dyn Transport>,
    pub(crate) channel: Arc<Channel>,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) seq: u64,
    pub(crate) finished: bool,
}

impl Started {
    /// What `peer` lends, or a range of its bytes.
    pub(crate) fn window(&self, peer: usize, range: Option<Range<usize>>) -> Result<Window> {
        self.window_if_lent(peer, range)?.ok_or_else(|| {
            let lender = self.channel.members()[peer];
            CommError::system(
                format!("reading what rank {lender} lends in {}", self.fingerprint),
                "it lends nothing",
            )
        })
    }

    /// What `peer` lends, or a range of its bytes; `None` when it lends nothing.
    pub(crate) fn window_if_lent(&self, peer: usize, range: Option<Range<usize>>) -> Result<Option<Window>> {
        self.transport.window(&self.channel, self.seq, &self.fingerprint, peer, range)
    }

    /// Waits until every member has started the operation, and the same one.
    pub(crate) fn wait_for_all(&self) -> Result<()> {
        self.peers().try_for_each(|peer| {
            self.transport.wait_started(&self.channel, self.seq, &self.fingerprint, peer)
        })
    }

    /// Group ranks, starting after this one, so that ranks do not all read from the same peer at once.
    pub(crate) fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let (own, n) = (self.channel.index(), self.channel.members().len());
        (1..=n).map(move |step| (own + step) % n)
    }

    pub(crate) fn finish(&mut self) {
        if !self.finished {
            self.finished = true;
            self.transport.finish(&self.channel, self.seq);
        }
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        self.finish();
    }
}

/// Memory that an all-gather can fill.
pub trait GatherTarget: Send + Debug {
    /// The number of elements.
    fn numel(&self) -> usize;

    /// The elements, to write.
    ///
    /// # Errors
    /// When they are lent to peers that do not give them back.
    fn target(&mut self) -> Result<&mut [f32]>;
}

impl GatherTarget for HostBuffer {
    fn numel(&self) -> usize {
        self.numel()
    }

    fn target(&mut self) -> Result<&mut [f32]> {
        Ok(self.as_mut_slice())
    }
}

impl GatherTarget for SharedBuffer {
    fn numel(&self) -> usize {
        self.numel()
    }

    fn target(&mut self) -> Result<&mut [f32]> {
        self.writable()
    }
}

/// An all-gather whose parts arrive in a buffer that it owns.
#[derive(Debug)]
pub struct PendingGather<T = HostBuffer> {
    pub(crate) started: Option<Started>,
    pub(crate) dest: T,
    pub(crate) part_numel: usize,
    /// Why the operation could not be started.
    pub(crate) error: Option<CommError>,
}

impl<T: GatherTarget> PendingGather<T> {
    /// Waits for every part and hands the buffer back, whole when the result is `Ok`.
    pub fn wait(mut self) -> (T, Result<()>) {
        let result = self.copy_parts();
        (self.dest, result)
    }

    /// Gives up on the parts and hands the buffer back as it is; the peers are not disturbed.
    pub fn cancel(self) -> T {
        self.dest
    }

    fn copy_parts(&mut self) -> Result<()> {
        if let Some(error) = self.error.take() {
            return Err(error);
        }
        let Some(started) = &mut self.started else { return Ok(()) };
        let dest = self.dest.target()?;
        for peer in started.peers() {
            let window = started.window(peer, None)?;
            let at = peer * self.part_numel;
            dest[at..at + self.part_numel].copy_from_slice(window.f32s());
        }
        started.finish();
        Ok(())
    }
}

/// A buffer that is lent to the peers, and theirs to this rank, until every one of them is done with all of it.
///
/// Between lending and finishing, each rank reads what it needs, as often as it needs it and in any order: no peer has to
/// do anything for it.
#[derive(Debug)]
pub struct Loan {
    pub(crate) started: Started,
}

impl Loan {
    /// Copies elements `range` of every rank's buffer, which lie there packed in `precision`, into `dest`, one rank after
    /// another, as f32.
    ///
    /// # Errors
    /// When a peer has lent something else, is lost, or is late with lending.
    ///
    /// # Panics
    /// When `dest` is not as long as the range times the number of ranks.
    pub fn gather(&self, range: Range<usize>, dest: &mut [f32], precision: Precision) -> Result<()> {
        let n = range.len();
        assert_eq!(
            dest.len(),
            n * self.started.channel.members().len(),
            "the gathered buffer holds every part"
        );
        let width = precision.bytes();
        let bytes = range.start * width..range.end * width;
        for peer in self.started.peers() {
            let window = self.started.window(peer, Some(bytes.clone()))?;
            take(window.bytes(), &mut dest[peer * n..(peer + 1) * n], precision);
        }
        Ok(())
    }

    /// Bytes of what `peer` lends, where they lie.
    ///
    /// # Errors
    /// When the peer has lent something else, or less, is lost, or is late with lending.
    pub fn window(&self, peer: usize, bytes: Range<usize>) -> Result<Window> {
        self.started.window(peer, Some(bytes))
    }

    /// Group ranks, starting after this one, so that ranks do not all read from the same peer at once.
    pub fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        self.started.peers()
    }

    /// Copies f32 elements of `peer`'s buffer, from `start` on, into `dest`. No elements are read without waiting for anyone.
    ///
    /// # Errors
    /// As [`Loan::gather`], and when the peer's buffer is too short.
    pub fn read(&self, peer: usize, start: usize, dest: &mut [f32]) -> Result<()> {
        if dest.is_empty() {
            return Ok(());
        }
        let width = size_of::<f32>();
        let window = self.started.window(peer, Some(start * width..(start + dest.len()) * width))?;
        take(window.bytes(), dest, Precision::F32);
        Ok(())
    }

    /// Tells the peers that this rank has read all it needs.
    pub fn finish(mut self) {
        self.started.finish();
    }
}

/// The parts that every buffer of a reduction consists of, and whose are summed.
#[derive(Debug, Clone)]
pub(crate) struct Parts {
    /// Elements of one part.
    pub(crate) numel: usize,
    /// How many there are.
    pub(crate) count: usize,
    /// The type in which they travel.
    pub(crate) precision: Precision,
    /// What they are quantised to, behind all parts.
    pub(crate) quantised: Option<Quantization>,
    /// The members whose buffers are summed.
    pub(crate) summed: Range<usize>,
}

impl Parts {
    /// Bytes of all parts.
    pub(crate) fn bytes(&self) -> usize {
        self.range(self.count).start + self.count * self.quantised_bytes()
    }

    fn quantised_bytes(&self) -> usize {
        self.quantised.map_or(0, |how| how.bytes(self.numel))
    }

    fn range(&self, part: usize) -> Range<usize> {
        let bytes = self.numel * self.precision.bytes();
        part * bytes..(part + 1) * bytes
    }

    pub(crate) fn quantised_range(&self, part: usize) -> Range<usize> {
        let (start, bytes) = (self.range(self.count).start, self.quantised_bytes());
        start + part * bytes..start + (part + 1) * bytes
    }

    /// Sums one part of the members' buffers. One that lends nothing counts as zeros.
    pub(crate) fn sum(&self, started: &Started, part: usize, dst: &mut [f32], add: bool) -> Result<()> {
        let windows = |range: Range<usize>| {
            let peers = self.summed.clone();
            let window = |peer| started.window_if_lent(peer, Some(range.clone()));
            peers.map(window).collect::<Result<Vec<Option<Window>>>>()
        };
        let travelling = if self.quantised.is_some() { self.quantised_range(part) } else { self.range(part) };
        let lent = windows(travelling.clone())?;
        let missing = if lent.iter().all(Option::is_some) { 0 } else { travelling.len() };
        // As quantised elements, too, these are zeros.
        let missing = vec![0u8; missing];
        let slices: Vec<&[u8]> =
            lent.iter().map(|w| w.as_ref().map_or(missing.as_slice(), Window::bytes)).collect();
        let Some(how) = self.quantised else {
            sum_encoded(dst, &slices, self.precision, add);
            return Ok(());
        };
        let raw_of = |(peer, bytes): (usize, &&[u8])| {
            if !has_raw(bytes, self.numel) {
                return Ok(None);
            }
            started.window_if_lent(peer, Some(self.range(part)))
        };
        let raw: Vec<Option<Window>> = self.summed.clone().zip(&slices).map(raw_of).collect::<Result<_>>()?;
        let sources = raw.iter().map(|raw| raw.as_ref().map(Window::f32s));
        let quantised: Vec<(&[u8], Option<&[f32]>)> = slices.into_iter().zip(sources).collect();
        Ok(sum_quantised(dst, &quantised, how, add)?)
    }

    /// The same where this rank is the only one: nothing travels.
    fn sum_own(&self, source: Option<&SharedBuffer>, part: usize, dst: &mut [f32], add: bool) {
        match source {
            Some(source) => {
                sum_encoded(dst, &[&source.as_bytes()[self.range(part)]], self.precision, add);
            }
            None if add => {}
            None => dst.fill(0.0),
        }
    }
}

/// A reduce-scatter that owns the unreduced buffer until every peer has read its part.
#[derive(Debug)]
pub struct PendingReduce {
    pub(crate) started: Option<Started>,
    /// `None` for a rank that contributes nothing.
    pub(crate) source: Option<SharedBuffer>,
    pub(crate) parts: Parts,
    /// This rank's place among the members whose buffers are summed.
    pub(crate) own_part: usize,
    pub(crate) error: Option<CommError>,
}

impl PendingReduce {
    /// Waits until every peer has come to this place in the order of operations, and says whether all of them do the same
    /// here.
    ///
    /// # Errors
    /// When a peer is lost or late.
    pub fn agrees(&self) -> Result<bool> {
        if let Some(error) = self.error.clone() {
            return Err(error);
        }
        let Some(started) = &self.started else { return Ok(true) };
        for peer in started.peers() {
            if !started.transport.peer_agrees(&started.channel, started.seq, &started.fingerprint, peer)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Waits for every peer's buffer and puts the sum of this rank's parts into `dst`, or adds it to what `dst` holds: of
    /// the parts that have this rank's place among those whose buffers are summed. A rank that contributes nothing counts as
    /// zeros.
    ///
    /// # Errors
    /// When a peer is lost, late, or calls something else; `dst` is then unchanged.
    ///
    /// # Panics
    /// When `dst` is not as long as a part.
    pub fn sum_into(&mut self, dst: &mut [f32], add: bool) -> Result<()> {
        self.sum_part_into(self.own_part, dst, add)?;
        self.finish();
        Ok(())
    }

    /// As [`PendingReduce::sum_into`], of any part. The buffers stay lent until [`PendingReduce::finish`].
    ///
    /// # Errors
    /// As [`PendingReduce::sum_into`].
    ///
    /// # Panics
    /// As [`PendingReduce::sum_into`], and when there is no such part.
    pub fn sum_part_into(&self, part: usize, dst: &mut [f32], add: bool) -> Result<()> {
        assert_eq!(dst.len(), self.parts.numel, "the sum has the length of a part");
        assert!(part < self.parts.count, "part {part} of {}", self.parts.count);
        if let Some(error) = self.error.clone() {
            return Err(error);
        }
        match &self.started {
            Some(started) => self.parts.sum(started, part, dst, add)?,
            None => self.parts.sum_own(self.source.as_ref(), part, dst, add),
        }
        Ok(())
    }

    /// The unreduced buffer, if this rank contributes one.
    pub fn source(&self) -> Option<&SharedBuffer> {
        self.source.as_ref()
    }

    /// Tells the peers that this rank has summed what it needs.
    pub fn finish(&mut self) {
        if let Some(started) = &mut self.started {
            started.finish();
        }
    }

    /// Ends the operation and hands the unreduced buffer back. Peers may still read it:
    /// [`SharedBuffer::writable`] waits for them.
    pub fn into_source(mut self) -> Option<SharedBuffer> {
        drop(self.started.take());
        self.source
    }
}
