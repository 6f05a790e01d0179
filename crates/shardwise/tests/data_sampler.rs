//! Samples: which tokens sample `g` is, that every window has its turn, and when a run is refused.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use proptest::prelude::*;
use shardwise::data::{
    DataConfig, DataError, Format, Permutation, SamplerKind, TokenDataset, TokenStream, TokenWidth, Tokenizer,
};

/// A data set over the tokens 0, 1, 2, ..., so that a sample's first input says where it starts.
fn counting(tokens: u32, seq_len: usize, sampler: SamplerKind, seed: u64) -> Result<TokenDataset, DataError> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tokens.bin");
    fs::write(&file, (0..tokens).flat_map(u32::to_le_bytes).collect::<Vec<u8>>()).unwrap();
    let stream = TokenStream::from_token_files(&[file.display().to_string()], TokenWidth::U32).unwrap();
    TokenDataset::new(stream, seq_len, sampler, seed)
}

/// The window of each sample, from the token it starts with.
fn windows(dataset: &TokenDataset, samples: impl Iterator<Item = u64>) -> Vec<u64> {
    let start = |g| u64::from(dataset.sample(g).unwrap().0[0]);
    samples.map(|g| start(g) / dataset.seq_len() as u64).collect()
}

#[test]
fn targets_are_the_inputs_one_token_further_on() {
    for sampler in [SamplerKind::Sequential, SamplerKind::Shuffled] {
        let dataset = counting(1 + 5 * 4, 4, sampler, 1).unwrap();
        assert_eq!(dataset.num_windows(), 5);
        for g in 0..5 {
            let (inputs, targets) = dataset.sample(g).unwrap();
            let start = inputs[0];
            assert_eq!(start % 4, 0);
            assert_eq!(inputs, (start..start + 4).collect::<Vec<_>>());
            assert_eq!(targets, (start + 1..start + 5).collect::<Vec<_>>());
        }
    }
}

#[test]
fn sequential_samples_follow_the_stream_and_end_with_it() {
    for (tokens, seq_len, expected) in [(21, 4, 5), (24, 4, 5), (25, 4, 6), (5, 4, 1), (10, 1, 9)] {
        let dataset = counting(tokens, seq_len, SamplerKind::Sequential, 9).unwrap();
        assert_eq!(windows(&dataset, 0..expected), (0..expected).collect::<Vec<_>>(), "{tokens} / {seq_len}");
        let error = dataset.sample(expected).unwrap_err();
        let DataError::PastEnd { sample, samples, .. } = error else { panic!("{error}") };
        assert_eq!((sample, samples), (expected, expected));
    }
}

#[test]
fn a_shuffled_epoch_visits_every_window_once_in_an_order_of_its_own() {
    let (num_windows, epochs) = (50, 20);
    let dataset = counting(50 * 3 + 1, 3, SamplerKind::Shuffled, 7).unwrap();
    let mut orders = BTreeSet::new();
    for epoch in 0..epochs {
        let order = windows(&dataset, epoch * num_windows..(epoch + 1) * num_windows);
        assert_eq!(order.iter().collect::<BTreeSet<_>>().len(), 50, "epoch {epoch}");
        orders.insert(order);
    }
    assert_eq!(orders.len(), epochs as usize, "no order comes twice");

    let first = |seed| windows(&counting(151, 3, SamplerKind::Shuffled, seed).unwrap(), 0..num_windows);
    assert_ne!(first(7), first(8), "the seed decides");
    assert_eq!(first(7), first(7), "and nothing else");
}

