use burn::module::{Module, Param};
use burn::tensor::{Tensor, activation};
use longwall_kernels::attention::{
    self, Activation, AttentionConfig, AttentionShape, AttentionState, DecodeState, DocumentStarts,
    Inputs, Projection,
};
use longwall_kernels::backend::OpBackend;

use super::projection::conv_taps;
use super::time::{History, Past, history_elements};
use super::{Linear, Norm, SideProjection};
use crate::config::{ModelConfig, NormKind, ValueResidual};
use crate::init::Init;

/// Taps of the short convolution.
pub(crate) const CONV_TAPS: usize = 4;

/// An attention layer: projections, norms, gates and output around a variant's operation.
#[derive(Module, Debug)]
pub struct Attention<B: OpBackend> {
    /// To `views · heads · head_dim`.
    pub q: Linear<B>,
    /// To `views · kv_heads · head_dim`.
    pub k: Linear<B>,
    /// To `kv_heads · value_dim`.
    pub v: Linear<B>,
    /// From `heads · value_dim` back to the residual stream.
    pub output: Linear<B>,
    /// What the variant projects beside q, k and v, in its order.
    pub projections: Vec<SideProjection<B>>,
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
    /// Token shift's μ of q, k, v, the side projections and the output gate, `[width]` each.
    pub shifts: Vec<Param<Tensor<B, 1>>>,
    /// λ₁ and λ₂ of the learned value residual.
    pub value_mix: Option<Param<Tensor<B, 1>>>,
    /// ν of the gated value residual.
    pub value_gate: Option<SideProjection<B>>,
    #[module(skip)]
    shape: AttentionShape,
    #[module(skip)]
    variant: AttentionConfig,
}

/// What decoding keeps of one attention layer.
#[derive(Clone, Debug)]
pub struct AttentionLayerState<B: OpBackend> {
    attention: AttentionState<B>,
    history: History<B>,
}

impl<B: OpBackend> AttentionLayerState<B> {
    /// Elements held.
    pub fn elements(&self) -> usize {
        self.attention.elements() + history_elements(&self.history)
    }
}

impl<B: OpBackend> Attention<B> {
    pub(crate) fn new(init: &Init<B>, config: &ModelConfig, layer: usize) -> Self {
        let shape = config.attention_shape(layer);
        let variant = &config.attention;
        let width = config.width;
        let q = variant.views() * shape.heads * shape.head_dim;
        let k = variant.views() * shape.kv_heads * shape.head_dim;
        let v = shape.kv_heads * variant.value_dim(&shape);
        let inner = shape.heads * variant.value_dim(&shape);
        let linear =
            |name: &str, outputs| Linear::new(&init.part(name), width, outputs, config.bias);
        let head_norm = |name: &str| {
            let init = init.part(name);
            config.qk_norm.then(|| Norm::new(&init, NormKind::RmsNorm, shape.head_dim, false))
        };
        let side = |spec: &Projection| SideProjection::new(&init.part(spec.name), width, spec);
        let specs = variant.projections(&shape);
        let parameters = variant.parameters(&shape);
        let convs = if config.short_conv {
            [("q_conv", q), ("k_conv", k), ("v_conv", v)]
                .map(|(name, channels)| conv_taps(&init.part(name), channels, CONV_TAPS))
                .into()
        } else {
            vec![]
        };
        // The first layer's values are the residual's.
        let residual = if layer == 0 { ValueResidual::None } else { config.value_residual };
        Attention {
            q: linear("q", q),
            k: linear("k", k),
            v: linear("v", v),
            output: Linear::residual(&init.part("output"), inner, width, config.bias),
            projections: specs.iter().map(side).collect(),
            parameters: parameters
                .iter()
                .map(|p| init.part(p.name).start(p.elements, &p.init))
                .collect(),
            q_norm: head_norm("q_norm"),
            k_norm: head_norm("k_norm"),
            output_gate: config.output_gate.then(|| linear("output_gate", inner)),
            convs,
            shifts: token_shifts(init, config, &shape, &specs),
            value_mix: (residual == ValueResidual::Learned)
                .then(|| init.part("value_mix").constant(2, 0.5)),
            value_gate: (residual == ValueResidual::Gated).then(|| {
                let rank = config.value_residual_rank();
                let spec = Projection::new("value_gate", v)
                    .low_rank(rank, Activation::Identity)
                    .bias(attention::Init::Constant(1.0));
                side(&spec)
            }),
            shape,
            variant: variant.clone(),
        }
    }

