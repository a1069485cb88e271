use burn::module::Module;
use burn::tensor::Tensor;
use longwall_kernels::attention::DocumentStarts;
use longwall_kernels::backend::OpBackend;

use super::{Attention, LayerState, Mlp, Norm};
use crate::config::ModelConfig;
use crate::init::Init;

/// A pre-norm block: x + attention(norm(x)), then x + mlp(norm(x)).
#[derive(Module, Debug)]
pub struct Block<B: OpBackend> {
    /// Before the attention.
    pub attention_norm: Norm<B>,
    /// The attention layer.
    pub attention: Attention<B>,
    /// Before the MLP.
    pub mlp_norm: Norm<B>,
    /// The MLP.
    pub mlp: Mlp<B>,
}

impl<B: OpBackend> Block<B> {
    pub(crate) fn new(init: &Init<B>, config: &ModelConfig) -> Self {
        let norm = |name| Norm::new(&init.part(name), config.norm, config.width, config.bias);
        Block {
            attention_norm: norm("attention_norm"),
            attention: Attention::new(&init.part("attention"), config),
            mlp_norm: norm("mlp_norm"),
            mlp: Mlp::new(&init.part("mlp"), config),
        }
    }

    /// Whole rows: `[batch, seq_len, width]`, both ways.
    pub fn forward(&self, x: Tensor<B, 3>, documents: DocumentStarts<B>) -> Tensor<B, 3> {
        let attention = self.attention.forward(self.attention_norm.forward(x.clone()), documents);
        self.add_mlp(x + attention)
    }

    /// New tokens after those in `state`: `[batch, n, width]`, both ways.
    pub fn extend(&self, x: Tensor<B, 3>, state: &mut LayerState<B>) -> Tensor<B, 3> {
        let attention = self.attention.extend(self.attention_norm.forward(x.clone()), state);
        self.add_mlp(x + attention)
    }

    fn add_mlp(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        let mlp = self.mlp.forward(self.mlp_norm.forward(x.clone()));
        x + mlp
    }
}
