//! A folder of weights as the source of a model's first values: checked as a whole, then read slice by slice.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;

use shardwise_burn::ParamSource;
use shardwise_checkpoint::{Dtype, SafetensorsFolder, StoredLayout};

use crate::config::ModelConfig;
use crate::error::{ModelError, Result};
use crate::names::{HEAD_TENSOR, Names, TOKEN_EMBEDDING};
use crate::parameters::ParameterInfo;

/// How many elements of a tied head are compared with the embedding: as many as tell apart any two that were trained.
const COMPARED: usize = 1 << 20;

/// The weights of one model in a Hugging Face folder.
///
/// As a [`ParamSource`] it reads the elements asked for and little else, so that each rank of a sharded model reads its
/// own slices. Names may lack the prefix (`transformer.`, `model.`), as in a file saved from the model without its head.
#[derive(Debug)]
pub struct WeightsFolder {
    folder: SafetensorsFolder,
    /// By path.
    tensors: BTreeMap<String, Located>,
    unused: Vec<String>,
}

#[derive(Debug)]
struct Located {
    name: String,
    layout: StoredLayout,
    /// The parameter's shape in the module.
    shape: Vec<usize>,
}

impl WeightsFolder {
    /// Opens the weights in `folder` and checks that they hold every parameter of the model that `config` describes, in
    /// the right shape and in a type that can be read. Values are read only where a tied model's weights have a head,
    /// to see that it is the embedding.
    ///
    /// Tensors that the model has no parameters for are left out ([`WeightsFolder::unused`]), but not those without which
    /// it would compute something else: anything in a block, and the bias of a layer that has none here.
    ///
    /// # Errors
    /// [`ModelError::Surplus`], [`ModelError::MissingTensor`], [`ModelError::MissingHead`], [`ModelError::TensorShape`],
    /// [`ModelError::TensorType`], [`ModelError::HeadDiffers`], or what [`SafetensorsFolder::open`] returns.
    pub fn open(folder: impl AsRef<Path>, config: &ModelConfig) -> Result<Self> {
        let path = folder.as_ref();
        let folder = SafetensorsFolder::open(path)?;
        let names = config.names();
        let mut unused: BTreeSet<&str> = folder.names().filter(|name| !names.is_constant(name)).collect();
        let mut tensors = BTreeMap::new();
        for parameter in config.parameters()? {
            let name = locate(&unused, names, &parameter.tensor)
                .ok_or_else(|| missing(path, names, parameter.clone()))?;
            check(&folder, name, &parameter)?;
            unused.remove(name);
            let ParameterInfo { path, shape, layout, .. } = parameter;
            tensors.insert(path, Located { name: name.to_string(), layout, shape });
        }
        if config.tie_word_embeddings() && unused.remove(HEAD_TENSOR) {
            check_tied_head(path, &folder, &tensors)?;
        }
        let used: BTreeSet<&str> = tensors.values().map(|located| located.name.as_str()).collect();
        let surplus: Vec<&str> = unused.iter().copied().filter(|n| is_mathematics(n, names, &used)).collect();
        if let Some(first) = surplus.first() {
            return Err(ModelError::Surplus {
                folder: path.to_path_buf(),
                tensor: (*first).to_string(),
                count: surplus.len(),
                layers: config.num_layers(),
            });
        }
        let unused = unused.into_iter().map(str::to_string).collect();
        Ok(Self { folder, tensors, unused })
    }

    /// The tensors that the model has no parameters for, sorted; without constants such as attention masks.
    pub fn unused(&self) -> &[String] {
        &self.unused
    }

    /// What a user should hear about [`WeightsFolder::unused`] tensors; nothing when there are none.
    pub fn warning(&self) -> Option<String> {
        const NAMED: usize = 5;
        let named = self.unused.iter().take(NAMED).map(|name| format!("`{name}`")).collect::<Vec<_>>();
        let more = match self.unused.len().saturating_sub(NAMED) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        (!named.is_empty()).then(|| {
            format!(
                "the weights hold what the model has no use for, and it is left out: {}{more}",
                named.join(", ")
            )
        })
    }

