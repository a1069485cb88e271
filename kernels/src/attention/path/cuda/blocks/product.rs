//! Products of small matrices in shared memory, in f32.
//!
//! A thread block computes C ± A·B, C ± A·Bᵀ or C ± Aᵀ·B for a batch of equally spaced matrices. Each thread owns
//! micro-tiles of C of up to 4×4 elements and reads four channels at a time. Along a contiguous dimension its
//! elements are neighbours, along the others they are strided, so that a warp reads neighbouring rows or quads:
//! with rows of an odd number of quads neither conflicts in banks.

use cubecl::prelude::*;

use super::THREADS;

/// Four neighbouring elements of a row.
pub type Quad = Vector<f32, Const<4>>;

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

    /// The same batch with its matrices this many columns less apart.
    pub const fn back(self, columns: usize) -> Self {
        Place { next: self.next - columns, ..self }
    }
}

/// Which elements of a product with `Bᵀ` remain; the others become 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kept {
    /// All of them.
    All,
    /// Those on and below the diagonal.
    Lower,
    /// Those below the diagonal.
    StrictlyLower,
}

/// Which operand is transposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Form {
    Plain,
    FirstTransposed,
    SecondTransposed,
}

/// A batch of products [m × k]·[k × n].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Product {
    a: Place,
    b: Place,
    c: Place,
    form: Form,
    m: usize,
    n: usize,
    k: usize,
    batch: usize,
    adds: bool,
    negative: bool,
    kept: Kept,
}

impl Product {
    const fn new(form: Form, [a, b, c]: [Place; 3], [m, n, k]: [usize; 3]) -> Self {
        let (batch, adds, negative, kept) = (1, false, false, Kept::All);
        Product { a, b, c, form, m, n, k, batch, adds, negative, kept }
    }

    /// C = A·B.
    pub const fn ab(abc: [Place; 3], mnk: [usize; 3]) -> Self {
        Self::new(Form::Plain, abc, mnk)
    }

    /// C = A·Bᵀ.
    pub const fn abt(abc: [Place; 3], mnk: [usize; 3]) -> Self {
        Self::new(Form::SecondTransposed, abc, mnk)
    }

    /// C = Aᵀ·B.
    pub const fn atb(abc: [Place; 3], mnk: [usize; 3]) -> Self {
        Self::new(Form::FirstTransposed, abc, mnk)
    }

    /// The same for this many matrices.
    pub const fn batch(self, batch: usize) -> Self {
        Product { batch, ..self }
    }

    /// Adds to C.
    pub const fn added(self) -> Self {
        Product { adds: true, ..self }
    }

    /// With the product's sign changed.
    pub const fn negative(self) -> Self {
        Product { negative: true, ..self }
    }

    /// With these elements of the result alone.
    pub const fn kept(self, kept: Kept) -> Self {
        Product { kept, ..self }
    }

    const fn first_transposed(&self) -> bool {
        matches!(self.form, Form::FirstTransposed)
    }

    const fn second_transposed(&self) -> bool {
        matches!(self.form, Form::SecondTransposed)
    }

    /// Whether there is less than a 4×4 micro-tile for each thread.
    const fn small(&self) -> bool {
        self.batch * self.m * self.n < 16 * THREADS
    }

    /// Rows of a micro-tile.
    pub const fn rows(&self) -> usize {
        if self.first_transposed() || !self.small() { 4 } else { 2 }
    }

    /// Columns of a micro-tile.
    pub const fn columns(&self) -> usize {
        if !self.second_transposed() || !self.small() { 4 } else { 2 }
    }

    /// Micro-tiles below one another.
    const fn down(&self) -> usize {
        self.m / self.rows()
    }

    /// Micro-tiles beside one another.
    const fn across(&self) -> usize {
        self.n / self.columns()
    }

    const fn tiles(&self) -> usize {
        self.batch * self.down() * self.across()
    }

