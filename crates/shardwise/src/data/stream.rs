//! All tokens of a run as one sequence: in memory when made from text, in files when they are tokens already.

use std::fmt;
use std::fs::File;
use std::ops::Range;
use std::path::PathBuf;

use shardwise_core::seed::SplitMix64;

use super::corpus::Corpus;
use super::error::{DataError, Result};
use super::files::resolve;
use super::token_files::{TokenFiles, TokenWidth};
use super::tokenizer::Tokenizer;

/// Tokens that a pass over the stream reads at once.
const BLOCK: u64 = 16 << 10;

/// Blocks that a fingerprint reads at most: streams of up to 16 Mi tokens are hashed whole.
const HASHED_BLOCKS: u64 = 1024;

/// A sequence of token ids that can be read at any position, from any thread.
pub struct TokenStream {
    storage: Storage,
    origin: String,
}

enum Storage {
    Held(TokenWidth, Vec<u8>),
    /// Made from text, in a file without a name.
    Shared(TokenFiles),
    Files(TokenFiles),
}

impl TokenStream {
    /// Tokenizes a text; the tokens stay in memory, in as few bytes each as the vocabulary allows.
    ///
    /// A `tokenizer.json` is given the text file by file, and large files in pieces of a few hundred
    /// kilobytes, cut between lines. So memory is bounded, and special tokens are never added.
    ///
    /// # Errors
    /// A file that cannot be read, is not UTF-8, or that the tokenizer has no tokens for.
    pub fn from_text(corpus: &Corpus, tokenizer: &Tokenizer) -> Result<Self> {
        let mut held = Vec::new();
        let width = Self::encode(corpus, tokenizer, |bytes| {
            held.extend_from_slice(bytes);
            Ok::<_, DataError>(())
        })?;
        Ok(Self { storage: Storage::Held(width, held), origin: corpus.origin().to_owned() })
    }

