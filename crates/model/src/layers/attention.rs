use burn::module::{Module, Param};
use burn::tensor::Tensor;
use longwall_kernels::attention::probe::{Metric, Probe};
use longwall_kernels::attention::{
    AttentionConfig, AttentionShape, AttentionState, DecodeState, DocumentStarts, Init, Inputs,
    LowRankActivation, ProjectionSpec,
};
use longwall_kernels::backend::OpBackend;
use longwall_kernels::ops::activation::glu;

use super::carried::Carried;
use super::norm::Input;
use super::projection::{ProjectionHistory, conv_taps};
use super::span::Span;
use super::time::Preceding;
use super::weight_map::{LayerWeights, weight_map};
use super::{Linear, Named, Norm, Projection};
use crate::config::{ModelConfig, NormKind, ValueResidual};
use crate::cost::channels;
use crate::init::{WeightInit, token_shift};

/// Taps of the short convolution.
pub(crate) const CONV_TAPS: usize = 4;

/// An attention layer: projections, norms, gates and output around a variant's operation.
#[derive(Module, Debug)]
pub struct Attention<B: OpBackend> {
    /// To `views · query_heads · head_dim`.
    pub q: Projection<B>,
    /// To `views · key_heads · head_dim`.
    pub k: Projection<B>,
    /// To `kv_heads · value_dim`.
    pub v: Projection<B>,
    /// From `heads · value_dim` back to the residual stream.
    pub output: Linear<B>,
    /// The variant's projections besides q, k and v, under its names and in its order.
    pub extra: Named<Projection<B>>,
    /// The variant's own learned vectors, under its names and in its order.
    pub parameters: Named<Param<Tensor<B, 1>>>,
    /// Norm of each head's q.
    pub q_norm: Option<Norm<B>>,
    /// Norm of each head's k.
    pub k_norm: Option<Norm<B>>,
    /// Logits of the gate on the output, to `heads · value_dim`.
    pub output_gate: Option<Projection<B>>,
    /// λ₁ and λ₂ of the learned value residual.
    pub value_mix: Option<Param<Tensor<B, 1>>>,
    /// Logits ν of the gated value residual, to `kv_heads · value_dim`; its input is that of v.
    pub value_gate: Option<Projection<B>>,
    #[module(skip)]
    shape: AttentionShape,
    #[module(skip)]
    variant: AttentionConfig,
}

/// What decoding keeps of one attention layer.
#[derive(Clone, Debug)]
pub struct AttentionLayerState<B: OpBackend> {
    attention: AttentionState<B>,
    projections: Histories<B>,
}

/// What decoding keeps of a layer's projections.
#[derive(Clone, Debug)]
pub(super) struct Histories<B: OpBackend> {
    q: ProjectionHistory<B>,
    k: ProjectionHistory<B>,
    v: ProjectionHistory<B>,
    /// In the order of [`Attention::extra`].
    extra: Vec<ProjectionHistory<B>>,
    output_gate: ProjectionHistory<B>,
}

impl<B: OpBackend> AttentionLayerState<B> {
    /// Elements held.
    pub fn elements(&self) -> usize {
        let Histories { q, k, v, extra, output_gate } = &self.projections;
        let projections = [q, k, v, output_gate].into_iter().chain(extra);
        self.attention.elements() + projections.map(ProjectionHistory::elements).sum::<usize>()
    }
}

impl<B: OpBackend> Attention<B> {
    pub(crate) fn new(init: &WeightInit<B>, config: &ModelConfig, layer: usize) -> Self {
        let shape = config.attention_shape(layer);
        let variant = config.attention_of(layer);
        let parts = Parts { init, config, shape };
        let [q, k, v] = channels(variant, &shape);
        let short_conv = config.short_conv || variant.short_conv();
        let inner = shape.heads * variant.value_dim(&shape);
        let extra = variant.projections(&shape);
        let parameters = variant.parameters(&shape);
        // The first layer supplies the values that later layers mix in.
        let residual = if layer == 0 { ValueResidual::None } else { config.value_residual };
        Attention {
            q: parts.convolved("q", q, Q_SHIFT, short_conv),
            k: parts.convolved("k", k, K_SHIFT, short_conv),
            v: parts.convolved("v", v, V_SHIFT, short_conv),
            output: Linear::residual(&init.part("output"), inner, config.width, config.bias),
            extra: Named::new("extra", extra.iter().map(|spec| (spec.name, parts.extra(spec)))),
            parameters: Named::new(
                "parameters",
                parameters
                    .iter()
                    .map(|p| (p.name, init.part(p.name).variant_vector(p.elements, &p.init))),
            ),
            q_norm: parts.head_norm("q_norm"),
            k_norm: parts.head_norm("k_norm"),
            output_gate: config.output_gate.then(|| parts.plain("output_gate", inner, GATE_SHIFT)),
            value_mix: (residual == ValueResidual::Learned)
                .then(|| init.part("value_mix").constant(2, 0.5)),
            value_gate: (residual == ValueResidual::Gated).then(|| parts.value_gate(v)),
            shape,
            variant: variant.clone(),
        }
    }

