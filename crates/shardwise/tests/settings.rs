//! Settings reach the engine as they were written, from the file and from `--set` alike.

use shardwise::config::Config;
use shardwise_core::{ErrorFeedback, Offload, Quantization, Rounding, Tier, WireConfig};
use shardwise_tier::{IoConfig, IoMethod};

const MODEL: &str = "[run]\nranks = 4\n[model]\nfamily = \"gpt2\"\n";

/// Parses the same settings as sections of a file and as overrides; both must agree.
fn parse(settings: &[&str]) -> Config {
    let mut text = MODEL.to_string();
    for section in ["shard", "offload"] {
        text.push_str(&format!("[{section}]\n"));
        for setting in settings.iter().filter_map(|s| s.strip_prefix(section)?.strip_prefix('.')) {
            text.push_str(&format!("{setting}\n"));
        }
    }
    let in_file = Config::parse(&text, "file", &[]).expect("a configuration");
    let overrides: Vec<String> = settings.iter().map(|s| (*s).to_string()).collect();
    assert_eq!(Config::parse(MODEL, "set", &overrides).expect("a configuration"), in_file, "{settings:?}");
    in_file
}

#[test]
fn offload_settings_reach_the_engine() {
    let defaults = Offload::default();
    let path = r#"offload.path="/mnt/nvme""#;
    let (parameters, optimizer) = (r#"offload.parameters="nvme""#, r#"offload.optimizer="nvme""#);
    let host = r#"offload.optimizer="host""#;
    let cases: [(&[&str], Offload); 7] = [
        (&[], defaults),
        (&[host], Offload { optimizer: Tier::Host, ..defaults }),
        (&[parameters, path], Offload { parameters: Tier::Nvme, ..defaults }),
        (
            &[optimizer, path, "offload.ratio=0.25"],
            Offload { optimizer: Tier::Nvme, ratio: 0.25, ..defaults },
        ),
        (
            &[parameters, host, path, "offload.max_in_memory=7", "offload.least_size=9"],
            Offload {
                parameters: Tier::Nvme,
                optimizer: Tier::Host,
                max_in_memory: 7,
                least_numel: 9,
                ..defaults
            },
        ),
        (
            &[host, "offload.buffer_count=3", "offload.buffer_size=2048", "offload.pipeline=false"],
            Offload {
                optimizer: Tier::Host,
                buffer_count: 3,
                buffer_numel: 2048,
                pipeline: false,
                ..defaults
            },
        ),
        // How files are read and written is the tier's, not the engine's.
        (&[r#"offload.io="threads""#, "offload.queue_depth=3", "offload.direct=false"], defaults),
    ];
    for (settings, want) in cases {
        assert_eq!(parse(settings).engine().offload, want, "{settings:?}");
    }
}

#[test]
fn settings_of_files_reach_the_tier() {
    let usual = IoConfig::default();
    let cases: [(&[&str], IoConfig); 4] = [
        (&[], usual),
        (
            &[r#"offload.io="uring""#, "offload.queue_depth=3"],
            IoConfig { method: IoMethod::Uring, queue_depth: 3, ..usual },
        ),
        (
            &[r#"offload.io="threads""#, "offload.threads=7"],
            IoConfig { method: IoMethod::Threads, threads: 7, ..usual },
        ),
        (
            &["offload.block_size=8192", "offload.direct=false"],
            IoConfig { block_bytes: 8192, direct: false, ..usual },
        ),
    ];
    for (settings, want) in cases {
        assert_eq!(parse(settings).offload.io(), want, "{settings:?}");
    }
}

#[test]
fn quantisation_settings_reach_the_engine() {
    let none = WireConfig::default();
    let (int8, int4) = (Some(Quantization::Int8), Some(Quantization::Int4));
    let gradients = WireConfig { gradients: int4, ..none };
    let cases: [(&[&str], WireConfig); 10] = [
        (&[], none),
        (&["shard.quantized_weights=true"], WireConfig { weights: int8, ..none }),
        (&[r#"shard.quantized_weights="int4""#], WireConfig { weights: int4, ..none }),
        (&["shard.quantized_weights=false", "shard.quantized_gradients=false"], none),
        (&["shard.quantized_gradients=true"], gradients),
        (&[r#"shard.quantized_gradients="int8""#], WireConfig { gradients: int8, ..none }),
        (
            &["shard.quantized_gradients=true", r#"shard.quantization_rounding="stochastic""#],
            WireConfig { rounding: Rounding::Stochastic, ..gradients },
        ),
        (
            &["shard.quantized_gradients=true", "shard.error_feedback=true"],
            WireConfig { error_feedback: Some(ErrorFeedback::default()), ..gradients },
        ),
        (
            &[
                "shard.quantized_gradients=true",
                "shard.error_feedback=true",
                "shard.err_beta=0.5",
                "shard.err_reset_steps=16",
            ],
            WireConfig { error_feedback: Some(ErrorFeedback { beta: 0.5, reset_steps: 16 }), ..gradients },
        ),
        (
            &[
                "shard.quantized_nontrainable_weights=true",
                "shard.node_size=2",
                "shard.secondary_partition_size=2",
            ],
            WireConfig { frozen_weights: true, node_size: Some(2), secondary_partition: Some(2), ..none },
        ),
    ];
    for (settings, want) in cases {
        assert_eq!(parse(settings).engine().wire, want, "{settings:?}");
    }
}
