//! The step inside backward: the same bits with one gradient shard for all units, and refusals where it cannot be.

mod common;

use common::{
    ADAFACTOR, ADAM, ADAMW, DEADLINE, LION, MOMENTUM, SGD, Toy, compute_round, config, full_params,
};
use common::{compute_step, write_gradients};
use shardwise_comm::threads;
use shardwise_core::{FlatLayout, MixedPrecision, Purpose, RoundAssignment, ShardingStrategy};
use shardwise_engine::{
    Divisor, DynamicScale, Engine, EngineConfig, EngineError, EventKind, LossScale, NonFinite,
    OptimizerConfig, StepReport, UnitId,
};

use ShardingStrategy::{FullShard, HybridShard, NoShard, ShardGradOp};

/// Strategies, ranks and groups with what travels: one rank in f32, several in bf16.
fn layouts() -> Vec<(ShardingStrategy, usize, Option<usize>, MixedPrecision)> {
    let (f32s, bf16) = (MixedPrecision::default(), MixedPrecision::BF16);
    vec![
        (FullShard, 1, None, f32s),
        (NoShard, 1, None, f32s),
        (ShardGradOp, 1, None, bf16),
        (FullShard, 2, None, bf16),
        (FullShard, 3, None, bf16),
        (ShardGradOp, 4, None, bf16),
        (HybridShard, 4, Some(2), bf16),
    ]
}

fn step(engine: &mut Engine, ranks: usize) -> Result<StepReport, EngineError> {
    engine.begin_step_at(ranks, 0.05)?;
    match engine.begin_round()? {
        RoundAssignment::Compute(m) => compute_round(engine, m)?,
        RoundAssignment::Idle => engine.idle_round()?,
    }
    engine.end_step(0.05)
}

/// The gradients depend on the parameters that a unit gathers, so an update that came too early would show.
#[test]
fn weights_have_the_same_bits() {
    for (strategy, ranks, shard_group, precision) in layouts() {
        for optimizer in [ADAMW, ADAM, MOMENTUM, SGD, LION] {
            let run = |step_in_backward| {
                threads::run(ranks, DEADLINE, |group| {
                    let config = EngineConfig {
                        shard_group,
                        precision,
                        step_in_backward,
                        clip_norm: None,
                        ema_decay: Some(0.9),
                        ..config(strategy, optimizer)
                    };
                    let toy = Toy { frozen: vec![vec![4, 2], vec![3]], ..Toy::new(4) };
                    let mut engine = toy.engine(group, config);
                    let norms: Vec<u64> = (0..4)
                        .map(|_| step(&mut engine, ranks).expect("a step").grad_norm.to_bits())
                        .collect();
                    let weights = full_params(&mut engine);
                    engine.swap_averages().expect("idle");
                    let bits = |params: Vec<Vec<f32>>| -> Vec<u32> {
                        params.into_iter().flatten().map(f32::to_bits).collect()
                    };
                    (norms, bits(weights), bits(full_params(&mut engine)))
                })
                .expect("a world")
            };
            assert_eq!(run(true), run(false), "{strategy} {ranks} {optimizer:?}");
        }
    }
}

/// A unit is updated while others have their backward still to come, and one gradient shard serves all: the plan, to the
/// byte.
#[test]
fn one_gradient_shard_serves_all_units() {
    for (strategy, ranks, shard_group, precision) in layouts() {
        let config = EngineConfig {
            shard_group,
            precision,
            step_in_backward: true,
            clip_norm: None,
            ..config(strategy, ADAMW)
        };
        let toy = Toy::new(4);
        let sharers = config.shard_group_size(ranks).expect("groups that fit");
        let (root, units) = toy.layouts(sharers);
        let layouts: Vec<&FlatLayout> = root.iter().chain(units.iter().flatten()).collect();
        let plan = toy.plan(ranks, ranks, &config);
        let largest = layouts.iter().map(|layout| layout.shard_numel()).max().expect("layouts");
        assert_eq!(plan.bytes(Purpose::GradientShards), 4 * largest as u64);
        threads::run(ranks, DEADLINE, |group| {
            let mut engine = toy.engine(group, config);
            step(&mut engine, ranks).expect("a step");
            engine.log_events(true);
            step(&mut engine, ranks).expect("a step");
            for purpose in Purpose::ALL {
                assert_eq!(
                    engine.ledger().peak(purpose),
                    plan.bytes(purpose),
                    "{strategy} {ranks}: {purpose}"
                );
            }
            let events = engine.take_events();
            let at = |unit, kind| {
                events.iter().position(|e| e.unit == unit && e.kind == kind).expect("it happened")
            };
            let (last, first) = (UnitId::unit(3), UnitId::unit(0));
            assert!(at(last, EventKind::Updated) < at(first, EventKind::Backward), "{events:?}");
            let updated = events.iter().filter(|e| e.kind == EventKind::Updated).count();
            assert_eq!(updated, 5, "every unit and the root, once");
        })
        .expect("a world");
    }
}

