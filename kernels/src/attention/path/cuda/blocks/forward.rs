//! The forward pass over the blocks.

use burn::tensor::bf16;
use cubecl::prelude::*;

use super::THREADS;
use super::layout::{BLOCK, BlockConfig, KEYS_16, TILE, blocks_per_multiprocessor};
use super::levels::{
    HALF, among_halves, corner, first_visible, key_moves, level_of_halves, level_of_tiles,
    load_block, load_decay, prepare, score, tile_level,
};
use super::memory::{BlockInputs, BlockOf, BlockShape, copy_rows, load_head, store_rows};
use super::product::{Product, Quad, WarpTile, multiply, product_of, quad_of};
use crate::tile::roles::two_blocks_per_multiprocessor;
use crate::tile::{LOG2_E, MASKED, sum_of_four};

/// What the pass writes; N is the number of tokens rounded up to whole blocks. Rows past the last token are 0
/// in the moved vectors.
#[derive(CubeType, CubeLaunch)]
pub struct BlockOutputs {
    /// The queries times the scale, moved to the starts of their blocks, `[batch, N, heads, head_dim]`.
    pub q: Array<Quad>,
    /// The keys moved to the ends of their blocks, `[batch, N, kv_heads, head_dim]`.
    pub k: Array<Quad>,
    /// R, `[batch, N/64, kv_heads, head_dim, head_dim]`.
    pub r: Array<Quad>,
    /// The output over the keys of the query's own block, `[batch, tokens, heads, head_dim]`.
    pub o: Array<Quad>,
    /// The log-sum-exp of their scores, base 2 and relative to the decay up to the block, `[batch, heads, tokens]`.
    pub lse: Array<f32>,
}

/// Moved queries and keys, the transforms, and attention inside the blocks.
///
/// Grid: blocks · kv_heads · batch; [`THREADS`] threads.
#[cube(launch_unchecked)]
pub fn forward(
    inputs: &BlockInputs,
    outputs: &mut BlockOutputs,
    shape: BlockShape,
    #[comptime] config: BlockConfig,
) {
    if comptime!(blocks_per_multiprocessor(config.forward_elements()) > 1) {
        two_blocks_per_multiprocessor(comptime!("forward".to_string()), THREADS);
    }
    let mut arena = SharedMemory::<f32>::new_aligned(comptime!(config.forward_elements()), 16usize);
    let of = BlockOf::new(CUBE_POS_X as usize, &shape);
    load_block(&mut arena, inputs, &of, config);
    sync_cube();
    prepare(&mut arena, comptime!(config.fifth()), config);
    move_keys(&mut arena, outputs, &of, &shape, config);
    let group = (shape.heads / shape.kv_heads) as usize;
    for member in 0..group {
        let head = of.kv_head * group + member;
        attend(&mut arena, inputs, outputs, &of, head, &shape, config);
    }
}

/// R, and the keys moved to the end of the block.
#[cube]
fn move_keys(
    arena: &mut SharedMemory<f32>,
    outputs: &mut BlockOutputs,
    of: &BlockOf,
    shape: &BlockShape,
    #[comptime] config: BlockConfig,
) {
    let d = config.head_dim;
    let (w, k, x, keys) = comptime!((config.w(), config.k(), config.x(), config.fifth()));
    let s = comptime!(config.s());
    let (first, last) = comptime!((x, x.cell(HALF, 0)));

    // 1. y of the second half, moved to the start of the block.
    let sizes = comptime!(among_halves(d));
    let of_keys = comptime!(s);
    multiply(arena, comptime!(Product::abt([keys, last, of_keys], sizes).negative()));
    // Beside the moves of `prepare`, of which only the second is still needed.
    let of_y = comptime!(corner(s));
    let of_third = comptime!(key_moves(config).cell(HALF, 0));
    multiply(arena, comptime!(Product::abt([last, w, of_y], sizes).negative()));
    sync_cube();
    multiply(arena, comptime!(Product::ab([of_y, first, last], [HALF, d, HALF]).added()));
    sync_cube();

    // 2. R = Yᵀ W.
    let r = comptime!(Product::atb([x, w, x], [d, d, BLOCK]));
    let base = of.transform(shape) * comptime!(d * d / 4);
    for round in 0..comptime!(r.rounds()) {
        let tile = WarpTile::of_round(round, r);
        if tile.exists {
            let acc = product_of(arena, &tile, r);
            #[unroll]
            for row in 0..2usize {
                let at = base + tile.row(row) * comptime!(d / 4);
                #[unroll]
                for q in 0..comptime!(r.quads()) {
                    outputs.r[at + tile.quad(q, r)] = quad_of(&acc, row, q, r);
                }
            }
        }
    }
    sync_cube();

    // 3. The keys, from the ends of their tiles or halves.
    copy_rows(arena, keys, x, HALF, d);
    let (third, fourth) = comptime!((x.cell(HALF, 0), x.cell(HALF + TILE, 0)));
    copy_rows(arena, comptime!(keys.cell(KEYS_16 + TILE, 0)), third, TILE, d);
    copy_rows(arena, comptime!(k.cell(HALF + TILE, 0)), fourth, TILE, d);
    sync_cube();
    let w_last = comptime!(w.cell(HALF, 0));
    let w_fourth = comptime!(w.cell(HALF + TILE, 0));
    multiply(arena, comptime!(Product::ab([of_keys, w_last, first], [HALF, d, HALF]).added()));
    let rows = comptime!([TILE, d, TILE]);
    multiply(arena, comptime!(Product::ab([of_third, w_fourth, third], rows).added()));
    let m = comptime!(config.m().cell(HALF + TILE, 0));
    multiply(arena, comptime!(Product::atb([m, w_fourth, fourth], rows).negative().added()));
    sync_cube();
    let kv_heads = shape.kv_heads as usize;
    let base = of.padded_row(of.kv_head, kv_heads) * comptime!(d / 4);
    let (stride, all) = (kv_heads * comptime!(d / 4), BLOCK.runtime());
    store_rows::<f32>(arena, &mut outputs.k, base, stride, all, 1f32, x, BLOCK, d);
    sync_cube();
}

