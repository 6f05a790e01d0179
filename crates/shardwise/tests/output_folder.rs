//! The output folder: taken before training, held by one run, and never left with halves or with a model that is none.

mod common;

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};

use common::{golden_config, read_metrics, shardwise, stderr, stdout};
use rustix::process::{Pid, Signal, kill_process};

struct Run {
    folder: tempfile::TempDir,
    config: PathBuf,
}

impl Run {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let config = folder.path().join("c.toml");
        std::fs::write(&config, golden_config("gpt2-tiny", "adamw", &folder.path().join("out")))
            .expect("written");
        Self { folder, config }
    }

    fn out(&self) -> PathBuf {
        self.folder.path().join("out")
    }

    fn command(&self, sets: &[&str]) -> std::process::Command {
        let mut command = shardwise(["train".as_ref(), self.config.as_os_str()]);
        for set in sets {
            command.args(["--set", set]);
        }
        command
    }

    fn train(&self, sets: &[&str]) -> Output {
        self.command(sets).output().expect("the program runs")
    }

    fn weights(&self) -> Vec<u8> {
        std::fs::read(self.out().join("model/model.safetensors")).expect("exported weights")
    }
}

fn temporaries(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).map(|d| d.flatten().collect::<Vec<_>>()).unwrap_or_default();
    let names = entries.iter().map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.ends_with(".tmp")).collect()
}

