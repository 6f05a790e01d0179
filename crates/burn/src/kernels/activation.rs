//! The activations of a transformer's feed-forward layers, and their gradients.

use super::math::sigmoid;
use super::{map_to_vec, simd};

/// `2 sqrt(2 / pi)`: twice the inner factor of the tanh approximation, because `(1 + tanh u) / 2 = sigmoid(2 u)`.
const TWICE_SQRT_2_OVER_PI: f32 = 1.595_769_2;
const CUBIC: f32 = 0.044_715;

/// The GELU with the tanh approximation (Hendrycks and Gimpel, arXiv:1606.08415), elementwise:
/// `x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`.
pub fn gelu_tanh(x: &[f32]) -> Vec<f32> {
    map_to_vec(
        x,
        x,
        #[inline(always)]
        |x, _| {
            let inner = TWICE_SQRT_2_OVER_PI * x * (CUBIC * x).mul_add(x, 1.0);
            x * sigmoid(inner)
        },
    )
}

/// Turns `dy` into the gradient of `x` for [`gelu_tanh`].
pub fn gelu_tanh_backward(dy: &mut [f32], x: &[f32]) {
    simd(
        #[inline(always)]
        || {
            for (dy, &x) in dy.iter_mut().zip(x) {
                let square = x * x;
                let inner = TWICE_SQRT_2_OVER_PI * x * CUBIC.mul_add(square, 1.0);
                let slope = TWICE_SQRT_2_OVER_PI * (3.0 * CUBIC).mul_add(square, 1.0);
                let s = sigmoid(inner);
                *dy *= (x * slope * s).mul_add(1.0 - s, s);
            }
        },
    );
}

/// `silu(gate) * up` (SwiGLU; Shazeer, arXiv:2002.05202), elementwise.
pub fn silu_mul(gate: &[f32], up: &[f32]) -> Vec<f32> {
    map_to_vec(
        gate,
        up,
        #[inline(always)]
        |gate, up| gate * sigmoid(gate) * up,
    )
}

/// Turns `dy` into the gradient of `up` for [`silu_mul`] and returns the gradient of `gate`.
pub fn silu_mul_backward(dy: &mut [f32], gate: &[f32], up: &[f32]) -> Vec<f32> {
    let mut d_gate = up.to_vec();
    simd(
        #[inline(always)]
        || {
            for ((dy, d_gate), &gate) in dy.iter_mut().zip(&mut d_gate).zip(gate) {
                let s = sigmoid(gate);
                *d_gate *= *dy * (gate * s).mul_add(1.0 - s, s);
                *dy *= gate * s;
            }
        },
    );
    d_gate
}
