//! Parameters are whole inside a scope, and only there; who may change them is agreed on by all ranks.

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use common::{Net, Params, STRATEGIES, batch, config, params, step, world};
use shardwise_burn::{ShardError, ShardedModel, SummonOptions, Which};
use shardwise_comm::ProcessGroup;
use shardwise_core::{Precision, ShardingStrategy};

const WEIGHT: &str = "blocks.1.up.weight";
const BIAS: &str = "blocks.1.up.bias";

fn sharded(group: ProcessGroup, strategy: ShardingStrategy) -> ShardedModel<Net> {
    let device = Device::flex().autodiff();
    ShardedModel::new(group, Net::new(&device), config(strategy), &()).expect("sharded")
}

fn of(params: &Params, path: &str) -> Vec<f32> {
    params.iter().find(|(p, ..)| p == path).expect("exported").2.clone()
}

/// Every strategy on 1 to 4 ranks.
fn worlds() -> impl Iterator<Item = (ShardingStrategy, usize)> {
    STRATEGIES.into_iter().flat_map(|strategy| (1..=4).map(move |ranks| (strategy, ranks)))
}

#[test]
fn a_read_scope_shows_full_values_under_original_names() {
    for (strategy, ranks) in worlds() {
        world(ranks, |group| {
            let mut model = sharded(group, strategy);
            let want = params(&mut model);
            for (which, count) in
                [(Which::All, want.len()), (Which::Unit("blocks.1"), 6), (Which::Paths(&[BIAS, WEIGHT]), 2)]
            {
                let scope = model.gather(which).expect("gathered");
                for path in scope.paths() {
                    let (_, shape, values) = want.iter().find(|(p, ..)| p == path).expect("known");
                    assert_eq!(scope.values(path).expect("whole"), values);
                    assert_eq!(scope.shape(path).expect("whole"), shape);
                }
                assert_eq!(scope.paths().count(), count);
                let tensor = scope.tensor::<2>(WEIGHT).expect("a matrix");
                assert_eq!(tensor.dims(), [10, 17]);
                assert_eq!(tensor.into_data().try_to_vec::<f32>().expect("f32"), of(&want, WEIGHT));
                assert!(scope.tensor::<1>(WEIGHT).is_err(), "it has two dimensions");
            }
            // Reference fact 40: duplicates are removed, and the order is the model's whatever the caller's.
            let scope = model.gather(Which::Paths(&[BIAS, WEIGHT, BIAS])).expect("gathered");
            assert_eq!(scope.paths().collect::<Vec<_>>(), [WEIGHT, BIAS]);
        });
    }
}

/// F9, F10, O3: outside a scope shapes and counts are whole, and values cannot be had.
#[test]
fn outside_its_scope_a_parameter_has_a_shape_and_no_values() {
    world(3, |group| {
        let rank = group.rank();
        let model = sharded(group, ShardingStrategy::FullShard);
        let summary = model.parameter(WEIGHT).expect("known");
        assert_eq!((summary.shape.as_slice(), summary.numel()), ([10, 17].as_slice(), 170));
        assert!(summary.shard_numel < 170 && summary.requires_grad && !summary.persisted);
        let whole = model.gather(Which::All).expect("gathered").module();
        assert_eq!(whole.num_params(), Net::new(&Device::flex()).num_params());
        drop(whole);

        let scope = model.gather(Which::Paths(&[BIAS])).expect("gathered");
        let error = scope.values(WEIGHT).expect_err("not in the scope").to_string();
        for part in
            ["`blocks.1.up.weight`", "`blocks.1`", "NotAvailable", "[10, 17]", "170 elements", "`gather`"]
        {
            assert!(error.contains(part), "rank {rank}: {part} in {error}");
        }
        let error = scope.values("blocks.1.up.wieght").expect_err("unknown").to_string();
        assert!(error.contains("no parameter `blocks.1.up.wieght`"), "{error}");
        let error = model.parameter("up.bias").expect_err("unknown").to_string();
        assert!(error.contains("`up.bias`") && error.contains("blocks.0.up.bias"), "{error}");
        let error = model.gather(Which::Unit("blocks")).expect_err("unknown").to_string();
        assert!(error.contains("no unit `blocks`") && error.contains("blocks.2"), "{error}");
    });
}

