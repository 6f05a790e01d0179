//! Where an operation writes a parameter's gradient during backward: straight into its unit's flat gradient.
//!
//! A sharded parameter is a leaf of the autodiff graph whose gradient Burn need not hold. Whoever owns the flat
//! gradient registers a [`GradSink`] under the leaf's node; an operation of [`crate::ops`] that finds one at forward
//! time keeps it and, in backward, writes the gradient through it and registers nothing with Burn.

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::{Arc, LazyLock, PoisonError, RwLock};

use burn::backend::autodiff::NodeId;

/// Whether a window already holds a part of this backward's gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteMode {
    /// The window's contents are stale: every element must be written.
    Overwrite,
    /// An earlier use in this backward has written the window: add to every element.
    Add,
}

/// The window of a flat gradient that belongs to one parameter.
pub trait GradSink: Send + Sync + Debug {
    /// Calls `write` once with the parameter's gradient window (row-major, the parameter's numel) and whether to
    /// overwrite or to add; the next call in the same backward sees [`WriteMode::Add`].
    fn accumulate(&self, write: &mut dyn FnMut(&mut [f32], WriteMode));
}

static SINKS: LazyLock<RwLock<HashMap<NodeId, Arc<dyn GradSink>>>> = LazyLock::new(RwLock::default);

/// Removes a registration when dropped; operations that have already found the sink keep it.
#[derive(Debug)]
pub struct SinkGuard(NodeId);

impl Drop for SinkGuard {
    fn drop(&mut self) {
        SINKS.write().unwrap_or_else(PoisonError::into_inner).remove(&self.0);
    }
}

/// Makes `sink` the place for the gradient of the leaf `node`.
#[must_use = "the sink is unregistered when the guard is dropped"]
pub fn register(node: NodeId, sink: Arc<dyn GradSink>) -> SinkGuard {
    SINKS.write().unwrap_or_else(PoisonError::into_inner).insert(node, sink);
    SinkGuard(node)
}

/// The sink of a leaf, if one is registered.
pub fn lookup(node: NodeId) -> Option<Arc<dyn GradSink>> {
    SINKS.read().unwrap_or_else(PoisonError::into_inner).get(&node).cloned()
}
