//! `bench step`: how long a training step takes, and how much memory, sharded or alone.

use std::time::{Duration, Instant};

use burn::tensor::{Device, Int, Tensor, TensorData};
use serde::Serialize;
use shardwise_burn::{ShardConfig, ShardedModel};
use shardwise_comm::ProcessGroup;
use shardwise_core::ShardingStrategy;
use shardwise_core::seed::SplitMix64;
use shardwise_engine::{DecayRule, EngineConfig, OptimizerConfig};
use shardwise_models::{CausalLm, Gpt2Config, LanguageModel, ModelConfig};

use crate::bounds;
use crate::config::{Config, TransportKind};
use crate::error::RunError;
use crate::memory;
use crate::output::print;
use crate::report::median;
use crate::world::{on_own_threads, run_ranks};

/// What to measure.
#[derive(Debug, Clone, clap::Args)]
pub struct StepArgs {
    /// How the model is sharded; "none": each rank steps the whole model by itself
    #[arg(long, value_enum, default_value = "full_shard")]
    strategy: BenchStrategy,
    /// Ranks that run at once
    #[arg(long, default_value_t = 2, value_parser = bounds::rank_count)]
    ranks: usize,
    /// Sequences that each rank computes in a step
    #[arg(long, default_value_t = 2, value_parser = bounds::count)]
    batch: usize,
    /// Steps; the first two are not timed
    #[arg(long, default_value_t = 16)]
    steps: usize,
    /// Compute each block's forward again in backward
    #[arg(long)]
    recompute: bool,
    /// Take the model and the sequence length from a configuration
    #[arg(long)]
    config: Option<std::path::PathBuf>,
    /// Threads that each rank computes with
    #[arg(long, default_value_t = 1, value_parser = bounds::thread_count)]
    threads_per_rank: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
enum BenchStrategy {
    FullShard,
    ShardGradOp,
    NoShard,
    None,
}

impl BenchStrategy {
    fn sharding(self) -> ShardingStrategy {
        match self {
            BenchStrategy::FullShard => ShardingStrategy::FullShard,
            BenchStrategy::ShardGradOp => ShardingStrategy::ShardGradOp,
            BenchStrategy::NoShard | BenchStrategy::None => ShardingStrategy::NoShard,
        }
    }

    fn name(self) -> &'static str {
        match self {
            BenchStrategy::None => "none",
            sharded => sharded.sharding().name(),
        }
    }
}

/// The result, of rank 0; memory is that of the rank that has most.
#[derive(Debug, Serialize)]
struct Line {
    strategy: &'static str,
    ranks: usize,
    batch_per_rank: usize,
    recompute: bool,
    parameters: usize,
    median_step_seconds: f64,
    min_step_seconds: f64,
    /// Peak of all resident pages, shared ones counted whole: what the system calls maximum resident set size.
    peak_resident_bytes: u64,
    resident_bytes_before_model: u64,
    /// Peak of resident memory with shared pages counted by their part, and what it was before the model.
    peak_proportional_bytes: u64,
    proportional_bytes_before_model: u64,
    /// What the engine held at its peak.
    ledger_peak_bytes: u64,
    /// One tensor of logits, and the inputs of all blocks.
    logits_bytes: u64,
    block_input_bytes: u64,
}

/// The model of the comparison with PyTorch: 13.9M parameters, context 256.
fn default_model() -> ModelConfig {
    ModelConfig::Gpt2(Gpt2Config {
        vocab_size: 4096,
        n_positions: 256,
        n_embd: 384,
        n_layer: 6,
        n_head: 6,
        tie_word_embeddings: false,
        ..Gpt2Config::default()
    })
}

/// Runs the benchmark as all ranks, or as the one that a launcher has started; returns the exit code.
///
/// # Errors
/// When the configuration is wrong, or the ranks cannot be started or fail.
pub fn run(args: &StepArgs) -> Result<i32, RunError> {
    let (model, seq_len) = match &args.config {
        None => (default_model(), 256),
        Some(path) => {
            let config = Config::load(path, &[])?;
            let (model, _) = config.model_config()?;
            let seq_len = config.seq_len(&model);
            (model, seq_len)
        }
    };
    if args.steps < 3 {
        return Err(RunError::user("bench step needs at least 3 steps"));
    }
    bounds::check_memory(&model, args.batch, seq_len)
        .map_err(|e| RunError::user(format!("{e}; lower --batch")))?;
    run_ranks(args.ranks, TransportKind::Shm, Duration::from_secs(300), |group| {
        on_own_threads(args.threads_per_rank, || measure(&group, args, &model, seq_len))?
    })
}

