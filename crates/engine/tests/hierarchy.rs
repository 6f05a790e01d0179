//! Nodes: sums and gathers in two hops have the bits of one, whatever the timing, and each byte enters a node once.

mod common;

use common::{ADAMW, DEADLINE, Reference, Toy, compute_step, config, full, full_params, train};
use shardwise_comm::testing::delaying;
use shardwise_comm::threads;
use shardwise_core::{
    ErrorFeedback, MixedPrecision, Offload, Precision, Quantization, RoundAssignment, ShardingStrategy, Tier,
    WireConfig,
};
use shardwise_engine::{Accumulation, EngineConfig, EngineError, StepReport, UnitId};

use ShardingStrategy::{FullShard, HybridShard, NoShard, ShardGradOp};

const STEPS: usize = 2;

/// Worlds with every size of node that leaves several.
fn nodes() -> Vec<(usize, usize)> {
    let worlds = [2, 3, 4, 6, 8];
    let of = |world: usize| (1..world).filter(move |k| world.is_multiple_of(*k)).map(move |k| (world, k));
    worlds.into_iter().flat_map(of).collect()
}

fn with_nodes(base: EngineConfig, node: usize) -> EngineConfig {
    EngineConfig { wire: WireConfig { node_size: Some(node), ..base.wire }, ..base }
}

/// Every flat parameter and norm of every rank after some steps, as bits.
fn bits(toy: &Toy, world: usize, micro_batches: usize, config: EngineConfig) -> Vec<(Vec<u32>, Vec<u64>)> {
    let of = |(params, reports): (Vec<Vec<f32>>, Vec<StepReport>)| {
        let norms = reports.iter().map(|report| report.grad_norm.to_bits()).collect();
        (params.into_iter().flatten().map(f32::to_bits).collect(), norms)
    };
    train(toy, world, micro_batches, config, STEPS).into_iter().map(of).collect()
}

/// Against one loop over whole parameters that adds up inside nodes first.
#[test]
fn every_node_size_equals_the_reference() {
    let toy = Toy { frozen: vec![vec![3, 3], vec![1]], low: vec![vec![5, 2], vec![1]], ..Toy::new(2) };
    let low = MixedPrecision { reduce_dtype: Precision::Bf16, ..MixedPrecision::BF16 };
    for (world, node) in nodes() {
        for strategy in [FullShard, ShardGradOp, NoShard] {
            for (precision, accumulation, rounds) in [
                (MixedPrecision::default(), Accumulation::Sharded, 1),
                (MixedPrecision::default(), Accumulation::Sharded, 3),
                (MixedPrecision::default(), Accumulation::Unsharded, 2),
                (low, Accumulation::Sharded, 2),
            ] {
                let base = EngineConfig { precision, accumulation, ..config(strategy, ADAMW) };
                let config = with_nodes(base, node);
                let mut reference = Reference::new(&toy);
                for _ in 0..STEPS {
                    reference.step(world * rounds, world, &config, 0.05);
                }
                let want: Vec<u32> =
                    reference.params.iter().flat_map(|(_, _, p)| p).map(|x| x.to_bits()).collect();
                for (got, _) in bits(&toy, world, world * rounds, config) {
                    assert!(got == want, "{strategy}, {world} ranks, nodes of {node}, {precision:?}");
                }
            }
        }
    }
}

/// Nodes whose size is a power of two add in the order of one large group.
#[test]
fn nodes_of_a_power_of_two_change_no_bit() {
    let toy = Toy::new(3);
    for (world, node) in nodes().into_iter().filter(|(_, node)| node.is_power_of_two()) {
        for strategy in [FullShard, ShardGradOp, NoShard] {
            let plain = config(strategy, ADAMW);
            let want = bits(&toy, world, 2 * world, plain);
            assert_eq!(
                bits(&toy, world, 2 * world, with_nodes(plain, node)),
                want,
                "{strategy} {world} {node}"
            );
        }
    }
}

/// A group of a hybrid strategy is a node; other sizes are refused with both numbers.
#[test]
fn the_groups_of_a_hybrid_strategy_are_its_nodes() {
    let toy = Toy::new(2);
    let plain = EngineConfig { shard_group: Some(2), ..config(HybridShard, ADAMW) };
    let want = bits(&toy, 4, 4, plain);
    assert_eq!(bits(&toy, 4, 4, with_nodes(plain, 2)), want);
    let secondary = WireConfig { secondary_partition: Some(2), ..WireConfig::default() };
    assert_eq!(bits(&toy, 4, 4, EngineConfig { wire: secondary, ..plain }), want);
    let error = with_nodes(plain, 1).node_size(4).expect_err("another size").to_string();
    assert!(error.contains("nodes have 1 ranks") && error.contains("groups of 2"), "{error}");
}

