//! Every fused operation against Burn's own: the output and every gradient.

mod ops_common;

use burn::tensor::Tensor;
use ops_common::cases::flat;
use ops_common::{Array, Leaf, Random, assert_outcomes_close, differentiate, ids};
use shardwise_burn::ops::{self, AttentionHeads, reference};

const TOLERANCE: f32 = 2e-6;

/// Sizes around the blocks of the kernels. (A norm over one element has a gradient of rounding errors.)
const WIDTHS: [usize; 8] = [1, 3, 16, 17, 64, 65, 100, 384];

fn compare(
    what: &str,
    inputs: &[Array],
    fused: impl Fn(&[Leaf]) -> Tensor<1>,
    burn: impl Fn(&[Leaf]) -> Tensor<1>,
) {
    let (found, expected) = (differentiate(inputs, fused), differentiate(inputs, burn));
    assert_outcomes_close(what, &found, &expected, TOLERANCE);
}

#[test]
fn gelu_tanh() {
    for width in WIDTHS {
        let mut x = Random::new(1).array(&[2, 5, width]);
        x.values.iter_mut().for_each(|x| *x *= 6.0);
        compare(
            &format!("width {width}"),
            &[x],
            |i| flat(ops::gelu_tanh(i[0].get::<3>())),
            |i| flat(reference::gelu_tanh(i[0].get::<3>())),
        );
    }
}

#[test]
fn silu_mul() {
    for width in WIDTHS {
        let mut random = Random::new(2);
        let mut gate = random.array(&[3, width]);
        gate.values.iter_mut().for_each(|x| *x *= 6.0);
        compare(
            &format!("width {width}"),
            &[gate, random.array(&[3, width])],
            |i| flat(ops::silu_mul(i[0].get::<2>(), i[1].get())),
            |i| flat(reference::silu_mul(i[0].get::<2>(), i[1].get())),
        );
    }
}

#[test]
fn linear() {
    for (d_in, d_out) in [(1, 1), (1, 3), (3, 1), (3, 16), (17, 64), (64, 17), (65, 100), (600, 5)] {
        for rows in [1, 3, 65] {
            let mut random = Random::new(3);
            let inputs =
                [random.array(&[2, rows, d_in]), random.array(&[d_in, d_out]), random.array(&[d_out])];
            let what = format!("{rows} rows, {d_in} to {d_out}");
            compare(
                &what,
                &inputs,
                |i| flat(ops::linear(i[0].get::<3>(), i[1].get(), Some(i[2].get()))),
                |i| flat(reference::linear(i[0].get::<3>(), i[1].get(), Some(i[2].get()))),
            );
            compare(
                &format!("{what}, no bias"),
                &inputs[..2],
                |i| flat(ops::linear(i[0].get::<3>(), i[1].get(), None)),
                |i| flat(reference::linear(i[0].get::<3>(), i[1].get(), None)),
            );
        }
    }
}

#[test]
fn linear_residual() {
    for (d_in, d_out) in [(1, 3), (17, 64), (65, 100)] {
        let mut random = Random::new(4);
        let inputs = [
            random.array(&[2, 5, d_in]),
            random.array(&[d_in, d_out]),
            random.array(&[2, 5, d_out]),
            random.array(&[d_out]),
        ];
        let what = format!("{d_in} to {d_out}");
        compare(
            &what,
            &inputs,
            |i| flat(ops::linear_residual(i[0].get::<3>(), i[1].get(), Some(i[3].get()), i[2].get())),
            |i| flat(reference::linear_residual(i[0].get::<3>(), i[1].get(), Some(i[3].get()), i[2].get())),
        );
        compare(
            &format!("{what}, no bias"),
            &inputs[..3],
            |i| flat(ops::linear_residual(i[0].get::<3>(), i[1].get(), None, i[2].get())),
            |i| flat(reference::linear_residual(i[0].get::<3>(), i[1].get(), None, i[2].get())),
        );
    }
}

#[test]
fn linear_transposed() {
    for (d_in, d_out) in [(1, 3), (3, 1), (17, 64), (64, 300), (65, 1000)] {
        let mut random = Random::new(5);
        let inputs = [random.array(&[2, 33, d_in]), random.array(&[d_out, d_in])];
        compare(
            &format!("{d_in} to {d_out}"),
            &inputs,
            |i| flat(ops::linear_transposed(i[0].get::<3>(), i[1].get())),
            |i| flat(reference::linear_transposed(i[0].get::<3>(), i[1].get())),
        );
    }
}

#[test]
fn layer_norm() {
    for width in WIDTHS.into_iter().filter(|&width| width > 1) {
        let mut random = Random::new(6);
        let inputs = [random.array(&[2, 5, width]), random.array(&[width]), random.array(&[width])];
        compare(
            &format!("width {width}"),
            &inputs,
            |i| flat(ops::layer_norm(i[0].get::<3>(), i[1].get(), Some(i[2].get()), 1e-5)),
            |i| flat(reference::layer_norm(i[0].get::<3>(), i[1].get(), Some(i[2].get()), 1e-5)),
        );
        compare(
            &format!("width {width}, no beta"),
            &inputs[..2],
            |i| flat(ops::layer_norm(i[0].get::<3>(), i[1].get(), None, 1e-5)),
            |i| flat(reference::layer_norm(i[0].get::<3>(), i[1].get(), None, 1e-5)),
        );
    }
}

