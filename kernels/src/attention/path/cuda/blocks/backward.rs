//! The backward pass over the blocks.
//!
//! A thread block owns a block of one kv head: it sums over the heads of the group in order. Sums over heads are in
//! scratch memory, a gradient for each version of a vector that queries meet: y and keys of tiles, and those moved
//! to the ends of halves. After the last head, keys and y are taken from the end of the block to their tiles.

use burn::tensor::bf16;
use cubecl::prelude::*;

use super::THREADS;
use super::keys::finish_keys;
use super::layout::{BLOCK, BlockConfig, TILE, TILES, scratch};
use super::levels::{
    HALF, corner, corners, first_visible, level_of_halves, level_of_tiles, load_block, load_decay,
    odd, prepare, score, tile_level,
};
use super::memory::{
    BlockInputs, BlockOf, BlockShape, HeadQuads, RowQuad, load_head, load_rows, rounds_of,
    store_rows,
};
use super::product::{
    Place, Product, Quad, WarpTile, add_to_global, product_of, quad_of, quads_mut,
};
use super::queries::move_back;

/// The gradients that the pass starts from; N is the number of tokens rounded up to whole blocks.
#[derive(CubeType, CubeLaunch)]
pub struct Upstream {
    /// dO, `[batch, heads, tokens, head_dim]`.
    pub d_o: HeadQuads<bf16>,
    /// The log-sum-exps over all keys, base 2 and relative to the decay up to the block, `[batch, heads, tokens]`.
    pub lse: Array<f32>,
    /// δ = o · dO, `[batch, heads, tokens]`.
    pub delta: Array<f32>,
    /// Of the moved queries, `[batch, N, heads, head_dim]`.
    pub q: Array<Quad>,
    /// Of the moved keys, `[batch, N, kv_heads, head_dim]`.
    pub k: Array<Quad>,
    /// Of v so far, `[batch, N, kv_heads, head_dim]`.
    pub v: Array<Quad>,
    /// Of R, `[batch, N/64, kv_heads, head_dim, head_dim]`.
    pub r: Array<Quad>,
}

/// The gradients that the pass writes.
#[derive(CubeType, CubeLaunch)]
pub struct BlockGradients {
    /// Of q, with the scale.
    pub q: HeadQuads<bf16>,
    /// Of k.
    pub k: HeadQuads<bf16>,
    /// Of v.
    pub v: HeadQuads<bf16>,
    /// Of w.
    pub w: HeadQuads<f32>,
    /// Of β, `[batch, kv_heads, tokens]`.
    pub beta: Array<f32>,
    /// With a decay: Σ_j dS_ij is added, `[batch, heads, tokens]`.
    pub ds_rows: ComptimeOption<Array<f32>>,
    /// With a decay: Σ_i dS_ij is added, `[batch, heads, tokens]`.
    pub ds_columns: ComptimeOption<Array<f32>>,
}

/// The gradients of the blocks' inputs.
///
/// - `memory`: `[thread blocks, scratch rows, head_dim]`
/// - `number`: all blocks
///
/// Grid: as many thread blocks as the device runs at once, each with several blocks; [`THREADS`] threads.
#[cube(launch_unchecked)]
pub fn backward(
    inputs: &BlockInputs,
    upstream: &Upstream,
    gradients: &mut BlockGradients,
    memory: &mut Array<Quad>,
    shape: BlockShape,
    number: u32,
    #[comptime] config: BlockConfig,
) {
    let mut arena =
        SharedMemory::<f32>::new_aligned(comptime!(config.backward_elements()), 16usize);
    let group = (shape.heads / shape.kv_heads) as usize;
    let mut own = CUBE_POS_X as usize;
    while own < number as usize {
        let of = BlockOf::new(own, &shape);
        begin(&mut arena, inputs, upstream, memory, &of, &shape, config);
        for member in 0..group {
            let head = of.kv_head * group + member;
            recompute(&mut arena, inputs, upstream, memory, &of, head, &shape, config);
            weigh(&mut arena, inputs, upstream, memory, &of, head, &shape, config);
            add_sums(&arena, gradients, &of, head, &shape, config);
            move_back(&mut arena, inputs, upstream, memory, &of, head, &shape, config);
            let d_q = comptime!(config.fifth());
            store_head::<bf16>(&arena, &mut gradients.q, &of, head, shape.scale, d_q, config);
            sync_cube();
        }
        finish_keys(&mut arena, inputs, upstream, gradients, memory, &of, &shape, config);
        own += CUBE_COUNT_X as usize;
    }
}

