//! RWKV-7's time mix (Peng et al., "RWKV-7 Goose with expressive dynamic state evolution", 2025,
//! section 4.1, equations 4 to 22; the numbers below are the paper's).
//!
//! q is the receptance r. Vectors are rows, as in the paper; per kv head:
//!
//! - d = tanh(x W₁) W₂ + bias, w = exp(−e^−½ σ(d)), in (0.545, 1): the decay (11, 12)
//! - a = σ(x W₁ W₂ + bias): the in-context learning rate (4)
//! - κ = k ⊙ ξ, κ̂ = κ / ‖κ‖₂: the removal key (6, 15)
//! - k̃ = k ⊙ (1 + (a − 1) ⊙ α): the replacement key (7)
//! - S_t = S_{t−1} (diag(w_t) − κ̂_tᵀ (a_t ⊙ κ̂_t)) + v_tᵀ k̃_t, from S = 0 (16, 17)
//!
//! and per query head:
//!
//! - u = (Σ_n r_n ρ_n k̃_n) v: the bonus (20)
//! - p = norm(r S_tᵀ) + u, a layer norm of the head with scale and bias (21)
//! - o = g ⊙ p with g = σ(x W₁) W₂ (14, 22)
//!
//! There is no softmax scale, no positions and no window. Token shift (3) and the value residual (8 to 10)
//! belong to the block.
//!
//! | vector | elements | initial value |
//! |---|---|---|
//! | bias of d, channel n of N, layer l of L | kv_heads · head_dim | −6.5 + 5 (n/(N−1))^(0.85 + √(l/(L−1))) |
//! | bias of a | kv_heads · head_dim | 0 |
//! | ξ, α | kv_heads · head_dim | 0.85, 1 |
//! | ρ | heads · head_dim | 0 |
//! | norm's scale, bias | heads · value_dim | ((l+1)/L)^0.7, 0 |
//!
//! The paper gives ranks by width (Table 16). The initial values above are those of an earlier version of
//! the released training code (the newest version differs), which initialises W₁ to 0 and W₂ orthogonal;
//! here the layer initialises all its matrices alike. The norm's eps is head_dim · 10⁻⁵, which is the
//! released models' 64 · 10⁻⁵ at their head_dim of 64. A key of norm 0 has no direction: ‖κ‖ is computed
//! as √(Σκ² + 10⁻¹²). With grouped heads, which the paper does not have, everything that belongs to k and
//! v exists once per kv head; r, ρ, the norm and g once per query head.
//!
//! Decoding keeps only S: kv_heads · head_dim · value_dim elements at any length. A token costs a few
//! multiply-adds per element.

mod cuda;
mod masks;
mod recurrence;
#[cfg(test)]
mod tests;
mod time_mix;

use burn::tensor::ops::FloatTensor;
use burn::tensor::{DType, Tensor, activation::sigmoid};
use longwall_config::Problems;
use serde::{Deserialize, Serialize};

use self::recurrence::wkv;
use self::time_mix::{TimeMix, time_mix};
use super::chunked::{self, diagonal};
use super::dispatch::on_cuda;
use super::recurrent::by_head;
use super::saved::Channels;
use super::{
    AttentionShape, DecodeState, DocumentStarts, ExecPath, Init, Inputs, Kernel, LowRank,
    LowRankActivation, ParameterSpec, ProjectionSpec, Variant, VariantSpec,
};
use crate::backend::{OpBackend, primitive, tensor};

/// e^−½: the strongest decay of a step is exp(−e^−½).
const MAX_DECAY: f64 = 0.606_530_659_712_633_4;

/// Added to the square of a removal key's norm.
const KEY_EPS: f32 = 1e-12;

/// The group norm's eps per channel of a head.
const NORM_EPS: f32 = 1e-5;

/// `[model.attention]` with `kind = "rwkv7"`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Inner channels of the decay's projection, 1 to `width`; default 1.8 · √width, rounded to a
    /// multiple of 32, at least 32 and at most `width`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decay_rank: Option<usize>,
    /// Inner channels of the learning rate's projection, 1 to `width`; default as `decay_rank`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate_rank: Option<usize>,
    /// Inner channels of the output gate's projection, 1 to `width`; default 0.6 · width^0.8,
    /// rounded in the same way, but 128 for a width of 1024.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gate_rank: Option<usize>,
}

/// The state S of every key head.
#[derive(Clone, Debug)]
pub struct State<B: OpBackend> {
    /// Sᵀ, `[batch, kv_heads, head_dim, value_dim]`; `None` before the first token.
    wkv: Option<Tensor<B, 4>>,
}

