//! What can go wrong between ranks; every message names the ranks and the call.

use std::time::Duration;

use thiserror::Error;

use crate::quantise::RawMissing;

/// A failed communication. Clones are equal: one failure is reported to many callers.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CommError {
    /// Ranks of one group issued different calls at the same place in their order.
    #[error("ranks disagree about the next collective: {0}")]
    Mismatch(String),
    /// A rank's process ended, or its thread left, while others still needed it.
    #[error("rank {rank} was lost: {how}")]
    RankLost {
        /// The rank, in the world.
        rank: usize,
        /// How it ended.
        how: String,
    },
    /// A peer did not arrive in time.
    #[error(
        "rank {rank} waited {waited:?} for rank {peer} in {call}; rank {peer} is alive but did not get there: it is stuck, \
         far slower, or runs another program; raise run.timeout_seconds if it is only slow"
    )]
    Timeout {
        /// The rank that waited.
        rank: usize,
        /// The rank that did not come.
        peer: usize,
        /// What was waited for.
        call: String,
        /// For how long.
        waited: Duration,
    },
    /// Another rank reported a failure of its own.
    #[error("rank {rank} failed: {message}")]
    Peer {
        /// The rank that failed, in the world.
        rank: usize,
        /// Its message.
        message: String,
    },
    /// Ranks were started with different settings.
    #[error("{0}")]
    Disagreement(String),
    /// A call that cannot be right whatever the peers do.
    #[error("rank {rank}: {message}")]
    Usage {
        /// The calling rank.
        rank: usize,
        /// What is wrong and what would be right.
        message: String,
    },
    /// The operating system refused something.
    #[error("{what}: {source_text}")]
    System {
        /// What was attempted.
        what: String,
        /// The system's words.
        source_text: String,
    },
    /// The ranks could not find each other.
    #[error("{0}")]
    Rendezvous(String),
}

impl CommError {
    /// What a peer lends of `label` cannot be decoded.
    pub fn undecodable(label: &str, source: &crate::quantise::RawMissing) -> Self {
        Self::system(format!("decoding what travels of `{label}`"), source)
    }

    pub(crate) fn system(what: impl Into<String>, source: impl std::fmt::Display) -> Self {
        CommError::System { what: what.into(), source_text: source.to_string() }
    }
}

impl From<RawMissing> for CommError {
    fn from(missing: RawMissing) -> Self {
        Self::system("decoding what peers lend", missing)
    }
}
