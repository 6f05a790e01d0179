//! f32 numbers on a narrower wire: rounded once to nearest (ties to even), widened exactly.

use half::f16;
use half::slice::HalfFloatSliceExt;
use shardwise_core::Precision;

/// Numbers converted at a time, in the first cache level.
pub(crate) const BLOCK: usize = 1024;

/// Bits of an f32 that a bf16 lacks.
const CUT: u32 = 16;

/// Rounds `source` into `wire`, 16 bits a number.
///
/// # Panics
/// When the lengths differ, or `precision` has not 16 bits.
pub fn encode(source: &[f32], wire: &mut [u16], precision: Precision) {
    assert_eq!(source.len(), wire.len(), "one number on the wire for each");
    match precision {
        Precision::Bf16 => pulp::Arch::new().dispatch(
            #[inline(always)]
            || source.iter().zip(wire).for_each(|(x, w)| *w = to_bf16(*x)),
        ),
        Precision::F16 => half_wire(wire).convert_from_f32_slice(source),
        Precision::F32 => panic!("f32 travels as it is"),
    }
}

/// Widens `wire` into `dest`.
///
/// # Panics
/// When the lengths differ, or `precision` has not 16 bits.
pub fn decode(wire: &[u16], dest: &mut [f32], precision: Precision) {
    assert_eq!(wire.len(), dest.len(), "a number for each on the wire");
    match precision {
        Precision::Bf16 => pulp::Arch::new().dispatch(
            #[inline(always)]
            || wire.iter().zip(dest).for_each(|(w, x)| *x = f32::from_bits(u32::from(*w) << CUT)),
        ),
        Precision::F16 => bytemuck::cast_slice::<u16, f16>(wire).convert_to_f32_slice(dest),
        Precision::F32 => panic!("f32 travels as it is"),
    }
}

/// Rounds `source` into `buffer`, packed, behind `start` numbers of 16 bits.
///
/// # Panics
/// When `buffer` is too short, or `precision` has not 16 bits.
pub fn encode_packed(source: &[f32], buffer: &mut [f32], start: usize, precision: Precision) {
    let wire = &mut bytemuck::cast_slice_mut::<f32, u16>(buffer)[start..start + source.len()];
    encode(source, wire, precision);
}

/// Rounds `values` to `precision` where they are.
pub fn round(values: &mut [f32], precision: Precision) {
    if !precision.is_low() {
        return;
    }
    let mut wire = [0u16; BLOCK];
    for block in values.chunks_mut(BLOCK) {
        let wire = &mut wire[..block.len()];
        encode(block, wire, precision);
        decode(wire, block, precision);
    }
}

/// Divides the first `numel` numbers of `buffer` by `divisor` and rounds them, so that the buffer begins with them as they
/// travel: packed, 16 bits each. With f32 nothing moves.
pub fn pack(buffer: &mut [f32], numel: usize, divisor: f32, precision: Precision) {
    let divide = |values: &mut [f32]| {
        if divisor != 1.0 {
            values.iter_mut().for_each(|x| *x /= divisor);
        }
    };
    if !precision.is_low() {
        divide(&mut buffer[..numel]);
        return;
    }
    let (mut wide, mut wire) = ([0f32; BLOCK], [0u16; BLOCK]);
    let mut start = 0;
    while start < numel {
        // The packed numbers never overtake those that are still to be read: they take half the room.
        let n = BLOCK.min(numel - start);
        wide[..n].copy_from_slice(&buffer[start..start + n]);
        divide(&mut wide[..n]);
        encode(&wide[..n], &mut wire[..n], precision);
        bytemuck::cast_slice_mut::<f32, u16>(buffer)[start..start + n].copy_from_slice(&wire[..n]);
        start += n;
    }
}

/// Takes [`pack`] back, but for the rounding.
pub fn unpack(buffer: &mut [f32], numel: usize, divisor: f32, precision: Precision) {
    let (mut wide, mut wire) = ([0f32; BLOCK], [0u16; BLOCK]);
    // From the end: the wide numbers need the room of packed ones that have been read before.
    for start in (0..numel).step_by(BLOCK).rev() {
        let n = BLOCK.min(numel - start);
        if precision.is_low() {
            wire[..n].copy_from_slice(&bytemuck::cast_slice::<f32, u16>(buffer)[start..start + n]);
            decode(&wire[..n], &mut wide[..n], precision);
            buffer[start..start + n].copy_from_slice(&wide[..n]);
        }
        if divisor != 1.0 {
            buffer[start..start + n].iter_mut().for_each(|x| *x *= divisor);
        }
    }
}

