//! Every optimizer over shards equals its unsharded self: PyTorch's results, plain loops in f64, and its own bits on other
//! numbers of ranks.

mod common;

use std::collections::BTreeMap;

use common::given::{Given, Run, Values};
use common::{ADAFACTOR, ADAM, ADAMW, LION, MOMENTUM, NESTEROV, SGD, STRATEGIES, config};
use serde_json::Value;
use shardwise_core::{MixedPrecision, ShardingStrategy};
use shardwise_engine::{DecayRule, EngineConfig, EngineError, MuonScale, OptimizerConfig, ParamGroups};

const BETAS: [f64; 2] = [0.9, 0.95];
const MUON: OptimizerConfig = OptimizerConfig::MUON;
const MUON_ORIGINAL: OptimizerConfig = OptimizerConfig::Muon {
    momentum: 0.95,
    nesterov: true,
    steps: 5,
    scale: MuonScale::Original,
    weight_decay: 0.1,
    betas: BETAS,
    eps: 1e-8,
};

/// All that is trained decays, and nothing is clipped.
fn plain(strategy: ShardingStrategy, optimizer: OptimizerConfig) -> EngineConfig {
    EngineConfig { decay: DecayRule::All, clip_norm: None, ..config(strategy, optimizer) }
}

fn floats(value: &Value) -> Vec<f32> {
    let number = |v: &Value| v.as_f64().expect("a number") as f32;
    value.as_array().expect("a list").iter().map(number).collect()
}

/// The parameters and gradients that PyTorch had: tests/data/optimizers.py.
fn golden() -> (Given, Value) {
    let text = include_str!("data/optimizers.json");
    let json: Value = serde_json::from_str(text).expect("JSON");
    let of_shape = |pair: &Value| {
        let shape = floats(&pair[1]).into_iter().map(|n| n as usize).collect();
        (pair[0].as_str().expect("a name").to_string(), shape)
    };
    let shapes: Vec<(String, Vec<usize>)> =
        json["shapes"].as_array().expect("shapes").iter().map(of_shape).collect();
    let (initial, gradients) = (json.clone(), json.clone());
    let given = Given {
        units: vec![shapes[..2].to_vec(), shapes[2..].to_vec()],
        initial: Box::new(move |path, e| initial["initial"][path][e].as_f64().expect("a value") as f32),
        gradient: Box::new(move |path, e, _, step| {
            gradients["gradients"][step as usize - 1][path][e].as_f64().expect("a value") as f32
        }),
    };
    (given, json)
}

/// Five steps equal PyTorch's, for every number of ranks and strategy. (A16: also the first update by itself, below.)
#[test]
fn five_steps_equal_pytorch() {
    let (given, json) = golden();
    let sgd = |momentum, nesterov| OptimizerConfig::Sgd { momentum, nesterov, weight_decay: 0.1 };
    let adamw = OptimizerConfig::AdamW { betas: BETAS, eps: 1e-8, weight_decay: 0.1 };
    let adam = OptimizerConfig::Adam { betas: BETAS, eps: 1e-8, weight_decay: 0.1 };
    let cases = [
        ("adamw", adamw),
        ("adam", adam),
        ("sgd", sgd(0.0, false)),
        ("momentum", sgd(0.9, false)),
        ("nesterov", sgd(0.9, true)),
        ("adafactor", ADAFACTOR),
        ("muon", MUON_ORIGINAL),
        ("muon_adamw_scale", MUON),
    ];
    for (name, optimizer) in cases {
        for strategy in STRATEGIES {
            for ranks in 1..=4 {
                let trained = given.train(Run {
                    ranks,
                    micro_batches: ranks,
                    steps: 5,
                    lr: json["lr"].as_f64().expect("a rate"),
                    config: plain(strategy, optimizer),
                    groups: &ParamGroups::default(),
                });
                for (path, got) in &trained.params {
                    let want = floats(&json["final"][name][path]);
                    for (e, (got, want)) in got.iter().zip(&want).enumerate() {
                        let error = (got - want).abs();
                        assert!(error < 2e-6, "{name} {strategy} {ranks}: {path} {e}: {got} {want}");
                    }
                }
            }
        }
    }
}

