//! Threshold differential attention, TDA (Huang et al., "Threshold differential attention", 2026,
//! §4.2 and appendix C).
//!
//! Two views, each with its own projections of queries and keys, and one set of values. In each
//! view t, the weights of [`tra`](super::tra) with the same threshold:
//!
//! a⁽ᵗ⁾_ij = max(q̂⁽ᵗ⁾_iᵀk̂⁽ᵗ⁾_j − τ_i, 0)^p, o_i = RMSNorm(Σ_{j≤i} (a⁽¹⁾_ij − λ a⁽²⁾_ij) v_j).
//!
//! (§4.2 omits the power; the experiments and appendix C have it.) A row in which no key passes
//! either threshold gives o = 0.
//!
//! | parameter | elements | initial value |
//! | --- | --- | --- |
//! | `beta` | 1 | `beta`, 1; with `learn_beta = false` it is not a parameter and keeps this value |
//! | `lambda` | 1 | 0.5, clamped to [0, 1] in the operation |
//! | `norm` | head_dim | 1, the RMS norm's scale, shared by the layer's heads |
//!
//! Not specified by the source, chosen here: λ's gradient passes through the clamp, so that a λ that
//! has left [0, 1] can return; the rest, the norm's epsilon too, as in `tra`.
//!
//! On CUDA in bf16, as in `tra`; both views are heads of one call, and share the values.
//!
//! Decoding caches normalised, rotated keys of both views and values: 3 · kv_heads · head_dim
//! elements per token.

#[cfg(test)]
mod tests;

use burn::tensor::{DType, Tensor};
use longwall_config::Problems;
use serde::{Deserialize, Serialize};

use super::flash;
use super::kv_cache_variant::{KvCacheVariant, Prepared};
use super::output_norm::validate_norm_eps;
use super::probe::{Metric, Probe};
use super::rectified::{
    LAMBDA_INIT, NORM_EPS, Rectified, beta_and_others, clamp_lambda, thresholds, validate_threshold,
};
use super::rotary::{Rotary, with_rotary_keys};
use super::rotation::Rotation;
use super::rowwise::{Rowwise, RowwiseCall, sparsity};
use super::saved::Channels;
use super::{AttentionShape, ExecPath, Init, Kernel, ParameterSpec, VariantSpec};
use crate::backend::OpBackend;
use crate::ops::rms_norm::rms_norm;
use crate::ops::view_difference::view_difference;

/// `[model.attention]` with `kind = "tda"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, remote = "Self")]
pub struct Config {
    /// The weights' power, 1 to 16; default 2.
    pub p: u32,
    /// Number of chance survivors per row that the threshold aims at, above 0; default 1.
    pub kappa: f32,
    /// Initial value of the threshold's factor, above 0; default 1.
    pub beta: f32,
    /// Whether β is learned; default true. With false it keeps its initial value.
    pub learn_beta: bool,
    /// What the RMS norm of outputs adds to the mean square, 1e-20 to 1; default 1e-6.
    pub norm_eps: f32,
    /// Rotary positions; on by default.
    #[serde(flatten, skip_deserializing)]
    pub rotary: Rotary,
}

with_rotary_keys!(Config);

impl Default for Config {
    fn default() -> Self {
        Config {
            p: 2,
            kappa: 1.0,
            beta: 1.0,
            learn_beta: true,
            norm_eps: NORM_EPS,
            rotary: Rotary::new(true),
        }
    }
}

impl VariantSpec for Config {
    const SOURCE: &'static str = "threshold differential attention (Huang et al., 2026)";

    const WEIGHS_VALUES: bool = true;

    const KERNELS: &'static [Kernel] = &[Kernel::CUDA_BF16];

    fn serves(&self, kernel: Kernel, shape: &AttentionShape, batch: usize) -> bool {
        flash::serves(kernel.dtype, batch * self.views() * shape.heads, shape.head_dim)
    }

    fn validate(&self, key: &str, shape: &AttentionShape, problems: &mut Problems) {
        validate_threshold(key, self.p, self.kappa, self.beta, problems);
        validate_norm_eps(key, self.norm_eps, NORM_EPS, problems);
        self.rotary.validate(key, shape, problems);
    }

    fn views(&self) -> usize {
        2
    }

    fn saved_bytes_per_token(
        &self,
        shape: &AttentionShape,
        seq_len: usize,
        path: ExecPath,
        dtype: DType,
    ) -> f64 {
        let channels = Channels::of(self, shape);
        match path {
            // q and k also before they are divided by their lengths.
            ExecPath::Kernel(_) => {
                channels.by_kernel(dtype) + (channels.q + channels.k) * dtype.size() as f64
            }
            ExecPath::Reference => channels.by_reference(shape.mean_keys(seq_len)),
        }
    }

    fn parameters(&self, shape: &AttentionShape) -> Vec<ParameterSpec> {
        let beta = ParameterSpec { name: "beta", elements: 1, init: Init::Constant(self.beta) };
        let others = [
            ParameterSpec { name: "lambda", elements: 1, init: Init::Constant(LAMBDA_INIT) },
            ParameterSpec { name: "norm", elements: shape.head_dim, init: Init::Constant(1.0) },
        ];
        self.learn_beta.then_some(beta).into_iter().chain(others).collect()
    }

    fn metrics(&self) -> Vec<Metric> {
        sparsity::METRICS.to_vec()
    }
}

impl Config {
    /// The attention before the norm, and the learned vectors other than β.
    fn attention<'a, B: OpBackend>(
        &self,
        shape: &AttentionShape,
        Prepared { q, k, v, parameters, first, documents, path }: Prepared<'a, B>,
    ) -> (RowwiseCall<B, Rectified>, &'a [Tensor<B, 1>]) {
        let (beta, others) = beta_and_others(self.learn_beta, self.beta, parameters);
        let tau = thresholds(shape, self.kappa, beta, q.dims()[2], first, &documents);
        let weights = Rectified { power: self.p };
        let op = Rowwise { weights, scale: 1.0, window: shape.window };
        (RowwiseCall { op, q, k, v, offsets: Some(tau), documents, path }, others)
    }
}

impl KvCacheVariant for Config {
    const UNIT_LENGTH: bool = true;

    fn rotation(&self) -> Option<Rotation> {
        self.rotary.rotation()
    }

    fn output<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        prepared: Prepared<'_, B>,
    ) -> Tensor<B, 4> {
        let (call, others) = self.attention(shape, prepared);
        let [lambda, norm] = others else { panic!("λ and the norm's weight, not {others:?}") };
        let o = view_difference(call.attend(), clamp_lambda(lambda.clone()));
        rms_norm(o, norm.clone(), self.norm_eps)
    }

    fn weigh_prepared<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        call: Prepared<'_, B>,
    ) -> Tensor<B, 4> {
        self.attention(shape, call).0.attend()
    }

    fn observe_output<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        call: Prepared<'_, B>,
        probe: &mut Probe,
    ) {
        self.attention(shape, call).0.report_sparsity(self.views(), probe);
    }
}
