//! `generate`: a text continued by a model from a Hugging Face folder.

use std::path::PathBuf;

use burn::tensor::{Device, Tensor, TensorData};
use shardwise_burn::{ShardConfig, ShardedModel};
use shardwise_comm::ProcessGroup;
use shardwise_engine::OptimizerConfig;
use shardwise_models::{CausalLm, LanguageModel, ModelError, Sampler, WeightsFolder};

use crate::bounds;
use crate::config::read_model_config;
use crate::data::Tokenizer;
use crate::error::RunError;
use crate::output::{print, say};
use crate::world::{DEFAULT_TIMEOUT, on_own_threads};

/// What to continue, and how.
#[derive(Debug, Clone, clap::Args)]
pub struct GenerateArgs {
    /// A Hugging Face folder: config.json, model.safetensors, tokenizer.json
    #[arg(long)]
    model: PathBuf,
    /// The text to continue
    #[arg(long, allow_hyphen_values = true)]
    prompt: String,
    /// Tokens to add
    #[arg(long, default_value_t = 200)]
    max_new_tokens: usize,
    /// Spread of the choice; 0 always takes the likeliest token
    #[arg(long, default_value_t = 0.8)]
    temperature: f64,
    /// Choose among this many of the likeliest tokens; all when left out
    #[arg(long)]
    top_k: Option<usize>,
    /// The same seed chooses the same tokens
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Threads to compute with
    #[arg(long, default_value_t = 1, value_parser = bounds::thread_count)]
    threads: usize,
}

/// Prints the prompt and its continuation; returns the exit code.
///
/// # Errors
/// When the model cannot be read or does not fit the options.
pub fn run(args: &GenerateArgs) -> Result<i32, RunError> {
    let (config, warnings) = read_model_config(&args.model)?;
    warnings.iter().for_each(|warning| say(&format!("warning: {warning}")));
    let file = args.model.join("tokenizer.json");
    let tokenizer = Tokenizer::open(&file.display().to_string()).map_err(RunError::user)?;
    let prompt = tokenizer.encode(&args.prompt).map_err(RunError::user)?;
    if prompt.is_empty() {
        return Err(RunError::user("the prompt has no token; give it some text to continue"));
    }
    if let Some(id) = prompt.iter().find(|id| **id as usize >= config.vocab_size()) {
        return Err(RunError::user(format!(
            "the prompt has token {id}, but the model knows {} tokens; the tokenizer in {} is not this model's",
            config.vocab_size(),
            args.model.display()
        )));
    }
    let weights = WeightsFolder::open(&args.model, &config).map_err(RunError::user)?;
    weights.warning().iter().for_each(|warning| say(&format!("warning: {warning}")));
    let mut sampler = Sampler::new(args.temperature, args.top_k, args.seed).map_err(RunError::user)?;
    let transport = shardwise_comm::threads::world(1, DEFAULT_TIMEOUT)?.remove(0);
    let text = on_own_threads(args.threads, || {
        let module = config.init(&Device::flex().autodiff()).map_err(RunError::user)?;
        let mut model = ShardedModel::new(ProcessGroup::world(transport), module, without_state(), &weights)?;
        let ids =
            continue_tokens(&mut model, &mut sampler, &prompt, args.max_new_tokens, config.max_positions())?;
        tokenizer.decode(&[prompt, ids].concat()).map_err(RunError::failed)
    })??;
    print(&(text + "\n"))?;
    Ok(0)
}

/// A sharded model that will not be trained needs no statistics.
fn without_state() -> ShardConfig {
    let mut config = ShardConfig::default();
    config.engine.optimizer = OptimizerConfig::Sgd { momentum: 0.0, nesterov: false, weight_decay: 0.0 };
    config
}

/// Continues `prompt` by `count` tokens, seeing at most the last `context` at a time. A collective: all ranks of the model
/// compute, and draw the same tokens.
///
/// # Errors
/// When communication fails, the prompt is empty, or the logits are not finite.
pub(crate) fn continue_tokens(
    model: &mut ShardedModel<LanguageModel>,
    sampler: &mut Sampler,
    prompt: &[u32],
    count: usize,
    context: usize,
) -> Result<Vec<u32>, RunError> {
    let device = Device::flex();
    let drawn = model.evaluate(|model| {
        sampler.generate(prompt, count, context, |tokens| {
            let ids: Vec<i64> = tokens.iter().map(|id| i64::from(*id)).collect();
            let ids = Tensor::from_data(TensorData::new(ids, [1, tokens.len()]), &device);
            Ok::<_, ModelError>(model.last_logits(ids).into_data().iter::<f32>().collect())
        })
    })?;
    drawn.map_err(RunError::failed)
}
