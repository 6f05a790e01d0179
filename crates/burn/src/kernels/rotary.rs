//! Rotary position embedding, in place.

use super::simd;

/// Whether to rotate or to undo a rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// By the angles of `cos` and `sin`.
    Forward,
    /// By their negatives: the gradient's way.
    Backward,
}

/// The angles of each position: tables of `len` rows of `head_dim / 2`.
#[derive(Clone, Copy, Debug)]
pub struct Angles<'a> {
    /// Cosines.
    pub cos: &'a [f32],
    /// Sines.
    pub sin: &'a [f32],
    /// Elements of a table's row: half a head.
    pub half: usize,
}

/// Rotates the pairs `(i, i + head_dim / 2)` of every head (Su et al., arXiv:2104.09864, in the rotate-half layout of
/// Hugging Face's Llama). `x` holds rows of `width` elements; row `r` is at position `r % len`.
pub fn rotate(x: &mut [f32], width: usize, angles: Angles<'_>, direction: Direction) {
    let Angles { cos, sin, half } = angles;
    let sign = if direction == Direction::Forward { 1.0 } else { -1.0 };
    let positions = cos.chunks_exact(half).zip(sin.chunks_exact(half)).cycle();
    simd(
        #[inline(always)]
        || {
            for (row, (cos, sin)) in x.chunks_exact_mut(width).zip(positions) {
                for head in row.chunks_exact_mut(2 * half) {
                    let (low, high) = head.split_at_mut(half);
                    for (((low, high), &cos), &sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
                        let (a, b, sin) = (*low, *high, sign * sin);
                        *low = a.mul_add(cos, -(b * sin));
                        *high = b.mul_add(cos, a * sin);
                    }
                }
            }
        },
    );
}
