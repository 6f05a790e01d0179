//! Quantised weights (qwZ) and frozen weights that rest in int8, against a plain reference that quantises shard by shard.

mod common;

use common::check::check;
use common::quantised::{arrived, rested};
use common::{
    ADAMW, DEADLINE, Reference, STRATEGIES, Toy, compute_step, config, full_params, initial, train,
};
use shardwise_comm::threads;
use shardwise_core::{
    MixedPrecision, Offload, Precision, Purpose, Quantization, Rounding, ShardingStrategy, Tier, WireConfig,
};
use shardwise_engine::{Engine, EngineConfig, EngineError, UnitId};

const INT8: WireConfig = wire(Some(Quantization::Int8), false);
const WIRES: [WireConfig; 5] = [
    INT8,
    wire(Some(Quantization::Int4), false),
    wire(None, true),
    wire(Some(Quantization::Int8), true),
    wire(Some(Quantization::Int4), true),
];

const fn wire(weights: Option<Quantization>, frozen_weights: bool) -> WireConfig {
    WireConfig {
        weights,
        frozen_weights,
        gradients: None,
        rounding: Rounding::Nearest,
        error_feedback: None,
        node_size: None,
        secondary_partition: None,
    }
}

/// Strategies with the sizes of their groups.
fn layouts(world: usize) -> Vec<(ShardingStrategy, Option<usize>)> {
    let mut all: Vec<_> = STRATEGIES.into_iter().map(|strategy| (strategy, None)).collect();
    for group in (1..=world).filter(|group| world.is_multiple_of(*group)) {
        all.push((ShardingStrategy::HybridShard, Some(group)));
    }
    all
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Every flat parameter as a computation sees it, in the order of collectives.
fn computed_with(engine: &mut Engine) -> Vec<Vec<f32>> {
    let mut all = Vec::new();
    engine.begin_evaluation().expect("an evaluation");
    for unit in engine.ids().collect::<Vec<_>>() {
        if !unit.is_root() {
            engine.enter_forward(unit);
        }
        for part in engine.parts(unit) {
            // SAFETY: the values are copied before the engine goes on.
            all.push(unsafe { part.view().slice(0..part.layout().numel()) }.expect("gathered").to_vec());
        }
        if !unit.is_root() {
            engine.leave_forward(unit);
        }
    }
    engine.end_evaluation().expect("evaluated");
    all
}

fn toy(shapes: Vec<Vec<usize>>) -> Toy {
    Toy {
        root: shapes.clone(),
        units: vec![shapes.clone(); 2],
        frozen: shapes,
        low: vec![],
        last_unused: false,
    }
}

/// F11, Q7: every number of elements and of ranks; every rank, the owner too, computes with the dequantised values, and the
/// masters are what they were.
#[test]
fn every_size_and_world_computes_with_what_the_reference_quantises() {
    let evaluates = MixedPrecision { low_precision_evaluation: true, ..MixedPrecision::default() };
    for numel in [0, 1, 3, 8, 17, 300, 2049, 1_000_003] {
        let shapes = if numel == 0 { vec![vec![0], vec![2]] } else { vec![vec![numel]] };
        let toy = Toy { low: vec![vec![5, 2], vec![1]], ..toy(shapes) };
        let large = numel > 1_000_000;
        let toy =
            if large { Toy { root: vec![vec![3]], units: vec![vec![vec![numel]]], ..toy } } else { toy };
        for world in 1..=8 {
            for (strategy, shard_group) in layouts(world) {
                if large && strategy != ShardingStrategy::FullShard {
                    continue;
                }
                for (index, wire) in WIRES.into_iter().enumerate() {
                    if large && index != world % WIRES.len() {
                        continue;
                    }
                    let low = [Precision::F32, Precision::Bf16, Precision::F16][index % 3];
                    let precision = MixedPrecision { param_dtype: low, ..evaluates };
                    let config = EngineConfig { shard_group, precision, wire, ..config(strategy, ADAMW) };
                    let reference = Reference::new(&toy);
                    let results = threads::run(world, DEADLINE, |group| {
                        let mut engine = toy.engine(group, config);
                        (computed_with(&mut engine), full_params(&mut engine))
                    });
                    for (rank, (seen, masters)) in results.expect("a world").into_iter().enumerate() {
                        let given = seen.iter().zip(&masters).zip(&reference.params);
                        for ((seen, masters), (id, layout, values)) in given {
                            let what = format!(
                                "{numel}, {world} ranks, {strategy} {shard_group:?}, {wire:?}, {id:?}"
                            );
                            let want = arrived(layout, values, &config, world);
                            assert!(bits(seen) == bits(&want), "{what}: rank {rank} computes with others");
                            let want = rested(layout, values, &config, world);
                            assert!(bits(masters) == bits(&want), "{what}: rank {rank} keeps others");
                        }
                    }
                }
            }
        }
    }
}

/// Trained bits equal the reference's in every layout: gradients are taken at the dequantised values, masters move in f32.
#[test]
fn training_equals_the_reference_bit_for_bit() {
    let toy = Toy { low: vec![vec![5, 2], vec![1]], frozen: vec![vec![9], vec![300]], ..Toy::new(2) };
    for world in [1, 2, 3, 4, 8] {
        for (strategy, shard_group) in layouts(world) {
            for (index, wire) in WIRES.into_iter().enumerate() {
                let precision = if index == 1 { MixedPrecision::BF16 } else { MixedPrecision::default() };
                let prefetch = index % 2 == 0;
                let base = config(strategy, ADAMW);
                let config = EngineConfig { shard_group, precision, wire, prefetch, ..base };
                let mut reference = Reference::new(&toy);
                for (_, layout, values) in &mut reference.params {
                    *values = rested(layout, values, &config, world);
                }
                for _ in 0..3 {
                    reference.step(2 * world, world, &config, 0.05);
                }
                for (params, reports) in train(&toy, world, 2 * world, config, 3) {
                    for (got, (id, _, want)) in params.iter().zip(&reference.params) {
                        assert_eq!(
                            bits(got),
                            bits(want),
                            "{world} ranks, {strategy} {shard_group:?}, {wire:?}, {id:?}"
                        );
                    }
                    for report in reports {
                        let error = report.weight_error;
                        assert!(if wire.weights.is_some() {
                            error > 1e-4 && error < 0.2
                        } else {
                            error == 0.0
                        });
                    }
                }
            }
        }
    }
}

/// The report says what was lost: the error of each rank's shards, relative to them.
#[test]
fn the_error_of_the_weights_is_reported() {
    let toy = Toy { last_unused: false, ..Toy::new(2) };
    for (strategy, world) in [(ShardingStrategy::FullShard, 3), (ShardingStrategy::NoShard, 2)] {
        let config = EngineConfig { wire: INT8, ..config(strategy, ADAMW) };
        let reference = Reference::new(&toy);
        let errors = threads::run(world, DEADLINE, |group| {
            let mut engine = toy.engine(group, config);
            compute_step(&mut engine, world, 0.1).expect("a step").weight_error
        });
        for (rank, error) in errors.expect("a world").into_iter().enumerate() {
            let (mut lost, mut all) = (0.0, 0.0);
            for (_, layout, values) in &reference.params {
                let cuts = common::quantised::cuts(layout, &config, world);
                let cut = if cuts.len() == 1 { cuts[0].clone() } else { cuts[rank].clone() };
                let seen = arrived(layout, values, &config, world);
                for e in cut {
                    lost += f64::from(values[e] - seen[e]).powi(2);
                    all += f64::from(values[e]).powi(2);
                }
            }
            let want = (lost / all).sqrt();
            assert!((error - want).abs() < 1e-9, "rank {rank}: {error}, not {want}");
        }
    }
}

/// A block with a number that is not finite travels as it is, to every rank, and only that block; so do numbers too small for
/// a scale. The bytes are counted.
#[test]
fn a_block_that_cannot_be_quantised_travels_as_it_is() {
    let toy = Toy { frozen: vec![], ..toy(vec![vec![3000]]) };
    let precision = MixedPrecision { low_precision_evaluation: true, ..MixedPrecision::default() };
    for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e-40] {
        for world in [1, 2, 5] {
            for strategy in STRATEGIES {
                for param_dtype in [Precision::F32, Precision::Bf16] {
                    let precision = MixedPrecision { param_dtype, ..precision };
                    let config = EngineConfig { wire: INT8, precision, ..config(strategy, ADAMW) };
                    let mut values: Vec<f32> = (0..3000).map(|e| initial(UnitId::unit(1), 0, e)).collect();
                    for (e, value) in values.iter_mut().enumerate() {
                        if special == 1e-40 && (1000..1600).contains(&e) {
                            *value = special;
                        }
                    }
                    values[1300] = special;
                    let results = threads::run(world, DEADLINE, |group| {
                        let mut engine = toy.engine(group, config);
                        engine.write_param(UnitId::unit(1), 0, 0, &values).expect("written");
                        computed_with(&mut engine).swap_remove(2)
                    });
                    let layout = &toy.layouts(1).1[1][0];
                    let want = arrived(layout, &values, &config, world);
                    for seen in results.expect("a world") {
                        assert_eq!(
                            bits(&seen),
                            bits(&want),
                            "{special}, {world} ranks, {strategy}, {param_dtype}"
                        );
                        assert!(special == 1e-40 || want[1300].to_bits() == values[1300].to_bits());
                    }
                }
            }
        }
    }
}

