//! Transports for tests: one that counts what is asked of it, one that makes every completion late.
//!
//! Both pass every call on to a transport that they wrap, so what is tested is the real one.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use shardwise_core::seed::SplitMix64;

use crate::Result;
use crate::buffer::SharedBuffer;
use crate::error::CommError;
use crate::fingerprint::Fingerprint;
use crate::group::ProcessGroup;
use crate::transport::{Channel, Lend, Transport, Window};

/// What a test transport does around the calls that it passes on.
trait Probe: std::fmt::Debug + Send + Sync {
    fn before_start(&self, _fingerprint: &Fingerprint, _lent_bytes: usize) {}
    /// After reading bytes that a world rank lends; `None` for this rank itself.
    fn after_window(&self, _fingerprint: &Fingerprint, _lender: Option<usize>, _bytes: usize) {}
    fn before_completion(&self) {}
}

/// How often each kind of operation was started, and what was read in it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Count {
    /// Operations started.
    pub started: usize,
    /// Bytes lent in them.
    pub lent_bytes: usize,
    /// Reads of a peer's bytes.
    pub reads: usize,
    /// Bytes read from peers.
    pub read_bytes: usize,
}

/// What a rank has asked of its transport, by kind and label of the operation.
#[derive(Debug, Clone, Default)]
pub struct Counter(Arc<Mutex<Counts>>);

#[derive(Debug, Default)]
struct Counts {
    by_label: BTreeMap<(&'static str, String), Count>,
    by_lender: BTreeMap<(String, usize), usize>,
}

impl Counter {
    /// Takes the counts since the last call.
    pub fn take(&self) -> BTreeMap<(&'static str, String), Count> {
        std::mem::take(&mut self.lock().by_label)
    }

    /// Takes the bytes read since the last call, by the operation's label and the world rank of who lent them.
    pub fn take_by_lender(&self) -> BTreeMap<(String, usize), usize> {
        std::mem::take(&mut self.lock().by_lender)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, fingerprint: &Fingerprint, change: impl FnOnce(&mut Count)) {
        let key = (fingerprint.kind.name(), fingerprint.label.clone());
        change(self.lock().by_label.entry(key).or_default());
    }
}

impl Probe for Counter {
    fn before_start(&self, fingerprint: &Fingerprint, lent_bytes: usize) {
        self.note(fingerprint, |count| {
            count.started += 1;
            count.lent_bytes += lent_bytes;
        });
    }

    fn after_window(&self, fingerprint: &Fingerprint, lender: Option<usize>, bytes: usize) {
        let Some(lender) = lender else { return };
        self.note(fingerprint, |count| {
            count.reads += 1;
            count.read_bytes += bytes;
        });
        *self.lock().by_lender.entry((fingerprint.label.clone(), lender)).or_default() += bytes;
    }
}

/// Sleeps before calls take effect: often not at all, sometimes long enough for peers to run ahead.
#[derive(Debug)]
struct Delays(Mutex<SplitMix64>);

/// The longest delay.
const LONGEST: Duration = Duration::from_micros(300);

impl Delays {
    fn pause(&self) {
        let (dice, length) = {
            let mut random = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            (random.below(8), random.next_f64())
        };
        match dice {
            0..=3 => {}
            4..=5 => std::thread::yield_now(),
            _ => std::thread::sleep(LONGEST.mul_f64(length)),
        }
    }
}

impl Probe for Delays {
    fn before_start(&self, _: &Fingerprint, _: usize) {
        self.pause();
    }

    fn after_window(&self, _: &Fingerprint, _: Option<usize>, _: usize) {
        self.pause();
    }

    fn before_completion(&self) {
        self.pause();
    }
}

/// The group of all ranks again, over a transport that counts what this rank asks of it. The given group must not be used
/// any more.
pub fn counting(group: &ProcessGroup) -> (ProcessGroup, Counter) {
    let counter = Counter::default();
    (over(group, Arc::new(counter.clone())), counter)
}

/// The group of all ranks again, over a transport that delays everything this rank does by random amounts, drawn from
/// `seed`. The given group must not be used any more.
pub fn delaying(group: &ProcessGroup, seed: u64) -> ProcessGroup {
    over(group, Arc::new(Delays(Mutex::new(SplitMix64::new(seed)))))
}

fn over(group: &ProcessGroup, probe: Arc<dyn Probe>) -> ProcessGroup {
    ProcessGroup::world(Arc::new(Probed { inner: group.transport().clone(), probe }))
}

/// A transport and what is done around its calls.
#[derive(Debug)]
struct Probed {
    inner: Arc<dyn Transport>,
    probe: Arc<dyn Probe>,
}

impl Transport for Probed {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn deadline(&self) -> Duration {
        self.inner.deadline()
    }

    fn allocate(&self, numel: usize) -> Result<SharedBuffer> {
        self.inner.allocate(numel)
    }

    fn start(&self, channel: &Channel, fingerprint: &Fingerprint, lend: Lend<'_>) -> Result<u64> {
        let lent = lend.as_ref().map_or(0, |(_, bytes)| bytes.len());
        self.probe.before_start(fingerprint, lent);
        self.inner.start(channel, fingerprint, lend)
    }

    fn wait_started(
        &self,
        channel: &Channel,
        seq: u64,
        fingerprint: &Fingerprint,
        peer: usize,
    ) -> Result<()> {
        self.inner.wait_started(channel, seq, fingerprint, peer)
    }

    fn peer_agrees(
        &self,
        channel: &Channel,
        seq: u64,
        fingerprint: &Fingerprint,
        peer: usize,
    ) -> Result<bool> {
        self.inner.peer_agrees(channel, seq, fingerprint, peer)
    }

    fn window(
        &self,
        channel: &Channel,
        seq: u64,
        fingerprint: &Fingerprint,
        peer: usize,
        range: Option<Range<usize>>,
    ) -> Result<Option<Window>> {
        let window = self.inner.window(channel, seq, fingerprint, peer, range)?;
        let bytes = window.as_ref().map_or(0, |w| w.bytes().len());
        let lender = (peer != channel.index()).then(|| channel.members()[peer]);
        self.probe.after_window(fingerprint, lender, bytes);
        Ok(window)
    }

    fn finish(&self, channel: &Channel, seq: u64) {
        self.probe.before_completion();
        self.inner.finish(channel, seq);
    }

    fn is_released(&self, channel: &Channel, seq: u64) -> bool {
        self.inner.is_released(channel, seq)
    }

    fn wait_released(&self, channel: &Channel, seq: u64) -> Result<()> {
        self.inner.wait_released(channel, seq)?;
        self.probe.before_completion();
        Ok(())
    }

    fn fail(&self, error: &CommError) {
        self.inner.fail(error);
    }

    fn failure(&self) -> Option<CommError> {
        self.inner.failure()
    }

    fn free_channels(&self) -> Vec<Option<u64>> {
        self.inner.free_channels()
    }

    fn take_channel(&self, id: usize) {
        self.inner.take_channel(id);
    }

    fn give_channel(&self, id: usize, next: u64) {
        self.inner.give_channel(id, next);
    }
}