/// Sizes that cut matrices and vectors in the middle, and leave ranks without elements.
fn awkward() -> Given {
    Given::formula(vec![
        vec![("embed.weight", vec![7, 3]), ("norm", vec![2]), ("nothing", vec![0, 3])],
        vec![("a.tall", vec![13, 5]), ("a.bias", vec![5]), ("a.none", vec![0]), ("a.one", vec![1])],
        vec![
            ("b.wide", vec![4, 33]),
            ("b.deep", vec![2, 3, 4]),
            ("b.unit", vec![1, 1]),
            ("b.row", vec![1, 9]),
        ],
        vec![("c.single", vec![1])],
        vec![("d.square", vec![36, 36]), ("d.column", vec![17, 1])],
    ])
}

/// The sum of the gradients in f64.
fn mean_gradient(given: &Given, path: &str, e: usize, micro_batches: usize, step: u64) -> f64 {
    let of = |m| f64::from((given.gradient)(path, e, m, step));
    (0..micro_batches).map(of).sum::<f64>() / micro_batches as f64
}

type Wide = BTreeMap<String, Vec<f64>>;

fn adafactor_in_f64(given: &Given, micro_batches: usize, steps: u64, lr: f64) -> Wide {
    let mut params = Wide::new();
    for (path, shape) in given.shapes() {
        let numel: usize = shape.iter().product();
        let mut p: Vec<f64> = (0..numel).map(|e| f64::from((given.initial)(path, e))).collect();
        let [m, n] = match shape.as_slice() {
            [.., m, n] => [*m, *n],
            _ => [1, numel],
        };
        let mut v = vec![0.0; numel];
        let (mut rows, mut columns) = (vec![0.0; numel], vec![0.0; numel]);
        let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
        for step in 1..=steps {
            let g: Vec<f64> =
                (0..numel).map(|e| mean_gradient(given, path, e, micro_batches, step)).collect();
            let t = step as f64;
            let weight = t.powf(-0.8);
            let size = (numel as f64).sqrt();
            let alpha = (norm(&p) / size).max(1e-3) * lr.min(1.0 / t.sqrt());
            if shape.len() < 2 {
                (0..numel).for_each(|e| v[e] = v[e] * (1.0 - weight) + g[e] * g[e] * weight);
            } else {
                for at in 0..numel / (m * n).max(1) {
                    let of = |i: usize, j: usize| at * m * n + i * n + j;
                    for i in 0..m {
                        let mean = (0..n).map(|j| g[of(i, j)].powi(2)).sum::<f64>() / n as f64;
                        let row = &mut rows[at * m + i];
                        *row = *row * (1.0 - weight) + mean * weight;
                    }
                    for j in 0..n {
                        let mean = (0..m).map(|i| g[of(i, j)].powi(2)).sum::<f64>() / m as f64;
                        let column = &mut columns[at * n + j];
                        *column = *column * (1.0 - weight) + mean * weight;
                    }
                    let mean = rows[at * m..(at + 1) * m].iter().sum::<f64>() / m as f64;
                    for i in 0..m {
                        for j in 0..n {
                            v[of(i, j)] =
                                rows[at * m + i] * columns[at * n + j] / mean.max(f64::from(f32::EPSILON));
                        }
                    }
                }
            }
            let least = f64::from(f32::EPSILON).powi(2);
            let u: Vec<f64> = g.iter().zip(&v).map(|(g, v)| g / v.max(least).sqrt()).collect();
            let cut = (norm(&u) / size).max(1.0);
            p.iter_mut().zip(&u).for_each(|(p, u)| *p = *p * (1.0 - lr * 0.1) - alpha / cut * u);
        }
        params.insert(path.clone(), p);
    }
    params
}

fn product(a: &[f64], b: &[f64], [m, k, n]: [usize; 3]) -> Vec<f64> {
    let of = |e: usize| (0..k).map(|l| a[e / n * k + l] * b[l * n + e % n]).sum();
    (0..m * n).map(of).collect()
}

fn transposed(a: &[f64], m: usize, n: usize) -> Vec<f64> {
    (0..m * n).map(|e| a[e % m * n + e / m]).collect()
}