    /// Attention over whole rows, or over this rank's part of shared rows.
    ///
    /// - `x`, and the result: `[batch, n, width]`
    /// - `first_values`: the first layer's values v₁ for the value residual,
    ///   `[batch, n, kv_heads · value_dim]`; the first layer finds `None` and fills it
    /// - `residual`: added to the result, if there is one
    pub fn forward(
        &self,
        x: Tensor<B, 3>,
        span: &Span<B>,
        first_values: &mut Option<Tensor<B, 3>>,
        residual: Option<Tensor<B, 3>>,
    ) -> Tensor<B, 3> {
        let (x, mut preceding) = (Input::of(x), span.preceding());
        let inputs = self.inputs(&x, first_values, &mut preceding);
        let o = span.attend(&self.variant, &self.shape, inputs);
        self.finish(o, &x, &mut preceding, residual)
    }

    /// As [`Attention::forward`] over whole rows, which go on from what the next of `parts` hold, and replace it.
    /// Documents that began before their row start at −1.
    pub(super) fn forward_from(
        &self,
        x: Tensor<B, 3>,
        documents: &DocumentStarts<B>,
        first_values: &mut Option<Tensor<B, 3>>,
        residual: Option<Tensor<B, 3>>,
        parts: &mut Carried<B>,
    ) -> Tensor<B, 3> {
        let (dtype, [_, seq_len, _]) = (x.dtype(), x.dims());
        let elements = self.variant.state_elements(&self.shape, seq_len) as usize;
        let mut state = parts.next(elements).expect("the state has elements");
        let mut next = |projection: &Projection<B>| {
            ProjectionHistory::next_of(parts, projection.history_shapes(), dtype)
        };
        let mut histories = Histories {
            q: next(&self.q),
            k: next(&self.k),
            v: next(&self.v),
            extra: self.extra.iter().map(&mut next).collect(),
            output_gate: self.output_gate.as_ref().map_or_else(ProjectionHistory::new, next),
        };
        let (x, mut preceding) = (Input::of(x), Preceding::Rows(documents, &mut histories));
        let inputs = self.inputs(&x, first_values, &mut preceding);
        let o = self.variant.attend_from(&self.shape, inputs, documents.clone(), &mut state);
        let y = self.finish(o, &x, &mut preceding, residual);
        parts.replace(Some(state));
        let Histories { q, k, v, extra, output_gate } = histories;
        let all = [q, k, v].into_iter().chain(extra).chain([output_gate]);
        all.for_each(|history| history.replace_in(parts));
        y
    }

    /// Elements that [`Attention::forward_from`] takes of each row.
    pub(super) fn carried_elements(&self) -> usize {
        let gate = self.output_gate.as_ref();
        let histories = self.projections().chain(gate).flat_map(Projection::history_shapes);
        let histories: usize = histories.map(|[tokens, channels]| tokens * channels).sum();
        self.variant.state_elements(&self.shape, 1) as usize + histories
    }

    /// Changes how far back a token attends, in tokens; `None` for all tokens before it. No weight depends on it.
    pub(crate) fn set_window(&mut self, window: Option<usize>) {
        self.shape.window = window;
    }

    /// The metrics that [`Attention::observe`] may report.
    pub fn metrics(&self) -> Vec<Metric> {
        self.variant.metrics()
    }

    /// As [`Attention::metrics`], for a thorough probe.
    pub fn thorough_metrics(&self) -> Vec<Metric> {
        self.variant.thorough_metrics()
    }

    /// Reports the variant's metrics of [`Attention::forward`] over whole rows.
    pub fn observe(
        &self,
        x: Tensor<B, 3>,
        documents: &DocumentStarts<B>,
        first_values: &mut Option<Tensor<B, 3>>,
        probe: &mut Probe,
    ) {
        let x = Input::of(x);
        let inputs = self.inputs(&x, first_values, &mut Preceding::Nothing(documents));
        self.variant.observe(&self.shape, inputs, documents.clone(), probe);
    }

    /// The weights of keys, for one sequence; arguments as in [`Attention::forward`].
    pub(super) fn weights(
        &self,
        x: Tensor<B, 3>,
        first_values: &mut Option<Tensor<B, 3>>,
    ) -> LayerWeights {
        let inputs = self.inputs(&Input::of(x), first_values, &mut Preceding::Nothing(&None));
        let map = weight_map(&self.variant, &self.shape, inputs);
        LayerWeights { kind: self.variant.kind(), map }
    }

