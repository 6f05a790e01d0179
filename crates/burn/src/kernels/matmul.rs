//! Matrix products of strided `f32` windows: the one place that calls the `gemm` crate.

use gemm::Parallelism;

use super::rows;
use crate::sink::WriteMode;

/// A read-only matrix: elements of a slice at a row and a column stride.
#[derive(Clone, Copy, Debug)]
pub struct MatRef<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> MatRef<'a> {
    /// `rows x cols` elements of `data`, whose rows are contiguous and lie `row_stride` apart.
    ///
    /// # Panics
    /// If the last element lies outside `data`.
    pub fn strided(data: &'a [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        check_bounds(data.len(), rows, cols, row_stride);
        Self { data, rows, cols, row_stride, col_stride: 1 }
    }

    /// A contiguous row-major matrix with `cols` columns.
    pub fn row_major(data: &'a [f32], rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    /// The number of rows.
    pub fn rows(self) -> usize {
        self.rows
    }

    /// The number of columns.
    pub fn cols(self) -> usize {
        self.cols
    }

    /// The rows `first..first + count`.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn row_range(self, first: usize, count: usize) -> Self {
        assert!(first + count <= self.rows, "rows {first}..{} of {}", first + count, self.rows);
        let start = (first * self.row_stride).min(self.data.len());
        Self { data: &self.data[start..], rows: count, ..self }
    }

    /// The transpose: the same elements.
    pub fn transposed(self) -> Self {
        Self {
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
            ..self
        }
    }
}

/// A matrix to write: contiguous rows that do not overlap.
#[derive(Debug)]
pub struct MatMut<'a> {
    data: &'a mut [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
}

impl<'a> MatMut<'a> {
    /// `rows x cols` elements of `data`, whose rows are contiguous and lie `row_stride` apart.
    ///
    /// # Panics
    /// If the last element lies outside `data`, or rows overlap.
    pub fn strided(data: &'a mut [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        check_bounds(data.len(), rows, cols, row_stride);
        assert!(rows <= 1 || row_stride >= cols, "rows of a matrix to write must not overlap");
        Self { data, rows, cols, row_stride }
    }

