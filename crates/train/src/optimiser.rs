//! AdamW over a model's parameters, in groups: matrices decay, all else does not.
//!
//! A parameter that the model holds in bf16 has an f32 master here: updates run on it, and the
//! model gets its rounded copy. Files hold masters.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;

use burn::backend::Autodiff;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Tensor, TensorData, TensorMetadata};
use longwall_kernels::backend::{OpBackend, primitive, tensor};
use longwall_kernels::ops::adamw::{AdamwStep, adamw};
use longwall_model::Precision;
use longwall_model::weights::{WeightsError, read_tensors};
use safetensors::{Dtype, SafeTensorError, View};

use crate::config::OptimiserConfig;
use crate::gradients::Gradients;

/// Whether weight decay applies to the parameter at `path` (segments joined by dots) of `rank`
/// dimensions: to matrices, but not to token and position embeddings. Norms, biases, gates' biases
/// and the vectors of attention variants have rank 1.
pub fn decays(path: &str, rank: usize) -> bool {
    let is_embedding = path.split('.').any(|part| part == "embedding" || part == "positions");
    rank >= 2 && !is_embedding
}

/// The numbers of one update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Update {
    /// Learning rate.
    pub lr: f64,
    /// How many updates there were, this one included: 1 for the first.
    pub number: u64,
    /// Factor on the gradients.
    pub grad_scale: f32,
}

/// AdamW's state: two moments a parameter, and its master where the model holds a rounded copy, in
/// the order in which the module visits them.
#[derive(Debug)]
pub struct Optimiser<B: OpBackend> {
    config: OptimiserConfig,
    slots: Vec<Slot<B>>,
}

/// One parameter's state.
#[derive(Debug)]
struct Slot<B: OpBackend> {
    path: String,
    shape: Vec<usize>,
    decays: bool,
    /// First and second moment; taken only while the parameter is being updated.
    moments: Option<[FloatTensor<B>; 2]>,
    /// The parameter in f32, where the model's is rounded.
    master: Option<FloatTensor<B>>,
}

impl<B: OpBackend> Optimiser<B> {
    /// The state before the first update of an f32 model: all moments zero.
    pub fn new<M: Module<Autodiff<B>>>(config: &OptimiserConfig, model: &M) -> Self {
        let mut make = MakeSlots { path: Vec::new(), slots: Vec::new() };
        model.visit(&mut make);
        Optimiser { config: config.clone(), slots: make.slots }
    }

    /// Gives `model`, f32 as yet, in `precision`, and keeps the masters of what that rounds.
    ///
    /// # Panics
    /// When the model is not the one that the optimiser was made for.
    pub fn round<M: Module<Autodiff<B>>>(&mut self, model: M, precision: Precision) -> M {
        let mut slots = self.slots.iter_mut();
        let mut keep = KeepMasters { slots: &mut slots, precision };
        model.visit(&mut keep);
        assert!(slots.next().is_none(), "as many parameters as slots");
        precision.convert(model)
    }

    /// `model` with its masters in place of their rounded copies: what files hold.
    ///
    /// # Panics
    /// When the model is not the one that the optimiser was made for.
    pub fn with_masters<M: Module<B>>(&self, model: M) -> M {
        model.map(&mut PutMasters { slots: self.slots.iter() })
    }

    /// Elements of the parameters that decay, and of those that do not.
    pub fn group_sizes(&self) -> (usize, usize) {
        let size = |decays| {
            let group = self.slots.iter().filter(|slot| slot.decays == decays);
            group.map(|slot| slot.shape.iter().product::<usize>()).sum()
        };
        (size(true), size(false))
    }

    /// One update of every parameter that has a gradient. Buffers that nobody else owns are
    /// updated in place.
    ///
    /// # Panics
    /// When model or gradients are not those that the optimiser was made for.
    pub fn step<M: Module<Autodiff<B>>>(
        &mut self,
        model: M,
        gradients: Gradients<B>,
        update: Update,
    ) -> M {
        let slots = self.slots.len();
        assert_eq!(gradients.tensors.len(), slots, "as many gradients as parameters");
        let OptimiserConfig::Adamw { beta1, beta2, eps, weight_decay } = self.config;
        let step = AdamwStep {
            lr: update.lr as f32,
            beta1: beta1 as f32,
            beta2: beta2 as f32,
            eps: eps as f32,
            weight_decay: weight_decay as f32,
            step: update.number,
            grad_scale: update.grad_scale,
        };
        let pairs = self.slots.iter_mut().zip(gradients.tensors);
        model.map(&mut ApplyUpdate { step, pairs })
    }

