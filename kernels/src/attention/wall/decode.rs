//! Decoding: the state that is kept between calls.

use burn::tensor::{FloatDType, Tensor};

use super::cuda::decode::{Evicted, GateInputs, RescaledKvCache};
use super::past::{EvictedTokens, PastTokens};
use super::piece::GatedQkv;
use super::reference::{attend_next, join, keys, next_piece, rows};
use super::{Config, GateSource, Wall, cuda};
use crate::attention::blocks::{copied, repeat_heads};
use crate::attention::cache::KvCache;
use crate::attention::dispatch::on_cuda;
use crate::attention::flash::capacity as capacity_of;
use crate::attention::rotation::rotate;
use crate::attention::{AttentionShape, DecodeState, ExecPath, Inputs};
use crate::backend::{OpBackend, primitive, tensor};
use crate::device::DeviceKind;

/// Tokens per chunk of the cache (Pai et al., section 3, approach 1).
pub(super) const DECODE_CHUNK: usize = 128;

/// The cache of the tokens so far.
#[derive(Clone, Debug)]
pub struct State<B: OpBackend> {
    cache: CacheStorage<B>,
    /// Position of the next token.
    position: usize,
    /// Tokens to reserve room for.
    capacity: usize,
}

#[derive(Clone, Debug)]
enum CacheStorage<B: OpBackend> {
    /// With [`GateSource::Hidden`]: rescaled keys, anchors and values.
    Rescaled(PastTokens<B>),
    /// With [`GateSource::Key`]: keys and values, from which the gate is recomputed.
    Plain(PlainCache<B>),
    /// With eviction, off CUDA's kernels: a state for each kv head of each sequence, because each evicts tokens of its
    /// own; empty before the first token.
    ByHead(Vec<State<B>>),
    /// The cache of the CUDA kernels, for either source.
    Cuda(CudaCache<B>),
}

/// Keys and values as they came.
#[derive(Clone, Debug)]
struct PlainCache<B: OpBackend> {
    tokens: KvCache<B>,
    /// ℓ of the tokens held, `[batch, heads, tokens]`, with a forget gate.
    log_forget: Option<Tensor<B, 3>>,
    /// The summary of evicted tokens.
    evicted: Option<EvictedTokens<B>>,
}

impl<B: OpBackend> PlainCache<B> {
    /// Appends tokens; returns keys, values and ℓ of all tokens held.
    fn append(
        &mut self,
        [k, v]: [Tensor<B, 4>; 2],
        log_forget: Option<Tensor<B, 3>>,
    ) -> ([Tensor<B, 4>; 2], Option<Tensor<B, 3>>) {
        let all = self.tokens.append(k, v);
        let old = self.log_forget.take().into_iter();
        self.log_forget = log_forget.map(|new| {
            let joined = Tensor::cat(old.chain([new]).collect(), 2);
            // The cache may have dropped tokens that left the window.
            let (held, seen) = (joined.dims()[2], self.tokens.len());
            if held > seen { copied(joined.narrow(2, held - seen, seen)) } else { joined }
        });
        (all, self.log_forget.clone())
    }
}

/// The cache of the CUDA kernels.
#[derive(Clone, Debug)]
struct CudaCache<B: OpBackend> {
    /// From the first token on.
    tokens: Option<Box<RescaledKvCache>>,
    /// The summary of evicted tokens.
    evicted: Option<EvictedTokens<B>>,
}

impl<B: OpBackend> DecodeState for State<B> {
    fn elements(&self) -> usize {
        let of_evicted = |evicted: &Option<EvictedTokens<B>>| {
            evicted.as_ref().map_or(0, EvictedTokens::elements)
        };
        match &self.cache {
            CacheStorage::Rescaled(past) => past.elements(),
            CacheStorage::ByHead(heads) => heads.iter().map(State::elements).sum(),
            CacheStorage::Plain(PlainCache { tokens, log_forget, evicted }) => {
                let log_forget = log_forget.as_ref().map_or(0, |x| x.shape().num_elements());
                tokens.elements() + log_forget + of_evicted(evicted)
            }
            CacheStorage::Cuda(CudaCache { tokens, evicted }) => {
                tokens.as_ref().map_or(0, |tokens| tokens.elements()) + of_evicted(evicted)
            }
        }
    }
}

impl<B: OpBackend> State<B> {
    /// The state before the first token.
    pub(super) fn new(
        config: &Config,
        shape: &AttentionShape,
        path: ExecPath,
        capacity: usize,
    ) -> Self {
        if path == ExecPath::Kernel(DeviceKind::Cuda) {
            let cache = CacheStorage::Cuda(CudaCache { tokens: None, evicted: None });
            return State { cache, position: 0, capacity };
        }
        if config.evict_below.is_some() {
            return State { cache: CacheStorage::ByHead(vec![]), position: 0, capacity };
        }
        Self::of_reference(config, shape, capacity)
    }

