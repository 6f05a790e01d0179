//! What a walk over a module finds: parameters with their paths, and the units they lie in.
//!
//! A [`crate::Sharded`] layer announces itself on the walking thread while its inside is visited, so that its name need
//! not appear in paths. The announcement lasts for one visit and is never looked at anywhere else.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{Bool, Device, Int, Tensor};
use shardwise_core::{DType, ParamSpec};

use crate::error::ShardError;
use crate::sharded::UnitSlot;
use crate::wrap::{Keep, Wrapping};

thread_local! {
    static OPEN_UNITS: RefCell<Vec<Arc<UnitSlot>>> = const { RefCell::new(Vec::new()) };
    static RENEWED: RefCell<Option<NewSlots>> = const { RefCell::new(None) };
}

/// Ends the announcement of a unit.
pub(crate) struct Inside;

impl Drop for Inside {
    fn drop(&mut self) {
        OPEN_UNITS.with_borrow_mut(|units| units.pop());
    }
}

/// Announces that the walk is inside a unit.
pub(crate) fn enter_unit(slot: &Arc<UnitSlot>) -> Inside {
    OPEN_UNITS.with_borrow_mut(|units| units.push(slot.clone()));
    Inside
}

/// The slots that took the places of others, by the address of the old slot; the old one is kept so that its address stays
/// its own.
pub(crate) type NewSlots = HashMap<*const UnitSlot, (Arc<UnitSlot>, Arc<UnitSlot>)>;

/// Runs `map`, a mapping of a module, so that the result's units have slots of their own: what is linked there is not
/// linked in the original, nor in another model made from it. Returns the new slots too.
pub(crate) fn renew_slots<T>(map: impl FnOnce() -> T) -> (T, NewSlots) {
    struct Off;
    impl Drop for Off {
        fn drop(&mut self) {
            RENEWED.set(None);
        }
    }
    RENEWED.set(Some(NewSlots::new()));
    let _off = Off;
    let result = map();
    (result, RENEWED.take().unwrap_or_default())
}

/// The slot for a mapped unit: its own, or inside [`renew_slots`] the new one, which all clones of the unit share.
pub(crate) fn slot_after_map(slot: Arc<UnitSlot>) -> Arc<UnitSlot> {
    RENEWED.with_borrow_mut(|renewed| match renewed {
        None => slot,
        Some(renewed) => {
            let new = || (slot.clone(), Arc::<UnitSlot>::default());
            renewed.entry(Arc::as_ptr(&slot)).or_insert_with(new).1.clone()
        }
    })
}

fn open_units() -> Vec<Arc<UnitSlot>> {
    OPEN_UNITS.with_borrow(Vec::clone)
}

/// A unit as the walk met it.
#[derive(Debug, Clone)]
pub(crate) struct FoundUnit {
    /// The path of the layer.
    pub(crate) name: String,
    pub(crate) slot: Arc<UnitSlot>,
    /// Burn's name for the layer's type, such as `Struct:Linear`.
    container: String,
    /// The unit around it, by index; `None` for the root.
    pub(crate) parent: Option<usize>,
}

impl FoundUnit {
    /// The layer's type without Burn's `Struct:` or `Enum:`.
    pub(crate) fn container(&self) -> &str {
        self.container.split_once(':').map_or(&self.container, |(_, name)| name)
    }
}

/// A parameter as the walk met it.
#[derive(Debug, Clone)]
pub(crate) struct FoundParam {
    pub(crate) id: ParamId,
    pub(crate) spec: ParamSpec,
    pub(crate) device: Device,
    /// Whether it is a running statistic, which layers update by themselves.
    pub(crate) is_buffer: bool,
    /// The unit that it was met in, by index; `None` for the root.
    pub(crate) unit: Option<usize>,
    /// The unit whose flat parameter it is part of: that of all its uses. Decided after the walk.
    pub(crate) owner: Option<usize>,
    /// Decided after the walk.
    pub(crate) keep: Keep,
}

/// Everything a walk met, in its order.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// A unit comes before those inside it.
    pub(crate) units: Vec<FoundUnit>,
    pub(crate) params: Vec<FoundParam>,
}

impl Found {
    /// Walks over `module` without initialising anything, and decides what is a unit and who owns what. `dtypes` are the
    /// types of parameters that were taken into shards before: what stands in their places is f32, whatever they were.
    ///
    /// # Errors
    /// When `wrapping` does not fit the module.
    pub(crate) fn in_module<M: Module>(
        module: &M,
        wrapping: &Wrapping,
        dtypes: HashMap<ParamId, DType>,
    ) -> Result<Self, ShardError> {
        let mut walker = Walker { dtypes, ..Walker::default() };
        module.visit(&mut walker);
        let mut found = walker.found;
        wrapping.apply(&mut found)?;
        Ok(found)
    }

