//! A folder that appears all at once: filled beside its target, then put in the target's place.
//!
//! The temporary folder is `.NAME.shardwise-XXXXXX.tmp`. While its writer lives it is locked (`flock` on the
//! folder itself, which the kernel drops with the process), so that the next writer can tell a dead writer's
//! leftover from a live one's folder. An existing model folder is replaced by exchanging the two names in one
//! system call: at every moment the target's name holds a complete folder, the old or the new. What is left
//! at the temporary name is then the old folder, and it goes; if the process dies first, the next writer
//! removes it. Writers with the same parent take turns (`flock` on the parent) at making, judging and
//! exchanging folders.
//!
//! Where a file system cannot lock folders, leftovers stay and nothing else changes: what cannot be locked is
//! never taken for a dead writer's, and turns matter only to writers of one target at the same time.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use tempfile::TempDir;

use crate::error::{Error, Result};
use crate::model_files::{INDEX_FILE, SINGLE_FILE, is_model_file, is_weights_file};

/// How long a writer waits for its turn, of which none takes longer than a few calls of the system.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long it waits before asking again.
const POLL: Duration = Duration::from_millis(2);

/// The characters that tell temporary folders of one target apart.
const RANDOM_CHARACTERS: usize = 6;

/// A temporary folder that becomes `target`. Dropped before that, it goes with all it holds.
#[derive(Debug)]
pub(crate) struct Staging {
    target: PathBuf,
    parent: PathBuf,
    folder: TempDir,
    /// Held for its lock.
    _lock: File,
}

/// What stands where a folder is to be put.
enum Standing {
    /// Nothing, or an empty folder: a plain rename takes its place.
    Free,
    /// A model folder, to be exchanged.
    Model,
}

impl Staging {
    /// Makes the temporary folder, after removing those that dead writers of this target left.
    pub(crate) fn create(target: &Path) -> Result<Self> {
        let (target, parent, name) = parts(target)?;
        let turn = take_turn(&parent, PATIENCE)?;
        let standing = standing(&target)?;
        let leftovers = leftovers(&parent, &name)?;
        let (folder, lock) = make_locked(&parent, &name)?;
        if !leftovers.is_empty() {
            // One of them may be a folder whose replacement is not yet sure to survive a loss of power.
            turn.sync_all().map_err(Error::io(&parent, "bring the names in it to disk"))?;
        }
        drop(turn);
        for leftover in leftovers {
            // One that cannot be removed stays: it must not keep a model from being saved.
            let _stays_if_refused = remove_model_folder(&leftover);
        }
        let staging = Self { folder, _lock: lock, parent, target };
        if matches!(standing, Standing::Model) {
            staging.try_exchange()?;
        }
        Ok(staging)
    }

    /// Removes the folders that dead writers of `target` left.
    pub(crate) fn remove_leftovers(target: &Path) -> Result<()> {
        let (_, parent, name) = parts(target)?;
        let turn = take_turn(&parent, PATIENCE)?;
        let leftovers = leftovers(&parent, &name)?;
        if leftovers.is_empty() {
            return Ok(());
        }
        // As in `create`.
        turn.sync_all().map_err(Error::io(&parent, "bring the names in it to disk"))?;
        drop(turn);
        for leftover in leftovers {
            remove_model_folder(&leftover).map_err(Error::io(&leftover, "remove it"))?;
        }
        Ok(())
    }

    /// The folder to fill.
    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// The folder to be.
    pub(crate) fn target(&self) -> &Path {
        &self.target
    }

    /// Puts the folder in place. Its files must be on disk already.
    pub(crate) fn publish(self) -> Result<()> {
        File::open(self.path())
            .and_then(|folder| folder.sync_all())
            .map_err(Error::io(self.path(), "bring it to disk"))?;
        let turn = take_turn(&self.parent, PATIENCE)?;
        let on_disk = || turn.sync_all().map_err(Error::io(&self.parent, "bring the names in it to disk"));
        match standing(&self.target)? {
            Standing::Free => {
                fs::rename(self.path(), &self.target).map_err(Error::io(&self.target, "put it in place"))?;
                let _moved = self.folder.keep();
                on_disk()
            }
            Standing::Model => {
                exchange(self.path(), &self.target)
                    .map_err(|source| Error::NoExchange { folder: self.target.clone(), source })?;
                let old = self.folder.keep();
                // The old folder goes only when the exchange is sure to survive a loss of power.
                on_disk()?;
                drop(turn);
                remove_model_folder(&old).map_err(Error::io(&old, "remove the replaced folder"))
            }
        }
    }

