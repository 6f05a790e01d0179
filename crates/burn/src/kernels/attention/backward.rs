//! The gradients of an attention.

use super::problem::{Part, Window};
use super::{BLOCK, Problem, for_each_task, put, scores};
use crate::kernels::math::exp;
use crate::kernels::matmul::{MatMut, MatRef, matmul_serial};
use crate::kernels::{rows, simd, sum2};
use crate::sink::WriteMode;

/// What one task works in, allocated once and used for every key head it meets.
struct Scratch {
    /// Keys and values of the head, transposed: `head_dim x len`.
    keys: Vec<f32>,
    values: Vec<f32>,
    /// Probabilities, and the gradients of scores: `BLOCK x len`.
    probabilities: Vec<f32>,
    slopes: Vec<f32>,
    /// The results: `len x head_dim` for each query head that reads the key head, for keys, and for values.
    d_queries: Vec<f32>,
    d_keys: Vec<f32>,
    d_values: Vec<f32>,
}

/// What [`forward`](super::forward()) saw and returned, and the gradient of its output.
#[derive(Clone, Copy, Debug)]
pub struct Saved<'a> {
    /// The sizes.
    pub problem: Problem,
    /// Queries, keys and values.
    pub buffers: &'a [&'a [f32]],
    /// The output.
    pub out: &'a [f32],
    /// The log-sum-exp of each query's scores.
    pub lse: &'a [f32],
    /// The output's gradient.
    pub d_out: &'a [f32],
}

/// The gradients of queries, keys and values, in buffers laid out like theirs. Where query heads share a key head, its
/// gradient is their sum in the order of heads.
pub fn backward(saved: Saved<'_>) -> Vec<Vec<f32>> {
    let problem = saved.problem;
    problem.check(saved.buffers);
    let Problem { batch, len, heads, .. } = problem;
    let dim = heads.head_dim;
    let mut grads: Vec<Vec<f32>> = problem.buffer_lens().into_iter().map(|n| vec![0.0; n]).collect();
    let scratch = || Scratch {
        keys: vec![0.0; dim * len],
        values: vec![0.0; dim * len],
        probabilities: vec![0.0; BLOCK.min(len) * len],
        slopes: vec![0.0; BLOCK.min(len) * len],
        d_queries: vec![0.0; heads.group() * len * dim],
        d_keys: vec![0.0; len * dim],
        d_values: vec![0.0; len * dim],
    };
    let run = |task: usize, scratch: &mut Scratch| {
        backward_head(saved, (task / heads.num_kv_heads, task % heads.num_kv_heads), scratch);
    };
    for_each_task(batch * heads.num_kv_heads, scratch, run, |task, scratch| {
        let (b, kv_head) = (task / heads.num_kv_heads, task % heads.num_kv_heads);
        let mut put_part = |part: Part, head: usize, rows: &[f32]| {
            let place = problem.place(part);
            put(&mut grads[place.buffer][problem.start(place, b, head)..], place.stride, rows, dim);
        };
        for (i, rows) in scratch.d_queries.chunks_exact(len * dim).enumerate() {
            put_part(Part::Query, kv_head * heads.group() + i, rows);
        }
        put_part(Part::Key, kv_head, &scratch.d_keys);
        put_part(Part::Value, kv_head, &scratch.d_values);
    });
    grads
}

fn backward_head(saved: Saved<'_>, (b, kv_head): (usize, usize), scratch: &mut Scratch) {
    let Problem { len, heads, .. } = saved.problem;
    let dim = heads.head_dim;
    let k = saved.problem.window(saved.buffers, Part::Key, b, kv_head);
    let v = saved.problem.window(saved.buffers, Part::Value, b, kv_head);
    rows::transpose(k.data, k.stride, dim, &mut scratch.keys);
    rows::transpose(v.data, v.stride, dim, &mut scratch.values);
    scratch.d_keys.fill(0.0);
    scratch.d_values.fill(0.0);
    for i in 0..heads.group() {
        for first in (0..len).step_by(BLOCK) {
            backward_block(saved, (b, kv_head, i), first, scratch);
        }
    }
}

/// With `P` the probabilities of a block of queries: `dV += P^T dO`, `dS = P (dO V^T - sum(dO O)) scale`, `dQ = dS K`,
/// `dK += dS^T Q`.
fn backward_block(
    saved: Saved<'_>,
    (b, kv_head, i): (usize, usize, usize),
    first: usize,
    scratch: &mut Scratch,
) {
    let Saved { problem, buffers, out, lse, d_out } = saved;
    let Problem { len, heads, .. } = problem;
    let dim = heads.head_dim;
    let head = kv_head * heads.group() + i;
    let (count, width) = (BLOCK.min(len - first), heads.query_width());
    let end = first + count;

    let start = b * len * width + head * dim;
    let out = Window { data: &out[start..], stride: width };
    let d_out = Window { data: &d_out[start..], stride: width };
    let lse = &lse[(b * heads.num_heads + head) * len..][..len];
    let q = problem.window(buffers, Part::Query, b, head).rows(first, count, dim);
    let k = problem.window(buffers, Part::Key, b, kv_head).rows(0, end, dim);

    let p = &mut scratch.probabilities[..count * end];
    let ds = &mut scratch.slopes[..count * end];
    scores(p, q, MatRef::strided(&scratch.keys, dim, end, len), heads.scale());
    scores(ds, d_out.rows(first, count, dim), MatRef::strided(&scratch.values, dim, end, len), 1.0);
    for (i, (p, ds)) in p.chunks_exact_mut(end).zip(ds.chunks_exact_mut(end)).enumerate() {
        let row = first + i;
        probabilities_and_slopes(
            p,
            ds,
            row + 1,
            [out.row(row, dim), d_out.row(row, dim)],
            (lse[row], heads.scale()),
        );
    }

    let p = MatRef::row_major(p, count, end).transposed();
    let ds = MatRef::row_major(ds, count, end);
    let d_value = MatMut::row_major(&mut scratch.d_values[..end * dim], end, dim);
    matmul_serial(d_value, p, d_out.rows(first, count, dim), 1.0, WriteMode::Add);
    let d_query = &mut scratch.d_queries[(i * len + first) * dim..][..count * dim];
    matmul_serial(MatMut::row_major(d_query, count, dim), ds, k, 1.0, WriteMode::Overwrite);
    let d_key = MatMut::row_major(&mut scratch.d_keys[..end * dim], end, dim);
    matmul_serial(d_key, ds.transposed(), q, 1.0, WriteMode::Add);
}

/// Turns a row of scores into probabilities, and the row of `dO V^T` into the gradient of the scores before scaling.
fn probabilities_and_slopes(
    p: &mut [f32],
    ds: &mut [f32],
    visible: usize,
    [out, d_out]: [&[f32]; 2],
    (lse, scale): (f32, f32),
) {
    p[visible..].fill(0.0);
    ds[visible..].fill(0.0);
    simd(
        #[inline(always)]
        || {
            let delta = sum2(
                out,
                d_out,
                #[inline(always)]
                |o, d| o * d,
            );
            for (p, ds) in p[..visible].iter_mut().zip(&mut ds[..visible]) {
                *p = exp(*p - lse);
                *ds = *p * (*ds - delta) * scale;
            }
        },
    );
}
