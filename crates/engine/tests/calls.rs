//! Calls out of order, units in unusual orders, gradients that are not finite, lost ranks.

mod common;

use common::{
    ADAMW, DEADLINE, STRATEGIES, Toy, compute_round, compute_step, config, full, full_params, train,
    write_gradients,
};
use shardwise_comm::threads;
use shardwise_core::{RoundAssignment, ShardingStrategy};
use shardwise_engine::{EngineError, EventKind, ParamStatus, UnitId};

/// A call that does not fit the state is an error that names the unit, the state and the call.
#[test]
fn calls_out_of_order_are_refused() {
    threads::run(1, DEADLINE, |group| {
        let mut engine = Toy::new(2).engine(group, config(ShardingStrategy::FullShard, ADAMW));
        let refused = |error: EngineError, state: &str, call: &str| {
            let text = error.to_string();
            assert!(
                text.contains(&format!("{call} of unit `root`")) && text.contains(&format!("state {state}")),
                "{text}"
            );
        };
        refused(engine.begin_round().expect_err("no step"), "Idle", "begin_round");
        refused(engine.end_step(0.1).expect_err("no step"), "Idle", "end_step");
        refused(engine.end_evaluation().expect_err("none"), "Idle", "end_evaluation");
        engine.begin_step(2).expect("idle");
        refused(engine.begin_step(2).expect_err("in a step"), "Step", "begin_step");
        refused(engine.end_step(0.1).expect_err("rounds left"), "Step", "end_step");
        refused(
            engine.edit_owned(UnitId::ROOT, 0, 0..1, |_| ()).expect_err("in a step"),
            "Step",
            "edit_owned",
        );
        engine.begin_round().expect("a round");
        refused(engine.end_step(0.1).expect_err("in a round"), "Round", "end_step");
        refused(
            engine.with_full_params(UnitId::ROOT, |_, _| ()).expect_err("in a round"),
            "Round",
            "with_full_params",
        );
        compute_round(&mut engine, 0).expect("a round");
        engine.begin_round().expect("a round");
        compute_round(&mut engine, 1).expect("a round");
        refused(engine.begin_round().expect_err("all rounds are done"), "Step", "begin_round");
        engine.end_step(0.1).expect("a whole step");
    })
    .expect("a world");
}

#[test]
fn a_unit_called_outside_a_step_is_a_bug_of_the_caller() {
    let outcome = std::panic::catch_unwind(|| {
        threads::run(1, DEADLINE, |group| {
            Toy::new(1)
                .engine(group, config(ShardingStrategy::FullShard, ADAMW))
                .enter_forward(UnitId::unit(0));
        })
    });
    let message = *outcome.expect_err("it panics").downcast::<String>().expect("a message");
    assert!(message.contains("forward of unit `blocks.0`") && message.contains("state Idle"), "{message}");
}

#[test]
fn fewer_micro_batches_than_ranks_are_refused() {
    threads::run(3, DEADLINE, |group| {
        let mut engine = Toy::new(1).engine(group, config(ShardingStrategy::FullShard, ADAMW));
        let text = engine.begin_step(2).expect_err("2 for 3").to_string();
        assert!(text.contains("2 micro-batches") && text.contains("3 ranks"), "{text}");
    })
    .expect("a world");
}

/// L11 and reported bug G7: a unit used three times in one forward is reduced once, and its gradient is the sum.
#[test]
fn a_unit_used_several_times_is_reduced_once() {
    for strategy in STRATEGIES {
        for prefetch in [true, false] {
            let config = shardwise_engine::EngineConfig { prefetch, ..config(strategy, ADAMW) };
            let (a, b) = (UnitId::unit(0), UnitId::unit(1));
            let results = threads::run(2, DEADLINE, |group| {
                let mut engine = Toy::new(2).engine(group, config);
                for _ in 0..3 {
                    engine.begin_step(2).expect("idle");
                    let RoundAssignment::Compute(m) = engine.begin_round().expect("a round") else {
                        unreachable!()
                    };
                    for unit in [a, b, a, a] {
                        engine.enter_forward(unit);
                        engine.leave_forward(unit);
                    }
                    for unit in [a, a, b, a] {
                        engine.enter_backward(unit);
                        write_gradients(&mut engine, unit, m);
                        engine.leave_backward(unit);
                    }
                    write_gradients(&mut engine, UnitId::ROOT, m);
                    engine.end_round().expect("a round");
                    engine.end_step(0.05).expect("a step");
                }
                let flat = full(&mut engine, a);
                (flat, engine.ledger().allocations())
            })
            .expect("a world");
            assert_eq!(results[0], results[1], "{strategy}");
            assert_ne!(results[0].0, train(&Toy::new(2), 2, 2, config, 3)[0].0[1], "three uses are not one");
        }
    }
}

