//! The optimiser's state in a checkpoint: one safetensors file with tensors `NAME.PATH`, the name of
//! the state tensor and the path of its parameter.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;

use burn::tensor::ops::FloatTensor;
use burn::tensor::{Tensor, TensorData, TensorMetadata};
use longwall_kernels::backend::{OpBackend, primitive, tensor};
use longwall_model::weights::{EarlierNames, WeightsError, read_tensors};
use safetensors::{Dtype, SafeTensorError, View};

use super::{Optimiser, Slot, StateTensor};

impl<B: OpBackend> Optimiser<B> {
    /// Writes the state, one tensor at a time.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn save(&self, path: &Path) -> Result<(), WeightsError> {
        let tensors = self.slots.iter().flat_map(|slot| {
            slot.layout.iter().zip(&slot.state).map(|(StateTensor { name, shape }, tensor)| {
                let view = Fetched::<B> { shape: shape.clone(), tensor: tensor.clone() };
                (format!("{name}.{}", slot.parameter.path), view)
            })
        });
        safetensors::serialize_to_file(tensors, None, path).map_err(|error| match error {
            SafeTensorError::IoError(source) => {
                WeightsError::Io { action: "write", path: path.to_owned(), source }
            }
            other => WeightsError::Format { path: path.to_owned(), reason: other.to_string() },
        })
    }

    /// Reads the state that [`Optimiser::save`] wrote, possibly under `earlier` names of the model's
    /// weights.
    ///
    /// # Errors
    /// When the file cannot be read, or holds the state of another model.
    pub fn load(
        &mut self,
        path: &Path,
        earlier: &EarlierNames,
        device: &B::Device,
    ) -> Result<(), WeightsError> {
        let mut tensors = earlier.replace(read_tensors(path)?);
        for Slot { parameter, layout, state, .. } in &mut self.slots {
            for (StateTensor { name, shape }, tensor) in layout.iter().zip(state) {
                let name = format!("{name}.{}", parameter.path);
                let elements = take(&mut tensors, path, &name, shape)?;
                let flat = TensorData::new(elements, [shape.iter().product::<usize>()]);
                let flat = Tensor::<B, 1>::from_data(flat, device);
                *tensor = B::float_reshape(primitive(flat), shape.clone().into());
            }
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

/// A tensor that is copied from the device only when it is written.
struct Fetched<B: OpBackend> {
    shape: Vec<usize>,
    tensor: FloatTensor<B>,
}

impl<B: OpBackend> View for Fetched<B> {
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
