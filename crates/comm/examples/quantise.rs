//! How fast quantisation is, beside a plain copy: `cargo run --release -p shardwise-comm --example quantise [MiB]`.

use shardwise_comm::quantise::measure;

fn main() {
    let mib = std::env::args().nth(1).and_then(|arg| arg.parse().ok()).unwrap_or(256usize);
    println!("{mib} MiB of f32, one thread, medians; GB of f32 a second");
    println!("{:<28} {:>10} {:>10} {:>8}", "", "rate", "copy", "ratio");
    for rate in measure(mib << 20) {
        println!(
            "{:<28} {:>10.2} {:>10.2} {:>8.2}",
            rate.name,
            rate.bytes_per_second / 1e9,
            rate.copied_per_second / 1e9,
            rate.ratio
        );
    }
}
