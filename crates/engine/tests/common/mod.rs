//! A model without tensors: each parameter's gradient is a plain function of its value and of the micro-batch, so that a
//! few lines of unsharded code can serve as the reference for every bit.
#![allow(dead_code, unreachable_pub, reason = "each test program uses its part")]

pub mod check;
pub mod given;
pub mod quantised;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use shardwise_comm::{ProcessGroup, threads};
use shardwise_core::{
    CarryCounter, DType, FlatLayout, MemoryPlan, ParamInfo, ParamSpec, Precision, RoundAssignment,
    ShardingStrategy, StepSchedule, pre_divisor,
};
use shardwise_engine::{
    Accumulation, Engine, EngineConfig, EngineError, Norm, OptimizerConfig, ParamGroups, StepReport,
    SwapPlace, UnitId,
};
use shardwise_tier::IoConfig;

pub const DEADLINE: Duration = Duration::from_secs(30);
pub const ADAMW: OptimizerConfig =
    OptimizerConfig::AdamW { betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1 };
pub const MOMENTUM: OptimizerConfig =
    OptimizerConfig::Sgd { momentum: 0.9, nesterov: false, weight_decay: 0.01 };
pub const SGD: OptimizerConfig = OptimizerConfig::Sgd { momentum: 0.0, nesterov: false, weight_decay: 0.0 };
pub const NESTEROV: OptimizerConfig =
    OptimizerConfig::Sgd { momentum: 0.9, nesterov: true, weight_decay: 0.01 };
pub const ADAM: OptimizerConfig = OptimizerConfig::Adam { betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1 };
pub const LION: OptimizerConfig = OptimizerConfig::Lion { betas: [0.9, 0.99], weight_decay: 0.1 };
pub const ADAFACTOR: OptimizerConfig = OptimizerConfig::Adafactor {
    beta2_decay: -0.8,
    eps: [f32::EPSILON as f64, 1e-3],
    clip_threshold: 1.0,
    weight_decay: 0.1,
};

pub const STRATEGIES: [ShardingStrategy; 3] =
    [ShardingStrategy::FullShard, ShardingStrategy::ShardGradOp, ShardingStrategy::NoShard];

pub fn config(strategy: ShardingStrategy, optimizer: OptimizerConfig) -> EngineConfig {
    EngineConfig { strategy, optimizer, clip_norm: Some(0.7), ..EngineConfig::default() }
}

/// Shapes of the parameters of one unit.
pub type Shapes = Vec<Vec<usize>>;

#[derive(Clone)]
pub struct Toy {
    pub root: Shapes,
    pub units: Vec<Shapes>,
    /// Frozen parameters that the root and every unit have besides.
    pub frozen: Shapes,
    /// Trained parameters that are bf16 in the model, which the root and every unit have besides.
    pub low: Shapes,
    /// Whether no micro-batch uses the last trained parameter of the root and of each unit.
    pub last_unused: bool,
}

impl Toy {
    /// `n` units with parameters of awkward sizes, and a root.
    pub fn new(n: usize) -> Self {
        let unit = vec![vec![3, 5], vec![5], vec![0], vec![1], vec![17]];
        Self {
            root: vec![vec![7, 3], vec![2]],
            units: vec![unit; n],
            frozen: vec![],
            low: vec![],
            last_unused: true,
        }
    }

    fn layouts_of(&self, name: &str, shapes: &Shapes, world: usize) -> Vec<FlatLayout> {
        let spec = |(i, (shape, requires_grad, dtype)): (usize, (&Vec<usize>, bool, DType))| {
            let unused = self.last_unused && i + 1 == shapes.len();
            let path = if unused { format!("{name}.{UNUSED}") } else { format!("{name}.p{i}") };
            ParamSpec { requires_grad, dtype, ..ParamSpec::f32(path, i as u64, shape.clone()) }
        };
        let trainable = shapes.iter().map(|s| (s, true, DType::F32));
        let low = self.low.iter().map(|s| (s, true, DType::BF16));
        let all = trainable.chain(self.frozen.iter().map(|s| (s, false, DType::F32))).chain(low);
        let specs: Vec<ParamSpec> = all.enumerate().map(spec).collect();
        if specs.is_empty() {
            vec![]
        } else {
            FlatLayout::build_groups(name, &specs, world).expect("a valid unit")
        }
    }

    pub fn layouts(&self, world: usize) -> (Vec<FlatLayout>, Vec<Vec<FlatLayout>>) {
        let root = self.layouts_of("root", &self.root, world);
        let unit = |(i, shapes): (usize, &Shapes)| self.layouts_of(&format!("blocks.{i}"), shapes, world);
        (root, self.units.iter().enumerate().map(unit).collect())
    }

    pub fn engine(&self, group: ProcessGroup, config: EngineConfig) -> Engine {
        self.engine_at(group, config, place(&config).as_ref()).expect("an engine")
    }

