//! The configuration of a run: a TOML file and `--set` overrides.
//!
//! Every key is known or an error that suggests the nearest one; what is left out has the default written here.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use shardwise_core::{BackwardPrefetch, GatherPolicy, MixedPrecision, Precision, ShardingStrategy};
use shardwise_engine::{
    Accumulation, DynamicScale, EngineConfig, LossScale, LrSchedule, MuonScale, NonFinite, OptimizerConfig,
};
use shardwise_models::{Gpt2Config, LlamaConfig, ModelConfig};
use toml::{Table, Value};

use crate::bounds;
use crate::data::DataConfig;
use crate::error::RunError;
use crate::suggest::nearest;

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
}

/// `[run]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunConfig {
    /// The run's name.
    pub name: String,
    /// Where its output goes; `runs/NAME` when left out.
    pub output_dir: Option<PathBuf>,
    /// The seed of initial values, of the data's order and of sampling.
    pub seed: u64,
    /// Optimizer steps.
    pub steps: u64,
    /// Processes (or threads) that share the model.
    pub ranks: usize,
    /// Threads that each rank computes with.
    pub threads_per_rank: usize,
    /// How ranks communicate.
    pub transport: TransportKind,
    /// How long a rank waits for another before the run fails.
    pub timeout_seconds: f64,
}

impl Default for RunConfig {
    fn default() -> Self {
        Self {
            name: "shardwise".into(),
            output_dir: None,
            seed: 0,
            steps: 100,
            ranks: 1,
            threads_per_rank: 1,
            transport: TransportKind::Shm,
            timeout_seconds: 300.0,
        }
    }
}

/// How ranks communicate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum TransportKind {
    /// Processes of this host, over shared memory.
    Shm,
    /// Threads of one process.
    Threads,
}

/// `[train]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainConfig {
    /// Samples of a step, over all ranks.
    pub global_batch: usize,
    /// Samples that a rank computes at once.
    pub micro_batch: usize,
    /// The update rule.
    pub optimizer: OptimizerName,
    /// The (peak) learning rate.
    pub lr: f64,
    /// Decay rates of AdamW, Adam and Lion; 0.9 and 0.95 when left out, 0.9 and 0.99 for Lion.
    pub betas: Option<[f64; 2]>,
    /// AdamW's and Adam's epsilon.
    pub eps: f64,
    /// Weight decay; 0.1 for AdamW, Lion and Muon and 0 for the others when left out. Applies to parameters of two
    /// dimensions or more.
    pub weight_decay: Option<f64>,
    /// The momentum of SGD and Muon; 0.9 and 0.95 when left out.
    pub momentum: Option<f64>,
    /// Whether SGD and Muon look ahead along the momentum; when left out, Muon does and SGD does not.
    pub nesterov: Option<bool>,
    /// The part of their average that the weights keep at each step; no average is kept when left out. Its weights are
    /// written to `model-ema`.
    pub ema_decay: Option<f64>,
    /// Whether each block is updated inside backward, so that one gradient shard serves all of them.
    pub step_in_backward: bool,
    /// The norm that gradients are cut down to; no clipping when left out.
    pub clip_norm: Option<f64>,
    /// What the loss is multiplied by before its backward: a number, or "dynamic"; nothing when left out.
    pub loss_scale: Option<LossScaleSetting>,
    /// What a gradient that is NaN or infinite leads to.
    pub non_finite: NonFinite,
    /// How the learning rate changes.
    pub schedule: LrSchedule,
    /// Steps of linear warm-up.
    pub warmup_steps: u64,
}

impl Default for TrainConfig {
    fn default() -> Self {
        Self {
            global_batch: 8,
            micro_batch: 1,
            optimizer: OptimizerName::AdamW,
            lr: 3e-4,
            betas: None,
            eps: 1e-8,
            weight_decay: None,
            momentum: None,
            nesterov: None,
            ema_decay: None,
            step_in_backward: false,
            clip_norm: None,
            loss_scale: None,
            non_finite: NonFinite::Error,
            schedule: LrSchedule::Constant,
            warmup_steps: 0,
        }
    }
}

