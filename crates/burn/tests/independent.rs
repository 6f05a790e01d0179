//! Units whose output does not depend on their input.

mod common;

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Int, Tensor};
use common::{
    Assign, Block, Net, STRATEGIES, assert_close, batch, descent, head, params, plain_descent, step, world,
};
use shardwise_burn::{ShardConfig, Sharded, ShardedModel};

type InUnit = fn(&Block, Tensor<3>) -> Tensor<3>;

/// A table of positions: of the input only the shape counts.
fn positions(block: &Block, x: Tensor<3>) -> Tensor<3> {
    let [batch, length, width] = x.dims();
    block.down.weight.val().narrow(0, 0, length).unsqueeze::<3>().expand([batch, length, width])
}

fn cut_off(block: &Block, x: Tensor<3>) -> Tensor<3> {
    block.forward(x.detach())
}

/// The net with something else in its middle unit.
fn loss(net: &Net, in_unit: InUnit, ids: Tensor<2, Int>, targets: Tensor<1, Int>) -> Tensor<1> {
    let x = net.blocks[0].call(net.embed.forward(ids), |block, x| block.forward(x));
    let x = net.blocks[1].call(x, in_unit);
    let x = net.blocks[2].call(x, |block, x| block.forward(x));
    head(net.norm.forward(x), net.embed.weight.val(), targets)
}

/// The units before such a unit learn nothing from it, and the others train as in plain Burn; the unit itself may be frozen.
#[test]
fn what_comes_before_gets_no_gradient() {
    let device = Device::flex().autodiff();
    for (in_unit, frozen) in
        [(positions as InUnit, false), (positions, true), (cut_off, false), (cut_off, true)]
    {
        let new = || {
            let mut net = Net::new(&device);
            if frozen {
                net.blocks[1] = Sharded::new(Block::new(&device).no_grad());
            }
            net
        };
        let loss = |net: &Net, ids: Tensor<2, Int>, targets: Tensor<1, Int>| loss(net, in_unit, ids, targets);
        for strategy in STRATEGIES {
            for recompute in [false, true] {
                world(2, |group| {
                    let config = ShardConfig { recompute, ..descent(strategy) };
                    let mut model = ShardedModel::new(group, new(), config, &()).expect("sharded");
                    let before = params(&mut model);
                    for index in 0..2 {
                        step(&mut model, index, loss);
                    }
                    let after = params(&mut model);
                    let plain = plain_descent(new(), &before, 2, loss);
                    assert_close(&after, &plain, 1e-5);
                    let evaluate = |net: &Net| {
                        let (ids, targets) = batch(0, 0, &Device::flex());
                        loss(net, ids, targets).into_scalar::<f32>()
                    };
                    let got = model.evaluate(evaluate).expect("evaluated");
                    let whole = Net::new(&Device::flex()).map(&mut Assign::new(&after, &Device::flex()));
                    assert!((got - evaluate(&whole)).abs() < 1e-5, "{strategy}: the loss of an evaluation");
                    for ((path, _, a), (_, _, b)) in before.iter().zip(&after) {
                        assert!(!path.starts_with("blocks.0") || a == b, "{path}");
                        assert!(!path.starts_with("blocks.2.up") || a != b, "{path}");
                    }
                });
            }
        }
    }
}

/// A parameter that a unit hands out as it is can be read after the unit is freed, from a unit in a unit too.
#[test]
fn a_parameter_may_be_the_output() {
    #[derive(Module, Debug)]
    struct Outer {
        inner: Sharded<Linear>,
        scale: Param<Tensor<2>>,
    }
    #[derive(Module, Debug)]
    struct Holder {
        outer: Sharded<Outer>,
        alone: Sharded<Linear>,
    }
    impl Holder {
        fn loss(&self, device: &Device) -> Tensor<1> {
            let x = Tensor::<2>::ones([3, 3], device);
            let y = self.outer.call(x, |outer, x| {
                let weight = outer.inner.call(x.clone(), |linear, _| linear.weight.val());
                x * weight * outer.scale.val()
            });
            let z = self.alone.call(y.clone(), |linear, _| linear.weight.val().transpose());
            (y * z).sum()
        }
    }
    let device = Device::flex().autodiff();
    let linear = || LinearConfig::new(3, 3).with_bias(false).init(&device);
    let new = || {
        let scale = Param::from_tensor(Tensor::full([3, 3], 0.5, &device));
        let outer = Sharded::new(Outer { inner: Sharded::new(linear()), scale });
        Holder { outer, alone: Sharded::new(linear()) }
    };
    for strategy in STRATEGIES {
        for recompute in [false, true] {
            world(2, |group| {
                let config = ShardConfig { recompute, ..descent(strategy) };
                let mut model = ShardedModel::new(group, new(), config, &()).expect("sharded");
                let before = params(&mut model);
                for index in 0..2 {
                    step(&mut model, index, |holder, _, _| holder.loss(&device));
                }
                let after = params(&mut model);
                let plain = plain_descent(new(), &before, 2, |holder, _, _| holder.loss(&device));
                assert_close(&after, &plain, 1e-6);
                assert!(before.iter().zip(&after).all(|(a, b)| a.2 != b.2), "everything learns");
                let got = model.evaluate(|holder| holder.loss(&Device::flex()).into_scalar::<f32>());
                let whole = new().map(&mut Assign::new(&after, &Device::flex()));
                let want = whole.loss(&Device::flex()).into_scalar::<f32>();
                assert!((got.expect("evaluated") - want).abs() < 1e-5, "{strategy}, recompute {recompute}");
            });
        }
    }
}
