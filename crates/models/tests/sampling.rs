//! Tokens drawn from logits: the likeliest, by chance but repeatable, among the top.

mod common;

use burn::tensor::Device;
use common::{DEADLINE, FIXTURES, config, data, ids, on_one_thread, optimizer, whole_model};
use shardwise_burn::ShardedModel;
use shardwise_comm::threads;
use shardwise_models::{CausalLm, ModelError, Sampler, WeightsFolder};

fn sampler(temperature: f64, top_k: Option<usize>, seed: u64) -> Sampler {
    Sampler::new(temperature, top_k, seed).expect("possible settings")
}

/// How often each token is drawn.
fn counts(mut sampler: Sampler, logits: &[f32], draws: usize) -> Vec<usize> {
    let mut counts = vec![0; logits.len()];
    for _ in 0..draws {
        counts[sampler.sample(logits).expect("a token") as usize] += 1;
    }
    counts
}

#[test]
fn without_temperature_the_likeliest_token_is_taken() {
    let mut greedy = sampler(0.0, None, 1);
    assert_eq!(greedy.sample(&[0.5, 2.0, -1.0, 2.0]).expect("a token"), 1, "the first of equals");
    assert_eq!(greedy.sample(&[f32::NEG_INFINITY, -3.0]).expect("a token"), 1);
    assert_eq!(counts(sampler(0.7, Some(1), 1), &[0.5, 1.0, 2.0], 50), [0, 0, 50]);
}

#[test]
fn tokens_are_drawn_by_their_probability() {
    let logits = [0.0, 1.0, f32::NEG_INFINITY, 2.0];
    for temperature in [0.5, 1.0, 3.0] {
        let counts = counts(sampler(temperature, None, 5), &logits, 20_000);
        let weights = logits.map(|logit| (f64::from(logit) / temperature).exp());
        let total: f64 = weights.iter().sum();
        for (count, weight) in counts.iter().zip(weights) {
            let difference = *count as f64 / 20_000.0 - weight / total;
            assert!(difference.abs() < 0.015, "temperature {temperature}: {counts:?}");
        }
        assert_eq!(counts[2], 0);
    }
}

#[test]
fn only_the_top_tokens_are_drawn() {
    let logits = [1.0, 3.0, 2.0, 2.0, 0.0];
    assert!(counts(sampler(1.0, Some(2), 3), &logits, 500)[3..].iter().all(|count| *count == 0));
    assert!(counts(sampler(1.0, Some(3), 3), &logits, 500)[1..4].iter().all(|count| *count > 0));
    let all = counts(sampler(1.0, None, 3), &logits, 500);
    assert_eq!(counts(sampler(1.0, Some(99), 3), &logits, 500), all, "more than there are");
}

/// A model of a kind: the next token depends on the last two.
fn logits(tokens: &[u32]) -> Result<Vec<f32>, ModelError> {
    let sum: u32 = tokens.iter().rev().take(2).sum();
    Ok((0..11).map(|token| ((token * 7 + sum * 5) % 11) as f32 / 4.0).collect())
}

#[test]
fn the_same_seed_draws_the_same_text() {
    let text = |seed| sampler(1.0, Some(5), seed).generate(&[1, 2], 40, 8, logits).expect("a text");
    assert_eq!(text(7), text(7));
    assert_ne!(text(7), text(8));
    assert_eq!(text(7).len(), 40);
}

#[test]
fn the_model_sees_the_last_tokens_of_its_context() {
    let mut seen = Vec::new();
    let text = sampler(0.0, None, 0)
        .generate(&[5, 6, 7], 4, 4, |tokens| {
            seen.push(tokens.to_vec());
            let next = tokens[tokens.len() - 1] + 1;
            Ok::<_, ModelError>((0..20).map(|token| if token == next { 1.0 } else { 0.0 }).collect())
        })
        .expect("a text");
    assert_eq!(text, [8, 9, 10, 11]);
    assert_eq!(seen, [vec![5, 6, 7], vec![5, 6, 7, 8], vec![6, 7, 8, 9], vec![7, 8, 9, 10]]);
}

#[test]
fn impossible_settings_and_logits_say_why() {
    let settings = |temperature, top_k| Sampler::new(temperature, top_k, 0).expect_err("refused").to_string();
    assert!(settings(-0.5, None).contains("`temperature` is -0.5"));
    assert!(settings(f64::NAN, None).contains("`temperature` is NaN"));
    assert!(settings(1.0, Some(0)).contains("`top_k` is 0"));

    let mut sampler = sampler(1.0, None, 0);
    for (logits, expected) in [
        (&[][..], "found none"),
        (&[0.0, f32::NAN], "found NaN for token 1"),
        (&[f32::INFINITY, 0.0], "found inf for token 0"),
        (&[f32::NEG_INFINITY; 2], "found negative infinity for all"),
    ] {
        let error = sampler.sample(logits).expect_err("refused").to_string();
        assert!(error.contains(expected), "{error}");
    }
    assert!(matches!(sampler.generate(&[], 3, 8, logits), Err(ModelError::EmptyPrompt)));
    let failing = sampler.generate(&[1], 3, 8, |_| Err(ModelError::EmptyPrompt));
    assert!(failing.is_err(), "the model's own error is passed on");
}

/// Each rank draws for itself, and what it draws is what the whole model would.
#[test]
fn ranks_that_share_a_model_draw_one_text() {
    let device = Device::flex();
    for fixture in FIXTURES {
        let folder = data(fixture);
        let (config, _) = config(&folder);
        let context = config.max_positions();
        // Longer than the context.
        let text = |logits: &mut dyn FnMut(&[u32]) -> Vec<f32>| {
            sampler(1.0, Some(40), 9)
                .generate(&[3, 1, 4], 80, context, |tokens| Ok::<_, ModelError>(logits(tokens)))
        };
        let whole = on_one_thread(|| {
            let model = whole_model(&folder, &device);
            text(&mut |tokens| model.last_logits(ids(tokens, &device)).into_data().iter().collect())
                .expect("a text")
        });
        let run = |group| {
            let weights = WeightsFolder::open(&folder, &config).expect("weights");
            let module = config.init(&Device::flex().autodiff()).expect("a valid configuration");
            let mut model = ShardedModel::new(group, module, optimizer("sgd").0, &weights).expect("sharded");
            text(&mut |tokens| {
                let logits =
                    model.evaluate(|model| model.last_logits(ids(tokens, &device))).expect("evaluated");
                logits.into_data().iter().collect()
            })
            .expect("a text")
        };
        for drawn in threads::run(2, DEADLINE, |group| on_one_thread(|| run(group))).expect("a world") {
            assert_eq!(drawn, whole, "{fixture}");
        }
    }
}
