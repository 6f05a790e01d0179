//! What every fused operation shares: taking tensors apart, recording its step, delivering gradients.

use std::array;
use std::sync::Arc;

use burn::Tensor;
use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, NodeGuard, OpsKind};
use burn::backend::flex::{FlexTensor, Layout};
use burn::backend::{
    Autodiff, AutodiffBackend, BackendTensor, DispatchAutodiffContext, DispatchTensor, DispatchTensorKind,
    Flex, GradientCheckpointingStrategy, TensorMetadata,
};
use burn::tensor::{Bytes, DType, Int, Shape};

use crate::kernels::rows;
use crate::sink::{self, GradSink, WriteMode};

/// The float inputs of an operation: `N` that it needs and `M` that it can do without.
pub(super) enum Inputs<const N: usize, const M: usize> {
    /// Every input is f32 on Flex: its row-major data, and its place in the graph.
    Fused([FlexTensor; N], [Option<FlexTensor>; M], Tape),
    /// The inputs as they came: Burn's own operations must do.
    Other([DispatchTensor; N], [Option<DispatchTensor>; M]),
}

impl<const N: usize, const M: usize> Inputs<N, M> {
    /// Takes the inputs apart if the operation can run fused: all f32, on Flex, and under no checkpointing strategy.
    pub(super) fn new(needed: [DispatchTensor; N], optional: [Option<DispatchTensor>; M]) -> Self {
        if !needed.iter().chain(optional.iter().flatten()).all(is_fusable) {
            return Self::Other(needed, optional);
        }
        let mut nodes = Vec::with_capacity(N + M);
        let needed = needed.map(|input| {
            let (tensor, node) = open(input);
            nodes.push(node);
            tensor
        });
        let optional = optional.map(|input| {
            let (tensor, node) = input.map(open).unzip();
            nodes.push(node.flatten());
            tensor
        });
        Self::Fused(needed, optional, Tape { nodes })
    }
}

fn is_fusable(tensor: &DispatchTensor) -> bool {
    let on_flex = match (&tensor.kind, tensor.autodiff) {
        (DispatchTensorKind::Flex(BackendTensor::Float(_)), DispatchAutodiffContext::Disabled) => true,
        (
            DispatchTensorKind::Autodiff(inner),
            DispatchAutodiffContext::Enabled(GradientCheckpointingStrategy::Disabled),
        ) => matches!(**inner, DispatchTensorKind::Flex(BackendTensor::Autodiff(_))),
        _ => false,
    };
    on_flex && tensor.dtype() == DType::F32
}

fn open(tensor: DispatchTensor) -> (FlexTensor, Option<Node>) {
    let kind = match tensor.kind {
        DispatchTensorKind::Autodiff(inner) => *inner,
        kind => kind,
    };
    match kind {
        DispatchTensorKind::Flex(BackendTensor::Autodiff(tensor)) => {
            let tracked = tensor.is_tracked();
            let (primitive, guard) = tensor.into_parts();
            (contiguous(primitive), Some(Node { guard, tracked }))
        }
        DispatchTensorKind::Flex(tensor) => (contiguous(tensor.float()), None),
        _ => unreachable!("`is_fusable` admits tensors on Flex only"),
    }
}

/// The inputs' places in the autodiff graph, the needed ones first.
pub(super) struct Tape {
    /// `None` for an input that is absent or outside autodiff.
    nodes: Vec<Option<Node>>,
}

struct Node {
    guard: NodeGuard,
    tracked: bool,
}

impl Tape {
    /// Whether input `i` needs a gradient.
    pub(super) fn is_tracked(&self, i: usize) -> bool {
        self.nodes[i].as_ref().is_some_and(|node| node.tracked)
    }

    /// Whether any input needs a gradient.
    pub(super) fn is_recording(&self) -> bool {
        (0..self.nodes.len()).any(|i| self.is_tracked(i))
    }

    /// Where the gradient of the parameter at input `i`, of this shape, goes; nowhere if there is no such input.
    pub(super) fn slot(&self, i: usize, shape: &[usize]) -> Slot {
        let sink = match self.nodes.get(i) {
            Some(Some(node)) if node.tracked => sink::lookup(node.guard.id()),
            _ => None,
        };
        Slot { shape: shape.to_vec(), sink }
    }

