//! What is read from a `config.json`, what is reported, what is refused, and what is written again.

mod common;

use common::{FIXTURES, config, data};
use serde_json::{Value, json};
use shardwise_models::{Gpt2Config, LlamaConfig, ModelConfig, ModelError};

const GPT2: &str = "gpt2-tiny";
const LLAMA: &str = "llama-tiny";

/// A fixture's configuration with some keys set.
fn text_with(fixture: &str, changes: Value) -> String {
    let text = std::fs::read_to_string(data(fixture).join("config.json")).expect("config.json");
    let mut object: Value = serde_json::from_str(&text).expect("JSON");
    for (key, value) in changes.as_object().expect("an object") {
        object[key] = value.clone();
    }
    object.to_string()
}

fn read_with(fixture: &str, changes: Value) -> Result<(ModelConfig, Vec<String>), ModelError> {
    ModelConfig::from_json(&text_with(fixture, changes), "dir/config.json")
}

fn gpt2(config: ModelConfig) -> Gpt2Config {
    let ModelConfig::Gpt2(config) = config else { panic!("a GPT-2") };
    config
}

fn llama(config: ModelConfig) -> LlamaConfig {
    let ModelConfig::Llama(config) = config else { panic!("a Llama") };
    config
}

#[test]
fn fixtures_are_read_without_warnings() {
    let (model, warnings) = config(&data(GPT2));
    assert_eq!((model.family(), model.vocab_size(), model.max_positions()), ("gpt2", 512, 64));
    assert!(warnings.is_empty() && model.tie_word_embeddings(), "{warnings:?}");
    let model = gpt2(model);
    assert_eq!((model.n_embd, model.n_layer, model.n_head, model.inner_width()), (64, 3, 4, 256));
    assert_eq!((model.layer_norm_epsilon, model.initializer_range), (1e-5, 0.02));

    let (model, warnings) = config(&data(LLAMA));
    assert_eq!((model.family(), model.vocab_size(), model.max_positions()), ("llama", 512, 64));
    assert!(warnings.is_empty() && !model.tie_word_embeddings(), "{warnings:?}");
    let model = llama(model);
    assert_eq!((model.hidden_size, model.num_hidden_layers, model.inner_width()), (64, 3, 160));
    assert_eq!((model.num_attention_heads, model.num_kv_heads(), model.head_width()), (4, 2, 16));
    assert_eq!((model.rms_norm_eps, model.rope_theta), (1e-5, 10000.0));
}

