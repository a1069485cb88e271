//! Products of small matrices in shared memory on tensor cores, to about 16 bits.
//!
//! A thread block computes A·B or −A·B for a batch of equally spaced matrices in f32. Each factor is the sum of two
//! numbers in bf16, and of the four products all but the smallest are summed in f32.
//!
//! A warp owns tiles of C of 16 rows and 16 or 32 columns. Which row, column or step of the sum an index of `mma.sync`
//! m16n8k16 stands for is free, as long as both factors and the result agree: lane 4g + t holds rows 2g and 2g + 1
//! and steps 4t to 4t + 3, and the columns that it holds of all fragments are neighbours. So it reads and writes whole
//! quads.

use burn::tensor::bf16;
use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;

use super::{Accumulator, Bf16Pair, Pair, Quad, keep_loop, split_pair};

/// Threads of a block.
pub const THREADS: usize = 256;

/// Warps of a thread block.
const WARPS: usize = THREADS / 32;

/// Rows of a warp's tile, and steps of the sum of an instruction.
const ROWS: usize = 16;

/// Where a matrix, or a batch of them, lies: in elements, all multiples of 4.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// The first element.
    pub at: usize,
    /// The stride between rows.
    pub row: usize,
    /// The stride between the matrices of a batch.
    pub next: usize,
}

impl Place {
    /// The matrix from this row and column on.
    pub const fn cell(self, row: usize, column: usize) -> Self {
        Place { at: self.at + row * self.row + column, ..self }
    }

    /// A batch whose matrices are this many rows and columns apart.
    pub const fn step(self, rows: usize, columns: usize) -> Self {
        Place { next: rows * self.row + columns, ..self }
    }
}

/// A batch of products [m × k]·[k × n]; m, n and k are multiples of 16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Product {
    a: Place,
    b: Place,
    c: Place,
    m: usize,
    n: usize,
    k: usize,
    batch: usize,
    negative: bool,
}

impl Product {
    /// C = A·B.
    pub const fn ab([a, b, c]: [Place; 3], [m, n, k]: [usize; 3]) -> Self {
        assert!(m.is_multiple_of(16) && n.is_multiple_of(16) && k.is_multiple_of(16));
        Product { a, b, c, m, n, k, batch: 1, negative: false }
    }

    /// The same for this many matrices.
    pub const fn batch(self, batch: usize) -> Self {
        Product { batch, ..self }
    }

    /// With the product's sign changed.
    pub const fn negative(self) -> Self {
        Product { negative: true, ..self }
    }

    /// Fragments of 8 columns of a warp's tile, 4 if all warps then have a tile.
    const fn fragments(&self) -> usize {
        let wide = self.n.is_multiple_of(32) && self.batch * self.m * self.n >= WARPS * ROWS * 32;
        if wide { 4 } else { 2 }
    }

    /// Quads of a row of a warp's tile that a lane holds.
    const fn quads(&self) -> usize {
        self.fragments() / 2
    }

    const fn columns(&self) -> usize {
        8 * self.fragments()
    }

    const fn tiles(&self) -> usize {
        self.batch * (self.m / ROWS) * (self.n / self.columns())
    }

    /// Tiles of a warp, at most.
    const fn rounds(&self) -> usize {
        self.tiles().div_ceil(WARPS)
    }

    const fn fills_rounds(&self) -> bool {
        self.tiles().is_multiple_of(WARPS)
    }
}

/// A warp's part of a product.
#[derive(CubeType)]
struct WarpTile {
    /// The number of the matrix in the batch.
    matrix: usize,
    /// Its first row.
    row: usize,
    /// Its first column.
    column: usize,
    /// Whether there is one.
    exists: bool,
}

#[cube]
impl WarpTile {
    /// The warp's tile of this round.
    fn of_round(round: usize, #[comptime] p: Product) -> WarpTile {
        let index = round * WARPS + UNIT_POS as usize / 32;
        let (down, across) = comptime!((p.m / ROWS, p.n / p.columns()));
        WarpTile {
            matrix: index / comptime!(down * across),
            row: index / across % down * ROWS,
            column: index % across * comptime!(p.columns()),
            exists: comptime!(p.fills_rounds()) || index < comptime!(p.tiles()),
        }
    }

    /// The row of C of the lane's row `r`, 0 or 1.
    fn row(&self, #[comptime] r: usize) -> usize {
        self.row + UNIT_POS_PLANE as usize / 4 * 2 + r
    }

    /// The place in its row of the lane's quad `q`, in quads.
    fn quad(&self, #[comptime] q: usize, #[comptime] p: Product) -> usize {
        self.column / 4 + UNIT_POS_PLANE as usize % 4 * comptime!(p.quads()) + q
    }
}

/// The arena as quads.
#[cube]
pub fn quads(arena: &SharedMemory<f32>) -> Slice<Quad> {
    arena.to_slice().into_vectorized().with_vector_size::<Const<4>>()
}

/// The arena as quads to write.
#[cube]
pub fn quads_mut(arena: &mut SharedMemory<f32>) -> SliceMut<Quad> {
    arena.to_slice_mut().into_vectorized().with_vector_size::<Const<4>>()
}

/// The arena as pairs.
#[cube]
fn pairs(arena: &SharedMemory<f32>) -> Slice<Pair> {
    arena.to_slice().into_vectorized().with_vector_size::<Const<2>>()
}

/// Numbers as the sums of two in bf16: fragments of an operand, two numbers each.
#[derive(CubeType)]
struct Split {
    high: Array<Bf16Pair>,
    low: Array<Bf16Pair>,
}

