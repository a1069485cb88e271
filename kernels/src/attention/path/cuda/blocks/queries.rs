//! The backward pass of the queries of one head: from the start of the block to their tiles.
//!
//! Gradients of the queries are in `fifth`, −c of all levels and dS have the places of the squares c and s. The
//! gradients of y, of keys and of w, as far as queries meet them, are added to those in scratch memory.

use burn::tensor::bf16;
use cubecl::prelude::*;

use super::backward::{Upstream, fetch, scratch_base};
use super::layout::{BLOCK, BlockConfig, KEYS_16, KEYS_32, TILE, TILES, Y_MOVED, scratch};
use super::levels::{HALF, among_tiles, corner, corners, even, odd};
use super::memory::{BlockInputs, BlockOf, BlockShape, load_head, load_rows};
use super::product::{Kept, Product, Quad, add_to_global, multiply};

/// From the gradients of the moved queries of one head to that of q, without its scale, in `fifth`.
#[cube]
pub fn move_back(
    arena: &mut SharedMemory<f32>,
    inputs: &BlockInputs,
    upstream: &Upstream,
    memory: &mut Array<Quad>,
    of: &BlockOf,
    head: usize,
    shape: &BlockShape,
    #[comptime] config: BlockConfig,
) {
    let d = config.head_dim;
    let (k, x, g) = comptime!((config.k(), config.x(), config.fifth()));
    let heads = shape.heads as usize;
    let from = of.padded_row(head, heads) * comptime!(d / 4);
    load_rows(arena, &upstream.q, from, heads * comptime!(d / 4), g, BLOCK, d);
    fetch(arena, memory, scratch::KEYS, k, BLOCK, config);
    fetch(arena, memory, scratch::QUERIES_32, comptime!(x.cell(HALF, 0)), HALF, config);
    sync_cube();
    halves_back(arena, memory, config);
    fetch(arena, memory, scratch::QUERIES_16, comptime!(odd(x)), HALF, config);
    sync_cube();
    tiles_of_halves_back(arena, memory, config);
    load_head::<bf16>(arena, &inputs.k, of, of.kv_head, 1f32, k, d);
    load_head::<bf16>(arena, &inputs.q, of, head, shape.scale, x, d);
    sync_cube();
    tiles_back(arena, memory, config);
}

/// The level of the halves: queries at x, keys of levels at k, gradients in `fifth`.
#[cube]
fn halves_back(
    arena: &mut SharedMemory<f32>,
    memory: &mut Array<Quad>,
    #[comptime] config: BlockConfig,
) {
    let d = config.head_dim;
    let (w, k, y) = comptime!((config.w(), config.k(), config.y()));
    let (x, g) = comptime!((config.x().cell(HALF, 0), config.fifth().cell(HALF, 0)));
    let (ds, c) = comptime!((corner(config.s()), corner(config.c())));
    // dcᵀ, above the diagonal, dc = −g Yᵀ; y of the second tile lies apart.
    let dct = comptime!(config.c().cell(0, HALF));
    let base = scratch_base(config);
    let moved = comptime!(Product::abt(
        [y.step(Y_MOVED, 0), g.step(0, 0), dct.step(TILE, 0)],
        [TILE, HALF, d]
    ));
    multiply(arena, comptime!(moved.batch(2).negative()));
    let d_y = comptime!(config.scratch(scratch::D_Y).step(Y_MOVED, 0));
    let of_y = comptime!(Product::atb([c.step(0, TILE), g.step(0, 0), d_y], [TILE, d, HALF]));
    add_to_global(arena, memory, base, comptime!(of_y.batch(2)));
    sync_cube();

    let sizes = comptime!([HALF, d, HALF]);
    let d_w = comptime!(config.scratch(scratch::D_W));
    add_to_global(arena, memory, base, comptime!(Product::ab([dct, x, d_w], sizes)));
    let d_keys = comptime!(config.scratch(scratch::D_KEYS + KEYS_32));
    add_to_global(arena, memory, base, comptime!(Product::atb([ds, x, d_keys], sizes)));
    multiply(arena, comptime!(Product::atb([dct, w, g], sizes).added()));
    sync_cube();
    let keys = comptime!(k.cell(KEYS_32, 0));
    multiply(arena, comptime!(Product::ab([ds, keys, g], sizes).added()));
    sync_cube();
}

