//! The one reduction: windows are added in the order of [`shardwise_core::reduction`], whatever the transport.

use std::ops::Range;

use shardwise_core::Precision;

use crate::codec::{BLOCK, take};

/// Windows that are added in one pass, in registers. (More of them no longer compile to vector code.)
const FUSED: usize = 4;

/// Sums `windows` (one per rank, in rank order, each as long as `dst`) by the binary counter over ranks and puts the sum
/// into `dst`, or adds it to what `dst` holds.
///
/// # Panics
/// When a window's length differs from that of `dst`, or there is none.
pub fn sum_windows(dst: &mut [f32], windows: &[&[f32]], add: bool) {
    assert!(!windows.is_empty(), "a sum needs at least one window");
    assert!(windows.iter().all(|w| w.len() == dst.len()), "windows must be as long as their sum");
    pulp::Arch::new().dispatch(|| {
        if windows.len() <= FUSED {
            sum_fused(dst, windows, add);
        } else {
            // Four windows are a subtree of the counter's tree, and so is the rest at its end.
            let groups: Vec<&[&[f32]]> = windows.chunks(FUSED).collect();
            let read = |group: usize, range: Range<usize>, block: &mut [f32]| {
                let mut part: [&[f32]; FUSED] = [&[]; FUSED];
                let windows = groups[group];
                for (part, window) in part.iter_mut().zip(windows) {
                    *part = &window[range.clone()];
                }
                sum_fused(block, &part[..windows.len()], false);
            };
            sum_read(dst, groups.len(), read, add);
        }
    });
}

/// Up to [`FUSED`] windows in one pass.
#[inline(always)]
fn sum_fused(dst: &mut [f32], windows: &[&[f32]], add: bool) {
    match (windows, add) {
        ([a], false) => dst.copy_from_slice(a),
        ([a], true) => map(dst, [*a], |d, [a]| d + a),
        ([a, b], false) => map(dst, [*a, *b], |_, [a, b]| a + b),
        ([a, b], true) => map(dst, [*a, *b], |d, [a, b]| d + (a + b)),
        ([a, b, c], false) => map(dst, [*a, *b, *c], |_, [a, b, c]| (a + b) + c),
        ([a, b, c], true) => map(dst, [*a, *b, *c], |d, [a, b, c]| d + ((a + b) + c)),
        ([a, b, c, e], false) => map(dst, [*a, *b, *c, *e], |_, [a, b, c, e]| (a + b) + (c + e)),
        ([a, b, c, e], true) => map(dst, [*a, *b, *c, *e], |d, [a, b, c, e]| d + ((a + b) + (c + e))),
        _ => {}
    }
}

/// `dst[i] = f(dst[i], windows[..][i])`, in a form that compiles to vector code.
#[inline(always)]
fn map<const N: usize>(dst: &mut [f32], windows: [&[f32]; N], f: impl Fn(f32, [f32; N]) -> f32) {
    let n = dst.len();
    let windows = windows.map(|w| &w[..n]);
    for i in 0..n {
        dst[i] = f(dst[i], windows.map(|w| w[i]));
    }
}

/// As [`sum_windows`], for windows of bytes as they travel in `precision`: widened first, added in f32.
///
/// # Panics
/// When a window holds another number of elements than `dst`, or there is none.
pub fn sum_encoded(dst: &mut [f32], windows: &[&[u8]], precision: Precision, add: bool) {
    assert!(!windows.is_empty(), "a sum needs at least one window");
    let width = precision.bytes();
    assert!(windows.iter().all(|w| w.len() == dst.len() * width), "windows must be as long as their sum");
    if precision.is_low() {
        let read = |window: usize, range: Range<usize>, block: &mut [f32]| {
            take(&windows[window][range.start * width..range.end * width], block, precision);
        };
        pulp::Arch::new().dispatch(|| sum_read(dst, windows.len(), read, add));
    } else {
        let windows: Vec<&[f32]> = windows.iter().map(|w| bytemuck::cast_slice(w)).collect();
        sum_windows(dst, &windows, add);
    }
}

