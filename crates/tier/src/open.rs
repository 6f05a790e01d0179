//! How files will be read and written here: what was asked for is tried on a real file, and what does not work is said.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags, fstatvfs, open};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use shardwise_core::IO_ALIGNMENT;

use crate::Result;
use crate::buffer::{Cut, Memory};
use crate::config::{IoMethod, TierConfig};
use crate::error::{Access, TierError};
use crate::method::{Method, OpenFile, Piece, Wait};
use crate::names;
use crate::testing::Faults;
use crate::threads::Threads;
use crate::uring::Uring;

/// What works here.
pub(crate) struct Found {
    pub(crate) method: Box<dyn Method>,
    pub(crate) direct: bool,
    /// Why it is not what would be best.
    pub(crate) why: Option<String>,
}

/// Finds the best way to read and write files in `folder` that the configuration allows.
pub(crate) fn find(config: &TierConfig, folder: &Path, faults: Option<&Faults>) -> Result<Found> {
    let rank = config.rank;
    let mut why = Vec::new();
    if matches!(config.io.method, IoMethod::Auto | IoMethod::Uring) {
        match uring(config, faults) {
            Ok(mut ring) => match probe_both(config, folder, faults, &mut ring, &mut why) {
                // What is wrong with the folder is wrong with it whatever the method.
                Err(Refused::Method(cause)) if config.io.method == IoMethod::Auto => {
                    why.push(format!("io_uring cannot be used: {cause}"));
                }
                Err(Refused::Method(cause)) => return Err(TierError::NoUring { rank, cause }),
                Err(Refused::Folder(error)) => return Err(*error),
                Ok(direct) => return Ok(Found { method: Box::new(ring), direct, why: text(&why) }),
            },
            Err(cause) if config.io.method == IoMethod::Uring => {
                return Err(TierError::NoUring { rank, cause });
            }
            Err(cause) => why.push(format!("io_uring cannot be used: {cause}")),
        }
    }
    let system = |cause: String| TierError::System {
        rank,
        what: format!("cannot start {} threads that read and write; lower threads", config.io.threads),
        cause,
    };
    let mut threads = Threads::new(config.io.threads).map_err(|e| system(e.to_string()))?;
    match probe_both(config, folder, faults, &mut threads, &mut why) {
        Ok(direct) => Ok(Found { method: Box::new(threads), direct, why: text(&why) }),
        Err(Refused::Folder(error)) => Err(*error),
        Err(Refused::Method(cause)) => Err(TierError::Folder {
            folder: folder.to_path_buf(),
            what: "write a file and read it again in".into(),
            cause,
        }),
    }
}

/// Lets this process hold as many files open as it may: every object is one.
pub(crate) fn raise_descriptors() {
    let now = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: now.maximum, maximum: now.maximum });
}

/// Makes a file that is not there yet.
pub(crate) fn create(rank: usize, path: &Path, direct: bool) -> Result<OwnedFd> {
    create_raw(path, direct).map_err(|errno| refused(rank, path, errno))
}

/// Bytes that are free on a file's file system, for this user.
pub(crate) fn free_bytes(file: &OwnedFd) -> u64 {
    fstatvfs(file).map_or(0, |found| found.f_bavail.saturating_mul(found.f_frsize))
}

fn create_raw(path: &Path, direct: bool) -> std::result::Result<OwnedFd, Errno> {
    let mut flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
    flags.set(OFlags::DIRECT, direct);
    open(path, flags, Mode::RUSR | Mode::WUSR)
}

fn refused(rank: usize, path: &Path, errno: Errno) -> TierError {
    let advice = match errno {
        Errno::MFILE | Errno::NFILE => format!(
            "; every parameter that rests in files holds one open, and this process may hold {}: raise the limit (ulimit \
             -n), or offload fewer",
            getrlimit(Resource::Nofile).current.map_or("any number".to_string(), |n| n.to_string())
        ),
        Errno::ROFS | Errno::ACCESS | Errno::PERM => {
            "; choose another offload.path, one that this user may write to".into()
        }
        Errno::NOSPC | Errno::DQUOT => "; free some space, or choose another offload.path".into(),
        _ => String::new(),
    };
    TierError::Create { rank, file: path.to_path_buf(), cause: errno.to_string(), advice }
}

/// Why a method was not accepted.
enum Refused {
    /// It does not work; another may.
    Method(String),
    /// Nothing will work in this folder.
    Folder(Box<TierError>),
}

