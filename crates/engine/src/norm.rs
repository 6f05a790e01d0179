//! The gradient norm, without a trace of how the gradient is cut into shards.
//!
//! The square of an f32 is exact in f64. Squares are summed in double-double arithmetic (Dekker 1971, Knuth's two-sum),
//! about 106 bits, and the total is rounded once: shard boundaries move additions around, but not the rounded result.

use shardwise_core::CarryCounter;

/// Lanes that a slice is summed in, whatever the processor.
const LANES: usize = 8;

/// An unevaluated sum of two f64.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct DoubleDouble {
    high: f64,
    low: f64,
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
fn two_sum(a: f64, b: f64) -> (f64, f64) {
    let sum = a + b;
    let part = sum - a;
    (sum, (a - (sum - part)) + (b - part))
}

/// Divides every element by `divisor` and returns the sum of the squares of the quotients.
pub fn divide_and_square_sum(gradient: &mut [f32], divisor: f32) -> DoubleDouble {
    pulp::Arch::new().dispatch(
        #[inline(always)]
        || {
            if divisor != 1.0 {
                gradient.iter_mut().for_each(|g| *g /= divisor);
            }
            square_sum(gradient)
        },
    )
}

#[inline(always)]
fn square_sum(values: &[f32]) -> DoubleDouble {
    let mut high = [0.0f64; LANES];
    let mut low = [0.0f64; LANES];
    let (body, tail) = values.as_chunks::<LANES>();
    for chunk in body {
        for lane in 0..LANES {
            let x = f64::from(chunk[lane]);
            let (sum, error) = two_sum(high[lane], x * x);
            high[lane] = sum;
            low[lane] += error;
        }
    }
    for (lane, value) in tail.iter().enumerate() {
        let x = f64::from(*value);
        let (sum, error) = two_sum(high[lane], x * x);
        high[lane] = sum;
        low[lane] += error;
    }
    high.into_iter()
        .zip(low)
        .map(|(high, low)| DoubleDouble { high, low })
        .fold(DoubleDouble::default(), DoubleDouble::plus)
}

/// Combines the ranks' sums by the one reduction order.
pub fn combine(sums: impl IntoIterator<Item = DoubleDouble>) -> DoubleDouble {
    let mut counter = CarryCounter::default();
    for sum in sums {
        counter.push(sum, 1, DoubleDouble::plus);
    }
    counter.finish(DoubleDouble::plus).unwrap_or_default()
}

/// The factor that brings a gradient of `norm` down to `max_norm`: `min(1, max_norm / (norm + 1e-6))`, in f32.
pub fn clip_coefficient(norm: f64, max_norm: Option<f64>) -> f32 {
    max_norm.map_or(1.0, |max| (max / (norm + 1e-6)).min(1.0) as f32)
}
