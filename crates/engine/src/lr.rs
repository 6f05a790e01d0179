//! The learning rate of each step.

use serde::{Deserialize, Serialize};

/// How the learning rate changes over a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LrSchedule {
    /// The configured rate at every step, after a linear warm-up if one is asked for.
    #[default]
    Constant,
    /// A linear warm-up to the configured rate, then half a cosine down to a tenth of it at the last step.
    Cosine,
}

/// The fraction of the peak rate that the cosine ends with.
const COSINE_FLOOR: f64 = 0.1;

impl LrSchedule {
    /// The rate of `step` (counted from 1) in a run of `steps`, with `warmup` steps of warm-up to `peak`.
    ///
    /// Step `s` of the warm-up has `peak * s / warmup`.
    pub fn rate(self, peak: f64, step: u64, warmup: u64, steps: u64) -> f64 {
        if step <= warmup {
            return peak * step as f64 / warmup as f64;
        }
        match self {
            LrSchedule::Constant => peak,
            LrSchedule::Cosine => {
                let span = steps.saturating_sub(warmup).max(1) as f64;
                let progress = ((step - warmup) as f64 / span).min(1.0);
                let cosine = 0.5 * (1.0 + (std::f64::consts::PI * progress).cos());
                peak * (COSINE_FLOOR + (1.0 - COSINE_FLOOR) * cosine)
            }
        }
    }
}
