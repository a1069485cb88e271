use burn::module::{Module, Param};
use burn::tensor::Tensor;
use longwall_kernels::backend::OpBackend;
use longwall_kernels::ops::activation::{gelu, relu_squared, swiglu};
use longwall_kernels::ops::linear::linear_add;
use longwall_kernels::ops::mlp::gelu_mlp;

use super::Linear;
use super::norm::Input;
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
            shift: config.token_shift.then(|| {
                let shape = config.attention_shape(layer);
                init.vector(width, || token_shift(&shape, |r| r.powi(4)))
            }),
            kind: config.mlp,
        }
    }

    /// Inputs that the token shift needs of earlier tokens, as `[tokens, width]`.
    pub(super) fn history_shape(&self) -> [usize; 2] {
        self.shift.as_ref().map_or([0, 0], |mu| [1, mu.dims()[0]])
    }

    /// The MLP's output, added to `residual` if there is one: both are `[batch, n, width]`.
    pub(super) fn forward(
        &self,
        input: Input<B>,
        preceding: Preceding<B, History<B>>,
        residual: Option<Tensor<B, 3>>,
    ) -> Tensor<B, 3> {
        let input = match &self.shift {
            Some(mu) => Input::of(preceding.shift(input.value(), mu.val())),
            None => input,
        };
        if let (None, MlpKind::Gelu, None, Some(_)) =
            (&self.gate, self.kind, &self.up.bias, &residual)
            && self.down.bias.is_none()
        {
            let residual = residual.expect("matched");
            let (up, down) = (self.up.weight.val(), self.down.weight.val());
            return match input.gelu_of_few_rows(up.clone()) {
                Some(hidden) => linear_add(hidden, down, residual),
                None => gelu_mlp(input.value(), up, down, residual),
            };
        }
        let layers = self.gate.iter().chain([&self.up]).map(Linear::tensors);
        let mut outputs = input.linears(layers.collect());
        let up = outputs.pop().expect("an output of each layer");
        let hidden = match (outputs.pop(), self.kind) {
            (Some(gate), _) => swiglu(gate, up),
            (None, MlpKind::ReluSquared) => relu_squared(up),
            (None, _) => gelu(up),
        };
        self.down.forward_onto(hidden, residual)
    }
}
