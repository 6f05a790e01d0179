//! How fast ranks read their shards: as is and transposed, from the page cache and from the disk.
//!
//! `cargo bench -p shardwise-checkpoint` prints, for each layout, type and world size, the time for the shard
//! of one rank in the middle, the f32 bytes it gets per second, and the bytes read for each byte wanted.

use std::error::Error;
use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{Advice, fadvise};
use shardwise_checkpoint::{FloatType, FolderWriter, SafetensorsFolder, StoredLayout, TensorSpec};

/// Rows and columns of the matrix: 64 MiB as F32.
const SIDE: usize = 4096;

fn main() -> Result<(), Box<dyn Error>> {
    // `cargo test --all-targets` starts benchmarks too, without this argument.
    if !std::env::args().any(|argument| argument == "--bench") {
        return Ok(());
    }
    // Beside the build, since /tmp may be in memory.
    let parent = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
    let folder = parent.path().join("model");
    let types = [FloatType::F32, FloatType::F16, FloatType::Bf16];
    let spec = |dtype: FloatType| TensorSpec { name: dtype.to_string(), shape: vec![SIDE, SIDE], dtype };
    let values: Vec<f32> = (0..SIDE * SIDE).map(|k| (k % 1024) as f32).collect();
    let mut writer = FolderWriter::create(&folder, types.map(spec).to_vec(), u64::MAX)?;
    for dtype in types {
        writer.write(&dtype.to_string(), &values, StoredLayout::AsIs)?;
    }
    writer.finish()?;

    println!("matrix [{SIDE}, {SIDE}]; cold: not in the page cache; warm: the best of five after that");
    for layout in [StoredLayout::AsIs, StoredLayout::Transposed] {
        for dtype in types {
            for world_size in [1, 2, 4, 8, 64, 1024] {
                measure(&folder, dtype, layout, world_size)?;
            }
        }
    }
    Ok(())
}

/// Reads one shard six times, and prints a line about it.
fn measure(
    folder: &Path,
    dtype: FloatType,
    layout: StoredLayout,
    world_size: usize,
) -> Result<(), Box<dyn Error>> {
    let mut out = vec![0.0; SIDE * SIDE / world_size];
    let start = world_size / 2 * out.len();
    let name = dtype.to_string();
    let weights = SafetensorsFolder::open(folder)?;
    fadvise(File::open(&weights.info(&name)?.file)?, 0, None, Advice::DontNeed)?;
    let mut times = [Duration::ZERO; 6];
    for time in &mut times {
        let before = Instant::now();
        weights.read_range(&name, start..start + out.len(), layout, &mut out)?;
        *time = before.elapsed();
    }
    let [cold, warm @ ..] = times;
    let warm = warm.into_iter().min().unwrap_or_default();
    let rate = |time: Duration| (out.len() * size_of::<f32>()) as f64 / time.as_secs_f64() / 1e9;
    let wanted = out.len() * if dtype == FloatType::F32 { 4 } else { 2 };
    println!(
        "{layout:?} {name} world {world_size}: cold {cold:.1?} ({:.2} GB/s), warm {warm:.1?} ({:.2} GB/s), {:.2} of the bytes",
        rate(cold),
        rate(warm),
        weights.bytes_read() as f64 / (times.len() * wanted) as f64,
    );
    Ok(())
}
