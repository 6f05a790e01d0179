//! Ranks that are lost, disagree, or are started by someone else.

mod common;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{golden_config, shardwise, stderr, stdout};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

/// A run that goes on until it is stopped, with its ranks.
struct Running {
    launcher: Child,
    ranks: Vec<Pid>,
    lines: std::sync::mpsc::Receiver<String>,
}

impl Running {
    /// Starts the run and waits until it trains.
    fn start(config: &Path, ranks: usize) -> Self {
        let mut launcher = shardwise(["train".as_ref(), config.as_os_str()])
            .args([
                "--set",
                &format!("run.ranks={ranks}"),
                "--set",
                "run.steps=100000",
                "--set",
                "data.sampler=shuffled",
            ])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("started");
        let stderr = launcher.stderr.take().expect("piped");
        let (send, lines) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            BufReader::new(stderr).lines().map_while(Result::ok).all(|line| send.send(line).is_ok());
        });
        loop {
            let line = lines.recv_timeout(Duration::from_secs(30)).expect("the run begins");
            if line.starts_with("step") {
                break;
            }
        }
        let children = format!("/proc/{0}/task/{0}/children", launcher.id());
        let ranks = std::fs::read_to_string(children)
            .expect("a running launcher")
            .split_whitespace()
            .filter_map(|pid| pid.parse().ok().and_then(Pid::from_raw))
            .collect();
        Self { launcher, ranks, lines }
    }

    fn wait_at_most(&mut self, at_most: Duration) -> Option<i32> {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.launcher.try_wait().expect("a child of ours") {
                return status.code();
            }
            assert!(begun.elapsed() < at_most, "the launcher still runs after {at_most:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn assert_gone(&self) {
        let begun = Instant::now();
        while self.ranks.iter().any(|pid| test_kill_process(*pid).is_ok()) {
            assert!(begun.elapsed() < Duration::from_secs(2), "a rank is left");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn shared_memory_files() -> Vec<std::ffi::OsString> {
    let entries = std::fs::read_dir("/dev/shm").map(|d| d.flatten().map(|e| e.file_name()).collect());
    let mut names: Vec<_> = entries.unwrap_or_default();
    names.sort();
    names
}

#[test]
fn a_killed_rank_ends_the_run_within_five_seconds() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = folder.path().join("c.toml");
    std::fs::write(&config, golden_config("gpt2-tiny", "adamw", &folder.path().join("out")))
        .expect("written");
    let before = shared_memory_files();
    for victim in 0..3 {
        let mut run = Running::start(&config, 3);
        assert_eq!(run.ranks.len(), 3);
        std::thread::sleep(Duration::from_millis(50 + 31 * victim as u64));
        kill_process(run.ranks[victim], Signal::KILL).expect("it runs");
        assert_eq!(run.wait_at_most(Duration::from_secs(5)), Some(128 + 9));
        run.assert_gone();
        let text: Vec<String> = run.lines.iter().collect();
        let reports = text.iter().filter(|l| {
            l.starts_with("shardwise: rank ") && l.contains(&format!(": rank {victim} was lost"))
        });
        assert_eq!(reports.count(), 2, "both others report rank {victim}: {text:#?}");
        assert!(
            text.iter().any(|l| l.contains(&format!("rank {victim} was killed by signal 9"))),
            "{text:#?}"
        );
        assert!(!folder.path().join("out/model").exists(), "no model of a run that was lost");
    }
    assert_eq!(shared_memory_files(), before, "no shared memory is left");
}

#[test]
fn control_c_ends_all_ranks() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = folder.path().join("c.toml");
    std::fs::write(&config, golden_config("gpt2-tiny", "adamw", &folder.path().join("out")))
        .expect("written");
    let mut run = Running::start(&config, 2);
    kill_process(Pid::from_child(&run.launcher), Signal::INT).expect("it runs");
    assert_eq!(run.wait_at_most(Duration::from_secs(4)), Some(128 + 2));
    run.assert_gone();
}

/// Starts `configs` as the ranks of one world, as a launcher of someone else's would.
fn by_hand(configs: &[&Path], port: u16, world: usize) -> Vec<(Option<i32>, String)> {
    let start = |(rank, config): (usize, &&Path)| {
        let mut command: Command = shardwise(["train".as_ref(), config.as_os_str()]);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", world.to_string());
        command.env("MASTER_PORT", port.to_string()).stderr(Stdio::piped()).stdout(Stdio::piped());
        command.spawn().expect("started")
    };
    let children: Vec<Child> = configs.iter().enumerate().map(start).collect();
    let end = |child: Child| {
        let output = child.wait_with_output().expect("ended");
        (output.status.code(), stderr(&output) + &stdout(&output))
    };
    children.into_iter().map(end).collect()
}

fn port(salt: u16) -> u16 {
    30_000 + (std::process::id() % 3_000) as u16 * 10 + salt
}

#[test]
fn ranks_with_different_configurations_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let files: Vec<_> = ["0.003", "0.004"]
        .iter()
        .enumerate()
        .map(|(i, lr)| {
            let file = folder.path().join(format!("{i}.toml"));
            let text = golden_config("gpt2-tiny", "adamw", &folder.path().join("out"));
            let text = text
                .replace("lr = 0.003", &format!("lr = {lr}"))
                .replace("steps = 30", "steps = 30\nranks = 2");
            std::fs::write(&file, text).expect("written");
            file
        })
        .collect();
    let ended = by_hand(&[&files[0], &files[1]], port(0), 2);
    assert!(ended.iter().all(|(code, _)| *code == Some(2)), "{ended:?}");
    let text: String = ended.iter().map(|(_, text)| text.as_str()).collect();
    assert!(text.contains("train.lr is `0.003` on rank 0 but `0.004` on rank 1"), "{text}");
    assert!(!folder.path().join("out").exists(), "nothing is written");
}

