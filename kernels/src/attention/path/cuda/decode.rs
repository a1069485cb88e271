//! Decoding on CUDA: parts of the past in halves, as in the other passes (`docs/path.md`, "Decoding").
//!
//! A launch appends a token: it moves the keys of the newest block, and the token's queries to the end of each part.
//! Then the flash core attends to the cache, whose tiles of keys each lie in one part.

use burn::tensor::{DType, Tensor, bf16, s};
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use super::blocks::{BLOCK, MovedBlocks};
use super::split::joined;
use super::{Call, Path};
use crate::Cuda;
use crate::attention::decay::{DecayBiases, DecaySums, DecaySumsCache, OptionalDecay};
use crate::attention::flash::decode::{KEYS_PER_WARP, WARPS};
use crate::attention::flash::hooks::{
    Hooks, LaunchOf, NoBiases, PlainOperands, ScaledScore, TileQueries,
};
use crate::attention::flash::mask::QueryBlock;
use crate::attention::flash::problem::{KernelConfig, ProblemShape};
use crate::attention::flash::weight::{SoftmaxArgs, SoftmaxWeight, sinks};
use crate::attention::flash::{
    CacheBuffer, FlashAttention, Strides, as_u32, decode, expired, padded, strides,
};
use crate::attention::path::one_after_another;
use crate::attention::path::token_blocks::BlockTransform;
use crate::backend::{primitive, tensor};
use crate::cuda::{CudaTensor, buffer, contiguous, empty, narrow, unshare, zeros};
use crate::ops::matmul::MatMul;
use crate::tile::warpgroup::RowsAt;
use crate::tile::{AFragments, Bf16Pair};

// A tile of keys lies in one block.
const _: () = assert!(WARPS * KEYS_PER_WARP == BLOCK);

/// The tensors of some tokens, as in [`PathInputs`](crate::attention::path::op::PathInputs).
#[derive(Clone, Debug)]
pub struct Tokens {
    /// Queries, `[batch, heads, tokens, head_dim]` in bf16.
    pub q: CudaTensor,
    /// Keys, `[batch, kv_heads, tokens, head_dim]` in bf16.
    pub k: CudaTensor,
    /// Values, like k.
    pub v: CudaTensor,
    /// Directions of norm at most 1, like k, in f32.
    pub w: CudaTensor,
    /// β in [0, 2], `[batch, kv_heads, tokens, 1]` in f32.
    pub beta: CudaTensor,
    /// ℓ ≤ 0, `[batch, heads, tokens]` in f32.
    pub log_decay: Option<CudaTensor>,
}

impl Tokens {
    /// The sequences (dimension 0) or tokens (2) in a range.
    fn narrow(&self, dim: usize, range: std::ops::Range<usize>) -> Self {
        let cut = |x: &CudaTensor| narrow(x, dim, range.clone());
        Tokens {
            q: cut(&self.q),
            k: cut(&self.k),
            v: cut(&self.v),
            w: cut(&self.w),
            beta: cut(&self.beta),
            log_decay: self.log_decay.as_ref().map(cut),
        }
    }

    fn len(&self) -> usize {
        self.q.meta.shape()[2]
    }
}

/// Keys, values and transforms of the tokens so far.
///
/// Full blocks are in parts of 1, 2, 4, … blocks, by the bits of their number: the largest part is the oldest.
#[derive(Clone, Debug)]
pub struct PathKvCache {
    /// Keys at the ends of their parts, those of the newest block at the newest token,
    /// `[batch, kv_heads, tokens, head_dim]` in bf16.
    keys: CacheBuffer,
    /// `[batch, kv_heads, tokens, head_dim]` in bf16
    values: CacheBuffer,
    /// R of the part of 2^i blocks, if there is one, `[levels, batch, kv_heads, head_dim, head_dim]` in f32.
    transforms: CudaTensor,
    /// Of the newest block, which is not full, `[batch, kv_heads, 64, head_dim]` in f32: keys at the newest token, w
    /// and Y.
    newest: [CudaTensor; 3],
    decay: Option<DecaySumsCache>,
    /// Tokens that have left the window and the cache, a multiple of 64.
    dropped: usize,
}

