//! Small passes over the rows of a row-major matrix.

use std::array;

use super::simd;

/// `rows` copies of `row`.
pub fn repeat(row: &[f32], rows: usize) -> Vec<f32> {
    let mut out = Vec::with_capacity(rows * row.len());
    for _ in 0..rows {
        out.extend_from_slice(row);
    }
    out
}

/// A copy of `matrix` with `row` added to each of its rows.
pub fn add_row(matrix: &[f32], row: &[f32]) -> Vec<f32> {
    let mut out = Vec::with_capacity(matrix.len());
    let mut sum = row.to_vec();
    for source in matrix.chunks_exact(row.len()) {
        simd(
            #[inline(always)]
            || {
                for ((s, &a), &b) in sum.iter_mut().zip(source).zip(row) {
                    *s = a + b;
                }
            },
        );
        out.extend_from_slice(&sum);
    }
    out
}

/// The sum of the rows of `matrix`, in row order, written over `sum`.
pub fn sum_rows(matrix: &[f32], sum: &mut [f32]) {
    sum.fill(0.0);
    let width = sum.len();
    simd(
        #[inline(always)]
        || {
            let mut quads = matrix.chunks_exact(4 * width);
            for quad in &mut quads {
                let (ab, cd) = quad.split_at(2 * width);
                let ((a, b), (c, d)) = (ab.split_at(width), cd.split_at(width));
                for ((((s, &a), &b), &c), &d) in sum.iter_mut().zip(a).zip(b).zip(c).zip(d) {
                    *s += (a + b) + (c + d);
                }
            }
            for row in quads.remainder().chunks_exact(width) {
                add_assign(sum, row);
            }
        },
    );
}

/// `target += source`, elementwise.
pub fn add(target: &mut [f32], source: &[f32]) {
    simd(
        #[inline(always)]
        || add_assign(target, source),
    );
}

/// `target *= factor`, elementwise.
pub fn scale(target: &mut [f32], factor: f32) {
    simd(
        #[inline(always)]
        || target.iter_mut().for_each(|t| *t *= factor),
    );
}

#[inline(always)]
fn add_assign(target: &mut [f32], source: &[f32]) {
    for (t, &s) in target.iter_mut().zip(source) {
        *t += s;
    }
}

/// Source rows that [`transpose`] reads side by side.
const STRIP: usize = 8;

/// Writes the transpose of a `rows x cols` matrix, whose rows lie `stride` apart in `source`, to `target`
/// (`cols x rows`, contiguous).
///
/// # Panics
/// If `cols` does not divide the target's length, or the source is too short.
pub fn transpose(source: &[f32], stride: usize, cols: usize, target: &mut [f32]) {
    let rows = target.len().checked_div(cols).unwrap_or(0);
    assert_eq!(rows * cols, target.len(), "a whole number of rows");
    let line = |row: usize| &source[row * stride..][..cols];
    simd(
        #[inline(always)]
        || {
            let strips = rows / STRIP * STRIP;
            for row in (0..strips).step_by(STRIP) {
                let lines: [&[f32]; STRIP] = array::from_fn(|i| line(row + i));
                for col in 0..cols {
                    let out = &mut target[col * rows + row..][..STRIP];
                    for i in 0..STRIP {
                        out[i] = lines[i][col];
                    }
                }
            }
            for row in strips..rows {
                for (col, &x) in line(row).iter().enumerate() {
                    target[col * rows + row] = x;
                }
            }
        },
    );
}
