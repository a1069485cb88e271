//! Attention with 1.5-entmax instead of softmax (Peters et al., "Sparse sequence-to-sequence models",
//! 2019, with α = 1.5).
//!
//! S_ij = scale · q_iᵀk_j, o_i = Σ_j p_ij v_j, p_ij = max(S_ij/2 − τ_i, 0)², where τ_i is the number
//! for which Σ_j p_ij = 1: the distribution that maximises pᵀS plus Tsallis' entropy with α = 1.5.
//! Keys far below the row's best get exactly 0.
//!
//! There are no parameters beyond the projections.
//!
//! τ is found by iteration, not by sorting: every step is one pass over the scores. The reference takes about
//! ten steps to f32's accuracy. The CUDA kernel takes one pass, and steps over the few keys that may be above τ;
//! where these are many, it takes three or four passes more.
//!
//! Decoding caches rotated keys and values: 2 · kv_heads · head_dim elements per token.

mod cuda;
#[cfg(test)]
mod tests;
mod weights;

use burn::tensor::Tensor;
use longwall_config::Problems;
use serde::{Deserialize, Serialize};

pub use self::weights::Entmax;
use super::kv_cache_variant::{KvCacheVariant, Prepared};
use super::probe::{Metric, Probe};
use super::rotary::{Rotary, with_rotary_keys};
use super::rotation::Rotation;
use super::rowwise::{Rowwise, RowwiseCall, sparsity};
use super::{AttentionShape, Kernel, VariantSpec, flash};
use crate::backend::OpBackend;

fn attention<B: OpBackend>(
    shape: &AttentionShape,
    Prepared { q, k, v, documents, path, .. }: Prepared<'_, B>,
) -> RowwiseCall<B, Entmax> {
    let op = Rowwise { weights: Entmax, scale: shape.scale(), window: shape.window };
    RowwiseCall { op, q, k, v, offsets: None, documents, path }
}

/// `[model.attention]` with `kind = "entmax"`.
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
    const SOURCE: &'static str = "1.5-entmax attention (Peters et al., 2019)";

    const WEIGHS_VALUES: bool = true;

    const KERNELS: &'static [Kernel] = &[Kernel::CUDA_BF16];

    fn serves(&self, kernel: Kernel, shape: &AttentionShape, batch: usize) -> bool {
        flash::serves(kernel.dtype, batch * shape.heads, shape.head_dim)
    }

    fn validate(&self, key: &str, shape: &AttentionShape, problems: &mut Problems) {
        self.rotary.validate(key, shape, problems);
    }

    fn metrics(&self) -> Vec<Metric> {
        sparsity::METRICS.to_vec()
    }
}

impl KvCacheVariant for Config {
    fn rotation(&self) -> Option<Rotation> {
        self.rotary.rotation()
    }

    fn output<B: OpBackend>(&self, shape: &AttentionShape, call: Prepared<'_, B>) -> Tensor<B, 4> {
        attention(shape, call).attend()
    }

    fn observe_output<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        call: Prepared<'_, B>,
        probe: &mut Probe,
    ) {
        attention(shape, call).report_sparsity(1, probe);
    }
}
