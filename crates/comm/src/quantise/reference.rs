//! Quantisation by its definition, one element at a time, and what it must keep for every input.

use proptest::prelude::*;
use shardwise_core::QUANTISATION_BLOCK as BLOCK;
use shardwise_core::Quantization::{self, Int4, Int8};
use shardwise_core::seed::SplitMix64;

use super::*;

/// What a block is worth: its scale, if it is not raw, and its codes.
struct Coded {
    scale: Option<f32>,
    codes: Vec<i8>,
}

fn code_block(block: &[f32], how: Quantization, key: Option<Key>) -> Coded {
    let levels = f64::from(how.levels());
    let raw = Coded { scale: None, codes: vec![0; block.len()] };
    if block.iter().any(|x| !x.is_finite()) {
        return raw;
    }
    let largest = block.iter().fold(0f32, |max, x| max.max(x.abs()));
    let exact = largest / how.levels() as f32;
    if largest != 0.0 && exact < f32::MIN_POSITIVE {
        return raw;
    }
    let scale = f32::from_bits(exact.to_bits() / 256 * 256);
    let code = |(i, x): (usize, &f32)| match key {
        _ if scale == 0.0 => 0,
        // In f64 the quotient is as good as exact.
        None => (f64::from(*x) / f64::from(scale)).round_ties_even().clamp(-levels, levels) as i8,
        Some(key) => {
            let (step, draw) = (x / scale, draw(key.seed, key.first.wrapping_add(i as u64)));
            (step + draw).floor().clamp(-levels as f32, levels as f32) as i8
        }
    };
    Coded { scale: Some(scale), codes: block.iter().enumerate().map(code).collect() }
}

/// One draw, between 0 and 1.
fn draw(seed: u64, position: u64) -> f32 {
    let key = SplitMix64::new(seed ^ (position >> 32).wrapping_mul(0x9e37_79b9_7f4a_7c15)).next_u64();
    let (a, b) = (key as u32, (key >> 32) as u32);
    let mut x = position as u32 ^ a;
    x ^= x >> 17;
    x = x.wrapping_mul(0xed5a_d4bb).wrapping_add(b);
    x ^= x >> 11;
    x = x.wrapping_mul(0xac4c_1b51);
    x ^= x >> 15;
    x = x.wrapping_mul(0x3184_8bab);
    x ^= x >> 14;
    ((f64::from(x >> 16) + 0.5) / 65536.0) as f32
}

