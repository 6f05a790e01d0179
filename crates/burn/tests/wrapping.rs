//! What becomes a unit, what stays out of units, and that neither changes what is learned.

mod common;

use burn::module::{Module, Param};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, Int, Tensor};
use common::{
    Block, Net, Params, STRATEGIES, VOCAB, WIDTH, assert_close, batch, config, descent, head, params,
    plain_descent, sorted, step, world,
};
use shardwise_burn::{Ignored, Init, Persistence, ShardConfig, Sharded, WrapPolicy};
use shardwise_core::{Precision, Purpose, ShardingStrategy};
use shardwise_engine::{EventKind, OptimizerConfig};

/// Two wrapped blocks in a wrapped stage, with parameters of its own around them.
#[derive(Module, Debug)]
struct Stage {
    first: Sharded<Block>,
    mix: Linear,
    second: Sharded<Block>,
    norm: LayerNorm,
}

impl Stage {
    fn new(device: &Device) -> Self {
        Self {
            first: Sharded::new(Block::new(device)),
            mix: LinearConfig::new(WIDTH, WIDTH).init(device),
            second: Sharded::new(Block::new(device)),
            norm: LayerNormConfig::new(WIDTH).init(device),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let x = self.first.call(x, |block, x| block.forward(x));
        let x = self.mix.forward(x);
        // With a constant, so that a call inlined into the stage must not let gradients into it.
        let by = x.clone().mean_dim(2);
        let x = self.second.call_with(x, by, |block, x, by| block.forward(x) + by.clone() * 0.5);
        self.norm.forward(x)
    }
}

/// Stages that are units with units inside, and one plain block.
#[derive(Module, Debug)]
struct Deep {
    embed: Embedding,
    stages: Vec<Sharded<Stage>>,
    last: Sharded<Block>,
}

impl Deep {
    fn new(device: &Device) -> Self {
        Self {
            embed: EmbeddingConfig::new(VOCAB, WIDTH).init(device),
            stages: (0..2).map(|_| Sharded::new(Stage::new(device))).collect(),
            last: Sharded::new(Block::new(device)),
        }
    }

    fn loss(&self, ids: Tensor<2, Int>, targets: Tensor<1, Int>) -> Tensor<1> {
        let mut x = self.embed.forward(ids);
        for stage in &self.stages {
            x = stage.call(x, |stage, x| stage.forward(x));
        }
        let x = self.last.call(x, |block, x| block.forward(x));
        head(x, self.embed.weight.val(), targets)
    }
}

fn train(ranks: usize, init: &Init) -> (Vec<u64>, Params) {
    world(ranks, |group| {
        let device = Device::flex().autodiff();
        let mut model = init.shard(group, Deep::new(&device), &()).expect("sharded");
        let losses = (0..3).map(|index| step(&mut model, index, Deep::loss)).collect();
        (losses, sorted(params(&mut model)))
    })
    .remove(0)
}

/// The names of the units, in the model's order.
fn units(init: &Init) -> Vec<String> {
    world(1, |group| {
        let device = Device::flex().autodiff();
        let model = init.shard(group, Deep::new(&device), &()).expect("sharded");
        let mut names: Vec<String> = model.layouts().iter().map(|l| l.unit().to_string()).collect();
        names.dedup();
        names
    })
    .remove(0)
}

fn policies() -> Vec<(WrapPolicy, &'static [&'static str])> {
    vec![
        (
            WrapPolicy::Every,
            &[
                "root",
                "stages.0",
                "stages.0.first",
                "stages.0.second",
                "stages.1",
                "stages.1.first",
                "stages.1.second",
                "last",
            ],
        ),
        (
            WrapPolicy::containers(["Block"]),
            &["root", "stages.0.first", "stages.0.second", "stages.1.first", "stages.1.second", "last"],
        ),
        (WrapPolicy::containers(["Stage"]), &["root", "stages.0", "stages.1"]),
        // A block has 387 elements, a stage 130 of its own and 904 with its blocks.
        (
            WrapPolicy::MinNumel(387),
            &["root", "stages.0.first", "stages.0.second", "stages.1.first", "stages.1.second", "last"],
        ),
        (WrapPolicy::MinNumel(388), &["root", "stages.0", "stages.1"]),
        (
            WrapPolicy::choose(|c| c.path.ends_with("second") || (c.container == "Stage" && c.numel == 517)),
            &["root", "stages.0", "stages.0.second", "stages.1", "stages.1.second"],
        ),
        (WrapPolicy::nothing(), &["root"]),
    ]
}

