//! A folder of safetensors weights, opened and checked as a whole, and read range by range.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use half::{bf16, f16};
use safetensors::Dtype;

use crate::directory::{Directory, RegularFile};
use crate::element::FloatType;
use crate::error::{Error, Result};
use crate::header::{WeightsFile, read_header};
use crate::index::read_index;
use crate::model_files::{INDEX_FILE, SINGLE_FILE};
use crate::read::{StoredTensor, read_as_is, read_transposed};
use crate::transpose::{StoredLayout, matrix_shape};

/// What a file says of one of its tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// The shape as stored: `[out, in]` for most linear layers. Empty for a scalar.
    pub shape: Vec<usize>,
    /// The element type as stored; only F32, F16 and BF16 can be read.
    pub dtype: Dtype,
    /// The file that holds it.
    pub file: PathBuf,
}

impl TensorInfo {
    /// The number of elements: 1 for a scalar.
    pub fn numel(&self) -> usize {
        // Cannot overflow: the header's check has formed the same product.
        self.shape.iter().product()
    }
}

/// The weights in a folder, of one file or several.
///
/// Files are read with `pread`, never mapped: a file that another process shortens gives an error, not a
/// signal. Threads may share one folder.
#[derive(Debug)]
pub struct SafetensorsFolder {
    folder: PathBuf,
    files: Vec<WeightsFile>,
    tensors: BTreeMap<String, Located>,
    bytes_read: AtomicU64,
}

/// A tensor and where its data starts.
#[derive(Debug)]
struct Located {
    info: TensorInfo,
    /// The place of its file in the folder's list.
    file: usize,
    /// Its first byte in that file.
    start: u64,
}

impl SafetensorsFolder {
    /// Opens the weights in `folder` and checks every header; no data is read.
    ///
    /// As in `transformers`, `model.safetensors` is preferred over `model.safetensors.index.json`. With an
    /// index, every file it names must be there and hold the tensors it says; a tensor that a file holds
    /// though the index does not list it belongs to the folder too. Files may be symbolic links, as in the
    /// Hugging Face cache.
    ///
    /// # Errors
    ///
    /// [`Error::NoWeights`] without weights; [`Error::Header`] for a damaged file, or with its own variant
    /// whatever is wrong with the index: [`Error::Index`], [`Error::ShardOutsideFolder`],
    /// [`Error::MissingShard`], [`Error::NotInShard`], [`Error::InTwoShards`]; [`Error::Io`] for an answer of
    /// the system.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let directory = Directory::open(folder)?;
        let mut opened = Self {
            folder: folder.to_path_buf(),
            files: Vec::new(),
            tensors: BTreeMap::new(),
            bytes_read: AtomicU64::new(0),
        };
        if let Some(single) = directory.find(SINGLE_FILE)? {
            opened.add_file(single)?;
        } else if let Some(index) = directory.find(INDEX_FILE)? {
            opened.add_indexed(&directory, index)?;
        } else {
            return Err(Error::NoWeights { folder: folder.to_path_buf() });
        }
        Ok(opened)
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// What is stored under `name`.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownTensor`] if there is no such tensor.
    pub fn info(&self, name: &str) -> Result<&TensorInfo> {
        self.locate(name).map(|located| &located.info)
    }

