//! The `[model]` table.

use longwall_config::Problems;
use longwall_kernels::attention::{AttentionConfig, AttentionShape};
use serde::{Deserialize, Serialize};

/// The family of blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Arch {
    /// Pre-norm blocks: x + attention(norm(x)), then x + mlp(norm(x)) (Radford et al., 2019).
    #[default]
    Gpt2,
}

/// The MLP of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MlpKind {
    /// W₂ GELU(W₁ x).
    #[default]
    Gelu,
    /// W₂ max(W₁ x, 0)².
    ReluSquared,
    /// W₃ (SiLU(W₁ x) ⊙ W₂ x).
    Swiglu,
}

/// The normalisation before attention, MLP and head.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NormKind {
    /// Mean and variance.
    #[default]
    LayerNorm,
    /// Root mean square.
    RmsNorm,
}

/// Absolute positions added to the embedding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Positions {
    /// None: positions, if any, are the attention's.
    #[default]
    None,
    /// A learned vector per position in the document, up to the training length.
    Learned,
}

/// The `[model]` table of a run's configuration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// The family of blocks; default `"gpt2"`.
    #[serde(default)]
    pub arch: Arch,
    /// Number of blocks.
    pub layers: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads, a divisor of `heads`; default `heads`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_heads: Option<usize>,
    /// Channels of a head; default `width / heads`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head_dim: Option<usize>,
    /// The MLP; default `"gelu"`.
    #[serde(default)]
    pub mlp: MlpKind,
    /// Hidden width of the MLP; default 4 · width, for SwiGLU 8/3 · width rounded up to a multiple
    /// of 64.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mlp_width: Option<usize>,
    /// The norms; default `"layer-norm"`.
    #[serde(default)]
    pub norm: NormKind,
    /// Biases in linear layers and layer norms; default false, as in nanoGPT.
    #[serde(default)]
    pub bias: bool,
    /// Use the embedding as the output projection; default true.
    #[serde(default = "yes")]
    pub tie_embeddings: bool,
    /// Absolute positions; default `"none"`.
    #[serde(default)]
    pub positions: Positions,
    /// RMS norm of each head's q and k, with learned scales; default false.
    #[serde(default)]
    pub qk_norm: bool,
    /// o ⊙ σ(W x) per channel before the output projection; default false.
    #[serde(default)]
    pub output_gate: bool,
    /// A causal depthwise convolution of width 4 with SiLU on q, k and v; default false.
    #[serde(default)]
    pub short_conv: bool,
    /// With a window w, a token attends to itself and the w − 1 tokens before it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub window: Option<usize>,
    /// The attention variant and its own keys.
    pub attention: AttentionConfig,
}

fn yes() -> bool {
    true
}

impl ModelConfig {
    /// The sizes of the attention layers.
    pub fn attention_shape(&self) -> AttentionShape {
        AttentionShape {
            width: self.width,
            heads: self.heads,
            kv_heads: self.kv_heads.unwrap_or(self.heads),
            head_dim: self.head_dim.unwrap_or(self.width / self.heads.max(1)),
            window: self.window,
        }
    }

    /// Hidden width of the MLP.
    pub fn mlp_hidden(&self) -> usize {
        self.mlp_width.unwrap_or(match self.mlp {
            MlpKind::Gelu | MlpKind::ReluSquared => 4 * self.width,
            MlpKind::Swiglu => (8 * self.width).div_ceil(3).next_multiple_of(64),
        })
    }

    /// Records everything that is wrong with the table.
    pub fn validate(&self, problems: &mut Problems) {
        let sizes = [("layers", self.layers), ("width", self.width), ("heads", self.heads)];
        for (key, value) in sizes {
            let key = format!("model.{key}");
            problems.check(value > 0, &*key, value, "a whole number above 0", format!("set {key}"));
        }
        let options = [
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("mlp_width", self.mlp_width),
            ("window", self.window),
        ];
        for (key, value) in options {
            problems.check(
                value != Some(0),
                format!("model.{key}"),
                0,
                "a whole number above 0",
                format!("leave model.{key} out for its default"),
            );
        }
        if sizes.iter().any(|size| size.1 == 0) || options.iter().any(|size| size.1 == Some(0)) {
            return; // The checks below divide by these.
        }
        let shape = self.attention_shape();
        problems.check(
            self.head_dim.is_some() || self.width.is_multiple_of(self.heads),
            "model.heads",
            self.heads,
            format!("a divisor of model.width, {}", self.width),
            "change heads or width, or set model.head_dim",
        );
        problems.check(
            self.heads.is_multiple_of(shape.kv_heads),
            "model.kv_heads",
            shape.kv_heads,
            format!("a divisor of model.heads, {}", self.heads),
            format!("set model.kv_heads = {}, or leave it out", self.heads),
        );
        self.attention.validate(&shape, problems);
    }
}
