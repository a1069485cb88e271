//! The backward pass of keys and transforms, after the last head: from the end of the block to its tiles.
//!
//! The gradients of keys are at k, those of y in `fifth`. Where a move x ← x − c B, c = x Aᵀ, is taken back, −c and
//! dcᵀ have the places of the square c, dc = −g Bᵀ.

use burn::tensor::bf16;
use cubecl::prelude::*;

use super::THREADS;
use super::backward::{BlockGradients, Upstream, fetch, scratch_base, store_head};
use super::layout::{BLOCK, BlockConfig, KEYS_16, KEYS_32, TILE, TILES, Y_MOVED, scratch};
use super::levels::{HALF, among_halves, among_tiles, corner, corners, even, odd, tile_products};
use super::memory::{
    BlockInputs, BlockOf, BlockShape, RowQuad, add_rows, copy_rows, load_head, load_rows, rounds_of,
};
use super::product::{Kept, Place, Product, Quad, add_to_global, multiply, quads, quads_mut};
use crate::tile::sum_of_four;

/// The gradients of k, v, w and β, from those of the moved keys, of R and of the versions that queries met.
#[cube]
pub fn finish_keys(
    arena: &mut SharedMemory<f32>,
    inputs: &BlockInputs,
    upstream: &Upstream,
    gradients: &mut BlockGradients,
    memory: &mut Array<Quad>,
    of: &BlockOf,
    shape: &BlockShape,
    #[comptime] config: BlockConfig,
) {
    let d = config.head_dim;
    let (k, y, x, g) = comptime!((config.k(), config.y(), config.x(), config.fifth()));
    transform_back(arena, upstream, memory, of, shape, config);
    y_of_halves_back(arena, memory, config);
    let kv_heads = shape.kv_heads as usize;
    let from = of.padded_row(of.kv_head, kv_heads) * comptime!(d / 4);
    load_rows(arena, &upstream.k, from, kv_heads * comptime!(d / 4), k, BLOCK, d);
    fetch(arena, memory, comptime!(scratch::KEYS + KEYS_32), x, HALF, config);
    sync_cube();
    keys_of_halves_back(arena, memory, config);

    add(arena, memory, comptime!(scratch::D_KEYS + KEYS_32), k, HALF, config);
    add(arena, memory, comptime!(scratch::D_Y + Y_MOVED), comptime!(g.cell(TILE, 0)), TILE, config);
    fetch(arena, memory, comptime!(scratch::KEYS + KEYS_16), comptime!(even(x)), HALF, config);
    sync_cube();
    y_of_tiles_back(arena, memory, config);
    keys_of_tiles_back(arena, memory, config);

    add(arena, memory, comptime!(scratch::D_KEYS + KEYS_16), comptime!(even(k)), HALF, config);
    add(arena, memory, scratch::D_Y, g, BLOCK, config);
    load_head::<bf16>(arena, &inputs.k, of, of.kv_head, 1f32, x, d);
    sync_cube();
    tiles_back(arena, gradients, memory, of, shape, config);

    store_head::<f32>(arena, &mut gradients.w, of, of.kv_head, 1f32, y, config);
    // A thread has the same elements in all passes over rows.
    add(arena, memory, scratch::D_K, k, BLOCK, config);
    store_head::<bf16>(arena, &mut gradients.k, of, of.kv_head, 1f32, k, config);
    fetch(arena, memory, scratch::D_V, x, BLOCK, config);
    store_head::<bf16>(arena, &mut gradients.v, of, of.kv_head, 1f32, x, config);
    sync_cube();
}

/// Adds rows of scratch memory.
#[cube]
fn add(
    arena: &mut SharedMemory<f32>,
    memory: &Array<Quad>,
    #[comptime] first: usize,
    #[comptime] to: Place,
    #[comptime] rows: usize,
    #[comptime] config: BlockConfig,
) {
    let d = config.head_dim;
    let base = scratch_base(config) + comptime!(first * d / 4);
    add_rows(arena, memory, base, comptime!(d / 4).runtime(), to, rows, d);
}

