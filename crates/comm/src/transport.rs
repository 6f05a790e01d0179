//! What a rank can do with its peers: lend bytes, read what they lend, and learn when its own are free again.
//!
//! Every collective is one such exchange. In an all-gather a rank lends its part and reads everyone's; in an all-to-all
//! it lends its whole and reads its own part of everyone's; in a broadcast one rank lends; in a barrier nobody does.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::Result;
use crate::buffer::{RegionHandle, SharedBuffer};
use crate::error::CommError;
use crate::fingerprint::Fingerprint;
use crate::mapping::Mapping;

/// The members of a group and their place in its order of operations.
#[derive(Debug)]
pub struct Channel {
    id: usize,
    members: Vec<usize>,
    index: usize,
    next: AtomicU64,
}

impl Channel {
    pub(crate) fn new(id: usize, members: Vec<usize>, index: usize) -> Self {
        Self::from(id, members, index, 0)
    }

    /// A channel whose first operation has the number `next`: earlier ones were those of another group.
    pub(crate) fn from(id: usize, members: Vec<usize>, index: usize, next: u64) -> Self {
        Self { id, members, index, next: AtomicU64::new(next) }
    }

    /// The channel's number in the world.
    pub fn id(&self) -> usize {
        self.id
    }

    /// World ranks of the members, by group rank.
    pub fn members(&self) -> &[usize] {
        &self.members
    }

    /// This rank's group rank.
    pub fn index(&self) -> usize {
        self.index
    }

    pub(crate) fn next_sequence(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// The number that the next operation will have.
    pub(crate) fn upcoming(&self) -> u64 {
        self.next.load(Ordering::Relaxed)
    }

    /// Leaves out the operations before `next`.
    pub(crate) fn skip_to(&self, next: u64) {
        self.next.store(next, Ordering::Relaxed);
    }
}

/// The bytes that a rank lends in one operation: nothing, or a range (in bytes) of a shared buffer.
pub type Lend<'a> = Option<(&'a RegionHandle, Range<usize>)>;

/// Bytes that a peer lends, readable until this rank finishes the operation.
#[derive(Debug, Clone)]
pub struct Window {
    memory: Arc<Mapping>,
    range: Range<usize>,
}

impl Window {
    pub(crate) fn new(memory: Arc<Mapping>, range: Range<usize>) -> Result<Self> {
        if range.start > range.end || range.end > memory.len() {
            return Err(CommError::system(
                "reading a peer's bytes",
                format!("{range:?} of {} bytes", memory.len()),
            ));
        }
        Ok(Self { memory, range })
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the range is inside the mapping (checked in `new`), which lives as long as `self`. The lender does not
        // write them before this rank has finished the operation: `SharedBuffer::writable` waits for that.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().add(self.range.start), self.range.len()) }
    }

    /// The bytes as f32 elements; empty when the range is not a whole number of aligned elements.
    pub fn f32s(&self) -> &[f32] {
        bytemuck::try_cast_slice(self.bytes()).unwrap_or_default()
    }
}

/// A way for the ranks of a world to exchange bytes.
///
/// Operations of one channel are started in one order by every member and may be finished in any order. Starting never
/// waits for peers (beyond a bound on unfinished operations); every wait ends at the deadline.
pub trait Transport: Send + Sync + Debug {
    /// The transport's name in configurations and reports.
    fn name(&self) -> &'static str;

    /// This rank.
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn world_size(&self) -> usize;

    /// How long a collective may wait for a peer.
    fn deadline(&self) -> Duration;

    /// Zeroed memory of `numel` f32 elements that peers can read in place.
    ///
    /// # Errors
    /// When the system has none.
    fn allocate(&self, numel: usize) -> Result<SharedBuffer>;

    /// Starts the channel's next operation and returns its sequence number; peers may read `lend` from now on.
    ///
    /// # Errors
    /// When the world has failed.
    fn start(&self, channel: &Channel, fingerprint: &Fingerprint, lend: Lend<'_>) -> Result<u64>;

    /// Waits for group rank `peer` to start operation `seq`.
    ///
    /// # Errors
    /// When the peer started something else, is lost, or is late.
    fn wait_started(&self, channel: &Channel, seq: u64, fingerprint: &Fingerprint, peer: usize)
    -> Result<()>;

    /// Waits for group rank `peer` to start operation `seq`, and says whether it is the one described. Unlike
    /// [`Transport::wait_started`] it leaves the decision what a difference means to the caller.
    ///
    /// # Errors
    /// When the peer is lost or late.
    fn peer_agrees(
        &self,
        channel: &Channel,
        seq: u64,
        fingerprint: &Fingerprint,
        peer: usize,
    ) -> Result<bool>;

    /// What group rank `peer` lends in operation `seq`, cut to `range` of the lent bytes (all of them when `None`);
    /// `None` when it lends nothing. Waits for the peer to start the operation.
    ///
    /// # Errors
    /// When the peer started something else, is lost, or is late.
    fn window(
        &self,
        channel: &Channel,
        seq: u64,
        fingerprint: &Fingerprint,
        peer: usize,
        range: Option<Range<usize>>,
    ) -> Result<Option<Window>>;

    /// Tells the peers that this rank has finished reading in operation `seq`.
    fn finish(&self, channel: &Channel, seq: u64);

    /// Whether every member has finished reading in operation `seq`.
    fn is_released(&self, channel: &Channel, seq: u64) -> bool;

    /// Waits for that.
    ///
    /// # Errors
    /// When a peer is lost or late.
    fn wait_released(&self, channel: &Channel, seq: u64) -> Result<()>;

    /// Makes this rank's failure known to every rank: their waits end with it.
    fn fail(&self, error: &CommError);

    /// The failure that ended the world, if any.
    fn failure(&self) -> Option<CommError>;

    /// By channel number: the least sequence number that this rank's next operation in such a channel may have, or `None`
    /// while a group uses it.
    fn free_channels(&self) -> Vec<Option<u64>>;

    /// Notes that a group uses the channel.
    fn take_channel(&self, id: usize);

    /// Notes that no group of this rank uses the channel any more; its operations have had numbers below `next`.
    fn give_channel(&self, id: usize, next: u64);
}
