//! Products of f32 matrices on tensor cores: each matrix is the sum of two in bf16, and of the four products all
//! but the smallest are summed. About 16 bits of each element remain.
//!
//! In global memory the two follow one another: R and its gradient as `[…, 2, head_dim, head_dim]`, the gradients of
//! vectors as `[2, batch, tokens, heads, head_dim]`.

use burn::tensor::{DType, Tensor};
use cubecl::prelude::*;

use crate::Cuda;
use crate::backend::tensor;
use crate::cuda::{CudaTensor, narrow};
use crate::tile::copies::copy_chunk;
use crate::tile::warpgroup::{start_panels_atb, start_tile_ab, start_tile_abt, uninit_a_frags};
use crate::tile::{
    AFragments, ALIGN, Accumulator, CHUNK, Chunk, PANEL, PANEL_DIM, Pair, place_in, split_pair,
};

/// Rows in global memory, each as the sum of two.
#[derive(CubeType, Clone, Copy)]
pub struct SplitRows {
    /// The first chunk of the first row.
    pub base: usize,
    /// Chunks from one row to the next.
    pub stride: usize,
    /// Chunks from a row to the rest of it.
    pub to_low: usize,
    /// Rows.
    pub count: usize,
    /// Chunks of a row.
    pub chunks: usize,
}

#[cube]
impl SplitRows {
    /// All rows of matrix `number` of `dim` rows and columns.
    pub fn of_matrix(number: usize, #[comptime] dim: usize) -> SplitRows {
        let chunks = comptime!(dim / CHUNK);
        SplitRows {
            base: number * comptime!(2 * dim * chunks),
            stride: chunks.runtime(),
            to_low: comptime!(dim * chunks).runtime(),
            count: dim.runtime(),
            chunks: chunks.runtime(),
        }
    }

    /// At most 64 of the rows, from row `first` on.
    pub fn rows(&self, first: usize) -> SplitRows {
        SplitRows {
            base: self.base + first * self.stride,
            stride: self.stride,
            to_low: self.to_low,
            count: at_most(self.count - first, PANEL_DIM),
            chunks: self.chunks,
        }
    }

    /// At most 64 of the columns, from column `first` on.
    pub fn columns(&self, first: usize) -> SplitRows {
        let chunk = first / CHUNK;
        SplitRows {
            base: self.base + chunk,
            stride: self.stride,
            to_low: self.to_low,
            count: self.count,
            chunks: at_most(self.chunks - chunk, PANEL),
        }
    }
}

/// The smaller one of two numbers. (In kernels with 64-bit addresses, `min` takes no constant.)
#[cube]
pub fn at_most(x: usize, #[comptime] most: usize) -> usize {
    select(x < most, x, most)
}

/// Uninitialised chunks in shared memory for asynchronous copies.
#[cube]
pub fn shared_tile(#[comptime] chunks: usize) -> SharedMemory<Chunk> {
    let mut tile = SharedMemory::<Chunk>::new_aligned(chunks, ALIGN);
    // Never true. cubecl declares what it sees used, and does not see the copies and products.
    if CUBE_DIM == 0 {
        tile[0] = Chunk::cast_from(0f32);
    }
    tile
}

/// Matrices of `rows` rows and `dim` columns, a multiple of 64, in shared memory, one after the other: each as the sum
/// of two in bf16.
#[derive(CubeType)]
pub struct SplitTile {
    /// The elements rounded to bf16.
    pub high: SharedMemory<Chunk>,
    /// The rest, rounded to bf16.
    pub low: SharedMemory<Chunk>,
    #[cube(comptime)]
    rows: usize,
    #[cube(comptime)]
    dim: usize,
}

