//! The operation in plain tensor operations: each block of tokens is transformed on its own, then queries
//! travel right to left over the blocks before them (section 3.3).
//!
//! All queries of a chunk travel together, so that a step is one matrix product over hundreds of rows.
//! The softmax is online; only one chunk's scores against one block exist at a time. Positions count from
//! the first token of the sequence.

use std::ops::Range;

use burn::tensor::{Bool, Int, Tensor};

use super::householder::TransformedBlocks;
use super::token_blocks::{BlockTransform, TokenBlock, TransformedKv, added};
use crate::attention::blocks::{Block, MASKED, attention_mask, copied, decay_between, sums_after};
use crate::backend::OpBackend;
use crate::ops::matmul::MatMul;

/// Most tokens per block. Longer blocks cost fewer query transforms (head_dim² per query and block),
/// shorter ones less merging; near head_dim both are small.
pub const BLOCK: usize = 64;

/// Most elements of a step's scores, unless one block of queries has more: few enough to stay in a core's
/// cache between the operations of a step.
const STEP_ELEMENTS: usize = 1 << 18;

/// The mask by window and documents, beside the causal mask.
#[derive(Clone, Debug)]
pub struct Visible<B: OpBackend> {
    /// With a window w, a query sees its own key and the w − 1 before it.
    pub window: Option<usize>,
    /// The start of each position's document, `[batch, seq_len]`.
    pub documents: Option<Tensor<B, 2, Int>>,
    /// kv heads.
    pub kv_heads: usize,
}

impl<B: OpBackend> Visible<B> {
    /// Whether the query at `query` is too far from every key of a range that ends before `end`.
    fn out_of_window(&self, query: usize, end: usize) -> bool {
        self.window.is_some_and(|w| query + 1 >= end + w)
    }

    /// Masks scores `[rows, group, queries, keys]`.
    fn mask(&self, scores: Tensor<B, 4>, block: Block) -> Tensor<B, 4> {
        let cut = self.out_of_window(block.queries.end - 1, block.keys.start + 1);
        let causal = block.keys.end <= block.queries.start + 1;
        if causal && !cut && self.documents.is_none() {
            return scores;
        }
        let documents = self.documents.as_ref();
        let mask: Tensor<B, 4, Bool> =
            attention_mask(&block, self.window, documents, &scores.device());
        let [batch, _, queries, keys] = mask.dims();
        let mask = match batch {
            1 => mask,
            _ => mask.expand([batch, self.kv_heads, queries, keys]).reshape([
                batch * self.kv_heads,
                1,
                queries,
                keys,
            ]),
        };
        let shape = scores.shape();
        scores.mask_fill(mask.expand(shape), MASKED)
    }
}

/// The operation's inputs: rows is batch · kv_heads, group the query heads per kv head.
#[derive(Clone, Debug)]
pub struct Tokens<B: OpBackend> {
    /// Queries times the softmax scale, `[rows, group, tokens, head_dim]`.
    pub q: Tensor<B, 4>,
    /// Keys, `[rows, 1, tokens, head_dim]`.
    pub k: Tensor<B, 4>,
    /// Values, `[rows, 1, tokens, head_dim]`.
    pub v: Tensor<B, 4>,
    /// Directions of norm at most 1, `[rows, 1, tokens, head_dim]`.
    pub w: Tensor<B, 4>,
    /// β in [0, 2], `[rows, 1, tokens, 1]`.
    pub beta: Tensor<B, 4>,
    /// ℓ ≤ 0, natural logarithm, `[rows, group, tokens]`.
    pub log_decay: Option<Tensor<B, 3>>,
}

impl<B: OpBackend> Tokens<B> {
    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.q.dims()[2]
    }

    /// `len` tokens from `first` on.
    pub fn narrow(&self, first: usize, len: usize) -> Self {
        let cut = |x: &Tensor<B, 4>| x.clone().narrow(2, first, len);
        Tokens {
            q: cut(&self.q),
            k: cut(&self.k),
            v: cut(&self.v),
            w: cut(&self.w),
            beta: cut(&self.beta),
            log_decay: self.log_decay.as_ref().map(|x| x.clone().narrow(2, first, len)),
        }
    }
}