#[test]
fn nothing_to_gather_is_no_work() {
    world(2, |group| {
        let rank = group.rank();
        let model = sharded(group, ShardingStrategy::FullShard);
        let version = model.version();
        if rank == 0 {
            // Not even a collective: the other rank does not take part.
            for which in [Which::Nothing, Which::Paths(&[]), Which::All.enabled(false)] {
                assert_eq!(model.gather(which).expect("nothing").paths().count(), 0);
                model.gather_mut(which, 1).expect("nothing").close().expect("nothing");
            }
        }
        assert_eq!(model.version(), version);
        assert!(model.gather(Which::Unit("root").enabled(true)).expect("gathered").paths().count() > 0);
    });
}

/// Reference fact 41: what `modifier_rank` wrote, and nothing else, is seen by all from then on; by training too (O2).
#[test]
fn the_modifiers_values_reach_every_rank() {
    for (strategy, ranks) in worlds() {
        let losses = world(ranks, |group| {
            let rank = group.rank();
            let mut model = sharded(group, strategy);
            let before = params(&mut model);
            let version = model.version();
            let modifier = ranks - 1;
            let mut scope = model.gather_mut(Which::Paths(&[WEIGHT]), modifier).expect("gathered");
            // Every rank writes something else.
            let value = if rank == modifier { 0.0 } else { 100.0 + rank as f32 };
            scope.values_mut(WEIGHT).expect("held").fill(value);
            let error = scope.values_mut(BIAS).expect_err("not held").to_string();
            assert!(error.contains("`blocks.1.up.bias`") && error.contains("`gather_mut`"), "{error}");
            drop(scope);
            assert!(model.version() > version, "copies of the old values are stale");
            let after = params(&mut model);
            assert!(of(&after, WEIGHT).iter().all(|w| *w == 0.0));
            for ((path, _, a), (_, _, b)) in before.iter().zip(&after) {
                assert!(path == WEIGHT || a == b, "{path}");
            }
            let changed = step(&mut model, 0, Net::loss);
            let device = Device::flex();
            let mut scope = model.gather_mut(Which::Unit("blocks.1"), 0).expect("gathered");
            scope.set(BIAS, Tensor::<1>::ones([17], &device)).expect("the same shape");
            let error = scope.set(BIAS, Tensor::<1>::ones([3], &device)).expect_err("another").to_string();
            assert!(error.contains("[17], not [3]"), "{error}");
            scope.close().expect("sharded again");
            let seen = model.evaluate(|net| {
                net.blocks[1].call(Tensor::<2>::zeros([1, 17], &device), |block, x| {
                    x + block.up.bias.as_ref().expect("a bias").val().unsqueeze()
                })
            });
            let seen = seen.expect("evaluated").into_data();
            assert!(seen.iter::<f32>().all(|b| b == 1.0), "the unit computes with what was written");
            changed
        });
        let unchanged = world(1, |group| step(&mut sharded(group, strategy), 0, Net::loss))[0];
        assert!(losses.iter().all(|loss| *loss == losses[0] && *loss != unchanged));
    }
}

/// The step after an edit is that of a model that was built with the edited values, on any number of ranks.
#[test]
fn training_goes_on_from_what_was_written() {
    let run = |strategy, ranks| {
        world(ranks, |group| {
            let mut model = sharded(group, strategy);
            step(&mut model, 0, Net::loss);
            let mut scope = model.gather_mut(Which::All, 0).expect("gathered");
            scope.values_mut(WEIGHT).expect("held").iter_mut().for_each(|w| *w *= 0.5);
            drop(scope);
            (step(&mut model, 1, Net::loss), params(&mut model))
        })
        .remove(0)
    };
    let want = run(ShardingStrategy::FullShard, 1);
    for (strategy, ranks) in worlds().filter(|(_, ranks)| *ranks != 3) {
        assert!(run(strategy, ranks) == want, "{strategy}, {ranks} ranks");
    }
}

