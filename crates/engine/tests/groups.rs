//! Parameter groups: rules of their own for some parameters, however the model is cut into units.

mod common;

use common::given::{Given, Run, Trained};
use common::{ADAFACTOR, ADAMW, DEADLINE, LION, SGD, STRATEGIES, config};
use shardwise_comm::threads;
use shardwise_core::{FlatLayout, Purpose, ShardingStrategy, StepSchedule};
use shardwise_engine::{Engine, EngineConfig, EngineError, GroupLr, GroupRule, OptimizerConfig, ParamGroups};

const FULL: ShardingStrategy = ShardingStrategy::FullShard;

fn model() -> Given {
    Given::formula(vec![
        vec![("embed.weight", vec![7, 3]), ("norm", vec![2])],
        vec![("a.weight", vec![13, 5]), ("a.bias", vec![5]), ("a.none", vec![0]), ("a.one", vec![1])],
        vec![("b.weight", vec![4, 9]), ("b.deep", vec![2, 3, 4]), ("b.bias", vec![9])],
    ])
}

/// The same parameters in other units and in another order.
fn model_in_other_units() -> Given {
    Given::formula(vec![
        vec![("b.bias", vec![9]), ("a.one", vec![1]), ("b.weight", vec![4, 9])],
        vec![("norm", vec![2])],
        vec![("b.deep", vec![2, 3, 4]), ("a.bias", vec![5])],
        vec![("a.none", vec![0]), ("embed.weight", vec![7, 3]), ("a.weight", vec![13, 5])],
    ])
}

fn rule(lr: GroupLr, weight_decay: Option<f64>, optimizer: Option<OptimizerConfig>) -> GroupRule {
    GroupRule { lr, weight_decay, optimizer }
}

fn run<'a>(
    strategy: ShardingStrategy,
    ranks: usize,
    optimizer: OptimizerConfig,
    groups: &'a ParamGroups,
) -> Run<'a> {
    let config = EngineConfig { clip_norm: None, ..config(strategy, optimizer) };
    Run { ranks, micro_batches: 4, steps: 3, lr: 0.05, config, groups }
}

/// Every optimizer at once.
fn mixed() -> ParamGroups {
    ParamGroups::new()
        .with_pattern("*.bias", rule(GroupLr::Times(2.0), Some(0.0), None))
        .with("deep", |_, shape| shape.len() == 3, rule(GroupLr::Fixed(0.01), None, Some(ADAFACTOR)))
        .with_pattern("embed.*", rule(GroupLr::default(), Some(0.3), Some(LION)))
        .with_pattern("norm", rule(GroupLr::default(), None, Some(SGD)))
        .with_pattern("*.one", rule(GroupLr::Times(0.0), None, Some(ADAFACTOR)))
}

/// What a group says is what an engine does that is configured so as a whole.
#[test]
fn a_group_equals_an_engine_of_its_configuration() {
    let groups = mixed();
    let given = model();
    for strategy in STRATEGIES {
        for ranks in 1..=4 {
            let got = given.train(run(strategy, ranks, OptimizerConfig::MUON, &groups));
            let alone = |optimizer, lr, decay| {
                let one = ParamGroups::new().with("all", |_, _| true, rule(lr, decay, Some(optimizer)));
                given.train(run(strategy, ranks, SGD, &one)).params
            };
            let rest = OptimizerConfig::AdamW { betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.0 };
            let same = |paths: &[&str], want: &common::given::Values| {
                for path in paths {
                    assert_eq!(got.params[*path], want[*path], "{path} {strategy} {ranks}");
                }
            };
            same(&["a.bias", "b.bias"], &alone(rest, GroupLr::Fixed(0.1), Some(0.0)));
            same(&["b.deep"], &alone(ADAFACTOR, GroupLr::Fixed(0.01), Some(0.1)));
            same(&["embed.weight"], &alone(LION, GroupLr::Fixed(0.05), Some(0.3)));
            same(&["norm"], &alone(SGD, GroupLr::Times(1.0), None));
            let untrained: Vec<f32> = vec![(given.initial)("a.one", 0)];
            assert_eq!(got.params["a.one"], untrained);
            let muon = given.train(run(strategy, ranks, OptimizerConfig::MUON, &ParamGroups::new()));
            same(&["a.weight", "b.weight"], &muon.params);
        }
    }
}

/// A14: state is keyed by the parameter's path. However the model is cut into units, and in whatever order they were
/// made, weights and statistics have the same bits.
#[test]
fn weights_and_statistics_do_not_depend_on_units_or_their_order() {
    let groups = mixed();
    for (optimizer, groups) in [
        (OptimizerConfig::MUON, &groups),
        (ADAMW, const { &ParamGroups::new() }),
        (ADAFACTOR, const { &ParamGroups::new() }),
    ] {
        let want: Trained = model().train(run(FULL, 1, optimizer, groups));
        for strategy in STRATEGIES {
            for ranks in [1, 2, 4] {
                for given in [model(), model_in_other_units()] {
                    assert_eq!(
                        given.train(run(strategy, ranks, optimizer, groups)),
                        want,
                        "{strategy} {ranks}"
                    );
                }
            }
        }
    }
}

