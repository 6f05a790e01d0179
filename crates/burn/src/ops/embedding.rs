//! Embedding lookups as single operations, whose gradients go row by row into the table's.

use burn::Tensor;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::{Flex, TensorMetadata};
use burn::tensor::Int;

use super::fused::{Inputs, Slot, contiguous, elements, indices, tensor};
use super::reference;
use crate::kernels::{embedding as kernel, rows};
use crate::sink::WriteMode;

/// The rows `ids` of `weight`.
///
/// # Shapes
/// `weight`: `[vocabulary, width]`; `ids`: `[batch, len]`; the result: `[batch, len, width]`.
///
/// # Panics
/// If an id is not in `0..vocabulary`.
pub fn embedding(weight: Tensor<2>, ids: Tensor<2, Int>) -> Tensor<3> {
    match Inputs::new([weight.into_dispatch()], []) {
        Inputs::Fused([weight], [], tape) => {
            let ([batch, len], width) = (ids.dims(), weight.shape()[1]);
            let ids = indices(ids);
            let y = tensor(kernel::gather(elements(&weight), width, &ids), &[batch, len, width]);
            tape.finish(Embedding, y, |tape| (ids, tape.slot(0, &weight.shape())))
        }
        Inputs::Other([weight], []) => reference::embedding(Tensor::from_dispatch(weight), ids),
    }
}

/// The backward step; its state is the ids and where the table's gradient goes.
#[derive(Debug)]
struct Embedding;

impl Backward<Flex, 1> for Embedding {
    type State = (Vec<usize>, Slot);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let [node] = ops.parents.map(|node| node.map(|node| node.id));
        let dy = contiguous(grads.consume::<Flex>(&ops.node));
        let (ids, slot) = ops.state;
        let width = slot.width();
        slot.deliver(node, grads, |window, mode| scatter(window, mode, (width, &ids), elements(&dy)));
    }
}

/// Adds the rows `dy` to the rows `ids` of a table's gradient, in token order.
fn scatter(window: &mut [f32], mode: WriteMode, (width, ids): (usize, &[usize]), dy: &[f32]) {
    if mode == WriteMode::Overwrite {
        window.fill(0.0);
    }
    kernel::scatter_add(window, width, ids, dy);
}

/// `tokens[id] + positions[t]` for the token at position `t` of each sequence.
///
/// # Shapes
/// `tokens`: `[vocabulary, width]`; `positions`: `[context, width]`; `ids`: `[batch, len]`; the result:
/// `[batch, len, width]`.
///
/// # Panics
/// If an id is not in `0..vocabulary`, or a sequence is longer than the context.
pub fn embedding_with_positions(tokens: Tensor<2>, positions: Tensor<2>, ids: Tensor<2, Int>) -> Tensor<3> {
    let ([batch, len], [context, width]) = (ids.dims(), positions.dims());
    assert!(len <= context, "embedding: a sequence of {len} tokens is longer than the context of {context}");
    assert_eq!(tokens.dims()[1], width, "embedding: tokens and positions must have one width");
    match Inputs::new([tokens.into_dispatch(), positions.into_dispatch()], []) {
        Inputs::Fused([tokens, positions], [], tape) => {
            let ids = indices(ids);
            let mut y = kernel::gather(elements(&tokens), width, &ids);
            let used = &elements(&positions)[..len * width];
            y.chunks_exact_mut(used.len().max(1)).for_each(|sequence| rows::add(sequence, used));
            let y = tensor(y, &[batch, len, width]);
            tape.finish(EmbeddingWithPositions, y, |tape| State {
                tokens: tape.slot(0, &tokens.shape()),
                positions: tape.slot(1, &positions.shape()),
                ids,
            })
        }
        Inputs::Other([tokens, positions], []) => {
            let (tokens, positions) = (Tensor::from_dispatch(tokens), Tensor::from_dispatch(positions));
            reference::embedding_with_positions(tokens, positions, ids)
        }
    }
}

/// The backward step; its parents are the two tables.
#[derive(Debug)]
struct EmbeddingWithPositions;

#[derive(Clone, Debug)]
struct State {
    tokens: Slot,
    positions: Slot,
    ids: Vec<usize>,
}

impl Backward<Flex, 2> for EmbeddingWithPositions {
    type State = State;

    fn backward(self, ops: Ops<State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let [tokens_node, positions_node] = ops.parents.map(|node| node.map(|node| node.id));
        let dy = contiguous(grads.consume::<Flex>(&ops.node));
        let State { tokens, positions, ids } = ops.state;
        let width = tokens.width();
        let dy_rows = elements(&dy);
        if positions_node.is_some() {
            let [_, len, _] = dy.shape().dims();
            let mut sum = vec![0.0; len * width];
            rows::sum_rows(dy_rows, &mut sum);
            positions.deliver(positions_node, grads, |window, mode| {
                let (used, unused) = window.split_at_mut(sum.len());
                match mode {
                    WriteMode::Overwrite => {
                        used.copy_from_slice(&sum);
                        unused.fill(0.0);
                    }
                    WriteMode::Add => rows::add(used, &sum),
                }
            });
        }
        tokens.deliver(tokens_node, grads, |window, mode| scatter(window, mode, (width, &ids), dy_rows));
    }
}
