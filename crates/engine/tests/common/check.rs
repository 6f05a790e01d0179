//! One check for every combination: what ranks train together, bit for bit against one loop over whole parameters.

use shardwise_core::{MixedPrecision, Precision, ShardingStrategy};
use shardwise_engine::EngineConfig;

use super::{Reference, Toy, train};

pub const STEPS: usize = 3;

/// Strategies with the sizes of their groups: a hybrid one has every shape of mesh.
pub fn layouts(world: usize) -> Vec<(ShardingStrategy, Option<usize>)> {
    use ShardingStrategy::{FullShard, HybridShard, HybridShardZero2, NoShard, ShardGradOp};
    let mut all = vec![(FullShard, None), (ShardGradOp, None), (NoShard, None)];
    for group in (1..=world).filter(|group| world.is_multiple_of(*group)) {
        all.extend([(HybridShard, Some(group)), (HybridShardZero2, Some(group))]);
    }
    all
}

/// Trained bits and norms of all layouts equal the reference's, and so each other's where their sums have one order.
pub fn check(toy: &Toy, world: usize, rounds: usize, base: &EngineConfig) {
    let micro_batches = world * rounds;
    for (strategy, shard_group) in layouts(world) {
        let config = EngineConfig { strategy, shard_group, ..*base };
        let mut reference = Reference::new(toy);
        for (_, layout, values) in &mut reference.params {
            *values = super::quantised::rested(layout, values, &config, world);
        }
        let norms: Vec<f64> =
            (0..STEPS).map(|_| reference.step(micro_batches, world, &config, 0.05)).collect();
        let what = format!("{config:?}, {world} ranks, {rounds} rounds, {:?}", toy.units);
        for (params, reports) in train(toy, world, micro_batches, config, STEPS) {
            let got: Vec<f64> = reports.iter().map(|r| r.grad_norm).collect();
            for (got, want) in got.iter().zip(&norms) {
                assert!((got - want).abs() <= 1e-12 * want.abs(), "{what}: norm {got}, not {want}");
            }
            for (got, (id, _, want)) in params.iter().zip(&reference.params) {
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(got), bits(want), "{what}: {id:?}");
            }
        }
    }
}

pub fn precision(name: &str) -> MixedPrecision {
    let f32 = MixedPrecision::default();
    match name {
        "f32" => f32,
        "bf16" => MixedPrecision::BF16,
        "bf16 everywhere" => MixedPrecision {
            reduce_dtype: Precision::Bf16,
            keep_low_precision_grads: true,
            ..MixedPrecision::BF16
        },
        _ => MixedPrecision { param_dtype: Precision::F16, reduce_dtype: Precision::F16, ..f32 },
    }
}