/// The moved queries of one head, and its attention inside the block.
#[cube]
fn attend(
    arena: &mut SharedMemory<f32>,
    inputs: &BlockInputs,
    outputs: &mut BlockOutputs,
    of: &BlockOf,
    head: usize,
    shape: &BlockShape,
    #[comptime] config: BlockConfig,
) {
    let d = config.head_dim;
    let (x, s, keys) = comptime!((config.x(), config.s(), config.fifth()));
    let heads = shape.heads as usize;
    load_head::<bf16>(arena, &inputs.q, of, head, shape.scale, x, d);
    load_decay(arena, &inputs.visibility, of, head, shape, config);
    sync_cube();
    // −c has its place where no score is yet: first on the other diagonal, then above the first.
    tile_level(arena, comptime!(s.cell(0, BLOCK - TILE).step(TILE, 0).back(TILE)), config);
    level_of_tiles(arena, keys, comptime!(s.cell(0, HALF).step(TILE, TILE)), config);
    level_of_halves(arena, keys, comptime!(s.cell(0, HALF)), config);
    let base = of.padded_row(head, heads) * comptime!(d / 4);
    let (stride, all) = (heads * comptime!(d / 4), BLOCK.runtime());
    store_rows::<f32>(arena, &mut outputs.q, base, stride, all, 1f32, x, BLOCK, d);
    sync_cube();

    load_head::<bf16>(arena, &inputs.v, of, of.kv_head, 1f32, x, d);
    weigh(arena, inputs, outputs, of, head, shape, config);
    sync_cube();
    let product = comptime!(Product::ab([s, x, x], [BLOCK, d, BLOCK]));
    let base = (of.batch * shape.tokens as usize + of.first()) * heads + head;
    for round in 0..comptime!(product.rounds()) {
        let tile = WarpTile::of_round(round, product);
        if tile.exists {
            let acc = product_of(arena, &tile, product);
            #[unroll]
            for r in 0..2usize {
                let row = tile.row(r);
                if row < of.count {
                    let at = (base + row * heads) * comptime!(d / 4);
                    #[unroll]
                    for q in 0..comptime!(product.quads()) {
                        outputs.o[at + tile.quad(q, product)] = quad_of(&acc, r, q, product);
                    }
                }
            }
        }
    }
    sync_cube();
}

/// Turns the scores into weights; 0 where a query does not see a key. Four threads share a row.
#[cube]
fn weigh(
    arena: &mut SharedMemory<f32>,
    inputs: &BlockInputs,
    outputs: &mut BlockOutputs,
    of: &BlockOf,
    head: usize,
    shape: &BlockShape,
    #[comptime] config: BlockConfig,
) {
    let s = comptime!(config.s());
    let (row, part) = (UNIT_POS as usize / 4, UNIT_POS as usize % 4);
    let first = first_visible(&inputs.visibility, of, row, shape, config);
    let mut scores = Array::<f32>::new(TILE);
    let mut largest = f32::cast_from(MASKED);
    #[unroll]
    for i in 0..TILE {
        let column = part + i * 4;
        let visible = (column >= first) & (column <= row);
        scores[i] = select(visible, score(arena, row, column, config), MASKED);
        largest = max(largest, scores[i]);
    }
    largest = max(largest, plane_shuffle_xor(largest, 1));
    largest = max(largest, plane_shuffle_xor(largest, 2));
    let mut sum = 0f32;
    #[unroll]
    for i in 0..TILE {
        let column = part + i * 4;
        let visible = (column >= first) & (column <= row);
        scores[i] = select(visible, Exp::exp(scores[i] - largest), 0f32);
        sum += scores[i];
    }
    let sum = sum_of_four(sum);
    let factor = select(row < of.count, 1f32 / sum, 0f32);
    #[unroll]
    for i in 0..TILE {
        arena[s.at + row * s.row + part + i * 4] = scores[i] * factor;
    }
    if (part == 0) & (row < of.count) {
        outputs.lse[of.token(head, shape.heads as usize, shape) + row] =
            (largest + Log::ln(sum)) * LOG2_E;
    }
}
