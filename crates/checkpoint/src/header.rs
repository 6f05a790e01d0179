//! The header of one safetensors file, checked against the file before anything of it is used.
//!
//! The file is: the header's length (8 bytes, little-endian), the header (JSON, UTF-8), the data. The
//! `safetensors` crate wants the whole file in memory to check all that, so the checks of lengths are done
//! here, along with those it leaves out (keys given twice, a header that is no object) or reports without
//! naming the tensor.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use safetensors::tensor::{Metadata, TensorInfo};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::directory::RegularFile;
use crate::error::{Error, Result};

/// The longest header or index that is read, as in the `safetensors` crate.
pub(crate) const MAX_JSON_BYTES: u64 = 100_000_000;

/// The bytes before the header, which hold its length.
pub(crate) const LENGTH_BYTES: u64 = 8;

/// The header's key that is not a tensor.
pub(crate) const METADATA_KEY: &str = "__metadata__";

/// One open safetensors file.
#[derive(Debug)]
pub(crate) struct WeightsFile {
    pub(crate) path: PathBuf,
    pub(crate) file: File,
    /// Where the data starts, in bytes.
    pub(crate) data_start: u64,
}

/// Reads the header of a safetensors file; returns its tensors in the order of their data.
pub(crate) fn read_header(source: RegularFile) -> Result<(WeightsFile, Vec<(String, TensorInfo)>)> {
    let RegularFile { path, file, bytes: file_bytes } = source;
    let problem = |expected, found| Error::Header { file: path.clone(), expected, found };
    let Some(most) = file_bytes.checked_sub(LENGTH_BYTES).map(|rest| rest.min(MAX_JSON_BYTES)) else {
        return Err(problem(
            format!("{LENGTH_BYTES} bytes of header length"),
            format!("a file of {file_bytes} bytes"),
        ));
    };
    let mut length = [0; LENGTH_BYTES as usize];
    file.read_exact_at(&mut length, 0).map_err(Error::io(&path, "read the header's length"))?;
    let header_bytes = u64::from_le_bytes(length);
    if header_bytes > most {
        return Err(problem(
            format!("a header of at most {most} bytes (the file has {file_bytes})"),
            format!("a header length of {header_bytes}"),
        ));
    }

    let mut header = vec![0; header_bytes as usize];
    file.read_exact_at(&mut header, LENGTH_BYTES).map_err(Error::io(&path, "read the header"))?;
    let data_start = LENGTH_BYTES + header_bytes;
    let tensors =
        parse(&header, file_bytes - data_start).map_err(|(expected, found)| problem(expected, found))?;
    Ok((WeightsFile { path, file, data_start }, tensors))
}

/// What was expected, and what was found.
type Mismatch = (String, String);

/// The tensors of a header that is followed by `data_bytes` bytes, in the order of their data.
fn parse(header: &[u8], data_bytes: u64) -> Result<Vec<(String, TensorInfo)>, Mismatch> {
    let text =
        std::str::from_utf8(header).map_err(|error| ("a header in UTF-8".into(), error.to_string()))?;
    if !text.starts_with('{') {
        return Err(("a header that starts with `{`".into(), format!("{:?}", text.chars().next())));
    }
    let entries: UniqueEntries = serde_json::from_str(text)
        .map_err(|error| ("a header that is one JSON object".into(), error.to_string()))?;

    let mut metadata: Option<HashMap<String, String>> = None;
    let mut tensors = Vec::with_capacity(entries.0.len());
    for (name, value) in entries.0 {
        if name == METADATA_KEY {
            let pairs = serde_json::from_str(value.get()).map_err(|error| {
                (format!("`{METADATA_KEY}` to map strings to strings"), error.to_string())
            })?;
            metadata = Some(pairs);
        } else {
            let info: TensorInfo = serde_json::from_str(value.get()).map_err(|error| {
                (format!("dtype, shape and data_offsets of tensor `{name}`"), error.to_string())
            })?;
            tensors.push((name, info));
        }
    }
    tensors.sort_by_key(|(_, info)| info.data_offsets);
    check_data(&tensors, data_bytes)?;
    // The crate's own rules have the last word.
    Metadata::new(metadata, tensors.clone())
        .map_err(|error| ("a header that the safetensors crate accepts".into(), error.to_string()))?;
    Ok(tensors)
}

/// Checks that the tensors, in the order of their data, cover it without hole or overlap, each with its own
/// size.
fn check_data(tensors: &[(String, TensorInfo)], data_bytes: u64) -> Result<(), Mismatch> {
    let mut covered = 0;
    for (name, info) in tensors {
        let (start, end) = info.data_offsets;
        if start != covered {
            return Err((
                format!("tensor `{name}` to start at byte {covered} of the data, without hole or overlap"),
                format!("data_offsets [{start}, {end}]"),
            ));
        }
        let described = || format!("tensor `{name}` of shape {:?} and dtype {}", info.shape, info.dtype);
        let bits = (info.shape.iter())
            .try_fold(1usize, |product, extent| product.checked_mul(*extent))
            .and_then(|elements| elements.checked_mul(info.dtype.bitsize()))
            .ok_or_else(|| {
                (format!("{} to have a size", described()), "more than fits 64 bits".to_owned())
            })?;
        if end.checked_sub(start) != Some(bits / 8) {
            return Err((
                format!("{} to take {} bytes", described(), bits / 8),
                format!("data_offsets [{start}, {end}]"),
            ));
        }
        covered = end;
    }
    if covered as u64 != data_bytes {
        return Err((format!("{covered} bytes of data"), format!("{data_bytes} bytes after the header")));
    }
    Ok(())
}

/// The entries of a JSON object in their order, none with a key given twice: a map would keep one of the two
/// at will.
pub(crate) struct UniqueEntries(pub(crate) Vec<(String, Box<RawValue>)>);

impl<'de> Deserialize<'de> for UniqueEntries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = UniqueEntries;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<UniqueEntries, A::Error> {
                let mut seen = HashSet::new();
                let mut entries = Vec::new();
                while let Some((key, value)) = map.next_entry::<String, Box<RawValue>>()? {
                    if !seen.insert(key.clone()) {
                        return Err(A::Error::custom(format!("`{key}` given twice")));
                    }
                    entries.push((key, value));
                }
                Ok(UniqueEntries(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}
