//! Which units are gathered ahead of their use, and which stay after it: the knobs of ZeRO-3's coordinator and of FSDP.
//!
//! The rules are functions of sizes alone, so that the engine which follows them and the plan which foresees them agree.

use serde::{Deserialize, Serialize};

use crate::error::PlanError;

/// When the next unit of the backward is gathered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BackwardPrefetch {
    /// Before this unit's gradient work: most overlap, one more unit in memory.
    #[default]
    Pre,
    /// After it.
    Post,
    /// When it is needed.
    None,
}

/// How far gathers run ahead and how long units stay. Sizes are in elements of flat parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GatherPolicy {
    /// Whether the next units of the forward are gathered while one computes.
    pub forward_prefetch: bool,
    /// When the next units of the backward are.
    pub backward_prefetch: BackwardPrefetch,
    /// Units gathered at a time, the one in use included; a prefetch of depth d needs d + 1.
    pub limit_all_gathers: usize,
    /// Elements gathered ahead of use; the next unit always fits.
    pub prefetch_bucket_size: usize,
    /// Elements gathered at a time; past it nothing is gathered ahead, and units that were kept for reuse are freed.
    pub max_live_parameters: usize,
    /// A unit that is used again before so many elements of others have been is not freed in between; 0 frees all.
    pub max_reuse_distance: usize,
}

impl Default for GatherPolicy {
    /// One unit ahead in both directions, none kept.
    fn default() -> Self {
        Self {
            forward_prefetch: true,
            backward_prefetch: BackwardPrefetch::Pre,
            limit_all_gathers: 2,
            prefetch_bucket_size: usize::MAX,
            max_live_parameters: usize::MAX,
            max_reuse_distance: 0,
        }
    }
}

impl GatherPolicy {
    /// The same without gathering ahead.
    #[must_use]
    pub fn without_prefetch(self) -> Self {
        Self { forward_prefetch: false, backward_prefetch: BackwardPrefetch::None, ..self }
    }

    /// Refuses limits that leave no unit.
    ///
    /// # Errors
    /// When a limit is 0.
    pub fn check(&self) -> Result<(), PlanError> {
        for (name, value) in
            [("limit_all_gathers", self.limit_all_gathers), ("max_live_parameters", self.max_live_parameters)]
        {
            if value == 0 {
                return Err(PlanError::Zero { name });
            }
        }
        Ok(())
    }

    /// How many of the `next` units should be gathered now. Of each: its elements, and whether it is gathered already;
    /// `live` elements are gathered.
    pub fn ahead(&self, next: impl IntoIterator<Item = (usize, bool)>, mut live: usize) -> usize {
        let (mut units, mut elements) = (0, 0usize);
        for (numel, is_here) in next.into_iter().take(self.limit_all_gathers.saturating_sub(1)) {
            elements = elements.saturating_add(numel);
            if units > 0 && elements > self.prefetch_bucket_size {
                break;
            }
            if !is_here {
                live = live.saturating_add(numel);
                if live > self.max_live_parameters {
                    break;
                }
            }
            units += 1;
        }
        units
    }

    /// Whether a unit stays that is used again after `distance` elements of others, while `live` elements are gathered.
    pub fn keeps(&self, distance: usize, live: usize) -> bool {
        distance < self.max_reuse_distance && live <= self.max_live_parameters
    }

    /// The most of the `counted` units (those that have flat parameters of some kind) that are gathered at a time when
    /// units of these sizes compute one after another, forward and backward, in `rounds` rounds, each freed after each use
    /// unless the policy keeps it.
    pub fn slots(&self, sizes: &[usize], counted: &[bool], rounds: usize) -> usize {
        let mut walk = Walk { policy: self, sizes, counted, here: vec![false; sizes.len()], most: 0 };
        for round in 0..rounds.min(2) {
            walk.forward();
            walk.backward(round + 1 < rounds);
        }
        walk.most
    }
}