fn measure(
    world: &ProcessGroup,
    args: &StepArgs,
    config: &ModelConfig,
    seq_len: usize,
) -> Result<(), RunError> {
    // Alone, each rank is a group of one; the world only keeps the steps together.
    let color = if args.strategy == BenchStrategy::None { world.rank() } else { 0 };
    let group = world.split(color as u64, world.rank() as u64)?;
    let before = memory::Resident::now();
    let device = Device::flex().autodiff();
    let mut model = ShardedModel::new(
        group.clone(),
        config.init(&device).map_err(RunError::user)?,
        shard_config(args),
        &(),
    )?;
    let mut random = SplitMix64::new(100 + world.rank() as u64);
    let mut seconds = Vec::with_capacity(args.steps);
    for step in 0..args.steps {
        let (ids, targets) =
            [(); 2].map(|()| batch(&mut random, args.batch, seq_len, config.vocab_size(), &device)).into();
        world.barrier("step")?;
        let begun = Instant::now();
        let data = (ids, targets);
        model.step(group.size(), 3e-4, |model: &LanguageModel, _| {
            model.loss(data.0.clone(), data.1.clone())
        })?;
        world.barrier("step")?;
        if step >= 2 {
            seconds.push(begun.elapsed().as_secs_f64());
        }
    }
    let own = [
        memory::peak_of_all(),
        before.all,
        memory::PeakProportional::new().exact_bytes(),
        before.proportional,
        model.ledger().total_peak(),
    ];
    let most = maxima(world, &own)?;
    if world.rank() == 0 {
        let line = Line {
            strategy: args.strategy.name(),
            ranks: world.size(),
            batch_per_rank: args.batch,
            recompute: args.recompute,
            parameters: model.layouts().iter().map(|l| l.numel()).sum(),
            median_step_seconds: median(&seconds),
            min_step_seconds: seconds.iter().copied().fold(f64::INFINITY, f64::min),
            peak_resident_bytes: most[0],
            resident_bytes_before_model: most[1],
            peak_proportional_bytes: most[2],
            proportional_bytes_before_model: most[3],
            ledger_peak_bytes: most[4],
            logits_bytes: (args.batch * seq_len * config.vocab_size() * size_of::<f32>()) as u64,
            block_input_bytes: (args.batch
                * seq_len
                * config.hidden_size()
                * config.num_layers()
                * size_of::<f32>()) as u64,
        };
        print(&(serde_json::to_string(&line).map_err(RunError::failed)? + "\n"))?;
    }
    world.barrier("end")?;
    Ok(())
}

fn shard_config(args: &StepArgs) -> ShardConfig {
    ShardConfig {
        engine: EngineConfig {
            strategy: args.strategy.sharding(),
            optimizer: OptimizerConfig::AdamW { betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.01 },
            decay: DecayRule::All,
            ..EngineConfig::default()
        },
        recompute: args.recompute,
        seed: 0,
    }
}

fn batch(
    random: &mut SplitMix64,
    batch: usize,
    seq_len: usize,
    vocab: usize,
    device: &Device,
) -> Tensor<2, Int> {
    let ids: Vec<i64> = (0..batch * seq_len).map(|_| random.below(vocab as u64) as i64).collect();
    Tensor::from_data(TensorData::new(ids, [batch, seq_len]), device)
}

/// The largest of each figure over the ranks.
fn maxima(group: &ProcessGroup, own: &[u64]) -> Result<Vec<u64>, RunError> {
    let bytes: Vec<u8> = own.iter().flat_map(|n| n.to_le_bytes()).collect();
    let all = group.all_gather_bytes("figures", &bytes)?;
    let figure = |bytes: &[u8], i: usize| {
        bytes.get(i * 8..i * 8 + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes)
    };
    Ok((0..own.len()).map(|i| all.iter().map(|b| figure(b, i)).max().unwrap_or(0)).collect())
}
