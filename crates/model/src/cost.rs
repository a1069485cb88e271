//! What a model costs: parameters, FLOPs and cache.

use longwall_kernels::attention::AttentionConfig;

use crate::config::{MlpKind, ModelConfig, NormKind, Positions};

/// Number of parameters, by part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Parameters {
    /// Token embedding, and learned positions.
    pub embedding: usize,
    /// The output projection, 0 when it is the embedding.
    pub head: usize,
    /// All attention layers, with gates and norms of q and k.
    pub attention: usize,
    /// All MLPs.
    pub mlp: usize,
    /// Norms of blocks and head.
    pub norms: usize,
}

impl Parameters {
    /// Of a model of this configuration; `seq_len` counts for learned positions.
    pub fn of(config: &ModelConfig, vocab_size: usize, seq_len: usize) -> Self {
        let width = config.width;
        let learned = config.positions == Positions::Learned;
        let norm = if config.bias && config.norm == NormKind::LayerNorm { 2 } else { 1 } * width;
        Parameters {
            embedding: width * (vocab_size + if learned { seq_len } else { 0 }),
            head: if config.tie_embeddings { 0 } else { vocab_size * width },
            attention: config.layers * attention_parameters(config),
            mlp: config.layers * mlp_parameters(config),
            norms: (2 * config.layers + 1) * norm,
        }
    }

    /// All of them.
    pub fn total(&self) -> usize {
        self.embedding + self.head + self.attention + self.mlp + self.norms
    }
}

/// Parameters of a linear layer.
fn linear(inputs: usize, outputs: usize, bias: bool) -> usize {
    inputs * outputs + if bias { outputs } else { 0 }
}

/// Parameters of matrices that multiply every token in one attention layer.
fn attention_matrices(config: &ModelConfig) -> Vec<(usize, usize, bool)> {
    let shape = config.attention_shape();
    let (inner, kv) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    let mut matrices = vec![
        (config.width, inner, config.bias),
        (config.width, kv, config.bias),
        (config.width, kv, config.bias),
        (inner, config.width, config.bias),
    ];
    matrices
        .extend(config.attention.gates(&shape).iter().map(|g| (config.width, g.features, true)));
    if config.output_gate {
        matrices.push((config.width, inner, config.bias));
    }
    matrices
}

fn attention_parameters(config: &ModelConfig) -> usize {
    let shape = config.attention_shape();
    let matrices: usize =
        attention_matrices(config).iter().map(|&(i, o, bias)| linear(i, o, bias)).sum();
    let own: usize = config.attention.parameters(&shape).iter().map(|p| p.init.len()).sum();
    let norms = if config.qk_norm { 2 * shape.head_dim } else { 0 };
    let channels = (shape.heads + 2 * shape.kv_heads) * shape.head_dim;
    let convs = if config.short_conv { 4 * channels } else { 0 };
    matrices + own + norms + convs
}

fn mlp_matrices(config: &ModelConfig) -> usize {
    if config.mlp == MlpKind::Swiglu { 3 } else { 2 }
}

fn mlp_parameters(config: &ModelConfig) -> usize {
    let (width, hidden) = (config.width, config.mlp_hidden());
    let ups = mlp_matrices(config) - 1;
    ups * linear(width, hidden, config.bias) + linear(hidden, width, config.bias)
}

/// FLOPs of the forward pass per token, averaged over a causal sequence of `seq_len` tokens: two
/// per weight of every matrix (the output projection included, the embedding look-up not) and the
/// attention operation's own, as its kind counts them.
pub fn forward_flops_per_token(config: &ModelConfig, vocab_size: usize, seq_len: usize) -> f64 {
    let attention: usize = attention_matrices(config).iter().map(|(i, o, _)| i * o).sum();
    let mlp = mlp_matrices(config) * config.width * config.mlp_hidden();
    let matrices = config.layers * (attention + mlp) + vocab_size * config.width;
    2.0 * matrices as f64 + config.layers as f64 * attention_flops_per_token(config, seq_len)
}

/// FLOPs of one layer's attention operation per token, forward.
pub fn attention_flops_per_token(config: &ModelConfig, seq_len: usize) -> f64 {
    config.attention.flops_per_token(&config.attention_shape(), seq_len)
}

/// FLOPs of a training step per token: the backward pass counts twice the forward.
pub fn train_flops_per_token(config: &ModelConfig, vocab_size: usize, seq_len: usize) -> f64 {
    3.0 * forward_flops_per_token(config, vocab_size, seq_len)
}

/// Elements that decoding keeps per sequence of `seq_len` tokens, over all layers.
pub fn state_elements(config: &ModelConfig, seq_len: usize) -> u64 {
    let shape = config.attention_shape();
    let attention: &AttentionConfig = &config.attention;
    config.layers as u64 * attention.state_elements(&shape, seq_len)
}
