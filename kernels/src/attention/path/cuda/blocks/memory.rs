//! What the kernels read, and how it comes to shared memory and leaves registers.

use burn::tensor::bf16;
use cubecl::prelude::*;

use super::layout::{BLOCK, BlockConfig, Operand};
use super::product::{GROUPS, WarpTile, chunk_in, start_load};
use crate::attention::decay::Sums;
use crate::attention::flash::{HeadChunks, HeadQuads, Strides};
use crate::tile::matrix::pair;
use crate::tile::rows::{Own, rounds};
use crate::tile::{Accumulator, CHUNK, Chunk, Pair, Quad, RowStrides, sum_of_four};

/// Chunks of a row of a square.
pub const SQUARE_CHUNKS: usize = BLOCK / CHUNK;

/// The sizes of a call.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct BlockShape {
    /// Query heads.
    pub heads: u32,
    /// kv heads.
    pub kv_heads: u32,
    /// Tokens of a sequence.
    pub tokens: u32,
    /// Factor on q.
    pub scale: f32,
}

/// What the scores of a block depend on beside q, k, w and β.
#[derive(CubeType, CubeLaunch)]
pub struct Visibility {
    /// The start of each token's document, `[batch, tokens]`.
    pub documents: ComptimeOption<Array<i32>>,
    /// With a window w, a query sees its own key and the w − 1 before it.
    pub window: u32,
    /// The decay's prefix sums. A block is one span of them.
    pub decay: ComptimeOption<Sums>,
}

/// The inputs of both passes.
#[derive(CubeType, CubeLaunch)]
pub struct BlockInputs {
    /// `[batch, heads, tokens, head_dim]`, without its scale.
    pub q: HeadChunks,
    /// `[batch, kv_heads, tokens, head_dim]`
    pub k: HeadChunks,
    /// `[batch, kv_heads, tokens, head_dim]`
    pub v: HeadChunks,
    /// `[batch, kv_heads, tokens, head_dim]`
    pub w: HeadQuads<f32>,
    /// `[batch, kv_heads, tokens]`
    pub beta: Array<f32>,
    /// The strides of β.
    pub beta_strides: Strides,
    /// Masks and decay.
    pub visibility: Visibility,
}

/// A block of one kv head of one sequence.
#[derive(CubeType, Clone, Copy)]
pub struct BlockOf {
    /// The sequence.
    pub batch: usize,
    /// The kv head.
    pub kv_head: usize,
    /// The number of the block in its sequence.
    pub block: usize,
    /// The number of blocks in a sequence.
    pub blocks: usize,
    /// Tokens of the block.
    pub count: usize,
}

#[cube]
impl BlockOf {
    /// The thread block's own.
    pub fn own(shape: &BlockShape) -> BlockOf {
        let tokens = shape.tokens as usize;
        let blocks = (tokens + BLOCK - 1) / BLOCK;
        let kv_heads = shape.kv_heads as usize;
        let number = CUBE_POS_X as usize;
        let (block, row) = (number % blocks, number / blocks);
        BlockOf {
            batch: row / kv_heads,
            kv_head: row % kv_heads,
            block,
            blocks,
            count: min(tokens - block * BLOCK, BLOCK.runtime()),
        }
    }

    /// The block's first token.
    pub fn first(&self) -> usize {
        self.block * BLOCK
    }

    /// The index of the block's first row in `[batch, padded tokens, heads]`.
    pub fn padded_row(&self, head: usize, heads: usize) -> usize {
        ((self.batch * self.blocks + self.block) * BLOCK) * heads + head
    }

    /// The index of the block's first token in `[batch, heads, tokens]`.
    pub fn token(&self, head: usize, heads: usize, shape: &BlockShape) -> usize {
        (self.batch * heads + head) * shape.tokens as usize + self.first()
    }

    /// The index of the block's R.
    pub fn transform(&self, shape: &BlockShape) -> usize {
        (self.batch * self.blocks + self.block) * shape.kv_heads as usize + self.kv_head
    }