/// Queries that travel right to left over blocks of keys, with their online softmax.
struct TravellingQueries<B: OpBackend> {
    /// Queries transformed to the position they have reached, `[rows, group, queries, head_dim]`.
    q: Tensor<B, 4>,
    /// Σ ℓ from that position to the query, `[rows, group, queries, 1]`.
    decay: Option<Tensor<B, 4>>,
    /// Row maximum, `[rows, group, queries, 1]`.
    max: Tensor<B, 4>,
    /// Σ exp(score − max), `[rows, group, queries, 1]`.
    sum: Tensor<B, 4>,
    /// Σ exp(score − max) v, `[rows, group, queries, head_dim]`.
    out: Tensor<B, 4>,
    /// Positions of the queries.
    at: Range<usize>,
}

impl<B: OpBackend> TravellingQueries<B> {
    /// Queries that have seen no key.
    fn new(q: Tensor<B, 4>, decay: Option<Tensor<B, 4>>, at: Range<usize>) -> Self {
        let [rows, group, queries, _] = q.dims();
        let one = [rows, group, queries, 1];
        let device = q.device();
        TravellingQueries {
            max: Tensor::full(one, MASKED, &device),
            sum: Tensor::zeros(one, &device),
            out: Tensor::zeros(q.shape(), &device),
            q,
            decay,
            at,
        }
    }

    /// Adds keys with these scores `[rows, group, queries, keys]`, plus `shift`
    /// `[rows, group, queries, 1]`.
    fn weigh(self, scores: Tensor<B, 4>, shift: Option<Tensor<B, 4>>, v: Tensor<B, 4>) -> Self {
        // Detached: the softmax does not depend on the maximum.
        let mut block_max = scores.clone().detach().max_dim(3);
        if let Some(shift) = &shift {
            block_max = block_max + shift.clone().detach();
        }
        let max = self.max.clone().max_pair(block_max);
        let correction = (self.max - max.clone()).exp();
        // One pass over the scores for both.
        let less = shift.map_or(max.clone(), |shift| max.clone() - shift);
        let weights = (scores - less).exp();
        TravellingQueries {
            sum: self.sum * correction.clone() + weights.clone().sum_dim(3),
            out: self.out * correction + weights.mm(v),
            max,
            ..self
        }
    }

    /// Attends to the block of tokens right before the position reached, and moves to before it.
    fn pass(mut self, block: &TokenBlock<B>, visible: &Visible<B>) -> Self {
        // The oldest keys of a decode state are one long block.
        let [rows, group, queries, _] = self.q.dims();
        let size = (STEP_ELEMENTS / (rows * group * queries)).max(BLOCK);
        for start in (block.keys.first..block.keys.end()).step_by(size) {
            let end = (start + size).min(block.keys.end());
            self = self.see(block.keys.slice(start..end), visible);
        }
        match &block.transform {
            Some(transform) => self.cross(transform),
            None => self,
        }
    }

    /// Attends to keys transformed to the position that the queries have reached.
    fn see(self, keys: TransformedKv<B>, visible: &Visible<B>) -> Self {
        if visible.out_of_window(self.at.start, keys.end()) {
            return self;
        }
        let mut scores = self.q.clone().mm(keys.k.clone().transpose());
        if let Some(decay) = keys.decay.clone() {
            // Repeated first: a broadcast sum of this shape is slow on the CPU.
            scores = scores + decay.repeat_dim(2, self.at.len());
        }
        let block = Block { queries: self.at.clone(), keys: keys.first..keys.end() };
        let way = self.decay.clone();
        self.weigh(visible.mask(scores, block), way, keys.v)
    }

