//! The configuration of a run: a TOML file and `--set` overrides.
//!
//! Every key is known or an error that suggests the nearest one; what is left out has the default written here.

mod keys;
mod offload;
mod sections;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use shardwise_core::{MixedPrecision, PlanError, seed_for};
use shardwise_engine::{EngineConfig, LossScale, MuonScale, OptimizerConfig, SwapPlace};
use shardwise_models::{Gpt2Config, LlamaConfig, ModelConfig};
use toml::{Table, Value};

use crate::bounds;
use crate::data::DataConfig;
use crate::error::RunError;

use keys::{MODEL_KEYS, check_keys, check_names, set};
pub use offload::OffloadConfig;
pub use sections::{
    LossScaleSetting, NamedLossScale, OptimizerName, QuantizeSetting, RunConfig, ShardingConfig, TrainConfig,
    TransportKind,
};

/// A whole configuration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The run as such.
    #[serde(default)]
    pub run: RunConfig,
    /// The model: a family with its sizes, or `init_from`.
    pub model: Table,
    /// What it learns.
    #[serde(default)]
    pub data: DataConfig,
    /// How it learns.
    #[serde(default)]
    pub train: TrainConfig,
    /// How it is spread over ranks.
    #[serde(default)]
    pub shard: ShardingConfig,
    /// What rests away from where it computes.
    #[serde(default)]
    pub offload: OffloadConfig,
}

/// The longest sample that is taken without being asked for.
const DEFAULT_SEQ_LEN: usize = 1024;

impl Config {
    /// Reads a file and applies overrides of the form `section.key=value`.
    ///
    /// # Errors
    /// When the file cannot be read, a key is unknown, or a value is of the wrong kind or out of its range.
    pub fn load(path: &Path, overrides: &[String]) -> Result<Self, RunError> {
        let text = std::fs::read_to_string(path)
            .map_err(|e| RunError::user(format!("cannot read the configuration {}: {e}", path.display())))?;
        Self::parse(&text, &path.display().to_string(), overrides)
    }