    /// Micro-tiles of a thread, at most.
    pub const fn rounds(&self) -> usize {
        self.tiles().div_ceil(THREADS)
    }

    const fn fills_rounds(&self) -> bool {
        self.tiles().is_multiple_of(THREADS)
    }
}

/// A thread's part of a product.
#[derive(CubeType)]
pub struct MicroTile {
    /// The number of the matrix in the batch.
    pub matrix: usize,
    /// The number of the micro-tile among those below one another.
    pub down: usize,
    /// The number among those beside one another.
    pub across: usize,
    /// Whether there is one.
    pub exists: bool,
}

#[cube]
impl MicroTile {
    /// The thread's micro-tile of this round.
    pub fn of_round(round: usize, #[comptime] p: Product) -> MicroTile {
        let index = round * THREADS + UNIT_POS as usize;
        let (down, across) = comptime!((p.down(), p.across()));
        MicroTile {
            matrix: index / comptime!(down * across),
            down: index / across % down,
            across: index % across,
            exists: comptime!(p.fills_rounds()) || index < comptime!(p.tiles()),
        }
    }

    /// The row of C of the micro-tile's row `r`.
    pub fn row(&self, #[comptime] r: usize, #[comptime] p: Product) -> usize {
        if comptime!(p.first_transposed()) {
            self.down * 4 + r
        } else {
            self.down + comptime!(r * p.down())
        }
    }