#[test]
fn a_panic_or_an_error_inside_a_scope_still_shards_again() {
    world(2, |group| {
        let rank = group.rank();
        let mut model = sharded(group, ShardingStrategy::FullShard);
        // Rank 1 panics in a scope that rank 0 leaves as usual.
        let left = catch_unwind(AssertUnwindSafe(|| {
            let mut scope = model.gather_mut(Which::Paths(&[BIAS]), 1).expect("gathered");
            scope.values_mut(BIAS).expect("held").fill(7.0);
            assert_eq!(rank, 0, "inside the scope");
        }));
        assert_eq!(left.is_err(), rank == 1);
        assert!(of(&params(&mut model), BIAS).iter().all(|b| *b == 7.0));
        let fails = |model: &ShardedModel<Net>| -> Result<(), String> {
            let mut scope = model.gather_mut(Which::Paths(&[BIAS]), 0).expect("gathered");
            scope.values_mut(BIAS).expect("held").fill(8.0);
            Err("an error".to_string())
        };
        assert!(fails(&model).is_err());
        assert!(of(&params(&mut model), BIAS).iter().all(|b| *b == 8.0));
        step(&mut model, 0, Net::loss);
        // A panic in a read scope leaves nothing behind either: a write scope may follow.
        let read = catch_unwind(AssertUnwindSafe(|| {
            let _scope = model.gather(Which::All).expect("gathered");
            panic!("inside the scope");
        }));
        assert!(read.is_err());
        model.gather_mut(Which::All, 0).expect("alone").close().expect("sharded again");
    });
}

#[test]
fn read_scopes_overlap_and_a_write_scope_is_alone() {
    world(3, |group| {
        let rank = group.rank();
        let model = sharded(group, ShardingStrategy::FullShard);
        let whole = model.gather(Which::All).expect("gathered");
        let unit = model.gather(Which::Unit("blocks.1")).expect("reads overlap");
        assert_eq!(whole.values(BIAS).expect("held"), unit.values(BIAS).expect("held"));
        drop(whole);
        assert!(unit.values(WEIGHT).is_ok(), "the inner scope outlives the outer");
        // Only rank 2 still reads: the write scope is refused on all ranks nevertheless.
        let unit = (rank == 2).then_some(unit);
        let error = model.gather_mut(Which::Paths(&[BIAS, "norm.gamma"]), 0).expect_err("overlaps");
        assert_eq!(
            error,
            ShardError::ScopeOverlap { call: "gather_mut", paths: vec![BIAS.to_string()], ranks: vec![2] }
        );
        assert!(error.to_string().contains("[\"blocks.1.up.bias\"]"), "{error}");
        drop(unit);
        let write = model.gather_mut(Which::Unit("blocks.1"), 0).expect("alone");
        let apart = model.gather_mut(Which::Unit("blocks.0"), 1).expect("another unit");
        let error = model.gather(Which::All).expect_err("a write scope is open");
        let ShardError::ScopeOverlap { paths, ranks, .. } = &error else { panic!("{error}") };
        assert_eq!((paths.len(), ranks.as_slice()), (12, [0, 1, 2].as_slice()));
        assert!(matches!(model.gather_mut(Which::Paths(&[WEIGHT]), 0), Err(ShardError::ScopeOverlap { .. })));
        model.gather(Which::Unit("blocks.2")).expect("what no one writes can be read");
        drop((write, apart));
        model.gather(Which::All).expect("all scopes are closed");
    });
}

#[test]
fn ranks_that_ask_for_different_scopes_are_told() {
    let errors = world(2, |group| {
        let rank = group.rank();
        let model = sharded(group, ShardingStrategy::FullShard);
        let which = [Which::Paths(&[WEIGHT]), Which::Paths(&[BIAS])][rank];
        let lists = model.gather(which).expect_err("other lists").to_string();
        let kinds = if rank == 0 {
            model.gather(Which::All).map(drop)
        } else {
            model.gather_mut(Which::All, 1).map(drop)
        };
        let kinds = kinds.expect_err("a read and a write scope").to_string();
        let unknown = [Which::Paths(&["nothing"]), Which::Paths(&[BIAS])][rank];
        let unknown = model.gather(unknown).expect_err("one rank cannot").to_string();
        let modifier = model.gather_mut(Which::All, 2).expect_err("no such rank").to_string();
        // The ranks are still together.
        model.gather(Which::All).expect("gathered");
        [lists, kinds, unknown, modifier]
    });
    for [lists, kinds, unknown, modifier] in &errors {
        assert!(lists.contains("rank 0") && lists.contains(WEIGHT) && lists.contains(BIAS), "{lists}");
        assert!(kinds.contains("rank 0 calls gather of") && kinds.contains("modifier_rank 1"), "{kinds}");
        assert!(unknown.contains("no parameter `nothing`"), "{unknown}");
        assert!(modifier.contains("modifier_rank 2 is not one of the 2 ranks"), "{modifier}");
    }
    assert!(errors[1][2].contains("rank 0 could not"), "{}", errors[1][2]);
}

