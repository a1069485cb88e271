//! The optimiser's state in a checkpoint: one safetensors file with tensors `NAME.PATH`, the name of
//! the state tensor and the path of its parameter.

use std::collections::HashMap;
use std::path::Path;

use burn::tensor::{Tensor, TensorData};
use longwall_kernels::backend::{OpBackend, primitive};
use longwall_model::weights::{EarlierNames, WeightsError, read_tensors};

use super::{Optimiser, Slot, StateTensor};

impl<B: OpBackend> Optimiser<B> {
    /// Reads the state that a file holds, possibly under `earlier` names of the model's
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
        for Slot { rule, layout, state, own, .. } in &mut self.slots {
            let mut loaded = vec![];
            for StateTensor { name, shape } in layout.iter() {
                let name = format!("{name}.{}", rule.parameter.path);
                let elements = take(&mut tensors, path, &name, shape)?;
                if *own {
                    let flat = TensorData::new(elements, [shape.iter().product::<usize>()]);
                    let flat = Tensor::<B, 1>::from_data(flat, device);
                    loaded.push(B::float_reshape(primitive(flat), shape.clone().into()));
                }
            }
            *state = loaded;
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