impl PathKvCache {
    /// An empty cache for tokens like these, with room for `capacity` of them.
    pub fn new(tokens: &Tokens, capacity: usize) -> Self {
        let k = &tokens.k;
        let [batch, kv_heads, _, head_dim]: [usize; 4] = k.meta.shape().dims();
        let heads = tokens.q.meta.shape()[1];
        let held = || CacheBuffer::new(k, [batch, kv_heads, head_dim], k.dtype, capacity);
        let levels = (capacity / BLOCK).max(1).ilog2() as usize + 1;
        let of_block = || zeros(k, &[batch, kv_heads, BLOCK, head_dim], DType::F32);
        let sums = || DecaySumsCache::new(k, [batch, heads], capacity);
        PathKvCache {
            keys: held(),
            values: held(),
            transforms: zeros(k, &[levels, batch, kv_heads, head_dim, head_dim], DType::F32),
            newest: [of_block(), of_block(), of_block()],
            decay: tokens.log_decay.as_ref().map(|_| sums()),
            dropped: 0,
        }
    }

    /// Elements of all buffers.
    pub fn elements(&self) -> usize {
        let of = |x: &CudaTensor| x.meta.shape().num_elements();
        [&self.keys, &self.values].map(CacheBuffer::elements).iter().sum::<usize>()
            + of(&self.transforms)
            + self.newest.iter().map(of).sum::<usize>()
            + self.decay.as_ref().map_or(0, DecaySumsCache::elements)
    }

    /// The position of the next token.
    fn position(&self) -> usize {
        self.dropped + self.keys.rows()
    }

    /// Appends tokens one by one and returns their outputs, `[batch, heads, tokens, head_dim]`.
    pub(in crate::attention::path) fn extend(&mut self, op: &Path, tokens: &Tokens) -> CudaTensor {
        let outputs = (0..tokens.len()).map(|t| {
            let token = tokens.narrow(2, t..t + 1);
            let queries = self.append(op, &token);
            let output = self.attend(op, &token, queries);
            self.close_block();
            tensor::<Cuda, 4>(output)
        });
        primitive(one_after_another(outputs.collect(), 2))
    }

    /// Fills an empty cache with tokens, whose outputs come from elsewhere, at most `most` sequences at a time.
    pub(in crate::attention::path) fn fill(&mut self, op: &Path, tokens: &Tokens, most: usize) {
        let full = tokens.len() / BLOCK * BLOCK;
        if full > 0 {
            let blocks = tokens.narrow(2, 0..full);
            let batch = self.newest[0].meta.shape()[0];
            let (keys, transforms) = (0..batch)
                .step_by(most)
                .map(|first| {
                    let Tokens { q, k, v, w, beta, log_decay } =
                        &blocks.narrow(0, first..batch.min(first + most));
                    let call = Call::new(op, [q, k, v, w, beta], log_decay.as_ref(), None);
                    let MovedBlocks { k, r, .. } = call.blocks.moved();
                    let r = joined::<6>(&r, 3).squeeze_dim::<5>(3);
                    (tensor::<Cuda, 4>(k).swap_dims(1, 2), r)
                })
                .unzip();
            let keys = one_after_another(keys, 0);
            let (k, parts) = merge_all(keys, one_after_another(transforms, 0));
            self.keys.append(primitive(k.cast(DType::BF16)));
            self.values.append(blocks.v);
            if let (Some(sums), Some(log_decay)) = (&mut self.decay, &blocks.log_decay) {
                sums.append(log_decay);
            }
            for (level, transform) in parts {
                self.keep_transform(level, transform);
            }
        }
        for t in full..tokens.len() {
            self.append(op, &tokens.narrow(2, t..t + 1));
        }
    }

