//! Units that compute several times before their backward.

mod common;

use burn::tensor::{Device, Int, Tensor};
use common::{
    Net, Params, STRATEGIES, assert_close, config, descent, head, params, plain_descent, step, world,
};
use shardwise_burn::{ShardConfig, ShardedModel};
use shardwise_core::ShardingStrategy;
use shardwise_engine::EventKind;

type Loss = fn(&Net, Tensor<2, Int>, Tensor<1, Int>) -> Tensor<1>;

/// The first unit three times, the second once, the first again.
fn loop_loss(net: &Net, ids: Tensor<2, Int>, targets: Tensor<1, Int>) -> Tensor<1> {
    let mut x = net.embed.forward(ids);
    for block in [0, 0, 0, 1, 0] {
        x = net.blocks[block].call(x, |block, x| block.forward(x));
    }
    head(net.norm.forward(x), net.embed.weight.val(), targets)
}

/// Two forwards, as a preference loss has them, then one backward.
fn pair_loss(net: &Net, ids: Tensor<2, Int>, targets: Tensor<1, Int>) -> Tensor<1> {
    let chosen = net.loss(ids.clone(), targets.clone());
    let rejected = net.loss(ids.flip([1]), targets);
    burn::tensor::activation::log_sigmoid(rejected.clone() - chosen.clone()).neg() + (chosen + rejected) * 0.1
}

/// The second of two forwards has no part in the loss.
fn unused_forward_loss(net: &Net, ids: Tensor<2, Int>, targets: Tensor<1, Int>) -> Tensor<1> {
    let loss = net.loss(ids.clone(), targets);
    let x = net.embed.forward(ids);
    drop(net.blocks[1].call(x, |block, x| block.forward(x)));
    loss
}

const LOSSES: [(&str, Loss); 3] = [
    ("one unit several times", loop_loss),
    ("two forwards, one backward", pair_loss),
    ("a forward without backward", unused_forward_loss),
];

fn train(ranks: usize, config: ShardConfig, loss: Loss) -> (Vec<u64>, Params, Params) {
    world(ranks, |group| {
        let device = Device::flex().autodiff();
        let mut model = ShardedModel::new(group, Net::new(&device), config, &()).expect("sharded");
        let before = params(&mut model);
        let losses = (0..3).map(|index| step(&mut model, index, loss)).collect();
        (losses, before, params(&mut model))
    })
    .remove(0)
}

/// G7, G9: gradients add up over the uses, with recomputation too.
#[test]
fn a_units_gradient_is_the_sum_over_its_calls() {
    let device = Device::flex().autodiff();
    for (name, loss) in LOSSES {
        let want = train(1, descent(ShardingStrategy::FullShard), loss);
        assert_close(&want.2, &plain_descent(Net::new(&device), &want.1, 3, loss), 1e-5);
        for strategy in STRATEGIES {
            for recompute in [false, true] {
                for ranks in [1, 2, 4] {
                    let got = train(ranks, ShardConfig { recompute, ..descent(strategy) }, loss);
                    assert!(got == want, "{name}: {strategy}, recompute {recompute}, {ranks} ranks");
                }
                let got = train(3, ShardConfig { recompute, ..descent(strategy) }, loss);
                assert_close(&got.2, &want.2, 1e-5);
            }
        }
    }
}

/// G7, G10: a unit is gathered once for each call and each backward, and reduced once; recomputation gathers no more.
#[test]
fn a_unit_is_reduced_once_after_its_last_backward() {
    for recompute in [false, true] {
        world(2, |group| {
            let device = Device::flex().autodiff();
            let config = ShardConfig { recompute, ..config(ShardingStrategy::FullShard) };
            let mut model = ShardedModel::new(group, Net::new(&device), config, &()).expect("sharded");
            // The first step teaches the order.
            step(&mut model, 0, pair_loss);
            model.log_events(true);
            step(&mut model, 1, pair_loss);
            let events = model.take_events();
            for unit in 0..3 {
                let unit = shardwise_engine::UnitId::unit(unit);
                let count =
                    |kind| events.iter().filter(|e| e.unit == unit && e.kind == kind && e.round == 1).count();
                assert_eq!(count(EventKind::Forward), 2, "recompute {recompute}");
                assert_eq!(count(EventKind::Backward), 2, "recompute {recompute}");
                assert_eq!(count(EventKind::ReduceStarted), 1, "recompute {recompute}");
                assert!(count(EventKind::Gathered) <= 4, "recompute {recompute}");
            }
        });
    }
}
