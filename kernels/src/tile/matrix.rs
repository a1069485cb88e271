//! Products of bf16 matrices in shared memory by `mma.sync`, with sums in f32 registers.
//!
//! A block's eight warps share the result C, in tiles of 16 rows and a multiple of 16 columns, one for each warp: an
//! owner of elements depends on the size of C alone. So products with results of one size add to one accumulator, and
//! a result stays in registers for as long as a kernel needs it.

use burn::tensor::bf16;
use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

use super::product::THREADS;
use super::{Accumulator, Bf16Pair, CHUNK, Chunk, Pair, half, quad_in_two_chunks, quad_of_row};

/// Warps of a block.
pub const WARPS: usize = THREADS / 32;

/// Rows of a warp's tile, columns of a pair of fragments, and steps of the sum of an instruction.
const STEP: usize = 16;

/// Where a matrix lies in shared memory, in chunks.
///
/// Its rows are an odd number of chunks apart: eight of them then lie in different banks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Matrix {
    /// The first chunk.
    pub at: usize,
    /// The stride between rows.
    pub row: usize,
}

impl Matrix {
    /// A matrix of `columns` columns, a multiple of 16, from chunk `at` on.
    pub const fn new(at: usize, columns: usize) -> Self {
        Matrix { at, row: columns / CHUNK + 1 }
    }

    /// The first chunk after `rows` rows.
    pub const fn end(self, rows: usize) -> usize {
        self.at + rows * self.row
    }
}

/// Which operand lies in memory transposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Form {
    Plain,
    FirstTransposed,
    SecondTransposed,
}

/// A product [m × k]·[k × n]; m, n and k are multiples of 16, and m is at most 128.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Product {
    a: Matrix,
    b: Matrix,
    form: Form,
    m: usize,
    n: usize,
    k: usize,
}

impl Product {
    const fn new(form: Form, a: Matrix, b: Matrix, [m, n, k]: [usize; 3]) -> Self {
        assert!(m.is_multiple_of(STEP) && n.is_multiple_of(STEP) && k.is_multiple_of(STEP));
        assert!(m <= WARPS * STEP);
        Product { a, b, form, m, n, k }
    }

    /// A·B.
    pub const fn ab(a: Matrix, b: Matrix, mnk: [usize; 3]) -> Self {
        Self::new(Form::Plain, a, b, mnk)
    }

    /// A·Bᵀ.
    pub const fn abt(a: Matrix, b: Matrix, mnk: [usize; 3]) -> Self {
        Self::new(Form::SecondTransposed, a, b, mnk)
    }

    /// Aᵀ·B.
    pub const fn atb(a: Matrix, b: Matrix, mnk: [usize; 3]) -> Self {
        Self::new(Form::FirstTransposed, a, b, mnk)
    }

    const fn first_transposed(&self) -> bool {
        matches!(self.form, Form::FirstTransposed)
    }

    const fn second_transposed(&self) -> bool {
        matches!(self.form, Form::SecondTransposed)
    }

    /// Tiles beside one another: as many as there are warps for, of equal width.
    const fn across(&self) -> usize {
        let mut across = WARPS / (self.m / STEP);
        while !(self.n / STEP).is_multiple_of(across) {
            across -= 1;
        }
        across
    }

    const fn columns(&self) -> usize {
        self.n / self.across()
    }

    /// Fragments of a warp's accumulator.
    pub const fn fragments(&self) -> usize {
        self.columns() / 8
    }

    const fn fills_warps(&self) -> bool {
        self.m / STEP * self.across() == WARPS
    }
}

/// A warp's part of a result.
#[derive(CubeType, Clone, Copy)]
pub struct WarpTile {
    /// Whether there is one.
    pub exists: bool,
    /// Its number among those beside one another.
    pub across: usize,
    /// Its number among those below one another.
    pub down: usize,
    /// Its first column.
    pub column: usize,
}

#[cube]
impl WarpTile {
    /// The warp's tile of a product's result.
    pub fn new(#[comptime] p: Product) -> WarpTile {
        let warp = UNIT_POS as usize / 32;
        let down = comptime!(p.m / STEP);
        let tiles = comptime!(p.m / STEP * p.across());
        WarpTile {
            exists: comptime!(p.fills_warps()) || warp < tiles,
            across: warp / down,
            down: warp % down,
            column: warp / down * comptime!(p.columns()),
        }
    }