/// The level of the tiles of each half, likewise.
#[cube]
fn tiles_of_halves_back(
    arena: &mut SharedMemory<f32>,
    memory: &mut Array<Quad>,
    #[comptime] config: BlockConfig,
) {
    let d = config.head_dim;
    let (w, y) = comptime!((even(config.w()), even(config.y())));
    let (x, g) = comptime!((odd(config.x()), odd(config.fifth())));
    let (ds, c) = comptime!((corners(config.s()), corners(config.c())));
    let dct = comptime!(config.c().cell(0, TILE).step(HALF, HALF));
    let base = scratch_base(config);
    multiply(arena, comptime!(Product::abt([y, g, dct], among_tiles(d)).batch(2).negative()));
    let sizes = comptime!([TILE, d, TILE]);
    let d_y = comptime!(even(config.scratch(scratch::D_Y)));
    add_to_global(arena, memory, base, comptime!(Product::atb([c, g, d_y], sizes).batch(2)));
    sync_cube();

    let d_w = comptime!(even(config.scratch(scratch::D_W)));
    add_to_global(arena, memory, base, comptime!(Product::ab([dct, x, d_w], sizes).batch(2)));
    let d_keys = comptime!(config.scratch(scratch::D_KEYS + KEYS_16).step(TILE, 0));
    add_to_global(arena, memory, base, comptime!(Product::atb([ds, x, d_keys], sizes).batch(2)));
    multiply(arena, comptime!(Product::atb([dct, w, g], sizes).batch(2).added()));
    sync_cube();
    let keys = comptime!(config.k().cell(KEYS_16, 0).step(TILE, 0));
    multiply(arena, comptime!(Product::ab([ds, keys, g], sizes).batch(2).added()));
    sync_cube();
}

/// Inside the tiles: q and k as given at x and k.
#[cube]
fn tiles_back(
    arena: &mut SharedMemory<f32>,
    memory: &mut Array<Quad>,
    #[comptime] config: BlockConfig,
) {
    let d = config.head_dim;
    let (w, k, y) = comptime!((config.w(), config.k(), config.y()));
    let (x, g, m) = comptime!((config.x(), config.fifth(), config.m()));
    let (ds, c) = comptime!((config.s(), config.c()));
    let (dc, dm) = comptime!((config.dc(), config.dm()));
    let base = scratch_base(config);
    // A thread has the same elements of both parts of dc.
    let small = comptime!([TILE, TILE, TILE]);
    multiply(arena, comptime!(Product::abt([ds, m, dc], small).batch(TILES).negative()));
    let of_moved = comptime!(Product::abt([g, y, dc], among_tiles(d)).batch(TILES));
    multiply(arena, comptime!(of_moved.negative().added().kept(Kept::Lower)));
    multiply(arena, comptime!(Product::atb([c, ds, dm], small).batch(TILES).added()));
    let sizes = comptime!([TILE, d, TILE]);
    let d_y = comptime!(config.scratch(scratch::D_Y));
    add_to_global(arena, memory, base, comptime!(Product::atb([c, g, d_y], sizes).batch(TILES)));
    sync_cube();

    let d_w = comptime!(config.scratch(scratch::D_W));
    add_to_global(arena, memory, base, comptime!(Product::atb([dc, x, d_w], sizes).batch(TILES)));
    let d_k = comptime!(config.scratch(scratch::D_K));
    add_to_global(arena, memory, base, comptime!(Product::atb([ds, x, d_k], sizes).batch(TILES)));
    multiply(arena, comptime!(Product::ab([dc, w, g], sizes).batch(TILES).added()));
    multiply(arena, comptime!(Product::ab([ds, k, g], sizes).batch(TILES).added()));
    sync_cube();
}