#[cube]
impl SplitTile {
    /// `count` uninitialised matrices; `rows` is a multiple of 8.
    pub fn new(
        #[comptime] rows: usize,
        #[comptime] dim: usize,
        #[comptime] count: usize,
    ) -> SplitTile {
        let chunks = comptime!(count * rows * dim / CHUNK);
        let (high, low) = (shared_tile(chunks), shared_tile(chunks));
        SplitTile { high, low, rows, dim }
    }

    /// The first chunk of matrix `number`.
    pub fn at(&self, number: usize) -> usize {
        number * comptime!(self.rows * self.dim / CHUNK)
    }

    /// Starts to copy rows to the matrix from chunk `at` on, whose other elements become 0. All `threads` threads of
    /// the block call it, and then [`wait_for_chunks`](crate::tile::copies::wait_for_chunks),
    /// `sync_async_proxy_shared` and `sync_cube`.
    pub fn start_copy(
        &mut self,
        at: usize,
        source: &Array<Chunk>,
        from: &SplitRows,
        #[comptime] threads: usize,
    ) {
        let rows = comptime!(self.rows);
        let chunks_per_row = comptime!(self.dim / CHUNK);
        let chunks = comptime!(self.rows * self.dim / CHUNK);
        let mut own = UNIT_POS as usize;
        while own < chunks {
            let (row, chunk) = (own / chunks_per_row, own % chunks_per_row);
            let exists = (row < from.count) & (chunk < from.chunks);
            let first = from.base + select(exists, row * from.stride + chunk, 0usize);
            let to = at + place_in(row, chunk, rows);
            copy_chunk(&mut self.high, to, source, first, exists);
            copy_chunk(&mut self.low, to, source, first + from.to_low, exists);
            own += threads;
        }
    }

    /// Takes the lane's rows of an accumulator off the matrix from chunk `at` on: 16 rows per warp, from `row` on,
    /// and columns from `column` on. No product may read them.
    pub fn subtract(&mut self, at: usize, acc: &Accumulator, row: usize, column: usize) {
        let rows = comptime!(self.rows);
        let lane = UNIT_POS_PLANE as usize;
        let mut high = self.high.to_slice_mut().with_vector_size::<Const<2>>();
        let mut low = self.low.to_slice_mut().with_vector_size::<Const<2>>();
        #[unroll]
        for r in 0..2usize {
            let row = row + lane / 4 + comptime!(8 * r);
            #[unroll]
            for n in 0..acc.len() {
                let chunk = at + place_in(row, column / CHUNK + n, rows);
                let pair = chunk * comptime!(CHUNK / 2) + lane % 4;
                let sum = Pair::cast_from(high[pair]) + Pair::cast_from(low[pair]);
                let (nearest, rest) = split_pair(sum - acc.index(n)[r]);
                high[pair] = nearest;
                low[pair] = rest;
            }
        }
    }

    /// Takes rows of the first matrix off the lane's rows of an accumulator, as in [`SplitTile::subtract`].
    pub fn subtract_from(&self, acc: &mut Accumulator, row: usize) {
        let rows = comptime!(self.rows);
        let lane = UNIT_POS_PLANE as usize;
        let high = self.high.to_slice().with_vector_size::<Const<2>>();
        let low = self.low.to_slice().with_vector_size::<Const<2>>();
        #[unroll]
        for r in 0..2usize {
            let row = row + lane / 4 + comptime!(8 * r);
            #[unroll]
            for n in 0..acc.len() {
                let pair = place_in(row, n, rows) * comptime!(CHUNK / 2) + lane % 4;
                let sum = Pair::cast_from(high[pair]) + Pair::cast_from(low[pair]);
                let left = acc.index(n)[r] - sum;
                acc.index_mut(n)[r] = left;
            }
        }
    }

