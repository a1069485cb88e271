//! Weights on disk: one safetensors file, f32, each tensor named by its place and role in the model
//! (`blocks.0.attention.forget_gate.weight`).

mod earlier_names;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorData};
use longwall_kernels::Cpu;
use longwall_kernels::backend::OpBackend;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensorError, SafeTensors};

pub use self::earlier_names::EarlierNames;
use crate::{LanguageModel, ModelConfig};

/// Why weights could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// The file cannot be read or written.
    #[error("cannot {action} the weights file {}: {source}\n  hint: check the path and its permissions, and the room on the disk", path.display())]
    Io {
        /// `read` or `write`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The file is no safetensors file, or damaged.
    #[error(
        "{} is not a valid safetensors file: {reason}\n  hint: take an earlier checkpoint",
        path.display()
    )]
    Format {
        /// The file.
        path: PathBuf,
        /// The reader's reason.
        reason: String,
    },
    /// The file's tensors are not those of the model.
    #[error(
        "the weights in {} do not fit the model: {reason}\n  hint: use the config.toml that lies beside them",
        path.display()
    )]
    Mismatch {
        /// The file.
        path: PathBuf,
        /// The first difference found.
        reason: String,
    },
    /// A model cannot start from the file's weights.
    #[error(
        "the model cannot start from the weights in {}:{}\n  hint: give the new configuration the source's [model] table and, with learned positions, its data.seq_len; only the attention kind may differ",
        path.display(), shown(problems)
    )]
    NoStart {
        /// The file.
        path: PathBuf,
        /// Every weight and layer that does not fit.
        problems: Vec<String>,
    },
}

/// The most problems that a message lists.
const MOST_SHOWN: usize = 12;

fn shown(problems: &[String]) -> String {
    let lines: String =
        problems.iter().take(MOST_SHOWN).map(|line| format!("\n  {line}")).collect();
    match problems.len().saturating_sub(MOST_SHOWN) {
        0 => lines,
        more => format!("{lines}\n  and {more} more"),
    }
}

/// Named f32 tensors in the model's order: name, shape, elements.
pub type NamedTensors = Vec<(String, Vec<usize>, Vec<f32>)>;

/// Shapes and elements of f32 tensors by name.
pub type TensorMap = HashMap<String, (Vec<usize>, Vec<f32>)>;

/// Writes named tensors to a safetensors file.
///
/// # Errors
/// When the file cannot be written.
pub fn write_tensors(path: &Path, tensors: &NamedTensors) -> Result<(), WeightsError> {
    let views = tensors.iter().map(|(name, shape, data)| {
        let view = TensorView::new(Dtype::F32, shape.clone(), bytemuck::cast_slice(data));
        (name, view.expect("the elements are those of the shape"))
    });
    safetensors::serialize_to_file(views, None, path).map_err(|error| match error {
        SafeTensorError::IoError(source) => {
            WeightsError::Io { action: "write", path: path.to_owned(), source }
        }
        other => WeightsError::Format { path: path.to_owned(), reason: other.to_string() },
    })
}

/// Reads every tensor of a safetensors file, by name.
///
/// # Errors
/// When the file cannot be read, is damaged, or holds a type other than f32.
pub fn read_tensors(path: &Path) -> Result<TensorMap, WeightsError> {
    let bytes = std::fs::read(path).map_err(|source| WeightsError::Io {
        action: "read",
        path: path.to_owned(),
        source,
    })?;
    let format = |reason: String| WeightsError::Format { path: path.to_owned(), reason };
    let file = SafeTensors::deserialize(&bytes).map_err(|e| format(e.to_string()))?;
    file.iter()
        .map(|(name, view)| {
            if view.dtype() != Dtype::F32 {
                return Err(format(format!("{name} is {:?}; allowed: F32", view.dtype())));
            }
            let data = view.data().chunks_exact(4);
            let data = data.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
            Ok((name.to_owned(), (view.shape().to_vec(), data)))
        })
        .collect()
}

/// A model's parameters by name, in the model's order.
pub fn named_tensors<B: OpBackend>(model: &LanguageModel<B>) -> NamedTensors {
    collect(model, true)
}

