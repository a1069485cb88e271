//! Differential rectified linear attention: ReLA with the difference of two views, a baseline of
//! Huang et al. ("Threshold differential attention", 2026, §6.1, which calls it "a straightforward
//! combination" and gives no equation).
//!
//! Two views, each with its own projections of queries and keys, and one set of values:
//!
//! a⁽ᵗ⁾_ij = max(scale · q⁽ᵗ⁾_iᵀk⁽ᵗ⁾_j, 0), o_i = LayerNorm(Σ_{j≤i} (a⁽¹⁾_ij − λ a⁽²⁾_ij) v_j).
//!
//! | parameter | elements | initial value |
//! | --- | --- | --- |
//! | `lambda` | 1 | 0.5, clamped to [0, 1] as in [`tda`](super::tda) |
//! | `norm` | head_dim | 1, the layer norm's scale, shared by the layer's heads |
//! | `norm_bias` | head_dim | 0 |
//!
//! Not specified by the source, chosen here: λ is TDA's (one per layer, clamped, initially 0.5), the
//! norm ReLA's. The norm is over a head's channels and adds `norm_eps`, 10⁻⁵, to the variance; a row without a
//! positive score gives the norm's bias.
//!
//! Decoding caches rotated keys of both views and values: 3 · kv_heads · head_dim elements per token.

#[cfg(test)]
mod tests;

use burn::tensor::Tensor;
use longwall_config::Problems;
use serde::{Deserialize, Serialize};

use super::flash;
use super::kv_cache_variant::{KvCacheVariant, Prepared};
use super::output_norm::validate_norm_eps;
use super::probe::{Metric, Probe};
use super::rectified::{LAMBDA_INIT, clamp_lambda, rectified};
use super::rotary::{Rotary, with_rotary_keys};
use super::rotation::Rotation;
use super::rowwise::sparsity;
use super::{AttentionShape, Init, Kernel, ParameterSpec, VariantSpec};
use crate::backend::OpBackend;
use crate::ops::layer_norm::layer_norm;
use crate::ops::view_difference::view_difference;

/// What the layer norm adds to the variance by default.
const NORM_EPS: f32 = 1e-5;

/// `[model.attention]` with `kind = "diff_rela"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, remote = "Self")]
pub struct Config {
    /// What the layer norm of outputs adds to the variance, 1e-20 to 1; default 1e-5.
    pub norm_eps: f32,
    /// Rotary positions; on by default.
    #[serde(flatten, skip_deserializing)]
    pub rotary: Rotary,
}

with_rotary_keys!(Config);

impl Default for Config {
    fn default() -> Self {
        Config { norm_eps: NORM_EPS, rotary: Rotary::new(true) }
    }
}

impl VariantSpec for Config {
    const SOURCE: &'static str = "ReLA with the difference of two views (Huang et al., 2026)";

    const WEIGHS_VALUES: bool = true;

    const KERNELS: &'static [Kernel] = &[Kernel::CUDA_BF16];

    fn serves(&self, kernel: Kernel, shape: &AttentionShape, batch: usize) -> bool {
        flash::serves(kernel.dtype, batch * self.views() * shape.heads, shape.head_dim)
    }

    fn validate(&self, key: &str, shape: &AttentionShape, problems: &mut Problems) {
        validate_norm_eps(key, self.norm_eps, NORM_EPS, problems);
        self.rotary.validate(key, shape, problems);
    }

    fn views(&self) -> usize {
        2
    }

    fn parameters(&self, shape: &AttentionShape) -> Vec<ParameterSpec> {
        let head_dim = shape.head_dim;
        vec![
            ParameterSpec { name: "lambda", elements: 1, init: Init::Constant(LAMBDA_INIT) },
            ParameterSpec { name: "norm", elements: head_dim, init: Init::Constant(1.0) },
            ParameterSpec { name: "norm_bias", elements: head_dim, init: Init::Constant(0.0) },
        ]
    }

    fn metrics(&self) -> Vec<Metric> {
        sparsity::METRICS.to_vec()
    }
}

impl KvCacheVariant for Config {
    fn rotation(&self) -> Option<Rotation> {
        self.rotary.rotation()
    }

    fn output<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        prepared: Prepared<'_, B>,
    ) -> Tensor<B, 4> {
        let parameters = prepared.parameters;
        let [lambda, norm, bias] = parameters else { panic!("3 parameters, not {parameters:?}") };
        let o = view_difference(rectified(shape, prepared).attend(), clamp_lambda(lambda.clone()));
        layer_norm(o, norm.clone(), Some(bias.clone()), self.norm_eps)
    }

    fn weigh_prepared<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        call: Prepared<'_, B>,
    ) -> Tensor<B, 4> {
        rectified(shape, call).attend()
    }

    fn observe_output<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        call: Prepared<'_, B>,
        probe: &mut Probe,
    ) {
        rectified(shape, call).report_sparsity(self.views(), probe);
    }
}
