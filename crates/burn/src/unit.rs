//! One call of a unit: gather, compute, free, and in backward the same in reverse.
//!
//! The call is one step of the outer graph. Inside, the layer computes on fresh leaves that are windows onto the flat
//! parameter, in a graph of its own that either waits for backward or, with recomputation, is built anew there. The two
//! graphs share no node, so the inner backward can run inside the outer one.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::{FlexTensor, Layout};
use burn::backend::{Autodiff, AutodiffBackend, BackendTypes, Flex};
use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{Bytes, DType, Device, Shape, Tensor};
use shardwise_engine::{Engine, ForwardPass, UnitId};

use crate::sink::{self, GradSink, SinkGuard, WriteMode};
use crate::view::ParamView;

/// A float tensor of Burn's autodiff backend over Flex.
pub(crate) type AdTensor = <Autodiff<Flex> as BackendTypes>::FloatTensorPrimitive;

/// The engine, for everyone on this rank who needs it. Calls are brief and never wait for each other.
#[derive(Clone, Debug)]
pub(crate) struct SharedEngine(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    engine: Mutex<Engine>,
    /// What a unit's forward is for now: units inside a unit take part in its passes.
    pass: Mutex<ForwardPass>,
}

impl SharedEngine {
    pub(crate) fn new(engine: Engine) -> Self {
        Self(Arc::new(Shared { engine: Mutex::new(engine), pass: Mutex::default() }))
    }

    pub(crate) fn downgrade(&self) -> WeakEngine {
        WeakEngine(Arc::downgrade(&self.0))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Engine> {
        self.0.engine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pass(&self) -> ForwardPass {
        *self.0.pass.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_pass(&self, pass: ForwardPass) -> ForwardPass {
        std::mem::replace(&mut *self.0.pass.lock().unwrap_or_else(PoisonError::into_inner), pass)
    }

    /// Lets the forwards until the guard is dropped be part of `pass`.
    fn within(&self, pass: ForwardPass) -> WithinPass<'_> {
        WithinPass { engine: self, before: self.set_pass(pass) }
    }
}

/// The engine, for who must not keep it.
#[derive(Clone, Debug)]
pub(crate) struct WeakEngine(Weak<Shared>);

impl WeakEngine {
    pub(crate) fn upgrade(&self) -> Option<SharedEngine> {
        self.0.upgrade().map(SharedEngine)
    }
}

/// Ends a pass, when its forward panics too.
struct WithinPass<'a> {
    engine: &'a SharedEngine,
    before: ForwardPass,
}

impl Drop for WithinPass<'_> {
    fn drop(&mut self) {
        self.engine.set_pass(self.before);
    }
}

/// The gradient window of one parameter.
#[derive(Debug)]
pub(crate) struct ParamSink {
    pub(crate) engine: SharedEngine,
    pub(crate) unit: UnitId,
    pub(crate) part: usize,
    pub(crate) index: usize,
}

impl GradSink for ParamSink {
    fn accumulate(&self, write: &mut dyn FnMut(&mut [f32], WriteMode)) {
        self.engine.lock().write_gradient(self.unit, self.part, self.index, |window, overwrite| {
            write(window, if overwrite { WriteMode::Overwrite } else { WriteMode::Add });
        });
    }
}

impl ParamSink {
    /// Takes in a gradient that Burn has computed as a tensor.
    pub(crate) fn take_in(&self, gradient: FlexTensor) {
        let gradient = gradient.to_contiguous();
        let Some(values) = gradient.as_slice::<f32>() else { return };
        self.accumulate(&mut |window, mode| match mode {
            WriteMode::Overwrite => window.copy_from_slice(values),
            WriteMode::Add => shardwise_comm::reduce::add_into(window, values),
        });
    }
}

/// One of a unit's parameters.
#[derive(Debug)]
pub(crate) struct UnitParam {
    pub(crate) id: ParamId,
    pub(crate) view: ParamView,
    /// Where its gradient goes; `None` for a frozen one.
    pub(crate) sink: Option<Arc<ParamSink>>,
}

