//! Standard output and error: a reader that goes away ends no run, and no text drives a terminal.

mod common;

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::process::Stdio;

use common::{golden_config, shardwise, stderr, stdout};

fn full() -> File {
    File::options().write(true).open("/dev/full").expect("/dev/full")
}

/// A pipe that nobody reads.
fn closed() -> Stdio {
    let (read, write) = std::io::pipe().expect("a pipe");
    drop(read);
    write.into()
}

#[test]
fn a_run_goes_on_without_its_readers() {
    let folder = tempfile::tempdir().expect("a folder");
    let (config, out) = (folder.path().join("c.toml"), folder.path().join("out"));
    std::fs::write(&config, golden_config("gpt2-tiny", "adamw", &out)).expect("written");
    for transport in ["shm", "threads"] {
        let command = || {
            let mut command = shardwise(["train".as_ref(), config.as_os_str()]);
            command.args(["--set", "run.steps=25", "--set", "run.ranks=2"]);
            command.args(["--set", &format!("run.transport={transport}")]);
            command
        };
        let finished = |what: &str| {
            assert!(
                out.join("model/model.safetensors").exists(),
                "{transport}, {what}: the model is written"
            );
            std::fs::remove_dir_all(&out).expect("removed");
        };
        // `train ... 2>&1 | head -2`
        let mut run = command().stderr(Stdio::piped()).stdout(Stdio::null()).spawn().expect("started");
        let mut lines = BufReader::new(run.stderr.take().expect("piped")).lines();
        assert!(lines.next().is_some_and(|line| line.is_ok()));
        drop(lines);
        assert_eq!(run.wait().expect("ended").code(), Some(0));
        finished("a closed standard error");
        let ran = command().stdout(closed()).stderr(closed()).output().expect("ran");
        assert_eq!(ran.status.code(), Some(0));
        finished("closed pipes");
        let ran = command().stderr(full()).output().expect("ran");
        assert_eq!(ran.status.code(), Some(0));
        finished("a full standard error");
        let ran = command().stdout(full()).output().expect("ran");
        assert_eq!(ran.status.code(), Some(1), "{}", stderr(&ran));
        assert!(stderr(&ran).contains("writing to standard output: No space left"), "{}", stderr(&ran));
        finished("a full standard output");
    }
}

/// `generate` prints as it draws, the same text as at once, and stops when nobody reads on.
#[test]
fn a_text_is_printed_while_it_grows() {
    let folder = tempfile::tempdir().expect("a folder");
    let (config, out) = (folder.path().join("c.toml"), folder.path().join("out"));
    std::fs::write(&config, golden_config("gpt2-tiny", "adamw", &out)).expect("written");
    let ran = shardwise(["train".as_ref(), config.as_os_str()])
        .args(["--set", "run.steps=1", "--set", "data.tokenizer=bytes"])
        .output()
        .expect("ran");
    assert!(ran.status.success(), "{}", stderr(&ran));
    let model = out.join("model").display().to_string();
    let generate = |count: &str| {
        let mut command =
            shardwise(["generate", "--model", &model, "--prompt", "caf\u{e9}", "--max-new-tokens", count]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    let short = stdout(&generate("1500").output().expect("ran"));
    assert!(short.starts_with("caf\u{e9}") && short.ends_with('\n'));
    assert_eq!(stdout(&generate("1500").output().expect("ran")), short, "whenever it is printed");
    let mut endless = generate("1000000000").spawn().expect("started");
    let mut start = vec![0; 40];
    let mut text = endless.stdout.take().expect("piped");
    std::io::Read::read_exact(&mut text, &mut start).expect("a text that has begun");
    assert_eq!(
        String::from_utf8_lossy(&start).chars().take(20).collect::<String>(),
        short.chars().take(20).collect::<String>()
    );
    drop(text);
    let ended = endless.wait_with_output().expect("ended");
    assert_eq!((ended.status.code(), stderr(&ended)), (Some(0), String::new()));
}

#[test]
fn short_commands_say_what_they_could_not_write() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = folder.path().join("c.toml");
    std::fs::write(&config, golden_config("gpt2-tiny", "adamw", &folder.path().join("out")))
        .expect("written");
    let config = config.display().to_string();
    let commands: [&[&str]; 3] = [
        &["plan", &config],
        &["bench", "comm", "--ranks", "1", "--mebibytes", "1", "--calls", "1", "--transport", "threads"],
        &["bench", "optimizer", "--mebibytes", "1", "--calls", "1"],
    ];
    for args in commands {
        let ran = shardwise(args).stdout(closed()).output().expect("ran");
        assert_eq!(ran.status.code(), Some(0), "{args:?}: {}", stderr(&ran));
        assert_eq!(stderr(&ran), "", "{args:?}: a reader that has had enough is no error");
        let ran = shardwise(args).stdout(full()).output().expect("ran");
        assert_eq!(ran.status.code(), Some(1), "{args:?}: {}", stderr(&ran));
        assert!(stderr(&ran).starts_with("shardwise: writing to standard output: No space left"), "{args:?}");
    }
}

#[test]
fn what_is_said_drives_no_terminal() {
    let ran = shardwise(["plan", "no\x1b[31m\x07such.toml"]).output().expect("ran");
    assert_eq!(ran.status.code(), Some(2));
    let text = stderr(&ran);
    assert!(text.contains("such.toml") && !text.contains('\x1b') && !text.contains('\x07'), "{text:?}");
    assert_eq!(stdout(&ran), "");
}
