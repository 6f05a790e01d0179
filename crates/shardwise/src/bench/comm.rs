//! `bench comm`: how fast the collectives are, over buffers that were allocated from the transport.

use std::time::{Duration, Instant};

use serde::Serialize;
use shardwise_comm::{HostBuffer, ProcessGroup, SharedBuffer};

use crate::bounds;
use crate::config::TransportKind;
use crate::error::RunError;
use crate::output::print;
use crate::report::median;
use crate::world::{on_own_threads, run_ranks};

/// What to measure.
#[derive(Debug, Clone, clap::Args)]
pub struct CommArgs {
    /// Ranks that take part
    #[arg(long, default_value_t = 2, value_parser = bounds::rank_count)]
    ranks: usize,
    /// How they communicate
    #[arg(long, value_enum, default_value = "shm")]
    transport: TransportKind,
    /// Sizes of the whole (gathered or unreduced) buffer
    #[arg(long, num_args = 1.., default_values_t = [1, 8, 64], value_parser = bounds::mebibytes)]
    mebibytes: Vec<usize>,
    /// Timed calls; two more go before them
    #[arg(long, default_value_t = 10, value_parser = bounds::count)]
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
                print(&(serde_json::to_string(&line).map_err(RunError::failed)? + "\n"))?;
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
    let mut buffers = Buffers::new(group, part)?;
    let gather = timed(group, calls, || buffers.all_gather(group))?;
    let reduce = timed(group, calls, || buffers.reduce_scatter(group))?;
    // The sum over ranks in every rank: the reduced parts are gathered from where they were summed.
    let all_reduce = timed(group, calls, || {
        buffers.reduce_scatter(group)?;
        buffers.all_gather(group)
    })?;
    Ok([("all_gather", gather), ("reduce_scatter", reduce), ("all_reduce", all_reduce)])
}

/// What the calls work on, used again by each. A buffer is away only while a call has it.
struct Buffers {
    shard: SharedBuffer,
    gathered: Option<HostBuffer>,
    unreduced: Option<SharedBuffer>,
}

impl Buffers {
    fn new(group: &ProcessGroup, part: usize) -> Result<Self, RunError> {
        let whole = part * group.size();
        let mut shard = group.allocate(part)?;
        shard.writable()?.fill(1.0);
        Ok(Self { shard, gathered: Some(HostBuffer::new(whole)?), unreduced: Some(group.allocate(whole)?) })
    }

    fn all_gather(&mut self, group: &ProcessGroup) -> shardwise_comm::Result<()> {
        let Some(dest) = self.gathered.take() else { return Ok(()) };
        let (dest, result) = group.start_all_gather("bench", &self.shard, dest).wait();
        self.gathered = Some(dest);
        result
    }

    /// Sums into the shard.
    fn reduce_scatter(&mut self, group: &ProcessGroup) -> shardwise_comm::Result<()> {
        let Some(source) = self.unreduced.take() else { return Ok(()) };
        let mut pending = group.start_reduce_scatter("bench", source, self.shard.numel());
        let result = self.shard.writable().and_then(|shard| pending.sum_into(shard, false));
        self.unreduced = pending.into_source();
        result
    }
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