    /// Finds out, before the work and not after it, whether this file system can exchange two names.
    fn try_exchange(&self) -> Result<()> {
        // Names of a model folder, so that this one stays recognisable as a leftover.
        let [first, second] = [INDEX_FILE, SINGLE_FILE].map(|name| self.path().join(name));
        for path in [&first, &second] {
            File::create_new(path).map_err(Error::io(path, "create it"))?;
        }
        exchange(&first, &second)
            .map_err(|source| Error::NoExchange { folder: self.target.clone(), source })?;
        for path in [&first, &second] {
            fs::remove_file(path).map_err(Error::io(path, "remove it"))?;
        }
        Ok(())
    }
}

/// The absolute target, its parent and its name.
fn parts(target: &Path) -> Result<(PathBuf, PathBuf, OsString)> {
    let target = std::path::absolute(target).map_err(Error::io(target, "make it absolute"))?;
    match (target.parent().map(Path::to_path_buf), target.file_name().map(OsStr::to_os_string)) {
        (Some(parent), Some(name)) => Ok((target, parent, name)),
        _ => Err(Error::NotAModelFolder { folder: target, found: "a path without a last name".into() }),
    }
}

/// Looks at what is at `target`; anything that could be lost by replacing it is an error.
fn standing(target: &Path) -> Result<Standing> {
    let foreign = |found: String| Err(Error::NotAModelFolder { folder: target.to_path_buf(), found });
    match fs::symlink_metadata(target) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Standing::Free),
        Err(error) => return Err(Error::io(target, "look it up")(error)),
        Ok(metadata) if metadata.is_symlink() => return foreign("a symbolic link".into()),
        Ok(metadata) if !metadata.is_dir() => return foreign("a file".into()),
        Ok(_) => {}
    }
    let listing = |error| Error::io(target, "list it")(error);
    let (mut is_empty, mut is_model) = (true, false);
    for entry in fs::read_dir(target).map_err(listing)? {
        let entry = entry.map_err(listing)?;
        let name = entry.file_name();
        let known = name.to_str().is_some_and(is_model_file);
        if !known || !entry.file_type().map_err(listing)?.is_file() {
            return foreign(format!("a folder that also holds {name:?}, which is no file of a model"));
        }
        is_empty = false;
        is_model |= name.to_str().is_some_and(|name| name == "config.json" || is_weights_file(name));
    }
    match (is_empty, is_model) {
        (true, _) => Ok(Standing::Free),
        (_, true) => Ok(Standing::Model),
        (false, false) => foreign("a folder with neither `config.json` nor weights".into()),
    }
}

/// Waits until no other writer works on the entries of `parent`; the turn ends when the handle is dropped.
fn take_turn(parent: &Path, patience: Duration) -> Result<File> {
    let handle = File::open(parent).map_err(Error::io(parent, "open the folder"))?;
    let deadline = Instant::now() + patience;
    loop {
        match handle.try_lock() {
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => thread::sleep(POLL),
            Err(TryLockError::WouldBlock) => {
                return Err(Error::io(parent, "lock it")(io::ErrorKind::TimedOut.into()));
            }
            Ok(()) | Err(TryLockError::Error(_)) => return Ok(handle),
        }
    }
}

/// Makes a temporary folder beside its target and locks it.
fn make_locked(parent: &Path, name: &OsStr) -> Result<(TempDir, File)> {
    let mut prefix = OsString::from(".");
    prefix.push(name);
    prefix.push(".shardwise-");
    let folder = tempfile::Builder::new()
        .prefix(&prefix)
        .suffix(".tmp")
        .rand_bytes(RANDOM_CHARACTERS)
        .tempdir_in(parent)
        .map_err(Error::io(parent, "make a folder in it"))?;
    let lock = File::open(folder.path()).map_err(Error::io(folder.path(), "open the folder"))?;
    let _unless_unsupported = lock.try_lock();
    Ok((folder, lock))
}

