//! From paths, folders and patterns to a list of files, in an order that is the same everywhere.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs;
use std::path::{Component, Path, PathBuf};

use glob::{MatchOptions, Pattern};

use super::error::{DataError, Result};

/// `*` and `?` stay within one name.
const OPTIONS: MatchOptions =
    MatchOptions { case_sensitive: true, require_literal_separator: true, require_literal_leading_dot: true };

/// The files that `paths` name: each a file, a folder (with all it holds), or a pattern of either.
///
/// The order is that of `paths`, and within one of them that of the sorted file paths. A file counts once.
/// Inside a folder, hidden entries are left out and links to folders are not followed.
pub(crate) fn resolve(paths: &[String]) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in paths {
        let mut found = Vec::new();
        match fs::metadata(path) {
            Ok(_) => collect(Path::new(path), &mut found)?,
            Err(_) if has_wildcard(OsStr::new(path)) => search_pattern(path, &mut found)?,
            Err(source) => return Err(DataError::io(Path::new(path), "open it")(source)),
        }
        found.sort();
        files.append(&mut found);
    }
    let mut seen = HashSet::new();
    // A file has many names: `a.txt`, `./a.txt`, a link to it.
    files.retain(|file| seen.insert(fs::canonicalize(file).unwrap_or_else(|_| file.clone())));
    if files.is_empty() {
        return Err(DataError::NoFiles { searched: paths.to_vec() });
    }
    Ok(files)
}

/// Every visible entry of `folder`, with what it is; links to folders are left out.
pub(crate) fn entries(folder: &Path) -> Result<Vec<Entry>> {
    entries_with_links(folder, |_| true)
}

/// As [`entries`], without the links that `is_wanted` refuses: nobody looks where those lead.
fn entries_with_links(folder: &Path, is_wanted: impl Fn(&Path) -> bool) -> Result<Vec<Entry>> {
    let listed = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let mut entries = Vec::new();
    for entry in fs::read_dir(listed).map_err(DataError::io(listed, "list the folder"))? {
        let entry = entry.map_err(DataError::io(listed, "list the folder"))?;
        let name = entry.file_name();
        if name.as_encoded_bytes().starts_with(b".") {
            continue;
        }
        let path = folder.join(name);
        let kind = entry.file_type().map_err(DataError::io(&path, "find out what it is"))?;
        if kind.is_symlink() && !is_wanted(&path) {
            continue;
        }
        let is_file = if kind.is_symlink() {
            fs::metadata(&path).map_err(DataError::io(&path, "follow the link"))?.is_file()
        } else {
            kind.is_file()
        };
        if is_file || kind.is_dir() {
            entries.push(Entry { path, is_file });
        }
    }
    Ok(entries)
}

/// A file, a link to one, or a folder.
pub(crate) struct Entry {
    pub(crate) path: PathBuf,
    pub(crate) is_file: bool,
}

/// A path that the user named: a file, or a folder with all it holds.
fn collect(path: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    let metadata = fs::metadata(path).map_err(DataError::io(path, "open it"))?;
    if metadata.is_file() {
        found.push(path.to_path_buf());
    } else if metadata.is_dir() {
        collect_folder(path, found)?;
    } else {
        return Err(DataError::NotAFile { path: path.to_path_buf() });
    }
    Ok(())
}

fn collect_folder(folder: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    for entry in entries(folder)? {
        if entry.is_file {
            found.push(entry.path);
        } else {
            collect_folder(&entry.path, found)?;
        }
    }
    Ok(())
}

/// Splits a pattern into the folder before its first wildcard and the levels below that it speaks of.
fn search_pattern(pattern: &str, found: &mut Vec<PathBuf>) -> Result<()> {
    let path: PathBuf = Path::new(pattern).components().collect();
    let error = |reason: String| DataError::Pattern { pattern: pattern.to_owned(), reason };
    let text = path.to_str().ok_or_else(|| error("text that is not UTF-8".to_owned()))?;
    let parsed = Pattern::new(text).map_err(|reason| error(reason.to_string()))?;

    let is_literal = |component: &Component<'_>| !has_wildcard(component.as_os_str());
    let root: PathBuf = path.components().take_while(is_literal).collect();
    let any_depth = path.components().any(|component| component.as_os_str() == "**");
    let levels = if any_depth { usize::MAX } else { path.components().skip_while(is_literal).count() };
    search(&root, &parsed, levels, found)
}

/// Collects what matches in `folder`, and in its folders down to `levels`.
fn search(folder: &Path, pattern: &Pattern, levels: usize, found: &mut Vec<PathBuf>) -> Result<()> {
    let matches = |path: &Path| pattern.matches_path_with(path, OPTIONS);
    for entry in entries_with_links(folder, matches)? {
        if matches(&entry.path) {
            collect(&entry.path, found)?;
        } else if !entry.is_file && levels > 1 {
            search(&entry.path, pattern, levels - 1, found)?;
        }
    }
    Ok(())
}

fn has_wildcard(text: &OsStr) -> bool {
    text.as_encoded_bytes().iter().any(|byte| b"*?[".contains(byte))
}
