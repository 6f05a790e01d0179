//! Which rank computes which micro-batch, and how many collectives a step takes.

use crate::error::PlanError;
use crate::strategy::ShardingStrategy;

/// What a rank does in one round of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RoundAssignment {
    /// It computes this micro-batch of the global batch.
    Compute(usize),
    /// It has none left: it takes part in every collective and contributes zeros.
    Idle,
}

/// How the micro-batches of one step are spread over ranks: micro-batch `m` goes to rank `m mod ranks`, in round
/// `m / ranks`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepSchedule {
    micro_batches: usize,
    ranks: usize,
}

/// The collectives of one step over all units: `n` units and (if it has parameters) the root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CollectiveCounts {
    /// All-gathers of the root's parameters.
    pub root_gathers: usize,
    /// All-gathers of units' parameters in forward.
    pub forward_gathers: usize,
    /// All-gathers of units' parameters in backward.
    pub backward_gathers: usize,
    /// Reductions of full gradients, the root's included.
    pub reductions: usize,
    /// All-gathers of summed gradients (only without sharding).
    pub gradient_gathers: usize,
}

impl StepSchedule {
    /// Spreads `global_batch` samples in micro-batches of `micro_batch` over `ranks`.
    ///
    /// # Errors
    /// When a count is zero, the micro-batch does not divide the global batch, or there are fewer micro-batches than
    /// ranks.
    pub fn new(global_batch: usize, micro_batch: usize, ranks: usize) -> Result<Self, PlanError> {
        for (name, value) in
            [("train.global_batch", global_batch), ("train.micro_batch", micro_batch), ("run.ranks", ranks)]
        {
            if value == 0 {
                return Err(PlanError::Zero { name });
            }
        }
        if !global_batch.is_multiple_of(micro_batch) {
            let suggestion = (1..=micro_batch.min(global_batch))
                .rev()
                .find(|d| global_batch.is_multiple_of(*d))
                .unwrap_or(1);
            return Err(PlanError::MicroBatchDoesNotDivide { global_batch, micro_batch, suggestion });
        }
        Self::of_micro_batches(global_batch / micro_batch, ranks)
    }

    /// Spreads `micro_batches` over `ranks`.
    ///
    /// # Errors
    /// When there are fewer micro-batches than ranks, or no ranks.
    pub fn of_micro_batches(micro_batches: usize, ranks: usize) -> Result<Self, PlanError> {
        if ranks == 0 {
            return Err(PlanError::Zero { name: "run.ranks" });
        }
        if micro_batches < ranks {
            return Err(PlanError::TooFewMicroBatches { micro_batches, ranks });
        }
        Ok(Self { micro_batches, ranks })
    }

    /// Micro-batches in a step, over all ranks.
    pub fn micro_batches(&self) -> usize {
        self.micro_batches
    }

    /// Ranks that share the step.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Rounds in a step: every rank computes at most one micro-batch in each.
    pub fn rounds(&self) -> usize {
        self.micro_batches.div_ceil(self.ranks)
    }

    /// What `rank` does in `round`.
    pub fn assignment(&self, round: usize, rank: usize) -> RoundAssignment {
        let micro_batch = round * self.ranks + rank;
        if micro_batch < self.micro_batches {
            RoundAssignment::Compute(micro_batch)
        } else {
            RoundAssignment::Idle
        }
    }

    /// The collectives that every rank takes part in during one step, for `units` units and, if `root`, a root unit.
    pub fn collectives(&self, strategy: ShardingStrategy, units: usize, root: bool) -> CollectiveCounts {
        let (k, root) = (self.rounds(), usize::from(root));
        if self.ranks == 1 {
            return CollectiveCounts {
                root_gathers: 0,
                forward_gathers: 0,
                backward_gathers: 0,
                reductions: 0,
                gradient_gathers: 0,
            };
        }
        CollectiveCounts {
            root_gathers: if strategy.is_sharded() { root } else { 0 },
            forward_gathers: if strategy.is_sharded() { units * k } else { 0 },
            backward_gathers: if strategy.reshards_after_forward() { units * k } else { 0 },
            reductions: (units + root) * k,
            gradient_gathers: if strategy.is_sharded() { 0 } else { units + root },
        }
    }
}