    /// The column of C of the micro-tile's column `c`, with Bᵀ.
    pub fn column(&self, #[comptime] c: usize, #[comptime] p: Product) -> usize {
        self.across + comptime!(c * p.across())
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

/// `acc` += the micro-tile of the product, row by row, without the product's sign.
#[cube]
pub fn accumulate(
    arena: &SharedMemory<f32>,
    acc: &mut Array<f32>,
    tile: &MicroTile,
    #[comptime] p: Product,
) {
    let quads = quads(arena);
    let (rows, columns) = comptime!((p.rows(), p.columns()));
    let (a_row, b_row) = comptime!((p.a.row / 4, p.b.row / 4));
    let a_at = comptime!(p.a.at / 4) + tile.matrix * comptime!(p.a.next / 4);
    let b_at = comptime!(p.b.at / 4) + tile.matrix * comptime!(p.b.next / 4);
    for step in 0..comptime!(p.k / 4) {
        let mut a = Array::<Quad>::new(4usize);
        if comptime!(p.first_transposed()) {
            #[unroll]
            for i in 0..4usize {
                a[i] = quads[a_at + (step * 4 + i) * a_row + tile.down];
            }
        } else {
            #[unroll]
            for r in 0..rows {
                a[r] = quads[a_at + (tile.down + comptime!(r * p.down())) * a_row + step];
            }
        }
        let mut b = Array::<Quad>::new(4usize);
        if comptime!(p.second_transposed()) {
            #[unroll]
            for c in 0..columns {
                b[c] = quads[b_at + (tile.across + comptime!(c * p.across())) * b_row + step];
            }
        } else {
            #[unroll]
            for i in 0..4usize {
                b[i] = quads[b_at + (step * 4 + i) * b_row + tile.across];
            }
        }
        #[unroll]
        for i in 0..4usize {
            #[unroll]
            for r in 0..rows {
                let x = element(&a, i, r, comptime!(p.first_transposed()));
                #[unroll]
                for c in 0..columns {
                    let y = element(&b, i, c, comptime!(!p.second_transposed()));
                    acc[comptime!(r * columns + c)] += x * y;
                }
            }
        }
    }
}

/// The operand's element for step `i` of the sum and line `line` of the micro-tile.
#[cube]
fn element(
    quads: &Array<Quad>,
    #[comptime] i: usize,
    #[comptime] line: usize,
    #[comptime] by_step: bool,
) -> f32 {
    if comptime!(by_step) {
        let quad = quads[i];
        quad[line]
    } else {
        let quad = quads[line];
        quad[i]
    }
}

/// A micro-tile's accumulators, all zero.
#[cube]
pub fn zeros(#[comptime] p: Product) -> Array<f32> {
    let count = comptime!(p.rows() * p.columns());
    let mut acc = Array::<f32>::new(count);
    #[unroll]
    for i in 0..count {
        acc[i] = 0f32;
    }
    acc
}

/// Row `r` of the accumulators, with the product's sign.
#[cube]
pub fn row_of(acc: &Array<f32>, #[comptime] r: usize, #[comptime] p: Product) -> Quad {
    let mut quad = Quad::empty();
    #[unroll]
    for c in 0..4usize {
        let value = acc[comptime!(r * 4 + c)];
        quad[c] = if comptime!(p.negative) { -value } else { value };
    }
    quad
}

/// Computes the product. Operands and results must be apart; the caller synchronises before and after.
#[cube]
pub fn multiply(arena: &mut SharedMemory<f32>, #[comptime] p: Product) {
    for round in 0..comptime!(p.rounds()) {
        let tile = MicroTile::of_round(round, p);
        if tile.exists {
            let mut acc = zeros(p);
            accumulate(arena, &mut acc, &tile, p);
            if comptime!(p.second_transposed()) {
                store_elements(arena, &acc, &tile, p);
            } else {
                store_quads(arena, &acc, &tile, p);
            }
        }
    }
}

#[cube]
fn store_quads(
    arena: &mut SharedMemory<f32>,
    acc: &Array<f32>,
    tile: &MicroTile,
    #[comptime] p: Product,
) {
    let mut quads = quads_mut(arena);
    let at = comptime!(p.c.at / 4) + tile.matrix * comptime!(p.c.next / 4) + tile.across;
    #[unroll]
    for r in 0..comptime!(p.rows()) {
        let at = at + tile.row(r, p) * comptime!(p.c.row / 4);
        let mut value = row_of(acc, r, p);
        if comptime!(p.adds) {
            value += quads[at];
        }
        quads[at] = value;
    }
}

#[cube]
fn store_elements(
    arena: &mut SharedMemory<f32>,
    acc: &Array<f32>,
    tile: &MicroTile,
    #[comptime] p: Product,
) {
    let at = p.c.at + tile.matrix * p.c.next;
    let columns = comptime!(p.columns());
    #[unroll]
    for r in 0..comptime!(p.rows()) {
        let row = tile.row(r, p);
        #[unroll]
        for c in 0..columns {
            let column = tile.column(c, p);
            let at = at + row * p.c.row + column;
            let product = acc[comptime!(r * columns + c)];
            let mut value = if comptime!(p.negative) { -product } else { product };
            if comptime!(p.adds) {
                value += arena[at];
            }
            if comptime!(matches!(p.kept, Kept::Lower)) {
                value = select(column > row, 0f32, value);
            }
            if comptime!(matches!(p.kept, Kept::StrictlyLower)) {
                value = select(column >= row, 0f32, value);
            }
            arena[at] = value;
        }
    }
}

/// Adds the product, which has no Bᵀ, to a matrix in global memory: `c` counts from quad `base` there.
#[cube]
pub fn add_to_global(
    arena: &SharedMemory<f32>,
    memory: &mut Array<Quad>,
    base: usize,
    #[comptime] p: Product,
) {
    for round in 0..comptime!(p.rounds()) {
        let tile = MicroTile::of_round(round, p);
        if tile.exists {
            let mut acc = zeros(p);
            accumulate(arena, &mut acc, &tile, p);
            let at =
                base + comptime!(p.c.at / 4) + tile.matrix * comptime!(p.c.next / 4) + tile.across;
            #[unroll]
            for r in 0..comptime!(p.rows()) {
                let at = at + tile.row(r, p) * comptime!(p.c.row / 4);
                memory[at] += row_of(&acc, r, p);
            }
        }
    }
}
