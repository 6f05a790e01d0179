//! What a launcher is told to ignore, what it must not leave behind, and what it says to programs that misuse a world.

mod common;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use common::{golden_config, shardwise, stderr};
use rustix::process::{Pid, Signal, kill_process};

const PROGRAM: &str = env!("CARGO_BIN_EXE_shardwise");

/// A folder with a configuration that trains until it is stopped.
struct Bench {
    folder: tempfile::TempDir,
    config: PathBuf,
}

impl Bench {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let config = folder.path().join("c.toml");
        let text = golden_config("gpt2-tiny", "adamw", &folder.path().join("out"));
        let text =
            text.replace("steps = 30", "steps = 100000000\nranks = 2").replace("sequential", "shuffled");
        std::fs::write(&config, text).expect("written");
        Self { folder, config }
    }

    /// `train` with that configuration, as a word of a shell's line.
    fn train(&self) -> String {
        format!("{PROGRAM} train {} 2>{}", self.config.display(), self.log().display())
    }

    fn log(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    fn metrics(&self) -> usize {
        let text = std::fs::read_to_string(self.folder.path().join("out/metrics.jsonl")).unwrap_or_default();
        text.lines().count()
    }

    /// Waits until the run has made more than `steps` steps.
    fn wait_for_steps(&self, steps: usize) {
        wait_until("the run trains", Duration::from_secs(30), || self.metrics() > steps);
    }

    /// The processes that have this folder in their arguments.
    fn processes(&self) -> Vec<Pid> {
        processes_with(self.folder.path())
    }
}

fn processes_with(path: &Path) -> Vec<Pid> {
    let mark = path.display().to_string();
    let entries = std::fs::read_dir("/proc").expect("a list of processes").flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let own = std::process::id() as i32;
    let found = numbers.filter(|pid| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        *pid != own && String::from_utf8_lossy(&line).contains(&mark)
    });
    found.filter_map(Pid::from_raw).collect()
}

fn wait_until(what: &str, at_most: Duration, is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < at_most, "{what}: not within {at_most:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn wait_at_most(child: &mut Child, at_most: Duration) -> ExitStatus {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait().expect("a child of ours") {
            return status;
        }
        assert!(begun.elapsed() < at_most, "it still runs after {at_most:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn shell(line: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", line]).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

fn run(command: &mut Command) -> Output {
    command.output().expect("it runs")
}

#[test]
fn signals_that_a_run_was_told_to_ignore_stay_ignored() {
    let bench = Bench::new();
    // As `nohup` starts a program, and as a script starts one in the background.
    let mut launcher = shell(&format!("trap '' HUP INT; exec {}", bench.train())).spawn().expect("started");
    bench.wait_for_steps(0);
    for signal in [Signal::HUP, Signal::INT] {
        kill_process(Pid::from_child(&launcher), signal).expect("it runs");
    }
    bench.wait_for_steps(bench.metrics() + 20);
    assert!(launcher.try_wait().expect("a child of ours").is_none(), "it goes on");
    kill_process(Pid::from_child(&launcher), Signal::TERM).expect("it runs");
    assert_eq!(wait_at_most(&mut launcher, Duration::from_secs(4)).code(), Some(128 + 15));
    wait_until("no process is left", Duration::from_secs(2), || bench.processes().is_empty());
}

#[test]
fn ranks_behind_a_wrapper_end_with_the_launcher() {
    for signal in [Signal::TERM, Signal::INT, Signal::HUP, Signal::KILL] {
        let bench = Bench::new();
        let wrapped = format!("{}; echo end", bench.train());
        let mut launcher = shardwise(["launch", "-n", "2", "--", "sh", "-c", &wrapped])
            .stderr(Stdio::null())
            .spawn()
            .expect("started");
        bench.wait_for_steps(0);
        assert_eq!(bench.processes().len(), 5, "the launcher, two shells, two ranks");
        kill_process(Pid::from_child(&launcher), signal).expect("it runs");
        wait_at_most(&mut launcher, Duration::from_secs(5));
        wait_until("no process is left", Duration::from_secs(3), || bench.processes().is_empty());
    }
}

/// Processes that a rank leaves behind end with the world, whether they asked for it (a closed session) or not.
#[test]
fn what_ranks_leave_running_is_ended() {
    for (ending, code) in [("exit 0", 0), ("exit 7", 7)] {
        let folder = tempfile::tempdir().expect("a folder");
        let script = folder.path().join("stay.sh");
        std::fs::write(&script, "trap '' TERM\nwhile :; do sleep 1; done\n").expect("written");
        let line =
            format!("sh {0} & setsid sh {0} & (sh {0} & exit 0); sleep 0.3; {ending}", script.display());
        let begun = Instant::now();
        let ran = run(&mut shardwise(["launch", "-n", "2", "--", "sh", "-c", &line]));
        let text = stderr(&ran);
        assert_eq!(ran.status.code(), Some(code), "{text}");
        assert!(begun.elapsed() < Duration::from_secs(6), "killed when asking did not help");
        assert!(processes_with(folder.path()).is_empty(), "{ending}: nothing is left");
        if code == 0 {
            assert!(text.contains("ending what they have left running: sh (process "), "{text}");
        }
    }
}

#[test]
fn a_world_is_for_one_program() {
    let bench = Bench::new();
    let one = format!("{PROGRAM} train {} --set run.steps=1", bench.config.display());
    let ran = run(&mut shardwise(["launch", "-n", "2", "--", "sh", "-c", &format!("{one} && {one}")]));
    let text = stderr(&ran);
    assert_eq!(ran.status.code(), Some(2), "{text}");
    assert!(
        text.contains("has joined this world before") && text.contains("a launcher of its own"),
        "{text}"
    );
}

#[test]
fn a_limit_on_file_sizes_is_named() {
    let bench = Bench::new();
    let config = bench.config.display();
    let ran = run(shell(&format!("ulimit -f 100000; exec {PROGRAM} train {config}")).stderr(Stdio::piped()));
    assert_eq!(ran.status.code(), Some(2), "{}", stderr(&ran));
    assert!(stderr(&ran).contains("limit on the size of files is") && stderr(&ran).contains("ulimit -f"));
    // Threads have no shared file; what they write is over the limit at some moment, which is an error like others.
    let line =
        format!("ulimit -f 10; exec {PROGRAM} train {config} --set run.transport=threads --set run.steps=1");
    let ran = run(shell(&line).stderr(Stdio::piped()));
    assert_eq!(ran.status.code(), Some(1), "{}", stderr(&ran));
    assert!(stderr(&ran).contains("File too large"), "{}", stderr(&ran));
    let left: Vec<_> =
        std::fs::read_dir(bench.folder.path().join("out")).expect("a folder").flatten().collect();
    assert_eq!(left.len(), 1, "only the metrics: {left:?}");
}