/// Stochastic rounding: every rank sees the same, less than a step from the masters, another rounding after each update, and
/// the same run again gives the same bits.
#[test]
fn stochastic_rounding_is_the_same_for_every_reader() {
    let toy = toy(vec![vec![700]]);
    let wire = WireConfig { rounding: Rounding::Stochastic, ..INT8 };
    let precision = MixedPrecision { low_precision_evaluation: true, ..MixedPrecision::default() };
    for (strategy, world) in [(ShardingStrategy::FullShard, 4), (ShardingStrategy::NoShard, 2)] {
        let stochastic = EngineConfig { wire, precision, ..config(strategy, ADAMW) };
        let run = |config: EngineConfig| {
            threads::run(world, DEADLINE, |group| {
                let mut engine = toy.engine(group, config);
                let first = computed_with(&mut engine);
                // A step without a change: other roundings of the same numbers.
                compute_step(&mut engine, world, 0.0).expect("a step");
                (first, computed_with(&mut engine), full_params(&mut engine))
            })
            .expect("a world")
        };
        let all = run(stochastic);
        assert_eq!(all, run(stochastic), "the same again");
        let nearest = run(EngineConfig { wire: INT8, ..stochastic });
        assert!(all.iter().all(|rank| rank == &all[0]), "every rank sees the same");
        let (first, second, masters) = &all[0];
        assert_ne!(first, second, "another rounding");
        assert_ne!(first, &nearest[0].0);
        assert_eq!(masters, &nearest[0].2);
        for (seen, master) in first.iter().flatten().zip(masters.iter().flatten()) {
            assert!((seen - master).abs() < 1.3 / 127.0, "{master} became {seen}");
        }
    }
}