/// Fact L15, reference fact 43.
#[test]
fn summon_full_params_honours_its_options() {
    for (strategy, ranks) in worlds() {
        world(ranks, |group| {
            let rank = group.rank();
            let mut model = sharded(group, strategy);
            let before = params(&mut model);
            let held = model.ledger();
            let options = SummonOptions::default();
            let mut scope = model.summon_full_params(options).expect("summoned");
            assert_eq!(scope.values(WEIGHT).expect("held"), of(&before, WEIGHT));
            scope.values_mut(WEIGHT).expect("held").fill(5.0);
            assert_eq!(scope.gradient(WEIGHT).expect("held"), None, "not asked for");
            drop(scope);
            assert!(params(&mut model) == before, "edits are lost");

            let mut scope =
                model.summon_full_params(SummonOptions { writeback: true, ..options }).expect("summoned");
            scope.values_mut(WEIGHT).expect("held").fill(6.0);
            drop(scope);
            assert!(of(&params(&mut model), WEIGHT).iter().all(|w| *w == 6.0), "edits are kept");

            let scope =
                model.summon_full_params(SummonOptions { rank0_only: true, ..options }).expect("summoned");
            match scope.values(WEIGHT) {
                Ok(values) => assert!(rank == 0 && values.iter().all(|w| *w == 6.0)),
                Err(error) => {
                    assert!(rank > 0 && error.to_string().contains("holds on this rank"), "{error}");
                }
            }
            drop(scope);
            let both = SummonOptions { rank0_only: true, writeback: true, ..options };
            let error = model.summon_full_params(both).expect_err("contradictory").to_string();
            assert!(error.contains("rank0_only") && error.contains("writeback"), "{error}");
            for purpose in shardwise_core::Purpose::ALL {
                // What stays is the pool of buffers, no more than a unit needs.
                assert!(model.ledger().held(purpose) >= held.held(purpose));
            }
        });
    }
}

#[test]
fn full_gradients_are_those_of_the_last_step() {
    let run = |strategy, ranks| {
        world(ranks, |group| {
            let mut model = sharded(group, strategy);
            let options = SummonOptions { with_grads: true, ..SummonOptions::default() };
            let early = model.summon_full_params(options).expect("summoned");
            assert_eq!(early.gradient(WEIGHT).expect("held"), None, "no step yet");
            drop(early);
            step(&mut model, 0, Net::loss);
            let scope = model.summon_full_params(options).expect("summoned");
            let paths: Vec<String> = scope.paths().map(str::to_string).collect();
            let of = |path: &String| {
                let gradient = scope.gradient(path).expect("held").expect("trained");
                (path.clone(), scope.shape(path).expect("held").to_vec(), gradient.to_vec())
            };
            let gradients: Params = paths.iter().map(of).collect();
            drop(scope);
            // Looking changes nothing: the next step is the same.
            (gradients, step(&mut model, 1, Net::loss))
        })
        .remove(0)
    };
    let want = run(ShardingStrategy::FullShard, 1);
    for (strategy, ranks) in worlds().filter(|(_, ranks)| *ranks != 3) {
        assert!(run(strategy, ranks) == want, "{strategy}, {ranks} ranks");
    }
    // Against plain Burn: one step of descent is the gradient times the rate.
    let device = Device::flex().autodiff();
    let initial = world(1, |group| params(&mut sharded(group, ShardingStrategy::FullShard))).remove(0);
    let after = common::plain_descent(Net::new(&device), &initial, 1, Net::loss);
    for ((path, _, a), (_, _, b)) in initial.iter().zip(&after) {
        let (_, _, gradient) = want.0.iter().find(|(p, ..)| p == path).expect("known");
        for ((a, b), g) in a.iter().zip(b).zip(gradient) {
            assert!(((a - b) / 0.01 - g).abs() < 1e-4, "{path}: {} {g}", (a - b) / 0.01);
        }
    }
}

/// Muon needs the gradient's memory for its directions: no gradient is shown, rather than something else.
#[test]
fn what_muon_has_used_up_is_not_shown() {
    world(2, |group| {
        let device = Device::flex().autodiff();
        let mut config = config(ShardingStrategy::FullShard);
        config.engine.optimizer = shardwise_engine::OptimizerConfig::MUON;
        let mut model = ShardedModel::new(group, Net::new(&device), config, &()).expect("sharded");
        step(&mut model, 0, Net::loss);
        let options = SummonOptions { with_grads: true, ..SummonOptions::default() };
        let scope = model.summon_full_params(options).expect("summoned");
        assert_eq!(scope.gradient(WEIGHT).expect("held"), None);
        assert!(scope.gradient("norm.gamma").expect("held").is_some(), "the root has no such matrix");
    });
}

