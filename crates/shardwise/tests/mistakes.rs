//! Mistakes of the user: exit code 2, one message that says what was found, what was expected and what to do, and
//! nothing written.

mod common;

use std::path::Path;
use std::process::Output;

use common::{fixture, golden_config, shardwise, stderr};

struct Case {
    what: &'static str,
    sets: Vec<String>,
    words: Vec<&'static str>,
}

fn case(what: &'static str, sets: &[&str], words: &[&'static str]) -> Case {
    Case { what, sets: sets.iter().map(|s| (*s).to_string()).collect(), words: words.to_vec() }
}

fn train(config: &Path, sets: &[String]) -> Output {
    let mut command = shardwise(["train".as_ref(), config.as_os_str()]);
    sets.iter().for_each(|s| {
        command.args(["--set", s]);
    });
    command.output().expect("the program runs")
}

/// Runs a case and checks code, message and that nothing is left.
fn check(case: &Case, config: &Path, output: &Path) {
    let ran = train(config, &case.sets);
    let text = stderr(&ran);
    assert_eq!(ran.status.code(), Some(2), "{}: {text}", case.what);
    for words in &case.words {
        assert!(text.contains(words), "{}: {text:?} lacks {words:?}", case.what);
    }
    assert_eq!(text.matches("shardwise: ").count(), 1, "{}: one message, not one a rank: {text}", case.what);
    assert!(!text.contains("panicked"), "{}: {text}", case.what);
    assert!(!output.exists(), "{}: nothing is written", case.what);
}

