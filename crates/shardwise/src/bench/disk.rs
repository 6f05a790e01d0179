//! `bench disk`: how to read and write the disk of a folder fastest, found by trying.

use std::path::{Path, PathBuf};

use serde::Serialize;
use shardwise_core::Offload;
use shardwise_tier::measure::{Throughput, throughput};
use shardwise_tier::{IoConfig, IoMethod, TierError};

use crate::bounds;
use crate::error::RunError;
use crate::output::{print, say};
use crate::report::{bytes, median, table};

/// Blocks tried, in bytes.
const BLOCKS: [usize; 3] = [256 << 10, 1 << 20, 4 << 20];
/// Depths of io_uring and numbers of threads tried, the cheapest first.
const DEPTHS: [usize; 4] = [4, 16, 32, 64];
const THREADS: [usize; 4] = [1, 2, 4, 8];
/// What is as good as the best: then the cheaper is taken.
const AS_GOOD: f64 = 0.95;

/// What to measure.
#[derive(Debug, Clone, clap::Args)]
pub struct DiskArgs {
    /// A folder on the disk, as offload.path will be
    #[arg(default_value = ".")]
    path: PathBuf,
    /// Written and read by each try
    #[arg(long, default_value_t = 128, value_parser = bounds::disk_mebibytes)]
    mebibytes: usize,
    /// How often everything is tried, in turn; the medians count
    #[arg(long, default_value_t = 3, value_parser = bounds::count)]
    rounds: usize,
    /// Try one way only, once, given by the options below: a JSON line
    #[arg(long)]
    sequential: bool,
    /// How files are read and written
    #[arg(long, value_parser = method, default_value = "auto", requires = "sequential")]
    io: IoMethod,
    /// Reads or writes under way at a time
    #[arg(long, default_value_t = IoConfig::default().queue_depth, requires = "sequential")]
    queue_depth: usize,
    /// Bytes of one of them
    #[arg(long, default_value_t = IoConfig::default().block_bytes, requires = "sequential")]
    block_size: usize,
    /// Threads, where io_uring is not used
    #[arg(long, default_value_t = IoConfig::default().threads, requires = "sequential")]
    threads: usize,
    /// Through the system's cache
    #[arg(long, requires = "sequential")]
    buffered: bool,
    /// Bytes of a buffer, a multiple of the block
    #[arg(long, default_value_t = Offload::default().buffer_bytes())]
    buffer_size: usize,
    /// Buffers
    #[arg(long, default_value_t = Offload::default().buffer_count)]
    buffer_count: usize,
}

fn method(text: &str) -> Result<IoMethod, String> {
    match text {
        "auto" => Ok(IoMethod::Auto),
        "uring" => Ok(IoMethod::Uring),
        "threads" => Ok(IoMethod::Threads),
        _ => Err("it must be auto, uring or threads".into()),
    }
}

/// Runs the benchmark; returns the exit code.
///
/// # Errors
/// When the folder cannot be used, or the disk fails.
pub fn run(args: &DiskArgs) -> Result<i32, RunError> {
    let buffers = (args.buffer_count as u64).saturating_mul(args.buffer_size as u64);
    if let Some(machine) = bounds::machine_bytes().filter(|machine| buffers > machine / 2) {
        return Err(RunError::user(format!(
            "--buffer-count {} of --buffer-size {} bytes take {}, and this machine has {} of memory; use at most half of it",
            args.buffer_count,
            args.buffer_size,
            bytes(buffers),
            bytes(machine)
        )));
    }
    if args.sequential {
        let io = IoConfig {
            method: args.io,
            queue_depth: args.queue_depth,
            block_bytes: args.block_size,
            threads: args.threads,
            direct: !args.buffered,
        };
        let line = Line::new(&io, args, &args.measure(io)?);
        print(&(serde_json::to_string(&line).map_err(RunError::failed)? + "\n"))?;
        return Ok(0);
    }
    print(&Search::new(args).run()?)?;
    Ok(0)
}

/// The result of `--sequential`.
#[derive(Debug, Serialize)]
struct Line {
    method: &'static str,
    direct: bool,
    queue_depth: usize,
    threads: usize,
    block_bytes: usize,
    bytes: u64,
    /// Until they are on the disk.
    write_bytes_per_second: f64,
    read_bytes_per_second: f64,
}

impl Line {
    fn new(io: &IoConfig, args: &DiskArgs, rate: &Throughput) -> Self {
        Self {
            method: rate.method,
            direct: rate.direct,
            queue_depth: io.queue_depth,
            threads: io.threads,
            block_bytes: io.block_bytes,
            bytes: args.bytes(),
            write_bytes_per_second: rate.write_bytes_per_second,
            read_bytes_per_second: rate.read_bytes_per_second,
        }
    }
}

