//! Burn's parameter modules, filled as language models are and computed with through the fused operations.

use burn::module::{Initializer, Param};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, Linear, LinearConfig, RmsNorm};
use burn::tensor::{Device, Tensor};
use shardwise_burn::ops;

/// Values drawn from a normal distribution around 0.
pub(crate) fn normal(std: f64) -> Initializer {
    Initializer::Normal { mean: 0.0, std }
}

/// A layer with a weight of `[width_in, width_out]` and no bias.
pub(crate) fn linear([width_in, width_out]: [usize; 2], std: f64, device: &Device) -> Linear {
    LinearConfig::new(width_in, width_out).with_bias(false).with_initializer(normal(std)).init(device)
}

/// [`linear`] with a bias, which starts at 0.
pub(crate) fn linear_with_bias(widths: [usize; 2], std: f64, device: &Device) -> Linear {
    Linear { bias: Some(Initializer::Zeros.init([widths[1]], device)), ..linear(widths, std, device) }
}

/// A table of `[rows, width]`.
pub(crate) fn embedding([rows, width]: [usize; 2], std: f64, device: &Device) -> Embedding {
    EmbeddingConfig::new(rows, width).with_initializer(normal(std)).init(device)
}

/// `layer(x)`.
pub(crate) fn project(layer: &Linear, x: Tensor<3>) -> Tensor<3> {
    ops::linear(x, layer.weight.val(), layer.bias.as_ref().map(Param::val))
}

/// `residual + layer(x)`.
pub(crate) fn project_onto(residual: Tensor<3>, layer: &Linear, x: Tensor<3>) -> Tensor<3> {
    ops::linear_residual(x, layer.weight.val(), layer.bias.as_ref().map(Param::val), residual)
}

/// The layer norm of `x`. (Burn's module keeps its epsilon to itself.)
pub(crate) fn layer_norm(norm: &LayerNorm, epsilon: f64, x: Tensor<3>) -> Tensor<3> {
    ops::layer_norm(x, norm.gamma.val(), norm.beta.as_ref().map(Param::val), epsilon)
}

/// The root-mean-square norm of `x`.
pub(crate) fn rms_norm(norm: &RmsNorm, x: Tensor<3>) -> Tensor<3> {
    ops::rms_norm(x, norm.gamma.val(), norm.epsilon)
}

/// The logits for `x`, whose last axis is the model's width. The weight is `[vocabulary, width]`, one row for each token
/// as in the embedding: `head`'s own, or with a tied head the embedding's.
pub(crate) fn logits(
    x: Tensor<3>,
    head: Option<&Param<Tensor<2>>>,
    token_embedding: &Embedding,
) -> Tensor<3> {
    ops::linear_transposed(x, head.unwrap_or(&token_embedding.weight).val())
}