/// R = Yᵀ W backwards: the gradient of y at the start of the block. Leaves y of halves at x.
#[cube]
fn transform_back(
    arena: &mut SharedMemory<f32>,
    upstream: &Upstream,
    memory: &mut Array<Quad>,
    of: &BlockOf,
    shape: &BlockShape,
    #[comptime] config: BlockConfig,
) {
    let d = config.head_dim;
    let (w, k, y) = comptime!((config.w(), config.k(), config.y()));
    let (x, g) = comptime!((config.x(), config.fifth()));

    // 1. y moved to the start of the block, at k.
    #[unroll]
    for i in 0..2usize {
        let to = comptime!(if i == 0 { x } else { k });
        copy_rows(arena, y, to, TILE, d);
        copy_rows(arena, comptime!(y.cell(Y_MOVED, 0)), comptime!(to.cell(TILE, 0)), TILE, d);
        copy_rows(arena, comptime!(y.cell(HALF, 0)), comptime!(to.cell(HALF, 0)), TILE, d);
        let last = comptime!(to.cell(HALF + TILE, 0));
        fetch(arena, memory, scratch::Y_LAST, last, TILE, config);
    }
    sync_cube();
    let c = comptime!(config.s());
    let moves = comptime!(Product::abt([x.cell(HALF, 0), w, c], among_halves(d)));
    multiply(arena, comptime!(moves.negative()));
    sync_cube();
    multiply(arena, comptime!(Product::ab([c, x, k.cell(HALF, 0)], [HALF, d, HALF]).added()));
    sync_cube();

    // 2. dY = W dRᵀ and dW += Y dR, by parts of dR's rows.
    let part = comptime!(config.transform_part());
    let from = of.transform(shape) * comptime!(d * d / 4);
    let base = scratch_base(config);
    let d_w = comptime!(config.scratch(scratch::D_W));
    #[unroll]
    for i in 0..comptime!(config.transform_parts()) {
        let (first, rows) = comptime!((i * BLOCK, config.transform_rows(i)));
        load_part(arena, &upstream.r, from + comptime!(first * d / 4), part, rows, d);
        sync_cube();
        let of_w = comptime!(Product::ab([k.cell(0, first), part, d_w], [BLOCK, d, rows]));
        add_to_global(arena, memory, base, comptime!(of_w));
        multiply(arena, comptime!(Product::abt([w, part, g.cell(0, first)], [BLOCK, rows, d])));
        sync_cube();
    }
}

/// Reads consecutive rows of dR.
#[cube]
fn load_part(
    arena: &mut SharedMemory<f32>,
    memory: &Array<Quad>,
    base: usize,
    #[comptime] to: Place,
    #[comptime] rows: usize,
    #[comptime] dim: usize,
) {
    let mut quads = quads_mut(arena);
    for round in 0..comptime!(rounds_of(rows, dim)) {
        let own = RowQuad::of_round(round, rows, dim);
        if own.exists {
            let at = comptime!(to.at / 4) + own.row * comptime!(to.row / 4) + own.quad;
            quads[at] = memory[base + own.row * comptime!(dim / 4) + own.quad];
        }
    }
}

/// y of the second half, moved over the first: y of halves at x.
#[cube]
fn y_of_halves_back(
    arena: &mut SharedMemory<f32>,
    memory: &mut Array<Quad>,
    #[comptime] config: BlockConfig,
) {
    let d = config.head_dim;
    let (w, x, g) = comptime!((config.w(), config.x(), config.fifth()));
    let (x_last, g_last) = comptime!((x.cell(HALF, 0), g.cell(HALF, 0)));
    let (c, dct) = comptime!((corner(config.c()), config.c().cell(0, HALF)));
    let sizes = comptime!(among_halves(d));
    multiply(arena, comptime!(Product::abt([x_last, w, c], sizes).negative()));
    multiply(arena, comptime!(Product::abt([x, g_last, dct], sizes).negative()));
    sync_cube();
    let rows = comptime!([HALF, d, HALF]);
    multiply(arena, comptime!(Product::atb([c, g_last, g], rows).added()));
    let d_w = comptime!(config.scratch(scratch::D_W));
    let base = scratch_base(config);
    add_to_global(arena, memory, base, comptime!(Product::ab([dct, x_last, d_w], rows)));
    sync_cube();
    multiply(arena, comptime!(Product::atb([dct, w, g_last], rows).added()));
    sync_cube();
}