#[test]
fn rms_norm() {
    for width in WIDTHS.into_iter().filter(|&width| width > 1) {
        let mut random = Random::new(7);
        let inputs = [random.array(&[2, 5, width]), random.array(&[width])];
        compare(
            &format!("width {width}"),
            &inputs,
            |i| flat(ops::rms_norm(i[0].get::<3>(), i[1].get(), 1e-5)),
            |i| flat(reference::rms_norm(i[0].get::<3>(), i[1].get(), 1e-5)),
        );
    }
}

#[test]
fn causal_attention() {
    let shapes = [(1, 1, 1), (1, 1, 3), (2, 2, 16), (4, 2, 17), (6, 1, 8), (4, 4, 64)];
    for (num_heads, num_kv_heads, head_dim) in shapes {
        let heads = AttentionHeads { num_heads, num_kv_heads, head_dim };
        for len in [1, 2, 63, 64, 65, 100] {
            let mut random = Random::new(8);
            let (q, k) = (num_heads * head_dim, num_kv_heads * head_dim);
            let inputs = [random.array(&[2, len, q]), random.array(&[2, len, k]), random.array(&[2, len, k])];
            compare(
                &format!("{heads:?}, {len} tokens"),
                &inputs,
                |i| flat(ops::causal_attention(i[0].get(), i[1].get(), i[2].get(), heads)),
                |i| flat(reference::causal_attention(i[0].get(), i[1].get(), i[2].get(), heads)),
            );
        }
    }
}

#[test]
fn causal_attention_packed() {
    for (num_heads, head_dim, len) in [(1, 1, 2), (3, 16, 65), (2, 64, 130)] {
        let qkv = Random::new(9).array(&[2, len, 3 * num_heads * head_dim]);
        compare(
            &format!("{num_heads} heads of {head_dim}, {len} tokens"),
            &[qkv],
            |i| flat(ops::causal_attention_packed(i[0].get(), num_heads)),
            |i| flat(reference::causal_attention_packed(i[0].get(), num_heads)),
        );
    }
}

#[test]
fn rotary() {
    for (heads, head_dim, len) in [(1, 2, 1), (3, 6, 5), (2, 64, 65)] {
        let mut random = Random::new(10);
        let inputs = [random.array(&[2, len, heads * head_dim])];
        let tables = [random.array(&[len, head_dim / 2]), random.array(&[len, head_dim / 2])];
        let [cos, sin] = tables.map(|t| t.tensor::<2>(&ops_common::Mode::Constant.device()));
        compare(
            &format!("{heads} heads of {head_dim}, {len} tokens"),
            &inputs,
            |i| flat(ops::rotary(i[0].get(), &cos, &sin, head_dim)),
            |i| flat(reference::rotary(i[0].get(), &cos, &sin, head_dim)),
        );
    }
}

#[test]
fn embedding() {
    for (rows, width) in [(1, 1), (7, 3), (50, 17), (100, 64)] {
        let mut random = Random::new(11);
        let tokens = random.ids(2 * 33, rows);
        let ids = ids(&tokens, [2, 33]);
        compare(
            &format!("{rows} rows of {width}"),
            &[random.array(&[rows, width])],
            |i| flat(ops::embedding(i[0].get(), ids.clone())),
            |i| flat(reference::embedding(i[0].get(), ids.clone())),
        );
    }
}

#[test]
fn embedding_with_positions() {
    for (len, context, width) in [(1, 1, 1), (5, 8, 17), (64, 64, 3)] {
        let mut random = Random::new(12);
        let tokens = random.ids(3 * len, 11);
        let ids = ids(&tokens, [3, len]);
        compare(
            &format!("{len} of {context} tokens, width {width}"),
            &[random.array(&[11, width]), random.array(&[context, width])],
            |i| flat(ops::embedding_with_positions(i[0].get(), i[1].get(), ids.clone())),
            |i| flat(reference::embedding_with_positions(i[0].get(), i[1].get(), ids.clone())),
        );
    }
}

#[test]
fn cross_entropy() {
    for vocabulary in [1, 2, 17, 100, 2049, 5000] {
        let mut random = Random::new(13);
        let targets = random.ids(2 * 3, vocabulary);
        let mut logits = random.array(&[2, 3, vocabulary]);
        logits.values.iter_mut().for_each(|x| *x *= 8.0);
        compare(
            &format!("{vocabulary} classes"),
            &[logits.clone()],
            |i| ops::cross_entropy(i[0].get::<3>(), ids(&targets, [2, 3])),
            |i| reference::cross_entropy(i[0].get::<3>(), ids(&targets, [2, 3])),
        );
        compare(
            &format!("{vocabulary} classes, rank 2"),
            &[Array { dims: vec![6, vocabulary], ..logits }],
            |i| ops::cross_entropy(i[0].get::<2>(), ids(&targets, [6])),
            |i| reference::cross_entropy(i[0].get::<2>(), ids(&targets, [6])),
        );
    }
}
