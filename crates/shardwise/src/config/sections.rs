//! The sections of a configuration and their defaults.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use shardwise_core::{
    BackwardPrefetch, ErrorFeedback, GatherPolicy, Precision, Quantization, Rounding, ShardingStrategy,
    WireConfig,
};
use shardwise_engine::{Accumulation, DynamicScale, LossScale, LrSchedule, NonFinite};

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
    pub(super) const ALL: [&str; 6] = ["adamw", "adam", "sgd", "lion", "adafactor", "muon"];
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
    pub(super) fn scale(self) -> LossScale {
        match self {
            LossScaleSetting::Static(scale) => LossScale::Static(scale),
            LossScaleSetting::Named(NamedLossScale::Dynamic) => LossScale::Dynamic(DynamicScale::default()),
        }
    }
}

/// Whether something travels quantised, and in what: a switch, or a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "it must be true, false, \"int8\" or \"int4\"")]
pub enum QuantizeSetting {
    /// In the usual type, or not.
    Switch(bool),
    /// In this type.
    Named(Quantization),
}

impl QuantizeSetting {
    pub(super) const ALL: [&str; 2] = ["int8", "int4"];

    fn or_usual(self, usual: Quantization) -> Option<Quantization> {
        match self {
            QuantizeSetting::Switch(on) => on.then_some(usual),
            QuantizeSetting::Named(quantization) => Some(quantization),
        }
    }
}

/// `[shard]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
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
    /// Whether parameters travel quantised; true is int8.
    pub quantized_weights: QuantizeSetting,
    /// Whether frozen parameters rest and travel in int8.
    pub quantized_nontrainable_weights: bool,
    /// Whether gradients travel quantised; true is int4.
    pub quantized_gradients: QuantizeSetting,
    /// How elements are rounded to codes.
    pub quantization_rounding: Rounding,
    /// Whether what quantisation takes from a gradient is given to the next one.
    pub error_feedback: bool,
    /// The part of its moving average that this error keeps at each step; 0.8 when left out.
    pub err_beta: Option<f64>,
    /// Steps after which it is forgotten; 1024 when left out.
    pub err_reset_steps: Option<u64>,
    /// Neighbouring ranks with fast links between them; all ranks when left out.
    pub node_size: Option<usize>,
    /// Neighbouring ranks that keep a second copy of the parameters for the backward; no such copy when left out.
    pub secondary_partition_size: Option<usize>,
}

impl ShardingConfig {
    pub(super) fn gather(&self) -> GatherPolicy {
        GatherPolicy {
            forward_prefetch: self.forward_prefetch,
            backward_prefetch: self.backward_prefetch,
            limit_all_gathers: self.limit_all_gathers,
            prefetch_bucket_size: self.prefetch_bucket_size.unwrap_or(usize::MAX),
            max_live_parameters: self.max_live_parameters.unwrap_or(usize::MAX),
            max_reuse_distance: self.max_reuse_distance,
        }
    }

    pub(super) fn wire(&self) -> WireConfig {
        let usual = ErrorFeedback::default();
        WireConfig {
            weights: self.quantized_weights.or_usual(Quantization::Int8),
            frozen_weights: self.quantized_nontrainable_weights,
            gradients: self.quantized_gradients.or_usual(Quantization::Int4),
            rounding: self.quantization_rounding,
            error_feedback: self.error_feedback.then(|| ErrorFeedback {
                beta: self.err_beta.unwrap_or(usual.beta),
                reset_steps: self.err_reset_steps.unwrap_or(usual.reset_steps),
            }),
            node_size: self.node_size,
            secondary_partition: self.secondary_partition_size,
        }
    }

    /// Refuses a setting of the error's feedback without the feedback.
    pub(super) fn check_error_feedback(&self) -> Result<(), String> {
        let beta = self.err_beta.map(|beta| format!("err_beta is {beta}"));
        let reset = self.err_reset_steps.map(|steps| format!("err_reset_steps is {steps}"));
        match beta.or(reset).filter(|_| !self.error_feedback) {
            Some(setting) => Err(format!(
                "shard.{setting}, but shard.error_feedback is false; set it to true, or leave the other out"
            )),
            None => Ok(()),
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
            quantized_weights: QuantizeSetting::Switch(false),
            quantized_nontrainable_weights: false,
            quantized_gradients: QuantizeSetting::Switch(false),
            quantization_rounding: Rounding::Nearest,
            error_feedback: false,
            err_beta: None,
            err_reset_steps: None,
            node_size: None,
            secondary_partition_size: None,
        }
    }
}
