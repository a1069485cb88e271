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
//! | `beta` | 1 | `beta`, 1 |
//! | `norm` | head_dim | 1, the RMS norm's scale, shared by the layer's heads |
//!
//! Not specified by the source, chosen here: β is not kept above 0 (at β ≤ 0 every key of positive
//! similarity passes, and some others); its gradient is −Σ p(s−τ)^{p−1} (dO·v) ∂τ/∂β over the
//! survivors, which the released code omits; the RMS norm adds 10⁻⁶ to the mean square.
//!
//! Decoding caches normalised, rotated keys and values: 2 · kv_heads · head_dim elements per token.

#[cfg(test)]
mod tests;

use burn::tensor::Tensor;
use longwall_config::Problems;
use serde::{Deserialize, Serialize};

use super::kv_cache_variant::{KvCacheVariant, Prepared};
use super::rectified::{
    Rectified, l2_normalise, normalise_outputs, thresholds, validate_threshold,
};
use super::rotary::{Rotary, with_rotary_keys};
use super::rotation::{Rotation, rotate};
use super::rowwise::{Rowwise, rowwise};
use super::{AttentionShape, Init, ParameterSpec, VariantSpec};
use crate::backend::OpBackend;

/// `[model.attention]` with `kind = "tra"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, remote = "Self")]
pub struct Config {
    /// The weights' power, 1 to 16; default 2.
    pub p: u32,
    /// Number of chance survivors per row that the threshold aims at, above 0; default 1.
    pub kappa: f32,
    /// Initial value of the learned factor of the threshold, above 0; default 1.
    pub beta: f32,
    /// Rotary positions; on by default.
    #[serde(flatten, skip_deserializing)]
    pub rotary: Rotary,
}

with_rotary_keys!(Config);

impl Default for Config {
    fn default() -> Self {
        Config { p: 2, kappa: 1.0, beta: 1.0, rotary: Rotary::new(true) }
    }
}

impl VariantSpec for Config {
    const SOURCE: &'static str = "threshold rectified attention (Huang et al., 2026)";

    fn validate(&self, key: &str, shape: &AttentionShape, problems: &mut Problems) {
        validate_threshold(key, self.p, self.kappa, self.beta, problems);
        self.rotary.validate(key, shape, problems);
    }

    fn parameters(&self, shape: &AttentionShape) -> Vec<ParameterSpec> {
        vec![
            ParameterSpec { name: "beta", elements: 1, init: Init::Constant(self.beta) },
            ParameterSpec { name: "norm", elements: shape.head_dim, init: Init::Constant(1.0) },
        ]
    }
}

impl KvCacheVariant for Config {
    fn rotation(&self) -> Option<Rotation> {
        self.rotary.rotation()
    }

    fn prepare<B: OpBackend>(&self, x: Tensor<B, 4>, first: usize) -> Tensor<B, 4> {
        l2_normalise(rotate(self.rotation(), x, first))
    }

    fn output<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        Prepared { q, k, v, parameters, first, documents, path, .. }: Prepared<'_, B>,
    ) -> Tensor<B, 4> {
        let [beta, norm] = parameters else { panic!("2 parameters, not {parameters:?}") };
        let queries = q.dims()[2];
        let tau = thresholds(shape, self.kappa, beta.clone(), queries, first, &documents);
        let weights = Rectified { power: self.p };
        let op = Rowwise { weights, scale: 1.0, window: shape.window };
        let o = rowwise(&op, q, k, v, Some(tau), documents, path);
        normalise_outputs(o, norm.clone())
    }
}
