//! What a run writes and prints: metrics, summary, model folder, plan, generated text.

mod common;

use common::{fixture, golden_config, read_metrics, shardwise, stderr, stdout};
use shardwise::report::Summary;

/// A short run of the default kind: text, bytes, shuffled, from scratch.
fn text_config(folder: &std::path::Path) -> String {
    let text = folder.join("text");
    std::fs::create_dir_all(&text).expect("a folder");
    std::fs::write(text.join("a.txt"), "The quick brown fox jumps over the lazy dog. ".repeat(200))
        .expect("written");
    format!(
        "[run]\nname = \"fox\"\nsteps = 12\nranks = 2\noutput_dir = {:?}\n\
         [model]\nfamily = \"gpt2\"\nn_layer = 2\nn_embd = 32\nn_head = 2\nn_positions = 32\nvocab_size = 256\n\
         [data]\npath = {text:?}\n\
         [train]\nglobal_batch = 4\nmicro_batch = 1\nlr = 0.01\nclip_norm = 1.0\nschedule = \"cosine\"\nwarmup_steps = 4\n",
        folder.join("out")
    )
}

#[test]
fn a_run_leaves_metrics_a_summary_and_a_model_behind() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = folder.path().join("fox.toml");
    std::fs::write(&config, text_config(folder.path())).expect("written");
    let ran = shardwise(["train".as_ref(), config.as_os_str()]).output().expect("the program runs");
    assert!(ran.status.success(), "{}", stderr(&ran));
    let out = folder.path().join("out");

    let metrics = read_metrics(&out);
    assert_eq!(metrics.iter().map(|m| m.step).collect::<Vec<_>>(), (1..=12).collect::<Vec<_>>());
    assert!(metrics[11].loss < metrics[0].loss, "the loss falls");
    for m in &metrics {
        assert_eq!(m.tokens, 4 * 32);
        assert!((m.tokens_per_second * m.step_seconds - m.tokens as f64).abs() < 1e-6);
        assert!(
            m.grad_norm > 0.0 && m.peak_rss_bytes > 1 << 20 && m.gathered_bytes_peak > 0 && m.bytes_sent > 0
        );
    }
    let lr: Vec<f64> = metrics.iter().map(|m| m.lr).collect();
    assert_eq!(lr[..4], [0.0025, 0.005, 0.0075, 0.01], "linear warm-up");
    assert!(
        lr[4..].windows(2).all(|w| w[1] < w[0]) && (lr[11] - 0.001).abs() < 1e-12,
        "then a cosine to a tenth"
    );

    let summary: Summary =
        serde_json::from_str(&std::fs::read_to_string(out.join("summary.json")).expect("a summary"))
            .expect("JSON");
    assert_eq!((summary.steps, summary.ranks, summary.family.as_str()), (12, 2, "gpt2"));
    assert_eq!(summary.last_loss, metrics[11].loss);
    for rank in &summary.ranks_held {
        assert_eq!(rank.ledger_peak_bytes, rank.planned_bytes, "what was held is what was planned");
        assert!(rank.held.iter().all(|h| h.bytes == h.planned), "{:?}", rank.held);
        assert!(rank.peak_rss_bytes > rank.ledger_peak_bytes);
    }
    let sent: u64 = metrics.iter().map(|m| m.bytes_sent).sum();
    assert_eq!(summary.ranks_held.iter().map(|r| r.bytes_sent).sum::<u64>(), sent);

    let mut files: Vec<_> = std::fs::read_dir(out.join("model"))
        .expect("a folder")
        .map(|f| f.expect("an entry").file_name().into_string().expect("UTF-8"))
        .collect();
    files.sort();
    assert_eq!(files, ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]);
    let shown = stdout(&ran);
    for words in
        ["A sample from the trained model", "held at the peak", "rank 1", "planned", "a Hugging Face folder"]
    {
        assert!(shown.contains(words), "{shown:?} lacks {words:?}");
    }

    // The folder serves: text from it, the same for the same seed, and another run from it.
    let model = out.join("model").display().to_string();
    let generate = |seed: &str| {
        let args = [
            "generate",
            "--model",
            &model,
            "--prompt",
            "The quick",
            "--max-new-tokens",
            "20",
            "--seed",
            seed,
        ];
        let ran = shardwise(args).output().expect("the program runs");
        assert!(ran.status.success(), "{}", stderr(&ran));
        stdout(&ran)
    };
    assert!(generate("1").starts_with("The quick"));
    assert_eq!(generate("1"), generate("1"));
    let again = shardwise(["train".as_ref(), config.as_os_str()])
        .args(["--set", "run.steps=1", "--set", &format!("run.output_dir={:?}", folder.path().join("again"))])
        .output()
        .expect("the program runs");
    assert!(again.status.success(), "{}", stderr(&again));
}