    /// Moves the queries to before the tokens of `carry`.
    fn cross(self, transform: &BlockTransform<B>) -> Self {
        TravellingQueries {
            q: self.q.clone() - self.q.mm(transform.removed.clone().transpose()),
            decay: added(self.decay, transform.decay.clone()),
            ..self
        }
    }

    /// Prepends the queries of the block before, which are at the same position.
    fn after(self, block: TravellingQueries<B>) -> Self {
        let cat = |a, b| Tensor::cat(vec![a, b], 2);
        TravellingQueries {
            q: cat(block.q, self.q),
            decay: block.decay.zip(self.decay).map(|(a, b)| cat(a, b)),
            max: cat(block.max, self.max),
            sum: cat(block.sum, self.sum),
            out: cat(block.out, self.out),
            at: block.at.start..self.at.end,
        }
    }
}

/// Prefix and suffix sums of ℓ inside blocks.
struct BlockDecays<B: OpBackend> {
    /// From the block's first token to each, inclusive, `[rows, group, blocks, block]`.
    to: Tensor<B, 4>,
    /// Over the tokens after each, `[rows, group, blocks, block]`.
    after: Tensor<B, 4>,
}

impl<B: OpBackend> BlockDecays<B> {
    /// From ℓ `[rows, group, blocks, block]`.
    fn new(log_decay: Tensor<B, 4>) -> Self {
        BlockDecays { after: sums_after(log_decay.clone(), 3), to: log_decay.cumsum(3) }
    }
}

/// A chunk of tokens, split into blocks.
struct QueryChunk<B: OpBackend> {
    tokens: Tokens<B>,
    blocks: TransformedBlocks<B>,
    decays: Option<BlockDecays<B>>,
    /// Tokens per block.
    block_size: usize,
    /// Position of the first token.
    first: usize,
}

impl<B: OpBackend> QueryChunk<B> {
    fn new(tokens: Tokens<B>, block_size: usize, first: usize) -> Self {
        let Tokens { q, k, w, beta, log_decay, .. } = tokens.clone();
        let blocks =
            TransformedBlocks::new([q, k, w, beta].map(|x| padded(x, block_size)), block_size);
        let decays = log_decay.map(|x| {
            let [rows, group, len] = x.dims();
            let x = padded(copied(x).reshape([rows, group, len, 1]), block_size);
            BlockDecays::new(x.reshape([rows, group, len.div_ceil(block_size), block_size]))
        });
        QueryChunk { tokens, blocks, decays, block_size, first }
    }

    fn count(&self) -> usize {
        self.tokens.len().div_ceil(self.block_size)
    }

    /// The tokens of block `n` in this chunk, without padding.
    fn range(&self, n: usize) -> Range<usize> {
        n * self.block_size..((n + 1) * self.block_size).min(self.tokens.len())
    }

    /// Positions of a range of this chunk's tokens.
    fn positions(&self, range: &Range<usize>) -> Range<usize> {
        self.first + range.start..self.first + range.end
    }

    /// The queries of block `n`, after attending to the keys of their own block.
    fn rows(&self, n: usize, visible: &Visible<B>) -> TravellingQueries<B> {
        let range = self.range(n);
        let len = range.len();
        let decay = self.decays.as_ref().map(|d| one(&d.to, n, len).swap_dims(2, 3));
        let at = self.positions(&range);
        let rows = TravellingQueries::new(block_of(&self.blocks.q, n, len), decay, at.clone());
        let mut scores = block_of(&self.blocks.scores, n, len).narrow(3, 0, len);
        if let Some(log_decay) = &self.tokens.log_decay {
            let own = Block { queries: range.clone(), keys: range.clone() };
            scores = scores + decay_between(log_decay, &own);
        }
        let scores = visible.mask(scores, Block { queries: at.clone(), keys: at });
        rows.weigh(scores, None, self.tokens.v.clone().narrow(2, range.start, len))
    }