/// Q2, E6: what rests in int8 is saved and loaded bit for bit, written whole, parameter by parameter and in pieces, over
/// whatever was there before.
#[test]
fn frozen_parameters_round_trip_bit_for_bit() {
    // Blocks and shards begin and end inside parameters.
    let frozen = vec![vec![100], vec![3], vec![0], vec![500], vec![1], vec![256], vec![77]];
    let toy = Toy { frozen: frozen.clone(), ..Toy::new(2) };
    for world in 1..=4 {
        for strategy in STRATEGIES {
            let config = EngineConfig { wire: wire(None, true), ..config(strategy, ADAMW) };
            let results = threads::run(world, DEADLINE, |group| {
                let mut engine = toy.engine(group, config);
                let saved = full_params(&mut engine);
                let (unit, part) = (UnitId::unit(0), 1);
                let layout = engine.parts(unit)[part].layout().clone();
                let flat = saved[engine
                    .ids()
                    .take_while(|id| *id != unit)
                    .map(|id| engine.parts(id).len())
                    .sum::<usize>()
                    + part]
                    .clone();
                assert_eq!(flat.len(), layout.numel());
                for order in [[0, 1, 2, 3, 4, 5, 6], [6, 4, 2, 0, 1, 3, 5]] {
                    // Numbers of another size were there before.
                    let owned = engine.parts(unit)[part].owned();
                    engine.edit_owned(unit, part, 0..owned.len(), |all| all.fill(1e6)).expect("idle");
                    for index in order {
                        let range = layout.params()[index].range();
                        engine.write_param(unit, part, index, &flat[range]).expect("written");
                    }
                    assert_eq!(full_params(&mut engine), saved, "{order:?}");
                }
                // In pieces of awkward sizes.
                let owned = engine.parts(unit)[part].owned();
                engine.edit_owned(unit, part, 0..owned.len(), |all| all.fill(-3.0)).expect("idle");
                for start in (0..owned.len()).step_by(37) {
                    let range = start..(start + 37).min(owned.len());
                    let from = owned.start + range.start..owned.start + range.end;
                    engine
                        .edit_owned(unit, part, range, |piece| piece.copy_from_slice(&flat[from]))
                        .expect("idle");
                }
                assert_eq!(full_params(&mut engine), saved);
                // A step leaves them alone.
                compute_step(&mut engine, world, 0.1).expect("a step");
                let after = full_params(&mut engine);
                assert_eq!(after[1], saved[1]);
            });
            results.expect("a world");
        }
    }
}

