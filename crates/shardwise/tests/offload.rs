//! Runs with what rests on the host and in files: the program itself, its bits, its files and its refusals.

mod common;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use common::{golden_config, shardwise, stderr, stdout, train};
use shardwise::report::Summary;

fn settings(items: &[&str]) -> Vec<String> {
    items.iter().map(|s| (*s).to_string()).collect()
}

fn path_of(folder: &Path) -> String {
    format!("offload.path={:?}", folder.display().to_string())
}

/// What is in a folder.
fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).expect("a folder");
    entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn exported_weights_do_not_depend_on_where_state_rests() {
    let folder = tempfile::tempdir().expect("a folder");
    let swap = folder.path().join("swap");
    // Small enough for tiles of one flat parameter to be several, and for nothing to stay in memory.
    let pool =
        settings(&["run.steps=6", "offload.buffer_size=1024", "offload.least_size=1", &path_of(&swap)]);
    let cases: [(&str, &[&str]); 9] = [
        ("gpt2-tiny", &["run.ranks=1", "offload.parameters=nvme", "offload.optimizer=nvme"]),
        ("gpt2-tiny", &["run.ranks=2", "offload.parameters=host", "offload.optimizer=host"]),
        (
            "gpt2-tiny",
            &["run.ranks=2", "offload.parameters=nvme", "offload.optimizer=nvme", "offload.io=threads"],
        ),
        (
            "gpt2-tiny",
            &["run.ranks=4", "offload.parameters=nvme", "offload.optimizer=nvme", "offload.pipeline=false"],
        ),
        (
            "gpt2-tiny",
            &["run.ranks=4", "offload.parameters=none", "offload.optimizer=nvme", "shard.recompute=true"],
        ),
        (
            "gpt2-tiny",
            &[
                "run.ranks=2",
                "offload.parameters=nvme",
                "shard.strategy=shard_grad_op",
                "run.transport=threads",
            ],
        ),
        (
            "gpt2-tiny",
            &["run.ranks=2", "offload.optimizer=nvme", "shard.strategy=no_shard", "offload.direct=false"],
        ),
        (
            "llama-tiny",
            &["run.ranks=2", "offload.parameters=nvme", "offload.optimizer=host", "offload.buffer_count=4"],
        ),
        (
            "llama-tiny",
            &["run.ranks=4", "offload.parameters=host", "offload.optimizer=nvme", "offload.ratio=0.5"],
        ),
    ];
    for name in ["gpt2-tiny", "llama-tiny"] {
        let config = golden_config(name, "adamw", &folder.path().join("unused"));
        let want = train(&config, &settings(&["run.steps=6", "run.ranks=2"]), &folder.path().join("run"));
        for (_, how) in cases.iter().filter(|(of, _)| *of == name) {
            let trained = train(&config, &[&settings(how)[..], &pool].concat(), &folder.path().join("run"));
            assert!(trained.weights == want.weights, "{name}, {how:?}: other weights than in memory");
            let last = trained.metrics.last().expect("steps");
            assert_eq!(last.loss, want.metrics.last().expect("steps").loss, "{name}, {how:?}");
            let rests = |tier: &str| how.iter().any(|s| s.ends_with(&format!("={tier}")));
            let moved = &last.moved;
            assert_eq!(
                moved.host_bytes_read.is_some_and(|n| n > 0),
                rests("host"),
                "{name}, {how:?}: {moved:?}"
            );
            assert_eq!(
                moved.nvme_bytes_written.is_some_and(|n| n > 0),
                rests("nvme"),
                "{name}, {how:?}: {moved:?}"
            );
            assert_eq!(moved.io_overlap.is_some(), rests("nvme"), "{name}, {how:?}: {moved:?}");
            if swap.exists() {
                assert_eq!(names(&swap), [] as [&str; 0], "{name}, {how:?}: nothing is left");
            }
        }
    }
}

