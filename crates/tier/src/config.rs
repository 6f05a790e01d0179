//! What a tier is told when it is opened.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use shardwise_core::IO_ALIGNMENT;

use crate::Result;
use crate::error::TierError;

/// How files are read and written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IoMethod {
    /// io_uring where the kernel allows it, otherwise threads.
    #[default]
    Auto,
    /// io_uring, or an error: containers often forbid it.
    Uring,
    /// Threads that call `pread` and `pwrite`.
    Threads,
}

/// How much is asked of a disk at a time. The defaults were measured (`examples/throughput.rs`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct IoConfig {
    /// How files are read and written.
    pub method: IoMethod,
    /// The most pieces that io_uring works on at once.
    pub queue_depth: usize,
    /// Bytes of a piece; a multiple of 4096.
    pub block_bytes: usize,
    /// Threads, where io_uring is not used.
    pub threads: usize,
    /// Whether to pass by the page cache (`O_DIRECT`) where the file system allows it.
    pub direct: bool,
}

impl Default for IoConfig {
    fn default() -> Self {
        Self { method: IoMethod::Auto, queue_depth: 32, block_bytes: 1 << 20, threads: 4, direct: true }
    }
}

/// Where a tier keeps its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// In memory that only its rank sees.
    Memory,
    /// In files of this folder, which is one rank's own ([`RunFolder::rank_folder`](crate::RunFolder::rank_folder)). It is
    /// made if it is not there; the folder around it must be.
    Folder(PathBuf),
}

/// What a rank's tier is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TierConfig {
    /// Where bytes rest.
    pub place: Place,
    /// The rank, named in errors.
    pub rank: usize,
    /// Buffers through which everything passes.
    pub buffer_count: usize,
    /// Bytes of a buffer, the most that a tile has; a multiple of 4096.
    pub buffer_bytes: usize,
    /// How files are read and written.
    pub io: IoConfig,
    /// How long to wait for a tile.
    pub deadline: Duration,
}

/// How long to wait for a tile where nothing else is said.
pub const DEFAULT_DEADLINE: Duration = Duration::from_secs(300);

impl TierConfig {
    /// Refuses what cannot work.
    pub(crate) fn check(&self) -> Result<()> {
        let io = &self.io;
        let aligned = |bytes: usize| bytes > 0 && bytes.is_multiple_of(IO_ALIGNMENT);
        let refused = if self.buffer_count == 0 {
            "there are 0 buffers; everything passes through buffers, so there must be some".to_string()
        } else if !aligned(self.buffer_bytes) {
            unaligned("a buffer", self.buffer_bytes)
        } else if !aligned(io.block_bytes) || io.block_bytes > MOST_BLOCK {
            unaligned("block_bytes", io.block_bytes)
        } else if io.queue_depth == 0 || io.queue_depth > MOST_DEPTH {
            format!("queue_depth is {}; it must be 1 to {MOST_DEPTH}", io.queue_depth)
        } else if io.threads == 0 || io.threads > MOST_THREADS {
            format!("threads is {}; it must be 1 to {MOST_THREADS}", io.threads)
        } else if self.buffer_count.checked_mul(self.buffer_bytes).is_none_or(|b| b > isize::MAX as usize) {
            format!(
                "{} buffers of {} bytes are more than can be addressed",
                self.buffer_count, self.buffer_bytes
            )
        } else {
            return Ok(());
        };
        Err(TierError::Config { rank: self.rank, message: refused })
    }
}

const MOST_DEPTH: usize = 4096;
const MOST_THREADS: usize = 256;
/// Of one system call; Linux moves less than 2 GiB at a time.
const MOST_BLOCK: usize = 1 << 30;

fn unaligned(what: &str, bytes: usize) -> String {
    let near = bytes.div_ceil(IO_ALIGNMENT).clamp(1, MOST_BLOCK / IO_ALIGNMENT) * IO_ALIGNMENT;
    format!(
        "{what} is {bytes} bytes; it must be a multiple of {IO_ALIGNMENT} (the unit of direct reads and writes), such as \
         {near}"
    )
}
