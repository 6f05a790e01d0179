//! What of one flat parameter rests elsewhere.

use shardwise_core::statistics::STATISTIC_SLOTS;
use shardwise_core::{Precision, Tier as Resting};

use super::sums::AwaySums;
use super::{Moved, Section, Swap};
use crate::norm::{Norm, PartialNorm};

/// What of one flat parameter rests elsewhere; nothing by default.
#[derive(Debug, Default)]
pub(crate) struct Away {
    /// The parameters that this rank keeps, padding included.
    pub(crate) params: Option<Section>,
    /// What the optimizer keeps, and what it is told.
    pub(crate) state: Option<AwayState>,
}

/// Statistics, averages and gradients that rest elsewhere.
#[derive(Debug)]
pub(crate) struct AwayState {
    /// The statistics by slot.
    pub(crate) slots: Vec<Section>,
    /// The average of the weights.
    pub(crate) average: Option<Section>,
    pub(crate) sums: AwaySums,
    /// The sum of the step's gradients, between the last reduction and the update.
    pub(crate) sum: Option<usize>,
    /// That of the last step, until the next one begins.
    pub(crate) last: Option<usize>,
    /// How the sum becomes the gradient.
    pub(crate) scaling: Scaling,
    /// The measure of the gradient, taken when it was summed, and the divisor that it holds for.
    pub(crate) measured: Option<(PartialNorm, f32)>,
}

/// Where the statistics of a flat parameter are to rest.
pub(crate) struct NewState<'a> {
    pub(crate) resting: Resting,
    pub(crate) name: &'a str,
    pub(crate) slots: [usize; STATISTIC_SLOTS],
    /// Elements of the average, if one is kept.
    pub(crate) average: Option<usize>,
    /// Elements of a sum.
    pub(crate) sum: usize,
}

impl AwayState {
    pub(crate) fn new(swap: &mut Swap, new: &NewState<'_>) -> Moved<Self> {
        let numels = new.slots.iter().copied().take_while(|numel| *numel > 0).chain(new.average);
        let numels: Vec<usize> = numels.collect();
        let mut sections = Vec::new();
        if !numels.is_empty() {
            sections = swap.create(new.resting, &format!("{}.optimizer", new.name), &numels)?;
        }
        let average = if new.average.is_some() { sections.pop() } else { None };
        Ok(Self {
            slots: sections,
            average,
            sums: AwaySums::new(new.resting, format!("{}.gradient", new.name), new.sum),
            sum: None,
            last: None,
            scaling: Scaling::default(),
            measured: None,
        })
    }

    /// The step's gradient, to read through [`AwayState::scaling`].
    pub(crate) fn gradient(&self) -> Option<Section> {
        self.sum.map(|index| self.sums.section(index))
    }

    /// That of the last step.
    pub(crate) fn last_gradient(&self) -> Option<Section> {
        self.last.map(|index| self.sums.section(index))
    }

    /// Puts the step's gradient away after the update; it can be looked at until the next step begins when `keep` says so.
    pub(crate) fn use_up(&mut self, keep: bool) {
        if let Some(index) = self.sum.take() {
            self.sums.give_back(index);
            self.last = keep.then_some(index);
        }
    }
}

/// What stands between a sum and the gradient that an optimizer sees. It is done anew wherever the sum is read, so that
/// the sum need not be written twice.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Scaling {
    pub(crate) divisor: f32,
    /// Gradients are rounded to this.
    pub(crate) rounded: Precision,
    /// Elements that are not finite count as zero.
    pub(crate) zero_non_finite: bool,
}

impl Default for Scaling {
    fn default() -> Self {
        Self { divisor: 1.0, rounded: Precision::F32, zero_non_finite: false }
    }
}

impl Scaling {
    /// Makes the gradient of a sum where it lies.
    pub(crate) fn scale(&self, sum: &mut [f32]) {
        if self.divisor != 1.0 {
            pulp::Arch::new().dispatch(
                #[inline(always)]
                || sum.iter_mut().for_each(|g| *g /= self.divisor),
            );
        }
        shardwise_comm::codec::round(sum, self.rounded);
        if self.zero_non_finite {
            sum.iter_mut().filter(|g| !g.is_finite()).for_each(|g| *g = 0.0);
        }
    }

    /// Makes the gradient of a sum where it lies, and measures it.
    pub(crate) fn apply(&self, sum: &mut [f32], norm: Norm) -> PartialNorm {
        if self.rounded.is_low() || self.zero_non_finite {
            self.scale(sum);
            norm.measure(sum)
        } else {
            norm.divide_and_measure(sum, self.divisor)
        }
    }
}
