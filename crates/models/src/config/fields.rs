//! The keys of a `config.json`: some are used; each of the others is kept, refused by name, or reported.

use serde_json::{Map, Value};

use crate::error::{ModelError, Result};

/// What is known of a key that is not used.
#[derive(Debug, Clone, Copy)]
pub(super) enum Rule {
    /// It does not change what training computes.
    Kept,
    /// It is written anew for every folder.
    Rewritten,
    /// It changes what the model computes: only this value is supported.
    Only(Supported),
    /// The probability of a dropout.
    Dropout,
}

/// The one supported value of a key.
#[derive(Debug, Clone, Copy)]
pub(super) struct Supported {
    /// In words.
    words: &'static str,
    /// Whether a value is it.
    is: fn(&Value) -> bool,
}

/// Only `true`.
pub(super) const ONLY_TRUE: Rule = Rule::Only(Supported { words: "true", is: |v| *v == Value::Bool(true) });

/// Only `false`, or nothing.
pub(super) const ONLY_FALSE: Rule =
    Rule::Only(Supported { words: "false", is: |v| v.is_null() || *v == Value::Bool(false) });

/// Only nothing.
pub(super) const ONLY_NULL: Rule = Rule::Only(Supported { words: "null", is: Value::is_null });

/// Only nothing, or an object without entries.
pub(super) const ONLY_EMPTY: Rule =
    Rule::Only(Supported { words: "{}", is: |v| v.is_null() || v.as_object().is_some_and(Map::is_empty) });

/// Only 1, or nothing.
pub(super) const ONLY_ONE: Rule =
    Rule::Only(Supported { words: "1", is: |v| v.is_null() || v.as_f64() == Some(1.0) });

/// The keys that every family may have: those of `PreTrainedConfig`, today and in older releases.
const COMMON: &[(&str, Rule)] = &[
    ("architectures", Rule::Rewritten),
    ("dtype", Rule::Rewritten),
    ("torch_dtype", Rule::Rewritten),
    ("add_cross_attention", ONLY_FALSE),
    ("cross_attention_hidden_size", ONLY_NULL),
    ("is_encoder_decoder", ONLY_FALSE),
    ("layer_types", ONLY_NULL),
    ("per_layer_config", ONLY_NULL),
    ("pruned_heads", ONLY_EMPTY),
    ("quantization_config", ONLY_NULL),
    ("sliding_window", ONLY_NULL),
    ("tie_encoder_decoder", ONLY_FALSE),
];

/// The keys of every family that say nothing about training: provenance, tokens, outputs, generation, other tasks.
const COMMON_KEPT: &[&str] = &[
    "_attn_implementation",
    "_from_model_config",
    "_name_or_path",
    "attn_implementation",
    "auto_map",
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "chunk_size_feed_forward",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "eos_token_id",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "gradient_checkpointing",
    "id2label",
    "is_decoder",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_labels",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_past",
    "output_scores",
    "pad_token_id",
    "prefix",
    "problem_type",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tie_last_hidden_states",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torchscript",
    "transformers_version",
    "typical_p",
    "use_bfloat16",
    "use_cache",
];

