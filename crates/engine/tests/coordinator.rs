//! How far gathers run ahead and how long units stay: the knobs change memory and events, never a bit.

mod common;

use common::{ADAMW, DEADLINE, Toy, compute_round, compute_step, config, full_params, train};
use shardwise_comm::testing::counting;
use shardwise_comm::threads;
use shardwise_core::{BackwardPrefetch, GatherPolicy, Purpose, ShardingStrategy};
use shardwise_engine::{Engine, EngineConfig, Event, EventKind, ParamStatus, UnitId};

const UNITS: usize = 6;
const RANKS: usize = 2;

/// Elements of one unit of [`Toy::new`], padded for two ranks.
const UNIT: usize = 38;

fn base() -> EngineConfig {
    config(ShardingStrategy::FullShard, ADAMW)
}

fn policies() -> Vec<GatherPolicy> {
    use BackwardPrefetch::{None, Post, Pre};
    let plain = GatherPolicy::default();
    let mut all = Vec::new();
    for forward_prefetch in [true, false] {
        for backward_prefetch in [Pre, Post, None] {
            for limit_all_gathers in [1, 2, 3, 5, 100] {
                for max_reuse_distance in [0, 1, 2 * UNIT + 1, usize::MAX] {
                    let policy = GatherPolicy {
                        forward_prefetch,
                        backward_prefetch,
                        limit_all_gathers,
                        max_reuse_distance,
                        ..plain
                    };
                    all.extend([
                        policy,
                        GatherPolicy { max_live_parameters: 3 * UNIT, ..policy },
                        GatherPolicy { prefetch_bucket_size: 2 * UNIT, ..policy },
                    ]);
                }
            }
        }
    }
    all
}

/// Every combination of knobs trains the same bits, and holds what the plan says.
#[test]
fn no_knob_changes_a_bit_and_the_plan_knows_them_all() {
    let toy = Toy::new(UNITS);
    let want = train(&toy, RANKS, 3 * RANKS, base(), 2);
    for policy in policies() {
        let config = EngineConfig { gather: policy, ..base() };
        let plan = toy.plan(RANKS, 3 * RANKS, &config);
        let results = threads::run(RANKS, DEADLINE, |group| {
            let mut engine = toy.engine(group, config);
            for _ in 0..2 {
                compute_step(&mut engine, 3 * RANKS, 0.05).expect("a step");
            }
            let held = engine.ledger().peak(Purpose::GatheredUnits);
            (full_params(&mut engine), held)
        });
        for (params, held) in results.expect("a world") {
            assert_eq!(params, want[0].0, "{policy:?}");
            assert_eq!(held, plan.bytes(Purpose::GatheredUnits), "{policy:?}");
        }
    }
}

/// The second step's events on rank 0.
fn events(policy: GatherPolicy, rounds: usize) -> Vec<Event> {
    let run = |group| {
        let mut engine = Toy::new(UNITS).engine(group, EngineConfig { gather: policy, ..base() });
        compute_step(&mut engine, rounds * RANKS, 0.1).expect("a step");
        engine.log_events(true);
        compute_step(&mut engine, rounds * RANKS, 0.1).expect("a step");
        engine.take_events()
    };
    threads::run(RANKS, DEADLINE, run).expect("a world").remove(0)
}

/// Units gathered or in flight at each moment.
fn most_gathered(log: &[Event]) -> usize {
    let (mut now, mut most) = (0usize, 0);
    for event in log.iter().filter(|e| !e.unit.is_root()) {
        match event.kind {
            EventKind::GatherStarted => now += 1,
            EventKind::Released => now -= 1,
            _ => {}
        }
        most = most.max(now);
    }
    most
}

fn count(log: &[Event], kind: EventKind) -> usize {
    log.iter().filter(|e| !e.unit.is_root() && e.kind == kind).count()
}

