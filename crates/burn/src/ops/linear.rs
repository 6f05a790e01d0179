//! Affine maps as single operations: one product forward, two backward, on the input flattened to a matrix.

use burn::Tensor;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::flex::FlexTensor;
use burn::backend::{Flex, TensorMetadata};

use super::fused::{Inputs, Slot, Tape, contiguous, elements, tensor};
use super::reference;
use crate::kernels::matmul::{MatMut, MatRef, matmul, product, product_transposed};
use crate::kernels::rows;
use crate::sink::WriteMode;

/// `x W + b` for every row of `x`.
///
/// # Shapes
/// `x`: `[.., in]`; `weight`: `[in, out]`; `bias`: `[out]`; the result: `[.., out]`.
///
/// # Panics
/// If the shapes do not fit.
pub fn linear<const D: usize>(x: Tensor<D>, weight: Tensor<2>, bias: Option<Tensor<1>>) -> Tensor<D> {
    affine(x, weight, bias, None)
}

/// `residual + x W + b` for every row of `x`, in one pass.
///
/// # Shapes
/// `x`: `[.., in]`; `weight`: `[in, out]`; `bias`: `[out]`; `residual` and the result: `[.., out]`.
///
/// # Panics
/// If the shapes do not fit.
pub fn linear_residual<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    residual: Tensor<D>,
) -> Tensor<D> {
    let [_, d_out] = weight.dims();
    let mut dims = x.dims();
    dims[D - 1] = d_out;
    assert_eq!(residual.dims(), dims, "linear: the residual must have the shape of the product");
    affine(x, weight, bias, Some(residual))
}

fn affine<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    residual: Option<Tensor<D>>,
) -> Tensor<D> {
    let [d_in, d_out] = weight.dims();
    check_input(&x, d_in);
    if let Some(bias) = &bias {
        assert_eq!(bias.dims(), [d_out], "linear: the bias must have one element for each output");
    }
    let optional = [bias.map(Tensor::into_dispatch), residual.map(Tensor::into_dispatch)];
    match Inputs::new([x.into_dispatch(), weight.into_dispatch()], optional) {
        Inputs::Fused([x, weight], [bias, residual], tape) => {
            let (x_matrix, weight_matrix) = (row_matrix(&x), row_matrix(&weight));
            let start = match (&bias, &residual) {
                (Some(bias), Some(residual)) => Some(rows::add_row(elements(residual), elements(bias))),
                (Some(bias), None) => Some(rows::repeat(elements(bias), x_matrix.rows())),
                (None, Some(residual)) => Some(elements(residual).to_vec()),
                (None, None) => None,
            };
            let y = match start {
                Some(mut y) => {
                    let target = MatMut::row_major(&mut y, x_matrix.rows(), d_out);
                    matmul(target, x_matrix, weight_matrix, WriteMode::Add);
                    y
                }
                None => product(x_matrix, weight_matrix),
            };
            finish(y, [x, weight], tape, Orientation::InOut)
        }
        Inputs::Other([x, weight], [bias, residual]) => {
            let (x, weight) = (Tensor::from_dispatch(x), Tensor::from_dispatch(weight));
            let bias = bias.map(Tensor::from_dispatch);
            match residual.map(Tensor::from_dispatch) {
                Some(residual) => reference::linear_residual(x, weight, bias, residual),
                None => reference::linear(x, weight, bias),
            }
        }
    }
}

/// `x W^T` for every row of `x`: the head of a language model whose weight is the token embedding's.
///
/// # Shapes
/// `x`: `[.., in]`; `weight`: `[out, in]`; the result: `[.., out]`.
///
/// # Panics
/// If the shapes do not fit.
pub fn linear_transposed<const D: usize>(x: Tensor<D>, weight: Tensor<2>) -> Tensor<D> {
    let [_, d_in] = weight.dims();
    check_input(&x, d_in);
    match Inputs::new([x.into_dispatch(), weight.into_dispatch()], []) {
        Inputs::Fused([x, weight], [], tape) => {
            let y = product_transposed(row_matrix(&x), row_matrix(&weight));
            finish(y, [x, weight], tape, Orientation::OutIn)
        }
        Inputs::Other([x, weight], []) => {
            reference::linear_transposed(Tensor::from_dispatch(x), Tensor::from_dispatch(weight))
        }
    }
}

fn check_input<const D: usize>(x: &Tensor<D>, d_in: usize) {
    let found = x.dims()[D - 1];
    assert_eq!(found, d_in, "linear: the input has {found} columns, the weight takes {d_in}");
}