    /// The operation's output, recorded in the graph if an input needs a gradient. The parents of `op` are the inputs.
    pub(super) fn finish<B: Backward<Flex, P>, const P: usize, const D: usize>(
        self,
        op: B,
        output: FlexTensor,
        state: impl FnOnce(&Self) -> B::State,
    ) -> Tensor<D> {
        if self.nodes.iter().all(Option::is_none) {
            return Tensor::from_primitive::<Flex>(output);
        }
        if !self.is_recording() {
            // Burn would register a step even here; a constant needs none.
            return Tensor::from_primitive::<Autodiff<Flex>>(Autodiff::<Flex>::from_inner(output));
        }
        let state = state(&self);
        let mut nodes = self.nodes.into_iter();
        let guards = array::from_fn(|_| nodes.next().flatten().map_or_else(constant, |node| node.guard));
        let output = match op.prepare::<NoCheckpointing>(guards).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(state, output),
            OpsKind::UnTracked(prep) => prep.finish(output),
        };
        Tensor::from_primitive::<Autodiff<Flex>>(output)
    }
}

/// A parent that needs no gradient, in the place of an input that has no node.
fn constant() -> NodeGuard {
    Autodiff::<Flex>::from_inner(tensor(vec![0.0], &[1])).into_parts().1
}

/// Where a parameter's gradient goes: to the sink registered for it, or else to Burn.
#[derive(Clone, Debug)]
pub(super) struct Slot {
    shape: Vec<usize>,
    sink: Option<Arc<dyn GradSink>>,
}

impl Slot {
    /// Delivers the gradient that `write` computes, if the parameter (whose node is `parent`) needs one.
    pub(super) fn deliver(
        &self,
        parent: Option<NodeId>,
        grads: &mut Gradients,
        mut write: impl FnMut(&mut [f32], WriteMode),
    ) {
        let Some(parent) = parent else { return };
        let numel = self.shape.iter().product();
        match &self.sink {
            Some(sink) => sink.accumulate(&mut |window, mode| {
                assert_eq!(window.len(), numel, "a sink's window must have the parameter's {:?}", self.shape);
                write(window, mode);
            }),
            None => {
                let mut gradient = vec![0.0; numel];
                write(&mut gradient, WriteMode::Overwrite);
                grads.register::<Flex>(parent, tensor(gradient, &self.shape));
            }
        }
    }

    /// Delivers a gradient that is already computed.
    pub(super) fn deliver_sum(&self, parent: Option<NodeId>, grads: &mut Gradients, sum: &[f32]) {
        self.deliver(parent, grads, |window, mode| match mode {
            WriteMode::Overwrite => window.copy_from_slice(sum),
            WriteMode::Add => rows::add(window, sum),
        });
    }

    /// Columns of the parameter.
    pub(super) fn width(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }
}

/// A new tensor around `data`, row-major.
pub(super) fn tensor(data: Vec<f32>, shape: &[usize]) -> FlexTensor {
    FlexTensor::new(Bytes::from_elems(data), Layout::contiguous(Shape::from(shape.to_vec())), DType::F32)
}

/// The same tensor with its elements in row-major order, copied only if they are not.
pub(super) fn contiguous(tensor: FlexTensor) -> FlexTensor {
    if tensor.is_contiguous() { tensor } else { tensor.to_contiguous() }
}

/// The elements of a [`contiguous`] tensor. Each call asks the storage's owner for the memory, which may have to be
/// fetched: once for each operation.
pub(super) fn elements(tensor: &FlexTensor) -> &[f32] {
    tensor.as_slice().expect("a contiguous f32 tensor")
}

/// The tensor with its elements changed, in place unless the storage is shared or holds more than them.
pub(super) fn update(tensor: FlexTensor, change: impl FnOnce(&mut [f32])) -> FlexTensor {
    // `to_contiguous` returns a second handle to a storage that needs no copy: the first must be gone before the write.
    let copy = tensor.to_contiguous();
    drop(tensor);
    let mut tensor = copy;
    change(tensor.storage_mut());
    tensor
}

/// The elements of an integer tensor, as indices.
///
/// # Panics
/// If one is negative.
pub(super) fn indices<const D: usize>(ids: Tensor<D, Int>) -> Vec<usize> {
    let index = |id: i64| {
        usize::try_from(id).unwrap_or_else(|_| panic!("index {id} is out of range: it is negative"))
    };
    ids.into_data().iter::<i64>().map(index).collect()
}
