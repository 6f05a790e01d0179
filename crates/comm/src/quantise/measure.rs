//! How fast quantisation is, beside a plain copy.

use std::hint::black_box;
use std::time::Instant;

use shardwise_core::Quantization;

use super::{Key, dequantise, quantise};

/// Pairs of measurements, of which the median counts.
const PAIRS: usize = 7;

/// How fast one direction is, on one thread.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rate {
    /// What was measured.
    pub name: &'static str,
    /// Bytes of f32 read (quantising) or written (dequantising) in a second: the median.
    pub bytes_per_second: f64,
    /// Bytes of f32 that a plain copy takes along in a second: the median.
    pub copied_per_second: f64,
    /// The median ratio of neighbouring measurements of both.
    pub ratio: f64,
}

/// Measures every codec on `bytes` bytes of f32, which should exceed the caches: each turn copies as many, so that both see
/// the same machine.
pub fn measure(bytes: usize) -> Vec<Rate> {
    let numel = (bytes / size_of::<f32>()).max(1);
    let source: Vec<f32> =
        (0..numel).map(|i| ((i as u32).wrapping_mul(2_654_435_761) >> 8) as f32 - 8e6).collect();
    let mut dest = vec![1.0f32; numel];
    let mut rates = Vec::new();
    for (how, [nearest, by_chance, back]) in [
        (Quantization::Int8, ["quantise int8", "quantise int8, stochastic", "dequantise int8"]),
        (Quantization::Int4, ["quantise int4", "quantise int4, stochastic", "dequantise int4"]),
    ] {
        let mut wire = vec![1u8; how.bytes(numel)];
        for (name, key) in [(nearest, None), (by_chance, Some(Key { seed: 1, first: 0 }))] {
            rates.push(beside_copy(name, &source, &mut dest, |_| {
                black_box(quantise(&source, &mut wire, how, key));
            }));
        }
        rates.push(beside_copy(back, &source, &mut dest, |dest| {
            // All elements are finite: nothing is raw.
            black_box(dequantise(&wire, dest, how, None)).ok();
        }));
    }
    rates
}

fn beside_copy(
    name: &'static str,
    source: &[f32],
    dest: &mut [f32],
    mut run: impl FnMut(&mut [f32]),
) -> Rate {
    let bytes = size_of_val(source) as f64;
    let rate = |start: Instant| bytes / start.elapsed().as_secs_f64().max(f64::MIN_POSITIVE);
    let (mut rates, mut copies, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    // The first pair finds pages and clocks cold.
    for pair in 0..=PAIRS {
        let start = Instant::now();
        dest.copy_from_slice(black_box(source));
        black_box(&mut *dest);
        let copied = rate(start);
        let start = Instant::now();
        run(dest);
        black_box(&mut *dest);
        let ran = rate(start);
        if pair > 0 {
            rates.push(ran);
            copies.push(copied);
            ratios.push(ran / copied);
        }
    }
    Rate { name, bytes_per_second: median(rates), copied_per_second: median(copies), ratio: median(ratios) }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