/// The step inside backward, with gathers that pass through nodes while units are updated: the same bits.
#[test]
fn steps_inside_backward_pass_through_nodes() {
    let run = |world: usize, wire: WireConfig, step_in_backward: bool| {
        threads::run(world, DEADLINE, |group| {
            let base =
                EngineConfig { precision: MixedPrecision::BF16, clip_norm: None, ..config(FullShard, ADAMW) };
            let mut engine = Toy::new(3).engine(group, EngineConfig { wire, step_in_backward, ..base });
            for _ in 0..3 {
                engine.begin_step_at(world, 0.05).expect("idle");
                let RoundAssignment::Compute(m) = engine.begin_round().expect("a round") else {
                    panic!("no work")
                };
                common::compute_round(&mut engine, m).expect("a round");
                engine.end_step(0.05).expect("a step");
            }
            full_params(&mut engine)
        })
        .expect("a world")
    };
    for (world, node) in [(2, 1), (4, 2), (6, 2)] {
        for secondary_partition in [None, Some(node)] {
            for gradients in [None, Some(Quantization::Int4)] {
                let error_feedback = gradients.map(|_| ErrorFeedback::default());
                let node_size = Some(node);
                let base = WireConfig { gradients, error_feedback, ..WireConfig::default() };
                let wire = WireConfig { node_size, secondary_partition, ..base };
                assert_eq!(run(world, wire, true), run(world, wire, false), "{world} {wire:?}");
            }
        }
    }
}

/// A wire on which nodes keep a second copy.
fn hpz(base: EngineConfig, size: usize) -> EngineConfig {
    EngineConfig { wire: WireConfig { secondary_partition: Some(size), ..base.wire }, ..base }
}

/// hpZ alone changes no bit: strategies, types, accumulation, every size of node that keeps a copy.
#[test]
fn a_second_copy_changes_no_bit() {
    let toy = Toy { frozen: vec![vec![3, 3], vec![1]], low: vec![vec![5, 2], vec![1]], ..Toy::new(3) };
    for (world, node) in nodes().into_iter().filter(|(_, node)| *node > 1) {
        for strategy in [FullShard, ShardGradOp, NoShard] {
            for precision in [MixedPrecision::default(), MixedPrecision::BF16] {
                let base = EngineConfig { precision, ..config(strategy, ADAMW) };
                let want = bits(&toy, world, 3 * world, with_nodes(base, node));
                let got = bits(&toy, world, 3 * world, hpz(base, node));
                assert!(got == want, "{strategy}, {world} ranks, nodes of {node}");
            }
        }
    }
}

/// Parameters and the optimizer's state, in small pieces.
fn on_the_host() -> Offload {
    let (parameters, optimizer) = (Tier::Host, Tier::Host);
    Offload { parameters, optimizer, buffer_numel: 1024, least_numel: 0, ..Offload::default() }
}

/// Every rank runs at its own, random pace; steps and evaluations take turns; units are gathered twice in a row. Whatever
/// is read before it is there would show.
#[test]
fn delays_change_no_bit() {
    let toy = Toy { frozen: vec![vec![4, 2]], ..Toy::new(3) };
    let run = |world: usize, config: EngineConfig, seed: Option<u64>| {
        threads::run(world, DEADLINE, |group| {
            let rank = group.rank() as u64;
            let group = seed.map_or(group.clone(), |seed| delaying(&group, seed * 100 + rank));
            let mut engine = toy.engine(group, config);
            let mut seen = Vec::new();
            for step in 0..4 {
                compute_step(&mut engine, 2 * world, 0.05).expect("a step");
                engine.begin_evaluation().expect("idle");
                // What rests elsewhere is gathered by all ranks alike.
                let pace = if config.offload.is_any() { 0 } else { rank as usize };
                for _ in 0..(pace + step) % 3 {
                    for unit in [1, 1, 0, 2].map(UnitId::unit) {
                        engine.enter_forward(unit);
                        engine.leave_forward(unit);
                    }
                }
                engine.end_evaluation().expect("ended");
                seen.extend(full_params(&mut engine).into_iter().flatten().map(f32::to_bits));
            }
            seen
        })
        .expect("a world")
    };
    for (world, node) in [(2, 1), (4, 2), (6, 3), (4, 1)] {
        for strategy in [FullShard, ShardGradOp] {
            let plain = with_nodes(config(strategy, ADAMW), node);
            let want = run(world, plain, None);
            for seed in 0..3 {
                let away = EngineConfig { offload: on_the_host(), ..hpz(plain, node) };
                assert!(
                    run(world, away, Some(seed)) == want,
                    "{strategy} {world} {node} {seed}, on the host"
                );
                assert!(run(world, plain, Some(seed)) == want, "{strategy} {world} {node} {seed}");
                if node > 1 {
                    assert!(
                        run(world, hpz(plain, node), Some(seed)) == want,
                        "{strategy} {world} {node} {seed}"
                    );
                }
            }
        }
    }
}

