//! Every combination of world, size, precision, accumulation, strategy and prefetch, three steps, against one loop over
//! whole parameters: bit for bit.

mod common;

use common::check::{STEPS, check, layouts, precision};
use common::{ADAMW, DEADLINE, STRATEGIES, Toy, compute_step, config, full_params, train};
use shardwise_comm::threads;
use shardwise_core::ShardingStrategy;
use shardwise_engine::{Accumulation, DynamicScale, EngineConfig, LossScale, Norm};

/// The grid of the specification: world x numel x type x accumulation x strategy x prefetch.
#[test]
fn every_combination_equals_the_unsharded_run() {
    for world in 1..=4 {
        for numel in [0, 1, 3, 5, 17, 64] {
            // A parameter without elements has others beside it.
            let unit = if numel == 0 { vec![vec![0], vec![2]] } else { vec![vec![numel]] };
            let toy = Toy {
                root: unit.clone(),
                units: vec![unit; 2],
                frozen: vec![],
                low: vec![],
                last_unused: false,
            };
            for name in ["f32", "bf16"] {
                for rounds in [1, 3] {
                    for prefetch in [true, false] {
                        let base = EngineConfig {
                            prefetch,
                            precision: precision(name),
                            ..config(ShardingStrategy::FullShard, ADAMW)
                        };
                        check(&toy, world, rounds, &base);
                    }
                }
            }
        }
    }
}

/// The same with several odd parameters in a unit, frozen ones beside them and one that nobody uses; with narrow reductions
/// and a loss scale; with gradients that add up unsharded.
#[test]
fn mixed_units_and_narrow_wires() {
    let toy = Toy { frozen: vec![vec![3, 3], vec![1]], low: vec![vec![5, 2], vec![1]], ..Toy::new(3) };
    let base = EngineConfig { norm: Norm::L2, ..config(ShardingStrategy::FullShard, ADAMW) };
    let dynamic = LossScale::Dynamic(DynamicScale { initial: 256.0, ..DynamicScale::default() });
    for world in 1..=4 {
        for rounds in [1, 2, 5] {
            for (name, loss_scale) in [
                ("f32", LossScale::Static(1024.0)),
                ("bf16", LossScale::None),
                ("bf16 everywhere", LossScale::None),
                ("f16", LossScale::Static(64.0)),
                ("f16", dynamic),
            ] {
                for accumulation in [Accumulation::Sharded, Accumulation::Unsharded] {
                    let base = EngineConfig { precision: precision(name), loss_scale, accumulation, ..base };
                    check(&toy, world, rounds, &base);
                }
            }
        }
    }
}

/// I7: an engine over a part of the world trains as one over a world of that size; the other ranks hold nothing of it.
#[test]
fn a_group_of_ranks_is_a_world_of_its_own() {
    let toy = Toy::new(2);
    for strategy in STRATEGIES {
        let config = config(strategy, ADAMW);
        let want = train(&toy, 2, 6, config, STEPS);
        let results = threads::run(5, DEADLINE, |world| {
            // Ranks 1 and 3, 0 and 4 train; rank 2 is in no engine.
            let color = [0, 1, 2, 1, 0][world.rank()];
            let group = world.split(color, 0).expect("a group");
            (color != 2).then(|| {
                let mut engine = toy.engine(group, config);
                let reports: Vec<_> =
                    (0..STEPS).map(|_| compute_step(&mut engine, 6, 0.05).expect("a step")).collect();
                (full_params(&mut engine), reports)
            })
        });
        for (rank, result) in results.expect("a world").into_iter().enumerate() {
            assert_eq!(result, (rank != 2).then(|| want[0].clone()), "{strategy}, rank {rank}");
        }
    }
}

/// With one order of sums, the bits do not depend on the world at all.
#[test]
fn worlds_and_meshes_have_the_same_bits() {
    let toy = Toy::new(2);
    for name in ["f32", "bf16", "bf16 everywhere"] {
        let mut first: Option<Vec<Vec<f32>>> = None;
        for world in [1, 2, 4, 8] {
            for (strategy, shard_group) in layouts(world) {
                let base = config(strategy, ADAMW);
                let config = EngineConfig { shard_group, precision: precision(name), ..base };
                for (params, _) in train(&toy, world, 8, config, STEPS) {
                    let want = first.get_or_insert_with(|| params.clone());
                    assert_eq!(*want, params, "{name}, {world} ranks, {strategy} {shard_group:?}");
                }
            }
        }
    }
}
