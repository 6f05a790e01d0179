//! A sharded model trains like the same module in plain Burn, and the same bit for bit however it is sharded.

use std::time::Duration;

use burn::module::{Module, Param};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{DType, Device, Int, Tensor, TensorData, activation};
use shardwise_burn::{ShardConfig, ShardError, Sharded, ShardedModel, ops};
use shardwise_comm::threads;
use shardwise_core::{Purpose, ShardingStrategy};
use shardwise_engine::{EngineConfig, Event, EventKind, OptimizerConfig};

const DEADLINE: Duration = Duration::from_secs(60);
const VOCAB: usize = 23;
const WIDTH: usize = 10;

#[derive(Module, Debug)]
struct Block {
    norm: LayerNorm,
    up: Linear,
    down: Linear,
    /// Used by no one.
    spare: Linear,
}

impl Block {
    fn new(device: &Device) -> Self {
        Self {
            norm: LayerNormConfig::new(WIDTH).init(device),
            up: LinearConfig::new(WIDTH, 17).init(device),
            down: LinearConfig::new(17, WIDTH).init(device),
            spare: LinearConfig::new(1, 1).init(device),
        }
    }

    /// Half through the fused operations, half through Burn's, so that gradients arrive both ways.
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let h = self.norm.forward(x.clone());
        let h = ops::linear(h, self.up.weight.val(), self.up.bias.as_ref().map(|b| b.val()));
        x + self.down.forward(activation::gelu_approximate(h))
    }
}

/// An embedding that is also the head, units in between.
#[derive(Module, Debug)]
struct Model {
    embed: Embedding,
    blocks: Vec<Sharded<Block>>,
    norm: LayerNorm,
    scale: Param<Tensor<1>>,
}

impl Model {
    fn new(device: &Device) -> Self {
        Self {
            embed: EmbeddingConfig::new(VOCAB, WIDTH).init(device),
            blocks: (0..3).map(|_| Sharded::new(Block::new(device))).collect(),
            norm: LayerNormConfig::new(WIDTH).init(device),
            scale: Param::from_tensor(Tensor::ones([1], device)),
        }
    }

    fn loss(&self, ids: Tensor<2, Int>, targets: Tensor<1, Int>) -> Tensor<1> {
        let mut x = self.embed.forward(ids);
        for block in &self.blocks {
            x = block.call(x, |block, x| block.forward(x));
        }
        let x = self.norm.forward(x) * self.scale.val().unsqueeze();
        let logits = ops::linear_transposed(x, self.embed.weight.val());
        ops::cross_entropy(logits.reshape([-1, VOCAB as i32]), targets)
    }
}

fn batch(m: usize, step: usize, device: &Device) -> (Tensor<2, Int>, Tensor<1, Int>) {
    let token = |i: usize| ((i * 7 + m * 5 + step * 3) % VOCAB) as i64;
    let ids: Vec<i64> = (0..8).map(token).collect();
    let targets: Vec<i64> = (1..9).map(token).collect();
    let ids = Tensor::from_data(TensorData::new(ids, [2, 4]), device);
    (ids, Tensor::from_data(TensorData::new(targets, [8]), device))
}

fn config(strategy: ShardingStrategy) -> ShardConfig {
    ShardConfig {
        engine: EngineConfig {
            strategy,
            optimizer: OptimizerConfig::AdamW { betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1 },
            clip_norm: Some(1.0),
            ..EngineConfig::default()
        },
        recompute: false,
        seed: 3,
    }
}

type Params = Vec<(String, Vec<usize>, Vec<f32>)>;

fn params<M: Module>(model: &mut ShardedModel<M>) -> Params {
    let mut all = Vec::new();
    model
        .export(|path, shape, values| all.push((path.into(), shape.to_vec(), values.to_vec())))
        .expect("exported");
    all
}

/// Trains three steps of 4 micro-batches and returns losses, norms and final parameters of rank 0.
fn train(ranks: usize, config: ShardConfig) -> (Vec<(u64, u64)>, Params) {
    threads::run(ranks, DEADLINE, |group| {
        rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a pool").install(|| {
            let device = Device::flex().autodiff();
            let mut model = ShardedModel::new(group, Model::new(&device), config, &()).expect("sharded");
            let reports = (0..3)
                .map(|step| {
                    let outcome = model
                        .step(4, 0.01, |model, m| {
                            let (ids, targets) = batch(m, step, &device);
                            model.loss(ids, targets)
                        })
                        .expect("a step");
                    (outcome.loss.to_bits(), outcome.report.grad_norm.to_bits())
                })
                .collect();
            (reports, params(&mut model))
        })
    })
    .expect("a world")
    .remove(0)
}

