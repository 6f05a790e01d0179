//! f32 numbers as small integers: a scale for each block of elements, then the codes.
//!
//! `n` elements take [`Quantization::bytes`]`(n)` bytes: one f32 scale per block of [`QUANTISATION_BLOCK`] elements, the
//! last block being shorter, then the codes (int8: a byte each; int4: two in a byte, the first in the low half), padded
//! with zeros to whole f32 words. An element is worth its code times the scale of its block.
//!
//! The scale is the largest magnitude of the block divided by the largest code, cut to 16 bits of significand. So a code
//! times a scale is an f32 without rounding, and so is the middle between two codes: the code is exactly the nearest, the
//! error at most half the scale, and values that have been quantised quantise to themselves.
//!
//! A block that holds a NaN or an infinity, or whose scale would be subnormal, is *raw*: its scale is NaN, its codes are
//! zero, and its elements are read where the f32 source lies.

mod kernels;
mod measure;
#[cfg(test)]
mod reference;

use std::ops::Range;

use shardwise_core::Quantization;
use shardwise_core::wire::QUANTISATION_BLOCK;

pub use measure::{Rate, measure};

/// Bytes of a scale.
const SCALE: usize = size_of::<f32>();

/// What stochastic rounding depends on, besides the element: nothing but its position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Key {
    /// Another one gives other roundings.
    pub seed: u64,
    /// The position of the first element.
    pub first: u64,
}

/// A block is raw, and its f32 source was not given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "elements {start} to {end} travel as f32, because they hold a NaN, an infinity or only numbers too small for a scale, but \
     their f32 source is not lent"
)]
pub struct RawMissing {
    /// The first element of the block.
    pub start: usize,
    /// One past its last element.
    pub end: usize,
}

/// What quantisation has taken from elements. Raw blocks lose nothing, and count for nothing.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct QuantisationError {
    /// The sum of the squared differences.
    pub sum_squares: f64,
    /// The sum of the squared elements.
    pub sum_squares_of_source: f64,
    /// The largest difference.
    pub max_abs: f32,
}

impl QuantisationError {
    /// The root of the mean squared difference, relative to that of the elements; 0 when all are zero.
    pub fn relative(&self) -> f64 {
        if self.sum_squares_of_source > 0.0 {
            (self.sum_squares / self.sum_squares_of_source).sqrt()
        } else {
            0.0
        }
    }

    /// Adds what other elements have lost.
    pub fn merge(&mut self, other: Self) {
        self.sum_squares += other.sum_squares;
        self.sum_squares_of_source += other.sum_squares_of_source;
        self.max_abs = self.max_abs.max(other.max_abs);
    }
}

/// Quantises `source` into `wire`, to the nearest, ties to even, or by chance with a `key`. Returns the number of raw blocks.
///
/// # Panics
/// When `wire` has not [`Quantization::bytes`] bytes.
pub fn quantise(source: &[f32], wire: &mut [u8], how: Quantization, key: Option<Key>) -> usize {
    quantise_at(source, wire, 0..source.len(), (source.len(), how), key)
}

/// Quantises elements `range` of `numel`, which are `source`, into their places in the `wire` of all: for sources that come
/// in pieces. The last piece writes the padding. Returns the number of raw blocks.
///
/// # Panics
/// When `wire` has not [`Quantization::bytes`]`(numel)` bytes, or the range does not consist of whole blocks.
pub fn quantise_at(
    source: &[f32],
    wire: &mut [u8],
    range: Range<usize>,
    (numel, how): (usize, Quantization),
    key: Option<Key>,
) -> usize {
    assert_eq!(wire.len(), how.bytes(numel), "the scales and codes of {numel} elements as {how}");
    assert_eq!(source.len(), range.len(), "the elements of the range");
    check_blocks(&range, numel);
    let (scales, codes) = wire.split_at_mut(Quantization::blocks(numel) * SCALE);
    let scales = &mut scales[range.start / QUANTISATION_BLOCK * SCALE..];
    if range.end == numel {
        codes[how.code_bytes(numel)..].fill(0);
    }
    let codes = &mut codes[how.code_bytes(range.start)..how.code_bytes(range.end)];
    let key = key.map(|key| Key { first: key.first.wrapping_add(range.start as u64), ..key });
    run(kernels::Quantise { source, scales, codes, how, key })
}

/// Puts what `wire` holds into `dest`; raw blocks come from `raw`, the f32 source.
///
/// # Errors
/// When there are raw blocks, but no `raw`.
///
/// # Panics
/// When `wire` has not [`Quantization::bytes`] bytes, or `raw` is not as long as `dest`.
pub fn dequantise(
    wire: &[u8],
    dest: &mut [f32],
    how: Quantization,
    raw: Option<&[f32]>,
) -> Result<(), RawMissing> {
    dequantise_at(wire, dest, 0..dest.len(), (dest.len(), how), raw)
}

/// Puts elements `range` of the `numel` that `wire` holds into `dest`; `raw` is the f32 source of these elements.
///
/// # Errors
/// When there are raw blocks among them, but no `raw`.
///
/// # Panics
/// When `wire` has not [`Quantization::bytes`]`(numel)` bytes, or the range does not consist of whole blocks.
pub fn dequantise_at(
    wire: &[u8],
    dest: &mut [f32],
    range: Range<usize>,
    (numel, how): (usize, Quantization),
    raw: Option<&[f32]>,
) -> Result<(), RawMissing> {
    assert_eq!(dest.len(), range.len(), "the elements of the range");
    let (scales, codes) = parts(wire, &range, (numel, how));
    if let Some(raw) = raw {
        assert_eq!(raw.len(), dest.len(), "the source of the elements");
    } else if let Some(missing) = raw_blocks(wire, numel).find(|block| overlap(block, &range)) {
        return Err(RawMissing { start: missing.start, end: missing.end });
    }
    run(kernels::Dequantise { scales, codes, dest, how, raw });
    Ok(())
}

