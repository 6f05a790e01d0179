//! The loops of quantisation, in a form that compiles to vector code; the last block takes the same path, so that results do
//! not depend on the width of vectors.
//!
//! Each entry is a [`WithSimd`] and not a closure: what `dispatch` does not inline is compiled without the processor's
//! features.

use pulp::{Simd, WithSimd};
use shardwise_core::Quantization;
use shardwise_core::wire::QUANTISATION_BLOCK as BLOCK;

use super::{Key, QuantisationError, SCALE, parts};
use crate::reduce::sum_read;

/// The bits of an f32 without its sign.
const MAGNITUDE: u32 = 0x7fff_ffff;
/// The bits of a scale: sign, exponent, and 16 of the significand with the hidden one. A code has 7 bits and the middle
/// between two codes 8: their products with a scale fit the 24 bits of an f32.
const SCALE_BITS: u32 = !0xff;
/// Added to a number up to 2^22, it leaves the number, rounded to nearest even, in the last bits.
const ROUND: f32 = 12_582_912.0;
/// Numbers that stochastic rounding distinguishes in a step. With them a code still fits the 24 bits of an f32.
const CHANCES: f32 = 65536.0;
/// Sums that run side by side.
const LANES: usize = 16;

/// A code for each element of a block, a byte each.
type Codes = [u8; BLOCK];
/// One draw for each element of a block.
type Draws = [f32; BLOCK];

pub(super) fn scale_of(bytes: &[u8]) -> f32 {
    f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

/// Quantises `source`; gives the number of raw blocks.
pub(super) struct Quantise<'a> {
    pub(super) source: &'a [f32],
    pub(super) scales: &'a mut [u8],
    pub(super) codes: &'a mut [u8],
    pub(super) how: Quantization,
    pub(super) key: Option<Key>,
}

impl WithSimd for Quantise<'_> {
    type Output = usize;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> usize {
        match self.how {
            Quantization::Int8 => self.run::<127>(),
            Quantization::Int4 => self.run::<7>(),
        }
    }
}

impl Quantise<'_> {
    #[inline(always)]
    fn run<const LEVELS: i8>(self) -> usize {
        let (mut raw, mut block) = (0, [0u8; BLOCK]);
        let parts = self.source.chunks(BLOCK).zip(self.scales.chunks_exact_mut(SCALE));
        let parts = parts.zip(self.codes.chunks_mut(self.how.code_bytes(BLOCK)));
        for (at, ((source, scale), codes)) in parts.enumerate() {
            let key = key_at(self.key, at);
            let value = code_block::<LEVELS>(source, &mut block, key);
            scale.copy_from_slice(&value.to_le_bytes());
            if value.is_nan() {
                raw += 1;
                codes.fill(0);
            } else if LEVELS == 127 {
                match (<&mut Codes>::try_from(&mut *codes), &block) {
                    (Ok(codes), block) => *codes = *block,
                    (Err(_), block) => codes.copy_from_slice(&block[..codes.len()]),
                }
            } else {
                block[source.len()..].fill(0);
                pack(&block, codes);
            }
        }
        raw
    }
}

/// Dequantises into `dest`; raw blocks come from `raw`, if there are any.
pub(super) struct Dequantise<'a> {
    pub(super) scales: &'a [u8],
    pub(super) codes: &'a [u8],
    pub(super) dest: &'a mut [f32],
    pub(super) how: Quantization,
    pub(super) raw: Option<&'a [f32]>,
}

impl WithSimd for Dequantise<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        self.run();
    }
}

impl Dequantise<'_> {
    #[inline(always)]
    fn run(self) {
        let mut block = [0u8; BLOCK];
        let parts = self.dest.chunks_mut(BLOCK).zip(self.scales.chunks_exact(SCALE));
        let parts = parts.zip(self.codes.chunks(self.how.code_bytes(BLOCK)));
        for (at, ((dest, scale), codes)) in parts.enumerate() {
            let scale = scale_of(scale);
            if scale.is_nan() {
                if let Some(raw) = self.raw {
                    dest.copy_from_slice(&raw[at * BLOCK..at * BLOCK + dest.len()]);
                }
            } else if self.how == Quantization::Int8 {
                widen(codes, scale, dest);
            } else {
                unpack(codes, &mut block);
                widen(&block, scale, dest);
            }
        }
    }
}

/// Dequantises windows and adds them.
pub(super) struct Sum<'a> {
    pub(super) dst: &'a mut [f32],
    pub(super) windows: &'a [(&'a [u8], Option<&'a [f32]>)],
    pub(super) how: Quantization,
    pub(super) add: bool,
}

impl WithSimd for Sum<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { dst, windows, how, add } = self;
        let numel = dst.len();
        sum_read(
            dst,
            windows.len(),
            #[inline(always)]
            |window, range, dest: &mut [f32]| {
                let (wire, raw) = windows[window];
                let raw = raw.map(|raw| &raw[range.clone()]);
                let (scales, codes) = parts(wire, &range, (numel, how));
                Dequantise { scales, codes, dest, how, raw }.run();
            },
            add,
        );
    }
}

