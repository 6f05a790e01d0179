//! The data that a configuration names, opened and checked against the model and the run.
//!
//! Text is made into tokens by rank 0 alone, into an anonymous file that all ranks read: one pass over the text and one copy
//! of its tokens, however many ranks there are.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, memfd_create};
use shardwise_comm::ProcessGroup;
use shardwise_models::ModelConfig;

use crate::config::Config;
use crate::data::{Corpus, DataError, Format, Source, TokenDataset, TokenStream, TokenWidth, Tokenizer};
use crate::error::RunError;
use crate::output::say;
use crate::report::bytes;

/// Whether looking at the data takes little time: whether no text has to go through a table of tokens.
pub(crate) fn is_quick(config: &Config) -> Result<bool, RunError> {
    Ok(config.data.format != Format::Text || tokenizer_name(config)?.as_deref() == Some("bytes"))
}

/// Which tokenizer belongs to the data: the configured one, that of the folder the model starts from, bytes for text of a
/// new model, and none for tokens that nobody has named one for.
fn tokenizer_name(config: &Config) -> Result<Option<String>, RunError> {
    if let Some(name) = &config.data.tokenizer {
        return Ok(Some(name.clone()));
    }
    let is_text = config.data.format == Format::Text;
    let Some(folder) = config.init_from()? else {
        return Ok(is_text.then(|| "bytes".to_string()));
    };
    let beside = folder.join("tokenizer.json");
    if beside.is_file() {
        return Ok(Some(beside.display().to_string()));
    }
    if is_text {
        return Err(RunError::user(format!(
            "{} has no tokenizer.json, so nothing tells which tokens its model knows; save the tokenizer there (transformers: \
             AutoTokenizer.from_pretrained(...).save_pretrained(...)), or set data.tokenizer to its path, or to \"bytes\"",
            folder.display()
        )));
    }
    Ok(None)
}

/// The tokenizer that belongs to the data, if there is one.
///
/// # Errors
/// When its file cannot be read or is none.
pub(crate) fn tokenizer(config: &Config) -> Result<Option<Tokenizer>, RunError> {
    tokenizer_name(config)?.map(|name| Tokenizer::open(&name).map_err(RunError::user)).transpose()
}

/// Opens the data and makes sure that it has enough samples for the run, and no token that the model does not know. With a
/// group this is a collective: text is made into tokens by its first rank.
///
/// # Errors
/// When it has not, or cannot be read.
pub(crate) fn open(
    config: &Config,
    model: &ModelConfig,
    tokenizer: Option<&Tokenizer>,
    group: Option<&ProcessGroup>,
) -> Result<TokenDataset, RunError> {
    let seq_len = config.seq_len(model);
    let as_bytes = Tokenizer::bytes();
    let tokenizer = tokenizer.unwrap_or(&as_bytes);
    let stream = match (Source::of(&config.data).map_err(RunError::user)?, group) {
        (Source::Tokens(stream), _) => stream,
        (Source::Text(corpus), None) => TokenStream::from_text(&corpus, tokenizer).map_err(RunError::user)?,
        (Source::Text(corpus), Some(group)) => tokenize_once(&corpus, tokenizer, group)?,
    };
    let data = TokenDataset::new(stream, seq_len, config.data.sampler, config.run.seed);
    let data = data.map_err(RunError::user)?;
    let samples_per_step = config.train.global_batch as u64;
    data.check_run(config.run.steps, samples_per_step).map_err(RunError::user)?;
    let samples = config.run.steps.saturating_mul(samples_per_step);
    data.check_vocab(model.vocab_size(), samples).map_err(RunError::user)?;
    Ok(data)
}

/// What the tokens of a text will take, as far as it can be told without reading it.
pub(crate) fn text_memory(config: &Config) -> Result<String, RunError> {
    let name = tokenizer_name(config)?;
    let is_bytes = name.as_deref() == Some("bytes");
    let size = match Source::of(&config.data) {
        Ok(Source::Text(corpus)) => {
            corpus.files().iter().map(|f| Some(std::fs::metadata(f).ok()?.len())).sum()
        }
        _ => None,
    };
    Ok(match size.map(bytes) {
        Some(size) if is_bytes => size,
        Some(size) => format!("2 or 4 bytes a token of {size} of text"),
        None if is_bytes => "a byte of memory for a byte of text".into(),
        None => "2 or 4 bytes a token".into(),
    })
}

