//! What can fail below the engine, before it is known on which rank.

use shardwise_comm::CommError;
use shardwise_tier::TierError;

/// A failure of communication or of a tier.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Trouble {
    Comm(CommError),
    Tier(TierError),
    /// A section of a tier that is not open.
    NoTier,
}

impl From<CommError> for Trouble {
    fn from(error: CommError) -> Self {
        Trouble::Comm(error)
    }
}
