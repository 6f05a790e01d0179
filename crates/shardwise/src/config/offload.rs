//! `[offload]`: what rests away from where it computes, where, and how it is read and written.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use shardwise_core::{IO_ALIGNMENT, Offload, Tier};
use shardwise_tier::{IoConfig, IoMethod};

use crate::bounds::machine_bytes;
use crate::report::bytes;

/// Reads or writes under way at a time.
const MAX_QUEUE_DEPTH: usize = 4096;
/// Bytes of one read or write; the system cuts larger ones.
const MAX_BLOCK_BYTES: usize = 1 << 30;
/// Threads that read and write.
const MAX_THREADS: usize = 256;

/// `[offload]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OffloadConfig {
    /// Where the shards of parameters rest.
    pub parameters: Tier,
    /// Where the optimizer's state rests; gradients follow it.
    pub optimizer: Tier,
    /// The folder below which each run makes one of its own, for "nvme".
    pub path: Option<PathBuf>,
    /// Buffers of a rank, through which everything passes.
    pub buffer_count: usize,
    /// Elements of a buffer.
    pub buffer_size: usize,
    /// Elements of a rank's parameters that stay in memory all the same.
    pub max_in_memory: usize,
    /// The share of the optimizer's state that rests elsewhere.
    pub ratio: f64,
    /// Whether a rank reads and writes while it computes.
    pub pipeline: bool,
    /// Shards of fewer elements stay in memory.
    pub least_size: usize,
    /// How files are read and written.
    pub io: IoMethod,
    /// Reads and writes of a rank that are under way at a time.
    pub queue_depth: usize,
    /// Bytes of one read or write.
    pub block_size: usize,
    /// Threads of a rank that read and write, where io_uring does not.
    pub threads: usize,
    /// Whether files are read and written past the system's cache, where the file system allows it.
    pub direct: bool,
}

impl Default for OffloadConfig {
    fn default() -> Self {
        let (offload, io) = (Offload::default(), IoConfig::default());
        Self {
            parameters: offload.parameters,
            optimizer: offload.optimizer,
            path: None,
            buffer_count: offload.buffer_count,
            buffer_size: offload.buffer_numel,
            max_in_memory: offload.max_in_memory,
            ratio: offload.ratio,
            pipeline: offload.pipeline,
            least_size: offload.least_numel,
            io: io.method,
            queue_depth: io.queue_depth,
            block_size: io.block_bytes,
            threads: io.threads,
            direct: io.direct,
        }
    }
}

impl OffloadConfig {
    /// What the engine is told.
    pub(super) fn engine(&self) -> Offload {
        Offload {
            parameters: self.parameters,
            optimizer: self.optimizer,
            buffer_count: self.buffer_count,
            buffer_numel: self.buffer_size,
            max_in_memory: self.max_in_memory,
            ratio: self.ratio,
            pipeline: self.pipeline,
            least_numel: self.least_size,
        }
    }

    /// How files are read and written.
    pub fn io(&self) -> IoConfig {
        IoConfig {
            method: self.io,
            queue_depth: self.queue_depth,
            block_bytes: self.block_size,
            threads: self.threads,
            direct: self.direct,
        }
    }

    /// Refuses what no machine can do, or this one cannot do for `ranks`; the error names the first such setting.
    pub(super) fn check(&self, ranks: usize) -> Result<(), String> {
        let counts = [
            ("queue_depth", self.queue_depth, MAX_QUEUE_DEPTH),
            ("threads", self.threads, MAX_THREADS),
            ("block_size", self.block_size, MAX_BLOCK_BYTES),
        ];
        for (key, value, most) in counts {
            if !(1..=most).contains(&value) {
                return Err(format!("offload.{key} is {value}; it must be at least 1 and at most {most}"));
            }
        }
        if !self.block_size.is_multiple_of(IO_ALIGNMENT) {
            return Err(format!(
                "offload.block_size is {}; it must be a multiple of {IO_ALIGNMENT} bytes, such as {}",
                self.block_size,
                self.block_size.next_multiple_of(IO_ALIGNMENT)
            ));
        }
        if self.path.as_ref().is_some_and(|path| path.as_os_str().is_empty()) {
            return Err("offload.path is empty; name a folder, or leave it out".into());
        }
        let offload = self.engine();
        if offload.uses_files() && self.path.is_none() {
            let key = if offload.parameters == Tier::Nvme { "parameters" } else { "optimizer" };
            return Err(format!(
                "offload.{key} is \"nvme\", but offload.path is not set; name a folder on the disk, such as \
                 path = \"/mnt/nvme\" below [offload], or --set offload.path=/mnt/nvme"
            ));
        }
        if offload.is_any() {
            self.check_pool(ranks)?;
        }
        Ok(())
    }

    /// The buffers of all ranks must fit this machine.
    fn check_pool(&self, ranks: usize) -> Result<(), String> {
        let all = [self.buffer_count, self.buffer_size, size_of::<f32>(), ranks]
            .into_iter()
            .try_fold(1u64, |product, n| product.checked_mul(n as u64));
        match (all, machine_bytes()) {
            (Some(all), Some(machine)) if all <= machine => Ok(()),
            (Some(_), None) => Ok(()),
            (all, machine) => Err(format!(
                "offload.buffer_count is {} and offload.buffer_size is {} elements: the buffers of {ranks} ranks take {}, \
                 but this machine has {} of memory; lower one of them",
                self.buffer_count,
                self.buffer_size,
                all.map_or("more bytes than can be counted".into(), bytes),
                machine.map_or("less".into(), bytes)
            )),
        }
    }

    /// What was asked for and will not be done.
    pub(crate) fn warning(&self) -> Option<String> {
        let path = self.path.as_ref().filter(|_| !self.engine().uses_files())?;
        Some(format!(
            "offload.path is {}, but nothing rests there; set offload.parameters or offload.optimizer to \"nvme\"",
            path.display()
        ))
    }
}
