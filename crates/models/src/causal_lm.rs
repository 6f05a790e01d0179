//! What every causal language model here can do, and one type for all of them.

use burn::module::{
    Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor,
};
use burn::tensor::{Device, Int, Tensor};
use shardwise_burn::ops;

use crate::gpt2::Gpt2;
use crate::llama::Llama;

/// A model that predicts each token from those before it.
///
/// In a sharded run every method that takes tokens must be called inside a step or an evaluation, and by every rank.
///
/// # Panics
/// Methods that take tokens do, if a sequence is longer than [`CausalLm::max_positions`] or empty, or a token is not
/// below [`CausalLm::vocab_size`].
pub trait CausalLm {
    /// How many tokens the model knows.
    fn vocab_size(&self) -> usize;

    /// The longest sequence, in tokens.
    fn max_positions(&self) -> usize;

    /// The residual stream after the last block.
    ///
    /// # Shapes
    /// `ids`: `[batch, len]`; the result: `[batch, len, width]`.
    fn hidden(&self, ids: Tensor<2, Int>) -> Tensor<3>;

    /// The last norm and the head.
    ///
    /// # Shapes
    /// `hidden`: `[batch, len, width]`; the result: `[batch, len, vocabulary]`.
    fn logits(&self, hidden: Tensor<3>) -> Tensor<3>;

    /// The logits at every position.
    ///
    /// # Shapes
    /// `ids`: `[batch, len]`; the result: `[batch, len, vocabulary]`.
    fn forward(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        self.logits(self.hidden(ids))
    }

    /// The mean cross entropy over all tokens, as a tensor of one element. It holds one buffer of logits, which becomes
    /// their gradient in place.
    ///
    /// # Shapes
    /// `ids` and `targets` (the tokens that follow): `[batch, len]`.
    fn loss(&self, ids: Tensor<2, Int>, targets: Tensor<2, Int>) -> Tensor<1> {
        ops::cross_entropy(self.forward(ids), targets)
    }

    /// The logits at the last position only: what sampling needs.
    ///
    /// # Shapes
    /// `ids`: `[batch, len]`; the result: `[batch, vocabulary]`.
    fn last_logits(&self, ids: Tensor<2, Int>) -> Tensor<2> {
        let hidden = self.hidden(ids);
        let [_, len, _] = hidden.dims();
        assert!(len > 0, "logits of the last position: the sequences are empty");
        self.logits(hidden.narrow(1, len - 1, 1)).squeeze_dim(1)
    }
}

/// A model of either family.
///
/// The enum leaves no trace in parameter paths: they are those of [`Gpt2`] or [`Llama`].
#[derive(Clone, Debug)]
pub enum LanguageModel {
    /// GPT-2.
    Gpt2(Gpt2),
    /// Llama.
    Llama(Llama),
}

/// The same expression for the model of either family.
macro_rules! either {
    ($value:expr, $model:ident => $expression:expr) => {
        match $value {
            LanguageModel::Gpt2($model) => $expression,
            LanguageModel::Llama($model) => $expression,
        }
    };
}

impl CausalLm for LanguageModel {
    fn vocab_size(&self) -> usize {
        either!(self, model => model.vocab_size())
    }

    fn max_positions(&self) -> usize {
        either!(self, model => model.max_positions())
    }

    fn hidden(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        either!(self, model => model.hidden(ids))
    }

    fn logits(&self, hidden: Tensor<3>) -> Tensor<3> {
        either!(self, model => model.logits(hidden))
    }
}

impl LanguageModel {
    /// The same family, with its model changed by Burn.
    fn map_model(self, gpt2: impl FnOnce(Gpt2) -> Gpt2, llama: impl FnOnce(Llama) -> Llama) -> Self {
        match self {
            Self::Gpt2(model) => Self::Gpt2(gpt2(model)),
            Self::Llama(model) => Self::Llama(llama(model)),
        }
    }
}

/// By hand, because the derived one puts the variant's name into parameter paths.
impl Module for LanguageModel {
    fn collect_devices(&self, devices: Devices) -> Devices {
        either!(self, model => model.collect_devices(devices))
    }

    fn fork(self, device: &Device) -> Self {
        self.map_model(|model| model.fork(device), |model| model.fork(device))
    }

    fn to_device(self, device: &Device) -> Self {
        self.map_model(|model| model.to_device(device), |model| model.to_device(device))
    }

    fn materialize(self) -> Self {
        self.map_model(Module::materialize, Module::materialize)
    }

    fn valid(&self) -> Self {
        self.clone().map_model(|model| model.valid(), |model| model.valid())
    }

    fn train(self) -> Self {
        self.map_model(Module::train, Module::train)
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        either!(self, model => model.visit(visitor));
    }

    fn map<P: ModuleMapper>(self, mapper: &mut P) -> Self {
        match self {
            Self::Gpt2(model) => Self::Gpt2(model.map(mapper)),
            Self::Llama(model) => Self::Llama(model.map(mapper)),
        }
    }
}

impl ModuleDisplayDefault for LanguageModel {
    fn content(&self, content: Content) -> Option<Content> {
        either!(self, model => model.content(content))
    }

    fn num_params(&self) -> usize {
        either!(self, model => Module::num_params(model))
    }
}

impl ModuleDisplay for LanguageModel {}
