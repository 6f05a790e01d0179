//! Ranks as processes of one host, over one anonymous file that all of them map.
//!
//! The file (a memfd) has no name and goes when the last process that holds it ends, so nothing is left behind whatever
//! happens. Ranks get it from the launcher that started them, or from rank 0 over a Unix socket. It is sparse: the
//! notice board lies at its start, and each rank allocates in a range of its own, whose pages exist only where used.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, ftruncate, memfd_create};
use rustix::process::{Resource, Signal, getpid, getrlimit, kill_process};

use crate::Result;
use crate::board::Board;
use crate::error::CommError;
use crate::fabric::{Fabric, World};
use crate::mapping::{Mapping, round_to_pages};
use crate::memory::SharedMemory;
use crate::rendezvous;
use crate::transport::Transport;

/// The name of this transport.
pub const NAME: &str = "shm";

/// The variable by which a launcher tells its ranks the number of the inherited descriptor.
pub const FD_VARIABLE: &str = "SHARDWISE_SHM_FD";

/// Address space of the file for each rank; its pages exist only where used.
const RANK_RANGE: u64 = 1 << 38;
/// The most ranks of a world.
pub const MAX_RANKS: usize = 1024;

/// The anonymous file of a world.
#[derive(Debug)]
pub(crate) struct WorldFile {
    file: OwnedFd,
    board: Board,
}

impl WorldFile {
    /// Makes the file for `ranks`.
    pub(crate) fn create(ranks: usize) -> Result<Self> {
        if ranks == 0 || ranks > MAX_RANKS {
            return Err(CommError::Rendezvous(format!("a world has 1 to {MAX_RANKS} ranks, not {ranks}")));
        }
        let system = |what: &str, e: rustix::io::Errno| CommError::system(what, e);
        let file = memfd_create("shardwise", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(|e| system("creating shared memory (memfd)", e))?;
        check_limit(file_bytes(ranks))?;
        ftruncate(&file, file_bytes(ranks)).map_err(|e| system("sizing shared memory", e))?;
        // Nobody can shrink it, so no mapping of it can ever fault.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)
            .map_err(|e| system("sealing shared memory", e))?;
        Self::open(file, ranks)
    }

    /// Takes over a file that another process has made for `ranks`.
    pub(crate) fn open(file: OwnedFd, ranks: usize) -> Result<Self> {
        let size =
            rustix::fs::fstat(&file).map_err(|e| CommError::system("looking at shared memory", e))?.st_size;
        let sealed = fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        if !sealed || size as u64 != file_bytes(ranks) {
            return Err(CommError::Rendezvous(format!(
                "the shared memory that this rank was given is not that of a world of {ranks} ranks ({size} bytes, \
                 expected {}); start all ranks with one launcher and the same WORLD_SIZE",
                file_bytes(ranks)
            )));
        }
        let mapping = Mapping::shared(file.as_fd(), 0, Board::bytes(ranks), true)?;
        Ok(Self { board: Board::over(Arc::new(mapping), ranks)?, file })
    }

    pub(crate) fn file(&self) -> &OwnedFd {
        &self.file
    }

    pub(crate) fn board(&self) -> &Board {
        &self.board
    }

    /// Shows ranks that the launcher lives, for as long as the returned handle does: a lock on the file that only this
    /// process holds, which the kernel drops with it.
    pub(crate) fn hold(&self) -> Result<File> {
        let what = "locking shared memory for the launcher";
        let file = open_anew(self.file.as_raw_fd()).map_err(|e| CommError::system(what, e))?;
        file.try_lock().map_err(|e| CommError::system(what, e))?;
        Ok(file)
    }

    /// Takes `rank`'s seat and waits for the others.
    fn join(self, rank: usize, deadline: Duration) -> Result<Arc<dyn Transport>> {
        let ranks = self.board.ranks();
        let start = board_range(ranks) + rank as u64 * RANK_RANGE;
        let store = Arc::new(SharedMemory::for_file(self.file, start..start + RANK_RANGE));
        let mut fabric = Fabric::join(World { name: NAME, board: self.board, store, deadline }, rank)?;
        fabric.wait_for_all(true)?;
        Ok(Arc::new(fabric))
    }
}

/// Bytes at the start of the file that are the board's.
fn board_range(ranks: usize) -> u64 {
    (round_to_pages(Board::bytes(ranks)) as u64).next_multiple_of(1 << 21)
}

fn file_bytes(ranks: usize) -> u64 {
    board_range(ranks) + ranks as u64 * RANK_RANGE
}

/// Where a rank finds its world.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Meeting {
    /// At the descriptor that its launcher left open.
    Descriptor(u32),
    /// At rank 0, over a Unix socket named after this port.
    Port(u16),
}

