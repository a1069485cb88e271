//! What the kernels read and write: their arguments, and rows of vectors between global and shared memory.

use burn::tensor::{Element, bf16};
use cubecl::prelude::*;

use super::CHUNK_TOKENS;
use crate::attention::flash::{HeadChunks, HeadPairs};
use crate::tile::matrix::{Matrix, Product, WarpTile, read_rows, write_rows};
use crate::tile::rows::{fetch, fetch_to, start_load, store};
use crate::tile::{Accumulator, CHUNK, Chunk, Pair, RowStrides, exp2};

/// How a token's value enters the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Update {
    /// As it is.
    Additive,
    /// Less what the decayed state holds for its key.
    Delta,
}

/// The compile-time configuration of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ChunkConfig {
    /// Channels of a query and a key, a multiple of 16, at most 128.
    pub head_dim: usize,
    /// Channels of a value, a multiple of 16.
    pub value_dim: usize,
    /// Channels of a value that are in shared memory at a time: 16, 32 or 64, a divisor of `value_dim`.
    pub columns: usize,
    /// The update.
    pub update: Update,
    /// Whether values have a weight, β.
    pub weighted: bool,
}

impl ChunkConfig {
    /// Parts of a value.
    pub const fn parts(&self) -> usize {
        self.value_dim / self.columns
    }

    /// Whether the update is the delta rule.
    pub const fn is_delta(&self) -> bool {
        matches!(self.update, Update::Delta)
    }
}

/// The states of rows before their first tokens and after their last, `[rows, head_dim, value_dim]` in f32.
#[derive(CubeType, CubeLaunch)]
pub struct EndStates {
    /// Those before, if they are given.
    pub before: Array<Pair>,
    /// Those after, if they are wanted.
    pub after: Array<Pair>,
}

/// Which of the [`EndStates`] there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct HandOver {
    /// Whether states before the first tokens are given; else they are 0.
    pub before: bool,
    /// Whether states after the last tokens are wanted.
    pub after: bool,
}

/// The sizes of a call.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Sizes {
    /// Tokens of a row.
    pub tokens: u32,
    /// Chunks of a row.
    pub chunks: u32,
    /// Query heads of a row.
    pub group: u32,
    /// Rows of a sequence.
    pub kv_heads: u32,
}

/// What all kernels read, in the notation of `docs/chunked.md`.
#[derive(CubeType, CubeLaunch)]
pub struct ChunkInputs {
    /// `[batch, heads, tokens, head_dim]`
    pub q: HeadChunks,
    /// `[batch, kv_heads, tokens, head_dim]`
    pub k: HeadChunks,
    /// The sums P of log decays inside chunks, base 2, `[rows, chunks, 64]`.
    pub sums: Array<f32>,
    /// β, `[rows, tokens]`, if values are weighted.
    pub beta: Array<f32>,
}

/// A chunk of a row.
#[derive(CubeType, Clone, Copy)]
pub struct ChunkOf {
    /// The row.
    pub row: usize,
    /// The number of the chunk in its row.
    pub chunk: usize,
    /// The number of the chunk among all.
    pub number: usize,
    /// Its first token.
    pub first: usize,
    /// The index of that token in `[rows, tokens]`.
    pub token: usize,
    /// Its tokens.
    pub count: usize,
    /// The row's sequence.
    batch: usize,
    /// The row's kv head.
    head: usize,
}

#[cube]
impl ChunkOf {
    /// Chunk `chunk` of row `row`.
    pub fn new(row: usize, chunk: usize, sizes: &Sizes) -> ChunkOf {
        let (tokens, chunks) = (sizes.tokens as usize, sizes.chunks as usize);
        let kv_heads = sizes.kv_heads as usize;
        let first = chunk * CHUNK_TOKENS;
        ChunkOf {
            row,
            chunk,
            number: row * chunks + chunk,
            first,
            token: row * tokens + first,
            count: min(tokens - first, CHUNK_TOKENS.runtime()),
            batch: row / kv_heads,
            head: row % kv_heads,
        }
    }

    /// Where its tokens lie in a tensor of kv heads.
    pub fn tokens(&self, strides: &RowStrides) -> TokensOf {
        self.tokens_of(self.head, strides)
    }

    /// Where its tokens lie in a tensor of query heads, for query head `head` of the row.
    pub fn queries(&self, head: usize, strides: &RowStrides, sizes: &Sizes) -> TokensOf {
        self.tokens_of(self.head * sizes.group as usize + head, strides)
    }

    fn tokens_of(&self, head: usize, strides: &RowStrides) -> TokensOf {
        let stride = strides.row as usize;
        TokensOf {
            base: strides.base(self.batch, head) + self.first * stride,
            stride,
            count: self.count,
        }
    }
}

/// Where the tokens of a chunk lie in a tensor of heads.
#[derive(CubeType, Clone, Copy)]
pub struct TokensOf {
    /// The first chunk of channels of the first token.
    pub base: usize,
    /// Chunks of channels between tokens.
    pub stride: usize,
    /// Tokens.
    pub count: usize,
}

#[cube]
impl TokensOf {
    /// Starts to copy `columns` channels from chunk `first` on to shared memory (see [`start_load`]).
    pub fn start_load(
        &self,
        arena: &mut SharedMemory<Chunk>,
        x: &HeadChunks,
        first: usize,
        #[comptime] to: Matrix,
        #[comptime] columns: usize,
    ) {
        let base = self.base + first;
        start_load(arena, &x.chunks, base, self.stride, self.count, to, CHUNK_TOKENS, columns);
    }