fn orthogonalised(g: &[f64], m: usize, n: usize) -> Vec<f64> {
    if m > n {
        return transposed(&orthogonalised(&transposed(g, m, n), n, m), n, m);
    }
    let norm = g.iter().map(|g| g * g).sum::<f64>().sqrt().max(1e-7);
    let mut x: Vec<f64> = g.iter().map(|g| g / norm).collect();
    for _ in 0..5 {
        let gram = product(&x, &transposed(&x, m, n), [m, n, m]);
        let square = product(&gram, &gram, [m, m, m]);
        let polynomial: Vec<f64> = gram.iter().zip(&square).map(|(g, s)| -4.7750 * g + 2.0315 * s).collect();
        let more = product(&polynomial, &x, [m, m, n]);
        x.iter_mut().zip(&more).for_each(|(x, y)| *x = 3.4445 * *x + y);
    }
    x
}

fn muon_in_f64(given: &Given, micro_batches: usize, steps: u64, lr: f64) -> Wide {
    let mut params = Wide::new();
    for (path, shape) in given.shapes() {
        let numel: usize = shape.iter().product();
        let mut p: Vec<f64> = (0..numel).map(|e| f64::from((given.initial)(path, e))).collect();
        let (mut b, mut v) = (vec![0.0; numel], vec![0.0; numel]);
        for step in 1..=steps {
            let g: Vec<f64> =
                (0..numel).map(|e| mean_gradient(given, path, e, micro_batches, step)).collect();
            match shape.as_slice() {
                &[m, n] if !path.starts_with("embed") && numel > 0 => {
                    b.iter_mut().zip(&g).for_each(|(b, g)| *b = 0.95 * *b + 0.05 * g);
                    let u: Vec<f64> = g.iter().zip(&b).map(|(g, b)| 0.05 * g + 0.95 * b).collect();
                    let scale = 0.2 * (m.max(n) as f64).sqrt();
                    let o = orthogonalised(&u, m, n);
                    p.iter_mut().zip(&o).for_each(|(p, o)| *p = *p * (1.0 - lr * 0.1) - lr * scale * o);
                }
                _ => {
                    for e in 0..numel {
                        b[e] = BETAS[0] * b[e] + (1.0 - BETAS[0]) * g[e];
                        v[e] = BETAS[1] * v[e] + (1.0 - BETAS[1]) * g[e] * g[e];
                        let [c1, c2] = BETAS.map(|beta| 1.0 - beta.powi(step as i32));
                        p[e] = p[e] * (1.0 - lr * 0.1) - lr / c1 * b[e] / ((v[e] / c2).sqrt() + 1e-8);
                    }
                }
            }
        }
        params.insert(path.clone(), p);
    }
    params
}

fn assert_near(got: &Values, want: &Wide, tolerance: f64, what: &str) {
    assert_eq!(got.len(), want.len());
    for (path, want) in want {
        assert_eq!(got[path].len(), want.len(), "{path}");
        for (e, (got, want)) in got[path].iter().zip(want).enumerate() {
            let error = (f64::from(*got) - want).abs();
            assert!(error < tolerance, "{what}: {path} {e}: {got} {want}");
        }
    }
}

/// Optimizers that look at whole parameters equal loops over whole parameters in f64 (A21: by their logical shapes).
#[test]
fn whole_parameters_equal_the_reference() {
    type Reference = fn(&Given, usize, u64, f64) -> Wide;
    let cases: [(OptimizerConfig, Reference, f64); 2] =
        [(ADAFACTOR, adafactor_in_f64, 2e-6), (MUON, muon_in_f64, 2e-4)];
    let given = awkward();
    for (optimizer, reference, tolerance) in cases {
        for ranks in 1..=4 {
            for micro_batches in [ranks, 3 * ranks] {
                let want = reference(&given, micro_batches, 3, 0.05);
                for strategy in STRATEGIES {
                    let trained = given.train(Run {
                        ranks,
                        micro_batches,
                        steps: 3,
                        lr: 0.05,
                        config: plain(strategy, optimizer),
                        groups: &ParamGroups::default(),
                    });
                    let what = format!("{optimizer:?}, {strategy}, {ranks} ranks");
                    assert_near(&trained.params, &want, tolerance, &what);
                }
            }
        }
    }
}

