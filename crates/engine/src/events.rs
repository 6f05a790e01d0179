//! What the engine did, in order: gathers, releases, reductions, updates.

use crate::config::UnitId;

/// One thing that happened to a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EventKind {
    /// A gather was started.
    GatherStarted,
    /// What rests elsewhere has begun to come in.
    ReadStarted,
    /// The full parameters are here.
    Gathered,
    /// The unit computes its forward.
    Forward,
    /// The unit computes its backward.
    Backward,
    /// The full parameters were freed.
    Released,
    /// The full gradient was lent for its reduction.
    ReduceStarted,
    /// The sum has arrived in the gradient shard.
    Reduced,
    /// The parameters were updated.
    Updated,
}

/// An event of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Event {
    /// The step, counted from 1.
    pub step: u64,
    /// The round of micro-batches in the step.
    pub round: usize,
    /// Which unit.
    pub unit: UnitId,
    /// What happened.
    pub kind: EventKind,
}

/// Events since the log was switched on.
#[derive(Debug, Default)]
pub(crate) struct EventLog {
    events: Option<Vec<Event>>,
}

impl EventLog {
    pub(crate) fn switch(&mut self, on: bool) {
        self.events = on.then(Vec::new);
    }

    pub(crate) fn push(&mut self, event: Event) {
        if let Some(events) = &mut self.events {
            events.push(event);
        }
    }

    pub(crate) fn take(&mut self) -> Vec<Event> {
        self.events.as_mut().map(std::mem::take).unwrap_or_default()
    }
}
