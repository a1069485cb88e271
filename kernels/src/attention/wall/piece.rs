//! Softmax attention of one piece: a run of neighbouring queries, with their own keys and the keys
//! before them.
//!
//! Tensors have five dimensions, `[n, group, blocks, rows, channels]`: n is batch · gate heads,
//! group the query heads that share a gate (1 for keys, values and decays), and a row of the
//! sequence lies at blocks · rows + row, so that blocks of other sizes are a reshape away.
use burn::tensor::{BasicOps, Bool, Int, Tensor};

use crate::attention::blocks::{MASKED, copied};
use crate::backend::OpBackend;
use crate::ops::matmul::MatMul;

/// Rows of a diagonal sub-block: its factors stay below exp(15 · g_max).
const SUB: usize = 16;

/// Keys, values and decays of some tokens, as one block of rows.
#[derive(Clone, Debug)]
pub(super) struct Keys<B: OpBackend> {
    /// `[n, 1, 1, rows, head_dim]`
    pub k: Tensor<B, 5>,
    /// `[batch · kv_heads, 1, 1, rows, value_dim]`
    pub v: Tensor<B, 5>,
    /// g, `[n, 1, 1, rows, head_dim]`.
    pub log_decay: Tensor<B, 5>,
}

impl<B: OpBackend> Keys<B> {
    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.k.dims()[3]
    }

    /// Tokens `first` to `first + n`.
    pub fn cut(&self, first: usize, n: usize) -> Self {
        self.clone().map(|x| x.narrow(3, first, n))
    }

    /// The same change to all three.
    pub fn map(self, f: impl Fn(Tensor<B, 5>) -> Tensor<B, 5>) -> Self {
        Keys { k: f(self.k), v: f(self.v), log_decay: f(self.log_decay) }
    }
}

/// Queries, and the keys of the same tokens.
#[derive(Clone, Debug)]
pub(super) struct Rows<B: OpBackend> {
    /// Queries times the softmax scale, `[n, group, 1, rows, head_dim]`.
    pub q: Tensor<B, 5>,
    /// Their keys.
    pub keys: Keys<B>,
    /// The sinks of their heads, `[n, group, 1, 1, 1]`.
    pub sinks: Option<Tensor<B, 5>>,
}

impl<B: OpBackend> Rows<B> {
    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Tokens `first` to `first + n`.
    pub fn cut(&self, first: usize, n: usize) -> Self {
        let (q, sinks) = (self.q.clone().narrow(3, first, n), self.sinks.clone());
        Rows { q, keys: self.keys.cut(first, n), sinks }
    }
}

/// Scores of queries and keys, and the values of these keys.
pub(super) struct Part<B: OpBackend> {
    /// `[n, group, blocks, rows, keys]`
    pub scores: Tensor<B, 5>,
    /// `[n, 1, blocks, keys, value_dim]`
    pub values: Tensor<B, 5>,
}

/// What the queries of a piece may see beside the causal mask.
pub(super) struct Sight<B: OpBackend> {
    /// Position of the piece's first row.
    pub first: usize,
    /// The lowest position that each row sees, `[n or 1, 1, 1, rows, 1]`; `None` when that is the
    /// first.
    pub lowest: Option<Tensor<B, 5, Int>>,
}

impl<B: OpBackend> Sight<B> {
    /// Hides keys at positions `first_key`, … that come before what the piece's rows see;
    /// `scores` is `[n, group, blocks, rows, keys]` with all of the piece's rows in every block.
    pub fn hide(&self, scores: Tensor<B, 5>, first_key: usize) -> Tensor<B, 5> {
        let Some(lowest) = &self.lowest else { return scores };
        let [_, _, blocks, _, keys] = scores.dims();
        let at = positions(lowest, first_key, blocks * keys).reshape([1, 1, blocks, 1, keys]);
        mask_below(scores, at, lowest.clone())
    }

    /// As [`Sight::hide`], for the sub-blocks' own keys.
    fn hide_diagonal(&self, scores: Tensor<B, 5>) -> Tensor<B, 5> {
        let Some(lowest) = &self.lowest else { return scores };
        let [_, _, blocks, rows, _] = scores.dims();
        let at = positions(lowest, self.first, blocks * rows).reshape([1, 1, blocks, 1, rows]);
        mask_below(scores, at, split(lowest.clone(), rows))
    }

