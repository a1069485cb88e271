//! Products of f32 matrices on tensor cores: each matrix is the sum of two in bf16, and of the four products all
//! but the smallest are summed. About 16 bits of each element remain.

use burn::tensor::bf16;
use cubecl::prelude::*;

use crate::tile::warpgroup::{
    set_a_frag, start_panels_atb, start_tile_ab, start_tile_abt, uninit_a_frags,
};
use crate::tile::{
    AFragments, ALIGN, Accumulator, Bf16Pair, CHUNK, Chunk, PANEL, PANEL_DIM, Pair, place,
};

/// A matrix of `rows` rows and `dim` columns, a multiple of 64, in shared memory, as the sum of two in bf16.
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
    /// An uninitialised matrix; `rows` is a multiple of 8.
    pub fn new(#[comptime] rows: usize, #[comptime] dim: usize) -> SplitTile {
        let chunks = comptime!(rows * dim / CHUNK);
        SplitTile {
            high: SharedMemory::<Chunk>::new_aligned(chunks, ALIGN),
            low: SharedMemory::<Chunk>::new_aligned(chunks, ALIGN),
            rows,
            dim,
        }
    }

    /// Splits rows of `columns` elements: row r begins at pair `base` + r · `stride` of `source`. Rows from `count` on
    /// and columns from `columns` on are zero. All `threads` threads of the block call it, and then
    /// `sync_async_proxy_shared` and `sync_cube`.
    pub fn load(
        &mut self,
        source: &Array<Pair>,
        base: usize,
        stride: usize,
        count: usize,
        #[comptime] columns: usize,
        #[comptime] threads: usize,
    ) {
        let chunks_per_row = comptime!(self.dim / CHUNK);
        let rows = comptime!(self.rows);
        let chunks = comptime!(self.rows * self.dim / CHUNK);
        #[unroll]
        for round in 0..comptime!(chunks.div_ceil(threads)) {
            let at = UNIT_POS as usize + comptime!(round * threads);
            if comptime!(chunks.is_multiple_of(threads)) || at < chunks {
                let (row, chunk) = (at / chunks_per_row, at % chunks_per_row);
                let exists = row < count && chunk * CHUNK < columns;
                // No read depends on a condition: the compiler would wait for each before it starts the next.
                let offset = row * stride + chunk * comptime!(CHUNK / 2);
                let from = base + select(exists, offset, 0usize);
                let mut high = Chunk::cast_from(0f32);
                let mut low = Chunk::cast_from(0f32);
                #[unroll]
                for i in 0..comptime!(CHUNK / 2) {
                    let pair = source[from + i];
                    #[unroll]
                    for e in 0..2usize {
                        let value = select(exists, pair[e], 0f32);
                        let nearest = bf16::cast_from(value);
                        high[comptime!(i * 2 + e)] = nearest;
                        low[comptime!(i * 2 + e)] =
                            bf16::cast_from(value - f32::cast_from(nearest));
                    }
                }
                let to = chunk / PANEL * rows * PANEL + place(row as u32, (chunk % PANEL) as u32);
                self.high[to] = high;
                self.low[to] = low;
            }
        }
    }

    /// Starts acc = A · B, for the 64 rows of A from `row` on; B is square.
    pub fn start_ab(&self, row: usize, right: &SplitTile, acc: &mut Accumulator) {
        let (rows, steps) = comptime!((self.rows, right.rows / 16));
        let zero = usize::cast_from(0u32);
        start_tile_ab(&self.high, row, rows, &right.high, zero, acc, true, steps);
        start_tile_ab(&self.low, row, rows, &right.high, zero, acc, false, steps);
        start_tile_ab(&self.high, row, rows, &right.low, zero, acc, false, steps);
    }

    /// Starts acc = A · Bᵀ, for the 64 rows of A from `row` on; B is square.
    pub fn start_abt(&self, row: usize, right: &SplitTile, acc: &mut Accumulator) {
        let (rows, n, steps) = comptime!((self.rows, right.rows / 8, right.rows / 16));
        let zero = usize::cast_from(0u32);
        start_tile_abt(&self.high, row, rows, &right.high, zero, acc, true, n, steps);
        start_tile_abt(&self.low, row, rows, &right.high, zero, acc, false, n, steps);
        start_tile_abt(&self.high, row, rows, &right.low, zero, acc, false, n, steps);
    }

    /// Starts acc = Aᵀ · B if `fresh`, else acc += Aᵀ · B, for the columns of A in `panel`, 64 each; A and B have
    /// the same rows.
    pub fn start_atb(
        &self,
        panel: usize,
        right: &SplitTile,
        acc: &mut Accumulator,
        #[comptime] fresh: bool,
    ) {
        let rows = comptime!(self.rows);
        let left_at = panel * rows * PANEL;
        let zero = usize::cast_from(0u32);
        start_panels_atb(&self.high, left_at, &right.high, zero, acc, fresh, rows);
        start_panels_atb(&self.low, left_at, &right.high, zero, acc, false, rows);
        start_panels_atb(&self.high, left_at, &right.low, zero, acc, false, rows);
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
            let pair = acc.index(column)[row];
            let nearest = Bf16Pair::cast_from(pair);
            set_a_frag(&mut high, column, row, pair);
            set_a_frag(&mut low, column, row, pair - Pair::cast_from(nearest));
        }
    }
    (high, low)
}
