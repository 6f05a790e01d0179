//! How fast a disk is through a tier: `cargo run --release -p shardwise-tier --example throughput -- PATH [key=value ...]`,
//! with the keys `method` (auto, uring, threads), `depth`, `block`, `threads`, `direct`, `bytes`, `buffer`, `buffers` and
//! `runs`. Prints MiB/s of each run.

use std::path::PathBuf;
use std::process::ExitCode;

use shardwise_tier::measure::throughput;
use shardwise_tier::{IoConfig, IoMethod};

struct Settings {
    io: IoConfig,
    bytes: u64,
    buffer_bytes: usize,
    buffer_count: usize,
    runs: usize,
}

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1);
    let Some(path) = words.next().map(PathBuf::from) else {
        eprintln!("usage: throughput PATH [key=value ...]");
        return ExitCode::from(2);
    };
    let mut settings = Settings {
        io: IoConfig::default(),
        bytes: 1 << 30,
        buffer_bytes: 4 << 20,
        buffer_count: 12,
        runs: 1,
    };
    for word in words {
        if let Err(message) = set(&mut settings, &word) {
            eprintln!("{word}: {message}");
            return ExitCode::from(2);
        }
    }
    let Settings { io, bytes, buffer_bytes, buffer_count, runs } = settings;
    for _ in 0..runs {
        match throughput(&path, io, bytes, buffer_bytes, buffer_count) {
            Ok(found) => println!(
                "write {:.0} MiB/s, read {:.0} MiB/s ({}{})",
                found.write_bytes_per_second / 1048576.0,
                found.read_bytes_per_second / 1048576.0,
                found.method,
                if found.direct { ", direct" } else { "" }
            ),
            Err(error) => {
                eprintln!("{error}");
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}

fn set(settings: &mut Settings, word: &str) -> Result<(), String> {
    let (key, value) = word.split_once('=').ok_or("expected key=value")?;
    let number = || value.parse::<usize>().map_err(|e| e.to_string());
    match key {
        "method" => {
            settings.io.method = match value {
                "auto" => IoMethod::Auto,
                "uring" => IoMethod::Uring,
                "threads" => IoMethod::Threads,
                _ => return Err("expected auto, uring or threads".into()),
            }
        }
        "direct" => settings.io.direct = value.parse().map_err(|e| format!("{e}"))?,
        "depth" => settings.io.queue_depth = number()?,
        "block" => settings.io.block_bytes = number()?,
        "threads" => settings.io.threads = number()?,
        "bytes" => settings.bytes = number()? as u64,
        "buffer" => settings.buffer_bytes = number()?,
        "buffers" => settings.buffer_count = number()?,
        "runs" => settings.runs = number()?,
        _ => return Err("unknown key".into()),
    }
    Ok(())
}
