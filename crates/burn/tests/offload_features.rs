//! What rests on the host or in files, or travels in few bits or through nodes, trains alike under every feature of the
//! adapter.

mod common;

use std::time::Instant;

use burn::tensor::{Device, Tensor};
use common::away::{Learned, Rich, TIERS, bits, held_out, learn, offload, one_step, place, resting};
use common::{DEADLINE, Net, WIDTH, batch, config, head, world};
use shardwise_burn::{Ignored, Init, Persistence, ShardConfig, ShardedModel, WrapPolicy};
use shardwise_core::{
    BackwardPrefetch, GatherPolicy, Offload, Precision, Quantization, ShardingStrategy, Tier, WireConfig,
};
use shardwise_engine::{Accumulation, Norm, OptimizerConfig};

/// Ranks and micro-batches of a step: rounds that are full, one that leaves ranks idle, one that leaves most of them idle.
const WORLDS: [(usize, usize); 6] = [(1, 3), (2, 4), (2, 3), (3, 3), (4, 5), (2, 5)];

/// How a model may be taken apart.
type Shape = (&'static str, fn(Init) -> Init);

const SHAPES: [Shape; 6] = [
    ("nested units", |init| init),
    ("blocks only", |init| init.wrap(WrapPolicy::containers(["Block"]))),
    ("no units", |init| init.wrap(WrapPolicy::nothing())),
    ("an external parameter", |init| init.register_external_parameter("last", "stages.0.first.down.weight")),
    ("replicated parameters", |init| {
        init.ignore(Ignored::Replicated, |path| {
            path.ends_with("norm.gamma") || path.starts_with("stages.0.mix")
        })
    }),
    ("persistent parameters", |init| {
        init.persist(Persistence { param_threshold: 17, ..Persistence::default() })
    }),
];

fn check(got: &[Learned], want: &[Learned], what: &str) {
    for (rank, (got, want)) in got.iter().zip(want).enumerate() {
        assert_eq!(got.steps, want.steps, "{what}, rank {rank}: loss, norm, clipping");
        assert_eq!(got.evaluated, want.evaluated, "{what}, rank {rank}: evaluations");
        for (a, b) in got.params.iter().zip(&want.params) {
            assert!(a == b, "{what}, rank {rank}: {}", a.0);
        }
        assert!(got.statistics == want.statistics, "{what}, rank {rank}: statistics");
        assert_eq!((got.params.len(), got.statistics.len()), (want.params.len(), want.statistics.len()));
    }
    assert_eq!(got.len(), want.len());
}

/// A7, B7, 32: every shape of the model, with recomputation and ragged rounds, and evaluations in between for which ranks have
/// different numbers of batches.
#[test]
fn every_feature_trains_to_the_same_bits() {
    for (name, shape) in SHAPES {
        for (ranks, micro_batches) in WORLDS {
            for recompute in [false, true] {
                let config = ShardConfig { recompute, ..config(ShardingStrategy::FullShard) };
                let want = learn(ranks, micro_batches, &shape(Init::new(config)));
                for tier in TIERS {
                    let got = learn(ranks, micro_batches, &shape(resting(config, tier)));
                    let what = format!("{name}, {ranks} ranks, {micro_batches}, {recompute}, {tier}");
                    check(&got, &want, &what);
                }
            }
        }
    }
}

/// The knobs that decide when something is gathered, kept, reduced or lent: none changes a bit.
#[test]
fn strategies_and_knobs_change_no_bit() {
    let base = config(ShardingStrategy::FullShard);
    let with = |change: &dyn Fn(&mut ShardConfig)| {
        let mut config = base;
        change(&mut config);
        config
    };
    let keeps = GatherPolicy { max_reuse_distance: 1000, ..GatherPolicy::default() };
    let deep = GatherPolicy { limit_all_gathers: 4, ..GatherPolicy::default() };
    let post = GatherPolicy { backward_prefetch: BackwardPrefetch::Post, ..GatherPolicy::default() };
    let cases = [
        ("shard_grad_op", with(&|c| c.engine.strategy = ShardingStrategy::ShardGradOp)),
        ("no_shard", with(&|c| c.engine.strategy = ShardingStrategy::NoShard)),
        ("no prefetch", with(&|c| c.engine.prefetch = false)),
        ("units that are kept", with(&|c| c.engine.gather = keeps)),
        ("deep prefetch", with(&|c| c.engine.gather = deep)),
        ("late prefetch", with(&|c| c.engine.gather = post)),
        ("unsharded accumulation", with(&|c| c.engine.accumulation = Accumulation::Unsharded)),
        ("another norm", with(&|c| (c.engine.norm, c.engine.clip_norm) = (Norm::Max, Some(0.01)))),
        ("bf16 on the wire", with(&|c| c.engine.precision.param_dtype = Precision::Bf16)),
        ("muon", with(&|c| c.engine.optimizer = OptimizerConfig::MUON)),
    ];
    for (name, config) in cases {
        for (ranks, micro_batches) in [(2, 3), (4, 5)] {
            for recompute in [false, true] {
                let config = ShardConfig { recompute, ..config };
                let want = learn(ranks, micro_batches, &Init::new(config));
                let got = learn(ranks, micro_batches, &resting(config, Tier::Nvme));
                check(&got, &want, &format!("{name}, {ranks} ranks, recompute {recompute}"));
            }
        }
    }
    // Only a part of it elsewhere, in tiers of two kinds, through few buffers, one after another.
    let full = Offload { buffer_count: 5, pipeline: false, ..offload(Tier::Host, Tier::Nvme) };
    let half = Offload { max_in_memory: 400, ratio: 0.5, ..full };
    for offload in [full, half, Offload { parameters: Tier::None, max_in_memory: 0, ..half }] {
        for (ranks, micro_batches) in [(2, 3), (4, 5)] {
            let config = ShardConfig { recompute: true, ..base };
            let want = learn(ranks, micro_batches, &Init::new(config));
            let away = with(&|c| (c.engine.offload, c.recompute) = (offload, true));
            let got = learn(ranks, micro_batches, &Init::new(away).swap_at(place()));
            check(&got, &want, &format!("{offload:?}, {ranks} ranks"));
        }
    }
    // Two groups that are replicas, each with its own gathers.
    let hybrid =
        with(&|c| (c.engine.strategy, c.engine.shard_group) = (ShardingStrategy::HybridShard, Some(2)));
    for recompute in [false, true] {
        let config = ShardConfig { recompute, ..hybrid };
        let want = learn(4, 5, &Init::new(config));
        check(&learn(4, 5, &resting(config, Tier::Nvme)), &want, "hybrid");
    }
}

/// Wires of few bits and nodes: recomputation, prefetch, the strategy and where things rest change no bit; nodes and the
/// second copy (hpZ) none either.
#[test]
fn quantised_wires_and_nodes_under_every_feature() {
    let base = config(ShardingStrategy::FullShard);
    let int8 = WireConfig { weights: Some(Quantization::Int8), ..WireConfig::default() };
    let plain = WireConfig::default();
    let wires = [
        ("nodes", WireConfig { node_size: Some(2), ..plain }, plain),
        ("hpZ", WireConfig { secondary_partition: Some(2), ..plain }, plain),
        ("qwZ", int8, int8),
        (
            "int4",
            WireConfig { weights: Some(Quantization::Int4), ..plain },
            WireConfig { weights: Some(Quantization::Int4), ..plain },
        ),
        ("qwZ and nodes", WireConfig { node_size: Some(2), ..int8 }, int8),
        ("qwZ and hpZ", WireConfig { secondary_partition: Some(2), ..int8 }, int8),
    ];
    for (name, wire, same_as) in wires {
        for (ranks, micro_batches) in [(4, 8), (4, 5)] {
            let with = |wire| {
                let mut config = base;
                config.engine.wire = wire;
                config
            };
            // What is replicated and has no elements passes through nodes as well.
            let init = |config| Init::new(config).ignore(Ignored::Replicated, |path| path.ends_with("empty"));
            let want = learn(ranks, micro_batches, &init(with(same_as)));
            for recompute in [false, true] {
                for strategy in [ShardingStrategy::FullShard, ShardingStrategy::ShardGradOp] {
                    for prefetch in [true, false] {
                        let mut config = ShardConfig { recompute, ..with(wire) };
                        (config.engine.strategy, config.engine.prefetch) = (strategy, prefetch);
                        let what =
                            format!("{name}, {micro_batches}, {strategy}, recompute {recompute}, {prefetch}");
                        check(&learn(ranks, micro_batches, &init(config)), &want, &what);
                        if prefetch {
                            let got = learn(ranks, micro_batches, &resting(config, Tier::Nvme));
                            check(&got, &want, &format!("{what}, nvme"));
                        }
                    }
                }
            }
        }
    }
}

/// G5, L10: ranks evaluate as many batches as they have, with units of their own, in any tier and through nodes; a rank that
/// is slow or has nothing to do holds nobody up for ever.
#[test]
fn ranks_evaluate_at_their_own_pace() {
    let by_rank = |model: &mut ShardedModel<Rich>, rank: usize| {
        let device = Device::flex();
        let x = || Tensor::<3>::ones([1, 2, WIDTH], &device) * (rank + 1) as f32;
        model
            .evaluate(|rich| {
                let mut all = Vec::new();
                for turn in 0..[2, 3, 0, 1][rank] {
                    let mut y = rich.stages[(rank + turn) % 2].call(x(), |stage, x| stage.forward(x));
                    for _ in 0..rank {
                        y = rich.last.call(y, |block, x| block.forward(x));
                    }
                    all.push(bits(&y.into_data().try_to_vec::<f32>().expect("f32")));
                }
                // A unit that nobody else has in mind.
                if rank == 3 {
                    let y = rich.still.call(x(), |block, x| block.forward(x));
                    all.push(bits(&y.into_data().try_to_vec::<f32>().expect("f32")));
                }
                all
            })
            .expect("evaluated")
    };
    let run = |init: &Init| {
        world(4, |group| {
            let rank = group.rank();
            let mut model = init.shard(group, Rich::new(&Device::flex().autodiff()), &()).expect("sharded");
            let mut all = Vec::new();
            for index in 0..2 {
                all.push(by_rank(&mut model, rank));
                let uneven = 0..[7, 0, 1, 2][rank];
                all.push(vec![vec![held_out(&mut model, uneven).to_bits() as u32]]);
                one_step(&mut model, 5, index);
            }
            all
        })
    };
    for low_precision_evaluation in [false, true] {
        let mut config = ShardConfig { recompute: true, ..config(ShardingStrategy::FullShard) };
        config.engine.precision.low_precision_evaluation = low_precision_evaluation;
        config.engine.wire.weights = Some(Quantization::Int8);
        let want = run(&Init::new(config));
        for tier in TIERS {
            assert!(run(&resting(config, tier)) == want, "{tier}, {low_precision_evaluation}");
        }
        config.engine.wire.secondary_partition = Some(2);
        assert!(run(&Init::new(config)) == want, "hpZ, {low_precision_evaluation}");
        assert!(run(&resting(config, Tier::Nvme)) == want, "hpZ and nvme, {low_precision_evaluation}");
    }
}

/// A rank whose loss uses other units than the others' cannot be waited for: all are told, with both sides, at once.
#[test]
fn a_rank_that_leaves_a_unit_out_is_named() {
    let base = config(ShardingStrategy::FullShard);
    let mut nodes = base;
    nodes.engine.wire.node_size = Some(2);
    for (ranks, init) in [(2, resting(base, Tier::Host)), (4, Init::new(nodes))] {
        for leaves_out in ["the last", "all"] {
            let started = Instant::now();
            let errors = world(ranks, |group| {
                let rank = group.rank();
                let device = Device::flex().autodiff();
                let mut model = init.shard(group, Net::new(&device), &()).expect("sharded");
                let error = model.step(2 * ranks, 0.1, |net, m| {
                    let (ids, targets) = batch(m, 0, &device);
                    let used = match leaves_out {
                        _ if rank > 0 || m == 0 => 3,
                        "the last" => 2,
                        _ => 0,
                    };
                    let mut x = net.embed.forward(ids);
                    for block in &net.blocks[..used] {
                        x = block.call(x, |block, x| block.forward(x));
                    }
                    head(net.norm.forward(x), net.embed.weight.val(), targets)
                });
                error.expect_err("ranks use different units").to_string()
            });
            assert!(started.elapsed() < DEADLINE / 4, "{leaves_out}: {:?}", started.elapsed());
            for error in errors {
                assert!(error.contains("blocks."), "{leaves_out}: {error}");
                assert!(error.contains("rank 0") && error.contains("rank "), "{leaves_out}: {error}");
            }
        }
    }
}
