//! A model's configuration: one of two families, with the keys that Hugging Face's `config.json` has for it.

mod fields;
mod gpt2;
mod limits;
mod llama;

use burn::tensor::Device;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::causal_lm::LanguageModel;
use crate::error::{ModelError, Result};
use crate::gpt2::Gpt2;
use crate::llama::Llama;
use fields::Fields;

pub use gpt2::Gpt2Config;
pub use llama::LlamaConfig;

/// The configuration of a model.
///
/// As a part of a TOML or JSON document it is a table with the key `family` (`"gpt2"` or `"llama"`) and the family's own
/// keys, each with a default.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "family", rename_all = "lowercase")]
pub enum ModelConfig {
    /// GPT-2.
    Gpt2(Gpt2Config),
    /// Llama.
    Llama(LlamaConfig),
}

impl ModelConfig {
    /// Reads the text of a `config.json`; `file` names it in errors. Beside the configuration it returns warnings: what
    /// the file asks for that training does otherwise, and keys that are not known.
    ///
    /// Keys that do not change what training computes are kept, and written again by [`ModelConfig::to_json`]. A key
    /// left out has the value that `transformers` gives it.
    ///
    /// # Errors
    /// For text that is no JSON object, another `model_type`, a value of the wrong type, a setting that would change the
    /// mathematics and is not supported, or impossible sizes.
    pub fn from_json(text: &str, file: &str) -> Result<(Self, Vec<String>)> {
        let mut fields = Fields::parse(text, file)?;
        let family = fields.take("model_type").unwrap_or(Value::Null);
        let (config, warnings) = match family.as_str() {
            Some(Gpt2Config::FAMILY) => {
                let (config, warnings) = Gpt2Config::from_fields(fields)?;
                (Self::Gpt2(config), warnings)
            }
            Some(LlamaConfig::FAMILY) => {
                let (config, warnings) = LlamaConfig::from_fields(fields)?;
                (Self::Llama(config), warnings)
            }
            _ => return Err(ModelError::Family { file: file.to_string(), found: family.to_string() }),
        };
        config
            .validate()
            .map_err(|error| ModelError::InFile { file: file.to_string(), source: Box::new(error) })?;
        Ok((config, warnings))
    }

    /// The text of a `config.json` that `transformers` reads: every key of the family, those kept from the file that the
    /// configuration was read from, the class that the weights belong to, and float32 as their type.
    pub fn to_json(&self) -> String {
        let (mut keys, class) = match self {
            Self::Gpt2(config) => (config.to_keys(), "GPT2LMHeadModel"),
            Self::Llama(config) => (config.to_keys(), "LlamaForCausalLM"),
        };
        keys.insert("model_type".to_string(), self.family().into());
        keys.insert("architectures".to_string(), vec![class].into());
        keys.insert("dtype".to_string(), "float32".into());
        // Of an object made of strings, numbers and their like this is the pretty-printed text, with sorted keys.
        format!("{:#}\n", Value::Object(keys))
    }

    /// The family's name, in `family` and in `model_type`.
    pub fn family(&self) -> &'static str {
        match self {
            Self::Gpt2(_) => Gpt2Config::FAMILY,
            Self::Llama(_) => LlamaConfig::FAMILY,
        }
    }

    /// How many tokens the model knows.
    pub fn vocab_size(&self) -> usize {
        match self {
            Self::Gpt2(config) => config.vocab_size,
            Self::Llama(config) => config.vocab_size,
        }
    }

    /// The longest sequence, in tokens.
    pub fn max_positions(&self) -> usize {
        match self {
            Self::Gpt2(config) => config.n_positions,
            Self::Llama(config) => config.max_position_embeddings,
        }
    }

    /// The width of the residual stream.
    pub fn hidden_size(&self) -> usize {
        match self {
            Self::Gpt2(config) => config.n_embd,
            Self::Llama(config) => config.hidden_size,
        }
    }

    /// How many blocks the model has.
    pub fn num_layers(&self) -> usize {
        match self {
            Self::Gpt2(config) => config.n_layer,
            Self::Llama(config) => config.num_hidden_layers,
        }
    }

    /// Whether the head's weight is the token embedding's.
    pub fn tie_word_embeddings(&self) -> bool {
        match self {
            Self::Gpt2(config) => config.tie_word_embeddings,
            Self::Llama(config) => config.tie_word_embeddings,
        }
    }

    /// Checks that the sizes are possible, alone and together.
    ///
    /// # Errors
    /// [`ModelError::Invalid`] for the first that is not.
    pub fn validate(&self) -> Result<()> {
        match self {
            Self::Gpt2(config) => config.validate(),
            Self::Llama(config) => config.validate(),
        }
    }

    /// Builds the model on `device`. No parameter has a value yet: each is drawn when it is first used, in the family's
    /// own way (normal with standard deviation `initializer_range`; biases 0, norms 1; GPT-2's projections onto the
    /// residual stream divided by `sqrt(2 n_layer)`).
    ///
    /// # Errors
    /// As [`ModelConfig::validate`].
    pub fn init(&self, device: &Device) -> Result<LanguageModel> {
        self.validate()?;
        Ok(match self {
            Self::Gpt2(config) => LanguageModel::Gpt2(Gpt2::new(config, device)),
            Self::Llama(config) => LanguageModel::Llama(Llama::new(config, device)),
        })
    }
}

/// Adds the ids of special tokens that `transformers` assumes where a file gives none, so that a copy of the file means
/// the same.
fn keep_token_ids(kept: &mut Map<String, Value>, defaults: &[(&str, u32)]) {
    for (key, id) in defaults {
        kept.entry(*key).or_insert_with(|| (*id).into());
    }
}

/// Says that a model has no special tokens, where nothing is said: otherwise `transformers` assumes the ids of the
/// original model's.
fn without_token_ids(keys: &mut Map<String, Value>) {
    for key in ["bos_token_id", "eos_token_id", "pad_token_id"] {
        keys.entry(key).or_insert(Value::Null);
    }
}
