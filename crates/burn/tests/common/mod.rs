//! A small model with units, its batches, and a world to train it in.
#![allow(dead_code, reason = "each test program uses its own part")]

pub(crate) mod away;

use std::time::Duration;

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, Int, Tensor, TensorData, activation};
use shardwise_burn::{ShardConfig, Sharded, ShardedModel, ops};
use shardwise_comm::{ProcessGroup, threads};
use shardwise_core::ShardingStrategy;
use shardwise_engine::{DecayRule, EngineConfig, Norm, OptimizerConfig};

pub(crate) const DEADLINE: Duration = Duration::from_secs(60);
pub(crate) const VOCAB: usize = 23;
pub(crate) const WIDTH: usize = 10;
pub(crate) const STRATEGIES: [ShardingStrategy; 3] =
    [ShardingStrategy::FullShard, ShardingStrategy::ShardGradOp, ShardingStrategy::NoShard];

#[derive(Module, Debug)]
pub(crate) struct Block {
    pub(crate) norm: LayerNorm,
    pub(crate) up: Linear,
    pub(crate) down: Linear,
}

impl Block {
    pub(crate) fn new(device: &Device) -> Self {
        Self {
            norm: LayerNormConfig::new(WIDTH).init(device),
            up: LinearConfig::new(WIDTH, 17).init(device),
            down: LinearConfig::new(17, WIDTH).init(device),
        }
    }

    /// Half through the fused operations, half through Burn's, so that gradients arrive both ways.
    pub(crate) fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let h = self.norm.forward(x.clone());
        let h = ops::linear(h, self.up.weight.val(), self.up.bias.as_ref().map(|b| b.val()));
        x + self.down.forward(activation::gelu_approximate(h))
    }
}

/// An embedding that is also the head, units in between.
#[derive(Module, Debug)]
pub(crate) struct Net {
    pub(crate) embed: Embedding,
    pub(crate) blocks: Vec<Sharded<Block>>,
    pub(crate) norm: LayerNorm,
}

impl Net {
    pub(crate) fn new(device: &Device) -> Self {
        Self {
            embed: EmbeddingConfig::new(VOCAB, WIDTH).init(device),
            blocks: (0..3).map(|_| Sharded::new(Block::new(device))).collect(),
            norm: LayerNormConfig::new(WIDTH).init(device),
        }
    }

    pub(crate) fn loss(&self, ids: Tensor<2, Int>, targets: Tensor<1, Int>) -> Tensor<1> {
        let mut x = self.embed.forward(ids);
        for block in &self.blocks {
            x = block.call(x, |block, x| block.forward(x));
        }
        head(self.norm.forward(x), self.embed.weight.val(), targets)
    }
}

/// The cross-entropy of logits that an embedding's transpose computes.
pub(crate) fn head(x: Tensor<3>, embedding: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
    let logits = ops::linear_transposed(x, embedding);
    ops::cross_entropy(logits.reshape([-1, VOCAB as i32]), targets)
}

pub(crate) fn batch(m: usize, step: usize, device: &Device) -> (Tensor<2, Int>, Tensor<1, Int>) {
    let token = |i: usize| ((i * 7 + m * 5 + step * 3) % VOCAB) as i64;
    let ids: Vec<i64> = (0..8).map(token).collect();
    let targets: Vec<i64> = (1..9).map(token).collect();
    let ids = Tensor::from_data(TensorData::new(ids, [2, 4]), device);
    (ids, Tensor::from_data(TensorData::new(targets, [8]), device))
}

pub(crate) fn config(strategy: ShardingStrategy) -> ShardConfig {
    let default = ShardConfig::default();
    ShardConfig {
        engine: EngineConfig {
            strategy,
            optimizer: OptimizerConfig::AdamW { betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1 },
            decay: DecayRule::default(),
            clip_norm: Some(1.0),
            norm: Norm::L2,
            ..default.engine
        },
        recompute: false,
        seed: 3,
    }
}

/// Plain gradient descent without clipping, for comparisons with plain Burn.
pub(crate) fn descent(strategy: ShardingStrategy) -> ShardConfig {
    let mut config = config(strategy);
    config.engine.optimizer = OptimizerConfig::Sgd { momentum: 0.0, weight_decay: 0.0, nesterov: false };
    config.engine.clip_norm = None;
    config
}

pub(crate) type Params = Vec<(String, Vec<usize>, Vec<f32>)>;

pub(crate) fn params<M: Module>(model: &mut ShardedModel<M>) -> Params {
    let mut all = Vec::new();
    model
        .export(|path, shape, values| all.push((path.into(), shape.to_vec(), values.to_vec())))
        .expect("exported");
    all
}

/// Sorted by path, so that layouts do not matter.
pub(crate) fn sorted(mut params: Params) -> Params {
    params.sort_by(|a, b| a.0.cmp(&b.0));
    params
}

