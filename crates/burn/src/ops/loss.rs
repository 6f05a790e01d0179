//! Cross entropy as a single operation that keeps one buffer of logits.

use burn::Tensor;
use burn::backend::Flex;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::flex::FlexTensor;
use burn::tensor::Int;

use super::fused::{Inputs, elements, indices, tensor, update};
use super::reference;
use crate::kernels::{loss as kernel, rows};

/// The mean over tokens of `log(sum(exp(logits))) - logits[target]`, as a tensor of one element.
///
/// The log-sum-exp subtracts the row's maximum; the mean is accumulated in double precision. Where a gradient is
/// needed, the logits' storage becomes the gradient at once, unless something else holds it: pass the logits by value
/// and keep no clone.
///
/// # Shapes
/// `logits`: `[.., vocabulary]`; `targets`: the same without the last axis.
///
/// # Panics
/// If the shapes do not fit, or a target is not in `0..vocabulary`.
pub fn cross_entropy<const D: usize, const E: usize>(
    logits: Tensor<D>,
    targets: Tensor<E, Int>,
) -> Tensor<1> {
    assert_eq!(
        logits.dims()[..D - 1],
        targets.dims()[..],
        "cross entropy: one target for each row of logits"
    );
    match Inputs::new([logits.into_dispatch()], []) {
        Inputs::Fused([logits], [], tape) => {
            let targets = indices(targets);
            if !tape.is_recording() {
                let loss = kernel::cross_entropy(elements(&logits), &targets);
                return tape.finish(CrossEntropy, tensor(vec![loss as f32], &[1]), |_| logits);
            }
            let mut loss = 0.0;
            let gradient = update(logits, |logits| {
                loss = kernel::cross_entropy_with_gradient(logits, &targets);
            });
            tape.finish(CrossEntropy, tensor(vec![loss as f32], &[1]), |_| gradient)
        }
        Inputs::Other([logits], []) => reference::cross_entropy(Tensor::<D>::from_dispatch(logits), targets),
    }
}

/// The backward step; its state is the logits' gradient for an upstream gradient of one.
#[derive(Debug)]
struct CrossEntropy;

impl Backward<Flex, 1> for CrossEntropy {
    type State = FlexTensor;

    fn backward(self, ops: Ops<FlexTensor, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let factor = elements(&grads.consume::<Flex>(&ops.node))[0];
        let [node] = ops.parents;
        if let Some(node) = node {
            let gradient = match factor {
                1.0 => ops.state,
                factor => update(ops.state, |gradient| rows::scale(gradient, factor)),
            };
            grads.register::<Flex>(node.id, gradient);
        }
    }
}
