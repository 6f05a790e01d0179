//! What optimizers keep and need beside parameters and gradients, counted before anything is allocated.
//!
//! Statistics of single elements lie where the elements are updated, without gaps: slot 0 holds the first statistic of
//! every parameter that has one, slot 1 the second. Ranks own different parameters; each allocates what the one that
//! needs most does, so that all hold the same.

use std::ops::Range;

use crate::layout::{FlatLayout, ParamInfo};
use crate::offload::Placement;
use crate::strategy::ShardingStrategy;

/// The most statistics that any optimizer keeps for an element.
pub const STATISTIC_SLOTS: usize = 2;

/// Columns of a matrix that a product of Muon's packs at a time.
pub const PRODUCT_COLUMNS: usize = 32;

/// The statistics an optimizer keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OptimizerKind {
    /// Two moments.
    AdamW,
    /// Two moments.
    Adam,
    /// One momentum buffer.
    SgdMomentum,
    /// Nothing.
    Sgd,
    /// One momentum buffer.
    Lion,
    /// For a matrix, the mean squares of its rows and of its columns, on every rank; for a vector, one moment.
    Adafactor,
    /// One momentum buffer, on the rank that sums the gradient, in every strategy.
    Muon,
}

impl OptimizerKind {
    /// f32 statistics kept for each element of a parameter with `dims` dimensions.
    pub fn states(self, dims: usize) -> usize {
        match self {
            OptimizerKind::AdamW | OptimizerKind::Adam => 2,
            OptimizerKind::SgdMomentum | OptimizerKind::Lion | OptimizerKind::Muon => 1,
            OptimizerKind::Adafactor => usize::from(dims < 2),
            OptimizerKind::Sgd => 0,
        }
    }

    /// Rows and columns of a parameter of `shape` for which Adafactor keeps a mean square each; leading dimensions count
    /// as matrices of their own. `[0, 0]` for other optimizers, vectors and parameters without elements.
    pub fn factors(self, shape: &[usize]) -> [usize; 2] {
        let numel: usize = shape.iter().product();
        match (self, shape) {
            (OptimizerKind::Adafactor, [.., rows, columns]) if numel > 0 => [numel / columns, numel / rows],
            _ => [0, 0],
        }
    }

    /// Whether statistics lie with the gradient's shard even where every rank updates all parameters.
    pub fn keeps_shards(self) -> bool {
        self == OptimizerKind::Muon
    }
}

/// Elements of the statistics of one flat parameter, equal on every rank.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StatisticsSize {
    /// Of each slot of single elements' statistics.
    pub slots: [usize; STATISTIC_SLOTS],
    /// Of Adafactor's rows and columns.
    pub factors: usize,
}

impl StatisticsSize {
    /// The size for `layout`, where `whole` says that every rank updates all of it.
    pub fn of(layout: &FlatLayout, whole: bool, kind_of: &dyn Fn(&ParamInfo) -> OptimizerKind) -> Self {
        if !layout.requires_grad() {
            return Self::default();
        }
        let kinds: Vec<(&ParamInfo, OptimizerKind)> =
            layout.params().iter().map(|param| (param, kind_of(param))).collect();
        let kept_by = |rank: usize, slot: usize| -> usize {
            let shard = layout.shard_range(rank);
            let kept = |(param, kind): &(&ParamInfo, OptimizerKind)| {
                let all = whole && !kind.keeps_shards();
                let here = if all { param.range() } else { overlap(&param.range(), &shard) };
                if kind.states(param.shape.len()) > slot { here.len() } else { 0 }
            };
            kinds.iter().map(kept).sum()
        };
        let most = |slot| (0..layout.world_size()).map(|rank| kept_by(rank, slot)).max().unwrap_or(0);
        let factors = kinds.iter().map(|(param, kind)| kind.factors(&param.shape).iter().sum::<usize>());
        Self { slots: std::array::from_fn(most), factors: factors.sum() }
    }

    /// All of it.
    pub fn numel(&self) -> usize {
        self.slots.iter().sum::<usize>() + self.factors
    }
}

/// Whether the update of a flat parameter takes each element by itself, with as many statistics for all of them.
pub fn updates_single_elements(layout: &FlatLayout, kind_of: &dyn Fn(&ParamInfo) -> OptimizerKind) -> bool {
    let mut kinds = layout.params().iter().filter(|p| p.numel > 0).map(|p| (kind_of(p), p.shape.len()));
    let single = |kind: OptimizerKind| !matches!(kind, OptimizerKind::Adafactor | OptimizerKind::Muon);
    let states = kinds.clone().next().map_or(0, |(kind, rank)| kind.states(rank));
    kinds.all(|(kind, rank)| single(kind) && kind.states(rank) == states)
}

