//! Softmax attention of one piece: consecutive queries with their own keys and the keys before them.
//!
//! Tensors have five dimensions, `[n, group, blocks, rows, channels]`: n is batch · gate heads, group
//! the query heads that share a gate (1 for keys, values and decays), and the token at index
//! block · rows + row is in `row` of `block`, so that a reshape changes the block size.
use burn::tensor::{BasicOps, Bool, Int, Tensor};

use super::forget::{ForgetTerms, of_diagonal};
use crate::attention::blocks::{MASKED, copied};
use crate::backend::OpBackend;
use crate::ops::matmul::MatMul;

/// Rows of a diagonal sub-block: factors inside it stay below exp(15 · g_max).
const SUB_BLOCK: usize = 16;

/// Keys, values and decays of some tokens, as one block of rows.
#[derive(Clone, Debug)]
pub(super) struct GatedKv<B: OpBackend> {
    /// `[n, 1, 1, rows, head_dim]`
    pub k: Tensor<B, 5>,
    /// `[batch · kv_heads, 1, 1, rows, value_dim]`
    pub v: Tensor<B, 5>,
    /// g, `[n, 1, 1, rows, head_dim]`.
    pub log_decay: Tensor<B, 5>,
    /// ℓ of the forget gate, `[n, group, 1, rows, 1]`.
    pub log_forget: Option<Tensor<B, 5>>,
}

impl<B: OpBackend> GatedKv<B> {
    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.k.dims()[3]
    }

    /// Tokens `first` to `first + n`.
    pub fn cut(&self, first: usize, n: usize) -> Self {
        self.clone().map(|x| x.narrow(3, first, n))
    }

    /// Applies `f` to all of them.
    pub fn map(self, f: impl Fn(Tensor<B, 5>) -> Tensor<B, 5>) -> Self {
        let log_forget = self.log_forget.map(&f);
        GatedKv { k: f(self.k), v: f(self.v), log_decay: f(self.log_decay), log_forget }
    }
}

/// Queries with the keys of the same tokens.
#[derive(Clone, Debug)]
pub(super) struct GatedQkv<B: OpBackend> {
    /// Queries times the softmax scale, `[n, group, 1, rows, head_dim]`.
    pub q: Tensor<B, 5>,
    /// Their keys.
    pub keys: GatedKv<B>,
    /// The sinks of their heads, `[n, group, 1, 1, 1]`.
    pub sinks: Option<Tensor<B, 5>>,
}

impl<B: OpBackend> GatedQkv<B> {
    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Tokens `first` to `first + n`.
    pub fn cut(&self, first: usize, n: usize) -> Self {
        let (q, sinks) = (self.q.clone().narrow(3, first, n), self.sinks.clone());
        GatedQkv { q, keys: self.keys.cut(first, n), sinks }
    }
}

/// Queries relative to an anchor before them.
#[derive(Clone, Debug)]
pub(super) struct AnchoredQueries<B: OpBackend> {
    /// Queries times their channels' decay since the anchor, `[n, group, blocks, rows, head_dim]`.
    pub q: Tensor<B, 5>,
    /// Σ ℓ since the anchor, `[n, group, blocks, rows, 1]`.
    pub forget: Option<Tensor<B, 5>>,
}

/// Scores of queries and keys, and the values of these keys.
pub(super) struct ScoredKeys<B: OpBackend> {
    /// `[n, group, blocks, rows, keys]`
    pub scores: Tensor<B, 5>,
    /// `[n, 1, blocks, keys, value_dim]`
    pub values: Tensor<B, 5>,
}

/// The mask of a piece by window and documents, beside the causal mask.
pub(super) struct PieceMask<B: OpBackend> {
    /// Position of the piece's first row.
    pub first: usize,
    /// The lowest position that each row sees, `[n or 1, 1, 1, rows, 1]`; `None` when that is the
    /// first.
    pub first_visible: Option<Tensor<B, 5, Int>>,
}

impl<B: OpBackend> PieceMask<B> {
    /// Masks the keys, at positions `first_key`, …, that come before a row's first visible key; `scores` is
    /// `[n, group, blocks, rows, keys]` with all of the piece's rows in every block.
    pub fn apply(&self, scores: Tensor<B, 5>, first_key: usize) -> Tensor<B, 5> {
        let Some(first_visible) = &self.first_visible else { return scores };
        let [_, _, blocks, _, keys] = scores.dims();
        let at =
            positions(first_visible, first_key, blocks * keys).reshape([1, 1, blocks, 1, keys]);
        mask_below(scores, at, first_visible.clone())
    }