/// Replaces values by what they are worth quantised; raw blocks stay.
pub(super) struct InPlace<'a> {
    pub(super) values: &'a mut [f32],
    pub(super) how: Quantization,
    pub(super) key: Option<Key>,
}

impl WithSimd for InPlace<'_> {
    type Output = QuantisationError;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> QuantisationError {
        match self.how {
            Quantization::Int8 => self.run::<127>(),
            Quantization::Int4 => self.run::<7>(),
        }
    }
}

impl InPlace<'_> {
    #[inline(always)]
    fn run<const LEVELS: i8>(self) -> QuantisationError {
        let (mut sums, mut block) = (Sums::default(), [0u8; BLOCK]);
        for (at, values) in self.values.chunks_mut(BLOCK).enumerate() {
            let scale = code_block::<LEVELS>(values, &mut block, key_at(self.key, at));
            if !scale.is_nan() {
                sums.add(values, &block, scale);
                widen(&block, scale, values);
            }
        }
        sums.finish()
    }
}

/// What was lost of `source`.
pub(super) struct ErrorOf<'a> {
    pub(super) source: &'a [f32],
    pub(super) scales: &'a [u8],
    pub(super) codes: &'a [u8],
    pub(super) how: Quantization,
}

impl WithSimd for ErrorOf<'_> {
    type Output = QuantisationError;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> QuantisationError {
        let (mut sums, mut block) = (Sums::default(), [0u8; BLOCK]);
        let parts = self.source.chunks(BLOCK).zip(self.scales.chunks_exact(SCALE));
        let parts = parts.zip(self.codes.chunks(self.how.code_bytes(BLOCK)));
        for ((source, scale), codes) in parts {
            let scale = scale_of(scale);
            if scale.is_nan() {
                continue;
            }
            match self.how {
                Quantization::Int8 => block[..codes.len()].copy_from_slice(codes),
                Quantization::Int4 => unpack(codes, &mut block),
            }
            sums.add(source, &block, scale);
        }
        sums.finish()
    }
}

/// Codes of a block whose scale is the least there is, rounded to nearest. Rare, so it may be slow.
pub(super) fn code_tiny(source: &[f32], codes: &mut [u8], how: Quantization) {
    let mut block = [0u8; BLOCK];
    for (code, x) in block.iter_mut().zip(source) {
        *code = (x / f32::MIN_POSITIVE + ROUND).to_bits() as u8;
    }
    match how {
        Quantization::Int8 => codes.copy_from_slice(&block[..codes.len()]),
        Quantization::Int4 => pack(&block, codes),
    }
}

#[inline(always)]
fn key_at(key: Option<Key>, block: usize) -> Option<Key> {
    key.map(|Key { seed, first }| Key { seed, first: first.wrapping_add((block * BLOCK) as u64) })
}

/// Puts the codes of a block into the first places of `codes`; gives its scale, NaN when it must be raw.
#[inline(always)]
fn code_block<const LEVELS: i8>(source: &[f32], codes: &mut Codes, key: Option<Key>) -> f32 {
    // A block of known length compiles to code without tails.
    match (<&[f32; BLOCK]>::try_from(source), key) {
        (Ok(source), None) => nearest::<LEVELS>(source, codes),
        (Err(_), None) => nearest::<LEVELS>(source, &mut codes[..source.len()]),
        (Ok(source), Some(key)) => by_chance::<LEVELS>(source, codes, key),
        (Err(_), Some(key)) => by_chance::<LEVELS>(source, &mut codes[..source.len()], key),
    }
}

#[inline(always)]
fn scale_for<const LEVELS: i8>(source: &[f32]) -> f32 {
    // As bits, magnitudes are ordered like numbers, with infinity and NaN at the end, and their maximum is the same in any
    // order.
    let mut largest = 0;
    for x in source {
        largest = largest.max(x.to_bits() & MAGNITUDE);
    }
    let scale = f32::from_bits(largest) / f32::from(LEVELS);
    if largest == 0 {
        0.0
    } else if scale >= f32::MIN_POSITIVE && scale.is_finite() {
        f32::from_bits(scale.to_bits() & SCALE_BITS)
    } else {
        f32::NAN
    }
}

/// What elements are divided by. All elements of a block without scale are zero.
#[inline(always)]
fn divisor(scale: f32) -> f32 {
    if scale == 0.0 { 1.0 } else { scale }
}

#[inline(always)]
fn nearest<const LEVELS: i8>(source: &[f32], codes: &mut [u8]) -> f32 {
    let scale = scale_for::<LEVELS>(source);
    let divisor = divisor(scale);
    // The largest element is at most 2^-15 of itself beyond the last code, and is rounded to it.
    for (code, x) in codes.iter_mut().zip(source) {
        *code = (x / divisor + ROUND).to_bits() as u8;
    }
    scale
}

