//! Collectives between processes, started by our launcher and by hand; losses, kills and signals.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{DEADLINE, exercise};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use shardwise_comm::launch::{Launch, launch};
use shardwise_comm::shm::{FD_VARIABLE, Meeting, join};
use shardwise_comm::{HostBuffer, ProcessGroup};

const ROLE: &str = "SHARDWISE_TEST_ROLE";

fn variable<T: std::str::FromStr>(name: &str) -> Option<T> {
    std::env::var(name).ok().and_then(|v| v.parse().ok())
}

fn join_world() -> Result<ProcessGroup, shardwise_comm::CommError> {
    let meeting = match variable(FD_VARIABLE) {
        Some(fd) => Meeting::Descriptor(fd),
        None => Meeting::Port(variable("MASTER_PORT").expect("a port")),
    };
    let deadline = variable("DEADLINE_MS").map_or(DEADLINE, Duration::from_millis);
    join(variable("RANK").expect("a rank"), variable("WORLD_SIZE").expect("a size"), &meeting, deadline)
        .map(ProcessGroup::world)
}

/// This test program, as one rank or as a launcher.
fn as_role(role: &str) -> Launch {
    Launch {
        program: std::env::current_exe().expect("this program").into(),
        args: ["--exact", "role", "--ignored", "--nocapture", "--test-threads=1"].map(Into::into).to_vec(),
        ranks: 1,
        env: vec![(ROLE.into(), role.into())],
    }
}

fn command(role: &str) -> Command {
    let launch = as_role(role);
    let mut command = Command::new(&launch.program);
    command.args(&launch.args).envs(launch.env).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.env_remove(FD_VARIABLE);
    command
}

/// Writes a line in one piece, so that lines of several ranks do not mix.
fn say(line: String) {
    std::io::stderr().write_all(format!("{line}\n").as_bytes()).expect("stderr");
}

/// What the child processes of the tests below do.
#[test]
#[ignore = "the body of the other tests' child processes"]
fn role() {
    let role: String = variable(ROLE).expect("a role");
    if let Some((ranks, role)) = role.split_once(" ranks: ") {
        let ranks = ranks.parse().expect("a number");
        let mut start = as_role(role);
        start.ranks = ranks;
        std::process::exit(launch(&start).expect("launched"));
    }
    let group = match join_world() {
        Ok(group) => group,
        Err(error) => {
            say(format!("rank {}: {error}", variable::<usize>("RANK").unwrap_or_default()));
            std::process::exit(3);
        }
    };
    let rank = group.rank();
    match role.as_str() {
        "exercise" => {
            for (salt, numel) in [0, 1, 5, 1000, 70_001].into_iter().enumerate() {
                exercise(&group, numel, salt as u64);
            }
            let half = group.split((rank % 2) as u64, rank as u64).expect("split");
            exercise(&half, 99, 9);
        }
        "forever" => {
            say(format!("rank {rank} pid {}", std::process::id()));
            let mut part = group.allocate(100_000).expect("memory");
            let mut dest = HostBuffer::new(100_000 * group.size()).expect("memory");
            loop {
                let result;
                (dest, result) = group.start_all_gather("blocks.1", &part, dest).wait();
                let result = result.and_then(|()| part.writable().map(|p| p[0] += 1.0));
                if let Err(error) = result {
                    say(format!("rank {rank} says: {error}"));
                    std::process::exit(3);
                }
            }
        }
        "exit 7" if rank == 1 => std::process::exit(7),
        "exit 7" => {
            let error = group.barrier("forward").expect_err("rank 1 exited");
            say(format!("rank {rank} says: {error}"));
            std::process::exit(3);
        }
        "mismatch" => {
            let mut all = vec![0.0; group.size()];
            let called = if rank == 1 {
                group.barrier("end of step")
            } else {
                group.all_gather("blocks.0", &[1.0], &mut all)
            };
            let error = called.and_then(|()| group.barrier("next")).expect_err("rank 1 does something else");
            say(format!("rank {rank} says: {error}"));
            std::process::exit(3);
        }
        "sleep" => {
            say(format!("rank {rank} pid {}", std::process::id()));
            std::thread::sleep(Duration::from_secs(60));
        }
        other => panic!("unknown role {other}"),
    }
}

