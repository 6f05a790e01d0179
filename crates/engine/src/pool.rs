//! Buffers that are used again and again: allocated when first needed, never given back during a run.

use shardwise_comm::{GatherTarget, HostBuffer, SharedBuffer};
use shardwise_core::Purpose;

use crate::ledger::Ledger;

/// Free buffers of one kind.
#[derive(Debug)]
pub(crate) struct Pool<B> {
    purpose: Purpose,
    /// No buffer is allocated smaller, so that any unit can use any of them.
    least_numel: usize,
    free: Vec<B>,
}

impl<B: GatherTarget> Pool<B> {
    pub(crate) fn new(purpose: Purpose, least_numel: usize) -> Self {
        Self { purpose, least_numel, free: Vec::new() }
    }

    /// The smallest free buffer with at least `numel` elements, or a new one from `allocate`.
    pub(crate) fn take<E>(
        &mut self,
        numel: usize,
        ledger: &mut Ledger,
        allocate: impl FnOnce(usize) -> Result<B, E>,
    ) -> Result<B, E> {
        let fitting = self.free.iter().enumerate().filter(|(_, b)| b.numel() >= numel);
        if let Some((index, _)) = fitting.min_by_key(|(_, b)| b.numel()) {
            return Ok(self.free.swap_remove(index));
        }
        let numel = numel.max(self.least_numel);
        let buffer = allocate(numel)?;
        ledger.add(self.purpose, numel);
        Ok(buffer)
    }

    pub(crate) fn give(&mut self, buffer: B) {
        self.free.push(buffer);
    }

    /// Whether [`Pool::take`] needs no allocation.
    pub(crate) fn has(&self, numel: usize) -> bool {
        self.free.iter().any(|b| b.numel() >= numel)
    }
}

/// Gathered parameters.
pub(crate) type GatherPool = Pool<HostBuffer>;
/// Full gradients, which peers read in place.
pub(crate) type GradientPool = Pool<SharedBuffer>;
