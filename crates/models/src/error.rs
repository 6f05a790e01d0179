//! The one error type of this crate: what was expected, what was found, and what to do.

use std::path::PathBuf;

use thiserror::Error;

/// The result of this crate's calls.
pub type Result<T, E = ModelError> = std::result::Result<T, E>;

/// Why a model cannot be configured, filled with weights, exported or sampled from.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A configuration that is not a JSON object.
    #[error(
        "{file}: expected a JSON object as `transformers` writes it, found {found}; fetch or export it again"
    )]
    Json {
        /// The file, as the caller named it.
        file: String,
        /// What the parser met.
        found: String,
    },
    /// A configuration of a family that is not there.
    #[error(
        "{file}: expected `model_type` \"gpt2\" or \"llama\", found {found}; only these families can be trained"
    )]
    Family {
        /// The file, as the caller named it.
        file: String,
        /// The value found.
        found: String,
    },
    /// A value of the wrong type.
    #[error("{file}: expected {expected} under `{key}`, found {found}; correct it")]
    Type {
        /// The file, as the caller named it.
        file: String,
        /// The key.
        key: String,
        /// The type or range wanted.
        expected: &'static str,
        /// The value found.
        found: String,
    },
    /// A setting that changes what the model computes, and is not there.
    #[error(
        "{file}: `{key}` is {found}, but only {supported} is supported: it changes what the model computes; use another \
         model, or change the setting if the weights were trained without it"
    )]
    Unsupported {
        /// The file, as the caller named it.
        file: String,
        /// The key.
        key: String,
        /// The value found.
        found: String,
        /// The value or values supported.
        supported: &'static str,
    },
    /// Sizes that are impossible, alone or together.
    #[error("`{key}` is {found}, but it must be {expected}; correct it")]
    Invalid {
        /// The key.
        key: &'static str,
        /// The value found.
        found: String,
        /// What it must be.
        expected: String,
    },
    /// What is impossible about the sizes in a file.
    #[error("{file}: {source}")]
    InFile {
        /// The file, as the caller named it.
        file: String,
        /// What is wrong.
        source: Box<ModelError>,
    },
    /// A path that names none of the model's parameters.
    #[error(
        "expected a parameter of the {family} model, found `{path}`; pass the path that a walk over the module gives"
    )]
    UnknownParameter {
        /// The model's family.
        family: &'static str,
        /// The path.
        path: String,
    },
    /// Weights without a tensor that the model needs.
    #[error(
        "{}: expected tensor `{tensor}` of shape {shape:?} for the parameter `{path}`, found no tensor of that name \
         (with `{prefix}` or without); check that config.json belongs to these weights",
        folder.display()
    )]
    MissingTensor {
        /// The folder of the weights.
        folder: PathBuf,
        /// The tensor's Hugging Face name.
        tensor: String,
        /// Its shape as it should be stored.
        shape: Vec<usize>,
        /// The parameter's path in the module.
        path: String,
        /// The prefix that may be left out.
        prefix: &'static str,
    },
    /// Weights without the head of an untied model.
    #[error(
        "{}: expected tensor `{tensor}` of shape {shape:?}, since `tie_word_embeddings` is false, found none; fetch the \
         model with its head, or set `tie_word_embeddings` to true in config.json if the head is the token embedding",
        folder.display()
    )]
    MissingHead {
        /// The folder of the weights.
        folder: PathBuf,
        /// The head's Hugging Face name.
        tensor: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// A tensor that the model of the weights computes with, and the configured one does not.
    #[error(
        "{}: expected the tensors of a model with {layers} layers and no other in its layers, found `{tensor}` \
         ({count} such in all): without it the model computes something else; check that config.json belongs to these \
         weights, or use another model",
        folder.display()
    )]
    Surplus {
        /// The folder of the weights.
        folder: PathBuf,
        /// The first such tensor.
        tensor: String,
        /// How many there are.
        count: usize,
        /// The layers that the configuration has.
        layers: usize,
    },
    /// A tensor of the wrong shape.
    #[error(
        "{}: expected tensor `{tensor}` of shape {expected:?} for the parameter `{path}`, found {found:?}; check that \
         config.json belongs to these weights",
        file.display()
    )]
    TensorShape {
        /// The file that holds it.
        file: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// The shape as stored.
        found: Vec<usize>,
        /// The shape as it should be stored.
        expected: Vec<usize>,
        /// The parameter's path in the module.
        path: String,
    },
    /// A tensor that is not of a float type that can be read.
    #[error("{}: expected tensor `{tensor}` as F32, F16 or BF16, found {found}; convert it before training", file.display())]
    TensorType {
        /// The file that holds it.
        file: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// Its element type.
        found: shardwise_checkpoint::Dtype,
    },
    /// A head of its own in the weights of a model whose head is its embedding.
    #[error(
        "{}: expected `{head}` to equal `{embedding}`, since `tie_word_embeddings` is true, found other values; set \
         `tie_word_embeddings` to false in config.json to keep both",
        folder.display()
    )]
    HeadDiffers {
        /// The folder of the weights.
        folder: PathBuf,
        /// The head's name.
        head: String,
        /// The embedding's name.
        embedding: String,
    },
    /// The safetensors themselves.
    #[error(transparent)]
    Checkpoint(#[from] shardwise_checkpoint::Error),
    /// A prompt without tokens.
    #[error("expected a prompt of at least 1 token, found none; start from some text")]
    EmptyPrompt,
    /// Logits that nothing can be drawn from.
    #[error(
        "expected a finite logit for at least one token and none that is NaN, found {found}; the model has diverged, or \
         its weights are damaged"
    )]
    Logits {
        /// What is wrong with them.
        found: String,
    },
}