impl<B: OpBackend> DecodeState for State<B> {
    fn elements(&self) -> usize {
        self.wkv.as_ref().map_or(0, |x| x.shape().num_elements())
    }
}

impl Config {
    fn decay_rank(&self, width: usize) -> usize {
        self.decay_rank.unwrap_or_else(|| LowRank::default_rank(1.8 * (width as f64).sqrt(), width))
    }

    fn rate_rank(&self, width: usize) -> usize {
        self.rate_rank.unwrap_or_else(|| LowRank::default_rank(1.8 * (width as f64).sqrt(), width))
    }

    fn gate_rank(&self, width: usize) -> usize {
        self.gate_rank.unwrap_or_else(|| match width {
            // The formula, which gives the table's other rows, would say 160.
            1024 => 128,
            _ => LowRank::default_rank(0.6 * (width as f64).powf(0.8), width),
        })
    }
}

/// The decay's initial bias: slow channels first, and a steeper curve in deeper layers.
fn decay_bias(shape: &AttentionShape) -> Init {
    let channels = shape.kv_heads * shape.head_dim;
    let depth = shape.layer as f64 / (shape.layers.max(2) - 1) as f64;
    let power = 0.85 + depth.sqrt();
    let place = |n: usize| n as f64 / (channels.max(2) - 1) as f64;
    Init::Values((0..channels).map(|n| (-6.5 + 5.0 * place(n).powf(power)) as f32).collect())
}

/// The inputs of [`TimeMix`].
fn in_order<B: OpBackend>(inputs: Inputs<B>) -> [FloatTensor<B>; 11] {
    let Inputs { q, k, v, projections, parameters } = inputs;
    let of_heads = [q, k, v].map(primitive).into_iter();
    let projections = projections.into_iter().map(primitive);
    let all = of_heads.chain(projections).chain(parameters.into_iter().map(primitive));
    let count = "three projections and five vectors";
    all.collect::<Vec<_>>().try_into().unwrap_or_else(|_| panic!("{count}"))
}

impl VariantSpec for Config {
    const SOURCE: &'static str = "RWKV-7's time mix (Peng et al., 2025)";

    const KERNELS: &'static [Kernel] = &[Kernel::CUDA_BF16];

    fn serves(&self, kernel: Kernel, shape: &AttentionShape, _batch: usize) -> bool {
        chunked::serves(kernel.dtype, shape.head_dim, self.value_dim(shape))
    }

    fn validate(&self, key: &str, shape: &AttentionShape, problems: &mut Problems) {
        let ranks = [
            ("decay_rank", self.decay_rank),
            ("rate_rank", self.rate_rank),
            ("gate_rank", self.gate_rank),
        ];
        for (name, rank) in ranks {
            problems.check(
                rank.is_none_or(|rank| (1..=shape.width).contains(&rank)),
                format!("{key}.{name}"),
                rank.unwrap_or_default(),
                format!("a whole number from 1 to model.width, {}", shape.width),
                "leave it out for the default",
            );
        }
    }

    fn allows_window(&self) -> bool {
        false
    }

    fn carries_state(&self) -> bool {
        true
    }

    fn projections(&self, shape: &AttentionShape) -> Vec<ProjectionSpec> {
        let (width, keys) = (shape.width, shape.kv_heads * shape.head_dim);
        let outputs = shape.heads * self.value_dim(shape);
        vec![
            ProjectionSpec::new("decay", keys)
                .low_rank(self.decay_rank(width), LowRankActivation::Tanh)
                .bias(decay_bias(shape)),
            ProjectionSpec::new("rate", keys)
                .low_rank(self.rate_rank(width), LowRankActivation::Identity)
                .bias(Init::Constant(0.0)),
            ProjectionSpec::new("gate", outputs)
                .low_rank(self.gate_rank(width), LowRankActivation::Sigmoid)
                .shift(0.2),
        ]
    }

    fn parameters(&self, shape: &AttentionShape) -> Vec<ParameterSpec> {
        let keys = shape.kv_heads * shape.head_dim;
        let outputs = shape.heads * self.value_dim(shape);
        let scale = ((shape.layer + 1) as f32 / shape.layers as f32).powf(0.7);
        [
            ("removal_scale", keys, 0.85),
            ("replacement", keys, 1.0),
            ("bonus", shape.heads * shape.head_dim, 0.0),
            ("norm_scale", outputs, scale),
            ("norm_bias", outputs, 0.0),
        ]
        .map(|(name, elements, init)| ParameterSpec { name, elements, init: Init::Constant(init) })
        .into()
    }

