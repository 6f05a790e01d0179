//! The keys of a configuration as text: overrides, and what is done about unknown ones.

use serde::Serialize;
use shardwise_models::{Gpt2Config, LlamaConfig};
use toml::{Table, Value};

use super::{OptimizerName, RunConfig, ShardingConfig, TrainConfig};
use crate::data::DataConfig;
use crate::error::RunError;
use crate::suggest::nearest;

/// Keys of `[train]` that have no default.
const OPTIONAL_TRAIN_KEYS: [&str; 7] =
    ["betas", "weight_decay", "momentum", "nesterov", "ema_decay", "clip_norm", "loss_scale"];

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
        "shard" => keys_of(
            ShardingConfig::default(),
            &["shard_group", "prefetch_bucket_size", "max_live_parameters"],
        ),
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
    const SECTIONS: [&str; 5] = ["run", "model", "data", "train", "shard"];
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

/// Refuses an unknown optimizer and suggests the nearest known one.
pub(super) fn check_optimizer(table: &Table, name: &str) -> Result<(), RunError> {
    let Some(Value::String(given)) = table.get("train").and_then(|train| train.get("optimizer")) else {
        return Ok(());
    };
    let known = OptimizerName::ALL.map(String::from);
    if known.contains(given) {
        return Ok(());
    }
    let hint = match nearest(given, &known) {
        Some(near) => format!("did you mean \"{near}\"?"),
        None => format!("known are {}", known.join(", ")),
    };
    Err(RunError::user(format!("{name}: train.optimizer is \"{given}\"; {hint}")))
}