/// Writes a block's rows of one head, times `factor`.
#[cube]
pub fn store_head<E: Numeric>(
    arena: &SharedMemory<f32>,
    to: &mut HeadQuads<E>,
    of: &BlockOf,
    head: usize,
    factor: f32,
    #[comptime] from: Place,
    #[comptime] config: BlockConfig,
) {
    let stride = to.strides.row as usize * 2;
    let base = to.strides.base(of.batch, head) * 2 + of.first() * stride;
    let d = config.head_dim;
    store_rows::<E>(arena, &mut to.quads, base, stride, of.count, factor, from, BLOCK, d);
}

/// The quad of scratch memory at which the thread block's part begins.
#[cube]
pub fn scratch_base(#[comptime] config: BlockConfig) -> usize {
    CUBE_POS_X as usize * comptime!(scratch::ROWS * config.head_dim / 4)
}

/// Tiles, keys of levels, and the sums over heads before the first.
#[cube]
fn begin(
    arena: &mut SharedMemory<f32>,
    inputs: &BlockInputs,
    upstream: &Upstream,
    memory: &mut Array<Quad>,
    of: &BlockOf,
    shape: &BlockShape,
    #[comptime] config: BlockConfig,
) {
    let d = config.head_dim;
    load_block(arena, inputs, of, config);
    let dm = comptime!(config.dm().at);
    for round in 0..comptime!((TILES * config.dm().next).div_ceil(THREADS)) {
        let at = round * THREADS + UNIT_POS as usize;
        if at < comptime!(TILES * config.dm().next) {
            arena[dm + at] = 0f32;
        }
    }
    sync_cube();
    let (keys, x) = comptime!((config.fifth(), config.x()));
    prepare(arena, keys, config);

    let base = scratch_base(config);
    spill(arena, memory, scratch::KEYS, keys, BLOCK, config);
    spill(arena, memory, scratch::Y_LAST, comptime!(x.cell(HALF + TILE, 0)), TILE, config);
    let zeroed = comptime!(scratch::D_V - scratch::D_Y);
    for round in 0..comptime!(rounds_of(zeroed, d)) {
        let own = RowQuad::of_round(round, zeroed, d);
        if own.exists {
            let at = comptime!(scratch::D_Y * d / 4) + own.row * comptime!(d / 4) + own.quad;
            memory[base + at] = Quad::cast_from(0f32);
        }
    }
    let kv_heads = shape.kv_heads as usize;
    let from = of.padded_row(of.kv_head, kv_heads) * comptime!(d / 4);
    for round in 0..comptime!(rounds_of(BLOCK, d)) {
        let own = RowQuad::of_round(round, BLOCK, d);
        if own.exists {
            let at = comptime!(scratch::D_V * d / 4) + own.row * comptime!(d / 4) + own.quad;
            let row = from + own.row * kv_heads * comptime!(d / 4);
            memory[base + at] = upstream.v[row + own.quad];
        }
    }
    sync_cube();
}

/// Writes rows of shared memory to scratch memory.
#[cube]
pub fn spill(
    arena: &SharedMemory<f32>,
    memory: &mut Array<Quad>,
    #[comptime] first: usize,
    #[comptime] from: Place,
    #[comptime] rows: usize,
    #[comptime] config: BlockConfig,
) {
    let d = config.head_dim;
    let base = scratch_base(config) + comptime!(first * d / 4);
    store_rows::<f32>(
        arena,
        memory,
        base,
        comptime!(d / 4).runtime(),
        rows.runtime(),
        1f32,
        from,
        rows,
        d,
    );
}

/// Reads rows of scratch memory.
#[cube]
pub fn fetch(
    arena: &mut SharedMemory<f32>,
    memory: &Array<Quad>,
    #[comptime] first: usize,
    #[comptime] to: Place,
    #[comptime] rows: usize,
    #[comptime] config: BlockConfig,
) {
    let d = config.head_dim;
    let base = scratch_base(config) + comptime!(first * d / 4);
    load_rows(arena, memory, base, comptime!(d / 4).runtime(), to, rows, d);
}