    /// As [`PieceMask::apply`], for the sub-blocks' own keys.
    fn apply_to_diagonal(&self, scores: Tensor<B, 5>) -> Tensor<B, 5> {
        let Some(first_visible) = &self.first_visible else { return scores };
        let [_, _, blocks, rows, _] = scores.dims();
        let at =
            positions(first_visible, self.first, blocks * rows).reshape([1, 1, blocks, 1, rows]);
        mask_below(scores, at, split(first_visible.clone(), rows))
    }

    /// As [`PieceMask::apply`], for the later halves' queries and the earlier halves' keys.
    fn apply_to_earlier_half(&self, scores: Tensor<B, 5>) -> Tensor<B, 5> {
        let Some(first_visible) = &self.first_visible else { return scores };
        let [_, _, blocks, rows, _] = scores.dims();
        let at = positions(first_visible, self.first, 2 * blocks * rows);
        let [at, _] = halves(at.reshape([1, 1, blocks, 2 * rows, 1]));
        let [_, first_visible] = halves(split(first_visible.clone(), 2 * rows));
        mask_below(scores, at.swap_dims(3, 4), first_visible)
    }
}

/// Positions `first`, … in the type of `like`.
fn positions<B: OpBackend>(like: &Tensor<B, 5, Int>, first: usize, n: usize) -> Tensor<B, 1, Int> {
    Tensor::arange(first as i64..(first + n) as i64, &like.device()).cast(like.dtype())
}

/// Masks the scores of keys at positions `at` below `first_visible`; both have five dimensions that expand
/// to those of `scores`.
fn mask_below<B: OpBackend>(
    scores: Tensor<B, 5>,
    at: Tensor<B, 5, Int>,
    first_visible: Tensor<B, 5, Int>,
) -> Tensor<B, 5> {
    let (n, dims) = (first_visible.dims()[0], scores.dims());
    let shape = [n, 1, dims[2], dims[3], dims[4]];
    let mask = at.expand(shape).lower(first_visible.expand(shape));
    scores.mask_fill(mask.expand(dims), MASKED)
}

/// The longest piece of at most `limit` rows: a power-of-two number of sub-blocks, or less than one.
pub(super) fn piece_len(limit: usize) -> usize {
    if limit < SUB_BLOCK { limit } else { SUB_BLOCK << (limit / SUB_BLOCK).ilog2() }
}

/// The sum of the rows after the first up to each row, along dimension 3.
fn sum_since_first<B: OpBackend>(x: &Tensor<B, 5>) -> Tensor<B, 5> {
    let rows = x.dims()[3];
    let first = x.clone().narrow(3, 0, 1) * 0.0;
    if rows == 1 {
        return first;
    }
    Tensor::cat(vec![first, x.clone().narrow(3, 1, rows - 1).cumsum(3)], 3)
}

/// Reshapes to blocks of `rows` rows.
pub(super) fn split<B: OpBackend, K: BasicOps<B>>(
    x: Tensor<B, 5, K>,
    rows: usize,
) -> Tensor<B, 5, K> {
    let [n, group, blocks, all, channels] = x.dims();
    x.reshape([n, group, blocks * all / rows, rows, channels])
}

/// The earlier and the later half of every block.
pub(super) fn halves<B: OpBackend, K: BasicOps<B>>(x: Tensor<B, 5, K>) -> [Tensor<B, 5, K>; 2] {
    let half = x.dims()[3] / 2;
    [0, half].map(|first| x.clone().narrow(3, first, half))
}

/// The inverse of [`halves`].
pub(super) fn join<B: OpBackend>(earlier: Tensor<B, 5>, later: Tensor<B, 5>) -> Tensor<B, 5> {
    Tensor::cat(vec![earlier, later], 3)
}

/// The broadcast product, with both sides materialised first: elementwise products are slower on broadcast
/// tensors.
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