/// Runs `rank` on every rank of a world of threads, each with one worker thread, and returns what each returned.
pub(crate) fn world<T: Send>(ranks: usize, rank: impl Fn(ProcessGroup) -> T + Send + Sync) -> Vec<T> {
    threads::run(ranks, DEADLINE, |group| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a pool");
        pool.install(|| rank(group))
    })
    .expect("a world")
}

/// One training step of four micro-batches; its loss, bit for bit.
pub(crate) fn step<M: Module>(
    model: &mut ShardedModel<M>,
    index: usize,
    loss: impl Fn(&M, Tensor<2, Int>, Tensor<1, Int>) -> Tensor<1>,
) -> u64 {
    let device = Device::flex().autodiff();
    let outcome = model.step(4, 0.01, |model, m| {
        let (ids, targets) = batch(m, index, &device);
        loss(model, ids, targets)
    });
    outcome.expect("a step").loss.to_bits()
}

/// What `steps` steps of gradient descent make of `module` in plain Burn, without units and without an engine; the values
/// come from `initial`.
pub(crate) fn plain_descent<M: Module>(
    module: M,
    initial: &Params,
    steps: usize,
    loss: impl Fn(&M, Tensor<2, Int>, Tensor<1, Int>) -> Tensor<1>,
) -> Params {
    plain_descent_from(module, initial, 0..steps, loss)
}

/// The same for some of the steps.
pub(crate) fn plain_descent_from<M: Module>(
    module: M,
    initial: &Params,
    steps: std::ops::Range<usize>,
    loss: impl Fn(&M, Tensor<2, Int>, Tensor<1, Int>) -> Tensor<1>,
) -> Params {
    let device = Device::flex().autodiff();
    let mut values = initial.clone();
    for index in steps {
        let whole = module.clone().map(&mut Assign::new(&values, &device));
        let mut total = Tensor::<1>::zeros([1], &device);
        for m in 0..4 {
            let (ids, targets) = batch(m, index, &device);
            total = total + loss(&whole, ids, targets) / 4.0;
        }
        let gradients = total.backward();
        let mut descend = Descend { gradients: &gradients, values: &mut values, path: Vec::new() };
        whole.visit(&mut descend);
    }
    values
}

/// Puts values in the places of parameters with the same path, tied ones sharing theirs.
pub(crate) struct Assign<'a> {
    values: &'a Params,
    path: Vec<String>,
    device: Device,
    tied: std::collections::HashMap<burn::module::ParamId, Box<dyn std::any::Any>>,
}

impl<'a> Assign<'a> {
    pub(crate) fn new(values: &'a Params, device: &Device) -> Self {
        Self { values, path: Vec::new(), device: device.clone(), tied: Default::default() }
    }
}

impl ModuleMapper for Assign<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let path = self.path.join(".");
        let (values, device) = (self.values, &self.device);
        // Asking the parameter itself would initialise it, from the generator that the worlds of other tests draw from.
        let stand_in = param.clone().transform_for_load(Tensor::zeros([1; D], device), param.id);
        let tensor = self.tied.entry(param.id).or_insert_with(|| {
            let (_, shape, values) =
                values.iter().find(|(p, ..)| *p == path).expect("exported under the same path");
            let tensor = Tensor::<D>::from_data(TensorData::new(values.clone(), shape.clone()), device);
            Box::new(tensor.set_require_grad(stand_in.is_require_grad()))
        });
        let tensor = tensor.downcast_ref::<Tensor<D>>().expect("a tie has one shape").clone();
        Param::initialized(param.id, tensor)
    }
}

struct Descend<'a> {
    gradients: &'a burn::tensor::Gradients,
    values: &'a mut Params,
    path: Vec<String>,
}

impl burn::module::ModuleVisitor for Descend<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let path = self.path.join(".");
        // A tie has one entry, under the path met first.
        let Some((_, _, values)) = self.values.iter_mut().find(|(p, ..)| *p == path) else { return };
        if let Some(gradient) = param.val().grad(self.gradients) {
            let gradient = gradient.into_data();
            values.iter_mut().zip(gradient.iter::<f32>()).for_each(|(v, g)| *v -= 0.01 * g);
        }
    }
}

/// Asserts that two sets of parameters are the same up to rounding.
pub(crate) fn assert_close(got: &Params, want: &Params, tolerance: f32) {
    assert_eq!(got.len(), want.len());
    for (path, shape, values) in got {
        let (_, want_shape, want) = want.iter().find(|(p, ..)| p == path).expect("the same parameters");
        assert_eq!(shape, want_shape, "{path}");
        for (g, w) in values.iter().zip(want) {
            assert!((g - w).abs() <= tolerance * w.abs().max(1.0), "{path}: {g} {w}");
        }
    }
}