    /// Starts to read `columns` channels from chunk `first` on into registers (see [`fetch`]).
    pub fn fetch(&self, x: &HeadChunks, first: usize, #[comptime] columns: usize) -> Array<Chunk> {
        fetch(&x.chunks, self.base + first, self.stride, self.count, CHUNK_TOKENS, columns)
    }

    /// As [`fetch`](Self::fetch), to these registers.
    pub fn fetch_to(
        &self,
        own: &mut Array<Chunk>,
        x: &HeadChunks,
        first: usize,
        #[comptime] columns: usize,
    ) {
        let base = self.base + first;
        fetch_to(own, &x.chunks, base, self.stride, self.count, CHUNK_TOKENS, columns);
    }

    /// Writes `columns` channels from shared memory (see [`store`]).
    pub fn store(
        &self,
        arena: &SharedMemory<Chunk>,
        to: &mut HeadChunks,
        #[comptime] from: Matrix,
        #[comptime] columns: usize,
    ) {
        let (base, stride) = (self.base, self.stride);
        store(arena, &mut to.chunks, base, stride, self.count, from, CHUNK_TOKENS, columns);
    }

    /// Reads an accumulator (see [`read_rows`]).
    pub fn read(
        &self,
        acc: &mut Accumulator,
        from: &HeadPairs<bf16>,
        tile: &WarpTile,
        #[comptime] p: Product,
    ) {
        let pairs = comptime!(CHUNK / 2);
        let (base, stride) = (self.base * pairs, self.stride * pairs);
        read_rows(acc, &from.pairs, tile, base, stride, self.count, p);
    }

    /// Writes an accumulator to channels from chunk `first` on (see [`write_rows`]).
    pub fn write<O: Numeric>(
        &self,
        to: &mut HeadPairs<O>,
        acc: &Accumulator,
        tile: &WarpTile,
        first: usize,
        #[comptime] p: Product,
    ) {
        let pairs = comptime!(CHUNK / 2);
        let (base, stride) = ((self.base + first) * pairs, self.stride * pairs);
        write_rows(&mut to.pairs, acc, tile, base, stride, self.count, p);
    }
}

/// The types of outputs. cubecl adds the type to the name of a kernel that is generic over a `Numeric`, and then
/// [`blocks_per_multiprocessor`](crate::tile::roles::blocks_per_multiprocessor) does not find it.
pub trait OutputElement: Numeric + Element {}

impl OutputElement for bf16 {}
impl OutputElement for f32 {}

/// The factors of a chunk's tokens, in shared memory.
#[derive(CubeType)]
pub struct Factors {
    /// The decay from the chunk's start to each token, e^P.
    pub since_start: SharedMemory<f32>,
    /// The decay from each token to the chunk's end.
    pub until_end: SharedMemory<f32>,
    /// P, base 2.
    pub sums: SharedMemory<f32>,
    /// β, 1 where values have no weight.
    pub beta: SharedMemory<f32>,
}

#[cube]
impl Factors {
    /// Without values.
    pub fn new() -> Factors {
        Factors {
            since_start: SharedMemory::<f32>::new(CHUNK_TOKENS),
            until_end: SharedMemory::<f32>::new(CHUNK_TOKENS),
            sums: SharedMemory::<f32>::new(CHUNK_TOKENS),
            beta: SharedMemory::<f32>::new(CHUNK_TOKENS),
        }
    }

    /// Reads those of a chunk. The block must synchronise before and after.
    pub fn load(&mut self, inputs: &ChunkInputs, of: &ChunkOf, #[comptime] config: ChunkConfig) {
        let ahead = FactorsAhead::fetch(inputs, of, config);
        self.put(&ahead);
    }

    /// Writes what has been fetched.
    pub fn put(&mut self, ahead: &FactorsAhead) {
        let token = UNIT_POS as usize;
        if token < CHUNK_TOKENS {
            self.since_start[token] = exp2(ahead.sum);
            self.until_end[token] = exp2(min(ahead.last - ahead.sum, 0f32));
            self.sums[token] = ahead.sum;
            self.beta[token] = ahead.beta;
        }
    }

    /// The decay from token s to a token t at or after it.
    pub fn between(&self, t: usize, s: usize) -> f32 {
        exp2(min(self.sums[t] - self.sums[s], 0f32))
    }

    /// The decay over the chunk.
    pub fn whole(&self) -> f32 {
        self.since_start[comptime!(CHUNK_TOKENS - 1)]
    }
}

/// A token's numbers of a chunk to come, in registers.
#[derive(CubeType)]
pub struct FactorsAhead {
    sum: f32,
    last: f32,
    beta: f32,
}

#[cube]
impl FactorsAhead {
    /// Reads them.
    pub fn fetch(
        inputs: &ChunkInputs,
        of: &ChunkOf,
        #[comptime] config: ChunkConfig,
    ) -> FactorsAhead {
        let token = UNIT_POS as usize % CHUNK_TOKENS;
        let base = of.number * CHUNK_TOKENS;
        let mut beta = f32::cast_from(1f32);
        if comptime!(config.weighted) {
            beta = 0f32;
            if token < of.count {
                beta = inputs.beta[of.token + token];
            }
        }
        FactorsAhead {
            sum: inputs.sums[base + token],
            last: inputs.sums[base + comptime!(CHUNK_TOKENS - 1)],
            beta,
        }
    }
}
