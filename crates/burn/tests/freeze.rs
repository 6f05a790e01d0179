//! Freezing and unfreezing a model that is sharded already.

mod common;

use burn::module::Module;
use burn::nn::LinearConfig;
use burn::tensor::Device;
use common::{
    Net, Params, STRATEGIES, assert_close, batch, config, descent, params, plain_descent_from, step, world,
};
use shardwise_burn::{ShardConfig, ShardedModel, StepWeights};
use shardwise_core::{Precision, Purpose, ShardingStrategy};
use shardwise_engine::Divisor;

/// The losses and the parameters after three steps.
fn three_steps(model: &mut ShardedModel<Net>) -> (Vec<u64>, Params) {
    ((0..3).map(|index| step(model, index, Net::loss)).collect(), params(model))
}

/// C7: what happens while a model is frozen leaves no trace once it is unfrozen, in mixed precision neither.
#[test]
fn frozen_then_unfrozen_equals_never_frozen() {
    let device = Device::flex().autodiff();
    for precision in [Precision::F32, Precision::Bf16] {
        for strategy in STRATEGIES {
            let mut config = config(strategy);
            config.engine.precision.param_dtype = precision;
            for ranks in [1, 2, 4] {
                world(ranks, |group| {
                    let never = ShardedModel::new(group.clone(), Net::new(&device), config, &());
                    let want = three_steps(&mut never.expect("sharded"));

                    let frozen = Net::new(&device).no_grad();
                    let mut model = ShardedModel::new(group, frozen, config, &()).expect("sharded");
                    let before = params(&mut model);
                    assert_eq!(model.ledger().held(Purpose::OptimizerState), 0);
                    let (ids, targets) = batch(0, 0, &Device::flex());
                    model.evaluate(|net| net.loss(ids, targets)).expect("evaluated");
                    // A step of a model that is frozen as a whole changes nothing.
                    step(&mut model, 7, Net::loss);
                    assert!(params(&mut model) == before);
                    model.set_trainable(|_| true).expect("unfrozen");
                    assert!(model.parameter("embed.weight").expect("known").requires_grad);
                    assert!(three_steps(&mut model) == want, "{strategy}, {precision:?}, {ranks} ranks");
                });
            }
        }
    }
}

/// A head is trained first, then everything, then everything but one unit: as in plain Burn.
#[test]
fn parts_are_unfrozen_one_after_another() {
    let device = Device::flex().autodiff();
    let is_norm = |path: &str| path.starts_with("norm");
    let not_middle = |path: &str| !path.starts_with("blocks.1");
    let run = |ranks, config: ShardConfig| {
        world(ranks, |group| {
            let mut model = ShardedModel::new(group, Net::new(&device), config, &()).expect("sharded");
            let mut all = vec![params(&mut model)];
            for trained in [&is_norm as &dyn Fn(&str) -> bool, &|_| true, &not_middle] {
                model.set_trainable(trained).expect("chosen");
                let (_, after) = three_steps(&mut model);
                let before = &all[all.len() - 1];
                for ((path, _, a), (_, _, b)) in before.iter().zip(&sorted_like(before, &after)) {
                    assert_eq!(a != b, trained(path), "{path}");
                }
                all.push(sorted_like(before, &after));
            }
            all
        })
        .remove(0)
    };
    let want = run(1, descent(ShardingStrategy::FullShard));
    let mut values = want[0].clone();
    for (index, trained) in
        [&is_norm as &dyn Fn(&str) -> bool, &|_| true, &not_middle].into_iter().enumerate()
    {
        // Plain Burn trains everything; what is frozen is put back after each step.
        for at in 0..3 {
            let learned = plain_descent_from(Net::new(&device), &values, at..at + 1, Net::loss);
            for ((path, _, old), (_, _, new)) in values.iter_mut().zip(learned) {
                if trained(path) {
                    *old = new;
                }
            }
        }
        assert_close(&want[index + 1], &values, 1e-5);
    }
    for strategy in STRATEGIES {
        for recompute in [false, true] {
            for ranks in [2, 4] {
                let got = run(ranks, ShardConfig { recompute, ..descent(strategy) });
                assert!(got == want, "{strategy}, recompute {recompute}, {ranks} ranks");
            }
        }
    }
}

