//! What parameters are worth when they arrive, by the definition of the formats, one shard and one element at a time.

use shardwise_core::{FlatLayout, Quantization};
use shardwise_engine::EngineConfig;

use super::rounded;

pub const BLOCK: usize = 256;

/// The parts into which a flat parameter of `numel` elements is cut for `ranks` ranks: one where a rank has all of it.
pub fn cuts(layout: &FlatLayout, config: &EngineConfig, ranks: usize) -> Vec<std::ops::Range<usize>> {
    let group = config.shard_group_size(ranks).expect("groups that fit");
    let numel = layout.numel();
    if group == 1 || !config.strategy.is_sharded() || layout.is_replicated() {
        return std::iter::once(0..numel).collect();
    }
    let part = numel.div_ceil(group);
    (0..group).map(|rank| (rank * part).min(numel)..((rank + 1) * part).min(numel)).collect()
}

/// What a computation sees of a flat parameter.
pub fn arrived(layout: &FlatLayout, masters: &[f32], config: &EngineConfig, ranks: usize) -> Vec<f32> {
    if config.wire.frozen_weights && !layout.requires_grad() {
        return rested(layout, masters, config, ranks);
    }
    let dtype = layout.dtype().low().unwrap_or(config.precision.param_dtype);
    let values: Vec<f32> = masters.iter().map(|x| rounded(*x, dtype)).collect();
    let Some(how) = config.wire.weights else { return values };
    cut_and_quantised(&values, &cuts(layout, config, ranks), how)
}

/// What is kept of a flat parameter.
pub fn rested(layout: &FlatLayout, values: &[f32], config: &EngineConfig, ranks: usize) -> Vec<f32> {
    if config.wire.frozen_weights && !layout.requires_grad() {
        cut_and_quantised(values, &cuts(layout, config, ranks), Quantization::Int8)
    } else {
        values.to_vec()
    }
}

fn cut_and_quantised(values: &[f32], cuts: &[std::ops::Range<usize>], how: Quantization) -> Vec<f32> {
    let shards = cuts.iter().map(|cut| &values[cut.clone()]);
    shards.flat_map(|shard| shard.chunks(BLOCK).flat_map(|block| of_block(block, how))).collect()
}

/// Symmetric, to the nearest, ties to even; the scale has 16 bits of significand.
pub fn of_block(block: &[f32], how: Quantization) -> Vec<f32> {
    let largest = block.iter().fold(0f32, |max, x| max.max(x.abs()));
    let scale = f32::from_bits((largest / f32::from(how.levels())).to_bits() & !0xff);
    if block.iter().any(|x| !x.is_finite()) || (largest > 0.0 && scale < f32::MIN_POSITIVE) {
        return block.to_vec();
    }
    let code =
        |x: &f32| if scale == 0.0 { 0.0 } else { (f64::from(*x) / f64::from(scale)).round_ties_even() };
    block
        .iter()
        .map(|x| (code(x) * f64::from(scale)) as f32)
        .map(|q| if q == 0.0 { 0.0 } else { q })
        .collect()
}
