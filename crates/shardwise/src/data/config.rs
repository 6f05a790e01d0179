//! What a user writes under `[data]`.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize};

use super::token_files::TokenWidth;

/// The `[data]` table of a run. Relative paths count from the working directory.
///
/// ```toml
/// [data]
/// path = ["books/*.txt", "notes"]  # files, folders or patterns; without it, the default corpus
/// format = "text"                  # or "tokens-u16", "tokens-u32": little-endian ids and nothing else
/// tokenizer = "bytes"              # or the path of a tokenizer.json
/// seq_len = 256                    # tokens in a sample; without it, what suits the model
/// sampler = "shuffled"             # or "sequential"
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DataConfig {
    /// Files, folders and patterns, read as one stream in this order; one string, or a list of them. Empty
    /// stands for the default corpus: [`CargoSources`](super::CargoSources).
    #[serde(deserialize_with = "one_or_many", skip_serializing_if = "Vec::is_empty")]
    pub path: Vec<String>,
    /// What the files hold.
    pub format: Format,
    /// `"bytes"`, or the path of a `tokenizer.json`: a name that [`Tokenizer::open`](super::Tokenizer::open)
    /// takes. The run chooses when it is left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<String>,
    /// Tokens in a sample; its targets are as many, one further on. The run chooses when it is left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seq_len: Option<usize>,
    /// The order in which samples are visited.
    pub sampler: SamplerKind,
}

impl Default for DataConfig {
    fn default() -> Self {
        Self {
            path: Vec::new(),
            format: Format::Text,
            tokenizer: None,
            seq_len: None,
            sampler: SamplerKind::Shuffled,
        }
    }
}

/// What data files hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// UTF-8 text, for the tokenizer.
    Text,
    /// Token ids of 16 bits, little-endian, without a header.
    TokensU16,
    /// Token ids of 32 bits, little-endian, without a header.
    TokensU32,
}

impl Format {
    /// How wide the tokens of the files are; nothing for text.
    pub fn token_width(self) -> Option<TokenWidth> {
        match self {
            Self::Text => None,
            Self::TokensU16 => Some(TokenWidth::U16),
            Self::TokensU32 => Some(TokenWidth::U32),
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Text => "text",
            Self::TokensU16 => "tokens-u16",
            Self::TokensU32 => "tokens-u32",
        })
    }
}

/// The order in which samples are visited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SamplerKind {
    /// In the order of the stream, once: sample `g` starts at token `g * seq_len`.
    Sequential,
    /// The same windows, each once an epoch, every epoch in another seeded order; without end.
    Shuffled,
}

/// Reads a string as a list of one. An empty list is refused: it would silently mean the default corpus.
fn one_or_many<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected a path, or a list of paths")]
    enum OneOrMany {
        One(String),
        Many(Vec<String>),
    }
    match OneOrMany::deserialize(deserializer)? {
        OneOrMany::One(path) => Ok(vec![path]),
        OneOrMany::Many(paths) if paths.is_empty() => Err(serde::de::Error::custom(
            "expected a path or a list of paths, found an empty list; leave `path` out for the default corpus",
        )),
        OneOrMany::Many(paths) => Ok(paths),
    }
}