/// A21: statistics have the whole parameter's sizes, each element once.
#[test]
fn statistics_have_logical_sizes() {
    let trained = model().train(run(FULL, 3, OptimizerConfig::MUON, &mixed()));
    let sizes: Vec<(String, String, usize)> =
        trained.statistics.into_iter().map(|((path, name), elements)| (path, name, elements.len())).collect();
    let want = [
        ("a.bias", "exp_avg", 5),
        ("a.bias", "exp_avg_sq", 5),
        ("a.one", "variance", 1),
        ("a.weight", "momentum_buffer", 65),
        ("b.bias", "exp_avg", 9),
        ("b.bias", "exp_avg_sq", 9),
        ("b.deep", "col_var", 8),
        ("b.deep", "row_var", 6),
        ("b.weight", "momentum_buffer", 36),
        ("embed.weight", "exp_avg", 21),
    ];
    let want = want.map(|(path, name, numel)| (path.to_string(), name.to_string(), numel));
    assert_eq!(sizes, want);
}

/// The first group that chooses a parameter has it.
#[test]
fn the_first_group_counts() {
    let config = config(FULL, ADAMW);
    let groups = ParamGroups::new()
        .with_pattern("a.*", rule(GroupLr::Times(2.0), None, None))
        .with_pattern("*.weight", rule(GroupLr::Times(3.0), None, None));
    let (root, units) = model().layouts(1);
    let lr = |path: &str| {
        let mut params = root.iter().chain(units.iter().flatten()).flat_map(FlatLayout::params);
        let param = params.find(|param| param.path == path).expect("a parameter");
        groups.rule(&config, param).expect("a rule").lr
    };
    assert_eq!(lr("a.weight"), GroupLr::Times(2.0));
    assert_eq!(lr("b.weight"), GroupLr::Times(3.0));
    assert_eq!(lr("norm"), GroupLr::Times(1.0));
}

/// E7: a group without parameters, on one rank or on all, changes nothing. F8: ranks that own nothing take part.
#[test]
fn empty_groups_and_ranks_that_own_nothing() {
    let tiny = Given::formula(vec![vec![], vec![("w", vec![1, 1]), ("b", vec![1])], vec![("x", vec![0, 2])]]);
    for optimizer in [ADAMW, ADAFACTOR, OptimizerConfig::MUON] {
        let none = ParamGroups::new();
        let empty = ParamGroups::new().with_pattern("no such", rule(GroupLr::Fixed(1.0), None, Some(LION)));
        for strategy in STRATEGIES {
            let want = tiny.train(Run { micro_batches: 8, ..run(strategy, 1, optimizer, &none) });
            for ranks in [2, 4, 8] {
                let got = tiny.train(Run { micro_batches: 8, ..run(strategy, ranks, optimizer, &empty) });
                assert_eq!(got, want, "{optimizer:?} {strategy} {ranks}");
            }
        }
    }
}

/// With any mix of optimizers a rank holds what was planned, to the byte.
#[test]
fn the_ledger_equals_the_plan_with_groups() {
    let groups = mixed();
    for strategy in STRATEGIES {
        for (ranks, optimizer) in [(1, ADAMW), (2, OptimizerConfig::MUON), (3, ADAFACTOR), (4, SGD)] {
            for ema_decay in [None, Some(0.9)] {
                let given = model();
                let config = EngineConfig { ema_decay, ..config(strategy, optimizer) };
                let (root, units) = given.layouts(ranks);
                let layouts: Vec<&FlatLayout> = root.iter().chain(units.iter().flatten()).collect();
                let schedule = StepSchedule::of_micro_batches(2 * ranks, ranks).expect("a schedule");
                let plan = groups.memory_plan(&config, &layouts, schedule).expect("possible rules");
                threads::run(ranks, DEADLINE, |group| {
                    let mut engine = given.engine(group, config, &groups);
                    for _ in 0..2 {
                        let report = given.step(&mut engine, 2 * ranks, 0.1);
                        assert_eq!(report.bytes_sent, plan.sent_per_step());
                        assert_eq!(ranks == 1, report.update_bytes_sent == 0, "{report:?}");
                    }
                    for purpose in Purpose::ALL {
                        let (peak, planned) = (engine.ledger().peak(purpose), plan.bytes(purpose));
                        assert_eq!(peak, planned, "{strategy}, {ranks} ranks, {optimizer:?}: {purpose}");
                    }
                })
                .expect("a world");
            }
        }
    }
}

/// Rules that cannot be followed are refused when the engine is built; messages name the group and the parameter.
#[test]
fn impossible_rules_are_refused() {
    let cases = [
        (
            rule(GroupLr::default(), None, Some(OptimizerConfig::MUON)),
            vec!["parameter group `a.*`", "Muon updates matrices", "`a.bias`", "[5]"],
        ),
        (rule(GroupLr::Times(-1.0), None, None), vec!["parameter group `a.*`", "lr is Times(-1.0)"]),
        (rule(GroupLr::default(), Some(-0.1), None), vec!["parameter group `a.*`", "weight_decay is -0.1"]),
    ];
    for (rule, words) in cases {
        threads::run(1, DEADLINE, |group| {
            let (root, units) = model().layouts(1);
            let groups = ParamGroups::new().with_pattern("a.*", rule);
            let error =
                Engine::with_groups(group, root, units, config(FULL, ADAMW), &groups).expect_err("refused");
            assert!(matches!(error, EngineError::Usage(_)), "{error:?}");
            for word in &words {
                assert!(error.to_string().contains(word), "{error} lacks {word}");
            }
        })
        .expect("a world");
    }
}
