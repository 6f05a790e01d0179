//! Where things rest: said once, seen through scopes, kept when the model is laid out anew, and told of when a disk fails.

mod common;

use std::path::{Path, PathBuf};

use burn::module::Module;
use burn::tensor::Device;
use common::away::{Rich, TIERS, bits, held_out, offload, one_step, place, resting};
use common::{Net, Params, config, descent, params, sorted, step, world};
use shardwise_burn::{Init, ShardConfig, ShardError, Sharded, ShardedModel, SummonOptions, Which};
use shardwise_comm::ProcessGroup;
use shardwise_core::{Precision, Purpose, ShardingStrategy, Tier};
use shardwise_engine::{EngineError, SwapPlace};
use shardwise_tier::testing::{Fault, Faults};

fn shard(init: &Init, group: ProcessGroup) -> Result<ShardedModel<Rich>, ShardError> {
    init.shard(group, Rich::new(&Device::flex().autodiff()), &())
}

/// The errors of all ranks when each takes the model apart as `init` says for it.
fn refused(ranks: usize, init: impl Fn(usize) -> Init + Sync + Send) -> Vec<String> {
    let errors = world(ranks, |group| {
        let rank = group.rank();
        shard(&init(rank), group).map(drop).expect_err("refused").to_string()
    });
    assert_eq!(errors.len(), ranks);
    errors
}

/// The folders of the runs of this place that are there.
fn folders(place: &SwapPlace) -> Vec<PathBuf> {
    let own = format!("shardwise-{}", place.run);
    let all = std::fs::read_dir(&place.path).expect("the place").map(|f| f.expect("a folder").path());
    all.filter(|f| f.file_name().is_some_and(|n| n.to_string_lossy().starts_with(&own))).collect()
}

fn files(folder: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(folder).expect("a folder").map(|f| f.expect("a file").path()).collect()
}

/// I3: the tier is said by the configuration or by the `Init`; a contradiction names both, and files need a place.
#[test]
fn where_parameters_rest_is_said_once() {
    let with = |parameters| {
        let mut config = config(ShardingStrategy::FullShard);
        config.engine.offload = offload(parameters, Tier::None);
        Init::new(config)
    };
    for (remote, configured) in [
        (Tier::Nvme, Tier::Host),
        (Tier::Host, Tier::Nvme),
        (Tier::None, Tier::Host),
        (Tier::None, Tier::Nvme),
    ] {
        let at = place();
        for error in refused(2, |_| with(configured).remote_device(remote).swap_at(at.clone())) {
            let both = [format!("remote_device is \"{remote}\""), format!("parameters is \"{configured}\"")];
            assert!(both.iter().all(|part| error.contains(part)), "{error}");
        }
        assert!(folders(&at).is_empty());
    }
    // Ranks that say different things are told, both ways of saying it.
    for init in [(|rank| if rank == 1 { Tier::Host } else { Tier::None }) as fn(usize) -> Tier, |rank| {
        if rank == 0 { Tier::Host } else { Tier::None }
    }] {
        for error in refused(2, |rank| with(Tier::None).remote_device(init(rank))) {
            assert!(error.contains("remote_device") && error.contains("host"), "{error}");
            assert!(error.contains("rank 0") && error.contains("rank 1"), "{error}");
        }
    }
    // Files without a place, whoever asked for them.
    let optimizer_only = || {
        let mut config = config(ShardingStrategy::FullShard);
        config.engine.offload = offload(Tier::None, Tier::Nvme);
        Init::new(config)
    };
    for init in [with(Tier::Nvme), with(Tier::None).remote_device(Tier::Nvme), optimizer_only()] {
        for error in refused(2, |_| init.clone()) {
            assert!(error.contains("offload.path") && error.contains("swap_at"), "{error}");
        }
    }
    // Said twice alike, or by the `Init` alone, it is where the parameters rest.
    for tier in TIERS {
        for init in [with(tier), with(tier).remote_device(tier), with(Tier::None).remote_device(tier)] {
            let init = init.swap_at(place());
            let traffic = world(2, |group| {
                let mut model = shard(&init, group).expect("sharded");
                one_step(&mut model, 2, 0);
                model.tier_traffic()
            });
            for traffic in traffic {
                let (used, other) = if tier == Tier::Host {
                    (traffic.host, traffic.nvme)
                } else {
                    (traffic.nvme, traffic.host)
                };
                assert!(used.read_bytes > 0 && used.written_bytes > 0 && other.read_bytes == 0, "{tier}");
            }
        }
    }
}

