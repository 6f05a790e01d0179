//! The data a run trains on: text or token files become one stream of tokens, and that becomes samples.
//!
//! - [`config`]: what a user writes under `[data]`.
//! - [`corpus`]: text files from paths, folders and patterns.
//! - [`cargo_sources`]: the text that a build left behind, for runs without a path.
//! - [`tokenizer`]: text to token ids and back.
//! - [`stream`]: all tokens of a run, in memory or in files, as one sequence.
//! - [`dataset`]: sample `g` of a run, the same whatever the ranks.
//! - [`permutation`]: the order of a shuffled epoch.
//!
//! ```
//! use shardwise::data::{Corpus, SamplerKind, TokenDataset, TokenStream, Tokenizer};
//!
//! # let folder = tempfile::tempdir()?;
//! # std::fs::write(folder.path().join("a.txt"), "to be, or not to be")?;
//! # let path = folder.path().display().to_string();
//! let tokenizer = Tokenizer::bytes();
//! let stream = TokenStream::from_text(&Corpus::from_paths(&[path])?, &tokenizer)?;
//! let dataset = TokenDataset::new(stream, 5, SamplerKind::Sequential, 0)?;
//! let (inputs, targets) = dataset.sample(1)?;
//! assert_eq!((tokenizer.decode(&inputs)?, tokenizer.decode(&targets)?), (", or ".into(), " or n".into()));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod cargo_packages;
pub mod cargo_sources;
pub mod config;
pub mod corpus;
pub mod dataset;
pub mod error;
mod files;
pub mod permutation;
pub mod stream;
mod text;
mod token_files;
pub mod tokenizer;

pub use cargo_sources::CargoSources;
pub use config::{DataConfig, Format, SamplerKind};
pub use corpus::Corpus;
pub(crate) use dataset::Source;
pub use dataset::TokenDataset;
pub use error::DataError;
pub use permutation::Permutation;
pub use stream::{Fingerprint, TokenStream};
pub use token_files::TokenWidth;
pub use tokenizer::Tokenizer;