    /// As [`Sight::hide`], for the later halves' queries and the earlier halves' keys.
    fn hide_earlier_half(&self, scores: Tensor<B, 5>) -> Tensor<B, 5> {
        let Some(lowest) = &self.lowest else { return scores };
        let [_, _, blocks, rows, _] = scores.dims();
        let at = positions(lowest, self.first, 2 * blocks * rows);
        let [at, _] = halves(at.reshape([1, 1, blocks, 2 * rows, 1]));
        let [_, lowest] = halves(split(lowest.clone(), 2 * rows));
        mask_below(scores, at.swap_dims(3, 4), lowest)
    }
}

/// Positions `first`, … in the type of `like`.
fn positions<B: OpBackend>(like: &Tensor<B, 5, Int>, first: usize, n: usize) -> Tensor<B, 1, Int> {
    Tensor::arange(first as i64..(first + n) as i64, &like.device()).cast(like.dtype())
}

/// Hides the scores of keys `at` below `lowest`; both are of five dimensions that expand to those
/// of `scores`.
fn mask_below<B: OpBackend>(
    scores: Tensor<B, 5>,
    at: Tensor<B, 5, Int>,
    lowest: Tensor<B, 5, Int>,
) -> Tensor<B, 5> {
    let (n, dims) = (lowest.dims()[0], scores.dims());
    let shape = [n, 1, dims[2], dims[3], dims[4]];
    let mask = at.expand(shape).lower(lowest.expand(shape));
    scores.mask_fill(mask.expand(dims), MASKED)
}

/// The longest piece that `limit` rows allow: a power of two of sub-blocks, or less than one.
pub(super) fn piece_len(limit: usize) -> usize {
    if limit < SUB { limit } else { SUB << (limit / SUB).ilog2() }
}

/// Σ of the rows after the first up to each row, along dimension 3.
fn sum_since_first<B: OpBackend>(x: &Tensor<B, 5>) -> Tensor<B, 5> {
    let rows = x.dims()[3];
    let first = x.clone().narrow(3, 0, 1) * 0.0;
    if rows == 1 {
        return first;
    }
    Tensor::cat(vec![first, x.clone().narrow(3, 1, rows - 1).cumsum(3)], 3)
}

/// Blocks of `rows` instead of those there are.
fn split<B: OpBackend, K: BasicOps<B>>(x: Tensor<B, 5, K>, rows: usize) -> Tensor<B, 5, K> {
    let [n, group, blocks, all, channels] = x.dims();
    x.reshape([n, group, blocks * all / rows, rows, channels])
}

/// The earlier and the later half of every block.
fn halves<B: OpBackend, K: BasicOps<B>>(x: Tensor<B, 5, K>) -> [Tensor<B, 5, K>; 2] {
    let half = x.dims()[3] / 2;
    [0, half].map(|first| x.clone().narrow(3, first, half))
}

/// The inverse of [`halves`].
fn join<B: OpBackend>(earlier: Tensor<B, 5>, later: Tensor<B, 5>) -> Tensor<B, 5> {
    Tensor::cat(vec![earlier, later], 3)
}

/// x times a factor, each repeated where the other is longer: products of whole tensors run at
/// full speed where those of broadcast ones do not.
pub(super) fn times<B: OpBackend>(x: Tensor<B, 5>, factor: Tensor<B, 5>) -> Tensor<B, 5> {
    let [mine, other] = [x.dims(), factor.dims()];
    let stretch = |x: Tensor<B, 5>| {
        let dims = x.dims();
        (0..5).fold(x, |x, d| match mine[d].max(other[d]) / dims[d] {
            1 => x,
            times => x.repeat_dim(d, times),
        })
    };
    stretch(x) * stretch(factor)
}