/// Joins the world as `rank` of `ranks` and waits until all have come.
///
/// # Errors
/// When the ranks cannot find each other before the deadline, or disagree about the number of ranks.
pub fn join(rank: usize, ranks: usize, meeting: &Meeting, deadline: Duration) -> Result<Arc<dyn Transport>> {
    if rank >= ranks {
        return Err(CommError::Rendezvous(format!("RANK={rank} is not below WORLD_SIZE={ranks}")));
    }
    let file = match meeting {
        Meeting::Descriptor(number) => {
            let world = inherited(*number, ranks)?;
            end_with_launcher(&world, rank)?;
            world
        }
        Meeting::Port(port) if rank == 0 => rendezvous::host(*port, ranks, deadline)?,
        Meeting::Port(port) => rendezvous::visit(*port, rank, ranks, deadline)?,
    };
    file.join(rank, deadline)
}

/// How often a rank looks whether its launcher lives.
const LAUNCHER_LOOK: Duration = Duration::from_millis(250);

/// Ends this process soon after its launcher has died, whatever is between the two: a wrapper's children do not die with
/// the launcher by themselves.
fn end_with_launcher(world: &WorldFile, rank: usize) -> Result<()> {
    let what = "watching the launcher";
    let lock: File = world.file.try_clone().map_err(|e| CommError::system(what, e))?.into();
    let board = world.board.clone();
    let watch = move || {
        // The launcher holds the lock as long as it lives. A world that has ended does not end the watch: this process
        // is the launcher's as long as it runs.
        while lock.try_lock_shared().is_err() {
            std::thread::sleep(LAUNCHER_LOOK);
        }
        board.fail(rank, &CommError::Rendezvous(format!("the launcher of rank {rank} has ended")));
        let _ = kill_process(getpid(), Signal::KILL);
    };
    std::thread::Builder::new()
        .name("launcher-watch".into())
        .spawn(watch)
        .map(drop)
        .map_err(|e| CommError::system(what, e))
}

/// Refuses a file that the limit on file sizes forbids: the system would end this process without a word.
fn check_limit(bytes: u64) -> Result<()> {
    match getrlimit(Resource::Fsize).current {
        Some(limit) if limit < bytes => Err(CommError::Rendezvous(format!(
            "shared memory is a file of {bytes} bytes (all but what is used is a hole in it), but the limit on the size of \
             files is {limit} bytes; lift it: ulimit -f unlimited"
        ))),
        _ => Ok(()),
    }
}

/// A handle of its own on what a descriptor of this process stands for.
fn open_anew(descriptor: impl std::fmt::Display) -> std::io::Result<File> {
    File::options().read(true).write(true).open(format!("/proc/self/fd/{descriptor}"))
}

/// Opens the launcher's descriptor anew, so that it is closed in programs that this rank starts.
fn inherited(number: u32, ranks: usize) -> Result<WorldFile> {
    let file = open_anew(number).map_err(|e| {
        CommError::Rendezvous(format!(
            "{FD_VARIABLE}={number} names a descriptor that is not open here ({e}); a program between the launcher and \
             this rank has closed it: unset {FD_VARIABLE} to meet over MASTER_PORT instead"
        ))
    })?;
    WorldFile::open(file.into(), ranks)
}