/// What a unit's wrapper needs to call it in a sharded run.
pub(crate) struct UnitLink {
    pub(crate) engine: SharedEngine,
    pub(crate) unit: UnitId,
    /// Other units whose parameters it uses too: they are gathered and freed along with it.
    pub(crate) owners: Vec<UnitId>,
    /// In the order of the flat parameters.
    pub(crate) params: Vec<UnitParam>,
    pub(crate) recompute: bool,
}

impl UnitLink {
    fn param(&self, id: ParamId) -> Option<&UnitParam> {
        self.params.iter().find(|param| param.id == id)
    }

    /// The units to gather for a call, its own last.
    fn gathered(&self) -> impl DoubleEndedIterator<Item = UnitId> + '_ {
        self.owners.iter().copied().chain([self.unit])
    }

    fn enter_forward(&self, pass: ForwardPass) {
        self.gathered().for_each(|unit| self.engine.lock().enter_forward_in(unit, pass));
    }

    fn leave_forward(&self, pass: ForwardPass) {
        self.gathered().rev().for_each(|unit| self.engine.lock().leave_forward_in(unit, pass));
    }

    /// An output of the unit's call that outlasts the gathered parameters. One that is a window onto a parameter, or a part
    /// of one, cannot be read once the unit is freed, so it gets memory of its own.
    fn outlasting(&self, y: FlexTensor) -> FlexTensor {
        let is_window = |y: &FlexTensor| self.params.iter().any(|param| param.view.is_behind(y));
        if !is_window(&y) {
            return y;
        }
        let y = y.to_contiguous();
        match y.as_slice::<f32>() {
            Some(values) if is_window(&y) => {
                let layout = Layout::contiguous(y.layout().shape().clone());
                FlexTensor::new(Bytes::from_elems(values.to_vec()), layout, DType::F32)
            }
            _ => y,
        }
    }

    fn enter_backward(&self) {
        self.gathered().for_each(|unit| self.engine.lock().enter_backward(unit));
    }

    fn leave_backward(&self) {
        self.gathered().rev().for_each(|unit| self.engine.lock().leave_backward(unit));
    }
}

impl fmt::Debug for UnitLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UnitLink").field("unit", &self.unit).field("params", &self.params.len()).finish()
    }
}

/// What the call computes.
pub(crate) type Forward<M, const D: usize, const E: usize> =
    Arc<dyn Fn(&M, Tensor<D>) -> Tensor<E> + Send + Sync>;

/// Computes a unit's call under the engine.
pub(crate) fn call<M: Module + Sync + 'static, const D: usize, const E: usize>(
    link: &Arc<UnitLink>,
    inner: &M,
    x: Tensor<D>,
    forward: Forward<M, D, E>,
) -> Tensor<E> {
    let pass = link.engine.pass();
    link.enter_forward(pass);
    let y = if link.engine.lock().is_evaluating() {
        let y = forward(inner, x.without_autodiff());
        let own = y.clone().try_into_primitive::<Flex>().map(|y| link.outlasting(y));
        own.map_or(y, Tensor::from_primitive::<Flex>)
    } else if pass == ForwardPass::Untracked {
        // The unit around this one wants values only.
        let y = forward(&inner.clone().map(&mut Untracked { link }), x);
        from_primitive(constant(link.outlasting(primitive(y).into_primitive())))
    } else {
        tracked_call(link, inner, x, &forward, pass)
    };
    link.leave_forward(pass);
    y
}