    /// Lets the units be those of the module that [`renew_slots`] has made.
    pub(crate) fn take_slots(&mut self, slots: &NewSlots) {
        for unit in &mut self.units {
            if let Some((_, new)) = slots.get(&Arc::as_ptr(&unit.slot)) {
                unit.slot = new.clone();
            }
        }
    }
}

/// The running statistics in `module`.
pub(crate) fn buffers<M: Module>(module: &M) -> HashSet<ParamId> {
    let mut walker = Walker::default();
    module.visit(&mut walker);
    walker.found.params.iter().filter(|param| param.is_buffer).map(|param| param.id).collect()
}

/// The elements of each float parameter in `module`, without initialising any.
pub(crate) fn numels<M: Module>(module: &M) -> BTreeMap<ParamId, usize> {
    let mut walker = Walker::default();
    module.visit(&mut walker);
    let floats = walker.found.params.iter().filter(|param| param.spec.dtype.is_float());
    floats.map(|param| (param.id, param.spec.numel())).collect()
}

#[derive(Default)]
struct Walker {
    found: Found,
    /// Of the parameters whose types are known without a look at them.
    dtypes: HashMap<ParamId, DType>,
    path: Vec<String>,
    /// The type that holds each name of the path.
    containers: Vec<String>,
}

impl Walker {
    /// The innermost unit that the walk is in; units are entered into the list at their first sight, when `path` is still
    /// the layer's own and `container` its type.
    fn current_unit(&mut self, container: &str) -> Option<usize> {
        let mut parent = None;
        for slot in open_units() {
            let index = match self.found.units.iter().position(|u| Arc::ptr_eq(&u.slot, &slot)) {
                Some(index) => index,
                None => {
                    let (name, container) = (self.path.join("."), container.to_string());
                    self.found.units.push(FoundUnit { name, slot, container, parent });
                    self.found.units.len() - 1
                }
            };
            parent = Some(index);
        }
        parent
    }

    /// Burn shows running statistics to visitors as if they were frozen parameters.
    fn is_buffer(&self) -> bool {
        let is = |name: &Vec<String>, what: &str| name.last().is_some_and(|n| n.starts_with(what));
        is(&self.containers, "Struct:BatchNorm") && is(&self.path, "running_")
    }

    fn push(&mut self, id: ParamId, shape: &[usize], kind: (DType, bool), device: Device) {
        let unit = self.current_unit("Param");
        let spec = ParamSpec {
            path: self.path.join("."),
            identity: id.val(),
            shape: shape.to_vec(),
            dtype: kind.0,
            requires_grad: kind.1,
            owner: None,
        };
        self.found.params.push(FoundParam {
            id,
            spec,
            device,
            is_buffer: self.is_buffer(),
            unit,
            owner: unit,
            keep: Keep::Sharded,
        });
    }
}

impl ModuleVisitor for Walker {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.current_unit(container);
        self.path.push(name.to_string());
        self.containers.push(container.to_string());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
        self.containers.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let dtype = self.dtypes.get(&param.id).copied().unwrap_or_else(|| dtype_of(param));
        let kind = (dtype, requires_grad(param));
        self.push(param.id, param.lazy_shape().as_slice(), kind, param.lazy_device());
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.push(param.id, param.lazy_shape().as_slice(), (DType::Int, false), param.lazy_device());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.push(param.id, param.lazy_shape().as_slice(), (DType::Int, false), param.lazy_device());
    }
}

/// The type of a parameter's value; f32 for one that has none yet.
pub(crate) fn dtype_of<const D: usize>(param: &Param<Tensor<D>>) -> DType {
    if param.is_initialized() { float_dtype(param.val().dtype()) } else { DType::F32 }
}

fn float_dtype(dtype: burn::tensor::DType) -> DType {
    match dtype {
        burn::tensor::DType::F32 => DType::F32,
        burn::tensor::DType::BF16 => DType::BF16,
        burn::tensor::DType::F16 => DType::F16,
        burn::tensor::DType::F64 => DType::F64,
        _ => DType::Int,
    }
}

/// Whether a parameter is trained, without initialising it: Burn tells this only of values, so a stand-in of one element
/// takes the parameter's place.
pub(crate) fn requires_grad<const D: usize>(param: &Param<Tensor<D>>) -> bool {
    let stand_in = Tensor::<D>::zeros([1; D], &param.lazy_device());
    if param.is_initialized() {
        return param.is_require_grad();
    }
    param.clone().transform_for_load(stand_in, param.id).is_require_grad()
}
