//! A model of named parameters whose gradients are given, and however it is cut into units.

use std::collections::BTreeMap;

use shardwise_comm::{ProcessGroup, threads};
use shardwise_core::{FlatLayout, ParamSpec, RoundAssignment};
use shardwise_engine::{Engine, EngineConfig, ParamGroups, UnitId};

use super::DEADLINE;

/// Values by path.
pub type Values = BTreeMap<String, Vec<f32>>;

/// Optimizer statistics by path and name, each element once.
pub type Statistics = BTreeMap<(String, String), BTreeMap<usize, f32>>;

/// The first value of an element: `(path, element)`.
pub type Initial = Box<dyn Fn(&str, usize) -> f32 + Send + Sync>;

/// The gradient of an element: `(path, element, micro_batch, step)`.
pub type Gradient = Box<dyn Fn(&str, usize, usize, u64) -> f32 + Send + Sync>;

pub struct Given {
    /// The root's parameters, then those of each unit.
    pub units: Vec<Vec<(String, Vec<usize>)>>,
    pub initial: Initial,
    pub gradient: Gradient,
}

/// What training has come to.
#[derive(Debug, PartialEq)]
pub struct Trained {
    pub params: Values,
    pub statistics: Statistics,
}

/// What one run is.
#[derive(Clone, Copy, Debug)]
pub struct Run<'a> {
    pub ranks: usize,
    pub micro_batches: usize,
    pub steps: u64,
    pub lr: f64,
    pub config: EngineConfig,
    pub groups: &'a ParamGroups,
}

impl Given {
    /// A smooth, irregular model: initial values and gradients by formula.
    pub fn formula(units: Vec<Vec<(&str, Vec<usize>)>>) -> Self {
        let salt = |path: &str| path.bytes().map(f32::from).sum::<f32>() * 0.13;
        let owned = |(path, shape): (&str, Vec<usize>)| (path.to_string(), shape);
        Self {
            units: units.into_iter().map(|unit| unit.into_iter().map(owned).collect()).collect(),
            initial: Box::new(move |path, e| (0.61 * e as f32 + salt(path)).sin()),
            gradient: Box::new(move |path, e, m, s| {
                let x = (e as f32 * 0.37 + m as f32 * 1.3 + s as f32 * 0.7 + salt(path)).sin();
                x * (1.0 + 0.5 * (e as f32 * 1.9).cos())
            }),
        }
    }

    pub fn shapes(&self) -> impl Iterator<Item = &(String, Vec<usize>)> {
        self.units.iter().flatten()
    }

    pub fn layouts(&self, world: usize) -> (Vec<FlatLayout>, Vec<Vec<FlatLayout>>) {
        let layouts = |(index, params): (usize, &Vec<(String, Vec<usize>)>)| {
            let specs: Vec<ParamSpec> = (params.iter().enumerate())
                .map(|(i, (path, shape))| ParamSpec::f32(path.clone(), i as u64, shape.clone()))
                .collect();
            let name = if index == 0 { "root".to_string() } else { format!("unit {index}") };
            if specs.is_empty() {
                vec![]
            } else {
                FlatLayout::build_groups(name, &specs, world).expect("a unit")
            }
        };
        let mut all: Vec<Vec<FlatLayout>> = self.units.iter().enumerate().map(layouts).collect();
        let units = all.split_off(1);
        (all.remove(0), units)
    }

    pub fn engine(&self, group: ProcessGroup, config: EngineConfig, groups: &ParamGroups) -> Engine {
        let sharers = config.shard_group_size(group.size()).expect("groups that fit");
        let (root, units) = self.layouts(sharers);
        let place = super::place(&config);
        let engine = Engine::with_swap(group, root, units, config, (groups, place.as_ref()));
        let mut engine = engine.expect("an engine");
        for id in engine.ids().collect::<Vec<_>>() {
            let (owned, layout) = (engine.parts(id)[0].owned(), engine.parts(id)[0].layout().clone());
            let set = |values: &mut [f32]| {
                for param in layout.params() {
                    for e in param.range().filter(|e| owned.contains(e)) {
                        values[e - owned.start] = (self.initial)(&param.path, e - param.offset);
                    }
                }
            };
            engine.edit_owned(id, 0, 0..owned.len(), set).expect("idle");
        }
        engine
    }

