//! A parameter that several places use is stored once, and its gradient is the sum of all uses.

mod common;

use burn::module::{Module, Param};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::{Device, Int, Tensor, activation};
use common::{
    Params, STRATEGIES, VOCAB, WIDTH, assert_close, config, descent, head, params, plain_descent, step, world,
};
use shardwise_burn::{Init, ShardConfig, Sharded, ShardedModel};
use shardwise_core::ShardingStrategy;
use shardwise_engine::EventKind;

#[derive(Module, Debug)]
struct Layer {
    up: Linear,
    down: Linear,
}

impl Layer {
    fn new(device: &Device) -> Self {
        let linear = |a, b| LinearConfig::new(a, b).init(device);
        Self { up: linear(WIDTH, 7), down: linear(7, WIDTH) }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        x.clone() + self.down.forward(activation::tanh(self.up.forward(x)))
    }
}

/// Units `a`, `b` and `c`; `embed` is the head too, and in the root.
#[derive(Module, Debug)]
struct Net {
    embed: Embedding,
    a: Sharded<Layer>,
    b: Sharded<Layer>,
    c: Sharded<Layer>,
}

impl Net {
    fn new(device: &Device) -> Self {
        let unit = || Sharded::new(Layer::new(device));
        let embed = EmbeddingConfig::new(VOCAB, WIDTH).init(device);
        Self { embed, a: unit(), b: unit(), c: unit() }
    }

    fn loss(&self, ids: Tensor<2, Int>, targets: Tensor<1, Int>) -> Tensor<1> {
        let mut x = self.embed.forward(ids);
        for unit in [&self.a, &self.b, &self.c] {
            x = unit.call(x, |layer, x| layer.forward(x));
        }
        head(x, self.embed.weight.val(), targets)
    }
}

/// `a` and `b` share `up`; the weight of `down` is one in all three.
fn tied(device: &Device) -> Net {
    let net = Net::new(device);
    let a = net.a.inner().clone();
    let with_down = |layer: &Layer| {
        let mut layer = layer.clone();
        layer.down.weight = a.down.weight.clone();
        layer
    };
    let mut b = with_down(net.b.inner());
    b.up = a.up.clone();
    let c = with_down(net.c.inner());
    Net { embed: net.embed, a: Sharded::new(a), b: Sharded::new(b), c: Sharded::new(c) }
}

fn train(ranks: usize, init: &Init, steps: usize) -> (Vec<u64>, Params, Params) {
    world(ranks, |group| {
        let device = Device::flex().autodiff();
        let mut model = init.shard(group, tied(&device), &()).expect("sharded");
        let before = params(&mut model);
        let losses = (0..steps).map(|index| step(&mut model, index, Net::loss)).collect();
        (losses, before, params(&mut model))
    })
    .remove(0)
}

/// D1, D4, F2: ties across units, two uses and three, belong to the root.
#[test]
fn a_tie_across_units_is_stored_once_and_gets_the_sum_of_its_gradients() {
    let device = Device::flex().autodiff();
    let (_, initial, got) = train(1, &Init::new(descent(ShardingStrategy::FullShard)), 3);
    let paths: Vec<&str> = got.iter().map(|(path, ..)| path.as_str()).collect();
    assert_eq!(
        paths,
        [
            "embed.weight",
            "a.up.weight",
            "a.up.bias",
            "a.down.weight",
            "a.down.bias",
            "b.down.bias",
            "c.up.weight",
            "c.up.bias",
            "c.down.bias"
        ],
        "one entry for each in an export"
    );
    let want = plain_descent(tied(&device), &initial, 3, Net::loss);
    assert_close(&got, &want, 1e-5);
    // Without the tie the uses would part.
    let untied = plain_descent(Net::new(&device), &untie(&initial), 3, Net::loss);
    let up = |params: &Params| params.iter().find(|(p, ..)| p == "a.up.weight").expect("there").2.clone();
    assert!(up(&untied).iter().zip(up(&want)).any(|(a, b)| (a - b).abs() > 1e-4));
}

/// The same values under every path.
fn untie(params: &Params) -> Params {
    let mut all = params.clone();
    for (path, primary) in [
        ("b.up.weight", "a.up.weight"),
        ("b.up.bias", "a.up.bias"),
        ("b.down.weight", "a.down.weight"),
        ("c.down.weight", "a.down.weight"),
    ] {
        let (_, shape, values) = params.iter().find(|(p, ..)| p == primary).expect("there").clone();
        all.push((path.to_string(), shape, values));
    }
    all
}

