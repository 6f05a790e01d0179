//! What the tests of the tier share.
#![allow(dead_code, reason = "each test program uses its part")]

use std::path::{Path, PathBuf};

use shardwise_tier::testing::Faults;
use shardwise_tier::{
    Buffer, DEFAULT_DEADLINE, IoConfig, IoMethod, ObjectId, Place, RunFolder, Tier, TierConfig, TierError,
};
use tempfile::TempDir;

/// A way to keep bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kind {
    pub(crate) name: &'static str,
    pub(crate) method: Option<IoMethod>,
    pub(crate) direct: bool,
}

/// Every way there is.
pub(crate) const KINDS: [Kind; 5] = [
    Kind { name: "memory", method: None, direct: false },
    Kind { name: "io_uring direct", method: Some(IoMethod::Uring), direct: true },
    Kind { name: "io_uring", method: Some(IoMethod::Uring), direct: false },
    Kind { name: "threads direct", method: Some(IoMethod::Threads), direct: true },
    Kind { name: "threads", method: Some(IoMethod::Threads), direct: false },
];

/// Those in files.
pub(crate) fn file_kinds() -> impl Iterator<Item = Kind> {
    KINDS.into_iter().filter(|kind| kind.method.is_some())
}

/// A folder of this crate's build, so that it lies on a real disk.
pub(crate) fn temp() -> TempDir {
    TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// A tier in a temporary folder. Fields drop in order.
pub(crate) struct Rig {
    pub(crate) tier: Tier,
    pub(crate) run: Option<RunFolder>,
    pub(crate) dir: TempDir,
}

impl Rig {
    pub(crate) fn new(kind: Kind, count: usize, bytes: usize) -> Self {
        Self::with(kind, count, bytes, Faults::new())
    }

    pub(crate) fn with(kind: Kind, count: usize, bytes: usize, faults: Faults) -> Self {
        let dir = temp();
        let run = kind.method.map(|_| RunFolder::claim(dir.path(), "test").unwrap());
        let config = config(kind, run.as_ref().map(RunFolder::path), count, bytes);
        let tier = Tier::open_with_faults(config, faults).unwrap();
        Self { tier, run, dir }
    }

    pub(crate) fn write(&mut self, object: ObjectId, tile: usize, bytes: &[u8]) -> Result<(), TierError> {
        let buffer = filled(self.tier.buffer()?, bytes);
        self.tier.start_write(object, tile, buffer)
    }

    pub(crate) fn read(&mut self, object: ObjectId, tile: usize) -> Result<Vec<u8>, TierError> {
        let buffer = self.tier.buffer()?;
        let reading = self.tier.start_read(object, tile, buffer)?;
        let buffer = self.tier.wait(reading)?;
        Ok(buffer.as_slice().to_vec())
    }

    /// The files of tiles.
    pub(crate) fn files(&self) -> Vec<PathBuf> {
        let rank = self.run.as_ref().unwrap().path().join("rank-3");
        files(&rank).into_iter().filter(|f| f.extension().is_some_and(|e| e == "tiles")).collect()
    }
}

pub(crate) fn config(kind: Kind, run: Option<&Path>, buffer_count: usize, buffer_bytes: usize) -> TierConfig {
    let method = kind.method.unwrap_or_default();
    let place = match run {
        Some(run) => Place::Folder(RunFolder::rank_folder(run, 3)),
        None => Place::Memory,
    };
    let io = IoConfig { method, queue_depth: 4, block_bytes: 16384, threads: 2, direct: kind.direct };
    TierConfig { place, rank: 3, buffer_count, buffer_bytes, io, deadline: DEFAULT_DEADLINE }
}

pub(crate) fn filled(mut buffer: Buffer, bytes: &[u8]) -> Buffer {
    buffer.set_len(bytes.len());
    buffer.as_mut_slice().copy_from_slice(bytes);
    buffer
}

/// Bytes that differ from one seed to the next.
pub(crate) fn pattern(seed: usize, bytes: usize) -> Vec<u8> {
    let mut x = (seed as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (0..bytes)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            (x >> 32) as u8
        })
        .collect()
}

/// Everything in a folder, sorted.
pub(crate) fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found: Vec<_> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    found.sort();
    found
}
