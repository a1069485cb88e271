//! Norms of gradients, weights and updates, by layer.

use std::collections::BTreeMap;

use burn::tensor::Tensor;
use burn::tensor::ops::FloatTensor;
use longwall_kernels::backend::{OpBackend, tensor};
use longwall_kernels::ops::grad_norm::square_sums;
use serde::{Deserialize, Serialize};

/// The norms of one layer: the square roots of sums of squares over all its parameters.
///
/// A norm that is not finite is `null`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerNorm {
    /// Norm of the gradient, before clipping.
    pub grad_norm: Option<f64>,
    /// Norm of the weights after the update.
    pub weight_norm: Option<f64>,
    /// Norm of the change of the weights, over that of the weights.
    pub update_ratio: Option<f64>,
}

/// The sums of squares of one update, which are read from the device at the end.
#[derive(Debug)]
pub struct UpdateNorms<B: OpBackend> {
    /// The layer and the quantity (gradient, weights, change) of each of `sums`.
    places: Vec<(String, usize)>,
    sums: Vec<Tensor<B, 1>>,
}

impl<B: OpBackend> UpdateNorms<B> {
    /// No parameter yet.
    pub fn new() -> Self {
        UpdateNorms { places: vec![], sums: vec![] }
    }

    /// Adds a parameter's gradient, and its values before and after the update.
    pub(super) fn add(
        &mut self,
        path: &str,
        gradient: FloatTensor<B>,
        [old, new]: [FloatTensor<B>; 2],
    ) {
        let change = B::float_sub(new.clone(), old);
        for (quantity, values) in [gradient, new, change].into_iter().enumerate() {
            for sum in square_sums::<B>(vec![values]) {
                self.places.push((layer_of(path), quantity));
                self.sums.push(tensor(sum));
            }
        }
    }

    /// The norms by layer.
    pub fn by_layer(self) -> BTreeMap<String, LayerNorm> {
        LayerNorm::of_squares(self.squares())
    }

    /// The sums of squares by layer: of gradient, weights, and change.
    pub(crate) fn squares(self) -> LayerSquares {
        let mut layers = LayerSquares::new();
        if self.sums.is_empty() {
            return layers;
        }
        let sums = Tensor::cat(self.sums, 0).into_data();
        for ((layer, quantity), sum) in self.places.into_iter().zip(sums.iter::<f64>()) {
            layers.entry(layer).or_default()[quantity] += sum;
        }
        layers
    }
}

/// Sums of squares by layer, in the order of [`UpdateNorms::squares`].
pub(crate) type LayerSquares = BTreeMap<String, [f64; 3]>;

impl LayerNorm {
    /// The norms by layer.
    pub(crate) fn of_squares(squares: LayerSquares) -> BTreeMap<String, Self> {
        let finite = |x: f64| Some(x).filter(|x| x.is_finite());
        let norm = |[gradient, weights, change]: [f64; 3]| LayerNorm {
            grad_norm: finite(gradient.sqrt()),
            weight_norm: finite(weights.sqrt()),
            update_ratio: finite((change / weights).sqrt()),
        };
        squares.into_iter().map(|(layer, squares)| (layer, norm(squares))).collect()
    }
}

impl<B: OpBackend> Default for UpdateNorms<B> {
    fn default() -> Self {
        Self::new()
    }
}

/// The layer of the parameter `path`: `blocks.0.attention` of a block's parts, else its first segment.
fn layer_of(path: &str) -> String {
    let depth = if path.starts_with("blocks.") { 3 } else { 1 };
    path.split('.').take(depth).collect::<Vec<_>>().join(".")
}
