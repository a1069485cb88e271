//! The states at the chunks' boundaries, from the first chunk to the last, and their gradients from the last to the
//! first.

use cubecl::prelude::*;

use super::super::CHUNK_TOKENS;
use super::super::memory::{ChunkOf, EndStates, HandOver, Sizes, TokensOf};
use super::DiagonalConfig;
use crate::attention::flash::HeadChunks;
use crate::tile::matrix::{
    Matrix, Product, WarpTile, add_product, read_numbers, write, write_numbers,
};
use crate::tile::rows::{fetch_to, put, rounds, store};
use crate::tile::{Accumulator, CHUNK, Chunk, Pair, RowStrides, zeros};

/// What the scan reads, and its result.
#[derive(CubeType, CubeLaunch)]
pub struct ScanArrays {
    /// K, `[batch, kv_heads, tokens, head_dim]`; backward Q, `[batch, heads, tokens, head_dim]`.
    pub vectors: HeadChunks,
    /// v, `[batch, kv_heads, tokens, value_dim]`; backward do, `[batch, heads, tokens, value_dim]`.
    pub values: HeadChunks,
    /// `[rows, chunks, head_dim]`
    pub decay: Array<f32>,
    /// G, `[rows, chunks, head_dim, head_dim]`, if there are corrections.
    pub change: Array<Chunk>,
    /// The states before the chunks, `[rows, chunks, head_dim, value_dim]`; backward the gradients of those after them.
    pub states: Array<Chunk>,
}

/// The matrices of a block in shared memory; two of each, of which one is written while the other is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Layout {
    vectors: Matrix,
    values: Matrix,
    state: Matrix,
    change: Matrix,
    chunks: usize,
}

impl Layout {
    const fn new(config: &DiagonalConfig) -> Self {
        let (d, n) = (config.head_dim, config.columns);
        let vectors = Matrix::new(0, d);
        let values = Matrix::new(vectors.end(CHUNK_TOKENS), n);
        let state = Matrix::new(values.end(CHUNK_TOKENS), n);
        let change = Matrix::new(state.end(d), d);
        let chunks = if config.corrects() { change.end(d) } else { change.at };
        Layout { vectors, values, state, change, chunks }
    }

    /// The second of each.
    fn second(self) -> Self {
        let by = self.chunks;
        let moved = |m: Matrix| Matrix { at: m.at + by, row: m.row };
        Layout {
            vectors: moved(self.vectors),
            values: moved(self.values),
            state: moved(self.state),
            change: moved(self.change),
            chunks: by,
        }
    }
}

/// The step of the scan: a chunk, or backward a query head of a chunk.
#[derive(CubeType, Clone, Copy)]
struct Step {
    of: ChunkOf,
    /// The query head of the row, backward.
    head: usize,
    /// Whether it is the first of its chunk.
    begins: bool,
}

#[cube]
impl Step {
    fn new(row: usize, step: usize, sizes: &Sizes, #[comptime] back: bool) -> Step {
        let chunks = sizes.chunks as usize;
        if comptime!(back) {
            let group = sizes.group as usize;
            let step = min(step, chunks * group - 1);
            let of = ChunkOf::new(row, chunks - 1 - step / group, sizes);
            let head = step % group;
            Step { of, head, begins: head == 0 }
        } else {
            let of = ChunkOf::new(row, min(step, chunks - 1), sizes);
            Step { of, head: 0usize.runtime(), begins: true.runtime() }
        }
    }

    /// Where its tokens lie in the arrays of vectors and of values.
    fn tokens(&self, strides: &RowStrides, sizes: &Sizes, #[comptime] back: bool) -> TokensOf {
        if comptime!(back) {
            self.of.queries(self.head, strides, sizes)
        } else {
            self.of.tokens(strides)
        }
    }
}

/// A step's numbers, in registers.
#[derive(CubeType)]
struct Ahead {
    vectors: Array<Chunk>,
    values: Array<Chunk>,
    change: Array<Chunk>,
    /// Tokens of the vectors and values.
    count: usize,
    /// The decays of the warp's rows of the state.
    decay: Array<f32>,
}

