//! Sample `g` of a run, counted over all ranks and steps: the same tokens whatever the ranks.

use shardwise_core::seed_for;

use super::config::{DataConfig, SamplerKind};
use super::corpus::Corpus;
use super::error::{DataError, Result};
use super::permutation::Permutation;
use super::stream::{Fingerprint, TokenStream};
use super::tokenizer::Tokenizer;

/// What a configuration names: text, which is still to be made into tokens, or tokens.
#[derive(Debug)]
pub(crate) enum Source {
    Text(Corpus),
    Tokens(TokenStream),
}

impl Source {
    pub(crate) fn of(config: &DataConfig) -> Result<Self> {
        Ok(match (config.format.token_width(), config.path.as_slice()) {
            (None, []) => Self::Text(Corpus::default_text()?),
            (None, paths) => Self::Text(Corpus::from_paths(paths)?),
            (Some(_), []) => return Err(DataError::NoTokenFiles { format: config.format }),
            (Some(width), paths) => Self::Tokens(TokenStream::from_token_files(paths, width)?),
        })
    }
}

/// A token stream cut into windows of `seq_len` tokens, visited in the order of its sampler.
///
/// Window `w` starts at token `w * seq_len`; its targets are the tokens one further on. Reading needs no `mut`
/// and no lock: ranks that are threads can share one data set.
#[derive(Debug)]
pub struct TokenDataset {
    stream: TokenStream,
    seq_len: usize,
    num_windows: u64,
    sampler: SamplerKind,
    seed: u64,
}

impl TokenDataset {
    /// The data that `config` names, in samples of `seq_len` tokens and the order that the run's `seed` gives.
    /// The tokenizer is for text; token files are read as they are.
    ///
    /// # Errors
    /// Data that is missing, unreadable, or shorter than one sample.
    pub fn open(config: &DataConfig, seq_len: usize, tokenizer: &Tokenizer, seed: u64) -> Result<Self> {
        let stream = match Source::of(config)? {
            Source::Text(corpus) => TokenStream::from_text(&corpus, tokenizer)?,
            Source::Tokens(stream) => stream,
        };
        Self::new(stream, seq_len, config.sampler, seed)
    }

    /// Cuts `stream` into windows of `seq_len` tokens.
    ///
    /// # Errors
    /// [`DataError::NoWindow`] for a `seq_len` of 0; [`DataError::TooFewTokens`] for a stream shorter than
    /// one window and the target after it.
    pub fn new(stream: TokenStream, seq_len: usize, sampler: SamplerKind, seed: u64) -> Result<Self> {
        if seq_len == 0 {
            return Err(DataError::NoWindow);
        }
        let (found, needed) = (stream.len(), (seq_len as u64).saturating_add(1));
        if found < needed {
            let origin = stream.origin().to_owned();
            return Err(DataError::TooFewTokens { origin, found, needed, seq_len });
        }
        let num_windows = (found - 1) / seq_len as u64;
        Ok(Self { stream, seq_len, num_windows, sampler, seed })
    }

    /// The inputs and targets of sample `g`, counted from 0 over the whole run, each of `seq_len` tokens.
    ///
    /// # Errors
    /// A file that cannot be read; [`DataError::PastEnd`] when a sequential run has no such sample.
    pub fn sample(&self, g: u64) -> Result<(Vec<u32>, Vec<u32>)> {
        let start = self.window(g)? * self.seq_len as u64;
        let mut inputs = vec![0; self.seq_len + 1];
        self.stream.read(start, &mut inputs)?;
        let targets = inputs[1..].to_vec();
        inputs.pop();
        Ok((inputs, targets))
    }

    /// Which window sample `g` is.
    fn window(&self, g: u64) -> Result<u64> {
        match self.sampler {
            SamplerKind::Sequential if g < self.num_windows => Ok(g),
            SamplerKind::Sequential => {
                let origin = self.stream.origin().to_owned();
                Err(DataError::PastEnd { origin, sample: g, samples: self.num_windows })
            }
            SamplerKind::Shuffled => {
                let (epoch, index) = (g / self.num_windows, g % self.num_windows);
                let seed = seed_for(self.seed, &format!("data.epoch.{epoch}"));
                Ok(Permutation::new(self.num_windows, seed).at(index))
            }
        }
    }

    /// Checks, before training, that there are samples for `steps` steps of `samples_per_step` samples over
    /// all ranks. A shuffled run starts a new epoch instead of running out.
    ///
    /// # Errors
    /// [`DataError::RunTooLong`] with the tokens found and needed, and the steps that would fit.
    pub fn check_run(&self, steps: u64, samples_per_step: u64) -> Result<()> {
        let samples = u128::from(steps) * u128::from(samples_per_step);
        if self.sampler == SamplerKind::Shuffled || samples <= u128::from(self.num_windows) {
            return Ok(());
        }
        Err(DataError::RunTooLong {
            origin: self.stream.origin().to_owned(),
            found: self.stream.len(),
            needed: samples.saturating_mul(self.seq_len as u128).saturating_add(1),
            steps,
            samples_per_step,
            steps_that_fit: self.num_windows / samples_per_step,
        })
    }

    /// Checks, before training, that every token in the run's first `samples` samples is below the model's
    /// `vocab_size`: one pass over the part of the stream that they cover.
    ///
    /// # Errors
    /// [`DataError::Vocabulary`] with file, position and id of the first token that is not; a file that cannot
    /// be read.
    pub fn check_vocab(&self, vocab_size: usize, samples: u64) -> Result<()> {
        let window = self.seq_len as u64;
        if self.sampler == SamplerKind::Sequential || samples >= self.num_windows {
            let end = samples.min(self.num_windows) * window + 1;
            return self.stream.check_vocab(vocab_size, 0..end);
        }
        for g in 0..samples {
            let start = self.window(g)? * window;
            self.stream.check_vocab(vocab_size, start..start + window + 1)?;
        }
        Ok(())
    }

    /// Tokens in a sample.
    pub fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// Samples in an epoch: the windows that the stream has tokens for.
    pub fn num_windows(&self) -> u64 {
        self.num_windows
    }

    /// The tokens that the windows are cut from.
    pub fn stream(&self) -> &TokenStream {
        &self.stream
    }

    /// [`TokenStream::fingerprint`].
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn fingerprint(&self) -> Result<Fingerprint> {
        self.stream.fingerprint()
    }
}
