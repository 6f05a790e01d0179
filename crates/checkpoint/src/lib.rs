//! Hugging Face weights for sharded models: folders of safetensors files, read by range and written whole.
//!
//! - [`SafetensorsFolder`] opens a folder and reads any range of any tensor as f32, so that each rank reads
//!   its own shard and little else.
//! - [`FolderWriter`] streams tensors into a new folder that `transformers` loads, and puts it in place in
//!   one step.
//!
//! Linear layers are stored as `[out, in]` by most Hugging Face models and held as `[in, out]` by Burn:
//! [`StoredLayout::Transposed`] turns one into the other while reading or writing, range by range.
//!
//! ```
//! use shardwise_checkpoint::{
//!     DEFAULT_MAX_FILE_BYTES, FloatType, FolderWriter, SafetensorsFolder, StoredLayout, TensorSpec,
//! };
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let parent = tempfile::tempdir()?;
//! let folder = parent.path().join("model");
//! let plan = vec![TensorSpec { name: "fc.weight".into(), shape: vec![3, 2], dtype: FloatType::F32 }];
//! let mut writer = FolderWriter::create(&folder, plan, DEFAULT_MAX_FILE_BYTES)?;
//! // Our parameter is [in, out] = [2, 3]; the file holds [out, in] = [3, 2].
//! writer.write("fc.weight", &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0], StoredLayout::Transposed)?;
//! writer.add_file("config.json", b"{}")?;
//! writer.finish()?;
//!
//! let weights = SafetensorsFolder::open(&folder)?;
//! let mut shard_of_rank_1 = [0.0; 3];
//! weights.read_range("fc.weight", 3..6, StoredLayout::Transposed, &mut shard_of_rank_1)?;
//! assert_eq!(shard_of_rank_1, [3.0, 4.0, 5.0]);
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod directory;
mod element;
mod error;
mod folder;
mod header;
mod index;
mod model_files;
mod plan;
mod read;
mod staging;
mod transpose;
mod writer;

pub use element::FloatType;
pub use error::{Error, Result};
pub use folder::{SafetensorsFolder, TensorInfo};
pub use model_files::COMPANION_FILES;
pub use plan::{DEFAULT_MAX_FILE_BYTES, TensorSpec};
pub use safetensors::Dtype;
pub use transpose::StoredLayout;
pub use writer::FolderWriter;

#[cfg(target_endian = "big")]
compile_error!("safetensors is little-endian, and this crate moves its bytes without swapping them");
