//! What the tests share: plans, reference transpositions, and safetensors files made by hand.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::fs;
use std::ops::Range;
use std::path::Path;

use shardwise_checkpoint::{
    DEFAULT_MAX_FILE_BYTES, FloatType, FolderWriter, SafetensorsFolder, StoredLayout, TensorSpec,
};

/// A tensor of a plan.
pub(crate) fn spec(name: &str, shape: &[usize], dtype: FloatType) -> TensorSpec {
    TensorSpec { name: name.into(), shape: shape.to_vec(), dtype }
}

/// Writes a folder with one F32 tensor and a configuration.
pub(crate) fn write_simple(folder: &Path, values: &[f32]) {
    let plan = vec![spec("w", &[values.len()], FloatType::F32)];
    let mut writer = FolderWriter::create(folder, plan, DEFAULT_MAX_FILE_BYTES).unwrap();
    writer.write("w", values, StoredLayout::AsIs).unwrap();
    writer.add_file("config.json", b"{}").unwrap();
    writer.finish().unwrap();
}

/// Reads a range into a new vector.
pub(crate) fn read(
    folder: &SafetensorsFolder,
    name: &str,
    range: Range<usize>,
    layout: StoredLayout,
) -> shardwise_checkpoint::Result<Vec<f32>> {
    let mut out = vec![f32::MIN; range.len()];
    folder.read_range(name, range, layout, &mut out)?;
    Ok(out)
}

/// All of a tensor that was written by `write_simple`.
pub(crate) fn read_simple(folder: &Path) -> Vec<f32> {
    let folder = SafetensorsFolder::open(folder).unwrap();
    read(&folder, "w", 0..folder.info("w").unwrap().numel(), StoredLayout::AsIs).unwrap()
}

/// A matrix of `[rows, columns]`, turned element by element.
pub(crate) fn transposed<T: Copy>(values: &[T], rows: usize, columns: usize) -> Vec<T> {
    (0..rows * columns).map(|k| values[(k % rows) * columns + k / rows]).collect()
}

/// The shard of each rank: equal parts, rounded up, of which the last may be short or empty.
pub(crate) fn shards(elements: usize, world_size: usize) -> impl Iterator<Item = Range<usize>> {
    let part = elements.div_ceil(world_size);
    (0..world_size).map(move |rank| (rank * part).min(elements)..((rank + 1) * part).min(elements))
}

/// The bit patterns, which tell NaNs and zeros apart.
pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// A safetensors file made by hand: a header that may be anything, and its data.
pub(crate) fn file_bytes(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

/// Puts a file made by hand into a folder, as `name`.
pub(crate) fn put_file(folder: &Path, name: &str, header: &str, data: &[u8]) {
    fs::write(folder.join(name), file_bytes(header, data)).unwrap();
}

/// The names in a folder, sorted.
pub(crate) fn listing(folder: &Path) -> Vec<String> {
    let name = |entry: std::io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
    let mut names: Vec<String> = fs::read_dir(folder).unwrap().map(name).collect();
    names.sort();
    names
}
