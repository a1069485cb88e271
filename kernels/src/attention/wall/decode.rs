//! Decoding: what is kept between calls.

use burn::tensor::{FloatDType, Tensor};

use super::past::{Faded, Past};
use super::piece::Rows;
use super::reference::{attend_next, join, keys, next_piece, rows};
use super::{Config, GateSource, Wall, cuda};
use crate::attention::blocks::{copied, repeat_heads};
use crate::attention::cache::KvCache;
use crate::attention::dispatch::on_cuda;
use crate::attention::flash::capacity as capacity_of;
use crate::attention::{AttentionShape, DecodeState, ExecPath, Inputs};
use crate::backend::{OpBackend, primitive, tensor};
use crate::device::DeviceKind;

/// Tokens of a chunk of the cache (Pai et al., section 3, approach 1).
pub(super) const CHUNK: usize = 128;

/// The tokens so far.
#[derive(Clone, Debug)]
pub struct State<B: OpBackend> {
    cache: CacheStorage<B>,
    /// Position of the next token.
    position: usize,
    /// Tokens to make room for, where buffers grow.
    capacity: usize,
}

#[derive(Clone, Debug)]
enum CacheStorage<B: OpBackend> {
    /// Rescaled keys, anchors and values: the gate comes from the hidden state.
    Rescaled(Past<B>),
    /// Keys and values alone, and what is left of evicted ones: the gate is computed from the keys
    /// again.
    Plain(KvCache<B>, Option<Faded<B>>),
    /// What the kernels for CUDA keep, wherever the gate comes from.
    Cuda(CudaCache<B>),
}

/// What the kernels for CUDA keep.
#[derive(Clone, Debug)]
struct CudaCache<B: OpBackend> {
    /// From the first token on.
    tokens: Option<Box<cuda::decode::RescaledKvCache>>,
    /// What is left of evicted tokens.
    faded: Option<Faded<B>>,
}

impl<B: OpBackend> DecodeState for State<B> {
    fn elements(&self) -> usize {
        let of_faded = |faded: &Option<Faded<B>>| faded.as_ref().map_or(0, Faded::elements);
        match &self.cache {
            CacheStorage::Rescaled(past) => past.elements(),
            CacheStorage::Plain(cache, faded) => cache.elements() + of_faded(faded),
            CacheStorage::Cuda(CudaCache { tokens, faded }) => {
                tokens.as_ref().map_or(0, |tokens| tokens.elements()) + of_faded(faded)
            }
        }
    }
}