/// What both ranges have.
pub fn overlap(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

/// Memory in which optimizers that look at whole parameters work, equal on every rank; in f32 elements.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ScratchSize {
    /// Of a buffer that peers read.
    pub shared: usize,
    /// Of a buffer of the rank's own.
    pub private: usize,
    /// Of sums in two f64 each.
    pub sums: usize,
}

impl ScratchSize {
    /// The scratch that the largest matrix or flat parameter of `layouts` needs.
    pub fn of<'a>(
        layouts: impl IntoIterator<Item = &'a FlatLayout>,
        kind_of: &dyn Fn(&ParamInfo) -> OptimizerKind,
    ) -> Self {
        layouts.into_iter().filter(|layout| layout.requires_grad()).fold(Self::default(), |most, layout| {
            let mut sums = 0;
            let mut size = most;
            for param in layout.params().iter().filter(|param| param.numel > 0) {
                match (kind_of(param), param.shape.as_slice()) {
                    (OptimizerKind::Muon, &[rows, columns]) => {
                        let (short, long) = (rows.min(columns), rows.max(columns));
                        let products = 2 * short * short + PRODUCT_COLUMNS * long;
                        size.shared = size.shared.max(param.numel);
                        size.private = size.private.max(param.numel + products);
                    }
                    (kind @ OptimizerKind::Adafactor, shape) => {
                        sums += 1 + kind.factors(shape).iter().sum::<usize>();
                    }
                    _ => {}
                }
            }
            // A sum of double precision and its rounding error: four f32.
            let words = 4 * sums;
            size.max(Self { shared: words, private: words, sums: words })
        })
    }

    /// The larger of each.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self {
            shared: self.shared.max(other.shared),
            private: self.private.max(other.private),
            sums: self.sums.max(other.sums),
        }
    }

    /// All of it.
    pub fn numel(&self) -> usize {
        self.shared + self.private + self.sums
    }
}

/// What an optimizer adds to a rank's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OptimizerPlan {
    pub(crate) statistics: PlannedStatistics,
    pub(crate) scratch: usize,
    pub(crate) average: bool,
    pub(crate) in_backward: bool,
    pub(crate) reloaded: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PlannedStatistics {
    /// So many for each trained element, padding included.
    PerElement(usize),
    /// So many in all.
    Elements(usize),
}

impl OptimizerPlan {
    /// For an optimizer that keeps `states` statistics for each trained element and looks at single elements only.
    pub fn per_element(states: usize) -> Self {
        Self {
            statistics: PlannedStatistics::PerElement(states),
            scratch: 0,
            average: false,
            in_backward: false,
            reloaded: 0,
        }
    }

    /// For any mix of optimizers over `layouts`, all of a model's.
    pub fn of_layouts(
        layouts: &[&FlatLayout],
        strategy: ShardingStrategy,
        kind_of: &dyn Fn(&ParamInfo) -> OptimizerKind,
    ) -> Self {
        let here = vec![Placement::default(); layouts.len()];
        Self::of_placed_layouts(layouts, &here, strategy, kind_of)
    }

    /// The same, with what rests elsewhere of each layout.
    pub fn of_placed_layouts(
        layouts: &[&FlatLayout],
        placements: &[Placement],
        strategy: ShardingStrategy,
        kind_of: &dyn Fn(&ParamInfo) -> OptimizerKind,
    ) -> Self {
        let (mut here, mut params, mut slots) = (0, 0, [0; STATISTIC_SLOTS]);
        for (layout, placement) in layouts.iter().zip(placements) {
            let whole = layout.world_size() == 1 || !strategy.is_sharded();
            let size = StatisticsSize::of(layout, whole, kind_of);
            here += if placement.optimizer { size.factors } else { size.numel() };
            if updates_single_elements(layout, kind_of) {
                continue;
            }
            if placement.parameters && layout.requires_grad() {
                params = params.max(if whole { layout.numel() } else { layout.shard_numel() });
            }
            if placement.optimizer {
                slots.iter_mut().zip(size.slots).for_each(|(most, numel)| *most = numel.max(*most));
            }
        }
        Self {
            statistics: PlannedStatistics::Elements(here),
            scratch: ScratchSize::of(layouts.iter().copied(), kind_of).numel(),
            average: false,
            in_backward: false,
            reloaded: params + slots.iter().sum::<usize>(),
        }
    }

    /// The same, with or without an average of the weights.
    #[must_use]
    pub fn with_average(self, average: bool) -> Self {
        Self { average, ..self }
    }

    /// The same, with or without the step inside backward: one gradient shard serves all flat parameters.
    #[must_use]
    pub fn with_step_in_backward(self, in_backward: bool) -> Self {
        Self { in_backward, ..self }
    }
}