/// The f32 numbers that lie in bytes of the wire.
///
/// # Panics
/// When there are not as many as `dest` has.
pub fn take(bytes: &[u8], dest: &mut [f32], precision: Precision) {
    if precision.is_low() {
        decode(bytemuck::cast_slice(bytes), dest, precision);
    } else {
        dest.copy_from_slice(bytemuck::cast_slice(bytes));
    }
}

fn half_wire(wire: &mut [u16]) -> &mut [f16] {
    bytemuck::cast_slice_mut(wire)
}

/// Rounds to nearest, ties to even; a NaN stays one.
#[inline(always)]
fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let half = (1 << (CUT - 1)) - 1 + ((bits >> CUT) & 1);
    let rounded = (bits.wrapping_add(half) >> CUT) as u16;
    let quiet = (bits >> CUT) as u16 | 0x40;
    if x.is_nan() { quiet } else { rounded }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    fn samples() -> Vec<f32> {
        let mut bits: Vec<u32> = (0..100_000u32).map(|i| i.wrapping_mul(2_654_435_761)).collect();
        bits.extend([
            0,
            1 << 31,
            0x7f80_0000,
            0xff80_0000,
            0x7fc0_0000,
            0x7f80_0001,
            0x7f7f_ffff,
            1,
            0x477f_f000,
        ]);
        bits.extend((0..64).map(|i| 0x3f80_0000 + (i << 14)));
        bits.into_iter().map(f32::from_bits).collect()
    }

    #[test]
    fn numbers_round_as_the_half_crate_rounds_them_one_by_one() {
        for precision in [Precision::Bf16, Precision::F16] {
            let all = samples();
            for values in [&all[..], &all[..1], &all[..17], &[]] {
                let mut wire = vec![0; values.len()];
                encode(values, &mut wire, precision);
                let mut back = vec![0.0; values.len()];
                decode(&wire, &mut back, precision);
                let mut rounded = values.to_vec();
                round(&mut rounded, precision);
                let mut packed = values.to_vec();
                pack(&mut packed, values.len(), 1.0, precision);
                let mut unpacked = vec![0.0; values.len()];
                let bytes: &[u8] = bytemuck::cast_slice(&packed);
                take(&bytes[..2 * values.len()], &mut unpacked, precision);
                for (i, x) in values.iter().enumerate() {
                    let want = match precision {
                        Precision::F16 => f16::from_f32(*x).to_f32(),
                        _ => bf16::from_f32(*x).to_f32(),
                    };
                    for got in [back[i], rounded[i], unpacked[i]] {
                        let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
                        assert!(same, "{precision}: {x} became {got}, not {want}");
                    }
                }
            }
        }
    }

    #[test]
    fn unpacking_takes_packing_back() {
        for numel in [0, 1, 5, 1023, 1024, 1025, 3000] {
            for precision in Precision::ALL {
                // Numbers that every type holds.
                let values: Vec<f32> = (0..numel).map(|i| (i % 256) as f32).collect();
                let mut buffer = values.clone();
                buffer.resize(numel + 7, 0.5);
                pack(&mut buffer, numel, 4.0, precision);
                unpack(&mut buffer, numel, 4.0, precision);
                assert_eq!(buffer[..numel], values, "{numel} in {precision}");
                assert_eq!(buffer[numel..], [0.5; 7]);
            }
        }
    }

    #[test]
    fn packing_divides_first() {
        let mut values: Vec<f32> = (0..3000).map(|i| i as f32).collect();
        pack(&mut values, 2500, 4.0, Precision::Bf16);
        let mut back = vec![0.0; 2500];
        take(&bytemuck::cast_slice::<f32, u8>(&values)[..5000], &mut back, Precision::Bf16);
        for (i, x) in back.iter().enumerate() {
            assert_eq!(*x, bf16::from_f32(i as f32 / 4.0).to_f32());
        }
    }
}
