//! GPT-2 and Llama as plain Burn modules, with their Hugging Face configuration and names, and sampling of text.
//!
//! - [`ModelConfig`] reads and writes `config.json`, refuses by name what would change the mathematics, and builds a
//!   [`LanguageModel`]: [`Gpt2`] or [`Llama`].
//! - [`CausalLm`] is what both families can do: logits, the mean loss, the logits of the last position.
//! - [`WeightsFolder`] gives a rank its slices of a folder of safetensors, and only those; [`export_plan`] and
//!   [`write_parameter`] write such a folder.
//! - [`Sampler`] draws tokens from logits.
//!
//! The modules hold Burn's own parameter modules and compute with [`shardwise_burn::ops`]. Their blocks are wrapped in
//! [`shardwise_burn::Sharded`], the one trace of sharding here: outside a sharded run that is a plain call.
//!
//! ```
//! use burn::tensor::{Device, Tensor};
//! use shardwise_models::{CausalLm, Gpt2Config, ModelConfig};
//!
//! # fn main() -> shardwise_models::Result<()> {
//! let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 4, n_layer: 1, n_head: 2, ..Default::default() };
//! let model = ModelConfig::Gpt2(sizes).init(&Device::flex())?;
//! let ids = Tensor::from_data([[1, 2, 3]], &Device::flex());
//! assert_eq!(model.forward(ids).dims(), [1, 3, 11]);
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod causal_lm;
mod config;
mod error;
mod export;
mod gpt2;
mod layers;
mod llama;
mod names;
mod parameters;
mod rotary;
mod sampling;
mod weights;

pub use causal_lm::{CausalLm, LanguageModel};
pub use config::{Gpt2Config, LlamaConfig, ModelConfig};
pub use error::{ModelError, Result};
pub use export::{export_plan, write_parameter};
pub use gpt2::{Gpt2, Gpt2Block};
pub use llama::{Llama, LlamaBlock};
pub use parameters::ParameterInfo;
pub use sampling::Sampler;
pub use weights::WeightsFolder;
