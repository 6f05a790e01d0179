//! `plan`: what each rank will hold and send, before anything is allocated.

use shardwise_burn::ShardError;
use shardwise_core::{FlatLayout, MemoryPlan, StepSchedule};
use shardwise_engine::ParamGroups;
use shardwise_models::ModelConfig;

use crate::config::Config;
use crate::data::Format;
use crate::dataset;
use crate::error::RunError;
use crate::output::print;
use crate::report::{bytes, counted, table, thousands};
use crate::tiers;

/// Prints the plan of a configuration; returns the exit code.
///
/// # Errors
/// When the configuration cannot be trained.
pub fn run(config: &Config) -> Result<i32, RunError> {
    print(&describe(config)?)?;
    Ok(0)
}

/// The plan of a run over `layouts`, the root's first if it has one.
///
/// # Errors
/// When the batches do not fit the ranks.
pub fn memory_plan(config: &Config, layouts: &[FlatLayout]) -> Result<MemoryPlan, RunError> {
    let schedule = StepSchedule::new(config.train.global_batch, config.train.micro_batch, config.run.ranks)?;
    let layouts: Vec<&FlatLayout> = layouts.iter().collect();
    let plan = ParamGroups::default().memory_plan(&config.engine(), &layouts, schedule);
    Ok(plan.map_err(ShardError::from)?)
}

/// What a configuration says by itself, before weights, tokenizer and data are looked at.
pub(crate) struct Outline {
    pub(crate) model: ModelConfig,
    pub(crate) warnings: Vec<String>,
    pub(crate) schedule: StepSchedule,
    pub(crate) seq_len: usize,
}

impl Outline {
    /// Makes sure that model, batches and samples fit each other.
    pub(crate) fn of(config: &Config) -> Result<Self, RunError> {
        let (model, mut warnings) = config.model_config()?;
        warnings.extend(config.offload.warning());
        let schedule =
            StepSchedule::new(config.train.global_batch, config.train.micro_batch, config.run.ranks)?;
        let seq_len = config.seq_len(&model);
        if seq_len > model.max_positions() {
            return Err(RunError::user(format!(
                "data.seq_len is {seq_len}, but the model has {} positions; lower one or raise the other",
                model.max_positions()
            )));
        }
        Ok(Self { model, warnings, schedule, seq_len })
    }
}

fn describe(config: &Config) -> Result<String, RunError> {
    let Outline { model, warnings, schedule, seq_len } = Outline::of(config)?;
    let layouts = tiers::layouts(config, &model)?;
    tiers::check(config, &layouts)?;
    let plan = memory_plan(config, &layouts)?;
    let parameters: usize = layouts.iter().map(FlatLayout::numel).sum();
    let mut text = String::new();
    for warning in &warnings {
        text.push_str(&format!("warning: {warning}\n"));
    }
    text.push_str(&format!(
        "{} with {} parameters in {} and the root, {} over {}\n",
        model.family(),
        thousands(parameters as u64),
        counted(layouts.iter().filter(|l| l.unit() != "root").count() as u64, "unit"),
        config.shard.strategy,
        counted(config.run.ranks as u64, "rank")
    ));
    text.push_str(&format!(
        "{} of {} a step, in {}\n\n",
        if schedule.micro_batches() == 1 {
            "1 micro-batch".into()
        } else {
            format!("{} micro-batches", schedule.micro_batches())
        },
        config.train.micro_batch,
        counted(schedule.rounds() as u64, "round")
    ));
    let mut rows = vec![vec!["each rank will hold".to_string(), "bytes".into(), String::new()]];
    for (purpose, n) in plan.by_purpose().iter().filter(|(_, n)| *n > 0) {
        rows.push(vec![purpose.to_string(), thousands(*n), bytes(*n)]);
    }
    rows.push(vec!["all of it, at the peak".into(), thousands(plan.total()), bytes(plan.total())]);
    let sent = plan.sent_per_step();
    rows.push(vec!["and send per step".into(), thousands(sent), bytes(sent)]);
    let across = plan.sent_across_per_step();
    if across > 0 {
        rows.push(vec!["of that across nodes".into(), thousands(across), bytes(across)]);
    }
    text.push_str(&table(&rows));
    text.push_str(&tiers::describe(config, &layouts, &plan)?);
    let tensor = |sizes: &[usize]| {
        sizes.iter().fold(size_of::<f32>() as u64, |product, n| product.saturating_mul(*n as u64))
    };
    let samples = config.train.micro_batch;
    let logits = tensor(&[samples, seq_len, model.vocab_size()]);
    let inputs = tensor(&[samples, seq_len, model.hidden_size(), model.num_layers()]);
    text.push_str(&format!(
        "\nBeside that, while a micro-batch computes: logits and their gradient, {} each; block inputs, {}{}.\n",
        bytes(logits),
        bytes(inputs),
        if config.shard.recompute { "" } else { ", and each block's activations (shard.recompute = true frees those)" }
    ));
    if config.data.format == Format::Text {
        text.push_str(&format!(
            "Text is made into tokens once and held once for all ranks, beside their own memory: {}.\n",
            dataset::text_memory(config)?
        ));
    }
    Ok(text)
}