#[test]
fn mistakes_in_the_configuration() {
    let folder = tempfile::tempdir().expect("a folder");
    let (config, output) = (folder.path().join("c.toml"), folder.path().join("out"));
    std::fs::write(&config, golden_config("gpt2-tiny", "adamw", &output)).expect("written");
    let tokens = folder.path().join("short.bin");
    std::fs::write(&tokens, [0u8; 2 * 100]).expect("written");
    let odd = folder.path().join("odd.bin");
    std::fs::write(&odd, [0u8; 2001]).expect("written");
    let wild = folder.path().join("wild.bin");
    let ids: Vec<u8> =
        (0..8000u16).flat_map(|i| if i == 777 { 512u16 } else { i % 512 }.to_le_bytes()).collect();
    std::fs::write(&wild, ids).expect("written");
    let path = |p: &Path| format!("data.path={:?}", p.display().to_string());
    let mut cases = vec![
        case(
            "a misspelt key",
            &["train.lr_schedule=1", "train.micro_bacth=2"],
            &["unknown key `train.", "did you mean"],
        ),
        case("a misspelt section", &["trian.lr=1"], &["unknown key `trian`", "`train`"]),
        case("a wrong type", &["train.lr=fast"], &["lr", "fast"]),
        case(
            "a wrong name",
            &["shard.strategy=zero3"],
            &["zero3", "full_shard", "shard_grad_op", "no_shard"],
        ),
        case("a bad --set", &["lr"], &["--set lr", "section.key=value"]),
        case(
            "a hybrid without groups",
            &["shard.strategy=hybrid_shard"],
            &["strategy hybrid_shard", "shard_group is not set", "divisor of the"],
        ),
        case(
            "groups that do not divide the ranks",
            &["shard.strategy=hybrid_shard", "run.ranks=4", "shard.shard_group=3"],
            &["shard_group = 3 does not divide the 4 ranks", "such as 2"],
        ),
        case("groups without a hybrid", &["shard.shard_group=1"], &["full_shard has no groups"]),
        case("f16 without a scale", &["shard.reduce_dtype=f16"], &["reduce_dtype is f16", "loss_scale"]),
        case("a wrong type of numbers", &["shard.param_dtype=f8"], &["f8", "bf16"]),
        case("a wrong scale", &["train.loss_scale=auto"], &["loss_scale", "dynamic"]),
        case("a scale of zero", &["train.loss_scale=0.0"], &["loss_scale is 0"]),
        case("zero steps", &["run.steps=0"], &["run.steps is 0", "at least 1"]),
        case(
            "an endless wait",
            &["run.timeout_seconds=1e300"],
            &["run.timeout_seconds is 1", "at most 1000000000"],
        ),
        case("no wait", &["run.timeout_seconds=0.0"], &["run.timeout_seconds is 0"]),
        case(
            "a batch beyond memory",
            &["train.global_batch=1000000000000000"],
            &["train.global_batch", "at most"],
        ),
        case(
            "a batch beyond numbers",
            &["train.global_batch=9000000000000000000"],
            &["train.global_batch", "at most"],
        ),
        case(
            "very many threads",
            &["run.threads_per_rank=30000"],
            &["run.threads_per_rank is 30000", "at most"],
        ),
        case("more ranks than fit a world", &["run.ranks=2000"], &["run.ranks is 2000", "at most 1024"]),
        case("an epsilon of zero", &["train.eps=0.0"], &["train.eps is 0", "positive"]),
        case(
            "a name that drives a terminal",
            &["run.name=\"a\\u001bb\""],
            &["run.name is", "a line of text"],
        ),
        case("an empty folder", &["run.output_dir=\"\""], &["run.output_dir is empty"]),
        case("an empty path", &["data.path=\"\""], &["data.path is empty"]),
        case("a negative rate", &["train.lr=-1.0"], &["train.lr is -1"]),
        case("beta of 1", &["train.betas=[0.9, 1.0]"], &["train.betas holds 1"]),
        case(
            "a misspelt optimizer",
            &["train.optimizer=adamv"],
            &["train.optimizer is \"adamv\"", "did you mean \"adamw\"?"],
        ),
        case(
            "an unknown optimizer",
            &["train.optimizer=shampoo"],
            &["train.optimizer is \"shampoo\"", "adamw, adam, sgd, lion, adafactor, muon"],
        ),
        case(
            "looking ahead without a momentum",
            &["train.optimizer=sgd", "train.nesterov=true", "train.momentum=0.0"],
            &["train.nesterov is set, but momentum is 0"],
        ),
        case(
            "looking ahead with AdamW",
            &["train.nesterov=true"],
            &["train.nesterov is true", "sgd and muon"],
        ),
        case(
            "several rounds and the step inside backward",
            &["train.step_in_backward=true"],
            &["train.step_in_backward needs one micro-batch", "1 of 8 samples"],
        ),
        case(
            "clipping and the step inside backward",
            &["train.step_in_backward=true", "train.micro_batch=8"],
            &["step_in_backward cannot be had", "leave clip_norm out"],
        ),
        case("an average that grows", &["train.ema_decay=1.5"], &["train.ema_decay is 1.5", "at most 1"]),
        case(
            "a momentum that grows",
            &["train.optimizer=muon", "train.momentum=1.0"],
            &["train.momentum holds 1", "below 1"],
        ),
        case("clipping to zero", &["train.clip_norm=0.0"], &["train.clip_norm is 0"]),
        case(
            "a micro-batch that does not divide",
            &["train.micro_batch=3"],
            &["train.micro_batch = 3 does not divide train.global_batch = 8", "such as 2"],
        ),
        case(
            "too few micro-batches",
            &["run.ranks=3", "train.micro_batch=4"],
            &["2 micro-batches", "3 ranks", "smaller micro_batch"],
        ),
        case(
            "a missing model folder",
            &["model.init_from=/nowhere/model"],
            &["/nowhere/model", "config.json"],
        ),
        case(
            "both init_from and sizes",
            &["model.n_layer=3"],
            &["model.n_layer", "model.init_from", "leave one of them out"],
        ),
        case("another family", &["model.family=llama"], &["\"llama\"", "gpt2"]),
        case("missing data", &["data.path=/nowhere/tokens.bin"], &["/nowhere/tokens.bin"]),
        case(
            "sequences longer than the model's",
            &["data.seq_len=65"],
            &["data.seq_len is 65", "64 positions"],
        ),
        case("a run longer than the data", &["run.steps=31"], &["31", "30"]),
    ];
    let run_with = |what, file: &Path, words: &[&'static str]| Case {
        what,
        sets: vec![path(file)],
        words: words.to_vec(),
    };
    cases.push(run_with("data too short", &tokens, &["short.bin", "100", "7681"]));
    cases.push(run_with("half a token", &odd, &["odd.bin", "2001"]));
    cases.push(run_with("a token beyond the vocabulary", &wild, &["wild.bin", "777", "512"]));
    for case in &cases {
        check(case, &config, &output);
    }
    // The same when found by several ranks at once.
    let mut several = run_with("a token beyond the vocabulary, 2 ranks", &wild, &["wild.bin", "777", "512"]);
    several.sets.push("run.ranks=2".into());
    check(&several, &config, &output);
}

