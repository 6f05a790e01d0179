//! Writing a model folder: tensors in any order, each streamed to its place.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use half::{bf16, f16};

use crate::element::{Element, FloatType};
use crate::error::{Error, Result};
use crate::index::index_text;
use crate::model_files::{COMPANION_FILES, INDEX_FILE};
use crate::plan::{PlannedFile, PlannedTensor, TensorSpec, lay_out};
use crate::staging::Staging;
use crate::transpose::{Blocking, Rectangle, StoredLayout, Strided, matrix_shape, transpose};

/// The buffer (in elements) through which elements are narrowed.
const NARROWED_AT_ONCE: usize = 512 << 10;

/// Writes one model folder.
///
/// Nothing appears at the folder's own name until [`finish`](Self::finish): a writer that is dropped, or
/// whose process dies, leaves what was there before. (What a dead process wrote beside it is removed by the
/// next writer of the same folder.)
#[derive(Debug)]
pub struct FolderWriter {
    staging: Staging,
    files: Vec<OutputFile>,
    tensors: BTreeMap<String, Slot>,
    companions: Vec<String>,
    total_size: u64,
}

/// A weights file that is being written.
#[derive(Debug)]
struct OutputFile {
    name: String,
    path: PathBuf,
    file: File,
}

/// A tensor's place, and whether it has been filled.
#[derive(Debug)]
struct Slot {
    tensor: PlannedTensor,
    /// The place of its file in the writer's list.
    file: usize,
    is_written: bool,
}

impl FolderWriter {
    /// Starts a folder that will hold the tensors of `plan`: `model.safetensors` if their data takes at most
    /// `max_file_bytes` (see [`DEFAULT_MAX_FILE_BYTES`](crate::DEFAULT_MAX_FILE_BYTES)), and otherwise
    /// `model-00001-of-0000N.safetensors` and so on, filled in the plan's order, with an index.
    ///
    /// The parent folder must exist. `folder` itself must not, or be empty, or be a model folder: one that
    /// holds `config.json` or weights and nothing but the files that this crate writes (weights, index, and
    /// [`COMPANION_FILES`]). It is then replaced, without a moment at which it is absent or incomplete.
    ///
    /// # Errors
    ///
    /// [`Error::Plan`] for an empty plan, a name given twice or a size beyond 64 bits;
    /// [`Error::NotAModelFolder`] for a folder that is not replaced; [`Error::NoExchange`] where the file
    /// system cannot replace one in a single step; [`Error::Io`] if the system refuses.
    pub fn create(folder: impl AsRef<Path>, plan: Vec<TensorSpec>, max_file_bytes: u64) -> Result<Self> {
        let (planned, total_size) = lay_out(plan, max_file_bytes)?;
        let staging = Staging::create(folder.as_ref())?;
        let mut files = Vec::with_capacity(planned.len());
        let mut tensors = BTreeMap::new();
        for PlannedFile { name, header, tensors: in_file } in planned {
            let path = staging.path().join(&name);
            let file = File::create_new(&path).map_err(Error::io(&path, "create it"))?;
            file.write_all_at(&header, 0).map_err(Error::io(&path, "write its header"))?;
            for tensor in in_file {
                let name = tensor.spec.name.clone();
                tensors.insert(name, Slot { tensor, file: files.len(), is_written: false });
            }
            files.push(OutputFile { name, path, file });
        }
        Ok(Self { staging, files, tensors, companions: Vec::new(), total_size })
    }

    /// Finds out, before the work and not after it, whether [`create`](Self::create) would take `folder`: makes the
    /// temporary folder beside it and removes it again.
    ///
    /// # Errors
    ///
    /// Those of [`create`](Self::create), but for the plan's.
    pub fn check(folder: impl AsRef<Path>) -> Result<()> {
        Staging::create(folder.as_ref()).map(drop)
    }

