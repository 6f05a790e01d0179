//! Burn tensors that are windows onto a unit's flat parameter, wherever its full parameters are at the moment.
//!
//! A window costs nothing and stays valid while the unit is sharded; its elements can be read only while the unit is
//! gathered. Invariant: Burn asks for a window's memory once in each operation that reads it and uses the answer within
//! that operation; the engine frees a unit only between operations of the same rank. So no slice outlives its memory.

use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use burn::backend::flex::{FlexTensor, Layout};
use burn::tensor::{Bytes, DType, Shape};
use cubecl_environment::bytes::{AccessError, AccessPolicy, AllocationController, AllocationProperty};
use shardwise_engine::{EngineError, FlatView};

/// Where a read outside a unit's use is reported.
pub(crate) type Failure = Arc<OnceLock<EngineError>>;

/// The memory of one parameter's window.
#[derive(Clone)]
struct Window {
    view: Arc<FlatView>,
    elements: Range<usize>,
    path: Arc<str>,
    failure: Failure,
    /// A copy of its own, once someone has written to this handle.
    private: Option<Vec<f32>>,
    /// What is read while the unit is sharded, after the failure has been noted.
    zeros: OnceLock<Vec<f32>>,
}

impl Window {
    fn elements(&self) -> &[f32] {
        if let Some(private) = &self.private {
            return private;
        }
        // SAFETY: the caller is one tensor operation of the rank that owns the engine (the invariant of this module).
        match unsafe { self.view.slice(self.elements.clone()) } {
            Some(elements) => elements,
            None => {
                // A panic here would poison Burn's graph; the step ends with this error instead.
                let _ = self.failure.set(EngineError::NotGathered {
                    path: self.path.to_string(),
                    unit: self.view.unit().to_string(),
                });
                self.zeros.get_or_init(|| vec![0.0; self.elements.len()])
            }
        }
    }
}

fn as_uninit(elements: &[f32]) -> &[MaybeUninit<u8>] {
    // SAFETY: initialised bytes are valid `MaybeUninit` bytes, and the length in bytes is the slice's.
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) }
}

impl AllocationController for Window {
    fn alloc_align(&self) -> usize {
        align_of::<f32>()
    }

    fn property(&self) -> AllocationProperty {
        AllocationProperty::Other
    }

    unsafe fn memory_mut(&mut self, policy: AccessPolicy) -> Result<&mut [MaybeUninit<u8>], AccessError> {
        if self.private.is_none() && !policy.copy_allowed() {
            return Err(AccessError::WouldCopy);
        }
        // The engine's memory is never written through a tensor.
        if self.private.is_none() {
            self.private = Some(self.elements().to_vec());
        }
        let private = self.private.get_or_insert_default();
        let bytes = size_of_val(private.as_slice());
        // SAFETY: as in `as_uninit`; the caller promises to write initialised bytes only.
        Ok(unsafe { std::slice::from_raw_parts_mut(private.as_mut_ptr().cast(), bytes) })
    }

    fn memory(&self, _: AccessPolicy) -> Result<&[MaybeUninit<u8>], AccessError> {
        Ok(as_uninit(self.elements()))
    }

    fn capacity(&self) -> usize {
        self.elements.len() * size_of::<f32>()
    }

    fn duplicate(&self) -> Option<Box<dyn AllocationController>> {
        Some(Box::new(self.clone()))
    }
}

/// The window of one parameter, as tensors see it.
#[derive(Clone, Debug)]
pub(crate) struct ParamView {
    bytes: Arc<Bytes>,
    shape: Vec<usize>,
}

impl ParamView {
    pub(crate) fn new(
        view: &Arc<FlatView>,
        elements: Range<usize>,
        path: &str,
        shape: &[usize],
        failure: &Failure,
    ) -> Self {
        let numel = elements.len();
        let window = Window {
            view: view.clone(),
            elements,
            path: path.into(),
            failure: failure.clone(),
            private: None,
            zeros: OnceLock::new(),
        };
        // SAFETY: the controller answers every request for memory with `numel` initialised elements.
        let bytes = unsafe { Bytes::from_controller(Box::new(window), numel * size_of::<f32>()) };
        Self { bytes: Arc::new(bytes), shape: shape.to_vec() }
    }

    /// Whether `tensor` reads from the window.
    pub(crate) fn is_behind(&self, tensor: &FlexTensor) -> bool {
        Arc::ptr_eq(&self.bytes, &tensor.data_arc())
    }

    /// A tensor over the window. Because this value holds the storage too, Burn never takes it for its own: it copies
    /// before it writes.
    pub(crate) fn tensor(&self) -> FlexTensor {
        let layout = Layout::contiguous(Shape::from(self.shape.clone()));
        FlexTensor::from_arc(self.bytes.clone(), layout, DType::F32)
    }
}
