//! Collectives over threads and shared memory, with one deterministic reduction.
//!
//! A [`Transport`] lets a rank lend bytes to its peers and read what they lend: that is all an all-gather, an
//! all-to-all, a broadcast and a barrier need, and over shared memory it takes no copy but the receiver's. A
//! [`ProcessGroup`] builds the collectives on it, among them the reduction of [`reduce`], which adds in one order
//! whatever the transport and the timing.
//!
//! Transports: [`threads`] (ranks are threads of one process; for tests) and [`shm`] (ranks are processes of one host;
//! the default). Every wait has a deadline, every call carries a [`Fingerprint`], and a rank that fails tells the
//! others, so nothing hangs.

mod agreement;
mod board;
pub mod buffer;
pub mod codec;
mod descendants;
pub mod error;
mod fabric;
pub mod fingerprint;
pub mod group;
pub mod launch;
mod liveness;
mod mapping;
mod memory;
pub mod pending;
pub mod quantise;
pub mod reduce;
mod rendezvous;
pub mod shm;
pub mod testing;
pub mod threads;
pub mod transport;

pub use buffer::{HostBuffer, SharedBuffer};
pub use error::CommError;
pub use fingerprint::{Fingerprint, OpKind};
pub use group::{ProcessGroup, ReduceScatter};
pub use pending::{GatherTarget, Loan, PendingGather, PendingReduce};
pub use transport::{Channel, Transport, Window};

/// The result of a communication.
pub type Result<T> = std::result::Result<T, CommError>;