/// An order of units that changes from step to step costs the prefetch, not the result.
#[test]
fn another_order_of_units_gives_the_same_result() {
    let toy = Toy::new(3);
    let config = config(ShardingStrategy::FullShard, ADAMW);
    let want = train(&toy, 2, 2, config, 3)[0].0.clone();
    let got = threads::run(2, DEADLINE, |group| {
        let mut engine = toy.engine(group, config);
        for order in [[0, 1, 2], [2, 0, 1], [1, 2, 0]] {
            engine.begin_step(2).expect("idle");
            let RoundAssignment::Compute(m) = engine.begin_round().expect("a round") else { unreachable!() };
            for unit in order.map(UnitId::unit) {
                engine.enter_forward(unit);
                engine.leave_forward(unit);
            }
            for unit in order.map(UnitId::unit).into_iter().rev() {
                engine.enter_backward(unit);
                write_gradients(&mut engine, unit, m);
                engine.leave_backward(unit);
            }
            write_gradients(&mut engine, UnitId::ROOT, m);
            engine.end_round().expect("a round");
            engine.end_step(0.05).expect("a step");
        }
        full_params(&mut engine)
    })
    .expect("a world");
    assert_eq!(got[0], want);
}

/// L10: a unit that no rank uses has no gradient: no decay, no momentum, no change. One whose output the loss does not
/// need has a zero gradient, and decays.
#[test]
fn unused_units_stay_and_unneeded_ones_get_zeros() {
    for strategy in STRATEGIES {
        threads::run(2, DEADLINE, |group| {
            let mut engine = Toy::new(3).engine(group, config(strategy, ADAMW));
            let before: Vec<Vec<f32>> = (0..3).map(|i| full(&mut engine, UnitId::unit(i))).collect();
            engine.begin_step(2).expect("idle");
            let RoundAssignment::Compute(m) = engine.begin_round().expect("a round") else { unreachable!() };
            for unit in [0, 2].map(UnitId::unit) {
                engine.enter_forward(unit);
                engine.leave_forward(unit);
            }
            engine.enter_backward(UnitId::unit(0));
            write_gradients(&mut engine, UnitId::unit(0), m);
            engine.leave_backward(UnitId::unit(0));
            engine.end_round().expect("a round");
            engine.end_step(0.05).expect("a step");
            let after: Vec<Vec<f32>> = (0..3).map(|i| full(&mut engine, UnitId::unit(i))).collect();
            assert_ne!(after[0], before[0]);
            assert_eq!(after[1], before[1], "unused: untouched");
            // The matrix (15 elements) decays by 1 - lr * weight_decay, the rest stays.
            let keep = (1.0 - 0.05 * 0.1) as f32;
            for (e, (a, b)) in after[2].iter().zip(&before[2]).enumerate() {
                assert_eq!(*a, if e < 15 { b * keep } else { *b }, "element {e}");
            }
        })
        .expect("a world");
    }
}

/// L16 and reported bug B9: a gradient that is not finite is an error on every rank that names the parameter, and
/// nothing is updated.
#[test]
fn a_non_finite_gradient_is_reported_by_every_rank() {
    for (bad, shown) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
        for strategy in STRATEGIES {
            let errors = threads::run(3, DEADLINE, |group| {
                let rank = group.rank();
                let mut engine = Toy::new(2).engine(group, config(strategy, ADAMW));
                let before = full(&mut engine, UnitId::unit(1));
                engine.begin_step(3).expect("idle");
                engine.begin_round().expect("a round");
                let unit = UnitId::unit(1);
                engine.enter_forward(unit);
                engine.leave_forward(unit);
                engine.enter_backward(unit);
                engine.write_gradient(unit, 0, 4, |window, _| {
                    window.fill(1.0);
                    if rank == 1 {
                        window[9] = bad;
                    }
                });
                engine.leave_backward(unit);
                engine.end_round().expect("a round");
                let error = engine.end_step(0.1).expect_err("not finite");
                assert_eq!(full(&mut engine, unit), before);
                compute_step(&mut engine, 3, 0.1).expect("the next step is a new one");
                error.to_string()
            })
            .expect("a world");
            for text in &errors {
                assert!(
                    text.contains("`blocks.1.unused`") && text.contains(shown) && text.contains("step 1"),
                    "{text}"
                );
                assert_eq!(text, &errors[0]);
            }
        }
    }
}

/// After a rank is lost the others finish the round with zeros and then report it, and stay failed.
#[test]
fn a_lost_rank_fails_the_step_on_the_others() {
    let results = threads::run(3, DEADLINE, |group| {
        let rank = group.rank();
        let mut engine = Toy::new(3).engine(group, config(ShardingStrategy::FullShard, ADAMW));
        compute_step(&mut engine, 3, 0.1).expect("a step");
        if rank == 2 {
            engine.begin_step(3).expect("idle");
            return None;
        }
        let error = compute_step(&mut engine, 3, 0.1).expect_err("rank 2 has left");
        assert_eq!(engine.begin_step(3).expect_err("still failed"), error);
        assert_eq!(engine.failure().get(), Some(&error));
        Some(error.to_string())
    })
    .expect("a world");
    for text in results.iter().flatten() {
        assert!(text.contains("rank 2 was lost"), "{text}");
    }
}