    /// Removes what writers of `folder` that have died left beside it; a live writer's folder stays.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the parent folder cannot be read.
    pub fn remove_leftovers(folder: impl AsRef<Path>) -> Result<()> {
        Staging::remove_leftovers(folder.as_ref())
    }

    /// Writes one tensor; the order of tensors is free.
    ///
    /// `values` are in our row-major order: that of the plan's shape with [`StoredLayout::AsIs`]; with
    /// [`StoredLayout::Transposed`] that of the `[in, out]` matrix, where the plan's shape is `[out, in]`.
    /// Beyond `values` this takes a buffer of 4 MiB. After an error the same tensor may be written again.
    ///
    /// # Errors
    ///
    /// [`Error::Unplanned`], [`Error::WrittenTwice`], [`Error::SliceLength`], [`Error::NotAMatrix`],
    /// [`Error::Overflow`] if a finite value would become infinite as F16 or BF16, [`Error::Io`] if the disk
    /// fails or is full.
    pub fn write(&mut self, name: &str, values: &[f32], layout: StoredLayout) -> Result<()> {
        let planned = self.tensors.len();
        let slot = (self.tensors.get_mut(name))
            .ok_or_else(|| Error::Unplanned { tensor: name.to_owned(), planned })?;
        if slot.is_written {
            return Err(Error::WrittenTwice { tensor: name.to_owned() });
        }
        if values.len() != slot.tensor.elements {
            return Err(Error::SliceLength {
                tensor: name.to_owned(),
                expected: slot.tensor.elements,
                found: values.len(),
            });
        }
        let output = Output { file: &self.files[slot.file], tensor: &slot.tensor };
        match slot.tensor.spec.dtype {
            FloatType::F32 => output.write(values, layout),
            FloatType::F16 => output.write_narrowed::<f16>(values, layout),
            FloatType::Bf16 => output.write_narrowed::<bf16>(values, layout),
        }?;
        slot.is_written = true;
        Ok(())
    }

    /// Adds a small file, such as `config.json`, as it is.
    ///
    /// # Errors
    ///
    /// [`Error::Companion`] for a name that is not among [`COMPANION_FILES`] or was added before;
    /// [`Error::Io`] if the disk fails or is full.
    pub fn add_file(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        let refused = |found| Error::Companion { name: name.to_owned(), allowed: COMPANION_FILES, found };
        if !COMPANION_FILES.contains(&name) {
            return Err(refused("another name"));
        }
        if self.companions.iter().any(|added| added == name) {
            return Err(refused("it a second time"));
        }
        self.write_file(name, bytes)?;
        self.companions.push(name.to_owned());
        Ok(())
    }

    /// Brings everything to disk and puts the folder in place; whatever model was there before is gone
    /// afterwards.
    ///
    /// # Errors
    ///
    /// [`Error::NotWritten`] if a tensor is missing; [`Error::NotAModelFolder`] if something else has taken
    /// the folder's place meanwhile; [`Error::NoExchange`]; [`Error::Io`]. In each case what was there before
    /// stays, but for an [`Error::Io`] about the parent folder or the replaced one: then the new folder is in
    /// place already.
    pub fn finish(self) -> Result<()> {
        let mut missing = self.tensors.values().filter(|slot| !slot.is_written).peekable();
        if let Some(first) = missing.peek() {
            return Err(Error::NotWritten {
                folder: self.staging.target().to_path_buf(),
                example: first.tensor.spec.name.clone(),
                missing: missing.count(),
            });
        }
        if self.files.len() > 1 {
            let file_of = |slot: &Slot| self.files[slot.file].name.as_str();
            let weight_map = self.tensors.iter().map(|(name, slot)| (name.as_str(), file_of(slot))).collect();
            let text = index_text(self.total_size, &weight_map)
                .map_err(|error| Error::io(self.staging.target(), "form its index")(error.into()))?;
            self.write_file(INDEX_FILE, &text)?;
        }
        for OutputFile { path, file, .. } in &self.files {
            file.sync_all().map_err(Error::io(path, "bring it to disk"))?;
        }
        self.staging.publish()
    }

