//! Ranks that use different units, in different orders and numbers: a missing gradient counts as zero, and the result is
//! that of one loop over all micro-batches (L10, reported bugs G2, G3, G4, G5).

mod common;

use common::{ADAMW, DEADLINE, STRATEGIES, Toy, config, full_params, initial};
use shardwise_comm::threads;
use shardwise_core::seed::{SplitMix64, seed_for};
use shardwise_core::{CarryCounter, MixedPrecision, Precision, RoundAssignment};
use shardwise_engine::{Engine, EngineConfig, ParamStatus, UnitId};

const UNITS: usize = 4;

/// Which units a micro-batch uses in a step, in which order, some of them several times.
type Route = fn(step: u64, micro_batch: usize) -> Vec<usize>;

/// Each micro-batch has an expert of its own between two shared units.
fn experts(_: u64, m: usize) -> Vec<usize> {
    vec![0, 1 + m % 2, 3]
}

/// Anything: no unit at all, one of them many times, all in any order.
fn anything(step: u64, m: usize) -> Vec<usize> {
    let mut random = SplitMix64::new(seed_for(step, &format!("micro-batch {m}")));
    (0..random.below(7)).map(|_| random.below(UNITS as u64) as usize).collect()
}

/// The first unit only, once for the first micro-batch, three times for the others.
fn repeated(_: u64, m: usize) -> Vec<usize> {
    vec![0; if m == 0 { 1 } else { 3 }]
}

/// The first half of the micro-batches uses nothing; a unit is unused in whole rounds.
fn late(step: u64, m: usize) -> Vec<usize> {
    if m < 4 { vec![] } else { experts(step, m) }
}

fn element_gradient(value: f32, element: usize, m: usize) -> f32 {
    value * 0.3 + (element as f32 * 0.37 + m as f32 * 1.3).sin()
}

/// Every other micro-batch uses the last unit only, and then its reductions are the beginning of the others'.
fn prefix(_: u64, m: usize) -> Vec<usize> {
    if m.is_multiple_of(2) { vec![1, 2] } else { vec![2] }
}

fn compute(engine: &mut Engine, units: &[usize], m: usize) {
    let units: Vec<UnitId> = units.iter().copied().map(UnitId::unit).collect();
    for unit in &units {
        engine.enter_forward(*unit);
        engine.leave_forward(*unit);
    }
    if !engine.parts(UnitId::ROOT).is_empty() {
        write(engine, UnitId::ROOT, m);
    }
    for unit in units.iter().rev() {
        engine.enter_backward(*unit);
        write(engine, *unit, m);
        engine.leave_backward(*unit);
    }
}

fn write(engine: &mut Engine, unit: UnitId, m: usize) {
    let handle = &engine.parts(unit)[0];
    let (view, params) = (handle.view().clone(), handle.layout().params().to_vec());
    for (index, param) in params.iter().enumerate() {
        // SAFETY: the values are copied before the engine goes on.
        let values = unsafe { view.slice(param.range()) }.expect("gathered").to_vec();
        engine.write_gradient(unit, 0, index, |window, overwrite| {
            for (k, g) in window.iter_mut().enumerate() {
                let own = element_gradient(values[k], param.offset + k, m);
                *g = if overwrite { own } else { *g + own };
            }
        });
    }
}

fn train(
    ranks: usize,
    micro_batches: usize,
    route: Route,
    config: EngineConfig,
) -> Vec<(Vec<Vec<f32>>, Vec<f64>)> {
    train_toy(&Toy::new(UNITS), (ranks, micro_batches), route, config)
}

fn train_toy(
    toy: &Toy,
    (ranks, micro_batches): (usize, usize),
    route: Route,
    config: EngineConfig,
) -> Vec<(Vec<Vec<f32>>, Vec<f64>)> {
    threads::run(ranks, DEADLINE, |group| {
        let mut engine = toy.engine(group, config);
        let norms = (1..=4)
            .map(|step| {
                let schedule = engine.begin_step(micro_batches).expect("idle");
                for _ in 0..schedule.rounds() {
                    match engine.begin_round().expect("a round") {
                        RoundAssignment::Idle => engine.idle_round().expect("a round"),
                        RoundAssignment::Compute(m) => {
                            compute(&mut engine, &route(step, m), m);
                            engine.end_round().expect("a round");
                        }
                    }
                }
                engine.end_step(0.05).expect("a step").grad_norm
            })
            .collect();
        (full_params(&mut engine), norms)
    })
    .expect("a world")
}

/// One loop over whole parameters, SGD.
fn reference(ranks: usize, micro_batches: usize, route: Route) -> Vec<Vec<f32>> {
    reference_toy(&Toy::new(UNITS), ranks, micro_batches, route)
}

