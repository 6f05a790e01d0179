//! What can fail below the engine, before it is known on which rank.

use shardwise_comm::CommError;
use shardwise_tier::TierError;

use crate::error::EngineError;

/// A failure of communication or of a tier.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Trouble {
    Comm(CommError),
    Tier(TierError),
    /// A section of a tier that is not open.
    NoTier,
}

impl Trouble {
    /// The same, of `rank`.
    pub(crate) fn on(self, rank: usize) -> EngineError {
        match self {
            Trouble::Comm(source) => EngineError::Comm { rank, source },
            Trouble::Tier(source) => EngineError::Tier { rank, source },
            Trouble::NoTier => EngineError::Usage("a tier was used that is not open".to_string()),
        }
    }
}

impl From<TierError> for Trouble {
    fn from(error: TierError) -> Self {
        Trouble::Tier(error)
    }
}

impl From<CommError> for Trouble {
    fn from(error: CommError) -> Self {
        Trouble::Comm(error)
    }
}
