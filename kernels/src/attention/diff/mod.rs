//! Differential attention (Ye et al., "Differential Transformer", 2025, equations 1 to 3).
//!
//! Two views, each with its own projections of queries and keys, and one set of values:
//!
//! o_i = (1 − λ_init) · RMSNorm(Σ_{j≤i} (softmax_j(scale · q⁽¹⁾_iᵀk⁽¹⁾_j) − λ softmax_j(scale ·
//! q⁽²⁾_iᵀk⁽²⁾_j)) v_j), λ = exp(λ_q1·λ_k1) − exp(λ_q2·λ_k2) + λ_init,
//! λ_init = 0.8 − 0.6 · exp(−0.3 · layer), with layers from 0. The norm is over each head's channels.
//!
//! In the paper a head's values have twice the channels of its queries, and a layer has half the heads
//! of a plain transformer's at the same head_dim. That is `value_factor = 2`, the default: halve
//! `model.heads`, keep `model.head_dim`, and the layer has as many parameters as a softmax layer.
//! `value_factor = 1` is the form that Huang et al. (2026) compare with, with as many heads as softmax.
//!
//! | parameter | elements | initial value |
//! | --- | --- | --- |
//! | `lambda_q1`, `lambda_k1`, `lambda_q2`, `lambda_k2` | head_dim each | normal(0, 0.1), shared by the layer's heads |
//! | `norm` | value_factor · head_dim | 1, the RMS norm's scale, shared by the layer's heads |
//!
//! Not specified by the source, chosen here: the RMS norm adds 10⁻⁵ to the mean square, as the
//! authors' code does; λ is not bounded.
//!
//! On CUDA in bf16, the flash kernels of softmax attention: both views are heads of one call, and share the values.
//! Heads of values have up to 256 channels, those of queries up to 128 with `value_factor = 2`.
//!
//! Decoding caches rotated keys of both views and values: (2 + value_factor) · kv_heads · head_dim
//! elements per token.

#[cfg(test)]
mod tests;

use burn::tensor::Tensor;
use longwall_config::Problems;
use serde::{Deserialize, Serialize};

use super::flash;
use super::kv_cache_variant::{KvCacheVariant, Prepared};
use super::rotary::{Rotary, with_rotary_keys};
use super::rotation::Rotation;
use super::softmax::{Softmax, softmax};
use super::{AttentionShape, Init, Kernel, ParameterSpec, VariantSpec};
use crate::backend::{OpBackend, primitive, tensor};
use crate::device::DeviceKind;
use crate::ops::rms_norm::rms_norm;
use crate::ops::view_difference::lambda::Lambda;
use crate::ops::view_difference::view_difference;

/// Added to the mean square by the RMS norm.
const NORM_EPSILON: f32 = 1e-5;

/// λ_init of the layer with this index, from 0.
pub(super) fn lambda_init(layer: usize) -> f32 {
    (0.8 - 0.6 * (-0.3 * layer as f64).exp()) as f32
}

/// `[model.attention]` with `kind = "diff"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, remote = "Self")]
pub struct Config {
    /// Channels of a head's values over those of its queries, 1 or 2; default 2.
    pub value_factor: usize,
    /// Rotary positions; on by default.
    #[serde(flatten, skip_deserializing)]
    pub rotary: Rotary,
}

with_rotary_keys!(Config);

impl Default for Config {
    fn default() -> Self {
        Config { value_factor: 2, rotary: Rotary::new(true) }
    }
}

impl VariantSpec for Config {
    const SOURCE: &'static str = "differential attention (Ye et al., 2025)";

    const WEIGHS_VALUES: bool = true;

    // The kernels of the softmax operation.
    const KERNELS: &'static [Kernel] = &[Kernel::CPU_F32, Kernel::CUDA_BF16];

    fn serves(&self, kernel: Kernel, shape: &AttentionShape, batch: usize) -> bool {
        let heads = batch * self.views() * shape.heads;
        match kernel.device {
            DeviceKind::Cpu => true,
            DeviceKind::Cuda => {
                flash::serves(kernel.dtype, heads, shape.head_dim)
                    && flash::serves_values(self.value_dim(shape))
            }
        }
    }

    fn validate(&self, key: &str, shape: &AttentionShape, problems: &mut Problems) {
        problems.check(
            matches!(self.value_factor, 1 | 2),
            format!("{key}.value_factor"),
            self.value_factor,
            "1 or 2",
            "set value_factor = 2 with half of a softmax layer's heads, or 1 with all of them",
        );
        self.rotary.validate(key, shape, problems);
    }

    fn views(&self) -> usize {
        2
    }

    fn value_dim(&self, shape: &AttentionShape) -> usize {
        self.value_factor * shape.head_dim
    }

    fn parameters(&self, shape: &AttentionShape) -> Vec<ParameterSpec> {
        let vector =
            |name| ParameterSpec { name, elements: shape.head_dim, init: Init::Normal(0.1) };
        let elements = self.value_dim(shape);
        let norm = ParameterSpec { name: "norm", elements, init: Init::Constant(1.0) };
        let vectors = ["lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"].map(vector);
        vectors.into_iter().chain([norm]).collect()
    }

    fn flops_per_token(&self, shape: &AttentionShape, seq_len: usize) -> f64 {
        // qᵀk and p·v in each view: two multiply-adds per channel and key.
        let per_key = 4 * shape.heads * (shape.head_dim + self.value_dim(shape));
        per_key as f64 * shape.mean_keys(seq_len)
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
        let [q1, k1, q2, k2, norm] = parameters else { panic!("5 parameters, not {parameters:?}") };
        let vectors = [q1, k1, q2, k2].map(|x| primitive(x.clone()));
        let init = lambda_init(shape.layer);
        let lambda = tensor(B::run(&Lambda { init }, vectors, vec![]));
        let both = self.weigh_prepared(shape, call);
        rms_norm(view_difference(both, lambda), norm.clone() * (1.0 - init), NORM_EPSILON)
    }
}
