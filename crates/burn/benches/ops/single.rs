//! Each operation alone, forward and backward, next to Burn's.

use burn::tensor::{Device, Distribution, Int, Tensor};
use shardwise_burn::ops::{self, AttentionHeads, reference};

use super::medians;

const ROWS: usize = 512;
const WIDTH: usize = 384;

fn leaf<const D: usize>(dims: [usize; D]) -> Tensor<D> {
    Tensor::random(dims, Distribution::Uniform(-1.0, 1.0), &Device::flex().autodiff()).require_grad()
}

fn compare<const D: usize>(what: &str, fused: impl Fn() -> Tensor<D>, burn: impl Fn() -> Tensor<D>) {
    // The cheapest gradient that is not constant in memory: the backward of a sum.
    let mut fused = || drop(fused().sum().backward());
    let mut burn = || drop(burn().sum().backward());
    let [fused, burn] = medians(21, [&mut fused, &mut burn]);
    println!("{what:28} {:9.3} ms {:9.3} ms {:6.2}", fused * 1e3, burn * 1e3, fused / burn);
}

pub(super) fn run() {
    println!("{:28} {:>12} {:>12} {:>6}", "forward and backward", "ours", "Burn's", "ratio");
    let (x, wide) = (leaf([2, 256, WIDTH]), leaf([2, 256, 4 * WIDTH]));
    let (weight, bias) = (leaf([WIDTH, 4 * WIDTH]), leaf([4 * WIDTH]));
    let (gamma, beta) = (leaf([WIDTH]), leaf([WIDTH]));
    compare(
        "linear 384 to 1536",
        || ops::linear(x.clone(), weight.clone(), Some(bias.clone())),
        || reference::linear(x.clone(), weight.clone(), Some(bias.clone())),
    );
    compare(
        "linear_residual 384 to 1536",
        || ops::linear_residual(x.clone(), weight.clone(), Some(bias.clone()), wide.clone()),
        || reference::linear_residual(x.clone(), weight.clone(), Some(bias.clone()), wide.clone()),
    );
    let table = leaf([4096, WIDTH]);
    compare(
        "linear_transposed to 4096",
        || ops::linear_transposed(x.clone(), table.clone()),
        || reference::linear_transposed(x.clone(), table.clone()),
    );
    compare("gelu_tanh", || ops::gelu_tanh(wide.clone()), || reference::gelu_tanh(wide.clone()));
    let gate = leaf([2, 256, 4 * WIDTH]);
    compare(
        "silu_mul",
        || ops::silu_mul(gate.clone(), wide.clone()),
        || reference::silu_mul(gate.clone(), wide.clone()),
    );
    compare(
        "layer_norm",
        || ops::layer_norm(x.clone(), gamma.clone(), Some(beta.clone()), 1e-5),
        || reference::layer_norm(x.clone(), gamma.clone(), Some(beta.clone()), 1e-5),
    );
    compare(
        "rms_norm",
        || ops::rms_norm(x.clone(), gamma.clone(), 1e-5),
        || reference::rms_norm(x.clone(), gamma.clone(), 1e-5),
    );
    let qkv = leaf([2, 256, 3 * WIDTH]);
    compare(
        "causal_attention_packed",
        || ops::causal_attention_packed(qkv.clone(), 6),
        || reference::causal_attention_packed(qkv.clone(), 6),
    );
    let heads = AttentionHeads { num_heads: 6, num_kv_heads: 2, head_dim: 64 };
    let (k, v) = (leaf([2, 256, 128]), leaf([2, 256, 128]));
    compare(
        "causal_attention, grouped",
        || ops::causal_attention(x.clone(), k.clone(), v.clone(), heads),
        || reference::causal_attention(x.clone(), k.clone(), v.clone(), heads),
    );
    let (cos, sin) = (leaf([256, 32]).detach(), leaf([256, 32]).detach());
    compare(
        "rotary",
        || ops::rotary(x.clone(), &cos, &sin, 64),
        || reference::rotary(x.clone(), &cos, &sin, 64),
    );
    let ids = Tensor::<1, Int>::arange(0..ROWS as i64, &Device::flex()).reshape([2, 256]);
    let positions = leaf([256, WIDTH]);
    compare(
        "embedding_with_positions",
        || ops::embedding_with_positions(table.clone(), positions.clone(), ids.clone()),
        || reference::embedding_with_positions(table.clone(), positions.clone(), ids.clone()),
    );
    let logits = leaf([2, 256, 4096]);
    // The logits are some operation's output, as in a model, not a leaf that is shared.
    compare(
        "cross_entropy, 4096 classes",
        || ops::cross_entropy(logits.clone() * 1.5, ids.clone()),
        || reference::cross_entropy(logits.clone() * 1.5, ids.clone()),
    );
}