#[test]
fn values_that_mean_the_same_are_accepted() {
    let cases = [
        (GPT2, json!({"activation_function": "gelu_pytorch_tanh"})),
        (GPT2, json!({"activation_function": "gelu_fast"})),
        (GPT2, json!({"n_ctx": 64, "task_specific_params": {"text-generation": {"do_sample": true}}})),
        (GPT2, json!({"attn_pdrop": 0.0, "resid_pdrop": null, "pruned_heads": {}})),
        (GPT2, json!({"hidden_size": 64, "num_hidden_layers": 3})),
        (GPT2, json!({"quantization_config": null, "a_key_of_the_future": null})),
        (LLAMA, json!({"hidden_act": "swish", "pretraining_tp": null, "partial_rotary_factor": 1.0})),
        (LLAMA, json!({"rope_scaling": null, "rope_theta": 10000, "attention_bias": null})),
        (
            LLAMA,
            json!({"rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1}}),
        ),
        (LLAMA, json!({"eos_token_id": [1, 2], "torch_dtype": "bfloat16", "max_length": 20})),
    ];
    for (fixture, changes) in cases {
        let (_, warnings) = read_with(fixture, changes.clone()).expect("accepted");
        assert!(warnings.is_empty(), "{changes}: {warnings:?}");
    }
}

#[test]
fn what_a_file_leaves_out_is_what_transformers_assumes() {
    let (model, warnings) = ModelConfig::from_json(r#"{"model_type": "gpt2"}"#, "f").expect("a GPT-2");
    assert!(warnings.is_empty());
    let mut model = gpt2(model);
    assert_eq!(model.kept["eos_token_id"], 50256);
    model.kept.clear();
    assert_eq!(model, Gpt2Config::default());

    let (model, _) =
        ModelConfig::from_json(r#"{"model_type": "llama", "hidden_size": 512, "rope_theta": 5e5}"#, "f")
            .expect("a Llama");
    let model = llama(model);
    assert_eq!((model.inner_width(), model.num_kv_heads(), model.head_width()), (11008, 32, 16));
    assert_eq!((model.rope_theta, model.rms_norm_eps, &model.kept["bos_token_id"]), (5e5, 1e-6, &json!(1)));
}

#[test]
fn what_training_does_otherwise_is_reported() {
    let cases = [
        (GPT2, json!({"attn_pdrop": 0.1}), "dir/config.json: `attn_pdrop` (0.1) is not applied"),
        (
            GPT2,
            json!({"resid_pdrop": 0.1}),
            "`resid_pdrop` (0.1) is not applied: training runs without dropout",
        ),
        (GPT2, json!({"embd_pdrop": 0.2}), "`embd_pdrop` (0.2)"),
        (LLAMA, json!({"attention_dropout": 0.5}), "`attention_dropout` (0.5) is not applied"),
        (LLAMA, json!({"pad_token_id": 0}), "`pad_token_id` (0) is trained like any other token"),
        (LLAMA, json!({"a_key_of_the_future": [1]}), "`a_key_of_the_future` ([1]) is not a known key"),
        (
            LLAMA,
            json!({"rope_parameters": {"rope_type": "default", "factor": 8.0}}),
            "`rope_parameters.factor` (8.0) has no meaning",
        ),
    ];
    for (fixture, changes, expected) in cases {
        let (model, warnings) = read_with(fixture, changes.clone()).expect("accepted");
        assert!(warnings.len() == 1 && warnings[0].contains(expected), "{changes}: {warnings:?}");
        let again: Value = serde_json::from_str(&model.to_json()).expect("JSON");
        for (key, value) in
            changes.as_object().expect("an object").iter().filter(|(k, _)| *k != "rope_parameters")
        {
            assert_eq!(again[key], *value, "{key} is kept");
        }
    }
}

#[test]
fn what_changes_the_mathematics_is_refused_by_name() {
    let cases = [
        (GPT2, json!({"scale_attn_by_inverse_layer_idx": true}), "only false is supported"),
        (GPT2, json!({"reorder_and_upcast_attn": true}), "only false is supported"),
        (GPT2, json!({"scale_attn_weights": false}), "only true is supported"),
        (GPT2, json!({"scale_attn_weights": null}), "only true is supported"),
        (GPT2, json!({"add_cross_attention": true}), "only false is supported"),
        (GPT2, json!({"is_encoder_decoder": true}), "only false is supported"),
        (GPT2, json!({"pruned_heads": {"0": [1]}}), "only {} is supported"),
        (GPT2, json!({"quantization_config": {"bits": 8}}), "only null is supported"),
        (GPT2, json!({"activation_function": "gelu"}), "no other activation is supported"),
        (LLAMA, json!({"attention_bias": true}), "only false is supported"),
        (LLAMA, json!({"mlp_bias": true}), "only false is supported"),
        (LLAMA, json!({"pretraining_tp": 2}), "only 1 is supported"),
        (LLAMA, json!({"partial_rotary_factor": 0.5}), "only 1 is supported"),
        (LLAMA, json!({"sliding_window": 4096}), "only null is supported"),
        (LLAMA, json!({"layer_types": ["full_attention"]}), "only null is supported"),
        (LLAMA, json!({"hidden_act": "gelu"}), "no other activation is supported"),
    ];
    for (fixture, changes, expected) in cases {
        let (key, value) = changes.as_object().and_then(|o| o.iter().next()).expect("one key");
        let error = read_with(fixture, changes.clone()).expect_err("refused").to_string();
        assert!(error.starts_with("dir/config.json: "), "{error}");
        assert!(error.contains(&format!("`{key}` is {value}")) && error.contains(expected), "{error}");
    }
}

#[test]
fn only_plain_rotary_embedding_is_supported() {
    let refused = [
        (json!({"rope_scaling": {"type": "linear", "factor": 2.0}}), "`rope_scaling.type` is \"linear\""),
        (json!({"rope_scaling": {"rope_type": "llama3"}}), "`rope_scaling.rope_type` is \"llama3\""),
        (json!({"rope_parameters": {"rope_type": "yarn"}}), "`rope_parameters.rope_type` is \"yarn\""),
        (
            json!({"rope_parameters": {"partial_rotary_factor": 0.5}}),
            "`rope_parameters.partial_rotary_factor` is 0.5",
        ),
        (json!({"rope_theta": 500000.0}), "`rope_theta` is 500000.0, and 10000.0 in `rope_parameters`"),
        (
            json!({"rope_theta": "big", "rope_parameters": null}),
            "expected a number under `rope_theta`, found \"big\"",
        ),
        (
            json!({"rope_theta": 0.0, "rope_parameters": null}),
            "`rope_theta` is 0, but it must be a positive number",
        ),
        (json!({"rope_parameters": 1}), "expected an object, or null under `rope_parameters`, found 1"),
    ];
    for (changes, expected) in refused {
        let error = read_with(LLAMA, changes).expect_err("refused").to_string();
        assert!(error.contains(expected), "{error}");
    }
    // Both forms, the newer and the older.
    for changes in [
        json!({"rope_parameters": {"rope_type": "default", "rope_theta": 500000}}),
        json!({"rope_parameters": null, "rope_theta": 500000.0, "rope_scaling": null}),
        json!({"rope_parameters": null, "rope_theta": 500000.0, "rope_scaling": {"rope_type": "default"}}),
    ] {
        let (model, warnings) = read_with(LLAMA, changes).expect("accepted");
        assert!(warnings.is_empty());
        let again: Value = serde_json::from_str(&model.to_json()).expect("JSON");
        assert_eq!(again["rope_parameters"], json!({"rope_theta": 500000.0, "rope_type": "default"}));
        assert_eq!(again["rope_theta"], 500000.0);
        assert_eq!(llama(model).rope_theta, 500000.0);
    }
}

#[test]
fn impossible_sizes_and_types_are_refused() {
    let cases = [
        (GPT2, json!({"n_head": 5}), "`n_embd` is 64, but it must be a multiple of `n_head` (5)"),
        (GPT2, json!({"n_embd": 0}), "`n_embd` is 0, but it must be from 1 to"),
        (GPT2, json!({"n_inner": 0}), "`n_inner` is 0"),
        (GPT2, json!({"n_layer": 0}), "`n_layer` is 0"),
        (GPT2, json!({"n_layer": 1_000_000_000u64}), "`n_layer` is 1000000000"),
        (GPT2, json!({"vocab_size": u64::MAX}), "`vocab_size` is 18446744073709551615"),
        (GPT2, json!({"n_embd": 1 << 24, "n_inner": 1 << 24, "n_layer": 100}), "have more than"),
        (
            GPT2,
            json!({"layer_norm_epsilon": 0}),
            "`layer_norm_epsilon` is 0, but it must be a positive number",
        ),
        (GPT2, json!({"initializer_range": -0.1}), "`initializer_range` is -0.1"),
        (GPT2, json!({"hidden_size": 32}), "`n_embd` is 64, and 32 under its other name `hidden_size`"),
        (GPT2, json!({"n_embd": "64"}), "expected a whole number of 0 or more under `n_embd`, found \"64\""),
        (GPT2, json!({"n_layer": 2.5}), "under `n_layer`, found 2.5"),
        (GPT2, json!({"n_layer": -1}), "under `n_layer`, found -1"),
        (GPT2, json!({"tie_word_embeddings": 1}), "expected true or false under `tie_word_embeddings`"),
        (GPT2, json!({"attn_pdrop": "some"}), "expected a probability under `attn_pdrop`"),
        (
            LLAMA,
            json!({"num_key_value_heads": 3}),
            "`num_attention_heads` is 4, but it must be a multiple of",
        ),
        (LLAMA, json!({"num_key_value_heads": 0}), "`num_key_value_heads` is 0"),
        (LLAMA, json!({"num_attention_heads": 0, "head_dim": null}), "`num_attention_heads` is 0"),
        (LLAMA, json!({"hidden_size": 66}), "`hidden_size` is 66, but it must be a multiple of"),
        (LLAMA, json!({"head_dim": 15}), "`head_dim` is 15, but it must be even"),
        (LLAMA, json!({"hidden_size": 4, "head_dim": null}), "`head_dim` is 1, but it must be even"),
        (LLAMA, json!({"rms_norm_eps": -1.0}), "`rms_norm_eps` is -1"),
        (
            LLAMA,
            json!({"model_type": "mistral"}),
            "expected `model_type` \"gpt2\" or \"llama\", found \"mistral\"",
        ),
        (LLAMA, json!({"model_type": null}), "found null"),
    ];
    for (fixture, changes, expected) in cases {
        let error = read_with(fixture, changes).expect_err("refused").to_string();
        assert!(error.starts_with("dir/config.json: ") && error.contains(expected), "{error}");
    }
    for (text, expected) in
        [("", "found other text (EOF"), ("[1]", "found [1]"), ("{\"a\":", "found other text")]
    {
        let error = ModelConfig::from_json(text, "f").expect_err("refused").to_string();
        assert!(error.contains("f: expected a JSON object") && error.contains(expected), "{error}");
    }
}

/// Everything that the file said is said again.
#[test]
fn a_configuration_is_written_as_it_was_read() {
    for fixture in FIXTURES {
        let (model, _) = config(&data(fixture));
        let text = std::fs::read_to_string(data(fixture).join("config.json")).expect("config.json");
        let mut want: Value = serde_json::from_str(&text).expect("JSON");
        let got: Value = serde_json::from_str(&model.to_json()).expect("JSON");
        if fixture == LLAMA {
            want["rope_theta"] = json!(10000.0);
        }
        assert_eq!(got, want, "{fixture}");
        let (again, _) = ModelConfig::from_json(&model.to_json(), "f").expect("accepted");
        assert_eq!(again, model);
    }
}

/// A model that was never in a file has no special tokens: `transformers` would assume those of the original model.
#[test]
fn a_new_configuration_is_written_in_full() {
    for (model, class) in [
        (ModelConfig::Gpt2(Gpt2Config::default()), "GPT2LMHeadModel"),
        (ModelConfig::Llama(LlamaConfig::default()), "LlamaForCausalLM"),
    ] {
        let written: Value = serde_json::from_str(&model.to_json()).expect("JSON");
        assert_eq!(written["architectures"], json!([class]));
        assert_eq!(written["dtype"], "float32");
        for key in ["bos_token_id", "eos_token_id", "pad_token_id"] {
            assert_eq!(written.get(key), Some(&Value::Null));
        }
        let (again, warnings) = ModelConfig::from_json(&model.to_json(), "f").expect("accepted");
        assert!(warnings.is_empty());
        assert_eq!(again.to_json(), model.to_json());
    }
}

#[test]
fn a_table_of_a_toml_file_is_a_configuration() {
    let read = |text: &str| toml::from_str::<ModelConfig>(text);
    let model = gpt2(read("family = 'gpt2'\nn_embd = 96\nn_head = 3").expect("a GPT-2"));
    assert_eq!(model, Gpt2Config { n_embd: 96, n_head: 3, ..Gpt2Config::default() });

    let text = "family = 'llama'\nhidden_size = 768\nnum_attention_heads = 12\nrope_theta = 500000";
    let model = llama(read(text).expect("a Llama"));
    // Two thirds of 4 * 768.
    assert_eq!((model.inner_width(), model.head_width(), model.num_kv_heads()), (2048, 64, 12));
    assert_eq!(model.rope_theta, 500000.0);
    assert_eq!(LlamaConfig::default().inner_width(), 11008);

    assert!(read("family = 'bert'").is_err());
}

/// `KEYS` are the keys of the tables.
#[test]
fn the_known_keys_are_those_that_can_be_set() {
    fn keys(config: &impl serde::Serialize) -> Vec<String> {
        let value = serde_json::to_value(config).expect("JSON");
        value.as_object().expect("an object").keys().cloned().collect()
    }
    fn sorted(keys: &[&str]) -> Vec<String> {
        let mut keys: Vec<String> = keys.iter().map(|key| (*key).to_string()).collect();
        keys.sort();
        keys
    }
    let gpt2 = Gpt2Config { n_inner: Some(1), ..Gpt2Config::default() };
    assert_eq!(keys(&gpt2), sorted(Gpt2Config::KEYS));
    let llama = LlamaConfig {
        intermediate_size: Some(1),
        num_key_value_heads: Some(1),
        head_dim: Some(1),
        ..LlamaConfig::default()
    };
    assert_eq!(keys(&llama), sorted(LlamaConfig::KEYS));
}
