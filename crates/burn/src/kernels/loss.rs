//! Cross entropy over rows of logits, and its gradient in the logits' place.

use super::math::exp;
use super::{exp_in_place, max, simd, sum};

/// Logits whose exponentials are summed in single precision before the sum goes on in double.
const BLOCK: usize = 2048;

/// The mean over rows of `log(sum(exp(row))) - row[target]`, accumulated in double precision.
///
/// `logits` holds one row of `logits.len() / targets.len()` logits for each target.
///
/// # Panics
/// If a target is no index into its row.
pub fn cross_entropy(logits: &[f32], targets: &[usize]) -> f64 {
    let width = check(logits.len(), targets);
    let mut total = 0.0;
    for (row, &target) in logits.chunks_exact(width).zip(targets) {
        let (max, sum) = simd(
            #[inline(always)]
            || {
                let max = max(row);
                let mut total = 0.0;
                for block in row.chunks(BLOCK) {
                    total += f64::from(sum(
                        block,
                        #[inline(always)]
                        |x| exp(x - max),
                    ));
                }
                (max, total)
            },
        );
        total += row_loss(max, sum, row[target]);
    }
    total / targets.len() as f64
}

/// The same mean, bit for bit; turns `logits` into their gradient, `(softmax(row) - one_hot(target)) / rows`.
///
/// # Panics
/// If a target is no index into its row.
pub fn cross_entropy_with_gradient(logits: &mut [f32], targets: &[usize]) -> f64 {
    let width = check(logits.len(), targets);
    let share = 1.0 / targets.len() as f64;
    let mut total = 0.0;
    for (row, &target) in logits.chunks_exact_mut(width).zip(targets) {
        let logit = row[target];
        let (max, sum) = simd(
            #[inline(always)]
            || {
                let max = max(row);
                let mut total = 0.0;
                for block in row.chunks_mut(BLOCK) {
                    total += f64::from(exp_in_place(block, max));
                }
                let scale = (share / total) as f32;
                row.iter_mut().for_each(|p| *p *= scale);
                (max, total)
            },
        );
        row[target] -= share as f32;
        total += row_loss(max, sum, logit);
    }
    total / targets.len() as f64
}

fn row_loss(max: f32, sum: f64, logit: f32) -> f64 {
    sum.ln() + f64::from(max) - f64::from(logit)
}

fn check(len: usize, targets: &[usize]) -> usize {
    assert!(!targets.is_empty() && len > 0, "cross entropy of no logits");
    let width = len / targets.len();
    assert_eq!(width * targets.len(), len, "one row of logits for each target");
    if let Some(target) = targets.iter().find(|&&target| target >= width) {
        panic!("target {target} is out of range: the logits have {width} classes");
    }
    width
}