    /// Writes a whole file and brings it to disk.
    fn write_file(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let path = self.staging.path().join(name);
        // A second attempt, after one that failed, writes over what the first one left.
        let file = File::create(&path).map_err(Error::io(&path, "create it"))?;
        file.write_all_at(bytes, 0).and_then(|()| file.sync_all()).map_err(Error::io(&path, "write it"))
    }
}

/// One tensor on its way to its file.
#[derive(Clone, Copy)]
struct Output<'a> {
    file: &'a OutputFile,
    tensor: &'a PlannedTensor,
}

impl Output<'_> {
    /// Writes elements that are in their final form already.
    fn put<T: Element>(self, first: usize, elements: &[T]) -> Result<()> {
        let bytes: &[u8] = bytemuck::cast_slice(elements);
        let offset = self.tensor.start + (first * size_of::<T>()) as u64;
        self.file.file.write_all_at(bytes, offset).map_err(|source| Error::Io {
            path: self.file.path.clone(),
            action: format!("write {} bytes at offset {offset}", bytes.len()),
            source,
        })
    }

    /// Writes a tensor stored as f32.
    fn write(self, values: &[f32], layout: StoredLayout) -> Result<()> {
        match layout {
            StoredLayout::AsIs => self.put(0, values),
            StoredLayout::Transposed => self.write_transposed::<f32>(values),
        }
    }

    /// Writes a tensor stored in a narrow type, after making sure that its values fit.
    fn write_narrowed<T: Element>(self, values: &[f32], layout: StoredLayout) -> Result<()> {
        let overflows = |value: &f32| value.is_finite() && value.abs() >= T::OVERFLOWS_FROM;
        if let Some(element) = values.iter().position(overflows) {
            return Err(Error::Overflow {
                tensor: self.tensor.spec.name.clone(),
                dtype: self.tensor.spec.dtype,
                value: values[element],
                element,
            });
        }
        match layout {
            StoredLayout::AsIs => self.write_as_is::<T>(values),
            StoredLayout::Transposed => self.write_transposed::<T>(values),
        }
    }

    /// Narrows and writes values that lie as they should in the file.
    fn write_as_is<T: Element>(self, values: &[f32]) -> Result<()> {
        let mut buffer: Vec<T> = Vec::with_capacity(values.len().min(NARROWED_AT_ONCE));
        for (chunk, piece) in values.chunks(NARROWED_AT_ONCE).enumerate() {
            buffer.clear();
            buffer.extend(piece.iter().map(|value| T::narrow(*value)));
            self.put(chunk * NARROWED_AT_ONCE, &buffer)?;
        }
        Ok(())
    }

    /// Writes the transpose of `values`, block by block; the file holds `[rows, columns]`.
    fn write_transposed<T: Element>(self, values: &[f32]) -> Result<()> {
        let spec = &self.tensor.spec;
        let [rows, columns] = matrix_shape(&spec.name, &spec.shape)?;
        if values.is_empty() {
            return Ok(());
        }
        let blocking = Blocking::new(columns, columns, size_of::<T>());
        let mut buffer: Vec<T> = Vec::new();
        for block in blocking.blocks(&Rectangle { rows: 0..rows, columns: 0..columns }) {
            let (height, width) = (block.rows.len(), block.columns.len());
            buffer.resize(height * width, T::zeroed());
            transpose(
                [width, height],
                Strided { values: &values[block.columns.start * rows + block.rows.start..], stride: rows },
                Strided { values: &mut buffer, stride: width },
                T::narrow,
            );
            let first = block.rows.start * columns + block.columns.start;
            if width == columns {
                self.put(first, &buffer)?;
            } else {
                for (row, piece) in buffer.chunks(width).enumerate() {
                    self.put(first + row * columns, piece)?;
                }
            }
        }
        Ok(())
    }
}
