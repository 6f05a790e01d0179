//! The order in which units compute, and which one to gather ahead.
//!
//! The order of one micro-batch is recorded and serves as a hint for the next: a call that differs from it costs the
//! prefetch, never correctness. Every rank runs the same program, so every rank prefetches the same.

use crate::config::UnitId;

/// The recorded order of forward calls, and where the current pass is in it.
#[derive(Debug, Default)]
pub struct Coordinator {
    /// The order of forward calls that is expected.
    expected: Vec<UnitId>,
    /// The forward calls of the current micro-batch.
    calls: Vec<UnitId>,
    /// How many of them have their backward still to come.
    pending: usize,
}

impl Coordinator {
    /// Expects the units in the order of the module walk until a micro-batch has been seen.
    pub fn new(units: usize) -> Self {
        Self { expected: (0..units).map(UnitId::unit).collect(), calls: Vec::new(), pending: 0 }
    }

    /// The order that is expected of the next micro-batch.
    pub fn expected(&self) -> &[UnitId] {
        &self.expected
    }

    /// The first unit that a micro-batch is expected to use.
    pub fn first(&self) -> Option<UnitId> {
        self.expected.first().copied()
    }

    /// Notes a forward call and returns the unit that is expected to come next.
    pub fn forward(&mut self, unit: UnitId) -> Option<UnitId> {
        let at = self.calls.len();
        self.calls.push(unit);
        self.pending = self.calls.len();
        if self.expected.get(at) == Some(&unit) { self.expected.get(at + 1).copied() } else { None }
    }

    /// After the last expected forward call: the unit whose backward comes first.
    pub fn turning_point(&self) -> Option<UnitId> {
        if self.calls.len() == self.expected.len() { self.calls.last().copied() } else { None }
    }

    /// Whether every expected forward call has come.
    pub fn is_complete(&self) -> bool {
        self.calls.len() >= self.expected.len()
    }

    /// Notes that the backward of one call of `unit` begins and returns the unit that is expected to come next.
    pub fn backward(&mut self, unit: UnitId) -> Option<UnitId> {
        match self.calls[..self.pending].iter().rposition(|u| *u == unit) {
            Some(at) => {
                self.pending = at;
                self.calls[..at].last().copied()
            }
            None => None,
        }
    }

    /// Ends a micro-batch: its order is what the next one is expected to follow.
    pub fn end_round(&mut self) {
        if !self.calls.is_empty() {
            std::mem::swap(&mut self.expected, &mut self.calls);
            self.calls.clear();
        }
        self.pending = 0;
    }
}
