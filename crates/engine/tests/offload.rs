//! What rests on the host or in files trains to the same bits: every strategy, round, precision and optimizer.

mod common;

use common::check::{check, precision};
use common::given::{Given, Run};
use common::{ADAFACTOR, ADAM, ADAMW, LION, MOMENTUM, SGD, Toy, config, train};
use shardwise_core::{ErrorFeedback, Offload, Quantization, Rounding, ShardingStrategy, Tier, WireConfig};
use shardwise_engine::{Accumulation, EngineConfig, OptimizerConfig, ParamGroups, StepReport};

/// Tiles of 1024 elements, so that a parameter of some thousands has several; nothing is too small to go.
fn offload(parameters: Tier, optimizer: Tier) -> Offload {
    Offload { parameters, optimizer, buffer_numel: 1024, least_numel: 0, ..Offload::default() }
}

/// Every choice of tiers, and bounds that cut a model in two.
fn offloads() -> Vec<Offload> {
    use Tier::{Host, None, Nvme};
    let both = offload(Nvme, Nvme);
    vec![
        offload(Host, Host),
        both,
        offload(Nvme, None),
        offload(None, Nvme),
        offload(Host, Nvme),
        Offload { pipeline: false, ..both },
        Offload { buffer_count: 4, ..both },
        Offload { ratio: 0.5, max_in_memory: 20, ..both },
        Offload { least_numel: 16, ..both },
    ]
}

fn toys() -> [Toy; 2] {
    let unit = vec![vec![3, 5], vec![0], vec![1], vec![2500], vec![17]];
    let large = Toy {
        root: vec![vec![7, 3], vec![1500]],
        units: vec![unit; 2],
        frozen: vec![vec![3, 3], vec![1100]],
        low: vec![vec![5, 2], vec![1]],
        last_unused: true,
    };
    [large, Toy { last_unused: false, ..Toy::new(3) }]
}

#[test]
fn every_tier_and_strategy_equals_the_unsharded_run() {
    let base = config(ShardingStrategy::FullShard, ADAMW);
    let [large, small] = toys();
    for offload in offloads() {
        check(&large, 2, 3, &EngineConfig { offload, ..base });
    }
    for world in 1..=4 {
        for rounds in [1, 3] {
            for tier in [Tier::Host, Tier::Nvme] {
                check(&small, world, rounds, &EngineConfig { offload: offload(tier, tier), ..base });
            }
        }
    }
}

#[test]
fn narrow_wires_optimizers_and_accumulation() {
    let [toy, _] = toys();
    let base = EngineConfig {
        offload: offload(Tier::Nvme, Tier::Nvme),
        ..config(ShardingStrategy::FullShard, ADAMW)
    };
    for world in [1, 3] {
        for rounds in [1, 2, 5] {
            for optimizer in [ADAM, MOMENTUM, SGD, LION] {
                check(&toy, world, rounds, &EngineConfig { optimizer, ..base });
            }
            for name in ["bf16", "bf16 everywhere"] {
                check(&toy, world, rounds, &EngineConfig { precision: precision(name), ..base });
            }
            check(&toy, world, rounds, &EngineConfig { accumulation: Accumulation::Unsharded, ..base });
        }
    }
}

/// Optimizers that look at whole parameters, averages of the weights, and the statistics themselves.
#[test]
fn optimizers_of_whole_parameters_and_their_statistics() {
    let given = Given::formula(vec![
        vec![("root.a", vec![5, 3]), ("root.b", vec![7])],
        vec![("one.w", vec![40, 30]), ("one.b", vec![9]), ("one.v", vec![6, 5])],
        vec![("two.w", vec![12, 90]), ("two.b", vec![2])],
    ]);
    let groups = ParamGroups::new();
    for optimizer in [ADAFACTOR, OptimizerConfig::MUON, ADAMW, MOMENTUM] {
        for ranks in [1, 2, 4] {
            for strategy in [ShardingStrategy::FullShard, ShardingStrategy::NoShard] {
                for ema_decay in [None, Some(0.9)] {
                    let base = EngineConfig { ema_decay, ..config(strategy, optimizer) };
                    let run = |offload| {
                        let config = EngineConfig { offload, ..base };
                        given.train(Run {
                            ranks,
                            micro_batches: 4,
                            steps: 3,
                            lr: 0.02,
                            config,
                            groups: &groups,
                        })
                    };
                    let want = run(Offload::default());
                    for away in offloads() {
                        assert_eq!(run(away), want, "{optimizer:?}, {ranks} ranks, {strategy}, {away:?}");
                    }
                }
            }
        }
    }
}

/// Codecs, nodes and the second copy do to what rests elsewhere what they do to what is in memory.
#[test]
fn with_quantised_wires_and_nodes() {
    let [toy, _] = toys();
    let wires = [
        WireConfig { weights: Some(Quantization::Int8), frozen_weights: true, ..WireConfig::default() },
        WireConfig {
            weights: Some(Quantization::Int4),
            rounding: Rounding::Stochastic,
            ..WireConfig::default()
        },
        WireConfig { node_size: Some(2), ..WireConfig::default() },
        WireConfig {
            secondary_partition: Some(2),
            weights: Some(Quantization::Int8),
            ..WireConfig::default()
        },
        WireConfig { gradients: Some(Quantization::Int4), ..WireConfig::default() },
        WireConfig {
            secondary_partition: Some(2),
            weights: Some(Quantization::Int8),
            gradients: Some(Quantization::Int4),
            error_feedback: Some(ErrorFeedback::default()),
            ..WireConfig::default()
        },
    ];
    for wire in wires {
        for strategy in [ShardingStrategy::FullShard, ShardingStrategy::NoShard] {
            for ranks in [1, 2, 4] {
                let base = EngineConfig { wire, ..config(strategy, ADAMW) };
                if wire.node(ranks).is_err() {
                    continue;
                }
                let run = |offload| train(&toy, ranks, 2 * ranks, EngineConfig { offload, ..base }, 3);
                let want = run(Offload::default());
                for away in [offload(Tier::Host, Tier::Host), offload(Tier::Nvme, Tier::None)] {
                    for (got, want) in run(away).iter().zip(&want) {
                        let what = format!("{wire:?}, {strategy}, {ranks} ranks, {away:?}");
                        assert_eq!(got.0, want.0, "{what}");
                        let sent =
                            |reports: &[StepReport]| reports.iter().map(|r| r.bytes_sent).collect::<Vec<_>>();
                        assert_eq!(sent(&got.1), sent(&want.1), "{what}");
                    }
                }
            }
        }
    }
}

/// Sizes at which a rank's last tile holds nothing of its own, and optimizers without statistics.
#[test]
fn odd_sizes_and_updates_without_statistics() {
    use Tier::{Host, None};
    let toy = Toy {
        root: vec![vec![4098]],
        units: vec![vec![vec![4097]], vec![vec![1025]]],
        frozen: vec![],
        low: vec![],
        last_unused: false,
    };
    for away in [offload(None, Host), offload(Host, None), offload(Host, Host)] {
        for optimizer in [ADAMW, SGD] {
            for world in [2, 4] {
                for rounds in [1, 3] {
                    let base = EngineConfig {
                        ema_decay: Some(0.9),
                        ..config(ShardingStrategy::FullShard, optimizer)
                    };
                    check(&toy, world, rounds, &EngineConfig { offload: away, ..base });
                }
            }
        }
    }
}