fn reference_toy(toy: &Toy, ranks: usize, micro_batches: usize, route: Route) -> Vec<Vec<f32>> {
    let (root, units) = toy.layouts(1);
    let first = usize::from(root.is_empty());
    let layouts: Vec<_> = root.into_iter().chain(units.into_iter().flatten()).collect();
    let id = |i: usize| if i == 0 { UnitId::ROOT } else { UnitId::unit(i - 1) };
    let mut params: Vec<Vec<f32>> = layouts
        .iter()
        .enumerate()
        .map(|(i, l)| (0..l.numel()).map(|e| initial(id(i + first), 0, e)).collect())
        .collect();
    for step in 1..=4 {
        let times = |unit: usize, m: usize| {
            if unit == 0 { 1 } else { route(step, m).iter().filter(|u| **u + 1 == unit).count() }
        };
        for (unit, values) in params.iter_mut().enumerate().map(|(i, values)| (i + first, values)) {
            if (0..micro_batches).all(|m| times(unit, m) == 0) {
                continue; // Unused everywhere: no gradient, no update.
            }
            for (e, value) in values.iter_mut().enumerate() {
                let of = |m: usize| {
                    let own = element_gradient(*value, e, m);
                    (1..times(unit, m)).fold(if times(unit, m) == 0 { 0.0 } else { own }, |sum, _| sum + own)
                };
                let gradient = tree(micro_batches, ranks, of) / micro_batches as f32;
                *value -= 0.05 * gradient;
            }
        }
    }
    params
}

fn tree(micro_batches: usize, ranks: usize, of: impl Fn(usize) -> f32) -> f32 {
    let mut rounds = CarryCounter::default();
    for round in 0..micro_batches.div_ceil(ranks) {
        let mut sum = CarryCounter::default();
        for m in round * ranks..(round + 1) * ranks {
            sum.push(if m < micro_batches { of(m) } else { 0.0 }, 1, |a, b| a + b);
        }
        rounds.push(sum.finish(|a, b| a + b).expect("a rank"), 1, |a, b| a + b);
    }
    rounds.finish(|a, b| a + b).expect("a round")
}

#[test]
fn ranks_with_different_units_equal_one_loop() {
    let sgd = |strategy| EngineConfig { clip_norm: None, ..config(strategy, common::SGD) };
    for (name, route) in
        [("experts", experts as Route), ("anything", anything), ("repeated", repeated), ("late", late)]
    {
        for (ranks, micro_batches) in [(1, 8), (2, 8), (3, 8), (4, 8), (4, 4), (3, 5)] {
            let want = reference(ranks, micro_batches, route);
            for strategy in STRATEGIES {
                for prefetch in [true, false] {
                    let config = EngineConfig { prefetch, ..sgd(strategy) };
                    for (rank, (got, _)) in train(ranks, micro_batches, route, config).into_iter().enumerate()
                    {
                        for (unit, (got, want)) in got.iter().zip(&want).enumerate() {
                            for (e, (a, b)) in got.iter().zip(want).enumerate() {
                                assert!(
                                    a.to_bits() == b.to_bits() || (*a == 0.0 && *b == 0.0),
                                    "{name}, {strategy}, {ranks} ranks, {micro_batches} micro-batches, rank {rank}, unit \
                                     {unit}, element {e}: {a} {b}"
                                );
                            }
                        }
                    }
                }
            }
        }
    }
}

fn assert_equal(got: &[Vec<f32>], want: &[Vec<f32>], tolerance: f32, what: &str) {
    for (unit, (got, want)) in got.iter().zip(want).enumerate() {
        for (e, (a, b)) in got.iter().zip(want).enumerate() {
            let same = a.to_bits() == b.to_bits() || (a - b).abs() <= tolerance * b.abs().max(1.0);
            assert!(same, "{what}, flat parameter {unit}, element {e}: {a} {b}");
        }
    }
}

/// However often ranks branch in a step, over however many units: more operations than an order holds at a time.
#[test]
fn branching_has_no_bound() {
    let sgd =
        EngineConfig { clip_norm: None, ..config(shardwise_core::ShardingStrategy::FullShard, common::SGD) };
    let wide: Route =
        |_, m| if m.is_multiple_of(2) { (0..40).collect() } else { (0..40).rev().step_by(3).collect() };
    for (toy, route, ranks, micro_batches) in
        [(Toy::new(UNITS), experts as Route, 2, 40), (Toy::new(40), wide, 2, 4), (Toy::new(40), wide, 4, 8)]
    {
        let want = reference_toy(&toy, ranks, micro_batches, route);
        for (got, _) in train_toy(&toy, (ranks, micro_batches), route, sgd) {
            assert_equal(&got, &want, 0.0, &format!("{ranks} ranks, {micro_batches} micro-batches"));
        }
    }
}