#[test]
fn nothing_about_the_sharding_changes_a_bit() {
    let want = train(1, config(ShardingStrategy::FullShard));
    for strategy in [ShardingStrategy::FullShard, ShardingStrategy::ShardGradOp, ShardingStrategy::NoShard] {
        for recompute in [false, true] {
            for prefetch in [false, true] {
                for ranks in [1, 2, 4] {
                    let mut config = ShardConfig { recompute, ..config(strategy) };
                    config.engine.prefetch = prefetch;
                    let got = train(ranks, config);
                    assert_eq!(
                        got.0, want.0,
                        "{strategy}, recompute {recompute}, {ranks} ranks: losses and norms"
                    );
                    assert!(got.1 == want.1, "{strategy}, recompute {recompute}, {ranks} ranks: parameters");
                }
            }
        }
    }
}

/// The first loss and gradient norm against the same module, unsharded, in plain Burn.
#[test]
fn the_first_step_equals_plain_burn() {
    let device = Device::flex().autodiff();
    let (sharded_loss, sharded_norm, initial) = threads::run(2, DEADLINE, |group| {
        let mut model =
            ShardedModel::new(group, Model::new(&device), config(ShardingStrategy::FullShard), &())
                .expect("sharded");
        let initial = params(&mut model);
        let outcome = model
            .step(4, 0.01, |model, m| {
                let (ids, targets) = batch(m, 0, &device);
                model.loss(ids, targets)
            })
            .expect("a step");
        (outcome.loss, outcome.report.grad_norm, initial)
    })
    .expect("a world")
    .remove(0);

    // The same initial values, whole, without any engine.
    let whole =
        Model::new(&device).map(&mut Assign { values: &initial, path: Vec::new(), device: device.clone() });
    let mut total = Tensor::<1>::zeros([1], &device);
    for m in 0..4 {
        let (ids, targets) = batch(m, 0, &device);
        total = total + whole.loss(ids, targets) / 4.0;
    }
    let loss: f32 = total.clone().into_scalar();
    let gradients = total.backward();
    let mut squares = SquareSum { gradients: &gradients, sum: 0.0 };
    whole.visit(&mut squares);
    assert!((f64::from(loss) - sharded_loss).abs() < 1e-6, "{loss} {sharded_loss}");
    let norm = squares.sum.sqrt();
    assert!((norm - sharded_norm).abs() / norm < 1e-5, "{norm} {sharded_norm}");
}

struct Assign<'a> {
    values: &'a Params,
    path: Vec<String>,
    device: Device,
}

impl burn::module::ModuleMapper for Assign<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let path = self.path.join(".");
        let (_, shape, values) =
            self.values.iter().find(|(p, ..)| *p == path).expect("exported under the same path");
        let tensor = Tensor::from_data(TensorData::new(values.clone(), shape.clone()), &self.device);
        Param::initialized(param.id, tensor.require_grad())
    }
}

struct SquareSum<'a> {
    gradients: &'a burn::tensor::Gradients,
    sum: f64,
}

impl burn::module::ModuleVisitor for SquareSum<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = param.val().grad(self.gradients) {
            self.sum += gradient.into_data().iter::<f64>().map(|g| g * g).sum::<f64>();
        }
    }
}

/// I2: the same seed gives the same values for any number of ranks, and the order of initialisation does not matter.
#[test]
fn initial_values_do_not_depend_on_the_number_of_ranks() {
    let device = Device::flex().autodiff();
    let initial = |ranks| {
        threads::run(ranks, DEADLINE, |group| {
            let mut model =
                ShardedModel::new(group, Model::new(&device), config(ShardingStrategy::FullShard), &())
                    .expect("sharded");
            params(&mut model)
        })
        .expect("a world")
    };
    let want = initial(1).remove(0);
    assert_eq!(want[0].0, "embed.weight");
    assert!(want.iter().any(|(path, ..)| path == "blocks.2.up.bias"), "no trace of the wrapper in a path");
    for ranks in 2..=4 {
        for got in initial(ranks) {
            assert!(got == want, "{ranks} ranks");
        }
    }
}

