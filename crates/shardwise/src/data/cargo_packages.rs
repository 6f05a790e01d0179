//! The packages that cargo fetched: in its registry folders, or where `cargo metadata` finds them.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;

use super::error::{DataError, Result};
use super::files::entries;

/// The folder of the newest version of each package that cargo fetched, as [`CargoSources`](super::CargoSources)
/// says; `looked` collects what was tried.
pub(crate) fn packages(
    cargo_home: &Path,
    directory: &Path,
    looked: &mut Vec<String>,
) -> Result<BTreeMap<String, PathBuf>> {
    let fetched = fetched_packages(cargo_home, looked)?;
    if let Some(lock) = nearest(directory, "Cargo.lock") {
        let locked = locked_packages(&lock)?;
        let is_locked = |package: &&Package| {
            let name = package.folder.file_name().and_then(OsStr::to_str);
            name.is_some_and(|name| locked.contains(name))
        };
        let here = fetched.iter().filter(is_locked);
        let newest = newest(here.cloned());
        if !newest.is_empty() {
            return Ok(newest);
        }
        looked.push(format!("none of the {} packages of {} there", locked.len(), lock.display()));
    } else {
        looked.push(format!("no Cargo.lock in or above {}", directory.display()));
    }
    if nearest(directory, "Cargo.toml").is_some() {
        let newest = newest(metadata(directory, looked));
        if !newest.is_empty() {
            return Ok(newest);
        }
    }
    Ok(newest(fetched))
}

/// Every package in cargo's registry folders.
fn fetched_packages(cargo_home: &Path, looked: &mut Vec<String>) -> Result<Vec<Package>> {
    let sources = cargo_home.join("registry").join("src");
    let mut packages = Vec::new();
    if sources.is_dir() {
        for registry in folders(&sources)? {
            packages.extend(folders(&registry)?.into_iter().filter_map(Package::from_folder));
        }
    }
    looked.push(format!("{} packages in {}", packages.len(), sources.display()));
    Ok(packages)
}

/// The packages outside the workspace, as cargo itself finds them, without network and without writing.
fn metadata(directory: &Path, looked: &mut Vec<String>) -> Vec<Package> {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo"));
    let arguments = ["metadata", "--offline", "--locked", "--format-version", "1"];
    let output = Command::new(cargo).args(arguments).current_dir(directory).output();
    let answer = match &output {
        Ok(output) if output.status.success() => {
            serde_json::from_slice::<Metadata>(&output.stdout).map_err(|error| error.to_string())
        }
        Ok(output) => Err(String::from_utf8_lossy(&output.stderr).trim().replace('\n', " ")),
        Err(error) => Err(error.to_string()),
    };
    let (packages, found) = match answer {
        Ok(metadata) => (metadata.packages, "no package outside the workspace".to_owned()),
        Err(error) => (Vec::new(), error),
    };
    looked.push(format!("`cargo {}` found: {found}", arguments.join(" ")));
    packages.into_iter().filter_map(MetadataPackage::outside).collect()
}

/// A package's sources on disk.
#[derive(Debug, Clone)]
struct Package {
    name: String,
    version: Version,
    folder: PathBuf,
}

impl Package {
    /// Reads name and version from a folder's name, such as `sha-1-0.10.1`.
    fn from_folder(folder: PathBuf) -> Option<Self> {
        let full_name = folder.file_name()?.to_str()?;
        let (name, version) = full_name.match_indices('-').find_map(|(dash, _)| {
            let version = Version::parse(&full_name[dash + 1..])?;
            Some((full_name[..dash].to_owned(), version))
        })?;
        Some(Self { name, version, folder })
    }
}

/// A version in cargo's order: numbers, then releases after pre-releases, then the pre-release's parts.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Version {
    numbers: [u64; 3],
    is_release: bool,
    pre_release: Vec<(u64, String)>,
}

impl Version {
    fn parse(text: &str) -> Option<Self> {
        let text = text.split('+').next()?;
        let (numbers, pre_release) = text.split_once('-').unwrap_or((text, ""));
        let parsed: Option<Vec<u64>> = numbers.split('.').map(|number| number.parse().ok()).collect();
        // Numeric parts come before others, in the order of their values.
        let part = |part: &str| (part.parse().unwrap_or(u64::MAX), part.to_owned());
        Some(Self {
            numbers: parsed?.try_into().ok()?,
            is_release: pre_release.is_empty(),
            pre_release: pre_release.split('.').map(part).collect(),
        })
    }
}

/// The newest version of each package; of equal ones, the first.
fn newest(packages: impl IntoIterator<Item = Package>) -> BTreeMap<String, PathBuf> {
    let mut newest: BTreeMap<String, Package> = BTreeMap::new();
    for package in packages {
        let known = newest.get(&package.name);
        if known.is_none_or(|known| known.version < package.version) {
            newest.insert(package.name.clone(), package);
        }
    }
    newest.into_iter().map(|(name, package)| (name, package.folder)).collect()
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<MetadataPackage>,
}

#[derive(Deserialize)]
struct MetadataPackage {
    name: String,
    version: String,
    /// Where cargo fetched it from; nothing for the workspace's own.
    source: Option<String>,
    manifest_path: PathBuf,
}

impl MetadataPackage {
    fn outside(self) -> Option<Package> {
        self.source?;
        let folder = self.manifest_path.parent()?.to_path_buf();
        Some(Package { name: self.name, version: Version::parse(&self.version)?, folder })
    }
}

#[derive(Deserialize)]
struct Lock {
    #[serde(default)]
    package: Vec<LockedPackage>,
}

#[derive(Deserialize)]
struct LockedPackage {
    name: String,
    version: String,
    source: Option<String>,
}

/// The names and versions of a lock file's registry packages, as the registry's folders are called.
fn locked_packages(lock: &Path) -> Result<BTreeSet<String>> {
    let text = fs::read_to_string(lock).map_err(DataError::io(lock, "read it"))?;
    let parsed: Lock = toml::from_str(&text).map_err(|error| {
        DataError::io(lock, "parse it")(io::Error::new(io::ErrorKind::InvalidData, error))
    })?;
    let is_registry = |source: &String| source.starts_with("registry+") || source.starts_with("sparse+");
    let from_registry = |package: &&LockedPackage| package.source.as_ref().is_some_and(is_registry);
    let packages = parsed.package.iter().filter(from_registry);
    Ok(packages.map(|package| format!("{}-{}", package.name, package.version)).collect())
}

/// A file of the nearest folder that has it, from `directory` upwards.
fn nearest(directory: &Path, name: &str) -> Option<PathBuf> {
    directory.ancestors().map(|folder| folder.join(name)).find(|file| file.is_file())
}

/// The folders in a folder, sorted.
fn folders(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut folders: Vec<PathBuf> =
        entries(folder)?.into_iter().filter(|entry| !entry.is_file).map(|entry| entry.path).collect();
    folders.sort();
    Ok(folders)
}
