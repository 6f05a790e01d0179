//! Initial values: drawn as the families' authors draw them, and only when they are asked for.

mod common;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Tensor};
use common::{DEADLINE, on_one_thread, optimizer};
use shardwise_burn::ShardedModel;
use shardwise_comm::threads;
use shardwise_models::{Gpt2Config, LlamaConfig, ModelConfig};

fn gpt2() -> ModelConfig {
    ModelConfig::Gpt2(Gpt2Config {
        vocab_size: 300,
        n_positions: 100,
        n_embd: 64,
        n_layer: 8,
        n_head: 4,
        initializer_range: 0.05,
        tie_word_embeddings: false,
        ..Gpt2Config::default()
    })
}

fn llama() -> ModelConfig {
    ModelConfig::Llama(LlamaConfig {
        vocab_size: 300,
        hidden_size: 64,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        initializer_range: 0.05,
        ..LlamaConfig::default()
    })
}

/// Every parameter of a fresh model, by path, with the same values for any number of ranks.
fn initial(config: &ModelConfig, ranks: usize) -> Vec<(String, Vec<f32>)> {
    let run = |group| {
        let module = config.init(&Device::flex().autodiff()).expect("a valid configuration");
        let mut model = ShardedModel::new(group, module, optimizer("adamw").0, &()).expect("sharded");
        let mut all = Vec::new();
        model.export(|path, _, values| all.push((path.to_string(), values.to_vec()))).expect("exported");
        all
    };
    threads::run(ranks, DEADLINE, |group| on_one_thread(|| run(group))).expect("a world").remove(0)
}

#[test]
fn values_are_drawn_as_the_authors_draw_them() {
    for config in [gpt2(), llama()] {
        let all = initial(&config, 1);
        assert!(initial(&config, 2) == all);
        for (path, values) in all {
            let n = values.len() as f64;
            let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / n;
            let std = (values.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / n).sqrt();
            let (want_mean, want_std) = match path.rsplit('.').next() {
                Some("gamma") => (1.0, 0.0),
                Some("bias" | "beta") => (0.0, 0.0),
                // 1 / sqrt(2 * 8 layers)
                _ if config.family() == "gpt2" && path.contains("output") => (0.0, 0.05 / 4.0),
                _ if config.family() == "gpt2" && path.contains("down") => (0.0, 0.05 / 4.0),
                _ => (0.0, 0.05),
            };
            // Four standard errors.
            assert!((mean - want_mean).abs() <= 4.0 * want_std / n.sqrt(), "{path}: mean {mean}");
            assert!((std - want_std).abs() <= 4.0 * want_std / (2.0 * n).sqrt(), "{path}: deviation {std}");
        }
    }
}

#[test]
fn parameters_differ_from_each_other() {
    let all = initial(&gpt2(), 1);
    let value = |path: &str| all.iter().find(|(p, _)| p == path).map(|(_, values)| values.clone());
    let first = value("blocks.0.mlp.up.weight");
    assert!(first.is_some() && first != value("blocks.1.mlp.up.weight"));
    assert_ne!(value("head"), value("token_embedding.weight"));
}

struct NoneInitialised;

impl ModuleVisitor for NoneInitialised {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        assert!(!param.is_initialized());
    }
}

/// A model of 7 billion parameters is described without any of them.
#[test]
fn no_value_exists_before_it_is_used() {
    let config = ModelConfig::Llama(LlamaConfig::default());
    let model = config.init(&Device::flex().autodiff()).expect("a valid configuration");
    model.visit(&mut NoneInitialised);
    let parameters = config.parameters().expect("a valid configuration");
    assert_eq!(parameters.len(), 32 * 9 + 3);
    assert_eq!(parameters.iter().map(|p| p.numel()).sum::<usize>(), 6_738_415_616);
    assert_eq!(model.num_params(), 6_738_415_616);

    let gpt2 = ModelConfig::Gpt2(Gpt2Config::default()).parameters().expect("a valid configuration");
    assert_eq!(gpt2.len(), 12 * 12 + 4);
    assert_eq!(gpt2.iter().map(|p| p.numel()).sum::<usize>(), 124_439_808);
}

#[test]
fn impossible_models_are_not_built() {
    let config = ModelConfig::Gpt2(Gpt2Config { n_head: 5, ..Gpt2Config::default() });
    let error = config.init(&Device::flex()).expect_err("refused").to_string();
    assert!(error.contains("`n_embd` is 768, but it must be a multiple of `n_head` (5)"), "{error}");
}
