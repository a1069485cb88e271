//! What a model costs: parameters, FLOPs and cache.

use longwall_kernels::attention::{AttentionShape, Projection};

use crate::config::{MlpKind, ModelConfig, NormKind, NormPosition, Positions, ValueResidual};
use crate::layers::CONV_TAPS;

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
        let biased = config.norm_bias && config.norm == NormKind::LayerNorm;
        let norm = if biased { 2 * width } else { width };
        let of_block = if config.norm_position == NormPosition::Sandwich { 4 } else { 2 };
        let norms = of_block * config.layers + 1 + usize::from(config.embedding_norm);
        Parameters {
            embedding: width * (vocab_size + if learned { seq_len } else { 0 }),
            head: if config.tie_embeddings { 0 } else { vocab_size * width },
            attention: (0..config.layers).map(|layer| attention_parameters(config, layer)).sum(),
            mlp: config.layers * mlp_parameters(config),
            norms: norms * norm,
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

/// The matrices that multiply every token in one attention layer: inputs, outputs, bias.
fn attention_matrices(config: &ModelConfig, layer: usize) -> Vec<(usize, usize, bool)> {
    let shape = config.attention_shape(layer);
    let (width, bias) = (config.width, config.bias);
    let [q, k, v] = channels(config, &shape);
    let inner = shape.heads * config.attention.value_dim(&shape);
    let mut matrices = vec![(width, q, bias), (width, k, bias), (width, v, bias)];
    matrices.push((inner, width, bias));
    for Projection { features, bias, low_rank, .. } in config.attention.projections(&shape) {
        matrices.extend(low_rank.map(|inner| (width, inner.rank, false)));
        matrices.push((low_rank.map_or(width, |inner| inner.rank), features, bias.is_some()));
    }
    if config.output_gate {
        matrices.push((width, inner, bias));
    }
    if config.value_residual == ValueResidual::Gated && layer > 0 {
        let rank = config.value_residual_rank();
        matrices.extend([(width, rank, false), (rank, v, true)]);
    }
    matrices
}

/// Channels of q, k and v over all heads.
fn channels(config: &ModelConfig, shape: &AttentionShape) -> [usize; 3] {
    let (views, value_dim) = (config.attention.views(), config.attention.value_dim(shape));
    let keys = views * shape.head_dim;
    [shape.heads * keys, shape.kv_heads * keys, shape.kv_heads * value_dim]
}

fn attention_parameters(config: &ModelConfig, layer: usize) -> usize {
    let shape = config.attention_shape(layer);
    let matrices = attention_matrices(config, layer);
    let matrices: usize = matrices.iter().map(|&(i, o, bias)| linear(i, o, bias)).sum();
    let own: usize = config.attention.parameters(&shape).iter().map(|p| p.elements).sum();
    let norms = if config.qk_norm { 2 * shape.head_dim } else { 0 };
    let sides = config.attention.projections(&shape);
    let side_convs: usize = sides.iter().filter_map(|p| p.conv.map(|taps| taps * p.features)).sum();
    let channels: usize = channels(config, &shape).iter().sum();
    let convs = if config.short_conv { CONV_TAPS * channels } else { 0 };
    let shifts = if config.token_shift { shifted(config, sides.len()) * config.width } else { 0 };
    let mixed = config.value_residual == ValueResidual::Learned && layer > 0;
    matrices + own + norms + side_convs + convs + shifts + if mixed { 2 } else { 0 }
}

fn mlp_matrices(config: &ModelConfig) -> usize {
    if config.mlp == MlpKind::Swiglu { 3 } else { 2 }
}

fn mlp_parameters(config: &ModelConfig) -> usize {
    let (width, hidden) = (config.width, config.mlp_hidden());
    let ups = mlp_matrices(config) - 1;
    let shift = if config.token_shift { width } else { 0 };
    ups * linear(width, hidden, config.bias) + linear(hidden, width, config.bias) + shift
}

/// FLOPs of the forward pass per token, averaged over a causal sequence of `seq_len` tokens: two
/// per weight of every matrix (the output projection included, the embedding look-up not) and the
/// attention operation's own, as its kind counts them.
pub fn forward_flops_per_token(config: &ModelConfig, vocab_size: usize, seq_len: usize) -> f64 {
    weight_flops_per_token(config, vocab_size) + attention_flops_per_token(config, seq_len)
}

/// FLOPs of the forward pass per token that multiply by weights: those of the blocks and the
/// output projection.
fn weight_flops_per_token(config: &ModelConfig, vocab_size: usize) -> f64 {
    block_flops_per_token(config) + 2.0 * (vocab_size * config.width) as f64
}

/// FLOPs of the forward pass per token that multiply by the blocks' weights.
fn block_flops_per_token(config: &ModelConfig) -> f64 {
    let attention: usize = (0..config.layers)
        .flat_map(|layer| attention_matrices(config, layer))
        .map(|(inputs, outputs, _)| inputs * outputs)
        .sum();
    let mlp = config.layers * mlp_matrices(config) * config.width * config.mlp_hidden();
    2.0 * (attention + mlp) as f64
}

/// The weight-to-state FLOP ratio: FLOPs with the blocks' weights over those of the attention
/// operations' states, keys and values (Gelada et al., 2025, section 3.2). Near 1, neither
/// parameters nor state are cheap to enlarge. The output projection is left out, which gives the
/// softmax rows of the paper's Table 2. (Its linear row, 30:1, is for a state read and written once
/// per token; `linear` also counts the scores inside a chunk that its chunked form computes.)
pub fn weight_state_ratio(config: &ModelConfig, seq_len: usize) -> f64 {
    let layer = |n| config.attention.weight_flops_per_token(&config.attention_shape(n));
    let own: f64 = (0..config.layers).map(layer).sum();
    let state = attention_flops_per_token(config, seq_len) - own;
    (block_flops_per_token(config) + own) / state
}

/// FLOPs of the attention operations of all layers per token, forward.
pub fn attention_flops_per_token(config: &ModelConfig, seq_len: usize) -> f64 {
    let layer = |n| config.attention.flops_per_token(&config.attention_shape(n), seq_len);
    (0..config.layers).map(layer).sum()
}

/// FLOPs of a training step per token: the backward pass counts twice the forward.
pub fn train_flops_per_token(config: &ModelConfig, vocab_size: usize, seq_len: usize) -> f64 {
    3.0 * forward_flops_per_token(config, vocab_size, seq_len)
}

/// Elements that decoding keeps per sequence of `seq_len` tokens, over all layers: the attention
/// variant's, and the last inputs of convolutions and token shifts.
pub fn state_elements(config: &ModelConfig, seq_len: usize) -> u64 {
    let layer = |n| {
        config.attention.state_elements(&config.attention_shape(n), seq_len)
            + history_elements(config, n, seq_len)
    };
    (0..config.layers).map(layer).sum()
}

/// Elements of the last inputs that layer `layer` keeps after `seq_len` tokens.
fn history_elements(config: &ModelConfig, layer: usize, seq_len: usize) -> u64 {
    let shape = config.attention_shape(layer);
    let kept = |taps: usize, channels: usize| ((taps - 1).min(seq_len) * channels) as u64;
    let sides = config.attention.projections(&shape);
    let side_convs: u64 =
        sides.iter().filter_map(|p| p.conv.map(|taps| kept(taps, p.features))).sum();
    let channels: usize = channels(config, &shape).iter().sum();
    let convs = if config.short_conv { kept(CONV_TAPS, channels) } else { 0 };
    // Those of attention, and the MLP's.
    let shifted = shifted(config, sides.len()) + 1;
    let shifts = if config.token_shift { kept(2, shifted * config.width) } else { 0 };
    side_convs + convs + shifts
}

/// Inputs of an attention layer that a token shift precedes: those of q, k, v, the side projections
/// and the output gate.
fn shifted(config: &ModelConfig, sides: usize) -> usize {
    3 + sides + usize::from(config.output_gate)
}
