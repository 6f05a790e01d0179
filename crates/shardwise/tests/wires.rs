//! Runs whose parameters and gradients travel quantised, or through nodes: how near their losses stay, and what changes no bit.

mod common;

use common::{Trained, golden_config, train};

const NAMES: [&str; 2] = ["gpt2-tiny", "llama-tiny"];

fn last(trained: &Trained) -> f64 {
    trained.metrics.last().expect("steps").loss
}

/// With quantised weights and gradients the fixture models end within 10 % of the plain loss, with error feedback within
/// 5 %; each step tells what quantising took.
#[test]
fn quantised_runs_end_near_the_plain_loss() {
    let folder = tempfile::tempdir().expect("a folder");
    let both = "shard.quantized_weights=true shard.quantized_gradients=true";
    let cases = [
        (0.10, "run.ranks=2", both),
        (
            0.10,
            "run.ranks=4",
            "shard.quantized_weights=true shard.quantized_gradients=true shard.node_size=2",
        ),
        (0.05, "run.ranks=2 shard.error_feedback=true", both),
        (0.05, "run.ranks=4 shard.error_feedback=true shard.node_size=2", both),
        (0.10, "run.ranks=2 shard.quantization_rounding=stochastic", both),
        (0.02, "run.ranks=2", "shard.quantized_weights=int8 shard.quantized_gradients=int8"),
        (0.10, "run.ranks=2 offload.parameters=host offload.optimizer=host offload.buffer_size=1024", both),
    ];
    for name in NAMES {
        let config = golden_config(name, "adamw", &folder.path().join("unused"));
        let run = |settings: &str| {
            let settings: Vec<String> = settings.split(' ').map(String::from).collect();
            train(&config, &settings, &folder.path().join("run"))
        };
        let plain = last(&run("run.ranks=2"));
        for (within, layout, quantised) in cases {
            let trained = run(&format!("{layout} {quantised}"));
            let loss = last(&trained);
            let off = (loss - plain).abs() / plain;
            assert!(off < within, "{name}, {layout} {quantised}: {loss} is {off:.3} from {plain}");
            for metrics in &trained.metrics {
                let (weights, gradients) = (metrics.moved.weight_error, metrics.moved.gradient_error);
                assert!(
                    weights.is_some_and(|e| e > 0.0 && e < 0.02)
                        && gradients.is_some_and(|e| e > 0.0 && e < 0.5),
                    "{name}, {layout}, step {}: errors {weights:?} {gradients:?}",
                    metrics.step
                );
            }
        }
    }
}

/// A second copy of the parameters inside a node changes no bit, with offload neither; nor do nodes.
#[test]
fn nodes_and_second_copies_change_no_bit() {
    let folder = tempfile::tempdir().expect("a folder");
    for name in NAMES {
        let config = golden_config(name, "adamw", &folder.path().join("unused"));
        let run = |settings: &[&str]| {
            let settings: Vec<String> = settings.iter().map(|s| (*s).to_string()).collect();
            train(&config, &settings, &folder.path().join("run"))
        };
        let plain = run(&["run.ranks=4"]);
        assert_eq!(plain.metrics[0].moved.bytes_sent_across, None, "one node");
        let away = ["offload.parameters=host", "offload.optimizer=host", "offload.buffer_size=1024"];
        let cases: [&[&str]; 4] = [
            &["shard.node_size=2"],
            &["shard.secondary_partition_size=2"],
            &["shard.secondary_partition_size=2", "run.transport=threads", "shard.recompute=true"],
            &[&["shard.secondary_partition_size=2"], &away[..]].concat(),
        ];
        let mut across = Vec::new();
        for case in cases {
            let trained = run(&[&["run.ranks=4"], case].concat());
            assert!(trained.weights == plain.weights, "{name}, {case:?}: other weights");
            across.push(trained.metrics[1].moved.bytes_sent_across.expect("there are nodes"));
        }
        assert!(across[1] < across[0], "{name}: the backward stays inside the node: {across:?}");
    }
}
