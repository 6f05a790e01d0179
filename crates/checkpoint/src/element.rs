//! The three element types that models are stored in, and their conversion from and to f32.

use std::fmt;

use half::{bf16, f16};
use safetensors::Dtype;

/// An element type that can be read as f32 and written from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FloatType {
    /// IEEE single precision: read and written unchanged.
    F32,
    /// IEEE half precision: read exactly, written rounded to nearest, ties to even.
    F16,
    /// The upper half of an f32: read exactly, written rounded to nearest, ties to even.
    Bf16,
}

impl FloatType {
    /// The float type of a stored one, if it is one of the three.
    pub(crate) fn of(dtype: Dtype) -> Option<Self> {
        match dtype {
            Dtype::F32 => Some(Self::F32),
            Dtype::F16 => Some(Self::F16),
            Dtype::BF16 => Some(Self::Bf16),
            _ => None,
        }
    }
}

impl From<FloatType> for Dtype {
    fn from(float: FloatType) -> Self {
        match float {
            FloatType::F32 => Self::F32,
            FloatType::F16 => Self::F16,
            FloatType::Bf16 => Self::BF16,
        }
    }
}

impl fmt::Display for FloatType {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        Dtype::from(*self).fmt(formatter)
    }
}

/// One stored element. The conversions of `half` set the quiet bit of a NaN; these keep its payload.
pub(crate) trait Element: bytemuck::Pod {
    /// The least magnitude that rounds to infinity.
    const OVERFLOWS_FROM: f32;

    /// The same value as f32; a NaN keeps its sign and payload.
    fn widen(self) -> f32;

    /// The nearest value; a NaN keeps its sign and the upper bits of its payload.
    fn narrow(value: f32) -> Self;
}

impl Element for f32 {
    const OVERFLOWS_FROM: f32 = f32::INFINITY;

    #[inline]
    fn widen(self) -> f32 {
        self
    }

    #[inline]
    fn narrow(value: f32) -> Self {
        value
    }
}

impl Element for bf16 {
    const OVERFLOWS_FROM: f32 = f32::from_bits(0x7F7F_8000);

    #[inline]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline]
    fn narrow(value: f32) -> Self {
        if !value.is_nan() {
            return bf16::from_f32(value);
        }
        let bits = (value.to_bits() >> 16) as u16;
        // A payload in the lower bits alone would leave an infinity.
        let payload_lost = bits & 0x007F == 0;
        bf16::from_bits(bits | (u16::from(payload_lost) << 6))
    }
}

impl Element for f16 {
    const OVERFLOWS_FROM: f32 = 65520.0;

    #[inline]
    fn widen(self) -> f32 {
        // Shift exponent and mantissa into place and add the difference of the two exponent biases.
        // Subnormals lack the implicit one: they get it, and lose it again by an exact subtraction.
        const EXPONENT: u32 = 0x7C00 << 13;
        const BIAS: u32 = (127 - 15) << 23;
        const TO_INFINITY: u32 = (128 - 16) << 23;
        const ONE_STEP: u32 = 1 << 23;
        let half = u32::from(self.to_bits());
        let magnitude = (half & 0x7FFF) << 13;
        let magnitude = match magnitude & EXPONENT {
            EXPONENT => magnitude + BIAS + TO_INFINITY,
            0 => {
                let scaled = f32::from_bits(magnitude + BIAS + ONE_STEP);
                (scaled - f32::from_bits(BIAS + ONE_STEP)).to_bits()
            }
            _ => magnitude + BIAS,
        };
        f32::from_bits(magnitude | (half & 0x8000) << 16)
    }

    #[inline]
    fn narrow(value: f32) -> Self {
        if !value.is_nan() {
            return f16::from_f32(value);
        }
        let bits = value.to_bits();
        let payload = (bits >> 13) as u16 & 0x03FF;
        let payload_lost = payload == 0;
        f16::from_bits((bits >> 16) as u16 & 0x8000 | 0x7C00 | payload | (u16::from(payload_lost) << 9))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_precision_pattern_widens_exactly_and_comes_back() {
        for bits in 0..=u16::MAX {
            let (half, brain) = (f16::from_bits(bits), bf16::from_bits(bits));
            if !half.is_nan() {
                assert_eq!(half.widen().to_bits(), half.to_f32().to_bits(), "f16 {bits:#06x}");
            }
            assert_eq!(brain.widen().to_bits(), u32::from(bits) << 16, "bf16 {bits:#06x}");
            assert_eq!(f16::narrow(half.widen()).to_bits(), bits, "f16 {bits:#06x}");
            assert_eq!(bf16::narrow(brain.widen()).to_bits(), bits, "bf16 {bits:#06x}");
        }
    }

    #[test]
    fn a_nan_stays_a_nan_when_its_payload_does_not_fit() {
        for bits in [0x7F80_0001, 0xFF80_0001, 0x7F80_1FFF] {
            let nan = f32::from_bits(bits);
            assert!(f16::narrow(nan).is_nan() && bf16::narrow(nan).is_nan(), "{bits:#010x}");
            assert_eq!(f16::narrow(nan).is_sign_negative(), nan.is_sign_negative());
            assert_eq!(bf16::narrow(nan).is_sign_negative(), nan.is_sign_negative());
        }
    }

    #[test]
    fn overflow_starts_where_rounding_gives_infinity() {
        fn check<T: Element>() {
            let below = f32::from_bits(T::OVERFLOWS_FROM.to_bits() - 1);
            assert!(T::narrow(below).widen().is_finite());
            assert!(T::narrow(T::OVERFLOWS_FROM).widen().is_infinite());
        }
        check::<f16>();
        check::<bf16>();
        check::<f32>();
    }
}
