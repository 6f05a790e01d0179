//! What the tests of the fused operations share: seeded inputs, runs in every mode, and comparisons.
#![allow(dead_code, reason = "every test file uses its own part")]

pub(crate) mod cases;

use std::sync::{Arc, Mutex};

use burn::backend::autodiff::NodeId;
use burn::backend::{Autodiff, DispatchTensor, Flex};
use burn::tensor::{Device, Int, Tensor, TensorData};
use shardwise_burn::sink::{GradSink, WriteMode};

/// A small generator (SplitMix64), so that inputs do not depend on Burn's global one.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in -1..1.
    pub(crate) fn value(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub(crate) fn values(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.value()).collect()
    }

    pub(crate) fn array(&mut self, dims: &[usize]) -> Array {
        Array { dims: dims.to_vec(), values: self.values(dims.iter().product()) }
    }

    pub(crate) fn ids(&mut self, count: usize, below: usize) -> Vec<i64> {
        (0..count).map(|_| (self.bits() % below as u64) as i64).collect()
    }
}

/// The values of a tensor of any rank.
#[derive(Clone, Debug)]
pub(crate) struct Array {
    pub(crate) dims: Vec<usize>,
    pub(crate) values: Vec<f32>,
}

impl Array {
    pub(crate) fn tensor<const D: usize>(&self, device: &Device) -> Tensor<D> {
        Tensor::from_data(TensorData::new(self.values.clone(), self.dims.clone()), device)
    }
}

/// A tensor whose rank is not in its type.
#[derive(Clone)]
pub(crate) struct Leaf(DispatchTensor);

impl Leaf {
    pub(crate) fn new<const D: usize>(tensor: Tensor<D>) -> Self {
        Self(tensor.into_dispatch())
    }

    pub(crate) fn get<const D: usize>(&self) -> Tensor<D> {
        Tensor::from_dispatch(self.0.clone())
    }

    pub(crate) fn from_array(array: &Array, mode: Mode) -> Self {
        fn leaf<const D: usize>(array: &Array, mode: Mode) -> Leaf {
            let tensor = array.tensor::<D>(&mode.device());
            Leaf::new(if mode == Mode::Tracked { tensor.require_grad() } else { tensor })
        }
        match array.dims.len() {
            1 => leaf::<1>(array, mode),
            2 => leaf::<2>(array, mode),
            3 => leaf::<3>(array, mode),
            rank => panic!("no test uses rank {rank}"),
        }
    }
}

/// How the inputs of an operation relate to autodiff.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Leaves that require gradients.
    Tracked,
    /// On the autodiff backend, without gradients.
    Constant,
    /// Outside autodiff.
    Plain,
}

impl Mode {
    pub(crate) fn device(self) -> Device {
        match self {
            Mode::Plain => Device::flex(),
            Mode::Tracked | Mode::Constant => Device::flex().autodiff(),
        }
    }
}

/// The output of an operation, flattened, and the gradient of each input for a fixed random gradient of the output.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) output: Vec<f32>,
    pub(crate) gradients: Vec<Option<Vec<f32>>>,
}

/// The arrays as leaves in one mode.
pub(crate) fn leaves(inputs: &[Array], mode: Mode) -> Vec<Leaf> {
    inputs.iter().map(|array| Leaf::from_array(array, mode)).collect()
}

/// Runs `op` on leaves that require gradients, and backward from it.
pub(crate) fn differentiate(inputs: &[Array], op: impl Fn(&[Leaf]) -> Tensor<1>) -> Outcome {
    differentiate_leaves(&leaves(inputs, Mode::Tracked), op)
}

