//! One failure, one message: of all ranks that fail, the first says why.

use shardwise_comm::{CommError, ProcessGroup};

use crate::error::RunError;

/// Marks a failure that the user can put right, on its way to other ranks.
const USER: &str = "the input is wrong: ";

/// Runs `body` and, if it fails, lets the other ranks know, so that they stop instead of waiting. A rank whose failure is
/// only the echo of another's returns [`RunError::Elsewhere`].
pub(crate) fn claimed(
    group: ProcessGroup,
    body: impl FnOnce(ProcessGroup) -> Result<(), RunError>,
) -> Result<(), RunError> {
    let transport = group.transport().clone();
    let rank = transport.rank();
    body(group).map_err(|error| {
        let mark = if matches!(error, RunError::User(_)) { USER } else { "" };
        transport.fail(&CommError::Peer { rank, message: format!("{mark}{error}") });
        match transport.failure() {
            Some(CommError::Peer { rank: first, message }) if first != rank => {
                let (code, text) = match message.strip_prefix(USER) {
                    Some(text) => (2, text.to_string()),
                    None => (1, message),
                };
                RunError::Elsewhere { code, message: format!("rank {first}: {text}") }
            }
            // Every rank has found the same difference; one of them says so.
            Some(CommError::Disagreement(message)) if rank != 0 => RunError::Elsewhere { code: 2, message },
            // Each rank that noticed a loss says so, under its own name.
            Some(CommError::RankLost { .. }) => match error {
                RunError::Failed(message) => RunError::Failed(format!("rank {rank}: {message}")),
                other => other,
            },
            _ => error,
        }
    })
}
