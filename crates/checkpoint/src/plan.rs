//! Where each tensor of a model goes (file, offset, header), decided before the first byte is written.

use std::collections::{HashMap, HashSet};

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use crate::element::FloatType;
use crate::error::{Error, Result};
use crate::header::{LENGTH_BYTES, MAX_JSON_BYTES, METADATA_KEY};
use crate::model_files::{SINGLE_FILE, shard_name};

/// The most tensor data that goes into one file unless told otherwise: 5 GB, long the default of
/// `transformers`.
pub const DEFAULT_MAX_FILE_BYTES: u64 = 5_000_000_000;

/// A tensor to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Its Hugging Face name.
    pub name: String,
    /// Its shape in the file: `[out, in]` where the model's family stores linear layers so.
    pub shape: Vec<usize>,
    /// Its element type in the file.
    pub dtype: FloatType,
}

/// A file to be written.
#[derive(Debug)]
pub(crate) struct PlannedFile {
    pub(crate) name: String,
    /// Everything before the data: the header's length and the header, padded to 8 bytes.
    pub(crate) header: Vec<u8>,
    /// Its tensors, in the order of their data.
    pub(crate) tensors: Vec<PlannedTensor>,
}

/// A tensor and its place.
#[derive(Debug)]
pub(crate) struct PlannedTensor {
    pub(crate) spec: TensorSpec,
    pub(crate) elements: usize,
    /// Its size in bytes.
    size: usize,
    /// Its first byte in its file.
    pub(crate) start: u64,
}

/// Lays out a model: one file if its data fits `max_file_bytes`; otherwise files filled in the plan's order,
/// none above that limit but those of a single tensor that exceeds it alone. Returns the files and the size
/// of all data.
pub(crate) fn lay_out(plan: Vec<TensorSpec>, max_file_bytes: u64) -> Result<(Vec<PlannedFile>, u64)> {
    let tensors = check(plan)?;
    let total = tensors.iter().map(|tensor| tensor.size as u64).sum();

    let mut groups: Vec<Vec<PlannedTensor>> = Vec::new();
    let mut filled = 0;
    for tensor in tensors {
        let size = tensor.size as u64;
        match groups.last_mut() {
            Some(group) if size <= max_file_bytes.saturating_sub(filled) => {
                filled += size;
                group.push(tensor);
            }
            _ => {
                filled = size;
                groups.push(vec![tensor]);
            }
        }
    }
    let count = groups.len();
    let name = |number| if count == 1 { SINGLE_FILE.to_owned() } else { shard_name(number, count) };
    let files =
        (1..).zip(groups).map(|(number, group)| plan_file(name(number), group)).collect::<Result<_>>()?;
    Ok((files, total))
}

/// Checks names and sizes.
fn check(plan: Vec<TensorSpec>) -> Result<Vec<PlannedTensor>> {
    let problem = |expected: &str, found: String| Error::Plan { expected: expected.to_owned(), found };
    let mut names = HashSet::new();
    let mut total = 0usize;
    let mut tensors = Vec::with_capacity(plan.len());
    for spec in plan {
        if spec.name.is_empty() || spec.name == METADATA_KEY {
            return Err(problem("tensor names", format!("{:?}", spec.name)));
        }
        if !names.insert(spec.name.clone()) {
            return Err(problem("each name once", format!("`{}` twice", spec.name)));
        }
        let element_bytes = Dtype::from(spec.dtype).bitsize() / 8;
        let elements = spec.shape.iter().try_fold(1usize, |product, extent| product.checked_mul(*extent));
        let size = elements.and_then(|elements| elements.checked_mul(element_bytes));
        let (Some(elements), Some(size)) = (elements, size) else {
            return Err(problem(
                "sizes that fit 64 bits",
                format!("`{}` of shape {:?}", spec.name, spec.shape),
            ));
        };
        total = (total.checked_add(size))
            .ok_or_else(|| problem("a total size that fits 64 bits", "more".to_owned()))?;
        tensors.push(PlannedTensor { spec, elements, size, start: 0 });
    }
    if tensors.is_empty() {
        return Err(problem("at least one tensor", "none".to_owned()));
    }
    Ok(tensors)
}

/// Places the tensors of one file, wide elements first so that all stay aligned.
fn plan_file(name: String, mut tensors: Vec<PlannedTensor>) -> Result<PlannedFile> {
    let order = |tensor: &PlannedTensor| std::cmp::Reverse(Dtype::from(tensor.spec.dtype).bitsize());
    tensors.sort_by(|a, b| order(a).cmp(&order(b)).then_with(|| a.spec.name.cmp(&b.spec.name)));

    let mut end = 0;
    let mut entries = Vec::with_capacity(tensors.len());
    for PlannedTensor { spec, size, .. } in &tensors {
        let info = TensorInfo {
            dtype: spec.dtype.into(),
            shape: spec.shape.clone(),
            data_offsets: (end, end + size),
        };
        end += size;
        entries.push((spec.name.clone(), info));
    }
    let header = header_bytes(entries)
        .map_err(|found| Error::Plan { expected: format!("a header for `{name}`"), found })?;

    let mut start = header.len() as u64;
    for tensor in &mut tensors {
        tensor.start = start;
        start += tensor.size as u64;
    }
    Ok(PlannedFile { name, header, tensors })
}

/// The header's length and the header. `transformers` wants each file to say which framework's layout it has.
fn header_bytes(entries: Vec<(String, TensorInfo)>) -> Result<Vec<u8>, String> {
    let format = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let metadata = Metadata::new(Some(format), entries).map_err(|error| error.to_string())?;
    let json = serde_json::to_string(&metadata).map_err(|error| error.to_string())?;
    let length = json.len().next_multiple_of(LENGTH_BYTES as usize);
    if length as u64 > MAX_JSON_BYTES {
        return Err(format!("{length} bytes of it, above the format's limit of {MAX_JSON_BYTES}"));
    }
    let mut header = (length as u64).to_le_bytes().to_vec();
    header.extend_from_slice(json.as_bytes());
    header.resize(LENGTH_BYTES as usize + length, b' ');
    Ok(header)
}