/// The temporary folders that dead writers of the same target left. To be asked for in one's turn: at any
/// other time, one just made and not yet locked would count as a dead writer's.
fn leftovers(parent: &Path, name: &OsStr) -> Result<Vec<PathBuf>> {
    let listing = |error| Error::io(parent, "list it")(error);
    let mut found = Vec::new();
    for entry in fs::read_dir(parent).map_err(listing)? {
        let entry = entry.map_err(listing)?;
        let is_folder = || entry.file_type().is_ok_and(|kind| kind.is_dir());
        let is_free = || File::open(entry.path()).is_ok_and(|folder| folder.try_lock().is_ok());
        if is_temporary_name(&entry.file_name(), name) && is_folder() && is_free() {
            found.push(entry.path());
        }
    }
    Ok(found)
}

/// Whether `entry` is how a temporary folder of target `name` is called.
fn is_temporary_name(entry: &OsStr, name: &OsStr) -> bool {
    let random = || {
        let rest = entry.as_bytes().strip_prefix(b".")?.strip_prefix(name.as_bytes())?;
        rest.strip_prefix(b".shardwise-")?.strip_suffix(b".tmp")
    };
    random().is_some_and(|random| {
        random.len() == RANDOM_CHARACTERS && random.iter().all(u8::is_ascii_alphanumeric)
    })
}

/// Removes a folder and the files of a model in it; if there is anything else in it, all of it stays.
fn remove_model_folder(folder: &Path) -> io::Result<()> {
    // Two writers may remove the same leftover.
    let unless_gone = |result: io::Result<()>| match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    };
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?.collect::<io::Result<Vec<_>>>()?,
    };
    let is_known = |entry: &&fs::DirEntry| entry.file_name().to_str().is_some_and(is_model_file);
    if let Some(foreign) = entries.iter().find(|entry| !is_known(entry)) {
        return Err(io::Error::other(format!("it also holds {:?}", foreign.file_name())));
    }
    for entry in entries {
        unless_gone(fs::remove_file(entry.path()))?;
    }
    unless_gone(fs::remove_dir(folder))
}

/// Swaps what two names stand for, in one step.
fn exchange(first: &Path, second: &Path) -> io::Result<()> {
    renameat_with(CWD, first, CWD, second, RenameFlags::EXCHANGE).map_err(io::Error::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_temporary_names_of_the_same_target_count_as_leftovers() {
        let cases = [
            (".m.shardwise-a1B2c3.tmp", "m", true),
            (".m.shardwise-a1B2c3.tmp", "n", false),
            (".m.shardwise-a1B2c.tmp", "m", false),
            (".m.shardwise-a1B2c34.tmp", "m", false),
            (".m.shardwise-a1/2c3.tmp", "m", false),
            ("m.shardwise-a1B2c3.tmp", "m", false),
            (".m.shardwise-a1B2c3", "m", false),
            (".m.shardwise-a1B2c3.tmp.shardwise-d4E5f6.tmp", "m", false),
            (".m.shardwise-a1B2c3.tmp.shardwise-d4E5f6.tmp", "m.shardwise-a1B2c3.tmp", true),
        ];
        for (entry, target, expected) in cases {
            assert_eq!(is_temporary_name(entry.as_ref(), target.as_ref()), expected, "{entry} of {target}");
        }
    }
    #[test]
    fn a_turn_that_does_not_come_is_an_error() {
        let parent = tempfile::tempdir().unwrap();
        let turn = take_turn(parent.path(), PATIENCE).unwrap();
        let error = take_turn(parent.path(), POLL).unwrap_err();
        assert!(error.to_string().contains("another process"), "{error}");
        drop(turn);
        take_turn(parent.path(), POLL).unwrap();
    }
}
