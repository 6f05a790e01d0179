//! The index of a model that is split over several files: which tensor is in which file.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::{Component, Path};

use serde::{Deserialize, Serialize};

use crate::directory::RegularFile;
use crate::error::{Error, Result};
use crate::header::{MAX_JSON_BYTES, UniqueEntries};

/// The file of each tensor, by tensor, from an index on disk. The file names are plain: none leaves the
/// folder.
pub(crate) fn read_index(source: RegularFile) -> Result<BTreeMap<String, String>> {
    #[derive(Deserialize)]
    struct Stored {
        weight_map: UniqueEntries,
    }

    let RegularFile { path, file, bytes: length } = source;
    let problem = |expected: &str, found: String| Error::Index {
        file: path.clone(),
        expected: expected.to_owned(),
        found,
    };
    if length > MAX_JSON_BYTES {
        return Err(problem("an index of at most 100 MB", format!("{length} bytes")));
    }
    let mut bytes = vec![0; length as usize];
    file.read_exact_at(&mut bytes, 0).map_err(Error::io(&path, "read it"))?;
    let stored: Stored = serde_json::from_slice(&bytes)
        .map_err(|error| problem("a JSON object with a `weight_map`", error.to_string()))?;

    let mut shards = BTreeMap::new();
    for (tensor, value) in stored.weight_map.0 {
        let shard: String = serde_json::from_str(value.get())
            .map_err(|error| problem(&format!("a file name for tensor `{tensor}`"), error.to_string()))?;
        if !is_plain_name(&shard) {
            return Err(Error::ShardOutsideFolder { index: path, tensor, shard });
        }
        shards.insert(tensor, shard);
    }
    if shards.is_empty() {
        return Err(problem("at least one tensor in `weight_map`", "none".into()));
    }
    Ok(shards)
}

/// The text of an index, laid out as `transformers` does it.
pub(crate) fn index_text(total_size: u64, weight_map: &BTreeMap<&str, &str>) -> serde_json::Result<Vec<u8>> {
    #[derive(Serialize)]
    struct Totals {
        total_size: u64,
    }
    #[derive(Serialize)]
    struct Written<'a> {
        metadata: Totals,
        weight_map: &'a BTreeMap<&'a str, &'a str>,
    }

    let mut text = serde_json::to_vec_pretty(&Written { metadata: Totals { total_size }, weight_map })?;
    text.push(b'\n');
    Ok(text)
}

/// Whether a name is one file name and nothing more: no folder, no `..`, no root.
fn is_plain_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(part)), None) if part == name)
}
