//! The forward pass over the blocks, in the notation of `docs/path.md`.

use cubecl::prelude::*;

use super::layout::{BLOCK, BlockConfig, Operand, two_fit};
use super::memory::{
    BlockInputs, BlockOf, BlockShape, Numbers, first_visible, has_column, keep_lower,
    load_directions, scale_rows, start_head, start_inverse, write_numbers,
};
use super::product::{Product, WarpTile, add_product, product, read, start_product, sync, write};
use crate::tile::copies::finish_copies;
use crate::tile::matrix::pair;
use crate::tile::product::THREADS;
use crate::tile::roles::blocks_per_multiprocessor;
use crate::tile::warpgroup::wait;
use crate::tile::{
    ALIGN, Accumulator, Bf16Quad, Chunk, MASKED, Pair, Quad, define_exp2, exp2, has_quad, log2,
    quad_of_row, scale, zeros,
};

/// The moved vectors and the transforms; N is the number of tokens rounded up to whole blocks. Rows past the last token
/// are 0.
#[derive(CubeType, CubeLaunch)]
pub struct MovedOutputs {
    /// The queries times the scale, moved to the starts of their blocks, `[batch, N, heads, head_dim]`.
    pub q: Array<Pair>,
    /// The keys moved to the ends of their blocks, `[batch, N, kv_heads, head_dim]`.
    pub k: Array<Pair>,
    /// R, as the sum of two, `[batch, N/64, kv_heads, 2, head_dim, head_dim]`.
    pub r: Array<Bf16Quad>,
}

/// Attention over the keys of the query's own block.
#[derive(CubeType, CubeLaunch)]
pub struct OwnOutputs {
    /// `[batch, tokens, heads, head_dim]`
    pub o: Array<Pair>,
    /// The log-sum-exp of the scores, base 2 and relative to the decay up to the block, `[batch, heads, tokens]`.
    pub lse: Array<f32>,
}

/// Moved queries and keys, the transforms, and, with `own`, attention inside the blocks.
///
/// Grid: all blocks; [`THREADS`](super::THREADS) threads.
#[cube(launch_unchecked, fast_math = FastMath::all())]
pub fn forward(
    inputs: &BlockInputs,
    inverses: &Array<Chunk>,
    moved: &mut MovedOutputs,
    own: &mut ComptimeOption<OwnOutputs>,
    shape: BlockShape,
    #[comptime] config: BlockConfig,
) {
    if comptime!(two_fit(config.forward_chunks())) {
        blocks_per_multiprocessor(comptime!("forward".to_string()), THREADS, 2usize);
    }
    define_exp2();
    let d = config.head_dim;
    let mut arena = SharedMemory::<Chunk>::new_aligned(comptime!(config.forward_chunks()), ALIGN);
    let mut numbers = Numbers::new();
    let of = BlockOf::own(&shape);
    let heads = shape.heads as usize;
    let group = heads / shape.kv_heads as usize;
    start_queries(&mut arena, inputs, &of, of.kv_head * group, comptime!(own.is_some()), config);
    begin(&mut arena, &mut numbers, inputs, inverses, &of, config);

    // 1. R = Yᵀ W.
    let (w, k, y, m) = comptime!((config.w(), config.k(), config.y(), config.m()));
    let p = comptime!(Product::atb(y, w, config.giving_transform()));
    let acc = product(&arena, p);
    write_transform(&mut moved.r, &acc, &WarpTile::new(p), of.transform(&shape), config);

    // 2. The keys, K − mᵀ W.
    let p = comptime!(Product::atb(m, w, config.over_tokens()));
    let tile = WarpTile::new(p);
    let mut acc = product(&arena, p);
    scale(&mut acc, -1f32);
    add_rows(&arena, &mut acc, &tile, 1f32, k);
    let kv_heads = shape.kv_heads as usize;
    let base = of.padded_row(of.kv_head, kv_heads) * comptime!(d / 2);
    write_numbers(&mut moved.k, &acc, &tile, base, kv_heads * comptime!(d / 2), config);

    // 3. The queries, and what they see.
    for member in 0..group {
        let head = of.kv_head * group + member;
        if member > 0 {
            sync();
            start_queries(&mut arena, inputs, &of, head, comptime!(own.is_some()), config);
        }
        if comptime!(own.is_some()) {
            numbers.load_decay(&inputs.visibility, &of, head, &shape, config);
        }
        finish_copies();
        let c = comptime!(config.c());
        let mut scores = begin_head(&mut arena, &shape, config);
        let p = comptime!(Product::ab(c, y, config.over_tokens()));
        let tile = WarpTile::new(p);
        let mut acc = product(&arena, p);
        add_rows(&arena, &mut acc, &tile, shape.scale, comptime!(config.q()));
        let base = of.padded_row(head, heads) * comptime!(d / 2);
        write_numbers(&mut moved.q, &acc, &tile, base, heads * comptime!(d / 2), config);
        if comptime!(own.is_some()) {
            let outputs = own.as_mut().unwrap();
            add_product(&arena, &mut scores, comptime!(Product::ab(c, m, config.squares())));
            attend(
                &mut arena,
                &mut numbers,
                inputs,
                outputs,
                &of,
                head,
                &mut scores,
                &shape,
                config,
            );
        }
    }
}

