//! Every byte that the engine holds, by purpose.

use shardwise_core::Purpose;

/// Bytes held now and at the peak, by purpose. Memory of the transport (its staging buffer) is counted apart.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ledger {
    held: [u64; Purpose::ALL.len()],
    peak: [u64; Purpose::ALL.len()],
    total_peak: u64,
    allocations: u64,
}

impl Ledger {
    /// Notes that `numel` f32 elements were allocated for `purpose`.
    pub(crate) fn add(&mut self, purpose: Purpose, numel: usize) {
        self.add_bytes(purpose, numel * size_of::<f32>());
    }

    /// Notes that `bytes` were allocated for `purpose`.
    pub(crate) fn add_bytes(&mut self, purpose: Purpose, bytes: usize) {
        let at = purpose as usize;
        self.held[at] += bytes as u64;
        self.peak[at] = self.peak[at].max(self.held[at]);
        self.total_peak = self.total_peak.max(self.total());
        self.allocations += 1;
    }

    /// Bytes held for one purpose.
    pub fn held(&self, purpose: Purpose) -> u64 {
        self.held[purpose as usize]
    }

    /// The most bytes that were held for one purpose.
    pub fn peak(&self, purpose: Purpose) -> u64 {
        self.peak[purpose as usize]
    }

    /// Bytes held for all purposes.
    pub fn total(&self) -> u64 {
        self.held.iter().sum()
    }

    /// The most bytes that were held at a time.
    pub fn total_peak(&self) -> u64 {
        self.total_peak
    }

    /// How many buffers have been allocated: constant once the second step has begun.
    pub fn allocations(&self) -> u64 {
        self.allocations
    }
}
