//! The one reduction: windows are added in the order of [`shardwise_core::reduction`], whatever the transport.

use std::ops::Range;

use shardwise_core::{CarryCounter, Precision};

use crate::codec::{BLOCK, take};

/// Sums `windows` (one per rank, in rank order, each as long as `dst`) by the binary counter over ranks and puts the sum
/// into `dst`, or adds it to what `dst` holds.
///
/// # Panics
/// When a window's length differs from that of `dst`, or there is none.
pub fn sum_windows(dst: &mut [f32], windows: &[&[f32]], add: bool) {
    assert!(!windows.is_empty(), "a sum needs at least one window");
    assert!(windows.iter().all(|w| w.len() == dst.len()), "windows must be as long as their sum");
    pulp::Arch::new().dispatch(|| match (windows, add) {
        ([a], false) => dst.copy_from_slice(a),
        ([a], true) => map(dst, [a], |d, [a]| d + a),
        ([a, b], false) => map(dst, [a, b], |_, [a, b]| a + b),
        ([a, b], true) => map(dst, [a, b], |d, [a, b]| d + (a + b)),
        ([a, b, c, e], false) => map(dst, [a, b, c, e], |_, [a, b, c, e]| (a + b) + (c + e)),
        ([a, b, c, e], true) => map(dst, [a, b, c, e], |d, [a, b, c, e]| d + ((a + b) + (c + e))),
        _ => sum_blocks(dst, windows, add),
    });
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

/// Any number of windows, a block of elements at a time.
#[inline(always)]
fn sum_blocks(dst: &mut [f32], windows: &[&[f32]], add: bool) {
    let read = |window: usize, range: Range<usize>, block: &mut [f32]| {
        block.copy_from_slice(&windows[window][range]);
    };
    sum_read(dst, windows.len(), read, add);
}

/// Sums `windows` windows of which `read` copies a range into a block.
#[inline(always)]
fn sum_read(dst: &mut [f32], windows: usize, read: impl Fn(usize, Range<usize>, &mut [f32]), add: bool) {
    let mut start = 0;
    while start < dst.len() {
        let end = (start + BLOCK).min(dst.len());
        let mut counter: CarryCounter<[f32; BLOCK]> = CarryCounter::default();
        for window in 0..windows {
            let mut block = [0.0; BLOCK];
            read(window, start..end, &mut block[..end - start]);
            counter.push(block, 1, add_blocks);
        }
        if let Some(sum) = counter.finish(add_blocks) {
            for (d, s) in dst[start..end].iter_mut().zip(&sum) {
                *d = if add { *d + s } else { *s };
            }
        }
        start = end;
    }
}

#[inline(always)]
fn add_blocks(mut older: [f32; BLOCK], newer: [f32; BLOCK]) -> [f32; BLOCK] {
    for (a, b) in older.iter_mut().zip(&newer) {
        *a += b;
    }
    older
}

/// Adds `newer` to `older`, as a carry of the counter over micro-batches does.
///
/// # Panics
/// When the lengths differ.
pub fn add_into(older: &mut [f32], newer: &[f32]) {
    sum_windows(older, &[newer], true);
}