#[test]
fn a_policy_chooses_the_units() {
    for (policy, want) in policies() {
        let init = Init::new(config(ShardingStrategy::FullShard)).wrap(policy.clone());
        assert_eq!(units(&init), want, "{policy:?}");
    }
    let typo = Init::new(config(ShardingStrategy::FullShard)).wrap(WrapPolicy::containers(["Blok"]));
    let device = Device::flex().autodiff();
    let error = world(1, |group| {
        typo.shard(group, Deep::new(&device), &()).map(drop).expect_err("no such type").to_string()
    })
    .remove(0);
    assert!(error.contains("`Blok`") && error.contains("[\"Block\", \"Stage\"]"), "{error}");
}

/// Nested units, units inside the root's computation, and none: the same bits, with recomputation and without (G9).
#[test]
fn the_choice_of_units_changes_no_bit() {
    let want = train(1, &Init::new(config(ShardingStrategy::FullShard)).wrap(WrapPolicy::nothing()));
    for (policy, _) in policies() {
        for strategy in STRATEGIES {
            for recompute in [false, true] {
                for ranks in [1, 2, 4] {
                    let config = ShardConfig { recompute, ..config(strategy) };
                    let got = train(ranks, &Init::new(config).wrap(policy.clone()));
                    assert!(got == want, "{policy:?}: {strategy}, recompute {recompute}, {ranks} ranks");
                }
            }
        }
    }
    let three = |policy| train(3, &Init::new(config(ShardingStrategy::FullShard)).wrap(policy));
    assert!(three(WrapPolicy::Every) == three(WrapPolicy::nothing()), "three ranks");
}

#[test]
fn nested_units_work_without_prefetch_and_in_evaluation() {
    let run = |policy: WrapPolicy, prefetch| {
        world(2, |group| {
            let device = Device::flex().autodiff();
            let mut config = ShardConfig { recompute: true, ..config(ShardingStrategy::FullShard) };
            config.engine.prefetch = prefetch;
            let init = Init::new(config).wrap(policy.clone());
            let mut model = init.shard(group, Deep::new(&device), &()).expect("sharded");
            let (ids, targets) = batch(0, 0, &Device::flex());
            let trained = step(&mut model, 0, Deep::loss);
            let evaluated = model.evaluate(|deep| deep.loss(ids, targets)).expect("evaluated");
            (trained, evaluated.into_scalar::<f32>().to_bits(), step(&mut model, 1, Deep::loss))
        })
        .remove(0)
    };
    assert_eq!(run(WrapPolicy::Every, false), run(WrapPolicy::Every, true));
    assert_eq!(run(WrapPolicy::Every, true), run(WrapPolicy::nothing(), true));
}

/// G9: two forwards before one backward, with nested units and recomputation.
#[test]
fn two_forwards_through_nested_units_have_one_backward() {
    let pair = |deep: &Deep, ids: Tensor<2, Int>, targets: Tensor<1, Int>| {
        let chosen = deep.loss(ids.clone(), targets.clone());
        let rejected = deep.loss(ids.flip([1]), targets);
        burn::tensor::activation::log_sigmoid(rejected.clone() - chosen.clone()).neg()
            + (chosen + rejected) * 0.1
    };
    let run = |ranks, config, policy: WrapPolicy| {
        world(ranks, |group| {
            let device = Device::flex().autodiff();
            let init = Init::new(config).wrap(policy.clone());
            let mut model = init.shard(group, Deep::new(&device), &()).expect("sharded");
            let before = params(&mut model);
            let losses: Vec<u64> = (0..3).map(|index| step(&mut model, index, pair)).collect();
            (losses, sorted(before), sorted(params(&mut model)))
        })
        .remove(0)
    };
    let want = run(1, descent(ShardingStrategy::FullShard), WrapPolicy::nothing());
    let device = Device::flex().autodiff();
    assert_close(&want.2, &plain_descent(Deep::new(&device), &want.1, 3, pair), 1e-5);
    for strategy in STRATEGIES {
        for recompute in [false, true] {
            for ranks in [1, 2, 4] {
                let config = ShardConfig { recompute, ..descent(strategy) };
                let got = run(ranks, config, WrapPolicy::Every);
                assert!(got == want, "{strategy}, recompute {recompute}, {ranks} ranks");
            }
        }
    }
}