/// Reference test 54: the second copy holds the parts of the ranks at one's place, padded with zeros whatever lies behind
/// a shard; a partition of one rank is no copy.
#[test]
fn what_pads_a_shard_does_not_travel() {
    let toy = |numel: usize| Toy {
        root: vec![],
        units: vec![vec![vec![numel]]],
        frozen: vec![],
        low: vec![],
        last_unused: false,
    };
    // Ranks, nodes, elements; then the elements that each rank of a node keeps, `None` being padding.
    type Kept = &'static [[Option<usize>; 2]];
    let cases: [(usize, usize, usize, Kept); 3] = [
        (4, 2, 3, &[[Some(0), Some(2)], [Some(1), None]]),
        (4, 2, 1, &[[Some(0), None], [None, None]]),
        (8, 4, 3, &[[Some(0), None], [Some(1), None], [Some(2), None], [None, None]]),
    ];
    for (world, node, numel, want) in cases {
        let base = config(FullShard, ADAMW);
        let kept = threads::run(world, DEADLINE, |group| {
            let mut engine = toy(numel).engine(group, hpz(base, node));
            assert_eq!(engine.secondary(UnitId::unit(0), 0), None, "not filled yet");
            let before = full(&mut engine, UnitId::unit(0));
            compute_step(&mut engine, world, 0.1).expect("a step");
            let bytes = engine.secondary(UnitId::unit(0), 0).expect("filled").to_vec();
            let kept: Vec<f32> =
                bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
            (before, kept)
        });
        for (rank, (before, kept)) in kept.expect("a world").into_iter().enumerate() {
            let want: Vec<f32> = want[rank % node].iter().map(|e| e.map_or(0.0, |e| before[e])).collect();
            assert_eq!(kept, want, "{numel} elements, {world} ranks, nodes of {node}");
        }
    }
    threads::run(4, DEADLINE, |group| {
        let mut engine = toy(3).engine(group, hpz(config(FullShard, ADAMW), 1));
        compute_step(&mut engine, 4, 0.1).expect("a step");
        assert_eq!(engine.secondary(UnitId::unit(0), 0), None);
    })
    .expect("a world");
}

/// Ranks that gather different units are told so, with both.
#[test]
fn gathers_of_different_units_name_both() {
    let errors = threads::run(4, DEADLINE, |group| {
        let rank = group.rank();
        let mut engine = Toy::new(2).engine(group, with_nodes(config(FullShard, ADAMW), 2));
        engine.begin_step(4).expect("idle");
        engine.begin_round().expect("a round");
        engine.enter_forward(UnitId::unit(usize::from(rank == 3)));
        engine.end_round().expect_err("different units")
    });
    for error in errors.expect("a world") {
        let EngineError::Comm { .. } = &error else { panic!("{error:?}") };
        let text = error.to_string();
        assert!(text.contains("`blocks.0`") && text.contains("`blocks.1`"), "{text}");
    }
}

/// Reductions of ranks that used different units, in two hops: what is not gathered may differ.
#[test]
fn branching_ranks_sum_in_two_hops() {
    let route = |rank: usize, round: usize| -> Vec<usize> {
        match (rank + round) % 3 {
            0 => vec![0, 1, 2],
            1 => vec![0, 2],
            _ => vec![1],
        }
    };
    let run = |world: usize, config: EngineConfig, seed: Option<u64>| {
        threads::run(world, DEADLINE, |group| {
            let rank = group.rank();
            let group = seed.map_or(group.clone(), |seed| delaying(&group, seed * 100 + rank as u64));
            let mut engine = Toy::new(3).engine(group, config);
            for _ in 0..3 {
                engine.begin_step(2 * world).expect("idle");
                for round in 0..2 {
                    engine.begin_round().expect("a round");
                    let units: Vec<UnitId> = route(rank, round).into_iter().map(UnitId::unit).collect();
                    for unit in &units {
                        engine.enter_forward(*unit);
                        engine.leave_forward(*unit);
                    }
                    common::write_gradients(&mut engine, UnitId::ROOT, rank);
                    for unit in units.iter().rev() {
                        engine.enter_backward(*unit);
                        common::write_gradients(&mut engine, *unit, rank);
                        engine.leave_backward(*unit);
                    }
                    engine.end_round().expect("a round");
                }
                engine.end_step(0.05).expect("a step");
            }
            full_params(&mut engine)
        })
        .expect("a world")
    };
    for (world, node) in [(2, 1), (4, 2), (8, 4), (8, 2)] {
        let plain = config(NoShard, ADAMW);
        let want = run(world, plain, None);
        for seed in 0..4 {
            assert_eq!(run(world, with_nodes(plain, node), Some(seed)), want, "{world} {node}");
        }
    }
}