    /// What a rank holds and sends in steps of so many micro-batches.
    pub fn plan(&self, ranks: usize, micro_batches: usize, config: &EngineConfig) -> MemoryPlan {
        let (root, units) = self.layouts(config.shard_group_size(ranks).expect("groups that fit"));
        let layouts: Vec<&FlatLayout> = root.iter().chain(units.iter().flatten()).collect();
        let schedule = StepSchedule::of_micro_batches(micro_batches, ranks).expect("a schedule");
        ParamGroups::new().memory_plan(config, &layouts, schedule).expect("a possible optimizer")
    }

    /// An engine that keeps what rests in files at `place`.
    pub fn engine_at(
        &self,
        group: ProcessGroup,
        config: EngineConfig,
        place: Option<&SwapPlace>,
    ) -> Result<Engine, EngineError> {
        let (root, units) = self.layouts(config.shard_group_size(group.size())?);
        let mut engine = Engine::with_swap(group, root, units, config, (&ParamGroups::new(), place))?;
        for id in engine.ids().collect::<Vec<_>>() {
            for part in 0..engine.parts(id).len() {
                let owned = engine.parts(id)[part].owned();
                let set = |values: &mut [f32]| {
                    values.iter_mut().zip(owned.clone()).for_each(|(v, e)| *v = initial(id, part, e));
                };
                engine.edit_owned(id, part, 0..owned.len(), set)?;
            }
        }
        Ok(engine)
    }
}

/// A folder of its own for what an engine keeps in files.
pub fn place(config: &EngineConfig) -> Option<SwapPlace> {
    static ENGINES: AtomicUsize = AtomicUsize::new(0);
    // Files in memory, where there are such: removing thousands of small ones takes a disk long.
    let path = std::path::PathBuf::from("/dev/shm");
    let path = if path.is_dir() { path } else { std::env::temp_dir() };
    config.offload.uses_files().then(|| SwapPlace {
        path,
        run: format!("engine-test-{}-{}", std::process::id(), ENGINES.fetch_add(1, Ordering::Relaxed)),
        io: IoConfig::default(),
        faults: None,
    })
}

/// The last part of the path of a parameter that no micro-batch uses.
const UNUSED: &str = "unused";

fn is_used(param: &ParamInfo) -> bool {
    !param.path.ends_with(UNUSED)
}

pub fn initial(id: UnitId, part: usize, element: usize) -> f32 {
    let salt = if id.is_root() { 5 } else { 11 } + 29 * part;
    (((element * 37 + salt) % 101) as f32 - 50.0) / 40.0
}

/// Every flat parameter of a model, whole, in the order of collectives.
pub fn full_params(engine: &mut Engine) -> Vec<Vec<f32>> {
    let mut all = Vec::new();
    for id in engine.ids().collect::<Vec<_>>() {
        engine.with_full_params(id, |_, values| all.push(values.to_vec())).expect("gathered");
    }
    all
}

/// The first flat parameter of a unit, whole.
pub fn full(engine: &mut Engine, id: UnitId) -> Vec<f32> {
    let mut all = Vec::new();
    engine.with_full_params(id, |_, values| all.push(values.to_vec())).expect("gathered");
    all.swap_remove(0)
}

/// The gradient of one element in one micro-batch.
pub fn gradient(value: f32, element: usize, micro_batch: usize, step: u64) -> f32 {
    let x = (element as f32 * 0.37 + micro_batch as f32 * 1.3 + step as f32 * 0.7).sin();
    value * 0.3 + x
}

/// Lets one rank compute its rounds of a step.
pub fn compute_step(engine: &mut Engine, micro_batches: usize, lr: f64) -> Result<StepReport, EngineError> {
    let schedule = engine.begin_step(micro_batches)?;
    for _ in 0..schedule.rounds() {
        match engine.begin_round()? {
            RoundAssignment::Idle => engine.idle_round()?,
            RoundAssignment::Compute(micro_batch) => compute_round(engine, micro_batch)?,
        }
    }
    engine.end_step(lr)
}

pub fn compute_round(engine: &mut Engine, micro_batch: usize) -> Result<(), EngineError> {
    let units: Vec<UnitId> = engine.ids().filter(|id| !id.is_root()).collect();
    for unit in &units {
        engine.enter_forward(*unit);
        assert!(engine.parts(*unit).iter().all(|part| part.view().is_present()));
        engine.leave_forward(*unit);
    }
    // A model's head and last norm come first in backward.
    write_gradients(engine, UnitId::ROOT, micro_batch);
    for unit in units.iter().rev() {
        engine.enter_backward(*unit);
        write_gradients(engine, *unit, micro_batch);
        engine.leave_backward(*unit);
    }
    engine.end_round()
}