/// How often rank 0 lets the others know that it still reads.
const SIGN_OF_LIFE: Duration = Duration::from_secs(1);
/// How long it reads before it says so.
const PATIENCE: Duration = Duration::from_secs(2);

/// What rank 0 tells the others.
struct Progress {
    is_done: bool,
    width: u64,
    tokens: u64,
    /// Where the file can be opened: a process and its descriptor.
    process: u64,
    descriptor: u64,
}

impl Progress {
    /// Hands rank 0's word to all.
    fn share(&self, group: &ProcessGroup) -> Result<Self, RunError> {
        let words = [u64::from(self.is_done), self.width, self.tokens, self.process, self.descriptor];
        let mut message = words.map(u64::to_le_bytes).concat();
        group.broadcast("reading data", &mut message, 0)?;
        let word = |at: usize| message[at * 8..at * 8 + 8].try_into().map_or(0, u64::from_le_bytes);
        let [is_done, width, tokens, process, descriptor] = [0, 1, 2, 3, 4].map(word);
        Ok(Self { is_done: is_done == 1, width, tokens, process, descriptor })
    }

    fn reading() -> Self {
        Self { is_done: false, width: 0, tokens: 0, process: 0, descriptor: 0 }
    }
}

/// Why rank 0 stops reading.
enum Stop {
    Data(DataError),
    Run(RunError),
}

impl From<DataError> for Stop {
    fn from(error: DataError) -> Self {
        Stop::Data(error)
    }
}

/// The tokens of `corpus`, made once for all ranks.
fn tokenize_once(
    corpus: &Corpus,
    tokenizer: &Tokenizer,
    group: &ProcessGroup,
) -> Result<TokenStream, RunError> {
    let origin = corpus.origin().to_owned();
    let stream = if group.rank() == 0 {
        let file = write_tokens(corpus, tokenizer, group)?;
        let width = TokenStream::width_of(tokenizer);
        let length = file.metadata().map_err(|e| RunError::failed(format!("holding the tokens: {e}")))?.len();
        let tokens = length / width.bytes();
        let (process, descriptor) = (u64::from(std::process::id()), file.as_raw_fd() as u64);
        Progress { is_done: true, width: width.bytes(), tokens, process, descriptor }.share(group)?;
        TokenStream::shared(file, tokens, width, origin)
    } else {
        let mut told = Progress::reading().share(group)?;
        while !told.is_done {
            told = Progress::reading().share(group)?;
        }
        let width = match told.width {
            1 => TokenWidth::U8,
            2 => TokenWidth::U16,
            _ => TokenWidth::U32,
        };
        match File::open(Path::new("/proc").join(format!("{}/fd/{}", told.process, told.descriptor))) {
            Ok(file) => TokenStream::shared(file, told.tokens, width, origin),
            // Where a process may not look at another (a strict sandbox), each rank reads for itself.
            Err(_) => TokenStream::from_text(corpus, tokenizer).map_err(RunError::user)?,
        }
    };
    // Rank 0 keeps the file until all have it; from then on each has it open.
    group.barrier("data")?;
    Ok(stream)
}

/// Rank 0's part: the tokens in an anonymous file, while the others hear that it goes on.
fn write_tokens(corpus: &Corpus, tokenizer: &Tokenizer, group: &ProcessGroup) -> Result<File, RunError> {
    let failed =
        |e: std::io::Error| RunError::failed(format!("holding the tokens of {}: {e}", corpus.origin()));
    let file = memfd_create("shardwise-tokens", MemfdFlags::CLOEXEC).map_err(|e| failed(e.into()))?;
    let mut writer = BufWriter::new(File::from(file));
    let (begun, mut last_sign, mut has_said) = (Instant::now(), Instant::now(), false);
    let written = TokenStream::encode(corpus, tokenizer, |bytes| {
        writer.write_all(bytes).map_err(|e| Stop::Run(failed(e)))?;
        if last_sign.elapsed() > SIGN_OF_LIFE {
            last_sign = Instant::now();
            Progress::reading().share(group).map_err(Stop::Run)?;
        }
        if !has_said && begun.elapsed() > PATIENCE {
            has_said = true;
            say(&format!("reading {}", corpus.origin()));
        }
        Ok(())
    });
    written.map_err(|stop| match stop {
        Stop::Data(error) => RunError::user(error),
        Stop::Run(error) => error,
    })?;
    writer.into_inner().map_err(|e| failed(e.into_error()))
}
