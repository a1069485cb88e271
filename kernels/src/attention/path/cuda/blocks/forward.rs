//! The forward pass over the blocks, in the notation of `docs/path.md`.

use cubecl::prelude::*;

use super::layout::{BLOCK, BlockConfig, Operand, SQUARES, two_fit};
use super::memory::{
    BlockInputs, BlockOf, BlockShape, Numbers, first_visible, keep_lower, load_directions, read,
    start_head, start_inverse, write,
};
use crate::tile::matrix::{Product, WarpTile, add_product, pair, scale, scale_rows, write_numbers};
use crate::tile::product::THREADS;
use crate::tile::roles::two_blocks_per_multiprocessor;
use crate::tile::rows::finish_loads;
use crate::tile::{
    Accumulator, Bf16Pair, Chunk, MASKED, Pair, define_exp2, exp2, log2, sum_of_four, zeros,
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
    pub r: Array<Bf16Pair>,
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
        two_blocks_per_multiprocessor(comptime!("forward".to_string()), THREADS);
    }
    define_exp2();
    let d = config.head_dim;
    let mut arena = SharedMemory::<Chunk>::new_aligned(comptime!(config.forward_chunks()), 16usize);
    let mut numbers = Numbers::new();
    let of = BlockOf::own(&shape);
    begin(&mut arena, &mut numbers, inputs, inverses, &of, config);

    // 1. R = Yᵀ W.
    let (w, k, y, m) = comptime!((config.w(), config.k(), config.y(), config.m()));
    let p = comptime!(Operand::atb(y, w, [d, d, BLOCK]));
    let tile = WarpTile::new(p);
    if tile.exists {
        let mut acc = zeros(comptime!(p.fragments()));
        add_product(&arena, &mut acc, &tile, p);
        write_transform(&mut moved.r, &acc, &tile, of.transform(&shape) * comptime!(d * d), d, p);
    }

    // 2. The keys, K − mᵀ W.
    let p = comptime!(Operand::atb(m, w, config.over_tokens()));
    let tile = WarpTile::new(p);
    if tile.exists {
        let mut acc = zeros(comptime!(p.fragments()));
        add_product(&arena, &mut acc, &tile, p);
        scale(&mut acc, -1f32, comptime!(p.fragments()));
        add_rows(&arena, &mut acc, &tile, 1f32, k, p);
        let kv_heads = shape.kv_heads as usize;
        let base = of.padded_row(of.kv_head, kv_heads) * comptime!(d / 2);
        write_numbers(&mut moved.k, &acc, &tile, base, kv_heads * comptime!(d / 2), p);
    }

    // 3. The queries, and what they see.
    let heads = shape.heads as usize;
    let group = heads / shape.kv_heads as usize;
    for member in 0..group {
        let head = of.kv_head * group + member;
        sync_cube();
        start_head(&mut arena, &inputs.q, &of, head, comptime!(config.q()), config);
        if comptime!(own.is_some()) {
            start_head(&mut arena, &inputs.v, &of, of.kv_head, comptime!(config.v()), config);
            numbers.load_decay(&inputs.visibility, &of, head, &shape, config);
        }
        finish_loads();
        let c = comptime!(config.c());
        let mut scores = begin_head(&mut arena, &shape, config);
        let p = comptime!(Operand::ab(c, y, config.over_tokens()));
        let tile = WarpTile::new(p);
        if tile.exists {
            let mut acc = zeros(comptime!(p.fragments()));
            add_product(&arena, &mut acc, &tile, p);
            add_rows(&arena, &mut acc, &tile, shape.scale, comptime!(config.q()), p);
            let base = of.padded_row(head, heads) * comptime!(d / 2);
            write_numbers(&mut moved.q, &acc, &tile, base, heads * comptime!(d / 2), p);
        }
        if comptime!(own.is_some()) {
            let outputs = own.as_mut().unwrap();
            let p = comptime!(Operand::ab(c, m, SQUARES));
            let tile = WarpTile::new(p);
            add_product(&arena, &mut scores, &tile, p);
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

/// Reads w, k, β and G; computes Y = G diag(β) W and m = G diag(β) B, B = W Kᵀ below the diagonal.
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
    finish_loads();
    let p = comptime!(Operand::abt(w, k, config.over_channels()));
    let square = WarpTile::new(p);
    let mut acc = zeros(comptime!(p.fragments()));
    add_product(arena, &mut acc, &square, p);
    scale_rows(&mut acc, &numbers.beta, &square, p);
    keep_lower(&mut acc, &square, false, p);
    write(arena, &acc, &square, m, p);
    sync_cube();

    let of_m = comptime!(Operand::ab(g, m, SQUARES));
    let mut acc = zeros(comptime!(of_m.fragments()));
    add_product(arena, &mut acc, &square, of_m);
    let of_y = comptime!(Operand::ab(g, y, config.over_tokens()));
    let tile = WarpTile::new(of_y);
    let mut acc_y = zeros(comptime!(of_y.fragments()));
    if tile.exists {
        add_product(arena, &mut acc_y, &tile, of_y);
    }
    sync_cube();
    write(arena, &acc, &square, m, of_m);
    if tile.exists {
        write(arena, &acc_y, &tile, y, of_y);
    }
    sync_cube();
}

/// Writes −c = −Q Wᵀ up to the diagonal, with the scale, and returns the scores Q Kᵀ. Synchronises before it returns.
#[cube]
pub fn begin_head(
    arena: &mut SharedMemory<Chunk>,
    shape: &BlockShape,
    #[comptime] config: BlockConfig,
) -> Accumulator {
    let q = comptime!(config.q());
    let p = comptime!(Operand::abt(q, config.w(), config.over_channels()));
    let tile = WarpTile::new(p);
    let mut along = zeros(comptime!(p.fragments()));
    add_product(arena, &mut along, &tile, p);
    scale(&mut along, -shape.scale, comptime!(p.fragments()));
    keep_lower(&mut along, &tile, true, p);
    write(arena, &along, &tile, comptime!(config.c()), p);
    let p = comptime!(Operand::abt(q, config.k(), config.over_channels()));
    let mut scores = zeros(comptime!(p.fragments()));
    add_product(arena, &mut scores, &tile, p);
    scale(&mut scores, shape.scale, comptime!(p.fragments()));
    sync_cube();
    scores
}

/// Writes an accumulator as the sum of two matrices, the first one from pair `base` on.
#[cube]
fn write_transform(
    to: &mut Array<Bf16Pair>,
    acc: &Accumulator,
    tile: &WarpTile,
    base: usize,
    #[comptime] d: usize,
    #[comptime] p: Product,
) {
    let stride = comptime!(d / 2);
    #[unroll]
    for r in 0..2usize {
        #[unroll]
        for f in 0..comptime!(p.fragments()) {
            let value = acc.index(f)[r];
            let nearest = Bf16Pair::cast_from(value);
            let at = base + tile.row(r) * stride + tile.column(f) / 2;
            to[at] = nearest;
            to[at + comptime!(2 * stride * stride)] =
                Bf16Pair::cast_from(value - Pair::cast_from(nearest));
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
    #[comptime] p: Product,
) {
    #[unroll]
    for r in 0..2usize {
        #[unroll]
        for f in 0..comptime!(p.fragments()) {
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
    let p = comptime!(Operand::ab(config.c(), config.m(), SQUARES));
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
            numbers.of_rows[tile.across * BLOCK + row] = largest;
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
        let sum = sum_of_four(sum);
        if UNIT_POS % 4 == 0 {
            numbers.of_rows[comptime!(2 * BLOCK) + tile.across * BLOCK + row] = sum;
        }
    }
    write(arena, scores, &tile, comptime!(config.c()), p);
    sync_cube();

    // 3. Outputs.
    let of_values = comptime!(Operand::ab(config.c(), config.v(), config.over_tokens()));
    let heads = shape.heads as usize;
    #[unroll]
    for r in 0..2usize {
        let row = tile.row(r);
        if (tile.across == 0) & (UNIT_POS % 4 == 0) & (row < of.count) {
            outputs.lse[of.token(head, heads, shape) + row] =
                of_rows[r] + log2(numbers.row(row, 1usize, p));
        }
    }
    let tile = WarpTile::new(of_values);
    if tile.exists {
        let mut acc = zeros(comptime!(of_values.fragments()));
        add_product(arena, &mut acc, &tile, of_values);
        let base = (of.batch * shape.tokens as usize + of.first()) * heads + head;
        #[unroll]
        for r in 0..2usize {
            let row = tile.row(r);
            if row < of.count {
                let at = (base + row * heads) * comptime!(d / 2);
                let factor = 1f32 / numbers.row(row, 1usize, p);
                #[unroll]
                for f in 0..comptime!(of_values.fragments()) {
                    outputs.o[at + tile.column(f) / 2] = acc.index(f)[r] * Pair::cast_from(factor);
                }
            }
        }
    }
}