    /// Writes the moments as `m.<path>` and `v.<path>`, one tensor at a time.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn save(&self, path: &Path) -> Result<(), WeightsError> {
        let tensors = self.slots.iter().flat_map(|slot| {
            let moments = slot.moments.as_ref().expect("moments are in place between updates");
            ["m", "v"].into_iter().zip(moments).map(|(name, moment)| {
                let shape = slot.shape.clone();
                (format!("{name}.{}", slot.path), Moment::<B> { shape, tensor: moment.clone() })
            })
        });
        safetensors::serialize_to_file(tensors, None, path).map_err(|error| match error {
            SafeTensorError::IoError(source) => {
                WeightsError::Io { action: "write", path: path.to_owned(), source }
            }
            other => WeightsError::Format { path: path.to_owned(), reason: other.to_string() },
        })
    }

    /// Reads the moments that [`Optimiser::save`] wrote.
    ///
    /// # Errors
    /// When the file cannot be read, or holds the moments of another model.
    pub fn load(&mut self, path: &Path, device: &B::Device) -> Result<(), WeightsError> {
        let mut tensors = read_tensors(path)?;
        for slot in &mut self.slots {
            let m = take(&mut tensors, path, &format!("m.{}", slot.path), &slot.shape)?;
            let v = take(&mut tensors, path, &format!("v.{}", slot.path), &slot.shape)?;
            slot.moments = Some([m, v].map(|elements| {
                let flat = TensorData::new(elements, [slot.shape.iter().product::<usize>()]);
                let flat = Tensor::<B, 1>::from_data(flat, device);
                B::float_reshape(primitive(flat), slot.shape.clone().into())
            }));
        }
        match tensors.keys().min() {
            None => Ok(()),
            Some(name) => Err(mismatch(path, format!("{name} is no parameter of the model"))),
        }
    }
}

fn mismatch(path: &Path, reason: String) -> WeightsError {
    WeightsError::Mismatch { path: path.to_owned(), reason }
}

/// Removes the elements of `name` from `tensors`.
fn take(
    tensors: &mut HashMap<String, (Vec<usize>, Vec<f32>)>,
    path: &Path,
    name: &str,
    shape: &[usize],
) -> Result<Vec<f32>, WeightsError> {
    match tensors.remove(name) {
        Some((found, elements)) if found == shape => Ok(elements),
        Some((found, _)) => {
            Err(mismatch(path, format!("{name} has shape {found:?}, the model's {shape:?}")))
        }
        None => Err(mismatch(path, format!("{name} is missing from the file"))),
    }
}

struct MakeSlots<B: OpBackend> {
    path: Vec<String>,
    slots: Vec<Slot<B>>,
}

impl<B: OpBackend> ModuleVisitor<Autodiff<B>> for MakeSlots<B> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Autodiff<B>, D>>) {
        let (path, shape, device) = (self.path.join("."), param.dims(), param.device());
        let zeros = || primitive(Tensor::<B, D>::zeros(shape, &device));
        self.slots.push(Slot {
            decays: decays(&path, D),
            path,
            shape: shape.to_vec(),
            moments: Some([zeros(), zeros()]),
            master: None,
        });
    }
}

struct KeepMasters<I> {
    slots: I,
    precision: Precision,
}

impl<'a, B: OpBackend, I> ModuleVisitor<Autodiff<B>> for KeepMasters<I>
where
    I: Iterator<Item = &'a mut Slot<B>>,
{
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Autodiff<B>, D>>) {
        let slot = self.slots.next().expect("as many slots as parameters");
        let rounds = self.precision.parameter(D) != param.val().dtype();
        slot.master = rounds.then(|| primitive(param.val().inner()));
    }
}

struct PutMasters<I> {
    slots: I,
}

impl<'a, B: OpBackend, I: Iterator<Item = &'a Slot<B>>> ModuleMapper<B> for PutMasters<I> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let slot = self.slots.next().expect("as many slots as parameters");
        match &slot.master {
            Some(master) => param.map(|_| tensor::<B, D>(master.clone())),
            None => param,
        }
    }
}

struct ApplyUpdate<I> {
    step: AdamwStep,
    pairs: I,
}

impl<'a, B, I> ModuleMapper<Autodiff<B>> for ApplyUpdate<I>
where
    B: OpBackend,
    I: Iterator<Item = (&'a mut Slot<B>, Option<FloatTensor<B>>)>,
{
    fn map_float<const D: usize>(
        &mut self,
        param: Param<Tensor<Autodiff<B>, D>>,
    ) -> Param<Tensor<Autodiff<B>, D>> {
        let (slot, gradient) = self.pairs.next().expect("as many slots as parameters");
        let (id, value, mapper) = param.consume();
        let Some(gradient) = gradient else {
            return Param::from_mapped_value(id, value, mapper);
        };
        assert_eq!(value.dims()[..], slot.shape[..], "the shape of {}", slot.path);
        let [m, v] = slot.moments.take().expect("moments are in place between updates");
        let weight_decay = if slot.decays { self.step.weight_decay } else { 0.0 };
        let step = AdamwStep { weight_decay, ..self.step };
        let (old, copy) = match slot.master.take() {
            Some(master) => (master, Some(value.dtype())),
            None => (primitive(value.inner()), None),
        };
        let ([new, m, v], copy) = adamw::<B>(&step, [old, gradient, m, v], copy);
        slot.moments = Some([m, v]);
        let value = match copy {
            Some(copy) => {
                slot.master = Some(new);
                copy
            }
            None => new,
        };
        let value = Tensor::from_inner(tensor::<B, D>(value)).require_grad();
        Param::from_mapped_value(id, value, mapper)
    }
}

/// A moment that is fetched from the device when it is written.
struct Moment<B: OpBackend> {
    shape: Vec<usize>,
    tensor: FloatTensor<B>,
}

impl<B: OpBackend> View for Moment<B> {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let count = self.tensor.shape().num_elements();
        let flat = B::float_reshape(self.tensor.clone(), [count].into());
        let elements = tensor::<B, 1>(flat).into_data();
        Cow::Owned(elements.iter::<f32>().flat_map(f32::to_le_bytes).collect())
    }

    fn data_len(&self) -> usize {
        self.shape.iter().product::<usize>() * size_of::<f32>()
    }
}

#[cfg(test)]
mod tests;
