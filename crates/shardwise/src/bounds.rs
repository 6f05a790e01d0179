//! Bounds on what a user may ask for: what no machine can give is refused before anything is started.

use std::time::Duration;

use shardwise_comm::shm::MAX_RANKS;
use shardwise_models::ModelConfig;

use crate::config::{Config, OptimizerName};
use crate::report::bytes;

/// Samples of a step; the largest runs take some millions.
const MAX_GLOBAL_BATCH: usize = 1 << 24;
/// The longest wait for a rank, in seconds: some thirty years.
const MAX_TIMEOUT: f64 = 1e9;
/// The largest file that a benchmark makes: 4 TiB.
const MAX_FILE_MEBIBYTES: usize = 1 << 22;
/// Threads that a rank may have on a machine with fewer cores.
const MAX_THREADS: usize = 256;

/// The most threads that a rank may compute with here.
fn max_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).max(MAX_THREADS)
}

/// Looks at the settings one by one; the error names the first that is out of its bounds.
pub(crate) fn check(config: &Config) -> Result<(), String> {
    let (run, train, data) = (&config.run, &config.train, &config.data);
    let counts = [
        ("run.steps", run.steps, u64::MAX),
        ("run.ranks", run.ranks as u64, MAX_RANKS as u64),
        ("run.threads_per_rank", run.threads_per_rank as u64, max_threads() as u64),
        ("train.global_batch", train.global_batch as u64, MAX_GLOBAL_BATCH as u64),
        ("data.seq_len", data.seq_len.unwrap_or(1) as u64, u64::MAX),
    ];
    for (key, value, most) in counts {
        if value == 0 {
            return Err(format!("{key} is 0; it must be at least 1"));
        }
        if value > most {
            return Err(format!("{key} is {value}; it must be at most {most}"));
        }
    }
    timeout(run.timeout_seconds)?;
    let divides = matches!(train.optimizer, OptimizerName::AdamW | OptimizerName::Adam | OptimizerName::Muon);
    if divides && train.eps == 0.0 {
        return Err(
            "train.eps is 0; it must be a positive number, or a parameter without gradients becomes NaN"
                .into(),
        );
    }
    if run.name.is_empty() || run.name.contains(char::is_control) {
        return Err(format!("run.name is {:?}; it must be a line of text", run.name));
    }
    if run.output_dir.as_ref().is_some_and(|path| path.as_os_str().is_empty()) {
        return Err("run.output_dir is empty; name a folder, or leave it out for runs/NAME".into());
    }
    if data.path.iter().any(String::is_empty) {
        return Err("data.path is empty; name a file, a folder or a pattern, or leave it out".into());
    }
    Ok(())
}

/// How long a rank waits for another.
pub(crate) fn timeout(seconds: f64) -> Result<Duration, String> {
    let wrong =
        || format!("run.timeout_seconds is {seconds}; it must be a positive number of at most {MAX_TIMEOUT}");
    if !(seconds > 0.0 && seconds <= MAX_TIMEOUT) {
        return Err(wrong());
    }
    Duration::try_from_secs_f64(seconds).map_err(|_| wrong())
}

/// Whether one tensor of logits, which a micro-batch cannot do without, fits this machine at all.
pub(crate) fn check_memory(model: &ModelConfig, samples: usize, seq_len: usize) -> Result<(), String> {
    let logits = [samples, seq_len, model.vocab_size(), size_of::<f32>()]
        .into_iter()
        .try_fold(1u64, |product, n| product.checked_mul(n as u64));
    let machine = machine_bytes();
    match (logits, machine) {
        (Some(logits), Some(machine)) if logits <= machine => Ok(()),
        (Some(_), None) => Ok(()),
        (logits, machine) => Err(format!(
            "the logits of {samples} samples of {seq_len} tokens alone take {}, but this machine has {} of memory",
            logits.map_or("more bytes than can be counted".into(), bytes),
            machine.map_or("less".into(), bytes)
        )),
    }
}

/// Memory and swap of this machine.
pub(crate) fn machine_bytes() -> Option<u64> {
    meminfo("MemTotal:", "SwapTotal:")
}

/// Memory and swap that are not in use.
pub(crate) fn available_bytes() -> Option<u64> {
    meminfo("MemAvailable:", "SwapFree:")
}

fn meminfo(memory: &str, swap: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kibibytes = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    Some((kibibytes(memory)? + kibibytes(swap).unwrap_or(0)) * 1024)
}

/// An option that counts from 1.
pub(crate) fn count(text: &str) -> Result<usize, String> {
    within(text, usize::MAX)
}

/// An option that is a number of ranks.
pub(crate) fn rank_count(text: &str) -> Result<usize, String> {
    within(text, MAX_RANKS)
}

/// An option that is a number of threads.
pub(crate) fn thread_count(text: &str) -> Result<usize, String> {
    within(text, max_threads())
}

/// An option that is the size of a buffer in MiB.
pub(crate) fn mebibytes(text: &str) -> Result<usize, String> {
    let most = machine_bytes().map_or(usize::MAX >> 20, |bytes| (bytes >> 20) as usize);
    within(text, most)
}

/// An option that is the size of a file in MiB.
pub(crate) fn disk_mebibytes(text: &str) -> Result<usize, String> {
    within(text, MAX_FILE_MEBIBYTES)
}

fn within(text: &str, most: usize) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if (1..=most).contains(&n) => Ok(n),
        _ if most == usize::MAX => Err("it must be a whole number of at least 1".into()),
        _ => Err(format!("it must be a whole number from 1 to {most}")),
    }
}
