//! The one error type of this module: what was expected where, what was found, and what to do.

use std::io;
use std::path::{Path, PathBuf};

use super::config::Format;

/// The result of this module's calls.
pub type Result<T, E = DataError> = std::result::Result<T, E>;

/// Why a run cannot be given its data.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// The operating system refused something.
    #[error("{}: could not {action}: {source}; {}", path.display(), remedy(source))]
    Io {
        /// The file or folder concerned.
        path: PathBuf,
        /// What was attempted.
        action: String,
        /// What the system answered.
        source: io::Error,
    },

    /// A pattern that is not one.
    #[error(
        "data.path `{pattern}`: expected a file, a folder or a pattern such as `books/*.txt`, found {reason}; \
         correct it"
    )]
    Pattern {
        /// The pattern.
        pattern: String,
        /// What is wrong with it, and where.
        reason: String,
    },

    /// A path to something that holds no bytes to read at a position.
    #[error(
        "{}: expected a regular file or a folder, found something else; name a file that stays on disk",
        path.display()
    )]
    NotAFile {
        /// The path.
        path: PathBuf,
    },

    /// Paths without a single file.
    #[error(
        "data.path: expected at least one file, found none in {searched:?}; hidden files and links to folders \
         inside a folder are not followed: name the files themselves"
    )]
    NoFiles {
        /// The paths and patterns that were searched.
        searched: Vec<String>,
    },

    /// A format that has no default corpus.
    #[error("data.format `{format}`: expected data.path to name the token files, found none; set data.path")]
    NoTokenFiles {
        /// The format.
        format: Format,
    },

    /// A machine on which cargo left no sources behind.
    #[error(
        "default corpus: expected Rust sources that cargo fetched, found none: {}; set data.path to a text \
         file, a folder or a pattern",
        looked.join("; ")
    )]
    NoSources {
        /// Where they were looked for, and what was there.
        looked: Vec<String>,
    },

    /// Text that is not UTF-8.
    #[error(
        "{}: expected UTF-8 text, found an invalid sequence at byte {offset}; convert the file to UTF-8, or \
         leave it out of data.path",
        file.display()
    )]
    NotUtf8 {
        /// The file.
        file: PathBuf,
        /// Where its first invalid sequence starts, in bytes.
        offset: u64,
    },

    /// A tokenizer that cannot be loaded.
    #[error(
        "{}: expected a tokenizer in the format of Hugging Face's `tokenizer.json`, found {reason}; export it \
         again, or set data.tokenizer to \"bytes\"",
        file.display()
    )]
    Tokenizer {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        reason: String,
    },

    /// Text that a tokenizer cannot turn into tokens, or tokens that it cannot turn into text.
    #[error(
        "{}: expected to {action}, found {reason}; a tokenizer needs an unknown token or a byte fallback to \
         take any text: choose another, or \"bytes\"",
        file.display()
    )]
    Tokenize {
        /// The tokenizer's file.
        file: PathBuf,
        /// What was attempted.
        action: &'static str,
        /// What the tokenizer answered.
        reason: String,
    },

    /// A token file that is not a whole number of tokens.
    #[error(
        "{}: expected a multiple of {width} bytes, one token each, found {bytes} bytes; check data.format, or \
         write the file again",
        file.display()
    )]
    WrongWidth {
        /// The file.
        file: PathBuf,
        /// The bytes of one token.
        width: u64,
        /// The bytes of the file.
        bytes: u64,
    },

    /// A token that the model has no embedding for.
    #[error(
        "{place}: expected token ids below the model's vocabulary of {vocab_size}, found {token} at token \
         {position}; raise the model's vocab_size, or check data.format and data.tokenizer"
    )]
    Vocabulary {
        /// The token file, or what the text was made from.
        place: String,
        /// The position in it, counted in tokens.
        position: u64,
        /// The token's id.
        token: u32,
        /// How many ids the model has.
        vocab_size: usize,
    },

    /// Windows without tokens.
    #[error(
        "data.seq_len: expected at least 1 token a sample, found 0; set it to the model's context or less"
    )]
    NoWindow,

    /// A stream shorter than one window.
    #[error(
        "{origin}: expected at least {needed} tokens for one sample of data.seq_len {seq_len} and its targets, \
         found {found}; add data or lower data.seq_len"
    )]
    TooFewTokens {
        /// What the stream was made from.
        origin: String,
        /// The tokens it has.
        found: u64,
        /// The tokens one sample needs.
        needed: u64,
        /// The length of a sample.
        seq_len: usize,
    },

    /// A run that would read past the end of its tokens.
    #[error(
        "{origin}: expected {needed} tokens for {steps} steps of {samples_per_step} sequential samples, found \
         {found}, enough for {steps_that_fit} steps; add data, lower the steps, or set data.sampler to \
         \"shuffled\" to visit the data again"
    )]
    RunTooLong {
        /// What the stream was made from.
        origin: String,
        /// The tokens it has.
        found: u64,
        /// The tokens the run needs.
        needed: u128,
        /// The optimizer steps of the run.
        steps: u64,
        /// The samples of each step, over all ranks.
        samples_per_step: u64,
        /// The steps that the tokens suffice for.
        steps_that_fit: u64,
    },

    /// A sample past the end of a sequential run.
    #[error(
        "{origin}: expected a sample below {samples}, found sample {sample}; a sequential run ends with its \
         data: check it with `check_run` before training"
    )]
    PastEnd {
        /// What the stream was made from.
        origin: String,
        /// The sample asked for.
        sample: u64,
        /// How many there are.
        samples: u64,
    },
}

impl DataError {
    /// The error of an attempt on `path`, from what the system answered.
    pub(crate) fn io(path: &Path, action: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { path: path.to_path_buf(), action: action.into(), source }
    }
}

/// What a user can do about an answer of the system.
fn remedy(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::NotFound => "check the path",
        io::ErrorKind::PermissionDenied => "check permissions and who owns it",
        io::ErrorKind::IsADirectory => "name a file in it",
        io::ErrorKind::InvalidData => "its content is damaged: write it again",
        io::ErrorKind::UnexpectedEof => "the file was shortened while in use: write it again",
        _ => "check the path and the disk",
    }
}