/// qwZ: what enters a node is quantised once, by the rank that has it, and arrives as without nodes; blocks that cannot be
/// quantised too, which are never kept.
#[test]
fn quantised_weights_arrive_through_nodes() {
    let toy =
        Toy { units: vec![vec![vec![1500]]; 2], frozen: vec![vec![300]], last_unused: false, ..Toy::new(2) };
    let run = |world: usize, wire: WireConfig, tiny: bool| {
        threads::run(world, DEADLINE, |group| {
            let mut engine = toy.engine(group, EngineConfig { wire, ..config(FullShard, ADAMW) });
            let owned = engine.parts(UnitId::unit(0))[0].owned().len();
            if tiny {
                let fill = |params: &mut [f32]| params.iter_mut().for_each(|p| *p = 1e-41);
                engine.edit_owned(UnitId::unit(0), 0, 0..owned.min(256), fill).expect("idle");
            }
            let mut seen = Vec::new();
            for _ in 0..2 {
                let report = compute_step(&mut engine, 2 * world, 0.05).expect("a step");
                assert_eq!(
                    engine.secondary(UnitId::unit(0), 0).is_some(),
                    wire.keeps_secondary() && !(tiny && seen.is_empty())
                );
                seen.push((report.bytes_sent, report.bytes_sent_across));
            }
            (full_params(&mut engine), seen)
        })
        .expect("a world")
    };
    for weights in [Quantization::Int8, Quantization::Int4].map(Some) {
        for frozen_weights in [false, true] {
            let wire = WireConfig { weights, frozen_weights, ..WireConfig::default() };
            for (world, node) in [(2, 1), (4, 2), (8, 4)] {
                let nodes = WireConfig { node_size: Some(node), ..wire };
                let hpz = WireConfig { secondary_partition: Some(node), ..wire };
                for tiny in [false, true] {
                    let want = run(world, wire, tiny);
                    for through in [nodes, hpz] {
                        for ((got, _), (want, _)) in run(world, through, tiny).iter().zip(&want) {
                            assert!(got == want, "{world} {node} {through:?} {tiny}");
                        }
                    }
                }
            }
        }
    }
}

/// What enters a node in a step of one micro-batch a rank, divided by (G - 1)/G, in bytes for each of the `M` parameters of
/// which `R` are the root's.
fn entering(toy: &Toy, world: usize, node: usize, config: EngineConfig) -> f64 {
    let nodes = world / node;
    let sent = threads::run(world, DEADLINE, |group| {
        let mut engine = toy.engine(group, config);
        compute_step(&mut engine, world, 0.05).expect("a step");
        compute_step(&mut engine, world, 0.05).expect("a step").bytes_sent_across
    });
    let entered = sent.expect("a world").into_iter().sum::<u64>() as f64 / nodes as f64;
    entered / ((nodes - 1) as f64 / nodes as f64)
}

/// Each byte enters a node once: 4 (3M - R) in f32, and with hpZ 4 (2M).
#[test]
fn each_byte_enters_a_node_once() {
    // Sizes that need no padding.
    let toy =
        Toy { root: vec![vec![24]], units: vec![vec![vec![48, 2]]; 3], last_unused: false, ..Toy::new(0) };
    let (m, r) = ((24 + 3 * 96) as f64, 24.0);
    for (world, node) in [(4, 2), (2, 1), (6, 3), (6, 2), (8, 4), (8, 2)] {
        let plain = with_nodes(config(FullShard, ADAMW), node);
        assert_eq!(entering(&toy, world, node, plain), 4.0 * (3.0 * m - r), "{world} {node}");
        if node > 1 {
            assert_eq!(entering(&toy, world, node, hpz(plain, node)), 4.0 * 2.0 * m, "{world} {node}");
        }
    }
}
