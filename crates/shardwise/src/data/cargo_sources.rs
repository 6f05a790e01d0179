//! The default corpus: Rust sources that cargo fetched for a build, so that a first run needs no download.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{env, fs, str};

use shardwise_core::seed_for;

use super::cargo_packages::packages;
use super::corpus::{Corpus, SEPARATOR};
use super::error::{DataError, Result};
use super::files::entries;

/// Larger files are left out: nobody wrote them by hand.
const MAX_FILE_BYTES: u64 = 256 << 10;

/// One package gives at most this part of a corpus: one in so many bytes.
const PACKAGE_SHARE: u64 = 64;

/// Where the sources that cargo fetched are looked for, and how much of them is taken.
///
/// They are those of the registry packages in the nearest `Cargo.lock`, from `directory` upwards: first in
/// cargo's registry folders, then where `cargo metadata` says (vendored sources). Without either, all packages
/// in the registry folders. Of several versions of a package only the newest counts.
///
/// The `.rs` files are ordered by a hash of their names, so that any stretch of the corpus is a broad mix,
/// and taken until `max_bytes`; no package gives more than a 64th of that, since bindings would crowd out
/// code that people wrote. Every process on a machine that starts in one folder gets the same text, until the
/// lock file changes or cargo fetches more of its packages; [`Fingerprint`](super::Fingerprint) tells.
#[derive(Debug, Clone)]
pub struct CargoSources {
    /// Cargo's own folder, which holds `registry/src`.
    pub cargo_home: PathBuf,
    /// Where `Cargo.lock` and `Cargo.toml` are looked for, and upwards.
    pub directory: PathBuf,
    /// The most bytes taken, separators included.
    pub max_bytes: u64,
}

impl CargoSources {
    /// The most bytes that a default run takes.
    pub const DEFAULT_MAX_BYTES: u64 = 16 << 20;

    /// `$CARGO_HOME` or `~/.cargo`, the working directory, and [`Self::DEFAULT_MAX_BYTES`].
    ///
    /// # Errors
    /// The process has no working directory.
    pub fn from_environment() -> Result<Self> {
        let here = Path::new(".");
        let directory = env::current_dir().map_err(DataError::io(here, "find the working directory"))?;
        let default_home = || env::home_dir().unwrap_or_default().join(".cargo");
        let cargo_home = env::var_os("CARGO_HOME").filter(|home| !home.is_empty());
        Ok(Self {
            cargo_home: cargo_home.map_or_else(default_home, |home| directory.join(home)),
            directory,
            max_bytes: Self::DEFAULT_MAX_BYTES,
        })
    }

    /// Finds the sources and chooses the files.
    ///
    /// # Errors
    /// [`DataError::NoSources`] when there are none; a file or folder that cannot be read.
    pub fn corpus(&self) -> Result<Corpus> {
        let mut looked = Vec::new();
        let packages = packages(&self.cargo_home, &self.directory, &mut looked)?;
        let files = self.choose(&packages)?;
        if files.is_empty() {
            return Err(DataError::NoSources { looked });
        }
        let origin = format!("{} of the Rust files that cargo fetched", files.len());
        Ok(Corpus::from_files(files, origin))
    }

    /// The files that are taken, in their order.
    fn choose(&self, packages: &BTreeMap<String, PathBuf>) -> Result<Vec<PathBuf>> {
        let mut sources = Vec::new();
        for (name, folder) in packages {
            list_sources(folder, name, &mut sources)?;
        }
        sources.sort_by(|a, b| (a.order, &a.name).cmp(&(b.order, &b.name)));

        let (mut files, mut total) = (Vec::new(), 0);
        let mut taken_of: BTreeMap<&str, u64> = BTreeMap::new();
        for source in &sources {
            let with_separator = source.bytes + SEPARATOR.len() as u64;
            let of_package = taken_of.entry(source.package()).or_default();
            if *of_package + with_separator > self.max_bytes / PACKAGE_SHARE {
                continue;
            }
            if total + with_separator > self.max_bytes {
                break;
            }
            let bytes = fs::read(&source.path).map_err(DataError::io(&source.path, "read it"))?;
            if str::from_utf8(&bytes).is_ok() {
                *of_package += with_separator;
                total += with_separator;
                files.push(source.path.clone());
            }
        }
        Ok(files)
    }
}

/// A source file that may be taken.
struct Source {
    /// A hash of the name.
    order: u64,
    /// The package's name and the path in it, without the version: an update leaves the order as it is.
    name: String,
    bytes: u64,
    path: PathBuf,
}

impl Source {
    fn package(&self) -> &str {
        self.name.split('/').next().unwrap_or_default()
    }
}

/// Lists the `.rs` files below `folder`, but empty and very large ones, under names that start with `name`.
fn list_sources(folder: &Path, name: &str, sources: &mut Vec<Source>) -> Result<()> {
    for entry in entries(folder)? {
        let path = entry.path;
        let name = format!("{name}/{}", path.file_name().unwrap_or_default().to_string_lossy());
        if !entry.is_file {
            list_sources(&path, &name, sources)?;
        } else if name.ends_with(".rs") {
            let bytes = fs::metadata(&path).map_err(DataError::io(&path, "find its size"))?.len();
            if (1..=MAX_FILE_BYTES).contains(&bytes) {
                sources.push(Source { order: seed_for(0, &name), name, bytes, path });
            }
        }
    }
    Ok(())
}