fn wait_at_most(child: &mut Child, at_most: Duration) -> Option<i32> {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait().expect("a child of ours") {
            return status.code();
        }
        assert!(begun.elapsed() < at_most, "it still runs after {at_most:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// What could not be replaced at the end is an error at the start, and an earlier run's files stay.
#[test]
fn an_unusable_output_folder_is_found_before_training() {
    type Spoil = fn(&Path);
    let cases: [(&str, Spoil, &str); 7] = [
        ("a README in it", |out| foreign(out, "README.md"), "README.md"),
        ("git's attributes in it", |out| foreign(out, ".gitattributes"), ".gitattributes"),
        ("a trainer's arguments in it", |out| foreign(out, "training_args.bin"), "training_args.bin"),
        ("a file for the model", |out| std::fs::write(out.join("model"), "x").expect("written"), "a file"),
        (
            "a link for the model",
            |out| {
                std::fs::create_dir(out.join("elsewhere")).expect("a folder");
                symlink("elsewhere", out.join("model")).expect("a link");
            },
            "a symbolic link",
        ),
        (
            "a folder for the summary",
            |out| std::fs::create_dir(out.join("summary.json")).expect("a folder"),
            "summary.json",
        ),
        (
            "a folder for the summary's draft",
            |out| std::fs::create_dir(out.join("summary.tmp")).expect("a folder"),
            "summary.tmp",
        ),
    ];
    for (what, spoil, words) in cases {
        let run = Run::new();
        std::fs::create_dir(run.out()).expect("a folder");
        std::fs::write(run.out().join("metrics.jsonl"), "earlier\n").expect("written");
        spoil(&run.out());
        let ran = run.train(&["run.ranks=2"]);
        assert_eq!(ran.status.code(), Some(2), "{what}: {}", stderr(&ran));
        assert!(stderr(&ran).contains(words), "{what}: {}", stderr(&ran));
        assert!(!stderr(&ran).contains("step "), "{what}: before the first step");
        let metrics = std::fs::read_to_string(run.out().join("metrics.jsonl")).expect("metrics");
        assert_eq!(metrics, "earlier\n", "{what}: what was there stays");
        assert!(temporaries(&run.out()).iter().all(|name| name == "summary.tmp"), "{what}");
    }
}

fn foreign(out: &Path, name: &str) {
    std::fs::create_dir_all(out.join("model")).expect("a folder");
    std::fs::write(out.join("model").join(name), "x").expect("written");
}

#[test]
fn a_diverged_model_does_not_replace_a_good_one() {
    let run = Run::new();
    assert!(run.train(&["run.steps=1"]).status.success());
    let good = run.weights();
    let ran = run.train(&["run.steps=1", "train.lr=1e30", "run.ranks=2"]);
    let text = stderr(&ran);
    assert_eq!(ran.status.code(), Some(1), "{text}");
    assert!(text.contains("after the last step") && text.contains("no model was written"), "{text}");
    assert!(run.weights() == good, "the model is the old one");
    // The old summary would make the new metrics look like a finished run.
    assert!(!run.out().join("summary.json").exists());
    assert_eq!(read_metrics(&run.out()).len(), 1);
    assert!(temporaries(&run.out()).is_empty());
    // SGD with a rate that overflows at once: the parameters themselves are infinite.
    let ran = run.train(&["run.steps=1", "train.optimizer=sgd", "train.lr=1e308"]);
    assert_eq!(ran.status.code(), Some(1), "{}", stderr(&ran));
    assert!(run.weights() == good, "the model is the old one");
}

#[test]
fn a_folder_is_one_runs_at_a_time() {
    let run = Run::new();
    let endless = ["run.steps=100000000", "data.sampler=shuffled"];
    let mut first =
        run.command(&endless).stderr(Stdio::null()).stdout(Stdio::null()).spawn().expect("started");
    let begun = Instant::now();
    let lines =
        || std::fs::read_to_string(run.out().join("metrics.jsonl")).unwrap_or_default().lines().count();
    while lines() < 2 {
        assert!(begun.elapsed() < Duration::from_secs(30), "the first run trains");
        std::thread::sleep(Duration::from_millis(10));
    }
    let second = run.train(&["run.steps=1"]);
    assert_eq!(second.status.code(), Some(2), "{}", stderr(&second));
    assert!(stderr(&second).contains("another run is writing"), "{}", stderr(&second));
    kill_process(Pid::from_child(&first), Signal::TERM).expect("it runs");
    wait_at_most(&mut first, Duration::from_secs(5));
    let steps: Vec<u64> = read_metrics(&run.out()).iter().map(|m| m.step).collect();
    assert_eq!(steps, (1..=steps.len() as u64).collect::<Vec<_>>(), "the first run's lines are whole");
    assert!(run.train(&["run.steps=1"]).status.success(), "and then it is free");
}

/// Interrupted while it writes the model, a run leaves nothing half-written.
#[test]
fn an_interrupted_export_leaves_nothing_behind() {
    for transport in ["shm", "threads"] {
        let run = Run::new();
        let text = std::fs::read_to_string(&run.config).expect("written");
        let (start, end) = (text.find("[model]").expect("a model"), text.find("[data]").expect("data"));
        let model = "[model]\nfamily = \"gpt2\"\nn_embd = 512\nn_layer = 4\nn_head = 4\nvocab_size = 512\nn_positions = 64\n";
        std::fs::write(&run.config, format!("{}{model}{}", &text[..start], &text[end..])).expect("written");
        let transport = format!("run.transport={transport}");
        let mut command = run.command(&["run.steps=1", "train.global_batch=2", "run.ranks=2", &transport]);
        let mut child = command.stderr(Stdio::null()).stdout(Stdio::null()).spawn().expect("started");
        let begun = Instant::now();
        // The first temporary folder is that of the test before training; the second is the export's.
        let has_trained = || std::fs::metadata(run.out().join("metrics.jsonl")).is_ok_and(|m| m.len() > 0);
        while (!has_trained() || temporaries(&run.out()).is_empty())
            && child.try_wait().expect("ours").is_none()
        {
            assert!(begun.elapsed() < Duration::from_secs(60), "the run ends");
        }
        let _ = kill_process(Pid::from_child(&child), Signal::INT);
        let code = wait_at_most(&mut child, Duration::from_secs(10));
        assert!(
            temporaries(&run.out()).is_empty(),
            "{transport}, code {code:?}: {:?}",
            temporaries(&run.out())
        );
    }
}

/// Text that a tokenizer makes into tokens is read by one rank for all; what they see is what one rank alone sees.
#[test]
fn text_is_tokenized_once_for_all_ranks() {
    let run = Run::new();
    let folder = run.folder.path();
    std::fs::write(folder.join("a.txt"), "hello world, hello again. ".repeat(300)).expect("written");
    let vocab =
        ["hello", "world", "again", ",", "."].iter().enumerate().map(|(i, w)| format!("\"{w}\": {i}"));
    let json = format!(
        "{{\"version\": \"1.0\", \"added_tokens\": [], \"pre_tokenizer\": {{\"type\": \"Whitespace\"}}, \
         \"model\": {{\"type\": \"WordLevel\", \"vocab\": {{{}}}, \"unk_token\": \"hello\"}}}}",
        vocab.collect::<Vec<_>>().join(", ")
    );
    std::fs::write(folder.join("tokenizer.json"), json).expect("written");
    let data = [
        format!("data.path={:?}", folder.join("a.txt")),
        format!("data.tokenizer={:?}", folder.join("tokenizer.json")),
        "data.format=text".into(),
        "run.steps=3".into(),
    ];
    let mut losses = Vec::new();
    for rest in [
        ["run.ranks=1", "run.transport=shm"],
        ["run.ranks=4", "run.transport=shm"],
        ["run.ranks=2", "run.transport=threads"],
    ] {
        let sets: Vec<&str> = data.iter().map(String::as_str).chain(rest).collect();
        let ran = run.train(&sets);
        assert!(ran.status.success(), "{}", stderr(&ran));
        // 300 x 6 tokens of 2 bytes.
        assert!(
            stderr(&ran).contains("1,800 tokens")
                && stderr(&ran).contains("held once for all ranks in 3.5 KiB")
        );
        assert!(stdout(&ran).contains("A sample from the trained model"));
        losses.push(read_metrics(&run.out()).iter().map(|m| m.loss.to_bits()).collect::<Vec<_>>());
    }
    assert!(losses.windows(2).all(|pair| pair[0] == pair[1]), "{losses:?}");
}

/// Tokens beyond the vocabulary that the run's own samples do not hold are not met when the end shows a sample either.
#[test]
fn the_sample_at_the_end_has_only_tokens_that_the_model_knows() {
    let run = Run::new();
    let tokens = run.folder.path().join("late.u16");
    let ids = (0..520u16).map(|i| if i < 200 { 3 } else { 600 + i });
    std::fs::write(&tokens, ids.flat_map(u16::to_le_bytes).collect::<Vec<u8>>()).expect("written");
    let path = format!("data.path={:?}", tokens.display().to_string());
    let ran =
        run.train(&[&path, "data.tokenizer=bytes", "run.steps=1", "train.global_batch=2", "data.seq_len=16"]);
    assert!(ran.status.success(), "{}", stderr(&ran));
    assert!(run.out().join("summary.json").exists());
}
