//! Text files as one text.

use std::path::PathBuf;

use super::cargo_sources::CargoSources;
use super::error::{DataError, Result};
use super::files::resolve;
use super::text::for_each_piece;

/// What stands between two files of a corpus: an empty line.
pub const SEPARATOR: &str = "\n\n";

/// A list of text files, read as one text with [`SEPARATOR`] between them.
#[derive(Debug, Clone)]
pub struct Corpus {
    files: Vec<PathBuf>,
    origin: String,
}

impl Corpus {
    /// The files that `paths` name: files, folders (with all the files below them) and patterns (`*` and `?`
    /// within one name, `**` across folders).
    ///
    /// They are read in the order of `paths`, sorted within each; a file named twice counts once. Inside a
    /// folder, hidden entries are left out and links to folders are not followed, links to files are.
    ///
    /// # Errors
    /// A path that does not exist, a pattern that is not one, or no file at all.
    pub fn from_paths(paths: &[String]) -> Result<Self> {
        let files = resolve(paths)?;
        let origin = match (paths, files.len()) {
            ([path], 1) => path.clone(),
            (_, count) => format!("{count} files of {}", paths.join(", ")),
        };
        Ok(Self { files, origin })
    }

    /// The text that is used when no path is given: sources that cargo fetched for a build, found from the
    /// process's environment.
    ///
    /// # Errors
    /// None are there; the error says where they were looked for.
    pub fn default_text() -> Result<Self> {
        CargoSources::from_environment()?.corpus()
    }

    pub(crate) fn from_files(files: Vec<PathBuf>, origin: String) -> Self {
        Self { files, origin }
    }

    /// The files, in the order in which they are read.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// What the text is, for reports and errors.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// Gives the whole text to `take`, in order, in pieces of bounded size. No piece spans two files;
    /// a separator belongs to the file before it.
    ///
    /// # Errors
    /// A file that cannot be read or is not UTF-8 (with the offset), or whatever `take` returns.
    pub fn for_each_piece(&self, take: impl FnMut(&str) -> Result<()>) -> Result<()> {
        self.try_for_each_piece(take)
    }

    /// As [`Corpus::for_each_piece`], for errors of any kind.
    pub(crate) fn try_for_each_piece<E: From<DataError>>(
        &self,
        mut take: impl FnMut(&str) -> Result<(), E>,
    ) -> Result<(), E> {
        if let Some((last, others)) = self.files.split_last() {
            for file in others {
                for_each_piece(file, SEPARATOR, &mut take)?;
            }
            for_each_piece(last, "", &mut take)?;
        }
        Ok(())
    }
}