/// Keys of the first half, moved over the second: keys before the move at x, y of the second half after them.
#[cube]
fn keys_of_halves_back(
    arena: &mut SharedMemory<f32>,
    memory: &mut Array<Quad>,
    #[comptime] config: BlockConfig,
) {
    let d = config.head_dim;
    let (k, x) = comptime!((config.k(), config.x()));
    let (y_last, w_last) = comptime!((x.cell(HALF, 0), config.w().cell(HALF, 0)));
    let g_last = comptime!(config.fifth().cell(HALF, 0));
    let (c, dct) = comptime!((corner(config.c()), config.c().cell(0, HALF)));
    let sizes = comptime!(among_halves(d));
    multiply(arena, comptime!(Product::abt([x, y_last, c], sizes).negative()));
    multiply(arena, comptime!(Product::abt([w_last, k, dct], sizes).negative()));
    sync_cube();
    let rows = comptime!([HALF, d, HALF]);
    let d_w = comptime!(config.scratch(scratch::D_W + HALF));
    let base = scratch_base(config);
    add_to_global(arena, memory, base, comptime!(Product::atb([c, k, d_w], rows)));
    multiply(arena, comptime!(Product::ab([dct, x, g_last], rows).added()));
    sync_cube();
    multiply(arena, comptime!(Product::atb([dct, y_last, k], rows).added()));
    sync_cube();
}

/// y of the second and fourth tile, moved over the one before.
#[cube]
fn y_of_tiles_back(
    arena: &mut SharedMemory<f32>,
    memory: &mut Array<Quad>,
    #[comptime] config: BlockConfig,
) {
    let d = config.head_dim;
    let (w, y, g) = comptime!((even(config.w()), config.y(), config.fifth()));
    let (c, dct) = comptime!((corners(config.c()), config.c().cell(0, TILE).step(HALF, HALF)));
    let sizes = comptime!(among_tiles(d));
    multiply(arena, comptime!(Product::abt([odd(y), w, c], sizes).batch(2).negative()));
    multiply(arena, comptime!(Product::abt([even(y), odd(g), dct], sizes).batch(2).negative()));
    sync_cube();
    let rows = comptime!([TILE, d, TILE]);
    multiply(arena, comptime!(Product::atb([c, odd(g), even(g)], rows).batch(2).added()));
    let d_w = comptime!(even(config.scratch(scratch::D_W)));
    let base = scratch_base(config);
    add_to_global(arena, memory, base, comptime!(Product::ab([dct, odd(y), d_w], rows).batch(2)));
    sync_cube();
    multiply(arena, comptime!(Product::atb([dct, w, odd(g)], rows).batch(2).added()));
    sync_cube();
}