    /// The index of the first chunk of a head's row, and the chunks between rows.
    pub fn rows(&self, head: usize, strides: &RowStrides) -> (usize, usize) {
        let stride = strides.row as usize;
        (strides.base(self.batch, head) + self.first() * stride, stride)
    }

    /// The index of the first β, and the numbers between them.
    fn betas(&self, inputs: &BlockInputs) -> (usize, usize) {
        let strides = inputs.beta_strides;
        let stride = strides.token as usize;
        let head = self.batch * strides.batch as usize + self.kv_head * strides.head as usize;
        (head + self.first() * stride, stride)
    }
}

/// Numbers of a block's tokens, in shared memory.
#[derive(CubeType)]
pub struct Numbers {
    /// β.
    pub beta: SharedMemory<f32>,
    /// Σ ℓ within the block, of one head.
    pub sums: SharedMemory<f32>,
    /// The queries' log-sum-exps, base 2.
    pub lse: SharedMemory<f32>,
    /// The queries' δ.
    pub delta: SharedMemory<f32>,
    /// Parts of rows' sums or maxima, of both warpgroups, in two sets.
    pub of_rows: SharedMemory<f32>,
    /// Parts of columns' sums, of four tiles below one another.
    pub of_columns: SharedMemory<f32>,
}

#[cube]
impl Numbers {
    /// Uninitialised.
    pub fn new() -> Numbers {
        Numbers {
            beta: SharedMemory::<f32>::new(BLOCK),
            sums: SharedMemory::<f32>::new(BLOCK),
            lse: SharedMemory::<f32>::new(BLOCK),
            delta: SharedMemory::<f32>::new(BLOCK),
            of_rows: SharedMemory::<f32>::new(comptime!(2 * GROUPS * BLOCK)),
            of_columns: SharedMemory::<f32>::new(comptime!(4 * BLOCK)),
        }
    }

    /// Reads β; 0 past the last token.
    pub fn load_beta(&mut self, inputs: &BlockInputs, of: &BlockOf) {
        let row = UNIT_POS as usize;
        if row < BLOCK {
            let (base, stride) = of.betas(inputs);
            let beta = inputs.beta[base + min(row, of.count - 1) * stride];
            self.beta[row] = select(row < of.count, beta, 0f32);
        }
    }

    /// Reads Σ ℓ of one head.
    pub fn load_decay(
        &mut self,
        visibility: &Visibility,
        of: &BlockOf,
        head: usize,
        shape: &BlockShape,
        #[comptime] config: BlockConfig,
    ) {
        if comptime!(config.decay) {
            let row = UNIT_POS as usize;
            if row < BLOCK {
                let sums = visibility.decay.as_ref().unwrap();
                let batch_head = of.batch * shape.heads as usize + head;
                self.sums[row] = sums.within_span(batch_head, of.first() + min(row, of.count - 1));
            }
        }
    }

    /// The score of a query and the key of `column`, base 2, with the decay from the key to the block's start; the
    /// rest, from there to the query, cancels in the softmax.
    pub fn score(&self, score: f32, column: usize, #[comptime] config: BlockConfig) -> f32 {
        let mut score = score;
        if comptime!(config.decay) {
            score -= self.sums[column];
        }
        score * crate::tile::LOG2_E
    }

    /// Writes the part of a sum over a row of the warpgroup's columns, of which `sum` is the lane's.
    pub fn put_row(&mut self, sum: f32, row: usize, tile: &WarpTile, #[comptime] set: usize) {
        let sum = sum_of_four(sum);
        if UNIT_POS % 4 == 0 {
            self.of_rows[(comptime!(set * GROUPS) + tile.group) * BLOCK + row] = sum;
        }
    }

    /// The sum of a row's parts of a set.
    pub fn row(&self, row: usize, #[comptime] set: usize) -> f32 {
        let first = comptime!(set * GROUPS * BLOCK);
        self.of_rows[first + row] + self.of_rows[comptime!(first + BLOCK) + row]
    }
}

