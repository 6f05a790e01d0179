//! The same operations written with Burn's own: what a fused operation falls back to, and what it is tested against.

use burn::prelude::*;
use burn::tensor::module::{self, attention};
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Int, activation};

use super::AttentionHeads;

/// `x W + b`; see [`super::linear`].
pub fn linear<const D: usize>(x: Tensor<D>, weight: Tensor<2>, bias: Option<Tensor<1>>) -> Tensor<D> {
    module::linear(x, weight, bias)
}

/// `residual + x W + b`; see [`super::linear_residual`].
pub fn linear_residual<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    residual: Tensor<D>,
) -> Tensor<D> {
    residual + linear(x, weight, bias)
}

/// `x W^T`; see [`super::linear_transposed`].
pub fn linear_transposed<const D: usize>(x: Tensor<D>, weight: Tensor<2>) -> Tensor<D> {
    linear(x, weight.transpose(), None)
}

/// The GELU with the tanh approximation; see [`super::gelu_tanh`].
pub fn gelu_tanh<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    activation::gelu_approximate(x)
}

/// `silu(gate) * up`; see [`super::silu_mul`].
pub fn silu_mul<const D: usize>(gate: Tensor<D>, up: Tensor<D>) -> Tensor<D> {
    activation::silu(gate) * up
}

/// Layer normalisation over the last axis; see [`super::layer_norm`].
pub fn layer_norm<const D: usize>(
    x: Tensor<D>,
    gamma: Tensor<1>,
    beta: Option<Tensor<1>>,
    eps: f64,
) -> Tensor<D> {
    module::layer_norm(x, gamma, beta, eps)
}

/// Root-mean-square normalisation over the last axis; see [`super::rms_norm`].
pub fn rms_norm<const D: usize>(x: Tensor<D>, gamma: Tensor<1>, eps: f64) -> Tensor<D> {
    let rms = (x.clone().square().mean_dim(D - 1) + eps).sqrt();
    (x / rms) * gamma.unsqueeze()
}

/// Causal grouped-query attention; see [`super::causal_attention`].
pub fn causal_attention(q: Tensor<3>, k: Tensor<3>, v: Tensor<3>, heads: AttentionHeads) -> Tensor<3> {
    let [b, t, _] = q.dims();
    let AttentionHeads { num_heads, num_kv_heads, head_dim } = heads;
    let group = num_heads / num_kv_heads;
    let split = |x: Tensor<3>, heads: usize| x.reshape([b, t, heads, head_dim]).swap_dims(1, 2);
    let spread = |x: Tensor<3>| {
        let x: Tensor<5> = split(x, num_kv_heads).unsqueeze_dim(2);
        x.repeat_dim(2, group).reshape([b, num_heads, t, head_dim])
    };
    let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
    let o = attention(split(q, num_heads), spread(k), spread(v), None, None, options);
    o.swap_dims(1, 2).reshape([b, t, num_heads * head_dim])
}

/// Causal attention on packed rows `[q | k | v]`; see [`super::causal_attention_packed`].
pub fn causal_attention_packed(qkv: Tensor<3>, num_heads: usize) -> Tensor<3> {
    let [_, _, width] = qkv.dims();
    let d = width / 3;
    let part = |i: usize| qkv.clone().narrow(2, i * d, d);
    let heads = AttentionHeads { num_heads, num_kv_heads: num_heads, head_dim: d / num_heads };
    causal_attention(part(0), part(1), part(2), heads)
}

/// Rotary position embedding in the rotate-half convention; see [`super::rotary`].
pub fn rotary(x: Tensor<3>, cos: &Tensor<2>, sin: &Tensor<2>, head_dim: usize) -> Tensor<3> {
    let [b, t, width] = x.dims();
    let half = head_dim / 2;
    let x = x.reshape([b, t, width / head_dim, head_dim]);
    let (low, high) = (x.clone().narrow(3, 0, half), x.narrow(3, half, half));
    let cos = cos.clone().reshape([1, t, 1, half]);
    let sin = sin.clone().reshape([1, t, 1, half]);
    let rotated =
        Tensor::cat(vec![low.clone() * cos.clone() - high.clone() * sin.clone(), high * cos + low * sin], 3);
    rotated.reshape([b, t, width])
}

/// Rows of a table; see [`super::embedding`].
pub fn embedding(weight: Tensor<2>, ids: Tensor<2, Int>) -> Tensor<3> {
    module::embedding(weight, ids)
}

/// Token plus position rows; see [`super::embedding_with_positions`].
pub fn embedding_with_positions(tokens: Tensor<2>, positions: Tensor<2>, ids: Tensor<2, Int>) -> Tensor<3> {
    let [_, t] = ids.dims();
    embedding(tokens, ids) + positions.narrow(0, 0, t).unsqueeze()
}

/// Mean cross entropy over tokens; see [`super::cross_entropy`].
pub fn cross_entropy<const D: usize, const E: usize>(
    logits: Tensor<D>,
    targets: Tensor<E, Int>,
) -> Tensor<1> {
    let vocab = logits.dims()[D - 1];
    let rows = targets.shape().num_elements();
    let logits: Tensor<2> = logits.reshape([rows, vocab]);
    let targets = targets.reshape([rows, 1]);
    activation::log_softmax(logits, 1).gather(1, targets).reshape([rows]).mean().neg()
}