    /// A contiguous row-major matrix with `cols` columns.
    pub fn row_major(data: &'a mut [f32], rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }
}

fn check_bounds(len: usize, rows: usize, cols: usize, row_stride: usize) {
    if rows > 0 && cols > 0 {
        let last = (rows - 1).checked_mul(row_stride).and_then(|start| start.checked_add(cols - 1));
        assert!(
            last.is_some_and(|last| last < len),
            "a {rows} x {cols} matrix with row stride {row_stride} does not fit {len} elements"
        );
    }
}

/// `dst = lhs rhs`, or `dst += lhs rhs`, on all threads of the current rayon pool.
///
/// # Panics
/// If the shapes do not fit.
pub fn matmul(dst: MatMut<'_>, lhs: MatRef<'_>, rhs: MatRef<'_>, mode: WriteMode) {
    let MatMut { data, rows, cols, row_stride } = dst;
    check_shapes(rows, cols, lhs, rhs);
    // SAFETY: `MatMut` keeps every element of a `rows x cols` matrix at `row_stride` within `data`, which is borrowed
    // mutably, and initialised.
    unsafe { call(data.as_mut_ptr(), row_stride, lhs, rhs, Scale { factor: 1.0, mode, parallelism: pool() }) }
}

/// `dst = scale lhs rhs`, or `dst += scale lhs rhs`, on the calling thread.
///
/// # Panics
/// If the shapes do not fit.
pub fn matmul_serial(dst: MatMut<'_>, lhs: MatRef<'_>, rhs: MatRef<'_>, factor: f32, mode: WriteMode) {
    let MatMut { data, rows, cols, row_stride } = dst;
    check_shapes(rows, cols, lhs, rhs);
    let scale = Scale { factor, mode, parallelism: Parallelism::None };
    // SAFETY: as in `matmul`.
    unsafe { call(data.as_mut_ptr(), row_stride, lhs, rhs, scale) }
}

/// `lhs rhs` as a new row-major matrix, whose memory is written once.
///
/// # Panics
/// If the shapes do not fit.
pub fn product(lhs: MatRef<'_>, rhs: MatRef<'_>) -> Vec<f32> {
    let (rows, cols) = (lhs.rows, rhs.cols);
    check_shapes(rows, cols, lhs, rhs);
    let mut out: Vec<f32> = Vec::with_capacity(rows * cols);
    let scale = Scale { factor: 1.0, mode: WriteMode::Overwrite, parallelism: pool() };
    // SAFETY: the allocation holds `rows * cols` elements, which `call` writes, and in this mode does not read.
    unsafe {
        call(out.as_mut_ptr(), cols, lhs, rhs, scale);
        out.set_len(rows * cols);
    }
    out
}

/// Row strides that are a multiple of this put a column's elements into few sets of the cache.
const CONFLICTING_STRIDE: usize = 512;
/// The largest matrix (in elements) that [`product_transposed`] copies.
const COPY_LIMIT: usize = 1 << 22;

/// `lhs rhs^T` as a new row-major matrix, where `rhs` is contiguous and row-major.
///
/// The product reads `rhs` along its columns, once; where those are slow to read, from a transposed copy. The result's
/// bits do not depend on that.
///
/// # Panics
/// If the shapes do not fit.
pub fn product_transposed(lhs: MatRef<'_>, rhs: MatRef<'_>) -> Vec<f32> {
    let (rows, cols) = (rhs.rows, rhs.cols);
    if cols.is_multiple_of(CONFLICTING_STRIDE) && rows * cols <= COPY_LIMIT && rhs.row_stride == cols {
        let mut copy = vec![0.0; rows * cols];
        rows::transpose(rhs.data, cols, cols, &mut copy);
        return product(lhs, MatRef::row_major(&copy, cols, rows));
    }
    product(lhs, rhs.transposed())
}

fn check_shapes(rows: usize, cols: usize, lhs: MatRef<'_>, rhs: MatRef<'_>) {
    assert!(
        lhs.rows == rows && rhs.cols == cols && lhs.cols == rhs.rows,
        "a {} x {} by a {} x {} product does not make a {rows} x {cols} matrix",
        lhs.rows,
        lhs.cols,
        rhs.rows,
        rhs.cols
    );
}

/// One thread never enters the pool; `gemm` itself keeps small products on the calling thread.
fn pool() -> Parallelism {
    match rayon::current_num_threads() {
        1 => Parallelism::None,
        threads => Parallelism::Rayon(threads),
    }
}

struct Scale {
    factor: f32,
    mode: WriteMode,
    parallelism: Parallelism,
}

/// # Safety
/// `dst` must be valid for writes of `lhs.rows` rows of `rhs.cols` elements that lie `row_stride >= rhs.cols` apart,
/// and for reads of them unless `scale.mode` is `Overwrite`; nothing else may access them meanwhile. `lhs.cols` must
/// equal `rhs.rows`.
unsafe fn call(dst: *mut f32, row_stride: usize, lhs: MatRef<'_>, rhs: MatRef<'_>, scale: Scale) {
    let add = scale.mode == WriteMode::Add;
    // SAFETY: the caller vouches for `dst`; `MatRef` keeps every element of both operands within its slice, and
    // strides of slices fit `isize`. `gemm` assumes no alignment beyond the element's.
    unsafe {
        gemm::gemm(
            lhs.rows,
            rhs.cols,
            lhs.cols,
            dst,
            1,
            row_stride.cast_signed(),
            add,
            lhs.data.as_ptr(),
            lhs.col_stride.cast_signed(),
            lhs.row_stride.cast_signed(),
            rhs.data.as_ptr(),
            rhs.col_stride.cast_signed(),
            rhs.row_stride.cast_signed(),
            if add { 1.0 } else { 0.0 },
            scale.factor,
            false,
            false,
            false,
            scale.parallelism,
        );
    }
}
