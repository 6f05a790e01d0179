//! What will rest on the host and in files, and whether there is room for it.

use std::path::Path;

use shardwise_core::{FlatLayout, MemoryPlan, Offload, Purpose, Tier};
use shardwise_engine::FileAccess;

use crate::bounds::available_bytes;
use crate::config::Config;
use crate::error::RunError;
use crate::plan::memory_plan;
use crate::report::{bytes, counted, table, thousands};

/// Buffers for each tile in hand: one is read, one computed with, one written.
const BUFFERS_PER_TILE: usize = 3;

/// What of one rank rests elsewhere, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Resting {
    /// Shards of parameters.
    pub(crate) parameters: u64,
    /// Statistics, averages of the weights and sums of gradients.
    pub(crate) optimizer: u64,
}

impl Resting {
    /// What a plan without offload holds in memory and `plan` does not.
    pub(crate) fn of(config: &Config, layouts: &[FlatLayout], plan: &MemoryPlan) -> Result<Self, RunError> {
        let mut in_memory = config.clone();
        in_memory.offload.parameters = Tier::None;
        in_memory.offload.optimizer = Tier::None;
        let all = memory_plan(&in_memory, layouts)?;
        let away = |purpose| all.bytes(purpose).saturating_sub(plan.bytes(purpose));
        Ok(Self {
            parameters: away(Purpose::Parameters),
            optimizer: away(Purpose::OptimizerState)
                + away(Purpose::WeightAverages)
                + away(Purpose::GradientShards),
        })
    }

    /// Bytes in one tier.
    pub(crate) fn on(&self, tier: Tier, offload: &Offload) -> u64 {
        let part = |of: Tier, n: u64| if of == tier { n } else { 0 };
        part(offload.parameters, self.parameters) + part(offload.optimizer, self.optimizer)
    }
}

/// Tiles that an update has in hand at a time: parameters, gradient and each statistic, as far as they rest elsewhere.
pub(crate) fn least_buffers(config: &Config, layouts: &[FlatLayout]) -> usize {
    let engine = config.engine();
    let trained = layouts.iter().filter(|layout| layout.requires_grad()).flat_map(|l| l.params());
    let statistics = trained.map(|p| engine.optimizer.for_param(p).kind().states(p.shape.len())).max();
    let of_state = if engine.offload.optimizer.is_away() { 1 + statistics.unwrap_or(0) } else { 0 };
    usize::from(engine.offload.parameters.is_away()) + of_state
}

/// Refuses a pool that is too small, and what this machine has no room for.
///
/// # Errors
/// Naming what there is and what there must be.
pub(crate) fn check(config: &Config, layouts: &[FlatLayout]) -> Result<(), RunError> {
    let offload = config.engine().offload;
    if !offload.is_any() {
        return Ok(());
    }
    let (count, least) = (offload.buffer_count, least_buffers(config, layouts));
    if count < least {
        return Err(RunError::user(format!(
            "offload.buffer_count is {count}, but a step has {least} tiles in hand at a time; it must be at least {least}, \
             and {} lets it read, compute and write at the same time (with offload.buffer_size = {}: {} or {} a rank)",
            BUFFERS_PER_TILE * least,
            offload.buffer_numel,
            bytes((least * offload.buffer_bytes()) as u64),
            bytes((BUFFERS_PER_TILE * least * offload.buffer_bytes()) as u64),
        )));
    }
    let plan = memory_plan(config, layouts)?;
    let resting = Resting::of(config, layouts, &plan)?;
    let ranks = config.run.ranks as u64;
    let in_files = ranks * resting.on(Tier::Nvme, &offload);
    if let Some((path, free)) =
        config.offload.path.as_deref().and_then(|path| Some((path, free_bytes(path)?)))
        && offload.uses_files()
        && in_files > free
    {
        return Err(RunError::user(format!(
            "offload.path is {}, where {} are free, but {} keep {} there ({} bytes free, {} needed); free some, or choose \
             another offload.path",
            path.display(),
            bytes(free),
            counted(ranks, "rank"),
            bytes(in_files),
            thousands(free),
            thousands(in_files)
        )));
    }
    let on_host = ranks * resting.on(Tier::Host, &offload);
    let held = ranks * plan.total();
    match available_bytes() {
        Some(available) if on_host > 0 && on_host.saturating_add(held) > available => {
            Err(RunError::user(format!(
                "{} keep {} on the host (offload.parameters = \"{}\", offload.optimizer = \"{}\") and hold {} beside it, but \
                 this machine has {} of memory available; let more rest in files (\"nvme\"), or lower offload.ratio",
                counted(ranks, "rank"),
                bytes(on_host),
                offload.parameters,
                offload.optimizer,
                bytes(held),
                bytes(available)
            )))
        }
        _ => Ok(()),
    }
}