/// [`differentiate`] for given leaves.
pub(crate) fn differentiate_leaves(leaves: &[Leaf], op: impl Fn(&[Leaf]) -> Tensor<1>) -> Outcome {
    let output = op(leaves);
    let values = output.to_data().try_to_vec().unwrap();
    let weights = upstream(values.len());
    let weights = Tensor::<1>::from_data(TensorData::new(weights, [values.len()]), &output.device());
    let mut gradients = (output * weights).sum().backward();
    let gradients = leaves.iter().map(|leaf| {
        let leaf = Tensor::<1>::from_dispatch(leaf.0.clone());
        leaf.grad_remove(&mut gradients).map(|g| g.into_data().try_to_vec().unwrap())
    });
    Outcome { output: values, gradients: gradients.collect() }
}

/// The gradient of the output in [`differentiate`].
pub(crate) fn upstream(count: usize) -> Vec<f32> {
    Random::new(4711).values(count)
}

/// The output of `op`, flattened, with inputs in the given mode.
pub(crate) fn evaluate(inputs: &[Array], mode: Mode, op: impl Fn(&[Leaf]) -> Tensor<1>) -> Vec<f32> {
    op(&leaves(inputs, mode)).into_data().try_to_vec().unwrap()
}

/// A tensor of ids.
pub(crate) fn ids<const D: usize>(values: &[i64], dims: [usize; D]) -> Tensor<D, Int> {
    Tensor::from_data(TensorData::new(values.to_vec(), dims), &Device::flex())
}

/// The node of a leaf: what a sink is registered under.
pub(crate) fn node(leaf: &Leaf) -> NodeId {
    Tensor::<1>::from_dispatch(leaf.0.clone())
        .try_into_primitive::<Autodiff<Flex>>()
        .expect("an autodiff tensor")
        .id()
}

/// The largest difference, relative to the largest expected value (or 0.1, where all are small).
pub(crate) fn distance(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let largest = |values: &mut dyn Iterator<Item = f32>| {
        values.fold(0.0, |a: f32, b| if b.abs() <= a { a } else { b.abs() })
    };
    let scale = largest(&mut expected.iter().copied()).max(0.1);
    largest(&mut found.iter().zip(expected).map(|(a, b)| a - b)) / scale
}

/// Fails unless [`distance`] is at most `tolerance` (a NaN fails).
pub(crate) fn assert_close(what: &str, found: &[f32], expected: &[f32], tolerance: f32) {
    let error = distance(found, expected);
    assert!(error <= tolerance, "{what}: differs by {error:.2e}, more than {tolerance:.0e}");
}

/// Fails unless the outcomes agree within `tolerance`, output and every gradient.
pub(crate) fn assert_outcomes_close(what: &str, found: &Outcome, expected: &Outcome, tolerance: f32) {
    assert_close(&format!("{what}, output"), &found.output, &expected.output, tolerance);
    for (i, (found, expected)) in found.gradients.iter().zip(&expected.gradients).enumerate() {
        let (found, expected) = (found.as_ref().expect("a gradient"), expected.as_ref().expect("a gradient"));
        assert_close(&format!("{what}, gradient {i}"), found, expected, tolerance);
    }
}

/// A gradient window that remembers whether it was written.
#[derive(Debug)]
pub(crate) struct Window(Mutex<(Vec<f32>, WriteMode)>);

impl Window {
    /// A window of stale values.
    pub(crate) fn new(count: usize) -> Arc<Self> {
        Arc::new(Self(Mutex::new((vec![f32::NAN; count], WriteMode::Overwrite))))
    }

    /// What was written, or `None`.
    pub(crate) fn written(&self) -> Option<Vec<f32>> {
        let state = self.0.lock().unwrap();
        (state.1 == WriteMode::Add).then(|| state.0.clone())
    }
}

impl GradSink for Window {
    fn accumulate(&self, write: &mut dyn FnMut(&mut [f32], WriteMode)) {
        let mut state = self.0.lock().unwrap();
        let mode = state.1;
        write(&mut state.0, mode);
        state.1 = WriteMode::Add;
    }
}

/// The bit patterns, so that a comparison tells zeros apart and holds for NaN.
pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}