/// Where the root has nothing to reduce, ranks that have reduced the beginning of what others reduce are noticed all the same;
/// so are those that have nothing to do in a ragged round.
#[test]
fn branching_is_noticed_without_a_root() {
    let toy = Toy { root: vec![], ..Toy::new(UNITS) };
    for route in [prefix as Route, anything, experts] {
        for (ranks, micro_batches) in [(2, 2), (2, 8), (2, 5), (3, 8), (4, 7)] {
            let want = reference_toy(&toy, ranks, micro_batches, route);
            for strategy in STRATEGIES {
                let sgd = EngineConfig { clip_norm: None, ..config(strategy, common::SGD) };
                for (got, _) in train_toy(&toy, (ranks, micro_batches), route, sgd) {
                    assert_equal(
                        &got,
                        &want,
                        0.0,
                        &format!("{strategy}, {ranks} ranks, {micro_batches} micro-batches"),
                    );
                }
            }
        }
    }
}

/// A unit with two backwards in a round in which ranks branch keeps both gradients, in narrow reductions too.
#[test]
fn a_second_backward_adds_to_a_gradient_that_is_kept() {
    let half = MixedPrecision { reduce_dtype: Precision::Bf16, ..MixedPrecision::default() };
    // By rank, each unit forth and back at once.
    let used = [vec![1, 0, 0, 2], vec![0, 2, 0, 0]];
    for (precision, tolerance) in [(MixedPrecision::default(), 1e-6), (half, 0.01)] {
        let base = config(shardwise_core::ShardingStrategy::FullShard, common::SGD);
        let config = EngineConfig { clip_norm: None, precision, ..base };
        let results = threads::run(2, DEADLINE, |group| {
            let rank = group.rank();
            let mut engine = Toy::new(UNITS).engine(group, config);
            let before = full_params(&mut engine);
            engine.begin_step(2).expect("idle");
            engine.begin_round().expect("a round");
            for unit in &used[rank] {
                let unit = UnitId::unit(*unit);
                engine.enter_forward(unit);
                engine.leave_forward(unit);
                engine.enter_backward(unit);
                for index in 0..engine.parts(unit)[0].layout().params().len() {
                    engine.write_gradient(unit, 0, index, |window, overwrite| {
                        window.iter_mut().for_each(|g| *g = if overwrite { 1.0 } else { *g + 1.0 });
                    });
                }
                engine.leave_backward(unit);
            }
            engine.end_round().expect("a round");
            engine.end_step(0.5).expect("a step");
            (before, full_params(&mut engine))
        });
        for (mut want, got) in results.expect("a world") {
            for unit in 0..UNITS {
                let times = used.iter().flatten().filter(|u| **u == unit).count();
                want[unit + 1].iter_mut().for_each(|p| *p -= 0.5 * times as f32 / 2.0);
            }
            assert_equal(&got, &want, tolerance, &format!("{precision:?}"));
        }
    }
}

/// The promise of equal bits holds for ranks that branch too, statistics and norms included.
#[test]
fn branching_changes_no_bit_between_numbers_of_ranks() {
    for route in [experts as Route, anything, late] {
        let config = config(shardwise_core::ShardingStrategy::FullShard, ADAMW);
        let want = train(1, 8, route, config).remove(0);
        for ranks in [2, 4, 8] {
            assert!(train(ranks, 8, route, config).into_iter().all(|got| got == want), "{ranks} ranks");
        }
    }
}

/// Ranks evaluate as many batches as they have, each calling units at its own pace.
#[test]
fn ranks_evaluate_different_numbers_of_batches() {
    for strategy in STRATEGIES {
        threads::run(3, DEADLINE, |group| {
            let rank = group.rank();
            let mut engine = Toy::new(UNITS).engine(group, config(strategy, ADAMW));
            for step in 1..4 {
                engine.begin_evaluation().expect("idle");
                for batch in 0..[3, 5, 0][rank] {
                    for unit in anything(step, batch).into_iter().map(UnitId::unit) {
                        engine.enter_forward(unit);
                        let part = &engine.parts(unit)[0];
                        assert_eq!(part.status(), ParamStatus::Available);
                        // SAFETY: the value is copied before the engine goes on.
                        let first = unsafe { part.view().slice(0..1) }.expect("gathered")[0];
                        assert!(first.is_finite());
                        engine.leave_forward(unit);
                    }
                }
                engine.end_evaluation().expect("ended");
                common::compute_step(&mut engine, 3, 0.05).expect("a step between");
            }
        })
        .expect("a world");
    }
}
