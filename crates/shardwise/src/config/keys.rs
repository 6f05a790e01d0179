//! The keys of a configuration as text: overrides, and what is done about unknown ones.

use serde::Serialize;
use shardwise_models::{Gpt2Config, LlamaConfig};
use toml::{Table, Value};

use super::{OffloadConfig, OptimizerName, QuantizeSetting, RunConfig, ShardingConfig, TrainConfig};
use crate::data::DataConfig;
use crate::error::RunError;
use crate::suggest::nearest;

/// Keys of `[train]` that have no default.
const OPTIONAL_TRAIN_KEYS: [&str; 7] =
    ["betas", "weight_decay", "momentum", "nesterov", "ema_decay", "clip_norm", "loss_scale"];

/// Keys of `[shard]` that have no default.
const OPTIONAL_SHARD_KEYS: [&str; 7] = [
    "shard_group",
    "prefetch_bucket_size",
    "max_live_parameters",
    "err_beta",
    "err_reset_steps",
    "node_size",
    "secondary_partition_size",
];

/// Keys of `[model]` beside the families' own.
pub(super) const MODEL_KEYS: [&str; 2] = ["family", "init_from"];

/// Applies one `section.key=value`.
pub(super) fn set(table: &mut Table, item: &str) -> Result<(), RunError> {
    let wrong =
        || RunError::user(format!("--set {item}: expected section.key=value, such as train.lr=0.001"));
    let (path, text) = item.split_once('=').ok_or_else(wrong)?;
    let (section, key) = path.trim().split_once('.').ok_or_else(wrong)?;
    // Whatever is not a TOML value by itself is a string without its quotes.
    let value = format!("x = {text}")
        .parse::<Table>()
        .ok()
        .and_then(|mut t| t.remove("x"))
        .unwrap_or_else(|| Value::String(text.to_string()));
    match table.entry(section).or_insert_with(|| Value::Table(Table::new())) {
        Value::Table(keys) => keys.insert(key.to_string(), value),
        _ => return Err(wrong()),
    };
    Ok(())
}

/// The keys of each section, from the defaults themselves.
fn known_keys(section: &str, table: &Table) -> Option<Vec<String>> {
    fn keys_of(value: impl Serialize, optional: &[&str]) -> Vec<String> {
        let mut keys: Vec<String> = match Value::try_from(value) {
            Ok(Value::Table(table)) => table.keys().cloned().collect(),
            _ => Vec::new(),
        };
        keys.extend(optional.iter().map(|k| (*k).to_string()));
        keys
    }
    Some(match section {
        "run" => keys_of(RunConfig::default(), &["output_dir"]),
        "data" => keys_of(DataConfig::default(), &["path", "tokenizer", "seq_len"]),
        "train" => keys_of(TrainConfig::default(), &OPTIONAL_TRAIN_KEYS),
        "shard" => keys_of(ShardingConfig::default(), &OPTIONAL_SHARD_KEYS),
        "offload" => keys_of(OffloadConfig::default(), &["path"]),
        "model" => {
            let family = match table.get("family").and_then(Value::as_str) {
                Some("llama") => LlamaConfig::KEYS,
                _ => Gpt2Config::KEYS,
            };
            MODEL_KEYS.iter().chain(family).map(|k| (*k).to_string()).collect()
        }
        _ => return None,
    })
}

/// Refuses unknown sections and keys, and suggests the nearest known one.
pub(super) fn check_keys(table: &Table, name: &str) -> Result<(), RunError> {
    const SECTIONS: [&str; 6] = ["run", "model", "data", "train", "shard", "offload"];
    let unknown = |what: String, known: &[String]| {
        let hint = match nearest(what.rsplit('.').next().unwrap_or(&what), known) {
            Some(near) => format!("did you mean `{near}`?"),
            None => format!("known are {}", known.join(", ")),
        };
        Err(RunError::user(format!("{name}: unknown key `{what}`; {hint}")))
    };
    for (section, value) in table {
        let Value::Table(keys) = value else {
            if SECTIONS.contains(&section.as_str()) {
                return Err(RunError::user(format!(
                    "{name}: `{section}` is {value}; expected a section, [{section}] with its keys on the lines after it"
                )));
            }
            return unknown(section.clone(), &SECTIONS.map(String::from));
        };
        let Some(known) = known_keys(section, keys) else {
            return unknown(section.clone(), &SECTIONS.map(String::from));
        };
        if let Some(key) = keys.keys().find(|k| !known.contains(k)) {
            return unknown(format!("{section}.{key}"), &known);
        }
    }
    if !table.contains_key("model") {
        return Err(RunError::user(format!(
            "{name}: there is no [model]; name a family (\"gpt2\" or \"llama\") or init_from, the folder of a model"
        )));
    }
    Ok(())
}

/// A setting that is a name out of a few, or a switch where it may be one.
struct Named<'a> {
    section: &'a str,
    key: &'a str,
    names: &'a [&'a str],
    is_switch: bool,
}

/// Refuses unknown names and suggests the nearest known one.
pub(super) fn check_names(table: &Table, name: &str) -> Result<(), RunError> {
    const TIERS: [&str; 3] = ["none", "host", "nvme"];
    const METHODS: [&str; 3] = ["auto", "uring", "threads"];
    const ROUNDINGS: [&str; 2] = ["nearest", "stochastic"];
    let of = |section, key, names| Named { section, key, names, is_switch: false };
    let switch = |section, key, names| Named { section, key, names, is_switch: true };
    let settings = [
        of("train", "optimizer", &OptimizerName::ALL),
        of("offload", "parameters", &TIERS),
        of("offload", "optimizer", &TIERS),
        of("offload", "io", &METHODS),
        of("shard", "quantization_rounding", &ROUNDINGS),
        switch("shard", "quantized_weights", &QuantizeSetting::ALL),
        switch("shard", "quantized_gradients", &QuantizeSetting::ALL),
    ];
    for setting in &settings {
        let given = table.get(setting.section).and_then(|section| section.get(setting.key));
        given.map_or(Ok(()), |given| setting.check(given, name))?;
    }
    Ok(())
}

impl Named<'_> {
    fn check(&self, given: &Value, name: &str) -> Result<(), RunError> {
        let mut known: Vec<String> = self.names.iter().map(|n| (*n).to_string()).collect();
        let hint = match given {
            Value::String(given) if known.contains(given) => return Ok(()),
            Value::Boolean(_) if self.is_switch => return Ok(()),
            Value::String(given) => nearest(given, &known).map(|near| format!("; did you mean \"{near}\"?")),
            _ => None,
        };
        if self.is_switch {
            known.extend(["true", "false"].map(String::from));
        }
        Err(RunError::user(format!(
            "{name}: {}.{} is {given}; it must be one of {}{}",
            self.section,
            self.key,
            known.join(", "),
            hint.unwrap_or_default()
        )))
    }
}
