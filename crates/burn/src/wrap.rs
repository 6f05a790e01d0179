//! Which wrapped layers become units, which parameters stay out of them, and who owns each.
//!
//! The policies are those of PyTorch FSDP (`auto_wrap_policy`, `ignored_modules`) and DeepSpeed
//! (`param_persistence_threshold`). Only a layer in a [`crate::Sharded`] wrapper can become a unit, because a unit needs
//! the wrapper's call; one that the policy does not choose computes as a part of what surrounds it.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;

use burn::module::ParamId;

use crate::error::ShardError;
use crate::walk::Found;

/// A wrapped layer that a policy may choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate<'a> {
    /// The layer's path; empty for the model itself.
    pub path: &'a str,
    /// The type of the layer, as Burn names it: `Linear` for a struct of that name.
    pub container: &'a str,
    /// Elements that would be the unit's own: those in it, without those of units inside it.
    pub numel: usize,
}

type Choice = Arc<dyn Fn(&Candidate<'_>) -> bool + Send + Sync>;
type Paths = Arc<dyn Fn(&str) -> bool + Send + Sync>;

/// Which wrapped layers become units.
#[derive(Clone, Default)]
pub enum WrapPolicy {
    /// Every one: units are chosen by hand, where the wrapper is written.
    #[default]
    Every,
    /// Those of one of these types.
    Containers(Vec<String>),
    /// Those with at least so many elements of their own, the inner ones chosen first.
    MinNumel(usize),
    /// Those that the function chooses, asked for the inner ones first.
    Choose(Choice),
}

impl WrapPolicy {
    /// Those of one of the types `names`.
    pub fn containers<S: Into<String>>(names: impl IntoIterator<Item = S>) -> Self {
        WrapPolicy::Containers(names.into_iter().map(Into::into).collect())
    }

    /// Those that `choose` is true for.
    pub fn choose(choose: impl Fn(&Candidate<'_>) -> bool + Send + Sync + 'static) -> Self {
        WrapPolicy::Choose(Arc::new(choose))
    }

    /// None: the model is one root.
    pub fn nothing() -> Self {
        WrapPolicy::Containers(Vec::new())
    }

    fn chooses(&self, candidate: &Candidate<'_>) -> bool {
        match self {
            WrapPolicy::Every => true,
            WrapPolicy::Containers(names) => names.iter().any(|name| name == candidate.container),
            WrapPolicy::MinNumel(least) => candidate.numel >= *least,
            WrapPolicy::Choose(choose) => choose(candidate),
        }
    }
}

impl fmt::Debug for WrapPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WrapPolicy::Every => f.write_str("Every"),
            WrapPolicy::Containers(names) => f.debug_tuple("Containers").field(names).finish(),
            WrapPolicy::MinNumel(least) => f.debug_tuple("MinNumel").field(least).finish(),
            WrapPolicy::Choose(_) => f.write_str("Choose"),
        }
    }
}

/// What ignoring a parameter means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Ignored {
    /// It is not sharded: every rank keeps it whole; its gradient is reduced as all others, and every rank updates it alike.
    #[default]
    Replicated,
    /// It is left alone: it keeps the value that each rank's module has, is never trained and is in no export. The running
    /// statistics of Burn's `BatchNorm` are always so: each rank's layer updates its own.
    Local,
}

/// Which small parameters stay whole on every rank, never gathered; their gradients are reduced all the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Persistence {
    /// The most elements of such a parameter (`param_persistence_threshold`).
    pub param_threshold: usize,
    /// The most elements of all of them together, in the order of the module walk (`model_persistence_threshold`).
    pub model_threshold: usize,
}

impl Default for Persistence {
    /// None.
    fn default() -> Self {
        Self { param_threshold: 0, model_threshold: usize::MAX }
    }
}

/// How a rank keeps a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Keep {
    #[default]
    Sharded,
    Replicated,
    Local,
}