    /// Whole rows: `[batch, seq_len, width]`, both ways. `first_values` is empty for the first
    /// layer, which fills it, and serves the value residual of the others. The result is added to
    /// `residual` if there is one.
    pub fn forward(
        &self,
        x: Tensor<B, 3>,
        documents: DocumentStarts<B>,
        first_values: &mut Option<Tensor<B, 3>>,
        residual: Option<Tensor<B, 3>>,
    ) -> Tensor<B, 3> {
        let mut past = Past::Rows(&documents);
        let inputs = self.inputs(&x, first_values, &mut past);
        let o = self.variant.attend(&self.shape, inputs, documents.clone());
        self.finish(o, x, &mut past, residual)
    }

    /// Whether the variant's `prune` is set.
    pub fn prunes(&self) -> bool {
        self.variant.prunes()
    }

    /// See [`Block::share_left_out`](super::Block::share_left_out).
    pub fn share_left_out(
        &self,
        x: Tensor<B, 3>,
        documents: &DocumentStarts<B>,
        first_values: &mut Option<Tensor<B, 3>>,
    ) -> Option<f64> {
        let inputs = self.inputs(&x, first_values, &mut Past::Rows(documents));
        self.variant.share_left_out(&self.shape, inputs, documents.clone())
    }

    /// The state before the first token.
    pub fn start(&self) -> AttentionLayerState<B> {
        AttentionLayerState {
            attention: self.variant.init_state(0),
            history: vec![None; 3 + self.projections.len() + self.shifts.len()],
        }
    }

    /// New tokens after those in `state`: `[batch, n, width]`, both ways; `first_values` and
    /// `residual` as in [`Attention::forward`].
    pub fn extend(
        &self,
        x: Tensor<B, 3>,
        state: &mut AttentionLayerState<B>,
        first_values: &mut Option<Tensor<B, 3>>,
        residual: Option<Tensor<B, 3>>,
    ) -> Tensor<B, 3> {
        let mut past = Past::Earlier(&mut state.history);
        let inputs = self.inputs(&x, first_values, &mut past);
        let o = self.variant.extend(&self.shape, inputs, &mut state.attention);
        self.finish(o, x, &mut past, residual)
    }

    /// The layer's input as projection number `at` (q, k, v, side projections, output gate) sees it.
    fn shifted(&self, at: usize, x: &Tensor<B, 3>, past: &mut Past<B>) -> Tensor<B, 3> {
        let slot = 3 + self.projections.len() + at;
        match self.shifts.get(at) {
            Some(mu) => past.shift(slot, x.clone(), mu.val()),
            None => x.clone(),
        }
    }

    /// Projection number `at` of q, k and v, convolved.
    fn project(
        &self,
        at: usize,
        linear: &Linear<B>,
        x: Tensor<B, 3>,
        past: &mut Past<B>,
    ) -> Tensor<B, 3> {
        let y = linear.forward(x);
        match self.convs.get(at) {
            Some(taps) => past.conv(at, y, taps.val(), true),
            None => y,
        }
    }