/// How a weight is stored.
#[derive(Clone, Copy, Debug)]
enum Orientation {
    /// `[in, out]`.
    InOut,
    /// `[out, in]`.
    OutIn,
}

/// A contiguous tensor as a matrix: its last axis by all the others.
fn row_matrix(tensor: &FlexTensor) -> MatRef<'_> {
    let shape = tensor.shape();
    let cols = shape.last().copied().unwrap_or(1);
    MatRef::row_major(elements(tensor), shape.num_elements() / cols.max(1), cols)
}

/// The output `y`, recorded with what the backward step will need.
fn finish<const D: usize>(
    y: Vec<f32>,
    [x, weight]: [FlexTensor; 2],
    tape: Tape,
    orientation: Orientation,
) -> Tensor<D> {
    let (x_shape, weight_shape) = (x.shape(), weight.shape());
    let d_out = match orientation {
        Orientation::InOut => weight_shape[1],
        Orientation::OutIn => weight_shape[0],
    };
    let y = tensor(y, &[&x_shape[..D - 1], &[d_out]].concat());
    tape.finish(Linear, y, |tape| State {
        orientation,
        weight_slot: tape.slot(1, &weight_shape),
        bias_slot: tape.slot(2, &[d_out]),
        x_shape: x_shape.to_vec(),
        x: tape.is_tracked(1).then_some(x),
        weight: tape.is_tracked(0).then_some(weight),
    })
}

/// The backward step; its parents are the input, the weight, the bias and the residual.
#[derive(Debug)]
struct Linear;

#[derive(Clone, Debug)]
struct State {
    orientation: Orientation,
    weight_slot: Slot,
    bias_slot: Slot,
    x_shape: Vec<usize>,
    /// The input, if the weight needs a gradient.
    x: Option<FlexTensor>,
    /// The weight, if the input needs a gradient.
    weight: Option<FlexTensor>,
}

impl Backward<Flex, 4> for Linear {
    type State = State;

    fn backward(self, ops: Ops<State, 4>, grads: &mut Gradients, _: &mut Checkpointer) {
        let [x_node, weight_node, bias_node, residual_node] =
            ops.parents.map(|node| node.map(|node| node.id));
        let dy = contiguous(grads.consume::<Flex>(&ops.node));
        let state = ops.state;
        let dy_matrix = row_matrix(&dy);

        if bias_node.is_some() {
            let mut sum = vec![0.0; dy_matrix.cols()];
            rows::sum_rows(elements(&dy), &mut sum);
            state.bias_slot.deliver_sum(bias_node, grads, &sum);
        }
        if let Some(x) = &state.x {
            let (lhs, rhs) = match state.orientation {
                Orientation::InOut => (row_matrix(x), dy_matrix),
                Orientation::OutIn => (dy_matrix, row_matrix(x)),
            };
            state.weight_slot.deliver(weight_node, grads, |window, mode| {
                accumulate(window, mode, lhs.transposed(), rhs);
            });
        }
        if let (Some(weight), Some(x_node)) = (&state.weight, x_node) {
            let weight = row_matrix(weight);
            let dx = match state.orientation {
                Orientation::InOut => product_transposed(dy_matrix, weight),
                Orientation::OutIn => product(dy_matrix, weight),
            };
            grads.register::<Flex>(x_node, tensor(dx, &state.x_shape));
        }
        if let Some(node) = residual_node {
            grads.register::<Flex>(node, dy);
        }
    }
}

/// Rows of a product that [`accumulate`] computes before it adds them.
const PANEL: usize = 256;

/// Writes `lhs rhs` to `window`, or adds it. What is added are the bits that would have been written: the product
/// itself would add to the window between the blocks of its sum.
fn accumulate(window: &mut [f32], mode: WriteMode, lhs: MatRef<'_>, rhs: MatRef<'_>) {
    let (height, width) = (lhs.rows(), rhs.cols());
    match mode {
        WriteMode::Overwrite => matmul(MatMut::row_major(window, height, width), lhs, rhs, mode),
        WriteMode::Add => {
            // Panels of about one height: a product of very few rows takes another path, with other rounding.
            let panel = height.div_ceil(height.div_ceil(PANEL).max(1));
            for (first, window) in
                (0..height).step_by(panel.max(1)).zip(window.chunks_mut((panel * width).max(1)))
            {
                rows::add(window, &product(lhs.row_range(first, panel.min(height - first)), rhs));
            }
        }
    }
}
