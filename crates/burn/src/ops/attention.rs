//! Causal attention as a single operation.

use burn::Tensor;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::flex::FlexTensor;
use burn::backend::{Flex, TensorMetadata};

use super::fused::{Inputs, Tape, contiguous, elements, tensor};
use super::reference;
use crate::kernels::attention::{self as kernel, AttentionHeads, Problem};

/// Causal attention of grouped heads: `softmax(q k^T / sqrt(head_dim)) v`, where token `t` sees tokens `0..=t`.
///
/// Query head `i` reads key head `i / (num_heads / num_kv_heads)` (grouped-query attention: Ainslie et al.,
/// arXiv:2305.13245). Method: FlashAttention (Dao et al., arXiv:2205.14135): no score outlives its block.
///
/// # Shapes
/// `q` and the result: `[batch, len, num_heads * head_dim]`; `k` and `v`: `[batch, len, num_kv_heads * head_dim]`.
///
/// # Panics
/// If the shapes do not fit.
pub fn causal_attention(q: Tensor<3>, k: Tensor<3>, v: Tensor<3>, heads: AttentionHeads) -> Tensor<3> {
    let AttentionHeads { num_heads, num_kv_heads, head_dim } = heads;
    let [batch, len, _] = q.dims();
    for (name, x, width) in [("q", &q, num_heads), ("k", &k, num_kv_heads), ("v", &v, num_kv_heads)] {
        assert_eq!(x.dims(), [batch, len, width * head_dim], "attention: the shape of {name} for {heads:?}");
    }
    match Inputs::new([q.into_dispatch(), k.into_dispatch(), v.into_dispatch()], []) {
        Inputs::Fused(inputs, [], tape) => fused(Problem { batch, len, heads, packed: false }, inputs, tape),
        Inputs::Other([q, k, v], []) => {
            let [q, k, v] = [q, k, v].map(Tensor::from_dispatch);
            reference::causal_attention(q, k, v, heads)
        }
    }
}

/// [`causal_attention`] on rows `[q | k | v]` of `num_heads` heads each, with no copy of the parts.
///
/// # Shapes
/// `qkv`: `[batch, len, 3 * num_heads * head_dim]`; the result: `[batch, len, num_heads * head_dim]`.
///
/// # Panics
/// If the columns do not divide into three times `num_heads` heads.
pub fn causal_attention_packed(qkv: Tensor<3>, num_heads: usize) -> Tensor<3> {
    let [batch, len, width] = qkv.dims();
    assert!(
        num_heads > 0 && width.is_multiple_of(3 * num_heads),
        "attention: {width} columns do not divide into q, k and v of {num_heads} heads"
    );
    let heads = AttentionHeads { num_heads, num_kv_heads: num_heads, head_dim: width / 3 / num_heads };
    match Inputs::new([qkv.into_dispatch()], []) {
        Inputs::Fused(inputs, [], tape) => fused(Problem { batch, len, heads, packed: true }, inputs, tape),
        Inputs::Other([qkv], []) => reference::causal_attention_packed(Tensor::from_dispatch(qkv), num_heads),
    }
}

fn fused<const N: usize>(problem: Problem, inputs: [FlexTensor; N], tape: Tape) -> Tensor<3> {
    let Problem { batch, len, heads, .. } = problem;
    let (out, lse) = kernel::forward(problem, &inputs.each_ref().map(elements));
    let out = tensor(out, &[batch, len, heads.num_heads * heads.head_dim]);
    let saved = out.clone();
    tape.finish(CausalAttention, out, |_| State { problem, inputs, out: saved, lse })
}

/// The backward step; its parents are the inputs: queries, keys and values, or the packed rows.
#[derive(Debug)]
struct CausalAttention;

#[derive(Clone, Debug)]
struct State<const N: usize> {
    problem: Problem,
    inputs: [FlexTensor; N],
    out: FlexTensor,
    lse: Vec<f32>,
}

impl<const N: usize> Backward<Flex, N> for CausalAttention {
    type State = State<N>;

    fn backward(self, ops: Ops<State<N>, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let d_out = contiguous(grads.consume::<Flex>(&ops.node));
        let State { problem, inputs, out, lse } = ops.state;
        let d_inputs = kernel::backward(kernel::Saved {
            problem,
            buffers: &inputs.each_ref().map(elements),
            out: elements(&out),
            lse: &lse,
            d_out: elements(&d_out),
        });
        for ((node, input), gradient) in ops.parents.into_iter().zip(&inputs).zip(d_inputs) {
            if let Some(node) = node {
                grads.register::<Flex>(node.id, tensor(gradient, &input.shape()));
            }
        }
    }
}
