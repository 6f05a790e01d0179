//! Where a run's files go, and whose they are.

use std::path::PathBuf;
use std::time::Duration;

use shardwise_comm::ProcessGroup;
use shardwise_core::Offload;
use shardwise_tier::testing::Faults;
use shardwise_tier::{IoConfig, Place, RunFolder, Tier, TierConfig, TierError};

use crate::Result;
use crate::error::EngineError;

/// Where and how what rests in files is kept.
#[derive(Debug, Clone, Default)]
pub struct SwapPlace {
    /// The folder in which the run gets a folder of its own.
    pub path: PathBuf,
    /// The run's name: a new run of this name removes what a dead one has left, and nothing else.
    pub run: String,
    /// How files are read and written.
    pub io: IoConfig,
    /// For tests: a disk that fails on demand, of this rank.
    pub faults: Option<Faults>,
}

/// A run's folder; the first rank holds it.
pub(crate) struct Claimed {
    pub(crate) folder: PathBuf,
    pub(crate) run: Option<RunFolder>,
}

/// Folders that one process may hold for a run at the same time: a model that is laid out anew is held twice for a moment.
const GENERATIONS: usize = 8;

/// The name by which a model beside others of one run claims its folder: one that no run has by itself.
fn generation(run: &str, number: usize) -> String {
    if number == 0 { run.to_string() } else { format!("{run}\u{1}{number}") }
}

/// Takes the run's folder for all ranks. A collective.
pub(crate) fn claim(group: &ProcessGroup, place: Option<&SwapPlace>) -> Result<Claimed> {
    let rank = group.rank();
    let own = if rank == 0 { Some(claim_as_first(place)) } else { None };
    let message = match &own {
        Some(Ok(run)) => format!("+{}", run.path().display()),
        Some(Err(error)) => format!("-{error}"),
        None => String::new(),
    };
    let all = group.all_gather_varied("run folder", message.as_bytes());
    let all = all.map_err(|source| EngineError::Comm { rank, source })?;
    let text = all.first().map(|bytes| String::from_utf8_lossy(bytes).into_owned()).unwrap_or_default();
    match (own, text.strip_prefix('+')) {
        (Some(Err(error)), _) => Err(error),
        (own, Some(folder)) => {
            Ok(Claimed { folder: PathBuf::from(folder), run: own.and_then(std::result::Result::ok) })
        }
        (_, None) => Err(EngineError::Usage(text.trim_start_matches('-').to_string())),
    }
}

fn claim_as_first(place: Option<&SwapPlace>) -> Result<RunFolder> {
    let Some(place) = place else {
        return Err(EngineError::Usage(
            "what rests on nvme needs a folder for its files, and none was named: set offload.path in the configuration, or \
             give the model a `SwapPlace` where it is taken apart (`Init::swap_at`)"
                .to_string(),
        ));
    };
    let claim = |number| RunFolder::claim(&place.path, &generation(&place.run, number));
    let mut first = None;
    for number in 0..GENERATIONS {
        match claim(number) {
            Ok(run) => {
                if number == 0 {
                    // What a dead run has left of further models goes as well.
                    for later in 1..GENERATIONS {
                        if RunFolder::path_of(&place.path, &generation(&place.run, later)).exists() {
                            drop(claim(later));
                        }
                    }
                }
                return Ok(run);
            }
            Err(error) if is_ours(&error) => {
                first.get_or_insert(error);
            }
            Err(error) => {
                first.get_or_insert(error);
                break;
            }
        }
    }
    match first {
        Some(source) => Err(EngineError::Tier { rank: 0, source }),
        None => Err(EngineError::Usage("no folder could be claimed".to_string())),
    }
}

/// Whether a folder is in use by this very process.
fn is_ours(error: &TierError) -> bool {
    let own = std::process::id().to_string();
    matches!(error, TierError::Owned { owner, .. } if owner.split(' ').next() == Some(own.as_str()))
}

/// Opens one rank's tier.
pub(crate) fn open(
    at: Place,
    (rank, deadline): (usize, Duration),
    offload: &Offload,
    place: Option<&SwapPlace>,
) -> std::result::Result<Tier, TierError> {
    let config = TierConfig {
        place: at,
        rank,
        buffer_count: offload.buffer_count,
        buffer_bytes: offload.buffer_bytes(),
        io: place.map(|place| place.io).unwrap_or_default(),
        deadline,
    };
    match place.and_then(|place| place.faults.clone()) {
        Some(faults) => Tier::open_with_faults(config, faults),
        None => Tier::open(config),
    }
}