/// The same parameters in the order of `order`: what is frozen is exported after what is trained.
fn sorted_like(order: &Params, params: &Params) -> Params {
    let find = |path: &String| params.iter().find(|(p, ..)| p == path).expect("the same parameters").clone();
    order.iter().map(|(path, ..)| find(path)).collect()
}

#[test]
fn statistics_are_not_dropped_silently() {
    world(2, |group| {
        let device = Device::flex().autodiff();
        let rank = group.rank();
        let config = config(ShardingStrategy::FullShard);
        let mut model = ShardedModel::new(group, Net::new(&device), config, &()).expect("sharded");
        let error = model.set_trainable(|path| path.len() % 2 == rank).expect_err("ranks differ").to_string();
        assert!(error.contains("frozen") && error.contains("rank 0"), "{error}");
        // The model is as it was.
        step(&mut model, 0, Net::loss);
        let error = model.set_trainable(|_| true).expect_err("it has statistics").to_string();
        assert!(error.contains("before the first update"), "{error}");
        step(&mut model, 1, Net::loss);
    });
    // An average of the weights is a statistic too.
    world(2, |group| {
        let device = Device::flex().autodiff();
        let mut config = descent(ShardingStrategy::FullShard);
        config.engine.ema_decay = Some(0.9);
        let mut model = ShardedModel::new(group, Net::new(&device), config, &()).expect("sharded");
        model.set_trainable(|_| true).expect("nothing has been updated");
        step(&mut model, 0, Net::loss);
        model.set_trainable(|_| true).expect_err("the average has begun");
    });
}

/// A handle for weights that was taken before parameters are frozen or unfrozen goes on to feed the model.
#[test]
fn weights_follow_the_model() {
    let device = Device::flex().autodiff();
    let mut config = config(ShardingStrategy::FullShard);
    config.engine.divisor = Divisor::Weights;
    let weighted = |model: &mut ShardedModel<Net>, weights: &StepWeights, index: usize| {
        let outcome = model.step(4, 0.01, |net, m| {
            let (ids, targets) = batch(m, index, &device);
            weights.add(m as f64 + 1.0);
            net.loss(ids, targets)
        });
        outcome.expect("a step").loss.to_bits()
    };
    world(2, |group| {
        let new = || ShardedModel::new(group.clone(), Net::new(&device), config, &()).expect("sharded");
        let mut model = new();
        let weights = model.weights();
        let want: Vec<u64> = (0..3).map(|index| weighted(&mut model, &weights, index)).collect();
        let want = (want, params(&mut model));

        let mut model = new();
        let (weights, same) = (model.weights(), model.weights());
        model.set_trainable(|path| path.starts_with("norm")).expect("frozen");
        model.set_trainable(|_| true).expect("unfrozen");
        let handles = [weights, same, model.weights()];
        let got: Vec<u64> = (0..3).map(|index| weighted(&mut model, &handles[index], index)).collect();
        assert!((got, params(&mut model)) == want);
        drop(model);
        // Nothing to feed: no harm either.
        handles[0].add(1.0);
    });
}

/// This process's resident bytes.
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    let pages = statm.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok());
    pages.expect("the second number") * 4096
}

/// The shards of the old layout go when the new one is there, also where a peer is slow to let go of them.
#[test]
fn old_shards_do_not_stay() {
    const SIDE: usize = 2048;
    const ROUNDS: usize = 8;
    let grown = world(2, |group| {
        let device = Device::flex().autodiff();
        let rank = group.rank();
        let group = if rank == 1 { shardwise_comm::testing::delaying(&group, 7) } else { group };
        let module = LinearConfig::new(SIDE, SIDE).with_bias(false).init(&device);
        let config = descent(ShardingStrategy::FullShard);
        let mut model = ShardedModel::new(group, module, config, &()).expect("sharded");
        let weights = model.weights();
        model.set_trainable(|_| false).expect("frozen");
        model.set_trainable(|_| true).expect("unfrozen");
        model.group().barrier("before").expect("together");
        let before = resident();
        for round in 0..ROUNDS {
            model.set_trainable(|_| round % 2 == 1).expect("chosen");
        }
        model.group().barrier("after").expect("together");
        let grown = resident().saturating_sub(before);
        model.group().barrier("measured").expect("together");
        weights.add(1.0);
        grown
    });
    let shard = SIDE * SIDE * size_of::<f32>() / 2;
    assert!(grown.iter().all(|grown| *grown < 3 * shard), "{grown:?} bytes more, with shards of {shard}");
}
