//! A model's parameters, told from its configuration: path, shape, and the tensor of a Hugging Face file.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Tensor};
use shardwise_checkpoint::StoredLayout;

use crate::config::ModelConfig;
use crate::error::Result;

/// One parameter of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParameterInfo {
    /// Its path in the module, such as `blocks.0.attention.qkv.weight`.
    pub path: String,
    /// Its shape in the module.
    pub shape: Vec<usize>,
    /// The name that `transformers` saves it under.
    pub tensor: String,
    /// How it is stored there.
    pub layout: StoredLayout,
}

impl ParameterInfo {
    /// The number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Its shape in a file.
    pub fn stored_shape(&self) -> Vec<usize> {
        match self.layout {
            StoredLayout::AsIs => self.shape.clone(),
            StoredLayout::Transposed => self.shape.iter().rev().copied().collect(),
        }
    }
}

impl ModelConfig {
    /// All parameters, in the order of a walk over the module. None gets a value.
    ///
    /// # Errors
    /// As [`ModelConfig::validate`].
    pub fn parameters(&self) -> Result<Vec<ParameterInfo>> {
        let mut walk = Walk::default();
        self.init(&Device::flex())?.visit(&mut walk);
        walk.found
            .into_iter()
            .map(|(path, shape)| {
                let (tensor, layout) = self.hf_name(&path)?;
                Ok(ParameterInfo { path, shape, tensor, layout })
            })
            .collect()
    }
}

#[derive(Default)]
struct Walk {
    path: Vec<String>,
    found: Vec<(String, Vec<usize>)>,
}

impl ModuleVisitor for Walk {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.found.push((self.path.join("."), param.lazy_shape().to_vec()));
    }
}