/// The scores of a piece's own keys, finest first (the diagonal sub-blocks; then, for blocks twice
/// as long each time, the later half's queries with the earlier half's keys), and the piece's
/// queries times their decay since the row before the piece.
///
/// Two tokens meet where their blocks join: queries hold exp(P_i − P_a), keys exp(P_a − P_j), with
/// a the earlier half's last row, both at most 1. When blocks join, the far half's factors are
/// multiplied by the decay of the near half, so that no long sum is ever formed.
fn own_parts<B: OpBackend>(rows: &Rows<B>, sight: &Sight<B>) -> (Vec<Part<B>>, Tensor<B, 5>) {
    let (all, sub) = (rows.len(), rows.len().min(SUB));
    let q = split(rows.q.clone(), sub);
    let Keys { k, v, log_decay } = rows.keys.clone().map(|x| split(x, sub));
    let v = repeat(&v, q.dims()[0]);
    // Inside a sub-block the anchor is its first row: queries shrink, keys grow, and what comes
    // after a query has no part in it.
    let since = sum_since_first(&log_decay).exp();
    let queries = times(q, since.clone());
    let keys = k / since.clone();
    let scores = queries.clone().mm(keys.clone().transpose());
    let later = Tensor::<B, 2, Bool>::tril_mask([sub, sub], 0, &scores.device());
    let later = later.reshape([1, 1, 1, sub, sub]).expand(scores.dims());
    let scores = sight.hide_diagonal(scores.mask_fill(later, MASKED));
    let mut parts = vec![Part { scores, values: v.clone() }];
    // From here on a block's keys are anchored at its last row, its queries at the row before it.
    let first = log_decay.narrow(3, 0, 1).exp();
    let last = since.narrow(3, sub - 1, 1);
    let mut queries = times(queries, first.clone());
    let mut keys = times(keys, last.clone());
    let mut decay = first * last;
    let mut half = sub;
    while half < all {
        [queries, keys] = [queries, keys].map(|x| split(x, 2 * half));
        let ([_, late], [early, _]) = (halves(queries.clone()), halves(keys.clone()));
        let [values, _] = halves(split(v.clone(), 2 * half));
        let scores = sight.hide_earlier_half(late.mm(early.transpose()));
        parts.push(Part { scores, values });
        let [early, late] = halves(split(decay, 2));
        decay = early.clone() * late.clone();
        let [early, late] = [early, late].map(|x| x.repeat_dim(3, half));
        queries = times(queries, join(early.ones_like(), early));
        keys = times(keys, join(late.clone(), late.ones_like()));
        half *= 2;
    }
    (parts, queries)
}

/// The largest score of each row, `[n, group, 1, rows, 1]`; no gradient passes.
fn row_maximum<B: OpBackend>(own: &[Part<B>], past: &[Part<B>]) -> Tensor<B, 5> {
    let mut own = own.iter().map(|part| part.scores.clone().detach().max_dim(4));
    let mut top = own.next().expect("the diagonal sub-blocks");
    for far in own {
        let [early, late] = halves(split(top, 2 * far.dims()[3]));
        top = join(early, late.max_pair(far));
    }
    past.iter()
        .fold(top, |top, part| top.max_pair(part.scores.clone().detach().max_dim(4).max_dim(2)))
}

/// Σ p v and Σ p over the part's keys with p = exp(score − top), `[n, group, blocks, rows,
/// value_dim + 1]`.
fn weigh<B: OpBackend>(part: Part<B>, top: Tensor<B, 5>) -> Tensor<B, 5> {
    let weights = (part.scores - top).exp();
    Tensor::cat(vec![weights.clone().mm(part.values), weights.sum_dim(4)], 4)
}

/// The outputs of a piece, `[n, group, 1, rows, value_dim]`.
///
/// `past` gives the parts before the piece, each `[n, group, blocks, rows, keys]`, from the
/// piece's queries times their decay since the row before the piece.
pub(super) fn attend_piece<B: OpBackend>(
    rows: &Rows<B>,
    sight: &Sight<B>,
    past: impl FnOnce(Tensor<B, 5>) -> Vec<Part<B>>,
) -> Tensor<B, 5> {
    let (own, queries) = own_parts(rows, sight);
    let past = past(queries);
    let mut top = row_maximum(&own, &past);
    if let Some(sinks) = &rows.sinks {
        top = top.clone().max_pair(sinks.clone().detach().expand(top.dims()));
    }
    let mut own = own.into_iter();
    let diagonal = own.next().expect("the diagonal sub-blocks");
    let sub = diagonal.scores.dims()[3];
    let mut sums = weigh(diagonal, split(top.clone(), sub));
    for part in own {
        let half = part.scores.dims()[3];
        let [_, top] = halves(split(top.clone(), 2 * half));
        let late = weigh(part, copied(top));
        sums = split(sums, 2 * half) + join(late.zeros_like(), late);
    }
    for part in past {
        sums = sums + weigh(part, top.clone()).sum_dim(2);
    }
    let value_dim = sums.dims()[4] - 1;
    let mut total = sums.clone().narrow(4, value_dim, 1);
    if let Some(sinks) = &rows.sinks {
        // A sink has no value.
        total = total + (sinks.clone() - top).exp();
    }
    sums.narrow(4, 0, value_dim) / total
}

/// Values of kv heads, repeated for `n` = batch · gate heads.
pub(super) fn repeat<B: OpBackend>(values: &Tensor<B, 5>, n: usize) -> Tensor<B, 5> {
    let [rows, _, blocks, keys, value_dim] = values.dims();
    if rows == n {
        return values.clone();
    }
    let all = values.clone().reshape([rows, 1, blocks * keys * value_dim]);
    all.repeat_dim(1, n / rows).reshape([n, 1, blocks, keys, value_dim])
}
