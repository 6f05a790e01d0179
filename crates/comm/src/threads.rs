//! Ranks as threads of one process.

use std::sync::Arc;
use std::time::Duration;

use crate::Result;
use crate::board::Board;
use crate::error::CommError;
use crate::fabric::{Fabric, World};
use crate::group::ProcessGroup;
use crate::mapping::Mapping;
use crate::memory::SharedMemory;
use crate::transport::Transport;

/// The name of this transport.
pub const NAME: &str = "threads";

/// A world of `ranks` threads: one transport for each, to be moved into its thread.
///
/// # Errors
/// When `ranks` is 0 or the system has no memory.
pub fn world(ranks: usize, deadline: Duration) -> Result<Vec<Arc<dyn Transport>>> {
    if ranks == 0 {
        return Err(CommError::Rendezvous("a world needs at least 1 rank".into()));
    }
    let board = Board::over(Arc::new(Mapping::anonymous(Board::bytes(ranks))?), ranks)?;
    let store = Arc::new(SharedMemory::for_threads());
    (0..ranks)
        .map(|rank| {
            let world = World { name: NAME, board: board.clone(), store: store.clone(), deadline };
            Ok(Arc::new(Fabric::join(world, rank)?) as Arc<dyn Transport>)
        })
        .collect()
}

/// Runs `body` once per rank, each in a thread of its own with the world's group, and returns the results by rank.
///
/// A panic of a rank is passed on after every rank has ended; the others see it as a lost rank.
///
/// # Errors
/// When the world cannot be made.
pub fn run<T: Send>(
    ranks: usize,
    deadline: Duration,
    body: impl Fn(ProcessGroup) -> T + Sync,
) -> Result<Vec<T>> {
    let transports = world(ranks, deadline)?;
    let results = std::thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = transports
            .into_iter()
            .map(|transport| scope.spawn(move || body(ProcessGroup::world(transport))))
            .collect();
        threads.into_iter().map(std::thread::ScopedJoinHandle::join).collect::<Vec<_>>()
    });
    Ok(results.into_iter().map(|r| r.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect())
}
