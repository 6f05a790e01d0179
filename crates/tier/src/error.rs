//! What can go wrong where bytes rest; every message says where, what was expected, what was found, and what to do.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;

/// What was being done to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Bytes were read.
    Read,
    /// Bytes were written.
    Write,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Access::Read => "reading",
            Access::Write => "writing",
        })
    }
}

/// A failure of a tier. Clones are equal: one failure may be told more than once.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum TierError {
    /// A setting that cannot work.
    #[error("rank {rank}: offload: {message}")]
    Config {
        /// The rank.
        rank: usize,
        /// What is wrong and what would be right.
        message: String,
    },
    /// A call that cannot be right whatever the disk does.
    #[error("rank {rank}: {message}")]
    Usage {
        /// The rank.
        rank: usize,
        /// What is wrong and what would be right.
        message: String,
    },
    /// The folder of a run, or of a rank, cannot be used.
    #[error("cannot {what} {}: {cause}; choose another offload.path, one that this user may write to", folder.display())]
    Folder {
        /// The folder or file.
        folder: PathBuf,
        /// What was attempted, as in "create".
        what: String,
        /// The system's words, or what was found.
        cause: String,
    },
    /// Another process that is alive owns the folder.
    #[error(
        "{} is in use by process {owner}; end that process, or give this run another name or another offload.path",
        folder.display()
    )]
    Owned {
        /// The folder.
        folder: PathBuf,
        /// The process, as in `123 (run "name")`.
        owner: String,
    },
    /// io_uring was asked for where the system forbids it.
    #[error(
        "rank {rank}: io_uring cannot be used here: {cause}; set the method to \"auto\" or \"threads\", or allow io_uring \
         (containers forbid it by a seccomp profile, hosts by kernel.io_uring_disabled)"
    )]
    NoUring {
        /// The rank.
        rank: usize,
        /// What the system said.
        cause: String,
    },
    /// Memory could not be had.
    #[error(
        "rank {rank}: cannot allocate {bytes} bytes for {what}: {cause}; lower buffer_count or buffer_size"
    )]
    Memory {
        /// The rank.
        rank: usize,
        /// Bytes asked for.
        bytes: u64,
        /// What for.
        what: String,
        /// The system's words.
        cause: String,
    },
    /// No buffer is free and none will become free.
    #[error(
        "rank {rank}: all {count} buffers of {bytes} bytes are in use ({reading} hold tiles that were asked for and not yet \
         taken, {held} are held by the caller) and no write is in flight that could free one; raise offload.buffer_count \
         above {count}"
    )]
    NoBuffer {
        /// The rank.
        rank: usize,
        /// Buffers there are.
        count: usize,
        /// Bytes of each.
        bytes: usize,
        /// Buffers that reads hold.
        reading: usize,
        /// Buffers that the caller holds.
        held: usize,
    },
    /// The disk is full.
    #[error(
        "rank {rank}: the disk is full: {} needs {needed} more bytes at offset {offset}, and {free} are free on its file \
         system; free some, or choose another offload.path", file.display()
    )]
    Full {
        /// The rank.
        rank: usize,
        /// The file.
        file: PathBuf,
        /// Where in the file.
        offset: u64,
        /// Bytes that were to be written or reserved there.
        needed: u64,
        /// Bytes that the file system says are free.
        free: u64,
    },
    /// The system refused to read or write.
    #[error(
        "rank {rank}: {access} {bytes} bytes at offset {offset} of {}: {cause}; look at the disk and the system's log",
        file.display()
    )]
    Io {
        /// The rank.
        rank: usize,
        /// The file.
        file: PathBuf,
        /// What was being done.
        access: Access,
        /// Where in the file the piece that failed lies.
        offset: u64,
        /// Bytes that were expected.
        bytes: u64,
        /// The system's words.
        cause: String,
    },
    /// A file ends inside a tile.
    #[error(
        "rank {rank}: {} is truncated: expected {expected} bytes at offset {offset}, found {found}; something else has \
         changed it: keep other programs out of offload.path, and start again from the last checkpoint", file.display()
    )]
    Truncated {
        /// The rank.
        rank: usize,
        /// The file.
        file: PathBuf,
        /// Where the tile begins.
        offset: u64,
        /// Bytes of the tile.
        expected: u64,
        /// Bytes that are there.
        found: u64,
    },
    /// A tile is not what was written.
    #[error(
        "rank {rank}: {bytes} bytes at offset {offset} of {} are corrupt: expected hash {expected:016x}, found {found:016x}; \
         the disk or something else has changed them: check the disk, and start again from the last checkpoint",
        file.display()
    )]
    Corrupt {
        /// The rank.
        rank: usize,
        /// The file.
        file: PathBuf,
        /// Where the tile begins.
        offset: u64,
        /// Bytes of the tile.
        bytes: u64,
        /// xxh3-64 of what was written.
        expected: u64,
        /// xxh3-64 of what was read.
        found: u64,
    },
    /// A file was deleted while it was used.
    #[error(
        "rank {rank}: {} was deleted by something else while this run used it (expected the tile at offset {offset}, found \
         no file of that name); keep other programs out of offload.path, and start again from the last checkpoint",
        file.display()
    )]
    Deleted {
        /// The rank.
        rank: usize,
        /// The file.
        file: PathBuf,
        /// Where the tile begins that was to be read or written.
        offset: u64,
    },
    /// A file could not be made or opened.
    #[error("rank {rank}: cannot create {}: {cause}{advice}", file.display())]
    Create {
        /// The rank.
        rank: usize,
        /// The file.
        file: PathBuf,
        /// The system's words.
        cause: String,
        /// What to do, after "; ".
        advice: String,
    },
    /// The disk does not answer.
    #[error(
        "rank {rank}: {access} {bytes} bytes at offset {offset} of {} has not ended within {waited:?}; look at the disk, or raise \
         run.timeout_seconds if it is only slow", file.display()
    )]
    Late {
        /// The rank.
        rank: usize,
        /// The file.
        file: PathBuf,
        /// What was being done.
        access: Access,
        /// Where in the file the tile lies.
        offset: u64,
        /// Its bytes.
        bytes: u64,
        /// How long the rank has waited.
        waited: Duration,
    },
    /// The system refused something that is not about one file.
    #[error("rank {rank}: {what}: {cause}")]
    System {
        /// The rank.
        rank: usize,
        /// What was attempted.
        what: String,
        /// The system's words.
        cause: String,
    },
}