/// The scores of a piece's own keys, finest level first (the diagonal sub-blocks; then, with blocks twice
/// as long at each level, the later half's queries with the earlier half's keys), and the piece's queries
/// relative to the row before the piece.
///
/// At each level queries are multiplied by exp(P_i − P_a) and keys by exp(P_a − P_j), both at most 1, where
/// a is the earlier half's last row. From one level to the next, the factors of the far half are multiplied
/// by the decay over the near half, so that no long sum is formed.
fn own_parts<B: OpBackend>(
    rows: &GatedQkv<B>,
    mask: &PieceMask<B>,
) -> (Vec<ScoredKeys<B>>, AnchoredQueries<B>) {
    let (all, sub) = (rows.len(), rows.len().min(SUB_BLOCK));
    let q = split(rows.q.clone(), sub);
    let GatedKv { k, v, log_decay, log_forget } = rows.keys.clone().map(|x| split(x, sub));
    let v = repeat(&v, q.dims()[0]);
    // Inside a sub-block the anchor is its first row: queries shrink and keys grow, and later tokens do
    // not affect a query.
    let since = sum_since_first(&log_decay).exp();
    let queries = times(q, since.clone());
    let keys = k / since.clone();
    let scores = queries.clone().mm(keys.clone().transpose());
    let scores = match &log_forget {
        Some(log_forget) => scores + of_diagonal(log_forget.clone()),
        None => scores,
    };
    let mut forget = log_forget.map(ForgetTerms::new);
    let later = Tensor::<B, 2, Bool>::tril_mask([sub, sub], 0, &scores.device());
    let later = later.reshape([1, 1, 1, sub, sub]).expand(scores.dims());
    let scores = mask.apply_to_diagonal(scores.mask_fill(later, MASKED));
    let mut parts = vec![ScoredKeys { scores, values: v.clone() }];
    // From here on a block's keys are anchored at its last row, its queries at the row before the block.
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
        let scores = late.mm(early.transpose());
        let scores = match &mut forget {
            Some(forget) => forget.add_to_later_half(scores, half),
            None => scores,
        };
        let scores = mask.apply_to_earlier_half(scores);
        parts.push(ScoredKeys { scores, values });
        let [early, late] = halves(split(decay, 2));
        decay = early.clone() * late.clone();
        let [early, late] = [early, late].map(|x| x.repeat_dim(3, half));
        queries = times(queries, join(early.ones_like(), early));
        keys = times(keys, join(late.clone(), late.ones_like()));
        half *= 2;
    }
    (parts, AnchoredQueries { q: queries, forget: forget.map(ForgetTerms::into_queries) })
}

/// The row maximum of the scores, `[n, group, 1, rows, 1]`, detached.
fn row_max_of<B: OpBackend>(own: &[ScoredKeys<B>], past: &[ScoredKeys<B>]) -> Tensor<B, 5> {
    let mut own = own.iter().map(|part| part.scores.clone().detach().max_dim(4));
    let mut row_max = own.next().expect("the diagonal sub-blocks");
    for far in own {
        let [early, late] = halves(split(row_max, 2 * far.dims()[3]));
        row_max = join(early, late.max_pair(far));
    }
    past.iter().fold(row_max, |row_max, part| {
        row_max.max_pair(part.scores.clone().detach().max_dim(4).max_dim(2))
    })
}

/// Σ p v and Σ p over the part's keys with p = exp(score − top), `[n, group, blocks, rows,
/// value_dim + 1]`.
fn weigh<B: OpBackend>(part: ScoredKeys<B>, row_max: Tensor<B, 5>) -> Tensor<B, 5> {
    let weights = (part.scores - row_max).exp();
    Tensor::cat(vec![weights.clone().mm(part.values), weights.sum_dim(4)], 4)
}

/// The outputs of a piece, `[n, group, 1, rows, value_dim]`.
///
/// `past` gives the parts before the piece, each `[n, group, blocks, rows, keys]`, from the
/// piece's queries relative to the row before the piece.
pub(super) fn attend_piece<B: OpBackend>(
    rows: &GatedQkv<B>,
    mask: &PieceMask<B>,
    past: impl FnOnce(AnchoredQueries<B>) -> Vec<ScoredKeys<B>>,
) -> Tensor<B, 5> {
    let (own, queries) = own_parts(rows, mask);
    let past = past(queries);
    let mut row_max = row_max_of(&own, &past);
    if let Some(sinks) = &rows.sinks {
        row_max = row_max.clone().max_pair(sinks.clone().detach().expand(row_max.dims()));
    }
    let mut own = own.into_iter();
    let diagonal = own.next().expect("the diagonal sub-blocks");
    let sub = diagonal.scores.dims()[3];
    let mut sums = weigh(diagonal, split(row_max.clone(), sub));
    for part in own {
        let half = part.scores.dims()[3];
        let [_, row_max] = halves(split(row_max.clone(), 2 * half));
        let late = weigh(part, copied(row_max));
        sums = split(sums, 2 * half) + join(late.zeros_like(), late);
    }
    for part in past {
        sums = sums + weigh(part, row_max.clone()).sum_dim(2);
    }
    let value_dim = sums.dims()[4] - 1;
    let mut total = sums.clone().narrow(4, value_dim, 1);
    if let Some(sinks) = &rows.sinks {
        // A sink has no value vector.
        total = total + (sinks.clone() - row_max).exp();
    }
    sums.narrow(4, 0, value_dim) / total
}

/// Repeats the values of kv heads for `n` = batch · gate heads.
pub(super) fn repeat<B: OpBackend>(values: &Tensor<B, 5>, n: usize) -> Tensor<B, 5> {
    let [rows, _, blocks, keys, value_dim] = values.dims();
    if rows == n {
        return values.clone();
    }
    let all = values.clone().reshape([rows, 1, blocks * keys * value_dim]);
    all.repeat_dim(1, n / rows).reshape([n, 1, blocks, keys, value_dim])
}