    /// What the variant's operation takes.
    fn inputs(
        &self,
        x: &Tensor<B, 3>,
        first_values: &mut Option<Tensor<B, 3>>,
        past: &mut Past<B>,
    ) -> Inputs<B> {
        let [batch, n, _] = x.dims();
        let heads = |y: Tensor<B, 3>, channels: usize| {
            let heads = y.dims()[2] / channels;
            y.reshape([batch, n, heads, channels]).swap_dims(1, 2)
        };
        let head_dim = self.shape.head_dim;
        let mut query_or_key = |at, linear, norm: Option<&Norm<B>>| {
            let shifted = self.shifted(at, x, past);
            let y = heads(self.project(at, linear, shifted, past), head_dim);
            match norm {
                Some(norm) => norm.forward(y),
                None => y,
            }
        };
        let q = query_or_key(0, &self.q, self.q_norm.as_ref());
        let k = query_or_key(1, &self.k, self.k_norm.as_ref());
        let v = self.values(x, first_values, past);
        let mut side = |(at, side): (usize, &SideProjection<B>)| {
            let x = self.shifted(3 + at, x, past);
            side.forward(3 + at, x, past)
        };
        Inputs {
            q,
            k,
            v: heads(v, self.variant.value_dim(&self.shape)),
            projections: self.projections.iter().enumerate().map(&mut side).collect(),
            parameters: self.parameters.iter().map(Param::val).collect(),
        }
    }

    /// The values `[batch, n, kv_heads · value_dim]`, with the first layer's mixed in.
    fn values(
        &self,
        x: &Tensor<B, 3>,
        first_values: &mut Option<Tensor<B, 3>>,
        past: &mut Past<B>,
    ) -> Tensor<B, 3> {
        let x = self.shifted(2, x, past);
        let v = self.project(2, &self.v, x.clone(), past);
        let first = first_values.get_or_insert_with(|| v.clone()).clone();
        if let Some(mix) = &self.value_mix {
            // In f32: λ's gradient is a sum over every element.
            let (dtype, lambdas) = (v.dtype(), mix.val());
            let lambda = |at| lambdas.clone().narrow(0, at, 1).reshape([1, 1, 1]);
            let wide = |x: Tensor<B, 3>| x.cast(lambdas.dtype());
            return (wide(first) * lambda(0) + wide(v) * lambda(1)).cast(dtype);
        }
        match &self.value_gate {
            // Without a convolution, the slot does not matter.
            Some(gate) => {
                let nu = activation::sigmoid(gate.forward(0, x, past));
                v.clone() + nu * (first - v)
            }
            None => v,
        }
    }

    /// Joins the heads, gates them, projects them back and adds them to `residual`.
    fn finish(
        &self,
        o: Tensor<B, 4>,
        x: Tensor<B, 3>,
        past: &mut Past<B>,
        residual: Option<Tensor<B, 3>>,
    ) -> Tensor<B, 3> {
        let [batch, heads, n, value_dim] = o.dims();
        let mut o = o.swap_dims(1, 2).reshape([batch, n, heads * value_dim]);
        if let Some(gate) = &self.output_gate {
            let x = self.shifted(3 + self.projections.len(), &x, past);
            o = o * activation::sigmoid(gate.forward(x));
        }
        self.output.forward_onto(o, residual)
    }
}

/// Initial μ of q, k, v, the side projections and the output gate: 1 − (c / width)^(e · r) for
/// channel c, where r falls from 1 to 0 with depth and e is 0.2 for q and the output gate, 0.7 for
/// k and v, and the variant's own for the others, as RWKV-7's released models have it.
fn token_shifts<B: OpBackend>(
    init: &Init<B>,
    config: &ModelConfig,
    shape: &AttentionShape,
    sides: &[Projection],
) -> Vec<Param<Tensor<B, 1>>> {
    if !config.token_shift {
        return vec![];
    }
    let gate = config.output_gate.then_some(0.2);
    let sides = sides.iter().map(|side| side.shift);
    let exponents = [0.2, 0.7, 0.7].into_iter().chain(sides).chain(gate);
    exponents.map(|e| init.vector(shift_start(shape, |r| e * r))).collect()
}

/// 1 − (c / width)^e(r) for each channel c, where r falls from 1 to 0 with depth.
pub(super) fn shift_start(shape: &AttentionShape, exponent: impl Fn(f64) -> f64) -> Vec<f32> {
    let r = 1.0 - shape.layer as f64 / shape.layers as f64;
    let start = |c| 1.0 - (c as f64 / shape.width as f64).powf(exponent(r));
    (0..shape.width).map(|c| start(c) as f32).collect()
}