    /// Appends a token; returns its queries moved to the ends of the parts,
    /// `[levels, batch, heads, padded(head_dim)]` in bf16.
    fn append(&mut self, op: &Path, token: &Tokens) -> CudaTensor {
        let old = expired(op.window, self.keys.rows(), 1);
        self.keys.drop_first(old);
        self.values.drop_first(old);
        self.dropped += old;
        if let (Some(sums), Some(log_decay)) = (&mut self.decay, &token.log_decay) {
            sums.drop_first(old);
            sums.append(log_decay);
        }
        let (position, held) = (self.position(), self.keys.rows());
        self.keys.add(1);
        self.values.add(1);
        self.newest.iter_mut().for_each(unshare);
        let [batch, heads, _, head_dim]: [usize; 4] = token.q.meta.shape().dims();
        let kv_heads = token.k.meta.shape()[1];
        let levels = self.transforms.meta.shape()[0];
        let shape = [levels, batch, heads, padded(head_dim)];
        let queries = empty(&token.q, &shape, DType::BF16);
        let config =
            AppendConfig { head_dim, padded_head_dim: padded(head_dim), group: heads / kv_heads };
        let [keys, w, y] = &self.newest;
        // SAFETY: a block handles the token of one kv head.
        unsafe {
            append::launch_unchecked::<CudaRuntime>(
                &token.q.client,
                CubeCount::Static(as_u32(batch * kv_heads), 1, 1),
                CubeDim::new_1d(THREADS as u32),
                TokenLaunch::new(
                    rows(&token.q),
                    rows(&token.k),
                    rows(&token.v),
                    rows(&token.w),
                    rows(&token.beta),
                ),
                NewestBlockLaunch::new(buffer(keys, 1), buffer(w, 1), buffer(y, 1)),
                rows(self.keys.buffer()),
                rows(self.values.buffer()),
                buffer(&self.transforms, 1),
                buffer(&queries, 1),
                as_u32(kv_heads),
                as_u32(position),
                as_u32(held),
                config,
            );
        }
        queries
    }

    /// The output of the newest token, whose `queries` have been moved.
    fn attend(&self, op: &Path, token: &Tokens, queries: CudaTensor) -> CudaTensor {
        let newest_block = (self.position() - 1) / BLOCK;
        let queries = MovedQueries { queries, first_block: self.dropped / BLOCK, newest_block };
        match &self.decay {
            Some(sums) => self.attend_with::<DecayBiases>(op, token, queries, Some(sums.held())),
            None => self.attend_with::<NoBiases>(op, token, queries, None),
        }
    }

    fn attend_with<B: OptionalDecay>(
        &self,
        op: &Path,
        token: &Tokens,
        queries: MovedQueries,
        decay: Option<DecaySums>,
    ) -> CudaTensor {
        let hooks = DecodeHooks { queries, decay, biases: std::marker::PhantomData::<B> };
        let inputs = [&token.q, &self.keys.held(), &self.values.held()];
        let flash = FlashAttention::new(inputs, op.scale, hooks).window(op.window);
        let [o, _] = decode(&flash, None);
        o
    }

    /// If the newest block is full, makes it a part, and merges it with those of its size.
    fn close_block(&mut self) {
        let blocks = self.position() / BLOCK;
        if !self.position().is_multiple_of(BLOCK) {
            return;
        }
        let [_, w, y] = self.newest.each_ref().map(|x| tensor::<Cuda, 4>(x.clone()));
        let mut part = BlockTransform { removed: y.swap_dims(2, 3).mm(w), decay: None };
        let mut end = self.keys.rows() - BLOCK;
        let mut level = 0;
        while (blocks - 1) >> level & 1 == 1 {
            // Of an old part, the window may have left a few tokens or none.
            let first = end.saturating_sub(BLOCK << level);
            if first < end {
                self.keys.update(first..end, |keys| {
                    let keys = tensor::<Cuda, 4>(keys).cast(DType::F32);
                    let moved = keys.clone() - keys.mm(part.removed.clone());
                    primitive(moved.cast(DType::BF16))
                });
            }
            let earlier = tensor::<Cuda, 5>(narrow(&self.transforms, 0, level..level + 1));
            part = BlockTransform { removed: earlier.squeeze_dim(0), decay: None }.then(&part);
            end = first;
            level += 1;
        }
        self.keep_transform(level, part.removed);
    }

