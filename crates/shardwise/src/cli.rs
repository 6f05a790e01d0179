//! The program's commands and their options.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::bench;
use crate::config::Config;
use crate::error::RunError;
use crate::{generate, plan, train, world};

/// Trains models that do not fit one worker: parameters, gradients and optimizer state sharded over ranks.
#[derive(Debug, Parser)]
#[command(name = "shardwise", version, about, max_term_width = 100)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Train a model from a configuration file
    ///
    /// Starts run.ranks processes on this host and trains the configured model, each rank holding its part. Writes
    /// metrics.jsonl, summary.json and model/ (a Hugging Face folder) to run.output_dir. Started by a launcher that sets
    /// RANK and WORLD_SIZE, it is one of the ranks.
    Train(ConfigArgs),
    /// Print what each rank will hold and send, before anything is allocated
    Plan(ConfigArgs),
    /// Continue a text with a model from a Hugging Face folder
    Generate(generate::GenerateArgs),
    /// Start any program as the ranks of a world on this host
    ///
    /// Sets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. When a rank fails, the others are
    /// told which and are ended; the exit code is that of the rank that failed first.
    Launch(LaunchArgs),
    /// Measure communication, training steps and disks on this machine
    #[command(subcommand)]
    Bench(Bench),
}

/// A configuration and what to change in it.
#[derive(Debug, Clone, Args)]
pub struct ConfigArgs {
    /// The configuration, a TOML file with [run], [model], [data], [train], [shard] and [offload]
    config: PathBuf,
    /// Change a setting, for example --set train.lr=0.001 (repeatable)
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    set: Vec<String>,
}

#[derive(Debug, Args)]
struct LaunchArgs {
    /// How many ranks to start
    #[arg(short = 'n', long = "ranks", value_parser = clap::value_parser!(u32).range(1..=1024))]
    ranks: u32,
    /// The program and its arguments, after --
    #[arg(required = true, last = true, value_name = "PROGRAM [ARGS]")]
    program: Vec<OsString>,
}

#[derive(Debug, Subcommand)]
enum Bench {
    /// The rate of collectives: JSON lines
    Comm(bench::comm::CommArgs),
    /// The time and memory of a training step: a JSON line
    Step(bench::step::StepArgs),
    /// The rate of AdamW's update beside a plain copy's: JSON lines
    Optimizer(bench::optimizer::OptimizerArgs),
    /// How to read and write a folder's disk fastest: a table, and the [offload] lines to copy
    Disk(bench::disk::DiskArgs),
    /// The rates of quantising and dequantising beside a plain copy's
    Quantize(bench::quantize::QuantizeArgs),
}

impl Cli {
    /// Runs the command and returns the exit code.
    ///
    /// # Errors
    /// When the command fails; the error knows its exit code.
    pub fn run(self) -> Result<i32, RunError> {
        match self.command {
            Command::Train(args) => train::run(&Config::load(&args.config, &args.set)?),
            Command::Plan(args) => plan::run(&Config::load(&args.config, &args.set)?),
            Command::Generate(args) => generate::run(&args),
            Command::Launch(args) => {
                let mut words = args.program.into_iter();
                let program = words.next().unwrap_or_default();
                world::start_program(program, words.collect(), args.ranks as usize)
            }
            Command::Bench(Bench::Comm(args)) => bench::comm::run(&args),
            Command::Bench(Bench::Step(args)) => bench::step::run(&args),
            Command::Bench(Bench::Optimizer(args)) => bench::optimizer::run(&args),
            Command::Bench(Bench::Disk(args)) => bench::disk::run(&args),
            Command::Bench(Bench::Quantize(args)) => bench::quantize::run(&args),
        }
    }
}