    /// The row of the lane's row `r`, 0 or 1.
    pub fn row(&self, #[comptime] r: usize) -> usize {
        self.down * STEP + UNIT_POS_PLANE as usize / 4 + comptime!(8 * r)
    }

    /// The first of the lane's two columns in a fragment.
    pub fn column(&self, #[comptime] fragment: usize) -> usize {
        self.column + UNIT_POS_PLANE as usize % 4 * 2 + comptime!(8 * fragment)
    }
}

/// Adds a product to the warp's accumulator, for a warp whose tile exists.
#[cube]
pub fn add_product(
    arena: &SharedMemory<Chunk>,
    acc: &mut Accumulator,
    tile: &WarpTile,
    #[comptime] p: Product,
) {
    let def = MmaDefinition::<bf16, bf16, f32>::new(16usize, 8usize, 16usize);
    for step in 0..comptime!(p.k / STEP) {
        let a = load_a(&def, arena, tile, step, p);
        #[unroll]
        for pair in 0..comptime!(p.fragments() / 2) {
            let column = tile.column + comptime!(pair * STEP);
            let four = load_b(&def, arena, column, step, p);
            #[unroll]
            for h in 0..2usize {
                let c = acc.index_mut(comptime!(pair * 2 + h));
                def.execute_inplace(&a, &half(&four, h), c);
            }
        }
    }
}

/// The fragment of A of the warp's rows and a step of the sum.
#[cube]
fn load_a(
    def: &MmaDefinition<bf16, bf16, f32>,
    arena: &SharedMemory<Chunk>,
    tile: &WarpTile,
    step: usize,
    #[comptime] p: Product,
) -> Array<Bf16Pair> {
    let lane = UNIT_POS_PLANE as usize;
    let (eight, within, second) = (lane / 8 % 2, lane % 8, lane / 16);
    let mut at = p.a.at + (tile.down * STEP + lane % 16) * p.a.row + step * 2 + second;
    if comptime!(p.first_transposed()) {
        at = p.a.at + (step * STEP + second * 8 + within) * p.a.row + tile.down * 2 + eight;
    }
    let slice = arena.slice(at, at + 1);
    let transposed = comptime!(p.first_transposed());
    def.load_matrix::<_, Const<2>>(&slice, MatrixIdent::A, 4usize, transposed)
}

/// Two fragments of B: 16 columns from `column` on.
#[cube]
fn load_b(
    def: &MmaDefinition<bf16, bf16, f32>,
    arena: &SharedMemory<Chunk>,
    column: usize,
    step: usize,
    #[comptime] p: Product,
) -> Array<Bf16Pair> {
    let lane = UNIT_POS_PLANE as usize;
    let (eight, within, second) = (lane / 8 % 2, lane % 8, lane / 16);
    let mut at = p.b.at + (step * STEP + lane % 16) * p.b.row + column / 8 + second;
    if comptime!(p.second_transposed()) {
        at = p.b.at + (column + second * 8 + within) * p.b.row + step * 2 + eight;
    }
    let slice = arena.slice(at, at + 1);
    let transposed = comptime!(!p.second_transposed());
    def.load_matrix::<_, Const<2>>(&slice, MatrixIdent::B, 4usize, transposed)
}

/// Two numbers as a pair.
#[cube]
pub fn pair(first: f32, second: f32) -> Pair {
    let mut pair = Pair::empty();
    pair[0] = first;
    pair[1] = second;
    pair
}

/// Multiplies the rows of an accumulator by factors in shared memory.
#[cube]
pub fn scale_rows(
    acc: &mut Accumulator,
    factors: &SharedMemory<f32>,
    tile: &WarpTile,
    #[comptime] p: Product,
) {
    #[unroll]
    for r in 0..2usize {
        let factor = factors[tile.row(r)];
        #[unroll]
        for f in 0..comptime!(p.fragments()) {
            let fragment = acc.index_mut(f);
            fragment[r] = fragment[r] * Pair::cast_from(factor);
        }
    }
}

