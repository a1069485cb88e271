//! Rows of vectors between global and shared memory.

use burn::tensor::bf16;
use cubecl::prelude::*;

use super::THREADS;
use super::layout::{BLOCK, TILE};
use super::product::{Place, Quad, quads, quads_mut};
use crate::attention::decay::Sums;
use crate::attention::flash::Strides;
use crate::tile::{CHUNK, RowStrides};

/// A tensor `[batch, heads, tokens, head_dim]` in quads of channels.
#[derive(CubeType, CubeLaunch)]
pub struct HeadQuads<E: Numeric> {
    /// Its elements.
    pub quads: Array<Vector<E, Const<4>>>,
    /// The strides of its rows.
    pub strides: RowStrides,
}

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
    pub q: HeadQuads<bf16>,
    /// `[batch, kv_heads, tokens, head_dim]`
    pub k: HeadQuads<bf16>,
    /// `[batch, kv_heads, tokens, head_dim]`
    pub v: HeadQuads<bf16>,
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
    /// The block with this number among all.
    pub fn new(number: usize, shape: &BlockShape) -> BlockOf {
        let tokens = shape.tokens as usize;
        let blocks = (tokens + BLOCK - 1) / BLOCK;
        let kv_heads = shape.kv_heads as usize;
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
}

/// A thread's quads of `rows` rows of vectors: one for each round.
#[derive(CubeType)]
pub struct RowQuad {
    /// The row.
    pub row: usize,
    /// The quad in the row.
    pub quad: usize,
    /// Whether there is one.
    pub exists: bool,
}

const fn quads_of(rows: usize, dim: usize) -> usize {
    rows * dim / 4
}

/// Rounds in which a block's threads pass over `rows` rows of `dim` channels.
pub const fn rounds_of(rows: usize, dim: usize) -> usize {
    quads_of(rows, dim).div_ceil(THREADS)
}

#[cube]
impl RowQuad {
    /// The thread's quad of this round.
    pub fn of_round(round: usize, #[comptime] rows: usize, #[comptime] dim: usize) -> RowQuad {
        let index = round * THREADS + UNIT_POS as usize;
        let count = comptime!(quads_of(rows, dim));
        RowQuad {
            row: index / comptime!(dim / 4),
            quad: index % comptime!(dim / 4),
            exists: comptime!(count.is_multiple_of(THREADS)) || index < count,
        }
    }

    /// Its index in shared memory, in quads.
    pub fn at(&self, #[comptime] place: Place) -> usize {
        let tile = self.row / TILE * comptime!(place.next / 4);
        comptime!(place.at / 4) + tile + self.row % TILE * comptime!(place.row / 4) + self.quad
    }
}

/// Reads a block's rows of one head times `factor`; rows past the last token are 0.
#[cube]
pub fn load_head<E: Numeric>(
    arena: &mut SharedMemory<f32>,
    source: &HeadQuads<E>,
    of: &BlockOf,
    head: usize,
    factor: f32,
    #[comptime] to: Place,
    #[comptime] dim: usize,
) {
    let mut quads = quads_mut(arena);
    let base = source.strides.base(of.batch, head) + of.first() * source.strides.row as usize;
    #[unroll]
    for round in 0..comptime!(rounds_of(BLOCK, dim)) {
        let own = RowQuad::of_round(round, BLOCK, dim);
        if own.exists {
            // No read depends on a condition: the compiler would wait for each before it starts the next.
            let row = min(own.row, of.count - 1);
            let chunk = base + row * source.strides.row as usize;
            let at = chunk * comptime!(CHUNK / 4) + own.quad;
            let factor = select(own.row < of.count, factor, 0f32);
            quads[own.at(to)] = Quad::cast_from(source.quads[at]) * Quad::cast_from(factor);
        }
    }
}

/// Reads `rows` rows, `stride` quads apart, from quad `base` of global memory on.
#[cube]
pub fn load_rows(
    arena: &mut SharedMemory<f32>,
    memory: &Array<Quad>,
    base: usize,
    stride: usize,
    #[comptime] to: Place,
    #[comptime] rows: usize,
    #[comptime] dim: usize,
) {
    let mut quads = quads_mut(arena);
    for round in 0..comptime!(rounds_of(rows, dim)) {
        let own = RowQuad::of_round(round, rows, dim);
        if own.exists {
            quads[own.at(to)] = memory[base + own.row * stride + own.quad];
        }
    }
}

/// As [`load_rows`], added to what is there.
#[cube]
pub fn add_rows(
    arena: &mut SharedMemory<f32>,
    memory: &Array<Quad>,
    base: usize,
    stride: usize,
    #[comptime] to: Place,
    #[comptime] rows: usize,
    #[comptime] dim: usize,
) {
    let mut quads = quads_mut(arena);
    for round in 0..comptime!(rounds_of(rows, dim)) {
        let own = RowQuad::of_round(round, rows, dim);
        if own.exists {
            let at = own.at(to);
            let value = quads[at];
            quads[at] = value + memory[base + own.row * stride + own.quad];
        }
    }
}

/// Writes the rows of a tensor of any type, those before `count`, times `factor`.
#[cube]
pub fn store_rows<E: Numeric>(
    arena: &SharedMemory<f32>,
    memory: &mut Array<Vector<E, Const<4>>>,
    base: usize,
    stride: usize,
    count: usize,
    factor: f32,
    #[comptime] from: Place,
    #[comptime] rows: usize,
    #[comptime] dim: usize,
) {
    let quads = quads(arena);
    for round in 0..comptime!(rounds_of(rows, dim)) {
        let own = RowQuad::of_round(round, rows, dim);
        if own.exists && own.row < count {
            let value = quads[own.at(from)] * Quad::cast_from(factor);
            memory[base + own.row * stride + own.quad] = Vector::cast_from(value);
        }
    }
}

/// Copies rows in shared memory.
#[cube]
pub fn copy_rows(
    arena: &mut SharedMemory<f32>,
    #[comptime] from: Place,
    #[comptime] to: Place,
    #[comptime] rows: usize,
    #[comptime] dim: usize,
) {
    let mut quads = quads_mut(arena);
    for round in 0..comptime!(rounds_of(rows, dim)) {
        let own = RowQuad::of_round(round, rows, dim);
        if own.exists {
            let value = quads[own.at(from)];
            quads[own.at(to)] = value;
        }
    }
}
