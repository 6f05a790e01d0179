//! The order in which units compute: what to gather ahead, and what is soon used again.
//!
//! The order of one micro-batch is recorded and serves as a hint for the next: a call that differs from it costs the
//! prefetch, never correctness. Training and evaluation have records of their own, so that they can take turns.

use crate::config::UnitId;

/// The recorded order of forward calls, and where the current pass is in it.
#[derive(Debug, Default)]
pub struct Coordinator {
    training: Trace,
    evaluation: Trace,
    evaluating: bool,
    /// Calls that came out of the recorded order.
    deviations: u64,
}

#[derive(Debug, Default, Clone)]
struct Trace {
    /// The order of forward calls that is expected.
    expected: Vec<UnitId>,
    /// The forward calls of the current micro-batch.
    calls: Vec<UnitId>,
    /// How many of them have their backward still to come.
    pending: usize,
    /// Whether `expected` has been seen, and is not only the order of the model.
    is_recorded: bool,
}

impl Coordinator {
    /// Expects the units in the order of the module walk until a micro-batch has been seen.
    pub fn new(units: usize) -> Self {
        let trace = Trace { expected: (0..units).map(UnitId::unit).collect(), ..Trace::default() };
        Self { training: trace.clone(), evaluation: trace, evaluating: false, deviations: 0 }
    }

    fn trace(&self) -> &Trace {
        if self.evaluating { &self.evaluation } else { &self.training }
    }

    fn trace_mut(&mut self) -> &mut Trace {
        if self.evaluating { &mut self.evaluation } else { &mut self.training }
    }

    /// Says whether the next calls belong to an evaluation.
    pub fn evaluate(&mut self, evaluating: bool) {
        self.evaluating = evaluating;
    }

    /// How many calls of training have come out of the order recorded before.
    pub fn deviations(&self) -> u64 {
        self.deviations
    }

    /// Notes a forward call.
    pub fn forward(&mut self, unit: UnitId) {
        let trace = self.trace_mut();
        let at = trace.calls.len();
        trace.calls.push(unit);
        trace.pending = trace.calls.len();
        let deviates = trace.is_recorded && trace.expected.get(at) != Some(&unit);
        self.deviations += u64::from(deviates && !self.evaluating);
    }

    /// The units that are expected to come next in forward; none when the last call was not the expected one.
    pub fn next_in_forward(&self) -> &[UnitId] {
        let trace = self.trace();
        let at = trace.calls.len();
        if at == 0 || trace.expected.get(at - 1) == trace.calls.last() {
            trace.expected.get(at..).unwrap_or_default()
        } else {
            &[]
        }
    }

    /// Whether every expected forward call has come.
    pub fn is_complete(&self) -> bool {
        self.trace().calls.len() >= self.trace().expected.len()
    }

    /// Whether the expected number of forward calls has just come: backward is next.
    pub fn turns(&self) -> bool {
        let trace = self.trace();
        trace.pending == trace.calls.len() && trace.calls.len() == trace.expected.len()
    }

    /// Notes that the backward of one call of `unit` begins.
    pub fn backward(&mut self, unit: UnitId) {
        let trace = self.trace_mut();
        if let Some(at) = trace.calls[..trace.pending].iter().rposition(|u| *u == unit) {
            trace.pending = at;
        }
    }

    /// The units that are expected to come next in backward.
    pub fn next_in_backward(&self) -> impl Iterator<Item = UnitId> + Clone + '_ {
        let trace = self.trace();
        trace.calls[..trace.pending].iter().rev().copied()
    }

    /// The units that compute between the last forward call, which was of `unit`, and its next use.
    pub fn until_reuse_after_forward(&self, unit: UnitId) -> Vec<UnitId> {
        let mut between = Vec::new();
        for next in self.next_in_forward() {
            if *next == unit {
                return between;
            }
            between.push(*next);
        }
        // Forth and back.
        let back: Vec<UnitId> = between.iter().rev().copied().collect();
        between.extend(back);
        between
    }

    /// The units that compute between the backward of a call of `unit` and its next use in this round, or in the next one
    /// if there is `another_round`; `None` when it is not used again.
    pub fn until_reuse_after_backward(&self, unit: UnitId, another_round: bool) -> Option<Vec<UnitId>> {
        let mut between = Vec::new();
        for next in self.next_in_backward() {
            if next == unit {
                return Some(between);
            }
            between.push(next);
        }
        if !another_round {
            return None;
        }
        // The next round repeats this one's calls.
        between.extend(self.trace().calls.iter().copied().take_while(|next| *next != unit));
        Some(between)
    }

    /// Ends a micro-batch: its order is what the next one is expected to follow.
    pub fn end_round(&mut self) {
        let trace = self.trace_mut();
        if !trace.calls.is_empty() {
            std::mem::swap(&mut trace.expected, &mut trace.calls);
            trace.calls.clear();
            trace.is_recorded = true;
        }
        trace.pending = 0;
    }
}
