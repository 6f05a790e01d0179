//! First values: each drawn once, for its path, and the same on every rank, or an error that names the parameter.

mod common;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use burn::module::{Module, Param, ParamId, RunningState};
use burn::nn::{BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::{Bool, Device, Int, Tensor};
use common::{Block, Net, Params, STRATEGIES, VOCAB, WIDTH, config, params, sorted, step, world};
use shardwise_burn::{
    Ignored, Init, InitialValues, ParamSource, ShardError, Sharded, ShardedModel, Which, WrapPolicy,
};
use shardwise_core::ShardingStrategy;

fn init() -> Init {
    Init::new(config(ShardingStrategy::FullShard))
}

/// How often each parameter was initialised.
type Counts = Arc<Mutex<HashMap<&'static str, usize>>>;

/// A lazy parameter that counts its initialisations.
fn counted(name: &'static str, counts: &Counts, device: &Device) -> Param<Tensor<2>> {
    let counts = counts.clone();
    let initialise = move |device: &Device, trained: bool| {
        *counts.lock().expect("counts").entry(name).or_default() += 1;
        let value = Tensor::random([3, 4], burn::tensor::Distribution::Default, device);
        value.set_require_grad(trained)
    };
    Param::uninitialized(ParamId::new(), initialise, device.clone(), true, [3, 4].into())
}

#[derive(Module, Debug)]
struct Leaf {
    weight: Param<Tensor<2>>,
    tied: Param<Tensor<2>>,
}

#[derive(Module, Debug)]
struct Tree {
    inner: Sharded<Leaf>,
    own: Param<Tensor<2>>,
}

#[derive(Module, Debug)]
struct Counted {
    outer: Sharded<Tree>,
    root: Param<Tensor<2>>,
    tied: Param<Tensor<2>>,
}

fn counting(counts: &Counts, device: &Device) -> Counted {
    let tied = counted("tied", counts, device);
    let leaf = Leaf { weight: counted("weight", counts, device), tied: tied.clone() };
    let tree = Tree { inner: Sharded::new(leaf), own: counted("own", counts, device) };
    Counted { outer: Sharded::new(tree), root: counted("root", counts, device), tied }
}

/// N1: with nested units and ties, each parameter of a lazily built module is initialised exactly once, and only where its
/// value is needed.
#[test]
fn every_parameter_is_initialised_exactly_once() {
    for policy in [InitialValues::Trusted, InitialValues::Checked, InitialValues::Synced] {
        for wrap in [WrapPolicy::Every, WrapPolicy::nothing()] {
            let drawn = world(3, |group| {
                let counts = Counts::default();
                let rank = group.rank();
                let module = counting(&counts, &Device::flex().autodiff());
                let init = init().initial_values(policy).wrap(wrap.clone());
                let mut model = init.shard(group, module, &()).expect("sharded");
                let values = sorted(params(&mut model));
                assert_eq!(values.len(), 4, "the tie is one");
                let counts = counts.lock().expect("counts").clone();
                let expected = if policy == InitialValues::Synced && rank > 0 { 0 } else { 4 };
                assert_eq!(counts.len(), expected, "{policy:?}, rank {rank}");
                assert!(counts.values().all(|count| *count == 1), "{policy:?}: {counts:?}");
                values
            });
            assert!(drawn.iter().all(|values| *values == drawn[0]));
        }
    }
}

/// I2, N3: the number of ranks, the strategy, the units and the policy leave no trace in the first values.
#[test]
fn first_values_depend_on_seed_and_path_only() {
    let device = Device::flex().autodiff();
    let of = |ranks, init: &Init| {
        let all = world(ranks, |group| {
            sorted(params(&mut init.shard(group, Net::new(&device), &()).expect("sharded")))
        });
        assert!(all.iter().all(|values| *values == all[0]), "all ranks export the same");
        all.into_iter().next().expect("a rank")
    };
    let want = of(1, &init());
    for strategy in STRATEGIES {
        for policy in [InitialValues::Trusted, InitialValues::Checked, InitialValues::Synced] {
            for ranks in 1..=4 {
                let init = Init::new(config(strategy)).initial_values(policy);
                assert!(of(ranks, &init) == want, "{strategy}, {policy:?}, {ranks} ranks");
                assert!(of(ranks, &init.wrap(WrapPolicy::nothing())) == want, "no units");
            }
        }
    }
}

/// A module with everything that can have a value: trained, frozen and left-alone parameters of three kinds.
#[derive(Module, Debug)]
struct Mixed {
    unit: Sharded<Linear>,
    frozen: Linear,
    scale: Param<Tensor<1>>,
    steps: Param<Tensor<1, Int>>,
    mask: Param<Tensor<1, Bool>>,
}

impl Mixed {
    /// Already built, with values that depend on the rank.
    fn of_rank(rank: usize, device: &Device) -> Self {
        let linear = || {
            let mut linear = LinearConfig::new(3, 2).init(device);
            linear.weight = Param::from_tensor(Tensor::full([3, 2], 1.0 + rank as f32, device));
            linear.bias = Some(Param::from_tensor(Tensor::full([2], -(rank as f32), device)));
            linear
        };
        let id = ParamId::new;
        Self {
            unit: Sharded::new(linear()),
            frozen: linear().no_grad(),
            scale: Param::from_tensor(Tensor::full([1], 5.0 + rank as f32, device)),
            steps: Param::initialized(id(), Tensor::from_data([7 + rank as i64], device)),
            mask: Param::initialized(id(), Tensor::from_data([rank == 0, true], device)),
        }
    }
}

fn left_alone(path: &str) -> bool {
    ["scale", "steps", "mask"].contains(&path)
}

/// Reference facts 42 and 45, N4: rank 0's values reach all, those of parameters that are not trained or not sharded too, and
/// the groups of a hybrid layout.
#[test]
fn rank_0s_values_reach_all_when_synced() {
    let hybrid = (ShardingStrategy::HybridShard, Some(2), 4);
    let plain = STRATEGIES.into_iter().flat_map(|strategy| (1..=4).map(move |ranks| (strategy, None, ranks)));
    for (strategy, shard_group, ranks) in plain.chain([hybrid]) {
        {
            let mut config = config(strategy);
            config.engine.shard_group = shard_group;
            world(ranks, |group| {
                let device = Device::flex().autodiff();
                let module = Mixed::of_rank(group.rank(), &device);
                let init = Init::new(config)
                    .ignore(Ignored::Local, left_alone)
                    .initial_values(InitialValues::Synced);
                let mut model = init.shard(group, module, &()).expect("sharded");
                for (path, _, values) in params(&mut model) {
                    let want = if path.ends_with("weight") { 1.0 } else { 0.0 };
                    assert!(values.iter().all(|v| *v == want), "{path}: {values:?}");
                }
                let (scale, steps, mask) =
                    model.evaluate(|m| (m.scale.val(), m.steps.val(), m.mask.val())).expect("evaluated");
                assert_eq!(scale.into_scalar::<f32>(), 5.0);
                assert_eq!(steps.into_scalar::<i64>(), 7);
                assert_eq!(mask.into_data().iter::<bool>().collect::<Vec<_>>(), [true, true]);
            });
        }
    }
}

/// The running statistics of a `BatchNorm` are each rank's own: rank 0's at first, if that is asked for, then updated by the
/// layer, in a unit too, and in no export.
#[test]
fn running_statistics_are_buffers() {
    #[derive(Module, Debug)]
    struct Inner {
        linear: Linear,
        norm: BatchNorm,
    }
    #[derive(Module, Debug)]
    struct Normed {
        outer: BatchNorm,
        unit: Sharded<Inner>,
    }
    impl Normed {
        fn forward(&self, x: Tensor<2>) -> Tensor<1> {
            let normed =
                |norm: &BatchNorm, x: Tensor<2>| norm.forward(x.unsqueeze_dim::<3>(2)).squeeze_dim::<2>(2);
            let x = normed(&self.outer, x);
            let y = self.unit.call(x, |inner, x| {
                let x = inner.linear.forward(x).unsqueeze_dim::<3>(2);
                inner.norm.forward(x).squeeze_dim::<2>(2)
            });
            y.powf_scalar(4.0).sum()
        }
    }
    let seen = world(2, |group| {
        let device = Device::flex().autodiff();
        let rank = group.rank();
        let norm = |at: f32| {
            let mut norm = BatchNormConfig::new(3).init(&device);
            norm.running_mean = RunningState::new(Tensor::full([3], at + rank as f32, &device));
            norm
        };
        let inner = Inner { linear: LinearConfig::new(3, 3).init(&device), norm: norm(20.0) };
        let module = Normed { outer: norm(10.0), unit: Sharded::new(inner) };
        let init = init().initial_values(InitialValues::Synced);
        let mut model = init.shard(group, module, &()).expect("sharded");
        assert!(params(&mut model).iter().all(|(path, ..)| !path.contains("running_")));
        let mean = |model: &mut ShardedModel<Normed>| {
            let mean = |norm: &BatchNorm| norm.running_mean.value_sync().into_data().iter::<f32>().next();
            let both = model.evaluate(|m| [mean(&m.outer), mean(&m.unit.inner().norm)]);
            both.expect("evaluated").map(|mean| mean.expect("an element"))
        };
        assert_eq!(mean(&mut model), [10.0, 20.0], "rank 0's");
        let x =
            |m: usize, device: &Device| Tensor::from_data([[1.0, 2.0, m as f32], [3.0, 1.0, 0.5]], device);
        for _ in 0..3 {
            model.step(2, 0.01, |module, m| module.forward(x(m, &device))).expect("a step");
        }
        // In each step the mean moves a tenth of the way to the batch's: 2 in the first feature.
        let after = mean(&mut model);
        let want = (0..3).fold(10.0f32, |mean, _| 0.9 * mean + 0.1 * 2.0);
        assert!((after[0] - want).abs() < 1e-4, "{after:?} {want}");
        assert!((after[1] - 20.0 * 0.9f32.powi(3)).abs() < 1.0, "the unit's layer keeps its own: {after:?}");
        let loss = model.evaluate(|module| module.forward(x(0, &Device::flex()))).expect("evaluated");
        assert!(loss.into_scalar::<f32>().is_finite());
        after[1]
    });
    assert!(seen.iter().all(|mean| mean.is_finite()));
}

#[test]
fn values_that_differ_are_named_when_checked() {
    let errors = world(4, |group| {
        let device = Device::flex().autodiff();
        // Ranks 1 and 3 are built otherwise than 0 and 2.
        let module = Mixed::of_rank(group.rank() % 2, &device);
        let init = init().ignore(Ignored::Local, left_alone).initial_values(InitialValues::Checked);
        let differs = init.shard(group.clone(), module, &()).map(drop).expect_err("they differ");
        let same = Mixed::of_rank(5, &device);
        init.shard(group.clone(), same, &()).expect("the same everywhere");
        // What is left alone is compared too.
        let mut module = Mixed::of_rank(0, &device);
        module.steps = Param::initialized(ParamId::new(), Tensor::from_data([group.rank() as i64], &device));
        (differs, init.shard(group, module, &()).map(drop).expect_err("they differ"))
    });
    for (weights, steps) in &errors {
        let (path, ranks) = ("unit.weight".to_string(), vec![1, 3]);
        assert_eq!(*weights, ShardError::ValuesDiffer { path, first: 0, ranks });
        let text = weights.to_string();
        assert!(
            text.contains("`unit.weight`") && text.contains("[1, 3]") && text.contains("Synced"),
            "{text}"
        );
        let (path, ranks) = ("steps".to_string(), vec![1, 2, 3]);
        assert_eq!(*steps, ShardError::ValuesDiffer { path, first: 0, ranks });
    }
}

/// Values for one parameter only.
struct Only(&'static str);

impl ParamSource for Only {
    fn fill(&self, path: &str, _: &[usize], _: Range<usize>, out: &mut [f32]) -> Result<bool, String> {
        out.fill(9.0);
        Ok(path == self.0)
    }
}

/// Fails for one parameter.
struct Broken(&'static str);

impl ParamSource for Broken {
    fn fill(&self, path: &str, _: &[usize], _: Range<usize>, _: &mut [f32]) -> Result<bool, String> {
        if path == self.0 { Err("the file is torn".into()) } else { Ok(false) }
    }
}

/// N2: a parameter without a value is an error with its path, on every rank.
#[test]
fn a_parameter_that_no_one_initialises_is_an_error() {
    for policy in [InitialValues::Trusted, InitialValues::Checked, InitialValues::Synced] {
        let errors = world(3, |group| {
            let device = Device::flex().autodiff();
            let init = init().initial_values(policy);
            let mut must_be_loaded = LinearConfig::new(3, 4).init(&device);
            let fails = |_: &Device, _: bool| -> Tensor<2> { panic!("load the weights first") };
            let lazy = || Param::uninitialized(ParamId::new(), fails, device.clone(), true, [3, 4].into());
            must_be_loaded.weight = lazy();
            let none = init.shard(group.clone(), must_be_loaded.clone(), &()).map(drop);
            must_be_loaded.weight = lazy();
            // With a source it is a model like any other.
            init.shard(group.clone(), must_be_loaded, &Only("weight")).expect("sharded");
            let only = init.clone().source_only();
            let module = LinearConfig::new(3, 4).init(&device);
            let missing = only.shard(group.clone(), module.clone(), &Only("weight")).map(drop);
            // Only rank 2 (with `Synced`: rank 0) reads a torn file.
            let reader = if policy == InitialValues::Synced { 0 } else { 2 };
            let torn = if group.rank() == reader { Broken("bias") } else { Broken("nothing") };
            let torn = init.shard(group.clone(), module.clone(), &torn).map(drop);
            init.shard(group, module, &()).expect("the ranks are still together");
            [none, missing, torn].map(|result| result.expect_err("refused").to_string())
        });
        for (rank, [none, missing, torn]) in errors.iter().enumerate() {
            assert!(none.contains("`weight` is initialised by no one"), "{policy:?}, rank {rank}: {none}");
            assert!(none.contains("load the weights first"), "{none}");
            assert!(missing.contains("`bias` is initialised by no one"), "{missing}");
            assert!(torn.contains("`bias`") && torn.contains("the file is torn"), "{policy:?}: {torn}");
        }
    }
}

/// I1, I4, I8: pieces are partitioned as they are built, nested and in any order, and what is partitioned already is left
/// alone; the model is the one that is made at once.
#[test]
fn pieces_that_are_partitioned_early_make_the_same_model() {
    let device = Device::flex().autodiff();
    let finish = |mut model: ShardedModel<Net>| {
        let before = params(&mut model);
        let losses: Vec<u64> = (0..2).map(|index| step(&mut model, index, Net::loss)).collect();
        (before, losses, params(&mut model))
    };
    let want =
        world(1, |group| finish(init().shard(group, Net::new(&device), &()).expect("sharded"))).remove(0);
    for policy in [InitialValues::Trusted, InitialValues::Checked, InitialValues::Synced] {
        for strategy in STRATEGIES {
            for ranks in [1, 2, 4] {
                let got = world(ranks, |group| {
                    let init = Init::new(config(strategy)).initial_values(policy);
                    let mut context = init.context(group);
                    // A layer that is partitioned by itself, inside a block that is partitioned later.
                    let mut block = Block::new(&device);
                    block.up = context.partition("blocks.1.up", block.up, &()).expect("partitioned");
                    assert_eq!(context.num_partitioned(), 2);
                    let block = context.partition("blocks.1", block, &()).expect("partitioned");
                    assert_eq!(context.num_partitioned(), 6);
                    let mut net = Net::new(&device);
                    net.blocks[1] = Sharded::new(block);
                    // Paused, nothing happens: not even a collective.
                    context.pause();
                    let mut net = context.partition("", net, &()).expect("as it is");
                    assert_eq!(context.num_partitioned(), 6);
                    context.resume();
                    net.embed = context.partition("embed", net.embed, &()).expect("partitioned");
                    // Shapes and counts are whole.
                    assert_eq!(net.blocks[1].inner().up.weight.dims(), [WIDTH, 17]);
                    assert_eq!(net.num_params(), Net::new(&device).num_params());
                    // The last piece is attached late, and never partitioned by itself.
                    finish(context.shard(net, &()).expect("sharded"))
                });
                assert!(got.iter().all(|got| *got == want), "{policy:?}, {strategy}, {ranks} ranks");
            }
        }
    }
}

/// Values of a module that was built before, ties and frozen parameters go through a partition unchanged.
#[test]
fn a_partition_keeps_values_ties_and_training_states() {
    #[derive(Module, Debug)]
    struct Tied {
        embed: Embedding,
        head: Sharded<Linear>,
        frozen: Linear,
    }
    world(3, |group| {
        let device = Device::flex().autodiff();
        let mut embed = EmbeddingConfig::new(VOCAB, 5).init(&device);
        let mut head = LinearConfig::new(VOCAB, 5).with_bias(false).init(&device);
        let table: Vec<f32> = (0..VOCAB * 5).map(|i| i as f32).collect();
        head.weight =
            Param::from_tensor(Tensor::<1>::from_floats(table.as_slice(), &device).reshape([VOCAB, 5]));
        embed.weight = head.weight.clone();
        let frozen = LinearConfig::new(1, 1).init(&device).no_grad();
        let module = Tied { embed, head: Sharded::new(head), frozen };
        let mut context = init().context(group);
        let module = context.partition("", module, &()).expect("partitioned");
        assert_eq!(context.num_partitioned(), 3, "the tie is one");
        let mut model = context.shard(module, &()).expect("sharded");
        let exported: Params = params(&mut model);
        assert_eq!(exported[0].2, table);
        assert!(!model.parameter("frozen.weight").expect("known").requires_grad);
        assert!(model.parameter("head.weight").expect("known").requires_grad);
        let scope = model.gather(Which::All).expect("gathered");
        assert_eq!(scope.values("head.weight").expect("held"), table);
    });
}

/// F9: a parameter that is partitioned cannot be read, and whoever did is told when the model is made.
#[test]
fn reading_a_partitioned_parameter_is_an_error() {
    static READS: AtomicUsize = AtomicUsize::new(0);
    let errors = world(2, |group| {
        let device = Device::flex().autodiff();
        let rank = group.rank();
        let mut context = init().context(group);
        let linear =
            context.partition("layer", LinearConfig::new(2, 2).init(&device), &()).expect("partitioned");
        if rank == 1 {
            READS.fetch_add(1, Ordering::Relaxed);
            let _ = linear.weight.val().sum().into_scalar::<f32>();
        }
        context.shard(linear, &()).map(drop).expect_err("it was read").to_string()
    });
    assert_eq!(READS.load(Ordering::Relaxed), 1);
    for error in errors {
        assert!(error.contains("`layer.weight`") && error.contains("partitioned"), "{error}");
    }
}

/// A rank that cannot have a value goes on to take part in what its peers do for the parameters that were partitioned
/// before: the failure is the same error everywhere, and the ranks stay together.
#[test]
fn a_failure_beside_partitioned_parameters_is_told_to_all() {
    for policy in [InitialValues::Trusted, InitialValues::Checked, InitialValues::Synced] {
        let reader = if policy == InitialValues::Synced { 0 } else { 1 };
        let errors = world(3, |group| {
            let device = Device::flex().autodiff();
            let rank = group.rank();
            let init = init().initial_values(policy);
            let mut context = init.context(group.clone());
            let mut net = Net::new(&device);
            net.norm = context.partition("norm", net.norm, &()).expect("partitioned");
            let torn = if rank == reader { Broken("blocks.0.up.weight") } else { Broken("nothing") };
            let error = context.shard(net, &torn).map(drop).expect_err("torn");
            init.shard(group, Net::new(&device), &()).expect("the ranks are still together");
            error
        });
        for (rank, error) in errors.iter().enumerate() {
            let is_own = matches!(error, ShardError::Load { .. });
            let is_peers = matches!(error, ShardError::InitOfPeer { rank, .. } if *rank == reader);
            assert!(if rank == reader { is_own } else { is_peers }, "{policy:?}, rank {rank}: {error}");
        }
    }
}

/// The same for a parameter that is left alone, whose initialiser fails on one rank.
#[test]
fn a_failure_of_a_left_alone_parameter_is_told_to_all() {
    #[derive(Module, Debug)]
    struct Beside {
        alone: Param<Tensor<2>>,
        linear: Sharded<Linear>,
    }
    for policy in [InitialValues::Trusted, InitialValues::Checked, InitialValues::Synced] {
        for failing in 0..3 {
            let errors = world(3, |group| {
                let device = Device::flex().autodiff();
                let fails = group.rank() == failing;
                let initialise = move |device: &Device, _: bool| {
                    assert!(!fails, "no value on this rank");
                    Tensor::<2>::ones([3, 4], device)
                };
                let alone =
                    Param::uninitialized(ParamId::new(), initialise, device.clone(), true, [3, 4].into());
                let linear = || Sharded::new(LinearConfig::new(2, 3).init(&device));
                let init = init().ignore(Ignored::Local, |path| path == "alone").initial_values(policy);
                let module = Beside { alone, linear: linear() };
                let error = init.shard(group.clone(), module, &()).map(drop).expect_err("no value");
                init.shard(group, linear(), &()).expect("the ranks are still together");
                error
            });
            for (rank, error) in errors.iter().enumerate() {
                let is_own = matches!(error, ShardError::Uninitialised { path, .. } if path == "alone");
                let is_peers = matches!(error, ShardError::InitOfPeer { rank, .. } if *rank == failing);
                assert!(if rank == failing { is_own } else { is_peers }, "{policy:?}, rank {rank}: {error}");
            }
        }
    }
}