    /// The decoding state before the first token.
    pub fn init_state(&self) -> AttentionLayerState<B> {
        let new = ProjectionHistory::new;
        let extra = self.extra.iter().map(|_| new()).collect();
        AttentionLayerState {
            attention: self.variant.init_state(0),
            projections: Histories { q: new(), k: new(), v: new(), extra, output_gate: new() },
        }
    }

    /// Attention of new tokens to themselves and to those in `state`: `x` and the result are
    /// `[batch, n, width]`; `first_values` and `residual` are as in [`Attention::forward`].
    pub(super) fn extend(
        &self,
        x: Input<B>,
        state: &mut AttentionLayerState<B>,
        first_values: &mut Option<Tensor<B, 3>>,
        residual: Option<Tensor<B, 3>>,
    ) -> Tensor<B, 3> {
        // What is read more than once is computed once.
        let once = self.is_one_product() && self.output_gate.is_none() && self.value_gate.is_none();
        let x = if once { x } else { Input::of(x.value()) };
        let mut preceding = Preceding::Held(&mut state.projections);
        let inputs = self.inputs(&x, first_values, &mut preceding);
        let o = self.variant.extend(&self.shape, inputs, &mut state.attention);
        self.finish(o, &x, &mut preceding, residual)
    }

    /// Whether q, k, v and the variant's projections are linear layers of one input.
    fn is_one_product(&self) -> bool {
        self.projections().all(Projection::reads_input)
    }

    /// The projections of q, k and v, and the variant's.
    fn projections(&self) -> impl Iterator<Item = &Projection<B>> {
        [&self.q, &self.k, &self.v].into_iter().chain(self.extra.iter())
    }

    /// The inputs of the variant's operation.
    pub(super) fn inputs(
        &self,
        x: &Input<B>,
        first_values: &mut Option<Tensor<B, 3>>,
        preceding: &mut Preceding<B, Histories<B>>,
    ) -> Inputs<B> {
        let head_dim = self.shape.head_dim;
        let query_or_key = |y: Tensor<B, 3>, norm: &Option<Norm<B>>| {
            let y = split_heads(y, head_dim);
            match norm {
                Some(norm) => norm.forward(y),
                None => y,
            }
        };
        let (v_input, products) = self.products(x, preceding);
        let mut products = products.into_iter();
        let mut next = || products.next().expect("a product of each projection");
        let (q, k, v) = (next(), next(), next());
        let q = self.q.convolved(q, preceding.part(|held| &mut held.q.conv));
        let q = query_or_key(q, &self.q_norm);
        let k = self.k.convolved(k, preceding.part(|held| &mut held.k.conv));
        let k = query_or_key(k, &self.k_norm);
        let v = self.v.convolved(v, preceding.part(|held| &mut held.v.conv));
        let v = self.mixed_values(v, v_input, first_values);
        let extra = self.extra.iter().enumerate().map(|(at, projection)| {
            projection.convolved(next(), preceding.part(|held| &mut held.extra[at].conv))
        });
        Inputs {
            q,
            k,
            v: split_heads(v, self.variant.value_dim(&self.shape)),
            projections: extra.collect(),
            parameters: self.parameters.iter().map(Param::val).collect(),
        }
    }

    /// The input of v's linear layer, if the value residual has a gate, and the linear layers' outputs, in the order
    /// of [`Attention::projections`].
    fn products(
        &self,
        x: &Input<B>,
        preceding: &mut Preceding<B, Histories<B>>,
    ) -> (Option<Tensor<B, 3>>, Vec<Tensor<B, 3>>) {
        if self.is_one_product() {
            let tensors = self.projections().map(Projection::tensors).collect();
            return (self.value_gate.is_some().then(|| x.value()), x.linears(tensors));
        }
        let x = x.value();
        let q = self.q.shifted(&x, preceding.part(|held| &mut held.q.shift));
        let k = self.k.shifted(&x, preceding.part(|held| &mut held.k.shift));
        let v = self.v.shifted(&x, preceding.part(|held| &mut held.v.shift));
        let v_input = self.value_gate.is_some().then(|| v.clone());
        let of_qkv = [self.q.linear(q), self.k.linear(k), self.v.linear(v)];
        let extra = self.extra.iter().enumerate().map(|(at, projection)| {
            let part = preceding.part(|held| &mut held.extra[at].shift);
            projection.linear(projection.shifted(&x, part))
        });
        (v_input, of_qkv.into_iter().chain(extra).collect())
    }

