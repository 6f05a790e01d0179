//! A disk that fails ends the step on every rank with an error that says where; a disk that is slow or stubborn changes
//! nothing.

mod common;

use std::path::Path;
use std::time::Duration;

use common::{ADAMW, DEADLINE, SGD, Toy, compute_step, config, full_params, place};
use shardwise_comm::threads;
use shardwise_core::{Offload, ShardingStrategy, Tier};
use shardwise_engine::{Engine, EngineConfig, EngineError, SwapPlace, UnitId};
use shardwise_tier::testing::{Fault, Faults};
use shardwise_tier::{IoConfig, IoMethod};

fn on_disk() -> EngineConfig {
    let offload = Offload {
        parameters: Tier::Nvme,
        optimizer: Tier::Nvme,
        buffer_numel: 1024,
        least_numel: 0,
        ..Offload::default()
    };
    EngineConfig { offload, ..config(ShardingStrategy::FullShard, ADAMW) }
}

fn toy() -> Toy {
    let unit = vec![vec![3, 5], vec![2500], vec![17]];
    Toy { units: vec![unit; 2], last_unused: false, ..Toy::new(2) }
}

/// A folder of the test's own, in which ranks keep their files with these faults.
fn place_with(folder: &Path, faults: &Faults, method: IoMethod) -> SwapPlace {
    let io = IoConfig { method, ..IoConfig::default() };
    SwapPlace { path: folder.to_path_buf(), run: "faults".into(), io, faults: Some(faults.clone()) }
}