    /// As [`State::new`], where all heads hold the same tokens.
    fn of_reference(config: &Config, shape: &AttentionShape, capacity: usize) -> Self {
        let cache = match config.gate_source {
            GateSource::Hidden => CacheStorage::Rescaled(PastTokens::new(DECODE_CHUNK, None)),
            GateSource::Key => CacheStorage::Plain(PlainCache {
                tokens: KvCache::new(shape.window, capacity),
                log_forget: None,
                evicted: None,
            }),
        };
        State { cache, position: 0, capacity }
    }
}

/// Appends tokens and returns their outputs; as [`Variant::extend`](crate::attention::Variant).
pub(super) fn extend<B: OpBackend>(
    config: &Config,
    shape: &AttentionShape,
    mut inputs: Inputs<B>,
    state: &mut State<B>,
) -> Tensor<B, 4> {
    let tokens = inputs.q.dims()[2];
    if let CacheStorage::ByHead(states) = &mut state.cache {
        return extend_by_head(config, shape, &inputs, states, state.capacity);
    }
    [inputs.q, inputs.k] = rotate(config.rotation(), [inputs.q, inputs.k], state.position);
    state.position += tokens;
    let outputs = match &mut state.cache {
        CacheStorage::ByHead(_) => unreachable!("has returned"),
        CacheStorage::Cuda(cache) => {
            return extend_on_cuda(config, shape, inputs, cache, state.capacity);
        }
        CacheStorage::Rescaled(past) => {
            let Inputs { q, k, v, projections, parameters } = inputs;
            let logits = config.logits(shape, k.clone(), &projections, &parameters);
            let log_decay = config.log_decay(shape, logits);
            let keys = keys(shape, [k, v, log_decay], config.log_forget(&projections));
            let rows = rows(shape, q, keys, config.sinks_of(&parameters));
            extend_past(config, shape, past, &rows)
        }
        CacheStorage::Plain(cache) => {
            let Inputs { q, k, v, projections, parameters } = inputs;
            let ([k, v], log_forget) = cache.append([k, v], config.log_forget(&projections));
            let logits = config.logits(shape, k.clone(), &projections, &parameters);
            let log_decay = config.log_decay(shape, logits);
            let all = keys(shape, [k, v, log_decay], log_forget);
            let old = all.len() - tokens;
            let mut past = PastTokens::new(DECODE_CHUNK, cache.evicted.take());
            if old > 0 {
                past.push(all.cut(0, old));
            }
            let rows = rows(shape, q, all.cut(old, tokens), config.sinks_of(&parameters));
            let outputs = extend_past(config, shape, &mut past, &rows);
            if config.evict_below.is_some() {
                cache.tokens.drop_oldest(past.first());
            }
            cache.evicted = past.into_evicted();
            outputs
        }
    };
    join(shape, outputs)
}

/// [`extend`] by the CUDA kernels; q and k are already rotated.
fn extend_on_cuda<B: OpBackend>(
    config: &Config,
    shape: &AttentionShape,
    Inputs { q, k, v, projections, parameters }: Inputs<B>,
    cache: &mut CudaCache<B>,
    capacity: usize,
) -> Tensor<B, 4> {
    let gate_heads = config.gate_heads_of(shape);
    let tokens = q.dims()[2];
    let forget_logits = projections.last().filter(|_| config.forget_gate).cloned().map(on_cuda);
    let of_gates = on_cuda(repeat_heads(k.clone(), gate_heads / shape.kv_heads));
    let [q, v] = [q, v].map(on_cuda);
    let gate = if tokens == 1 && config.gate_source == GateSource::Key {
        let [weight, bias] = [0, 1].map(|at| on_cuda(parameters[at].clone()));
        cuda::logits_of_token(&of_gates, [&weight, &bias], config.gate_dims_of(shape))
    } else {
        on_cuda(config.logits(shape, k, &projections, &parameters))
    };
    let held = cache.tokens.get_or_insert_with(|| {
        let capacity = capacity_of(shape.window, capacity, tokens);
        let forgetting = config.forget_gate.then_some(shape.heads);
        Box::new(RescaledKvCache::new(&of_gates, &v, forgetting, capacity))
    });
    let op =
        Wall { config: config.clone(), shape: AttentionShape { kv_heads: gate_heads, ..*shape } };
    if tokens > 1
        && let Some(firsts) = held.firsts()
    {
        let evicted = cache.evicted.take().expect("tokens were evicted").give_back(firsts);
        held.restore(&on_cuda(evicted.means().cast(FloatDType::BF16)), tokens);
        cache.evicted = Some(evicted);
    }
    let before = held.tiles();
    let sinks = config.sinks_of(&parameters).map(on_cuda);
    let gates = GateInputs { gate, forget_logits, sinks };
    let results = held.extend(&op, [&q, &of_gates, &v], &gates);
    let [o, sums] = results.map(|x| tensor(B::from_cuda(primitive(x))));
    let o = match &cache.evicted {
        None => o,
        Some(evicted) => evicted.join(o, sums),
    };
    if let Some(threshold) = config.evict_below
        && held.tiles() > before
        && let Some(Evicted { tokens, sums }) = held.evict(shape.heads, threshold)
    {
        let sums = tensor(B::from_cuda(primitive(sums)));
        cache.evicted = Some(EvictedTokens::add(cache.evicted.take(), &tokens, sums));
    }
    o
}