#[test]
fn mistakes_in_offload_and_quantisation() {
    let folder = tempfile::tempdir().expect("a folder");
    let (config, output) = (folder.path().join("c.toml"), folder.path().join("out"));
    std::fs::write(&config, golden_config("gpt2-tiny", "adamw", &output)).expect("written");
    let host = "offload.optimizer=host";
    let cases = [
        case("a misspelt section", &["offlaod.path=/tmp"], &["unknown key `offlaod`", "`offload`"]),
        case("a misspelt key", &["offload.bufer_count=3"], &["`offload.bufer_count`", "`buffer_count`"]),
        case("another misspelt key", &["shard.quantised_weights=true"], &["`quantized_weights`"]),
        case(
            "an unknown tier",
            &["offload.parameters=disk"],
            &["offload.parameters is \"disk\"", "none, host, nvme"],
        ),
        case("a misspelt tier", &["offload.optimizer=nvem"], &["offload.optimizer is \"nvem\"", "\"nvme\"?"]),
        case(
            "a tier that is a switch",
            &["offload.optimizer=true"],
            &["offload.optimizer is true", "one of none"],
        ),
        case(
            "no path",
            &["offload.optimizer=nvme"],
            &["offload.optimizer is \"nvme\"", "offload.path is not set", "path = "],
        ),
        case(
            "no path for parameters",
            &["offload.parameters=nvme", host],
            &["offload.parameters is \"nvme\""],
        ),
        case("an empty path", &["offload.parameters=nvme", "offload.path=\"\""], &["offload.path is empty"]),
        case("an odd buffer", &[host, "offload.buffer_size=1000"], &["offload.buffer_size is 1000", "1024"]),
        case("no buffers", &[host, "offload.buffer_count=0"], &["offload.buffer_count is 0"]),
        case(
            "buffers beyond memory",
            &[host, "offload.buffer_count=1000000000"],
            &["offload.buffer_count is 1000000000", "this machine has"],
        ),
        case(
            "buffers beyond numbers",
            &[host, "offload.buffer_count=9000000000000000000"],
            &["more bytes than can be counted"],
        ),
        case("a negative count", &["offload.buffer_count=-1"], &["offload.buffer_count", "-1"]),
        case("a share above one", &[host, "offload.ratio=1.5"], &["offload.ratio is 1.5", "at most 1"]),
        case("a share that is no number", &[host, "offload.ratio=nan"], &["offload.ratio is NaN"]),
        case("a share of nothing", &["offload.ratio=0.5"], &["offload.ratio is 0.5", "set optimizer"]),
        case(
            "a limit on nothing",
            &["offload.max_in_memory=5"],
            &["offload.max_in_memory is 5", "set parameters"],
        ),
        case(
            "an unknown way to read",
            &["offload.io=aio"],
            &["offload.io is \"aio\"", "auto, uring, threads"],
        ),
        case("an odd block", &["offload.block_size=5000"], &["offload.block_size is 5000", "such as 8192"]),
        case("no block", &["offload.block_size=0"], &["offload.block_size is 0", "at least 1"]),
        case("no depth", &["offload.queue_depth=0"], &["offload.queue_depth is 0", "at least 1"]),
        case("very deep", &["offload.queue_depth=99999"], &["offload.queue_depth is 99999", "at most 4096"]),
        case("no threads", &["offload.threads=0"], &["offload.threads is 0", "at least 1"]),
        case("a wrong switch", &["offload.direct=maybe"], &["offload.direct", "maybe"]),
        case(
            "weights in odd bits",
            &["shard.quantized_weights=int3"],
            &["shard.quantized_weights is \"int3\"", "true, false"],
        ),
        case(
            "a number of bits",
            &["shard.quantized_gradients=8"],
            &["shard.quantized_gradients is 8", "int8, int4, true, false"],
        ),
        case("misspelt rounding", &["shard.quantization_rounding=stochastik"], &["\"stochastic\"?"]),
        case(
            "chance without codes",
            &["shard.quantization_rounding=stochastic"],
            &["shard.quantization_rounding is \"stochastic\"", "nothing is quantised"],
        ),
        case(
            "feedback without errors",
            &["shard.error_feedback=true"],
            &["shard.error_feedback is set", "quantized_gradients"],
        ),
        case(
            "a beta of one",
            &["shard.error_feedback=true", "shard.quantized_gradients=true", "shard.err_beta=1.0"],
            &["shard.err_beta is 1", "below 1"],
        ),
        case(
            "a reset at once",
            &["shard.error_feedback=true", "shard.quantized_gradients=true", "shard.err_reset_steps=0"],
            &["shard.err_reset_steps is 0"],
        ),
        case(
            "a beta of nothing",
            &["shard.err_beta=0.5"],
            &["shard.err_beta is 0.5", "shard.error_feedback is false"],
        ),
        case("a reset of nothing", &["shard.err_reset_steps=9"], &["shard.err_reset_steps is 9"]),
        case(
            "odd nodes",
            &["run.ranks=4", "shard.node_size=3"],
            &["shard.node_size = 3", "4 ranks", "use 2"],
        ),
        case("nodes of none", &["shard.node_size=0"], &["shard.node_size = 0", "use 1"]),
        case(
            "a second copy in odd groups",
            &["run.ranks=4", "shard.secondary_partition_size=8"],
            &["shard.secondary_partition_size = 8", "use 4"],
        ),
        case(
            "a second copy across nodes",
            &["run.ranks=4", "shard.secondary_partition_size=4", "shard.node_size=2"],
            &["shard.secondary_partition_size = 4, but node_size = 2", "make them equal"],
        ),
    ];
    for case in &cases {
        check(case, &config, &output);
    }
}