impl DiskArgs {
    fn bytes(&self) -> u64 {
        (self.mebibytes as u64) << 20
    }

    fn measure(&self, io: IoConfig) -> Result<Throughput, TierError> {
        throughput(&self.path, io, self.bytes(), self.buffer_size, self.buffer_count)
    }
}

/// One way to read and write, and how fast it was each time.
struct Try {
    io: IoConfig,
    rates: Vec<Throughput>,
}

impl Try {
    fn new(io: IoConfig) -> Self {
        Self { io, rates: Vec::new() }
    }

    fn write(&self) -> f64 {
        median(&self.rates.iter().map(|r| r.write_bytes_per_second).collect::<Vec<_>>())
    }

    fn read(&self) -> f64 {
        median(&self.rates.iter().map(|r| r.read_bytes_per_second).collect::<Vec<_>>())
    }

    /// Bytes in a second of writing them all and reading them all.
    fn both(&self) -> f64 {
        2.0 / (1.0 / self.write() + 1.0 / self.read())
    }

    fn row(&self) -> Vec<String> {
        let rate = self.rates.first();
        vec![
            rate.map_or("", |r| r.method).to_string(),
            if rate.is_some_and(|r| r.direct) { "direct" } else { "cached" }.to_string(),
            if self.io.method == IoMethod::Uring {
                format!("depth {}", self.io.queue_depth)
            } else {
                format!("threads {}", self.io.threads)
            },
            format!("{} KiB", self.io.block_bytes >> 10),
            format!("{:.2}", self.write() / 1e9),
            format!("{:.2}", self.read() / 1e9),
        ]
    }
}

/// First how much at a time, for each method, then in what blocks.
struct Search<'a> {
    args: &'a DiskArgs,
    tried: Vec<Try>,
}

impl<'a> Search<'a> {
    fn new(args: &'a DiskArgs) -> Self {
        Self { args, tried: Vec::new() }
    }

    fn run(mut self) -> Result<String, RunError> {
        let usual = IoConfig::default();
        let threads = THREADS.map(|threads| IoConfig { method: IoMethod::Threads, threads, ..usual });
        let rings = DEPTHS.map(|queue_depth| IoConfig { method: IoMethod::Uring, queue_depth, ..usual });
        let mut candidates = threads.to_vec();
        match self.args.measure(rings[0]) {
            Ok(_) => candidates.extend(rings),
            Err(error @ TierError::NoUring { .. }) => say(&format!("{error}")),
            Err(error) => return Err(error.into()),
        }
        let best = self.try_all(&candidates)?;
        let blocks = BLOCKS.into_iter().filter(|block| *block != best.block_bytes);
        let others: Vec<IoConfig> = blocks.map(|block_bytes| IoConfig { block_bytes, ..best }).collect();
        self.try_all(&others)?;
        let best = self.best();
        let head = ["method", "", "at a time", "block", "write GB/s", "read GB/s"].map(String::from).to_vec();
        let mut text =
            table(&std::iter::once(head).chain(self.tried.iter().map(Try::row)).collect::<Vec<_>>());
        text.push_str(&lines(&self.args.path, &best.io, best.rates.first().is_some_and(|r| r.direct)));
        Ok(text)
    }

    /// Tries every way, round by round, so that all see the same disk; the best of all so far.
    fn try_all(&mut self, ways: &[IoConfig]) -> Result<IoConfig, RunError> {
        let first = self.tried.len();
        self.tried.extend(ways.iter().map(|io| Try::new(*io)));
        for _ in 0..self.args.rounds {
            for way in &mut self.tried[first..] {
                way.rates.push(self.args.measure(way.io)?);
            }
        }
        Ok(self.best().io)
    }

    /// The first, so the cheapest, that is as good as the best.
    fn best(&self) -> &Try {
        let most = self.tried.iter().map(Try::both).fold(0.0, f64::max);
        let good = self.tried.iter().find(|way| way.both() >= AS_GOOD * most);
        good.unwrap_or(&self.tried[0])
    }
}

/// The lines of a configuration.
fn lines(path: &Path, io: &IoConfig, direct: bool) -> String {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    let name = if io.method == IoMethod::Uring { "uring" } else { "threads" };
    format!(
        "\n[offload]\npath = {:?}\nio = \"{name}\"\nqueue_depth = {}\nblock_size = {}\nthreads = {}\ndirect = {direct}\n",
        path.display().to_string(),
        io.queue_depth,
        io.block_bytes,
        io.threads
    )
}
