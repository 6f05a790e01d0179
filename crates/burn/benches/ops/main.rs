//! Times of the fused operations next to Burn's own, on one thread: `cargo bench -p shardwise-burn --bench ops`.
//!
//! With no argument: every operation, forward and backward, at the sizes of the benchmark GPT. With `gpt`: a whole
//! training step without its optimizer. With `matmul`: the matrix products alone, in GFLOP/s. Medians of interleaved
//! runs.

mod gpt;
mod matmul;
mod single;

use std::time::Instant;

/// The median seconds of `runs` runs of each job, taken in turns.
fn medians<const N: usize>(runs: usize, mut jobs: [&mut dyn FnMut(); N]) -> [f64; N] {
    let mut times = [const { Vec::new() }; N];
    for _ in 0..runs {
        for (job, times) in jobs.iter_mut().zip(&mut times) {
            let start = Instant::now();
            job();
            times.push(start.elapsed().as_secs_f64());
        }
    }
    times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    })
}

fn main() {
    // `cargo bench` passes flags of its own.
    let mode = std::env::args().skip(1).find(|a| !a.starts_with('-'));
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a pool of one thread");
    pool.install(|| match mode.as_deref() {
        None => single::run(),
        Some("gpt") => gpt::run(),
        Some("matmul") => matmul::run(),
        Some(other) => panic!("unknown mode {other}: use none, `gpt` or `matmul`"),
    });
}