/// Sums `windows` windows of which `read` puts a range into a block, a block of elements at a time: a counter whose levels
/// stay where they are.
#[inline(always)]
pub(crate) fn sum_read(
    dst: &mut [f32],
    windows: usize,
    read: impl Fn(usize, Range<usize>, &mut [f32]),
    add: bool,
) {
    let depth = (usize::BITS - windows.leading_zeros()) as usize;
    // Level `k` holds the sum of 2^k windows wherever bit `k` of the number of windows so far is set.
    let mut levels = vec![[0.0f32; BLOCK]; depth];
    let mut newer = [0.0f32; BLOCK];
    let mut start = 0;
    while start < dst.len() {
        let end = (start + BLOCK).min(dst.len());
        let newer = &mut newer[..end - start];
        for window in 0..windows {
            read(window, start..end, newer);
            // Carries: as many as the number so far has ones at its end.
            let carries = window.trailing_ones() as usize;
            levels[..carries].iter().for_each(|older| add_to_older(newer, older));
            levels[carries][..newer.len()].copy_from_slice(newer);
        }
        // What is left meets smallest first.
        let mut left = (0..depth).filter(|level| windows >> level & 1 == 1);
        if let Some(smallest) = left.next() {
            newer.copy_from_slice(&levels[smallest][..end - start]);
        }
        left.for_each(|level| add_to_older(newer, &levels[level]));
        for (d, s) in dst[start..end].iter_mut().zip(newer.iter()) {
            *d = if add { *d + *s } else { *s };
        }
        start = end;
    }
}

/// `newer = older + newer`.
#[inline(always)]
fn add_to_older(newer: &mut [f32], older: &[f32; BLOCK]) {
    for (n, o) in newer.iter_mut().zip(older) {
        *n += *o;
    }
}

/// Adds `newer` to `older`, as a carry of the counter over micro-batches does.
///
/// # Panics
/// When the lengths differ.
pub fn add_into(older: &mut [f32], newer: &[f32]) {
    sum_windows(older, &[newer], true);
}

#[cfg(test)]
mod tests {
    use shardwise_core::CarryCounter;
    use shardwise_core::seed::SplitMix64;

    use super::*;

    /// Every number of windows that has a path of its own, and some beyond, bit for bit against the counter itself.
    #[test]
    fn every_number_of_windows_adds_in_the_order_of_the_counter() {
        let mut random = SplitMix64::new(3);
        for windows in (1..=35).chain([63, 64, 65, 127]) {
            for numel in [0, 1, 17, BLOCK, BLOCK + 33] {
                let mut value = || (random.next_f64() - 0.5) as f32 * 10f32.powi(random.below(9) as i32 - 4);
                let parts: Vec<Vec<f32>> =
                    (0..windows).map(|_| (0..numel).map(|_| value()).collect()).collect();
                let before: Vec<f32> = (0..numel).map(|_| value()).collect();
                let slices: Vec<&[f32]> = parts.iter().map(Vec::as_slice).collect();
                let bytes: Vec<&[u8]> = slices.iter().map(|s| bytemuck::cast_slice(s)).collect();
                for add in [false, true] {
                    let plain = |i: usize| {
                        let mut counter = CarryCounter::default();
                        parts.iter().for_each(|part| counter.push(part[i], 1, |older, newer| older + newer));
                        let sum = counter.finish(|larger, smaller| larger + smaller).expect("a window");
                        (if add { before[i] + sum } else { sum }).to_bits()
                    };
                    let want: Vec<u32> = (0..numel).map(plain).collect();
                    let bits = |sum: Vec<f32>| sum.into_iter().map(f32::to_bits).collect::<Vec<_>>();
                    let mut sum = before.clone();
                    sum_windows(&mut sum, &slices, add);
                    assert_eq!(bits(sum), want, "{windows} windows of {numel}, add: {add}");
                    let mut sum = before.clone();
                    let read = |window: usize, range: Range<usize>, block: &mut [f32]| {
                        block.copy_from_slice(&slices[window][range]);
                    };
                    sum_read(&mut sum, windows, read, add);
                    assert_eq!(bits(sum), want, "{windows} windows of {numel} read, add: {add}");
                    let mut sum = before.clone();
                    sum_encoded(&mut sum, &bytes, Precision::F32, add);
                    assert_eq!(bits(sum), want, "{windows} windows of {numel} in bytes, add: {add}");
                }
            }
        }
    }
}
