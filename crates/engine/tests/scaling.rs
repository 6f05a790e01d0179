//! What the summed gradient is divided by, and what happens when it is not finite: loss scales, skipped steps, weights.

mod common;

use common::{ADAMW, DEADLINE, SGD, STRATEGIES, Toy, compute_step, config, full_params};
use shardwise_comm::{ProcessGroup, threads};
use shardwise_core::{MixedPrecision, Precision, ShardingStrategy};
use shardwise_engine::{
    Divisor, DynamicScale, Engine, EngineConfig, EngineError, LossScale, MAX_SKIPS, NonFinite, StepReport,
    UnitId,
};

/// One step in which every element of unit 0 gets this gradient from a rank; the other units are not used.
fn step(engine: &mut Engine, gradient: f32, weight: f64) -> Result<StepReport, EngineError> {
    let (ranks, unit) = (engine.group().size(), UnitId::unit(0));
    engine.begin_step(ranks)?;
    engine.begin_round()?;
    engine.enter_forward(unit);
    engine.leave_forward(unit);
    engine.enter_backward(unit);
    let scale = engine.loss_scale() as f32;
    for index in 0..engine.parts(unit)[0].layout().params().len() {
        engine.write_gradient(unit, 0, index, |window, _| window.fill(gradient * scale));
    }
    engine.leave_backward(unit);
    engine.add_weight(weight);
    engine.end_round()?;
    engine.end_step(1.0)
}

fn sgd() -> EngineConfig {
    EngineConfig { clip_norm: None, ..config(ShardingStrategy::FullShard, SGD) }
}

fn engine(group: ProcessGroup, config: EngineConfig) -> Engine {
    Toy::new(2).engine(group, config)
}

/// The change of unit 0's first element in one step of SGD with rate 1: its averaged gradient.
fn averaged(config: EngineConfig, of_rank: &[(f32, f64)]) -> f32 {
    let results = threads::run(of_rank.len(), DEADLINE, |group| {
        let (gradient, weight) = of_rank[group.rank()];
        let mut engine = engine(group, config);
        let before = full_params(&mut engine)[1][0];
        step(&mut engine, gradient, weight).expect("a step");
        before - full_params(&mut engine)[1][0]
    })
    .expect("a world");
    assert!(results.iter().all(|r| *r == results[0]));
    results[0]
}

/// Reported bugs A1 and A2: a custom divisor gives the sum over it, on every mesh and wire.
#[test]
fn a_custom_divisor_divides_the_sum() {
    let gradients = [(300.0, 1.0), (600.0, 1.0), (900.0, 1.0), (1200.0, 1.0)];
    for (strategy, shard_group) in [
        (ShardingStrategy::FullShard, None),
        (ShardingStrategy::NoShard, None),
        (ShardingStrategy::HybridShard, Some(2)),
        (ShardingStrategy::HybridShard, Some(1)),
        (ShardingStrategy::HybridShardZero2, Some(4)),
    ] {
        for (reduce_dtype, loss_scale) in [
            (Precision::F32, LossScale::None),
            (Precision::Bf16, LossScale::None),
            (Precision::F16, LossScale::Static(2.0)),
        ] {
            let precision = MixedPrecision { reduce_dtype, ..MixedPrecision::default() };
            let divisor = Divisor::Custom(300.0);
            let config = EngineConfig { strategy, shard_group, divisor, precision, loss_scale, ..sgd() };
            let got = averaged(config, &gradients);
            let rounding = if reduce_dtype == Precision::F32 { 1e-5 } else { 0.02 };
            assert!((got - 10.0).abs() <= rounding, "{strategy} {shard_group:?} {reduce_dtype}: {got}");
        }
    }
}

/// Reference test 39: losses that are sums, divided by the number of all tokens, are the mean over all tokens.
#[test]
fn weights_are_a_global_denominator() {
    let config = EngineConfig { divisor: Divisor::Weights, ..sgd() };
    // 5 tokens with gradient 2 each, and 3 with 4: the mean over 8 tokens.
    let got = averaged(config, &[(10.0, 5.0), (12.0, 3.0), (0.0, 0.0)]);
    assert!((got - 22.0 / 8.0).abs() <= 1e-6, "{got}");
    let errors = threads::run(2, DEADLINE, |group| {
        step(&mut engine(group, config), 1.0, 0.0).expect_err("no weight at all").to_string()
    });
    for text in errors.expect("a world") {
        assert!(text.contains("weights of step 1 add up to 0") && text.contains("add_weight"), "{text}");
    }
}