#[cube]
impl Ahead {
    /// Without values.
    fn new(#[comptime] config: DiagonalConfig) -> Ahead {
        let (d, n) = comptime!((config.head_dim, config.columns));
        Ahead {
            vectors: Array::<Chunk>::new(comptime!(rounds(CHUNK_TOKENS, d))),
            values: Array::<Chunk>::new(comptime!(rounds(CHUNK_TOKENS, n))),
            change: Array::<Chunk>::new(comptime!(if config.corrects() {
                rounds(d, d)
            } else {
                1
            })),
            count: usize::cast_from(0u32),
            decay: Array::<f32>::new(2usize),
        }
    }

    /// Starts to read a step's.
    fn fetch(
        &mut self,
        arrays: &ScanArrays,
        step: &Step,
        own: &WarpTile,
        first: usize,
        sizes: &Sizes,
        #[comptime] back: bool,
        #[comptime] config: DiagonalConfig,
    ) {
        let (d, n) = comptime!((config.head_dim, config.columns));
        self.count = step.of.count;
        let vectors = step.tokens(&arrays.vectors.strides, sizes, back);
        vectors.fetch_to(&mut self.vectors, &arrays.vectors, 0usize, d);
        let values = step.tokens(&arrays.values.strides, sizes, back);
        values.fetch_to(&mut self.values, &arrays.values, first, n);
        if comptime!(config.corrects()) {
            let of_k = comptime!(d / CHUNK);
            let base = step.of.number * comptime!(d * d / CHUNK);
            fetch_to(&mut self.change, &arrays.change, base, of_k, d.runtime(), d, d);
        }
        #[unroll]
        for r in 0..2usize {
            self.decay[r] = 0f32;
            if own.exists {
                self.decay[r] = arrays.decay[step.of.number * d + own.row(r)];
            }
        }
    }

    fn put(
        &self,
        arena: &mut SharedMemory<Chunk>,
        #[comptime] layout: Layout,
        #[comptime] config: DiagonalConfig,
    ) {
        let (d, n) = comptime!((config.head_dim, config.columns));
        put(arena, &self.vectors, self.count, layout.vectors, CHUNK_TOKENS, d);
        put(arena, &self.values, self.count, layout.values, CHUNK_TOKENS, n);
        if comptime!(config.corrects()) {
            put(arena, &self.change, d.runtime(), layout.change, d, d);
        }
    }

    fn put_decay(&self, decay: &mut Array<f32>) {
        #[unroll]
        for r in 0..2usize {
            decay[r] = self.decay[r];
        }
    }
}

