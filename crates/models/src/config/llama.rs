//! The configuration of Llama.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::fields::{Fields, ONLY_FALSE, ONLY_ONE, Rule};
use super::{keep_token_ids, limits, without_token_ids};
use crate::error::Result;

/// A Llama (Touvron et al., arXiv:2302.13971; grouped queries as in arXiv:2307.09288), under the names of
/// `transformers`' `LlamaConfig` and with its defaults: the model of 7 billion parameters. What is optional here follows
/// from the other sizes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LlamaConfig {
    /// How many tokens there are.
    pub vocab_size: usize,
    /// The width of the residual stream.
    pub hidden_size: usize,
    /// The width inside the MLP; when left out, that of the original models: two thirds of `4 * hidden_size`, rounded up
    /// to a multiple of 256.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub intermediate_size: Option<usize>,
    /// How many blocks there are.
    pub num_hidden_layers: usize,
    /// Query heads of a block; divides `hidden_size`.
    pub num_attention_heads: usize,
    /// Key and value heads of a block, which divide the query heads; as many as those when left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_key_value_heads: Option<usize>,
    /// Columns of a head, an even number; `hidden_size / num_attention_heads` when left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head_dim: Option<usize>,
    /// The MLP's activation: `silu`.
    pub hidden_act: String,
    /// The longest sequence.
    pub max_position_embeddings: usize,
    /// The base of the rotary frequencies.
    pub rope_theta: f64,
    /// Added to the mean square in norms.
    pub rms_norm_eps: f64,
    /// The standard deviation of initial values.
    pub initializer_range: f64,
    /// Whether the head's weight is the token embedding's.
    pub tie_word_embeddings: bool,
    /// Keys of the `config.json` that the configuration was read from which do not change what training computes.
    #[serde(skip)]
    pub kept: Map<String, Value>,
}

impl Default for LlamaConfig {
    fn default() -> Self {
        Self {
            vocab_size: 32000,
            hidden_size: 4096,
            intermediate_size: None,
            num_hidden_layers: 32,
            num_attention_heads: 32,
            num_key_value_heads: None,
            head_dim: None,
            hidden_act: "silu".to_string(),
            max_position_embeddings: 2048,
            rope_theta: 10000.0,
            rms_norm_eps: 1e-6,
            initializer_range: 0.02,
            tie_word_embeddings: false,
            kept: Map::new(),
        }
    }
}

/// What a file without `intermediate_size` means, whatever its `hidden_size`.
const FILE_INTERMEDIATE_SIZE: usize = 11008;

/// The names that `transformers` has for one function.
const ACTIVATIONS: &[&str] = &["silu", "swish"];

/// What the keys that are not used mean.
const RULES: &[(&str, Rule)] = &[
    ("attention_dropout", Rule::Dropout),
    ("attention_bias", ONLY_FALSE),
    ("mlp_bias", ONLY_FALSE),
    ("partial_rotary_factor", ONLY_ONE),
    ("pretraining_tp", ONLY_ONE),
];

impl LlamaConfig {
    /// The family's name.
    pub const FAMILY: &'static str = "llama";

