//! What a step holds, sends and does: the ledger equals the plan, the event log shows when parameters exist.

mod common;

use common::{ADAFACTOR, ADAM, ADAMW, DEADLINE, LION, MOMENTUM, SGD, STRATEGIES, Toy, compute_step, config};
use shardwise_comm::threads;
use shardwise_core::{
    ErrorFeedback, MixedPrecision, Offload, Precision, Purpose, Quantization, ShardingStrategy, Tier,
    WireConfig,
};
use shardwise_engine::{Accumulation, EngineConfig, Event, EventKind, OptimizerConfig, UnitId};

/// Trains two steps and compares what every rank holds and sends with the plan.
fn check_plan(toy: &Toy, ranks: usize, micro_batches: usize, config: EngineConfig) {
    let plan = toy.plan(ranks, micro_batches, &config);
    threads::run(ranks, DEADLINE, |group| {
        let mut engine = toy.engine(group, config);
        let what =
            format!("{config:?}, {ranks} ranks, {micro_batches} micro-batches, {} units", toy.units.len());
        for _ in 0..2 {
            let report = compute_step(&mut engine, micro_batches, 0.1).expect("a step");
            assert_eq!(report.bytes_sent, plan.sent_per_step(), "{what}");
            assert_eq!(report.bytes_sent_across, plan.sent_across_per_step(), "{what}");
        }
        for purpose in Purpose::ALL {
            let (peak, planned) = (engine.ledger().peak(purpose), plan.bytes(purpose));
            assert_eq!(peak, planned, "{what}: {purpose}");
        }
        assert_eq!(engine.ledger().total_peak(), plan.total(), "{what}");
    })
    .expect("a world");
}

#[test]
fn the_ledger_equals_the_plan_to_the_byte() {
    for strategy in STRATEGIES {
        for optimizer in [ADAMW, ADAM, MOMENTUM, SGD, LION, ADAFACTOR, OptimizerConfig::MUON] {
            for (ranks, micro_batches) in [(1, 1), (1, 3), (2, 2), (2, 6), (3, 8), (4, 4), (4, 28)] {
                for (units, prefetch, ema_decay) in [
                    (3, true, Some(0.9)),
                    (3, false, None),
                    (2, true, None),
                    (1, true, None),
                    (0, true, Some(0.9)),
                ] {
                    let frozen = if units == 3 { vec![vec![4, 2], vec![3]] } else { vec![] };
                    let toy = Toy { frozen, ..Toy::new(units) };
                    check_plan(
                        &toy,
                        ranks,
                        micro_batches,
                        EngineConfig { prefetch, ema_decay, ..config(strategy, optimizer) },
                    );
                }
            }
        }
    }
}

/// Hybrid layouts, narrow wires and unsharded accumulation have their own formulas.
#[test]
fn variations_of_the_plan() {
    use ShardingStrategy::{FullShard, HybridShard, HybridShardZero2, NoShard, ShardGradOp};
    let toy = Toy { frozen: vec![vec![4, 2], vec![3]], low: vec![vec![5, 2], vec![1]], ..Toy::new(3) };
    let both_low = MixedPrecision { reduce_dtype: Precision::Bf16, ..MixedPrecision::BF16 };
    for (strategy, ranks, shard_group) in [
        (FullShard, 1, None),
        (FullShard, 3, None),
        (ShardGradOp, 2, None),
        (NoShard, 2, None),
        (HybridShard, 4, Some(2)),
        (HybridShardZero2, 6, Some(3)),
        (HybridShard, 4, Some(1)),
        (HybridShard, 2, Some(2)),
    ] {
        for precision in [MixedPrecision::default(), MixedPrecision::BF16, both_low] {
            for accumulation in [Accumulation::Sharded, Accumulation::Unsharded] {
                for micro_batches in [ranks, 3 * ranks] {
                    for optimizer in [ADAMW, ADAFACTOR, OptimizerConfig::MUON] {
                        let base = config(strategy, optimizer);
                        let config = EngineConfig { shard_group, precision, accumulation, ..base };
                        check_plan(&toy, ranks, micro_batches, config);
                    }
                }
            }
        }
    }
}

/// What rests elsewhere takes no memory but for its way.
#[test]
fn offload_in_the_plan() {
    use ShardingStrategy::{FullShard, NoShard, ShardGradOp};
    let toy = Toy { frozen: vec![vec![4, 2], vec![30]], low: vec![vec![5, 2], vec![1]], ..Toy::new(3) };
    let small = Offload { buffer_numel: 1024, least_numel: 0, ..Offload::default() };
    for (parameters, optimizer) in [
        (Tier::Host, Tier::Host),
        (Tier::Nvme, Tier::None),
        (Tier::None, Tier::Host),
        (Tier::Nvme, Tier::Host),
    ] {
        for (least_numel, max_in_memory, ratio) in [(0, 0, 1.0), (10, 0, 1.0), (0, 30, 0.4)] {
            let max_in_memory = if parameters.is_away() { max_in_memory } else { 0 };
            let ratio = if optimizer.is_away() { ratio } else { 1.0 };
            let offload = Offload { parameters, optimizer, least_numel, max_in_memory, ratio, ..small };
            for (strategy, ranks) in [(FullShard, 1), (FullShard, 3), (ShardGradOp, 2), (NoShard, 2)] {
                for precision in [MixedPrecision::default(), MixedPrecision::BF16] {
                    for optimizer in [ADAMW, ADAFACTOR, OptimizerConfig::MUON] {
                        let base = EngineConfig { ema_decay: Some(0.9), ..config(strategy, optimizer) };
                        check_plan(&toy, ranks, 3 * ranks, EngineConfig { precision, offload, ..base });
                    }
                }
            }
        }
    }
}