/// Names and shapes of the parameters of a model of `config`, in the model's order. Takes no memory for weights.
///
/// Learned positions, if any, cover `seq_len` tokens.
pub fn parameter_shapes(
    config: &ModelConfig,
    vocab_size: usize,
    seq_len: usize,
) -> Vec<(String, Vec<usize>)> {
    shapes_of(&LanguageModel::<Cpu>::blank(config, vocab_size, seq_len, &Default::default()))
}

/// Names and shapes of a model's parameters, in the model's order.
pub(crate) fn shapes_of<B: OpBackend>(model: &LanguageModel<B>) -> Vec<(String, Vec<usize>)> {
    collect(model, false).into_iter().map(|(name, shape, _)| (name, shape)).collect()
}

/// Names and shapes of a model's parameters; elements only with `read`, because reading them copies
/// them from the device.
fn collect<B: OpBackend>(model: &LanguageModel<B>, read: bool) -> NamedTensors {
    struct Collect {
        path: Vec<String>,
        read: bool,
        found: NamedTensors,
    }
    impl<B: Backend> ModuleVisitor<B> for Collect {
        fn enter_module(&mut self, name: &str, _container: &str) {
            self.path.push(name.to_owned());
        }
        fn exit_module(&mut self, _name: &str, _container: &str) {
            self.path.pop();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let data = match self.read {
                true => param.val().into_data().iter::<f32>().collect(),
                false => vec![],
            };
            self.found.push((self.path.join("."), param.dims().to_vec(), data));
        }
    }
    let mut collect = Collect { path: vec![], read, found: vec![] };
    model.visit(&mut collect);
    collect.found
}

/// Writes a model's weights.
///
/// # Errors
/// When the file cannot be written.
pub fn save<B: OpBackend>(model: &LanguageModel<B>, path: &Path) -> Result<(), WeightsError> {
    write_tensors(path, &named_tensors(model))
}

/// Loads the weights of a file into a model of the same configuration. The file may have earlier
/// names, see [`EarlierNames`].
///
/// # Errors
/// When the file cannot be read, or its names or shapes differ from the model's.
pub fn load<B: OpBackend>(
    model: LanguageModel<B>,
    path: &Path,
) -> Result<LanguageModel<B>, WeightsError> {
    let mismatch = |reason: String| WeightsError::Mismatch { path: path.to_owned(), reason };
    let mut tensors = EarlierNames::of(&model).replace(read_tensors(path)?);
    let wanted = collect(&model, false);
    for (name, shape, _) in &wanted {
        match tensors.get(name) {
            None => return Err(mismatch(format!("{name} is missing from the file"))),
            Some((found, _)) if found != shape => {
                return Err(mismatch(format!("{name} has shape {found:?}, the model's {shape:?}")));
            }
            Some(_) => {}
        }
    }
    let mut replace = Replace { path: vec![], tensors: &mut tensors };
    let model = model.map(&mut replace);
    if let Some(name) = tensors.keys().min() {
        let (extra, count) = (tensors.len(), wanted.len());
        let reason =
            format!("the file has {extra} tensors beside the model's {count}, for example {name}");
        return Err(mismatch(reason));
    }
    Ok(model)
}

/// `model` with the tensors of `tensors` in place of its parameters of the same names and shapes.
pub(crate) fn with_tensors<B: OpBackend>(
    model: LanguageModel<B>,
    mut tensors: TensorMap,
) -> LanguageModel<B> {
    model.map(&mut Replace { path: vec![], tensors: &mut tensors })
}

/// Replaces each parameter with the tensor of its name, if there is one.
struct Replace<'a> {
    path: Vec<String>,
    tensors: &'a mut TensorMap,
}

impl<B: Backend> ModuleMapper<B> for Replace<'_> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }
    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let Some((shape, data)) = self.tensors.remove(&self.path.join(".")) else { return param };
        let device = param.device();
        param.map(|old| {
            let new = Tensor::from_data(TensorData::new(data, shape), &device);
            if old.is_require_grad() { new.require_grad() } else { new }
        })
    }
}