/// Every used parameter writes its gradient in two uses, half each.
pub fn write_gradients(engine: &mut Engine, unit: UnitId, micro_batch: usize) {
    let (step, scale) = (engine.step(), engine.loss_scale() as f32);
    for part in 0..engine.parts(unit).len() {
        let handle = &engine.parts(unit)[part];
        let (view, params) = (handle.view().clone(), handle.layout().params().to_vec());
        for (index, param) in params.iter().enumerate().filter(|(_, p)| is_used(p)) {
            // SAFETY: the values are copied before the engine goes on.
            let values = unsafe { view.slice(param.range()) }.expect("gathered").to_vec();
            for _ in 0..2 {
                engine.write_gradient(unit, part, index, |window, overwrite| {
                    for (k, g) in window.iter_mut().enumerate() {
                        let half = 0.5 * scale * gradient(values[k], param.offset + k, micro_batch, step);
                        *g = if overwrite { half } else { *g + half };
                    }
                });
            }
        }
    }
}

/// The same training by one loop over whole parameters.
pub struct Reference {
    pub params: Vec<(UnitId, FlatLayout, Vec<f32>)>,
    states: Vec<[Vec<f32>; 2]>,
    step: u64,
}

impl Reference {
    pub fn new(toy: &Toy) -> Self {
        let (root, units) = toy.layouts(1);
        let of = |id: UnitId, layouts: Vec<FlatLayout>| -> Vec<_> {
            let values =
                |part, layout: &FlatLayout| (0..layout.numel()).map(|e| initial(id, part, e)).collect();
            layouts
                .into_iter()
                .enumerate()
                .map(|(part, l)| (id, values(part, &l), l))
                .map(|(id, v, l)| (id, l, v))
                .collect()
        };
        let mut params = of(UnitId::ROOT, root);
        params.extend(units.into_iter().enumerate().flat_map(|(i, layouts)| of(UnitId::unit(i), layouts)));
        let states = params.iter().map(|(_, l, _)| [vec![0.0; l.numel()], vec![0.0; l.numel()]]).collect();
        Self { params, states, step: 0 }
    }

    /// One step; returns the gradient norm.
    pub fn step(&mut self, micro_batches: usize, ranks: usize, config: &EngineConfig, lr: f64) -> f64 {
        self.step += 1;
        let of_layout = |(_, layout, values): &(UnitId, FlatLayout, Vec<f32>)| {
            let mut gradients = vec![0.0; layout.numel()];
            let arrived = quantised::arrived(layout, values, config, ranks);
            for param in layout.params().iter().filter(|p| layout.requires_grad() && is_used(p)) {
                for e in param.range() {
                    let of = |m: usize| gradient(arrived[e], e, m, self.step);
                    gradients[e] = averaged(micro_batches, ranks, config, of);
                }
            }
            gradients
        };
        let gradients: Vec<Vec<f32>> = self.params.iter().map(of_layout).collect();
        let all = || gradients.iter().flatten().map(|g| f64::from(*g).abs());
        let norm = match config.norm {
            Norm::L1 => all().sum(),
            Norm::L2 => all().map(|g| g * g).sum::<f64>().sqrt(),
            Norm::Lp(p) => all().map(|g| g.powf(p)).sum::<f64>().powf(1.0 / p),
            Norm::Max => all().fold(0.0, f64::max),
        };
        let clip = config.clip_norm.map_or(1.0, |max| (max / (norm + 1e-6)).min(1.0) as f32);
        for (((_, layout, values), [m, v]), gradient) in
            self.params.iter_mut().zip(&mut self.states).zip(&gradients)
        {
            for param in layout.params().iter().filter(|_| layout.requires_grad()) {
                let decays = param.shape.len() >= 2;
                for e in param.range() {
                    update(
                        &mut values[e],
                        gradient[e] * clip,
                        (&mut m[e], &mut v[e]),
                        config,
                        (lr, self.step, decays),
                    );
                }
            }
        }
        norm
    }
}

/// A number as it is after a journey in a narrower type.
pub fn rounded(x: f32, precision: Precision) -> f32 {
    match precision {
        Precision::F32 => x,
        Precision::Bf16 => half::bf16::from_f32(x).to_f32(),
        Precision::F16 => half::f16::from_f32(x).to_f32(),
    }
}

