//! What a unit's forward is for: a unit inside another takes part in the passes of that one.

/// Why a unit computes its forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum ForwardPass {
    /// For its output and, in a training step, for the backward to come.
    #[default]
    First,
    /// For its output alone: a unit around it will compute it again in backward, and then run its backward.
    Untracked,
    /// Again, in the backward of a unit around it: the call has been counted when it came first.
    Again,
}

impl ForwardPass {
    /// Whether the call is new: one more backward to come, and a part of the order that the next micro-batch is expected to
    /// follow.
    pub(crate) fn is_new(self) -> bool {
        self != ForwardPass::Again
    }
}
