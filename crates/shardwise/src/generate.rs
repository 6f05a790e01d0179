//! `generate`: a text continued by a model from a Hugging Face folder.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use burn::tensor::{Device, Tensor, TensorData};
use shardwise_burn::{ShardConfig, ShardedModel};
use shardwise_comm::ProcessGroup;
use shardwise_engine::OptimizerConfig;
use shardwise_models::{CausalLm, LanguageModel, Sampler, WeightsFolder};

use crate::bounds;
use crate::config::read_model_config;
use crate::data::Tokenizer;
use crate::error::RunError;
use crate::output::{print_to_reader, say};
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
    on_own_threads(args.threads, || {
        let module = config.init(&Device::flex().autodiff()).map_err(RunError::user)?;
        let mut model = ShardedModel::new(ProcessGroup::world(transport), module, without_state(), &weights)?;
        let mut text = LiveText::new(&tokenizer, prompt.clone());
        let drawn = continue_tokens(
            &mut model,
            &mut sampler,
            &prompt,
            [args.max_new_tokens, config.max_positions()],
            |token| text.add(token),
        );
        match drawn {
            // Nobody reads on, so there is nothing left to do.
            Err(_) if text.reader_left => Ok(0),
            drawn => drawn.and_then(|ids| text.finish(&[prompt, ids].concat())).map(|()| 0),
        }
    })?
}

/// A text that is printed while it grows.
struct LiveText<'a> {
    tokenizer: &'a Tokenizer,
    tokens: Vec<u32>,
    printed: String,
    last: Option<Instant>,
    reader_left: bool,
}

/// Decoding starts at the beginning each time, so it is not done for every token.
const PRINT_EVERY: Duration = Duration::from_millis(100);

impl<'a> LiveText<'a> {
    fn new(tokenizer: &'a Tokenizer, tokens: Vec<u32>) -> Self {
        Self { tokenizer, tokens, printed: String::new(), last: None, reader_left: false }
    }

    /// Adds a token, and prints what is new now and then.
    fn add(&mut self, token: u32) -> Result<(), RunError> {
        self.tokens.push(token);
        if self.last.is_some_and(|last| last.elapsed() < PRINT_EVERY) {
            return Ok(());
        }
        self.last = Some(Instant::now());
        let text = self.tokenizer.decode(&self.tokens).map_err(RunError::failed)?;
        // The bytes of a character can come as several tokens.
        self.print(text.trim_end_matches('\u{fffd}'))
    }

    /// Prints the rest of the whole text.
    fn finish(&mut self, tokens: &[u32]) -> Result<(), RunError> {
        let text = self.tokenizer.decode(tokens).map_err(RunError::failed)?;
        self.print(&(text + "\n"))
    }

    fn print(&mut self, text: &str) -> Result<(), RunError> {
        // A decoder may still change the end of what it has said; what is printed stays.
        let same = text.char_indices().zip(self.printed.chars()).take_while(|((_, a), b)| a == b).count();
        let new: String = text.chars().skip(same).collect();
        self.printed = text.to_string();
        self.reader_left = !print_to_reader(&new)?;
        if self.reader_left { Err(RunError::failed("nobody reads the text")) } else { Ok(()) }
    }
}

/// A sharded model that will not be trained needs no statistics.
fn without_state() -> ShardConfig {
    let mut config = ShardConfig::default();
    config.engine.optimizer = OptimizerConfig::Sgd { momentum: 0.0, nesterov: false, weight_decay: 0.0 };
    config
}

/// Continues `prompt` by `count` tokens, seeing at most the last `context` at a time, and shows each but the last to `see`
/// as soon as it is drawn. A collective: all ranks of the model compute, and draw the same tokens.
///
/// # Errors
/// When communication fails, the prompt is empty, the logits are not finite, or whatever `see` returns.
pub(crate) fn continue_tokens(
    model: &mut ShardedModel<LanguageModel>,
    sampler: &mut Sampler,
    prompt: &[u32],
    [count, context]: [usize; 2],
    mut see: impl FnMut(u32) -> Result<(), RunError>,
) -> Result<Vec<u32>, RunError> {
    let device = Device::flex();
    let mut is_prompt = true;
    model.evaluate(|model| {
        sampler.generate(prompt, count, context, |tokens| {
            if let (false, Some(drawn)) = (is_prompt, tokens.last()) {
                see(*drawn)?;
            }
            is_prompt = false;
            let ids: Vec<i64> = tokens.iter().map(|id| i64::from(*id)).collect();
            let ids = Tensor::from_data(TensorData::new(ids, [1, tokens.len()]), &device);
            Ok::<_, RunError>(model.last_logits(ids).into_data().iter::<f32>().collect())
        })
    })?
}
