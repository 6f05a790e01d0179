//! Attention, norms and the loss against plain loops in double precision: the output, and the gradient by central
//! differences.

mod ops_common;

use ops_common::cases::flat;
use ops_common::{Array, Leaf, Random, assert_close, differentiate, ids, upstream};

use burn::tensor::Tensor;
use shardwise_burn::ops::{self, AttentionHeads};

const TOLERANCE: f32 = 2e-6;

fn compare(
    what: &str,
    inputs: &[Array],
    op: impl Fn(&[Leaf]) -> Tensor<1>,
    plain: impl Fn(&[Vec<f64>]) -> Vec<f64>,
) {
    let found = differentiate(inputs, op);
    let mut wide: Vec<Vec<f64>> =
        inputs.iter().map(|a| a.values.iter().map(|&x| f64::from(x)).collect()).collect();
    let output: Vec<f32> = plain(&wide).into_iter().map(|y| y as f32).collect();
    assert_close(&format!("{what}, output"), &found.output, &output, TOLERANCE);

    let weights = upstream(output.len());
    let loss = |inputs: &[Vec<f64>]| -> f64 {
        plain(inputs).iter().zip(&weights).map(|(y, &w)| y * f64::from(w)).sum()
    };
    for input in 0..inputs.len() {
        let gradient: Vec<f32> = (0..wide[input].len())
            .map(|i| {
                let (x, step) = (wide[input][i], 1e-5);
                wide[input][i] = x + step;
                let above = loss(&wide);
                wide[input][i] = x - step;
                let below = loss(&wide);
                wide[input][i] = x;
                ((above - below) / (2.0 * step)) as f32
            })
            .collect();
        let found = found.gradients[input].as_ref().expect("a gradient");
        assert_close(&format!("{what}, gradient {input}"), found, &gradient, TOLERANCE);
    }
}

/// Row `t` of head `h` in `[batch, len, heads * dim]`.
fn row(x: &[f64], width: usize, dim: usize, [t, h]: [usize; 2]) -> &[f64] {
    &x[t * width + h * dim..][..dim]
}

fn attention(q: &[f64], k: &[f64], v: &[f64], len: usize, heads: AttentionHeads) -> Vec<f64> {
    let AttentionHeads { num_heads, num_kv_heads, head_dim } = heads;
    let (q_width, k_width) = (num_heads * head_dim, num_kv_heads * head_dim);
    let mut out = vec![0.0; q.len()];
    for token in 0..q.len() / q_width {
        let first = token / len * len;
        for head in 0..num_heads {
            let kv_head = head / (num_heads / num_kv_heads);
            let q = row(q, q_width, head_dim, [token, head]);
            let scores: Vec<f64> = (first..=token)
                .map(|t| {
                    q.iter().zip(row(k, k_width, head_dim, [t, kv_head])).map(|(q, k)| q * k).sum::<f64>()
                })
                .map(|score| score / (head_dim as f64).sqrt())
                .collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
            let out = &mut out[token * q_width + head * head_dim..][..head_dim];
            for (t, score) in (first..).zip(&scores) {
                let p = (score - max).exp() / sum;
                out.iter_mut().zip(row(v, k_width, head_dim, [t, kv_head])).for_each(|(o, v)| *o += p * v);
            }
        }
    }
    out
}

#[test]
fn causal_attention() {
    for (num_heads, num_kv_heads, head_dim, len) in [(1, 1, 1, 2), (2, 2, 3, 5), (6, 2, 3, 7), (2, 1, 2, 65)]
    {
        let heads = AttentionHeads { num_heads, num_kv_heads, head_dim };
        let mut random = Random::new(1);
        let mut array = |heads: usize| {
            let mut array = random.array(&[2, len, heads * head_dim]);
            array.values.iter_mut().for_each(|x| *x *= 3.0);
            array
        };
        let inputs = [array(num_heads), array(num_kv_heads), array(num_kv_heads)];
        compare(
            &format!("{heads:?}, {len} tokens"),
            &inputs,
            |i| flat(ops::causal_attention(i[0].get(), i[1].get(), i[2].get(), heads)),
            |i| attention(&i[0], &i[1], &i[2], len, heads),
        );
    }
}

