//! Low-rank adapters train beside frozen weights. A program of its own: attaching them draws from Burn's one generator, which
//! other tests' first values come from.

mod common;

use burn::module::{Lora, Module};
use burn::tensor::Device;
use common::{Net, STRATEGIES, assert_close, descent, params, plain_descent, step, world};
use shardwise_burn::{Init, ShardConfig};
use shardwise_core::ShardingStrategy;

/// E1: Burn's own LoRA. The factors learn as in plain Burn, and what is frozen keeps its bits.
#[test]
fn lora_trains_its_factors_and_leaves_the_rest() {
    let device = Device::flex().autodiff();
    // Burn draws the factors when they are attached, so ranks get clones of one module.
    let adapted = Net::new(&device).apply_lora(Lora::new(2, 4.0));
    let is_factor = |path: &str| path.contains(".lora.");
    let run = |ranks, config| {
        world(ranks, |group| {
            let mut model = Init::new(config).shard(group, adapted.clone(), &()).expect("sharded");
            let before = params(&mut model);
            let losses: Vec<u64> = (0..3).map(|index| step(&mut model, index, Net::loss)).collect();
            let trained: usize =
                model.layouts().iter().filter(|l| l.requires_grad()).map(|l| l.numel()).sum();
            (losses, before, params(&mut model), trained)
        })
        .remove(0)
    };
    let want = run(1, descent(ShardingStrategy::FullShard));
    let (_, before, after, trained) = &want;
    for ((path, _, a), (_, _, b)) in before.iter().zip(after) {
        // The first step moves only the factor that is zero; the other follows.
        assert_eq!(a != b, is_factor(path), "{path}");
    }
    let factors: usize = after.iter().filter(|(p, ..)| is_factor(p)).map(|(_, _, v)| v.len()).sum();
    assert_eq!(*trained, factors, "gradients and statistics are those of the factors only");
    assert!(after.iter().any(|(path, ..)| path == "blocks.1.up.weight.lora.a"));
    assert_close(after, &plain_descent(adapted.clone(), before, 3, Net::loss), 1e-5);
    for strategy in STRATEGIES {
        for recompute in [false, true] {
            for ranks in [2, 4] {
                let got = run(ranks, ShardConfig { recompute, ..descent(strategy) });
                assert!(got == want, "{strategy}, recompute {recompute}, {ranks} ranks");
            }
        }
    }
}
