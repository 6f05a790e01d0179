//! `bench optimizer`: how near the update of the parameters comes to the speed of memory.

mod on_disk;

use std::hint::black_box;
use std::path::PathBuf;
use std::time::Instant;

use serde::Serialize;
use shardwise_comm::HostBuffer;
use shardwise_engine::OptimizerConfig;
use shardwise_engine::optimizer::Update;

use crate::bounds;
use crate::error::RunError;
use crate::output::print;
use crate::report::median;

/// What to measure.
#[derive(Debug, Clone, clap::Args)]
pub struct OptimizerArgs {
    /// Sizes of the parameters
    #[arg(long, num_args = 1.., default_values_t = [64], value_parser = bounds::mebibytes)]
    mebibytes: Vec<usize>,
    /// Timed calls; two more go before them
    #[arg(long, default_value_t = 15, value_parser = bounds::count)]
    calls: usize,
    /// Measure a step with its state in files in this folder instead, against the speed of the disk
    #[arg(long)]
    on_disk: Option<PathBuf>,
}

/// A line of the result: bytes read and written over the median time of a call, on one thread.
#[derive(Debug, Serialize)]
struct Line {
    work: &'static str,
    mebibytes: usize,
    gigabytes_per_second: f64,
    /// That of the work over that of the copy.
    ratio_to_copy: f64,
}

/// Runs the benchmark; returns the exit code.
///
/// # Errors
/// When memory cannot be had.
pub fn run(args: &OptimizerArgs) -> Result<i32, RunError> {
    for &mebibytes in &args.mebibytes {
        if let Some(path) = &args.on_disk {
            for line in on_disk::measure(path, mebibytes)? {
                print(&(serde_json::to_string(&line).map_err(RunError::failed)? + "\n"))?;
            }
            continue;
        }
        for line in measure(mebibytes, args.calls)? {
            print(&(serde_json::to_string(&line).map_err(RunError::failed)? + "\n"))?;
        }
    }
    Ok(0)
}

fn measure(mebibytes: usize, calls: usize) -> Result<[Line; 2], RunError> {
    let numel = (mebibytes << 20) / size_of::<f32>();
    let filled = |value: f32| -> Result<HostBuffer, RunError> {
        let mut buffer = HostBuffer::new(numel)?;
        buffer.as_mut_slice().fill(value);
        Ok(buffer)
    };
    let (mut params, gradient, mut m, mut v) = (filled(0.5)?, filled(0.01)?, filled(0.0)?, filled(0.0)?);
    // The copy and the update take turns, so that both see the same machine.
    let mut seconds = [Vec::with_capacity(calls), Vec::with_capacity(calls)];
    for call in 0..calls + 2 {
        let begun = Instant::now();
        black_box(&mut m).as_mut_slice().copy_from_slice(black_box(&gradient).as_slice());
        let copied = begun.elapsed().as_secs_f64();
        let update = Update {
            config: OptimizerConfig::ADAMW,
            lr: 1e-3,
            count: call as u64 + 1,
            clip: 1.0,
            decay: true,
        };
        let begun = Instant::now();
        update.apply(
            black_box(&mut params).as_mut_slice(),
            gradient.as_slice(),
            &mut [m.as_mut_slice(), v.as_mut_slice()],
        );
        let updated = begun.elapsed().as_secs_f64();
        if call >= 2 {
            seconds[0].push(copied);
            seconds[1].push(updated);
        }
    }
    black_box(&params);
    // A copy reads one buffer and writes one; AdamW reads four and writes three.
    let rate =
        |buffers: usize, seconds: &[f64]| (buffers * numel * size_of::<f32>()) as f64 / median(seconds) / 1e9;
    let (copy, adamw) = (rate(2, &seconds[0]), rate(7, &seconds[1]));
    let line = |work, rate| Line { work, mebibytes, gigabytes_per_second: rate, ratio_to_copy: rate / copy };
    Ok([line("copy", copy), line("adamw", adamw)])
}