/// A mistake that only the ranks can see (text through a tokenizer is not read before they start) is still one message.
#[test]
fn a_mistake_found_by_all_ranks_is_told_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let output = folder.path().join("out");
    let text = folder.path().join("a.txt");
    std::fs::write(&text, "hello world ".repeat(200)).expect("written");
    let tokenizer = folder.path().join("tokenizer.json");
    let vocab: Vec<String> =
        ["hello", "world"].iter().enumerate().map(|(i, w)| format!("\"{w}\": {}", i + 600)).collect();
    let json = format!(
        "{{\"version\": \"1.0\", \"added_tokens\": [], \"pre_tokenizer\": {{\"type\": \"Whitespace\"}}, \
         \"model\": {{\"type\": \"WordLevel\", \"vocab\": {{{}}}, \"unk_token\": \"hello\"}}}}",
        vocab.join(", ")
    );
    std::fs::write(&tokenizer, json).expect("written");
    let config = folder.path().join("c.toml");
    std::fs::write(&config, golden_config("gpt2-tiny", "adamw", &output)).expect("written");
    let case = Case {
        what: "tokens beyond the vocabulary, found by every rank",
        sets: vec![
            format!("data.path={:?}", text.display().to_string()),
            format!("data.tokenizer={:?}", tokenizer.display().to_string()),
            "data.format=text".into(),
            "data.sampler=shuffled".into(),
            "run.ranks=3".into(),
        ],
        words: vec!["512", "60"],
    };
    check(&case, &config, &output);
    let threads = Case { sets: [case.sets.clone(), vec!["run.transport=threads".into()]].concat(), ..case };
    check(&threads, &config, &output);
}

#[test]
fn damaged_weights() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("model");
    let (config, output) = (folder.path().join("c.toml"), folder.path().join("out"));
    let weights = std::fs::read(fixture("gpt2-tiny").join("model.safetensors")).expect("the fixture");
    let json = std::fs::read_to_string(fixture("gpt2-tiny").join("config.json")).expect("the fixture");
    std::fs::write(&config, golden_config("gpt2-tiny", "adamw", &output)).expect("written");
    let with = |weights: &[u8], json: &str| {
        std::fs::create_dir_all(&model).expect("a folder");
        std::fs::write(model.join("model.safetensors"), weights).expect("written");
        std::fs::write(model.join("config.json"), json).expect("written");
    };
    let sets =
        || vec![format!("model.init_from={:?}", model.display().to_string()), "run.ranks=2".to_string()];
    let tries: [(&'static str, Vec<u8>, String, Vec<&'static str>); 6] = [
        ("truncated", weights[..weights.len() - 1].to_vec(), json.clone(), vec!["model.safetensors"]),
        ("cut in the header", weights[..40].to_vec(), json.clone(), vec!["model.safetensors"]),
        ("empty", Vec::new(), json.clone(), vec!["model.safetensors"]),
        (
            "not safetensors",
            b"hello, I am no tensor file at all".to_vec(),
            json.clone(),
            vec!["model.safetensors"],
        ),
        ("another shape", weights.clone(), json.replace("\"n_layer\": 3", "\"n_layer\": 4"), vec!["h.3."]),
        (
            "other mathematics",
            weights.clone(),
            json.replace(
                "\"scale_attn_by_inverse_layer_idx\": false",
                "\"scale_attn_by_inverse_layer_idx\": true",
            ),
            vec!["scale_attn_by_inverse_layer_idx", "true"],
        ),
    ];
    for (what, weights, json, words) in tries {
        with(&weights, &json);
        check(&Case { what, sets: sets(), words }, &config, &output);
    }
    // The last bytes are those of a tensor: a NaN.
    let mut damaged = weights.clone();
    let last = damaged.len() - 4;
    damaged[last..].copy_from_slice(&f32::NAN.to_le_bytes());
    with(&damaged, &json);
    check(
        &Case { what: "NaN in the weights", sets: sets(), words: vec!["holds NaN", "tensor `"] },
        &config,
        &output,
    );
    with(&weights, &json);
    let text = folder.path().join("a.txt");
    std::fs::write(&text, "hello ".repeat(2000)).expect("written");
    let with_text = [format!("data.path={:?}", text.display().to_string()), "data.format=text".into()];
    let case = Case {
        what: "text for a model without a tokenizer",
        sets: [sets(), with_text.to_vec()].concat(),
        words: vec!["has no tokenizer.json", "data.tokenizer"],
    };
    check(&case, &config, &output);
    std::fs::remove_file(model.join("model.safetensors")).expect("removed");
    check(&Case { what: "no weights", sets: sets(), words: vec!["model.safetensors"] }, &config, &output);
}

