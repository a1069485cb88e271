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
//! | `beta` | 1 | `beta`, 1 |
//! | `lambda` | 1 | 0.5, clamped to [0, 1] in the operation |
//! | `norm` | head_dim | 1, the RMS norm's scale, shared by the layer's heads |
//!
//! Not specified by the source, chosen here: λ's gradient passes through the clamp, so that a λ that
//! has left [0, 1] can return; the rest as in `tra`.
//!
//! Decoding caches normalised, rotated keys of both views and values: 3 · kv_heads · head_dim
//! elements per token.

#[cfg(test)]
mod tests;

use burn::tensor::Tensor;
use longwall_config::Problems;
use serde::{Deserialize, Serialize};

use super::kv_cache_variant::{KvCacheVariant, Prepared};
use super::rectified::{
    LAMBDA_INIT, Rectified, clamp_lambda, difference, l2_normalise, normalise_outputs,
    repeat_for_views, thresholds, validate_threshold,
};
use super::rotary::{Rotary, with_rotary_keys};
use super::rotation::{Rotation, rotate};
use super::rowwise::{Rowwise, rowwise};
use super::{AttentionShape, Init, ParameterSpec, VariantSpec};
use crate::backend::OpBackend;

/// `[model.attention]` with `kind = "tda"`.
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
    const SOURCE: &'static str = "threshold differential attention (Huang et al., 2026)";

    fn validate(&self, key: &str, shape: &AttentionShape, problems: &mut Problems) {
        validate_threshold(key, self.p, self.kappa, self.beta, problems);
        self.rotary.validate(key, shape, problems);
    }

    fn views(&self) -> usize {
        2
    }

    fn parameters(&self, shape: &AttentionShape) -> Vec<ParameterSpec> {
        vec![
            ParameterSpec { name: "beta", elements: 1, init: Init::Constant(self.beta) },
            ParameterSpec { name: "lambda", elements: 1, init: Init::Constant(LAMBDA_INIT) },
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
        let [beta, lambda, norm] = parameters else { panic!("3 parameters, not {parameters:?}") };
        let queries = q.dims()[2];
        let tau = thresholds(shape, self.kappa, beta.clone(), queries, first, &documents);
        let weights = Rectified { power: self.p };
        let op = Rowwise { weights, scale: 1.0, window: shape.window };
        let both = rowwise(&op, q, k, repeat_for_views(v), Some(tau), documents, path);
        let o = difference(both, clamp_lambda(lambda.clone()));
        normalise_outputs(o, norm.clone())
    }
}