#[test]
fn ties_across_units_train_the_same_however_they_are_sharded() {
    let want = train(1, &Init::new(config(ShardingStrategy::FullShard)), 3);
    for strategy in STRATEGIES {
        for recompute in [false, true] {
            for ranks in [1, 2, 4] {
                let init = Init::new(ShardConfig { recompute, ..config(strategy) });
                assert!(train(ranks, &init, 3) == want, "{strategy}, recompute {recompute}, {ranks} ranks");
            }
            // Three ranks divide the micro-batches otherwise.
            let init = Init::new(ShardConfig { recompute, ..config(strategy) });
            assert_close(&train(3, &init, 3).2, &want.2, 1e-4);
        }
    }
}

#[test]
fn a_tie_is_found_under_each_of_its_paths() {
    world(2, |group| {
        let device = Device::flex().autodiff();
        let config = config(ShardingStrategy::FullShard);
        let mut model = ShardedModel::new(group, tied(&device), config, &()).expect("sharded");
        let root = &model.layouts()[0];
        let shared: Vec<(&str, &str)> = root
            .shared_params()
            .iter()
            .map(|shared| (shared.path.as_str(), shared.primary_path.as_str()))
            .collect();
        assert_eq!(
            shared,
            [
                ("b.up.weight", "a.up.weight"),
                ("b.up.bias", "a.up.bias"),
                ("b.down.weight", "a.down.weight"),
                ("c.down.weight", "a.down.weight")
            ]
        );
        assert_eq!(model.parameter("c.down.weight").expect("known").unit, "root");
        // A change under one path is seen under all.
        let mut scope =
            model.gather_mut(shardwise_burn::Which::Paths(&["c.down.weight"]), 0).expect("gathered");
        scope.values_mut("b.down.weight").expect("the same").fill(2.0);
        drop(scope);
        let x = Tensor::<2>::zeros([1, 1], &Device::flex());
        for unit in ["a", "b", "c"] {
            let x = x.clone();
            let sum = model.evaluate(|net| {
                let unit = match unit {
                    "a" => &net.a,
                    "b" => &net.b,
                    _ => &net.c,
                };
                unit.call(x, |layer, x| x + layer.down.weight.val().sum().unsqueeze())
            });
            assert_eq!(sum.expect("evaluated").into_scalar::<f32>(), 2.0 * 70.0, "{unit}");
        }
    });
}

/// P10: a registered use leaves the parameter with its owner, which is gathered for the user too.
#[test]
fn an_external_parameter_stays_with_its_owner() {
    let register = |init: Init| {
        let mut init = init;
        for path in ["a.up.weight", "a.up.bias", "a.down.weight"] {
            init = init.register_external_parameter("b", path);
        }
        init.register_external_parameter("c", "a.down.weight")
    };
    // Where a parameter lies changes no bit.
    let want = train(1, &Init::new(config(ShardingStrategy::FullShard)), 3);
    let sort = |run: (Vec<u64>, Params, Params)| (run.0, common::sorted(run.1), common::sorted(run.2));
    let want = sort(want);
    for strategy in STRATEGIES {
        for recompute in [false, true] {
            for ranks in [1, 2, 4] {
                let init = register(Init::new(ShardConfig { recompute, ..config(strategy) }));
                let got = sort(train(ranks, &init, 3));
                assert!(got == want, "{strategy}, recompute {recompute}, {ranks} ranks");
            }
        }
    }
    // A rank that idles in the last round walks the same order.
    let three = |init: &Init| sort(train(3, init, 3));
    let init = || Init::new(config(ShardingStrategy::FullShard));
    assert!(three(&register(init())) == three(&init()), "3 ranks");
    world(2, |group| {
        let device = Device::flex().autodiff();
        let init = register(Init::new(config(ShardingStrategy::FullShard)));
        let mut model = init.shard(group, tied(&device), &()).expect("sharded");
        assert_eq!(model.parameter("c.down.weight").expect("known").unit, "a");
        model.log_events(true);
        step(&mut model, 0, Net::loss);
        let events = model.take_events();
        let a = shardwise_engine::UnitId::unit(0);
        let count = |kind| events.iter().filter(|e| e.unit == a && e.kind == kind && e.round == 0).count();
        assert_eq!(count(EventKind::Forward), 3, "gathered for its own call and those of `b` and `c`");
        assert_eq!(count(EventKind::ReduceStarted), 1, "reduced once, after the last of them");
        let evaluated = model.evaluate(|net| {
            net.b.call(Tensor::<3>::ones([1, 1, WIDTH], &Device::flex()), |layer, x| layer.forward(x))
        });
        assert!(evaluated.expect("evaluated").into_data().iter::<f32>().all(f32::is_finite));
    });
}

