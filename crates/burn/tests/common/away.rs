//! A model with every feature of the adapter at once, and places for what rests elsewhere.
#![allow(dead_code, reason = "each test program uses its own part")]

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::module::{Module, Param};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, Int, Tensor};
use shardwise_burn::{Init, ShardConfig, Sharded, ShardedModel};
use shardwise_core::{Offload, Tier};
use shardwise_engine::SwapPlace;

use super::{Block, Params, VOCAB, WIDTH, batch, head, params, sorted, world};

/// Everything rests in `tier`, in tiles of which a unit has one or a few.
pub(crate) fn offload(parameters: Tier, optimizer: Tier) -> Offload {
    Offload { parameters, optimizer, buffer_numel: 1024, least_numel: 0, ..Offload::default() }
}

/// Both tiers.
pub(crate) const TIERS: [Tier; 2] = [Tier::Host, Tier::Nvme];

/// A folder of its own for what a model keeps in files.
pub(crate) fn place() -> SwapPlace {
    static PLACES: AtomicUsize = AtomicUsize::new(0);
    // Files in memory, where there are such: removing many small ones takes a disk long.
    let path = PathBuf::from("/dev/shm");
    let path = if path.is_dir() { path } else { std::env::temp_dir() };
    let number = PLACES.fetch_add(1, Ordering::Relaxed);
    SwapPlace { path, run: format!("burn-test-{}-{number}", std::process::id()), ..SwapPlace::default() }
}

/// `config` with parameters and optimizer in `tier`, and the place that takes.
pub(crate) fn resting(mut config: ShardConfig, tier: Tier) -> Init {
    config.engine.offload = offload(tier, tier);
    let init = Init::new(config);
    if tier == Tier::Nvme { init.swap_at(place()) } else { init }
}

/// A layer with parameters of one element and of none.
#[derive(Module, Debug)]
pub(crate) struct Scaled {
    pub(crate) linear: Linear,
    pub(crate) scale: Param<Tensor<1>>,
    pub(crate) empty: Param<Tensor<1>>,
}

impl Scaled {
    fn new(device: &Device) -> Self {
        Self {
            linear: LinearConfig::new(WIDTH, WIDTH).init(device),
            scale: Param::from_tensor(Tensor::ones([1], device)),
            empty: Param::from_tensor(Tensor::zeros([0], device)),
        }
    }

    pub(crate) fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.linear.forward(x) * self.scale.val().unsqueeze()
    }
}

/// A unit with units inside and parameters of its own around them.
#[derive(Module, Debug)]
pub(crate) struct Stage {
    pub(crate) first: Sharded<Block>,
    pub(crate) mix: Linear,
    pub(crate) second: Sharded<Scaled>,
    pub(crate) norm: LayerNorm,
}

impl Stage {
    fn new(device: &Device) -> Self {
        Self {
            first: Sharded::new(Block::new(device)),
            mix: LinearConfig::new(WIDTH, WIDTH).init(device),
            second: Sharded::new(Scaled::new(device)),
            norm: LayerNormConfig::new(WIDTH).init(device),
        }
    }

    pub(crate) fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let x = self.first.call(x, |block, x| block.forward(x));
        let x = self.mix.forward(x);
        let x = self.second.call(x.clone(), |scaled, x| scaled.forward(x)) + x;
        self.norm.forward(x)
    }
}

/// Nested units, one of which runs twice; a tie of two units and one with the root; a unit that is frozen in part, and one
/// that is frozen.
#[derive(Module, Debug)]
pub(crate) struct Rich {
    pub(crate) embed: Embedding,
    pub(crate) stages: Vec<Sharded<Stage>>,
    pub(crate) adapted: Sharded<Block>,
    pub(crate) still: Sharded<Block>,
    pub(crate) last: Sharded<Block>,
}

impl Rich {
    pub(crate) fn new(device: &Device) -> Self {
        let stages: Vec<_> = (0..2).map(|_| Sharded::new(Stage::new(device))).collect();
        let mut adapted = Block::new(device);
        adapted.up.weight = adapted.up.weight.set_require_grad(false);
        let mut last = Block::new(device);
        last.down.weight = stages[0].inner().first.inner().down.weight.clone();
        Self {
            embed: EmbeddingConfig::new(VOCAB, WIDTH).init(device),
            stages,
            adapted: Sharded::new(adapted),
            still: Sharded::new(Block::new(device).no_grad()),
            last: Sharded::new(last),
        }
    }

    pub(crate) fn loss(&self, ids: Tensor<2, Int>, targets: Tensor<1, Int>) -> Tensor<1> {
        let mut x = self.embed.forward(ids);
        for stage in [0, 1, 0] {
            x = self.stages[stage].call(x, |stage, x| stage.forward(x));
        }
        for block in [&self.adapted, &self.still, &self.last] {
            x = block.call(x, |block, x| block.forward(x));
        }
        head(x, self.embed.weight.val(), targets)
    }
}

/// What a rank has learned.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Learned {
    /// Loss, norm and clipping of each step, bit for bit.
    pub(crate) steps: Vec<[u64; 3]>,
    /// The loss of held-out data after each step.
    pub(crate) evaluated: Vec<u64>,
    /// Parameters as bits, since some may be NaN.
    pub(crate) params: Vec<(String, Vec<u32>)>,
    /// The optimizer's statistics of what this rank owns.
    pub(crate) statistics: Vec<(String, &'static str, usize, Vec<u32>)>,
}

pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// One step of `micro_batches`; loss, norm and clipping.
pub(crate) fn one_step(model: &mut ShardedModel<Rich>, micro_batches: usize, index: usize) -> [u64; 3] {
    let device = Device::flex().autodiff();
    let outcome = model.step(micro_batches, 0.01, |rich, m| {
        let (ids, targets) = batch(m, index, &device);
        rich.loss(ids, targets)
    });
    let outcome = outcome.expect("a step");
    [outcome.loss, outcome.report.grad_norm, outcome.report.clip_coefficient.into()].map(f64::to_bits)
}

/// The mean over held-out batches, of which `own` fall to this rank.
pub(crate) fn held_out(model: &mut ShardedModel<Rich>, own: std::ops::Range<usize>) -> f64 {
    let loss = |rich: &Rich, m: usize| {
        let (ids, targets) = batch(m, 50, &Device::flex());
        (f64::from(rich.loss(ids, targets).into_scalar::<f32>()), 1.0)
    };
    model.evaluate_mean(own, loss).expect("evaluated")
}

/// Trains three steps with evaluations in between, for which each rank has a batch more than the one before.
pub(crate) fn learn(ranks: usize, micro_batches: usize, init: &Init) -> Vec<Learned> {
    world(ranks, |group| {
        let rank = group.rank();
        let mut model = init.shard(group, Rich::new(&Device::flex().autodiff()), &()).expect("sharded");
        let (mut steps, mut evaluated) = (Vec::new(), Vec::new());
        for index in 0..3 {
            steps.push(one_step(&mut model, micro_batches, index));
            evaluated.push(held_out(&mut model, 0..(ranks - rank) % 3).to_bits());
        }
        let exported: Params = sorted(params(&mut model));
        let params = exported.into_iter().map(|(path, _, values)| (path, bits(&values))).collect();
        let mut statistics = Vec::new();
        let see = |s: shardwise_engine::StateSlice<'_>| {
            statistics.push((s.path.to_string(), s.name, s.elements.start, bits(s.values)));
        };
        model.each_state(see).expect("idle");
        statistics.sort();
        Learned { steps, evaluated, params, statistics }
    })
}