/// [`extend`], each kv head of each sequence on its own.
fn extend_by_head<B: OpBackend>(
    config: &Config,
    shape: &AttentionShape,
    inputs: &Inputs<B>,
    states: &mut Vec<State<B>>,
    capacity: usize,
) -> Tensor<B, 4> {
    let ([batch, heads, tokens, _], kv_heads) = (inputs.q.dims(), shape.kv_heads);
    let one = AttentionShape { heads: shape.group(), kv_heads: 1, ..*shape };
    if states.is_empty() {
        let new = || State::of_reference(config, &one, capacity);
        states.extend(std::iter::repeat_with(new).take(batch * kv_heads));
    }
    let outputs = states.iter_mut().enumerate().map(|(at, state)| {
        let inputs = inputs_of_head(inputs, at / kv_heads, at % kv_heads, kv_heads);
        extend(config, &one, inputs, state)
    });
    let all = Tensor::cat(outputs.collect(), 1);
    let value_dim = all.dims()[3];
    all.reshape([batch, heads, tokens, value_dim])
}

/// The inputs of one kv head of a sequence: every input has the heads in their order, the same part for each kv head.
fn inputs_of_head<B: OpBackend>(
    inputs: &Inputs<B>,
    sequence: usize,
    head: usize,
    kv_heads: usize,
) -> Inputs<B> {
    fn part<B: OpBackend, const D: usize>(
        x: &Tensor<B, D>,
        dim: usize,
        at: usize,
        parts: usize,
    ) -> Tensor<B, D> {
        let n = x.dims()[dim] / parts;
        x.clone().narrow(dim, at * n, n)
    }
    let heads =
        |x: &Tensor<B, 4>| copied(part(&x.clone().narrow(0, sequence, 1), 1, head, kv_heads));
    let features =
        |x: &Tensor<B, 3>| copied(part(&x.clone().narrow(0, sequence, 1), 2, head, kv_heads));
    Inputs {
        q: heads(&inputs.q),
        k: heads(&inputs.k),
        v: heads(&inputs.v),
        projections: inputs.projections.iter().map(features).collect(),
        parameters: inputs.parameters.iter().map(|x| part(x, 0, head, kv_heads)).collect(),
    }
}

/// The outputs of `rows`, piece by piece; each piece is appended to `past`.
fn extend_past<B: OpBackend>(
    config: &Config,
    shape: &AttentionShape,
    past: &mut PastTokens<B>,
    rows: &GatedQkv<B>,
) -> Vec<Tensor<B, 5>> {
    let (mut outputs, mut first) = (vec![], 0);
    while first < rows.len() {
        let piece = rows.cut(first, next_piece(past, rows, first));
        outputs.push(attend_next(shape, past, &piece, None));
        first += piece.len();
        // Copied, because slices would keep the memory of all inputs alive.
        past.push(piece.keys.map(copied));
        past.retain(shape.window, config.evict_below);
    }
    outputs
}

/// As [`VariantSpec::state_elements`](crate::attention::VariantSpec::state_elements).
pub(super) fn state_elements(config: &Config, shape: &AttentionShape, seq_len: usize) -> usize {
    let values = shape.kv_heads * shape.head_dim;
    let forget = if config.forget_gate { shape.heads } else { 0 };
    if config.gate_source == GateSource::Key {
        return (2 * values + forget) * shape.cached_tokens(seq_len);
    }
    let gates = config.gate_heads_of(shape) * shape.head_dim;
    let complete = seq_len / DECODE_CHUNK;
    // When a chunk is complete, those that no later token sees are dropped.
    let unseen =
        shape.window.map_or(0, |w| (complete * DECODE_CHUNK + 1).saturating_sub(w) / DECODE_CHUNK);
    let (closed, open) = (complete - unseen, seq_len % DECODE_CHUNK);
    let of_chunk = DECODE_CHUNK * (gates + values + forget) + gates + forget;
    closed * of_chunk + open * (2 * gates + values + forget)
}