/// Reference test 20 and reported bug I1: with depth d, the next d units are gathered while one computes, and never more.
#[test]
fn a_depth_of_d_gathers_d_units_ahead() {
    for depth in 0..4 {
        let policy = GatherPolicy { limit_all_gathers: depth + 1, ..GatherPolicy::default() };
        let log = events(policy, 2);
        assert_eq!(most_gathered(&log), depth + 1, "depth {depth}");
        // When unit 1 computes its forward, the next `depth` have been started, and no other.
        let at = log
            .iter()
            .position(|e| e.unit == UnitId::unit(1) && e.kind == EventKind::Forward)
            .expect("a call");
        let next = log[at..].iter().position(|e| e.kind == EventKind::Released).expect("freed") + at;
        let started: Vec<UnitId> = log[..next]
            .iter()
            .filter(|e| e.kind == EventKind::GatherStarted && !e.unit.is_root())
            .map(|e| e.unit)
            .collect();
        let want: Vec<UnitId> = (0..2 + depth).map(UnitId::unit).collect();
        assert_eq!(started, want, "depth {depth}");
    }
}

/// Where the next unit's gather stands in the backward of unit 3.
#[test]
fn backward_prefetch_before_or_after_the_gradient_work() {
    let order = |backward_prefetch| {
        let log = events(GatherPolicy { backward_prefetch, ..GatherPolicy::default() }, 1);
        let at = |unit: usize, kind, from: usize| {
            log.iter()
                .skip(from)
                .position(|e| e.unit == UnitId::unit(unit) && e.kind == kind)
                .map(|i| i + from)
        };
        let turn = log.iter().rposition(|e| e.kind == EventKind::Forward).expect("a forward");
        let backward = at(3, EventKind::Backward, turn).expect("a backward");
        let reduced = at(3, EventKind::ReduceStarted, turn).expect("a reduction");
        let gather = at(2, EventKind::GatherStarted, turn).expect("a gather");
        let next = at(2, EventKind::Backward, turn).expect("a backward");
        (backward < gather && gather < reduced, reduced < gather && gather < next)
    };
    assert_eq!(order(BackwardPrefetch::Pre), (true, false));
    assert_eq!(order(BackwardPrefetch::Post), (false, true));
    assert_eq!(order(BackwardPrefetch::None), (false, true));
}

/// Reference test 26: without reuse, a unit is not there after its use; with it, those that are soon used again stay, which
/// saves their gathers, and none is there after the step.
#[test]
fn units_that_are_soon_used_again_stay() {
    for (max_reuse_distance, saved) in
        [(0, 0), (1, 1), (2 * UNIT + 1, 2), (4 * UNIT + 1, 3), (usize::MAX, UNITS)]
    {
        let log = events(GatherPolicy { max_reuse_distance, ..GatherPolicy::default() }, 1);
        assert_eq!(count(&log, EventKind::GatherStarted), 2 * UNITS - saved, "{max_reuse_distance}");
        assert_eq!(count(&log, EventKind::GatherStarted), count(&log, EventKind::Released));
    }
    // Past the live limit units are freed all the same.
    let tight = GatherPolicy {
        max_reuse_distance: usize::MAX,
        max_live_parameters: 2 * UNIT,
        ..GatherPolicy::default()
    };
    let log = events(tight, 1);
    assert!(count(&log, EventKind::GatherStarted) > UNITS && most_gathered(&log) <= 3);
    let status = |engine: &Engine| {
        engine.ids().filter(|id| !id.is_root()).map(|id| engine.parts(id)[0].status()).collect::<Vec<_>>()
    };
    let run = |group| {
        let policy = GatherPolicy { max_reuse_distance: usize::MAX, ..GatherPolicy::default() };
        let mut engine = Toy::new(UNITS).engine(group, EngineConfig { gather: policy, ..base() });
        compute_step(&mut engine, 3 * RANKS, 0.1).expect("a step");
        assert!(status(&engine).iter().all(|s| *s == ParamStatus::NotAvailable));
    };
    threads::run(RANKS, DEADLINE, run).expect("a world");
}

