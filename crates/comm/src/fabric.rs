//! The transport over a board and memory that all ranks of one host can reach; threads and processes differ only in
//! where that memory lies.
//!
//! There is no progress thread: a rank's bytes can be read once it has started an operation, and a reader copies (or
//! sums) them when it needs the result. Waiting is a brief spin, then a futex on the word of the rank waited for.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::thread::futex;

use crate::Result;
use crate::board::{Board, CHANNELS, Posted, SLOTS, rank_state};
use crate::buffer::SharedBuffer;
use crate::error::CommError;
use crate::fingerprint::Fingerprint;
use crate::liveness::Liveness;
use crate::memory::{RegionId, SharedMemory};
use crate::transport::{Channel, Lend, Transport, Window};

/// Looks at the condition this often before sleeping, if every rank can have a core of its own.
const SPINS: usize = 2000;
/// Sleeps no longer than this between looks at the peers' health.
const HEALTH_INTERVAL: Duration = Duration::from_millis(100);

/// One rank's end of a world on one host.
#[derive(Debug)]
pub(crate) struct Fabric {
    name: &'static str,
    rank: usize,
    board: Board,
    store: Arc<SharedMemory>,
    deadline: Duration,
    liveness: Option<Liveness>,
    channels: Mutex<Vec<Option<u64>>>,
    spins: usize,
}

/// What a world is made of, for [`Fabric::join`].
pub(crate) struct World {
    pub(crate) name: &'static str,
    pub(crate) board: Board,
    pub(crate) store: Arc<SharedMemory>,
    pub(crate) deadline: Duration,
}

