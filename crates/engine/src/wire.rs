//! How a flat parameter's elements become the bytes that peers read, and elements again.
//!
//! Both directions are functions of memory alone: whoever has elements (in memory, on their way from a disk) can encode them,
//! and whoever has bytes (lent, relayed) can decode them.

use shardwise_comm::codec;
use shardwise_comm::quantise::{
    self, Key, QuantisationError, RawMissing, dequantise, error_at, quantise_at, quantise_in_place,
};
use shardwise_core::{QUANTISATION_BLOCK, Quantization, Travel};

/// Elements that are rounded and quantised at a time, in the first cache level.
const PIECE: usize = 8 * QUANTISATION_BLOCK;

/// What an encoding has lost, and what it could not encode.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Encoded {
    /// What quantisation has lost of the elements.
    pub(crate) error: QuantisationError,
    /// Elements whose f32 source is read instead.
    pub(crate) raw: usize,
}

/// Encodes `source` into `wire`, which has room for `numel` elements: those that are lacking are padding, and travel as zeros.
///
/// # Panics
/// When `wire` has not [`Travel::bytes`]`(numel)` bytes, or there are more elements than `numel`.
pub(crate) fn encode(
    travel: Travel,
    (source, numel): (&[f32], usize),
    wire: &mut [u8],
    key: Option<Key>,
) -> Encoded {
    match travel.quantised {
        Some(how) => quantise_shard(travel, how, (source, numel), wire, key),
        None => {
            let (own, padding) = wire.split_at_mut(travel.bytes(source.len()));
            if travel.precision.is_low() {
                codec::encode(source, bytemuck::cast_slice_mut(own), travel.precision);
            } else {
                own.copy_from_slice(bytemuck::cast_slice(source));
            }
            padding.fill(0);
            Encoded::default()
        }
    }
}

fn quantise_shard(
    travel: Travel,
    how: Quantization,
    (source, numel): (&[f32], usize),
    wire: &mut [u8],
    key: Option<Key>,
) -> Encoded {
    let mut encoded = Encoded::default();
    let mut rounded = [0f32; PIECE];
    for start in (0..numel).step_by(PIECE) {
        let range = start..(start + PIECE).min(numel);
        let own = &source[start.min(source.len())..range.end.min(source.len())];
        let piece = if travel.precision.is_low() || own.len() < range.len() {
            let piece = &mut rounded[..range.len()];
            piece[..own.len()].copy_from_slice(own);
            piece[own.len()..].fill(0.0);
            codec::round(piece, travel.precision);
            piece
        } else {
            own
        };
        if quantise_at(piece, wire, range.clone(), (numel, how), key) > 0 {
            let raw = quantise::raw_blocks(wire, numel).filter(|block| range.contains(&block.start));
            encoded.raw += raw.map(|block| block.len()).sum::<usize>();
        }
        encoded.error.merge(error_at(piece, wire, range, (numel, how)));
    }
    encoded
}

/// Decodes all that `wire` holds into `dest`. `raw` is the f32 source, needed when [`needs_raw`] says so.
///
/// # Errors
/// When the source is needed, but not given.
///
/// # Panics
/// When `wire` has not [`Travel::bytes`] bytes.
pub(crate) fn decode(
    travel: Travel,
    wire: &[u8],
    dest: &mut [f32],
    raw: Option<&[f32]>,
) -> Result<(), RawMissing> {
    let Some(how) = travel.quantised else {
        codec::take(wire, dest, travel.precision);
        return Ok(());
    };
    dequantise(wire, dest, how, raw)?;
    if raw.is_some() && travel.precision.is_low() {
        quantise::raw_blocks(wire, dest.len())
            .for_each(|block| codec::round(&mut dest[block], travel.precision));
    }
    Ok(())
}

/// Whether some of the `numel` elements of `wire` must be read from their f32 source.
pub(crate) fn needs_raw(travel: Travel, wire: &[u8], numel: usize) -> bool {
    travel.quantised.is_some() && quantise::has_raw(wire, numel)
}

/// Puts in the place of `values` what arrives when they travel.
pub(crate) fn arrive(travel: Travel, values: &mut [f32], key: Option<Key>) -> QuantisationError {
    codec::round(values, travel.precision);
    travel.quantised.map_or_else(QuantisationError::default, |how| quantise_in_place(values, how, key))
}

#[cfg(test)]
mod tests {
    use shardwise_core::Precision;

    use super::*;

    /// Encoding and decoding a shard with its padding gives what a rank that owns it computes with.
    #[test]
    fn what_arrives_from_a_peer_is_what_arrives_at_its_owner() {
        for precision in Precision::ALL {
            for quantised in [None, Some(Quantization::Int8), Some(Quantization::Int4)] {
                let travel = Travel { precision, quantised };
                for (numel, padding) in [(0, 0), (0, 3), (1, 0), (255, 2), (2048, 0), (5000, 1), (3000, 300)]
                {
                    let mut source: Vec<f32> = (0..numel).map(|i| (i as f32 * 0.37).sin() * 3.0).collect();
                    if numel > 2500 {
                        source[2400] = f32::NAN;
                    }
                    let key = Some(Key { seed: 3, first: 11 });
                    let all = numel + padding;
                    let mut words = vec![1.5f32; travel.bytes(all).div_ceil(4)];
                    let wire = &mut bytemuck::cast_slice_mut::<f32, u8>(&mut words)[..travel.bytes(all)];
                    let encoded = encode(travel, (&source, all), wire, key);
                    let has_raw = quantised.is_some() && numel > 2500;
                    assert_eq!(needs_raw(travel, wire, all), has_raw);
                    assert_eq!(encoded.raw > 0, has_raw);
                    let mut raw = source.clone();
                    raw.resize(all, f32::NAN);
                    let mut dest = vec![1.0; all];
                    decode(travel, wire, &mut dest, Some(&raw).filter(|_| has_raw).map(Vec::as_slice))
                        .expect("the source where it is needed");
                    let mut own = source.clone();
                    let lost = arrive(travel, &mut own, key);
                    for (i, (a, b)) in dest.iter().zip(&own).enumerate() {
                        let same = a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
                        assert!(same, "{travel:?}, {i} of {numel}: {a} is not {b}");
                    }
                    assert!((lost.relative() - encoded.error.relative()).abs() < 1e-12);
                }
            }
        }
    }
}