fn uring(config: &TierConfig, faults: Option<&Faults>) -> std::result::Result<Uring, String> {
    if faults.is_some_and(Faults::no_uring) {
        return Err(Errno::PERM.to_string());
    }
    Uring::new(config.io.queue_depth).map_err(|e| e.to_string())
}

fn text(why: &[String]) -> Option<String> {
    (!why.is_empty()).then(|| why.join("; "))
}

/// Whether direct transfers work with `method`; an error if none do.
fn probe_both(
    config: &TierConfig,
    folder: &Path,
    faults: Option<&Faults>,
    method: &mut dyn Method,
    why: &mut Vec<String>,
) -> std::result::Result<bool, Refused> {
    let mut not_direct = None;
    if config.io.direct {
        let tried = match faults.is_some_and(Faults::no_direct) {
            true => Err(Refused::Method(Errno::INVAL.to_string())),
            false => probe(config.rank, folder, method, true),
        };
        match tried {
            Ok(()) => return Ok(true),
            Err(Refused::Method(cause)) => {
                not_direct = Some(format!("the page cache is used, since O_DIRECT does not work: {cause}"));
            }
            Err(folder) => return Err(folder),
        }
    }
    probe(config.rank, folder, method, false)?;
    why.extend(not_direct);
    Ok(false)
}

/// Writes a block to a new file and reads it again.
fn probe(
    rank: usize,
    folder: &Path,
    method: &mut dyn Method,
    direct: bool,
) -> std::result::Result<(), Refused> {
    let path = folder.join(names::tiles_file("probe"));
    let fd = match create_raw(&path, direct) {
        Err(Errno::INVAL) if direct => {
            // The file may have been made before the flag was refused.
            let _ = fs::remove_file(&path);
            return Err(Refused::Method(Errno::INVAL.to_string()));
        }
        other => other.map_err(|errno| Refused::Folder(Box::new(refused(rank, &path, errno))))?,
    };
    let file = Arc::new(OpenFile { fd, path });
    let result = write_and_read(rank, method, &file);
    let _ = fs::remove_file(&file.path);
    result
}

fn write_and_read(
    rank: usize,
    method: &mut dyn Method,
    file: &Arc<OpenFile>,
) -> std::result::Result<(), Refused> {
    let memory = || Memory::new(IO_ALIGNMENT).map_err(|e| Refused::Method(e.to_string()));
    let pattern: Vec<u8> = (0..IO_ALIGNMENT).map(|i| (i % 251) as u8).collect();
    let mut written = memory()?;
    written.as_mut_slice().copy_from_slice(&pattern);
    transfer(method, file, written.store(IO_ALIGNMENT)).map_err(|errno| match errno {
        Errno::NOSPC | Errno::DQUOT => Refused::Folder(Box::new(TierError::Full {
            rank,
            file: file.path.clone(),
            offset: 0,
            needed: IO_ALIGNMENT as u64,
            free: free_bytes(&file.fd),
        })),
        errno => Refused::Method(format!("{} a block: {errno}", Access::Write)),
    })?;
    let read = transfer(method, file, memory()?.fill(IO_ALIGNMENT))
        .map_err(|errno| Refused::Method(format!("{} a block: {errno}", Access::Read)))?;
    if read.as_slice() != pattern {
        return Err(Refused::Method("a block that was read is not what was written".into()));
    }
    Ok(())
}

/// How long a probe may take.
const PROBE_WAIT: Duration = Duration::from_secs(60);

/// Moves one block, and waits for it.
fn transfer(
    method: &mut dyn Method,
    file: &Arc<OpenFile>,
    mut cut: Cut,
) -> std::result::Result<Memory, Errno> {
    let part = cut.next(IO_ALIGNMENT).ok_or(Errno::INVAL)?;
    let piece = Piece { transfer: 0, file: file.clone(), offset: 0, part };
    method.begin(piece).map_err(|_| Errno::BUSY)?;
    let (mut done, end) = (Vec::new(), Instant::now() + PROBE_WAIT);
    while done.is_empty() && method.in_flight() > 0 {
        if Instant::now() >= end {
            return Err(Errno::TIMEDOUT);
        }
        method.reap(Wait::Until(end), &mut done)?;
    }
    let moved = done.pop().ok_or(Errno::IO)?.result?;
    if moved != IO_ALIGNMENT {
        return Err(Errno::IO);
    }
    cut.join().map_err(|_| Errno::BUSY)
}
