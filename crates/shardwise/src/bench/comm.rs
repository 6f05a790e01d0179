//! `bench comm`: how fast the collectives are, over buffers that were allocated from the transport.

use std::time::{Duration, Instant};

use serde::Serialize;
use shardwise_comm::{HostBuffer, ProcessGroup, SharedBuffer};

use crate::config::TransportKind;
use crate::error::RunError;
use crate::report::median;
use crate::world::{on_own_threads, run_ranks};

/// What to measure.
#[derive(Debug, Clone, clap::Args)]
pub struct CommArgs {
    /// Ranks that take part
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// How they communicate
    #[arg(long, value_enum, default_value = "shm")]
    transport: TransportKind,
    /// Sizes of the whole (gathered or unreduced) buffer
    #[arg(long, num_args = 1.., default_values_t = [1, 8, 64])]
    mebibytes: Vec<usize>,
    /// Timed calls; two more go before them
    #[arg(long, default_value_t = 10)]
    calls: usize,
}

/// A line of the result: bytes of the whole buffer over the median time of a call.
#[derive(Debug, Serialize)]
struct Line {
    collective: &'static str,
    transport: &'static str,
    mebibytes: usize,
    ranks: usize,
    gigabytes_per_second: f64,
}

/// Runs the benchmark as all ranks, or as the one that a launcher has started; returns the exit code.
///
/// # Errors
/// When the ranks cannot be started or fail.
pub fn run(args: &CommArgs) -> Result<i32, RunError> {
    run_ranks(args.ranks, args.transport, Duration::from_secs(60), |group| {
        on_own_threads(1, || measure(&group, args))?
    })
}

fn measure(group: &ProcessGroup, args: &CommArgs) -> Result<(), RunError> {
    for &mebibytes in &args.mebibytes {
        let part = (mebibytes << 20) / size_of::<f32>() / group.size();
        for (collective, seconds) in measure_size(group, part, args.calls)? {
            let line = Line {
                collective,
                transport: group.transport().name(),
                mebibytes,
                ranks: group.size(),
                gigabytes_per_second: (part * group.size() * size_of::<f32>()) as f64 / seconds / 1e9,
            };
            if group.rank() == 0 {
                println!("{}", serde_json::to_string(&line).map_err(RunError::failed)?);
            }
        }
    }
    Ok(())
}

/// Median seconds of each collective over parts of `part` elements.
fn measure_size(
    group: &ProcessGroup,
    part: usize,
    calls: usize,
) -> Result<[(&'static str, f64); 3], RunError> {
    let whole = part * group.size();
    let mut shard = group.allocate(part)?;
    shard.writable()?.fill(1.0);
    let mut dest = Some(HostBuffer::new(whole)?);
    let gather = timed(group, calls, || {
        let (buffer, result) = group
            .start_all_gather("bench", &shard, dest.take().map_or_else(|| HostBuffer::new(whole), Ok)?)
            .wait();
        dest = Some(buffer);
        result
    })?;
    let mut source = Some(group.allocate(whole)?);
    let mut sum = vec![0.0; part];
    let full = |source: &mut Option<SharedBuffer>| source.take().map_or_else(|| group.allocate(whole), Ok);
    let reduce = timed(group, calls, || {
        let mut pending = group.start_reduce_scatter("bench", full(&mut source)?, part);
        let result = pending.sum_into(&mut sum, false);
        source = Some(pending.into_source());
        result
    })?;
    // The sum over ranks in every rank: the reduced parts are gathered from where they were summed.
    let all_reduce = timed(group, calls, || {
        let mut pending = group.start_reduce_scatter("bench", full(&mut source)?, part);
        pending.sum_into(shard.writable()?, false)?;
        source = Some(pending.into_source());
        let (buffer, result) = group
            .start_all_gather("bench", &shard, dest.take().map_or_else(|| HostBuffer::new(whole), Ok)?)
            .wait();
        dest = Some(buffer);
        result
    })?;
    Ok([("all_gather", gather), ("reduce_scatter", reduce), ("all_reduce", all_reduce)])
}

fn timed(
    group: &ProcessGroup,
    calls: usize,
    mut call: impl FnMut() -> shardwise_comm::Result<()>,
) -> Result<f64, RunError> {
    let mut seconds = Vec::with_capacity(calls);
    for index in 0..calls + 2 {
        group.barrier("bench")?;
        let begun = Instant::now();
        call()?;
        if index >= 2 {
            seconds.push(begun.elapsed().as_secs_f64());
        }
    }
    Ok(median(&seconds))
}
