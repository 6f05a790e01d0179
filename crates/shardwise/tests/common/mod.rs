//! What the program's tests share: running it, the golden runs, configurations for them.
#![allow(dead_code, unreachable_pub, reason = "each test program uses its part")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use shardwise::report::StepMetrics;

/// The program, in an environment without a launcher's variables.
pub fn shardwise<S: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shardwise"));
    for variable in
        ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "SHARDWISE_SHM_FD"]
    {
        command.env_remove(variable);
    }
    command.env("RUST_BACKTRACE", "0").args(args);
    command
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A golden run's folder: config.json, model.safetensors, tokens.bin, reference.json.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/data").join(name)
}

/// The losses and norms of a golden run, and where its f32 version ended up.
pub struct Reference {
    pub losses: Vec<f64>,
    pub norms: Vec<f64>,
}

pub fn reference(name: &str, run: &str) -> Reference {
    let text = std::fs::read_to_string(fixture(name).join("reference.json")).expect("a golden run");
    let json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let steps = json["runs"][run]["steps"].as_array().expect("steps").clone();
    let column = |key: &str| steps.iter().map(|s| s[key].as_f64().expect("a number")).collect();
    Reference { losses: column("loss"), norms: column("grad_norm") }
}

/// The configuration of a golden run, writing to `output`.
pub fn golden_config(name: &str, optimizer: &str, output: &Path) -> String {
    let folder = fixture(name);
    let train = match optimizer {
        "adamw" => {
            "optimizer = \"adamw\"\nlr = 0.003\nbetas = [0.9, 0.95]\neps = 1e-8\nweight_decay = 0.1\nclip_norm = 1.0"
        }
        "sgd" => "optimizer = \"sgd\"\nlr = 0.05\nmomentum = 0.9\nweight_decay = 0.0",
        other => panic!("no golden run with {other}"),
    };
    format!(
        "[run]\nname = \"{name}\"\nsteps = 30\noutput_dir = {output:?}\ntimeout_seconds = 60\n\
         [model]\ninit_from = {folder:?}\n\
         [data]\npath = {tokens:?}\nformat = \"tokens-u16\"\nseq_len = 32\nsampler = \"sequential\"\n\
         [train]\nglobal_batch = 8\nmicro_batch = 1\n{train}\n",
        tokens = folder.join("tokens.bin"),
    )
}

/// What a run wrote.
pub struct Trained {
    pub metrics: Vec<StepMetrics>,
    pub weights: Vec<u8>,
}

/// Trains a configuration with overrides, in a folder of its own.
pub fn train(config: &str, overrides: &[String], folder: &Path) -> Trained {
    std::fs::create_dir_all(folder).expect("a folder");
    let file = folder.join("config.toml");
    std::fs::write(&file, config).expect("written");
    let mut args = vec!["train".to_string(), file.display().to_string()];
    let output = folder.join("out");
    for item in overrides.iter().chain([&format!("run.output_dir={:?}", output.display().to_string())]) {
        args.extend(["--set".to_string(), item.clone()]);
    }
    let ran = shardwise(&args).output().expect("the program runs");
    assert!(ran.status.success(), "{overrides:?}: {}", stderr(&ran));
    let metrics = read_metrics(&output);
    let weights = std::fs::read(output.join("model/model.safetensors")).expect("exported weights");
    Trained { metrics, weights }
}

pub fn read_metrics(output: &Path) -> Vec<StepMetrics> {
    let text = std::fs::read_to_string(output.join("metrics.jsonl")).expect("metrics");
    text.lines().map(|line| serde_json::from_str(line).expect("a line of metrics")).collect()
}
