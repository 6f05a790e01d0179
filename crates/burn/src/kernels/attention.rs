//! Causal attention by blocks of queries, and its gradient, over strided rows: no transpose or split of the heads.
//!
//! After FlashAttention (Dao et al., arXiv:2205.14135): a block of [`BLOCK`] queries meets only the keys up to its last
//! query; forward keeps the output and each query's log-sum-exp, and backward recomputes the probabilities from them.

use rayon::prelude::*;

use super::math::exp;
use super::matmul::{MatMut, MatRef, matmul_serial};
use super::{LANES, max, rows, simd, sum_lanes, sum2};
use crate::sink::WriteMode;

/// Queries whose scores are alive at a time: eight tiles of the product's microkernel, and few enough that it does not
/// pack its other operand.
const BLOCK: usize = 48;

/// How the columns of queries, keys and values divide into heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionHeads {
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`. Query head `i` reads key head `i / (num_heads / num_kv_heads)`.
    pub num_kv_heads: usize,
    /// Columns of one head.
    pub head_dim: usize,
}

impl AttentionHeads {
    fn group(self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    fn query_width(self) -> usize {
        self.num_heads * self.head_dim
    }

    fn key_width(self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    fn scale(self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }
}

/// The sizes of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Sequences.
    pub batch: usize,
    /// Tokens of a sequence.
    pub len: usize,
    /// Heads.
    pub heads: AttentionHeads,
    /// Whether queries, keys and values are columns of one buffer (`[q | k | v]`) or three buffers.
    pub packed: bool,
}

/// One of the three operands.
#[derive(Clone, Copy, Debug)]
enum Part {
    Query,
    Key,
    Value,
}

/// Where an operand lies: which buffer, its rows' stride, and its first column.
#[derive(Clone, Copy, Debug)]
struct Place {
    buffer: usize,
    stride: usize,
    column: usize,
}

impl Problem {
    fn place(self, part: Part) -> Place {
        let (q, k) = (self.heads.query_width(), self.heads.key_width());
        let (buffer, width, column) = match part {
            Part::Query => (0, q, 0),
            Part::Key => (1, k, q),
            Part::Value => (2, k, q + k),
        };
        match self.packed {
            true => Place { buffer: 0, stride: q + 2 * k, column },
            false => Place { buffer, stride: width, column: 0 },
        }
    }

    /// The first element of `head` of sequence `b`.
    fn start(self, place: Place, b: usize, head: usize) -> usize {
        b * self.len * place.stride + place.column + head * self.heads.head_dim
    }

    fn window<'a>(self, buffers: &[&'a [f32]], part: Part, b: usize, head: usize) -> Window<'a> {
        let place = self.place(part);
        Window { data: &buffers[place.buffer][self.start(place, b, head)..], stride: place.stride }
    }

    /// Elements of each buffer.
    pub fn buffer_lens(self) -> Vec<usize> {
        let (q, k) = (self.heads.query_width(), self.heads.key_width());
        let rows = self.batch * self.len;
        match self.packed {
            true => vec![rows * (q + 2 * k)],
            false => vec![rows * q, rows * k, rows * k],
        }
    }

    /// # Panics
    /// If the heads do not divide, or a buffer has another length than the sizes say.
    fn check(self, buffers: &[&[f32]]) {
        let AttentionHeads { num_heads, num_kv_heads, head_dim } = self.heads;
        assert!(
            num_heads.min(num_kv_heads).min(head_dim) > 0 && num_heads.is_multiple_of(num_kv_heads),
            "attention with {num_heads} heads over {num_kv_heads} key heads of {head_dim} columns"
        );
        assert!(self.len > 0, "attention over no tokens");
        let found: Vec<usize> = buffers.iter().map(|b| b.len()).collect();
        assert_eq!(found, self.buffer_lens(), "attention buffers of {self:?}");
    }
}

/// The rows of one head: `len` rows of `head_dim`, `stride` apart.
#[derive(Clone, Copy)]
struct Window<'a> {
    data: &'a [f32],
    stride: usize,
}

impl<'a> Window<'a> {
    fn rows(self, first: usize, count: usize, dim: usize) -> MatRef<'a> {
        MatRef::strided(&self.data[first * self.stride..], count, dim, self.stride)
    }

    fn row(self, index: usize, dim: usize) -> &'a [f32] {
        &self.data[index * self.stride..][..dim]
    }
}

/// What one task works in, allocated once and used for every head it meets.
struct Scratch {
    /// Keys and values of the head, transposed: `head_dim x len`.
    keys: Vec<f32>,
    values: Vec<f32>,
    /// Probabilities, and their gradients: `BLOCK x len`.
    probabilities: Vec<f32>,
    slopes: Vec<f32>,
    /// Results: `len x head_dim` for each query head of the task, for keys, and for values.
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
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
        values: Vec::new(),
        probabilities: vec![0.0; BLOCK.min(len) * len],
        slopes: Vec::new(),
        query: vec![0.0; len * heads.head_dim],
        key: Vec::new(),
        value: Vec::new(),
        lse: vec![0.0; len],
    };
    let run = |task: usize, scratch: &mut Scratch| {
        let (b, head) = (task / heads.num_heads, task % heads.num_heads);
        forward_head(problem, buffers, (b, head), scratch);
    };
    for_each_task(batch * heads.num_heads, scratch, run, |task, scratch| {
        let (b, head) = (task / heads.num_heads, task % heads.num_heads);
        put(&mut out[b * len * width + head * heads.head_dim..], width, &scratch.query, heads.head_dim);
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
        let out = &mut scratch.query[first * dim..end * dim];
        let p = MatRef::row_major(p, count, end);
        matmul_serial(MatMut::row_major(out, count, dim), p, v.rows(0, end, dim), 1.0, WriteMode::Overwrite);
        for (row, &inverse) in out.chunks_exact_mut(dim).zip(&inverse) {
            rows::scale(row, inverse);
        }
    }
}

fn scores(p: &mut [f32], q: MatRef<'_>, keys: MatRef<'_>, scale: f32) {
    let (count, end) = (q.rows(), keys.cols());
    matmul_serial(MatMut::row_major(p, count, end), q, keys, scale, WriteMode::Overwrite);
}

/// Turns the first `visible` scores of a row into `exp(score - max)`, the others into 0; returns the maximum and the sum.
fn softmax_numerators(row: &mut [f32], visible: usize) -> (f32, f32) {
    let (row, hidden) = row.split_at_mut(visible);
    hidden.fill(0.0);
    simd(
        #[inline(always)]
        || {
            let max = max(row);
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
            (max, sum_lanes(lanes))
        },
    )
}

/// What [`forward`] saw and returned, and the gradient of its output.
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
        query: vec![0.0; heads.group() * len * dim],
        key: vec![0.0; len * dim],
        value: vec![0.0; len * dim],
        lse: Vec::new(),
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
        for (i, rows) in scratch.query.chunks_exact(len * dim).enumerate() {
            put_part(Part::Query, kv_head * heads.group() + i, rows);
        }
        put_part(Part::Key, kv_head, &scratch.key);
        put_part(Part::Value, kv_head, &scratch.value);
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
    scratch.key.fill(0.0);
    scratch.value.fill(0.0);
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
    let d_value = MatMut::row_major(&mut scratch.value[..end * dim], end, dim);
    matmul_serial(d_value, p, d_out.rows(first, count, dim), 1.0, WriteMode::Add);
    let d_query = &mut scratch.query[(i * len + first) * dim..][..count * dim];
    matmul_serial(MatMut::row_major(d_query, count, dim), ds, k, 1.0, WriteMode::Overwrite);
    let d_key = MatMut::row_major(&mut scratch.key[..end * dim], end, dim);
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

/// Copies contiguous `rows` of `dim` to rows `stride` apart.
fn put(target: &mut [f32], stride: usize, rows: &[f32], dim: usize) {
    for (target, row) in target.chunks_mut(stride).zip(rows.chunks_exact(dim)) {
        target[..dim].copy_from_slice(row);
    }
}

/// Runs tasks on the threads of the current pool (on the calling thread where there is one), each thread with its own
/// scratch, and hands the results over in task order.
fn for_each_task<S: Send>(
    count: usize,
    scratch: impl Fn() -> S,
    run: impl Fn(usize, &mut S) + Sync,
    mut finish: impl FnMut(usize, &S),
) {
    let threads = rayon::current_num_threads().min(count);
    let mut scratches: Vec<S> = (0..threads).map(|_| scratch()).collect();
    for first in (0..count).step_by(threads.max(1)) {
        let wave = &mut scratches[..threads.min(count - first)];
        match &mut *wave {
            [only] => run(first, only),
            wave => wave.par_iter_mut().enumerate().for_each(|(i, scratch)| run(first + i, scratch)),
        }
        for (i, scratch) in wave.iter().enumerate() {
            finish(first + i, scratch);
        }
    }
}
