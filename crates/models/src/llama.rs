//! Llama: rotary positions, root-mean-square norms, grouped queries, SwiGLU, no biases.

use std::sync::Arc;

use burn::module::{Module, Param};
use burn::nn::{Embedding, Linear, RmsNorm, RmsNormConfig};
use burn::tensor::{Device, Int, Tensor};
use shardwise_burn::ops::AttentionHeads;
use shardwise_burn::{Sharded, ops};

use crate::causal_lm::CausalLm;
use crate::config::LlamaConfig;
use crate::layers::{embedding, linear, logits, normal, project, project_onto, rms_norm};
use crate::rotary::RotaryTables;

/// Llama (Touvron et al., arXiv:2302.13971; arXiv:2307.09288).
///
/// Each block is a unit; the embedding, the last norm and an untied head belong to the root.
#[derive(Module, Debug)]
pub struct Llama {
    /// `[vocabulary, width]`.
    token_embedding: Embedding,
    blocks: Vec<Sharded<LlamaBlock>>,
    final_norm: RmsNorm,
    /// `[vocabulary, width]`; a tied head uses the token embedding.
    head: Option<Param<Tensor<2>>>,
    max_positions: usize,
    /// One for all blocks, and for all clones of the model.
    #[module(skip)]
    rotary: Arc<RotaryTables>,
}

impl Llama {
    /// Builds what `config` describes, which has been validated.
    pub(crate) fn new(config: &LlamaConfig, device: &Device) -> Self {
        let std = config.initializer_range;
        let (vocab, width) = (config.vocab_size, config.hidden_size);
        Self {
            token_embedding: embedding([vocab, width], std, device),
            blocks: (0..config.num_hidden_layers)
                .map(|_| Sharded::new(LlamaBlock::new(config, device)))
                .collect(),
            final_norm: new_norm(config, device),
            head: (!config.tie_word_embeddings).then(|| normal(std).init([vocab, width], device)),
            max_positions: config.max_position_embeddings,
            rotary: Arc::new(RotaryTables::new(config.rope_theta, config.head_width())),
        }
    }
}

impl CausalLm for Llama {
    fn vocab_size(&self) -> usize {
        self.token_embedding.weight.lazy_shape()[0]
    }

    fn max_positions(&self) -> usize {
        self.max_positions
    }

    fn hidden(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        let [_, len] = ids.dims();
        let longest = self.max_positions;
        assert!(len <= longest, "llama: a sequence of {len} tokens is longer than the context of {longest}");
        let mut x = ops::embedding(self.token_embedding.weight.val(), ids);
        let tables = self.rotary.tables(len, &x.device());
        for block in &self.blocks {
            x = block.call_with(x, tables.clone(), LlamaBlock::forward);
        }
        x
    }

    fn logits(&self, hidden: Tensor<3>) -> Tensor<3> {
        logits(rms_norm(&self.final_norm, hidden), self.head.as_ref(), &self.token_embedding)
    }
}

/// Attention and MLP, each added to the residual stream.
#[derive(Module, Debug)]
pub struct LlamaBlock {
    attention_norm: RmsNorm,
    attention: Attention,
    mlp_norm: RmsNorm,
    mlp: Mlp,
}

/// Separate projections, so that each parameter is one tensor of a Hugging Face file.
#[derive(Module, Debug)]
struct Attention {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    #[module(skip)]
    heads: AttentionHeads,
}

#[derive(Module, Debug)]
struct Mlp {
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl LlamaBlock {
    fn new(config: &LlamaConfig, device: &Device) -> Self {
        let (width, inner) = (config.hidden_size, config.inner_width());
        let heads = AttentionHeads {
            num_heads: config.num_attention_heads,
            num_kv_heads: config.num_kv_heads(),
            head_dim: config.head_width(),
        };
        let [query_width, key_width] = [heads.num_heads, heads.num_kv_heads].map(|n| n * heads.head_dim);
        let linear = |width_in, width_out| linear([width_in, width_out], config.initializer_range, device);
        Self {
            attention_norm: new_norm(config, device),
            attention: Attention {
                query: linear(width, query_width),
                key: linear(width, key_width),
                value: linear(width, key_width),
                output: linear(query_width, width),
                heads,
            },
            mlp_norm: new_norm(config, device),
            mlp: Mlp { gate: linear(width, inner), up: linear(width, inner), down: linear(inner, width) },
        }
    }

    /// # Shapes
    /// `x` and the result: `[batch, len, width]`; the tables of cosines and sines: `[len, head_dim / 2]`.
    pub fn forward(&self, x: Tensor<3>, (cos, sin): &(Tensor<2>, Tensor<2>)) -> Tensor<3> {
        let Attention { query, key, value, output, heads } = &self.attention;
        let h = rms_norm(&self.attention_norm, x.clone());
        let q = ops::rotary(project(query, h.clone()), cos, sin, heads.head_dim);
        let k = ops::rotary(project(key, h.clone()), cos, sin, heads.head_dim);
        let v = project(value, h);
        let x = project_onto(x, output, ops::causal_attention(q, k, v, *heads));

        let Mlp { gate, up, down } = &self.mlp;
        let h = rms_norm(&self.mlp_norm, x.clone());
        let h = ops::silu_mul(project(gate, h.clone()), project(up, h));
        project_onto(x, down, h)
    }
}

fn new_norm(config: &LlamaConfig, device: &Device) -> RmsNorm {
    RmsNormConfig::new(config.hidden_size).with_epsilon(config.rms_norm_eps).init(device)
}
