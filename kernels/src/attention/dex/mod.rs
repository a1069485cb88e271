//! DEX, the differential extension of softmax attention (Kong et al., "Understanding differential
//! transformer unchains pretrained self-attentions", 2025, equations 4 and 5).
//!
//! o = softmax(scale · q kᵀ) v for each head, o' = o − λ · o W_D: a learned map of a head's outputs,
//! shared by the layer's heads, replaces the second view of differential attention. There is one
//! softmax.
//!
//! | parameter | elements | initial value |
//! | --- | --- | --- |
//! | `w_d` | head_dim², W_D by rows | 0: the layer starts as softmax attention, also from a pretrained model |
//! | `lambda` | 1 | λ_init = 0.8 − 0.6 · exp(−0.3 · layer), with layers from 0 |
//!
//! Differences: the paper fine-tunes trained models, and over T steps moves λ from 0 through
//! (1 − t/T)(t/T) λ_init + (t/T) λ_learn to a learned λ that starts around 0. An operation does not
//! know the step, so here λ is learned from λ_init, and W_D starts at 0 (with both at 0 neither would
//! have a gradient). The paper selects the heads to adapt by their entropy in the trained model; here
//! all heads are adapted, as in Huang et al.'s (2026) comparison, which trains from scratch.
//!
//! On CUDA in bf16, the flash kernels of softmax attention, then one product with −λ W_D, in bf16, that is added
//! to o.
//!
//! Decoding caches rotated keys and values: 2 · kv_heads · head_dim elements per token.

#[cfg(test)]
mod tests;

use burn::tensor::Tensor;
use longwall_config::Problems;
use serde::{Deserialize, Serialize};

use super::diff::lambda_init;
use super::flash;
use super::kv_cache_variant::{KvCacheVariant, Prepared};
use super::rotary::{Rotary, with_rotary_keys};
use super::rotation::Rotation;
use super::softmax::{Softmax, softmax};
use super::{AttentionShape, Init, Kernel, ParameterSpec, VariantSpec};
use crate::backend::OpBackend;
use crate::device::DeviceKind;
use crate::ops::linear::linear_add;

/// o − λ · o W_D, of `[batch, heads, queries, head_dim]`.
fn adapt<B: OpBackend>(o: Tensor<B, 4>, parameters: &[Tensor<B, 1>]) -> Tensor<B, 4> {
    let [w_d, lambda] = parameters else { panic!("2 parameters, not {parameters:?}") };
    let [batch, heads, queries, head_dim] = o.dims();
    // In the memory order of the kernels' outputs.
    let rows = o.swap_dims(1, 2).reshape([batch, queries * heads, head_dim]);
    let w_d = w_d.clone().reshape([head_dim, head_dim]) * lambda.clone().neg().reshape([1, 1]);
    let adapted = linear_add(rows.clone(), w_d.transpose(), rows);
    adapted.reshape([batch, queries, heads, head_dim]).swap_dims(1, 2)
}

/// `[model.attention]` with `kind = "dex"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, remote = "Self")]
pub struct Config {
    /// Rotary positions; on by default.
    #[serde(flatten, skip_deserializing)]
    pub rotary: Rotary,
}

with_rotary_keys!(Config);

impl Default for Config {
    fn default() -> Self {
        Config { rotary: Rotary::new(true) }
    }
}

impl VariantSpec for Config {
    const SOURCE: &'static str = "differential extension, DEX (Kong et al., 2025)";

    const WEIGHS_VALUES: bool = true;

    // The kernels of the softmax operation.
    const KERNELS: &'static [Kernel] = &[Kernel::CPU_F32, Kernel::CUDA_BF16];

    const MATRICES: &'static [&'static str] = &["w_d"];

    fn serves(&self, kernel: Kernel, shape: &AttentionShape, batch: usize) -> bool {
        match kernel.device {
            DeviceKind::Cpu => true,
            DeviceKind::Cuda => flash::serves(kernel.dtype, batch * shape.heads, shape.head_dim),
        }
    }

    fn validate(&self, key: &str, shape: &AttentionShape, problems: &mut Problems) {
        self.rotary.validate(key, shape, problems);
    }

    fn parameters(&self, shape: &AttentionShape) -> Vec<ParameterSpec> {
        let elements = shape.head_dim * shape.head_dim;
        let lambda = Init::Constant(lambda_init(shape.layer));
        vec![
            ParameterSpec { name: "w_d", elements, init: Init::Constant(0.0) },
            ParameterSpec { name: "lambda", elements: 1, init: lambda },
        ]
    }

    fn flops_per_token(&self, shape: &AttentionShape, seq_len: usize) -> f64 {
        // qᵀk and p·v: two multiply-adds per channel and key; then the map of the outputs.
        let outputs = (shape.heads * shape.head_dim) as f64;
        outputs * 4.0 * shape.mean_keys(seq_len) + self.weight_flops_per_token(shape)
    }

    fn weight_flops_per_token(&self, shape: &AttentionShape) -> f64 {
        (2 * shape.heads * shape.head_dim * shape.head_dim) as f64
    }
}

impl KvCacheVariant for Config {
    fn rotation(&self) -> Option<Rotation> {
        self.rotary.rotation()
    }

    fn weigh_prepared<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        Prepared { q, k, v, documents, path, .. }: Prepared<'_, B>,
    ) -> Tensor<B, 4> {
        softmax(&Softmax::of(shape), [q, k, v], None, documents, path)
    }

    fn output<B: OpBackend>(&self, shape: &AttentionShape, call: Prepared<'_, B>) -> Tensor<B, 4> {
        let parameters = call.parameters;
        adapt(self.weigh_prepared(shape, call), parameters)
    }
}