#[test]
fn a_sample_is_the_same_whatever_the_ranks_and_the_order_of_asking() {
    let (batch, steps) = (12, 20);
    let all: Vec<u64> =
        windows(&counting(1001, 10, SamplerKind::Shuffled, 3).unwrap(), 0..batch as u64 * steps);
    for world_size in [1, 2, 3, 4, 12] {
        let mut gathered = vec![0; all.len()];
        for rank in (0..world_size).rev() {
            // Each rank opens the data for itself and asks for its own micro-batches.
            let dataset = counting(1001, 10, SamplerKind::Shuffled, 3).unwrap();
            let own: Vec<usize> = (0..all.len()).filter(|g| g % batch % world_size == rank).collect();
            for (g, window) in own.iter().zip(windows(&dataset, own.iter().map(|g| *g as u64))) {
                gathered[*g] = window;
            }
        }
        assert_eq!(gathered, all, "{world_size} ranks");
    }
}

proptest! {
    #[test]
    fn permutations_are_bijections(len in 1u64..5000, seed: u64) {
        let permutation = Permutation::new(len, seed);
        let mut seen = vec![false; len as usize];
        for index in 0..len {
            let image = permutation.at(index);
            prop_assert!(image < len, "{index} goes to {image}");
            prop_assert!(!std::mem::replace(&mut seen[image as usize], true), "two go to {image}");
        }
    }

    #[test]
    fn huge_permutations_stay_in_range_and_do_not_collide(len in 5000u64.., seed: u64) {
        let permutation = Permutation::new(len, seed);
        let images: BTreeSet<u64> = (0..1000).map(|index| permutation.at(index)).collect();
        prop_assert_eq!(images.len(), 1000);
        prop_assert!(images.iter().all(|image| *image < len));
    }
}

/// How far counts are from being equal, in standard deviations; they have `freedom` degrees of freedom.
fn unevenness(counts: &[u32], freedom: u64, scale: f64) -> f64 {
    let expected = f64::from(counts.iter().sum::<u32>()) / counts.len() as f64;
    let squares = counts.iter().map(|count| (f64::from(*count) - expected).powi(2) / expected);
    let freedom = freedom as f64;
    (squares.sum::<f64>() * scale - freedom) / (2.0 * freedom).sqrt()
}

#[test]
fn every_order_of_a_few_windows_comes_equally_often() {
    for (len, orders) in [(2, 2), (3, 6), (4, 24), (5, 120)] {
        let mut counts = BTreeMap::new();
        for seed in 0..8000 {
            let permutation = Permutation::new(len, seed);
            *counts.entry((0..len).map(|index| permutation.at(index)).collect::<Vec<_>>()).or_insert(0) += 1;
        }
        assert_eq!(counts.len(), orders, "orders of {len}");
        let counts: Vec<u32> = counts.into_values().collect();
        let unevenness = unevenness(&counts, orders as u64 - 1, 1.0);
        assert!(unevenness < 5.0, "orders of {len}: {unevenness} standard deviations");
    }
}

#[test]
fn every_window_comes_at_every_turn_equally_often() {
    for len in [8, 11, 16, 23, 65] {
        let mut counts = vec![0; (len * len) as usize];
        for seed in 0..8000 {
            let permutation = Permutation::new(len, seed);
            for index in 0..len {
                counts[(index * len + permutation.at(index)) as usize] += 1;
            }
        }
        // Each row and column has a fixed sum: the squares of true permutations are larger by len / (len - 1).
        let unevenness = unevenness(&counts, (len - 1) * (len - 1), (len - 1) as f64 / len as f64);
        assert!(unevenness < 5.0, "{len} windows: {unevenness} standard deviations");
    }
}

#[test]
fn a_stream_shorter_than_a_sample_is_refused_with_both_numbers() {
    for (tokens, seq_len) in [(0, 1), (1, 1), (4, 4), (100, 100)] {
        let error = counting(tokens, seq_len, SamplerKind::Shuffled, 0).unwrap_err().to_string();
        for part in [format!("at least {} tokens", seq_len + 1), format!("found {tokens};")] {
            assert!(error.contains(&part), "expected `{part}` in: {error}");
        }
    }
    assert!(matches!(counting(9, 0, SamplerKind::Shuffled, 0).unwrap_err(), DataError::NoWindow));
    assert!(counting(9, usize::MAX, SamplerKind::Shuffled, 0).is_err());
}

