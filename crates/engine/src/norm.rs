//! The gradient norm, without a trace of how the gradient is cut into shards.
//!
//! The square of an f32 is exact in f64. Powers are summed in double-double arithmetic (Dekker 1971, Knuth's two-sum),
//! about 106 bits, and the total is rounded once: shard boundaries move additions around, but not the rounded result.

use shardwise_core::CarryCounter;

/// Lanes that a slice is summed in, whatever the processor.
const LANES: usize = 8;

/// An unevaluated sum of two f64.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct DoubleDouble {
    pub(crate) high: f64,
    pub(crate) low: f64,
}

impl DoubleDouble {
    /// The sum of two such numbers.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        let (high, error) = two_sum(self.high, other.high);
        let (high, low) = two_sum(high, error + (self.low + other.low));
        Self { high, low }
    }

    /// The nearest f64.
    pub fn value(self) -> f64 {
        self.high + self.low
    }

    /// 16 bytes for the way to other ranks.
    pub fn to_bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.high.to_le_bytes());
        bytes[8..].copy_from_slice(&self.low.to_le_bytes());
        bytes
    }

    /// The inverse of [`DoubleDouble::to_bytes`]; missing bytes count as NaN.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let word = |range: std::ops::Range<usize>| {
            bytes.get(range).and_then(|b| b.try_into().ok()).map_or(f64::NAN, f64::from_le_bytes)
        };
        Self { high: word(0..8), low: word(8..16) }
    }
}

#[inline(always)]
pub(crate) fn two_sum(a: f64, b: f64) -> (f64, f64) {
    let sum = a + b;
    let part = sum - a;
    (sum, (a - (sum - part)) + (b - part))
}

/// Which norm of the gradient is meant.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Norm {
    /// The sum of absolute values.
    L1,
    /// The root of the sum of squares.
    #[default]
    L2,
    /// The p-th root of the sum of p-th powers of absolute values, each power rounded to f64.
    Lp(f64),
    /// The largest absolute value.
    Max,
}

/// A rank's part of a norm: a sum of powers, or (for [`Norm::Max`]) a maximum.
pub type PartialNorm = DoubleDouble;

impl Norm {
    /// Divides every element by `divisor` and measures the quotients.
    pub fn divide_and_measure(self, gradient: &mut [f32], divisor: f32) -> PartialNorm {
        pulp::Arch::new().dispatch(
            #[inline(always)]
            || {
                if divisor != 1.0 {
                    gradient.iter_mut().for_each(|g| *g /= divisor);
                }
                self.measure_here(gradient)
            },
        )
    }

    /// Measures every element.
    pub fn measure(self, values: &[f32]) -> PartialNorm {
        pulp::Arch::new().dispatch(
            #[inline(always)]
            || self.measure_here(values),
        )
    }

    #[inline(always)]
    fn measure_here(self, values: &[f32]) -> PartialNorm {
        match self {
            Norm::L2 => power_sum(values, |x| x * x),
            Norm::L1 => power_sum(values, f64::abs),
            Norm::Lp(p) => power_sum(values, |x| x.abs().powf(p)),
            Norm::Max => DoubleDouble { high: largest(values), low: 0.0 },
        }
    }

    /// Puts two parts together.
    #[must_use]
    pub fn join(self, a: PartialNorm, b: PartialNorm) -> PartialNorm {
        match self {
            Norm::Max if a.high.is_nan() || a.high > b.high => a,
            Norm::Max => b,
            _ => a.plus(b),
        }
    }

    /// The norm, from the ranks' parts in rank order.
    pub fn of_parts(self, parts: impl IntoIterator<Item = PartialNorm>) -> f64 {
        let mut counter = CarryCounter::default();
        for part in parts {
            counter.push(part, 1, |a, b| self.join(a, b));
        }
        let whole = counter.finish(|a, b| self.join(a, b)).unwrap_or_default().value();
        match self {
            Norm::L2 => whole.sqrt(),
            Norm::L1 | Norm::Max => whole,
            Norm::Lp(p) => whole.powf(1.0 / p),
        }
    }
}

/// The largest absolute value; NaN if there is one.
#[inline(always)]
fn largest(values: &[f32]) -> f64 {
    let larger = |most: f32, x: &f32| if x.abs() > most || x.is_nan() { x.abs() } else { most };
    f64::from(values.iter().fold(0.0, larger))
}

#[inline(always)]
pub(crate) fn power_sum(values: &[f32], power: impl Fn(f64) -> f64) -> DoubleDouble {
    let mut high = [0.0f64; LANES];
    let mut low = [0.0f64; LANES];
    let (body, tail) = values.as_chunks::<LANES>();
    for chunk in body {
        for lane in 0..LANES {
            let x = f64::from(chunk[lane]);
            let (sum, error) = two_sum(high[lane], power(x));
            high[lane] = sum;
            low[lane] += error;
        }
    }
    for (lane, value) in tail.iter().enumerate() {
        let x = f64::from(*value);
        let (sum, error) = two_sum(high[lane], power(x));
        high[lane] = sum;
        low[lane] += error;
    }
    high.into_iter()
        .zip(low)
        .map(|(high, low)| DoubleDouble { high, low })
        .fold(DoubleDouble::default(), DoubleDouble::plus)
}

/// The factor that brings a gradient of `norm` down to `max_norm`: `min(1, max_norm / (norm + 1e-6))`, in f32.
pub fn clip_coefficient(norm: f64, max_norm: Option<f64>) -> f32 {
    max_norm.map_or(1.0, |max| (max / (norm + 1e-6)).min(1.0) as f32)
}