    /// Reads elements `range` of a tensor into `out`, as f32.
    ///
    /// The range counts in our row-major order: that of the file with [`StoredLayout::AsIs`]; that of the
    /// `[in, out]` matrix with [`StoredLayout::Transposed`], where the file holds `[out, in]`. F16 and BF16
    /// are widened exactly; every bit pattern of F32, a NaN's included, arrives unchanged. After an error
    /// `out` holds nothing of use.
    ///
    /// `AsIs` reads the range's bytes and no more. `Transposed` reads at most twice as many (see
    /// [`StoredLayout::Transposed`]), through a buffer of 4 MiB.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownTensor`], [`Error::UnsupportedDtype`] (F64 and integers are not converted),
    /// [`Error::Range`], [`Error::SliceLength`] unless `out` is as long as the range, [`Error::NotAMatrix`]
    /// for a transposition of anything but two dimensions, [`Error::Io`] if the disk fails or the file was
    /// shortened meanwhile.
    pub fn read_range(
        &self,
        name: &str,
        range: Range<usize>,
        layout: StoredLayout,
        out: &mut [f32],
    ) -> Result<()> {
        let Located { info, file, start } = self.locate(name)?;
        let float = FloatType::of(info.dtype).ok_or_else(|| Error::UnsupportedDtype {
            file: info.file.clone(),
            tensor: name.to_owned(),
            dtype: info.dtype,
        })?;
        let elements = info.numel();
        if range.start > range.end || range.end > elements {
            return Err(Error::Range {
                tensor: name.to_owned(),
                start: range.start,
                end: range.end,
                elements,
                shape: info.shape.clone(),
            });
        }
        if range.len() != out.len() {
            return Err(Error::SliceLength {
                tensor: name.to_owned(),
                expected: range.len(),
                found: out.len(),
            });
        }
        let stored = StoredTensor { file: &self.files[*file], start: *start, bytes_read: &self.bytes_read };
        match layout {
            StoredLayout::AsIs => match float {
                FloatType::F32 => stored.read(range.start, out),
                FloatType::F16 => read_as_is::<f16>(&stored, range, out),
                FloatType::Bf16 => read_as_is::<bf16>(&stored, range, out),
            },
            StoredLayout::Transposed => {
                let shape = matrix_shape(name, &info.shape)?;
                match float {
                    FloatType::F32 => read_transposed::<f32>(&stored, shape, range, out),
                    FloatType::F16 => read_transposed::<f16>(&stored, shape, range, out),
                    FloatType::Bf16 => read_transposed::<bf16>(&stored, shape, range, out),
                }
            }
        }
    }

    /// How many bytes of tensor data all calls of [`read_range`](Self::read_range) have read so far; headers
    /// and the index are not counted.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    /// The tensor of that name.
    fn locate(&self, name: &str) -> Result<&Located> {
        self.tensors.get(name).ok_or_else(|| {
            let resembles = |other: &&str| other.ends_with(name) || name.ends_with(*other);
            let example = self.names().find(resembles).or_else(|| self.names().next());
            Error::UnknownTensor {
                folder: self.folder.clone(),
                tensor: name.to_owned(),
                count: self.tensors.len(),
                example: example.unwrap_or_default().to_owned(),
            }
        })
    }

    /// Opens every file that an index names, and checks that each holds what the index says.
    fn add_indexed(&mut self, directory: &Directory, index: RegularFile) -> Result<()> {
        let index_path = index.path.clone();
        let shards = read_index(index)?;
        let mut tensors_of: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (tensor, shard) in &shards {
            tensors_of.entry(shard).or_default().push(tensor);
        }
        for (shard, expected) in tensors_of {
            let Some(file) = directory.find(shard)? else {
                let (shard, tensors) = (shard.to_owned(), expected.len());
                return Err(Error::MissingShard { index: index_path, shard, tensors });
            };
            let number = self.files.len();
            self.add_file(file)?;
            for tensor in expected {
                if self.tensors.get(tensor).is_none_or(|located| located.file != number) {
                    let shard = self.files[number].path.clone();
                    return Err(Error::NotInShard { shard, tensor: tensor.to_owned() });
                }
            }
        }
        Ok(())
    }

    /// Adds the tensors of one file.
    fn add_file(&mut self, source: RegularFile) -> Result<()> {
        let (file, tensors) = read_header(source)?;
        for (name, stored) in tensors {
            let located = Located {
                start: file.data_start + stored.data_offsets.0 as u64,
                file: self.files.len(),
                info: TensorInfo { shape: stored.shape, dtype: stored.dtype, file: file.path.clone() },
            };
            match self.tensors.entry(name) {
                Entry::Vacant(place) => place.insert(located),
                Entry::Occupied(other) => {
                    let (tensor, first) = (other.key().clone(), other.get().info.file.clone());
                    return Err(Error::InTwoShards { tensor, first, second: file.path });
                }
            };
        }
        self.files.push(file);
        Ok(())
    }
}