/// What a run has planned, held and moved is told; without offload nothing of it is.
#[test]
fn reports_tell_what_moved() {
    let folder = tempfile::tempdir().expect("a folder");
    let (config, output) = (folder.path().join("c.toml"), folder.path().join("out"));
    std::fs::write(&config, golden_config("gpt2-tiny", "adamw", &output)).expect("written");
    let run = |command: &str, sets: &[&str]| {
        let mut args = vec![command.to_string(), config.display().to_string()];
        for set in sets.iter().chain(&["run.steps=2", "run.ranks=2"]) {
            args.extend(["--set".to_string(), (*set).to_string()]);
        }
        let ran = shardwise(&args).output().expect("the program runs");
        assert!(ran.status.success(), "{}", stderr(&ran));
        ran
    };
    let path = path_of(&folder.path().join("swap"));
    let away =
        [path.as_str(), "offload.parameters=nvme", "offload.optimizer=host", "offload.buffer_size=4096"];
    let plan = stdout(&run("plan", &away));
    for words in
        ["tier buffers", "parameters, in files", "on the host", "of 2 ranks", "at least 4 are needed"]
    {
        assert!(plan.contains(words), "{plan:?} lacks {words:?}");
    }
    let ran = run("train", &away);
    let (said, shown) = (stderr(&ran), stdout(&ran));
    assert!(said.contains("offload: parameters nvme, optimizer host; files below "), "{said}");
    assert!(said.contains(", by io_uring") || said.contains(", by threads"), "{said}");
    for words in ["read from files", "written to the host", "files, not waited for"] {
        assert!(shown.contains(words), "{shown:?} lacks {words:?}");
    }
    let summary = std::fs::read(output.join("summary.json")).expect("a summary");
    let summary: Summary = serde_json::from_slice(&summary).expect("JSON");
    let of_ranks: u64 = summary.ranks_held.iter().filter_map(|rank| rank.moved.nvme_bytes_read).sum();
    assert!(of_ranks > 0 && summary.moved.nvme_bytes_read == Some(of_ranks), "{:?}", summary.moved);
    for rank in &summary.ranks_held {
        assert_eq!(rank.ledger_peak_bytes, rank.planned_bytes, "the plan is what is held");
    }
    let ran = run("train", &[]);
    let text = std::fs::read_to_string(output.join("summary.json")).expect("a summary");
    let metrics = std::fs::read_to_string(output.join("metrics.jsonl")).expect("metrics");
    for text in [stderr(&ran), stdout(&ran), text, metrics, stdout(&run("plan", &[]))] {
        for word in ["offload", "nvme", "host", "bytes_sent_across", "across nodes", "_error", "files,"] {
            assert!(!text.contains(word), "{word:?} in {text}");
        }
    }
}