/// D1: a parameter with two uses is stored once, and its gradient is the sum of both.
#[test]
fn a_model_walks_its_ties_once() {
    #[derive(Module, Debug)]
    struct Tied {
        first: Linear,
        second: Linear,
    }
    let device = Device::flex().autodiff();
    let mut linear = LinearConfig::new(3, 3).with_bias(false).init(&device);
    linear.weight =
        Param::from_tensor(Tensor::from_data([[0.5, 0.1, 0.0], [0.0, 0.4, 0.2], [0.3, 0.0, 0.6]], &device));
    let results = threads::run(2, DEADLINE, |group| {
        let model = Tied { first: linear.clone(), second: linear.clone() };
        let mut config = config(ShardingStrategy::FullShard);
        config.engine.optimizer = OptimizerConfig::Sgd { momentum: 0.0, nesterov: false, weight_decay: 0.0 };
        config.engine.clip_norm = None;
        let mut model = ShardedModel::new(group, model, config, &()).expect("sharded");
        assert_eq!(model.layouts()[0].shared_params()[0].path, "second.weight");
        for _ in 0..3 {
            model
                .step(2, 0.1, |model, _| {
                    let x = Tensor::<2>::from_data([[1.0, 2.0, 3.0]], &device);
                    ops::linear(model.first.forward(x), model.second.weight.val(), None).sum()
                })
                .expect("a step");
        }
        params(&mut model)
    })
    .expect("a world");
    // By hand: d/dW sum(x W W) = x^T (1 W^T) + (x W)^T 1.
    let mut w = [[0.5f64, 0.1, 0.0], [0.0, 0.4, 0.2], [0.3, 0.0, 0.6]];
    let x = [1.0, 2.0, 3.0];
    for _ in 0..3 {
        let row_sums: Vec<f64> = w.iter().map(|row| row.iter().sum()).collect();
        let xw: Vec<f64> = (0..3).map(|j| (0..3).map(|i| x[i] * w[i][j]).sum()).collect();
        for i in 0..3 {
            for j in 0..3 {
                w[i][j] -= 0.1 * (x[i] * row_sums[j] + xw[i]);
            }
        }
    }
    assert_eq!(results[0].len(), 1, "one entry for one parameter");
    for (got, want) in results[0][0].2.iter().zip(w.as_flattened()) {
        assert!((f64::from(*got) - want).abs() < 1e-4, "{got} {want}");
    }
}

/// F6 and reported bug E1: frozen parameters beside trained ones, in a unit and in the root, and a unit that is frozen as
/// a whole. They stay bit-unchanged, cost no gradient, and the trained ones learn the same for any number of ranks.
#[test]
fn frozen_parameters_train_beside_the_others() {
    let device = Device::flex().autodiff();
    let frozen_paths = ["embed.weight", "blocks.0.up.weight", "blocks.1."];
    let is_frozen = |path: &str| frozen_paths.iter().any(|f| path.starts_with(f));
    let build = || {
        let mut model = Model::new(&device);
        model.embed = model.embed.no_grad();
        let freeze = |block: &Sharded<Block>, all: bool| {
            let mut block = block.inner().clone();
            if all {
                return Sharded::new(block.no_grad());
            }
            block.up.weight = block.up.weight.set_require_grad(false);
            Sharded::new(block)
        };
        model.blocks[0] = freeze(&model.blocks[0], false);
        model.blocks[1] = freeze(&model.blocks[1], true);
        model
    };
    let run = |ranks, config: ShardConfig| {
        threads::run(ranks, DEADLINE, |group| {
            let mut model = ShardedModel::new(group, build(), config, &()).expect("sharded");
            let before = params(&mut model);
            let losses: Vec<u64> = (0..3)
                .map(|step| {
                    let loss = |model: &Model, m| {
                        let (ids, targets) = batch(m, step, &device);
                        model.loss(ids, targets)
                    };
                    model.step(4, 0.01, loss).expect("a step").loss.to_bits()
                })
                .collect();
            let after = params(&mut model);
            for ((path, _, a), (_, _, b)) in before.iter().zip(&after) {
                // A bias that nobody uses has a zero gradient and no decay.
                assert_eq!(a == b, is_frozen(path) || path.ends_with("spare.bias"), "{path}");
            }
            let trained: usize =
                after.iter().filter(|(path, ..)| !is_frozen(path)).map(|(_, _, values)| values.len()).sum();
            let shards: usize =
                model.layouts().iter().filter(|l| l.requires_grad()).map(|l| l.shard_numel()).sum();
            assert!(shards * ranks >= trained && shards * ranks < trained + 5 * ranks);
            let partials = if ranks == 1 { 2 } else { 1 };
            assert_eq!(model.ledger().peak(Purpose::GradientShards), (4 * partials * shards) as u64);
            (losses, after)
        })
        .expect("a world")
        .remove(0)
    };
    let want = run(1, config(ShardingStrategy::FullShard));
    for strategy in [ShardingStrategy::FullShard, ShardingStrategy::ShardGradOp, ShardingStrategy::NoShard] {
        for recompute in [false, true] {
            for ranks in [2, 4] {
                let got = run(ranks, ShardConfig { recompute, ..config(strategy) });
                assert!(got == want, "{strategy}, recompute {recompute}, {ranks} ranks");
            }
        }
    }
}

