//! Decoding: what is kept between calls.

use burn::tensor::Tensor;

use super::past::{Faded, Past};
use super::piece::Rows;
use super::reference::{attend_next, join, keys, next_piece, rows};
use super::{Config, GateSource};
use crate::attention::blocks::copied;
use crate::attention::cache::KvCache;
use crate::attention::{AttentionShape, DecodeState, Inputs};
use crate::backend::OpBackend;

/// Tokens of a chunk of the cache (Pai et al., section 3, approach 1).
pub(super) const CHUNK: usize = 128;

/// The tokens so far.
#[derive(Clone, Debug)]
pub struct State<B: OpBackend> {
    held: Held<B>,
    /// Position of the next token.
    position: usize,
}

#[derive(Clone, Debug)]
enum Held<B: OpBackend> {
    /// Rescaled keys, anchors and values: the gate comes from the hidden state.
    Rescaled(Past<B>),
    /// Keys and values alone, and what is left of evicted ones: the gate is computed from the keys
    /// again.
    Plain(KvCache<B>, Option<Faded<B>>),
}

impl<B: OpBackend> DecodeState for State<B> {
    fn elements(&self) -> usize {
        match &self.held {
            Held::Rescaled(past) => past.elements(),
            Held::Plain(cache, faded) => {
                cache.elements() + faded.as_ref().map_or(0, Faded::elements)
            }
        }
    }
}

impl<B: OpBackend> State<B> {
    /// Before the first token.
    pub(super) fn new(config: &Config, shape: &AttentionShape) -> Self {
        let held = match config.gate_source {
            GateSource::Hidden => Held::Rescaled(Past::new(CHUNK, None)),
            GateSource::Key => Held::Plain(KvCache::new(shape.window), None),
        };
        State { held, position: 0 }
    }
}

/// Appends tokens and returns their outputs; as [`Variant::extend`](crate::attention::Variant).
pub(super) fn extend<B: OpBackend>(
    config: &Config,
    shape: &AttentionShape,
    Inputs { q, k, v, projections, parameters }: Inputs<B>,
    state: &mut State<B>,
) -> Tensor<B, 4> {
    let tokens = q.dims()[2];
    let [q, k] = [q, k].map(|x| config.rotate(x, state.position));
    state.position += tokens;
    let outputs = match &mut state.held {
        Held::Rescaled(past) => {
            let log_decay = config.hidden_gate(shape, projections[0].clone());
            let rows = rows(shape, q, keys(shape, [k, v, log_decay]));
            extend_past(config, shape, past, &rows)
        }
        Held::Plain(cache, faded) => {
            let [k, v] = cache.append(k, v);
            let log_decay = config.key_gate(shape, k.clone(), &parameters);
            let all = keys(shape, [k, v, log_decay]);
            let old = all.len() - tokens;
            let mut past = Past::new(CHUNK, faded.take());
            if old > 0 {
                past.push(all.cut(0, old));
            }
            let rows = rows(shape, q, all.cut(old, tokens));
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
