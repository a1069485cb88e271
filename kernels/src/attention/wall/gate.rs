//! The gate's logits, and the log decays computed from them.

use burn::tensor::{FloatDType, Tensor};

use super::{Config, GateSource};
use crate::attention::AttentionShape;
use crate::backend::OpBackend;
use crate::ops::activation::log_sigmoid;
use crate::ops::matmul::MatMul;

/// −g_max (1 − e^(ĝ/g_max)) with ĝ = ln σ(logit): in (−g_max, 0] (Pai et al., appendix G).
///
/// e^y − 1 is computed as tanh(y/2)·(e^y + 1), which is accurate for nearly open gates.
fn soft_clamp<B: OpBackend>(logits: Tensor<B, 4>, g_max: f32) -> Tensor<B, 4> {
    let y = log_sigmoid(logits) / g_max;
    (y.clone() / 2.0).tanh() * (y.exp() + 1.0) * g_max
}

impl Config {
    /// The gate's logits, `[batch, gate heads, seq_len, gate_dims]`, for either source.
    ///
    /// - `k`: `[batch, kv_heads, seq_len, head_dim]`, rotated if so configured
    /// - `projections`, `parameters`: those of the layer; the parameters of a key gate are W,
    ///   `[kv_heads, head_dim, outputs]`, and b, `[kv_heads, outputs]`, both flat
    pub(super) fn logits<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        k: Tensor<B, 4>,
        projections: &[Tensor<B, 3>],
        parameters: &[Tensor<B, 1>],
    ) -> Tensor<B, 4> {
        let (dims, outputs) = (self.gate_dims_of(shape), self.gate_outputs(shape));
        let logits = match self.gate_source {
            GateSource::Hidden => {
                let ([batch, seq_len, _], heads) =
                    (projections[0].dims(), self.gate_heads_of(shape));
                projections[0].clone().reshape([batch, seq_len, heads, outputs]).swap_dims(1, 2)
            }
            GateSource::Key => {
                let heads = shape.kv_heads;
                let weight = parameters[0].clone().reshape([1, heads, shape.head_dim, outputs]);
                let bias = parameters[1].clone().reshape([1, heads, 1, outputs]);
                k.cast(FloatDType::F32).mm(weight) + bias
            }
        };
        // A single output, of a scalar gate or of the only gated channel, serves every gated channel.
        if outputs < dims { logits.repeat_dim(3, dims) } else { logits }
    }

    /// g of [`Config::logits`], `[batch, gate heads, seq_len, head_dim]`, 0 in channels without a gate.
    pub(super) fn log_decay<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        logits: Tensor<B, 4>,
    ) -> Tensor<B, 4> {
        let g = soft_clamp(logits, self.g_max);
        let [batch, heads, seq_len, dims] = g.dims();
        if dims == shape.head_dim {
            return g;
        }
        let plain = [batch, heads, seq_len, shape.head_dim - dims];
        Tensor::cat(vec![g.clone(), Tensor::zeros(plain, &g.device())], 3)
    }
}