/// An inner unit is there only around its own use, and each unit is reduced once a round, the inner before the outer.
#[test]
fn a_nested_unit_is_gathered_and_reduced_by_itself() {
    for recompute in [false, true] {
        world(2, |group| {
            let device = Device::flex().autodiff();
            let config = ShardConfig { recompute, ..config(ShardingStrategy::FullShard) };
            let mut model = Init::new(config).shard(group, Deep::new(&device), &()).expect("sharded");
            step(&mut model, 0, Deep::loss);
            model.log_events(true);
            step(&mut model, 1, Deep::loss);
            let events = model.take_events();
            let unit = shardwise_engine::UnitId::unit;
            let reduced: Vec<_> = events
                .iter()
                .filter(|e| e.kind == EventKind::ReduceStarted && e.round == 0)
                .map(|e| e.unit)
                .collect();
            let root = shardwise_engine::UnitId::ROOT;
            let order = [unit(6), unit(5), unit(4), unit(3), unit(2), unit(1), unit(0), root];
            assert_eq!(reduced, order, "recompute {recompute}");
            let started = |u| {
                let is_it = |e: &&shardwise_engine::Event| {
                    e.unit == unit(u) && e.kind == EventKind::GatherStarted && e.round == 0
                };
                events.iter().filter(is_it).count()
            };
            // Units inside one that is computed again are gathered once more for that, and may lose a prefetch.
            let started = [0, 1, 2, 3, 4, 5, 6].map(started);
            if recompute {
                assert!(started.iter().all(|count| *count <= 4) && started[0] == 2 && started[6] == 2);
            } else {
                assert_eq!(started, [2; 7]);
            }
            // Twice for a unit; once more for a unit inside one that is computed again.
            let gathers = |u| {
                let is_it = |e: &&shardwise_engine::Event| {
                    e.unit == unit(u) && e.kind == EventKind::Forward && e.round == 0
                };
                events.iter().filter(is_it).count()
            };
            let inner = if recompute { 2 } else { 1 };
            assert_eq!([gathers(0), gathers(1), gathers(2)], [1, inner, inner], "recompute {recompute}");
        });
    }
}

/// A model of one unit, and one without.
#[test]
fn a_model_can_be_one_unit_or_have_none() {
    #[derive(Module, Debug)]
    struct Whole {
        /// Twice wrapped: the outer unit has nothing of its own.
        body: Sharded<Sharded<Linear>>,
    }
    let device = Device::flex().autodiff();
    let run = |ranks, policy: WrapPolicy| {
        world(ranks, |group| {
            let module = Whole { body: Sharded::new(Sharded::new(LinearConfig::new(3, 1).init(&device))) };
            let init = Init::new(config(ShardingStrategy::FullShard)).wrap(policy.clone());
            let mut model = init.shard(group, module, &()).expect("sharded");
            assert_eq!(model.layouts().len(), 1);
            for _ in 0..3 {
                let loss = |whole: &Whole, m: usize| {
                    let x = Tensor::<2>::from_data([[1.0, 2.0, m as f32]], &device);
                    whole
                        .body
                        .call(x, |unit, x| unit.call(x, |linear, x| linear.forward(x)))
                        .powf_scalar(2.0)
                        .sum()
                };
                model.step(4, 0.01, loss).expect("a step");
            }
            params(&mut model)
        })
        .remove(0)
    };
    let want = run(1, WrapPolicy::Every);
    for ranks in [1, 2, 4] {
        assert!(run(ranks, WrapPolicy::Every) == want, "{ranks} ranks, one unit");
        assert!(run(ranks, WrapPolicy::nothing()) == want, "{ranks} ranks, no unit");
    }
}

