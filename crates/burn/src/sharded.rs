//! `Sharded<M>`: a layer whose parameters are whole only while it computes.
//!
//! Wrapped around a layer in a model's own struct it is a unit. Outside a sharded run its call is a plain call. In one,
//! the call is a single step of the outer autodiff graph: forward gathers the unit, computes, and frees it; backward
//! gathers it again, runs the layer's own backward inside that step, hands the gradients to the engine, and frees it.

use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use burn::module::{
    Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor,
};
use burn::tensor::{Bool, Device, Int, Tensor};

use crate::unit::{self, UnitLink};
use crate::walk;

/// The place that links a unit's wrapper, and all its clones, to the engine.
#[derive(Default)]
pub(crate) struct UnitSlot {
    link: RwLock<Option<Arc<UnitLink>>>,
}

impl UnitSlot {
    pub(crate) fn link(&self) -> Option<Arc<UnitLink>> {
        self.link.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn set_link(&self, link: Arc<UnitLink>) {
        *self.link.write().unwrap_or_else(PoisonError::into_inner) = Some(link);
    }
}

impl fmt::Debug for UnitSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.link().is_some() { "sharded" } else { "whole" })
    }
}

/// A layer that is gathered for its computation and freed after it.
///
/// The wrapper leaves no trace in parameter paths. Clones share the unit: a model that calls clones of one `Sharded`
/// layer uses one unit several times.
#[derive(Clone, Debug)]
pub struct Sharded<M> {
    inner: M,
    slot: Arc<UnitSlot>,
}

impl<M> Sharded<M> {
    /// Makes `inner` a unit.
    pub fn new(inner: M) -> Self {
        Self { inner, slot: Arc::default() }
    }

    /// The layer. Its parameters can be read only inside a call once the model is sharded.
    pub fn inner(&self) -> &M {
        &self.inner
    }
}

impl<M: Module + Sync + 'static> Sharded<M> {
    /// Computes `forward(layer, x)` with the layer's full parameters.
    ///
    /// `forward` is a function or a closure that captures nothing: what it computes must depend on the layer and on `x`
    /// alone, because backward may compute it again. Pass constants through [`Sharded::call_with`].
    ///
    /// # Panics
    /// In a sharded run, when called outside a step or an evaluation.
    pub fn call<const D: usize, const E: usize>(
        &self,
        x: Tensor<D>,
        forward: fn(&M, Tensor<D>) -> Tensor<E>,
    ) -> Tensor<E> {
        match self.slot.link() {
            None => forward(&self.inner, x),
            Some(link) => unit::call(&link, &self.inner, x, Arc::new(forward)),
        }
    }

    /// Computes `forward(layer, x, constants)`; no gradient flows into the constants.
    ///
    /// # Panics
    /// As [`Sharded::call`].
    pub fn call_with<const D: usize, const E: usize, C: Constants>(
        &self,
        x: Tensor<D>,
        constants: C,
        forward: fn(&M, Tensor<D>, &C) -> Tensor<E>,
    ) -> Tensor<E> {
        match self.slot.link() {
            None => forward(&self.inner, x, &constants.detached()),
            Some(link) => {
                let constants = constants.detached();
                unit::call(&link, &self.inner, x, Arc::new(move |m: &M, x| forward(m, x, &constants)))
            }
        }
    }
}

/// Values that a unit's computation may use beside its input: tensors without gradients, and plain numbers.
pub trait Constants: Clone + Send + Sync + 'static {
    /// The same values, cut off from any graph.
    #[must_use]
    fn detached(self) -> Self;
}

impl<const D: usize> Constants for Tensor<D> {
    fn detached(self) -> Self {
        self.detach()
    }
}

impl<const D: usize> Constants for Tensor<D, Int> {
    fn detached(self) -> Self {
        self
    }
}

impl<const D: usize> Constants for Tensor<D, Bool> {
    fn detached(self) -> Self {
        self
    }
}

macro_rules! plain_constants {
    ($($type:ty),*) => {$(
        impl Constants for $type {
            fn detached(self) -> Self {
                self
            }
        }
    )*};
}
plain_constants!(bool, usize, f32, f64);

impl<C: Constants> Constants for Option<C> {
    fn detached(self) -> Self {
        self.map(C::detached)
    }
}

impl<A: Constants, B: Constants> Constants for (A, B) {
    fn detached(self) -> Self {
        (self.0.detached(), self.1.detached())
    }
}

impl<A: Constants, B: Constants, C: Constants> Constants for (A, B, C) {
    fn detached(self) -> Self {
        (self.0.detached(), self.1.detached(), self.2.detached())
    }
}

impl<M: Module> Module for Sharded<M> {
    fn collect_devices(&self, devices: Devices) -> Devices {
        self.inner.collect_devices(devices)
    }

    fn fork(self, device: &Device) -> Self {
        Self { inner: self.inner.fork(device), slot: self.slot }
    }

    fn to_device(self, device: &Device) -> Self {
        Self { inner: self.inner.to_device(device), slot: self.slot }
    }

    fn materialize(self) -> Self {
        Self { inner: self.inner.materialize(), slot: self.slot }
    }

    fn valid(&self) -> Self {
        Self { inner: self.inner.valid(), slot: self.slot.clone() }
    }

    fn train(self) -> Self {
        Self { inner: self.inner.train(), slot: self.slot }
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        let _inside = walk::enter_unit(&self.slot);
        self.inner.visit(visitor);
    }

    fn map<P: ModuleMapper>(self, mapper: &mut P) -> Self {
        let _inside = walk::enter_unit(&self.slot);
        Self { inner: self.inner.map(mapper), slot: walk::slot_after_map(self.slot) }
    }
}

impl<M: ModuleDisplay> ModuleDisplayDefault for Sharded<M> {
    fn content(&self, content: Content) -> Option<Content> {
        self.inner.content(content)
    }

    fn num_params(&self) -> usize {
        self.inner.num_params()
    }
}

impl<M: ModuleDisplay> ModuleDisplay for Sharded<M> {}