/// Keys of the first and third tile, moved over the next: keys before the move in these tiles of x.
#[cube]
fn keys_of_tiles_back(
    arena: &mut SharedMemory<f32>,
    memory: &mut Array<Quad>,
    #[comptime] config: BlockConfig,
) {
    let d = config.head_dim;
    let (k, x) = comptime!((even(config.k()), even(config.x())));
    let (y, w, g) = comptime!((odd(config.y()), odd(config.w()), odd(config.fifth())));
    let (c, dct) = comptime!((corners(config.c()), config.c().cell(0, TILE).step(HALF, HALF)));
    let sizes = comptime!(among_tiles(d));
    multiply(arena, comptime!(Product::abt([x, y, c], sizes).batch(2).negative()));
    multiply(arena, comptime!(Product::abt([w, k, dct], sizes).batch(2).negative()));
    sync_cube();
    let rows = comptime!([TILE, d, TILE]);
    let d_w = comptime!(odd(config.scratch(scratch::D_W)));
    let base = scratch_base(config);
    add_to_global(arena, memory, base, comptime!(Product::atb([c, k, d_w], rows).batch(2)));
    multiply(arena, comptime!(Product::ab([dct, x, g], rows).batch(2).added()));
    sync_cube();
    multiply(arena, comptime!(Product::atb([dct, y, k], rows).batch(2).added()));
    sync_cube();
}

/// Inside the tiles: the gradient of β, that of w at y, and that of the keys at k but for the part in scratch memory.
/// The keys are at x.
#[cube]
fn tiles_back(
    arena: &mut SharedMemory<f32>,
    gradients: &mut BlockGradients,
    memory: &mut Array<Quad>,
    of: &BlockOf,
    shape: &BlockShape,
    #[comptime] config: BlockConfig,
) {
    let d = config.head_dim;
    let (w, k, y) = comptime!((config.w(), config.k(), config.y()));
    let (x, g) = comptime!((config.x(), config.fifth()));
    let (m, dm) = comptime!((config.m(), config.dm()));
    let a = comptime!(config.spare_tiles(0));
    let wk = comptime!(config.spare_tiles(1));
    let f = comptime!(config.spare_tiles(2));
    tile_products(arena, x, a, wk, config);
    let (below, sizes) = comptime!((Kept::StrictlyLower, among_tiles(d)));
    let of_moved = comptime!(Product::abt([w, k, dm], sizes).batch(TILES));
    multiply(arena, comptime!(of_moved.negative().added().kept(below)));
    sync_cube();
    substitute_back(arena, a, config);
    sync_cube();

    // The products of the gradients with y and m, by which a and β enter. A thread has the same elements of both.
    multiply(arena, comptime!(Product::abt([g, y, f], sizes).batch(TILES)));
    let small = comptime!([TILE, TILE, TILE]);
    let of_m = comptime!(Product::abt([dm, m, f], small).batch(TILES));
    multiply(arena, comptime!(of_m.added().kept(below)));
    sync_cube();
    beta_back(arena, gradients, of, shape, a, wk, f, config);
    begin_w(arena, memory, config);
    sync_cube();
    let rows = comptime!([TILE, d, TILE]);
    multiply(arena, comptime!(Product::ab([dm, x, y], rows).batch(TILES).added()));
    multiply(arena, comptime!(Product::ab([f, w, y], rows).batch(TILES).added()));
    multiply(arena, comptime!(Product::ab([m, k, y], rows).batch(TILES).negative().added()));
    sync_cube();
    multiply(arena, comptime!(Product::atb([f, w, y], rows).batch(TILES).added()));
    multiply(arena, comptime!(Product::atb([dm, w, k], rows).batch(TILES).added()));
    sync_cube();
}

