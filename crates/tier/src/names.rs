//! Names of files and folders: readable, harmless, and different wherever what they are made from is.
//!
//! What a name may be is decided here alone, so that cleaning removes exactly what creating makes.

use std::ffi::OsStr;
use std::fmt::Write;

use xxhash_rust::xxh3::xxh3_64;

/// The file in a folder that its owner holds a lock on.
pub(crate) const LOCK: &str = "owner.lock";
const TILES: &str = ".tiles";
const RUN: &str = "shardwise-";
const RANK: &str = "rank-";
/// Characters that are taken over into a name; file systems allow 255 bytes.
const MOST_READABLE: usize = 100;
const HASH_DIGITS: usize = 16;

/// The file of an object: its id with the characters that are harmless, and the hash of all of it.
pub(crate) fn tiles_file(id: &str) -> String {
    format!("{}-{:016x}{TILES}", readable(id), xxh3_64(id.as_bytes()))
}

/// Whether a name is one that [`tiles_file`] makes.
pub(crate) fn is_tiles_file(name: &OsStr) -> bool {
    let Some(stem) = name.to_str().and_then(|n| n.strip_suffix(TILES)) else { return false };
    has_hash(stem) && stem.chars().all(is_harmless)
}

/// The folder of a run: its name if that is harmless, or what is harmless in it and its hash.
pub(crate) fn run_folder(run: &str) -> String {
    let mut name = format!("{RUN}{}", readable(run));
    // A harmless name that looks as if it had a hash gets one too: two runs never share a folder.
    if readable(run) != run || run.is_empty() || has_hash(run) {
        let _ = write!(name, "-{:016x}", xxh3_64(run.as_bytes()));
    }
    name
}

/// Whether a name is one that [`run_folder`] could make.
pub(crate) fn is_run_folder(name: &OsStr) -> bool {
    name.to_str().is_some_and(|n| n.starts_with(RUN) && n.chars().all(is_harmless))
}

/// The folder of a rank in that of its run.
pub(crate) fn rank_folder(rank: usize) -> String {
    format!("{RANK}{rank}")
}

/// Whether a name is one that [`rank_folder`] makes.
pub(crate) fn is_rank_folder(name: &OsStr) -> bool {
    name.to_str()
        .and_then(|n| n.strip_prefix(RANK))
        .is_some_and(|n| n.parse::<usize>().is_ok_and(|rank| rank.to_string() == n))
}

fn is_harmless(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-')
}

fn readable(text: &str) -> String {
    text.chars().take(MOST_READABLE).map(|c| if is_harmless(c) { c } else { '_' }).collect()
}

fn has_hash(name: &str) -> bool {
    name.rsplit_once('-').is_some_and(|(_, hash)| {
        hash.len() == HASH_DIGITS && hash.chars().all(|c| matches!(c, '0'..='9' | 'a'..='f'))
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn distinct_runs_have_distinct_harmless_folders() {
        let hashed = run_folder("a/b");
        let looks_hashed = hashed.strip_prefix(RUN).unwrap().to_string();
        let long = "x".repeat(300);
        let longer = "x".repeat(301);
        let runs =
            ["", "a", "a/b", "a_b", "a b", "../up", ".", "..", "é", "e", &looks_hashed, &long, &longer];
        let folders: HashSet<String> = runs.iter().map(|r| run_folder(r)).collect();
        assert_eq!(folders.len(), runs.len());
        assert!(folders.iter().all(|f| f.chars().all(is_harmless) && f.len() < 200));
        assert_eq!(run_folder("gpt2-small"), "shardwise-gpt2-small");
    }

    #[test]
    fn only_our_files_are_ours() {
        for id in ["", "blocks.0.attention.query.weight", "a/b", "../x", "wörter", &"long.".repeat(100)] {
            assert!(is_tiles_file(OsStr::new(&tiles_file(id))), "{id}");
        }
        assert_ne!(tiles_file("a/b"), tiles_file("a_b"));
        for foreign in ["notes.txt", "x.tiles", "x-0123.tiles", "x-0123456789abcdeg.tiles", "-.tiles", LOCK] {
            assert!(!is_tiles_file(OsStr::new(foreign)), "{foreign}");
        }
        assert!(is_rank_folder(OsStr::new(&rank_folder(12))));
        for foreign in ["rank-", "rank-01", "rank-+1", "rank-1x", "rank-1.bak"] {
            assert!(!is_rank_folder(OsStr::new(foreign)), "{foreign}");
        }
    }
}
