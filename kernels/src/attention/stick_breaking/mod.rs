//! Stick-breaking attention (Tan et al., "Scaling stick-breaking attention", 2025).
//!
//! z_ij = scale · q_iᵀk_j, A_ij = σ(z_ij) Π_{j<m<i} (1 − σ(z_im)), o_i = Σ_{j<i} A_ij v_j:
//! going back from the query, each token takes its share of what is left of a stick of length 1. A
//! query does not see its own token, so the first token of a document has o = 0. Nearer tokens come
//! first, so no positions are needed.
//!
//! There are no parameters beyond the projections.
//!
//! Weights are computed as logarithms, ln σ(z_ij) + Σ_{j<m<i} ln σ(−z_im), summed from the query
//! backwards. With a window, only the window's tokens break the stick. The remainder of the stick is
//! dropped, as in the paper's main form (its appendix gives it to a learned vector).
//!
//! On CUDA in bf16, scores and what is left of a stick are f32, and weights are products, not sums of logarithms.
//! After n keys a factor of 2⁻²³ · n at most is lost to rounding. A block of 64 queries ends where nothing is left of
//! all its sticks in f32: this changes no result.
//!
//! Decoding caches keys and values: 2 · kv_heads · head_dim elements per token.

mod cuda;
#[cfg(test)]
mod tests;
mod weights;

use burn::tensor::{DType, Tensor};
use longwall_config::Problems;
use serde::{Deserialize, Serialize};

pub use self::weights::StickBreaking;
use super::kv_cache_variant::{KvCacheVariant, Prepared};
use super::rotary::{Rotary, with_rotary_keys};
use super::rotation::Rotation;
use super::rowwise::{Rowwise, rowwise};
use super::saved::Channels;
use super::{AttentionShape, ExecPath, Kernel, VariantSpec, flash};
use crate::backend::OpBackend;

fn core(shape: &AttentionShape) -> Rowwise<StickBreaking> {
    Rowwise { weights: StickBreaking, scale: shape.scale(), window: shape.window }
}

/// `[model.attention]` with `kind = "stick_breaking"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, remote = "Self")]
pub struct Config {
    /// Rotary positions; off by default.
    #[serde(flatten, skip_deserializing)]
    pub rotary: Rotary,
}

with_rotary_keys!(Config);

impl Default for Config {
    fn default() -> Self {
        Config { rotary: Rotary::new(false) }
    }
}

impl VariantSpec for Config {
    const SOURCE: &'static str = "stick-breaking attention (Tan et al., 2025)";

    const WEIGHS_VALUES: bool = true;

    const KERNELS: &'static [Kernel] = &[Kernel::CUDA_BF16];

    fn serves(&self, kernel: Kernel, shape: &AttentionShape, batch: usize) -> bool {
        flash::serves(kernel.dtype, batch * shape.heads, shape.head_dim)
    }

    fn validate(&self, key: &str, shape: &AttentionShape, problems: &mut Problems) {
        problems.check(
            shape.window != Some(1),
            "model.window",
            1,
            "at least 2 with kind = \"stick_breaking\", where no token sees itself",
            "set a window of at least 2, or leave model.window out",
        );
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
            ExecPath::Kernel(_) => {
                let per_row = cuda::saved_bytes_per_row(seq_len, shape.head_dim);
                channels.by_kernel(dtype) + channels.rows * per_row as f64
            }
            ExecPath::Reference => channels.by_reference(shape.mean_keys(seq_len)),
        }
    }
}

impl KvCacheVariant for Config {
    fn rotation(&self) -> Option<Rotation> {
        self.rotary.rotation()
    }

    fn output<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        Prepared { q, k, v, documents, path, .. }: Prepared<'_, B>,
    ) -> Tensor<B, 4> {
        rowwise(&core(shape), q, k, v, None, documents, path)
    }
}