#[cube]
impl Split {
    /// Splits `count` pairs of numbers.
    fn new(numbers: &Array<f32>, #[comptime] count: usize) -> Split {
        let mut high = Array::<Bf16Pair>::new(count);
        let mut low = Array::<Bf16Pair>::new(count);
        #[unroll]
        for i in 0..count {
            let mut pair = Pair::empty();
            pair[0] = numbers[comptime!(2 * i)];
            pair[1] = numbers[comptime!(2 * i + 1)];
            let (nearest, rest) = split_pair(pair);
            high[i] = nearest;
            low[i] = rest;
        }
        Split { high, low }
    }
}

/// The fragment of A for the 16 steps of the sum from 16·`step` on.
#[cube]
fn left(arena: &SharedMemory<f32>, tile: &WarpTile, step: usize, #[comptime] p: Product) -> Split {
    let (group, lane) = (UNIT_POS_PLANE as usize / 4, UNIT_POS_PLANE as usize % 4);
    let at = p.a.at + tile.matrix * p.a.next;
    // Rows 2g and 2g + 1, first of the steps 4t and 4t + 1, then of the next two.
    let mut numbers = Array::<f32>::new(8usize);
    let at = at + (tile.row + group * 2) * p.a.row + step * ROWS + lane * 4;
    #[unroll]
    for r in 0..2usize {
        let steps = quads(arena)[at / 4 + comptime!(r * (p.a.row / 4))];
        #[unroll]
        for i in 0..4usize {
            numbers[comptime!(i / 2 * 4 + r * 2 + i % 2)] = steps[i];
        }
    }
    Split::new(&numbers, 4usize)
}

/// The fragments of B for the same steps, one after the other.
#[cube]
fn right(arena: &SharedMemory<f32>, tile: &WarpTile, step: usize, #[comptime] p: Product) -> Split {
    let (group, lane) = (UNIT_POS_PLANE as usize / 4, UNIT_POS_PLANE as usize % 4);
    let fragments = comptime!(p.fragments());
    let at = p.b.at + tile.matrix * p.b.next;
    let column = tile.column + group * fragments;
    let mut numbers = Array::<f32>::new(comptime!(4 * fragments));
    let at = at + (step * ROWS + lane * 4) * p.b.row + column;
    #[unroll]
    for i in 0..4usize {
        if comptime!(fragments == 4) {
            let columns = quads(arena)[at / 4 + comptime!(i * (p.b.row / 4))];
            #[unroll]
            for f in 0..4usize {
                numbers[comptime!(f * 4 + i)] = columns[f];
            }
        } else {
            let columns = pairs(arena)[at / 2 + comptime!(i * (p.b.row / 2))];
            #[unroll]
            for f in 0..2usize {
                numbers[comptime!(f * 4 + i)] = columns[f];
            }
        }
    }
    Split::new(&numbers, comptime!(2 * fragments))
}

/// The fragment `f` of B.
#[cube]
fn fragment(all: &Array<Bf16Pair>, #[comptime] f: usize) -> Array<Bf16Pair> {
    let mut two = Array::<Bf16Pair>::new(2usize);
    two[0] = all[comptime!(2 * f)];
    two[1] = all[comptime!(2 * f + 1)];
    two
}

/// The warp's tile of the product, without the product's sign.
#[cube]
fn product_of(arena: &SharedMemory<f32>, tile: &WarpTile, #[comptime] p: Product) -> Accumulator {
    let def = MmaDefinition::<bf16, bf16, f32>::new(16usize, 8usize, 16usize);
    let fragments = comptime!(p.fragments());
    let mut acc = crate::tile::zeros(fragments);
    // Two thread blocks share a multiprocessor's registers.
    keep_loop();
    for step in 0..comptime!(p.k / ROWS) {
        let a = left(arena, tile, step, p);
        let b = right(arena, tile, step, p);
        #[unroll]
        for f in 0..fragments {
            let (high, low) = (fragment(&b.high, f), fragment(&b.low, f));
            def.execute_inplace(&a.low, &high, acc.index_mut(f));
            def.execute_inplace(&a.high, &low, acc.index_mut(f));
            def.execute_inplace(&a.high, &high, acc.index_mut(f));
        }
    }
    acc
}

/// The lane's quad `q` of its row `r`, with the product's sign.
#[cube]
fn quad_of(
    acc: &Accumulator,
    #[comptime] r: usize,
    #[comptime] q: usize,
    #[comptime] p: Product,
) -> Quad {
    let mut quad = Quad::empty();
    #[unroll]
    for c in 0..4usize {
        let of_quad = comptime!(q * 4 + c);
        let columns = acc.index(comptime!(of_quad % p.fragments()))[r];
        let value = columns[comptime!(of_quad / p.fragments())];
        quad[c] = if comptime!(p.negative) { -value } else { value };
    }
    quad
}

/// Computes the product. Operands and results must be apart; the caller synchronises before and after.
#[cube]
pub fn multiply(arena: &mut SharedMemory<f32>, #[comptime] p: Product) {
    for round in 0..comptime!(p.rounds()) {
        let tile = WarpTile::of_round(round, p);
        if tile.exists {
            let acc = product_of(arena, &tile, p);
            let mut quads = quads_mut(arena);
            let at = comptime!(p.c.at / 4) + tile.matrix * comptime!(p.c.next / 4);
            #[unroll]
            for r in 0..2usize {
                let row = tile.row(r);
                #[unroll]
                for q in 0..comptime!(p.quads()) {
                    let at = at + row * comptime!(p.c.row / 4) + tile.quad(q, p);
                    quads[at] = quad_of(&acc, r, q, p);
                }
            }
        }
    }
}