/// Reported bug G4 and reference test 28: another order costs a prefetch and is counted, and is the expected one from then
/// on; evaluations have an order of their own, so that taking turns is no deviation.
#[test]
fn the_recorded_order_is_a_hint() {
    let run = |group| {
        let mut engine = Toy::new(UNITS).engine(group, base());
        let evaluate = |engine: &mut Engine| {
            engine.begin_evaluation().expect("idle");
            for unit in [3, 1] {
                engine.enter_forward(UnitId::unit(unit));
                engine.leave_forward(UnitId::unit(unit));
            }
            engine.end_evaluation().expect("an evaluation");
        };
        for _ in 0..3 {
            compute_step(&mut engine, RANKS, 0.1).expect("a step");
            evaluate(&mut engine);
        }
        assert_eq!(engine.deviations(), 0);
        let mut deviations = Vec::new();
        for _ in 0..2 {
            engine.begin_step(RANKS).expect("idle");
            engine.begin_round().expect("a round");
            let order = [4, 2, 0].map(UnitId::unit);
            for unit in order {
                engine.enter_forward(unit);
                engine.leave_forward(unit);
            }
            for unit in order.into_iter().rev() {
                engine.enter_backward(unit);
                engine.leave_backward(unit);
            }
            engine.end_round().expect("a round");
            engine.end_step(0.1).expect("a step");
            deviations.push(engine.deviations());
        }
        assert_eq!(deviations, [3, 3], "counted once, then the new order is the expected one");
    };
    threads::run(RANKS, DEADLINE, run).expect("a world");
}

/// The policy may change between steps, also on one rank alone, and never inside a step.
#[test]
fn the_policy_changes_between_steps() {
    let toy = Toy::new(UNITS);
    let want = train(&toy, RANKS, 2 * RANKS, base(), 6);
    let results = threads::run(RANKS, DEADLINE, |group| {
        let rank = group.rank();
        let mut engine = toy.engine(group, base());
        let plain = GatherPolicy::default();
        for step in 0..6 {
            let reuse = if (step + rank) % 2 == 0 { usize::MAX } else { 0 };
            let policy = GatherPolicy { limit_all_gathers: 1 + step % 4, max_reuse_distance: reuse, ..plain };
            engine.set_gather_policy(policy).expect("between steps");
            engine.begin_step(2 * RANKS).expect("idle");
            let error = engine.set_gather_policy(plain).expect_err("in a step").to_string();
            assert!(error.contains("set_gather_policy") && error.contains("Step"), "{error}");
            for micro_batch in [rank, rank + RANKS] {
                engine.begin_round().expect("a round");
                compute_round(&mut engine, micro_batch).expect("a round");
            }
            engine.end_step(0.05).expect("a step");
        }
        let error =
            engine.set_gather_policy(GatherPolicy { limit_all_gathers: 0, ..plain }).expect_err("no unit");
        assert!(error.to_string().contains("limit_all_gathers is 0"), "{error}");
        full_params(&mut engine)
    });
    for params in results.expect("a world") {
        assert_eq!(params, want[0].0);
    }
}

/// P1 and P2: a prefetched unit is in flight until it computes, then available; asking for one that is available asks the
/// peers for nothing.
#[test]
fn a_gather_is_in_flight_until_its_unit_computes() {
    let run = |group| {
        let (group, counter) = counting(&group);
        let mut engine = Toy::new(3).engine(group, base());
        let status = |engine: &Engine| [0, 1, 2].map(|i| engine.parts(UnitId::unit(i))[0].status());
        use ParamStatus::{Available, InFlight, NotAvailable};
        assert_eq!(status(&engine), [NotAvailable; 3]);
        engine.begin_step(RANKS).expect("idle");
        engine.begin_round().expect("a round");
        assert_eq!(status(&engine), [InFlight, NotAvailable, NotAvailable]);
        engine.enter_forward(UnitId::unit(0));
        assert_eq!(status(&engine), [Available, InFlight, NotAvailable]);
        assert!(engine.parts(UnitId::unit(0))[0].summary().contains("Available"));
        let reads = |counter: &shardwise_comm::testing::Counter| -> usize {
            counter.take().values().map(|count| count.reads).sum()
        };
        reads(&counter);
        engine.enter_forward(UnitId::unit(0));
        assert_eq!(reads(&counter), 0, "it was available");
        engine.leave_forward(UnitId::unit(0));
        assert_eq!(status(&engine)[0], Available, "the outer call still computes");
        engine.leave_forward(UnitId::unit(0));
        assert_eq!(status(&engine)[0], NotAvailable);
    };
    threads::run(RANKS, DEADLINE, run).expect("a world");
}
