//! Nodes: sums and gathers in two hops have the bits of one, whatever the timing, and each byte enters a node once.

mod common;

use common::{ADAMW, Reference, Toy, config, train};
use shardwise_core::{MixedPrecision, Precision, ShardingStrategy, WireConfig};
use shardwise_engine::{Accumulation, EngineConfig};

use ShardingStrategy::{FullShard, HybridShard, NoShard, ShardGradOp};

const STEPS: usize = 2;

/// Worlds with every size of node that leaves several.
fn nodes() -> Vec<(usize, usize)> {
    let worlds = [2, 3, 4, 6, 8];
    let of = |world: usize| (1..world).filter(move |k| world.is_multiple_of(*k)).map(move |k| (world, k));
    worlds.into_iter().flat_map(of).collect()
}

fn with_nodes(base: EngineConfig, node: usize) -> EngineConfig {
    EngineConfig { wire: WireConfig { node_size: Some(node), ..base.wire }, ..base }
}

/// Every flat parameter and norm of every rank after some steps, as bits.
fn bits(toy: &Toy, world: usize, micro_batches: usize, config: EngineConfig) -> Vec<(Vec<u32>, Vec<u64>)> {
    let of = |(params, reports): (Vec<Vec<f32>>, Vec<shardwise_engine::StepReport>)| {
        let norms = reports.iter().map(|report| report.grad_norm.to_bits()).collect();
        (params.into_iter().flatten().map(f32::to_bits).collect(), norms)
    };
    train(toy, world, micro_batches, config, STEPS).into_iter().map(of).collect()
}

/// Against one loop over whole parameters that adds up inside nodes first.
#[test]
fn every_node_size_equals_the_reference() {
    let toy = Toy { frozen: vec![vec![3, 3], vec![1]], low: vec![vec![5, 2], vec![1]], ..Toy::new(2) };
    let low = MixedPrecision { reduce_dtype: Precision::Bf16, ..MixedPrecision::BF16 };
    for (world, node) in nodes() {
        for strategy in [FullShard, ShardGradOp, NoShard] {
            for (precision, accumulation, rounds) in [
                (MixedPrecision::default(), Accumulation::Sharded, 1),
                (MixedPrecision::default(), Accumulation::Sharded, 3),
                (MixedPrecision::default(), Accumulation::Unsharded, 2),
                (low, Accumulation::Sharded, 2),
            ] {
                let base = EngineConfig { precision, accumulation, ..config(strategy, ADAMW) };
                let config = with_nodes(base, node);
                let mut reference = Reference::new(&toy);
                for _ in 0..STEPS {
                    reference.step(world * rounds, world, &config, 0.05);
                }
                let want: Vec<u32> =
                    reference.params.iter().flat_map(|(_, _, p)| p).map(|x| x.to_bits()).collect();
                for (got, _) in bits(&toy, world, world * rounds, config) {
                    assert!(got == want, "{strategy}, {world} ranks, nodes of {node}, {precision:?}");
                }
            }
        }
    }
}

/// Nodes whose size is a power of two add in the order of one large group.
#[test]
fn nodes_of_a_power_of_two_change_no_bit() {
    let toy = Toy::new(3);
    for (world, node) in nodes().into_iter().filter(|(_, node)| node.is_power_of_two()) {
        for strategy in [FullShard, ShardGradOp, NoShard] {
            let plain = config(strategy, ADAMW);
            let want = bits(&toy, world, 2 * world, plain);
            assert_eq!(
                bits(&toy, world, 2 * world, with_nodes(plain, node)),
                want,
                "{strategy} {world} {node}"
            );
        }
    }
}

/// A group of a hybrid strategy is a node; other sizes are refused with both numbers.
#[test]
fn the_groups_of_a_hybrid_strategy_are_its_nodes() {
    let toy = Toy::new(2);
    let plain = EngineConfig { shard_group: Some(2), ..config(HybridShard, ADAMW) };
    let want = bits(&toy, 4, 4, plain);
    assert_eq!(bits(&toy, 4, 4, with_nodes(plain, 2)), want);
    let secondary = WireConfig { secondary_partition: Some(2), ..WireConfig::default() };
    assert_eq!(bits(&toy, 4, 4, EngineConfig { wire: secondary, ..plain }), want);
    let error = with_nodes(plain, 1).node_size(4).expect_err("another size").to_string();
    assert!(error.contains("nodes have 1 ranks") && error.contains("groups of 2"), "{error}");
}