/// A model trained from a folder starts where that folder's weights are.
#[test]
fn a_run_can_go_on_from_an_exported_folder() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = folder.path().join("golden.toml");
    std::fs::write(&config, golden_config("llama-tiny", "sgd", &folder.path().join("out"))).expect("written");
    let train = |sets: &[String]| {
        let mut command = shardwise(["train".as_ref(), config.as_os_str()]);
        sets.iter().for_each(|s| {
            command.args(["--set", s]);
        });
        let ran = command.output().expect("the program runs");
        assert!(ran.status.success(), "{}", stderr(&ran));
    };
    train(&["train.lr=0.0".into(), "run.steps=1".into(), "run.ranks=2".into()]);
    let exported = std::fs::read(folder.path().join("out/model/model.safetensors")).expect("exported");
    let original = std::fs::read(fixture("llama-tiny").join("model.safetensors")).expect("the fixture");
    assert!(exported == original, "a step with lr = 0 changes no byte of the file");
    let from = format!("model.init_from={:?}", folder.path().join("out/model"));
    train(&[from, format!("run.output_dir={:?}", folder.path().join("next")), "run.steps=2".into()]);
    let first = read_metrics(&folder.path().join("next"))[0].loss;
    assert!((first - common::reference("llama-tiny", "sgd.float64").losses[0]).abs() < 1e-5);
}

#[test]
fn a_plan_says_what_each_rank_will_hold_and_send() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = folder.path().join("fox.toml");
    std::fs::write(&config, text_config(folder.path())).expect("written");
    let plan = |sets: &[&str]| {
        let mut command = shardwise(["plan".as_ref(), config.as_os_str()]);
        sets.iter().for_each(|s| {
            command.args(["--set", s]);
        });
        let ran = command.output().expect("the program runs");
        assert!(ran.status.success(), "{}", stderr(&ran));
        stdout(&ran)
    };
    // Two blocks of 12,704 elements; the root has 256 x 32 + 32 x 32 + 64 = 9,280; shards 2 x 6,352 + 4,640 = 17,344.
    let text = plan(&[]);
    assert!(
        text.starts_with("gpt2 with 34,688 parameters in 2 units and the root, full_shard over 2 ranks\n"),
        "{text}"
    );
    assert!(text.contains("4 micro-batches of 1 a step, in 2 rounds"), "{text}");
    for (purpose, bytes) in [
        ("parameters", "69,376"),
        ("optimizer state", "138,752"),
        ("gradient shards", "69,376"),
        ("gathered root", "37,120"),
        ("gathered units", "101,632"),
        ("root gradient", "37,120"),
        ("unit gradient", "50,816"),
        // Shards that peers take: the root's once, each block's twice in each of 2 rounds, and all of them reduced in each.
        ("and send per step", "360,576"),
    ] {
        let line = text.lines().find(|l| l.starts_with(purpose)).unwrap_or_default();
        assert!(line.split_whitespace().any(|word| word == bytes), "{purpose} is not {bytes}: {text}");
    }
    assert!(!folder.path().join("out").exists(), "a plan writes nothing");
    // 200 x 45 bytes.
    assert!(text.contains("held once for all ranks, beside their own memory: 8.8 KiB."), "{text}");
    let small = plan(&["run.ranks=1", "model.n_layer=1", "train.global_batch=1"]);
    assert!(small.contains("in 1 unit and the root, full_shard over 1 rank\n"), "{small}");
    assert!(small.contains("1 micro-batch of 1 a step, in 1 round\n"), "{small}");
    let large = plan(&["model.n_embd=8192", "model.n_layer=100", "model.n_head=64", "run.ranks=4"]);
    assert!(
        large.contains("80,543,662,080 parameters"),
        "80 billion parameters are planned without being allocated: {large}"
    );
}