    /// The values `v` `[batch, n, kv_heads · value_dim]` with the first layer's mixed in; `input` is that of v's
    /// linear layer.
    fn mixed_values(
        &self,
        v: Tensor<B, 3>,
        input: Option<Tensor<B, 3>>,
        first_values: &mut Option<Tensor<B, 3>>,
    ) -> Tensor<B, 3> {
        let first = first_values.get_or_insert_with(|| v.clone()).clone();
        if let Some(mix) = &self.value_mix {
            // In f32: λ's gradient is a sum over every element.
            let (dtype, lambdas) = (v.dtype(), mix.val());
            let lambda = |at| lambdas.clone().narrow(0, at, 1).reshape([1, 1, 1]);
            let to_f32 = |x: Tensor<B, 3>| x.cast(lambdas.dtype());
            return (to_f32(first) * lambda(0) + to_f32(v) * lambda(1)).cast(dtype);
        }
        match (&self.value_gate, input) {
            (Some(gate), Some(input)) => v.clone() + glu(gate.linear(input), first - v),
            _ => v,
        }
    }

    /// Joins the heads of `o` `[batch, heads, n, value_dim]`, gates them by the layer's input `x`,
    /// applies the output projection and adds `residual`.
    fn finish(
        &self,
        o: Tensor<B, 4>,
        x: &Input<B>,
        preceding: &mut Preceding<B, Histories<B>>,
        residual: Option<Tensor<B, 3>>,
    ) -> Tensor<B, 3> {
        let [batch, heads, n, value_dim] = o.dims();
        let mut o = o.swap_dims(1, 2).reshape([batch, n, heads * value_dim]);
        if let Some(gate) = &self.output_gate {
            let logits = gate.forward(&x.value(), preceding.part(|held| &mut held.output_gate));
            o = glu(logits, o);
        }
        self.output.forward_onto(o, residual)
    }
}

/// `[batch, n, heads · channels]` to `[batch, heads, n, channels]`.
pub(super) fn split_heads<B: OpBackend>(y: Tensor<B, 3>, channels: usize) -> Tensor<B, 4> {
    let [batch, n, features] = y.dims();
    y.reshape([batch, n, features / channels, channels]).swap_dims(1, 2)
}

/// Exponents of the token shifts' initial μ (see [`token_shift`]), as in RWKV-7's released models.
const Q_SHIFT: f64 = 0.2;
const K_SHIFT: f64 = 0.7;
const V_SHIFT: f64 = 0.7;
const GATE_SHIFT: f64 = 0.2;

/// Makes the parts of an attention layer.
struct Parts<'a, B: OpBackend> {
    init: &'a WeightInit<'a, B>,
    config: &'a ModelConfig,
    shape: AttentionShape,
}

impl<B: OpBackend> Parts<'_, B> {
    /// A projection to `features`, with a token shift if the model has them.
    fn plain(&self, name: &str, features: usize, shift: f64) -> Projection<B> {
        let ModelConfig { width, bias, .. } = *self.config;
        let linear = Linear::new(&self.init.part(name), width, features, bias);
        Projection::new(linear).with_shift(self.token_shift(shift))
    }

    /// As [`Parts::plain`], followed by a short convolution if `short_conv`.
    fn convolved(
        &self,
        name: &str,
        features: usize,
        shift: f64,
        short_conv: bool,
    ) -> Projection<B> {
        let taps = short_conv
            .then(|| conv_taps(&self.init.part(format_args!("{name}_conv")), features, CONV_TAPS));
        self.plain(name, features, shift).with_silu_conv(taps)
    }

    /// A projection that the variant asks for.
    fn extra(&self, spec: &ProjectionSpec) -> Projection<B> {
        let projection = Projection::extra(&self.init.part(spec.name), self.config.width, spec);
        projection.with_shift(self.token_shift(spec.shift))
    }

    /// The gated value residual's projection, to `features`.
    fn value_gate(&self, features: usize) -> Projection<B> {
        let rank = self.config.value_residual_rank();
        let spec = ProjectionSpec::new("value_gate", features)
            .low_rank(rank, LowRankActivation::Identity)
            .bias(Init::Constant(1.0));
        Projection::extra(&self.init.part(spec.name), self.config.width, &spec)
    }

    fn head_norm(&self, name: &str) -> Option<Norm<B>> {
        let init = self.init.part(name);
        let norm = || Norm::new(&init, NormKind::RmsNorm, self.shape.head_dim, false);
        self.config.qk_norm.then(norm)
    }

    fn token_shift(&self, exponent: f64) -> Option<Param<Tensor<B, 1>>> {
        let values = || token_shift(&self.shape, |r| exponent * r);
        let mu = || self.init.vector(self.shape.width, values);
        self.config.token_shift.then(mu)
    }
}