/// Nodes, with and without a second copy of the parameters.
#[test]
fn nodes_have_their_own_formulas() {
    use ShardingStrategy::{FullShard, NoShard, ShardGradOp};
    let toy = Toy { frozen: vec![vec![4, 2], vec![3]], low: vec![vec![5, 2], vec![1]], ..Toy::new(3) };
    let both_low = MixedPrecision { reduce_dtype: Precision::Bf16, ..MixedPrecision::BF16 };
    for (ranks, node) in [(2, 1), (4, 2), (4, 1), (6, 3), (8, 4)] {
        for strategy in [FullShard, ShardGradOp, NoShard] {
            for precision in [MixedPrecision::default(), both_low] {
                for accumulation in [Accumulation::Sharded, Accumulation::Unsharded] {
                    for secondary_partition in [None, Some(node)] {
                        let wire = WireConfig {
                            node_size: Some(node),
                            secondary_partition,
                            ..WireConfig::default()
                        };
                        let base = config(strategy, ADAMW);
                        let config = EngineConfig { wire, precision, accumulation, ..base };
                        check_plan(&toy, ranks, 2 * ranks, config);
                    }
                }
            }
        }
    }
}

/// Quantised gradients and their errors: groups, nodes, neither.
#[test]
fn quantised_gradients_have_their_own_formulas() {
    use ShardingStrategy::{FullShard, HybridShard, NoShard, ShardGradOp};
    let toy = Toy { frozen: vec![vec![4, 2]], low: vec![vec![5, 2], vec![1]], ..Toy::new(3) };
    let feedback = Some(ErrorFeedback::default());
    for (ranks, node_size) in [(1, None), (2, Some(1)), (3, None), (4, Some(2)), (8, Some(4))] {
        for (strategy, shard_group) in
            [(FullShard, None), (ShardGradOp, None), (NoShard, None), (HybridShard, node_size)]
        {
            if strategy == HybridShard && shard_group.is_none() {
                continue;
            }
            for (gradients, error_feedback) in [(Quantization::Int4, None), (Quantization::Int8, feedback)] {
                for accumulation in [Accumulation::Sharded, Accumulation::Unsharded] {
                    let (gradients, weights) = (Some(gradients), error_feedback.map(|_| Quantization::Int8));
                    let secondary_partition = node_size;
                    let wire = WireConfig {
                        weights,
                        gradients,
                        error_feedback,
                        node_size,
                        secondary_partition,
                        ..WireConfig::default()
                    };
                    let base = config(strategy, ADAMW);
                    let config = EngineConfig { wire, shard_group, accumulation, ..base };
                    check_plan(&toy, ranks, 2 * ranks, config);
                }
            }
        }
    }
}

#[test]
fn nothing_is_allocated_after_the_second_step() {
    let runs = STRATEGIES.into_iter().flat_map(|strategy| {
        [ADAMW, ADAFACTOR, OptimizerConfig::MUON].map(|optimizer| (strategy, optimizer))
    });
    for (strategy, optimizer) in runs {
        let toy = Toy::new(4);
        threads::run(2, DEADLINE, |group| {
            let mut engine = toy.engine(group, config(strategy, optimizer));
            for _ in 0..2 {
                compute_step(&mut engine, 6, 0.1).expect("a step");
            }
            let allocations = engine.ledger().allocations();
            for _ in 0..20 {
                compute_step(&mut engine, 6, 0.1).expect("a step");
            }
            assert_eq!(engine.ledger().allocations(), allocations);
        })
        .expect("a world");
    }
}

/// The events of the second step on rank 0 of 2.
fn events(strategy: ShardingStrategy, units: usize, rounds: usize) -> Vec<Event> {
    let toy = Toy::new(units);
    threads::run(2, DEADLINE, |group| {
        let mut engine = toy.engine(group, config(strategy, ADAMW));
        compute_step(&mut engine, 2 * rounds, 0.1).expect("a step");
        engine.log_events(true);
        compute_step(&mut engine, 2 * rounds, 0.1).expect("a step");
        engine.take_events()
    })
    .expect("a world")
    .remove(0)
}

fn count(events: &[Event], root: bool, kind: EventKind) -> usize {
    events.iter().filter(|e| e.kind == kind && e.unit.is_root() == root).count()
}

