//! Parameter paths of the modules and tensor names of `transformers`: one for each.

use shardwise_checkpoint::StoredLayout;

use crate::config::ModelConfig;
use crate::error::{ModelError, Result};

use StoredLayout::{AsIs, Transposed};

/// What the names of one family are made of.
pub(crate) struct Names {
    /// Before the names of everything but the head; a file saved from the model without its head lacks it.
    pub(crate) prefix: &'static str,
    /// Before the number of a block.
    blocks: &'static str,
    /// Outside the blocks: path, name after the prefix. All are stored as they are.
    root: &'static [(&'static str, &'static str)],
    /// In a block: path, name, layout.
    block: &'static [(&'static str, &'static str, StoredLayout)],
    /// Ends of names that old files have for constants, not parameters.
    constants: &'static [&'static str],
}

/// The head's path.
const HEAD: &str = "head";

/// The head's name, in both families.
pub(crate) const HEAD_TENSOR: &str = "lm_head.weight";

/// The path of the parameter that a tied head uses, in both families.
pub(crate) const TOKEN_EMBEDDING: &str = "token_embedding.weight";

/// Linear layers are `Conv1D`, stored as `[in, out]` like ours.
static GPT2: Names = Names {
    prefix: "transformer.",
    blocks: "h.",
    root: &[
        (TOKEN_EMBEDDING, "wte.weight"),
        ("position_embedding.weight", "wpe.weight"),
        ("final_norm.gamma", "ln_f.weight"),
        ("final_norm.beta", "ln_f.bias"),
    ],
    block: &[
        ("attention_norm.gamma", "ln_1.weight", AsIs),
        ("attention_norm.beta", "ln_1.bias", AsIs),
        ("attention.qkv.weight", "attn.c_attn.weight", AsIs),
        ("attention.qkv.bias", "attn.c_attn.bias", AsIs),
        ("attention.output.weight", "attn.c_proj.weight", AsIs),
        ("attention.output.bias", "attn.c_proj.bias", AsIs),
        ("mlp_norm.gamma", "ln_2.weight", AsIs),
        ("mlp_norm.beta", "ln_2.bias", AsIs),
        ("mlp.up.weight", "mlp.c_fc.weight", AsIs),
        ("mlp.up.bias", "mlp.c_fc.bias", AsIs),
        ("mlp.down.weight", "mlp.c_proj.weight", AsIs),
        ("mlp.down.bias", "mlp.c_proj.bias", AsIs),
    ],
    constants: &[".attn.bias", ".attn.masked_bias"],
};

/// Linear layers are stored as `[out, in]`.
static LLAMA: Names = Names {
    prefix: "model.",
    blocks: "layers.",
    root: &[(TOKEN_EMBEDDING, "embed_tokens.weight"), ("final_norm.gamma", "norm.weight")],
    block: &[
        ("attention_norm.gamma", "input_layernorm.weight", AsIs),
        ("attention.query.weight", "self_attn.q_proj.weight", Transposed),
        ("attention.key.weight", "self_attn.k_proj.weight", Transposed),
        ("attention.value.weight", "self_attn.v_proj.weight", Transposed),
        ("attention.output.weight", "self_attn.o_proj.weight", Transposed),
        ("mlp_norm.gamma", "post_attention_layernorm.weight", AsIs),
        ("mlp.gate.weight", "mlp.gate_proj.weight", Transposed),
        ("mlp.up.weight", "mlp.up_proj.weight", Transposed),
        ("mlp.down.weight", "mlp.down_proj.weight", Transposed),
    ],
    constants: &["rotary_emb.inv_freq"],
};

impl Names {
    fn tensor(&self, path: &str) -> Option<(String, StoredLayout)> {
        if path == HEAD {
            // `[vocabulary, width]` in both.
            return Some((HEAD_TENSOR.to_string(), AsIs));
        }
        let prefix = self.prefix;
        if let Some((_, name)) = self.root.iter().find(|(known, _)| *known == path) {
            return Some((format!("{prefix}{name}"), AsIs));
        }
        let (number, rest) = path.strip_prefix("blocks.")?.split_once('.')?;
        let number: usize = number.parse().ok()?;
        let (_, name, layout) = self.block.iter().find(|(known, ..)| *known == rest)?;
        Some((format!("{prefix}{}{number}.{name}", self.blocks), *layout))
    }

    /// Whether a file's tensor belongs to a block, known here or not.
    pub(crate) fn is_in_block(&self, tensor: &str) -> bool {
        let bare = tensor.strip_prefix(self.prefix).unwrap_or(tensor);
        let number = bare.strip_prefix(self.blocks).and_then(|rest| rest.split_once('.'));
        number.is_some_and(|(number, _)| number.parse::<usize>().is_ok())
    }

    /// Whether a file's tensor is a constant that the model has no need of.
    pub(crate) fn is_constant(&self, tensor: &str) -> bool {
        self.constants.iter().any(|end| tensor.ends_with(end))
    }
}

impl ModelConfig {
    pub(crate) fn names(&self) -> &'static Names {
        match self {
            Self::Gpt2(_) => &GPT2,
            Self::Llama(_) => &LLAMA,
        }
    }

    /// The name that `transformers` saves the parameter `path` under (with the prefix `transformer.` or `model.`), and how
    /// it is stored there.
    ///
    /// # Errors
    /// [`ModelError::UnknownParameter`] when the family has no such parameter.
    pub fn hf_name(&self, path: &str) -> Result<(String, StoredLayout)> {
        let unknown = || ModelError::UnknownParameter { family: self.family(), path: path.to_string() };
        self.names().tensor(path).ok_or_else(unknown)
    }
}