/// A step's gathers as the policy wants them, by unit.
struct Walk<'a> {
    policy: &'a GatherPolicy,
    sizes: &'a [usize],
    counted: &'a [bool],
    here: Vec<bool>,
    most: usize,
}

impl Walk<'_> {
    fn live(&self) -> usize {
        self.here.iter().zip(self.sizes).filter(|(here, _)| **here).map(|(_, numel)| numel).sum()
    }

    fn gather(&mut self, unit: usize) {
        self.here[unit] = true;
        let counted = self.here.iter().zip(self.counted).filter(|(here, counted)| **here && **counted);
        self.most = self.most.max(counted.count());
    }

    fn ahead(&mut self, next: impl Iterator<Item = usize> + Clone) {
        let sizes = next.clone().map(|unit| (self.sizes[unit], self.here[unit]));
        let units = self.policy.ahead(sizes, self.live());
        next.take(units).for_each(|unit| self.gather(unit));
    }

    fn forward(&mut self) {
        let n = self.sizes.len();
        for unit in 0..n {
            self.gather(unit);
            if self.policy.forward_prefetch {
                self.ahead(unit + 1..n);
            }
            let distance = 2 * self.sizes[unit + 1..].iter().sum::<usize>();
            self.here[unit] = self.policy.keeps(distance, self.live());
        }
    }

    fn backward(&mut self, another_round: bool) {
        let n = self.sizes.len();
        if self.policy.backward_prefetch != BackwardPrefetch::None {
            self.ahead((0..n).rev());
        }
        for unit in (0..n).rev() {
            self.gather(unit);
            if self.policy.backward_prefetch == BackwardPrefetch::Pre {
                self.ahead((0..unit).rev());
            }
            let distance = 2 * self.sizes[..unit].iter().sum::<usize>();
            self.here[unit] = another_round && self.policy.keeps(distance, self.live());
            if self.policy.backward_prefetch == BackwardPrefetch::Post {
                self.ahead((0..unit).rev());
            }
        }
        if another_round && self.policy.forward_prefetch {
            self.ahead(0..n);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The slots for `units` units of 7 elements each.
    fn slots(policy: GatherPolicy, units: usize, rounds: usize) -> usize {
        policy.slots(&vec![7; units], &vec![true; units], rounds)
    }

    #[test]
    fn one_unit_ahead_takes_two_slots() {
        let policy = GatherPolicy::default();
        for (units, want) in [(0, 0), (1, 1), (2, 2), (5, 2)] {
            assert_eq!(slots(policy, units, 3), want);
            assert_eq!(slots(policy.without_prefetch(), units, 3), want.min(1));
        }
    }

    #[test]
    fn depth_buckets_and_limits() {
        let deep = GatherPolicy { limit_all_gathers: 4, ..GatherPolicy::default() };
        assert_eq!(slots(deep, 6, 1), 4);
        assert_eq!(slots(GatherPolicy { prefetch_bucket_size: 14, ..deep }, 6, 1), 3);
        assert_eq!(slots(GatherPolicy { prefetch_bucket_size: 1, ..deep }, 6, 1), 2);
        assert_eq!(slots(GatherPolicy { max_live_parameters: 14, ..deep }, 6, 1), 2);
        assert_eq!(slots(GatherPolicy { max_live_parameters: 1, ..deep }, 6, 1), 1);
    }

    #[test]
    fn units_that_are_used_again_soon_stay() {
        let policy = GatherPolicy { max_reuse_distance: 15, ..GatherPolicy::default() };
        // The last two are used again within 14 elements, which takes no more memory than prefetch does; the third last
        // within 28.
        assert_eq!(slots(policy, 6, 1), 2);
        assert_eq!(slots(GatherPolicy { max_reuse_distance: 29, ..policy }, 6, 1), 3);
        assert_eq!(slots(GatherPolicy { max_reuse_distance: usize::MAX, ..policy }, 6, 1), 6);
        let tight = GatherPolicy { max_reuse_distance: usize::MAX, max_live_parameters: 21, ..policy };
        assert!(slots(tight, 6, 1) <= 4);
    }
}