    /// How many bytes of tensor data have been read.
    pub fn bytes_read(&self) -> u64 {
        self.folder.bytes_read()
    }
}

impl ParamSource for WeightsFolder {
    fn fill(
        &self,
        path: &str,
        shape: &[usize],
        elements: Range<usize>,
        out: &mut [f32],
    ) -> Result<bool, String> {
        let Some(Located { name, layout, shape: known }) = self.tensors.get(path) else {
            return Err(
                "the configuration that the weights were opened with has no such parameter".to_string()
            );
        };
        if shape != known {
            return Err(format!("it has shape {shape:?}, but the weights were opened for {known:?}"));
        }
        self.folder.read_range(name, elements.clone(), *layout, out).map_err(|error| error.to_string())?;
        match out.iter().position(|value| !value.is_finite()) {
            None => Ok(true),
            Some(index) => Err(format!(
                "the tensor `{name}` holds {} (as element {} of the parameter); these weights are damaged or of a training \
                 that diverged: use others",
                out[index],
                elements.start + index
            )),
        }
    }
}

/// Whether a tensor that is no parameter takes part in what the model of its weights computes: it belongs to a block, or it
/// is the bias of a layer that is used without one.
fn is_mathematics(tensor: &str, names: &Names, used: &BTreeSet<&str>) -> bool {
    let weight = tensor.strip_suffix(".bias").map(|layer| format!("{layer}.weight"));
    names.is_in_block(tensor) || weight.is_some_and(|weight| used.contains(weight.as_str()))
}

/// The name among `present` that a tensor has, with its prefix or without.
fn locate<'a>(present: &BTreeSet<&'a str>, names: &Names, tensor: &str) -> Option<&'a str> {
    let bare = tensor.strip_prefix(names.prefix).unwrap_or(tensor);
    present.get(tensor).or_else(|| present.get(bare)).copied()
}

fn missing(folder: &Path, names: &Names, parameter: ParameterInfo) -> ModelError {
    let (folder, shape) = (folder.to_path_buf(), parameter.stored_shape());
    let ParameterInfo { tensor, path, .. } = parameter;
    match tensor.as_str() {
        HEAD_TENSOR => ModelError::MissingHead { folder, tensor, shape },
        _ => ModelError::MissingTensor { folder, tensor, shape, path, prefix: names.prefix },
    }
}

fn check(folder: &SafetensorsFolder, name: &str, parameter: &ParameterInfo) -> Result<()> {
    let info = folder.info(name)?;
    let (file, tensor) = (info.file.clone(), name.to_string());
    if !matches!(info.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
        return Err(ModelError::TensorType { file, tensor, found: info.dtype });
    }
    let expected = parameter.stored_shape();
    if info.shape != expected {
        let (found, path) = (info.shape.clone(), parameter.path.clone());
        return Err(ModelError::TensorShape { file, tensor, found, expected, path });
    }
    Ok(())
}

/// Whether the head that a tied model's weights hold is the embedding, as `transformers` demands before it ties the two.
fn check_tied_head(
    path: &Path,
    folder: &SafetensorsFolder,
    tensors: &BTreeMap<String, Located>,
) -> Result<()> {
    let Some(embedding) = tensors.get(TOKEN_EMBEDDING) else { return Ok(()) };
    let numel = embedding.shape.iter().product::<usize>().min(COMPARED);
    let read = |name: &str| {
        let mut values = vec![0.0f32; numel];
        folder.read_range(name, 0..numel, StoredLayout::AsIs, &mut values).map(|()| values)
    };
    let same =
        folder.info(HEAD_TENSOR)?.shape == embedding.shape && read(HEAD_TENSOR)? == read(&embedding.name)?;
    if same {
        return Ok(());
    }
    Err(ModelError::HeadDiffers {
        folder: path.to_path_buf(),
        head: HEAD_TENSOR.to_string(),
        embedding: embedding.name.clone(),
    })
}
