//! The kernels below the operations: products of strided windows, transposes, and sums of fixed order.

mod ops_common;

use ops_common::{Random, assert_close};
use shardwise_burn::kernels::math::exp;
use shardwise_burn::kernels::matmul::{MatMut, MatRef, matmul, matmul_serial, product, product_transposed};
use shardwise_burn::kernels::{max, rows, simd, sum};
use shardwise_burn::sink::WriteMode;

/// `lhs rhs` in double precision; both contiguous.
fn plain_product(lhs: &[f32], rhs: &[f32], [m, k, n]: [usize; 3]) -> Vec<f32> {
    let element =
        |i: usize, j: usize| (0..k).map(|p| f64::from(lhs[i * k + p]) * f64::from(rhs[p * n + j])).sum();
    (0..m * n).map(|index| element(index / n, index % n)).map(|sum: f64| sum as f32).collect()
}

#[test]
fn products_in_every_orientation() {
    for shape in [[1, 1, 1], [2, 3, 5], [17, 1, 16], [1, 64, 1], [64, 64, 64], [65, 100, 33], [3, 1100, 2]] {
        let [m, k, n] = shape;
        let mut random = Random::new(1);
        let (lhs, rhs) = (random.values(m * k), random.values(k * n));
        let expected = plain_product(&lhs, &rhs, shape);
        let (mut lhs_t, mut rhs_t) = (vec![0.0; m * k], vec![0.0; k * n]);
        rows::transpose(&lhs, k, k, &mut lhs_t);
        rows::transpose(&rhs, n, n, &mut rhs_t);
        let (lhs, rhs) = (MatRef::row_major(&lhs, m, k), MatRef::row_major(&rhs, k, n));
        let (lhs_t, rhs_t) = (MatRef::row_major(&lhs_t, k, m), MatRef::row_major(&rhs_t, n, k));
        for found in [
            product(lhs, rhs),
            product(lhs_t.transposed(), rhs),
            product(lhs, rhs_t.transposed()),
            product(lhs_t.transposed(), rhs_t.transposed()),
            product_transposed(lhs, rhs_t),
        ] {
            assert_close(&format!("{shape:?}"), &found, &expected, 2e-6);
        }
    }
}

#[test]
fn products_into_a_strided_window_touch_nothing_else() {
    let mut random = Random::new(2);
    let (lhs, rhs) = (random.values(3 * 4), random.values(4 * 5));
    let (lhs_matrix, rhs_matrix) = (MatRef::row_major(&lhs, 3, 4), MatRef::row_major(&rhs, 4, 5));
    let expected = plain_product(&lhs, &rhs, [3, 4, 5]);
    for (mode, start) in [(WriteMode::Overwrite, f32::NAN), (WriteMode::Add, 1.0)] {
        let mut target = [7.0; 3 * 8];
        target.chunks_mut(8).for_each(|row| row[2..7].fill(start));
        let window = MatMut::strided(&mut target[2..], 3, 5, 8);
        matmul_serial(window, lhs_matrix, rhs_matrix, 2.0, mode);
        for (row, expected) in target.chunks(8).zip(expected.chunks(5)) {
            assert_eq!([row[0], row[1], row[7]], [7.0; 3]);
            let base = if mode == WriteMode::Add { 1.0 } else { 0.0 };
            let expected: Vec<f32> = expected.iter().map(|e| base + 2.0 * e).collect();
            assert_close(&format!("{mode:?}"), &row[2..7], &expected, 2e-6);
        }
    }
}

#[test]
fn products_over_nothing_are_zero() {
    assert_eq!(product(MatRef::row_major(&[], 2, 0), MatRef::row_major(&[], 0, 3)), [0.0; 6]);
    assert!(product(MatRef::row_major(&[], 0, 2), MatRef::row_major(&[1.0; 6], 2, 3)).is_empty());
}

#[test]
#[should_panic(expected = "does not fit 6 elements")]
fn a_matrix_beyond_its_slice_is_refused() {
    MatRef::row_major(&[0.0; 6], 3, 3);
}