/// The first row of the block that the query of `row` sees, [`BLOCK`] for a row past the last token.
#[cube]
pub fn first_visible(
    visibility: &Visibility,
    of: &BlockOf,
    row: usize,
    shape: &BlockShape,
    #[comptime] config: BlockConfig,
) -> usize {
    let mut first = 0usize;
    if row < of.count {
        if comptime!(config.window) {
            let window = visibility.window as usize;
            if row >= window {
                first = row - window + 1;
            }
        }
        if comptime!(config.documents) {
            let documents = visibility.documents.as_ref().unwrap();
            let at = of.batch * shape.tokens as usize + of.first() + row;
            let start = documents[at] as usize;
            if start > of.first() + first {
                first = start - of.first();
            }
        }
    } else {
        first = BLOCK.runtime();
    }
    first
}

/// Starts to read a block's rows of one head; rows past the last token are 0.
#[cube]
pub fn start_head(
    arena: &mut SharedMemory<Chunk>,
    source: &HeadChunks,
    of: &BlockOf,
    head: usize,
    #[comptime] to: Operand,
    #[comptime] config: BlockConfig,
) {
    let (base, stride) = of.rows(head, &source.strides);
    let d = config.head_dim;
    let columns = comptime!(config.columns());
    start_load(arena, &source.chunks, base, stride, of.count, d, comptime!(to.high), columns);
}

/// Starts to read the block's inverse G from `[blocks, 2, 64, 64]`.
#[cube]
pub fn start_inverse(
    arena: &mut SharedMemory<Chunk>,
    inverses: &Array<Chunk>,
    #[comptime] to: Operand,
) {
    let base = CUBE_POS_X as usize * comptime!(2 * BLOCK * SQUARE_CHUNKS);
    let (stride, rows) = (SQUARE_CHUNKS.runtime(), BLOCK.runtime());
    start_load(arena, inverses, base, stride, rows, BLOCK, comptime!(to.high), BLOCK);
    if let Some(low) = comptime!(to.low) {
        let base = base + comptime!(BLOCK * SQUARE_CHUNKS);
        start_load(arena, inverses, base, stride, rows, BLOCK, low, BLOCK);
    }
}

/// Eight numbers times a factor as the sum of two chunks.
#[cube]
pub fn split(first: Quad, second: Quad, factor: f32) -> (Chunk, Chunk) {
    let mut high = Chunk::cast_from(0f32);
    let mut low = Chunk::cast_from(0f32);
    #[unroll]
    for i in 0..CHUNK {
        let mut value = first[comptime!(i % 4)];
        if comptime!(i >= 4) {
            value = second[comptime!(i % 4)];
        }
        let value = value * factor;
        let nearest = bf16::cast_from(value);
        high[i] = nearest;
        low[i] = bf16::cast_from(value - f32::cast_from(nearest));
    }
    (high, low)
}

/// Reads w and, if `weighted`, w times β to the place of Y.
#[cube]
pub fn load_directions(
    arena: &mut SharedMemory<Chunk>,
    inputs: &BlockInputs,
    of: &BlockOf,
    #[comptime] weighted: bool,
    #[comptime] config: BlockConfig,
) {
    let d = config.head_dim;
    let (w, y) = comptime!((config.w(), config.y()));
    let (w_low, y_low) = comptime!((w.low.expect("two"), y.low.expect("two")));
    let (base, stride) = of.rows(of.kv_head, &inputs.w.strides);
    let (betas, beta_stride) = of.betas(inputs);
    #[unroll]
    for round in 0..comptime!(rounds(BLOCK, config.columns())) {
        let at = Own::new(round, BLOCK, comptime!(config.columns()));
        if at.exists {
            let row = min(at.row, of.count - 1);
            let exists = (at.row < of.count) & (at.chunk < comptime!(d / CHUNK));
            let from = (base + row * stride + select(exists, at.chunk, 0usize)) * 2;
            let factor = select(exists, 1f32, 0f32);
            let (first, second) = (inputs.w.quads[from], inputs.w.quads[from + 1]);
            let (high, low) = split(first, second, factor);
            arena[chunk_in(at.row, at.chunk, comptime!(w.high))] = high;
            arena[chunk_in(at.row, at.chunk, w_low)] = low;
            if comptime!(weighted) {
                let beta = inputs.beta[betas + row * beta_stride];
                let (high, low) = split(first, second, factor * beta);
                arena[chunk_in(at.row, at.chunk, comptime!(y.high))] = high;
                arena[chunk_in(at.row, at.chunk, y_low)] = low;
            }
        }
    }
}

