//! What a model costs: parameters, FLOPs, and the state that decoding keeps.

use longwall_kernels::attention::{AttentionConfig, AttentionShape, ProjectionSpec};

use crate::config::{KindLayers, ModelConfig, NormKind, NormPosition, Positions, ValueResidual};
use crate::layers::CONV_TAPS;

/// Number of parameters, by part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Parameters {
    /// Token embedding, and learned positions.
    pub embedding: usize,
    /// The output layer; 0 when tied to the embedding.
    pub head: usize,
    /// All attention layers, with gates and norms of q and k.
    pub attention: usize,
    /// All MLPs.
    pub mlp: usize,
    /// Norms of blocks and embedding, and the one before the output layer.
    pub norms: usize,
}

impl Parameters {
    /// The parameters of a model of this configuration; learned positions are `seq_len` vectors.
    pub fn of(config: &ModelConfig, vocab_size: usize, seq_len: usize) -> Self {
        let (width, vocab_size) = (config.width, config.padded_vocab(vocab_size));
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

    /// The total.
    pub fn total(&self) -> usize {
        self.embedding + self.head + self.attention + self.mlp + self.norms
    }
}

/// Parameters of a linear layer.
fn linear(inputs: usize, outputs: usize, bias: bool) -> usize {
    inputs * outputs + if bias { outputs } else { 0 }
}

/// The weight matrices of one attention layer: inputs, outputs, and whether there is a bias.
fn attention_matrices(config: &ModelConfig, layer: usize) -> Vec<(usize, usize, bool)> {
    let (shape, attention) = (config.attention_shape(layer), config.attention_of(layer));
    let (width, bias) = (config.width, config.bias);
    let [q, k, v] = channels(attention, &shape);
    let inner = shape.heads * attention.value_dim(&shape);
    let mut matrices = vec![(width, q, bias), (width, k, bias), (width, v, bias)];
    matrices.push((inner, width, bias));
    for ProjectionSpec { features, bias, low_rank, .. } in attention.projections(&shape) {
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
pub fn channels(attention: &AttentionConfig, shape: &AttentionShape) -> [usize; 3] {
    let (views, value_dim) = (attention.views(), attention.value_dim(shape));
    let [q, k] = [attention.query_heads(shape), attention.key_heads(shape)]
        .map(|heads| views * heads * shape.head_dim);
    [q, k, shape.kv_heads * value_dim]
}

fn attention_parameters(config: &ModelConfig, layer: usize) -> usize {
    let (shape, attention) = (config.attention_shape(layer), config.attention_of(layer));
    let matrices = attention_matrices(config, layer);
    let matrices: usize = matrices.iter().map(|&(i, o, bias)| linear(i, o, bias)).sum();
    let own: usize = attention.parameters(&shape).iter().map(|p| p.elements).sum();
    let norms = if config.qk_norm { 2 * shape.head_dim } else { 0 };
    let extra = attention.projections(&shape);
    let extra_convs: usize =
        extra.iter().filter_map(|p| p.conv.map(|taps| taps * p.features)).sum();
    let channels: usize = channels(attention, &shape).iter().sum();
    let convs = if config.short_conv || attention.short_conv() { CONV_TAPS * channels } else { 0 };
    let shifts = if config.token_shift { shifted(config, extra.len()) * config.width } else { 0 };
    let mixed = config.value_residual == ValueResidual::Learned && layer > 0;
    matrices + own + norms + extra_convs + convs + shifts + if mixed { 2 } else { 0 }
}

fn mlp_matrices(config: &ModelConfig) -> usize {
    config.mlp.up_projections() + 1
}

fn mlp_parameters(config: &ModelConfig) -> usize {
    let (width, hidden) = (config.width, config.mlp_hidden());
    let ups = config.mlp.up_projections();
    let shift = if config.token_shift { width } else { 0 };
    ups * linear(width, hidden, config.bias) + linear(hidden, width, config.bias) + shift
}

/// FLOPs of the forward pass per token, averaged over a causal sequence of `seq_len` tokens: two per
/// weight of every matrix (including the output layer, but not the embedding lookup), plus those of
/// the attention operations, as each kind counts them.
pub fn forward_flops_per_token(config: &ModelConfig, vocab_size: usize, seq_len: usize) -> f64 {
    weight_flops_per_token(config, vocab_size) + attention_flops_per_token(config, seq_len)
}

/// FLOPs of the forward pass per token that multiply by weights: those of the blocks and of the
/// output layer.
fn weight_flops_per_token(config: &ModelConfig, vocab_size: usize) -> f64 {
    let vocab_size = config.padded_vocab(vocab_size);
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

/// The weight-to-state FLOP ratio (Gelada et al., 2025, section 3.2): FLOPs that multiply by the
/// blocks' weights, over FLOPs that multiply by the attention operations' states, keys or values. A
/// ratio far from 1 means that one of the two, weights or state, could grow at little cost.
///
/// The output layer is not counted; this gives the softmax rows of the paper's Table 2. The paper's
/// linear row, 30:1, counts one read and one write of the state per token; for `linear` this function
/// also counts the scores within a chunk, which its chunked form computes.
pub fn weight_state_ratio(config: &ModelConfig, seq_len: usize) -> f64 {
    let layer = |n| config.attention_of(n).weight_flops_per_token(&config.attention_shape(n));
    let own: f64 = (0..config.layers).map(layer).sum();
    let state = attention_flops_per_token(config, seq_len) - own;
    (block_flops_per_token(config) + own) / state
}

/// FLOPs of the attention operations of all layers per token, forward.
pub fn attention_flops_per_token(config: &ModelConfig, seq_len: usize) -> f64 {
    (0..config.layers).map(|layer| layer_flops_per_token(config, layer, seq_len)).sum()
}

/// FLOPs of the attention operation of layer `layer` per token, forward.
fn layer_flops_per_token(config: &ModelConfig, layer: usize, seq_len: usize) -> f64 {
    config.attention_of(layer).flops_per_token(&config.attention_shape(layer), seq_len)
}

/// What the attention layers of one kind cost together.
#[derive(Clone, Debug, PartialEq)]
pub struct KindCost<'a> {
    /// The kind and its layers.
    pub kind: KindLayers<'a>,
    /// Parameters, with gates and norms of q and k.
    pub parameters: usize,
    /// FLOPs of the attention operations per token, forward.
    pub flops_per_token: f64,
    /// Elements that decoding keeps per sequence.
    pub state_elements: u64,
}

impl<'a> KindCost<'a> {
    fn of(config: &ModelConfig, kind: KindLayers<'a>, seq_len: usize) -> Self {
        let layers = || kind.layers.iter().copied();
        KindCost {
            parameters: layers().map(|layer| attention_parameters(config, layer)).sum(),
            flops_per_token: layers().map(|n| layer_flops_per_token(config, n, seq_len)).sum(),
            state_elements: sum(layers().map(|n| layer_state_elements(config, n, seq_len))),
            kind,
        }
    }
}

/// The costs of each kind of the model, at a length of `seq_len` tokens.
pub fn by_kind(config: &ModelConfig, seq_len: usize) -> Vec<KindCost<'_>> {
    let kinds = config.layers_by_kind().into_iter();
    kinds.map(|kind| KindCost::of(config, kind, seq_len)).collect()
}

/// FLOPs of a training step per token: the backward pass counts as twice the forward pass.
pub fn train_flops_per_token(config: &ModelConfig, vocab_size: usize, seq_len: usize) -> f64 {
    3.0 * forward_flops_per_token(config, vocab_size, seq_len)
}

/// Elements that decoding keeps per sequence after `seq_len` tokens, over all layers: the attention
/// variant's state, and the last inputs of convolutions and token shifts. At most `u64::MAX`.
pub fn state_elements(config: &ModelConfig, seq_len: usize) -> u64 {
    sum((0..config.layers).map(|layer| layer_state_elements(config, layer, seq_len)))
}

/// The sum, at most `u64::MAX`: a long sequence in a large model has more elements than that.
fn sum(elements: impl Iterator<Item = u64>) -> u64 {
    elements.fold(0, u64::saturating_add)
}

fn layer_state_elements(config: &ModelConfig, layer: usize, seq_len: usize) -> u64 {
    let attention = config.attention_of(layer);
    let state = attention.state_elements(&config.attention_shape(layer), seq_len);
    state.saturating_add(history_elements(config, layer, seq_len))
}

/// Elements of the last inputs that the convolutions and token shifts of layer `layer` keep.
fn history_elements(config: &ModelConfig, layer: usize, seq_len: usize) -> u64 {
    let (shape, attention) = (config.attention_shape(layer), config.attention_of(layer));
    let kept = |taps: usize, channels: usize| ((taps - 1).min(seq_len) * channels) as u64;
    let extra = attention.projections(&shape);
    let extra_convs: u64 =
        extra.iter().filter_map(|p| p.conv.map(|taps| kept(taps, p.features))).sum();
    let channels: usize = channels(attention, &shape).iter().sum();
    let convs =
        if config.short_conv || attention.short_conv() { kept(CONV_TAPS, channels) } else { 0 };
    // Attention's projections, and the MLP.
    let shifted = shifted(config, extra.len()) + 1;
    let shifts = if config.token_shift { kept(2, shifted * config.width) } else { 0 };
    extra_convs + convs + shifts
}

/// How many projections of an attention layer have a token shift: q, k and v, the `extra` ones of its
/// kind, and the output gate.
pub(crate) fn shifted(config: &ModelConfig, extra: usize) -> usize {
    3 + extra + usize::from(config.output_gate)
}
