//! The trained model as a Hugging Face folder.

use std::path::Path;

use shardwise_burn::ShardedModel;
use shardwise_checkpoint::{DEFAULT_MAX_FILE_BYTES, FolderWriter};
use shardwise_models::{LanguageModel, ModelConfig, ModelError, export_plan, write_parameter};

use crate::data::Tokenizer;
use crate::error::RunError;
use crate::interrupt::PutOff;

/// Writes the model to `folder`, as a whole or not at all: gathered one unit at a time by all ranks, written by rank 0.
/// What was there before stays when it fails.
///
/// # Errors
/// When a parameter is not finite, the folder cannot be written, or communication fails.
pub(crate) fn write(
    model: &mut ShardedModel<LanguageModel>,
    config: &ModelConfig,
    tokenizer: Option<&Tokenizer>,
    folder: &Path,
) -> Result<(), RunError> {
    let failed = |e: ModelError| RunError::failed(format!("writing the model to {}: {e}", folder.display()));
    let is_writer = model.group().rank() == 0;
    // Outlives the writer, which removes what it began when it is dropped.
    let put_off = is_writer.then(PutOff::new);
    let mut writer = if is_writer {
        let plan = export_plan(config).map_err(failed)?;
        let writer = FolderWriter::create(folder, plan, DEFAULT_MAX_FILE_BYTES);
        Some(writer.map_err(|e| failed(e.into()))?)
    } else {
        None
    };
    let mut result = Ok(());
    model.export(|path, _, values| {
        if let Some(writer) = writer.as_mut().filter(|_| result.is_ok()) {
            if put_off.as_ref().is_some_and(PutOff::is_due) {
                result = Err(RunError::failed("a signal has interrupted it"));
                return;
            }
            result = check_finite(path, values)
                .and_then(|()| write_parameter(writer, config, path, values).map_err(failed));
        }
    })?;
    result?;
    let Some(mut writer) = writer else { return Ok(()) };
    let mut files = vec![("config.json".to_string(), config.to_json().into_bytes())];
    files.extend(tokenizer.map(Tokenizer::companion_files).unwrap_or_default());
    for (name, bytes) in files {
        writer.add_file(&name, &bytes).map_err(|e| failed(e.into()))?;
    }
    writer.finish().map(drop).map_err(|e| failed(e.into()))
}

/// A model with values that are not finite computes nothing: it must not take the place of one that does.
fn check_finite(path: &str, values: &[f32]) -> Result<(), RunError> {
    match values.iter().position(|value| !value.is_finite()) {
        None => Ok(()),
        Some(element) => Err(RunError::failed(format!(
            "element {element} of the trained parameter `{path}` is {}: the training has diverged; lower train.lr or set \
             train.clip_norm",
            values[element]
        ))),
    }
}
