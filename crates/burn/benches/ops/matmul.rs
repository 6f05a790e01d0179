//! The matrix products of a training step alone: how much of a step no fusion can remove.

use shardwise_burn::kernels::matmul::{MatMut, MatRef, matmul};
use shardwise_burn::sink::WriteMode;

use super::medians;

pub(super) fn run() {
    let tokens = 512;
    for (d_in, d_out) in [(384, 1152), (384, 384), (384, 1536), (1536, 384), (384, 4096)] {
        let x = vec![0.5; tokens * d_in];
        let w = vec![0.25; d_in * d_out];
        let dy = vec![0.125; tokens * d_out];
        let (mut y, mut dw, mut dx) = (dy.clone(), w.clone(), x.clone());
        let (x, w, dy) = (
            MatRef::row_major(&x, tokens, d_in),
            MatRef::row_major(&w, d_in, d_out),
            MatRef::row_major(&dy, tokens, d_out),
        );
        let mut forward = || matmul(MatMut::row_major(&mut y, tokens, d_out), x, w, WriteMode::Overwrite);
        let mut weight =
            || matmul(MatMut::row_major(&mut dw, d_in, d_out), x.transposed(), dy, WriteMode::Overwrite);
        let mut input =
            || matmul(MatMut::row_major(&mut dx, tokens, d_in), dy, w.transposed(), WriteMode::Overwrite);
        let rates = medians(31, [&mut forward, &mut weight, &mut input])
            .map(|seconds| 2e-9 * (tokens * d_in * d_out) as f64 / seconds);
        println!(
            "{tokens} x {d_in:4} by {d_in:4} x {d_out:4}: y {:5.0}, dW {:5.0}, dx {:5.0} GFLOP/s",
            rates[0], rates[1], rates[2]
        );
    }
}
