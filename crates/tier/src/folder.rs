//! A rank's own folder, and what is removed from it: files with our names, nothing else.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::Result;
use crate::error::TierError;
use crate::lock::Lock;
use crate::names::{is_run_folder, is_tiles_file};

/// A rank's folder, locked. Dropping it removes what is ours, and the folder if nothing else is in it.
#[derive(Debug)]
pub(crate) struct RankFolder {
    path: PathBuf,
    /// There until the drop.
    lock: Option<Lock>,
}

impl RankFolder {
    /// Makes the folder if it is not there, takes it, and removes files that a dead owner left.
    pub(crate) fn take(path: &Path, what: &str) -> Result<Self> {
        let lock = Lock::take(path, what)?;
        remove_tiles(path)?;
        Ok(Self { path: path.to_path_buf(), lock: Some(lock) })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for RankFolder {
    fn drop(&mut self) {
        let _ = remove_tiles(&self.path);
        self.lock = None;
        let _ = fs::remove_dir(&self.path);
        // The last rank to go takes the run's folder along, if its owner has gone before. (An owner has a file in it.)
        if let Some(run) = self.path.parent()
            && run.file_name().is_some_and(is_run_folder)
        {
            let _ = fs::remove_dir(run);
        }
    }
}

/// Makes a folder of ours in one that is there. A link in its place is refused: what lies behind it is not ours to clean.
pub(crate) fn make(path: &Path) -> Result<()> {
    make_unless_there(path, false)
}

/// Makes a user's folder in one that is there; a link to one is as good.
pub(crate) fn make_or_follow(path: &Path) -> Result<()> {
    make_unless_there(path, true)
}

fn make_unless_there(path: &Path, follow: bool) -> Result<()> {
    let refused =
        |cause: String| TierError::Folder { folder: path.to_path_buf(), what: "create".into(), cause };
    loop {
        match fs::create_dir(path) {
            Ok(()) => return Ok(()),
            Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
            Err(e) if e.kind() == ErrorKind::NotFound => {
                return Err(refused(format!("the folder that it would lie in is not there ({e})")));
            }
            Err(e) => return Err(refused(e.to_string())),
        }
        let found = fs::symlink_metadata(path);
        if !follow && found.as_ref().is_ok_and(fs::Metadata::is_symlink) {
            return Err(refused("a link is in its place".into()));
        }
        match fs::metadata(path) {
            Ok(found) if found.is_dir() => return Ok(()),
            Ok(_) => return Err(refused("a file of that name is in its place".into())),
            // Another owner has removed it in between, and may have made it again since; a link to nowhere stays.
            Err(e) if e.kind() == ErrorKind::NotFound && !found.is_ok_and(|found| found.is_symlink()) => {}
            Err(e) => return Err(refused(e.to_string())),
        }
    }
}

/// Removes the files of tiles in a folder whose lock is held.
pub(crate) fn remove_tiles(folder: &Path) -> Result<()> {
    let refused = |path: &Path, what: &str, e: std::io::Error| TierError::Folder {
        folder: path.to_path_buf(),
        what: what.to_string(),
        cause: e.to_string(),
    };
    for entry in fs::read_dir(folder).map_err(|e| refused(folder, "list", e))? {
        let entry = entry.map_err(|e| refused(folder, "list", e))?;
        let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
        if is_file && is_tiles_file(&entry.file_name()) {
            match fs::remove_file(entry.path()) {
                Err(e) if e.kind() != ErrorKind::NotFound => return Err(refused(&entry.path(), "remove", e)),
                _ => {}
            }
        }
    }
    Ok(())
}
