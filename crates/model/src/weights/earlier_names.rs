//! Names that attention layers' weights had in older files, which numbered them:
//! `projections.0.outer.weight` is now `forget_gate.weight`.

use std::collections::HashMap;

use longwall_kernels::backend::OpBackend;

use super::TensorMap;
use crate::LanguageModel;
use crate::layers::Attention;

/// Maps each earlier name of a model's weight to its current name.
#[derive(Clone, Debug)]
pub struct EarlierNames(HashMap<String, String>);

impl EarlierNames {
    /// The earlier names of `model`'s weights.
    pub fn of<B: OpBackend>(model: &LanguageModel<B>) -> Self {
        let layers = model.blocks.iter().enumerate();
        let names = layers.flat_map(|(layer, block)| {
            let place = format!("blocks.{layer}.attention");
            let names = of_layer(&block.attention).into_iter();
            names.map(move |(was, is)| (format!("{place}.{was}"), format!("{place}.{is}")))
        });
        EarlierNames(names.collect())
    }

    /// Gives the tensors of a file their current names. A prefix before `blocks`, as in an optimiser's
    /// `m.blocks.0…`, is kept. A tensor whose current name the file has too keeps its earlier name: no
    /// model takes both.
    pub fn replace(&self, mut tensors: TensorMap) -> TensorMap {
        let renamed = |name: &String| {
            let at = name.find("blocks.").unwrap_or(0);
            let now = self.0.get(&name[at..])?;
            Some((name.clone(), format!("{}{now}", &name[..at])))
        };
        let names: Vec<(String, String)> = tensors.keys().filter_map(renamed).collect();
        for (name, now) in names {
            if !tensors.contains_key(&now)
                && let Some(tensor) = tensors.remove(&name)
            {
                tensors.insert(now, tensor);
            }
        }
        tensors
    }
}

/// Earlier and current names of one layer's weights, for those whose names differ.
fn of_layer<B: OpBackend>(attention: &Attention<B>) -> Vec<(String, String)> {
    let mut names = vec![];
    let mut add = |was: String, is: String| names.push((was, is));
    for (at, name) in ["q", "k", "v"].iter().enumerate() {
        add(format!("convs.{at}"), format!("{name}.conv"));
    }
    for (at, name) in attention.extra.names().enumerate() {
        for part in ["weight", "bias"] {
            add(format!("projections.{at}.outer.{part}"), format!("{name}.{part}"));
        }
        for part in ["inner.weight", "conv"] {
            add(format!("projections.{at}.{part}"), format!("{name}.{part}"));
        }
    }
    for (at, name) in attention.parameters.names().enumerate() {
        add(format!("parameters.{at}"), name.to_owned());
    }
    for part in ["weight", "bias"] {
        add(format!("value_gate.outer.{part}"), format!("value_gate.{part}"));
    }
    let shifted = ["q", "k", "v"].into_iter().chain(attention.extra.names());
    for (at, name) in shifted.chain(["output_gate"]).enumerate() {
        add(format!("shifts.{at}"), format!("{name}.shift"));
    }
    names
}