/// The wire, what it is worth, and the number of raw blocks.
fn quantise_plainly(source: &[f32], how: Quantization, key: Option<Key>) -> (Vec<u8>, Vec<f32>, usize) {
    let (mut scales, mut halves, mut worth, mut raw) = (Vec::new(), Vec::new(), Vec::new(), 0);
    for (at, block) in source.chunks(BLOCK).enumerate() {
        let first = |key: Key| Key { first: key.first.wrapping_add((at * BLOCK) as u64), ..key };
        let coded = code_block(block, how, key.map(first));
        scales.extend(coded.scale.unwrap_or(f32::NAN).to_le_bytes());
        raw += usize::from(coded.scale.is_none());
        for (x, code) in block.iter().zip(&coded.codes) {
            worth.push(coded.scale.map_or(*x, |scale| *code as f32 * scale));
        }
        halves.extend(coded.codes);
    }
    let codes: Vec<u8> = match how {
        Int8 => halves.iter().map(|code| *code as u8).collect(),
        Int4 => halves
            .chunks(2)
            .map(|pair| (pair[0] & 15) as u8 + ((pair.get(1).unwrap_or(&0) & 15) as u8) * 16)
            .collect(),
    };
    let mut wire = scales;
    wire.extend(codes);
    wire.resize(how.bytes(source.len()), 0);
    (wire, worth, raw)
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Everything that quantising `source` must give, against the plain code; returns what it is worth.
fn check(source: &[f32], how: Quantization, key: Option<Key>, what: &str) -> Vec<f32> {
    let (want, worth, raw) = quantise_plainly(source, how, key);
    let n = source.len();
    let mut wire = vec![0xee; how.bytes(n)];
    assert_eq!(quantise(source, &mut wire, how, key), raw, "{what}: raw blocks");
    assert!(wire == want, "{what}: the wire of {n} as {how} differs from the plain one");
    let mut back = vec![7.0; n];
    let given = dequantise(&wire, &mut back, how, None);
    assert_eq!(given.is_err(), raw > 0, "{what}: {given:?}");
    assert_eq!(has_raw(&wire, n), raw > 0);
    dequantise(&wire, &mut back, how, Some(source)).expect("the source is given");
    assert!(bits(&back) == bits(&worth), "{what}: the values of {n} as {how} differ from the plain ones");
    let mut in_place = source.to_vec();
    let lost = quantise_in_place(&mut in_place, how, key);
    assert!(bits(&in_place) == bits(&worth), "{what}: in place");
    assert_eq!(lost, error_of(source, &wire, how), "{what}");
    worth
}

/// The error that is allowed in each block, in steps of the block's own largest number.
fn check_bound(source: &[f32], worth: &[f32], how: Quantization, steps: f64) {
    for (block, worth) in source.chunks(BLOCK).zip(worth.chunks(BLOCK)) {
        let largest = block.iter().fold(0f64, |max, x| max.max(f64::from(x.abs())));
        let bound = largest / f64::from(how.levels()) * steps;
        for (x, q) in block.iter().zip(worth) {
            let same = x.to_bits() == q.to_bits();
            let error = (f64::from(*x) - f64::from(*q)).abs();
            assert!(same || error <= bound, "{x} became {q}, off by {error}, more than {bound}");
        }
    }
}

/// Half a step and what rounding may add to it; a whole one for stochastic rounding.
const HALF: f64 = 0.5 * (1.0 + 1.0 / (1u64 << 20) as f64);

fn numbers(n: usize, seed: u64) -> Vec<f32> {
    let mut random = SplitMix64::new(seed);
    (0..n).map(|_| (random.next_f64() - 0.5) as f32 * 10f32.powi(random.below(4) as i32)).collect()
}

/// Arrays of `n` elements with what is special about them.
fn patterns(n: usize) -> Vec<(&'static str, Vec<f32>)> {
    let plain = numbers(n, n as u64);
    let with = |value: f32| {
        let mut values = plain.clone();
        if n > 0 {
            values[n / 2] = value;
        }
        values
    };
    vec![
        ("zeros", vec![0.0; n]),
        ("negative zeros", vec![-0.0; n]),
        ("one NaN", with(f32::NAN)),
        ("infinity", with(f32::INFINITY)),
        ("minus infinity", with(f32::NEG_INFINITY)),
        ("the largest", with(f32::MAX)),
        ("the most negative", with(f32::MIN)),
        ("a subnormal", with(f32::from_bits(1))),
        ("subnormals", (0..n).map(|i| f32::from_bits((i as u32).wrapping_mul(9973) % (1 << 23))).collect()),
        ("around the least scale", (0..n).map(|i| f32::MIN_POSITIVE * (i % 300) as f32 * 0.5).collect()),
        (
            "ties",
            (0..n).map(|i| if i % BLOCK == 0 { 127.0 } else { (i % 253) as f32 * 0.5 - 63.0 }).collect(),
        ),
        ("plain", plain),
    ]
}

const KEYS: [Option<Key>; 2] = [None, Some(Key { seed: 7, first: u32::MAX as u64 - 300 })];

#[test]
fn every_length_width_rounding_and_special_value_gives_the_plain_bits() {
    for n in (0..=1030).chain([1_000_003]) {
        for (what, source) in patterns(n) {
            for how in [Int8, Int4] {
                for key in KEYS {
                    let worth = check(&source, how, key, what);
                    check_bound(&source, &worth, how, if key.is_some() { 1.0 } else { HALF });
                }
            }
        }
    }
}

/// E6: what has been quantised once is worth the same ever after.
#[test]
fn quantised_values_quantise_to_themselves() {
    for n in [1, 2, 255, 256, 257, 1030, 100_003] {
        for (what, source) in patterns(n) {
            for how in [Int8, Int4] {
                for key in KEYS {
                    let once = check(&source, how, key, what);
                    for again in KEYS {
                        let twice = check(&once, how, again, what);
                        assert!(bits(&once) == bits(&twice), "{n} {what} as {how}");
                    }
                }
            }
        }
    }
}

#[test]
fn pieces_in_any_order_give_the_bits_of_the_whole() {
    let n = 5 * BLOCK + 77;
    let mut source = numbers(n, 1);
    source[3 * BLOCK] = f32::NAN;
    for how in [Int8, Int4] {
        for key in KEYS {
            let (want, worth, _) = quantise_plainly(&source, how, key);
            let mut wire = vec![0xee; how.bytes(n)];
            let mut back = vec![0.0; n];
            let (mut raw, mut lost) = (0, QuantisationError::default());
            let ranges = [3 * BLOCK..n, 0..BLOCK, BLOCK..3 * BLOCK];
            for range in ranges.clone() {
                raw += quantise_at(&source[range.clone()], &mut wire, range, (n, how), key);
            }
            assert_eq!((raw, &wire), (1, &want));
            for range in ranges {
                let given = Some(&source[range.clone()]).filter(|_| range.contains(&(3 * BLOCK)));
                let dest = &mut back[range.clone()];
                dequantise_at(&wire, dest, range.clone(), (n, how), given).expect("raw only where given");
                lost.merge(error_at(&source[range.clone()], &wire, range, (n, how)));
            }
            assert_eq!(bits(&back), bits(&worth));
            let whole = error_of(&source, &wire, how);
            assert!((lost.relative() - whole.relative()).abs() < 1e-12 && lost.max_abs == whole.max_abs);
            let missing = dequantise(&wire, &mut back, how, None).expect_err("a block is raw");
            assert_eq!((missing.start, missing.end), (3 * BLOCK, 4 * BLOCK));
        }
    }
}

/// The mean of many roundings is the element, and neighbours in position or seed do not agree by more than chance.
#[test]
fn stochastic_rounding_is_fair_and_depends_on_seed_and_position_alone() {
    let n = 1 << 16;
    let source: Vec<f32> = (0..n).map(|i| if i % BLOCK == 0 { 127.0 } else { 5.3 }).collect();
    let ups = |seed: u64, first: u64| -> Vec<bool> {
        let mut values = source.clone();
        quantise_in_place(&mut values, Int8, Some(Key { seed, first }));
        values.iter().zip(&source).map(|(q, x)| q > x).collect()
    };
    let expected = (n - n / BLOCK) as f64 * 0.3;
    let allowed = 5.0 * (n as f64 * 0.3 * 0.7).sqrt();
    let one = ups(1, 0);
    assert_eq!(one, ups(1, 0));
    for other in [ups(2, 0), ups(1, n as u64), ups(1, 1 << 32), ups(1, 1)] {
        let count = other.iter().filter(|up| **up).count() as f64;
        assert!((count - expected).abs() < allowed, "{count} of {expected}");
        let both = one.iter().zip(&other).filter(|(a, b)| **a && **b).count() as f64;
        assert!((both - expected * 0.3).abs() < allowed, "{both} of {}", expected * 0.3);
    }
    assert_eq!(one[BLOCK + 1..], ups(1, BLOCK as u64)[1..n - BLOCK], "position, not the cut");
}

/// Where the source is not kept, numbers too small for a scale have the least one; they keep their values ever after.
#[test]
fn raw_blocks_can_be_settled_unless_they_are_not_finite() {
    for how in [Int8, Int4] {
        let n = 3 * BLOCK + 5;
        let mut source = numbers(n, 9);
        for (i, x) in source[BLOCK..2 * BLOCK].iter_mut().enumerate() {
            *x = f32::MIN_POSITIVE * (i as f32 * 0.013 - 1.5);
        }
        let mut wire = vec![0; how.bytes(n)];
        assert_eq!(quantise(&source, &mut wire, how, None), 1);
        settle_raw(&source, &mut wire, 0..n, (n, how)).expect("all are finite");
        let mut once = vec![0.0; n];
        dequantise(&wire, &mut once, how, None).expect("nothing is raw");
        for (i, (x, q)) in source.iter().zip(&once).enumerate() {
            let tiny = (BLOCK..2 * BLOCK).contains(&i);
            assert!(!tiny || (x - q).abs() <= f32::MIN_POSITIVE / 2.0, "{x} became {q}");
        }
        let again = wire.clone();
        quantise(&once, &mut wire, how, None);
        settle_raw(&once, &mut wire, 0..n, (n, how)).expect("all are finite");
        assert!(wire == again, "idempotent");
        source[2 * BLOCK + 7] = f32::NAN;
        let piece = BLOCK..3 * BLOCK;
        quantise_at(&source[piece.clone()], &mut wire, piece.clone(), (n, how), None);
        let bad = settle_raw(&source[piece.clone()], &mut wire, piece, (n, how));
        assert_eq!(bad, Err(BLOCK + 7));
    }
}

#[test]
fn quantised_windows_add_in_the_order_of_the_one_reduction() {
    for n in [0, 1, 255, 1024, 3000] {
        for windows in 1..=9 {
            let sources: Vec<Vec<f32>> = (0..windows)
                .map(|w| {
                    let mut values = numbers(n, 100 + w);
                    if n > 600 && w == 1 {
                        values[600] = f32::NAN;
                    }
                    values
                })
                .collect();
            for (how, key) in [(Int8, KEYS[0]), (Int4, KEYS[1])] {
                let coded: Vec<_> = sources.iter().map(|s| quantise_plainly(s, how, key)).collect();
                let worth: Vec<&[f32]> = coded.iter().map(|(_, worth, _)| worth.as_slice()).collect();
                let given: Vec<(&[u8], Option<&[f32]>)> = coded
                    .iter()
                    .zip(&sources)
                    .map(|((wire, _, raw), source)| {
                        (wire.as_slice(), (*raw > 0).then_some(source.as_slice()))
                    })
                    .collect();
                for add in [false, true] {
                    let (mut want, mut sum) = (numbers(n, 5), numbers(n, 5));
                    crate::reduce::sum_windows(&mut want, &worth, add);
                    sum_quantised(&mut sum, &given, how, add).expect("sources where they are needed");
                    assert_eq!(bits(&sum), bits(&want), "{windows} windows of {n} as {how}, add: {add}");
                }
                let mut sum = numbers(n, 5);
                let without: Vec<(&[u8], Option<&[f32]>)> = given.iter().map(|(w, _)| (*w, None)).collect();
                let result = sum_quantised(&mut sum, &without, how, false);
                assert_eq!(result.is_err(), n > 600 && windows > 1);
                assert!(result.is_ok() || sum == numbers(n, 5), "unchanged");
            }
        }
    }
}

proptest! {
    #[test]
    fn no_element_is_off_by_more_than_half_a_step(
        values in prop::collection::vec(any::<f32>(), 0..700),
        exponent in -126i32..127,
        four in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let how = if four { Int4 } else { Int8 };
        let near: Vec<f32> = values.iter().map(|x| {
            f32::from_bits(x.to_bits() & 0x007f_ffff | 0x3f80_0000).copysign(*x) * 2f32.powi(exponent)
        }).collect();
        for source in [values, near] {
            for (key, steps) in [(None, HALF), (Some(Key { seed, first: seed }), 1.0)] {
                let worth = check(&source, how, key, "any");
                check_bound(&source, &worth, how, steps);
            }
        }
    }
}
