//! Decoding: what is kept between calls.

use burn::tensor::{DType, FloatDType, Tensor};

use super::past::{Faded, Past};
use super::piece::Rows;
use super::reference::{attend_next, join, keys, next_piece, rows};
use super::{Config, GateSource, Wall, cuda};
use crate::attention::blocks::{copied, repeat_heads};
use crate::attention::cache::KvCache;
use crate::attention::flash::{capacity, cuda_inputs};
use crate::attention::{AttentionShape, DecodeState, Inputs};
use crate::backend::{OpBackend, primitive, tensor};

/// Tokens of a chunk of the cache (Pai et al., section 3, approach 1).
pub(super) const CHUNK: usize = 128;

/// The tokens so far.
#[derive(Clone, Debug)]
pub struct State<B: OpBackend> {
    held: Held<B>,
    /// Position of the next token.
    position: usize,
    /// Tokens to make room for, where buffers grow.
    reserved: usize,
}

#[derive(Clone, Debug)]
enum Held<B: OpBackend> {
    /// Rescaled keys, anchors and values: the gate comes from the hidden state.
    Rescaled(Past<B>),
    /// Keys and values alone, and what is left of evicted ones: the gate is computed from the keys
    /// again.
    Plain(KvCache<B>, Option<Faded<B>>),
    /// What the kernels for CUDA keep, wherever the gate comes from, and what is left of evicted tokens.
    OnCuda(Box<cuda::decode::State>, Option<Faded<B>>),
}

impl<B: OpBackend> DecodeState for State<B> {
    fn elements(&self) -> usize {
        match &self.held {
            Held::Rescaled(past) => past.elements(),
            Held::Plain(cache, faded) => {
                cache.elements() + faded.as_ref().map_or(0, Faded::elements)
            }
            Held::OnCuda(state, faded) => {
                state.elements() + faded.as_ref().map_or(0, Faded::elements)
            }
        }
    }

    fn reserve(&mut self, tokens: usize) {
        self.reserved = tokens;
    }
}

impl<B: OpBackend> State<B> {
    /// Before the first token.
    pub(super) fn new(config: &Config, shape: &AttentionShape) -> Self {
        let held = match config.gate_source {
            GateSource::Hidden => Held::Rescaled(Past::new(CHUNK, None)),
            GateSource::Key => Held::Plain(KvCache::new(shape.window), None),
        };
        State { held, position: 0, reserved: 0 }
    }
}

/// Appends tokens and returns their outputs; as [`Variant::extend`](crate::attention::Variant).
pub(super) fn extend<B: OpBackend>(
    config: &Config,
    shape: &AttentionShape,
    inputs: Inputs<B>,
    state: &mut State<B>,
) -> Tensor<B, 4> {
    if let Some(o) = extend_on_cuda(config, shape, &inputs, state) {
        return o;
    }
    let Inputs { q, k, v, projections, parameters } = inputs.widened();
    let tokens = q.dims()[2];
    let [q, k] = [q, k].map(|x| config.rotate(x, state.position));
    state.position += tokens;
    let outputs = match &mut state.held {
        Held::OnCuda(..) => unreachable!("served above"),
        Held::Rescaled(past) => {
            let logits = config.logits(shape, k.clone(), &projections, &parameters);
            let log_decay = config.log_decay(shape, logits);
            let rows = rows(shape, q, keys(shape, [k, v, log_decay]), config.sinks_of(&parameters));
            extend_past(config, shape, past, &rows)
        }
        Held::Plain(cache, faded) => {
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

/// As [`extend`], where the kernels for CUDA serve and no other path has begun the sequence.
///
/// # Panics
/// When they do not, though they have begun it.
fn extend_on_cuda<B: OpBackend>(
    config: &Config,
    shape: &AttentionShape,
    Inputs { q, k, v, projections, parameters }: &Inputs<B>,
    state: &mut State<B>,
) -> Option<Tensor<B, 4>> {
    let begun = matches!(state.held, Held::OnCuda(..));
    let gate_type = projections.first().map_or(DType::F32, |x| x.dtype());
    let served = cuda_inputs([q, k, v]).is_some() && matches!(gate_type, DType::F32 | DType::BF16);
    assert!(served || !begun, "inputs of {:?} after a state of bf16 on CUDA's kernels", q.dtype());
    if !served || (state.position > 0 && !begun) {
        return None;
    }
    let [q, k] = [q, k].map(|x| config.rotate(x.clone(), state.position));
    let gate_heads = config.gate_heads_of(shape);
    let of_gates = repeat_heads(k.clone(), gate_heads / shape.kv_heads);
    let tokens = q.dims()[2];
    let [q, of_gates, v] = cuda_inputs([&q, &of_gates, v])?;
    let gate = if tokens == 1 && config.gate_source == GateSource::Key {
        let [weight, bias] = [0, 1].map(|at| B::into_cuda(primitive(parameters[at].clone())));
        cuda::logits_of_token(&of_gates, [&weight?, &bias?], config.gate_dims_of(shape))
    } else {
        B::into_cuda(primitive(config.logits(shape, k, projections, parameters)))?
    };
    if !begun {
        let capacity = capacity(shape.window, state.reserved, tokens);
        let held = cuda::decode::State::new(&of_gates, &v, capacity);
        state.held = Held::OnCuda(Box::new(held), None);
    }
    let Held::OnCuda(held, faded) = &mut state.held else { unreachable!("set above") };
    state.position += tokens;
    let op =
        Wall { config: config.clone(), shape: AttentionShape { kv_heads: gate_heads, ..*shape } };
    let before = held.tiles();
    let sinks = config.sinks_of(parameters).and_then(|x| B::into_cuda(primitive(x)));
    let results = held.extend(&op, [&q, &of_gates, &v], &gate, sinks.as_ref());
    let [o, sums] = results.map(|x| tensor(B::from_cuda(primitive(x))));
    let o = match faded {
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
            *faded = Some(Faded::add(faded.take(), values.cast(FloatDType::F32)));
        }
    }
    Some(o)
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

/// As [`Variant::state_elements`](crate::attention::Variant::state_elements).
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
