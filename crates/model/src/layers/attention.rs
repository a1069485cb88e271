use burn::module::{Module, Param};
use burn::tensor::{Tensor, activation, s};
use longwall_kernels::attention::{
    AttentionConfig, AttentionShape, AttentionState, DocumentStarts, Inputs,
};
use longwall_kernels::backend::OpBackend;
use longwall_kernels::ops::short_conv::short_conv;

use super::{Linear, Norm};
use crate::config::{ModelConfig, NormKind};
use crate::init::Init;

/// Taps of the short convolution.
const CONV_TAPS: usize = 4;

/// An attention layer: projections, norms, gates and output around a variant's operation.
#[derive(Module, Debug)]
pub struct Attention<B: OpBackend> {
    /// To `heads · head_dim`.
    pub q: Linear<B>,
    /// To `kv_heads · head_dim`.
    pub k: Linear<B>,
    /// To `kv_heads · head_dim`.
    pub v: Linear<B>,
    /// From `heads · head_dim` back to the residual stream.
    pub output: Linear<B>,
    /// The variant's gates, in its order.
    pub gates: Vec<Linear<B>>,
    /// The variant's own learned vectors, in its order.
    pub parameters: Vec<Param<Tensor<B, 1>>>,
    /// Norm of each head's q.
    pub q_norm: Option<Norm<B>>,
    /// Norm of each head's k.
    pub k_norm: Option<Norm<B>>,
    /// Gate on the output, per channel.
    pub output_gate: Option<Linear<B>>,
    /// Taps of the short convolutions of q, k and v, `[channels, 4]`.
    pub convs: Vec<Param<Tensor<B, 2>>>,
    #[module(skip)]
    shape: AttentionShape,
    #[module(skip)]
    variant: AttentionConfig,
}

/// What decoding keeps of one layer.
#[derive(Clone, Debug)]
pub struct LayerState<B: OpBackend> {
    attention: AttentionState<B>,
    /// The last inputs of the short convolutions, `[batch, up to 3, channels]`.
    convs: Vec<Option<Tensor<B, 3>>>,
}

impl<B: OpBackend> Attention<B> {
    pub(crate) fn new(init: &Init<B>, config: &ModelConfig) -> Self {
        let shape = config.attention_shape();
        let width = config.width;
        let inner = shape.heads * shape.head_dim;
        let kv_inner = shape.kv_heads * shape.head_dim;
        let linear =
            |name: &str, outputs| Linear::new(&init.part(name), width, outputs, config.bias);
        let head_norm = |name: &str| {
            let init = init.part(name);
            config.qk_norm.then(|| Norm::new(&init, NormKind::RmsNorm, shape.head_dim, false))
        };
        let gate = |spec: &longwall_kernels::attention::GateSpec| {
            let init = init.part(spec.name);
            let mut gate = Linear::new(&init, width, spec.features, false);
            gate.bias = Some(init.constant(spec.features, spec.bias_init));
            gate
        };
        let convs: &[_] = if config.short_conv {
            &[("q_conv", inner), ("k_conv", kv_inner), ("v_conv", kv_inner)]
        } else {
            &[]
        };
        let parameters = config.attention.parameters(&shape);
        Attention {
            q: linear("q", inner),
            k: linear("k", kv_inner),
            v: linear("v", kv_inner),
            output: Linear::residual(&init.part("output"), inner, width, config.bias),
            gates: config.attention.gates(&shape).iter().map(gate).collect(),
            parameters: parameters.into_iter().map(|p| init.part(p.name).vector(p.init)).collect(),
            q_norm: head_norm("q_norm"),
            k_norm: head_norm("k_norm"),
            output_gate: config.output_gate.then(|| linear("output_gate", inner)),
            // Uniform in ±1/√4 would be a convolution's usual start; a normal of that spread.
            convs: convs
                .iter()
                .map(|&(name, channels)| init.part(name).normal([channels, CONV_TAPS], 0.29))
                .collect(),
            shape,
            variant: config.attention.clone(),
        }
    }

    /// Whole rows: `[batch, seq_len, width]`, both ways.
    pub fn forward(&self, x: Tensor<B, 3>, documents: DocumentStarts<B>) -> Tensor<B, 3> {
        let conv =
            |_, x, taps: &Param<Tensor<B, 2>>| short_conv(x, taps.val(), true, documents.clone());
        let inputs = self.inputs(&x, conv);
        let o = self.variant.attend(&self.shape, inputs, documents.clone());
        self.finish(o, x)
    }

    /// The state before the first token.
    pub fn start(&self) -> LayerState<B> {
        let attention = self.variant.start(&self.shape);
        LayerState { attention, convs: vec![None; self.convs.len()] }
    }

    /// New tokens after those in `state`: `[batch, n, width]`, both ways.
    pub fn extend(&self, x: Tensor<B, 3>, state: &mut LayerState<B>) -> Tensor<B, 3> {
        let convs = &mut state.convs;
        let inputs = self.inputs(&x, |at: usize, new, taps| {
            let new_len = new.dims()[1];
            let all = match convs[at].take() {
                Some(old) => Tensor::cat(vec![old, new], 1),
                None => new,
            };
            let len = all.dims()[1];
            convs[at] = Some(all.clone().slice(s![.., len.saturating_sub(CONV_TAPS - 1)..]));
            short_conv(all, taps.val(), true, None).slice(s![.., len - new_len..])
        });
        let o = self.variant.extend(&self.shape, inputs, &mut state.attention);
        self.finish(o, x)
    }

    /// q, k, v and gates of `x`; `conv(index, projection, taps)` applies a short convolution.
    fn inputs(
        &self,
        x: &Tensor<B, 3>,
        mut conv: impl FnMut(usize, Tensor<B, 3>, &Param<Tensor<B, 2>>) -> Tensor<B, 3>,
    ) -> Inputs<B> {
        let [batch, seq_len, _] = x.dims();
        let mut project = |at: usize, linear: &Linear<B>, norm: Option<&Norm<B>>| {
            let mut y = linear.forward(x.clone());
            if let Some(taps) = self.convs.get(at) {
                y = conv(at, y, taps);
            }
            let heads = y.dims()[2] / self.shape.head_dim;
            let y = y.reshape([batch, seq_len, heads, self.shape.head_dim]).swap_dims(1, 2);
            match norm {
                Some(norm) => norm.forward(y),
                None => y,
            }
        };
        Inputs {
            q: project(0, &self.q, self.q_norm.as_ref()),
            k: project(1, &self.k, self.k_norm.as_ref()),
            v: project(2, &self.v, None),
            gates: self.gates.iter().map(|gate| gate.forward(x.clone())).collect(),
            parameters: self.parameters.iter().map(Param::val).collect(),
        }
    }

    /// Joins the heads, gates them and projects them back.
    fn finish(&self, o: Tensor<B, 4>, x: Tensor<B, 3>) -> Tensor<B, 3> {
        let [batch, heads, seq_len, head_dim] = o.dims();
        let mut o = o.swap_dims(1, 2).reshape([batch, seq_len, heads * head_dim]);
        if let Some(gate) = &self.output_gate {
            o = o * activation::sigmoid(gate.forward(x));
        }
        self.output.forward(o)
    }
}