    /// The keys that a configuration may set.
    pub const KEYS: &'static [&'static str] = &[
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "max_position_embeddings",
        "rope_theta",
        "rms_norm_eps",
        "initializer_range",
        "tie_word_embeddings",
    ];

    /// The width inside the MLP.
    pub fn inner_width(&self) -> usize {
        self.intermediate_size.unwrap_or_else(|| (8 * self.hidden_size).div_ceil(3).next_multiple_of(256))
    }

    /// Key and value heads of a block.
    pub fn num_kv_heads(&self) -> usize {
        self.num_key_value_heads.unwrap_or(self.num_attention_heads)
    }

    /// Columns of a head.
    pub fn head_width(&self) -> usize {
        self.head_dim.unwrap_or_else(|| self.hidden_size / self.num_attention_heads)
    }

    pub(super) fn from_fields(mut fields: Fields<'_>) -> Result<(Self, Vec<String>)> {
        let default = Self::default();
        let (rope_theta, mut warnings) = rope_theta(&mut fields)?;
        let mut config = Self {
            vocab_size: fields.size("vocab_size", default.vocab_size)?,
            hidden_size: fields.size("hidden_size", default.hidden_size)?,
            intermediate_size: Some(fields.size("intermediate_size", FILE_INTERMEDIATE_SIZE)?),
            num_hidden_layers: fields.size("num_hidden_layers", default.num_hidden_layers)?,
            num_attention_heads: fields.size("num_attention_heads", default.num_attention_heads)?,
            num_key_value_heads: fields.optional_size("num_key_value_heads")?,
            head_dim: fields.optional_size("head_dim")?,
            hidden_act: fields.text("hidden_act", &default.hidden_act)?,
            max_position_embeddings: fields
                .size("max_position_embeddings", default.max_position_embeddings)?,
            rope_theta: rope_theta.unwrap_or(default.rope_theta),
            rms_norm_eps: fields.number("rms_norm_eps", default.rms_norm_eps)?,
            initializer_range: fields.number("initializer_range", default.initializer_range)?,
            tie_word_embeddings: fields.flag("tie_word_embeddings", default.tie_word_embeddings)?,
            kept: Map::new(),
        };
        if let Some(id) = fields.peek("pad_token_id").filter(|id| !id.is_null()) {
            let what = "is trained like any other token, where `transformers` leaves its embedding as it is";
            warnings.push(fields.warning("pad_token_id", id, what));
        }
        let (kept, more) = fields.finish(RULES, &[])?;
        warnings.extend(more);
        config.kept = kept;
        keep_token_ids(&mut config.kept, &[("bos_token_id", 1), ("eos_token_id", 2)]);
        Ok((config, warnings))
    }

    /// All keys that go into a `config.json`.
    pub(super) fn to_keys(&self) -> Map<String, Value> {
        let mut keys = self.kept.clone();
        without_token_ids(&mut keys);
        let mut rope = Map::new();
        rope.insert("rope_theta".to_string(), self.rope_theta.into());
        rope.insert("rope_type".to_string(), "default".into());
        let own: [(&str, Value); 14] = [
            ("vocab_size", self.vocab_size.into()),
            ("hidden_size", self.hidden_size.into()),
            ("intermediate_size", self.inner_width().into()),
            ("num_hidden_layers", self.num_hidden_layers.into()),
            ("num_attention_heads", self.num_attention_heads.into()),
            ("num_key_value_heads", self.num_kv_heads().into()),
            ("head_dim", self.head_width().into()),
            ("hidden_act", self.hidden_act.as_str().into()),
            ("max_position_embeddings", self.max_position_embeddings.into()),
            ("rope_parameters", rope.into()),
            // Releases before 5 read this one, and would assume 10000 without it.
            ("rope_theta", self.rope_theta.into()),
            ("rms_norm_eps", self.rms_norm_eps.into()),
            ("initializer_range", self.initializer_range.into()),
            ("tie_word_embeddings", self.tie_word_embeddings.into()),
        ];
        keys.extend(own.map(|(key, value)| (key.to_string(), value)));
        keys
    }

    pub(super) fn validate(&self) -> Result<()> {
        limits::sizes(&[
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_kv_heads()),
            ("max_position_embeddings", self.max_position_embeddings),
        ])?;
        limits::sizes(&[("intermediate_size", self.inner_width())])?;
        // With a `head_dim` of its own a model would not need this, but `transformers` demands it all the same.
        limits::divides("hidden_size", self.hidden_size, ("num_attention_heads", self.num_attention_heads))?;
        limits::divides(
            "num_attention_heads",
            self.num_attention_heads,
            ("num_key_value_heads", self.num_kv_heads()),
        )?;
        let head_width = self.head_width();
        limits::sizes(&[("head_dim", head_width)])?;
        if !head_width.is_multiple_of(2) {
            let expected =
                "even: rotary embedding turns pairs of columns (set head_dim, or other numbers of heads)";
            return Err(limits::invalid("head_dim", head_width, expected));
        }
        let [width, inner] = [self.hidden_size, self.inner_width()].map(|size| size as u128);
        let attention = (self.num_attention_heads + self.num_kv_heads()) as u128 * head_width as u128;
        limits::layers("num_hidden_layers", self.num_hidden_layers, width * (2 * attention + 3 * inner))?;
        limits::activation("hidden_act", &self.hidden_act, ACTIVATIONS)?;
        if !(self.rope_theta.is_finite() && self.rope_theta > 0.0) {
            return Err(limits::invalid("rope_theta", self.rope_theta, "a positive number"));
        }
        limits::epsilon("rms_norm_eps", self.rms_norm_eps)?;
        limits::initializer_range(self.initializer_range)
    }
}

/// The base of the rotary frequencies, if the file gives it: under `rope_parameters` (release 5 of `transformers`), or as
/// a key of its own beside `rope_scaling` (before). Any other kind of rotary embedding is refused.
fn rope_theta(fields: &mut Fields<'_>) -> Result<(Option<f64>, Vec<String>)> {
    let mut theta = fields.take("rope_theta").filter(|value| !value.is_null());
    let mut warnings = Vec::new();
    for key in ["rope_parameters", "rope_scaling"] {
        for (name, value) in fields.object(key)?.unwrap_or_default() {
            let path = format!("{key}.{name}");
            match name.as_str() {
                _ if value.is_null() => {}
                "rope_type" | "type" if value == "default" => {}
                "rope_type" | "type" => return Err(fields.unsupported(&path, &value, "\"default\"")),
                "partial_rotary_factor" if value.as_f64() == Some(1.0) => {}
                "partial_rotary_factor" => return Err(fields.unsupported(&path, &value, "1")),
                "rope_theta" => match &theta {
                    Some(other) if other.as_f64() != value.as_f64() => {
                        return Err(
                            fields.contradiction("rope_theta", format!("{other}, and {value} in `{key}`"))
                        );
                    }
                    _ => theta = Some(value),
                },
                _ => warnings.push(fields.warning(
                    &path,
                    &value,
                    "has no meaning for a `rope_type` of \"default\"; it is dropped",
                )),
            }
        }
    }
    match theta {
        None => Ok((None, warnings)),
        Some(value) => match value.as_f64() {
            Some(theta) => Ok((Some(theta), warnings)),
            None => Err(fields.wrong_type("rope_theta", "a number", &value)),
        },
    }
}