    /// Writes at most 64 rows of the first matrix, from row `first` on, to global memory.
    pub fn store(
        &self,
        first: usize,
        target: &mut Array<Chunk>,
        to: &SplitRows,
        #[comptime] threads: usize,
    ) {
        let rows = comptime!(self.rows);
        let chunks_per_row = comptime!(self.dim / CHUNK);
        #[unroll]
        for round in 0..comptime!((PANEL_DIM * chunks_per_row).div_ceil(threads)) {
            let own = UNIT_POS as usize + comptime!(round * threads);
            let (row, chunk) = (own / chunks_per_row, own % chunks_per_row);
            if (row < to.count) & (chunk < to.chunks) {
                let from = place_in(first + row, chunk, rows);
                let place = to.base + row * to.stride + chunk;
                target[place] = self.high[from];
                target[place + to.to_low] = self.low[from];
            }
        }
    }

    /// Starts acc = A · B for the columns of B from panel `panel` on, as many as `acc` has. A are the first 64 rows of
    /// the matrix from chunk `at` on; B is square.
    pub fn start_ab(&self, at: usize, right: &SplitTile, panel: usize, acc: &mut Accumulator) {
        let (rows, steps) = comptime!((self.rows, right.rows / 16));
        let (row, to) = (at / PANEL, panel * comptime!(right.rows * PANEL));
        start_tile_ab(&self.high, row, rows, &right.high, to, acc, true, steps);
        start_tile_ab(&self.low, row, rows, &right.high, to, acc, false, steps);
        start_tile_ab(&self.high, row, rows, &right.low, to, acc, false, steps);
    }

    /// As [`SplitTile::start_ab`], A · Bᵀ for rows of B; unless `fresh`, adds it to `acc`.
    pub fn start_abt(
        &self,
        at: usize,
        right: &SplitTile,
        panel: usize,
        acc: &mut Accumulator,
        #[comptime] fresh: bool,
    ) {
        let (rows, n, steps) = comptime!((self.rows, right.rows / 8, right.rows / 16));
        let (row, to) = (at / PANEL, panel * comptime!(PANEL_DIM * PANEL));
        start_tile_abt(&self.high, row, rows, &right.high, to, acc, fresh, n, steps);
        start_tile_abt(&self.low, row, rows, &right.high, to, acc, false, n, steps);
        start_tile_abt(&self.high, row, rows, &right.low, to, acc, false, n, steps);
    }

    /// Starts acc += Aᵀ · B, for a matrix A of 64 columns; A and B have the same rows.
    pub fn start_atb(&self, right: &SplitTile, acc: &mut Accumulator) {
        let rows = comptime!(self.rows);
        let zero = usize::cast_from(0u32);
        start_panels_atb(&self.high, zero, &right.high, zero, acc, false, rows);
        start_panels_atb(&self.low, zero, &right.high, zero, acc, false, rows);
        start_panels_atb(&self.high, zero, &right.low, zero, acc, false, rows);
    }
}

/// Panels of a matrix of `columns` columns.
pub const fn panels(columns: usize) -> usize {
    columns.div_ceil(PANEL_DIM)
}

/// An accumulator as fragments of an operand A: each number rounded, and the rest rounded.
#[cube]
pub fn split_fragments(acc: &Accumulator, #[comptime] n: usize) -> (AFragments, AFragments) {
    let (mut high, mut low) = (uninit_a_frags(comptime!(n / 2)), uninit_a_frags(comptime!(n / 2)));
    #[unroll]
    for column in 0..n {
        #[unroll]
        for row in 0..2usize {
            let (nearest, rest) = split_pair(acc.index(column)[row]);
            let place = comptime!(column % 2 * 2 + row);
            high.index_mut(comptime!(column / 2))[place] = nearest;
            low.index_mut(comptime!(column / 2))[place] = rest;
        }
    }
    (high, low)
}

/// The sums in f32: dimension `dim` of `x`, the two matrices, becomes 1.
pub fn joined<const D: usize>(x: &CudaTensor, dim: usize) -> Tensor<Cuda, D> {
    let [high, low] = [0, 1].map(|i| tensor::<Cuda, D>(narrow(x, dim, i..i + 1)).cast(DType::F32));
    high + low
}