/// Evaluation gathers and frees units like a forward, without gradients, in any number of passes.
#[test]
fn evaluation_frees_everything() {
    for strategy in STRATEGIES {
        threads::run(2, DEADLINE, |group| {
            let mut engine = Toy::new(3).engine(group, config(strategy, ADAMW));
            let resident = !strategy.is_sharded();
            for pass in 0..3 {
                engine.begin_evaluation().expect("idle");
                for _ in 0..=pass {
                    for unit in (0..3).map(UnitId::unit) {
                        engine.enter_forward(unit);
                        assert_eq!(engine.parts(unit)[0].status(), ParamStatus::Available);
                        engine.leave_forward(unit);
                        let after = engine.parts(unit)[0].status();
                        assert_eq!(after == ParamStatus::Available, resident, "{strategy}");
                    }
                }
                engine.end_evaluation().expect("ended");
                for id in engine.ids() {
                    let status = engine.parts(id)[0].status();
                    assert_eq!(status == ParamStatus::Available, resident, "{strategy}");
                }
                compute_step(&mut engine, 4, 0.1).expect("a step between");
            }
        })
        .expect("a world");
    }
}

/// Reported bug O5: the parameters without gradient are listed by rank.
#[test]
fn parameters_without_gradient_are_listed_by_rank() {
    let lists = threads::run(2, DEADLINE, |group| {
        let rank = group.rank();
        let mut engine = Toy::new(2).engine(group, config(ShardingStrategy::FullShard, ADAMW));
        for used in [rank, 1 - rank] {
            let unit = UnitId::unit(used);
            engine.begin_step(2).expect("idle");
            engine.begin_round().expect("a round");
            engine.enter_forward(unit);
            engine.leave_forward(unit);
            engine.enter_backward(unit);
            for index in 0..3 {
                engine.write_gradient(unit, 0, index, |window, _| window.fill(1.0));
            }
            engine.leave_backward(unit);
            engine.end_round().expect("a round");
            engine.end_step(0.1).expect("a step");
        }
        engine.params_without_gradient().expect("both ranks")
    })
    .expect("a world");
    let without = |unused: usize, used: usize| {
        let all = ["p0", "p1", "p2", "p3", "unused"].map(|p| format!("blocks.{unused}.{p}"));
        let some = ["p3", "unused"].map(|p| format!("blocks.{used}.{p}"));
        let root = ["root.p0", "root.unused"].map(String::from);
        let blocks =
            if unused < used { [&all[..], &some[..]].concat() } else { [&some[..], &all[..]].concat() };
        [&root[..], &blocks[..]].concat()
    };
    // In the last step rank 0 used unit 1, and rank 1 unit 0.
    assert_eq!(lists, vec![vec![without(0, 1), without(1, 0)]; 2]);
}

/// Reference test 23: the end of a backward that is not due, because the unit has had its last or was not used at all, changes
/// nothing.
#[test]
fn a_backward_that_is_not_due_changes_nothing() {
    let train = |extra: bool| {
        threads::run(2, DEADLINE, |group| {
            let rank = group.rank();
            let mut engine = Toy::new(3).engine(group, config(ShardingStrategy::FullShard, ADAMW));
            let unit = UnitId::unit(1);
            engine.log_events(true);
            engine.begin_step(6).expect("idle");
            for micro_batch in [rank, rank + 2, rank + 4] {
                engine.begin_round().expect("a round");
                engine.enter_forward(unit);
                engine.leave_forward(unit);
                engine.enter_backward(unit);
                write_gradients(&mut engine, unit, micro_batch);
                engine.leave_backward(unit);
                if extra {
                    engine.leave_backward(unit);
                    engine.leave_backward(UnitId::unit(2));
                }
                engine.end_round().expect("a round");
            }
            let report = engine.end_step(0.1).expect("a step");
            let reduced = engine.take_events().iter().filter(|e| e.kind == EventKind::Reduced).count();
            (report, reduced, full_params(&mut engine))
        })
        .expect("a world")
    };
    assert_eq!(train(true), train(false));
}

/// A failure that only one rank has met, inside the graph, ends the step on the others at once, although that rank lives on.
#[test]
fn a_failure_inside_the_graph_is_told_to_all() {
    let done = std::sync::atomic::AtomicBool::new(false);
    let errors = threads::run(2, DEADLINE, |group| {
        let rank = group.rank();
        let mut engine = Toy::new(2).engine(group, config(ShardingStrategy::FullShard, ADAMW));
        engine.begin_step(2).expect("idle");
        engine.begin_round().expect("a round");
        if rank == 1 {
            engine.failure().set(EngineError::Usage("a view was read too late".into())).expect("the first");
        }
        let ended = compute_round(&mut engine, rank).and_then(|()| engine.end_step(0.1).map(drop));
        let error = ended.expect_err("nobody goes on").to_string();
        if rank == 0 {
            done.store(true, std::sync::atomic::Ordering::Release);
        }
        // Leaving would tell rank 0 too.
        while !done.load(std::sync::atomic::Ordering::Acquire) {
            std::thread::yield_now();
        }
        error
    })
    .expect("a world");
    assert_eq!(errors[1], "a view was read too late");
    assert!(errors[0].contains("rank 1") && errors[0].contains("a view was read too late"), "{}", errors[0]);
}
