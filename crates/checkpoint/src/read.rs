//! Reading a range of one stored tensor: straight through, or transposed block by block.

use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{Advice, fadvise};

use crate::element::Element;
use crate::error::{Error, Result};
use crate::header::WeightsFile;
use crate::transpose::{Blocking, Strided, rectangles, transpose};

/// The buffer (in elements) through which narrow elements are widened.
const WIDENED_AT_ONCE: usize = 512 << 10;

/// The data of one tensor in its file.
pub(crate) struct StoredTensor<'a> {
    pub(crate) file: &'a WeightsFile,
    /// Its first byte in the file.
    pub(crate) start: u64,
    /// Where the bytes read are counted.
    pub(crate) bytes_read: &'a AtomicU64,
}

impl StoredTensor<'_> {
    /// Reads the elements from `first` on, as many as `into` takes.
    pub(crate) fn read<T: Element>(&self, first: usize, into: &mut [T]) -> Result<()> {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(into);
        let offset = self.start + (first * size_of::<T>()) as u64;
        self.file.file.read_exact_at(bytes, offset).map_err(|source| Error::Io {
            path: self.file.path.clone(),
            action: format!("read {} bytes at offset {offset}", bytes.len()),
            source,
        })?;
        self.bytes_read.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Tells the kernel that these elements will be read. Scattered pieces of a file that is not in memory
    /// then come from the disk side by side and not one after another.
    fn prefetch<T: Element>(&self, first: usize, elements: usize) {
        let offset = self.start + (first * size_of::<T>()) as u64;
        let bytes = NonZeroU64::new((elements * size_of::<T>()) as u64);
        // Advice alone: a file system that does not take it reads all the same.
        let _ignored = fadvise(&self.file.file, offset, bytes, Advice::WillNeed);
    }
}

/// Reads a range that lies in the file as it should in `out`.
pub(crate) fn read_as_is<T: Element>(
    stored: &StoredTensor<'_>,
    range: Range<usize>,
    out: &mut [f32],
) -> Result<()> {
    let mut buffer = vec![T::zeroed(); range.len().min(WIDENED_AT_ONCE)];
    for (first, piece) in range.step_by(WIDENED_AT_ONCE).zip(out.chunks_mut(WIDENED_AT_ONCE)) {
        let narrow = &mut buffer[..piece.len()];
        stored.read(first, narrow)?;
        for (wide, narrow) in piece.iter_mut().zip(narrow) {
            *wide = narrow.widen();
        }
    }
    Ok(())
}

/// Reads a range of the transposed matrix; the file holds `[rows, columns]`.
pub(crate) fn read_transposed<T: Element>(
    stored: &StoredTensor<'_>,
    [rows, columns]: [usize; 2],
    range: Range<usize>,
    out: &mut [f32],
) -> Result<()> {
    let mut buffer: Vec<T> = Vec::new();
    for rectangle in rectangles(rows, &range) {
        let blocking = Blocking::new(rectangle.columns.len(), columns, size_of::<T>());
        for block in blocking.blocks(&rectangle) {
            let (height, width) = (block.rows.len(), block.columns.len());
            let first = block.rows.start * columns + block.columns.start;
            // The last row ends with its own columns.
            buffer.resize((height - 1) * blocking.stride + width, T::zeroed());
            if blocking.stride == columns {
                stored.read(first, &mut buffer)?;
            } else {
                for row in 0..height {
                    stored.prefetch::<T>(first + row * columns, width);
                }
                for (row, piece) in buffer.chunks_mut(blocking.stride).enumerate() {
                    stored.read(first + row * columns, &mut piece[..width])?;
                }
            }
            let target = block.columns.start * rows + block.rows.start - range.start;
            transpose(
                [height, width],
                Strided { values: &buffer, stride: blocking.stride },
                Strided { values: &mut out[target..], stride: rows },
                T::widen,
            );
        }
    }
    Ok(())
}