/// A scope's module is a plain Burn module with the scope's values, of which nothing is shared with the sharded one.
#[test]
fn a_scope_gives_a_plain_module() {
    world(2, |group| {
        let mut model = sharded(group, ShardingStrategy::FullShard);
        let plain = Device::flex();
        let (ids, targets) = batch(0, 0, &plain);
        let evaluated = model.evaluate(|net| net.loss(ids.clone(), targets.clone())).expect("evaluated");
        let module = model.gather(Which::All).expect("gathered").module();
        step(&mut model, 0, Net::loss);
        // Outside any step and scope, with the values of its time.
        module.loss(ids, targets).into_data().assert_eq(&evaluated.into_data(), true);
    });
}

/// O7, H18, reference fact 43: a scope shows the f32 masters under mixed precision, and an edit makes the rounded copies
/// stale: the next step computes with it.
#[test]
fn under_mixed_precision_a_scope_is_of_the_masters() {
    let mut low = config(ShardingStrategy::FullShard);
    low.engine.precision.param_dtype = Precision::Bf16;
    for strategy in STRATEGIES {
        low.engine.strategy = strategy;
        let run = |ranks| {
            world(ranks, |group| {
                let device = Device::flex().autodiff();
                let mut model = ShardedModel::new(group, Net::new(&device), low, &()).expect("sharded");
                // The rounded copies are made, and then stale.
                step(&mut model, 0, Net::loss);
                let mut scope = model.gather_mut(Which::Paths(&[WEIGHT]), 0).expect("gathered");
                let values = scope.values_mut(WEIGHT).expect("held");
                assert!(values.iter().any(|v| v.to_bits() & 0xffff != 0), "not rounded");
                values.fill(0.0);
                drop(scope);
                (step(&mut model, 1, Net::loss), params(&mut model))
            })
            .remove(0)
        };
        let want = run(1);
        for ranks in [2, 4] {
            assert!(run(ranks) == want, "{strategy}, {ranks} ranks");
        }
        // Without the edit the loss is another.
        let differs = world(2, |group| {
            let device = Device::flex().autodiff();
            let mut model = ShardedModel::new(group, Net::new(&device), low, &()).expect("sharded");
            step(&mut model, 0, Net::loss);
            let unedited = step(&mut model, 1, Net::loss);
            unedited != want.0
        });
        assert!(differs[0], "{strategy}: the edit shows");
    }
}

/// Options decide which collectives follow, so ranks agree on them before: a difference or a refusal is a typed error on
/// every rank, and the ranks stay together.
#[test]
fn ranks_agree_on_options_too() {
    world(3, |group| {
        let rank = group.rank();
        let mut model = sharded(group, ShardingStrategy::FullShard);
        step(&mut model, 0, Net::loss);
        let plain = SummonOptions::default();
        for other in [
            SummonOptions { with_grads: true, ..plain },
            SummonOptions { rank0_only: true, ..plain },
            SummonOptions { writeback: true, ..plain },
        ] {
            let options = if rank == 0 { other } else { plain };
            let error = model.summon_full_params(options).map(drop).expect_err("they differ");
            assert!(matches!(error, ShardError::ScopesDiffer { ranks: [0, 1], .. }), "{error}");
            let text = error.to_string();
            let names = ["with_grads", "rank0_only", "writeback"];
            assert!(names.iter().any(|name| text.contains(name)), "{text}");
        }
        // A combination that is refused on one rank.
        let refused = SummonOptions { rank0_only: true, writeback: true, ..plain };
        let options = if rank == 1 { refused } else { plain };
        let error = model.summon_full_params(options).map(drop).expect_err("refused");
        match rank {
            1 => assert_eq!(error, ShardError::Rank0OnlyWriteback),
            _ => assert!(matches!(error, ShardError::ScopeOfPeer { rank: 1, .. }), "{error}"),
        }
        let error = model.summon_full_params(refused).map(drop).expect_err("refused");
        assert_eq!(error, ShardError::Rank0OnlyWriteback);
        let options = SummonOptions { with_grads: true, ..plain };
        assert!(
            model.summon_full_params(options).expect("the same").gradient(WEIGHT).expect("held").is_some()
        );
        step(&mut model, 1, Net::loss);
    });
}