#[test]
fn causal_attention_packed() {
    let (num_heads, head_dim, len) = (2, 3, 6);
    let heads = AttentionHeads { num_heads, num_kv_heads: num_heads, head_dim };
    let part = |x: &[f64], i: usize| -> Vec<f64> {
        x.chunks(18).flat_map(|row| row[i * 6..(i + 1) * 6].iter().copied()).collect()
    };
    compare(
        "packed",
        &[Random::new(2).array(&[2, len, 3 * num_heads * head_dim])],
        |i| flat(ops::causal_attention_packed(i[0].get(), num_heads)),
        |i| attention(&part(&i[0], 0), &part(&i[0], 1), &part(&i[0], 2), len, heads),
    );
}

fn normalise(x: &[f64], gamma: &[f64], beta: &[f64], centre: bool) -> Vec<f64> {
    let count = gamma.len() as f64;
    let normalise_row = |x: &[f64]| -> Vec<f64> {
        let mean = if centre { x.iter().sum::<f64>() / count } else { 0.0 };
        let deviation = (x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count + 1e-5).sqrt();
        x.iter().zip(gamma).zip(beta).map(|((x, g), b)| (x - mean) / deviation * g + b).collect()
    };
    x.chunks(gamma.len()).flat_map(normalise_row).collect()
}

#[test]
fn norms() {
    for width in [2, 3, 33, 65] {
        let mut random = Random::new(3);
        let inputs = [random.array(&[3, width]), random.array(&[width]), random.array(&[width])];
        compare(
            &format!("layer norm of {width}"),
            &inputs,
            |i| flat(ops::layer_norm(i[0].get::<2>(), i[1].get(), Some(i[2].get()), 1e-5)),
            |i| normalise(&i[0], &i[1], &i[2], true),
        );
        compare(
            &format!("root-mean-square norm of {width}"),
            &inputs[..2],
            |i| flat(ops::rms_norm(i[0].get::<2>(), i[1].get(), 1e-5)),
            |i| normalise(&i[0], &i[1], &vec![0.0; width], false),
        );
    }
}

#[test]
fn cross_entropy() {
    for vocabulary in [2, 33, 65] {
        let targets = Random::new(4).ids(5, vocabulary);
        let mut logits = Random::new(5).array(&[5, vocabulary]);
        logits.values.iter_mut().for_each(|x| *x *= 10.0);
        let plain = |i: &[Vec<f64>]| {
            let loss = |(row, &target): (&[f64], &i64)| {
                let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                row.iter().map(|x| (x - max).exp()).sum::<f64>().ln() + max - row[target as usize]
            };
            vec![i[0].chunks(vocabulary).zip(&targets).map(loss).sum::<f64>() / 5.0]
        };
        compare(
            &format!("{vocabulary} classes"),
            &[logits],
            |i| ops::cross_entropy(i[0].get::<2>(), ids(&targets, [5])),
            plain,
        );
    }
}

#[test]
fn cross_entropy_of_extreme_logits() {
    let logits = |values: [f32; 3]| Array { dims: vec![1, 3], values: values.to_vec() };
    let loss = |values: [f32; 3]| {
        let outcome =
            differentiate(&[logits(values)], |i| ops::cross_entropy(i[0].get::<2>(), ids(&[0], [1])));
        (outcome.output[0], outcome.gradients[0].clone().unwrap())
    };
    let (value, gradient) = loss([3e38, -3e38, 0.0]);
    assert_eq!((value, gradient), (0.0, vec![0.0; 3]));
    let (value, gradient) = loss([0.0, f32::NEG_INFINITY, 0.0]);
    assert!((value - 2.0_f32.ln()).abs() < 1e-7 && gradient[1] == 0.0);
    assert!(loss([f32::NAN, 0.0, 0.0]).0.is_nan());
    assert!(loss([0.0, f32::NAN, 0.0]).0.is_nan());
}
