//! Attention variants: the contract, and the registry.
//!
//! A variant is one folder and one line in `registry!` below. Its `Config` is the
//! `[model.attention]` table of a run's configuration; the layer (projections of the input, norms,
//! output) is the model's. A variant receives q, k and v, the logits of the gates it asked for and
//! its own learned parameters, and returns o.

pub mod cache;
#[cfg(test)]
mod conformance;
mod registry;
pub mod softmax;

use burn::tensor::{Int, Tensor};
use longwall_config::Problems;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::backend::OpBackend;

registry::registry! {
    /// Softmax attention with rotary positions, ALiBi, or none.
    Rope = "rope" in rope;
    /// Forgetting attention.
    Fox = "fox" in fox;
}

/// What tables say of a registered kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KindInfo {
    /// The value of `kind`.
    pub kind: &'static str,
    /// Title and source.
    pub source: &'static str,
}

/// The sizes of one attention layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionShape {
    /// Width of the layer's input.
    pub width: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// With a window w, a token attends to itself and the w − 1 tokens before it.
    pub window: Option<usize>,
}

impl AttentionShape {
    /// The softmax scale, 1/√head_dim.
    pub fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    /// Mean number of keys a query sees in a causal sequence of `seq_len` tokens.
    pub fn mean_keys(&self, seq_len: usize) -> f64 {
        let (t, w) = (seq_len as f64, self.window.unwrap_or(seq_len).min(seq_len) as f64);
        // The first w queries see 1, 2, … w keys, the rest w.
        (w * (w + 1.0) / 2.0 + (t - w) * w) / t
    }
}

/// A projection of the layer's input that a variant takes beside q, k and v.
#[derive(Clone, Debug, PartialEq)]
pub struct GateSpec {
    /// Name of the parameter group, for example `forget_gate`.
    pub name: &'static str,
    /// Output features.
    pub features: usize,
    /// Initial bias.
    pub bias_init: f32,
}

/// A learned vector that belongs to the variant itself.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterSpec {
    /// Name of the parameter.
    pub name: &'static str,
    /// Initial elements.
    pub init: Vec<f32>,
}

/// What a variant's operation takes.
#[derive(Clone, Debug)]
pub struct Inputs<B: OpBackend> {
    /// Queries, `[batch, heads, seq_len, head_dim]`.
    pub q: Tensor<B, 4>,
    /// Keys, `[batch, kv_heads, seq_len, head_dim]`.
    pub k: Tensor<B, 4>,
    /// Values, `[batch, kv_heads, seq_len, head_dim]`.
    pub v: Tensor<B, 4>,
    /// The logits of each gate of [`Variant::gates`], `[batch, seq_len, features]`.
    pub gates: Vec<Tensor<B, 3>>,
    /// The learned vectors of [`Variant::parameters`].
    pub parameters: Vec<Tensor<B, 1>>,
}

/// Index in its row of the first token of each position's document, `[batch, seq_len]`; `None`
/// when each row is one document.
pub type DocumentStarts<B> = Option<Tensor<B, 2, Int>>;

/// One attention variant: the contract every folder here fulfils with its `Config`.
pub trait Variant: Clone + std::fmt::Debug + PartialEq + Serialize + DeserializeOwned {
    /// What decoding keeps between calls.
    type State<B: OpBackend>: Clone + std::fmt::Debug;

    /// Title and source of the variant, for tables.
    const SOURCE: &'static str;

    /// Records what is wrong with the configuration for a layer of this shape; `key` is the path
    /// of the variant's table.
    fn validate(&self, key: &str, shape: &AttentionShape, problems: &mut Problems);

    /// The gates the layer projects for this variant.
    fn gates(&self, shape: &AttentionShape) -> Vec<GateSpec> {
        let _ = shape;
        vec![]
    }

    /// The variant's own learned vectors.
    fn parameters(&self, shape: &AttentionShape) -> Vec<ParameterSpec> {
        let _ = shape;
        vec![]
    }

    /// Causal attention over whole rows: `[batch, heads, seq_len, head_dim]`.
    fn attend<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        inputs: Inputs<B>,
        documents: DocumentStarts<B>,
    ) -> Tensor<B, 4>;

    /// The state before the first token.
    fn start<B: OpBackend>(&self, shape: &AttentionShape) -> Self::State<B>;

    /// Appends the inputs' tokens (one or more) to the sequences in `state` and returns their
    /// outputs: a prefill first, then single steps.
    fn extend<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        inputs: Inputs<B>,
        state: &mut Self::State<B>,
    ) -> Tensor<B, 4>;

    /// FLOPs of the operation's forward pass per token (projections apart), averaged over a causal
    /// sequence of `seq_len` tokens.
    fn flops_per_token(&self, shape: &AttentionShape, seq_len: usize) -> f64;

    /// Elements that decoding keeps per sequence after `seq_len` tokens fed one by one. Buffers may
    /// be up to twice as large.
    fn state_elements(&self, shape: &AttentionShape, seq_len: usize) -> u64;
}