/// The substitution backwards, for each column of the gradients of y and m: g_s −= a_ts β_t g_t, s < t, from the
/// last t.
#[cube]
fn substitute_back(
    arena: &mut SharedMemory<f32>,
    #[comptime] a: Place,
    #[comptime] config: BlockConfig,
) {
    let (g, dm) = comptime!((config.fifth(), config.dm()));
    let (dim, each) = comptime!((config.head_dim, config.head_dim + TILE));
    for round in 0..comptime!((TILES * each).div_ceil(THREADS)) {
        let index = round * THREADS + UNIT_POS as usize;
        if index < comptime!(TILES * each) {
            let (tile, column) = (index / each, index % each);
            let mut at = dm.at + tile * dm.next + column - dim;
            let mut stride = comptime!(dm.row).runtime();
            // The first row that a column has.
            let mut first = column + 1 - dim;
            if column < dim {
                at = g.at + tile * g.next + column;
                stride = comptime!(g.row).runtime();
                first = 0usize.runtime();
            }
            let a_at = comptime!(a.at / 4) + tile * comptime!(a.next / 4);
            let beta_at = comptime!(config.beta()) + tile * TILE;
            let mut x = Array::<f32>::new(TILE);
            #[unroll]
            for t in 0..TILE {
                x[t] = arena[at + t * stride];
            }
            #[unroll]
            for back in 0..TILE {
                let t = comptime!(TILE - 1 - back);
                let value = x[t] * arena[beta_at + t];
                #[unroll]
                for four in 0..comptime!(t.div_ceil(4)) {
                    let quad = quads(arena)[a_at + comptime!(t * (a.row / 4) + four)];
                    // Beyond the diagonal a is 0.
                    #[unroll]
                    for i in 0..4usize {
                        x[comptime!(four * 4 + i)] -= quad[i] * value;
                    }
                }
            }
            #[unroll]
            for t in 0..TILE {
                arena[at + t * stride] = select(t >= first, x[t], 0f32);
            }
        }
    }
}

/// dβ; then the gradient of W Kᵀ in place of that of m, β dm, and that of a in place of f, −β f. Four threads share
/// a row.
#[cube]
fn beta_back(
    arena: &mut SharedMemory<f32>,
    gradients: &mut BlockGradients,
    of: &BlockOf,
    shape: &BlockShape,
    #[comptime] a: Place,
    #[comptime] wk: Place,
    #[comptime] f: Place,
    #[comptime] config: BlockConfig,
) {
    let (row, part) = (UNIT_POS as usize / 4, UNIT_POS as usize % 4);
    let beta = arena[comptime!(config.beta()) + row];
    let (w, g, dm) = comptime!((config.w(), config.fifth(), config.dm()));
    let mut sum = 0f32;
    let mut quads = quads_mut(arena);
    for i in 0..comptime!(config.head_dim / 16) {
        let at = row * comptime!(w.row / 4) + i * 4 + part;
        sum += dot(quads[comptime!(w.at / 4) + at], quads[comptime!(g.at / 4) + at]);
    }
    let at = row * comptime!(f.row / 4) + part;
    let of_a = quads[comptime!(f.at / 4) + at];
    let of_wk = quads[comptime!(dm.at / 4) + at];
    sum += dot(of_wk, quads[comptime!(wk.at / 4) + at]);
    sum -= dot(of_a, quads[comptime!(a.at / 4) + at]);
    let sum = sum_of_four(sum);
    quads[comptime!(f.at / 4) + at] = of_a * Quad::cast_from(-beta);
    quads[comptime!(dm.at / 4) + at] = of_wk * Quad::cast_from(beta);
    if (part == 0) & (row < of.count) {
        gradients.beta[of.token(of.kv_head, shape.kv_heads as usize, shape) + row] = sum;
    }
}

#[cube]
fn dot(a: Quad, b: Quad) -> f32 {
    let product = a * b;
    (product[0] + product[1]) + (product[2] + product[3])
}

/// The gradient of w so far, from scratch memory, and that through y, β g, at y.
#[cube]
fn begin_w(arena: &mut SharedMemory<f32>, memory: &Array<Quad>, #[comptime] config: BlockConfig) {
    let (d, y, g) = comptime!((config.head_dim, config.y(), config.fifth()));
    let base = scratch_base(config) + comptime!(scratch::D_W * d / 4);
    for round in 0..comptime!(rounds_of(BLOCK, d)) {
        let own = RowQuad::of_round(round, BLOCK, d);
        let beta = arena[comptime!(config.beta()) + own.row];
        let mut quads = quads_mut(arena);
        let value = quads[own.at(g)] * Quad::cast_from(beta);
        quads[own.at(y)] = value + memory[base + own.row * comptime!(d / 4) + own.quad];
    }
}
