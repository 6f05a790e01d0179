//! Rotary position embedding as a single operation.

use burn::Tensor;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::flex::FlexTensor;
use burn::backend::{Flex, TensorMetadata};

use super::fused::{Inputs, elements, update};
use super::reference;
use crate::kernels::rotary::{Angles, Direction, rotate};

/// Rotates the pairs `(i, i + head_dim / 2)` of every head by the angles of the row's position: with `a` and `b` a
/// pair, `a cos - b sin` and `b cos + a sin`.
///
/// Method: Su et al., arXiv:2104.09864, in the rotate-half layout of Hugging Face's Llama. The tables are constants: no
/// gradient reaches them.
///
/// # Shapes
/// `x` and the result: `[batch, len, heads * head_dim]`; `cos` and `sin`: `[len, head_dim / 2]`.
///
/// # Panics
/// If the shapes do not fit.
pub fn rotary(x: Tensor<3>, cos: &Tensor<2>, sin: &Tensor<2>, head_dim: usize) -> Tensor<3> {
    let [_, len, width] = x.dims();
    assert!(
        head_dim > 0 && head_dim.is_multiple_of(2) && width.is_multiple_of(head_dim),
        "rotary: {width} columns do not divide into heads of {head_dim} (an even number of) columns"
    );
    for table in [cos, sin] {
        assert_eq!(table.dims(), [len, head_dim / 2], "rotary: a table must be [len, head_dim / 2]");
    }
    let (cos, sin) = (cos.clone().detach(), sin.clone().detach());
    match Inputs::new([x.into_dispatch(), cos.into_dispatch(), sin.into_dispatch()], []) {
        Inputs::Fused([x, cos, sin], [], tape) => {
            let tables = Tables { cos, sin };
            let y = tables.rotate(x, Direction::Forward);
            tape.finish(Rotary, y, |_| tables)
        }
        Inputs::Other([x, cos, sin], []) => {
            let (cos, sin) = (Tensor::from_dispatch(cos), Tensor::from_dispatch(sin));
            reference::rotary(Tensor::from_dispatch(x), &cos, &sin, head_dim)
        }
    }
}

/// The backward step: the same rotation by the negative angles. Its parents are the input and the two tables.
#[derive(Debug)]
struct Rotary;

#[derive(Clone, Debug)]
struct Tables {
    cos: FlexTensor,
    sin: FlexTensor,
}

impl Tables {
    fn rotate(&self, x: FlexTensor, direction: Direction) -> FlexTensor {
        let width = x.shape()[2];
        let angles = Angles { cos: elements(&self.cos), sin: elements(&self.sin), half: self.cos.shape()[1] };
        update(x, |x| rotate(x, width, angles, direction))
    }
}

impl Backward<Flex, 3> for Rotary {
    type State = Tables;

    fn backward(self, ops: Ops<Tables, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        let dy = grads.consume::<Flex>(&ops.node);
        let [x, _, _] = ops.parents;
        if let Some(node) = x {
            grads.register::<Flex>(node.id, ops.state.rotate(dy, Direction::Backward));
        }
    }
}
