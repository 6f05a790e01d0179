//! GPT-2: learned positions, layer norms before attention and MLP, tanh-GELU.

use burn::module::{Module, Param};
use burn::nn::{Embedding, LayerNorm, LayerNormConfig, Linear};
use burn::tensor::{Device, Int, Tensor};
use shardwise_burn::{Sharded, ops};

use crate::causal_lm::CausalLm;
use crate::config::Gpt2Config;
use crate::layers::{embedding, layer_norm, linear_with_bias, logits, normal, project, project_onto};

/// GPT-2 (Radford et al. 2019, "Language models are unsupervised multitask learners").
///
/// Each block is a unit; embeddings, the last norm and an untied head belong to the root.
#[derive(Module, Debug)]
pub struct Gpt2 {
    /// `[vocabulary, width]`.
    token_embedding: Embedding,
    /// `[context, width]`.
    position_embedding: Embedding,
    blocks: Vec<Sharded<Gpt2Block>>,
    final_norm: LayerNorm,
    /// `[vocabulary, width]`; a tied head uses the token embedding.
    head: Option<Param<Tensor<2>>>,
    norm_epsilon: f64,
}

impl Gpt2 {
    /// Builds what `config` describes, which has been validated.
    pub(crate) fn new(config: &Gpt2Config, device: &Device) -> Self {
        let std = config.initializer_range;
        let (vocab, width) = (config.vocab_size, config.n_embd);
        Self {
            token_embedding: embedding([vocab, width], std, device),
            position_embedding: embedding([config.n_positions, width], std, device),
            blocks: (0..config.n_layer).map(|_| Sharded::new(Gpt2Block::new(config, device))).collect(),
            final_norm: new_norm(config, device),
            head: (!config.tie_word_embeddings).then(|| normal(std).init([vocab, width], device)),
            norm_epsilon: config.layer_norm_epsilon,
        }
    }
}

impl CausalLm for Gpt2 {
    fn vocab_size(&self) -> usize {
        self.token_embedding.weight.lazy_shape()[0]
    }

    fn max_positions(&self) -> usize {
        self.position_embedding.weight.lazy_shape()[0]
    }

    fn hidden(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        let (tokens, positions) = (self.token_embedding.weight.val(), self.position_embedding.weight.val());
        let mut x = ops::embedding_with_positions(tokens, positions, ids);
        for block in &self.blocks {
            x = block.call(x, Gpt2Block::forward);
        }
        x
    }

    fn logits(&self, hidden: Tensor<3>) -> Tensor<3> {
        let x = layer_norm(&self.final_norm, self.norm_epsilon, hidden);
        logits(x, self.head.as_ref(), &self.token_embedding)
    }
}

/// Attention and MLP, each added to the residual stream.
#[derive(Module, Debug)]
pub struct Gpt2Block {
    attention_norm: LayerNorm,
    attention: Attention,
    mlp_norm: LayerNorm,
    mlp: Mlp,
    norm_epsilon: f64,
}

#[derive(Module, Debug)]
struct Attention {
    /// `[width, 3 width]`: columns of queries, keys and values, as GPT-2 stores them.
    qkv: Linear,
    output: Linear,
    num_heads: usize,
}

#[derive(Module, Debug)]
struct Mlp {
    up: Linear,
    down: Linear,
}

impl Gpt2Block {
    fn new(config: &Gpt2Config, device: &Device) -> Self {
        let (width, inner, std) = (config.n_embd, config.inner_width(), config.initializer_range);
        // The residual stream sums two projections per block; the paper scales them so that it keeps its variance.
        let residual_std = std / (2.0 * config.n_layer as f64).sqrt();
        let attention = Attention {
            qkv: linear_with_bias([width, 3 * width], std, device),
            output: linear_with_bias([width, width], residual_std, device),
            num_heads: config.n_head,
        };
        let mlp = Mlp {
            up: linear_with_bias([width, inner], std, device),
            down: linear_with_bias([inner, width], residual_std, device),
        };
        Self {
            attention_norm: new_norm(config, device),
            attention,
            mlp_norm: new_norm(config, device),
            mlp,
            norm_epsilon: config.layer_norm_epsilon,
        }
    }

    /// # Shapes
    /// `x` and the result: `[batch, len, width]`.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let Attention { qkv, output, num_heads } = &self.attention;
        let h = layer_norm(&self.attention_norm, self.norm_epsilon, x.clone());
        let h = ops::causal_attention_packed(project(qkv, h), *num_heads);
        let x = project_onto(x, output, h);

        let h = layer_norm(&self.mlp_norm, self.norm_epsilon, x.clone());
        let h = ops::gelu_tanh(project(&self.mlp.up, h));
        project_onto(x, &self.mlp.down, h)
    }
}

fn new_norm(config: &Gpt2Config, device: &Device) -> LayerNorm {
    LayerNormConfig::new(config.n_embd).with_epsilon(config.layer_norm_epsilon).init(device)
}
