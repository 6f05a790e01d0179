//! Logits of models with unusual settings, against `transformers` in float64 (see `tests/data/variants/make.py`).

mod common;

use burn::tensor::{Device, Tensor, TensorData};
use common::{config, data, whole_model};
use serde::Deserialize;
use shardwise_models::{CausalLm, ModelConfig};

#[derive(Deserialize)]
struct Logits {
    /// `[sample][position]`
    ids: Vec<Vec<i64>>,
    /// `[sample][position][token]`
    logits: Vec<Vec<Vec<f64>>>,
}

/// The largest difference between the logits of our model in `tests/data/variants/NAME` and theirs.
fn difference(name: &str) -> f64 {
    let folder = data("variants").join(name);
    let text = std::fs::read_to_string(folder.join("logits.json")).expect("logits.json");
    let Logits { ids, logits } = serde_json::from_str(&text).expect("logits");
    let device = Device::flex().autodiff();
    let shape = [ids.len(), ids[0].len()];
    let ids = Tensor::from_data(TensorData::new(ids.concat(), shape), &device);
    let ours = whole_model(&folder, &device).forward(ids).into_data();
    let theirs = logits.concat().concat();
    assert_eq!(ours.num_elements(), theirs.len());
    let difference =
        ours.iter::<f64>().zip(theirs).map(|(ours, theirs)| (ours - theirs).abs()).fold(0.0, f64::max);
    println!("{name}: {difference:.1e}");
    difference
}

#[test]
fn gpt2_with_a_head_and_an_inner_width_of_its_own() {
    assert!(difference("gpt2-untied-inner") < 1e-5);
}

#[test]
fn gpt2_saved_without_its_head() {
    assert!(difference("gpt2-without-prefix") < 1e-5);
}

#[test]
fn llama_tied_with_one_key_head_and_wide_heads() {
    let name = "llama-tied-one-key-head";
    let (ModelConfig::Llama(llama), _) = config(&data("variants").join(name)) else { panic!("a llama") };
    assert_eq!((llama.num_kv_heads(), llama.head_width(), llama.rope_theta), (1, 10, 500000.0));
    assert!(difference(name) < 1e-5);
}

#[test]
fn llama_in_bf16_with_the_rope_keys_of_older_releases() {
    assert!(difference("llama-bf16-old-rope") < 1e-5);
}