    /// Block `n` as later queries attend to it.
    fn block(&self, n: usize) -> TokenBlock<B> {
        let range = self.range(n);
        let len = range.len();
        let keys = TransformedKv {
            k: block_of(&self.blocks.k, n, len),
            v: self.tokens.v.clone().narrow(2, range.start, len),
            decay: self.decays.as_ref().map(|d| one(&d.after, n, len)),
            first: self.first + range.start,
        };
        let decay =
            self.decays.as_ref().map(|d| one(&d.to, n, self.block_size).narrow(3, len - 1, 1));
        let head_dim = self.blocks.removed.dims()[4];
        let removed = block_of(&self.blocks.removed, n, head_dim);
        TokenBlock { keys, transform: Some(BlockTransform { removed, decay }) }
    }
}

/// The first `len` rows of block `n` of `[rows, heads, blocks, block, channels]`.
fn block_of<B: OpBackend>(x: &Tensor<B, 5>, n: usize, len: usize) -> Tensor<B, 4> {
    x.clone().narrow(2, n, 1).squeeze_dim::<4>(2).narrow(2, 0, len)
}

/// The first `len` entries of block `n` of `[rows, heads, blocks, block]`, as `[rows, heads, 1, len]`.
fn one<B: OpBackend>(x: &Tensor<B, 4>, n: usize, len: usize) -> Tensor<B, 4> {
    x.clone().narrow(2, n, 1).narrow(3, 0, len)
}

/// Pads `[rows, heads, tokens, channels]` with zeros to whole blocks: β = 0 there makes the transforms the
/// identity.
fn padded<B: OpBackend>(x: Tensor<B, 4>, block: usize) -> Tensor<B, 4> {
    let [rows, heads, tokens, channels] = x.dims();
    let missing = tokens.next_multiple_of(block) - tokens;
    if missing == 0 {
        return x;
    }
    let zeros = Tensor::zeros([rows, heads, missing, channels], &x.device());
    Tensor::cat(vec![x, zeros], 2)
}

/// The outputs `[rows, group, tokens, head_dim]` of tokens that follow `past`, and the tokens as blocks for
/// later queries.
///
/// `past` is oldest first; the first token is at position `first`.
pub fn attend<B: OpBackend>(
    tokens: &Tokens<B>,
    visible: &Visible<B>,
    past: &[TokenBlock<B>],
    first: usize,
) -> (Tensor<B, 4>, Vec<TokenBlock<B>>) {
    let [rows, group, len, _] = tokens.q.dims();
    let block_size = len.next_power_of_two().min(BLOCK);
    let limit =
        (STEP_ELEMENTS / (rows * group * block_size)).next_multiple_of(block_size).max(block_size);
    // With a window, queries of a longer chunk would visit mostly keys outside it.
    let size = visible.window.map_or(limit, |w| limit.min(w.next_multiple_of(block_size)));

    let mut blocks: Vec<TokenBlock<B>> = past.to_vec();
    let mut outputs = vec![];
    for start in (0..len).step_by(size) {
        let tokens = tokens.narrow(start, size.min(len - start));
        let chunk = QueryChunk::new(tokens, block_size, first + start);
        let before = blocks.len();
        blocks.extend((0..chunk.count()).map(|n| chunk.block(n)));
        let mut rows = chunk.rows(chunk.count() - 1, visible);
        for n in (0..chunk.count() - 1).rev() {
            rows = rows.pass(&blocks[before + n], visible).after(chunk.rows(n, visible));
        }
        for block in blocks[..before].iter().rev() {
            if visible.out_of_window(rows.at.start, block.keys.end()) {
                break;
            }
            rows = rows.pass(block, visible);
        }
        outputs.push(rows.out / rows.sum);
    }
    let blocks = blocks.split_off(past.len());
    (if outputs.len() == 1 { outputs.remove(0) } else { Tensor::cat(outputs, 2) }, blocks)
}
