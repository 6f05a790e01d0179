//! `plan`: what each rank will hold and send, before anything is allocated.

use burn::tensor::Device;
use shardwise_burn::{ShardError, model_layouts};
use shardwise_core::{FlatLayout, MemoryPlan, PlanInput, StepSchedule, UnitSize};
use shardwise_engine::ParamGroups;

use shardwise_engine::Accumulation;

use crate::config::Config;
use crate::error::RunError;
use crate::report::{bytes, table, thousands};

/// Prints the plan of a configuration; returns the exit code.
///
/// # Errors
/// When the configuration cannot be trained.
pub fn run(config: &Config) -> Result<i32, RunError> {
    print!("{}", describe(config)?);
    Ok(0)
}

/// The plan of a run over `layouts`, the root's first if it has one.
///
/// # Errors
/// When the batches do not fit the ranks.
pub fn memory_plan(config: &Config, layouts: &[FlatLayout]) -> Result<MemoryPlan, RunError> {
    let schedule = StepSchedule::new(config.train.global_batch, config.train.micro_batch, config.run.ranks)?;
    let engine = config.engine();
    // A unit's flat parameters follow each other.
    let mut units: Vec<&[FlatLayout]> = layouts.chunk_by(|a, b| a.unit() == b.unit()).collect();
    let root = units.first().filter(|unit| unit[0].unit() == "root").map(|root| UnitSize::of(*root));
    units.drain(..usize::from(root.is_some()));
    Ok(MemoryPlan::new(&PlanInput {
        units: units.into_iter().map(UnitSize::of).collect(),
        root: root.unwrap_or_default(),
        strategy: engine.strategy,
        optimizer: ParamGroups::default()
            .plan(&engine, &layouts.iter().collect::<Vec<_>>())
            .map_err(ShardError::from)?,
        schedule,
        gather: engine.gather_policy(),
        shard_group: engine.shard_group_size(config.run.ranks).map_err(RunError::user)?,
        precision: engine.precision,
        unsharded_accumulation: engine.accumulation == Accumulation::Unsharded,
    }))
}

fn describe(config: &Config) -> Result<String, RunError> {
    let (model, warnings) = config.model_config()?;
    let group = config.engine().shard_group_size(config.run.ranks).map_err(RunError::user)?;
    let layouts = model_layouts(&model.init(&Device::flex().autodiff()).map_err(RunError::user)?, group)?;
    let plan = memory_plan(config, &layouts)?;
    let schedule = StepSchedule::new(config.train.global_batch, config.train.micro_batch, config.run.ranks)?;
    let parameters: usize = layouts.iter().map(FlatLayout::numel).sum();
    let mut text = String::new();
    for warning in &warnings {
        text.push_str(&format!("warning: {warning}\n"));
    }
    text.push_str(&format!(
        "{} with {} parameters in {} units and the root, {} over {} ranks\n",
        model.family(),
        thousands(parameters as u64),
        layouts.iter().filter(|l| l.unit() != "root").count(),
        config.shard.strategy,
        config.run.ranks
    ));
    text.push_str(&format!(
        "{} micro-batches of {} a step, in {} rounds\n\n",
        schedule.micro_batches(),
        config.train.micro_batch,
        schedule.rounds()
    ));
    let mut rows = vec![vec!["each rank will hold".to_string(), "bytes".into(), String::new()]];
    for (purpose, n) in plan.by_purpose() {
        rows.push(vec![purpose.to_string(), thousands(*n), bytes(*n)]);
    }
    rows.push(vec!["all of it, at the peak".into(), thousands(plan.total()), bytes(plan.total())]);
    let sent = plan.sent_per_step();
    rows.push(vec!["and send per step".into(), thousands(sent), bytes(sent)]);
    text.push_str(&table(&rows));
    let tokens = config.train.micro_batch * config.seq_len(&model);
    let logits = (tokens * model.vocab_size() * size_of::<f32>()) as u64;
    let inputs = (tokens * model.hidden_size() * model.num_layers() * size_of::<f32>()) as u64;
    text.push_str(&format!(
        "\nBeside that, while a micro-batch computes: logits and their gradient, {} each; block inputs, {}{}.\n",
        bytes(logits),
        bytes(inputs),
        if config.shard.recompute { "" } else { ", and each block's activations (shard.recompute = true frees those)" }
    ));
    Ok(text)
}