    /// Keeps R of the part of 2^`level` blocks.
    fn keep_transform(&mut self, level: usize, transform: Tensor<Cuda, 4>) {
        let transform = transform.unsqueeze::<5>();
        let levels = self.transforms.meta.shape()[0];
        let old = std::mem::replace(&mut self.transforms, primitive(transform.clone()));
        let mut all = tensor::<Cuda, 5>(old);
        if level >= levels {
            let more = Tensor::zeros_like(&transform).repeat_dim(0, level + 1 - levels);
            all = Tensor::cat(vec![all, more], 0);
        }
        let all = all.slice_assign(s![level..level + 1, .., .., .., ..], transform);
        self.transforms = contiguous(&primitive(all));
    }
}

/// Merges full blocks, whose keys `[batch, kv_heads, tokens, head_dim]` and transforms
/// `[batch, blocks, kv_heads, head_dim, head_dim]` are in f32, into parts: the keys at the ends of their parts, and the
/// transform of each part with the logarithm of its number of blocks.
fn merge_all(
    keys: Tensor<Cuda, 4>,
    transforms: Tensor<Cuda, 5>,
) -> (Tensor<Cuda, 4>, Vec<(usize, Tensor<Cuda, 4>)>) {
    let [batch, kv_heads, tokens, d] = keys.dims();
    let rows = batch * kv_heads;
    let mut keys = keys.reshape([1, rows, tokens, d]);
    let count = tokens / BLOCK;
    let mut transforms = transforms.swap_dims(1, 2).reshape([rows, count, d, d]);
    let mut parts = vec![];
    let mut level = 0;
    loop {
        let (count, part) = (transforms.dims()[1], BLOCK << level);
        if count % 2 == 1 {
            let last = transforms.clone().narrow(1, count - 1, 1);
            parts.push((level, last.reshape([batch, kv_heads, d, d])));
        }
        let pairs = count / 2;
        if pairs == 0 {
            break;
        }
        let halves = transforms.narrow(1, 0, 2 * pairs).reshape([rows, pairs, 2, d, d]);
        let [first, second] =
            [0, 1].map(|half| halves.clone().narrow(2, half, 1).reshape([rows, pairs, d, d]));
        let end = 2 * pairs * part;
        let pairs_of_keys = keys.clone().narrow(2, 0, end).reshape([rows, pairs, 2 * part, d]);
        let of_first = pairs_of_keys.clone().narrow(2, 0, part);
        let moved = of_first.clone() - of_first.mm(second.clone());
        let pairs_of_keys = pairs_of_keys.slice_assign(s![.., .., 0..part, ..], moved);
        let moved = pairs_of_keys.reshape([1, rows, end, d]);
        keys = keys.slice_assign(s![.., .., 0..end, ..], moved);
        let later = BlockTransform { removed: second, decay: None };
        transforms = BlockTransform { removed: first, decay: None }.then(&later).removed;
        level += 1;
    }
    (keys.reshape([batch, kv_heads, tokens, d]), parts)
}

/// The queries of one token at the ends of the cache's parts.
struct MovedQueries {
    /// `[levels, batch, heads, padded(head_dim)]` in bf16
    queries: CudaTensor,
    /// The block of the first key in the cache, and that of the token.
    first_block: usize,
    newest_block: usize,
}

/// The hooks of decoding, with biases `B`.
struct DecodeHooks<B> {
    queries: MovedQueries,
    decay: Option<DecaySums>,
    biases: std::marker::PhantomData<B>,
}

impl<B: OptionalDecay> Hooks for DecodeHooks<B> {
    type Operands = PlainOperands<bf16, QueriesOfParts>;
    type Biases = B;
    type Score = ScaledScore;
    type Weight = SoftmaxWeight;

