//! What the tests share: the fixtures, their token stream, and modules filled from a source of values.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::path::{Path, PathBuf};
use std::time::Duration;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, Int, Tensor, TensorData};
use serde::Deserialize;
use shardwise_burn::{ParamSource, ShardConfig};
use shardwise_engine::{EngineConfig, OptimizerConfig};
use shardwise_models::{LanguageModel, ModelConfig, WeightsFolder};

pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// Both fixtures: models of three layers and width 64, trained for 30 steps with PyTorch in float64 and float32.
pub(crate) const FIXTURES: [&str; 2] = ["gpt2-tiny", "llama-tiny"];

/// A folder of `tests/data`.
pub(crate) fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

/// The configuration in a folder, and its warnings.
pub(crate) fn config(folder: &Path) -> (ModelConfig, Vec<String>) {
    let text = std::fs::read_to_string(folder.join("config.json")).expect("config.json");
    ModelConfig::from_json(&text, "config.json").expect("a supported model")
}

/// The reference run of a fixture.
#[derive(Debug, Deserialize)]
pub(crate) struct Reference {
    pub(crate) seq_len: usize,
    pub(crate) global_batch: usize,
    pub(crate) runs: std::collections::BTreeMap<String, Run>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Run {
    pub(crate) steps: Vec<Step>,
    pub(crate) final_parameter_sums: std::collections::BTreeMap<String, Sums>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Step {
    pub(crate) loss: f64,
    pub(crate) grad_norm: f64,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Sums {
    pub(crate) sum: f64,
    pub(crate) abs_sum: f64,
}

pub(crate) fn reference(fixture: &str) -> Reference {
    let text = std::fs::read_to_string(data(fixture).join("reference.json")).expect("reference.json");
    serde_json::from_str(&text).expect("a reference")
}

/// A fixture's token stream: sample `g` (counted over the whole run) starts at token `g * seq_len`.
pub(crate) struct Stream {
    tokens: Vec<i64>,
    seq_len: usize,
}

impl Stream {
    pub(crate) fn of(fixture: &str, seq_len: usize) -> Self {
        let bytes = std::fs::read(data(fixture).join("tokens.bin")).expect("tokens.bin");
        let tokens =
            bytes.as_chunks::<2>().0.iter().map(|pair| i64::from(u16::from_le_bytes(*pair))).collect();
        Self { tokens, seq_len }
    }

    /// Samples `first..first + count` and the tokens that follow theirs, each `[count, seq_len]`.
    pub(crate) fn batch(
        &self,
        first: usize,
        count: usize,
        device: &Device,
    ) -> (Tensor<2, Int>, Tensor<2, Int>) {
        let tensor = |shift: usize| {
            let start = first * self.seq_len + shift;
            let tokens = self.tokens[start..start + count * self.seq_len].to_vec();
            Tensor::from_data(TensorData::new(tokens, [count, self.seq_len]), device)
        };
        (tensor(0), tensor(1))
    }
}

/// Tokens as a batch of one.
pub(crate) fn ids(tokens: &[u32], device: &Device) -> Tensor<2, Int> {
    let tokens: Vec<i64> = tokens.iter().map(|&token| i64::from(token)).collect();
    let len = tokens.len();
    Tensor::from_data(TensorData::new(tokens, [1, len]), device)
}

/// The model in a folder, whole, in plain Burn.
pub(crate) fn whole_model(folder: &Path, device: &Device) -> LanguageModel {
    let (config, _) = config(folder);
    let weights = WeightsFolder::open(folder, &config).expect("weights");
    let module = config.init(device).expect("a valid configuration");
    module.map(&mut Assign { source: &weights, path: Vec::new(), device })
}

/// Gives every parameter the values of a source.
struct Assign<'a> {
    source: &'a dyn ParamSource,
    path: Vec<String>,
    device: &'a Device,
}

impl ModuleMapper for Assign<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let shape = param.lazy_shape().to_vec();
        let mut values = vec![f32::NAN; shape.iter().product()];
        let all = 0..values.len();
        assert!(self.source.fill(&self.path.join("."), &shape, all, &mut values).expect("values"));
        let tensor = Tensor::from_data(TensorData::new(values, shape), self.device);
        let tensor = if self.device.is_autodiff() { tensor.require_grad() } else { tensor };
        Param::initialized(param.id, tensor)
    }
}

/// AdamW or SGD as in the reference runs, with the learning rate.
pub(crate) fn optimizer(name: &str) -> (ShardConfig, f64) {
    let (optimizer, clip_norm, lr) = match name {
        "adamw" => {
            let adamw = OptimizerConfig::AdamW { betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1 };
            (adamw, Some(1.0), 0.003)
        }
        _ => (OptimizerConfig::Sgd { momentum: 0.9, nesterov: false, weight_decay: 0.0 }, None, 0.05),
    };
    let engine = EngineConfig { optimizer, clip_norm, ..EngineConfig::default() };
    (ShardConfig { engine, recompute: false, seed: 7 }, lr)
}

/// Runs `body` on one thread of rayon, as a rank does: bits are promised for that only.
pub(crate) fn on_one_thread<T: Send>(body: impl FnOnce() -> T + Send) -> T {
    rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a pool").install(body)
}