/// Everything that decides what becomes a unit and who owns what.
#[derive(Clone, Default)]
pub(crate) struct Wrapping {
    pub(crate) policy: WrapPolicy,
    pub(crate) ignored: Vec<(Ignored, Paths)>,
    pub(crate) persistence: Persistence,
    /// Pairs of a unit's path and the path of a parameter of another unit that it uses.
    pub(crate) external: Vec<(String, String)>,
}

impl fmt::Debug for Wrapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wrapping")
            .field("policy", &self.policy)
            .field("ignored", &self.ignored.len())
            .field("persistence", &self.persistence)
            .field("external", &self.external)
            .finish()
    }
}

impl Wrapping {
    /// Decides for everything that the walk has `found`.
    ///
    /// # Errors
    /// When the policies name what is not there, or a tied parameter is trained under one path and frozen under another.
    pub(crate) fn apply(&self, found: &mut Found) -> Result<(), ShardError> {
        check_ties(found)?;
        self.choose_units(found)?;
        self.choose_keepers(found);
        self.choose_owners(found)
    }

    /// What the first rule that fits `path` says.
    pub(crate) fn ignored(&self, path: &str) -> Option<Ignored> {
        self.ignored.iter().find(|(_, paths)| paths(path)).map(|(ignored, _)| *ignored)
    }

    /// Leaves only the chosen units; what lies in another goes to the unit around it.
    fn choose_units(&self, found: &mut Found) -> Result<(), ShardError> {
        if let WrapPolicy::Containers(names) = &self.policy {
            let is_there = |name: &&String| found.units.iter().any(|unit| unit.container() == name.as_str());
            if let Some(missing) = names.iter().find(|name| !is_there(name)) {
                let mut there: Vec<String> =
                    found.units.iter().map(|unit| unit.container().to_string()).collect();
                there.sort_unstable();
                there.dedup();
                return Err(ShardError::NoSuchContainer { name: missing.clone(), there });
            }
        }
        let mut chosen = vec![false; found.units.len()];
        // A unit is met before those inside it, so backwards the inner ones come first.
        for index in (0..found.units.len()).rev() {
            let mut seen = HashSet::new();
            let own =
                |unit: Option<usize>| nearest(found, unit, |at| chosen[at] || at == index) == Some(index);
            let numel =
                found.params.iter().filter(|p| own(p.unit) && seen.insert(p.id)).map(|p| p.spec.numel());
            let numel = numel.sum();
            let unit = &found.units[index];
            chosen[index] =
                self.policy.chooses(&Candidate { path: &unit.name, container: unit.container(), numel });
        }
        let new_index: Vec<usize> =
            (0..chosen.len()).map(|i| chosen[..i].iter().filter(|c| **c).count()).collect();
        let renumbered = |unit| nearest(found, unit, |at| chosen[at]).map(|at: usize| new_index[at]);
        let units_of_params: Vec<_> = found.params.iter().map(|p| renumbered(p.unit)).collect();
        let parents: Vec<_> = found.units.iter().map(|unit| renumbered(unit.parent)).collect();
        found.params.iter_mut().zip(units_of_params).for_each(|(param, unit)| param.unit = unit);
        found.units.iter_mut().zip(parents).for_each(|(unit, parent)| unit.parent = parent);
        let mut at = chosen.into_iter();
        found.units.retain(|_| at.next().unwrap_or(true));
        Ok(())
    }