/// A18: an ignored parameter is replicated, its gradient reduced, and it is equal on all ranks ever after.
#[test]
fn ignored_parameters_stay_replicated_and_in_step() {
    let ignored = |path: &str| path.ends_with("norm.gamma") || path.starts_with("stages.0.mix");
    let want = train(1, &Init::new(config(ShardingStrategy::FullShard)));
    for strategy in STRATEGIES {
        for recompute in [false, true] {
            for ranks in [1, 2, 4] {
                let config = ShardConfig { recompute, ..config(strategy) };
                let init = Init::new(config).ignore(Ignored::default(), ignored);
                assert!(train(ranks, &init) == want, "{strategy}, recompute {recompute}, {ranks} ranks");
            }
        }
    }
    // In a hybrid layout and with rounded parameters too.
    let hybrid = |ranks, shard_group, precision, ignored: fn(&str) -> bool| {
        let mut config = config(ShardingStrategy::HybridShard);
        config.engine.shard_group = Some(shard_group);
        config.engine.precision.param_dtype = precision;
        train(ranks, &Init::new(config).ignore(Ignored::Replicated, ignored))
    };
    for shard_group in [1, 2, 4] {
        assert!(hybrid(4, shard_group, Precision::F32, ignored) == want, "groups of {shard_group}");
        let low = hybrid(4, shard_group, Precision::Bf16, |_| false);
        assert!(hybrid(4, shard_group, Precision::Bf16, ignored) == low, "groups of {shard_group}, bf16");
    }
    let ranks = world(3, |group| {
        let device = Device::flex().autodiff();
        let init = Init::new(config(ShardingStrategy::FullShard)).ignore(Ignored::Replicated, ignored);
        let mut model = init.shard(group, Deep::new(&device), &()).expect("sharded");
        for index in 0..3 {
            step(&mut model, index, Deep::loss);
        }
        let summary = model.parameter("stages.0.mix.weight").expect("known");
        assert!(summary.persisted && summary.shard_numel == summary.numel());
        // What each rank computes with, without asking any other.
        let own = model.evaluate(|deep| deep.stages[0].inner().mix.weight.val().into_data());
        own.expect("evaluated").try_to_vec::<f32>().expect("f32")
    });
    assert!(ranks[0] == ranks[1] && ranks[0] == ranks[2]);
}

#[test]
fn local_parameters_are_left_alone() {
    #[derive(Module, Debug)]
    struct WithLocal {
        net: Net,
        scale: Param<Tensor<1>>,
        steps: Param<Tensor<1, Int>>,
        block: Sharded<Scaled>,
    }
    #[derive(Module, Debug)]
    struct Scaled {
        gain: Param<Tensor<1>>,
        linear: Linear,
    }
    impl WithLocal {
        fn new(device: &Device, scale: f32) -> Self {
            let scaled = Scaled {
                gain: Param::from_tensor(Tensor::full([1], 2.0, device)),
                linear: LinearConfig::new(WIDTH, WIDTH).init(device),
            };
            Self {
                net: Net::new(device),
                scale: Param::from_tensor(Tensor::full([1], scale, device)),
                steps: Param::initialized(burn::module::ParamId::new(), Tensor::from_data([7], device)),
                block: Sharded::new(scaled),
            }
        }

        fn loss(&self, ids: Tensor<2, Int>, targets: Tensor<1, Int>) -> Tensor<1> {
            let x = self.net.embed.forward(ids) * self.scale.val().unsqueeze();
            let x = self.block.call(x, |scaled, x| scaled.linear.forward(x) * scaled.gain.val().unsqueeze());
            head(x, self.net.embed.weight.val(), targets)
        }
    }
    for recompute in [false, true] {
        let ranks = world(2, |group| {
            let device = Device::flex().autodiff();
            let rank = group.rank();
            let config = ShardConfig { recompute, ..config(ShardingStrategy::FullShard) };
            let init = Init::new(config)
                .ignore(Ignored::Local, |path| ["scale", "steps", "block.gain"].contains(&path));
            let module = WithLocal::new(&device, 1.0 + rank as f32);
            let mut model = init.shard(group, module, &()).expect("sharded");
            for index in 0..2 {
                step(&mut model, index, WithLocal::loss);
            }
            let exported = params(&mut model);
            assert!(exported.iter().all(|(path, ..)| path != "scale" && path != "block.gain"));
            assert!(exported.iter().any(|(path, ..)| path == "block.linear.weight"));
            let (ids, targets) = batch(0, 0, &Device::flex());
            let (scale, gain, steps, loss) = model
                .evaluate(|m| {
                    let gain = m.block.inner().gain.val().into_scalar::<f32>();
                    (m.scale.val(), gain, m.steps.val(), m.loss(ids, targets))
                })
                .expect("evaluated");
            assert_eq!((gain, steps.into_scalar::<i64>()), (2.0, 7));
            assert!(loss.into_scalar::<f32>().is_finite());
            scale.into_scalar::<f32>()
        });
        assert_eq!(ranks, [1.0, 2.0], "each rank keeps its own");
    }
    // Without a policy an integer parameter is refused, and the message says what to do.
    let refused = world(1, |group| {
        let module = WithLocal::new(&Device::flex().autodiff(), 1.0);
        let init = Init::new(config(ShardingStrategy::FullShard));
        init.shard(group, module, &()).map(drop).expect_err("an integer").to_string()
    });
    assert!(refused[0].contains("`steps`") && refused[0].contains("ignore it"), "{}", refused[0]);
}

