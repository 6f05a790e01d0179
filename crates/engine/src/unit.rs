//! A unit: the flat parameters that are gathered, used and freed together.

use std::ops::{Index, IndexMut};

use crate::config::UnitId;
use crate::handle::FlatParamHandle;

/// The flat parameters of one unit (one for what is trained, one for what is frozen), and who uses them.
#[derive(Debug, Default)]
pub(crate) struct Unit {
    pub(crate) parts: Vec<FlatParamHandle>,
    /// Calls that compute with the full parameters now.
    pub(crate) users: usize,
    /// Forward calls of the current micro-batch whose backward is still to come.
    pub(crate) calls: usize,
    /// Whether the last backward of the current step has been, if the step is taken inside backward.
    pub(crate) complete: bool,
    /// Whether the full parameters stay although nobody uses them, because they soon will be.
    pub(crate) kept: bool,
}

impl Unit {
    /// Elements of the full flat parameters, padding included.
    pub(crate) fn padded_numel(&self) -> usize {
        self.parts.iter().map(|part| part.layout().padded_numel()).sum()
    }
}

/// All units of a model, the root first.
#[derive(Debug)]
pub(crate) struct Units(Vec<Unit>);

impl Units {
    pub(crate) fn new(root: Vec<FlatParamHandle>, units: Vec<Vec<FlatParamHandle>>) -> Self {
        let unit = |parts| Unit { parts, ..Unit::default() };
        Self(std::iter::once(root).chain(units).map(unit).collect())
    }

    /// Every unit with parameters, the root first: the order of collectives.
    pub(crate) fn ids(&self) -> impl Iterator<Item = UnitId> + use<> {
        let with_params: Vec<UnitId> =
            (0..self.0.len()).filter(|i| !self.0[*i].parts.is_empty()).map(UnitId::at).collect();
        with_params.into_iter()
    }

    /// The units without the root.
    pub(crate) fn ids_without_root(&self) -> impl Iterator<Item = UnitId> + use<> {
        (1..self.0.len()).map(UnitId::at)
    }

    /// The places of all flat parameters, in the order of collectives.
    pub(crate) fn places(&self) -> Vec<Place> {
        let parts =
            |i: usize| (0..self.0[i].parts.len()).map(move |part| Place { unit: UnitId::at(i), part });
        (0..self.0.len()).flat_map(parts).collect()
    }

    /// The index of a flat parameter among all, in the order of collectives.
    pub(crate) fn index_of(&self, at: Place) -> usize {
        self.0[..at.unit.index()].iter().map(|unit| unit.parts.len()).sum::<usize>() + at.part
    }

    /// Begins a step in which no unit is complete.
    pub(crate) fn begin_step(&mut self) {
        self.0.iter_mut().for_each(|unit| unit.complete = false);
    }

    pub(crate) fn handles(&self) -> impl Iterator<Item = &FlatParamHandle> {
        self.0.iter().flat_map(|unit| &unit.parts)
    }

    pub(crate) fn handles_mut(&mut self) -> impl Iterator<Item = &mut FlatParamHandle> {
        self.0.iter_mut().flat_map(|unit| &mut unit.parts)
    }
}

impl Index<UnitId> for Units {
    type Output = Unit;

    fn index(&self, id: UnitId) -> &Unit {
        &self.0[id.index()]
    }
}

impl IndexMut<UnitId> for Units {
    fn index_mut(&mut self, id: UnitId) -> &mut Unit {
        &mut self.0[id.index()]
    }
}

/// Names one flat parameter: a unit's part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) unit: UnitId,
    pub(crate) part: usize,
}

impl Index<Place> for Units {
    type Output = FlatParamHandle;

    fn index(&self, at: Place) -> &FlatParamHandle {
        &self[at.unit].parts[at.part]
    }
}

impl IndexMut<Place> for Units {
    fn index_mut(&mut self, at: Place) -> &mut FlatParamHandle {
        &mut self[at.unit].parts[at.part]
    }
}
