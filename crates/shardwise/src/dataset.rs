//! The data that a configuration names, opened and checked against the model and the run.

use shardwise_models::ModelConfig;

use crate::config::Config;
use crate::data::{Format, TokenDataset, Tokenizer};
use crate::error::RunError;

/// Whether looking at the data takes little time: whether no text has to go through a table of tokens.
pub(crate) fn is_quick(config: &Config) -> Result<bool, RunError> {
    Ok(config.data.format != Format::Text || tokenizer_name(config)?.as_deref() == Some("bytes"))
}

/// Which tokenizer belongs to the data: the configured one, that of the folder the model starts from, bytes for text, and
/// none for tokens that nobody has named one for.
fn tokenizer_name(config: &Config) -> Result<Option<String>, RunError> {
    if let Some(name) = &config.data.tokenizer {
        return Ok(Some(name.clone()));
    }
    let beside =
        config.init_from()?.map(|folder| folder.join("tokenizer.json")).filter(|file| file.is_file());
    let text = config.data.format == Format::Text;
    Ok(beside.map(|file| file.display().to_string()).or_else(|| text.then(|| "bytes".to_string())))
}

/// The tokenizer that belongs to the data, if there is one.
///
/// # Errors
/// When its file cannot be read or is none.
pub(crate) fn tokenizer(config: &Config) -> Result<Option<Tokenizer>, RunError> {
    tokenizer_name(config)?.map(|name| Tokenizer::open(&name).map_err(RunError::user)).transpose()
}

/// Opens the data and makes sure that it has enough samples for the run, and no token that the model does not know.
///
/// # Errors
/// When it has not, or cannot be read.
pub(crate) fn open(
    config: &Config,
    model: &ModelConfig,
    tokenizer: Option<&Tokenizer>,
) -> Result<TokenDataset, RunError> {
    let bytes = Tokenizer::bytes();
    let seq_len = config.seq_len(model);
    let data = TokenDataset::open(&config.data, seq_len, tokenizer.unwrap_or(&bytes), config.run.seed);
    let data = data.map_err(RunError::user)?;
    let samples_per_step = config.train.global_batch as u64;
    data.check_run(config.run.steps, samples_per_step).map_err(RunError::user)?;
    let samples = config.run.steps.saturating_mul(samples_per_step);
    data.check_vocab(model.vocab_size(), samples).map_err(RunError::user)?;
    Ok(data)
}
