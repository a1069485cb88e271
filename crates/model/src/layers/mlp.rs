use burn::module::{Module, Param};
use burn::tensor::Tensor;
use longwall_kernels::backend::OpBackend;
use longwall_kernels::ops::activation::{gelu, relu_squared, swiglu};
use longwall_kernels::ops::mlp::gelu_mlp;

use super::Linear;
use super::time::{History, Preceding};
use crate::config::{MlpKind, ModelConfig};
use crate::init::{WeightInit, token_shift};

/// The MLP of a block.
#[derive(Module, Debug)]
pub struct Mlp<B: OpBackend> {
    /// SwiGLU's gate, W₁ of [`MlpKind::Swiglu`].
    pub gate: Option<Linear<B>>,
    /// To the hidden width.
    pub up: Linear<B>,
    /// From the hidden width back to the residual stream.
    pub down: Linear<B>,
    /// Token shift's μ, `[width]`.
    pub shift: Option<Param<Tensor<B, 1>>>,
    #[module(skip)]
    kind: MlpKind,
}

impl<B: OpBackend> Mlp<B> {
    pub(crate) fn new(init: &WeightInit<B>, config: &ModelConfig, layer: usize) -> Self {
        let (width, hidden) = (config.width, config.mlp_hidden());
        let gated = config.mlp == MlpKind::Swiglu;
        Mlp {
            gate: gated.then(|| Linear::new(&init.part("gate"), width, hidden, config.bias)),
            up: Linear::new(&init.part("up"), width, hidden, config.bias),
            down: Linear::residual(&init.part("down"), hidden, width, config.bias),
            // As in RWKV-7's channel mix.
            shift: config
                .token_shift
                .then(|| init.vector(token_shift(&config.attention_shape(layer), |r| r.powi(4)))),
            kind: config.mlp,
        }
    }

    /// The MLP's output, added to `residual` if there is one: all are `[batch, n, width]`.
    pub(super) fn forward(
        &self,
        x: Tensor<B, 3>,
        preceding: Preceding<B, History<B>>,
        residual: Option<Tensor<B, 3>>,
    ) -> Tensor<B, 3> {
        let x = match &self.shift {
            Some(mu) => preceding.shift(x, mu.val()),
            None => x,
        };
        if let (None, MlpKind::Gelu, None, Some(_)) =
            (&self.gate, self.kind, &self.up.bias, &residual)
            && self.down.bias.is_none()
        {
            let residual = residual.expect("matched");
            return gelu_mlp(x, self.up.weight.val(), self.down.weight.val(), residual);
        }
        let hidden = match (&self.gate, self.kind) {
            (Some(gate), _) => swiglu(gate.forward(x.clone()), self.up.forward(x)),
            (None, MlpKind::ReluSquared) => relu_squared(self.up.forward(x)),
            (None, _) => gelu(self.up.forward(x)),
        };
        self.down.forward_onto(hidden, residual)
    }
}
