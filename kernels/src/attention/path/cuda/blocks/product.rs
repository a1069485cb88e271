//! Products of a block's matrices by `wgmma`, with sums in f32 registers.
//!
//! A block's two warpgroups share a result: of 64 rows each has half of the columns, of 128 half of the rows. So
//! products with results of one size add to one accumulator, and a result stays in registers for as long as a kernel
//! needs it.

use cubecl::prelude::*;

use super::layout::{BLOCK, BlockConfig, Operand, Panels};
use crate::tile::copies::copy_chunk;
use crate::tile::rows::{Own, rounds};
use crate::tile::warpgroup::{GROUP_ROWS, GROUP_WARPS, SmemOperand, start_tiles, wait};
use crate::tile::{
    Accumulator, CHUNK, Chunk, PANEL, PANEL_DIM, Pair, place_in, quad_in_two_chunks, split_pair,
    zeros,
};

/// Warpgroups of a block.
pub const GROUPS: usize = 2;

/// A product of two matrices in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Product {
    a: Operand,
    b: Operand,
    first_transposed: bool,
    second_transposed: bool,
    size: Size,
}

/// The size of a product [m × k]·[k × n]. m is 64, or m and n are 128.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Size {
    m: usize,
    n: usize,
    k: usize,
}

impl BlockConfig {
    /// A square as the result, a sum over the channels.
    pub const fn over_channels(&self) -> Size {
        Size { m: BLOCK, n: BLOCK, k: self.head_dim }
    }

    /// Vectors as the result, a sum over the tokens.
    pub const fn over_tokens(&self) -> Size {
        Size { m: BLOCK, n: self.columns(), k: BLOCK }
    }

    /// A square as the result, a sum over the tokens.
    pub const fn squares(&self) -> Size {
        Size { m: BLOCK, n: BLOCK, k: BLOCK }
    }

    /// Vectors times a transform.
    pub const fn of_transform(&self) -> Size {
        Size { m: BLOCK, n: self.columns(), k: self.head_dim }
    }

    /// A transform as the result.
    pub const fn giving_transform(&self) -> Size {
        Size { m: self.rows_of_transform(), n: self.columns(), k: BLOCK }
    }
}

impl Product {
    /// A·B.
    pub const fn ab(a: Operand, b: Operand, size: Size) -> Self {
        Product { a, b, first_transposed: false, second_transposed: false, size }
    }

    /// A·Bᵀ.
    pub const fn abt(a: Operand, b: Operand, size: Size) -> Self {
        Product { second_transposed: true, ..Self::ab(a, b, size) }
    }

    /// Aᵀ·B.
    pub const fn atb(a: Operand, b: Operand, size: Size) -> Self {
        Product { first_transposed: true, ..Self::ab(a, b, size) }
    }

    /// Columns of a warpgroup's part of the result.
    const fn columns(&self) -> usize {
        if self.size.m == GROUP_ROWS { self.size.n / GROUPS } else { self.size.n }
    }

    /// Products of two matrices in bf16 that are summed.
    pub const fn terms(&self) -> usize {
        1 + self.a.low.is_some() as usize + self.b.low.is_some() as usize
    }

    /// Fragments of 8 columns of a warp's accumulator.
    pub const fn fragments(&self) -> usize {
        self.columns() / 8
    }

    const fn left(&self) -> SmemOperand {
        let rows = self.a.high.rows;
        if self.first_transposed {
            SmemOperand::over_rows(rows)
        } else {
            SmemOperand::over_channels(rows)
        }
    }

    const fn right(&self) -> SmemOperand {
        let rows = self.b.high.rows;
        if self.second_transposed {
            SmemOperand::over_channels(rows)
        } else {
            SmemOperand::over_rows(rows)
        }
    }
}

/// A warp's part of a result.
#[derive(CubeType, Clone, Copy)]
pub struct WarpTile {
    /// Its warpgroup.
    pub group: usize,
    /// Its first row.
    row: usize,
    /// Its first column.
    column: usize,
}

#[cube]
impl WarpTile {
    /// The warp's part of a product's result.
    pub fn new(#[comptime] p: Product) -> WarpTile {
        let warp = plane_shuffle(UNIT_POS / 32, 0u32) as usize;
        let group = warp / GROUP_WARPS;
        let mut row = warp * 16;
        let mut column = 0usize.runtime();
        if comptime!(p.size.m == GROUP_ROWS) {
            row = warp % GROUP_WARPS * 16;
            column = group * comptime!(p.columns());
        }
        WarpTile { group, row, column }
    }

    /// The row of the lane's row `r`, 0 or 1.
    pub fn row(&self, #[comptime] r: usize) -> usize {
        self.row + UNIT_POS_PLANE as usize / 4 + comptime!(8 * r)
    }

    /// The first of the lane's two columns in a fragment.
    pub fn column(&self, #[comptime] fragment: usize) -> usize {
        self.column + UNIT_POS_PLANE as usize % 4 * 2 + comptime!(8 * fragment)
    }