#[test]
fn a_configuration_that_is_none() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = folder.path().join("c.toml");
    let output = folder.path().join("out");
    for (what, text, words) in [
        ("not TOML", "[run\nname = 1", vec!["c.toml"]),
        ("no model", "[run]\nname = \"x\"", vec!["there is no [model]"]),
        ("a section that is a value", "model = 3", vec!["`model` is 3", "[model]"]),
        ("an empty model", "[model]", vec!["neither a family", "init_from"]),
        ("an unknown family", "[model]\nfamily = \"bert\"", vec!["\"bert\"", "\"gpt2\" or \"llama\""]),
        (
            "a llama's size for a gpt2",
            "[model]\nfamily = \"gpt2\"\nhidden_size = 4",
            vec!["unknown key `model.hidden_size`"],
        ),
        ("impossible sizes", "[model]\nfamily = \"gpt2\"\nn_embd = 10\nn_head = 3", vec!["n_embd", "n_head"]),
    ] {
        std::fs::write(&config, text).expect("written");
        check(&Case { what, sets: vec![format!("run.output_dir={output:?}")], words }, &config, &output);
    }
    // A plan refuses what a run would refuse.
    std::fs::write(&config, golden_config("gpt2-tiny", "adamw", &output)).expect("written");
    for (set, words) in
        [("data.seq_len=99", "99, but the model has 64 positions"), ("run.ranks=2000", "at most 1024")]
    {
        let ran = shardwise(["plan".as_ref(), config.as_os_str(), "--set".as_ref(), set.as_ref()]).output();
        let ran = ran.expect("the program runs");
        assert_eq!(ran.status.code(), Some(2), "{set}");
        assert!(stderr(&ran).contains(words), "{}", stderr(&ran));
    }
    let missing = folder.path().join("missing.toml");
    check(&Case { what: "no file", sets: vec![], words: vec!["missing.toml"] }, &missing, &output);
}

/// Options that no machine can serve, and prompts that look like options.
#[test]
fn options_out_of_their_bounds() {
    let model = fixture("gpt2-tiny").display().to_string();
    let cases: [&[&str]; 11] = [
        &["bench", "disk", "/nowhere/at/all"],
        &["bench", "disk", "--threads", "2"],
        &["bench", "disk", "--sequential", "--block-size", "5"],
        &["bench", "quantize", "--mebibytes", "0"],
        &["bench", "comm", "--calls", "0"],
        &["bench", "comm", "--ranks", "0"],
        &["bench", "comm", "--mebibytes", "99999999999"],
        &["bench", "step", "--threads-per-rank", "0"],
        &["bench", "step", "--batch", "99999999999"],
        &["bench", "step", "--ranks", "2000"],
        &["generate", "--model", &model, "--prompt", "x", "--threads", "0"],
    ];
    for args in cases {
        let ran = shardwise(args).output().expect("the program runs");
        assert_eq!(ran.status.code(), Some(2), "{args:?}: {}", stderr(&ran));
        assert!(ran.stdout.is_empty() && !stderr(&ran).contains("panicked"), "{args:?}: {}", stderr(&ran));
    }
    let ran =
        shardwise(["generate", "--model", &model, "--prompt", "-x"]).output().expect("the program runs");
    assert!(stderr(&ran).contains("tokenizer.json"), "the prompt is taken: {}", stderr(&ran));
}

#[test]
fn an_output_folder_that_cannot_be_made() {
    let folder = tempfile::tempdir().expect("a folder");
    let (config, file) = (folder.path().join("c.toml"), folder.path().join("file"));
    std::fs::write(&file, "in the way").expect("written");
    std::fs::write(&config, golden_config("gpt2-tiny", "adamw", &file.join("out"))).expect("written");
    let case = Case {
        what: "a file in the way",
        sets: vec!["run.ranks=2".into()],
        words: vec!["cannot make the folder", "file/out"],
    };
    check(&case, &config, &file.join("out"));
}
