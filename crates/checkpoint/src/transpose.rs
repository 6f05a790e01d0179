//! How a range of a transposed matrix lies in its file: rectangles, their blocks, and the turning of one.
//!
//! The file holds `[rows, columns]`, row by row; our parameter is `[columns, rows]`, row by row, so that its
//! element `k` is in file row `k % rows` and file column `k / rows`. All arithmetic here is on element
//! indices.

use std::ops::Range;

use crate::error::{Error, Result};

/// How a tensor lies in its file, as against in our parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StoredLayout {
    /// In the same row-major order.
    AsIs,
    /// As the transposed matrix: `[out, in]` in the file, `[in, out]` in our parameter. Only for two
    /// dimensions.
    ///
    /// A range of our parameter is a set of file columns, hence a piece of each file row. Each piece is read
    /// by itself, unless the gap to the next one is at most a page and no longer than the piece: then both
    /// are read in one go and the gap is dropped. So the bytes read are at most twice those wanted.
    Transposed,
}

/// The shape of a matrix as `[rows, columns]`; an error for anything else, since only matrices are
/// transposed.
pub(crate) fn matrix_shape(tensor: &str, shape: &[usize]) -> Result<[usize; 2]> {
    <[usize; 2]>::try_from(shape)
        .map_err(|_| Error::NotAMatrix { tensor: tensor.to_owned(), shape: shape.to_vec() })
}

/// The buffer (in bytes) that a block fits.
const BUFFER_BYTES: usize = 4 << 20;

/// The longest row (in bytes) that is read or written whole: a block has 16 such rows at least.
const ROW_BYTES: usize = BUFFER_BYTES / 16;

/// The most of a longer row (in bytes) that a block takes: a block has 256 such pieces at least.
const PIECE_BYTES: usize = BUFFER_BYTES / 256;

/// The gap between the pieces of two rows (in bytes) up to which reading on through it costs less than
/// another call; it is a page, so that this takes no page more from the disk.
const GAP_BYTES: usize = 4 << 10;

/// Some rows of some columns of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rectangle {
    pub(crate) rows: Range<usize>,
    pub(crate) columns: Range<usize>,
}

/// The rectangles of a file with `rows` rows that a range of the transposed matrix covers: at most three,
/// disjoint, and nothing beside the range.
pub(crate) fn rectangles(rows: usize, range: &Range<usize>) -> impl Iterator<Item = Rectangle> + use<> {
    // A range starts within one file column and ends within another. Between the two rows where it does so,
    // the columns it takes from a row do not change.
    let (mut cuts, mut first, mut last) = ([0; 4], (0, 0), (0, 0));
    if !range.is_empty() {
        first = (range.start / rows, range.start % rows);
        last = ((range.end - 1) / rows, (range.end - 1) % rows + 1);
        cuts = [0, first.1.min(last.1), first.1.max(last.1), rows];
    }
    (0..3).filter_map(move |band| {
        let rows = cuts[band]..cuts[band + 1];
        let start = first.0 + usize::from(rows.start < first.1);
        let end = last.0 + usize::from(rows.start < last.1);
        (!rows.is_empty() && start < end).then_some(Rectangle { rows, columns: start..end })
    })
}

/// How a rectangle is cut into blocks that fit the buffer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Blocking {
    /// The most columns of a block.
    pub(crate) columns: usize,
    /// From one row of a block to the next in the buffer: as in the file if whole rows are read, and
    /// otherwise the block's columns.
    pub(crate) stride: usize,
    /// The most rows of a block.
    pub(crate) rows: usize,
}

impl Blocking {
    /// The blocking for `width` columns out of the file's `columns`, in elements of `element_bytes`.
    pub(crate) fn new(width: usize, columns: usize, element_bytes: usize) -> Self {
        let gap = columns - width;
        let whole_rows =
            columns * element_bytes <= ROW_BYTES && gap <= width && gap * element_bytes <= GAP_BYTES;
        let block_columns = if whole_rows { width } else { width.min(PIECE_BYTES / element_bytes) };
        let stride = if whole_rows { columns } else { block_columns };
        Self { columns: block_columns, stride, rows: BUFFER_BYTES / element_bytes / stride }
    }

    /// The blocks of `rectangle`, row bands first.
    pub(crate) fn blocks(self, rectangle: &Rectangle) -> impl Iterator<Item = Rectangle> + use<> {
        let Rectangle { rows, columns } = rectangle.clone();
        rows.clone().step_by(self.rows).flat_map(move |row| {
            let band = row..(row + self.rows).min(rows.end);
            columns.clone().step_by(self.columns).map({
                let end = columns.end;
                move |column| Rectangle {
                    rows: band.clone(),
                    columns: column..(column + self.columns).min(end),
                }
            })
        })
    }
}

/// Values in rows, `stride` apart.
pub(crate) struct Strided<V> {
    pub(crate) values: V,
    pub(crate) stride: usize,
}

/// Writes `convert(source[row][column])` to `target[column][row]` for all rows and columns.
pub(crate) fn transpose<S: Copy, D>(
    [rows, columns]: [usize; 2],
    source: Strided<&[S]>,
    target: Strided<&mut [D]>,
    convert: impl Fn(S) -> D,
) {
    /// A tile's rows and columns stay within a few cache lines each.
    const TILE: usize = 16;
    for row in (0..rows).step_by(TILE) {
        let row_end = (row + TILE).min(rows);
        for column in (0..columns).step_by(TILE) {
            for c in column..(column + TILE).min(columns) {
                let line = &mut target.values[c * target.stride + row..c * target.stride + row_end];
                for (r, place) in (row..row_end).zip(line) {
                    *place = convert(source.values[r * source.stride + c]);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rectangles_cover_a_range_exactly_once() {
        for (rows, columns) in [(1, 1), (1, 5), (5, 1), (3, 4), (4, 3), (7, 7)] {
            for start in 0..=rows * columns {
                for end in start..=rows * columns {
                    let mut elements: Vec<usize> = rectangles(rows, &(start..end))
                        .flat_map(|area| {
                            let Rectangle { rows: area_rows, columns } = area;
                            columns.flat_map(move |c| area_rows.clone().map(move |r| c * rows + r))
                        })
                        .collect();
                    elements.sort_unstable();
                    assert!(elements.into_iter().eq(start..end), "[{rows}, {columns}] {start}..{end}");
                }
            }
        }
    }

    #[test]
    fn blocks_tile_their_rectangle_and_fit_the_buffer() {
        let cases = [
            (1, 1),
            (1, 9),
            (5, 9),
            (9, 9),
            (3000, 5000),
            (5000, 5000),
            (9000, 100_000),
            (2_000_000, 2_000_000),
        ];
        for (width, columns) in cases {
            let blocking = Blocking::new(width, columns, 4);
            let rectangle = Rectangle { rows: 3..2500, columns: 2..2 + width };
            let mut covered = 0;
            for block in blocking.blocks(&rectangle) {
                assert!(block.rows.len() <= blocking.rows && block.columns.len() <= blocking.stride);
                assert!(blocking.rows * blocking.stride * 4 <= BUFFER_BYTES);
                covered += block.rows.len() * block.columns.len();
            }
            assert_eq!(covered, rectangle.rows.len() * width, "{width} of {columns} columns");
        }
    }
}
