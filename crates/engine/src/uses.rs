//! What a rank without a micro-batch does in a round: what it did in the last one, without computing.
//!
//! Gathers of what rests elsewhere, and those through nodes, are collectives in the order of use. That order is more than the
//! order of forward calls: a unit inside another is gathered while the outer one is, in backward too, and once more when the
//! outer one computes again. Full gradients have an order as well, since who writes one waits for those who read its buffer.
//! So a computing rank notes every use, and an idle one repeats them as they were.

use crate::Result;
use crate::config::UnitId;
use crate::engine::{Engine, Phase};
use crate::handle::GradientState;
use crate::pass::ForwardPass;
use crate::unit::Place;

/// One call of the adapter in a round.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Use {
    EnterForward(UnitId, ForwardPass),
    LeaveForward(UnitId, ForwardPass),
    EnterBackward(UnitId),
    LeaveBackward(UnitId),
    /// The first gradient of a flat parameter is written.
    Gradient(Place),
}

/// The uses of the current round, and of the one before.
#[derive(Debug, Default)]
pub(crate) struct Uses {
    current: Vec<Use>,
    last: Vec<Use>,
}

impl Uses {
    fn end_round(&mut self) {
        std::mem::swap(&mut self.last, &mut self.current);
        self.current.clear();
    }
}

impl Engine {
    /// Notes a use, if it belongs to a training round.
    pub(crate) fn note_use(&mut self, what: Use) {
        if matches!(self.phase, Phase::Round { .. }) {
            self.uses.current.push(what);
        }
    }

    /// Notes that a gradient is about to be written, if it is the first of its flat parameter.
    pub(crate) fn note_gradient(&mut self, at: Place) {
        let handle = &self.units[at];
        if handle.is_trainable() && !matches!(handle.gradient, GradientState::Writing { .. }) {
            self.note_use(Use::Gradient(at));
        }
    }

    /// Takes part in a round without computing: repeats the uses of the last round that this rank has computed and
    /// contributes zeros. Every rank computes in the first round of a step.
    ///
    /// # Errors
    /// Outside a round, or the first failure of the step.
    pub fn idle_round(&mut self) -> Result<()> {
        if !matches!(self.phase, Phase::Round { .. }) {
            return Err(self.wrong_state(UnitId::ROOT, "idle_round", "begin a round first"));
        }
        let uses = std::mem::take(&mut self.uses.last);
        for what in &uses {
            self.repeat(*what);
        }
        // What repeating has noted is the same once more.
        self.uses.last = std::mem::replace(&mut self.uses.current, uses);
        self.end_round()
    }

    fn repeat(&mut self, what: Use) {
        match what {
            Use::EnterForward(unit, pass) => self.enter_forward_in(unit, pass),
            Use::LeaveForward(unit, pass) => self.leave_forward_in(unit, pass),
            Use::EnterBackward(unit) => self.enter_backward(unit),
            Use::LeaveBackward(unit) => self.leave_backward(unit),
            Use::Gradient(at) => {
                self.note_gradient(at);
                let result = self.prepare_gradient(at);
                self.keep_failure(result);
            }
        }
    }

    /// Ends the round's order of gathers. A rank that still waits for one which others do not want is told so by this.
    pub(crate) fn end_uses(&mut self) {
        self.uses.end_round();
        if self.takes_turns() {
            drop(self.staged.start_reduce_scatter(END_OF_ROUND, None, 0));
        }
        if let Some(hops) = self.hops.as_ref().filter(|_| self.config.strategy.is_sharded()) {
            hops.end_round(END_OF_ROUND);
        }
    }
}

const END_OF_ROUND: &str = "end of round";