/// One micro-batch a rank: n + 1 gathers in forward, n in backward, n + 1 reductions; with K of them the root is
/// gathered once, units 2nK times, and there are (n + 1)K reductions.
#[test]
fn gathers_and_reductions_of_a_step() {
    use EventKind::{GatherStarted, ReduceStarted};
    for (units, rounds) in [(3, 1), (5, 1), (3, 4)] {
        for (strategy, passes) in [(ShardingStrategy::FullShard, 2), (ShardingStrategy::ShardGradOp, 1)] {
            let log = events(strategy, units, rounds);
            assert_eq!(count(&log, true, GatherStarted), 1, "{strategy}");
            assert_eq!(count(&log, false, GatherStarted), passes * units * rounds, "{strategy}");
            let reductions = count(&log, true, ReduceStarted) + count(&log, false, ReduceStarted);
            assert_eq!(reductions, (units + 1) * rounds, "{strategy}");
        }
        let log = events(ShardingStrategy::NoShard, units, rounds);
        assert_eq!(count(&log, false, GatherStarted) + count(&log, true, GatherStarted), 0);
        assert_eq!(count(&log, false, ReduceStarted), units * rounds);
    }
}

/// A unit's parameters exist only around its use: from the event log, at most two units are gathered or in flight at
/// any time, each computes only while it is gathered, and each is freed before the step ends.
#[test]
fn full_shard_keeps_parameters_only_around_their_use() {
    let log = events(ShardingStrategy::FullShard, 5, 3);
    let mut present: Vec<UnitId> = Vec::new();
    let mut arrived: Vec<UnitId> = Vec::new();
    for event in log.iter().filter(|e| !e.unit.is_root()) {
        match event.kind {
            EventKind::GatherStarted => {
                assert!(!present.contains(&event.unit), "{event:?}");
                present.push(event.unit);
                assert!(present.len() <= 2, "{event:?}: {present:?}");
            }
            EventKind::Gathered => arrived.push(event.unit),
            EventKind::Forward | EventKind::Backward => assert!(arrived.contains(&event.unit), "{event:?}"),
            EventKind::Released => {
                present.retain(|u| *u != event.unit);
                arrived.retain(|u| *u != event.unit);
            }
            EventKind::Updated => assert!(present.is_empty(), "{event:?}"),
            EventKind::ReadStarted | EventKind::ReduceStarted | EventKind::Reduced => {}
        }
    }
    assert!(present.is_empty());
}

/// Reference test 19: with one-ahead prefetch in backward, the next unit's gather is started before this unit's
/// gradient work, and its reduction after.
#[test]
fn backward_prefetches_one_unit_ahead() {
    let log = events(ShardingStrategy::FullShard, 3, 1);
    let unit = UnitId::unit;
    let turn = log.iter().rposition(|e| e.kind == EventKind::Forward).expect("a forward");
    let got: Vec<(UnitId, EventKind)> = log[turn..]
        .iter()
        .filter(|e| {
            matches!(e.kind, EventKind::GatherStarted | EventKind::Backward | EventKind::ReduceStarted)
        })
        .map(|e| (e.unit, e.kind))
        .collect();
    use EventKind::{Backward, GatherStarted, ReduceStarted};
    let want = [
        (unit(2), GatherStarted),
        (unit(2), Backward),
        (unit(1), GatherStarted),
        (unit(2), ReduceStarted),
        (unit(1), Backward),
        (unit(0), GatherStarted),
        (unit(1), ReduceStarted),
        (unit(0), Backward),
        (unit(0), ReduceStarted),
        (UnitId::ROOT, ReduceStarted),
    ];
    assert_eq!(got, want);
}

/// Reported bug E3: units that are frozen are freed in backward like the others, and cost no gradient.
#[test]
fn frozen_units_are_freed_in_backward() {
    let mut toy = Toy { frozen: vec![vec![5, 2], vec![3]], ..Toy::new(5) };
    (1..4).for_each(|unit| toy.units[unit].clear());
    for strategy in STRATEGIES {
        check_plan(&toy, 2, 4, config(strategy, ADAMW));
    }
    let run = |group| {
        let mut engine = toy.engine(group, config(ShardingStrategy::FullShard, ADAMW));
        compute_step(&mut engine, 4, 0.1).expect("a step");
        engine.log_events(true);
        compute_step(&mut engine, 4, 0.1).expect("a step");
        engine.take_events()
    };
    let log = threads::run(2, DEADLINE, run).expect("a world").remove(0);
    for unit in (1..4).map(UnitId::unit) {
        let of = |kind| log.iter().filter(|e| e.unit == unit && e.kind == kind).count();
        assert_eq!(
            (of(EventKind::GatherStarted), of(EventKind::Released)),
            (4, 4),
            "twice in each of two rounds"
        );
        assert_eq!(of(EventKind::ReduceStarted), 0);
        let last_use =
            log.iter().rposition(|e| e.unit == unit && e.kind == EventKind::Backward).expect("a backward");
        let released = log[last_use..].iter().position(|e| e.unit == unit && e.kind == EventKind::Released);
        let next = log[last_use + 1..].iter().position(|e| e.kind == EventKind::Backward && e.unit != unit);
        assert!(released.expect("freed") <= next.expect("the unit before") + 1);
    }
}