    fn saved_bytes_per_token(
        &self,
        shape: &AttentionShape,
        seq_len: usize,
        path: ExecPath,
        dtype: DType,
    ) -> f64 {
        let channels = Channels::of(self, shape);
        if let ExecPath::Kernel(_) = path {
            // The inputs, the recurrence's output, and what the core saves.
            let update = diagonal::Update::Replace;
            let saved = diagonal::saved_bytes(update, shape, self.value_dim(shape));
            let Channels { q, k, v, o, .. } = channels;
            return dtype.size() as f64 * (q + 3.0 * k + v + 2.0 * o) + saved;
        }
        // r, k̃, v, κ̂, a, the decay and their products with its factors; the matrices and states of chunks.
        let chunk = recurrence::CHUNK_SIZE.min(seq_len) as f64;
        let state = channels.rows * (shape.head_dim * self.value_dim(shape)) as f64 / chunk;
        channels.in_f32() + channels.scores(8.0, chunk) + 4.0 * (20.0 * channels.k + 4.0 * state)
    }

    fn has_retention(&self) -> bool {
        true
    }

    fn flops_per_token(&self, shape: &AttentionShape, _seq_len: usize) -> f64 {
        // By the recurrence, per element of the state: S κ̂ᵀ, the decay, and two rank-one updates;
        // then r Sᵀ for each query head.
        let elements = (shape.head_dim * self.value_dim(shape)) as f64;
        (7 * shape.kv_heads + 2 * shape.heads) as f64 * elements
    }

    fn state_elements(&self, shape: &AttentionShape, _seq_len: usize) -> u64 {
        (shape.kv_heads * shape.head_dim * self.value_dim(shape)) as u64
    }

    fn state_dtype(&self, _path: ExecPath, _dtype: DType) -> DType {
        DType::F32
    }
}

impl Variant for Config {
    type State<B: OpBackend> = State<B>;

    fn attend<B: OpBackend>(
        &self,
        _shape: &AttentionShape,
        inputs: Inputs<B>,
        documents: DocumentStarts<B>,
        path: ExecPath,
    ) -> Tensor<B, 4> {
        let ints = documents.into_iter().map(Tensor::into_primitive).collect();
        tensor(path.run::<B, _, 11>(&TimeMix, in_order(inputs), ints))
    }

    fn attend_from<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        inputs: Inputs<B>,
        documents: DocumentStarts<B>,
        state: &mut Tensor<B, 2>,
        path: ExecPath,
    ) -> Tensor<B, 4> {
        let ints = documents.into_iter().map(Tensor::into_primitive).collect();
        let [batch, elements] = state.dims();
        let sizes = [batch, shape.kv_heads, shape.head_dim, self.value_dim(shape)];
        let before = primitive(state.clone().reshape(sizes));
        let [y, after] = path.run_from::<B, _, 11>(&TimeMix, in_order(inputs), ints, before);
        *state = tensor::<B, 4>(after).reshape([batch, elements]);
        tensor(y)
    }

    fn log_retention<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        inputs: Inputs<B>,
    ) -> Option<Tensor<B, 4>> {
        let decay = inputs.in_f32().projections.swap_remove(0);
        Some(by_head(sigmoid(decay) * -MAX_DECAY, shape.kv_heads))
    }

    fn init_state<B: OpBackend>(
        &self,
        _shape: &AttentionShape,
        _path: ExecPath,
        _capacity: usize,
    ) -> State<B> {
        State { wkv: None }
    }

    fn extend<B: OpBackend>(
        &self,
        _shape: &AttentionShape,
        inputs: Inputs<B>,
        state: &mut State<B>,
        path: ExecPath,
    ) -> Tensor<B, 4> {
        if let ExecPath::Kernel(_) = path {
            let on_device =
                |x: FloatTensor<B>| B::into_cuda(x).expect("the kernel's path is on CUDA");
            let inputs = in_order(inputs).map(on_device);
            let before = state.wkv.take().map(on_cuda::<B, 4>);
            let done = cuda::forward_from(&inputs, &[], before.as_ref(), false);
            let (forward, end) = done.expect("the kernel serves the layer");
            state.wkv = Some(tensor(B::from_cuda(end)));
            return tensor(B::from_cuda(forward.output));
        }
        time_mix(inputs, |inputs| {
            let (o, end) = wkv(inputs, None, state.wkv.take());
            state.wkv = Some(end);
            o
        })
    }
}