#[test]
fn evaluation_changes_nothing_and_sees_what_training_sees() {
    let device = Device::flex().autodiff();
    threads::run(2, DEADLINE, |group| {
        let mut model =
            ShardedModel::new(group, Model::new(&device), config(ShardingStrategy::FullShard), &())
                .expect("sharded");
        let plain = Device::flex();
        let before = params(&mut model);
        let evaluated: Vec<f32> = (0..4)
            .map(|m| {
                let (ids, targets) = batch(m, 0, &plain);
                let loss = model.evaluate(|model| model.loss(ids, targets)).expect("evaluated");
                assert!(!loss.is_autodiff());
                loss.into_scalar()
            })
            .collect();
        assert!(params(&mut model) == before);
        let outcome = model
            .step(4, 0.0, |model, m| {
                let (ids, targets) = batch(m, 0, &device);
                model.loss(ids, targets)
            })
            .expect("a step");
        let mean = evaluated.iter().map(|l| f64::from(*l)).sum::<f64>() / 4.0;
        assert!((mean - outcome.loss).abs() < 1e-6, "{mean} {}", outcome.loss);
    })
    .expect("a world");
}

/// With `full_shard` a unit's parameters exist only around its use, under recomputation too: n + 1 gathers in forward,
/// n in backward, n + 1 reductions (reported bug G10: recomputation gathers no more).
#[test]
fn gathers_of_a_step_through_burn() {
    for recompute in [false, true] {
        let device = Device::flex().autodiff();
        let events: Vec<Event> = threads::run(2, DEADLINE, |group| {
            let config = ShardConfig { recompute, ..config(ShardingStrategy::FullShard) };
            let mut model = ShardedModel::new(group, Model::new(&device), config, &()).expect("sharded");
            model.log_events(true);
            model
                .step(2, 0.01, |model, m| {
                    let (ids, targets) = batch(m, 0, &device);
                    model.loss(ids, targets)
                })
                .expect("a step");
            model.take_events()
        })
        .expect("a world")
        .remove(0);
        let count = |kind| events.iter().filter(|e| e.kind == kind).count();
        assert_eq!(count(EventKind::GatherStarted), 3 + 1 + 3, "recompute {recompute}");
        assert_eq!(count(EventKind::ReduceStarted), 3 + 1, "recompute {recompute}");
        let order: Vec<bool> = events
            .iter()
            .filter(|e| !e.unit.is_root() && matches!(e.kind, EventKind::ReduceStarted | EventKind::Backward))
            .map(|e| e.kind == EventKind::Backward)
            .collect();
        assert_eq!(
            order,
            [true, false, true, false, true, false],
            "each unit is reduced before the next begins"
        );
    }
}

#[test]
fn gradients_take_one_units_memory_at_a_time() {
    let device = Device::flex().autodiff();
    threads::run(2, DEADLINE, |group| {
        let mut model =
            ShardedModel::new(group, Model::new(&device), config(ShardingStrategy::FullShard), &())
                .expect("sharded");
        model
            .step(2, 0.01, |model, m| {
                let (ids, targets) = batch(m, 0, &device);
                model.loss(ids, targets)
            })
            .expect("a step");
        let unit = model.layouts()[1].padded_numel();
        assert_eq!(model.ledger().peak(Purpose::UnitGradient), 4 * unit as u64);
        assert_eq!(model.ledger().peak(Purpose::GatheredUnits), 2 * 4 * unit as u64);
    })
    .expect("a world");
}