#[inline(always)]
fn by_chance<const LEVELS: i8>(source: &[f32], codes: &mut [u8], key: Key) -> f32 {
    let scale = scale_for::<LEVELS>(source);
    let (divisor, levels) = (divisor(scale), f32::from(LEVELS));
    let mut draws: Draws = [0.0; BLOCK];
    draw(key, &mut draws[..source.len()]);
    for ((code, x), draw) in codes.iter_mut().zip(source).zip(&draws) {
        let down = floor(x / divisor + draw);
        let down = if down > levels { levels } else { down };
        let down = if down < -levels { -levels } else { down };
        *code = (down + ROUND).to_bits() as u8;
    }
    scale
}

/// As [`f32::floor`], for small numbers; that one is a call where the target has no instruction for it.
#[inline(always)]
fn floor(x: f32) -> f32 {
    let near = (x + ROUND) - ROUND;
    if near > x { near - 1.0 } else { near }
}

#[inline(always)]
fn widen(codes: &[u8], scale: f32, dest: &mut [f32]) {
    for (x, code) in dest.iter_mut().zip(codes) {
        *x = f32::from(*code as i8) * scale;
    }
}

/// Two codes a byte, the first in the low half.
#[inline(always)]
fn pack(block: &Codes, codes: &mut [u8]) {
    for (byte, pair) in codes.iter_mut().zip(block.chunks_exact(2)) {
        let pair = u16::from_le_bytes([pair[0], pair[1]]) & 0x0f0f;
        *byte = (pair | (pair >> 4)) as u8;
    }
}

/// One code a byte.
#[inline(always)]
fn unpack(codes: &[u8], block: &mut Codes) {
    for (pair, byte) in block.chunks_exact_mut(2).zip(codes) {
        let byte = u16::from(*byte);
        let halves = (byte & 0xf) | ((byte & 0xf0) << 4);
        // The sign of a half, in each byte: nothing is carried across.
        let signs = (halves & 0x0808) >> 3;
        pair.copy_from_slice(&(halves | (signs * 0xf0)).to_le_bytes());
    }
}

/// Numbers between 0 and 1, each by its position alone.
#[inline(always)]
fn draw(key: Key, draws: &mut [f32]) {
    let mut start = 0;
    while start < draws.len() {
        // The upper half of a position is a part of the key, so that what is left fits vectors of 32 bits.
        let at = key.first.wrapping_add(start as u64);
        let (high, low) = (at >> 32, at as u32);
        let n = ((1u64 << 32) - u64::from(low)).min((draws.len() - start) as u64) as usize;
        let (a, b) = halves_of_key(key.seed, high);
        for (i, draw) in draws[start..start + n].iter_mut().enumerate() {
            let chance = hash(low.wrapping_add(i as u32), a, b) >> 16;
            *draw = (chance as i32 as f32 + 0.5) * (1.0 / CHANCES);
        }
        start += n;
    }
}

fn halves_of_key(seed: u64, high: u64) -> (u32, u32) {
    let mut key = shardwise_core::seed::SplitMix64::new(seed ^ high.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let key = key.next_u64();
    (key as u32, (key >> 32) as u32)
}

/// Wellons' `triple32` with a key before and after its first multiplication.
#[inline(always)]
fn hash(position: u32, a: u32, b: u32) -> u32 {
    let mut x = position ^ a;
    x = (x ^ (x >> 17)).wrapping_mul(0xed5a_d4bb).wrapping_add(b);
    x = (x ^ (x >> 11)).wrapping_mul(0xac4c_1b51);
    x = (x ^ (x >> 15)).wrapping_mul(0x3184_8bab);
    x ^ (x >> 14)
}

/// Sums of squares, side by side.
#[derive(Default)]
struct Sums {
    errors: [f64; LANES],
    source: [f64; LANES],
    max: [f32; LANES],
}

impl Sums {
    /// Adds the elements of a block and what their codes have lost.
    #[inline(always)]
    fn add(&mut self, source: &[f32], codes: &Codes, scale: f32) {
        let (groups, rest) = source.as_chunks::<LANES>();
        let (of_groups, of_rest) = codes[..source.len()].as_chunks::<LANES>();
        for (source, codes) in groups.iter().zip(of_groups) {
            self.add_group(source, codes, scale);
        }
        let (mut last, mut codes) = ([0.0; LANES], [0; LANES]);
        last[..rest.len()].copy_from_slice(rest);
        codes[..rest.len()].copy_from_slice(of_rest);
        self.add_group(&last, &codes, scale);
    }

    #[inline(always)]
    fn add_group(&mut self, source: &[f32; LANES], codes: &[u8; LANES], scale: f32) {
        for lane in 0..LANES {
            let error = source[lane] - f32::from(codes[lane] as i8) * scale;
            self.errors[lane] += f64::from(error) * f64::from(error);
            self.source[lane] += f64::from(source[lane]) * f64::from(source[lane]);
            let magnitude = error.abs();
            self.max[lane] = if magnitude > self.max[lane] { magnitude } else { self.max[lane] };
        }
    }

    #[inline(always)]
    fn finish(self) -> QuantisationError {
        QuantisationError {
            sum_squares: self.errors.iter().sum(),
            sum_squares_of_source: self.source.iter().sum(),
            max_abs: self.max.into_iter().fold(0.0, f32::max),
        }
    }
}