/// What cannot be had is refused when the engine is built, with the reason.
#[test]
fn impossible_settings_are_refused() {
    let good = EngineConfig {
        precision: MixedPrecision::BF16,
        step_in_backward: true,
        clip_norm: None,
        ..config(FullShard, ADAMW)
    };
    let cases = [
        (EngineConfig { clip_norm: Some(1.0), ..good }, "leave clip_norm out"),
        (
            EngineConfig { loss_scale: LossScale::Dynamic(DynamicScale::default()), ..good },
            "dynamic loss scale",
        ),
        (EngineConfig { non_finite: NonFinite::Skip, ..good }, "set non_finite to \"error\""),
        (EngineConfig { divisor: Divisor::Weights, ..good }, "sum of weights"),
        (EngineConfig { optimizer: ADAFACTOR, ..good }, "choose another optimizer"),
        (EngineConfig { optimizer: OptimizerConfig::MUON, ..good }, "choose another optimizer"),
        (EngineConfig { strategy: NoShard, ..good }, "choose a strategy that shards"),
        (EngineConfig { precision: MixedPrecision::default(), ..good }, "set param_dtype to bf16 or f16"),
    ];
    for (config, words) in cases {
        threads::run(2, DEADLINE, |group| {
            let (root, units) = Toy::new(2).layouts(2);
            let error = Engine::new(group, root, units, config).expect_err("refused");
            let text = error.to_string();
            assert!(text.contains("step_in_backward cannot be had") && text.contains(words), "{text}");
        })
        .expect("a world");
    }
    threads::run(2, DEADLINE, |group| {
        let mut engine = Toy::new(2).engine(group, good);
        let refused = |error: EngineError, words: &str| assert!(error.to_string().contains(words), "{error}");
        refused(compute_step(&mut engine, 2, 0.1).expect_err("no rate"), "begin_step_at");
        refused(engine.begin_step_at(6, 0.1).expect_err("three rounds"), "6 on 2 ranks");
        step(&mut engine, 2).expect("a step");
    })
    .expect("a world");
}

/// A gradient that is not finite ends the run on every rank, and says that other parameters have changed.
#[test]
fn a_gradient_that_is_not_finite_ends_the_run() {
    threads::run(2, DEADLINE, |group| {
        let (rank, precision) = (group.rank(), MixedPrecision::BF16);
        let config =
            EngineConfig { precision, step_in_backward: true, clip_norm: None, ..config(FullShard, ADAMW) };
        let mut engine = Toy::new(2).engine(group, config);
        engine.begin_step_at(2, 0.1).expect("idle");
        engine.begin_round().expect("a round");
        for unit in [0, 1].map(UnitId::unit) {
            engine.enter_forward(unit);
            engine.leave_forward(unit);
        }
        for unit in [1, 0].map(UnitId::unit) {
            engine.enter_backward(unit);
            write_gradients(&mut engine, unit, rank);
            if unit == UnitId::unit(1) && rank == 1 {
                engine.write_gradient(unit, 0, 1, |window, _| window[2] = f32::NAN);
            }
            engine.leave_backward(unit);
        }
        engine.end_round().expect("a round");
        let error = engine.end_step(0.1).expect_err("not finite");
        assert!(matches!(error, EngineError::NonFiniteInBackward { .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.contains("`blocks.1.p1`") && text.contains("changed already"), "{text}");
        let again = engine.begin_step_at(2, 0.1).expect_err("still failed");
        assert_eq!(again.to_string(), text);
    })
    .expect("a world");
}

/// A unit that is called again after its backward would compute with, and change, what has been updated.
#[test]
fn a_unit_is_not_used_after_its_update() {
    for order in [&[1, 0, 1][..], &[1, 1]] {
        threads::run(1, DEADLINE, |group| {
            let config = EngineConfig { step_in_backward: true, clip_norm: None, ..config(FullShard, ADAMW) };
            let mut engine = Toy::new(2).engine(group, config);
            engine.begin_step_at(1, 0.1).expect("idle");
            engine.begin_round().expect("a round");
            for unit in order.iter().map(|unit| UnitId::unit(*unit)) {
                engine.enter_forward(unit);
                engine.leave_forward(unit);
                engine.enter_backward(unit);
                write_gradients(&mut engine, unit, 0);
                engine.leave_backward(unit);
            }
            let error = engine.end_round().expect_err("used again");
            let text = error.to_string();
            assert!(text.contains("`blocks.1`") && text.contains("leave step_in_backward out"), "{text}");
        })
        .expect("a world");
    }
}