/// Free bytes of the file system that a folder is on, or will be.
fn free_bytes(path: &Path) -> Option<u64> {
    let path = std::path::absolute(path).ok()?;
    let there = path.ancestors().find(|folder| folder.exists())?;
    let stat = rustix::fs::statvfs(there).ok()?;
    Some(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// What a plan says of what rests elsewhere: a table of bytes of a rank and of all, and a line about the pool. Empty when
/// nothing does.
pub(crate) fn describe(
    config: &Config,
    layouts: &[FlatLayout],
    plan: &MemoryPlan,
) -> Result<String, RunError> {
    let offload = config.engine().offload;
    if !offload.is_any() {
        return Ok(String::new());
    }
    let resting = Resting::of(config, layouts, plan)?;
    let ranks = config.run.ranks as u64;
    let place = |tier: Tier| if tier == Tier::Nvme { "in files" } else { "on the host" };
    let row =
        |name: String, n: u64| vec![name, thousands(n), bytes(n), thousands(ranks * n), bytes(ranks * n)];
    let all = format!("of {}", counted(ranks, "rank"));
    let mut rows =
        vec![vec!["at rest elsewhere".to_string(), "bytes".into(), String::new(), all, String::new()]];
    let parts = [
        ("parameters", offload.parameters, resting.parameters),
        ("optimizer state and gradients", offload.optimizer, resting.optimizer),
    ];
    for (name, tier, n) in parts.into_iter().filter(|(_, tier, _)| tier.is_away()) {
        rows.push(row(format!("{name}, {}", place(tier)), n));
    }
    for tier in [Tier::Host, Tier::Nvme] {
        let n = resting.on(tier, &offload);
        if n > 0 {
            rows.push(row(format!("all {}", place(tier)), n));
        }
    }
    let least = least_buffers(config, layouts);
    let pool = format!(
        "Everything passes through {} of {} a rank and tier; at least {least} are needed, {} let a rank read, compute and \
         write at the same time.",
        counted(offload.buffer_count as u64, "buffer"),
        bytes(offload.buffer_bytes() as u64),
        BUFFERS_PER_TILE * least
    );
    Ok(format!("\n{}\n{pool}\n", table(&rows)))
}

/// The layouts of a model that is not built yet.
///
/// # Errors
/// When it cannot be sharded.
pub(crate) fn layouts(
    config: &Config,
    model: &shardwise_models::ModelConfig,
) -> Result<Vec<FlatLayout>, RunError> {
    let group = config.engine().shard_group_size(config.run.ranks).map_err(RunError::user)?;
    let model = model.init(&burn::tensor::Device::flex().autodiff()).map_err(RunError::user)?;
    Ok(shardwise_burn::model_layouts(&model, group)?)
}

/// What a run says of what rests elsewhere before it begins; `None` when nothing does.
pub(crate) fn announcement(config: &Config, files: Option<&FileAccess>) -> Option<String> {
    let offload = config.engine().offload;
    if !offload.is_any() {
        return None;
    }
    let mut text = format!("offload: parameters {}, optimizer {}", offload.parameters, offload.optimizer);
    if let (Some(files), Some(path)) = (files, &config.offload.path) {
        let direct = if files.direct { "direct" } else { "through the system's cache" };
        text.push_str(&format!("; files below {}, by {}, {direct}", path.display(), files.method));
        if let Some(why) = &files.why {
            text.push_str(&format!(" ({why})"));
        }
    }
    Some(text)
}
