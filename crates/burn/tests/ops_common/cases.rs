//! One small example of every operation that can run fused, for tests of what they have in common.

use burn::tensor::Tensor;
use shardwise_burn::ops::{self, AttentionHeads};

use super::{Array, Leaf, Mode, Random, ids};

/// An operation whose output is flattened.
pub(crate) type Op = Box<dyn Fn(&[Leaf]) -> Tensor<1> + Sync>;

/// An operation with inputs. Sizes are no multiple of any block.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) inputs: Vec<Array>,
    /// The inputs that are parameters: their gradients may go to a sink.
    pub(crate) parameters: Vec<usize>,
    pub(crate) op: Op,
}

/// The tensor as one row.
pub(crate) fn flat<const D: usize>(x: Tensor<D>) -> Tensor<1> {
    let count = x.shape().num_elements();
    x.reshape([count])
}

/// Every operation, with values drawn from `seed`.
pub(crate) fn cases(seed: u64) -> Vec<Case> {
    let mut random = Random::new(seed);
    let mut case = |name, dims: &[&[usize]], parameters: &[usize], op: Op| Case {
        name,
        inputs: dims.iter().map(|dims| random.array(dims)).collect(),
        parameters: parameters.to_vec(),
        op,
    };
    let tokens = ids(&Random::new(99).ids(2 * 21, 13), [2, 21]);
    let positioned = tokens.clone();
    let targets = ids(&Random::new(98).ids(2 * 3, 37), [2, 3]);
    let heads = AttentionHeads { num_heads: 4, num_kv_heads: 2, head_dim: 5 };
    vec![
        case(
            "linear",
            &[&[2, 5, 17], &[17, 33], &[33]],
            &[1, 2],
            Box::new(|i| flat(ops::linear(i[0].get::<3>(), i[1].get(), Some(i[2].get())))),
        ),
        case(
            "linear to a multiple of 512 columns",
            &[&[2, 33, 7], &[7, 512]],
            &[1],
            Box::new(|i| flat(ops::linear(i[0].get::<3>(), i[1].get(), None))),
        ),
        case(
            "linear with a long sum and many rows of the weight",
            &[&[600, 300], &[300, 9]],
            &[1],
            Box::new(|i| flat(ops::linear(i[0].get::<2>(), i[1].get(), None))),
        ),
        case(
            "linear_residual",
            &[&[2, 5, 17], &[17, 33], &[33], &[2, 5, 33]],
            &[1, 2],
            Box::new(|i| {
                flat(ops::linear_residual(i[0].get::<3>(), i[1].get(), Some(i[2].get()), i[3].get()))
            }),
        ),
        case(
            "linear_transposed",
            &[&[2, 5, 17], &[65, 17]],
            &[1],
            Box::new(|i| flat(ops::linear_transposed(i[0].get::<3>(), i[1].get()))),
        ),
        case("gelu_tanh", &[&[2, 1031]], &[], Box::new(|i| flat(ops::gelu_tanh(i[0].get::<2>())))),
        case(
            "silu_mul",
            &[&[3, 35], &[3, 35]],
            &[],
            Box::new(|i| flat(ops::silu_mul(i[0].get::<2>(), i[1].get()))),
        ),
        case(
            "layer_norm",
            &[&[3, 5, 35], &[35], &[35]],
            &[1, 2],
            Box::new(|i| flat(ops::layer_norm(i[0].get::<3>(), i[1].get(), Some(i[2].get()), 1e-5))),
        ),
        case(
            "rms_norm",
            &[&[3, 5, 35], &[35]],
            &[1],
            Box::new(|i| flat(ops::rms_norm(i[0].get::<3>(), i[1].get(), 1e-5))),
        ),
        case(
            "causal_attention",
            &[&[2, 65, 20], &[2, 65, 10], &[2, 65, 10]],
            &[],
            Box::new(move |i| flat(ops::causal_attention(i[0].get(), i[1].get(), i[2].get(), heads))),
        ),
        case(
            "causal_attention_packed",
            &[&[2, 50, 3 * 2 * 7]],
            &[],
            Box::new(|i| flat(ops::causal_attention_packed(i[0].get(), 2))),
        ),
        case(
            "rotary",
            &[&[2, 5, 3 * 6]],
            &[],
            Box::new(|i| {
                let [cos, sin] =
                    [1, 2].map(|seed| Random::new(seed).array(&[5, 3]).tensor(&Mode::Plain.device()));
                flat(ops::rotary(i[0].get(), &cos, &sin, 6))
            }),
        ),
        case(
            "embedding",
            &[&[13, 19]],
            &[0],
            Box::new(move |i| flat(ops::embedding(i[0].get(), tokens.clone()))),
        ),
        case(
            "embedding_with_positions",
            &[&[13, 19], &[30, 19]],
            &[0, 1],
            Box::new(move |i| {
                flat(ops::embedding_with_positions(i[0].get(), i[1].get(), positioned.clone()))
            }),
        ),
        case(
            "cross_entropy",
            &[&[2, 3, 37]],
            &[],
            Box::new(move |i| ops::cross_entropy(i[0].get::<3>(), targets.clone())),
        ),
    ]
}