/// Leaves the elements of a square below the diagonal, and those on it if `diagonal`; the others become 0.
#[cube]
pub fn keep_lower(acc: &mut Accumulator, tile: &WarpTile, #[comptime] diagonal: bool) {
    let on = comptime!(if diagonal { 1usize } else { 0usize });
    #[unroll]
    for r in 0..2usize {
        let end = tile.row(r) + on;
        #[unroll]
        for f in 0..acc.len() {
            let column = tile.column(f);
            let fragment = acc.index_mut(f);
            let value = fragment[r];
            let first = select(column < end, value[0], 0f32);
            let second = select(column + 1 < end, value[1], 0f32);
            fragment[r] = pair(first, second);
        }
    }
}

/// The sum over the lane's part of row `r` of the products of two accumulators' elements.
#[cube]
pub fn dot(a: &Accumulator, b: &Accumulator, #[comptime] r: usize) -> f32 {
    let mut sum = 0f32;
    #[unroll]
    for f in 0..a.len() {
        let product = a.index(f)[r] * b.index(f)[r];
        sum += product[0] + product[1];
    }
    sum
}

/// Multiplies the rows of an accumulator by factors in shared memory.
#[cube]
pub fn scale_rows(acc: &mut Accumulator, factors: &SharedMemory<f32>, tile: &WarpTile) {
    #[unroll]
    for r in 0..2usize {
        let factor = factors[tile.row(r)];
        #[unroll]
        for f in 0..acc.len() {
            let fragment = acc.index_mut(f);
            fragment[r] = fragment[r] * Pair::cast_from(factor);
        }
    }
}

/// Writes an accumulator's channels to rows of `stride` pairs in global memory, from pair `base` on.
#[cube]
pub fn write_numbers(
    numbers: &mut Array<Pair>,
    acc: &Accumulator,
    tile: &WarpTile,
    base: usize,
    stride: usize,
    #[comptime] config: BlockConfig,
) {
    #[unroll]
    for f in 0..acc.len() {
        let column = tile.column(f);
        if has_column(column, config) {
            #[unroll]
            for r in 0..2usize {
                numbers[base + tile.row(r) * stride + column / 2] = acc.index(f)[r];
            }
        }
    }
}

/// The inverse of [`write_numbers`]; other channels become 0.
#[cube]
pub fn read_numbers(
    acc: &mut Accumulator,
    numbers: &Array<Pair>,
    tile: &WarpTile,
    base: usize,
    stride: usize,
    #[comptime] config: BlockConfig,
) {
    #[unroll]
    for f in 0..acc.len() {
        let column = tile.column(f);
        let exists = has_column(column, config);
        let fragment = acc.index_mut(f);
        #[unroll]
        for r in 0..2usize {
            let from = base + tile.row(r) * stride + select(exists, column / 2, 0usize);
            fragment[r] = numbers[from] * Pair::cast_from(select(exists, 1f32, 0f32));
        }
    }
}

/// Whether there is this channel, of those in products.
#[cube]
pub fn has_column(column: usize, #[comptime] config: BlockConfig) -> bool {
    comptime!(config.columns() == config.head_dim) || column < config.head_dim
}
