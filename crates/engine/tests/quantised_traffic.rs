//! Quantised gradients beside all else: branches, nodes, what rests elsewhere, and the bytes that are sent, as reported and as
//! read.

mod common;

use common::{ADAMW, DEADLINE, SGD, Toy, compute_step, config, full_params, train};
use shardwise_comm::testing::{counting, delaying};
use shardwise_comm::threads;
use shardwise_core::{
    ErrorFeedback, MixedPrecision, Offload, Precision, Quantization, ShardingStrategy, Tier, WireConfig,
};
use shardwise_engine::{EngineConfig, UnitId};

use Quantization::{Int4, Int8};
use ShardingStrategy::{FullShard, HybridShard, NoShard, ShardGradOp};

fn smooth(rank: usize, round: usize, step: usize, element: usize) -> f32 {
    let x = element as f32 * 0.37 + rank as f32 * 1.3 + round as f32 * 0.9 + step as f32 * 0.7;
    x.sin() * (1.0 + (element as f32 * 0.011).cos())
}

fn base(strategy: ShardingStrategy, wire: WireConfig) -> EngineConfig {
    EngineConfig { wire, clip_norm: None, ..config(strategy, SGD) }
}

/// Ranks that use different units: what is deferred is the same sums, whatever the timing, with nodes and without.
#[test]
fn branching_ranks_sum_the_same() {
    let train = |world: usize, config: EngineConfig, branches: bool, seed: Option<u64>| {
        threads::run(world, DEADLINE, |group| {
            let rank = group.rank();
            let group = seed.map_or(group.clone(), |seed| delaying(&group, seed * 100 + rank as u64));
            let mut engine = Toy::new(3).engine(group, config);
            for step in 0..3 {
                engine.begin_step(2 * world).expect("idle");
                for round in 0..2 {
                    engine.begin_round().expect("a round");
                    let uses = |unit: usize| !(unit + rank + round + step).is_multiple_of(3);
                    let units: Vec<usize> = (0..3).filter(|unit| !branches || uses(*unit)).collect();
                    for unit in units.iter().map(|unit| UnitId::unit(*unit)) {
                        engine.enter_forward(unit);
                        engine.leave_forward(unit);
                    }
                    for index in units.iter().rev() {
                        let unit = UnitId::unit(*index);
                        engine.enter_backward(unit);
                        for param in 0..engine.parts(unit)[0].layout().params().len() {
                            engine.write_gradient(unit, 0, param, |window, _| {
                                let value = |e: usize| smooth(rank, round, step, e + 10 * param);
                                let g = |e| if uses(*index) { value(e) } else { 0.0 };
                                window.iter_mut().enumerate().for_each(|(e, w)| *w = g(e));
                            });
                        }
                        engine.leave_backward(unit);
                    }
                    engine.end_round().expect("a round");
                }
                engine.end_step(0.05).expect("a step");
            }
            full_params(&mut engine)
        })
        .expect("a world")
    };
    for (world, node_size) in [(2, Some(1)), (4, Some(2)), (3, None)] {
        let plain = WireConfig { gradients: Some(Int4), node_size, ..WireConfig::default() };
        let config = base(NoShard, plain);
        // Nothing is a zero as much as zeros are.
        let want = train(world, config, false, None);
        for seed in 0..3 {
            assert!(train(world, config, true, Some(seed)) == want, "{world} {node_size:?}");
        }
        let error_feedback = Some(ErrorFeedback::default());
        let config = base(NoShard, WireConfig { error_feedback, ..plain });
        let want = train(world, config, true, None);
        for seed in 0..3 {
            assert!(train(world, config, true, Some(seed)) == want, "{world} {node_size:?}, feedback");
        }
    }
}

/// The three together, on two nodes: at most 1.6 bytes a parameter enter a node, over (G - 1)/G.
#[test]
fn the_three_together_send_a_tenth() {
    let toy =
        Toy { root: vec![vec![1000]], units: vec![vec![vec![64, 96]]; 4], last_unused: false, ..Toy::new(0) };
    let m = 1000 + 4 * 64 * 96;
    let wire = WireConfig {
        weights: Some(Int8),
        gradients: Some(Int4),
        secondary_partition: Some(2),
        ..WireConfig::default()
    };
    let entered = |wire: WireConfig| {
        let sent = threads::run(4, DEADLINE, |group| {
            let mut engine = toy.engine(group, EngineConfig { wire, ..config(FullShard, ADAMW) });
            compute_step(&mut engine, 4, 0.05).expect("a step").bytes_sent_across
        });
        // Two nodes, half of what is sent enters each; over (2 - 1)/2.
        sent.expect("a world").into_iter().sum::<u64>()
    };
    let nodes = WireConfig { node_size: Some(2), ..WireConfig::default() };
    assert_eq!(entered(nodes), 4 * (3 * m - 1000));
    let three = entered(wire);
    assert!(10 * three <= 16 * m, "{three} bytes of {m} parameters");
}

