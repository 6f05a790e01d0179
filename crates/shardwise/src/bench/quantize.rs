//! `bench quantize`: how near quantising and dequantising come to the speed of a plain copy.

use shardwise_comm::quantise::measure;

use crate::bounds;
use crate::error::RunError;
use crate::output::print;
use crate::report::table;

/// What to measure.
#[derive(Debug, Clone, clap::Args)]
pub struct QuantizeArgs {
    /// Size of the elements in f32; larger than the caches
    #[arg(long, default_value_t = 256, value_parser = bounds::mebibytes)]
    mebibytes: usize,
}

/// Runs the benchmark; returns the exit code.
///
/// # Errors
/// When the result cannot be printed.
pub fn run(args: &QuantizeArgs) -> Result<i32, RunError> {
    let head = ["", "f32 GB/s", "a copy's", "ratio"].map(String::from).to_vec();
    let mut rows = vec![head];
    for rate in measure(args.mebibytes << 20) {
        rows.push(vec![
            rate.name.to_string(),
            format!("{:.1}", rate.bytes_per_second / 1e9),
            format!("{:.1}", rate.copied_per_second / 1e9),
            format!("{:.2}", rate.ratio),
        ]);
    }
    print(&format!(
        "{} MiB of f32 on one thread, medians of runs in turn:\n\n{}",
        args.mebibytes,
        table(&rows)
    ))?;
    Ok(0)
}