/// The update rules by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerName {
    /// Adam with decoupled weight decay.
    AdamW,
    /// Adam; the decay is part of the gradient.
    Adam,
    /// Stochastic gradient descent with momentum.
    Sgd,
    /// The sign of a momentum.
    Lion,
    /// Second moments from rows and columns; the learning rate is the largest relative step.
    Adafactor,
    /// Orthogonalised momentum for the blocks' matrices, AdamW for all else.
    Muon,
}

impl OptimizerName {
    const ALL: [&str; 6] = ["adamw", "adam", "sgd", "lion", "adafactor", "muon"];
}

/// `loss_scale`: a number, or "dynamic".
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(untagged, expecting = "train.loss_scale must be \"dynamic\" or a positive number")]
pub enum LossScaleSetting {
    /// Always this.
    Static(f64),
    /// As much as the gradients bear.
    Named(NamedLossScale),
}

/// Loss scales that have a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NamedLossScale {
    /// As much as the gradients bear.
    Dynamic,
}

impl LossScaleSetting {
    fn scale(self) -> LossScale {
        match self {
            LossScaleSetting::Static(scale) => LossScale::Static(scale),
            LossScaleSetting::Named(NamedLossScale::Dynamic) => LossScale::Dynamic(DynamicScale::default()),
        }
    }
}

/// `[shard]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ShardingConfig {
    /// How parameters, gradients and optimizer state are spread.
    pub strategy: ShardingStrategy,
    /// Ranks that share one copy of the model, for a hybrid strategy; the groups of so many are replicas.
    pub shard_group: Option<usize>,
    /// The type in which parameters are gathered and to which they are rounded for the computation.
    pub param_dtype: Precision,
    /// The type in which gradients travel; their sum is f32.
    pub reduce_dtype: Precision,
    /// Whether the summed gradient is rounded to `reduce_dtype` again.
    pub keep_low_precision_grads: bool,
    /// Where the gradients of several micro-batches of a rank add up.
    pub accumulate: Accumulation,
    /// Whether blocks keep only their input and compute their forward again in backward.
    pub recompute: bool,
    /// Whether blocks are gathered while others compute.
    pub prefetch: bool,
    /// Whether that goes for the forward.
    pub forward_prefetch: bool,
    /// When the next block of the backward is gathered.
    pub backward_prefetch: BackwardPrefetch,
    /// Blocks gathered at a time, the one in use included.
    pub limit_all_gathers: usize,
    /// Elements gathered ahead; the next block always fits.
    pub prefetch_bucket_size: Option<usize>,
    /// Elements gathered at a time: past it nothing is gathered ahead or kept.
    pub max_live_parameters: Option<usize>,
    /// A block that is used again before so many elements of others have been is not freed in between.
    pub max_reuse_distance: usize,
}

impl ShardingConfig {
    fn gather(&self) -> GatherPolicy {
        GatherPolicy {
            forward_prefetch: self.forward_prefetch,
            backward_prefetch: self.backward_prefetch,
            limit_all_gathers: self.limit_all_gathers,
            prefetch_bucket_size: self.prefetch_bucket_size.unwrap_or(usize::MAX),
            max_live_parameters: self.max_live_parameters.unwrap_or(usize::MAX),
            max_reuse_distance: self.max_reuse_distance,
        }
    }
}

impl Default for ShardingConfig {
    fn default() -> Self {
        Self {
            strategy: ShardingStrategy::FullShard,
            shard_group: None,
            param_dtype: Precision::F32,
            reduce_dtype: Precision::F32,
            keep_low_precision_grads: false,
            accumulate: Accumulation::Sharded,
            recompute: false,
            prefetch: true,
            forward_prefetch: true,
            backward_prefetch: BackwardPrefetch::Pre,
            limit_all_gathers: 2,
            prefetch_bucket_size: None,
            max_live_parameters: None,
            max_reuse_distance: 0,
        }
    }
}

/// The longest sample that is taken without being asked for.
const DEFAULT_SEQ_LEN: usize = 1024;

/// Keys of `[train]` that have no default.
const OPTIONAL_TRAIN_KEYS: [&str; 7] =
    ["betas", "weight_decay", "momentum", "nesterov", "ema_decay", "clip_norm", "loss_scale"];

/// Keys of `[model]` beside the families' own.
const MODEL_KEYS: [&str; 2] = ["family", "init_from"];

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
        check_optimizer(&table, name)?;
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
        let engine = self.engine();
        engine
            .check()
            .and_then(|()| engine.shard_group_size(self.run.ranks))
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
            ..EngineConfig::default()
        }
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