/// Starts to read a head's queries and, for attention, the values.
#[cube]
fn start_queries(
    arena: &mut SharedMemory<Chunk>,
    inputs: &BlockInputs,
    of: &BlockOf,
    head: usize,
    #[comptime] with_values: bool,
    #[comptime] config: BlockConfig,
) {
    start_head(arena, &inputs.q, of, head, comptime!(config.q()), config);
    if with_values {
        start_head(arena, &inputs.v, of, of.kv_head, comptime!(config.v()), config);
    }
}

/// Reads w, k, β and G, and waits for all copies; computes Y = G diag(β) W and m = G diag(β) B, B = W Kᵀ below the
/// diagonal.
#[cube]
pub fn begin(
    arena: &mut SharedMemory<Chunk>,
    numbers: &mut Numbers,
    inputs: &BlockInputs,
    inverses: &Array<Chunk>,
    of: &BlockOf,
    #[comptime] config: BlockConfig,
) {
    let (w, k, y, m) = comptime!((config.w(), config.k(), config.y(), config.m()));
    let g = comptime!(config.c());
    start_head(arena, &inputs.k, of, of.kv_head, k, config);
    start_inverse(arena, inverses, g);
    load_directions(arena, inputs, of, true, config);
    numbers.load_beta(inputs, of);
    finish_copies();
    let p = comptime!(Product::abt(w, k, config.over_channels()));
    let square = WarpTile::new(p);
    let mut acc = product(arena, p);
    scale_rows(&mut acc, &numbers.beta, &square);
    keep_lower(&mut acc, &square, false);
    write(arena, &acc, &square, m);
    sync();

    let of_m = comptime!(Product::ab(g, m, config.squares()));
    let of_y = comptime!(Product::ab(g, y, config.over_tokens()));
    let mut acc = zeros(comptime!(of_m.fragments()));
    let mut acc_y = zeros(comptime!(of_y.fragments()));
    start_product(arena, &mut acc, of_m);
    start_product(arena, &mut acc_y, of_y);
    wait(&mut acc, 0usize);
    wait(&mut acc_y, 0usize);
    sync();
    write(arena, &acc, &square, m);
    write(arena, &acc_y, &WarpTile::new(of_y), y);
    sync();
}

/// Writes −c = −Q Wᵀ up to the diagonal, with the scale, and returns the scores Q Kᵀ. Synchronises before it returns.
#[cube]
pub fn begin_head(
    arena: &mut SharedMemory<Chunk>,
    shape: &BlockShape,
    #[comptime] config: BlockConfig,
) -> Accumulator {
    let q = comptime!(config.q());
    let p = comptime!(Product::abt(q, config.w(), config.over_channels()));
    let of_scores = comptime!(Product::abt(q, config.k(), config.over_channels()));
    let mut along = zeros(comptime!(p.fragments()));
    let mut scores = zeros(comptime!(p.fragments()));
    start_product(arena, &mut along, p);
    start_product(arena, &mut scores, of_scores);
    wait(&mut along, 0usize);
    wait(&mut scores, 0usize);
    let tile = WarpTile::new(p);
    scale(&mut along, -shape.scale);
    keep_lower(&mut along, &tile, true);
    write(arena, &along, &tile, comptime!(config.c()));
    scale(&mut scores, shape.scale);
    sync();
    scores
}

/// Writes a transform, number `number`, as the sum of two matrices.
#[cube]
fn write_transform(
    to: &mut Array<Bf16Quad>,
    acc: &Accumulator,
    tile: &WarpTile,
    number: usize,
    #[comptime] config: BlockConfig,
) {
    let d = config.head_dim;
    #[unroll]
    for r in 0..2usize {
        let row = tile.row(r);
        #[unroll]
        for two in 0..comptime!(acc.len().div_ceil(2)) {
            let quad = quad_of_row(acc, two, r);
            let column = tile.column_of_quad(two);
            if (row < d) & has_quad(two, acc.len()) & has_column(column, config) {
                let nearest = Bf16Quad::cast_from(quad);
                let at = number * comptime!(d * d / 2) + row * comptime!(d / 4) + column / 4;
                to[at] = nearest;
                to[at + comptime!(d * d / 4)] =
                    Bf16Quad::cast_from(quad - Quad::cast_from(nearest));
            }
        }
    }
}