    /// Tokenizes a text piece by piece: gives `take` the little-endian bytes of each piece's tokens, in order, and returns
    /// how wide they are.
    pub(crate) fn encode<E: From<DataError>>(
        corpus: &Corpus,
        tokenizer: &Tokenizer,
        mut take: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<TokenWidth, E> {
        let width = Self::width_of(tokenizer);
        let mut bytes = Vec::new();
        corpus.try_for_each_piece(|piece| {
            // The vocabulary says that no id is cut.
            bytes.clear();
            match width {
                TokenWidth::U8 => return take(piece.as_bytes()),
                TokenWidth::U16 => {
                    bytes.extend(
                        tokenizer.encode(piece)?.into_iter().flat_map(|id| (id as u16).to_le_bytes()),
                    );
                }
                TokenWidth::U32 => {
                    bytes.extend(tokenizer.encode(piece)?.into_iter().flat_map(u32::to_le_bytes));
                }
            }
            take(&bytes)
        })?;
        Ok(width)
    }

    /// How wide a tokenizer's tokens are.
    pub(crate) fn width_of(tokenizer: &Tokenizer) -> TokenWidth {
        match tokenizer.vocab_size() {
            _ if tokenizer.is_bytes() => TokenWidth::U8,
            size if size <= 1 << 16 => TokenWidth::U16,
            _ => TokenWidth::U32,
        }
    }

    /// The tokens that [`TokenStream::encode`] has given, `tokens` of them, in `file`; made from what `origin` says.
    pub(crate) fn shared(file: File, tokens: u64, width: TokenWidth, origin: String) -> Self {
        let files = TokenFiles::over(file, PathBuf::from(&origin), tokens, width);
        Self { storage: Storage::Shared(files), origin }
    }

    /// Bytes of memory that the tokens take; 0 for token files.
    pub fn held_bytes(&self) -> u64 {
        match &self.storage {
            Storage::Held(_, bytes) => bytes.len() as u64,
            Storage::Shared(files) => files.bytes(),
            Storage::Files(_) => 0,
        }
    }

    /// Opens token files as one stream, in order: files, folders and patterns, as [`Corpus::from_paths`]
    /// takes them.
    ///
    /// # Errors
    /// A path that does not exist, a file that is not a whole number of tokens, or no file at all.
    pub fn from_token_files(paths: &[String], width: TokenWidth) -> Result<Self> {
        let files = resolve(paths)?;
        Ok(Self { storage: Storage::Files(TokenFiles::open(files, width)?), origin: paths.join(", ") })
    }

    /// How many tokens there are.
    pub fn len(&self) -> u64 {
        match &self.storage {
            Storage::Held(width, bytes) => bytes.len() as u64 / width.bytes(),
            Storage::Shared(files) | Storage::Files(files) => files.len(),
        }
    }

    /// Whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What the tokens were made from, for reports and errors.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// Reads the tokens from `start` on, as many as `into` takes.
    ///
    /// # Errors
    /// A file that cannot be read.
    ///
    /// # Panics
    /// When the stream ends before `start + into.len()`.
    pub fn read(&self, start: u64, into: &mut [u32]) -> Result<()> {
        let end = start + into.len() as u64;
        assert!(end <= self.len(), "tokens {start}..{end} of a stream of {}", self.len());
        match &self.storage {
            Storage::Held(width, bytes) => {
                let width = width.bytes() as usize;
                let tokens = bytes[start as usize * width..end as usize * width].chunks_exact(width);
                for (id, bytes) in into.iter_mut().zip(tokens) {
                    let mut wide = [0; 4];
                    wide[..width].copy_from_slice(bytes);
                    *id = u32::from_le_bytes(wide);
                }
            }
            Storage::Shared(files) | Storage::Files(files) => files.read(start, into)?,
        }
        Ok(())
    }

    /// Checks that the tokens of `range` are below `vocab_size`, in bounded memory.
    ///
    /// # Errors
    /// [`DataError::Vocabulary`] with the first that is not, and its place; a file that cannot be read.
    pub fn check_vocab(&self, vocab_size: usize, range: Range<u64>) -> Result<()> {
        let mut block = Vec::new();
        for start in range.clone().step_by(BLOCK as usize) {
            block.resize((range.end - start).min(BLOCK) as usize, 0);
            self.read(start, &mut block)?;
            if let Some(index) = block.iter().position(|token| *token as usize >= vocab_size) {
                let (place, position) = self.locate(start + index as u64);
                return Err(DataError::Vocabulary { place, position, token: block[index], vocab_size });
            }
        }
        Ok(())
    }

    /// What ranks compare to know that they see the same data, and runs that they continue with it.
    ///
    /// Reads at most 1024 evenly spread blocks of 16 Ki tokens: the whole stream up to 16 Mi tokens, a sample
    /// of a longer one. Streams that differ in one token of those read differ in their fingerprint.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn fingerprint(&self) -> Result<Fingerprint> {
        let tokens = self.len();
        let blocks = tokens.div_ceil(BLOCK);
        let hashed = blocks.min(HASHED_BLOCKS);
        let (mut block, mut hash) = (Vec::new(), tokens);
        for index in 0..hashed {
            // The last block is always among them.
            let start = (index + 1) * blocks / hashed * BLOCK - BLOCK;
            block.resize((tokens - start).min(BLOCK) as usize, 0);
            self.read(start, &mut block)?;
            for token in &block {
                // Each step is a bijection of the hash, so that a difference is never lost.
                hash = (hash.rotate_left(5) ^ u64::from(*token)).wrapping_mul(0x517c_c1b7_2722_0a95);
            }
        }
        Ok(Fingerprint { tokens, hash: SplitMix64::new(hash).next_u64() })
    }

    /// What a token came from, and its position there.
    fn locate(&self, position: u64) -> (String, u64) {
        let in_file = match &self.storage {
            Storage::Files(files) => files.locate(position),
            Storage::Held(..) | Storage::Shared(_) => None,
        };
        in_file.unwrap_or_else(|| (self.origin.clone(), position))
    }
}

impl fmt::Debug for TokenStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TokenStream({} tokens of {})", self.len(), self.origin)
    }
}

/// A stream's length and a hash of its tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fingerprint {
    /// How many tokens the stream has.
    pub tokens: u64,
    /// A hash of those read; the same for text and for files with the same tokens.
    pub hash: u64,
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} tokens, hash {:016x}", self.tokens, self.hash)
    }
}
