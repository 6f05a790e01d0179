//! What a run can end with, and the exit code that goes with it.

use std::fmt::Display;

use shardwise_burn::ShardError;
use shardwise_comm::CommError;
use shardwise_core::{LayoutError, PlanError};
use shardwise_engine::EngineError;
use shardwise_models::ModelError;
use shardwise_tier::TierError;
use thiserror::Error;

/// Why a command failed.
#[derive(Debug, Error)]
pub enum RunError {
    /// Something that the user can put right: configuration, data, files. Exit code 2.
    #[error("{0}")]
    User(String),
    /// The run itself failed: a lost rank, a gradient that is not finite, a full disk. Exit code 1.
    #[error("{0}")]
    Failed(String),
    /// Another rank failed and has said so. Exit code 1, or 2 when its mistake was the user's.
    #[error("{message}")]
    Elsewhere {
        /// The exit code.
        code: i32,
        /// What the other rank reported.
        message: String,
    },
}

impl RunError {
    /// A mistake of the user.
    pub fn user(message: impl Display) -> Self {
        RunError::User(message.to_string())
    }

    /// A failure of the run.
    pub fn failed(message: impl Display) -> Self {
        RunError::Failed(message.to_string())
    }

    /// The exit code of the program.
    pub fn exit_code(&self) -> i32 {
        match self {
            RunError::User(_) => 2,
            RunError::Failed(_) => 1,
            RunError::Elsewhere { code, .. } => *code,
        }
    }
}

impl From<PlanError> for RunError {
    fn from(error: PlanError) -> Self {
        Self::user(error)
    }
}

impl From<LayoutError> for RunError {
    fn from(error: LayoutError) -> Self {
        Self::user(error)
    }
}

impl From<CommError> for RunError {
    fn from(error: CommError) -> Self {
        match error {
            CommError::Disagreement(_) | CommError::Rendezvous(_) => Self::user(error),
            _ => Self::failed(error),
        }
    }
}

impl From<TierError> for RunError {
    fn from(error: TierError) -> Self {
        match error {
            TierError::Config { .. }
            | TierError::Folder { .. }
            | TierError::Owned { .. }
            | TierError::NoUring { .. }
            | TierError::NoBuffer { .. }
            | TierError::Memory { .. } => Self::user(error),
            _ => Self::failed(error),
        }
    }
}

impl From<ModelError> for RunError {
    fn from(error: ModelError) -> Self {
        Self::failed(error)
    }
}

impl From<ShardError> for RunError {
    fn from(error: ShardError) -> Self {
        match error {
            ShardError::Comm(error) => error.into(),
            ShardError::Engine(EngineError::Plan(error)) => error.into(),
            ShardError::Engine(EngineError::Tier { source, .. }) => source.into(),
            ShardError::Engine(_) => Self::failed(error),
            _ => Self::user(error),
        }
    }
}