    fn operands(&self) -> LaunchOf<PartQueries> {
        let MovedQueries { queries, first_block, newest_block } = &self.queries;
        let shape = queries.meta.shape();
        PartQueriesLaunch::new(
            buffer(queries, 2),
            as_u32(shape[1] * shape[2]),
            as_u32(*first_block),
            as_u32(*newest_block),
        )
    }

    fn biases(&self) -> LaunchOf<B::Args> {
        B::launch(self.decay.as_ref())
    }

    fn score(&self) {}

    fn weight(&self) -> LaunchOf<SoftmaxArgs> {
        sinks(None)
    }
}

/// The queries of parts as a kernel argument.
#[derive(CubeType, CubeLaunch)]
struct PartQueries {
    /// `[levels, batch · heads, padded_head_dim]`
    pairs: Array<Bf16Pair>,
    /// batch · heads
    rows: u32,
    /// The block of the first key.
    first_block: u32,
    /// The block of the query.
    newest_block: u32,
}

/// Each tile of keys meets the query at the end of its part.
struct QueriesOfParts;

/// The state of [`QueriesOfParts`].
#[derive(CubeType)]
struct PartState {
    /// The first key of the tile to come.
    column: usize,
    /// 0 in the newest block, then 1 + the level of the part.
    part: u32,
    /// A lane's two heads, as batch · heads + head.
    rows: Array<usize>,
}

#[cube]
impl TileQueries for QueriesOfParts {
    type Args = PartQueries;
    type State = PartState;

    const CHANGES_QUERIES: bool = false;

    fn queries_at(
        _args: &PartQueries,
        block: &QueryBlock,
        _column: usize,
        #[comptime] _config: KernelConfig,
    ) -> RowsAt {
        block.queries_at()
    }

    fn keys_at(
        _args: &PartQueries,
        block: &QueryBlock,
        column: usize,
        #[comptime] _config: KernelConfig,
    ) -> RowsAt {
        block.keys_at(column)
    }

    fn changes_queries(
        _block: &QueryBlock,
        _column: usize,
        #[comptime] _config: KernelConfig,
    ) -> bool {
        false.runtime()
    }

    fn begin(
        _args: &PartQueries,
        _problem: &ProblemShape,
        batch_heads: &Array<usize>,
        column: usize,
        #[comptime] _config: KernelConfig,
    ) -> PartState {
        let mut rows = Array::<usize>::new(2usize);
        rows[0] = batch_heads[0];
        rows[1] = batch_heads[1];
        PartState { column, part: 0u32.runtime(), rows }
    }

    fn turn_to_tile(
        state: &mut PartState,
        args: &PartQueries,
        q: &mut AFragments,
        next: usize,
        #[comptime] config: KernelConfig,
    ) {
        // The part of block b of the past has the level of the highest bit in which b and the newest block differ.
        let block = args.first_block + (state.column / BLOCK) as u32;
        let part = 32u32 - u32::leading_zeros(block ^ args.newest_block);
        if part != state.part {
            let half = comptime!(config.padded_head_dim / 2);
            let at = (part as usize - 1) * args.rows as usize;
            let lane = UNIT_POS_PLANE as usize % 4;
            let from_0 = (at + state.rows[0]) * half + lane;
            let from_1 = (at + state.rows[1]) * half + lane;
            #[unroll]
            for step in 0..comptime!(config.padded_head_dim / 16) {
                let q = q.index_mut(step);
                q[0] = args.pairs[from_0 + comptime!(step * 8)];
                q[1] = args.pairs[from_1 + comptime!(step * 8)];
                q[2] = args.pairs[from_0 + comptime!(step * 8 + 4)];
                q[3] = args.pairs[from_1 + comptime!(step * 8 + 4)];
            }
        }
        state.part = part;
        state.column = next;
    }
}

/// Threads per block of [`append`].
const THREADS: usize = 256;

/// Rows of channels.
#[derive(CubeType, CubeLaunch)]
struct Rows<E: Numeric> {
    values: Array<E>,
    strides: Strides,
}

fn rows<E: Numeric>(x: &CudaTensor) -> RowsLaunch<E, CudaRuntime> {
    RowsLaunch::new(buffer(x, 1), strides(x))
}

