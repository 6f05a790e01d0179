//! Activations as single operations.

use burn::Tensor;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::flex::FlexTensor;
use burn::backend::{Flex, TensorMetadata};

use super::fused::{Inputs, elements, tensor, update};
use super::reference;
use crate::kernels::activation as kernel;

/// The GELU with the tanh approximation, elementwise: `x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`.
///
/// Method: Hendrycks and Gimpel, arXiv:1606.08415; PyTorch's `gelu(approximate="tanh")`, GPT-2's `gelu_new`.
pub fn gelu_tanh<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    match Inputs::new([x.into_dispatch()], []) {
        Inputs::Fused([x], [], tape) => {
            let y = tensor(kernel::gelu_tanh(elements(&x)), &x.shape());
            tape.finish(GeluTanh, y, |_| x)
        }
        Inputs::Other([x], []) => reference::gelu_tanh(Tensor::from_dispatch(x)),
    }
}

/// The backward step; its state is the input.
#[derive(Debug)]
struct GeluTanh;

impl Backward<Flex, 1> for GeluTanh {
    type State = FlexTensor;

    fn backward(self, ops: Ops<FlexTensor, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let dy = grads.consume::<Flex>(&ops.node);
        let x = ops.state;
        let [node] = ops.parents;
        if let Some(node) = node {
            let dx = update(dy, |dy| kernel::gelu_tanh_backward(dy, elements(&x)));
            grads.register::<Flex>(node.id, dx);
        }
    }
}

/// `silu(gate) * up`, elementwise, with `silu(x) = x / (1 + e^-x)`: the activation of a SwiGLU layer.
///
/// Method: Shazeer, arXiv:2002.05202.
///
/// # Panics
/// If the shapes differ.
pub fn silu_mul<const D: usize>(gate: Tensor<D>, up: Tensor<D>) -> Tensor<D> {
    assert_eq!(gate.dims(), up.dims(), "silu_mul: gate and up must have one shape");
    match Inputs::new([gate.into_dispatch(), up.into_dispatch()], []) {
        Inputs::Fused([gate, up], [], tape) => {
            let y = tensor(kernel::silu_mul(elements(&gate), elements(&up)), &gate.shape());
            tape.finish(SiluMul, y, |_| [gate, up])
        }
        Inputs::Other([gate, up], []) => {
            reference::silu_mul(Tensor::from_dispatch(gate), Tensor::from_dispatch(up))
        }
    }
}

/// The backward step; its state and its parents are gate and up.
#[derive(Debug)]
struct SiluMul;

impl Backward<Flex, 2> for SiluMul {
    type State = [FlexTensor; 2];

    fn backward(self, ops: Ops<[FlexTensor; 2], 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let dy = grads.consume::<Flex>(&ops.node);
        let [gate, up] = ops.state;
        let [gate_node, up_node] = ops.parents;
        let mut d_gate = Vec::new();
        let d_up = update(dy, |dy| d_gate = kernel::silu_mul_backward(dy, elements(&gate), elements(&up)));
        if let Some(node) = gate_node {
            grads.register::<Flex>(node.id, tensor(d_gate, &gate.shape()));
        }
        if let Some(node) = up_node {
            grads.register::<Flex>(node.id, d_up);
        }
    }
}
