//! How fast a folder's disk is through a tier.

use std::path::Path;
use std::time::Instant;

use crate::Result;
use crate::buffer::Buffer;
use crate::config::{DEFAULT_DEADLINE, IoConfig, Place, TierConfig};
use crate::run_folder::RunFolder;
use crate::tier::Tier;

/// What was measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Throughput {
    /// Bytes of tiles read in a second, hashes checked.
    pub read_bytes_per_second: f64,
    /// Bytes of tiles written in a second, hashes computed, until they are on the disk.
    pub write_bytes_per_second: f64,
    /// The method that was used.
    pub method: &'static str,
    /// Whether the page cache was passed by.
    pub direct: bool,
}

/// Writes `bytes` as one object in a folder of its own below `folder`, has them brought to the disk, reads them in order,
/// and removes them. Buffers are `buffer_count` of `buffer_bytes`, all of which are used.
///
/// # Errors
/// As [`Tier::open`] and every call of it.
pub fn throughput(
    folder: &Path,
    io: IoConfig,
    bytes: u64,
    buffer_bytes: usize,
    buffer_count: usize,
) -> Result<Throughput> {
    let run = RunFolder::claim(folder, &format!("measure-{}", std::process::id()))?;
    let place = Place::Folder(RunFolder::rank_folder(run.path(), 0));
    let mut tier = Tier::open(TierConfig {
        place,
        rank: 0,
        buffer_count,
        buffer_bytes,
        io,
        deadline: DEFAULT_DEADLINE,
    })?;
    fill_buffers(&mut tier, buffer_count)?;
    let tiles = bytes.div_ceil(buffer_bytes as u64) as usize;
    let object = tier.create("measure", tiles)?;
    let len = |tile: usize| (bytes - tile as u64 * buffer_bytes as u64).min(buffer_bytes as u64) as usize;

    let start = Instant::now();
    for tile in 0..tiles {
        let mut buffer = tier.buffer()?;
        buffer.set_len(len(tile));
        tier.start_write(object, tile, buffer)?;
    }
    tier.sync()?;
    let write = start.elapsed();

    let start = Instant::now();
    let mut readings = std::collections::VecDeque::new();
    for tile in 0..tiles {
        let buffer = match tier.try_buffer()? {
            Some(buffer) => buffer,
            None => match readings.pop_front() {
                Some(reading) => tier.wait(reading)?,
                None => tier.buffer()?,
            },
        };
        readings.push_back(tier.start_read(object, tile, buffer)?);
    }
    for reading in readings {
        let buffer = tier.wait(reading)?;
        tier.give(buffer);
    }
    let read = start.elapsed();
    Ok(Throughput {
        read_bytes_per_second: bytes as f64 / read.as_secs_f64(),
        write_bytes_per_second: bytes as f64 / write.as_secs_f64(),
        method: tier.method(),
        direct: tier.is_direct(),
    })
}

/// Puts something in every buffer that no disk can make shorter.
fn fill_buffers(tier: &mut Tier, count: usize) -> Result<()> {
    let mut x = 0x9e37_79b9_7f4a_7c15u64;
    let mut buffers: Vec<Buffer> = Vec::with_capacity(count);
    for _ in 0..count {
        let mut buffer = tier.buffer()?;
        for word in buffer.as_mut_slice().as_chunks_mut::<8>().0 {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            *word = x.to_le_bytes();
        }
        buffers.push(buffer);
    }
    Ok(())
}