#[test]
fn a_run_longer_than_its_data_is_refused_before_it_starts() {
    // 25 windows of 4 tokens, and 3 tokens more.
    for (steps, samples_per_step, fit) in [(5, 5, None), (6, 5, Some(5)), (26, 1, Some(25)), (1, 26, Some(0))]
    {
        let check = |sampler| counting(104, 4, sampler, 0).unwrap().check_run(steps, samples_per_step);
        assert!(check(SamplerKind::Shuffled).is_ok());
        match (check(SamplerKind::Sequential), fit) {
            (Ok(()), None) => {}
            (Err(error @ DataError::RunTooLong { steps_that_fit, .. }), Some(fit)) => {
                assert_eq!(steps_that_fit, fit);
                let needed = steps * samples_per_step * 4 + 1;
                for part in
                    [format!("expected {needed} tokens"), "found 104,".into(), format!("for {fit} steps")]
                {
                    assert!(error.to_string().contains(&part), "expected `{part}` in: {error}");
                }
            }
            (result, fit) => panic!("{steps} steps of {samples_per_step}: {result:?} instead of {fit:?}"),
        }
    }
    counting(104, 4, SamplerKind::Sequential, 0).unwrap().check_run(u64::MAX, u64::MAX).unwrap_err();
}

#[test]
fn the_vocabulary_is_checked_where_the_run_reads_and_only_there() {
    // Token t of the stream is t, so that a run may use the ids below its end.
    let sequential = counting(101, 4, SamplerKind::Sequential, 0).unwrap();
    for (samples, end) in [(0, 1), (1, 5), (10, 41), (25, 101), (1000, 101)] {
        sequential.check_vocab(end, samples).unwrap();
        let error = sequential.check_vocab(end - 1, samples).unwrap_err();
        assert!(matches!(error, DataError::Vocabulary { token, .. } if token as usize == end - 1), "{error}");
    }
    let shuffled = counting(101, 4, SamplerKind::Shuffled, 5).unwrap();
    for samples in [1, 7, 24, 25, 26, 1000] {
        let largest = (0..samples).flat_map(|g| shuffled.sample(g).unwrap().1).max().unwrap() as usize;
        shuffled.check_vocab(largest + 1, samples).unwrap();
        shuffled.check_vocab(largest, samples).unwrap_err();
    }
}

#[test]
fn a_configuration_opens_as_it_says() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    fs::write(path("text"), "abcdefgh").unwrap();
    fs::write(path("tokens"), [1, 0, 2, 0, 3, 0, 0, 0]).unwrap();
    let config = |name: &str, format| DataConfig {
        path: vec![path(name)],
        format,
        sampler: SamplerKind::Sequential,
        ..DataConfig::default()
    };
    for (name, format, samples, first) in [
        ("text", Format::Text, 7, (97, 98)),
        ("tokens", Format::TokensU16, 3, (1, 2)),
        ("tokens", Format::TokensU32, 1, (0x0002_0001, 3)),
    ] {
        let dataset = TokenDataset::open(&config(name, format), 1, &Tokenizer::bytes(), 0).unwrap();
        assert_eq!(dataset.num_windows(), samples, "{name} as {format}");
        assert_eq!(dataset.sample(0).unwrap(), (vec![first.0], vec![first.1]), "{name} as {format}");
        assert_eq!(dataset.stream().origin(), path(name));
    }
    let without_path = DataConfig { path: Vec::new(), ..config("text", Format::TokensU16) };
    let error = TokenDataset::open(&without_path, 1, &Tokenizer::bytes(), 0).unwrap_err().to_string();
    assert!(error.contains("data.format `tokens-u16`") && error.contains("set data.path"), "{error}");

    let default = TokenDataset::open(&DataConfig::default(), 256, &Tokenizer::bytes(), 0).unwrap();
    assert!(default.num_windows() > 1000, "the default corpus needs no path");
}