#[test]
fn launched_ranks_agree_with_a_plain_computation() {
    for ranks in 1..=4 {
        let start = Launch { ranks, ..as_role("exercise") };
        assert_eq!(launch(&start).expect("launched"), 0, "{ranks} ranks");
    }
}

/// Starts ranks by hand, as another launcher would, and returns their exit codes and messages.
fn by_hand(role: &str, port: u16, ranks: &[(usize, usize)], deadline_ms: u64) -> Vec<(Option<i32>, String)> {
    let children: Vec<Child> = ranks
        .iter()
        .map(|(rank, world)| {
            let mut command = command(role);
            command.env("RANK", rank.to_string()).env("WORLD_SIZE", world.to_string());
            command.env("MASTER_PORT", port.to_string()).env("DEADLINE_MS", deadline_ms.to_string());
            command.spawn().expect("started")
        })
        .collect();
    children
        .into_iter()
        .map(|child| {
            let output = child.wait_with_output().expect("ended");
            (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
        })
        .collect()
}

/// Ports of the abstract name space, which no other test uses.
fn port(salt: u16) -> u16 {
    20_000 + (std::process::id() % 4_000) as u16 * 10 + salt
}

#[test]
fn ranks_started_by_hand_meet_over_master_port() {
    let ended = by_hand("exercise", port(0), &[(2, 3), (0, 3), (1, 3)], 60_000);
    assert!(ended.iter().all(|(code, _)| *code == Some(0)), "{ended:?}");
}

#[test]
fn ranks_that_cannot_meet_say_why() {
    let ended = by_hand("exercise", port(1), &[(0, 2), (1, 3)], 1500);
    assert!(ended[0].1.contains("ranks [1] of 2 did not come"), "{ended:?}");
    assert!(
        ended[1].1.contains("rank 1 was started with WORLD_SIZE=3, but rank 0 with WORLD_SIZE=2"),
        "{ended:?}"
    );
    let ended = by_hand("exercise", port(2), &[(1, 2)], 500);
    assert!(ended[0].1.contains("looked 500ms for rank 0"), "{ended:?}");
    let ended = by_hand("exercise", port(3), &[(0, 2), (1, 2), (1, 2)], 1500);
    assert!(
        ended[1..].iter().any(|(_, text)| text.contains("joined already") || text.contains("looked")),
        "{ended:?}"
    );
    assert_eq!(ended.iter().filter(|(code, _)| *code == Some(0)).count(), 2, "{ended:?}");
}

/// A launcher in a process of its own, and the process ids that its ranks print.
fn start_launcher(role: &str, ranks: usize) -> (Child, Vec<Pid>, std::sync::mpsc::Receiver<String>) {
    let mut launcher = command(&format!("{ranks} ranks: {role}")).spawn().expect("started");
    let stderr = launcher.stderr.take().expect("piped");
    let mut stdout = launcher.stdout.take().expect("piped");
    std::thread::spawn(move || stdout.read_to_end(&mut Vec::new()));
    let (send, lines) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stderr).lines().map_while(Result::ok) {
            if send.send(line).is_err() {
                return;
            }
        }
    });
    let mut pids = vec![None; ranks];
    while pids.iter().any(Option::is_none) {
        let line = lines.recv_timeout(Duration::from_secs(20)).expect("the ranks start");
        if let Some((rank, pid)) = line.strip_prefix("rank ").and_then(|l| l.split_once(" pid ")) {
            let rank: usize = rank.parse().expect("a rank");
            pids[rank] = pid.trim().parse().ok().and_then(Pid::from_raw);
        }
    }
    (launcher, pids.into_iter().flatten().collect(), lines)
}

