//! LSSAR, length scaled softplus attention with re-weighting (Gao and Spratling, "Softplus attention
//! with re-weighting boosts length extrapolation in large language models", 2025).
//!
//! With q̂ = q/‖q‖₂ and k̂ = k/‖k‖₂ after the rotation, and N_i the number of keys that query i sees:
//!
//! φ_ij = softplus(ln head_dim · ln N_i · q̂_iᵀk̂_j), A_ij = φ_ij / Σ_j φ_ij,
//! R_ij = max(N_i A_ij − O_i, 0)^p, o_i = Σ_j R_ij v_j / Σ_j R_ij,
//!
//! with O_i = 1, but 0 for the first three rows (N_i ≤ 3). The scale replaces 1/√head_dim.
//! N_i A_ij − 1 is φ's relative excess over its mean in the row: only keys above the mean count.
//!
//! There are no parameters beyond the projections.
//!
//! Not specified by the source, chosen here: N_i counts the keys in the document and the window. A row
//! whose keys all have the same similarity (none is above the mean by more than 10⁻⁵ of it) selects
//! nothing, and o = 0. The second sum needs no epsilon: it is taken relative to the row's largest
//! term, so that p = 15 does not leave f32's range.
//!
//! Decoding caches normalised, rotated keys and values: 2 · kv_heads · head_dim elements per token.

mod cuda;
#[cfg(test)]
mod tests;
mod weights;

use burn::tensor::{DType, FloatDType, Tensor};
use longwall_config::Problems;
use serde::{Deserialize, Serialize};

pub use self::weights::Lssar;
use super::blocks::positions_in_documents;
use super::kv_cache_variant::{KvCacheVariant, Prepared};
use super::probe::{Metric, Probe};
use super::rotary::{Rotary, with_rotary_keys};
use super::rotation::Rotation;
use super::rowwise::{Rowwise, RowwiseCall, sparsity};
use super::saved::Channels;
use super::{AttentionShape, ExecPath, Kernel, VariantSpec, flash};
use crate::backend::OpBackend;

/// The largest power: the source goes to 15.
const LARGEST_POWER: u32 = 32;

/// `[model.attention]` with `kind = "lssar"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, remote = "Self")]
pub struct Config {
    /// The power that sharpens the weights, 1 to 32; default 15, the source's best beyond the
    /// trained length (3 is its best within).
    pub p: u32,
    /// Rotary positions; on by default.
    #[serde(flatten, skip_deserializing)]
    pub rotary: Rotary,
}

with_rotary_keys!(Config);

impl Default for Config {
    fn default() -> Self {
        Config { p: 15, rotary: Rotary::new(true) }
    }
}

impl VariantSpec for Config {
    const SOURCE: &'static str =
        "softplus attention with re-weighting, LSSAR (Gao and Spratling, 2025)";

    const WEIGHS_VALUES: bool = true;

    const KERNELS: &'static [Kernel] = &[Kernel::CUDA_BF16];

    fn serves(&self, kernel: Kernel, shape: &AttentionShape, batch: usize) -> bool {
        flash::serves(kernel.dtype, batch * shape.heads, shape.head_dim)
    }

    fn validate(&self, key: &str, shape: &AttentionShape, problems: &mut Problems) {
        problems.check(
            (1..=LARGEST_POWER).contains(&self.p),
            format!("{key}.p"),
            self.p,
            format!("a whole number from 1 to {LARGEST_POWER}"),
            "set p = 15",
        );
        self.rotary.validate(key, shape, problems);
    }

    fn metrics(&self) -> Vec<Metric> {
        sparsity::METRICS.to_vec()
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
            // q also in f32, before its scale.
            ExecPath::Kernel(_) => channels.by_kernel(dtype) + 4.0 * channels.q,
            ExecPath::Reference => channels.by_reference(shape.mean_keys(seq_len)),
        }
    }
}

impl Config {
    fn attention<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        Prepared { q, k, v, first, documents, path, .. }: Prepared<'_, B>,
    ) -> RowwiseCall<B, Lssar> {
        let queries = q.dims()[2];
        let positions = positions_in_documents(queries, first, documents.as_ref(), &q.device());
        let seen = match shape.window {
            Some(window) => (positions + 1.0).clamp_max(window as f32),
            None => positions + 1.0,
        };
        let batch = seen.dims()[0];
        let scale = seen.log() * (shape.head_dim as f32).ln();
        let scale = scale.reshape([batch, 1, queries, 1]);
        let q = match q.dtype() {
            DType::BF16 => (q.cast(FloatDType::F32) * scale).cast(FloatDType::BF16),
            _ => q * scale,
        };
        let weights = Lssar { power: self.p };
        let op = Rowwise { weights, scale: 1.0, window: shape.window };
        RowwiseCall { op, q, k, v, offsets: None, documents, path }
    }
}

impl KvCacheVariant for Config {
    const UNIT_LENGTH: bool = true;

    fn rotation(&self) -> Option<Rotation> {
        self.rotary.rotation()
    }

    fn output<B: OpBackend>(&self, shape: &AttentionShape, call: Prepared<'_, B>) -> Tensor<B, 4> {
        self.attention(shape, call).attend()
    }

    fn observe_output<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        call: Prepared<'_, B>,
        probe: &mut Probe,
    ) {
        self.attention(shape, call).report_sparsity(1, probe);
    }
}