    /// The first column of the lane's quad in chunks 2·`two` and 2·`two` + 1 ([`quad_in_two_chunks`]).
    pub fn column_of_quad(&self, #[comptime] two: usize) -> usize {
        self.column + comptime!(2 * CHUNK * two) + quad_in_two_chunks() * 4
    }

    /// The number of the warp's part among those below one another.
    pub fn down(&self) -> usize {
        self.row / 16
    }
}

/// Starts to add a product to an accumulator. [`wait`] waits for it.
#[cube]
pub fn start_product(arena: &SharedMemory<Chunk>, acc: &mut Accumulator, #[comptime] p: Product) {
    start_term(arena, acc, comptime!(p.a.high), comptime!(p.b.high), p);
    if let Some(low) = comptime!(p.a.low) {
        start_term(arena, acc, low, comptime!(p.b.high), p);
    }
    if let Some(low) = comptime!(p.b.low) {
        start_term(arena, acc, comptime!(p.a.high), low, p);
    }
}

#[cube]
fn start_term(
    arena: &SharedMemory<Chunk>,
    acc: &mut Accumulator,
    #[comptime] a: Panels,
    #[comptime] b: Panels,
    #[comptime] p: Product,
) {
    let tile = WarpTile::new(p);
    let mut from = comptime!(a.at).runtime();
    if comptime!(p.size.m > GROUP_ROWS) {
        from += tile.group * comptime!(a.rows * PANEL);
    }
    let mut to = b.at + tile.column * PANEL;
    if comptime!(!p.second_transposed) {
        let panel = tile.column / PANEL_DIM;
        to = b.at + panel * comptime!(b.rows * PANEL) + tile.column % PANEL_DIM / CHUNK;
    }
    let (left, right, steps) = comptime!((p.left(), p.right(), p.size.k / 16));
    start_tiles(arena, from, to, acc, left, right, steps);
}

/// Adds a product to an accumulator.
#[cube]
pub fn add_product(arena: &SharedMemory<Chunk>, acc: &mut Accumulator, #[comptime] p: Product) {
    start_product(arena, acc, p);
    wait(acc, 0usize);
}

/// A product.
#[cube]
pub fn product(arena: &SharedMemory<Chunk>, #[comptime] p: Product) -> Accumulator {
    let mut acc = zeros(comptime!(p.fragments()));
    add_product(arena, &mut acc, p);
    acc
}

/// Synchronises the block: then products read what its threads have written to shared memory.
#[cube]
pub fn sync() {
    sync_async_proxy_shared();
    sync_cube();
}

/// Starts to copy a matrix from global to shared memory: `width` columns of `count` rows, at least one, `stride` chunks
/// apart, from chunk `base` on. All other elements of the matrix, which has `columns` columns, become 0.
#[cube]
pub fn start_load(
    arena: &mut SharedMemory<Chunk>,
    source: &Array<Chunk>,
    base: usize,
    stride: usize,
    count: usize,
    #[comptime] width: usize,
    #[comptime] to: Panels,
    #[comptime] columns: usize,
) {
    #[unroll]
    for round in 0..comptime!(rounds(to.rows, columns)) {
        let at = Own::new(round, comptime!(to.rows), columns);
        if at.exists {
            let row = base + min(at.row, count - 1) * stride;
            let exists = (at.row < count) & (at.chunk < comptime!(width / CHUNK));
            let from = row + select(exists, at.chunk, 0usize);
            copy_chunk(arena, chunk_in(at.row, at.chunk, to), source, from, exists);
        }
    }
}

/// Where a chunk of a matrix lies.
#[cube]
pub fn chunk_in(row: usize, chunk: usize, #[comptime] of: Panels) -> usize {
    of.at + place_in(row, chunk, comptime!(of.rows))
}

/// Where the element pair at an even column lies.
#[cube]
fn pair_in(row: usize, column: usize, #[comptime] of: Panels) -> usize {
    chunk_in(row, column / CHUNK, of) * comptime!(CHUNK / 2) + column % CHUNK / 2
}

/// The element pair at an even column.
#[cube]
pub fn read(
    arena: &SharedMemory<Chunk>,
    row: usize,
    column: usize,
    #[comptime] from: Operand,
) -> Pair {
    let pairs = arena.to_slice().with_vector_size::<Const<2>>();
    let mut value = Pair::cast_from(pairs[pair_in(row, column, comptime!(from.high))]);
    if let Some(low) = comptime!(from.low) {
        value += Pair::cast_from(pairs[pair_in(row, column, low)]);
    }
    value
}

/// Writes an accumulator.
#[cube]
pub fn write(
    arena: &mut SharedMemory<Chunk>,
    acc: &Accumulator,
    tile: &WarpTile,
    #[comptime] to: Operand,
) {
    let low = comptime!(to.low.expect("the sum of two matrices"));
    let mut pairs = arena.to_slice_mut().with_vector_size::<Const<2>>();
    #[unroll]
    for r in 0..2usize {
        #[unroll]
        for f in 0..acc.len() {
            let (nearest, rest) = split_pair(acc.index(f)[r]);
            let (row, column) = (tile.row(r), tile.column(f));
            pairs[pair_in(row, column, comptime!(to.high))] = nearest;
            pairs[pair_in(row, column, low)] = rest;
        }
    }
}
