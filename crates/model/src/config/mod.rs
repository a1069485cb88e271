//! The `[model]` table.

mod heads;
mod pattern;

use std::collections::BTreeMap;

use longwall_config::Problems;
use longwall_kernels::attention::{AttentionConfig, AttentionShape, LowRank};
use serde::{Deserialize, Serialize};

pub use self::heads::HeadBlocks;
pub use self::pattern::{KindLayers, NamedKind, Window};

/// The block architecture: sets the defaults of other keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Arch {
    /// Layer norms and GELU (Radford et al., 2019).
    #[default]
    Gpt2,
    /// RMS norms and SwiGLU, the embedding not tied (Touvron et al., 2023).
    Llama,
    /// RWKV-7's blocks (Peng et al., 2025): layer norms with biases, one of them after the embedding,
    /// token shift before every projection, squared ReLU in the MLP (the channel mix), gated value
    /// residual. Attention takes the place of the time mix: `kind = "rwkv7"`, or any other kind.
    Rwkv7,
}

/// What keys are that a configuration leaves out.
struct ArchDefaults {
    mlp: MlpKind,
    norm: NormKind,
    embedding_norm: bool,
    /// Also with `bias = false`.
    norm_bias: bool,
    tie_embeddings: bool,
    token_shift: bool,
    value_residual: ValueResidual,
}

impl Arch {
    fn defaults(self) -> ArchDefaults {
        let gpt2 = ArchDefaults {
            mlp: MlpKind::Gelu,
            norm: NormKind::LayerNorm,
            embedding_norm: false,
            norm_bias: false,
            tie_embeddings: true,
            token_shift: false,
            value_residual: ValueResidual::None,
        };
        match self {
            Arch::Gpt2 => gpt2,
            Arch::Llama => ArchDefaults {
                mlp: MlpKind::Swiglu,
                norm: NormKind::RmsNorm,
                tie_embeddings: false,
                ..gpt2
            },
            Arch::Rwkv7 => ArchDefaults {
                mlp: MlpKind::ReluSquared,
                embedding_norm: true,
                norm_bias: true,
                tie_embeddings: false,
                token_shift: true,
                value_residual: ValueResidual::Gated,
                ..gpt2
            },
        }
    }
}

/// Where the norms of a block are. Below, f is attention or MLP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NormPosition {
    /// x + f(norm(x)).
    #[default]
    Pre,
    /// norm(x + f(x)) (Vaswani et al., 2017).
    Post,
    /// x + norm(f(norm(x))) (Ding et al., 2021).
    Sandwich,
}

/// How later layers mix the first layer's values v₁ into their own values v.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ValueResidual {
    /// Not at all.
    #[default]
    None,
    /// v ← λ₁ v₁ + λ₂ v with learned scalars, ½ each at the start (Zhou et al., 2024).
    Learned,
    /// v ← v + σ(ν) ⊙ (v₁ − v), where ν is a low-rank projection of the layer's input, with biases
    /// of 1 at the start (Peng et al., 2025, equations 8 to 10).
    Gated,
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

impl MlpKind {
    /// Matrices from the residual stream to the hidden layer.
    pub fn up_projections(self) -> usize {
        match self {
            MlpKind::Gelu | MlpKind::ReluSquared => 1,
            MlpKind::Swiglu => 2,
        }
    }
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
    /// None: only attention encodes positions.
    #[default]
    None,
    /// A learned vector for each position in the document, up to the training length.
    Learned,
}