/// Everything that a rank sees of a model in between steps.
#[derive(Debug, PartialEq)]
struct Seen {
    values: Vec<Vec<u32>>,
    gradient: Option<Vec<u32>>,
    averages: (u64, Vec<Vec<u32>>),
    versions: Vec<u64>,
    statistics: Vec<(String, &'static str, Vec<u32>)>,
}

const PATHS: [&str; 3] = ["stages.0.first.up.weight", "adapted.up.weight", "embed.weight"];

fn exported(model: &mut ShardedModel<Rich>) -> Vec<Vec<u32>> {
    sorted(params(model)).iter().map(|(.., values)| bits(values)).collect()
}

fn look(init: &Init, ranks: usize) -> Vec<Seen> {
    world(ranks, |group| {
        let rank = group.rank();
        let mut model = shard(init, group).expect("sharded");
        let (mut values, mut versions) = (exported(&mut model), Vec::new());
        let first = model.version();
        one_step(&mut model, 3, 0);
        let scope = model.gather(Which::Paths(&PATHS)).expect("gathered");
        // A scope in a scope, of a unit that is gathered for another.
        let inner = model.gather(Which::Unit("stages.0.first")).expect("gathered");
        assert_eq!(inner.values(PATHS[0]).expect("held"), scope.values(PATHS[0]).expect("held"));
        values.extend(PATHS.map(|path| bits(scope.values(path).expect("held"))));
        drop((inner, scope));
        versions.push(model.version() - first);
        // The last rank's edits reach all, of frozen parameters too.
        let mut scope = model.gather_mut(Which::Paths(&PATHS), ranks - 1).expect("gathered");
        for path in PATHS {
            let add = rank as f32;
            scope.values_mut(path).expect("held").iter_mut().for_each(|v| *v = *v * 0.5 + add);
        }
        scope.close().expect("sharded again");
        one_step(&mut model, 3, 1);
        let options = SummonOptions { with_grads: true, ..SummonOptions::default() };
        let mut scope = model.summon_full_params(options).expect("summoned");
        let gradient = scope.gradient(PATHS[0]).expect("held").map(bits);
        // What a scope holds is its own: nothing stays gathered for it, and edits without writeback are lost.
        let held = model.ledger();
        let copies: usize = scope.paths().map(|path| scope.values(path).expect("held").len()).sum();
        assert!((copies * size_of::<f32>()) as u64 > held.peak(Purpose::GatheredUnits) / 2);
        scope.values_mut(PATHS[0]).expect("held").fill(9.0);
        let plain = scope.module();
        drop(scope);
        let mut scope = model
            .summon_full_params(SummonOptions { writeback: true, ..SummonOptions::default() })
            .expect("summoned");
        scope.values_mut("last.norm.gamma").expect("held").fill(1.5);
        drop(scope);
        one_step(&mut model, 3, 2);
        // A module that a scope has given lives on, with the values of then.
        let frozen_in_time = plain.stages[0].inner().first.inner().up.weight.val().into_data();
        assert!(frozen_in_time.iter::<f32>().all(|v| v == 9.0));
        versions.push(model.version() - first);
        let averages = model.with_averages(|model| {
            Ok::<_, ShardError>((held_out(model, 0..rank).to_bits(), exported(model)))
        });
        values.extend(exported(&mut model));
        let mut statistics = Vec::new();
        model.each_state(|s| statistics.push((s.path.to_string(), s.name, bits(s.values)))).expect("idle");
        statistics.sort();
        Seen { values, gradient, averages: averages.expect("averages"), versions, statistics }
    })
}

/// L15, L2: scopes, exports, averages and statistics show what rests elsewhere as they show what is in memory, and what they
/// write reaches it.
#[test]
fn scopes_see_and_change_what_rests_elsewhere() {
    for (strategy, precision) in [
        (ShardingStrategy::FullShard, Precision::F32),
        (ShardingStrategy::NoShard, Precision::F32),
        (ShardingStrategy::FullShard, Precision::Bf16),
    ] {
        for ranks in [1, 3] {
            let mut config = ShardConfig { recompute: true, ..config(strategy) };
            config.engine.ema_decay = Some(0.9);
            config.engine.precision.param_dtype = precision;
            let want = look(&Init::new(config), ranks);
            for tier in TIERS {
                for (got, want) in look(&resting(config, tier), ranks).iter().zip(&want) {
                    let what = format!("{strategy}, {precision:?}, {ranks} ranks, {tier}");
                    assert_eq!(got.versions, want.versions, "{what}: versions");
                    assert!(got.values == want.values, "{what}: values");
                    assert!(got.gradient == want.gradient, "{what}: gradient");
                    assert!(got.averages == want.averages, "{what}: averages");
                    assert!(got == want, "{what}: statistics");
                }
            }
        }
    }
}

/// L2: after a step what rests elsewhere is the truth. What is read between steps is read there, so a file that was changed
/// behind the engine's back is noticed, on all ranks, by whatever looks first.
#[test]
fn what_is_read_between_steps_comes_from_where_it_rests() {
    for tier in TIERS {
        let init = resting(config(ShardingStrategy::FullShard), tier);
        world(2, |group| {
            let mut model = shard(&init, group).expect("sharded");
            one_step(&mut model, 2, 0);
            let read = |model: &ShardedModel<Rich>| {
                let traffic = model.tier_traffic();
                traffic.host.read_bytes + traffic.nvme.read_bytes
            };
            let before = read(&model);
            let scope = model.gather(Which::Unit("last")).expect("gathered");
            drop(scope);
            let layouts = model.layouts();
            let shards: usize = layouts.iter().filter(|l| l.unit() == "last").map(|l| l.shard_numel()).sum();
            assert_eq!(read(&model) - before, (shards * size_of::<f32>()) as u64, "{tier}: one shard, once");
            let before = read(&model);
            params(&mut model);
            let all: usize = layouts.iter().map(|l| l.shard_numel()).sum();
            assert_eq!(read(&model) - before, (all * size_of::<f32>()) as u64, "{tier}: every shard, once");
        });
    }
    type Look = fn(&mut ShardedModel<Rich>) -> Result<(), ShardError>;
    let looks: [(&str, Look); 4] = [
        ("export", |model| model.export(|_, _, _| ())),
        ("gather", |model| model.gather(Which::All).map(drop)),
        ("evaluate", |model| {
            let (ids, targets) = common::batch(0, 0, &Device::flex());
            model.evaluate(|rich| rich.loss(ids, targets)).map(drop)
        }),
        ("step", |model| {
            let device = Device::flex().autodiff();
            let loss = |rich: &Rich, m| {
                let (ids, targets) = common::batch(m, 0, &device);
                rich.loss(ids, targets)
            };
            model.step(2, 0.1, loss).map(drop)
        }),
    ];
    for (name, look) in looks {
        let at = place();
        let mut config = config(ShardingStrategy::FullShard);
        config.engine.offload = offload(Tier::Nvme, Tier::None);
        let init = Init::new(config).swap_at(at.clone());
        let errors = world(2, |group| {
            let (rank, barrier) = (group.rank(), group.clone());
            let mut model = shard(&init, group).expect("sharded");
            one_step(&mut model, 2, 0);
            // The last write is on its way no longer once it has been read back.
            params(&mut model);
            barrier.barrier("written").expect("all are well");
            if rank == 1 {
                let folder = &folders(&at)[0].join("rank-1");
                for file in files(folder).into_iter().filter(|f| f.is_file()) {
                    let mut bytes = std::fs::read(&file).expect("readable");
                    bytes.iter_mut().for_each(|b| *b ^= 1);
                    std::fs::write(&file, bytes).expect("writable");
                }
            }
            barrier.barrier("changed").expect("all are well");
            look(&mut model).expect_err(name)
        });
        assert!(
            matches!(&errors[1], ShardError::Engine(EngineError::Tier { rank: 1, .. })),
            "{:?}",
            errors[1]
        );
        for error in errors {
            let text = error.to_string();
            assert!(text.contains("rank-1") && text.contains("offset"), "{name}: {text}");
        }
        assert!(folders(&at).is_empty(), "{name}: nothing is left behind");
    }
}

/// A failing disk is an error of the user's step on every rank, with the file and the rank.
#[test]
fn a_failing_tier_is_told_with_file_and_rank() {
    let (at, faults) = (place(), Faults::new());
    let errors = world(2, |group| {
        let rank = group.rank();
        let place = SwapPlace { faults: (rank == 1).then(|| faults.clone()), ..at.clone() };
        let mut config = config(ShardingStrategy::FullShard);
        config.engine.offload = offload(Tier::Nvme, Tier::Nvme);
        let mut model = shard(&Init::new(config).swap_at(place), group).expect("sharded");
        one_step(&mut model, 2, 0);
        if rank == 1 {
            faults.arm(Fault::ReadError { nth: 5 });
        }
        let device = Device::flex().autodiff();
        let loss = |rich: &Rich, m| {
            let (ids, targets) = common::batch(m, 1, &device);
            rich.loss(ids, targets)
        };
        let error = model.step(2, 0.1, loss).expect_err("the disk fails");
        // What follows is the same error: nobody knows any more what rests there.
        assert_eq!(model.export(|_, _, _| ()).expect_err("failed before"), error);
        error
    });
    for error in errors {
        let text = error.to_string();
        assert!(matches!(error, ShardError::Engine(_)), "{text}");
        for part in ["rank 1", "rank-1", "reading"] {
            assert!(text.contains(part), "{text:?} lacks {part:?}");
        }
    }
}

/// Freezing and unfreezing lays out anew what rests elsewhere: two engines of one run are there for a moment, and one folder
/// in the end. The rule about statistics is unchanged.
#[test]
fn freezing_lays_out_anew_what_rests_elsewhere() {
    let run = |init: &Init, at: Option<&SwapPlace>| {
        world(2, |group| {
            let barrier = group.clone();
            let mut model = init.shard(group, Net::new(&Device::flex().autodiff()), &()).expect("sharded");
            let mut all: Vec<(u64, Params)> = Vec::new();
            let choices: [fn(&str) -> bool; 4] =
                [|p| p.starts_with("norm"), |_| true, |p| !p.starts_with("blocks.1"), |_| true];
            for (index, trained) in choices.into_iter().enumerate() {
                model.set_trainable(trained).expect("chosen");
                barrier.barrier("chosen").expect("all are well");
                if let Some(at) = at {
                    assert_eq!(folders(at).len(), 1, "the old engine's folder is gone");
                }
                barrier.barrier("looked").expect("all are well");
                let loss = step(&mut model, index, Net::loss);
                all.push((loss, sorted(params(&mut model))));
            }
            all
        })
    };
    let config_of = |tier| {
        let mut config = descent(ShardingStrategy::FullShard);
        config.engine.offload = offload(tier, tier);
        Init::new(config)
    };
    let want = run(&config_of(Tier::None), None);
    assert!(run(&config_of(Tier::Host), None) == want, "host");
    let at = place();
    assert!(run(&config_of(Tier::Nvme).swap_at(at.clone()), Some(&at)) == want, "nvme");
    assert!(folders(&at).is_empty());
    for tier in TIERS {
        let init = resting(config(ShardingStrategy::FullShard), tier);
        world(2, |group| {
            let mut model = init.shard(group, Net::new(&Device::flex().autodiff()), &()).expect("sharded");
            model.set_trainable(|path| path.starts_with("blocks")).expect("before the first update");
            step(&mut model, 0, Net::loss);
            let error = model.set_trainable(|_| true).expect_err("statistics");
            assert_eq!(error, ShardError::StatisticsInUse, "{tier}");
            step(&mut model, 1, Net::loss);
        });
    }
}

/// I1, I3: pieces that are taken apart while the model is built rest where parameters do: on nvme they take no memory.
#[test]
fn pieces_rest_where_parameters_do() {
    let run = |init: &Init, tier, at: &SwapPlace| {
        world(2, |group| {
            let device = Device::flex().autodiff();
            let barrier = group.clone();
            let mut context = init.context(group);
            let mut rich = Rich::new(&device);
            let inner = |stage: &Sharded<common::away::Stage>| stage.inner().clone();
            for index in 0..2 {
                let prefix = format!("stages.{index}");
                let stage = context.partition(&prefix, inner(&rich.stages[index]), &()).expect("partitioned");
                rich.stages[index] = Sharded::new(stage);
            }
            let last = context.partition("last", rich.last.inner().clone(), &()).expect("partitioned");
            rich.last = Sharded::new(last);
            assert!(context.num_partitioned() > 20);
            let whole = rich.stages[0].inner().num_params();
            if tier == Tier::Nvme {
                assert_eq!(context.bytes_in_memory(), 0);
                let there = files(&folders(at)[0].join("rank-0")).len();
                // A parameter of which a rank keeps nothing has none.
                let most = context.num_partitioned() + 1;
                assert!(there > 3 && there <= most, "a file for each shard, and a lock: {there}");
            } else {
                assert!(context.bytes_in_memory() >= whole * size_of::<f32>() / 2);
            }
            barrier.barrier("looked").expect("all are well");
            let mut model = context.shard(rich, &()).expect("sharded");
            barrier.barrier("sharded").expect("all are well");
            if tier == Tier::Nvme {
                assert_eq!(folders(at).len(), 1, "the pieces' folder is gone");
            }
            barrier.barrier("looked again").expect("all are well");
            let before = exported(&mut model);
            let losses: Vec<[u64; 3]> = (0..2).map(|index| one_step(&mut model, 3, index)).collect();
            (before, losses, exported(&mut model))
        })
    };
    let base = config(ShardingStrategy::FullShard);
    let want = world(2, |group| {
        let mut model = shard(&Init::new(base), group).expect("sharded");
        let before = exported(&mut model);
        let losses: Vec<[u64; 3]> = (0..2).map(|index| one_step(&mut model, 3, index)).collect();
        (before, losses, exported(&mut model))
    });
    for tier in [Tier::None, Tier::Host, Tier::Nvme] {
        let mut config = base;
        config.engine.offload = offload(Tier::None, Tier::None);
        let at = place();
        let init = Init::new(config).remote_device(tier).swap_at(at.clone());
        for policy in [shardwise_burn::InitialValues::Trusted, shardwise_burn::InitialValues::Synced] {
            assert!(run(&init.clone().initial_values(policy), tier, &at) == want, "{tier}, {policy:?}");
            assert!(folders(&at).is_empty());
        }
    }
    // Mistakes show with the first piece, on all ranks.
    let init = Init::new(base).remote_device(Tier::Nvme);
    let errors = world(2, |group| {
        let mut context = init.context(group);
        let rich = Rich::new(&Device::flex().autodiff());
        context.partition("", rich, &()).map(drop).expect_err("no place").to_string()
    });
    assert!(errors.iter().all(|error| error.contains("swap_at")), "{errors:?}");
    // A disk that fails is told to all, and named.
    let (at, faults) = (place(), Faults::new());
    let errors = world(2, |group| {
        let rank = group.rank();
        if rank == 1 {
            faults.arm(Fault::DiskFull { after_bytes: 4096 });
        }
        let place = SwapPlace { faults: (rank == 1).then(|| faults.clone()), ..at.clone() };
        let mut context = Init::new(base).remote_device(Tier::Nvme).swap_at(place).context(group);
        let rich = Rich::new(&Device::flex().autodiff());
        let partitioned = context.partition("", rich, &());
        // A write that runs behind is told of by the next call.
        let result = partitioned.and_then(|rich| context.shard(rich, &()).map(drop));
        result.expect_err("the disk is full").to_string()
    });
    for error in errors {
        assert!(error.contains("rank-1") && error.contains("the disk is full"), "{error}");
    }
    assert!(folders(&at).is_empty());
}
