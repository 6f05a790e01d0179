//! Where bytes rest: memory or NVMe, through one bounded pool of aligned buffers.
//!
//! A [`Tier`] belongs to one rank. It keeps *objects*, each made of *tiles* that are at most one buffer long. Tiles are
//! read and written whole and asynchronously; every byte passes through the buffers that were allocated when the tier was
//! opened, and there are never more of them. In files every tile is hashed when it is written and checked when it is read,
//! so that what comes back is what was stored, or an error.
//!
//! The crate does not know why bytes rest where they do: that is its caller's policy.

mod buffer;
mod config;
mod disk;
mod error;
mod folder;
mod host;
mod lock;
pub mod measure;
mod method;
mod names;
mod object;
mod open;
mod queue;
mod run_folder;
mod stats;
pub mod testing;
mod threads;
mod tier;
mod uring;

pub use buffer::Buffer;
pub use config::{DEFAULT_DEADLINE, IoConfig, IoMethod, Place, TierConfig};
pub use error::{Access, TierError};
pub use object::ObjectId;
pub use run_folder::RunFolder;
pub use stats::TierStats;
pub use tier::{Reading, Tier};

pub(crate) type Result<T> = std::result::Result<T, TierError>;