    pub fn step(&self, engine: &mut Engine, micro_batches: usize, lr: f64) -> shardwise_engine::StepReport {
        let schedule = engine.begin_step(micro_batches).expect("idle");
        for _ in 0..schedule.rounds() {
            match engine.begin_round().expect("a round") {
                RoundAssignment::Idle => engine.idle_round().expect("a round"),
                RoundAssignment::Compute(m) => self.round(engine, m),
            }
        }
        engine.end_step(lr).expect("a step")
    }

    fn round(&self, engine: &mut Engine, micro_batch: usize) {
        let units: Vec<UnitId> = engine.ids().filter(|id| !id.is_root()).collect();
        for unit in &units {
            engine.enter_forward(*unit);
            engine.leave_forward(*unit);
        }
        if engine.ids().any(UnitId::is_root) {
            self.write(engine, UnitId::ROOT, micro_batch);
        }
        for unit in units.iter().rev() {
            engine.enter_backward(*unit);
            self.write(engine, *unit, micro_batch);
            engine.leave_backward(*unit);
        }
        engine.end_round().expect("a round");
    }

    fn write(&self, engine: &mut Engine, unit: UnitId, micro_batch: usize) {
        let (params, step) = (engine.parts(unit)[0].layout().params().to_vec(), engine.step());
        for (index, param) in params.iter().enumerate() {
            engine.write_gradient(unit, 0, index, |window, _| {
                for (e, g) in window.iter_mut().enumerate() {
                    *g = (self.gradient)(&param.path, e, micro_batch, step);
                }
            });
        }
    }

    /// Trains on `run.ranks` threads; all ranks must see the same, and their statistics are put together.
    pub fn train(&self, run: Run<'_>) -> Trained {
        let all = threads::run(run.ranks, DEADLINE, |group| {
            let mut engine = self.engine(group, run.config, run.groups);
            for _ in 0..run.steps {
                self.step(&mut engine, run.micro_batches, run.lr);
            }
            (params(&mut engine), statistics(&mut engine))
        })
        .expect("a world");
        let mut trained = Trained { params: all[0].0.clone(), statistics: Statistics::new() };
        for (params, statistics) in all {
            assert_eq!(params, trained.params, "{run:?}");
            for (key, elements) in statistics {
                let merged = trained.statistics.entry(key).or_default();
                for (e, value) in elements {
                    let before = merged.insert(e, value);
                    assert!(before.is_none_or(|b| b.to_bits() == value.to_bits()), "{run:?}");
                }
            }
        }
        trained
    }
}

/// Every parameter, whole.
pub fn params(engine: &mut Engine) -> Values {
    let mut all = Values::new();
    for id in engine.ids().collect::<Vec<_>>() {
        let see = |layout: &FlatLayout, flat: &[f32]| {
            all.extend(layout.params().iter().map(|p| (p.path.clone(), flat[p.range()].to_vec())));
        };
        engine.with_full_params(id, see).expect("gathered");
    }
    all
}

/// This rank's statistics.
pub fn statistics(engine: &mut Engine) -> Statistics {
    let mut all = Statistics::new();
    let see = |slice: shardwise_engine::StateSlice<'_>| {
        let kept = all.entry((slice.path.to_string(), slice.name.to_string())).or_default();
        assert_eq!(slice.elements.len(), slice.values.len());
        kept.extend(slice.elements.zip(slice.values.iter().copied()));
    };
    engine.each_state(see).expect("idle");
    all
}