/// What reports and the plan tell is what the transport sees: bytes that ranks read from each other, by who lent them.
#[test]
fn what_is_reported_is_what_is_read() {
    // No padding, which is counted but does not travel, and no block that travels raw.
    let toy =
        Toy { root: vec![vec![240]], units: vec![vec![vec![48, 30]]; 2], last_unused: false, ..Toy::new(0) };
    let error_feedback = Some(ErrorFeedback::default());
    let quantised =
        WireConfig { gradients: Some(Int4), weights: Some(Int8), error_feedback, ..WireConfig::default() };
    for wire in [WireConfig::default(), quantised] {
        for (world, near) in [(2, 1), (4, 2), (6, 3), (4, 1), (4, 4)] {
            for (strategy, secondary, shard_group) in [
                (FullShard, false, None),
                (FullShard, true, None),
                (NoShard, false, None),
                (HybridShard, false, Some(near)),
            ] {
                let wire = WireConfig {
                    node_size: Some(near),
                    secondary_partition: secondary.then_some(near),
                    ..wire
                };
                let config = EngineConfig { wire, shard_group, clip_norm: None, ..config(strategy, SGD) };
                let units = ["root", "blocks.0", "blocks.1", "parameters"];
                let seen = threads::run(world, DEADLINE, |group| {
                    let rank = group.rank();
                    let (group, counter) = counting(&group);
                    let mut engine = toy.engine(group, config);
                    compute_step(&mut engine, 2 * world, 0.05).expect("a step");
                    counter.take_by_lender();
                    let report = compute_step(&mut engine, 2 * world, 0.05).expect("a step");
                    let read = counter.take_by_lender().into_iter();
                    let read = read.filter(|((label, _), _)| units.contains(&label.as_str()));
                    let by = read.map(|((_, lender), bytes)| (lender, rank, bytes as u64));
                    (report.bytes_sent, report.bytes_sent_across, by.collect::<Vec<_>>())
                })
                .expect("a world");
                let reads: Vec<(usize, usize, u64)> = seen.iter().flat_map(|(_, _, by)| by.clone()).collect();
                for (rank, (sent, across, _)) in seen.iter().enumerate() {
                    let by_link = |is_across: bool| -> u64 {
                        let link = |reader: usize| (reader / near != rank / near) == is_across;
                        let mine =
                            reads.iter().filter(|(lender, reader, _)| *lender == rank && link(*reader));
                        mine.map(|(_, _, bytes)| bytes).sum()
                    };
                    let got = (by_link(false) + by_link(true), by_link(true));
                    assert_eq!(got, (*sent, *across), "{strategy}, {world} ranks, {near}: {wire:?}");
                }
            }
        }
    }
}

/// The three, and feedback, with everything on the host: the same bits.
#[test]
fn what_rests_elsewhere_travels_alike() {
    let offload = Offload {
        parameters: Tier::Host,
        optimizer: Tier::Host,
        buffer_numel: 1024,
        least_numel: 0,
        ..Offload::default()
    };
    let toy = Toy { units: vec![vec![vec![1500], vec![7]]; 2], frozen: vec![vec![300]], ..Toy::new(2) };
    let error_feedback = Some(ErrorFeedback::default());
    for (world, near) in [(2, 1), (4, 2), (3, 3)] {
        for strategy in [FullShard, ShardGradOp] {
            let wire = WireConfig {
                gradients: Some(Int4),
                weights: Some(Int8),
                error_feedback,
                node_size: Some(near),
                secondary_partition: Some(near),
                ..WireConfig::default()
            };
            let config = EngineConfig { wire, ..config(strategy, ADAMW) };
            let want = train(&toy, world, 3 * world, config, 3);
            let away = train(&toy, world, 3 * world, EngineConfig { offload, ..config }, 3);
            for ((got, _), (want, _)) in away.iter().zip(&want) {
                assert!(got == want, "{strategy}, {world} ranks, nodes of {near}");
            }
        }
    }
}

/// Two narrow ways at once are refused, with both settings.
#[test]
fn low_reductions_are_not_quantised() {
    let wire = WireConfig { gradients: Some(Int4), ..WireConfig::default() };
    let precision = MixedPrecision { reduce_dtype: Precision::Bf16, ..MixedPrecision::default() };
    let error = EngineConfig { precision, ..base(FullShard, wire) }.check().expect_err("both").to_string();
    assert!(
        error.contains("quantized_gradients is int4") && error.contains("reduce_dtype is bf16"),
        "{error}"
    );
}
