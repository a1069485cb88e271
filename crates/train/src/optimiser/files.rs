//! The optimiser's state in a checkpoint: one safetensors file with tensors `NAME.PATH`, the name of
//! the state tensor and the path of its parameter.

use std::collections::HashMap;
use std::path::Path;

use burn::tensor::{Tensor, TensorData};
use longwall_kernels::backend::{OpBackend, primitive, tensor};
use longwall_model::weights::{EarlierNames, NamedTensors, WeightsError, read_tensors};

use super::{Optimiser, Slot, StateTensor};

impl<B: OpBackend> Optimiser<B> {
    /// The state by name, in main memory; among ranks, that of the parameters that this one owns.
    pub fn named_tensors(&self) -> NamedTensors {
        let of_slot = |slot: &Slot<B>| -> NamedTensors {
            let tensors = slot.layout.iter().zip(&slot.state);
            let named = tensors.map(|(StateTensor { name, shape }, state)| {
                let flat =
                    B::float_reshape(state.clone(), [shape.iter().product::<usize>()].into());
                let elements = tensor::<B, 1>(flat).into_data().iter::<f32>().collect();
                (format!("{name}.{}", slot.rule.parameter.path), shape.clone(), elements)
            });
            named.collect()
        };
        self.slots.iter().flat_map(of_slot).collect()
    }

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