/// The reduction order, written as the text of the rule: each micro-batch's gradient as it travels; a tree over the ranks
/// of a group or node, one over those, then the counter over rounds; divided once.
fn averaged(micro_batches: usize, ranks: usize, config: &EngineConfig, of: impl Fn(usize) -> f32) -> f32 {
    let add = |a: f32, b: f32| a + b;
    let nodes = config.node_size(ranks).expect("nodes that fit");
    let group = nodes.unwrap_or(config.shard_group_size(ranks).expect("groups that fit"));
    let low = config.precision.reduce_dtype;
    let pre = if low == Precision::F32 { 1.0 } else { pre_divisor(micro_batches) as f32 };
    let scale = match config.loss_scale {
        shardwise_engine::LossScale::None => 1.0,
        shardwise_engine::LossScale::Static(scale) => scale as f32,
        shardwise_engine::LossScale::Dynamic(dynamic) => dynamic.initial as f32,
    };
    let of = |m: usize| if m < micro_batches { of(m) * scale } else { 0.0 };
    let travelled = |x: f32| rounded(x / pre, low);
    let over_ranks = |of_rank: &dyn Fn(usize) -> f32| {
        let mut groups = CarryCounter::default();
        for first in (0..ranks).step_by(group) {
            let mut tree = CarryCounter::default();
            (first..first + group).for_each(|rank| tree.push(travelled(of_rank(rank)), 1, add));
            groups.push(tree.finish(add).expect("a rank"), 1, add);
        }
        groups.finish(add).expect("a group")
    };
    let rounds = micro_batches.div_ceil(ranks);
    let sum = if config.accumulation == Accumulation::Unsharded {
        // Every use of a parameter writes half of its gradient.
        let halves = |rank| (0..2 * rounds).map(move |use_| 0.5 * of(use_ / 2 * ranks + rank));
        over_ranks(&|rank| halves(rank).fold(0.0, add))
    } else {
        let mut counter = CarryCounter::default();
        (0..rounds).for_each(|round| counter.push(over_ranks(&|rank| of(round * ranks + rank)), 1, add));
        counter.finish(add).expect("a round")
    };
    let mean = sum / (micro_batches as f32 * scale / pre);
    if config.precision.keep_low_precision_grads { rounded(mean, low) } else { mean }
}

fn update(
    p: &mut f32,
    g: f32,
    (m, v): (&mut f32, &mut f32),
    config: &EngineConfig,
    (lr, step, decays): (f64, u64, bool),
) {
    match config.optimizer {
        OptimizerConfig::AdamW { betas: [b1, b2], eps, weight_decay } => {
            let decay = if decays { weight_decay } else { 0.0 };
            let (c1, c2) = (1.0 - b1.powi(step as i32), 1.0 - b2.powi(step as i32));
            *m = *m * b1 as f32 + g * (1.0 - b1) as f32;
            *v = *v * b2 as f32 + g * g * (1.0 - b2) as f32;
            let root = v.sqrt() / c2.sqrt() as f32 + eps as f32;
            *p = *p * (1.0 - lr * decay) as f32 - (lr / c1) as f32 * (*m / root);
        }
        OptimizerConfig::Adam { betas: [b1, b2], eps, weight_decay } => {
            let g = g + if decays { weight_decay as f32 } else { 0.0 } * *p;
            let (c1, c2) = (1.0 - b1.powi(step as i32), 1.0 - b2.powi(step as i32));
            *m = *m * b1 as f32 + g * (1.0 - b1) as f32;
            *v = *v * b2 as f32 + g * g * (1.0 - b2) as f32;
            let root = v.sqrt() / c2.sqrt() as f32 + eps as f32;
            *p -= (lr / c1) as f32 * (*m / root);
        }
        OptimizerConfig::Sgd { momentum, nesterov, weight_decay } => {
            let decay = if decays { weight_decay as f32 } else { 0.0 };
            let g = g + decay * *p;
            *m = *m * momentum as f32 + g;
            *p -= lr as f32
                * match (momentum, nesterov) {
                    (0.0, _) => g,
                    (_, false) => *m,
                    (_, true) => g + momentum as f32 * *m,
                };
        }
        OptimizerConfig::Lion { betas: [b1, b2], weight_decay } => {
            let decay = if decays { weight_decay } else { 0.0 };
            let direction = *m * b1 as f32 + g * (1.0 - b1) as f32;
            let sign = if direction == 0.0 { 0.0 } else { direction.signum() };
            *p = *p * (1.0 - lr * decay) as f32 - lr as f32 * sign;
            *m = *m * b2 as f32 + g * (1.0 - b2) as f32;
        }
        whole => panic!("{whole:?} looks at whole parameters"),
    }
}

/// Trains `steps` steps on `ranks` threads and returns every rank's full parameters and reports.
pub fn train(
    toy: &Toy,
    ranks: usize,
    micro_batches: usize,
    config: EngineConfig,
    steps: usize,
) -> Vec<(Vec<Vec<f32>>, Vec<StepReport>)> {
    threads::run(ranks, DEADLINE, |group| {
        let mut engine = toy.engine(group, config);
        let reports = (0..steps)
            .map(|_| compute_step(&mut engine, micro_batches, 0.05).expect("a step"))
            .collect::<Vec<_>>();
        let params = full_params(&mut engine);
        (params, reports)
    })
    .expect("a world")
}
