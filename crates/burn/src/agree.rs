//! How ranks agree on opening a scope: what each asks for is exchanged, and all come to the same verdict.

use shardwise_comm::ProcessGroup;

use crate::access::SummonOptions;
use crate::error::ShardError;

const FIELD: char = '\u{1f}';
const ITEM: char = '\u{1e}';

/// What one rank asks for.
pub(crate) struct Request {
    pub(crate) call: &'static str,
    pub(crate) modifier_rank: Option<usize>,
    pub(crate) options: SummonOptions,
    pub(crate) paths: Vec<String>,
    /// Parameters that an open scope of this rank holds.
    pub(crate) overlaps: Vec<String>,
    /// Why this rank cannot even ask.
    pub(crate) problem: Option<ShardError>,
}

/// A request as it arrives.
#[derive(Debug, PartialEq)]
struct Asked {
    what: String,
    paths: Vec<String>,
    overlaps: Vec<String>,
    problem: String,
}

impl Asked {
    fn parse(bytes: &[u8]) -> Self {
        let text = String::from_utf8_lossy(bytes);
        let mut fields = text.split(FIELD);
        let mut field = || fields.next().unwrap_or_default();
        let items = |field: &str| field.split_terminator(ITEM).map(str::to_string).collect();
        Self {
            what: field().to_string(),
            paths: items(field()),
            overlaps: items(field()),
            problem: field().to_string(),
        }
    }
}

/// Returns once every rank has asked for the same, and nothing stands against it on any.
///
/// # Errors
/// On all ranks alike: a problem of any rank, requests that differ, or parameters that are held already.
pub(crate) fn agree(group: &ProcessGroup, request: Request) -> Result<(), ShardError> {
    let items = |list: &[String]| list.iter().map(|item| format!("{item}{ITEM}")).collect::<String>();
    let text = [
        what(&request),
        items(&request.paths),
        items(&request.overlaps),
        request.problem.as_ref().map(ToString::to_string).unwrap_or_default(),
    ]
    .join(&FIELD.to_string());
    let all = group.all_gather_varied("parameters to gather", text.as_bytes())?;
    let all: Vec<Asked> = all.iter().map(|bytes| Asked::parse(bytes)).collect();
    if let Some(problem) = request.problem {
        return Err(problem);
    }
    let members = group.members();
    if let Some((rank, asked)) = all.iter().enumerate().find(|(_, asked)| !asked.problem.is_empty()) {
        return Err(ShardError::ScopeOfPeer {
            call: request.call,
            rank: members[rank],
            message: asked.problem.clone(),
        });
    }
    let differs = |asked: &Asked| (&asked.what, &asked.paths) != (&all[0].what, &all[0].paths);
    if let Some((rank, asked)) = all.iter().enumerate().find(|(_, asked)| differs(asked)) {
        return Err(ShardError::ScopesDiffer {
            ranks: [members[0], members[rank]],
            asked: [description(&all[0], asked), description(asked, &all[0])],
        });
    }
    let holders: Vec<usize> =
        (0..all.len()).filter(|rank| !all[*rank].overlaps.is_empty()).map(|rank| members[rank]).collect();
    if holders.is_empty() {
        return Ok(());
    }
    // Every rank asked for the same paths, so their order is that of the first list.
    let held = |path: &&String| all.iter().any(|asked| asked.overlaps.contains(path));
    let paths = all[0].paths.iter().filter(held).cloned().collect();
    Err(ShardError::ScopeOverlap { call: request.call, paths, ranks: holders })
}

/// The call with its settings: what decides which collectives follow.
fn what(request: &Request) -> String {
    let SummonOptions { writeback, rank0_only, with_grads } = request.options;
    let set = |is_set: bool, name: &str| is_set.then(|| name.to_string());
    let settings = [
        request.modifier_rank.map(|rank| format!("modifier_rank {rank}")),
        set(writeback, "writeback"),
        set(rank0_only, "rank0_only"),
        set(with_grads, "with_grads"),
    ];
    match settings.into_iter().flatten().collect::<Vec<_>>() {
        none if none.is_empty() => request.call.to_string(),
        settings => format!("{} with {}", request.call, settings.join(", ")),
    }
}

/// The call, and the first parameter that the other rank did not ask for.
fn description(own: &Asked, other: &Asked) -> String {
    let only_here = own.paths.iter().find(|path| !other.paths.contains(path));
    let count = own.paths.len();
    match only_here {
        Some(path) => format!("{} of {count} parameters, `{path}` among them", own.what),
        None => format!("{} of {count} parameters", own.what),
    }
}
