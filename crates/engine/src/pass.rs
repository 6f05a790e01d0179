//! What a unit's forward is for: a unit inside another takes part in the passes of that one.

/// Why a unit computes its forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum ForwardPass {
    /// For its output and, in a training step, for the backward to come.
    #[default]
    First,
    /// For its output alone: a unit around it will compute it again in backward.
    Untracked,
    /// Again, in the backward of a unit around it.
    Again,
}

impl ForwardPass {
    /// Whether a backward of this very call comes.
    pub(crate) fn has_backward(self) -> bool {
        self != ForwardPass::Untracked
    }

    /// Whether the call is part of the order that the next micro-batch is expected to follow.
    pub(crate) fn is_in_order(self) -> bool {
        self != ForwardPass::Again
    }
}