/// Adds a factor times rows in shared memory.
#[cube]
pub fn add_rows(
    arena: &SharedMemory<Chunk>,
    acc: &mut Accumulator,
    tile: &WarpTile,
    factor: f32,
    #[comptime] from: Operand,
) {
    #[unroll]
    for r in 0..2usize {
        #[unroll]
        for f in 0..acc.len() {
            let value = read(arena, tile.row(r), tile.column(f), from);
            let fragment = acc.index_mut(f);
            fragment[r] += value * Pair::cast_from(factor);
        }
    }
}

/// Softmax of the scores, and the sum of the values. The queries' c has been read by all threads that have passed the
/// first barrier.
#[cube]
fn attend(
    arena: &mut SharedMemory<Chunk>,
    numbers: &mut Numbers,
    inputs: &BlockInputs,
    outputs: &mut OwnOutputs,
    of: &BlockOf,
    head: usize,
    scores: &mut Accumulator,
    shape: &BlockShape,
    #[comptime] config: BlockConfig,
) {
    let d = config.head_dim;
    let p = comptime!(Product::ab(config.c(), config.m(), config.squares()));
    let tile = WarpTile::new(p);

    // 1. The largest of each row.
    #[unroll]
    for r in 0..2usize {
        let row = tile.row(r);
        let first = first_visible(&inputs.visibility, of, row, shape, config);
        let mut largest = f32::cast_from(MASKED);
        #[unroll]
        for f in 0..comptime!(p.fragments()) {
            let fragment = scores.index_mut(f);
            let value = fragment[r];
            let mut masked = Pair::empty();
            #[unroll]
            for c in 0..2usize {
                let column = tile.column(f) + c;
                let visible = (column >= first) & (column <= row);
                let score = numbers.score(value[c], column, config);
                masked[c] = select(visible, score, MASKED);
                largest = max(largest, masked[c]);
            }
            fragment[r] = masked;
        }
        largest = max(largest, plane_shuffle_xor(largest, 1));
        largest = max(largest, plane_shuffle_xor(largest, 2));
        if UNIT_POS % 4 == 0 {
            numbers.of_rows[tile.group * BLOCK + row] = largest;
        }
    }
    sync_cube();

    // 2. Weights relative to it. A row without a visible key, past the last token, has none.
    let mut of_rows = Array::<f32>::new(2usize);
    #[unroll]
    for r in 0..2usize {
        let row = tile.row(r);
        let largest = max(numbers.of_rows[row], numbers.of_rows[BLOCK + row]);
        of_rows[r] = largest;
        let reference = select(row < of.count, largest, 0f32);
        let mut sum = 0f32;
        #[unroll]
        for f in 0..comptime!(p.fragments()) {
            let fragment = scores.index_mut(f);
            let value = fragment[r];
            let weights = pair(exp2(value[0] - reference), exp2(value[1] - reference));
            sum += weights[0] + weights[1];
            fragment[r] = weights;
        }
        numbers.put_row(sum, row, &tile, 1usize);
    }
    write(arena, scores, &tile, comptime!(config.c()));
    sync();

    // 3. Outputs.
    let of_values = comptime!(Product::ab(config.c(), config.v(), config.over_tokens()));
    let heads = shape.heads as usize;
    #[unroll]
    for r in 0..2usize {
        let row = tile.row(r);
        if (tile.group == 0) & (UNIT_POS % 4 == 0) & (row < of.count) {
            outputs.lse[of.token(head, heads, shape) + row] =
                of_rows[r] + log2(numbers.row(row, 1usize));
        }
    }
    let tile = WarpTile::new(of_values);
    let acc = product(arena, of_values);
    let base = (of.batch * shape.tokens as usize + of.first()) * heads + head;
    #[unroll]
    for r in 0..2usize {
        let row = tile.row(r);
        if row < of.count {
            let at = (base + row * heads) * comptime!(d / 2);
            let factor = 1f32 / numbers.row(row, 1usize);
            #[unroll]
            for f in 0..acc.len() {
                let column = tile.column(f);
                if has_column(column, config) {
                    outputs.o[at + column / 2] = acc.index(f)[r] * Pair::cast_from(factor);
                }
            }
        }
    }
}