/// The `[model]` table of a run's configuration.
///
/// Keys that are left out take the defaults of `arch`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "Table")]
pub struct ModelConfig {
    /// The block architecture, which sets the defaults of other keys; default `"gpt2"`.
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
    /// The MLP.
    pub mlp: MlpKind,
    /// Hidden width of the MLP; default 4 · width, for SwiGLU 8/3 · width rounded up to a multiple
    /// of 64.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mlp_width: Option<usize>,
    /// The kind of all norms: in blocks, before the output layer and after the embedding.
    pub norm: NormKind,
    /// Where the norms of a block are; default `"pre"`.
    pub norm_position: NormPosition,
    /// Whether a norm follows the embedding.
    pub embedding_norm: bool,
    /// Biases in linear layers; default false, as in nanoGPT.
    pub bias: bool,
    /// Biases in layer norms; default `bias`, for RWKV-7 true.
    pub norm_bias: bool,
    /// Whether the output layer shares the embedding's weights.
    pub tie_embeddings: bool,
    /// The embedding and the output layer have a multiple of this many rows, at least one per token; default:
    /// exactly one per token. See [`ModelConfig::padded_vocab`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vocab_multiple: Option<usize>,
    /// With c, the logits are c·tanh(z / c); default: no cap (Gemma 2: Gemma Team, 2024).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logit_softcap: Option<f64>,
    /// Standard deviation of initial weights; default 0.02, as in GPT-2.
    pub init_std: f64,
    /// Whether the two projections of each block into the residual stream start with `init_std` divided by
    /// √(2 · layers); default true.
    pub scale_residual_init: bool,
    /// Absolute positions; default `"none"`.
    pub positions: Positions,
    /// RMS norm of each head's q and k, with learned scales; default false.
    pub qk_norm: bool,
    /// o ⊙ σ(W x) per channel before the output projection; default false.
    pub output_gate: bool,
    /// A causal depthwise convolution of width 4 with SiLU on q, k and v; default false.
    pub short_conv: bool,
    /// Token shift: each projection of attention, and the MLP, take x_t + μ ⊙ (x_{t−1} − x_t) in
    /// place of x_t, each with its own learned μ.
    pub token_shift: bool,
    /// How later layers mix in the first layer's values.
    pub value_residual: ValueResidual,
    /// With a window w, a token attends to itself and the w − 1 tokens before it; applies to all layers
    /// whose kind sets no window of its own. In TOML: a number of tokens, or `"none"`, the default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub window: Option<usize>,
    /// The kinds of the first layers, by name; the layers after them repeat the pattern.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pattern: Option<Vec<String>>,
    /// The attention variant of all layers and its own keys; not together with `pattern`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attention: Option<AttentionConfig>,
    /// The tables that `pattern` names. Reading a configuration adds one with defaults for each
    /// registered kind that `pattern` names without a table.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub kinds: BTreeMap<String, NamedKind>,
}

/// The most layers that a configuration may have.
const MOST_LAYERS: usize = 1024;

/// The most channels of any activation.
const MOST_CHANNELS: usize = 1 << 18;

/// The greatest `vocab_multiple`.
const MOST_VOCAB_MULTIPLE: usize = 1 << 16;

/// The largest initial standard deviation.
const MOST_INIT_STD: f64 = 10.0;

fn default_init_std() -> f64 {
    0.02
}

fn default_true() -> bool {
    true
}

/// The table as it is in the file, where keys may be left out.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    #[serde(default)]
    arch: Arch,
    layers: usize,
    width: usize,
    heads: usize,
    kv_heads: Option<usize>,
    head_dim: Option<usize>,
    mlp: Option<MlpKind>,
    mlp_width: Option<usize>,
    norm: Option<NormKind>,
    #[serde(default)]
    norm_position: NormPosition,
    embedding_norm: Option<bool>,
    #[serde(default)]
    bias: bool,
    norm_bias: Option<bool>,
    tie_embeddings: Option<bool>,
    vocab_multiple: Option<usize>,
    logit_softcap: Option<f64>,
    #[serde(default = "default_init_std")]
    init_std: f64,
    #[serde(default = "default_true")]
    scale_residual_init: bool,
    #[serde(default)]
    positions: Positions,
    #[serde(default)]
    qk_norm: bool,
    #[serde(default)]
    output_gate: bool,
    #[serde(default)]
    short_conv: bool,
    token_shift: Option<bool>,
    value_residual: Option<ValueResidual>,
    window: Option<Window>,
    pattern: Option<Vec<String>>,
    attention: Option<AttentionConfig>,
    #[serde(default)]
    kinds: BTreeMap<String, NamedKind>,
}

