//! Elementary functions in single precision as branch-free code that vectorises.

use std::f32::consts::LOG2_E;

/// `e^x`, with a relative error below 2e-7 where the result is a normal number, correct to one unit in the last place
/// of the subnormals below; 0, infinity and NaN as in `f32::exp`.
///
/// Method: Cephes `expf`. `x = n ln 2 + r`, a polynomial in `|r| <= ln 2 / 2`, then a scaling by `2^n` in two steps, so
/// that neither factor leaves the range of exponents.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Adding 1.5 * 2^23 leaves the nearest integer in the low bits of the mantissa.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts, the first with few bits, so that its product with n is exact.
    const LN_2_HIGH: f32 = 355.0 / 512.0;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    // Beyond these the result is 0 or infinity; `clamp` lets NaN through.
    let x = x.clamp(-104.0, 89.0);
    let shifted = x.mul_add(LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN_2_HIGH, x);
    let r = n.mul_add(-LN_2_LOW, r);
    let p = 1.987_569_1e-4_f32;
    let p = p.mul_add(r, 1.398_2e-3);
    let p = p.mul_add(r, 8.333_452e-3);
    let p = p.mul_add(r, 4.166_579_6e-2);
    let p = p.mul_add(r, 1.666_666_5e-1);
    let p = p.mul_add(r, 0.5);
    let p = (p * r).mul_add(r, r) + 1.0;
    let n = shifted.to_bits().wrapping_sub(ROUND.to_bits()).cast_signed();
    let half = n >> 1;
    p * power_of_two(half) * power_of_two(n.wrapping_sub(half))
}

/// `2^n` for an exponent of a normal number (-126 to 127).
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) << 23).cast_unsigned())
}

/// `1 / (1 + e^-x)`, with a relative error below 3e-7 for `x > -87`; 0 below -89.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}