/// Replaces each value by what its quantised self is worth; raw blocks stay. For ranks that own everything. Returns what was
/// lost.
pub fn quantise_in_place(values: &mut [f32], how: Quantization, key: Option<Key>) -> QuantisationError {
    run(kernels::InPlace { values, how, key })
}

/// Sums `windows` (one per rank, in rank order: the wire of as many elements as `dst` has, and its f32 source where it has raw
/// blocks) in the order of [`crate::reduce`] and puts the sum into `dst`, or adds it to what `dst` holds. Each is
/// dequantised first; additions are in f32.
///
/// # Errors
/// When a window has raw blocks, but no source; `dst` is then unchanged.
///
/// # Panics
/// When a window holds another number of elements than `dst`, or there is none.
pub fn sum_quantised(
    dst: &mut [f32],
    windows: &[(&[u8], Option<&[f32]>)],
    how: Quantization,
    add: bool,
) -> Result<(), RawMissing> {
    assert!(!windows.is_empty(), "a sum needs at least one window");
    let numel = dst.len();
    for (wire, raw) in windows {
        assert_eq!(wire.len(), how.bytes(numel), "windows hold as many elements as their sum");
        match raw_blocks(wire, numel).next() {
            Some(block) if raw.is_none() => return Err(RawMissing { start: block.start, end: block.end }),
            _ => {}
        }
    }
    run(kernels::Sum { dst, windows, how, add });
    Ok(())
}

/// What `wire` has lost of `source`.
///
/// # Panics
/// When `wire` has not [`Quantization::bytes`] bytes.
pub fn error_of(source: &[f32], wire: &[u8], how: Quantization) -> QuantisationError {
    error_at(source, wire, 0..source.len(), (source.len(), how))
}

/// What the `wire` of `numel` elements has lost of elements `range`, which were `source`.
///
/// # Panics
/// As [`dequantise_at`].
pub fn error_at(
    source: &[f32],
    wire: &[u8],
    range: Range<usize>,
    (numel, how): (usize, Quantization),
) -> QuantisationError {
    assert_eq!(source.len(), range.len(), "the elements of the range");
    let (scales, codes) = parts(wire, &range, (numel, how));
    run(kernels::ErrorOf { source, scales, codes, how })
}

/// The raw blocks among the `numel` elements of `wire`: ranges of elements.
pub fn raw_blocks(wire: &[u8], numel: usize) -> impl Iterator<Item = Range<usize>> {
    let scales = wire[..Quantization::blocks(numel) * SCALE].chunks_exact(SCALE);
    let is_raw = |(_, scale): &(usize, &[u8])| kernels::scale_of(scale).is_nan();
    scales.enumerate().filter(is_raw).map(move |(block, _)| {
        let start = block * QUANTISATION_BLOCK;
        start..(start + QUANTISATION_BLOCK).min(numel)
    })
}

/// Gives the raw blocks among elements `range`, which are `source`, a scale, for wires whose source is not kept: the least
/// that a scale can be, so that numbers below half of it are zero. To be called after [`quantise_at`] of the same.
///
/// # Errors
/// The first element that is NaN or infinite, counted from the start of `source`; blocks before it have their scale.
///
/// # Panics
/// As [`quantise_at`].
pub fn settle_raw(
    source: &[f32],
    wire: &mut [u8],
    range: Range<usize>,
    (numel, how): (usize, Quantization),
) -> Result<(), usize> {
    assert_eq!(source.len(), range.len(), "the elements of the range");
    check_blocks(&range, numel);
    let raw: Vec<Range<usize>> = raw_blocks(wire, numel).filter(|block| overlap(block, &range)).collect();
    for block in raw {
        let elements = &source[block.start - range.start..block.end - range.start];
        if let Some(bad) = elements.iter().position(|x| !x.is_finite()) {
            return Err(block.start - range.start + bad);
        }
        let (scales, codes) = wire.split_at_mut(Quantization::blocks(numel) * SCALE);
        let at = block.start / QUANTISATION_BLOCK * SCALE;
        scales[at..at + SCALE].copy_from_slice(&f32::MIN_POSITIVE.to_le_bytes());
        kernels::code_tiny(elements, &mut codes[how.code_bytes(block.start)..how.code_bytes(block.end)], how);
    }
    Ok(())
}

/// Whether decoding the `numel` elements of `wire` needs their f32 source.
pub fn has_raw(wire: &[u8], numel: usize) -> bool {
    raw_blocks(wire, numel).next().is_some()
}

fn run<Op: pulp::WithSimd>(kernel: Op) -> Op::Output {
    pulp::Arch::new().dispatch(kernel)
}

/// The scales and codes of elements `range`.
fn parts<'a>(
    wire: &'a [u8],
    range: &Range<usize>,
    (numel, how): (usize, Quantization),
) -> (&'a [u8], &'a [u8]) {
    assert_eq!(wire.len(), how.bytes(numel), "the scales and codes of {numel} elements as {how}");
    check_blocks(range, numel);
    let (scales, codes) = wire.split_at(Quantization::blocks(numel) * SCALE);
    (
        &scales[range.start / QUANTISATION_BLOCK * SCALE..],
        &codes[how.code_bytes(range.start)..how.code_bytes(range.end)],
    )
}

fn check_blocks(range: &Range<usize>, numel: usize) {
    let whole = |at: usize| at.is_multiple_of(QUANTISATION_BLOCK) || at == numel;
    assert!(
        range.end <= numel && whole(range.start) && whole(range.end),
        "whole blocks: {range:?} of {numel}"
    );
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}
