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
//! Decoding caches keys and values: 2 · kv_heads · head_dim elements per token.

#[cfg(test)]
mod tests;
mod weights;

use burn::tensor::Tensor;
use longwall_config::Problems;
use serde::{Deserialize, Serialize};

pub use self::weights::StickBreaking;
use super::kv_cache_variant::{KvCacheVariant, Prepared};
use super::rotary::{Rotary, with_rotary_keys};
use super::rotation::Rotation;
use super::rowwise::{Rowwise, rowwise};
use super::{AttentionShape, VariantSpec};
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
