use burn::module::{Module, Param};
use burn::tensor::Tensor;
use longwall_kernels::backend::OpBackend;
use longwall_kernels::ops::activation::{gelu, relu_squared, swiglu};
use longwall_kernels::ops::mlp::gelu_mlp;

use super::Linear;
use super::attention::shift_start;
use super::time::Past;
use crate::config::{MlpKind, ModelConfig};
use crate::init::Init;

/// The MLP of a block.
#[derive(Module, Debug)]
pub struct Mlp<B: OpBackend> {
    /// SwiGLU's gate.
    pub gate: Option<Linear<B>>,
    /// Into the hidden width.
    pub up: Linear<B>,
    /// Back to the residual stream.
    pub down: Linear<B>,
    /// Token shift's μ, `[width]`.
    pub shift: Option<Param<Tensor<B, 1>>>,
    #[module(skip)]
    kind: MlpKind,
}

impl<B: OpBackend> Mlp<B> {
    pub(crate) fn new(init: &Init<B>, config: &ModelConfig, layer: usize) -> Self {
        let (width, hidden) = (config.width, config.mlp_hidden());
        let gated = config.mlp == MlpKind::Swiglu;
        Mlp {
            gate: gated.then(|| Linear::new(&init.part("gate"), width, hidden, config.bias)),
            up: Linear::new(&init.part("up"), width, hidden, config.bias),
            down: Linear::residual(&init.part("down"), hidden, width, config.bias),
            // RWKV-7's channel mix: 1 − (c / width)^(r⁴).
            shift: config
                .token_shift
                .then(|| init.vector(shift_start(&config.attention_shape(layer), |r| r.powi(4)))),
            kind: config.mlp,
        }
    }

    /// `[batch, seq_len, width]`, both ways; added to `residual` if there is one.
    pub(super) fn forward(
        &self,
        x: Tensor<B, 3>,
        past: &mut Past<B>,
        residual: Option<Tensor<B, 3>>,
    ) -> Tensor<B, 3> {
        let x = match &self.shift {
            Some(mu) => past.shift(0, x, mu.val()),
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