/// Starts a run that goes on until it is ended, and waits until it has written files.
fn start(config: &Path, swap: &Path, sets: &[String]) -> Child {
    let mut args = vec!["train".to_string(), config.display().to_string()];
    for set in sets {
        args.extend(["--set".to_string(), set.clone()]);
    }
    let child = shardwise(&args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("started");
    let end = Instant::now() + Duration::from_secs(60);
    let has_files = || {
        let runs = names(swap).into_iter().map(|run| swap.join(run)).filter(|run| run.is_dir());
        let ranks = runs.flat_map(|run| names(&run).into_iter().map(move |rank| run.join(rank)));
        ranks.filter(|rank| rank.is_dir()).any(|rank| names(&rank).len() > 2)
    };
    while !has_files() {
        assert!(Instant::now() < end, "no files appear");
        std::thread::sleep(Duration::from_millis(10));
    }
    child
}

#[test]
fn a_killed_runs_files_go_with_the_next_and_others_stay() {
    let folder = tempfile::tempdir().expect("a folder");
    let swap = folder.path().join("swap");
    std::fs::create_dir(&swap).expect("a folder");
    let away = |name: &str, steps: u32| {
        settings(&[
            &format!("run.name={name}"),
            &format!("run.output_dir={:?}", folder.path().join(name).display().to_string()),
            &format!("run.steps={steps}"),
            "run.ranks=2",
            "data.sampler=shuffled",
            "offload.parameters=nvme",
            "offload.optimizer=nvme",
            "offload.buffer_size=4096",
            "offload.least_size=1",
            &path_of(&swap),
        ])
    };
    let config = folder.path().join("c.toml");
    std::fs::write(&config, golden_config("gpt2-tiny", "adamw", &folder.path().join("unused")))
        .expect("written");
    std::fs::write(swap.join("a file of someone else"), "theirs").expect("written");
    let mut killed = start(&config, &swap, &away("first", 30));
    killed.kill().expect("killed");
    killed.wait().expect("ended");
    let left = names(&swap);
    assert!(left.iter().any(|name| name.starts_with("shardwise-first")), "something was left: {left:?}");
    // Another run leaves it, and its own goes.
    let run = |name: &str| {
        let mut args = vec!["train".to_string(), config.display().to_string()];
        away(name, 2).iter().for_each(|set| args.extend(["--set".to_string(), set.clone()]));
        let ran = shardwise(&args).output().expect("the program runs");
        assert!(ran.status.success(), "{}", stderr(&ran));
    };
    let sorted = || {
        let mut all = names(&swap);
        all.sort();
        all
    };
    let before = sorted();
    run("second");
    assert_eq!(sorted(), before, "another run's files stay");
    run("first");
    assert_eq!(sorted(), ["a file of someone else"], "its own go, with the run's end");
}

#[test]
fn what_cannot_work_is_refused_before_training() {
    let folder = tempfile::tempdir().expect("a folder");
    let (config, output) = (folder.path().join("c.toml"), folder.path().join("out"));
    std::fs::write(&config, golden_config("gpt2-tiny", "adamw", &output)).expect("written");
    let swap = path_of(&folder.path().join("swap"));
    let file = folder.path().join("file");
    std::fs::write(&file, "in the way").expect("written");
    let in_the_way = path_of(&file);
    let away = ["offload.parameters=nvme", "offload.optimizer=nvme", "offload.least_size=1"];
    // This is far beyond any disk and memory; nothing of them is allocated.
    let large = "[run]\nsteps = 1\nranks = 2\n[model]\nfamily = \"gpt2\"\nn_layer = 4000\nn_embd = 16384\nn_head = 8\n";
    let large_config = folder.path().join("large.toml");
    std::fs::write(&large_config, large).expect("written");
    let missing = path_of(&folder.path().join("no/where/at/all"));
    let cases: [(&str, &Path, Vec<&str>, &[&str]); 5] = [
        (
            "too few buffers",
            &config,
            [&away[..], &[&swap, "offload.buffer_count=3"]].concat(),
            &["offload.buffer_count is 3", "at least 4", "12 lets it"],
        ),
        (
            "a disk that is too small",
            &large_config,
            [&away[..], &[&swap]].concat(),
            &["offload.path is", "are free", "2 ranks keep", "another offload.path"],
        ),
        (
            "a host that is too small",
            &large_config,
            vec!["offload.optimizer=host"],
            &["2 ranks keep", "on the host", "memory available"],
        ),
        (
            "no folder around it",
            &config,
            [&away[..], &[&missing]].concat(),
            &["no/where/at/all", "offload.path"],
        ),
        ("a file in the way", &config, [&away[..], &[&in_the_way]].concat(), &["file", "offload.path"]),
    ];
    for (what, config, sets, words) in cases {
        for command in ["train", "plan"] {
            if command == "plan"
                && !words.iter().any(|w| w.contains("at least 4") || w.contains("2 ranks keep"))
            {
                continue;
            }
            let mut args = vec![command.to_string(), config.display().to_string()];
            sets.iter()
                .chain(&["run.ranks=2"])
                .for_each(|set| args.extend(["--set".into(), (*set).to_string()]));
            let ran = shardwise(&args).output().expect("the program runs");
            let text = stderr(&ran);
            assert_eq!(ran.status.code(), Some(2), "{what}: {text}");
            for word in words {
                assert!(text.contains(word), "{what}: {text:?} lacks {word:?}");
            }
            assert_eq!(text.matches("shardwise: ").count(), 1, "{what}: one message: {text}");
            assert!(!output.exists() && !text.contains("panicked"), "{what}: {text}");
        }
    }
}

/// Who may not write there is told so. (The superuser may write anywhere.)
#[test]
fn a_read_only_folder_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let (config, output) = (folder.path().join("c.toml"), folder.path().join("out"));
    std::fs::write(&config, golden_config("gpt2-tiny", "adamw", &output)).expect("written");
    let swap = folder.path().join("swap");
    std::fs::create_dir(&swap).expect("a folder");
    std::fs::set_permissions(&swap, std::fs::Permissions::from_mode(0o555)).expect("changed");
    let may_write = std::fs::write(swap.join("try"), "").is_ok();
    let place = if may_write { "/proc" } else { swap.to_str().expect("a path") };
    let ran = shardwise([
        "train",
        &config.display().to_string(),
        "--set",
        "offload.optimizer=nvme",
        "--set",
        &format!("offload.path={place:?}"),
    ]);
    let ran = { ran }.output().expect("the program runs");
    let text = stderr(&ran);
    assert_eq!(ran.status.code(), Some(2), "{text}");
    assert!(text.contains(place) && text.contains("offload.path"), "{text}");
    assert!(!output.exists(), "{text}");
}

/// A disk that is full in the middle of a run ends it with the file and the numbers, on all ranks; the last model stays.
#[test]
fn a_file_beyond_its_limit_ends_the_run_with_its_name() {
    let folder = tempfile::tempdir().expect("a folder");
    let (config, output) = (folder.path().join("c.toml"), folder.path().join("out"));
    std::fs::write(&config, golden_config("gpt2-tiny", "adamw", &output)).expect("written");
    let swap = folder.path().join("swap");
    let command = format!(
        "ulimit -f 32; exec {} train {} --set run.ranks=2 --set run.transport=threads --set offload.parameters=nvme --set \
         offload.path='{:?}' --set offload.least_size=1 --set offload.buffer_size=1024",
        env!("CARGO_BIN_EXE_shardwise"),
        config.display(),
        swap.display().to_string()
    );
    let ran = std::process::Command::new("sh").args(["-c", &command]).output().expect("the program runs");
    let text = stderr(&ran);
    assert!(!ran.status.success() && !text.contains("panicked"), "{text}");
    assert!(text.contains(&swap.display().to_string()), "{text}");
    assert!(!output.join("model").exists(), "{text}");
}
