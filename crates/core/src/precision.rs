//! In which type numbers travel, and in which they rest.
//!
//! Master parameters, sums of gradients and statistics always rest in f32. What travels may be narrower: parameters on
//! their way to a unit's computation, gradients on their way to a reduction. A narrower number is rounded to nearest,
//! ties to even, once; additions are done in f32.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::PlanError;

/// A floating-point type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// 8 bits of exponent, 24 of significand.
    #[default]
    F32,
    /// 8 bits of exponent, 8 of significand: the range of f32.
    Bf16,
    /// 5 bits of exponent, 11 of significand: beyond 65504 there is only infinity.
    F16,
}

impl Precision {
    /// Every type, the widest first.
    pub const ALL: [Precision; 3] = [Precision::F32, Precision::Bf16, Precision::F16];

    /// Bytes of one number.
    pub fn bytes(self) -> usize {
        match self {
            Precision::F32 => 4,
            Precision::Bf16 | Precision::F16 => 2,
        }
    }

    /// Whether numbers lose bits on their way.
    pub fn is_low(self) -> bool {
        self != Precision::F32
    }

    /// The name used in configurations and messages.
    pub fn name(self) -> &'static str {
        match self {
            Precision::F32 => "f32",
            Precision::Bf16 => "bf16",
            Precision::F16 => "f16",
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What is narrower than f32 in a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MixedPrecision {
    /// The type in which parameters are gathered, and to which they are rounded for the computation.
    pub param_dtype: Precision,
    /// The type in which each micro-batch's gradient travels to its reduction. The sum is f32.
    pub reduce_dtype: Precision,
    /// Whether the summed gradient is rounded to `reduce_dtype` again before the update.
    pub keep_low_precision_grads: bool,
    /// Whether an evaluation computes with the rounded parameters too; otherwise it has the masters.
    pub low_precision_evaluation: bool,
}

impl MixedPrecision {
    /// bf16 parameters, f32 reductions: half the bytes of a gather, and no loss scale is needed.
    pub const BF16: MixedPrecision = MixedPrecision {
        param_dtype: Precision::Bf16,
        reduce_dtype: Precision::F32,
        keep_low_precision_grads: false,
        low_precision_evaluation: false,
    };

    /// Refuses what cannot work. f16 gradients need a loss scale, `scaled`.
    ///
    /// # Errors
    /// Naming the setting.
    pub fn check(&self, scaled: bool) -> Result<(), PlanError> {
        if self.reduce_dtype == Precision::F16 && !scaled {
            return Err(PlanError::UnscaledF16);
        }
        if self.keep_low_precision_grads && !self.reduce_dtype.is_low() {
            return Err(PlanError::NothingLowToKeep { reduce_dtype: self.reduce_dtype });
        }
        Ok(())
    }
}

/// What a micro-batch's gradient is divided by before it travels in low precision: about the root of the number of
/// `micro_batches` that are added, so that neither the parts nor their sum leave the range. A power of two that divides
/// the number, so that no bit is lost; the rest of the division comes after the sum.
pub fn pre_divisor(micro_batches: usize) -> usize {
    let mut divisor = 1;
    while micro_batches.is_multiple_of(2 * divisor) && 4 * divisor * divisor <= micro_batches {
        divisor *= 2;
    }
    divisor
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fact L7: a power of two that divides the number, about its root.
    #[test]
    fn the_pre_divisor_is_about_the_root_and_divides() {
        for (micro_batches, divisor) in
            [(1, 1), (2, 1), (3, 1), (4, 2), (8, 2), (12, 2), (16, 4), (64, 8), (100, 4)]
        {
            assert_eq!(pre_divisor(micro_batches), divisor, "{micro_batches}");
        }
        for micro_batches in 1..2000 {
            let divisor = pre_divisor(micro_batches);
            assert!(divisor.is_power_of_two() && micro_batches % divisor == 0);
            assert!(divisor * divisor <= micro_batches);
        }
    }
}
