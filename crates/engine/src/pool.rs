//! Buffers that are used again and again: allocated when first needed, never given back during a run.

use shardwise_comm::{GatherTarget, HostBuffer, SharedBuffer};
use shardwise_core::{FlatLayout, Purpose, Quantization};

use crate::config::{Accumulation, EngineConfig};
use crate::ledger::Ledger;

/// Free buffers of one kind.
#[derive(Debug)]
pub(crate) struct Pool<B> {
    purpose: Purpose,
    /// No buffer is allocated smaller, so that any unit can use any of them.
    least_numel: usize,
    /// What is kept of each part behind all parts, and how many there are.
    quantised: Option<(Quantization, usize)>,
    free: Vec<B>,
}

impl<B: GatherTarget> Pool<B> {
    pub(crate) fn new(purpose: Purpose, least_numel: usize) -> Self {
        Self { purpose, least_numel, quantised: None, free: Vec::new() }
    }

    /// The same, with room for quantised parts behind all parts.
    fn quantised(self, quantised: Option<(Quantization, usize)>) -> Self {
        Self { quantised, ..self }
    }

    /// f32 words behind `numel` elements.
    fn words_behind(&self, numel: usize) -> usize {
        self.quantised.map_or(0, |(how, parts)| parts * how.bytes(numel / parts) / size_of::<f32>())
    }

    /// The smallest free buffer with room for at least `numel` elements, or a new one from `allocate`.
    pub(crate) fn take<E>(
        &mut self,
        numel: usize,
        ledger: &mut Ledger,
        allocate: impl FnOnce(usize) -> Result<B, E>,
    ) -> Result<B, E> {
        let words = numel + self.words_behind(numel);
        let fitting = self.free.iter().enumerate().filter(|(_, b)| b.numel() >= words);
        if let Some((index, _)) = fitting.min_by_key(|(_, b)| b.numel()) {
            return Ok(self.free.swap_remove(index));
        }
        self.allocate(numel, ledger, allocate)
    }

    /// Adds a free buffer with room for `numel` elements.
    pub(crate) fn add<E>(
        &mut self,
        numel: usize,
        ledger: &mut Ledger,
        allocate: impl FnOnce(usize) -> Result<B, E>,
    ) -> Result<(), E> {
        let buffer = self.allocate(numel, ledger, allocate)?;
        self.free.push(buffer);
        Ok(())
    }

    fn allocate<E>(
        &self,
        numel: usize,
        ledger: &mut Ledger,
        allocate: impl FnOnce(usize) -> Result<B, E>,
    ) -> Result<B, E> {
        let numel = numel.max(self.least_numel);
        let behind = self.words_behind(numel);
        let buffer = allocate(numel + behind)?;
        ledger.add(self.purpose, numel);
        if behind > 0 {
            ledger.add(Purpose::QuantisedGradients, behind);
        }
        Ok(buffer)
    }

    pub(crate) fn give(&mut self, buffer: B) {
        self.free.push(buffer);
    }

    /// Whether [`Pool::take`] needs no allocation.
    pub(crate) fn has(&self, numel: usize) -> bool {
        self.free.iter().any(|b| b.numel() >= numel + self.words_behind(numel))
    }
}

/// What a flat parameter shares with those of other units whose buffers it can use: those of one unit differ in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PartKind {
    trainable: bool,
    low: bool,
}

impl PartKind {
    /// By [`PartKind::index`].
    const ALL: [PartKind; 4] = [
        PartKind { trainable: true, low: false },
        PartKind { trainable: false, low: false },
        PartKind { trainable: true, low: true },
        PartKind { trainable: false, low: true },
    ];

    pub(crate) fn of(layout: &FlatLayout) -> Self {
        Self { trainable: layout.requires_grad(), low: layout.dtype().is_low() }
    }

    pub(crate) fn index(self) -> usize {
        usize::from(!self.trainable) + 2 * usize::from(self.low)
    }
}

/// The pools of an engine: the root has its own, and so has each kind of flat parameter.
#[derive(Debug)]
pub(crate) struct Pools {
    root_params: Pool<HostBuffer>,
    unit_params: [Pool<HostBuffer>; 4],
    root_gradient: Pool<SharedBuffer>,
    unit_gradient: [Pool<SharedBuffer>; 4],
}

impl Pools {
    /// For units of these layouts, of which so many ranks share one copy, and so many sum each other's gradients.
    pub(crate) fn new(
        units: &[Vec<FlatLayout>],
        config: &EngineConfig,
        (sharers, summing): (usize, usize),
    ) -> Self {
        let quantised = config.wire.gradients.filter(|_| summing > 1).map(|how| (how, sharers));
        let largest = |kind: PartKind| {
            let parts = units.iter().flatten().filter(|layout| PartKind::of(layout) == kind);
            parts.map(FlatLayout::padded_numel).max().unwrap_or(0)
        };
        // Units that are freed after each use share buffers, any unit any of them.
        let slot = |kind| if config.strategy.reshards_after_forward() { largest(kind) } else { 0 };
        let gradient = |kind| if config.accumulation == Accumulation::Sharded { largest(kind) } else { 0 };
        Self {
            root_params: Pool::new(Purpose::GatheredRoot, 0),
            unit_params: PartKind::ALL.map(|kind| Pool::new(Purpose::GatheredUnits, slot(kind))),
            root_gradient: Pool::new(Purpose::RootGradient, 0).quantised(quantised),
            unit_gradient: PartKind::ALL
                .map(|kind| Pool::new(Purpose::UnitGradient, gradient(kind)).quantised(quantised)),
        }
    }

    /// Where full parameters are gathered.
    pub(crate) fn params(&mut self, root: bool, kind: PartKind) -> &mut Pool<HostBuffer> {
        if root { &mut self.root_params } else { &mut self.unit_params[kind.index()] }
    }

    /// Where full gradients are written, for peers to read in place.
    pub(crate) fn gradient(&mut self, root: bool, kind: PartKind) -> &mut Pool<SharedBuffer> {
        if root { &mut self.root_gradient } else { &mut self.unit_gradient[kind.index()] }
    }
}