#[cube]
impl<E: Numeric> Rows<E> {
    /// The index of the first channel of a token.
    fn at(&self, batch: usize, head: usize, token: usize) -> usize {
        batch * self.strides.batch as usize
            + head * self.strides.head as usize
            + token * self.strides.token as usize
    }
}

/// A new token.
#[derive(CubeType, CubeLaunch)]
struct Token {
    /// `[batch, heads, 1, head_dim]`
    q: Rows<bf16>,
    /// `[batch, kv_heads, 1, head_dim]`
    k: Rows<bf16>,
    /// `[batch, kv_heads, 1, head_dim]`
    v: Rows<bf16>,
    /// `[batch, kv_heads, 1, head_dim]`
    w: Rows<f32>,
    /// `[batch, kv_heads, 1, 1]`
    beta: Rows<f32>,
}

/// The newest block, `[batch, kv_heads, 64, head_dim]` each.
#[derive(CubeType, CubeLaunch)]
struct NewestBlock {
    keys: Array<f32>,
    w: Array<f32>,
    y: Array<f32>,
}

/// What [`append`] is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct AppendConfig {
    head_dim: usize,
    padded_head_dim: usize,
    /// Query heads of a kv head.
    group: usize,
}

/// a·b by a warp, for rows of `dim` channels; the result is in all lanes.
#[cube]
fn dot(
    a: &SharedMemory<f32>,
    from_a: usize,
    b: &Array<f32>,
    from_b: usize,
    #[comptime] dim: usize,
) -> f32 {
    let lane = UNIT_POS_PLANE as usize;
    let mut sum = 0f32;
    #[unroll]
    for i in 0..comptime!(dim.div_ceil(32)) {
        let channel = comptime!(i * 32) + lane;
        if comptime!(dim.is_multiple_of(32)) || channel < dim {
            sum += a[from_a + channel] * b[from_b + channel];
        }
    }
    plane_sum(sum)
}

