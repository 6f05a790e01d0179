//! The output of an attention.

use super::problem::Part;
use super::{BLOCK, Problem, for_each_task, put, scores};
use crate::kernels::matmul::{MatMut, MatRef, matmul_serial};
use crate::kernels::{exp_in_place, max, rows, simd};
use crate::sink::WriteMode;

/// What one task works in, allocated once and used for every head it meets.
struct Scratch {
    /// Keys of the head, transposed: `head_dim x len`.
    keys: Vec<f32>,
    /// Probabilities: `BLOCK x len`.
    probabilities: Vec<f32>,
    /// The result: `len x head_dim`.
    out: Vec<f32>,
    /// The log-sum-exp of each query's scores.
    lse: Vec<f32>,
}

/// Causal scaled dot-product attention of every head: `softmax(q k^T / sqrt(head_dim)) v`.
///
/// Returns the output, `[batch, len, num_heads * head_dim]`, and the log-sum-exp of each query's scores,
/// `[batch, num_heads, len]`.
///
/// # Panics
/// If the buffers do not fit the sizes.
pub fn forward(problem: Problem, buffers: &[&[f32]]) -> (Vec<f32>, Vec<f32>) {
    problem.check(buffers);
    let Problem { batch, len, heads, .. } = problem;
    let width = heads.query_width();
    let mut out = vec![0.0; batch * len * width];
    let mut lse = vec![0.0; batch * heads.num_heads * len];
    let scratch = || Scratch {
        keys: vec![0.0; heads.head_dim * len],
        probabilities: vec![0.0; BLOCK.min(len) * len],
        out: vec![0.0; len * heads.head_dim],
        lse: vec![0.0; len],
    };
    let run = |task: usize, scratch: &mut Scratch| {
        let (b, head) = (task / heads.num_heads, task % heads.num_heads);
        forward_head(problem, buffers, (b, head), scratch);
    };
    for_each_task(batch * heads.num_heads, scratch, run, |task, scratch| {
        let (b, head) = (task / heads.num_heads, task % heads.num_heads);
        put(&mut out[b * len * width + head * heads.head_dim..], width, &scratch.out, heads.head_dim);
        lse[task * len..][..len].copy_from_slice(&scratch.lse);
    });
    (out, lse)
}

fn forward_head(problem: Problem, buffers: &[&[f32]], (b, head): (usize, usize), scratch: &mut Scratch) {
    let Problem { len, heads, .. } = problem;
    let dim = heads.head_dim;
    let q = problem.window(buffers, Part::Query, b, head);
    let k = problem.window(buffers, Part::Key, b, head / heads.group());
    let v = problem.window(buffers, Part::Value, b, head / heads.group());
    rows::transpose(k.data, k.stride, dim, &mut scratch.keys);
    for first in (0..len).step_by(BLOCK) {
        let count = BLOCK.min(len - first);
        let end = first + count;
        let p = &mut scratch.probabilities[..count * end];
        scores(p, q.rows(first, count, dim), MatRef::strided(&scratch.keys, dim, end, len), heads.scale());
        let mut inverse = [0.0; BLOCK];
        for (i, row) in p.chunks_exact_mut(end).enumerate() {
            let (max, sum) = softmax_numerators(row, first + i + 1);
            inverse[i] = 1.0 / sum;
            scratch.lse[first + i] = max + sum.ln();
        }
        let out = &mut scratch.out[first * dim..end * dim];
        let p = MatRef::row_major(p, count, end);
        matmul_serial(MatMut::row_major(out, count, dim), p, v.rows(0, end, dim), 1.0, WriteMode::Overwrite);
        for (row, &inverse) in out.chunks_exact_mut(dim).zip(&inverse) {
            rows::scale(row, inverse);
        }
    }
}

/// Turns the first `visible` scores of a row into `exp(score - max)`, the others into 0; returns the maximum and the sum.
fn softmax_numerators(row: &mut [f32], visible: usize) -> (f32, f32) {
    let (row, hidden) = row.split_at_mut(visible);
    hidden.fill(0.0);
    simd(
        #[inline(always)]
        || {
            let max = max(row);
            (max, exp_in_place(row, max))
        },
    )
}