/// A20: one rank with eight micro-batches, two with four and four with two have the same bits, statistics included, in
/// every strategy.
#[test]
fn ranks_and_strategies_change_no_bit_of_any_optimizer() {
    let given = awkward();
    for optimizer in [ADAMW, ADAM, SGD, MOMENTUM, NESTEROV, LION, ADAFACTOR, MUON] {
        for clip_norm in [None, Some(0.5)] {
            let run = |strategy, ranks| Run {
                ranks,
                micro_batches: 8,
                steps: 4,
                lr: 0.05,
                config: EngineConfig { clip_norm, ..config(strategy, optimizer) },
                groups: const { &ParamGroups::new() },
            };
            let alone = given.train(run(STRATEGIES[0], 1));
            for strategy in STRATEGIES {
                for ranks in [1, 2, 4, 8] {
                    let trained = given.train(run(strategy, ranks));
                    assert_eq!(trained, alone, "{optimizer:?} {strategy} {ranks}");
                }
            }
            // The gradients are given, so what is rounded on its way to compute leaves no trace in the masters.
            let mut narrow = run(ShardingStrategy::FullShard, 2);
            narrow.config.precision = MixedPrecision::BF16;
            assert_eq!(given.train(narrow), alone, "{optimizer:?} through bf16");
            for (ranks, group) in [(2, 1), (4, 2), (4, 4)] {
                let mut run = run(ShardingStrategy::HybridShard, ranks);
                run.config.shard_group = Some(group);
                assert_eq!(given.train(run), alone, "{optimizer:?} {ranks} in groups of {group}");
            }
        }
    }
}

/// A16: one update by AdamW is the reference's.
#[test]
fn one_update_by_adamw_equals_the_reference() {
    let given = awkward();
    for ranks in 1..=4 {
        let trained = given.train(Run {
            ranks,
            micro_batches: ranks,
            steps: 1,
            lr: 1e-3,
            config: plain(STRATEGIES[0], ADAMW),
            groups: &ParamGroups::default(),
        });
        for (path, params) in &trained.params {
            for (e, after) in params.iter().enumerate() {
                let before = f64::from((given.initial)(path, e));
                let g = mean_gradient(&given, path, e, ranks, 1);
                let want = -1e-3 * 0.1 * before - 1e-3 * g / (g.abs() + 1e-8);
                let update = f64::from(*after) - before;
                assert!((update - want).abs() <= 1e-6, "{path} {e}: {update} {want}");
            }
        }
    }
}

/// Constants that cannot be meant are refused when the engine is built, with what they must be.
#[test]
fn impossible_constants_are_refused() {
    let adamw = |betas, eps| OptimizerConfig::AdamW { betas, eps, weight_decay: 0.1 };
    let muon = |steps| match MUON {
        OptimizerConfig::Muon { momentum, nesterov, scale, weight_decay, betas, eps, .. } => {
            OptimizerConfig::Muon { momentum, nesterov, steps, scale, weight_decay, betas, eps }
        }
        other => other,
    };
    let adafactor = |beta2_decay, clip_threshold| OptimizerConfig::Adafactor {
        beta2_decay,
        eps: [1e-7, 1e-3],
        clip_threshold,
        weight_decay: 0.0,
    };
    let cases = [
        (adamw([0.9, 1.0], 1e-8), "betas holds 1"),
        (adamw([0.9, 0.95], -1.0), "eps is -1"),
        (
            OptimizerConfig::Sgd { momentum: 0.0, nesterov: true, weight_decay: 0.0 },
            "nesterov is set, but momentum is 0",
        ),
        (OptimizerConfig::Lion { betas: [-0.1, 0.9], weight_decay: 0.0 }, "betas holds -0.1"),
        (OptimizerConfig::Lion { betas: BETAS, weight_decay: f64::NAN }, "weight_decay is NaN"),
        (adafactor(0.8, 1.0), "beta2_decay is 0.8"),
        (adafactor(-0.8, 0.5), "clip_threshold is 0.5"),
        (muon(0), "steps is 0"),
        (muon(100), "steps is 100"),
    ];
    for (optimizer, words) in cases {
        shardwise_comm::threads::run(1, common::DEADLINE, |group| {
            let (root, units) = awkward().layouts(1);
            let config = plain(STRATEGIES[0], optimizer);
            let error = shardwise_engine::Engine::new(group, root, units, config).expect_err("refused");
            assert!(matches!(error, EngineError::Usage(_)), "{error:?}");
            assert!(error.to_string().contains(words), "{error} lacks {words}");
        })
        .expect("a world");
    }
}
