//! A folder's owner: a process that holds a lock on a file in it. The lock goes when the process ends, however it ends.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;

use crate::Result;
use crate::error::TierError;
use crate::folder::make;
use crate::names::LOCK;

/// Attempts, where a file goes between its opening and its locking, as it does when another owner ends.
const ATTEMPTS: usize = 100;

/// A lock on a folder. Dropping it removes the file that carries it.
#[derive(Debug)]
pub(crate) struct Lock {
    file: File,
    path: PathBuf,
}

impl Lock {
    /// Makes `folder` if it is not there, takes its lock, and writes into the lock's file who has it.
    pub(crate) fn take(folder: &Path, what: &str) -> Result<Self> {
        let path = folder.join(LOCK);
        let refused = |what: &str, cause: String| TierError::Folder {
            folder: path.clone(),
            what: what.to_string(),
            cause,
        };
        for _ in 0..ATTEMPTS {
            make(folder)?;
            let opened = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o644)
                .custom_flags(OFlags::NOFOLLOW.bits() as i32)
                .open(&path);
            let file = match opened {
                Ok(file) => file,
                // The owner before has just removed the folder.
                Err(e) if e.kind() == ErrorKind::NotFound => continue,
                Err(e) => return Err(refused("create", e.to_string())),
            };
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => return Err(owned(folder, file)),
                Err(Errno::INTR) => continue,
                Err(e) => return Err(refused("lock", e.to_string())),
            }
            // The owner before may have removed the file after it was opened here.
            let lock = Self { file, path: path.clone() };
            if !lock.is_in_place() {
                continue;
            }
            let text = format!("{} ({what})\n", std::process::id());
            lock.write(&text).map_err(|e| refused("write to", e.to_string()))?;
            return Ok(lock);
        }
        Err(refused("lock", format!("its file was removed {ATTEMPTS} times while it was taken")))
    }

    fn write(&self, text: &str) -> std::io::Result<()> {
        self.file.set_len(0)?;
        (&self.file).write_all(text.as_bytes())
    }

    fn is_in_place(&self) -> bool {
        match (self.file.metadata(), fs::symlink_metadata(&self.path)) {
            (Ok(held), Ok(named)) => held.ino() == named.ino() && held.dev() == named.dev(),
            _ => false,
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        if self.is_in_place() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn owned(folder: &Path, file: File) -> TierError {
    let mut text = String::new();
    let _ = file.take(4096).read_to_string(&mut text);
    let owner = match text.trim() {
        "" => "that has only just begun".to_string(),
        text => text.to_string(),
    };
    TierError::Owned { folder: folder.to_path_buf(), owner }
}
