//! A model of real size, GPT-2 with 124M parameters, on 4 ranks: what a rank takes beyond its ledger.

mod common;

use common::{shardwise, stderr, stdout};

/// Resident growth of a rank (shared pages counted by their part) over the process before the model: at most 1.15 times
/// the ledger, three tensors of logits and the blocks' inputs.
#[test]
fn a_rank_takes_little_more_than_its_ledger() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = folder.path().join("gpt2.toml");
    std::fs::write(&config, "[model]\nfamily = \"gpt2\"\n[data]\nseq_len = 256\n").expect("written");
    let ran = shardwise([
        "bench",
        "step",
        "--ranks",
        "4",
        "--batch",
        "1",
        "--steps",
        "3",
        "--recompute",
        "--config",
    ])
    .arg(&config)
    .output()
    .expect("the program runs");
    assert!(ran.status.success(), "{}", stderr(&ran));
    let line: serde_json::Value = serde_json::from_str(&stdout(&ran)).expect("a line of JSON");
    let figure = |name: &str| line[name].as_f64().expect("a number");
    assert_eq!(figure("parameters"), 124_439_808.0);
    let growth = figure("peak_proportional_bytes") - figure("proportional_bytes_before_model");
    let accounted = figure("ledger_peak_bytes") + 3.0 * figure("logits_bytes") + figure("block_input_bytes");
    let ratio = growth / accounted;
    assert!(ratio <= 1.15, "grew by {growth} bytes, {ratio} of the {accounted} accounted for");
}
