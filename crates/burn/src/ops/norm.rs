//! Normalisations as single operations.

use burn::Tensor;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::flex::FlexTensor;
use burn::backend::{Flex, TensorMetadata};

use super::fused::{Inputs, Slot, Tape, elements, tensor, update};
use super::reference;
use crate::kernels::norm::{self as kernel, Norm, RowStats};

/// `(x - mean) / sqrt(var + eps) * gamma + beta` over the last axis, with the biased variance.
///
/// Method: Ba et al., arXiv:1607.06450.
///
/// # Shapes
/// `x` and the result: `[.., width]`; `gamma` and `beta`: `[width]`.
///
/// # Panics
/// If the shapes do not fit.
pub fn layer_norm<const D: usize>(
    x: Tensor<D>,
    gamma: Tensor<1>,
    beta: Option<Tensor<1>>,
    eps: f64,
) -> Tensor<D> {
    check(&x, &gamma, beta.as_ref());
    match Inputs::new([x.into_dispatch(), gamma.into_dispatch()], [beta.map(Tensor::into_dispatch)]) {
        Inputs::Fused(needed, [beta], tape) => fused(Norm::Layer, needed, beta, eps, tape),
        Inputs::Other([x, gamma], [beta]) => {
            let beta = beta.map(Tensor::from_dispatch);
            reference::layer_norm(Tensor::from_dispatch(x), Tensor::from_dispatch(gamma), beta, eps)
        }
    }
}

/// `x / sqrt(mean(x^2) + eps) * gamma` over the last axis.
///
/// Method: Zhang and Sennrich, arXiv:1910.07467.
///
/// # Shapes
/// `x` and the result: `[.., width]`; `gamma`: `[width]`.
///
/// # Panics
/// If the shapes do not fit.
pub fn rms_norm<const D: usize>(x: Tensor<D>, gamma: Tensor<1>, eps: f64) -> Tensor<D> {
    check(&x, &gamma, None);
    match Inputs::new([x.into_dispatch(), gamma.into_dispatch()], []) {
        Inputs::Fused(needed, [], tape) => fused(Norm::RootMeanSquare, needed, None, eps, tape),
        Inputs::Other([x, gamma], []) => {
            reference::rms_norm(Tensor::from_dispatch(x), Tensor::from_dispatch(gamma), eps)
        }
    }
}

fn check<const D: usize>(x: &Tensor<D>, gamma: &Tensor<1>, beta: Option<&Tensor<1>>) {
    let width = x.dims()[D - 1];
    assert_eq!(gamma.dims(), [width], "norm: gamma must have one element for each column");
    if let Some(beta) = beta {
        assert_eq!(beta.dims(), [width], "norm: beta must have one element for each column");
    }
}

fn fused<const D: usize>(
    norm: Norm,
    [x, gamma]: [FlexTensor; 2],
    beta: Option<FlexTensor>,
    eps: f64,
    tape: Tape,
) -> Tensor<D> {
    let beta = beta.as_ref().map(elements);
    let (y, stats) = kernel::forward(norm, elements(&x), elements(&gamma), beta, eps as f32);
    let y = tensor(y, &x.shape());
    tape.finish(Normalise, y, |tape| State {
        norm,
        gamma_slot: tape.slot(1, &gamma.shape()),
        beta_slot: tape.slot(2, &gamma.shape()),
        x,
        gamma,
        stats,
    })
}

/// The backward step of both; its parents are the input, gamma and beta.
#[derive(Debug)]
struct Normalise;

#[derive(Clone, Debug)]
struct State {
    norm: Norm,
    gamma_slot: Slot,
    beta_slot: Slot,
    x: FlexTensor,
    gamma: FlexTensor,
    stats: Vec<RowStats>,
}

impl Backward<Flex, 3> for Normalise {
    type State = State;

    fn backward(self, ops: Ops<State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        let [x_node, gamma_node, beta_node] = ops.parents.map(|node| node.map(|node| node.id));
        let dy = grads.consume::<Flex>(&ops.node);
        let State { norm, gamma_slot, beta_slot, x, gamma, stats } = ops.state;
        let width = gamma.shape().num_elements();
        let mut d_gamma = vec![0.0; width];
        let mut d_beta = beta_node.map(|_| vec![0.0; width]);
        let dx = update(dy, |dy| {
            let saved = kernel::Saved { norm, x: elements(&x), gamma: elements(&gamma), stats: &stats };
            kernel::backward(saved, dy, &mut d_gamma, d_beta.as_deref_mut());
        });
        gamma_slot.deliver_sum(gamma_node, grads, &d_gamma);
        if let Some(d_beta) = d_beta {
            beta_slot.deliver_sum(beta_node, grads, &d_beta);
        }
        if let Some(node) = x_node {
            grads.register::<Flex>(node, dx);
        }
    }
}