/// The element pair at an even column of a matrix in shared memory.
#[cube]
pub fn read_pair(
    arena: &SharedMemory<Chunk>,
    row: usize,
    column: usize,
    #[comptime] from: Matrix,
) -> Pair {
    let pairs = arena.to_slice().with_vector_size::<Const<2>>();
    Pair::cast_from(pairs[(from.at + row * from.row) * comptime!(CHUNK / 2) + column / 2])
}

/// Writes a pair, rounded to bf16.
#[cube]
pub fn write_pair(
    arena: &mut SharedMemory<Chunk>,
    value: Pair,
    row: usize,
    column: usize,
    #[comptime] to: Matrix,
) {
    let mut pairs = arena.to_slice_mut().with_vector_size::<Const<2>>();
    pairs[(to.at + row * to.row) * comptime!(CHUNK / 2) + column / 2] = Bf16Pair::cast_from(value);
}

/// Writes an accumulator, rounded to bf16.
#[cube]
pub fn write(
    arena: &mut SharedMemory<Chunk>,
    acc: &Accumulator,
    tile: &WarpTile,
    #[comptime] to: Matrix,
    #[comptime] p: Product,
) {
    #[unroll]
    for r in 0..2usize {
        #[unroll]
        for f in 0..comptime!(p.fragments()) {
            write_pair(arena, acc.index(f)[r], tile.row(r), tile.column(f), to);
        }
    }
}

/// Writes the rows of an accumulator before `count` to rows of `stride` pairs in global memory, from pair `base` on,
/// both even. All lanes of the warp call it.
#[cube]
pub fn write_rows<O: Numeric>(
    output: &mut Array<Vector<O, Const<2>>>,
    acc: &Accumulator,
    tile: &WarpTile,
    base: usize,
    stride: usize,
    count: usize,
    #[comptime] p: Product,
) {
    let mut quads = output.to_slice_mut().with_vector_size::<Const<4>>();
    #[unroll]
    for r in 0..2usize {
        let row = tile.row(r);
        let at = (base + row * stride) / 2 + tile.column / 4 + quad_in_two_chunks();
        #[unroll]
        for two in 0..comptime!(p.fragments() / 2) {
            let quad = quad_of_row(acc, two, r);
            if row < count {
                quads[at + comptime!(two * CHUNK / 2)] = Vector::<O, Const<4>>::cast_from(quad);
            }
        }
    }
}

/// Reads the rows of an accumulator before `count`, at least one, as [`write_rows`] writes them. The others are the
/// last of these.
#[cube]
pub fn read_rows(
    acc: &mut Accumulator,
    source: &Array<Bf16Pair>,
    tile: &WarpTile,
    base: usize,
    stride: usize,
    count: usize,
    #[comptime] p: Product,
) {
    #[unroll]
    for r in 0..2usize {
        let row = base + min(tile.row(r), count - 1) * stride;
        #[unroll]
        for f in 0..comptime!(p.fragments()) {
            let fragment = acc.index_mut(f);
            fragment[r] = Pair::cast_from(source[row + tile.column(f) / 2]);
        }
    }
}

/// Reads an accumulator from rows of `stride` pairs in global memory, from pair `base` on.
#[cube]
pub fn read_numbers(
    acc: &mut Accumulator,
    numbers: &Array<Pair>,
    tile: &WarpTile,
    base: usize,
    stride: usize,
    #[comptime] p: Product,
) {
    #[unroll]
    for f in 0..comptime!(p.fragments()) {
        let fragment = acc.index_mut(f);
        #[unroll]
        for r in 0..2usize {
            fragment[r] = numbers[base + tile.row(r) * stride + tile.column(f) / 2];
        }
    }
}

/// The inverse of [`read_numbers`].
#[cube]
pub fn write_numbers(
    numbers: &mut Array<Pair>,
    acc: &Accumulator,
    tile: &WarpTile,
    base: usize,
    stride: usize,
    #[comptime] p: Product,
) {
    #[unroll]
    for r in 0..2usize {
        #[unroll]
        for f in 0..comptime!(p.fragments()) {
            numbers[base + tile.row(r) * stride + tile.column(f) / 2] = acc.index(f)[r];
        }
    }
}
