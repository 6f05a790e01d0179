//! The average of the weights over steps, kept on shards.

mod common;

use std::collections::BTreeMap;

use common::given::{Given, params};
use common::{ADAMW, DEADLINE, STRATEGIES, config};
use shardwise_comm::threads;
use shardwise_engine::{Engine, EngineConfig, EngineError, ParamGroups};

fn model() -> Given {
    Given::formula(vec![
        vec![("embed", vec![7, 3]), ("norm", vec![2])],
        vec![("a", vec![13, 5]), ("b", vec![5]), ("none", vec![0]), ("one", vec![1])],
        vec![("single", vec![1])],
    ])
}

type Bits = BTreeMap<String, Vec<u32>>;

fn bits(engine: &mut Engine) -> Bits {
    let bits = |(path, values): (String, Vec<f32>)| (path, values.into_iter().map(f32::to_bits).collect());
    params(engine).into_iter().map(bits).collect()
}

/// The average follows PyTorch's rule, has the same bits on any number of ranks, and changes places with the weights and
/// back without touching training.
#[test]
fn averages_equal_the_reference() {
    const DECAY: f64 = 0.9;
    let given = model();
    let mut alone: Option<(Bits, Bits)> = None;
    for strategy in STRATEGIES {
        for ranks in [1, 2, 4] {
            let all = threads::run(ranks, DEADLINE, |group| {
                let config = EngineConfig { ema_decay: Some(DECAY), ..config(strategy, ADAMW) };
                let mut engine = given.engine(group, config, &ParamGroups::new());
                let mut want: Option<BTreeMap<String, Vec<f64>>> = None;
                for _ in 0..4 {
                    given.step(&mut engine, 4, 0.05);
                    let weights = params(&mut engine);
                    let first = || {
                        let wide = |v: &Vec<f32>| v.iter().map(|v| f64::from(*v)).collect();
                        weights.iter().map(|(path, v)| (path.clone(), wide(v))).collect()
                    };
                    let mut average = want.take().unwrap_or_else(first);
                    for (path, values) in &mut average {
                        let pairs = values.iter_mut().zip(&weights[path]);
                        pairs.for_each(|(a, p)| *a += (1.0 - DECAY) * (f64::from(*p) - *a));
                    }
                    engine.swap_averages().expect("idle");
                    assert!(engine.averages_are_swapped());
                    for (path, values) in params(&mut engine) {
                        for (got, want) in values.iter().zip(&average[&path]) {
                            assert!((f64::from(*got) - want).abs() < 1e-6, "{path}: {got} {want}");
                        }
                    }
                    engine.swap_averages().expect("idle");
                    assert_eq!(params(&mut engine), weights);
                    want = Some(average);
                }
                let weights = bits(&mut engine);
                engine.swap_averages().expect("idle");
                (weights, bits(&mut engine))
            })
            .expect("a world");
            for both in all {
                assert_eq!(alone.get_or_insert_with(|| both.clone()), &both, "{strategy} {ranks}");
            }
        }
    }
}

/// Averaging does not change the weights.
#[test]
fn training_is_the_same_with_and_without_averages() {
    let given = model();
    let run = |ema_decay| {
        threads::run(2, DEADLINE, |group| {
            let config = EngineConfig { ema_decay, ..config(STRATEGIES[0], ADAMW) };
            let mut engine = given.engine(group, config, &ParamGroups::new());
            for _ in 0..3 {
                given.step(&mut engine, 4, 0.05);
            }
            bits(&mut engine)
        })
        .expect("a world")
    };
    assert_eq!(run(None), run(Some(0.5)));
}

/// While averages are in the weights' place, evaluation works and a step is refused; so is a decay that is none.
#[test]
fn misuse_is_refused() {
    let given = model();
    threads::run(2, DEADLINE, |group| {
        let config = EngineConfig { ema_decay: Some(0.9), ..config(STRATEGIES[0], ADAMW) };
        let mut engine = given.engine(group, config, &ParamGroups::new());
        let initial = bits(&mut engine);
        engine.swap_averages().expect("idle");
        assert_eq!(bits(&mut engine), initial, "nothing has been averaged");
        engine.swap_averages().expect("idle");
        given.step(&mut engine, 2, 0.1);
        engine.swap_averages().expect("idle");
        engine.begin_evaluation().expect("idle");
        engine.end_evaluation().expect("an evaluation");
        let error = engine.begin_step(2).expect_err("averages are in place");
        let text = error.to_string();
        assert!(text.contains("begin_step") && text.contains("swap_averages"), "{text}");
        engine.swap_averages().expect("idle");
        engine.begin_step(2).expect("the weights are back");
        let error = engine.swap_averages().expect_err("in a step");
        assert!(matches!(error, EngineError::State { .. }), "{error:?}");
    })
    .expect("a world");
    threads::run(1, DEADLINE, |group| {
        let (root, units) = given.layouts(1);
        let config = EngineConfig { ema_decay: Some(1.5), ..config(STRATEGIES[0], ADAMW) };
        let error = Engine::new(group, root, units, config).expect_err("refused");
        assert!(error.to_string().contains("ema_decay is 1.5"), "{error}");
    })
    .expect("a world");
}