fn tracked_call<M: Module + Sync + 'static, const D: usize, const E: usize>(
    link: &Arc<UnitLink>,
    inner: &M,
    x: Tensor<D>,
    forward: &Forward<M, D, E>,
    pass: ForwardPass,
) -> Tensor<E> {
    let x = primitive(x.autodiff());
    let x_tracked = x.is_tracked();
    let (x, x_node) = x.into_parts();
    let input = x_tracked.then(|| (x.layout().shape().clone(), x.dtype()));
    // In the backward of a unit around this one the graph is needed at once.
    let (y, pass) = if link.recompute && pass != ForwardPass::Again {
        let untracked = inner.clone().map(&mut Untracked { link });
        let y = {
            let _values_only = link.engine.within(ForwardPass::Untracked);
            forward(&untracked, from_primitive(constant(x.clone())))
        };
        let (link, inner, forward) = (link.clone(), inner.clone(), forward.clone());
        let again = move || {
            let _again = link.engine.within(ForwardPass::Again);
            let (y, graph) = graph_call(&link, &inner, x, x_tracked, &forward);
            drop(y);
            graph
        };
        (primitive(y).into_primitive(), Box::new(again) as BackwardPass)
    } else {
        let (y, graph) = graph_call(link, inner, x, x_tracked, forward);
        (y, Box::new(move || graph) as BackwardPass)
    };
    let y = link.outlasting(y);
    // Where the input has no graph, a leaf makes the call part of one. It is this call's own: graphs that share a node are one
    // to Burn, and the graph inside a unit must not be that of the unit around it.
    let leaf = || primitive(Tensor::<1>::zeros([1], &Device::flex().autodiff()).require_grad());
    let anchor = (!x_tracked).then(leaf);
    let parent = anchor.as_ref().map_or(x_node, AdTensor::node);
    let state =
        UnitState { link: link.clone(), pass: Arc::new(Mutex::new(Some(pass))), input, _anchor: anchor };
    let prep = UnitStep.prepare::<NoCheckpointing>([parent]).compute_bound();
    let y = match prep.stateful() {
        OpsKind::Tracked(prep) => prep.finish(state, y),
        OpsKind::UnTracked(prep) => prep.finish(y),
    };
    from_primitive(y)
}

/// Computes the layer in a graph of its own.
fn graph_call<M: Module + 'static, const D: usize, const E: usize>(
    link: &Arc<UnitLink>,
    inner: &M,
    x: FlexTensor,
    x_tracked: bool,
    forward: &Forward<M, D, E>,
) -> (FlexTensor, InnerGraph) {
    let mut leaves = FreshLeaves { link, leaves: HashMap::new(), sinks: Vec::new() };
    let layer = inner.clone().map(&mut leaves);
    let x = if x_tracked { constant(x).require_grad() } else { constant(x) };
    let y = primitive(forward(&layer, from_primitive(x.clone())));
    // Whoever computes with the leaves has found their sinks by now.
    let FreshLeaves { leaves, sinks, .. } = leaves;
    drop(sinks);
    let (y, node) = y.into_parts();
    let seed = Arc::new(Mutex::new(None));
    let scalar =
        FlexTensor::new(Bytes::from_elems(vec![0.0f32]), Layout::contiguous(Shape::from([1])), DType::F32);
    let end = match SeedStep.prepare::<NoCheckpointing>([node]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => Some(prep.finish(Seed(seed.clone()), scalar)),
        OpsKind::UnTracked(_) => None,
    };
    (y, InnerGraph { seed, end, x: x_tracked.then_some(x), leaves })
}

/// A layer's own graph, waiting for the gradient of its output.
struct InnerGraph {
    seed: Arc<Mutex<Option<FlexTensor>>>,
    /// The node whose backward runs the graph's; `None` when nothing in it needs a gradient.
    end: Option<AdTensor>,
    /// The input, if it needs a gradient.
    x: Option<AdTensor>,
    /// The parameters' leaves.
    leaves: HashMap<ParamId, AdTensor>,
}

impl InnerGraph {
    /// Runs the backward from `dy`, delivers the parameters' gradients and returns the input's.
    fn run(self, link: &UnitLink, dy: FlexTensor) -> Option<FlexTensor> {
        let end = self.end?;
        *self.seed.lock().unwrap_or_else(PoisonError::into_inner) = Some(dy);
        let mut gradients = end.backward();
        for param in &link.params {
            if let (Some(leaf), Some(sink)) = (self.leaves.get(&param.id), &param.sink)
                && let Some(gradient) = leaf.grad_remove(&mut gradients)
            {
                sink.take_in(gradient);
            }
        }
        self.x.and_then(|x| x.grad_remove(&mut gradients))
    }
}

/// How backward comes by the layer's graph: forward has kept it, or it is computed again.
type BackwardPass = Box<dyn FnOnce() -> InnerGraph + Send>;

#[derive(Clone)]
struct UnitState {
    link: Arc<UnitLink>,
    pass: Arc<Mutex<Option<BackwardPass>>>,
    /// The shape and type of the input, if it needs a gradient.
    input: Option<(Shape, DType)>,
    _anchor: Option<AdTensor>,
}

