//! A folder held open, so that all its files come from it even if another folder takes its name meanwhile.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, openat};

use crate::error::{Error, Result};

/// An open folder.
#[derive(Debug)]
pub(crate) struct Directory {
    path: PathBuf,
    handle: File,
}

/// An open regular file and its length when it was opened.
#[derive(Debug)]
pub(crate) struct RegularFile {
    pub(crate) path: PathBuf,
    pub(crate) file: File,
    pub(crate) bytes: u64,
}

impl Directory {
    /// Opens a folder.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let handle = File::open(path).map_err(Error::io(path, "open the folder"))?;
        Ok(Self { path: path.to_path_buf(), handle })
    }

    /// Opens a file in it (or where a link in it leads, as in the Hugging Face cache); `None` if there is
    /// none.
    pub(crate) fn find(&self, name: &str) -> Result<Option<RegularFile>> {
        let path = self.path.join(name);
        // A named pipe would otherwise wait for a writer; regular files know no waiting.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = match openat(&self.handle, name, flags, Mode::empty()).map_err(io::Error::from) {
            Ok(descriptor) => File::from(descriptor),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Error::io(&path, "open it")(error)),
        };
        let metadata = file.metadata().map_err(Error::io(&path, "ask its length"))?;
        if !metadata.is_file() {
            let source = io::Error::other("it is a folder, pipe or device, not a file");
            return Err(Error::io(&path, "read it")(source));
        }
        Ok(Some(RegularFile { path, file, bytes: metadata.len() }))
    }
}