/// A loss scale that is a power of two changes no bit of an f32 run.
#[test]
fn a_loss_scale_leaves_no_trace() {
    let run = |loss_scale| {
        let train = |group| {
            let mut engine =
                engine(group, EngineConfig { loss_scale, ..config(ShardingStrategy::FullShard, ADAMW) });
            let norms: Vec<f64> =
                (0..3).map(|_| compute_step(&mut engine, 4, 0.1).expect("a step").grad_norm).collect();
            (norms, full_params(&mut engine))
        };
        threads::run(2, DEADLINE, train).expect("a world")
    };
    let plain = run(LossScale::None);
    assert_eq!(plain, run(LossScale::Static(4096.0)));
    assert_eq!(plain, run(LossScale::Dynamic(DynamicScale { window: 2, ..DynamicScale::default() })));
}

/// Reference test 37, reported bugs C9 and C11: an overflow on any rank, in whoever's shard it lies, skips the step and
/// lowers the scale on all, a rank without elements of its own included.
#[test]
fn an_overflow_on_one_rank_skips_the_step_on_all() {
    for strategy in STRATEGIES {
        for bad_rank in 0..3 {
            let dynamic = DynamicScale { initial: 1024.0, ..DynamicScale::default() };
            let config = EngineConfig { strategy, loss_scale: LossScale::Dynamic(dynamic), ..sgd() };
            let results = threads::run(3, DEADLINE, |group| {
                let rank = group.rank();
                let tiny =
                    Toy { root: vec![], units: vec![vec![vec![1]]], last_unused: false, ..Toy::new(0) };
                let mut engine = tiny.engine(group, config);
                let before = full_params(&mut engine);
                let bad = if rank == bad_rank { f32::INFINITY } else { 1.0 };
                let skipped = step(&mut engine, bad, 1.0).expect("skipped");
                assert_eq!(full_params(&mut engine), before, "nothing is updated");
                let element = skipped.skipped.expect("the element");
                assert_eq!((element.rank, element.path.as_str()), (0, "blocks.0.p0"));
                assert_eq!((skipped.step, skipped.updates, skipped.loss_scale), (1, 0, 1024.0));
                let applied = step(&mut engine, 1.0, 1.0).expect("a step");
                assert_eq!(applied.skipped, None);
                assert_eq!((applied.step, applied.updates, applied.loss_scale), (2, 1, 512.0));
                full_params(&mut engine)
            })
            .expect("a world");
            assert!(results.iter().all(|r| *r == results[0]), "{strategy}");
        }
    }
}

/// Reported bugs B9 and C12: the named policies.
#[test]
fn policies_for_gradients_that_are_not_finite() {
    let run = |non_finite, gradient: f32| {
        threads::run(2, DEADLINE, move |group| {
            let rank = group.rank();
            let mut engine = engine(group, EngineConfig { non_finite, ..sgd() });
            let before = full_params(&mut engine);
            let results: Vec<_> = (0..MAX_SKIPS)
                .map(|_| {
                    step(&mut engine, if rank == 1 { gradient } else { 1.0 }, 1.0).map_err(|e| e.to_string())
                })
                .collect();
            (results, before == full_params(&mut engine))
        })
        .expect("a world")
    };
    for (results, unchanged) in run(NonFinite::Error, f32::NAN) {
        let text = results[0].as_ref().expect_err("an error");
        assert!(text.contains("`blocks.0.p0`") && text.contains("NaN") && text.contains("step 1"), "{text}");
        assert!(unchanged);
    }
    for (results, unchanged) in run(NonFinite::Skip, f32::NAN) {
        assert!(unchanged);
        let (last, skipped) = results.split_last().expect("steps");
        assert!(skipped.iter().all(|r| r.as_ref().is_ok_and(|r| r.skipped.is_some() && r.updates == 0)));
        let text = last.as_ref().expect_err("too many");
        for words in ["50 steps in a row", "`blocks.0.p0`", "on rank 0", "loss scale 1"] {
            assert!(text.contains(words), "{text}");
        }
    }
    for (results, unchanged) in run(NonFinite::Zero, f32::NAN) {
        let report = results[0].as_ref().expect("a step");
        assert!(unchanged && report.skipped.is_none() && report.grad_norm == 0.0, "every element was bad");
    }
    assert!(run(NonFinite::Zero, 1.0).iter().all(|(_, unchanged)| !unchanged));
}