    fn choose_keepers(&self, found: &mut Found) {
        let mut keep: HashMap<ParamId, Keep> = HashMap::new();
        for param in &found.params {
            // A tie is ignored under all of its paths if it is under one.
            match self.ignored(&param.spec.path) {
                Some(Ignored::Local) => keep.insert(param.id, Keep::Local),
                Some(Ignored::Replicated) => keep.insert(param.id, Keep::Replicated),
                // What a layer updates by itself cannot be kept for it.
                None if param.is_buffer => keep.insert(param.id, Keep::Local),
                None => None,
            };
        }
        let mut total = 0;
        for param in &found.params {
            let numel = param.spec.numel();
            if numel > 0
                && numel <= self.persistence.param_threshold
                && numel <= self.persistence.model_threshold.saturating_sub(total)
                && param.spec.dtype.is_float()
            {
                keep.entry(param.id).or_insert_with(|| {
                    total += numel;
                    Keep::Replicated
                });
            }
        }
        for param in &mut found.params {
            param.keep = keep.get(&param.id).copied().unwrap_or_default();
        }
    }

    /// A parameter belongs to the innermost unit around all of its uses; replicated ones to the root.
    fn choose_owners(&self, found: &mut Found) -> Result<(), ShardError> {
        let mut external: HashSet<(ParamId, Option<usize>)> = HashSet::new();
        for (unit, path) in &self.external {
            external.insert(external_use(found, unit, path)?);
        }
        let mut owners: HashMap<ParamId, Option<usize>> = HashMap::new();
        for param in found.params.iter().filter(|p| !external.contains(&(p.id, p.unit))) {
            let owner = match (owners.get(&param.id), param.keep) {
                (_, Keep::Replicated) => None,
                (None, _) => param.unit,
                (Some(other), _) => common_ancestor(found, *other, param.unit),
            };
            owners.insert(param.id, owner);
        }
        for param in &mut found.params {
            param.owner = owners.get(&param.id).copied().unwrap_or(param.unit);
        }
        Ok(())
    }
}

/// The innermost of the units around (and with) `unit` for which `is_it` is true.
fn nearest(found: &Found, unit: Option<usize>, mut is_it: impl FnMut(usize) -> bool) -> Option<usize> {
    let mut at = unit;
    while let Some(index) = at.filter(|index| !is_it(*index)) {
        at = found.units[index].parent;
    }
    at
}

/// The innermost unit that holds both; `None` is the root.
fn common_ancestor(found: &Found, a: Option<usize>, b: Option<usize>) -> Option<usize> {
    let mut around = HashSet::new();
    nearest(found, a, |at| !around.insert(at));
    nearest(found, b, |at| around.contains(&at))
}

/// The use of the parameter at `path` in `unit`, which is not its owner.
fn external_use(found: &Found, unit: &str, path: &str) -> Result<(ParamId, Option<usize>), ShardError> {
    let refuse = |message: &str| ShardError::External {
        unit: unit.to_string(),
        path: path.to_string(),
        message: message.to_string(),
    };
    let Some(user) = found.units.iter().position(|u| u.name == unit) else {
        return Err(refuse("there is no such unit"));
    };
    let Some(param) = found.params.iter().find(|p| p.spec.path == path) else {
        return Err(refuse("there is no such parameter"));
    };
    if param.unit == Some(user) {
        return Err(refuse(
            "the parameter lies in that very unit; name it by its path in the unit that owns it",
        ));
    }
    if !found.params.iter().any(|p| p.id == param.id && p.unit == Some(user)) {
        return Err(refuse("the unit does not hold it; give the unit's layer a clone of the parameter"));
    }
    Ok((param.id, Some(user)))
}

/// A tie is trained or frozen as a whole.
fn check_ties(found: &Found) -> Result<(), ShardError> {
    let mut first: HashMap<ParamId, usize> = HashMap::new();
    for (index, param) in found.params.iter().enumerate() {
        let met = &found.params[*first.entry(param.id).or_insert(index)];
        if met.spec.requires_grad != param.spec.requires_grad {
            let (trained, frozen) = if param.spec.requires_grad { (param, met) } else { (met, param) };
            return Err(ShardError::TieHalfFrozen {
                trained: trained.spec.path.clone(),
                frozen: frozen.spec.path.clone(),
            });
        }
    }
    Ok(())
}
