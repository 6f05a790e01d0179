//! The folder that a run owns for as long as it lives, and what dead runs of the same name left in it.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::Result;
use crate::error::TierError;
use crate::folder::{RankFolder, make_or_follow};
use crate::lock::Lock;
use crate::names::{self, is_rank_folder};

/// How long ranks of a dead run may take to end: they notice within a second.
const LAST_RANKS: Duration = Duration::from_secs(3);
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// The folder of a run, held by one of its ranks. The ranks' folders lie in it.
///
/// Dropping it removes it with what is left of the ranks' folders; folders of ranks that still live and files that are
/// not ours stay. So it goes after all tiers of the run.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    /// There until the drop.
    lock: Option<Lock>,
}

impl RunFolder {
    /// Makes `path/shardwise-RUN`, or takes over what a dead run of the same name left: its files are removed; other
    /// runs' folders, and files whose names are not ours, are left alone. `path` itself is made if its parent is there.
    ///
    /// In the folder's name, characters that could mean something in a path are replaced; names that differ make folders
    /// that differ.
    ///
    /// # Errors
    /// If a run of this name is alive, naming its process; if the folder cannot be made, listed, locked or cleaned.
    pub fn claim(path: &Path, run: &str) -> Result<Self> {
        make_or_follow(path)?;
        let folder = Self::path_of(path, run);
        let lock = Lock::take(&folder, &format!("run {run:?}"))?;
        // From here on the drop removes what is ours.
        let claimed = Self { path: folder, lock: Some(lock) };
        for rank in claimed.rank_folders()? {
            let end = Instant::now() + LAST_RANKS;
            loop {
                // Taking a folder removes what is ours from it, and so does dropping it.
                match RankFolder::take(&rank, &format!("cleaning for run {run:?}")) {
                    Err(TierError::Owned { .. }) if Instant::now() < end => sleep(LOOK_AGAIN),
                    other => break other.map(drop)?,
                }
            }
        }
        Ok(claimed)
    }

    /// The folder that a run of this name has below `path`.
    pub fn path_of(path: &Path, run: &str) -> PathBuf {
        path.join(names::run_folder(run))
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The folder of a rank, for [`Place::Folder`](crate::Place::Folder); opening a tier makes it.
    pub fn rank_folder(run_folder: &Path, rank: usize) -> PathBuf {
        run_folder.join(names::rank_folder(rank))
    }

    fn rank_folders(&self) -> Result<Vec<PathBuf>> {
        let refused = |e: std::io::Error| TierError::Folder {
            folder: self.path.clone(),
            what: "list".into(),
            cause: e.to_string(),
        };
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.path).map_err(refused)? {
            let entry = entry.map_err(refused)?;
            if is_rank_folder(&entry.file_name()) && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                found.push(entry.path());
            }
        }
        Ok(found)
    }
}

impl Drop for RunFolder {
    fn drop(&mut self) {
        for rank in self.rank_folders().unwrap_or_default() {
            let _ = RankFolder::take(&rank, "cleaning");
        }
        self.lock = None;
        let _ = fs::remove_dir(&self.path);
    }
}