/// The keys of one file that have not been dealt with.
#[derive(Debug)]
pub(super) struct Fields<'a> {
    file: &'a str,
    keys: Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// Parses `text`; `file` names it in errors.
    pub(super) fn parse(text: &str, file: &'a str) -> Result<Self> {
        let problem = |found| ModelError::Json { file: file.to_string(), found };
        match serde_json::from_str(text) {
            Ok(Value::Object(keys)) => Ok(Self { file, keys }),
            Ok(other) => Err(problem(shortened(&other))),
            Err(error) => Err(problem(format!("other text ({error})"))),
        }
    }

    /// Takes a value out.
    pub(super) fn take(&mut self, key: &str) -> Option<Value> {
        self.keys.remove(key)
    }

    /// Looks at a value.
    pub(super) fn peek(&self, key: &str) -> Option<&Value> {
        self.keys.get(key)
    }

    /// Moves what stands under another name of `key` to `key`.
    pub(super) fn rename(&mut self, alias: &str, key: &'static str) -> Result<()> {
        let Some(value) = self.take(alias) else { return Ok(()) };
        let present = self.keys.entry(key).or_insert_with(|| value.clone());
        if *present == value {
            return Ok(());
        }
        let found =
            format!("{}, and {} under its other name `{alias}`", shortened(present), shortened(&value));
        Err(self.contradiction(key, found))
    }

    /// A warning about a value.
    pub(super) fn warning(&self, key: &str, value: &Value, what: &str) -> String {
        format!("{}: `{key}` ({}) {what}", self.file, shortened(value))
    }

    /// The error of two values for one setting.
    pub(super) fn contradiction(&self, key: &'static str, found: String) -> ModelError {
        let source = Box::new(ModelError::Invalid { key, found, expected: "one value".to_string() });
        ModelError::InFile { file: self.file.to_string(), source }
    }

    /// A whole number.
    pub(super) fn size(&mut self, key: &str, default: usize) -> Result<usize> {
        self.typed(key, "a whole number of 0 or more", whole).map(|size| size.unwrap_or(default))
    }

    /// A whole number, or nothing.
    pub(super) fn optional_size(&mut self, key: &str) -> Result<Option<usize>> {
        self.typed(key, "a whole number of 0 or more, or null", |value| match value {
            Value::Null => Some(None),
            _ => whole(value).map(Some),
        })
        .map(Option::flatten)
    }

    /// A number.
    pub(super) fn number(&mut self, key: &str, default: f64) -> Result<f64> {
        self.typed(key, "a number", Value::as_f64).map(|number| number.unwrap_or(default))
    }

    /// True or false.
    pub(super) fn flag(&mut self, key: &str, default: bool) -> Result<bool> {
        self.typed(key, "true or false", Value::as_bool).map(|flag| flag.unwrap_or(default))
    }

    /// A text.
    pub(super) fn text(&mut self, key: &str, default: &str) -> Result<String> {
        let text = self.typed(key, "a string", |value| value.as_str().map(str::to_string))?;
        Ok(text.unwrap_or_else(|| default.to_string()))
    }

    /// An object, or nothing.
    pub(super) fn object(&mut self, key: &'static str) -> Result<Option<Map<String, Value>>> {
        self.typed(key, "an object, or null", |value| match value {
            Value::Null => Some(None),
            _ => value.as_object().cloned().map(Some),
        })
        .map(Option::flatten)
    }

    fn typed<T>(
        &mut self,
        key: &str,
        expected: &'static str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.take(key) else { return Ok(None) };
        read(&value).map(Some).ok_or_else(|| self.wrong_type(key, expected, &value))
    }

    /// The error of a value of another type than `expected`.
    pub(super) fn wrong_type(&self, key: &str, expected: &'static str, found: &Value) -> ModelError {
        ModelError::Type {
            file: self.file.to_string(),
            key: key.to_string(),
            expected,
            found: shortened(found),
        }
    }

    /// The error of a setting that changes what the model computes.
    pub(super) fn unsupported(&self, key: &str, found: &Value, supported: &'static str) -> ModelError {
        ModelError::Unsupported {
            file: self.file.to_string(),
            key: key.to_string(),
            found: shortened(found),
            supported,
        }
    }

    /// Deals with all keys that were not taken: returns those to keep, and warnings.
    pub(super) fn finish(
        self,
        family: &[(&str, Rule)],
        family_kept: &[&str],
    ) -> Result<(Map<String, Value>, Vec<String>)> {
        let mut warnings = Vec::new();
        let mut kept = Map::new();
        for (key, value) in &self.keys {
            match rule(key, family, family_kept) {
                Some(Rule::Kept) => {}
                Some(Rule::Rewritten) => continue,
                Some(Rule::Only(supported)) if (supported.is)(value) => {}
                Some(Rule::Only(supported)) => return Err(self.unsupported(key, value, supported.words)),
                Some(Rule::Dropout) => match value {
                    Value::Null => {}
                    Value::Number(probability) if probability.as_f64() == Some(0.0) => {}
                    Value::Number(_) => {
                        warnings.push(self.warning(
                            key,
                            value,
                            "is not applied: training runs without dropout",
                        ));
                    }
                    other => return Err(self.wrong_type(key, "a probability", other)),
                },
                None if value.is_null() => {}
                None => warnings.push(self.warning(
                    key,
                    value,
                    "is not a known key; it is kept when saving and ignored",
                )),
            }
            kept.insert(key.clone(), value.clone());
        }
        Ok((kept, warnings))
    }
}

fn rule(key: &str, family: &[(&str, Rule)], family_kept: &[&str]) -> Option<Rule> {
    let known = family.iter().chain(COMMON).find(|(known, _)| *known == key).map(|(_, rule)| *rule);
    let kept = || COMMON_KEPT.iter().chain(family_kept).any(|known| *known == key).then_some(Rule::Kept);
    known.or_else(kept)
}

fn whole(value: &Value) -> Option<usize> {
    value.as_u64().and_then(|number| usize::try_from(number).ok())
}

/// A value as an error shows it: a long one by its beginning.
fn shortened(value: &Value) -> String {
    const LONGEST: usize = 80;
    let text = value.to_string();
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
