//! Threshold rectified attention, TRA (Huang et al., "Threshold differential attention", 2026, §4.1,
//! equation 1, and appendix C).
//!
//! With q̂ = q/‖q‖₂ and k̂ = k/‖k‖₂ after the rotation:
//!
//! τ_i = β · sqrt(2 · ln((i+1)/κ) / head_dim), a_ij = max(q̂_iᵀk̂_j − τ_i, 0)^p,
//! o_i = RMSNorm(Σ_{j≤i} a_ij v_j).
//!
//! i counts from 0 in the token's document (as in appendix C; the main text counts from 1), also
//! under a window; τ is 0 where the logarithm is negative. A row in which no key passes the threshold
//! gives o = 0, and so does a zero query in the first row.
//!
//! | parameter | elements | initial value |
//! | --- | --- | --- |
//! | `beta` | 1 | `beta`, 1; with `learn_beta = false` it is not a parameter and keeps this value |
//! | `norm` | head_dim | 1, the RMS norm's scale, shared by the layer's heads |
//!
//! Not specified by the source, chosen here: β is not kept above 0 (at β ≤ 0 every key of positive
//! similarity passes, and some others); its gradient is −Σ p(s−τ)^{p−1} (dO·v) ∂τ/∂β over the
//! survivors, which the released code omits. The source sets β = 1 in its experiments and does not say
//! whether it is learned there; `learn_beta = false` holds it.
//!
//! The source does not give the RMS norm's epsilon either. It matters: at the start of training (head_dim 64,
//! β = κ = 1, p = 2), a row that any key survives in has a mean square near 4·10⁻⁸ (median), so that the
//! default of 10⁻⁶ leaves its outputs at a fifth of unit size, and f32's machine epsilon, 1.2·10⁻⁷, which is
//! PyTorch's default, at half of it. The configurations that follow the paper set the latter.
//!
//! On CUDA in bf16, q̂ and k̂ are rounded to bf16; scores, thresholds and the gradient of β are f32.
//!
//! Decoding caches normalised, rotated keys and values: 2 · kv_heads · head_dim elements per token.

#[cfg(test)]
mod tests;

use burn::tensor::{DType, Tensor};
use longwall_config::Problems;
use serde::{Deserialize, Serialize};

use super::flash;
use super::kv_cache_variant::{KvCacheVariant, Prepared};
use super::output_norm::validate_norm_eps;
use super::probe::{Metric, Probe};
use super::rectified::{NORM_EPS, Rectified, beta_and_others, thresholds, validate_threshold};
use super::rotary::{Rotary, with_rotary_keys};
use super::rotation::Rotation;
use super::rowwise::{Rowwise, RowwiseCall, sparsity};
use super::saved::Channels;
use super::{AttentionShape, ExecPath, Init, Kernel, ParameterSpec, VariantSpec};
use crate::backend::OpBackend;
use crate::ops::rms_norm::rms_norm;

/// `[model.attention]` with `kind = "tra"`.
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
    const SOURCE: &'static str = "threshold rectified attention (Huang et al., 2026)";

    const WEIGHS_VALUES: bool = true;

    const KERNELS: &'static [Kernel] = &[Kernel::CUDA_BF16];

    fn serves(&self, kernel: Kernel, shape: &AttentionShape, batch: usize) -> bool {
        flash::serves(kernel.dtype, batch * shape.heads, shape.head_dim)
    }

    fn validate(&self, key: &str, shape: &AttentionShape, problems: &mut Problems) {
        validate_threshold(key, self.p, self.kappa, self.beta, problems);
        validate_norm_eps(key, self.norm_eps, NORM_EPS, problems);
        self.rotary.validate(key, shape, problems);
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
            // q and k before they are divided by their lengths, too.
            ExecPath::Kernel(_) => {
                channels.by_kernel(dtype) + (channels.q + channels.k) * dtype.size() as f64
            }
            ExecPath::Reference => channels.by_reference(shape.mean_keys(seq_len)),
        }
    }

    fn parameters(&self, shape: &AttentionShape) -> Vec<ParameterSpec> {
        let beta = ParameterSpec { name: "beta", elements: 1, init: Init::Constant(self.beta) };
        let others =
            [ParameterSpec { name: "norm", elements: shape.head_dim, init: Init::Constant(1.0) }];
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
        let [norm] = others else { panic!("the norm's weight, not {others:?}") };
        let o = call.attend();
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
        self.attention(shape, call).0.report_sparsity(1, probe);
    }
}