fn wait_at_most(child: &mut Child, at_most: Duration) -> std::process::ExitStatus {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait().expect("a child of ours") {
            return status;
        }
        assert!(begun.elapsed() < at_most, "the launcher still runs after {at_most:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Whether a process runs. (A killed launcher's ranks become children of this process while a test in it launches: then
/// they have ended, and stay in the list until this process ends.)
fn runs(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    test_kill_process(pid).is_ok() && !stat.contains(") Z ")
}

fn all_gone(pids: &[Pid]) -> bool {
    let begun = Instant::now();
    while pids.iter().any(|pid| runs(*pid)) {
        if begun.elapsed() > Duration::from_secs(2) {
            return false;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    true
}

/// A rank killed at a random moment: the others report which one was lost, and all is over within 5 s.
#[test]
fn a_killed_rank_is_reported_by_the_others() {
    for (round, victim) in [1usize, 0, 2].into_iter().enumerate() {
        let (mut launcher, pids, lines) = start_launcher("forever", 3);
        std::thread::sleep(Duration::from_millis(37 * (round as u64 + 1)));
        kill_process(pids[victim], Signal::KILL).expect("it runs");
        let status = wait_at_most(&mut launcher, Duration::from_secs(5));
        assert_eq!(status.code(), Some(128 + 9));
        assert!(all_gone(&pids), "no rank is left");
        let text: Vec<String> = lines.iter().collect();
        for survivor in (0..3).filter(|r| *r != victim) {
            let report = format!("rank {survivor} says: rank {victim} was lost");
            assert!(text.iter().any(|l| l.starts_with(&report)), "{report}: {text:#?}");
        }
        let first = text.iter().find(|l| l.starts_with("shardwise launch")).expect("the launcher's words");
        assert!(first.contains(&format!("rank {victim} was killed by signal 9")), "{first}");
    }
}

#[test]
fn a_rank_that_exits_badly_ends_the_world_with_its_code() {
    let output = command("2 ranks: exit 7").output().expect("ran");
    assert_eq!(output.status.code(), Some(7));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("rank 1 exited with code 7"), "{text}");
    assert!(text.contains("rank 0 says: rank 1 was lost"), "{text}");
}

/// Every rank says what both sides did; nobody waits for the deadline.
#[test]
fn ranks_that_issue_different_collectives_all_say_so() {
    let begun = Instant::now();
    let output = command("3 ranks: mismatch").output().expect("ran");
    assert!(begun.elapsed() < Duration::from_secs(5));
    assert_eq!(output.status.code(), Some(3));
    let text = String::from_utf8_lossy(&output.stderr);
    for rank in 0..3 {
        let line = text.lines().find(|l| l.starts_with(&format!("rank {rank} says: "))).unwrap_or_default();
        assert!(
            line.contains("all_gather of `blocks.0`") && line.contains("barrier of `end of step`"),
            "{text}"
        );
    }
}

#[test]
fn an_interrupt_ends_all_ranks() {
    for (signal, number) in [(Signal::INT, 2), (Signal::TERM, 15)] {
        let (mut launcher, pids, _lines) = start_launcher("sleep", 2);
        kill_process(Pid::from_child(&launcher), signal).expect("it runs");
        let status = wait_at_most(&mut launcher, Duration::from_secs(4));
        assert_eq!(status.code(), Some(128 + number));
        assert!(all_gone(&pids), "no rank is left");
    }
}

#[test]
fn ranks_die_with_their_launcher() {
    let (mut launcher, pids, _lines) = start_launcher("sleep", 2);
    launcher.kill().expect("it runs");
    launcher.wait().expect("a child of ours");
    assert!(all_gone(&pids), "no rank outlives the launcher");
}

#[test]
fn a_program_that_cannot_be_started_is_named() {
    let start = Launch { program: "/no/such/program".into(), args: vec![], ranks: 2, env: vec![] };
    let error = launch(&start).expect_err("it does not exist").to_string();
    assert!(error.contains("starting rank 0") && error.contains("/no/such/program"), "{error}");
}