impl Fabric {
    /// Takes `rank`'s seat.
    pub(crate) fn join(world: World, rank: usize) -> Result<Self> {
        let World { name, board, store, deadline } = world;
        let cell = board.cell(rank);
        let seat = cell.state.compare_exchange(
            rank_state::ABSENT,
            rank_state::JOINED,
            Ordering::AcqRel,
            Ordering::Acquire,
        );
        if seat.is_err() {
            return Err(CommError::Rendezvous(format!(
                "rank {rank} of {} has joined this world before: a launcher's world is for one run of one program on each \
                 rank; start a second program with a launcher of its own, and each rank once with a RANK of its own",
                board.ranks()
            )));
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let spins = if board.ranks() <= cores { SPINS } else { 0 };
        let fabric = Self {
            name,
            rank,
            board,
            store,
            deadline,
            liveness: None,
            // The first is that of all ranks.
            channels: Mutex::new((0..CHANNELS).map(|id| (id > 0).then_some(0)).collect()),
            spins,
        };
        fabric.board.cell(rank).pid.store(std::process::id(), Ordering::Release);
        fabric.notify();
        Ok(fabric)
    }

    /// Waits until every rank has joined, then watches their processes.
    pub(crate) fn wait_for_all(&mut self, watch_processes: bool) -> Result<()> {
        let mut pids = Vec::with_capacity(self.board.ranks());
        for peer in 0..self.board.ranks() {
            self.wait(peer, &|| "joining the world".into(), &|| {
                self.board.cell(peer).pid.load(Ordering::Acquire) != 0
            })?;
            pids.push(self.board.cell(peer).pid.load(Ordering::Acquire));
        }
        if watch_processes {
            self.liveness =
                Some(Liveness::watch(self.rank, &pids).map_err(|peer| self.lost(peer, "its process ended"))?);
        }
        Ok(())
    }

    /// Wakes the ranks that wait for this one.
    fn notify(&self) {
        self.board.ring(self.rank);
    }

    /// Waits until `ready`, which only a change by `peer` can bring about.
    fn wait(&self, peer: usize, call: &dyn Fn() -> String, ready: &dyn Fn() -> bool) -> Result<()> {
        for _ in 0..self.spins {
            if ready() {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        let begun = Instant::now();
        let cell = self.board.cell(peer);
        loop {
            let event = cell.event.load(Ordering::SeqCst);
            if ready() {
                return Ok(());
            }
            if let Some(failure) = self.board.failure() {
                return Err(failure);
            }
            self.check_health(peer, call, ready)?;
            let waited = begun.elapsed();
            if waited >= self.deadline {
                let error = CommError::Timeout { rank: self.rank, peer, call: call(), waited: self.deadline };
                self.fail(&error);
                return Err(error);
            }
            self.sleep(peer, event, HEALTH_INTERVAL.min(self.deadline - waited), ready);
        }
    }

    fn sleep(&self, peer: usize, event: u32, at_most: Duration, ready: &dyn Fn() -> bool) {
        let cell = self.board.cell(peer);
        cell.waiters.fetch_add(1, Ordering::SeqCst);
        if !ready() {
            let timeout =
                Timespec { tv_sec: at_most.as_secs() as i64, tv_nsec: i64::from(at_most.subsec_nanos()) };
            // Every outcome (woken, word changed, timed out, interrupted) leads to another look.
            let _ = futex::wait(&cell.event, futex::Flags::empty(), event, Some(&timeout));
        }
        cell.waiters.fetch_sub(1, Ordering::SeqCst);
    }

    /// Whether `peer` can still bring the wait to its end.
    fn check_health(&self, peer: usize, call: &dyn Fn() -> String, ready: &dyn Fn() -> bool) -> Result<()> {
        let state = self.board.cell(peer).state.load(Ordering::Acquire);
        // A peer may have done its part and then left or died.
        let lost = |how: &str| if ready() { Ok(()) } else { Err(self.lost(peer, how)) };
        match state {
            rank_state::LEFT => {
                lost(&format!("it finished while rank {} waits for it in {}", self.rank, call()))
            }
            rank_state::PANICKED => lost("it panicked"),
            _ if self.liveness.as_ref().is_some_and(|l| l.is_dead(peer)) => lost("its process ended"),
            _ => Ok(()),
        }
    }

    fn lost(&self, peer: usize, how: &str) -> CommError {
        let error = CommError::RankLost { rank: peer, how: how.to_string() };
        self.fail(&error);
        self.board.failure().unwrap_or(error)
    }

    /// What `peer` has posted as operation `seq`, once it has.
    fn notice(&self, channel: &Channel, seq: u64, fingerprint: &Fingerprint, peer: usize) -> Result<Posted> {
        let world_peer = channel.members()[peer];
        self.wait(world_peer, &|| format!("{fingerprint}, operation {seq}"), &|| {
            self.board.has_posted(channel.id(), world_peer, seq)
        })?;
        self.board.posted(channel.id(), world_peer, seq).ok_or_else(|| {
            CommError::system(format!("reading rank {world_peer}'s notice"), "it is of another version")
        })
    }

    /// Waits for `peer` to start operation `seq` and makes sure that it is the same one.
    fn meet(&self, channel: &Channel, seq: u64, fingerprint: &Fingerprint, peer: usize) -> Result<Posted> {
        let posted = self.notice(channel, seq, fingerprint, peer)?;
        if posted.fingerprint != *fingerprint {
            return Err(self.mismatch(channel, seq, fingerprint, peer, &posted.fingerprint));
        }
        Ok(posted)
    }

    /// The error for peers that started different operations, told to everyone.
    fn mismatch(
        &self,
        channel: &Channel,
        seq: u64,
        own: &Fingerprint,
        peer: usize,
        theirs: &Fingerprint,
    ) -> CommError {
        let error = CommError::Mismatch(format!(
            "as operation {seq} of their group, rank {} called {own} and rank {} called {theirs}",
            self.rank,
            channel.members()[peer]
        ));
        self.fail(&error);
        self.board.failure().unwrap_or(error)
    }
}

impl Transport for Fabric {
    fn name(&self) -> &'static str {
        self.name
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.board.ranks()
    }

    fn deadline(&self) -> Duration {
        self.deadline
    }

    fn allocate(&self, numel: usize) -> Result<SharedBuffer> {
        SharedBuffer::allocate(&self.store, numel)
    }

    fn start(&self, channel: &Channel, fingerprint: &Fingerprint, lend: Lend<'_>) -> Result<u64> {
        if let Some(failure) = self.board.failure() {
            return Err(failure);
        }
        let seq = channel.next_sequence();
        if let Some(reused) = seq.checked_sub(SLOTS as u64) {
            self.wait_released(channel, reused)?;
        }
        let (region, lent) = match lend {
            Some((handle, range)) => (handle.id, range.start as u64..range.end as u64),
            None => (RegionId { offset: 0, len: 0 }, 0..0),
        };
        let posted = Posted { fingerprint: fingerprint.clone(), region, lent };
        self.board.post(channel.id(), self.rank, seq, &posted);
        self.notify();
        Ok(seq)
    }

    fn wait_started(
        &self,
        channel: &Channel,
        seq: u64,
        fingerprint: &Fingerprint,
        peer: usize,
    ) -> Result<()> {
        self.meet(channel, seq, fingerprint, peer).map(drop)
    }

    fn peer_agrees(
        &self,
        channel: &Channel,
        seq: u64,
        fingerprint: &Fingerprint,
        peer: usize,
    ) -> Result<bool> {
        Ok(self.notice(channel, seq, fingerprint, peer)?.fingerprint == *fingerprint)
    }

    fn window(
        &self,
        channel: &Channel,
        seq: u64,
        fingerprint: &Fingerprint,
        peer: usize,
        range: Option<Range<usize>>,
    ) -> Result<Option<Window>> {
        let posted = self.meet(channel, seq, fingerprint, peer)?;
        if posted.region.len == 0 {
            return Ok(None);
        }
        let lent = posted.lent.start as usize..posted.lent.end as usize;
        let range = range.map_or(lent.clone(), |r| lent.start + r.start..lent.start + r.end);
        if range.end > lent.end {
            let lender = channel.members()[peer];
            return Err(CommError::Usage {
                rank: self.rank,
                message: format!(
                    "asked for bytes {range:?} of the {lent:?} that rank {lender} lends in {fingerprint}"
                ),
            });
        }
        Window::new(self.store.view(posted.region)?, range).map(Some)
    }

    fn finish(&self, channel: &Channel, seq: u64) {
        self.board.mark_read(channel.id(), self.rank, seq);
        self.notify();
    }

    fn is_released(&self, channel: &Channel, seq: u64) -> bool {
        channel.members().iter().all(|&peer| self.board.has_read(channel.id(), peer, seq))
    }

    fn wait_released(&self, channel: &Channel, seq: u64) -> Result<()> {
        for &peer in channel.members() {
            self.wait(peer, &|| format!("finishing operation {seq}"), &|| {
                self.board.has_read(channel.id(), peer, seq)
            })?;
        }
        Ok(())
    }

    fn fail(&self, error: &CommError) {
        self.board.fail(self.rank, error);
    }

    fn failure(&self) -> Option<CommError> {
        self.board.failure()
    }

    fn free_channels(&self) -> Vec<Option<u64>> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn take_channel(&self, id: usize) {
        let mut channels = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(channel) = channels.get_mut(id) {
            *channel = None;
        }
    }

    fn give_channel(&self, id: usize, next: u64) {
        let mut channels = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(channel) = channels.get_mut(id) {
            *channel = Some(next);
        }
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        let state = if std::thread::panicking() { rank_state::PANICKED } else { rank_state::LEFT };
        self.board.cell(self.rank).state.store(state, Ordering::Release);
        self.notify();
    }
}