fn scratch(name: &str) -> std::path::PathBuf {
    let folder = std::env::temp_dir().join(format!("shardwise-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    folder
}

/// What a rank's engine comes to when `break_it` happens on rank 1 after the first step.
fn second_step(
    method: IoMethod,
    folder: &Path,
    break_it: impl Fn(&Faults, &Path) + Sync,
) -> Vec<Result<(), EngineError>> {
    threads::run(2, DEADLINE, |group| {
        let (rank, faults) = (group.rank(), Faults::new());
        let barrier = group.clone();
        let at = place_with(folder, &faults, method);
        let mut engine = toy().engine_at(group, on_disk(), Some(&at)).expect("an engine");
        compute_step(&mut engine, 2, 0.05).expect("a step");
        barrier.barrier("one step").expect("all are well");
        if rank == 1 {
            break_it(&faults, &folder.join("shardwise-faults").join("rank-1"));
        }
        // An error of a write that runs behind shows in the step or with whoever reads next.
        let result = compute_step(&mut engine, 2, 0.05).map(drop);
        result.and_then(|()| {
            for id in engine.ids().collect::<Vec<_>>() {
                engine.with_full_params(id, |_, _| ())?;
            }
            Ok(())
        })
    })
    .expect("a world")
}

#[test]
fn a_failing_disk_is_an_error_on_all_ranks_that_says_where() {
    type Breaks = fn(&Faults, &Path);
    let cases: [(&str, Breaks, &[&str]); 7] = [
        ("EIO while reading", |f, _| f.arm(Fault::ReadError { nth: 3 }), &["reading", "at offset"]),
        ("EIO while writing", |f, _| f.arm(Fault::WriteError { nth: 2 }), &["writing", "at offset"]),
        ("disk full", |f, _| f.arm(Fault::DiskFull { after_bytes: 9000 }), &["the disk is full", "free"]),
        ("a flipped bit", |f, _| f.arm(Fault::FlipBit { nth: 1, bit: 77 }), &["offset"]),
        ("an early end", |f, _| f.arm(Fault::EndOfFile { nth: 2 }), &["offset"]),
        (
            "truncated files",
            |_, folder| {
                each_file(folder, |f| {
                    std::fs::File::options().write(true).open(f).and_then(|f| f.set_len(512)).expect("cut")
                })
            },
            &["offset"],
        ),
        (
            "deleted files",
            |_, folder| each_file(folder, |f| std::fs::remove_file(f).expect("deleted")),
            &["delete"],
        ),
    ];
    for method in [IoMethod::Auto, IoMethod::Threads] {
        for (name, breaks, words) in &cases {
            let folder = scratch("offload-faults");
            let results = second_step(method, &folder, breaks);
            let error = |rank: usize| results[rank].clone().expect_err(&format!("{name} on rank {rank}"));
            let (other, own) = (error(0), error(1));
            assert!(matches!(&own, EngineError::Tier { rank: 1, .. }), "{name}: {own}");
            let (other, own) = (other.to_string(), own.to_string());
            for word in words.iter().chain(&["rank-1"]) {
                assert!(own.contains(word), "{name}: {own:?} lacks {word:?}");
                assert!(other.contains(word), "{name}: rank 0 says {other:?}, without {word:?}");
            }
            let left = std::fs::read_dir(&folder).expect("the folder").count();
            assert_eq!(left, 0, "{name}: nothing is left behind");
            std::fs::remove_dir(&folder).expect("empty");
        }
    }
}

fn each_file(folder: &Path, change: impl Fn(&Path)) {
    let files = std::fs::read_dir(folder).expect("the rank's folder");
    files.map(|f| f.expect("a file").path()).filter(|f| f.is_file()).for_each(|f| change(&f));
}

/// Short reads and writes are gone on with; no io_uring, no direct access and any order of completions change no bit (K6).
#[test]
fn a_slow_or_stubborn_disk_changes_no_bit() {
    let train = |faults: &(dyn Fn(usize) -> Faults + Sync), config: EngineConfig| {
        let folder = scratch("offload-slow");
        let all = threads::run(2, DEADLINE, |group| {
            let at = place_with(&folder, &faults(group.rank()), IoMethod::Auto);
            let at = config.offload.uses_files().then_some(at);
            let mut engine = toy().engine_at(group, config, at.as_ref()).expect("an engine");
            (0..3).for_each(|_| drop(compute_step(&mut engine, 4, 0.05).expect("a step")));
            full_params(&mut engine)
        })
        .expect("a world");
        std::fs::remove_dir(&folder).expect("nothing is left behind");
        all
    };
    let want = train(&|_| Faults::new(), EngineConfig { offload: Offload::default(), ..on_disk() });
    let short = |_| {
        let faults = Faults::new();
        faults.arm(Fault::ShortRead { nth: 2, bytes: 1024 });
        faults.arm(Fault::ShortWrite { nth: 2, bytes: 512 });
        faults
    };
    assert_eq!(train(&short, on_disk()), want, "short reads and writes");
    assert_eq!(train(&|_| Faults::new().without_uring(), on_disk()), want, "threads");
    assert_eq!(train(&|_| Faults::new().without_direct(), on_disk()), want, "through the cache");
    for seed in 0..20 {
        let most = Duration::from_micros(300);
        let delays = |rank: usize| Faults::new().with_delays(seed * 2 + rank as u64, most);
        assert_eq!(train(&delays, on_disk()), want, "delays, seed {seed}");
    }
}

/// What cannot work is refused before anything is trained, on all ranks, with what would work.
#[test]
fn what_cannot_work_is_refused() {
    let small = |buffer_count| {
        let base = on_disk();
        EngineConfig { offload: Offload { buffer_count, ..base.offload }, ..base }
    };
    let refused = |config: EngineConfig, at: Option<SwapPlace>| {
        let results = threads::run(2, DEADLINE, |group| {
            let at = at.clone();
            toy().engine_at(group, config, at.as_ref()).map(drop).expect_err("refused").to_string()
        });
        results.expect("a world")
    };
    // Parameters, gradient and two statistics.
    for text in refused(small(3), place(&small(3))) {
        assert!(text.contains("buffer_count is 3") && text.contains("at least 4"), "{text}");
    }
    threads::run(1, DEADLINE, |group| {
        let mut engine: Engine = toy().engine(group, small(4));
        compute_step(&mut engine, 2, 0.05).expect("as many as are needed");
    })
    .expect("a world");
    // Plain SGD reads no statistics, but sums of three rounds are merged.
    let sgd = |buffer_count| {
        let base = EngineConfig { optimizer: SGD, ..small(buffer_count) };
        EngineConfig { offload: Offload { parameters: Tier::None, ..base.offload }, ..base }
    };
    for text in refused(sgd(1), place(&sgd(1))) {
        assert!(text.contains("buffer_count is 1") && text.contains("at least 2"), "{text}");
    }
    threads::run(1, DEADLINE, |group| {
        let mut engine: Engine = toy().engine(group, sgd(2));
        compute_step(&mut engine, 3, 0.05).expect("as many as are needed");
    })
    .expect("a world");
    for text in refused(on_disk(), None) {
        assert!(text.contains("offload.path"), "{text}");
    }
    let file = scratch("offload-refused").join("file");
    std::fs::write(&file, "not a folder").expect("written");
    let at = SwapPlace { path: file.clone(), run: "refused".into(), ..SwapPlace::default() };
    for text in refused(on_disk(), Some(at)) {
        assert!(text.contains(&file.display().to_string()), "{text}");
    }
    std::fs::remove_dir_all(file.parent().expect("a folder")).expect("removed");
}

/// A rank that cannot open its files tells the others why, at once.
#[test]
fn a_rank_without_files_is_told_of() {
    let folder = scratch("offload-rank");
    let results = threads::run(2, DEADLINE, |group| {
        let rank = group.rank();
        if rank == 0 {
            let run = folder.join("shardwise-faults");
            std::fs::create_dir_all(&run).expect("a folder");
            std::fs::write(run.join("rank-1"), "in the way").expect("a file");
        }
        group.barrier("prepared").expect("all are well");
        let at = place_with(&folder, &Faults::new(), IoMethod::Auto);
        let made = toy().engine_at(group, on_disk(), Some(&at));
        made.and_then(|mut engine| compute_step(&mut engine, 2, 0.05)).expect_err("no files").to_string()
    });
    for text in results.expect("a world") {
        assert!(text.contains("rank-1"), "{text}");
    }
    std::fs::remove_dir_all(&folder).expect("removed");
}

/// Two models of one process may share a run; another process may not.
#[test]
fn two_models_of_one_run() {
    let folder = scratch("offload-two");
    threads::run(1, DEADLINE, |group| {
        let at = place_with(&folder, &Faults::new(), IoMethod::Auto);
        let mut engines: Vec<Engine> = (0..2)
            .map(|_| toy().engine_at(group.clone(), on_disk(), Some(&at)).expect("an engine"))
            .collect();
        let params: Vec<_> = engines
            .iter_mut()
            .map(|engine| {
                compute_step(engine, 1, 0.05).expect("a step");
                full_params(engine)
            })
            .collect();
        assert_eq!(params[0], params[1]);
    })
    .expect("a world");
    std::fs::remove_dir(&folder).expect("nothing is left behind");
}

/// K2: descriptors and bytes stay flat over a thousand swaps, and what is read overlaps with what computes (K8).
#[test]
fn descriptors_and_bytes_stay_flat() {
    let folder = scratch("offload-flat");
    threads::run(1, DEADLINE, |group| {
        let at = place_with(&folder, &Faults::new(), IoMethod::Auto);
        let mut engine = toy().engine_at(group, on_disk(), Some(&at)).expect("an engine");
        // Other tests have theirs in the same process.
        let ours = |link: &std::path::PathBuf| link.starts_with(&folder);
        let descriptors = || {
            let links = std::fs::read_dir("/proc/self/fd").expect("a list").flatten();
            links.filter_map(|link| std::fs::read_link(link.path()).ok()).filter(ours).count()
        };
        (0..2).for_each(|_| drop(compute_step(&mut engine, 2, 0.01).expect("a step")));
        let (fds, ledger, mut last) = (descriptors(), engine.ledger().clone(), engine.tier_traffic().nvme);
        let mut per_step = Vec::new();
        for _ in 0..60 {
            compute_step(&mut engine, 2, 0.01).expect("a step");
            let now = engine.tier_traffic().nvme;
            per_step.push((now.read_bytes - last.read_bytes, now.written_bytes - last.written_bytes));
            last = now;
        }
        assert!(per_step.iter().all(|bytes| *bytes == per_step[0]), "{per_step:?}");
        assert!(last.reads + last.writes > 1000);
        assert_eq!(descriptors(), fds);
        assert!(fds > 0);
        assert_eq!(engine.ledger(), &ledger);
    })
    .expect("a world");
    std::fs::remove_dir(&folder).expect("nothing is left behind");
}

/// Gathers of what rests elsewhere are collectives in the order of use: ranks that use different units are told so, at
/// once and all of them.
#[test]
fn ranks_that_use_different_units_are_named() {
    let errors = threads::run(2, DEADLINE, |group| {
        let rank = group.rank();
        let mut engine = toy().engine(group, on_disk());
        engine.begin_step(2).expect("idle");
        engine.begin_round().expect("a round");
        let unit = UnitId::unit(rank);
        engine.enter_forward(unit);
        engine.leave_forward(unit);
        engine.enter_backward(unit);
        engine.leave_backward(unit);
        engine.end_round().expect_err("different units").to_string()
    })
    .expect("a world");
    for text in errors {
        assert!(text.contains("rank 0") && text.contains("rank 1"), "{text}");
        assert!(text.contains("blocks.0") && text.contains("blocks.1"), "{text}");
    }
}