#[test]
fn wrong_ties_and_registrations_say_why() {
    let device = Device::flex().autodiff();
    let refused = |init: &Init, net: &Net| {
        world(1, |group| init.shard(group, net.clone(), &()).map(drop).expect_err("refused").to_string())
            .remove(0)
    };
    let init = || Init::new(config(ShardingStrategy::FullShard));
    let net = tied(&device);
    for (unit, path, part) in [
        ("z", "a.up.weight", "no such unit"),
        ("b", "a.up.wait", "no such parameter"),
        ("a", "a.up.weight", "lies in that very unit"),
        ("c", "a.up.weight", "does not hold it"),
    ] {
        let error = refused(&init().register_external_parameter(unit, path), &net);
        assert!(error.contains(part) && error.contains(&format!("`{path}` of unit `{unit}`")), "{error}");
    }
    let registered = init().register_external_parameter("b", "a.up.weight");
    let back = registered.unregister_external_parameter("b", "a.up.weight").expect("registered");
    let error = back.unregister_external_parameter("b", "a.up.weight").expect_err("not any more");
    assert!(error.to_string().contains("never registered"), "{error}");

    let mut half = net.a.inner().clone();
    // Clones of a parameter that is not initialised yet would be frozen together.
    let values = Tensor::<2>::ones([WIDTH, 7], &device);
    half.up.weight = Param::initialized(half.up.weight.id, values);
    let net = Net { b: Sharded::new(half), ..net };
    let error = refused(&init(), &net);
    assert!(error.contains("`a.up.weight`") && error.contains("`b.up.weight`"), "{error}");
    assert!(error.contains("freeze or train both"), "{error}");
}

/// A tie between a unit and the root: the head is the embedding, and a layer in a unit uses it too.
#[test]
fn a_tie_between_a_unit_and_the_root_belongs_to_the_root() {
    #[derive(Module, Debug)]
    struct Mixer {
        table: Param<Tensor<2>>,
        scale: Param<Tensor<1>>,
    }
    #[derive(Module, Debug)]
    struct Small {
        embed: Embedding,
        mix: Sharded<Mixer>,
    }
    impl Small {
        fn loss(&self, ids: Tensor<2, Int>, targets: Tensor<1, Int>) -> Tensor<1> {
            let x = self.embed.forward(ids);
            let x = self.mix.call(x, |mixer, x| {
                x * mixer.scale.val().unsqueeze() + mixer.table.val().mean_dim(0).unsqueeze()
            });
            head(x, self.embed.weight.val(), targets)
        }
    }
    let device = Device::flex().autodiff();
    let build = || {
        let embed = EmbeddingConfig::new(VOCAB, WIDTH).init(&device);
        let table = embed.weight.clone();
        let scale = Param::from_tensor(Tensor::ones([WIDTH], &device));
        Small { embed, mix: Sharded::new(Mixer { table, scale }) }
    };
    let run = |ranks, config| {
        world(ranks, |group| {
            let mut model = ShardedModel::new(group, build(), config, &()).expect("sharded");
            let before = params(&mut model);
            for index in 0..3 {
                step(&mut model, index, Small::loss);
            }
            (before, params(&mut model))
        })
        .remove(0)
    };
    let (initial, got) = run(1, descent(ShardingStrategy::FullShard));
    assert_eq!(got.len(), 2);
    assert_close(&got, &plain_descent(build(), &initial, 3, Small::loss), 1e-5);
    for strategy in STRATEGIES {
        for recompute in [false, true] {
            let config = ShardConfig { recompute, ..descent(strategy) };
            assert!(run(2, config).1 == got && run(4, config).1 == got, "{strategy}, recompute {recompute}");
        }
    }
}