/// Applies one `section.key=value`.
fn set(table: &mut Table, item: &str) -> Result<(), RunError> {
    let wrong =
        || RunError::user(format!("--set {item}: expected section.key=value, such as train.lr=0.001"));
    let (path, text) = item.split_once('=').ok_or_else(wrong)?;
    let (section, key) = path.trim().split_once('.').ok_or_else(wrong)?;
    // Whatever is not a TOML value by itself is a string without its quotes.
    let value = format!("x = {text}")
        .parse::<Table>()
        .ok()
        .and_then(|mut t| t.remove("x"))
        .unwrap_or_else(|| Value::String(text.to_string()));
    match table.entry(section).or_insert_with(|| Value::Table(Table::new())) {
        Value::Table(keys) => keys.insert(key.to_string(), value),
        _ => return Err(wrong()),
    };
    Ok(())
}

/// The keys of each section, from the defaults themselves.
fn known_keys(section: &str, table: &Table) -> Option<Vec<String>> {
    fn keys_of(value: impl Serialize, optional: &[&str]) -> Vec<String> {
        let mut keys: Vec<String> = match Value::try_from(value) {
            Ok(Value::Table(table)) => table.keys().cloned().collect(),
            _ => Vec::new(),
        };
        keys.extend(optional.iter().map(|k| (*k).to_string()));
        keys
    }
    Some(match section {
        "run" => keys_of(RunConfig::default(), &["output_dir"]),
        "data" => keys_of(DataConfig::default(), &["path", "tokenizer", "seq_len"]),
        "train" => keys_of(TrainConfig::default(), &OPTIONAL_TRAIN_KEYS),
        "shard" => keys_of(
            ShardingConfig::default(),
            &["shard_group", "prefetch_bucket_size", "max_live_parameters"],
        ),
        "model" => {
            let family = match table.get("family").and_then(Value::as_str) {
                Some("llama") => LlamaConfig::KEYS,
                _ => Gpt2Config::KEYS,
            };
            MODEL_KEYS.iter().chain(family).map(|k| (*k).to_string()).collect()
        }
        _ => return None,
    })
}

/// Refuses unknown sections and keys, and suggests the nearest known one.
fn check_keys(table: &Table, name: &str) -> Result<(), RunError> {
    const SECTIONS: [&str; 5] = ["run", "model", "data", "train", "shard"];
    let unknown = |what: String, known: &[String]| {
        let hint = match nearest(what.rsplit('.').next().unwrap_or(&what), known) {
            Some(near) => format!("did you mean `{near}`?"),
            None => format!("known are {}", known.join(", ")),
        };
        Err(RunError::user(format!("{name}: unknown key `{what}`; {hint}")))
    };
    for (section, value) in table {
        let Value::Table(keys) = value else {
            if SECTIONS.contains(&section.as_str()) {
                return Err(RunError::user(format!(
                    "{name}: `{section}` is {value}; expected a section, [{section}] with its keys on the lines after it"
                )));
            }
            return unknown(section.clone(), &SECTIONS.map(String::from));
        };
        let Some(known) = known_keys(section, keys) else {
            return unknown(section.clone(), &SECTIONS.map(String::from));
        };
        if let Some(key) = keys.keys().find(|k| !known.contains(k)) {
            return unknown(format!("{section}.{key}"), &known);
        }
    }
    if !table.contains_key("model") {
        return Err(RunError::user(format!(
            "{name}: there is no [model]; name a family (\"gpt2\" or \"llama\") or init_from, the folder of a model"
        )));
    }
    Ok(())
}

/// Refuses an unknown optimizer and suggests the nearest known one.
fn check_optimizer(table: &Table, name: &str) -> Result<(), RunError> {
    let Some(Value::String(given)) = table.get("train").and_then(|train| train.get("optimizer")) else {
        return Ok(());
    };
    let known = OptimizerName::ALL.map(String::from);
    if known.contains(given) {
        return Ok(());
    }
    let hint = match nearest(given, &known) {
        Some(near) => format!("did you mean \"{near}\"?"),
        None => format!("known are {}", known.join(", ")),
    };
    Err(RunError::user(format!("{name}: train.optimizer is \"{given}\"; {hint}")))
}