/// What int8 does not hold is refused where it is written, and nothing changes.
#[test]
fn a_frozen_parameter_that_is_not_finite_is_refused() {
    let toy = Toy { frozen: vec![vec![3], vec![4]], ..Toy::new(1) };
    let config = EngineConfig { wire: wire(None, true), ..config(ShardingStrategy::FullShard, ADAMW) };
    for special in [f32::NAN, f32::INFINITY] {
        threads::run(2, DEADLINE, |group| {
            let rank = group.rank();
            let mut engine = toy.engine(group, config);
            let before = full_params(&mut engine);
            let values = [1.0, 2.0, special, 3.0];
            let written = engine.write_param(UnitId::unit(0), 1, 1, &values);
            // The last of the seven elements is rank 1's, with two before it.
            if rank == 0 {
                written.expect("nothing special here");
            } else {
                match written.expect_err("refused") {
                    EngineError::FrozenNotFinite { rank: 1, unit, path, index: 2, value } => {
                        assert_eq!((unit.as_str(), path.as_str()), ("blocks.0", "blocks.0.p6"));
                        assert_eq!(value.to_bits(), special.to_bits());
                    }
                    other => panic!("{other}"),
                }
            }
            let after = full_params(&mut engine);
            assert_eq!(after[3][4..], before[3][4..], "nothing changed on rank 1");
        })
        .expect("a world");
    }
    // Too small for a scale is not refused: half of the least normal number is all that is lost.
    threads::run(1, DEADLINE, |group| {
        let mut engine = toy.engine(group, config);
        engine.edit_owned(UnitId::unit(0), 1, 0..7, |all| all.fill(1e-39)).expect("written");
        let tiny = full_params(&mut engine);
        assert!(tiny[3].iter().all(|x| (x - 1e-39).abs() <= f32::MIN_POSITIVE / 2.0));
    })
    .expect("a world");
}

/// Trains four steps and compares what every rank holds and sends with the plan.
fn check_plan(toy: &Toy, ranks: usize, micro_batches: usize, config: EngineConfig) {
    let plan = toy.plan(ranks, micro_batches, &config);
    threads::run(ranks, DEADLINE, |group| {
        let mut engine = toy.engine(group, config);
        let what = format!("{ranks} ranks, {config:?}");
        let mut allocations = 0;
        for step in 0..4 {
            let report = compute_step(&mut engine, micro_batches, 0.1).expect("a step");
            assert_eq!(report.bytes_sent, plan.sent_per_step(), "{what}");
            if step == 1 {
                allocations = engine.ledger().allocations();
            }
        }
        assert_eq!(engine.ledger().allocations(), allocations, "{what}");
        for purpose in Purpose::ALL {
            assert_eq!(engine.ledger().peak(purpose), plan.bytes(purpose), "{what}: {purpose}");
        }
        assert_eq!(engine.ledger().total_peak(), plan.total(), "{what}");
    })
    .expect("a world");
}

/// The ledger and the bytes sent equal the plan, and nothing is allocated after the second step.
#[test]
fn the_ledger_equals_the_plan_to_the_byte() {
    let large = Toy { frozen: vec![vec![40, 20], vec![3]], ..Toy::new(3) };
    let mixed = Toy { low: vec![vec![5, 70], vec![1]], root: vec![vec![300], vec![2]], ..large.clone() };
    for toy in [large, mixed] {
        for (ranks, micro_batches) in [(1, 3), (2, 2), (3, 8), (4, 12)] {
            for (strategy, shard_group) in layouts(ranks) {
                for (index, wire) in WIRES.into_iter().enumerate() {
                    let precision =
                        if index % 2 == 1 { MixedPrecision::BF16 } else { MixedPrecision::default() };
                    let prefetch = index != 2;
                    let base = config(strategy, ADAMW);
                    let config = EngineConfig { shard_group, precision, wire, prefetch, ..base };
                    check_plan(&toy, ranks, micro_batches, config);
                }
            }
        }
    }
}

/// What is lent as f32 for a whole step cannot change inside it.
#[test]
fn a_step_inside_backward_is_refused_where_masters_are_lent() {
    let base = EngineConfig { clip_norm: None, step_in_backward: true, ..EngineConfig::default() };
    let config = EngineConfig { wire: INT8, precision: MixedPrecision::BF16, ..base };
    let error = config.check_step_in_backward(2).expect_err("refused").to_string();
    assert!(error.contains("leave quantized_weights out"), "{error}");
    config.check_step_in_backward(1).expect("nobody reads them");
    let frozen = EngineConfig { wire: wire(None, true), ..config };
    frozen.check_step_in_backward(2).expect("frozen parameters do not change");
}