/// A row's states for a part of the value's channels: S' = decay ⊙ S + G S + Kᵀ V. Backward the same with Gᵀ, and Qᵀ do
/// of each query head in place of Kᵀ V. The state is in registers in f32; products read it rounded to bf16, as it is
/// written.
///
/// Grid: rows · parts; [`THREADS`](super::super::THREADS) threads.
#[cube(launch_unchecked, fast_math = FastMath::all())]
pub fn diagonal_scan(
    arrays: &mut ScanArrays,
    ends: &mut EndStates,
    sizes: Sizes,
    #[comptime] back: bool,
    #[comptime] hand_over: HandOver,
    #[comptime] config: DiagonalConfig,
) {
    let (d, n) = comptime!((config.head_dim, config.columns));
    let layout = comptime!(Layout::new(&config));
    let mut arena = SharedMemory::<Chunk>::new_aligned(comptime!(2 * layout.chunks), 16usize);
    let parts = comptime!(config.parts());
    let (row, part) = (CUBE_POS_X as usize / parts, CUBE_POS_X as usize % parts);
    let first = part * comptime!(n / CHUNK);
    let result = comptime!(Product::atb(layout.vectors, layout.values, [d, n, CHUNK_TOKENS]));
    let own = WarpTile::new(result);
    let mut state = zeros(comptime!(result.fragments()));
    let pairs = comptime!(config.value_dim / 2);
    let of_state = row * comptime!(d * pairs) + part * comptime!(n / 2);
    if comptime!(hand_over.before) {
        if own.exists {
            read_numbers(&mut state, &ends.before, &own, of_state, pairs, result);
        }
    }
    let mut steps = sizes.chunks as usize;
    if comptime!(back) {
        steps *= sizes.group as usize;
    }

    // A step's numbers are read two steps ahead: while one step's wait in registers, the next one's are on their way.
    let mut even = Ahead::new(config);
    let mut odd = Ahead::new(config);
    let step = Step::new(row, 0usize, &sizes, back);
    even.fetch(arrays, &step, &own, first, &sizes, back, config);
    let step = Step::new(row, 1usize, &sizes, back);
    odd.fetch(arrays, &step, &own, first, &sizes, back, config);
    even.put(&mut arena, layout, config);
    let mut decay = Array::<f32>::new(2usize);
    even.put_decay(&mut decay);
    let mut number = usize::cast_from(0u32);
    while number < steps {
        let second = comptime!(layout.second());
        let (this, next) =
            (Step::new(row, number, &sizes, back), Step::new(row, number + 2, &sizes, back));
        even.fetch(arrays, &next, &own, first, &sizes, back, config);
        advance(&mut arena, arrays, &mut state, &decay, &this, &own, first, back, layout, config);
        odd.put(&mut arena, second, config);
        odd.put_decay(&mut decay);
        if number + 1 < steps {
            let (this, next) = (
                Step::new(row, number + 1, &sizes, back),
                Step::new(row, number + 3, &sizes, back),
            );
            odd.fetch(arrays, &next, &own, first, &sizes, back, config);
            advance(
                &mut arena, arrays, &mut state, &decay, &this, &own, first, back, second, config,
            );
            even.put(&mut arena, layout, config);
            even.put_decay(&mut decay);
        }
        number += 2;
    }
    if comptime!(hand_over.after) {
        if own.exists {
            write_numbers(&mut ends.after, &state, &own, of_state, pairs, result);
        }
    }
}

/// Writes the state before a step, and advances it.
#[cube]
fn advance(
    arena: &mut SharedMemory<Chunk>,
    arrays: &mut ScanArrays,
    state: &mut Accumulator,
    decay: &Array<f32>,
    step: &Step,
    own: &WarpTile,
    first: usize,
    #[comptime] back: bool,
    #[comptime] here: Layout,
    #[comptime] config: DiagonalConfig,
) {
    let (d, n) = comptime!((config.head_dim, config.columns));
    let added = comptime!(Product::atb(here.vectors, here.values, [d, n, CHUNK_TOKENS]));
    if own.exists {
        write(arena, state, own, here.state, added);
    }
    sync_cube();
    if step.begins {
        let base = step.of.number * comptime!(d * config.value_dim / CHUNK) + first;
        let of_v = comptime!(config.value_dim / CHUNK);
        store(arena, &mut arrays.states, base, of_v, d.runtime(), here.state, d, n);
    }
    if own.exists {
        if step.begins {
            scale_each(state, decay, comptime!(added.fragments()));
            if comptime!(config.corrects()) {
                let change = comptime!(if back {
                    Product::atb(here.change, here.state, [d, n, d])
                } else {
                    Product::ab(here.change, here.state, [d, n, d])
                });
                add_product(arena, state, own, change);
            }
        }
        add_product(arena, state, own, added);
    }
}

/// Multiplies the lane's rows of an accumulator by their factors.
#[cube]
fn scale_each(acc: &mut Accumulator, factors: &Array<f32>, #[comptime] fragments: usize) {
    #[unroll]
    for f in 0..fragments {
        let fragment = acc.index_mut(f);
        #[unroll]
        for r in 0..2usize {
            fragment[r] = fragment[r] * Pair::cast_from(factors[r]);
        }
    }
}