/// The scores of one head without decay, and −c of all levels. Queries before they move by a tile or a half go to
/// scratch memory.
#[cube]
fn recompute(
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
    let (k, x, c) = comptime!((config.k(), config.x(), config.c()));
    load_head::<bf16>(arena, &inputs.k, of, of.kv_head, 1f32, k, d);
    load_head::<bf16>(arena, &inputs.q, of, head, shape.scale, x, d);
    load_decay(arena, &inputs.visibility, of, head, shape, config);
    let row = UNIT_POS as usize;
    if row < BLOCK {
        let mut lse = 0f32;
        let mut delta = 0f32;
        if row < of.count {
            let at = of.token(head, shape.heads as usize, shape) + row;
            lse = upstream.lse[at] * std::f32::consts::LN_2;
            delta = upstream.delta[at];
        }
        arena[comptime!(config.lse()) + row] = lse;
        arena[comptime!(config.delta()) + row] = delta;
    }
    sync_cube();
    tile_level(arena, c, config);
    fetch(arena, memory, scratch::KEYS, k, BLOCK, config);
    spill(arena, memory, scratch::QUERIES_16, comptime!(odd(x)), HALF, config);
    sync_cube();
    level_of_tiles(arena, k, comptime!(corners(c)), config);
    spill(arena, memory, scratch::QUERIES_32, comptime!(x.cell(HALF, 0)), HALF, config);
    level_of_halves(arena, k, comptime!(corner(c)), config);
}

/// From the scores to their gradients; adds to the gradient of v.
#[cube]
fn weigh(
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
    let (s, v, d_o) = comptime!((config.s(), config.k(), config.fifth()));
    load_head::<bf16>(arena, &inputs.v, of, of.kv_head, 1f32, v, d);
    load_head::<bf16>(arena, &upstream.d_o, of, head, 1f32, d_o, d);
    let (row, part) = (UNIT_POS as usize / 4, UNIT_POS as usize % 4);
    let first = first_visible(&inputs.visibility, of, row, shape, config);
    let lse = arena[comptime!(config.lse()) + row];
    #[unroll]
    for i in 0..TILE {
        let column = part + i * 4;
        let visible = (column >= first) & (column <= row);
        let weight = select(visible, Exp::exp(score(arena, row, column, config) - lse), 0f32);
        arena[s.at + row * s.row + column] = weight;
    }
    sync_cube();

    let base = scratch_base(config);
    let d_v = comptime!(config.scratch(scratch::D_V));
    add_to_global(arena, memory, base, comptime!(Product::atb([s, d_o, d_v], [BLOCK, d, BLOCK])));
    sync_cube();
    let product = comptime!(Product::abt([d_o, v, s], [BLOCK, BLOCK, d]));
    for round in 0..comptime!(product.rounds()) {
        let tile = WarpTile::of_round(round, product);
        let acc = product_of(arena, &tile, product);
        #[unroll]
        for r in 0..2usize {
            let row = tile.row(r);
            let delta = Quad::cast_from(arena[comptime!(config.delta()) + row]);
            let mut quads = quads_mut(arena);
            #[unroll]
            for q in 0..comptime!(product.quads()) {
                let at = comptime!(s.at / 4) + row * comptime!(s.row / 4) + tile.quad(q, product);
                let weight = quads[at];
                quads[at] = weight * (quad_of(&acc, r, q, product) - delta);
            }
        }
    }
    sync_cube();
}

/// With a decay, adds the sums of dS over rows and columns.
#[cube]
fn add_sums(
    arena: &SharedMemory<f32>,
    gradients: &mut BlockGradients,
    of: &BlockOf,
    head: usize,
    shape: &BlockShape,
    #[comptime] config: BlockConfig,
) {
    if comptime!(config.decay) {
        let s = comptime!(config.s());
        let line = UNIT_POS as usize % BLOCK;
        if line < of.count {
            let at = of.token(head, shape.heads as usize, shape) + line;
            let mut sum = 0f32;
            if (UNIT_POS as usize) < BLOCK {
                for column in 0..BLOCK {
                    sum += arena[s.at + line * s.row + column];
                }
                let rows = gradients.ds_rows.as_mut().unwrap();
                rows[at] += sum;
            } else if (UNIT_POS as usize) < comptime!(2 * BLOCK) {
                for row in 0..BLOCK {
                    sum += arena[s.at + row * s.row + line];
                }
                let columns = gradients.ds_columns.as_mut().unwrap();
                columns[at] += sum;
            }
        }
    }
}