/// I9 and reference fact 27: small parameters stay gathered across steps; nothing about training changes.
#[test]
fn small_parameters_persist() {
    let want = train(1, &Init::new(config(ShardingStrategy::FullShard)));
    for strategy in STRATEGIES {
        for param_threshold in [0, 10, 17, 100_000] {
            for ranks in [1, 2, 4] {
                let persistence = Persistence { param_threshold, ..Persistence::default() };
                let init = Init::new(config(strategy)).persist(persistence);
                assert!(train(ranks, &init) == want, "{strategy}, {param_threshold} elements, {ranks} ranks");
            }
        }
    }
    // With optimizers that look at whole parameters too, here persistent ones among them.
    for optimizer in [OptimizerConfig::MUON, OptimizerConfig::ADAFACTOR] {
        let with = |ranks, param_threshold, strategy| {
            let mut config = config(strategy);
            config.engine.optimizer = optimizer;
            let persistence = Persistence { param_threshold, ..Persistence::default() };
            train(ranks, &Init::new(config).persist(persistence))
        };
        let want = with(1, 0, ShardingStrategy::FullShard);
        for strategy in STRATEGIES {
            for ranks in [2, 4] {
                let got = with(ranks, 150, strategy);
                assert!(got == want, "{optimizer:?}: {strategy}, {ranks} ranks");
            }
        }
    }
    let persisted = |persistence| {
        world(2, |group| {
            let device = Device::flex().autodiff();
            let init = Init::new(config(ShardingStrategy::FullShard)).persist(persistence);
            let mut model = init.shard(group, Net::new(&device), &()).expect("sharded");
            model.log_events(true);
            for index in 0..2 {
                step(&mut model, index, Net::loss);
            }
            let gathers = model.take_events().iter().filter(|e| e.kind == EventKind::GatherStarted).count();
            let whole: Vec<String> = model
                .layouts()
                .iter()
                .filter(|l| l.is_replicated())
                .flat_map(|l| l.params().iter().map(|p| p.path.clone()))
                .collect();
            (whole, gathers, model.ledger().peak(Purpose::GatheredUnits))
        })
        .remove(0)
    };
    let (none, all_gathers, _) = persisted(Persistence::default());
    assert!(none.is_empty());
    let (whole, ..) = persisted(Persistence { param_threshold: 10, model_threshold: 45 });
    // In the order of the walk, until 45 elements are full: gamma, beta, down.bias, and the next gamma.
    assert_eq!(
        whole,
        ["blocks.0.norm.gamma", "blocks.0.norm.beta", "blocks.0.down.bias", "blocks.1.norm.gamma"]
    );
    // With everything persisted nothing is ever gathered.
    let (whole, gathers, bytes) = persisted(Persistence { param_threshold: 1000, ..Persistence::default() });
    assert_eq!((whole.len(), gathers, bytes), (21, 0, 0));
    assert!(all_gathers > 0);
}
