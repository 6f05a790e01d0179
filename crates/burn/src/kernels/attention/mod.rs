//! Causal attention by blocks of queries, and its gradient, over strided rows: no transpose or split of the heads.
//!
//! After FlashAttention (Dao et al., arXiv:2205.14135): a block of queries meets only the keys up to its last query;
//! forward keeps the output and each query's log-sum-exp, and backward recomputes the probabilities from them.

mod backward;
mod forward;
mod problem;

use rayon::prelude::*;

pub use backward::{Saved, backward};
pub use forward::forward;
pub use problem::{AttentionHeads, Problem};

use super::matmul::{MatMut, MatRef, matmul_serial};
use crate::sink::WriteMode;

/// Queries whose scores are alive at a time: eight tiles of the product's microkernel, and few enough that it does not
/// pack its other operand.
const BLOCK: usize = 48;

/// Writes the scores of a block of queries, `scale q keys`, over `p`, contiguous.
fn scores(p: &mut [f32], q: MatRef<'_>, keys: MatRef<'_>, scale: f32) {
    let (count, end) = (q.rows(), keys.cols());
    matmul_serial(MatMut::row_major(p, count, end), q, keys, scale, WriteMode::Overwrite);
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