#[test]
#[should_panic(expected = "does not fit 6 elements")]
fn a_stride_that_overflows_is_refused() {
    MatRef::strided(&[0.0; 6], 3, 1, usize::MAX);
}

#[test]
#[should_panic(expected = "must not overlap")]
fn a_target_whose_rows_overlap_is_refused() {
    MatMut::strided(&mut [0.0; 6], 2, 3, 2);
}

#[test]
#[should_panic(expected = "does not make a 2 x 2 matrix")]
fn a_product_of_other_shape_is_refused() {
    let x = [0.0; 6];
    let target = &mut [0.0; 4];
    matmul(
        MatMut::row_major(target, 2, 2),
        MatRef::row_major(&x, 2, 3),
        MatRef::row_major(&x, 2, 3),
        WriteMode::Add,
    );
}

#[test]
fn transposes_of_any_size() {
    for (height, width, stride) in [(1, 1, 1), (8, 3, 5), (9, 17, 17), (65, 33, 40), (7, 1, 1)] {
        let source = Random::new(3).values(height * stride);
        let mut target = vec![f32::NAN; height * width];
        rows::transpose(&source, stride, width, &mut target);
        for (i, &x) in target.iter().enumerate() {
            assert_eq!(x, source[i % height * stride + i / height]);
        }
    }
}

#[test]
fn row_passes_of_any_size() {
    for (height, width) in [(1, 1), (3, 17), (4, 33), (9, 64)] {
        let mut random = Random::new(4);
        let (matrix, row) = (random.values(height * width), random.values(width));
        let mut sums = vec![f32::NAN; width];
        rows::sum_rows(&matrix, &mut sums);
        let column =
            |j: usize| matrix.iter().skip(j).step_by(width).map(|&x| f64::from(x)).sum::<f64>() as f32;
        assert_close("sums", &sums, &(0..width).map(column).collect::<Vec<_>>(), 1e-6);
        let expected: Vec<f32> = matrix.iter().enumerate().map(|(i, x)| x + row[i % width]).collect();
        assert_eq!(rows::add_row(&matrix, &row), expected);
        assert_eq!(
            rows::repeat(&row, height),
            (0..height * width).map(|i| row[i % width]).collect::<Vec<_>>()
        );
    }
}

#[test]
fn sums_do_not_depend_on_alignment() {
    let values = Random::new(5).values(1000);
    for count in [0, 1, 31, 32, 33, 900] {
        let expected = sum(&values[..count], |x| x);
        let exact: f64 = values[..count].iter().map(|&x| f64::from(x)).sum();
        assert!((f64::from(expected) - exact).abs() < 1e-4);
        for offset in 1..16 {
            let mut shifted = vec![0.0; offset];
            shifted.extend_from_slice(&values[..count]);
            assert_eq!(sum(&shifted[offset..], |x| x).to_bits(), expected.to_bits());
        }
    }
}

#[test]
fn the_maximum_passes_over_nan() {
    assert_eq!(max(&[]), f32::NEG_INFINITY);
    assert_eq!(max(&[f32::NAN, -3.0, f32::NAN, -5.0]), -3.0);
    let mut values = vec![-1.0; 100];
    values[97] = 2.0;
    assert_eq!(max(&values), 2.0);
}

#[test]
fn the_instruction_set_does_not_change_the_bits() {
    let values: Vec<f32> = Random::new(6).values(1000).iter().map(|x| 90.0 * x).collect();
    let baseline: Vec<f32> = values.iter().map(|&x| exp(x)).collect();
    let mut vectorised = values.clone();
    simd(
        #[inline(always)]
        || vectorised.iter_mut().for_each(|x| *x = exp(*x)),
    );
    assert_eq!(vectorised, baseline);
    let term = |x: f32| x * x;
    let vectorised = simd(
        #[inline(always)]
        || sum(&values, term),
    );
    assert_eq!(vectorised.to_bits(), sum(&values, term).to_bits());
}
