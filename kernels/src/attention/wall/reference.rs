//! The operation in plain tensor operations: pieces of queries, each with its own keys and the rescaled
//! keys before it.

use std::ops::Range;

use burn::tensor::{Int, Tensor};

use super::past::PastTokens;
use super::piece::{GatedKv, GatedQkv, PieceMask, attend_piece, piece_len};
use crate::attention::AttentionShape;
use crate::attention::blocks::{BLOCK_ELEMENTS, copied, repeat_heads};
use crate::backend::OpBackend;

/// Tokens per chunk in training, chosen for the fewest operations.
pub(super) const TRAIN_CHUNK: usize = 256;

/// Causal attention over whole rows, `[batch, heads, seq_len, value_dim]`.
///
/// - `q`: `[batch, heads, seq_len, head_dim]`; `k`, `v`: `[batch, kv_heads, seq_len, channels]`
/// - `log_decay`: g ≤ 0, `[batch, gate heads, seq_len, head_dim]`; gate heads are kv_heads or heads
/// - `log_forget`: ℓ ≤ 0 of the forget gate, `[batch, heads, seq_len]`
/// - `sinks`: `[heads]`
/// - `documents`: `[batch, seq_len]`
pub(super) fn attend<B: OpBackend>(
    shape: &AttentionShape,
    q: Tensor<B, 4>,
    kvg: [Tensor<B, 4>; 3],
    log_forget: Option<Tensor<B, 3>>,
    sinks: Option<Tensor<B, 1>>,
    documents: Option<&Tensor<B, 2, Int>>,
) -> Tensor<B, 4> {
    let rows = rows(shape, q, keys(shape, kvg, log_forget), sinks);
    let (mut past, mut outputs, mut first) = (PastTokens::new(TRAIN_CHUNK, None), vec![], 0);
    loop {
        let piece = rows.cut(first, next_piece(&past, &rows, first));
        outputs.push(attend_next(shape, &past, &piece, documents));
        first += piece.len();
        if first == rows.len() {
            return join(shape, outputs);
        }
        past.push(piece.keys);
        past.retain(shape.window, None);
    }
}

/// Keys, values, g and ℓ in the layout of [`piece`](super::piece). If each query head has its own gate, keys
/// are repeated, values are not.
pub(super) fn keys<B: OpBackend>(
    shape: &AttentionShape,
    [k, v, g]: [Tensor<B, 4>; 3],
    log_forget: Option<Tensor<B, 3>>,
) -> GatedKv<B> {
    let gate_heads = g.dims()[1];
    let [k, v, log_decay] = [repeat_heads(k, gate_heads / shape.kv_heads), v, g].map(|x| {
        let [batch, heads, tokens, channels] = x.dims();
        x.reshape([batch * heads, 1, 1, tokens, channels])
    });
    let log_forget = log_forget.map(|x| {
        let [batch, heads, tokens] = x.dims();
        copied(x).reshape([batch * gate_heads, heads / gate_heads, 1, tokens, 1])
    });
    GatedKv { k, v, log_decay, log_forget }
}

/// Queries, scaled, with their keys and the sinks of their heads, `[heads]`.
pub(super) fn rows<B: OpBackend>(
    shape: &AttentionShape,
    q: Tensor<B, 4>,
    keys: GatedKv<B>,
    sinks: Option<Tensor<B, 1>>,
) -> GatedQkv<B> {
    let [batch, heads, tokens, head_dim] = q.dims();
    let n = keys.k.dims()[0];
    let group = batch * heads / n;
    let q = (q * shape.scale()).reshape([n, group, 1, tokens, head_dim]);
    // As one row: burn 0.21's gradient of `repeat_dim` is only correct for a dimension of one element.
    let of_sequences =
        |x: Tensor<B, 1>| x.reshape([1, heads]).repeat_dim(0, batch).reshape([n, group, 1, 1, 1]);
    GatedQkv { q, keys, sinks: sinks.map(of_sequences) }
}

/// The outputs of all pieces, `[batch, heads, seq_len, value_dim]`.
pub(super) fn join<B: OpBackend>(
    shape: &AttentionShape,
    mut outputs: Vec<Tensor<B, 5>>,
) -> Tensor<B, 4> {
    let all = if outputs.len() == 1 { outputs.remove(0) } else { Tensor::cat(outputs, 3) };
    let [n, group, _, tokens, value_dim] = all.dims();
    all.reshape([n * group / shape.heads, shape.heads, tokens, value_dim])
}

/// Tokens of the piece that starts at row `first`: at most to the end of the open chunk, and to
/// [`BLOCK_ELEMENTS`] scores.
pub(super) fn next_piece<B: OpBackend>(
    past: &PastTokens<B>,
    rows: &GatedQkv<B>,
    first: usize,
) -> usize {
    let [n, group, _, tokens, _] = rows.q.dims();
    let limit = (tokens - first).min(past.capacity());
    let per_row = n * group * (past.len() + limit);
    piece_len(limit.min((BLOCK_ELEMENTS / per_row).max(1)))
}

/// The outputs of the tokens that follow `past`, `[n, group, 1, rows, value_dim]`.
pub(super) fn attend_next<B: OpBackend>(
    shape: &AttentionShape,
    past: &PastTokens<B>,
    piece: &GatedQkv<B>,
    documents: Option<&Tensor<B, 2, Int>>,
) -> Tensor<B, 5> {
    let first = past.position();
    let first_visible =
        first_visible_keys(first..first + piece.len(), shape.window, documents, &piece.q);
    let mask = PieceMask { first, first_visible };
    attend_piece(piece, &mask, |queries| past.parts(queries, &mask))
}

/// The first position that each query of `range` sees, `[n or 1, 1, 1, rows, 1]`; `None` when all see
/// position 0.
fn first_visible_keys<B: OpBackend>(
    range: Range<usize>,
    window: Option<usize>,
    documents: Option<&Tensor<B, 2, Int>>,
    q: &Tensor<B, 5>,
) -> Option<Tensor<B, 5, Int>> {
    let (n, rows) = (q.dims()[0], range.len());
    let by_window = window.filter(|&w| range.end > w).map(|w| {
        let first_visible = range.start as i64 + 1 - w as i64;
        Tensor::<B, 1, Int>::arange(first_visible..first_visible + rows as i64, &q.device())
            .reshape([1, 1, 1, rows, 1])
    });
    let Some(starts) = documents else { return by_window };
    let batch = starts.dims()[0];
    let starts = copied(starts.clone().narrow(1, range.start, rows)).reshape([batch, 1, rows]);
    let starts = copied(starts.repeat_dim(1, n / batch)).reshape([n, 1, 1, rows, 1]);
    Some(match by_window {
        Some(first_visible) => {
            first_visible.expand(starts.dims()).cast(starts.dtype()).max_pair(starts)
        }
        None => starts,
    })
}