    /// Reads a text; `name` is what errors call it.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn parse(text: &str, name: &str, overrides: &[String]) -> Result<Self, RunError> {
        let mut table: Table = text.parse().map_err(|e| RunError::user(format!("{name}: {e}")))?;
        for item in overrides {
            set(&mut table, item)?;
        }
        check_keys(&table, name)?;
        check_names(&table, name)?;
        let config: Config = table
            .try_into()
            .map_err(|e: toml::de::Error| RunError::user(format!("{name}: {}", e.to_string().trim_end())))?;
        config.check(name)?;
        Ok(config)
    }

    fn check(&self, name: &str) -> Result<(), RunError> {
        let wrong = |message: String| Err(RunError::user(format!("{name}: {message}")));
        let train = &self.train;
        let non_negative = [
            ("train.lr", Some(train.lr)),
            ("train.eps", Some(train.eps)),
            ("train.weight_decay", train.weight_decay),
            ("train.momentum", train.momentum),
        ];
        for (key, value) in non_negative {
            if value.is_some_and(|v| !(v >= 0.0 && v.is_finite())) {
                return wrong(format!(
                    "{key} is {}; it must be a number of at least 0",
                    value.unwrap_or_default()
                ));
            }
        }
        if let Some(beta) = train.betas.iter().flatten().find(|b| !(0.0..1.0).contains(*b)) {
            return wrong(format!("train.betas holds {beta}; both must be at least 0 and below 1"));
        }
        if let Some(clip) = train.clip_norm.filter(|c| !(*c > 0.0 && c.is_finite())) {
            return wrong(format!(
                "train.clip_norm is {clip}; it must be a positive number (leave it out for no clipping)"
            ));
        }
        if let Some(decay) = train.ema_decay.filter(|d| !(0.0..=1.0).contains(d)) {
            return wrong(format!("train.ema_decay is {decay}; it must be at least 0 and at most 1"));
        }
        let looks_ahead = matches!(train.optimizer, OptimizerName::Sgd | OptimizerName::Muon);
        if train.nesterov == Some(true) && !looks_ahead {
            return wrong("train.nesterov is true, but only the optimizers sgd and muon have it".into());
        }
        self.optimizer().check().or_else(|message| wrong(format!("train.{message}")))?;
        let computed_at_once = train.micro_batch.saturating_mul(self.run.ranks);
        if train.step_in_backward && computed_at_once < train.global_batch {
            return wrong(format!(
                "train.step_in_backward needs one micro-batch a rank and step, but {} ranks compute {computed_at_once} of {} \
                 samples at once; make train.micro_batch larger, or leave it out",
                self.run.ranks, train.global_batch
            ));
        }
        bounds::check(self).or_else(wrong)?;
        self.offload.check(self.run.ranks).or_else(wrong)?;
        self.shard.check_error_feedback().or_else(wrong)?;
        let engine = self.engine();
        let offload = engine.offload.check().and_then(|()| engine.wire.check());
        let nodes = offload.and_then(|()| engine.wire.node(self.run.ranks));
        nodes.map(drop).or_else(|e| wrong(with_section(e)))?;
        engine
            .check()
            .and_then(|()| engine.node_size(self.run.ranks))
            .and_then(|_| engine.shard_group_size(self.run.ranks))
            .and_then(|sharers| engine.check_step_in_backward(sharers))
            .or_else(|e| wrong(e.to_string()))?;
        Ok(())
    }

    /// Where the run's output goes.
    pub fn output_dir(&self) -> PathBuf {
        self.run.output_dir.clone().unwrap_or_else(|| Path::new("runs").join(&self.run.name))
    }

    /// `model.init_from`, if the model starts from a folder.
    ///
    /// # Errors
    /// When it is not a string.
    pub fn init_from(&self) -> Result<Option<PathBuf>, RunError> {
        match self.model.get("init_from") {
            None => Ok(None),
            Some(Value::String(path)) => Ok(Some(path.into())),
            Some(other) => {
                Err(RunError::user(format!("model.init_from is {other}; it must be the path of a folder")))
            }
        }
    }

    /// The model's sizes, from `[model]` or from the folder that it starts from, and warnings about what is not kept.
    ///
    /// # Errors
    /// When they contradict each other or are impossible.
    pub fn model_config(&self) -> Result<(ModelConfig, Vec<String>), RunError> {
        let family = match self.model.get("family") {
            None => None,
            Some(Value::String(family)) => Some(family.as_str()),
            Some(other) => {
                return Err(RunError::user(format!(
                    "model.family is {other}; it must be \"gpt2\" or \"llama\""
                )));
            }
        };
        if let Some(folder) = self.init_from()? {
            if let Some(key) = self.model.keys().find(|k| !MODEL_KEYS.contains(&k.as_str())) {
                return Err(RunError::user(format!(
                    "model.{key} is set, but model.init_from takes all sizes from {}; leave one of them out",
                    folder.display()
                )));
            }
            let (config, warnings) = read_model_config(&folder)?;
            if let Some(family) = family.filter(|f| *f != config.family()) {
                return Err(RunError::user(format!(
                    "model.family is \"{family}\", but {} holds a {} model",
                    folder.display(),
                    config.family()
                )));
            }
            return Ok((config, warnings));
        }
        let mut sizes = self.model.clone();
        sizes.remove("family");
        let config = match family {
            Some("gpt2") => sizes.try_into::<Gpt2Config>().map(ModelConfig::Gpt2),
            Some("llama") => sizes.try_into::<LlamaConfig>().map(ModelConfig::Llama),
            Some(other) => {
                return Err(RunError::user(format!(
                    "model.family is \"{other}\"; it must be \"gpt2\" or \"llama\""
                )));
            }
            None => {
                return Err(RunError::user(
                    "[model] names neither a family (\"gpt2\" or \"llama\") nor init_from, the folder of a model",
                ));
            }
        };
        let config = config.map_err(|e| RunError::user(format!("[model]: {}", e.to_string().trim_end())))?;
        config.validate().map_err(|e| RunError::user(format!("[model]: {e}")))?;
        Ok((config, Vec::new()))
    }

    /// Tokens of a sample: as configured, or the model's context length up to 1024.
    pub fn seq_len(&self, model: &ModelConfig) -> usize {
        self.data.seq_len.unwrap_or_else(|| model.max_positions().min(DEFAULT_SEQ_LEN))
    }

    /// Strategy, update rule, clipping and prefetch for the engine.
    pub fn engine(&self) -> EngineConfig {
        let (train, shard) = (&self.train, &self.shard);
        EngineConfig {
            strategy: shard.strategy,
            shard_group: shard.shard_group,
            precision: MixedPrecision {
                param_dtype: shard.param_dtype,
                reduce_dtype: shard.reduce_dtype,
                keep_low_precision_grads: shard.keep_low_precision_grads,
                low_precision_evaluation: false,
            },
            loss_scale: train.loss_scale.map_or(LossScale::None, LossScaleSetting::scale),
            non_finite: train.non_finite,
            accumulation: shard.accumulate,
            optimizer: self.optimizer(),
            ema_decay: train.ema_decay,
            step_in_backward: train.step_in_backward,
            clip_norm: train.clip_norm,
            prefetch: shard.prefetch,
            gather: shard.gather(),
            wire: shard.wire(),
            offload: self.offload.engine(),
            ..EngineConfig::default()
        }
    }

    /// Where what rests in files goes. A run is known by its name and its output folder: what a dead one has left below the
    /// same path is its own.
    pub fn swap_place(&self) -> Option<SwapPlace> {
        let path = self.offload.path.clone()?;
        let output = std::path::absolute(self.output_dir()).unwrap_or_else(|_| self.output_dir());
        let run = format!("{}-{:08x}", self.run.name, seed_for(0, &output.to_string_lossy()) as u32);
        Some(SwapPlace { path, run, io: self.offload.io(), faults: None })
    }

    fn optimizer(&self) -> OptimizerConfig {
        let train = &self.train;
        let (betas, eps) = (train.betas.unwrap_or([0.9, 0.95]), train.eps);
        let momentum = |default| train.momentum.unwrap_or(default);
        let nesterov = |default| train.nesterov.unwrap_or(default);
        let defaults = match train.optimizer {
            OptimizerName::AdamW => OptimizerConfig::AdamW { betas, eps, weight_decay: 0.1 },
            OptimizerName::Adam => OptimizerConfig::Adam { betas, eps, weight_decay: 0.0 },
            OptimizerName::Sgd => {
                OptimizerConfig::Sgd { momentum: momentum(0.9), nesterov: nesterov(false), weight_decay: 0.0 }
            }
            OptimizerName::Lion => {
                OptimizerConfig::Lion { betas: train.betas.unwrap_or([0.9, 0.99]), weight_decay: 0.1 }
            }
            OptimizerName::Adafactor => OptimizerConfig::ADAFACTOR,
            OptimizerName::Muon => OptimizerConfig::Muon {
                momentum: momentum(0.95),
                nesterov: nesterov(true),
                steps: 5,
                scale: MuonScale::MatchAdamW,
                weight_decay: 0.1,
                betas,
                eps,
            },
        };
        train.weight_decay.map_or(defaults, |decay| defaults.with_weight_decay(decay))
    }

    /// Every setting as `(section.key, value)`, for comparison among ranks.
    pub fn settings(&self) -> Vec<(String, String)> {
        let mut settings = Vec::new();
        if let Ok(Value::Table(table)) = Value::try_from(self) {
            for (section, value) in &table {
                match value {
                    Value::Table(keys) => {
                        settings
                            .extend(keys.iter().map(|(key, v)| (format!("{section}.{key}"), v.to_string())));
                    }
                    other => settings.push((section.clone(), other.to_string())),
                }
            }
        }
        settings
    }
}

/// A refused setting by its name in the configuration; these messages begin with its key.
fn with_section(error: PlanError) -> String {
    match error {
        PlanError::Offload(message) => format!("offload.{message}"),
        PlanError::Wire(message) => format!("shard.{message}"),
        other => other.to_string(),
    }
}

/// Reads a model folder's `config.json`.
///
/// # Errors
/// When it is missing or describes a model that is not supported.
pub fn read_model_config(folder: &Path) -> Result<(ModelConfig, Vec<String>), RunError> {
    let path = folder.join("config.json");
    let text = std::fs::read_to_string(&path).map_err(|e| {
        RunError::user(format!(
            "cannot read {}: {e}; a model folder holds config.json and model.safetensors",
            path.display()
        ))
    })?;
    ModelConfig::from_json(&text, &path.display().to_string()).map_err(RunError::user)
}