/// What rests elsewhere travels as it would from memory, and int8 stays in memory: the same bits, and the plan holds.
#[test]
fn what_rests_elsewhere_travels_and_rests_quantised_too() {
    let shapes = vec![vec![1300], vec![3, 5]];
    let toy = Toy { low: vec![vec![5, 70]], last_unused: true, ..toy(shapes) };
    for tier in [Tier::Host, Tier::Nvme] {
        let both = Offload {
            parameters: tier,
            optimizer: tier,
            buffer_numel: 1024,
            least_numel: 0,
            ..Offload::default()
        };
        let some = Offload { least_numel: 300, ..both };
        let params = Offload { optimizer: Tier::None, ..both };
        for (offload, world) in [(both, 1), (both, 3), (some, 3), (params, 2)] {
            for (index, wire) in WIRES.into_iter().enumerate() {
                let low = if index % 2 == 1 { MixedPrecision::BF16 } else { MixedPrecision::default() };
                let base = config(ShardingStrategy::FullShard, ADAMW);
                let config = EngineConfig { offload, wire, precision: low, ..base };
                check(&toy, world, 2, &config);
                check_plan(&toy, world, 2 * world, config);
            }
        }
    }
}

/// The same for blocks that cannot be quantised, and for what is written in pieces.
#[test]
fn raw_blocks_and_frozen_pieces_come_from_elsewhere() {
    let toy = Toy { low: vec![vec![700]], ..toy(vec![vec![3000]]) };
    let offload =
        Offload { parameters: Tier::Nvme, buffer_numel: 1024, least_numel: 0, ..Offload::default() };
    let precision = MixedPrecision { low_precision_evaluation: true, ..MixedPrecision::default() };
    for world in [1, 2, 5] {
        for param_dtype in [Precision::F32, Precision::Bf16] {
            for rounding in [Rounding::Nearest, Rounding::Stochastic] {
                let wire = WireConfig { rounding, ..wire(Some(Quantization::Int8), true) };
                let precision = MixedPrecision { param_dtype, ..precision };
                let base = EngineConfig { wire, precision, ..config(ShardingStrategy::FullShard, ADAMW) };
                let want = seen_and_kept(&toy, world, base);
                let away = seen_and_kept(&toy, world, EngineConfig { offload, ..base });
                assert!(want == away, "{world} ranks, {param_dtype}, {rounding:?}");
            }
        }
    }
}

/// The bits of every flat parameter as it is computed with and as it is kept, after special values and pieces were written.
fn seen_and_kept(toy: &Toy, world: usize, config: EngineConfig) -> Vec<[Vec<Vec<u32>>; 2]> {
    let unit = UnitId::unit(1);
    let run = |group| {
        let mut engine = toy.engine(group, config);
        for (at, value) in [(5, f32::NAN), (1300, 1e-40), (2999, f32::INFINITY)] {
            let owned = engine.parts(unit)[0].owned();
            if owned.contains(&at) {
                let range = (at / 256 * 256).max(owned.start) - owned.start..at + 1 - owned.start;
                engine.edit_owned(unit, 0, range, |all| all.fill(value)).expect("written");
            }
            let (index, owned) = (at % 2000, engine.parts(unit)[1].owned().len());
            let range = index.min(owned)..(index + 100).min(owned);
            engine.edit_owned(unit, 1, range, |all| all.fill(at as f32 / 7.0)).expect("written");
        }
        let all_bits = |values: Vec<Vec<f32>>| values.iter().map(|v| bits(v)).collect();
        [all_bits(computed_with(&mut engine)), all_bits(full_params(&mut engine))]
    };
    threads::run(world, DEADLINE, run).expect("a world")
}

/// Raw blocks send their f32 too.
#[test]
fn raw_blocks_count_among_the_bytes_sent() {
    let toy = Toy { frozen: vec![], ..toy(vec![vec![2048]]) };
    let config = EngineConfig { wire: INT8, ..config(ShardingStrategy::FullShard, ADAMW) };
    let planned = toy.plan(2, 2, &config).sent_per_step();
    let sent = threads::run(2, DEADLINE, |group| {
        let mut engine = toy.engine(group, config);
        let tiny = |all: &mut [f32]| all[..512].fill(1e-40);
        engine.edit_owned(UnitId::unit(0), 0, 0..1024, tiny).expect("written");
        compute_step(&mut engine, 2, 0.1).expect("a step").bytes_sent
    });
    // Gathered twice, by one peer.
    for sent in sent.expect("a world") {
        assert_eq!(sent, planned + 2 * 512 * 4);
    }
}
