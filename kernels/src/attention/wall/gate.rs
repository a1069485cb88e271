//! Log decays from a gate's logits.

use burn::tensor::Tensor;

use super::Config;
use crate::attention::AttentionShape;
use crate::backend::OpBackend;
use crate::ops::activation::log_sigmoid;
use crate::ops::matmul::MatMul;

/// −g_max (1 − e^(ĝ/g_max)) with ĝ = ln σ(logit): in (−g_max, 0] (Pai et al., appendix G).
///
/// e^y − 1 is taken as tanh(y/2)·(e^y + 1), which keeps its digits where gates are nearly open.
fn soft_clamp<B: OpBackend>(logits: Tensor<B, 4>, g_max: f32) -> Tensor<B, 4> {
    let y = log_sigmoid(logits) / g_max;
    (y.clone() / 2.0).tanh() * (y.exp() + 1.0) * g_max
}

impl Config {
    /// g of the gate's own projection, `[batch, gate heads, seq_len, head_dim]`, 0 in channels
    /// without a gate. `logits` is `[batch, seq_len, gate heads · gate_dims]`.
    pub(super) fn hidden_gate<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        logits: Tensor<B, 3>,
    ) -> Tensor<B, 4> {
        let [batch, seq_len, _] = logits.dims();
        let (heads, dims) = (self.gate_heads_of(shape), self.gate_dims_of(shape));
        let logits = logits.reshape([batch, seq_len, heads, dims]).swap_dims(1, 2);
        self.widen(shape, soft_clamp(logits, self.g_max))
    }

    /// g from the keys as they are cached, `[batch, kv_heads, seq_len, head_dim]`, 0 in channels
    /// without a gate. The parameters are W, `[kv_heads, head_dim, outputs]`, and b,
    /// `[kv_heads, outputs]`, both flat.
    pub(super) fn key_gate<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        k: Tensor<B, 4>,
        parameters: &[Tensor<B, 1>],
    ) -> Tensor<B, 4> {
        let (kv_heads, outputs) = (shape.kv_heads, self.key_gate_outputs(shape));
        let weight = parameters[0].clone().reshape([1, kv_heads, shape.head_dim, outputs]);
        let bias = parameters[1].clone().reshape([1, kv_heads, 1, outputs]);
        let g = soft_clamp(k.mm(weight) + bias, self.g_max);
        let dims = self.gate_dims_of(shape);
        // One output is a scalar gate (or the only channel's): it serves every gated channel.
        let g = if outputs < dims { g.repeat_dim(3, dims) } else { g };
        self.widen(shape, g)
    }

    /// Adds the channels without a gate: they keep everything.
    fn widen<B: OpBackend>(&self, shape: &AttentionShape, g: Tensor<B, 4>) -> Tensor<B, 4> {
        let [batch, heads, seq_len, dims] = g.dims();
        if dims == shape.head_dim {
            return g;
        }
        let plain = [batch, heads, seq_len, shape.head_dim - dims];
        Tensor::cat(vec![g.clone(), Tensor::zeros(plain, &g.device())], 3)
    }
}