impl<B: OpBackend> State<B> {
    /// Before the first token.
    pub(super) fn new(
        config: &Config,
        shape: &AttentionShape,
        path: ExecPath,
        capacity: usize,
    ) -> Self {
        let cache = match (path, config.gate_source) {
            (ExecPath::Kernel(DeviceKind::Cuda), _) => {
                CacheStorage::Cuda(CudaCache { tokens: None, faded: None })
            }
            (_, GateSource::Hidden) => CacheStorage::Rescaled(Past::new(CHUNK, None)),
            (_, GateSource::Key) => CacheStorage::Plain(KvCache::new(shape.window, capacity), None),
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
    inputs.q = config.rotate(inputs.q, state.position);
    inputs.k = config.rotate(inputs.k, state.position);
    state.position += tokens;
    let outputs = match &mut state.cache {
        CacheStorage::Cuda(cache) => {
            return extend_on_cuda(config, shape, inputs, cache, state.capacity);
        }
        CacheStorage::Rescaled(past) => {
            let Inputs { q, k, v, projections, parameters } = inputs;
            let logits = config.logits(shape, k.clone(), &projections, &parameters);
            let log_decay = config.log_decay(shape, logits);
            let rows = rows(shape, q, keys(shape, [k, v, log_decay]), config.sinks_of(&parameters));
            extend_past(config, shape, past, &rows)
        }
        CacheStorage::Plain(cache, faded) => {
            let Inputs { q, k, v, projections, parameters } = inputs;
            let [k, v] = cache.append(k, v);
            let logits = config.logits(shape, k.clone(), &projections, &parameters);
            let log_decay = config.log_decay(shape, logits);
            let all = keys(shape, [k, v, log_decay]);
            let old = all.len() - tokens;
            let mut past = Past::new(CHUNK, faded.take());
            if old > 0 {
                past.push(all.cut(0, old));
            }
            let rows = rows(shape, q, all.cut(old, tokens), config.sinks_of(&parameters));
            let outputs = extend_past(config, shape, &mut past, &rows);
            if config.evict_below.is_some() {
                cache.drop_oldest(past.first());
            }
            *faded = past.into_faded();
            outputs
        }
    };
    join(shape, outputs)
}

/// [`extend`] by the kernels for CUDA, of rotated q and k.
fn extend_on_cuda<B: OpBackend>(
    config: &Config,
    shape: &AttentionShape,
    Inputs { q, k, v, projections, parameters }: Inputs<B>,
    cache: &mut CudaCache<B>,
    capacity: usize,
) -> Tensor<B, 4> {
    let gate_heads = config.gate_heads_of(shape);
    let tokens = q.dims()[2];
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
        Box::new(cuda::decode::RescaledKvCache::new(&of_gates, &v, capacity))
    });
    let op =
        Wall { config: config.clone(), shape: AttentionShape { kv_heads: gate_heads, ..*shape } };
    let before = held.tiles();
    let sinks = config.sinks_of(&parameters).map(on_cuda);
    let results = held.extend(&op, [&q, &of_gates, &v], &gate, sinks.as_ref());
    let [o, sums] = results.map(|x| tensor(B::from_cuda(primitive(x))));
    let o = match &cache.faded {
        None => o,
        Some(faded) => faded.join(o, sums),
    };
    if let Some(threshold) = config.evict_below
        && held.tiles() > before
    {
        let tiles = held.faded(threshold);
        if tiles > 0 {
            let values: Tensor<B, 4> = tensor(B::from_cuda(held.evict(tiles)));
            let [batch, kv_heads, tokens, channels] = values.dims();
            let values = values.reshape([batch * kv_heads, 1, 1, tokens, channels]);
            cache.faded = Some(Faded::add(cache.faded.take(), values.cast(FloatDType::F32)));
        }
    }
    o
}

/// The outputs of `rows`, piece by piece, each of which joins `past`.
fn extend_past<B: OpBackend>(
    config: &Config,
    shape: &AttentionShape,
    past: &mut Past<B>,
    rows: &Rows<B>,
) -> Vec<Tensor<B, 5>> {
    let (mut outputs, mut first) = (vec![], 0);
    while first < rows.len() {
        let piece = rows.cut(first, next_piece(past, rows, first));
        outputs.push(attend_next(shape, past, &piece, None));
        first += piece.len();
        // Slices would hold on to the memory of all inputs.
        past.push(piece.keys.map(copied));
        past.retain(shape.window, config.evict_below);
    }
    outputs
}

/// As [`VariantSpec::state_elements`](crate::attention::VariantSpec::state_elements).
pub(super) fn state_elements(config: &Config, shape: &AttentionShape, seq_len: usize) -> usize {
    let values = shape.kv_heads * shape.head_dim;
    if config.gate_source == GateSource::Key {
        return 2 * values * shape.cached_tokens(seq_len);
    }
    let gates = config.gate_heads_of(shape) * shape.head_dim;
    let complete = seq_len / CHUNK;
    // Chunks are dropped when one is complete and no later token sees any of theirs.
    let unseen = shape.window.map_or(0, |w| (complete * CHUNK + 1).saturating_sub(w) / CHUNK);
    let (closed, open) = (complete - unseen, seq_len % CHUNK);
    closed * (CHUNK * (gates + values) + gates) + open * (2 * gates + values)
}
