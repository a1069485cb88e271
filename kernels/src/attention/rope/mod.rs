//! Softmax attention with rotary positions (Su et al., 2021), ALiBi (Press et al., 2022), or none.
//!
//! S_ij = scale · (R_i q_i)ᵀ (R_j k_j), o_i = Σ_{j≤i} softmax_j(S_ij) v_j, where R_t rotates the
//! channel pairs (n, n + rotary_dims/2) by t · θ^(−2n/rotary_dims): the half-split pairing of
//! GPT-NeoX and Llama. With ALiBi instead, S_ij = scale · q_iᵀk_j − slope_h · (i − j).
//!
//! Decoding caches rotated keys and values: 2 · kv_heads · head_dim elements per token.

#[cfg(test)]
mod tests;

use burn::tensor::Tensor;
use longwall_config::Problems;
use serde::{Deserialize, Serialize};

use super::cache::KvCache;
use super::softmax::{Softmax, alibi_slopes, softmax};
use super::{AttentionShape, DocumentStarts, Inputs, Variant};
use crate::backend::OpBackend;
use crate::ops::rotary::rotary;

/// Where positions enter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Position {
    /// Nowhere: only the causal mask tells positions apart.
    None,
    /// Rotation of q and k.
    #[default]
    Rope,
    /// A linear penalty on distance, with a fixed slope per head.
    Alibi,
}

/// How rotary angles change for contexts longer than those trained on.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Scaling {
    /// Not at all.
    None {},
    /// NTK-aware: θ ← θ · factor^(d/(d−2)), which stretches slow channels by `factor` and leaves
    /// the fastest alone (bloc97, 2023).
    Ntk {
        /// Ratio of the wanted context to the trained one, at least 1.
        factor: f64,
    },
}

/// `[model.attention]` with `kind = "rope"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Where positions enter: `"rope"` (default), `"alibi"` or `"none"`.
    pub position: Position,
    /// Base of the rotary angles, above 1; default 10,000.
    pub theta: f64,
    /// Share of a head's channels that rotate, in (0, 1]; default 1.
    pub rotary_fraction: f64,
    /// Change of the angles for long contexts.
    pub scaling: Scaling,
    /// With c > 0, scores are c·tanh(score/c).
    pub softcap: Option<f32>,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            position: Position::Rope,
            theta: 10_000.0,
            rotary_fraction: 1.0,
            scaling: Scaling::None {},
            softcap: None,
        }
    }
}

impl Config {
    /// Channels that rotate: an even number.
    fn rotary_dims(&self, head_dim: usize) -> usize {
        (head_dim as f64 * self.rotary_fraction / 2.0).round() as usize * 2
    }

    fn scaled_theta(&self, rotary_dims: usize) -> f64 {
        match self.scaling {
            Scaling::None {} => self.theta,
            Scaling::Ntk { factor } => {
                let d = rotary_dims as f64;
                self.theta * factor.powf(d / (d - 2.0).max(1.0))
            }
        }
    }

    /// q or k `[batch, heads, seq_len, head_dim]`, rotated as positions `first`, `first` + 1, ….
    fn rotate<B: OpBackend>(&self, x: Tensor<B, 4>, first: usize) -> Tensor<B, 4> {
        if self.position != Position::Rope {
            return x;
        }
        let rotary_dims = self.rotary_dims(x.dims()[3]);
        rotary(x, first, self.scaled_theta(rotary_dims), rotary_dims)
    }

    fn core(&self, shape: &AttentionShape) -> Softmax {
        let alibi = self.position == Position::Alibi;
        Softmax {
            scale: shape.scale(),
            softcap: self.softcap,
            window: shape.window,
            slopes: if alibi { alibi_slopes(shape.heads) } else { vec![] },
        }
    }
}

impl Variant for Config {
    type State<B: OpBackend> = KvCache<B>;

    const SOURCE: &'static str = "softmax with rotary positions (Su et al., 2021), ALiBi or none";

    fn validate(&self, key: &str, shape: &AttentionShape, problems: &mut Problems) {
        let rotary_dims = self.rotary_dims(shape.head_dim);
        problems.check(
            self.theta > 1.0 && self.theta.is_finite(),
            format!("{key}.theta"),
            self.theta,
            "a number above 1",
            "set theta = 10000",
        );
        problems.check(
            self.rotary_fraction > 0.0 && self.rotary_fraction <= 1.0 && rotary_dims >= 2,
            format!("{key}.rotary_fraction"),
            self.rotary_fraction,
            "above 0, at most 1, and at least one pair of channels",
            "set rotary_fraction = 1.0, or position = \"none\"",
        );
        problems.check(
            self.position != Position::Rope || shape.head_dim.is_multiple_of(2),
            "model.head_dim",
            shape.head_dim,
            "an even number with rotary positions",
            "choose model.width and model.heads so that width / heads is even",
        );
        if let Scaling::Ntk { factor } = self.scaling {
            problems.check(
                factor >= 1.0 && factor.is_finite(),
                format!("{key}.scaling.factor"),
                factor,
                "a number of at least 1",
                "set it to the wanted context length / the trained one",
            );
        }
        problems.check(
            self.softcap.is_none_or(|c| c > 0.0 && c.is_finite()),
            format!("{key}.softcap"),
            self.softcap.unwrap_or_default(),
            "a number above 0",
            "leave it out for no cap, or set softcap = 50.0",
        );
    }

    fn attend<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        Inputs { q, k, v, .. }: Inputs<B>,
        documents: DocumentStarts<B>,
    ) -> Tensor<B, 4> {
        // Scores depend on distances alone, so packed documents need no positions of their own.
        softmax(&self.core(shape), self.rotate(q, 0), self.rotate(k, 0), v, None, documents)
    }

    fn start<B: OpBackend>(&self, shape: &AttentionShape) -> KvCache<B> {
        KvCache::new(shape.window)
    }

    fn extend<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        Inputs { q, k, v, .. }: Inputs<B>,
        state: &mut KvCache<B>,
    ) -> Tensor<B, 4> {
        let first = state.position();
        let [k, v] = state.append(self.rotate(k, first), v);
        softmax(&self.core(shape), self.rotate(q, first), k, v, None, None)
    }

    fn flops_per_token(&self, shape: &AttentionShape, seq_len: usize) -> f64 {
        // qᵀk and p·v: two multiply-adds per channel and key.
        4.0 * (shape.heads * shape.head_dim) as f64 * shape.mean_keys(seq_len)
    }

    fn state_elements(&self, shape: &AttentionShape, seq_len: usize) -> u64 {
        // Tokens that left the window are dropped in batches of one window.
        let tokens = shape.window.map_or(seq_len, |w| seq_len.min(2 * w));
        (2 * shape.kv_heads * shape.head_dim * tokens) as u64
    }
}
