//! The example of the README: a Burn model of the user's own, sharded over two processes.

mod common;

use std::path::PathBuf;
use std::process::Command;

/// Cargo builds examples before it runs integration tests, beside this test program.
fn example(name: &str) -> PathBuf {
    let mut path = std::env::current_exe().expect("this program");
    path.pop();
    path.pop();
    path.join("examples").join(name)
}

#[test]
fn a_model_of_the_users_own_trains_on_two_ranks() {
    let mut command = Command::new(example("custom_model"));
    for variable in ["RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "SHARDWISE_SHM_FD"] {
        command.env_remove(variable);
    }
    let ran = command.output().expect("the example runs");
    let text = common::stdout(&ran);
    assert!(ran.status.success(), "{}", common::stderr(&ran));
    let losses: Vec<f64> = text
        .lines()
        .filter_map(|l| l.split_once("loss "))
        .map(|(_, l)| l.parse().expect("a number"))
        .collect();
    assert_eq!(losses.len(), 10, "one rank speaks: {text}");
    assert!(losses[9] < 0.1 * losses[0], "{losses:?}");
}

/// The promise of its length: under 60 lines of code between `main` and the model.
#[test]
fn the_example_is_short() {
    let text = include_str!("../../../examples/custom_model.rs");
    let code = text.lines().filter(|l| !l.trim().is_empty() && !l.trim().starts_with("//")).count();
    assert!(code < 60, "{code} lines of code");
}