impl fmt::Debug for UnitState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.link.fmt(f)
    }
}

/// The step of the outer graph; its parent is the unit's input, or the anchor.
#[derive(Debug)]
struct UnitStep;

impl Backward<Flex, 1> for UnitStep {
    type State = UnitState;

    fn backward(self, ops: Ops<UnitState, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let dy = grads.consume::<Flex>(&ops.node);
        let [parent] = ops.parents;
        let UnitState { link, pass, input, .. } = ops.state;
        let pass = pass.lock().unwrap_or_else(PoisonError::into_inner).take();
        link.enter_backward();
        let dx = pass.and_then(|graph| graph().run(&link, dy));
        link.leave_backward();
        // The anchor gets none. An input that the output does not depend on gets zeros: Burn runs the step that made it all
        // the same, and that step takes its gradient for granted.
        if let (Some(x), Some((shape, dtype))) = (parent, input) {
            grads.register::<Flex>(x.id, dx.unwrap_or_else(|| FlexTensor::zeros(shape, dtype)));
        }
    }
}

#[derive(Clone, Debug)]
struct Seed(Arc<Mutex<Option<FlexTensor>>>);

/// The end of an inner graph: gives the layer's output the gradient that arrived from outside.
#[derive(Debug)]
struct SeedStep;

impl Backward<Flex, 1> for SeedStep {
    type State = Seed;

    fn backward(self, ops: Ops<Seed, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let seed = ops.state.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let ([Some(y)], Some(dy)) = (ops.parents, seed) {
            grads.register::<Flex>(y.id, dy);
        }
    }
}

/// Puts a fresh leaf in the place of each parameter, with its sink; a constant in the place of a frozen one.
struct FreshLeaves<'a> {
    link: &'a UnitLink,
    leaves: HashMap<ParamId, AdTensor>,
    sinks: Vec<SinkGuard>,
}

impl ModuleMapper for FreshLeaves<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(own) = self.link.param(param.id) else { return untracked(param) };
        let sinks = &mut self.sinks;
        let leaf = self.leaves.entry(param.id).or_insert_with(|| {
            let tensor = constant(own.view.tensor());
            let Some(sink) = &own.sink else { return tensor };
            let leaf = tensor.require_grad();
            sinks.push(sink::register(leaf.id(), sink.clone()));
            leaf
        });
        Param::initialized(param.id, from_primitive(leaf.clone()))
    }
}

/// Puts an untracked autodiff tensor in the place of each parameter: the same operations as with leaves, and no graph.
struct Untracked<'a> {
    link: &'a UnitLink,
}

impl ModuleMapper for Untracked<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.link.param(param.id) {
            Some(own) => Param::initialized(param.id, from_primitive(constant(own.view.tensor()))),
            None => untracked(param),
        }
    }
}

/// A parameter that no flat parameter holds, or that a unit further in gathers: a constant on the autodiff backend. One that
/// is there already may be a leaf of the unit around.
pub(crate) fn untracked<const D: usize>(param: Param<Tensor<D>>) -> Param<Tensor<D>> {
    let value = param.val();
    if value.is_autodiff() { param } else { Param::initialized(param.id, Tensor::from_inner(value)) }
}

/// A tensor that is part of no graph.
pub(crate) fn constant(tensor: FlexTensor) -> AdTensor {
    Autodiff::<Flex>::from_inner(tensor)
}

pub(crate) fn from_primitive<const D: usize>(tensor: AdTensor) -> Tensor<D> {
    Tensor::from_primitive::<Autodiff<Flex>>(tensor)
}

/// # Panics
/// When the tensor is not a float tensor on Flex: a unit was called with another.
pub(crate) fn primitive<const D: usize>(tensor: Tensor<D>) -> AdTensor {
    let device = tensor.device();
    match tensor.try_into_primitive::<Autodiff<Flex>>() {
        Ok(primitive) => primitive,
        Err(error) => {
            panic!("a sharded model computes on `Device::flex().autodiff()`, not on {device:?}: {error:?}")
        }
    }
}
