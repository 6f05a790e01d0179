//! A step over any number of ranks equals the same step by one loop over whole parameters, bit for bit.

mod common;

use common::{ADAM, ADAMW, LION, MOMENTUM, NESTEROV, Reference, SGD, STRATEGIES, Toy, config, train};
use shardwise_core::ShardingStrategy;
use shardwise_engine::Norm;

fn assert_equal_to_reference(
    toy: &Toy,
    ranks: usize,
    micro_batches: usize,
    config: shardwise_engine::EngineConfig,
) {
    let what = format!("{ranks} ranks, {micro_batches} micro-batches, {config:?}");
    let mut reference = Reference::new(toy);
    let norms: Vec<f64> = (0..3).map(|_| reference.step(micro_batches, ranks, &config, 0.05)).collect();
    for (rank, (params, reports)) in train(toy, ranks, micro_batches, config, 3).into_iter().enumerate() {
        for (flat, (_, layout, want)) in params.iter().zip(&reference.params) {
            for (e, (got, want)) in flat.iter().zip(want).enumerate() {
                assert_eq!(
                    got.to_bits(),
                    want.to_bits(),
                    "{what}: rank {rank}, {} element {e}: {got} {want}",
                    layout.unit()
                );
            }
        }
        for (report, norm) in reports.iter().zip(&norms) {
            let error = (report.grad_norm - norm).abs() / norm;
            assert!(error < 1e-14, "{what}: norm {} instead of {norm}", report.grad_norm);
        }
    }
}

#[test]
fn every_strategy_and_world_equals_the_reference() {
    for strategy in STRATEGIES {
        for ranks in 1..=4 {
            for rounds in [1, 3] {
                assert_equal_to_reference(&Toy::new(3), ranks, ranks * rounds, config(strategy, ADAMW));
            }
        }
    }
}

#[test]
fn every_optimizer_equals_the_reference() {
    for optimizer in [ADAMW, ADAM, MOMENTUM, NESTEROV, SGD, LION] {
        for strategy in STRATEGIES {
            assert_equal_to_reference(&Toy::new(2), 3, 6, config(strategy, optimizer));
        }
    }
}

#[test]
fn options_change_no_bit() {
    for prefetch in [true, false] {
        for clip_norm in [None, Some(0.01), Some(1e9)] {
            let config = shardwise_engine::EngineConfig {
                prefetch,
                clip_norm,
                ..config(ShardingStrategy::FullShard, ADAMW)
            };
            assert_equal_to_reference(&Toy::new(4), 2, 6, config);
        }
    }
}

/// L16: clipping by any norm equals the unsharded one (reported bug B1: the same coefficient for any number of ranks).
#[test]
fn every_norm_equals_the_reference() {
    for norm in [Norm::L1, Norm::L2, Norm::Lp(3.0), Norm::Lp(2.5), Norm::Max] {
        for ranks in [1, 2, 3] {
            for strategy in STRATEGIES {
                let config = shardwise_engine::EngineConfig { norm, ..config(strategy, ADAMW) };
                assert_equal_to_reference(&Toy::new(2), ranks, 2 * ranks, config);
            }
        }
    }
}

/// 8 micro-batches on 3 ranks: 3, 3 and 2 of them.
#[test]
fn a_ragged_last_round_is_exact() {
    for strategy in STRATEGIES {
        for (ranks, micro_batches) in [(3, 8), (4, 5), (2, 7), (3, 4), (4, 13), (3, 11)] {
            assert_equal_to_reference(&Toy::new(2), ranks, micro_batches, config(strategy, ADAMW));
        }
    }
}

#[test]
fn models_of_every_build() {
    let root_only = Toy { units: vec![], ..Toy::new(0) };
    let units_only = Toy { root: vec![], ..Toy::new(3) };
    let tiny = Toy {
        root: vec![vec![1], vec![1]],
        units: vec![vec![vec![1], vec![1]], vec![vec![2], vec![0]]],
        frozen: vec![],
        low: vec![],
        last_unused: true,
    };
    let uneven = Toy {
        root: vec![vec![3], vec![2]],
        units: vec![vec![vec![40], vec![1]], vec![vec![2], vec![1]], vec![vec![9, 9], vec![5]]],
        frozen: vec![],
        low: vec![],
        last_unused: true,
    };
    // F6: what is frozen is a flat parameter of its own, and is bit-unchanged.
    let frozen_too = Toy { frozen: vec![vec![5], vec![2, 3], vec![1]], ..Toy::new(3) };
    let mut all_frozen = frozen_too.clone();
    all_frozen.units[1] = vec![];
    all_frozen.root = vec![];
    for toy in [root_only, units_only, tiny, uneven, frozen_too, all_frozen] {
        for strategy in STRATEGIES {
            for ranks in [1, 2, 4] {
                assert_equal_to_reference(&toy, ranks, 2 * ranks, config(strategy, ADAMW));
            }
        }
    }
}

/// Powers of two that divide the micro-batches have the same bits, norms included.
#[test]
fn the_number_of_ranks_changes_no_bit() {
    for micro_batches in [4, 8, 12] {
        let run = |ranks| {
            train(&Toy::new(3), ranks, micro_batches, config(ShardingStrategy::FullShard, ADAMW), 3).remove(0)
        };
        let (one, reports) = run(1);
        for ranks in [2, 4] {
            let (params, others) = run(ranks);
            for (a, b) in params.iter().flatten().zip(one.iter().flatten()) {
                assert_eq!(a.to_bits(), b.to_bits());
            }
            for (a, b) in others.iter().zip(&reports) {
                assert_eq!(a.grad_norm.to_bits(), b.grad_norm.to_bits());
            }
        }
    }
}