/// Appends a token, the one at `position`, after the `held` ones of the cache: moves the keys of the newest block, and
/// writes the `queries` at the ends of parts, `[levels, batch, heads, padded_head_dim]`.
///
/// - `keys`, `values`: the cache, `[batch, kv_heads, tokens, head_dim]`
/// - `transforms`: `[levels, batch, kv_heads, head_dim, head_dim]`
///
/// Grid: batch · kv_heads.
#[cube(launch_unchecked, address_type = "u64")]
fn append(
    token: &Token,
    newest: &mut NewestBlock,
    keys: &mut Rows<bf16>,
    values: &mut Rows<bf16>,
    transforms: &Array<f32>,
    queries: &mut Array<bf16>,
    kv_heads: u32,
    position: u32,
    held: u32,
    #[comptime] config: AppendConfig,
) {
    let AppendConfig { head_dim: dim, padded_head_dim: padded, group } = comptime!(config);
    let warps = comptime!(THREADS / 32);
    let row = CUBE_POS_X as usize;
    let (kv_heads, held) = (kv_heads as usize, held as usize);
    let (batch, kv_head) = (row / kv_heads, row % kv_heads);
    let unit = UNIT_POS as usize;
    let (lane, warp) = (unit % 32, unit / 32);
    let own = position as usize % BLOCK;
    let block_at = row * comptime!(BLOCK * dim);
    let own_at = block_at + own * dim;

    let mut w = SharedMemory::<f32>::new(dim);
    let mut y = SharedMemory::<f32>::new(comptime!(BLOCK * dim));
    let mut x = SharedMemory::<f32>::new(comptime!(group * dim));
    let mut moved = SharedMemory::<f32>::new(comptime!(group * dim));
    let mut w_by_w = SharedMemory::<f32>::new(BLOCK);
    let mut q_by_w = SharedMemory::<f32>::new(comptime!(group * BLOCK));

    if unit < dim {
        let direction = token.w.values[token.w.at(batch, kv_head, 0usize) + unit];
        w[unit] = direction;
        newest.w[own_at + unit] = direction;
        let key = token.k.values[token.k.at(batch, kv_head, 0usize) + unit];
        newest.keys[own_at + unit] = f32::cast_from(key);
        let to = keys.at(batch, kv_head, held) + unit;
        keys.values[to] = key;
        let to = values.at(batch, kv_head, held) + unit;
        values.values[to] = token.v.values[token.v.at(batch, kv_head, 0usize) + unit];
    }
    let mut at = unit;
    while at < comptime!(group * dim) {
        let from = token.q.at(batch, kv_head * group + at / dim, 0usize) + at % dim;
        x[at] = f32::cast_from(token.q.values[from]);
        at += THREADS;
    }
    let mut at = unit;
    while at < own * dim {
        y[at] = newest.y[block_at + at];
        at += THREADS;
    }
    sync_cube();

    // 1. The products with the block's directions, and its keys moved by the token's transform.
    let beta = token.beta.values[token.beta.at(batch, kv_head, 0usize)];
    let mut s = warp;
    while s <= own {
        let at = block_at + s * dim;
        let of_w = dot(&w, 0usize, &newest.w, at, dim);
        if lane == 0 {
            w_by_w[s] = of_w;
        }
        #[unroll]
        for member in 0..group {
            let of_q = dot(&x, comptime!(member * dim), &newest.w, at, dim);
            if lane == 0 {
                q_by_w[comptime!(member * BLOCK) + s] = of_q;
            }
        }
        if s < own {
            let of_key = beta * dot(&w, 0usize, &newest.keys, at, dim);
            let to = keys.at(batch, kv_head, held - own + s);
            let mut channel = lane;
            while channel < dim {
                let key = newest.keys[at + channel] - of_key * w[channel];
                newest.keys[at + channel] = key;
                keys.values[to + channel] = bf16::cast_from(key);
                channel += 32;
            }
        }
        s += warps;
    }
    sync_cube();

    // 2. y of the token, then its queries at the start of the block.
    if unit < dim {
        let mut sum = 0f32;
        for s in 0..own {
            sum += w_by_w[s] * y[s * dim + unit];
        }
        let of_token = beta * (w[unit] - sum);
        y[own * dim + unit] = of_token;
        newest.y[own_at + unit] = of_token;
    }
    sync_cube();
    let mut at = unit;
    while at < comptime!(group * dim) {
        let mut sum = 0f32;
        for s in 0..own + 1 {
            sum += q_by_w[at / dim * BLOCK + s] * y[s * dim + at % dim];
        }
        x[at] -= sum;
        at += THREADS;
    }
    sync_cube();

    // 3. The queries at the end of each part, from the newest to the oldest.
    let blocks = position / comptime!(BLOCK as u32);
    let kv_rows = CUBE_COUNT_X as usize;
    let mut level = 0usize;
    while (blocks >> level as u32) != 0 {
        if (blocks >> level as u32) & 1u32 == 1u32 {
            let mut at = unit;
            while at < comptime!(group * padded) {
                let (member, channel) = (at / padded, at % padded);
                let mut value = 0f32;
                if channel < dim {
                    value = x[member * dim + channel];
                }
                let to = (level * kv_rows + row) * comptime!(group * padded) + at;
                queries[to] = bf16::cast_from(value);
                at += THREADS;
            }
            if (blocks >> level as u32) != 1 {
                let transform = (level * kv_rows + row) * comptime!(dim * dim);
                let mut channel = warp;
                while channel < dim {
                    #[unroll]
                    for member in 0..group {
                        let at = comptime!(member * dim);
                        let removed = dot(&x, at, transforms, transform + channel * dim, dim);
                        if lane == 0 {
                            moved[at + channel] = x[at + channel] - removed;
                        }
                    }
                    channel += warps;
                }
                sync_cube();
                let mut at = unit;
                while at < comptime!(group * dim) {
                    x[at] = moved[at];
                    at += THREADS;
                }
                sync_cube();
            }
        }
        level += 1;
    }
}
