//! The configuration of GPT-2.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::fields::{Fields, ONLY_FALSE, ONLY_TRUE, Rule};
use super::{keep_token_ids, limits, without_token_ids};
use crate::error::Result;

/// A GPT-2 (Radford et al. 2019), under the names of `transformers`' `GPT2Config` and with its defaults: the model of
/// 124 million parameters.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Gpt2Config {
    /// How many tokens there are.
    pub vocab_size: usize,
    /// The longest sequence.
    pub n_positions: usize,
    /// The width of the residual stream.
    pub n_embd: usize,
    /// How many blocks there are.
    pub n_layer: usize,
    /// Attention heads of a block; divides `n_embd`.
    pub n_head: usize,
    /// The width inside the MLP; four times `n_embd` when left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub n_inner: Option<usize>,
    /// The MLP's activation: one of the names of the GELU with the tanh approximation.
    pub activation_function: String,
    /// Added to the variance in layer norms.
    pub layer_norm_epsilon: f64,
    /// The standard deviation of initial values.
    pub initializer_range: f64,
    /// Whether the head's weight is the token embedding's.
    pub tie_word_embeddings: bool,
    /// Keys of the `config.json` that the configuration was read from which do not change what training computes.
    #[serde(skip)]
    pub kept: Map<String, Value>,
}

impl Default for Gpt2Config {
    fn default() -> Self {
        Self {
            vocab_size: 50257,
            n_positions: 1024,
            n_embd: 768,
            n_layer: 12,
            n_head: 12,
            n_inner: None,
            activation_function: "gelu_new".to_string(),
            layer_norm_epsilon: 1e-5,
            initializer_range: 0.02,
            tie_word_embeddings: true,
            kept: Map::new(),
        }
    }
}

/// The names that `transformers` has for one function, the GELU with the tanh approximation.
const ACTIVATIONS: &[&str] = &["gelu_new", "gelu_pytorch_tanh", "gelu_fast"];

/// What the keys that are not used mean.
const RULES: &[(&str, Rule)] = &[
    ("attn_pdrop", Rule::Dropout),
    ("embd_pdrop", Rule::Dropout),
    ("resid_pdrop", Rule::Dropout),
    ("reorder_and_upcast_attn", ONLY_FALSE),
    ("scale_attn_by_inverse_layer_idx", ONLY_FALSE),
    ("scale_attn_weights", ONLY_TRUE),
];

/// Keys for other tasks than language modelling, and of the first releases.
const KEPT: &[&str] = &[
    "n_ctx",
    "n_special",
    "predict_special_tokens",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
];

/// Other names that `transformers` reads some keys under.
const ALIASES: &[(&str, &str)] = &[
    ("hidden_size", "n_embd"),
    ("max_position_embeddings", "n_positions"),
    ("num_attention_heads", "n_head"),
    ("num_hidden_layers", "n_layer"),
];

impl Gpt2Config {
    /// The family's name.
    pub const FAMILY: &'static str = "gpt2";

    /// The keys that a configuration may set.
    pub const KEYS: &'static [&'static str] = &[
        "vocab_size",
        "n_positions",
        "n_embd",
        "n_layer",
        "n_head",
        "n_inner",
        "activation_function",
        "layer_norm_epsilon",
        "initializer_range",
        "tie_word_embeddings",
    ];

    /// The width inside the MLP.
    pub fn inner_width(&self) -> usize {
        self.n_inner.unwrap_or(4 * self.n_embd)
    }

    pub(super) fn from_fields(mut fields: Fields<'_>) -> Result<(Self, Vec<String>)> {
        for (alias, name) in ALIASES {
            fields.rename(alias, name)?;
        }
        let default = Self::default();
        let mut config = Self {
            vocab_size: fields.size("vocab_size", default.vocab_size)?,
            n_positions: fields.size("n_positions", default.n_positions)?,
            n_embd: fields.size("n_embd", default.n_embd)?,
            n_layer: fields.size("n_layer", default.n_layer)?,
            n_head: fields.size("n_head", default.n_head)?,
            n_inner: fields.optional_size("n_inner")?,
            activation_function: fields.text("activation_function", &default.activation_function)?,
            layer_norm_epsilon: fields.number("layer_norm_epsilon", default.layer_norm_epsilon)?,
            initializer_range: fields.number("initializer_range", default.initializer_range)?,
            tie_word_embeddings: fields.flag("tie_word_embeddings", default.tie_word_embeddings)?,
            kept: Map::new(),
        };
        let (kept, warnings) = fields.finish(RULES, KEPT)?;
        config.kept = kept;
        keep_token_ids(&mut config.kept, &[("bos_token_id", 50256), ("eos_token_id", 50256)]);
        Ok((config, warnings))
    }

    /// All keys that go into a `config.json`.
    pub(super) fn to_keys(&self) -> Map<String, Value> {
        let mut keys = self.kept.clone();
        without_token_ids(&mut keys);
        let own: [(&str, Value); 10] = [
            ("vocab_size", self.vocab_size.into()),
            ("n_positions", self.n_positions.into()),
            ("n_embd", self.n_embd.into()),
            ("n_layer", self.n_layer.into()),
            ("n_head", self.n_head.into()),
            ("n_inner", self.n_inner.into()),
            ("activation_function", self.activation_function.as_str().into()),
            ("layer_norm_epsilon", self.layer_norm_epsilon.into()),
            ("initializer_range", self.initializer_range.into()),
            ("tie_word_embeddings", self.tie_word_embeddings.into()),
        ];
        keys.extend(own.map(|(key, value)| (key.to_string(), value)));
        keys
    }

    pub(super) fn validate(&self) -> Result<()> {
        limits::sizes(&[
            ("vocab_size", self.vocab_size),
            ("n_positions", self.n_positions),
            ("n_embd", self.n_embd),
            ("n_head", self.n_head),
        ])?;
        limits::sizes(&[("n_inner", self.inner_width())])?;
        limits::divides("n_embd", self.n_embd, ("n_head", self.n_head))?;
        let (width, inner) = (self.n_embd as u128, self.inner_width() as u128);
        limits::layers("n_layer", self.n_layer, width * (4 * width + 2 * inner))?;
        limits::activation("activation_function", &self.activation_function, ACTIVATIONS)?;
        limits::epsilon("layer_norm_epsilon", self.layer_norm_epsilon)?;
        limits::initializer_range(self.initializer_range)
    }
}
