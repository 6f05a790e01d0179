//! Every optimizer by its name in a configuration: a run learns, and has the same bits on one rank and on several.

mod common;

use common::{golden_config, train};

/// A learning rate at which the tiny model learns in thirty steps.
const RATES: [(&str, f64); 6] =
    [("adamw", 0.003), ("adam", 0.003), ("sgd", 0.05), ("lion", 0.0005), ("adafactor", 0.02), ("muon", 0.01)];

#[test]
fn every_optimizer_trains_alike_on_any_number_of_ranks() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = golden_config("gpt2-tiny", "adamw", &folder.path().join("unused"));
    for (name, lr) in RATES {
        let run = |ranks: usize, strategy: &str| {
            let mut sets = vec![
                format!("train.optimizer={name}"),
                format!("train.lr={lr}"),
                format!("run.ranks={ranks}"),
                format!("shard.strategy={strategy}"),
                "run.steps=12".into(),
            ];
            if name == "lion" {
                sets.push("train.betas=[0.9, 0.99]".into());
            }
            train(&config, &sets, &folder.path().join(format!("{name}-{ranks}-{strategy}")))
        };
        let alone = run(1, "full_shard");
        let (first, last) = (&alone.metrics[0], &alone.metrics[alone.metrics.len() - 1]);
        assert!(last.loss < first.loss - 0.05, "{name}: loss {} -> {}", first.loss, last.loss);
        for (ranks, strategy) in [(2, "full_shard"), (4, "shard_grad_op"), (2, "no_shard")] {
            let sharded = run(ranks, strategy);
            assert_eq!(sharded.weights, alone.weights, "{name} on {ranks} ranks, {strategy}");
        }
    }
}

/// With `train.ema_decay` the average of the weights is written beside them; it lies between the first and the last.
#[test]
fn the_average_is_written_beside_the_model() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = golden_config("gpt2-tiny", "adamw", &folder.path().join("unused"));
    let run = |name: &str, sets: &[&str]| {
        let sets: Vec<String> = sets.iter().map(|s| (*s).to_string()).collect();
        train(&config, &sets, &folder.path().join(name)).weights
    };
    let average = |name: &str| {
        std::fs::read(folder.path().join(name).join("out/model-ema/model.safetensors")).expect("averages")
    };
    let plain = run("plain", &["run.steps=6"]);
    assert!(!folder.path().join("plain/out/model-ema").exists());
    let averaged = run("averaged", &["run.steps=6", "train.ema_decay=0.8"]);
    assert_eq!(averaged, plain, "averaging changes no weight");
    assert_ne!(average("averaged"), plain);
    run("two", &["run.steps=6", "train.ema_decay=0.8", "run.ranks=2"]);
    assert_eq!(average("two"), average("averaged"), "the same on two ranks");
    run("none", &["run.steps=6", "train.ema_decay=0.0"]);
    assert_eq!(average("none"), plain, "an average of the last weights only");
}

/// `train.step_in_backward` changes memory, and no bit.
#[test]
fn the_step_inside_backward_changes_no_bit() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = golden_config("gpt2-tiny", "sgd", &folder.path().join("unused"));
    for (ranks, precision) in [(1, "f32"), (2, "bf16")] {
        let run = |inside: bool| {
            let sets = [
                format!("run.ranks={ranks}"),
                format!("train.micro_batch={}", 8 / ranks),
                format!("shard.param_dtype={precision}"),
                format!("train.step_in_backward={inside}"),
                "run.steps=5".to_string(),
            ];
            let trained = train(&config, &sets, &folder.path().join(format!("{ranks}-{inside}")));
            (trained.weights, trained.metrics.iter().map(|m| m.grad_norm.to_bits()).collect::<Vec<_>>())
        };
        assert_eq!(run(true), run(false), "{ranks} ranks, {precision}");
    }
}