/// Reported bug C6: what cannot work is refused when the engine is built, with what would work.
#[test]
fn settings_that_contradict_each_other_are_refused() {
    let f16 = MixedPrecision { reduce_dtype: Precision::F16, ..MixedPrecision::default() };
    let keep = MixedPrecision { keep_low_precision_grads: true, ..MixedPrecision::default() };
    let hybrid = EngineConfig { strategy: ShardingStrategy::HybridShard, ..sgd() };
    let cases = [
        (EngineConfig { precision: f16, ..sgd() }, "reduce_dtype is f16"),
        (
            EngineConfig { precision: keep, ..sgd() },
            "keep_low_precision_grads is set but reduce_dtype is f32",
        ),
        (EngineConfig { loss_scale: LossScale::Static(-1.0), ..sgd() }, "loss_scale is -1"),
        (EngineConfig { divisor: Divisor::Custom(0.0), ..sgd() }, "divisor is 0"),
        (hybrid, "shard_group is not set"),
        (EngineConfig { shard_group: Some(3), ..hybrid }, "shard_group = 3 does not divide the 4 ranks"),
        (EngineConfig { shard_group: Some(0), ..hybrid }, "shard_group = 0 does not divide the 4 ranks"),
        (EngineConfig { shard_group: Some(2), ..sgd() }, "strategy full_shard has no groups"),
    ];
    for (config, words) in cases {
        let errors = threads::run(4, DEADLINE, |group| {
            let (root, units) = Toy::new(1).layouts(4);
            Engine::new(group, root, units, config).expect_err("refused").to_string()
        });
        for text in errors.expect("a world") {
            assert!(text.contains(words), "{text}");
        }
    }
}

/// Reported bugs B1, B2 and B11: the report says the norm before clipping, the coefficient and whether it cut anything; equal
/// on all ranks and for every number of them.
#[test]
fn the_report_says_whether_the_gradient_was_clipped() {
    // Every element of unit 0 has gradient 3 in every micro-batch.
    let elements = 38.0f64;
    let norm = (elements * 9.0).sqrt();
    for ranks in [1, 2, 4] {
        for (clip_norm, clipped) in [(None, false), (Some(1e9), false), (Some(2.0), true)] {
            let config = EngineConfig { clip_norm, ..sgd() };
            let reports = threads::run(ranks, DEADLINE, |group| step(&mut engine(group, config), 3.0, 1.0));
            for report in reports.expect("a world") {
                let report = report.expect("a step");
                assert!(
                    (report.grad_norm - norm).abs() < 1e-12 * norm,
                    "{ranks} ranks: {}",
                    report.grad_norm
                );
                let coefficient = if clipped { (2.0 / (norm + 1e-6)) as f32 } else { 1.0 };
                assert_eq!((report.is_clipped(), report.clip_coefficient), (clipped, coefficient));
            }
        }
    }
}

/// A step that cannot be ended, because its weights add up to nothing, is dropped: the next one is a step like any other.
#[test]
fn a_step_that_cannot_be_ended_is_dropped() {
    let config = EngineConfig { divisor: Divisor::Weights, ..sgd() };
    let run = |broken: bool| {
        threads::run(2, DEADLINE, move |group| {
            let mut engine = engine(group, config);
            if broken {
                let error = step(&mut engine, 7.0, 0.0).expect_err("no weights").to_string();
                assert!(error.contains("add up to 0"), "{error}");
            }
            step(&mut engine, 3.0, 2.0).expect("a step");
            full_params(&mut engine)
        })
        .expect("a world")
    };
    assert_eq!(run(true), run(false));
}

/// A loss scale that grows without an overflow stops before the divisor leaves f32; a divisor beyond it is refused.
#[test]
fn no_divisor_leaves_f32() {
    let dynamic = DynamicScale { initial: 1e18, window: 1, factor: 1e6, ..DynamicScale::default() };
    let config = EngineConfig { loss_scale: LossScale::Dynamic(dynamic), ..sgd() };
    let run = |group| {
        let mut engine = engine(group, config);
        for _ in 0..5 {
            let report = step(&mut engine, 1e-20, 1.0).expect("a step");
            assert!(report.grad_norm > 0.0 && report.loss_scale <= 2f64.powi(64), "{report:?}");
        }
    };
    threads::run(2, DEADLINE, run).expect("a world");
    let huge = EngineConfig { divisor: Divisor::Custom(1e39), ..sgd() };
    assert!(huge.check().expect_err("no f32").to_string().contains("divisor"));
}