#[test]
fn another_launchers_ranks_train_the_same() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("c.toml");
    let config = golden_config("gpt2-tiny", "adamw", &folder.path().join("out"));
    std::fs::write(&file, config.replace("steps = 30", "steps = 3\nranks = 2")).expect("written");
    let ended = by_hand(&[&file, &file], port(1), 2);
    assert!(ended.iter().all(|(code, _)| *code == Some(0)), "{ended:?}");
    let metrics = common::read_metrics(&folder.path().join("out"));
    let reference = common::reference("gpt2-tiny", "adamw.float64");
    assert!((metrics[2].loss - reference.losses[2]).abs() < 2e-4);
}

#[test]
fn a_launcher_with_another_number_of_ranks_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("c.toml");
    std::fs::write(&file, golden_config("gpt2-tiny", "adamw", &folder.path().join("out"))).expect("written");
    let ended = by_hand(&[&file], port(2), 3);
    assert_eq!(ended[0].0, Some(2));
    assert!(ended[0].1.contains("run.ranks = 1") && ended[0].1.contains("WORLD_SIZE=3"), "{ended:?}");
}

/// `launch` starts any program with the variables that such programs expect, and passes its exit code on.
#[test]
fn launch_starts_any_program() {
    let script = "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR ${MASTER_PORT:+port}";
    let ran = shardwise(["launch", "-n", "3", "--", "sh", "-c", script]).output().expect("ran");
    assert!(ran.status.success(), "{}", stderr(&ran));
    let mut lines: Vec<String> = stdout(&ran).lines().map(String::from).collect();
    lines.sort();
    let want: Vec<String> = (0..3).map(|r| format!("{r} {r} 3 3 127.0.0.1 port")).collect();
    assert_eq!(lines, want);
    let failing =
        shardwise(["launch", "-n", "2", "--", "sh", "-c", "exit $((RANK * 5))"]).output().expect("ran");
    assert_eq!(failing.status.code(), Some(5));
    assert!(stderr(&failing).contains("rank 1 exited with code 5"), "{}", stderr(&failing));
    let missing = shardwise(["launch", "-n", "2", "--", "/no/such/program"]).output().expect("ran");
    assert_eq!(missing.status.code(), Some(2));
    assert!(stderr(&missing).contains("/no/such/program"), "{}", stderr(&missing));
}