impl From<Table> for ModelConfig {
    fn from(mut t: Table) -> Self {
        pattern::add_registered_kinds(t.pattern.as_deref().unwrap_or_default(), &mut t.kinds);
        let defaults = t.arch.defaults();
        ModelConfig {
            arch: t.arch,
            layers: t.layers,
            width: t.width,
            heads: t.heads,
            kv_heads: t.kv_heads,
            head_dim: t.head_dim,
            mlp: t.mlp.unwrap_or(defaults.mlp),
            mlp_width: t.mlp_width,
            norm: t.norm.unwrap_or(defaults.norm),
            norm_position: t.norm_position,
            embedding_norm: t.embedding_norm.unwrap_or(defaults.embedding_norm),
            bias: t.bias,
            norm_bias: t.norm_bias.unwrap_or(t.bias || defaults.norm_bias),
            tie_embeddings: t.tie_embeddings.unwrap_or(defaults.tie_embeddings),
            vocab_multiple: t.vocab_multiple,
            logit_softcap: t.logit_softcap,
            init_std: t.init_std,
            scale_residual_init: t.scale_residual_init,
            positions: t.positions,
            qk_norm: t.qk_norm,
            output_gate: t.output_gate,
            short_conv: t.short_conv,
            token_shift: t.token_shift.unwrap_or(defaults.token_shift),
            value_residual: t.value_residual.unwrap_or(defaults.value_residual),
            window: t.window.and_then(Window::tokens),
            pattern: t.pattern,
            attention: t.attention,
            kinds: t.kinds,
        }
    }
}

impl ModelConfig {
    /// The sizes of attention layer `layer`, from 0.
    pub fn attention_shape(&self, layer: usize) -> AttentionShape {
        AttentionShape {
            width: self.width,
            heads: self.heads,
            kv_heads: self.kv_heads.unwrap_or(self.heads),
            head_dim: self.head_dim.unwrap_or(self.width / self.heads.max(1)),
            window: self.window_of(layer),
            layer,
            layers: self.layers,
        }
    }

    /// Rows of the embedding and of the output layer for a vocabulary of `vocab_size` tokens.
    ///
    /// The rows past the vocabulary belong to no token. As in the code of nanoGPT and its descendants, their
    /// logits are part of the softmax of the loss, which teaches the model to make them small; they are not
    /// part of the logits that decoding reads, so that they are never sampled.
    pub fn padded_vocab(&self, vocab_size: usize) -> usize {
        vocab_size.next_multiple_of(self.vocab_multiple.unwrap_or(1).max(1))
    }

    /// Rank of the gated value residual's projection, about 1.3 · √width.
    pub fn value_residual_rank(&self) -> usize {
        LowRank::default_rank(1.3 * (self.width as f64).sqrt(), self.width)
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
        let mut sound = true;
        let mut check = |key: &str, value: usize, most: usize, remedy: &str| {
            let allowed = (1..=most).contains(&value);
            sound &= allowed;
            let key = format!("model.{key}");
            let remedy = format!("{remedy} {key}");
            problems.check(allowed, key, value, format!("from 1 to {most}"), remedy);
        };
        check("layers", self.layers, MOST_LAYERS, "set");
        check("width", self.width, MOST_CHANNELS, "set");
        check("heads", self.heads, MOST_CHANNELS, "set");
        for (key, value) in [
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("mlp_width", self.mlp_width),
        ] {
            check(key, value.unwrap_or(1), MOST_CHANNELS, "change, or leave out,");
        }
        problems.check(
            self.vocab_multiple
                .is_none_or(|multiple| (1..=MOST_VOCAB_MULTIPLE).contains(&multiple)),
            "model.vocab_multiple",
            self.vocab_multiple.unwrap_or_default(),
            format!("from 1 to {MOST_VOCAB_MULTIPLE}"),
            "set vocab_multiple = 64, or leave it out",
        );
        problems.check(
            // It must stay such a number in f32.
            self.logit_softcap.is_none_or(|cap| cap > 0.0 && (cap as f32).is_normal()),
            "model.logit_softcap",
            self.logit_softcap.unwrap_or_default(),
            "a number above 0",
            "leave it out for no cap, or set logit_softcap = 30.0",
        );
        problems.check(
            self.init_std > 0.0 && self.init_std <= MOST_INIT_STD,
            "model.init_std",
            self.init_std,
            format!("a number above 0, at most {MOST_INIT_STD}"),
            "use 0.02, or leave it out",
        );
        self.validate_choice(problems);
        if !sound {
            return; // The checks below divide by these.
        }
        let shape = self.attention_shape(0);
        problems.check(
            shape.heads * shape.head_dim <= MOST_CHANNELS,
            "model.head_dim",
            shape.head_dim,
            format!("heads · head_dim up to {MOST_CHANNELS}"),
            "set model.head_dim or model.heads lower",
        );
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
        self.validate_kinds(problems);
    }
}
