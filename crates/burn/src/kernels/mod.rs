//! Numeric kernels over plain `f32` slices: what the fused operations compute, without tensors or graphs.
//!
//! Loops are written plainly and compiled once per instruction set ([`simd`]). A result never depends on which one
//! runs, nor on where in memory the slices lie: an elementwise step rounds alike in a vector and in its tail, because
//! every fused multiply-add is spelled out, and every sum has a fixed order of [`LANES`] interleaved partial sums.
//! (Matrix products follow the order of the `gemm` crate, which depends on the shapes and the machine's caches.)

pub mod activation;
pub mod attention;
pub mod embedding;
pub mod loss;
pub mod math;
pub mod matmul;
pub mod norm;
pub mod rotary;
pub mod rows;

use math::exp;

/// Interleaved partial sums of a float reduction.
pub const LANES: usize = 32;

/// Runs `work` compiled for the best instruction set of this machine.
#[inline(always)]
pub fn simd<R>(work: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(work)
}

/// The sum of the lanes, as a binary tree.
#[inline(always)]
pub fn sum_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// The sum of `term(a[i], b[i])` in the fixed order of [`LANES`] interleaved partial sums.
#[inline(always)]
pub fn sum2(a: &[f32], b: &[f32], term: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let (a_body, a_tail) = a.as_chunks::<LANES>();
    let (b_body, b_tail) = b.as_chunks::<LANES>();
    for (a, b) in a_body.iter().zip(b_body) {
        for i in 0..LANES {
            lanes[i] += term(a[i], b[i]);
        }
    }
    for ((lane, &a), &b) in lanes.iter_mut().zip(a_tail).zip(b_tail) {
        *lane += term(a, b);
    }
    sum_lanes(lanes)
}

/// The sum of `term(a[i])` in the fixed order of [`LANES`] interleaved partial sums.
#[inline(always)]
pub fn sum(a: &[f32], term: impl Fn(f32) -> f32) -> f32 {
    sum2(a, a, |a, _| term(a))
}

/// The largest element (negative infinity of none); NaNs are passed over.
#[inline(always)]
pub fn max(a: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (body, tail) = a.as_chunks::<LANES>();
    for a in body {
        for i in 0..LANES {
            lanes[i] = if a[i] > lanes[i] { a[i] } else { lanes[i] };
        }
    }
    for (lane, &a) in lanes.iter_mut().zip(tail) {
        *lane = if a > *lane { a } else { *lane };
    }
    lanes.into_iter().fold(f32::NEG_INFINITY, |m, a| if a > m { a } else { m })
}

/// Replaces each element by `exp(x - max)` and returns their sum, with the bits of [`sum`].
#[inline(always)]
pub fn exp_in_place(row: &mut [f32], max: f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let (body, tail) = row.as_chunks_mut::<LANES>();
    for chunk in body {
        for i in 0..LANES {
            chunk[i] = exp(chunk[i] - max);
            lanes[i] += chunk[i];
        }
    }
    for (x, lane) in tail.iter_mut().zip(&mut lanes) {
        *x = exp(*x - max);
        *lane += *x;
    }
    sum_lanes(lanes)
}

/// Elements that [`map_to_vec`] computes at a time: a part of the first-level cache.
const CHUNK: usize = 1024;

/// `f(a[i], b[i])` as a new vector, whose memory is written once.
#[inline(always)]
pub fn map_to_vec(a: &[f32], b: &[f32], f: impl Fn(f32, f32) -> f32) -> Vec<f32> {
    assert_eq!(a.len(), b.len(), "operands of one length");
    let mut out = Vec::with_capacity(a.len());
    simd(
        #[inline(always)]
        || {
            let mut chunk = [0.0; CHUNK];
            for (a, b) in a.chunks(CHUNK).zip(b.chunks(CHUNK)) {
                for ((o, &a), &b) in chunk.iter_mut().zip(a).zip(b) {
                    *o = f(a, b);
                }
                out.extend_from_slice(&chunk[..a.len()]);
            }
        },
    );
    out
}
