//! How a program becomes the ranks of a world: by a launcher's variables, or by starting itself once per rank.

use std::ffi::OsString;
use std::time::Duration;

use shardwise_comm::launch::{Launch, launch};
use shardwise_comm::shm::{FD_VARIABLE, Meeting, join};
use shardwise_comm::{ProcessGroup, threads};

use crate::config::TransportKind;
use crate::error::RunError;

/// This process's seat, as its launcher has told it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seat {
    rank: usize,
    world_size: usize,
    meeting: Meeting,
}

impl Seat {
    /// Reads `RANK`, `WORLD_SIZE`, and where to meet; `None` when this process was not started as a rank.
    ///
    /// # Errors
    /// When the variables are incomplete or contradict each other.
    pub fn from_env() -> Result<Option<Self>, RunError> {
        let Some(rank) = number("RANK")? else { return Ok(None) };
        let world_size = number("WORLD_SIZE")?.ok_or_else(|| {
            RunError::user("RANK is set but WORLD_SIZE is not; a launcher sets both: unset RANK to start ranks from here")
        })?;
        if rank >= world_size {
            return Err(RunError::user(format!("RANK={rank} is not below WORLD_SIZE={world_size}")));
        }
        if let Some(local) = number("LOCAL_WORLD_SIZE")?.filter(|local| *local != world_size) {
            return Err(RunError::user(format!(
                "LOCAL_WORLD_SIZE={local} but WORLD_SIZE={world_size}: ranks communicate through the shared memory of one \
                 host; start all of them on it"
            )));
        }
        let meeting = match (number(FD_VARIABLE)?, number("MASTER_PORT")?) {
            (Some(descriptor), _) => Meeting::Descriptor(descriptor as u32),
            (None, Some(port)) => Meeting::Port(u16::try_from(port).map_err(|_| {
                RunError::user(format!("MASTER_PORT={port} is no port; it must be below 65536"))
            })?),
            (None, None) => {
                return Err(RunError::user(
                    "RANK and WORLD_SIZE are set but MASTER_PORT is not; ranks find each other by it: set the same one for all",
                ));
            }
        };
        Ok(Some(Self { rank, world_size, meeting }))
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Takes the seat and waits for the others.
    ///
    /// # Errors
    /// When they do not come.
    pub fn join(&self, timeout: Duration) -> Result<ProcessGroup, RunError> {
        let transport = join(self.rank, self.world_size, &self.meeting, timeout)?;
        Ok(ProcessGroup::world(transport))
    }
}

fn number(name: &str) -> Result<Option<usize>, RunError> {
    match std::env::var(name) {
        Err(std::env::VarError::NotPresent) => Ok(None),
        Ok(text) => {
            text.trim().parse().map(Some).map_err(|_| {
                RunError::user(format!("the variable {name} is \"{text}\"; it must be a number"))
            })
        }
        Err(e) => Err(RunError::user(format!("the variable {name}: {e}"))),
    }
}

/// The C library's allocator gives large blocks back to the system as soon as they are free. A training step frees and
/// takes the same blocks over and over: kept, they save a page fault for each page of each activation. (Its arenas stay,
/// though each reserves 64 MiB of addresses: with one arena for all threads, `MALLOC_ARENA_MAX=1`, what was whole for a
/// moment while a model of 124M parameters was made stayed resident in holes of the heap, 300 MiB of it.)
const ALLOCATOR: [(&str, &str); 2] =
    [("MALLOC_MMAP_THRESHOLD_", "1073741824"), ("MALLOC_TRIM_THRESHOLD_", "1073741824")];

/// Starts this program again, once per rank, with the arguments it was started with; returns the exit code.
///
/// # Errors
/// When a rank cannot be started.
pub fn start_ranks(ranks: usize) -> Result<i32, RunError> {
    let program = std::env::current_exe();
    let program = program.map_err(|e| RunError::failed(format!("finding this program: {e}")))?.into();
    let args = std::env::args_os().skip(1).collect();
    let unset = ALLOCATOR.into_iter().filter(|(name, _)| std::env::var_os(name).is_none());
    let env = unset.map(|(name, value)| (name.to_string(), value.to_string())).collect();
    start(&Launch { program, args, ranks, env })
}

/// Starts any program, once per rank; returns the exit code.
///
/// # Errors
/// When it cannot be started.
pub fn start_program(program: OsString, args: Vec<OsString>, ranks: usize) -> Result<i32, RunError> {
    start(&Launch { program, args, ranks, env: Vec::new() })
}

fn start(what: &Launch) -> Result<i32, RunError> {
    launch(what).map_err(RunError::user)
}

/// Runs `body` on a pool of `threads` threads of its own, as every rank does: so ranks do not share a pool, and one
/// thread computes without handing work over.
///
/// # Errors
/// When the threads cannot be started.
pub fn on_own_threads<T: Send>(threads: usize, body: impl FnOnce() -> T + Send) -> Result<T, RunError> {
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build()
        .map_err(|e| RunError::failed(format!("starting {threads} threads: {e}")))?;
    Ok(pool.install(body))
}

/// Runs `body` as every rank of a world of `ranks`. Started by a launcher, this process is one of them; otherwise it
/// starts itself again once per rank, waits, and ends with their exit code.
///
/// This is how a program of your own becomes a sharded one: call it from `main`.
///
/// # Errors
/// What `body` returns, or that the ranks could not be started.
pub fn run<E: From<RunError> + Send>(
    ranks: usize,
    body: impl FnOnce(ProcessGroup) -> Result<(), E> + Send,
) -> Result<(), E> {
    match Seat::from_env()? {
        None => match start_ranks(ranks)? {
            0 => Ok(()),
            code => std::process::exit(code),
        },
        Some(seat) if seat.world_size() != ranks => Err(RunError::user(format!(
            "WORLD_SIZE={} but this program is for {ranks} ranks",
            seat.world_size()
        ))
        .into()),
        Some(seat) => {
            let group = seat.join(DEFAULT_TIMEOUT)?;
            on_own_threads(1, || body(group))?
        }
    }
}

/// How long a rank waits for another by default.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(300);

/// Runs `body` once per rank over the given transport and returns this process's exit code: the launcher's, or its own
/// rank's.
pub(crate) fn run_ranks(
    ranks: usize,
    transport: TransportKind,
    timeout: Duration,
    body: impl Fn(ProcessGroup) -> Result<(), RunError> + Sync,
) -> Result<i32, RunError> {
    match (transport, Seat::from_env()?) {
        (TransportKind::Threads, Some(seat)) => Err(RunError::user(format!(
            "run.transport = \"threads\" runs all ranks in one process, but a launcher has started {} of them; use \"shm\"",
            seat.world_size()
        ))),
        (TransportKind::Threads, None) => {
            let results = threads::run(ranks, timeout, &body)?;
            let first_cause = results.into_iter().filter_map(Result::err).min_by_key(|e| {
                // The rank that failed says why; the others only that it did.
                matches!(e, RunError::Elsewhere { .. })
            });
            first_cause.map_or(Ok(0), Err)
        }
        (TransportKind::Shm, None) => start_ranks(ranks),
        (TransportKind::Shm, Some(seat)) if seat.world_size() != ranks => Err(RunError::user(format!(
            "run.ranks = {ranks}, but this rank was started with WORLD_SIZE={}; make them equal",
            seat.world_size()
        ))),
        (TransportKind::Shm, Some(seat)) => seat.join(timeout).and_then(body).map(|()| 0),
    }
}