/// Reported bugs F9 and O3: a parameter read outside its unit's use is an error that names it, not a wrong number.
#[test]
fn reading_a_sharded_parameter_fails_the_step() {
    let device = Device::flex().autodiff();
    threads::run(2, DEADLINE, |group| {
        let mut model =
            ShardedModel::new(group, Model::new(&device), config(ShardingStrategy::FullShard), &())
                .expect("sharded");
        let error = model
            .step(2, 0.01, |model, m| {
                let (ids, targets) = batch(m, 0, &device);
                // Shapes are whole everywhere; values are not.
                let weight = model.blocks[1].inner().up.weight.val();
                assert_eq!(weight.dims(), [WIDTH, 17]);
                model.loss(ids, targets) + weight.sum()
            })
            .expect_err("read outside its unit")
            .to_string();
        assert!(error.contains("`blocks.1.up.weight`") && error.contains("`blocks.1`"), "{error}");
    })
    .expect("a world");
}

#[test]
fn modules_that_cannot_be_sharded_say_why() {
    #[derive(Module, Debug)]
    struct Counter {
        linear: Linear,
        count: Param<Tensor<1, Int>>,
    }
    let device = Device::flex().autodiff();
    let linear = || LinearConfig::new(2, 2).init(&device);
    fn refused<M: Module + Clone + Sync>(module: &M) -> String {
        let config = config(ShardingStrategy::FullShard);
        let results = threads::run(1, DEADLINE, |group| {
            ShardedModel::new(group, module.clone(), config, &()).expect_err("refused").to_string()
        });
        results.expect("a world").remove(0)
    }
    let int = refused(&Counter {
        linear: linear(),
        count: Param::initialized(burn::module::ParamId::new(), Tensor::zeros([2], &device)),
    });
    assert!(int.contains("`count`") && int.contains("integer parameters are unsupported"), "{int}");
    let mut wide = linear();
    wide.bias =
        Some(Param::initialized(burn::module::ParamId::new(), Tensor::zeros([2], (&device, DType::F64))));
    let wide = refused(&wide);
    assert!(wide.contains("`bias` is f64") && wide.contains("trained in f32"), "{wide}");
    let plain = refused(&LinearConfig::new(2, 2).init(&Device::flex()));
    assert!(plain.contains("`weight` is on") && plain.contains("autodiff"), "{plain}");
    let column = refused(&LinearConfig::new(2, 3).with_layout(burn::nn::LinearLayout::Col).init(&device));
    assert!(column.contains("stored as [3, 2] but used as [2, 3]"), "{column}");
}

#[test]
fn ranks_with_different_models_are_refused() {
    let device = Device::flex().autodiff();
    let errors = threads::run(2, DEADLINE, |group| {
        let width = 2 + group.rank();
        let module = LinearConfig::new(width, 2).init(&device);
        ShardedModel::new(group, module, config(ShardingStrategy::FullShard), &()).expect_err("refused")
    })
    .expect("a world");
    for error in errors {
        assert!(matches!(error, ShardError::Comm(_)));
        let text = error.to_string();
        assert!(text.contains("parameter weight is `[2, 2] f32 in unit root` on rank 0"), "{text}");
        assert!(text.contains("`[3, 2] f32 in unit root` on rank 1"), "{text}");
    }
}

#[test]
fn outside_a_sharded_run_the_wrapper_is_a_plain_call() {
    let device = Device::flex();
    // Nothing is drawn here: other tests use the one generator at the same time.
    let ones = burn::nn::Initializer::Ones;
    let block = Sharded::new(LinearConfig::new(2, 2).with_initializer(ones).init(&device));
    let x = Tensor::<2>::from_data([[1.0, 2.0]], &device);
    let same = block.inner().forward(x.clone()).into_data();
    block.call(x.clone(), |l, x| l.forward(x)).into_data().assert_eq(&same, true);
    let with =
        block.call_with(x, (2.0f64, Some(Tensor::<2>::ones([1, 2], &device))), |l, x, (factor, ones)| {
            l.forward(x) * *factor + ones.clone().expect("given")
        });
    let want: Vec<f32> = same.iter::<f32>().map(|v| v * 2.0 + 1.0).collect();
    assert_eq!(with.into_data().try_to_vec::<f32>().expect("f32"), want);
    assert_eq!(block.num_params(), 6);
}
