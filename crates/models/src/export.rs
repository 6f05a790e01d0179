//! A model as `transformers`' `save_pretrained` would save it: names, shapes, one parameter at a time.

use shardwise_checkpoint::{FloatType, FolderWriter, TensorSpec};

use crate::config::ModelConfig;
use crate::error::Result;

/// The tensors of the model that `config` describes, in f32, for [`FolderWriter::create`]. A tied head is no tensor.
///
/// # Errors
/// As [`ModelConfig::validate`].
pub fn export_plan(config: &ModelConfig) -> Result<Vec<TensorSpec>> {
    let spec = |shape, name| TensorSpec { name, shape, dtype: FloatType::F32 };
    Ok(config.parameters()?.into_iter().map(|p| spec(p.stored_shape(), p.tensor)).collect())
}

/// Writes the parameter `path`, whose values are row-major in the module's shape, under its Hugging Face name.
///
/// # Errors
/// When the family has no such parameter, or the writer refuses it.
pub fn write_parameter(
    writer: &mut FolderWriter,
    config: &ModelConfig,
    path: &str,
    values: &[f32],
) -> Result<()> {
    let (name, layout) = config.hf_name(path)?;
    Ok(writer.write(&name, values, layout)?)
}
