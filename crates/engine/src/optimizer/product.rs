//! The product of two f32 matrices, in one order of additions.
//!
//! Each element is one chain of fused multiply-adds along the inner dimension, wherever it lies in the matrix: blocks
//! change the speed, never a bit.

use shardwise_core::statistics::PRODUCT_COLUMNS;

/// Rows that are computed at a time.
const ROWS: usize = 4;

/// The right-hand matrix.
#[derive(Clone, Copy)]
pub(crate) enum Right<'a> {
    /// `[inner, columns]`, row-major.
    Plain(&'a [f32]),
    /// The transpose of a row-major `[columns, inner]`.
    Transposed(&'a [f32]),
}

/// Sizes of a product: `[rows, inner] x [inner, columns]`.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) rows: usize,
    pub(crate) inner: usize,
    pub(crate) columns: usize,
}

/// `out = factor * left x right + rest.0 * rest.1`, all row-major. `panel` holds `inner` times [`PRODUCT_COLUMNS`]
/// elements to work in.
pub(crate) fn multiply(
    out: &mut [f32],
    left: &[f32],
    right: Right<'_>,
    sizes: Sizes,
    (factor, rest): (f32, Option<(f32, &[f32])>),
    panel: &mut [f32],
) {
    let Sizes { rows, inner, columns } = sizes;
    pulp::Arch::new().dispatch(
        #[inline(always)]
        || {
            for first in (0..columns).step_by(PRODUCT_COLUMNS) {
                let width = PRODUCT_COLUMNS.min(columns - first);
                pack(panel, right, sizes, first..first + width);
                let (panel, _) = panel[..inner * PRODUCT_COLUMNS].as_chunks::<PRODUCT_COLUMNS>();
                let mut finish = |row: usize, sums: &[f32; PRODUCT_COLUMNS]| {
                    let at = row * columns + first..row * columns + first + width;
                    match rest {
                        None => out[at].iter_mut().zip(sums).for_each(|(o, s)| *o = factor * s),
                        Some((weight, other)) => {
                            let other = &other[at.clone()];
                            for ((o, s), x) in out[at].iter_mut().zip(sums).zip(other) {
                                *o = factor * s + weight * x;
                            }
                        }
                    }
                };
                let blocked = rows - rows % ROWS;
                for row in (0..blocked).step_by(ROWS) {
                    let left: [&[f32]; ROWS] =
                        std::array::from_fn(|r| &left[(row + r) * inner..(row + r + 1) * inner]);
                    let sums = block(left, panel);
                    sums.iter().enumerate().for_each(|(r, sums)| finish(row + r, sums));
                }
                for row in blocked..rows {
                    let [sums] = block([&left[row * inner..(row + 1) * inner]], panel);
                    finish(row, &sums);
                }
            }
        },
    );
}

#[inline(always)]
fn block<const N: usize>(left: [&[f32]; N], panel: &[[f32; PRODUCT_COLUMNS]]) -> [[f32; PRODUCT_COLUMNS]; N] {
    let left = left.map(|row| &row[..panel.len()]);
    let mut sums = [[0.0f32; PRODUCT_COLUMNS]; N];
    for (l, row) in panel.iter().enumerate() {
        for r in 0..N {
            let factor = left[r][l];
            for c in 0..PRODUCT_COLUMNS {
                sums[r][c] = factor.mul_add(row[c], sums[r][c]);
            }
        }
    }
    sums
}

/// Lays the columns `picked` of the right-hand matrix out row by row, with zeros behind them.
#[inline(always)]
fn pack(panel: &mut [f32], right: Right<'_>, sizes: Sizes, picked: std::ops::Range<usize>) {
    let Sizes { inner, columns, .. } = sizes;
    let (panel, _) = panel[..inner * PRODUCT_COLUMNS].as_chunks_mut::<PRODUCT_COLUMNS>();
    for (l, row) in panel.iter_mut().enumerate() {
        match right {
            Right::Plain(matrix) => {
                row[..picked.len()]
                    .copy_from_slice(&matrix[l * columns + picked.start..l * columns + picked.end]);
            }
            Right::Transposed(matrix) => {
                for (to, column) in row.iter_mut().zip(picked.clone()) {
                    *to = matrix[column * inner + l];
                }
            }
        }
        row[picked.len()..].fill(0.0);
    }
}

/// Writes the transpose of a row-major `[rows, columns]` to `out`.
pub(crate) fn transpose(out: &mut [f32], matrix: &[f32], rows: usize, columns: usize) {
    /// Rows and columns of a tile, so that both sides stay in the cache.
    const TILE: usize = 32;
    for top in (0..rows).step_by(TILE) {
        for left in (0..columns).step_by(TILE) {
            for row in top..rows.min(top + TILE) {
                for column in left..columns.min(left + TILE) {
                    out[column * rows + row] = matrix[row * columns + column];
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(rows: usize, columns: usize, salt: usize) -> Vec<f32> {
        (0..rows * columns).map(|i| ((i * 37 + salt) % 61) as f32 / 30.0 - 1.0).collect()
    }

    /// Every element equals one chain of fused multiply-adds, bit for bit.
    #[test]
    fn products_equal_the_chain() {
        for (rows, inner, columns) in [(1, 1, 1), (4, 3, 32), (5, 7, 33), (9, 40, 70), (3, 0, 2), (8, 5, 64)]
        {
            let (a, b, d) = (matrix(rows, inner, 1), matrix(inner, columns, 2), matrix(rows, columns, 3));
            let mut flipped = vec![0.0; b.len()];
            transpose(&mut flipped, &b, inner, columns);
            for right in [Right::Plain(&b), Right::Transposed(&flipped)] {
                for rest in [None, Some((0.5, d.as_slice()))] {
                    let mut out = vec![f32::NAN; rows * columns];
                    let mut panel = vec![f32::NAN; inner * PRODUCT_COLUMNS];
                    multiply(&mut out, &a, right, Sizes { rows, inner, columns }, (2.0, rest), &mut panel);
                    for (at, got) in out.iter().enumerate() {
                        let (i, j) = (at / columns, at % columns);
                        let chain =
                            (0..inner).fold(0.0f32, |s, l| a[i * inner + l].mul_add(b[l * columns + j], s));
                        let want = 2.0 * chain + rest.map_or(0.0, |(w, d)| w * d[at]);
                        assert_eq!(got.to_bits(), want.to_bits(), "{rows} {inner} {columns}: {i} {j}");
                    }
                }
            }
        }
    }
}
