//! The backward pass over the blocks, in the notation of `docs/path.md`.
//!
//! The gradients of m, Y, k and w are sums over the heads of the group, in registers.

use burn::tensor::bf16;
use cubecl::prelude::*;

use super::forward::{add_rows, begin, begin_head};
use super::layout::{BLOCK, BlockConfig, Operand};
use super::memory::{
    BlockInputs, BlockOf, BlockShape, Numbers, dot, first_visible, has_column, keep_lower,
    read_numbers, scale_rows, start_head, start_inverse, write_numbers,
};
use super::product::{
    Product, WarpTile, add_product, product, read, start_load, start_product, sync, write,
};
use crate::attention::flash::{HeadChunks, HeadQuads};
use crate::tile::copies::finish_copies;
use crate::tile::warpgroup::wait;
use crate::tile::{
    ALIGN, Accumulator, CHUNK, Chunk, Pair, define_exp2, exp2, has_quad, quad_of_row, scale, zeros,
};

/// The gradients that the pass starts from; N is the number of tokens rounded up to whole blocks. Those of q, k and R
/// are sums of two.
#[derive(CubeType, CubeLaunch)]
pub struct Upstream {
    /// dO, `[batch, heads, tokens, head_dim]`.
    pub d_o: HeadChunks,
    /// The log-sum-exps over all keys, base 2 and relative to the decay up to the block, `[batch, heads, tokens]`.
    pub lse: Array<f32>,
    /// δ = o · dO, `[batch, heads, tokens]`.
    pub delta: Array<f32>,
    /// Of the moved queries, `[2, batch, N, heads, head_dim]`.
    pub q: Array<Chunk>,
    /// Of the moved keys, `[2, batch, N, kv_heads, head_dim]`.
    pub k: Array<Chunk>,
    /// Of v so far, `[batch, N, kv_heads, head_dim]`. With several heads of a group, the sum over heads is kept here.
    pub v: Array<Pair>,
    /// Of R, `[batch, N/64, kv_heads, 2, head_dim, head_dim]`.
    pub r: Array<Chunk>,
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

/// The sums over heads.
#[derive(CubeType)]
struct Sums {
    /// Of m.
    m: Accumulator,
    /// Of Y.
    y: Accumulator,
    /// Of k.
    k: Accumulator,
    /// Of w.
    w: Accumulator,
}

/// The gradients of the blocks' inputs.
///
/// Grid: all blocks; [`THREADS`](super::THREADS) threads.
#[cube(launch_unchecked, fast_math = FastMath::all())]
pub fn backward(
    inputs: &BlockInputs,
    inverses: &Array<Chunk>,
    upstream: &mut Upstream,
    gradients: &mut BlockGradients,
    shape: BlockShape,
    #[comptime] config: BlockConfig,
) {
    define_exp2();
    let chunks = comptime!(config.backward_chunks());
    let mut arena = SharedMemory::<Chunk>::new_aligned(chunks, ALIGN);
    let mut numbers = Numbers::new();
    let of = BlockOf::own(&shape);
    let group = (shape.heads / shape.kv_heads) as usize;
    start_scores(&mut arena, inputs, upstream, &of, of.kv_head * group, config);
    begin(&mut arena, &mut numbers, inputs, inverses, &of, config);
    let square = comptime!(Product::ab(config.c(), config.m(), config.squares()));
    let vectors = comptime!(vectors(config));
    let mut sums = Sums {
        m: zeros(comptime!(square.fragments())),
        y: zeros(comptime!(vectors.fragments())),
        k: zeros(comptime!(vectors.fragments())),
        w: zeros(comptime!(vectors.fragments())),
    };
    for member in 0..group {
        let head = of.kv_head * group + member;
        let last = member == group - 1;
        if member > 0 {
            sync();
            start_scores(&mut arena, inputs, upstream, &of, head, config);
        }
        weigh(
            &mut arena,
            &mut numbers,
            inputs,
            upstream,
            gradients,
            &of,
            head,
            last,
            &shape,
            config,
        );
        if comptime!(!config.reads_ahead()) {
            start_queries(&mut arena, upstream, &of, head, &shape, config);
        }
        finish_copies();
        if last {
            read_ahead(&mut arena, inverses, upstream, &of, &shape, config);
        }
        move_back(&mut arena, gradients, &mut sums, &of, head, &shape, config);
    }
    scale(&mut sums.k, shape.scale);
    scale(&mut sums.w, shape.scale);
    sync();
    transform_back(&mut arena, inverses, upstream, &mut sums, &of, &shape, config);
    solve_back(&mut arena, &mut numbers, gradients, &mut sums, &of, &shape, config);
}

/// A product whose result has the size of a block's vectors.
const fn vectors(config: BlockConfig) -> Product {
    Product::ab(config.c(), config.y(), config.over_tokens())
}

/// Starts to read what the scores of a head need.
#[cube]
fn start_scores(
    arena: &mut SharedMemory<Chunk>,
    inputs: &BlockInputs,
    upstream: &Upstream,
    of: &BlockOf,
    head: usize,
    #[comptime] config: BlockConfig,
) {
    start_head(arena, &inputs.q, of, head, comptime!(config.q()), config);
    start_head(arena, &upstream.d_o, of, head, comptime!(config.d_o()), config);
    start_head(arena, &inputs.v, of, of.kv_head, comptime!(config.values_back()), config);
}

/// Starts to read the gradients of a head's moved queries.
#[cube]
fn start_queries(
    arena: &mut SharedMemory<Chunk>,
    upstream: &Upstream,
    of: &BlockOf,
    head: usize,
    shape: &BlockShape,
    #[comptime] config: BlockConfig,
) {
    let heads = shape.heads as usize;
    let to = comptime!(config.x_of_queries());
    start_moved(arena, &upstream.q, of, head, heads, shape, to, config);
}

/// Starts to read the gradients of the moved keys, and G.
#[cube]
fn start_keys(
    arena: &mut SharedMemory<Chunk>,
    inverses: &Array<Chunk>,
    upstream: &Upstream,
    of: &BlockOf,
    shape: &BlockShape,
    #[comptime] config: BlockConfig,
) {
    let heads = shape.kv_heads as usize;
    let to = comptime!(config.x_of_keys());
    start_moved(arena, &upstream.k, of, of.kv_head, heads, shape, to, config);
    start_inverse(arena, inverses, comptime!(config.g_again()));
}

/// Starts to read all further gradients, if there is room.
#[cube]
fn read_ahead(
    arena: &mut SharedMemory<Chunk>,
    inverses: &Array<Chunk>,
    upstream: &Upstream,
    of: &BlockOf,
    shape: &BlockShape,
    #[comptime] config: BlockConfig,
) {
    if comptime!(config.reads_ahead()) {
        start_transform(arena, upstream, of, 0usize, shape, config);
        start_keys(arena, inverses, upstream, of, shape, config);
    }
}

/// From the scores of one head to their gradients, which are written; the gradient of v. Leaves −c.
#[cube]
fn weigh(
    arena: &mut SharedMemory<Chunk>,
    numbers: &mut Numbers,
    inputs: &BlockInputs,
    upstream: &mut Upstream,
    gradients: &mut BlockGradients,
    of: &BlockOf,
    head: usize,
    last: bool,
    shape: &BlockShape,
    #[comptime] config: BlockConfig,
) {
    let d = config.head_dim;
    let (d_o, v) = comptime!((config.d_o(), config.values_back()));
    let weights = comptime!(config.dc());
    let heads = shape.heads as usize;
    numbers.load_decay(&inputs.visibility, of, head, shape, config);
    let row = UNIT_POS as usize;
    if row < BLOCK {
        let at = of.token(head, heads, shape) + min(row, of.count - 1);
        numbers.lse[row] = upstream.lse[at];
        numbers.delta[row] = upstream.delta[at];
    }
    finish_copies();
    if comptime!(config.reads_ahead()) {
        start_queries(arena, upstream, of, head, shape, config);
    }
    let mut scores = begin_head(arena, shape, config);
    let p = comptime!(Product::ab(config.c(), config.m(), config.squares()));
    let tile = WarpTile::new(p);
    add_product(arena, &mut scores, p);

    // 1. Weights.
    #[unroll]
    for r in 0..2usize {
        let row = tile.row(r);
        let first = first_visible(&inputs.visibility, of, row, shape, config);
        let lse = numbers.lse[row];
        #[unroll]
        for f in 0..scores.len() {
            let fragment = scores.index_mut(f);
            let value = fragment[r];
            let mut weight = Pair::empty();
            #[unroll]
            for c in 0..2usize {
                let column = tile.column(f) + c;
                let visible = (column >= first) & (column <= row);
                let score = numbers.score(value[c], column, config);
                weight[c] = select(visible, exp2(score - lse), 0f32);
            }
            fragment[r] = weight;
        }
    }
    write(arena, &scores, &tile, weights);

    // 2. dS = P ⊙ (dO Vᵀ − δ).
    let of_weights = comptime!(Product::abt(d_o, v, config.over_channels()));
    let mut ds = product(arena, of_weights);
    #[unroll]
    for r in 0..2usize {
        let delta = numbers.delta[tile.row(r)];
        #[unroll]
        for f in 0..scores.len() {
            let weight = scores.index(f)[r];
            let fragment = ds.index_mut(f);
            fragment[r] = weight * (fragment[r] - Pair::cast_from(delta));
        }
    }
    write(arena, &ds, &tile, comptime!(config.ds()));
    put_sums(numbers, &ds, &tile, config);
    sync();
    add_sums(numbers, gradients, of, head, shape, config);

    // 3. The gradient of v.
    let p = comptime!(Product::atb(weights, d_o, config.over_tokens()));
    let tile = WarpTile::new(p);
    let kv_heads = shape.kv_heads as usize;
    let base = of.padded_row(of.kv_head, kv_heads) * comptime!(d / 2);
    let stride = kv_heads * comptime!(d / 2);
    let mut acc = zeros(comptime!(p.fragments()));
    read_numbers(&mut acc, &upstream.v, &tile, base, stride, config);
    add_product(arena, &mut acc, p);
    if last {
        store::<bf16>(&mut gradients.v, &acc, &tile, of, of.kv_head, config);
    } else {
        write_numbers(&mut upstream.v, &acc, &tile, base, stride, config);
    }
    sync();
}

/// With a decay, writes the parts of the sums of dS over rows and columns.
#[cube]
fn put_sums(
    numbers: &mut Numbers,
    ds: &Accumulator,
    tile: &WarpTile,
    #[comptime] config: BlockConfig,
) {
    if comptime!(config.decay) {
        #[unroll]
        for r in 0..2usize {
            let mut sum = 0f32;
            #[unroll]
            for f in 0..ds.len() {
                let value = ds.index(f)[r];
                sum += value[0] + value[1];
            }
            numbers.put_row(sum, tile.row(r), tile, 0usize);
        }
        #[unroll]
        for f in 0..ds.len() {
            let both = ds.index(f)[0] + ds.index(f)[1];
            #[unroll]
            for c in 0..2usize {
                let mut sum = both[c];
                sum += plane_shuffle_xor(sum, 4);
                sum += plane_shuffle_xor(sum, 8);
                sum += plane_shuffle_xor(sum, 16);
                if UNIT_POS_PLANE < 4 {
                    numbers.of_columns[tile.down() * BLOCK + tile.column(f) + c] = sum;
                }
            }
        }
    }
}

/// With a decay, adds the sums of dS over rows and columns.
#[cube]
fn add_sums(
    numbers: &Numbers,
    gradients: &mut BlockGradients,
    of: &BlockOf,
    head: usize,
    shape: &BlockShape,
    #[comptime] config: BlockConfig,
) {
    if comptime!(config.decay) {
        let line = UNIT_POS as usize % BLOCK;
        if line < of.count {
            let at = of.token(head, shape.heads as usize, shape) + line;
            if (UNIT_POS as usize) < BLOCK {
                let rows = gradients.ds_rows.as_mut().unwrap();
                rows[at] += numbers.row(line, 0usize);
            } else if (UNIT_POS as usize) < comptime!(2 * BLOCK) {
                let mut sum = 0f32;
                #[unroll]
                for part in 0..4usize {
                    sum += numbers.of_columns[part * BLOCK + line];
                }
                let columns = gradients.ds_columns.as_mut().unwrap();
                columns[at] += sum;
            }
        }
    }
}

/// From dS and the gradient of the moved queries of one head to that of q; adds to the sums.
#[cube]
fn move_back(
    arena: &mut SharedMemory<Chunk>,
    gradients: &mut BlockGradients,
    sums: &mut Sums,
    of: &BlockOf,
    head: usize,
    shape: &BlockShape,
    #[comptime] config: BlockConfig,
) {
    let (w, k, y, m) = comptime!((config.w(), config.k(), config.y(), config.m()));
    let (q, c, x) = comptime!((config.q(), config.c(), config.x_of_queries()));
    let (ds, dc) = comptime!((config.ds(), config.dc()));

    // 1. dc = −(dS mᵀ + dq̃ Yᵀ); m, Y and k.
    let (squares, over_tokens) = comptime!((config.squares(), config.over_tokens()));
    let p = comptime!(Product::abt(ds, m, squares));
    let of_m = comptime!(Product::atb(c, ds, squares));
    let of_y = comptime!(Product::atb(c, x, over_tokens));
    let of_k = comptime!(Product::atb(ds, q, over_tokens));
    let mut acc = zeros(comptime!(p.fragments()));
    start_product(arena, &mut acc, p);
    start_product(arena, &mut acc, comptime!(Product::abt(x, y, config.over_channels())));
    start_product(arena, &mut sums.m, of_m);
    start_product(arena, &mut sums.y, of_y);
    start_product(arena, &mut sums.k, of_k);
    wait(&mut acc, comptime!(of_m.terms() + of_y.terms() + of_k.terms()));
    let square = WarpTile::new(p);
    scale(&mut acc, -1f32);
    keep_lower(&mut acc, &square, true);
    write(arena, &acc, &square, dc);
    wait(&mut sums.m, 0usize);
    wait(&mut sums.y, 0usize);
    wait(&mut sums.k, 0usize);
    sync();

    // 2. dq = dS K + dc W + dq̃, and w.
    let p = comptime!(Product::ab(ds, k, over_tokens));
    let of_w = comptime!(Product::atb(dc, q, over_tokens));
    let mut acc = zeros(comptime!(p.fragments()));
    start_product(arena, &mut acc, p);
    start_product(arena, &mut acc, comptime!(Product::ab(dc, w, over_tokens)));
    start_product(arena, &mut sums.w, of_w);
    wait(&mut acc, comptime!(of_w.terms()));
    let tile = WarpTile::new(p);
    add_rows(arena, &mut acc, &tile, 1f32, x);
    scale(&mut acc, shape.scale);
    store::<bf16>(&mut gradients.q, &acc, &tile, of, head, config);
    wait(&mut sums.w, 0usize);
}

/// Starts to read the gradients of a head's moved vectors, of which there are `heads`.
#[cube]
fn start_moved(
    arena: &mut SharedMemory<Chunk>,
    source: &Array<Chunk>,
    of: &BlockOf,
    head: usize,
    heads: usize,
    shape: &BlockShape,
    #[comptime] to: Operand,
    #[comptime] config: BlockConfig,
) {
    let d = config.head_dim;
    let chunks = comptime!(d / CHUNK);
    let low = comptime!(to.low.expect("the sum of two matrices"));
    let base = of.padded_row(head, heads) * chunks;
    let (stride, rows) = (heads * chunks, BLOCK.runtime());
    let group = heads / shape.kv_heads as usize;
    let to_low = CUBE_COUNT_X as usize * group * comptime!(BLOCK * chunks);
    let columns = comptime!(config.columns());
    start_load(arena, source, base, stride, rows, d, comptime!(to.high), columns);
    start_load(arena, source, base + to_low, stride, rows, d, low, columns);
}

/// Starts to read part 0 of the gradient of R, its numbers rounded, or part 1, the rest, or with room for it both.
#[cube]
fn start_transform(
    arena: &mut SharedMemory<Chunk>,
    upstream: &Upstream,
    of: &BlockOf,
    #[comptime] part: usize,
    shape: &BlockShape,
    #[comptime] config: BlockConfig,
) {
    let d = config.head_dim;
    let (stride, rows) = (comptime!(d / CHUNK).runtime(), d.runtime());
    let all = comptime!(d * d / CHUNK);
    let base = (of.transform(shape) * 2 + part) * all;
    let to = comptime!(if config.reads_ahead() { config.whole_d_r() } else { config.d_r() });
    let columns = comptime!(config.columns());
    start_load(arena, &upstream.r, base, stride, rows, d, comptime!(to.high), columns);
    if let Some(low) = comptime!(to.low) {
        start_load(arena, &upstream.r, base + all, stride, rows, d, low, columns);
    }
}

/// The gradients of the moved keys and of R: adds to those of m, Y and w. Then the first two are in shared memory, and
/// G, too.
#[cube]
fn transform_back(
    arena: &mut SharedMemory<Chunk>,
    inverses: &Array<Chunk>,
    upstream: &Upstream,
    sums: &mut Sums,
    of: &BlockOf,
    shape: &BlockShape,
    #[comptime] config: BlockConfig,
) {
    let (w, y, m) = comptime!((config.w(), config.y(), config.m()));
    let x = comptime!(config.x_of_keys());

    // 1. dY += W dRᵀ and dW += Y dR: at once, or of dR rounded, and of the rest.
    if comptime!(config.reads_ahead()) {
        finish_copies();
        add_transform(arena, sums, w, y, comptime!(config.whole_d_r()), config);
    } else {
        #[unroll]
        for part in 0..2usize {
            start_transform(arena, upstream, of, part, shape, config);
            finish_copies();
            let of_w = comptime!(if part == 1 { w.rounded() } else { w });
            let of_y = comptime!(if part == 1 { y.rounded() } else { y });
            add_transform(arena, sums, of_w, of_y, comptime!(config.d_r()), config);
            sync();
        }
        start_keys(arena, inverses, upstream, of, shape, config);
    }

    // 2. dK += dk̃, dm −= W dk̃ᵀ and dW −= m dk̃.
    scale(&mut sums.m, -1f32);
    scale(&mut sums.w, -1f32);
    if comptime!(!config.reads_ahead()) {
        finish_copies();
    }
    let of_m = comptime!(Product::abt(w, x, config.over_channels()));
    let of_w = comptime!(Product::ab(m, x, config.over_tokens()));
    let tile = WarpTile::new(of_w);
    start_product(arena, &mut sums.m, of_m);
    start_product(arena, &mut sums.w, of_w);
    add_rows(arena, &mut sums.k, &tile, 1f32, x);
    wait(&mut sums.m, 0usize);
    wait(&mut sums.w, 0usize);
    scale(&mut sums.m, -1f32);
    scale(&mut sums.w, -1f32);
    sync();
    write(arena, &sums.m, &WarpTile::new(of_m), comptime!(config.ds()));
    write(arena, &sums.y, &tile, comptime!(config.x()));
    sync();
}

/// Adds W dRᵀ to the gradient of Y, and Y dR to that of w.
#[cube]
fn add_transform(
    arena: &SharedMemory<Chunk>,
    sums: &mut Sums,
    #[comptime] w: Operand,
    #[comptime] y: Operand,
    #[comptime] d_r: Operand,
    #[comptime] config: BlockConfig,
) {
    let size = comptime!(config.of_transform());
    start_product(arena, &mut sums.y, comptime!(Product::abt(w, d_r, size)));
    start_product(arena, &mut sums.w, comptime!(Product::ab(y, d_r, size)));
    wait(&mut sums.y, 0usize);
    wait(&mut sums.w, 0usize);
}

/// Through m = G diag(β) B and Y = G diag(β) W: the gradients of k, w and β.
#[cube]
fn solve_back(
    arena: &mut SharedMemory<Chunk>,
    numbers: &mut Numbers,
    gradients: &mut BlockGradients,
    sums: &mut Sums,
    of: &BlockOf,
    shape: &BlockShape,
    #[comptime] config: BlockConfig,
) {
    let (w, k, y, m) = comptime!((config.w(), config.k(), config.y(), config.m()));
    let (c, x, ds, dc) = comptime!((config.g_again(), config.x(), config.ds(), config.dc()));

    // 1. Gᵀ dm and Gᵀ dY.
    let p = comptime!(Product::atb(c, ds, config.squares()));
    let vectors = comptime!(Product::atb(c, x, config.over_tokens()));
    let along = comptime!(Product::abt(w, k, config.over_channels()));
    let (square, tile) = (WarpTile::new(p), WarpTile::new(vectors));
    let mut of_m = zeros(comptime!(p.fragments()));
    let mut of_y = zeros(comptime!(vectors.fragments()));
    let mut acc = zeros(comptime!(along.fragments()));
    start_product(arena, &mut of_m, p);
    start_product(arena, &mut of_y, vectors);
    start_product(arena, &mut acc, along);
    wait(&mut of_m, 0usize);
    wait(&mut of_y, 0usize);
    wait(&mut acc, 0usize);
    keep_lower(&mut of_m, &square, false);
    #[unroll]
    for r in 0..2usize {
        numbers.put_row(dot(&of_m, &acc, r), square.row(r), &square, 0usize);
        let mut sum = 0f32;
        #[unroll]
        for f in 0..of_y.len() {
            let product = of_y.index(f)[r] * read(arena, tile.row(r), tile.column(f), w);
            sum += product[0] + product[1];
        }
        numbers.put_row(sum, tile.row(r), &tile, 1usize);
    }
    sync();
    let line = UNIT_POS as usize % BLOCK;
    let mut d_beta = numbers.row(line, 0usize) + numbers.row(line, 1usize);

    // 2. Of the right-hand sides D B and D W, then of A: −D F.
    write(arena, &of_m, &square, ds);
    scale_rows(&mut of_m, &numbers.beta, &square);
    write(arena, &of_m, &square, c);
    write(arena, &of_y, &tile, x);
    #[unroll]
    for r in 0..2usize {
        let beta = numbers.beta[tile.row(r)];
        #[unroll]
        for f in 0..of_y.len() {
            let value = of_y.index(f)[r];
            let fragment = sums.w.index_mut(f);
            fragment[r] += value * Pair::cast_from(beta);
        }
    }
    sync();
    let of_directions = comptime!(Product::abt(w, w, config.over_channels()));
    let mut of_a = zeros(comptime!(p.fragments()));
    let mut acc = zeros(comptime!(of_directions.fragments()));
    start_product(arena, &mut of_a, comptime!(Product::abt(ds, m, config.squares())));
    start_product(arena, &mut of_a, comptime!(Product::abt(x, y, config.over_channels())));
    start_product(arena, &mut acc, of_directions);
    wait(&mut of_a, 0usize);
    wait(&mut acc, 0usize);
    keep_lower(&mut of_a, &square, false);
    #[unroll]
    for r in 0..2usize {
        numbers.put_row(dot(&of_a, &acc, r), square.row(r), &square, 0usize);
    }
    scale_rows(&mut of_a, &numbers.beta, &square);
    scale(&mut of_a, -1f32);
    write(arena, &of_a, &square, dc);
    sync();
    d_beta -= numbers.row(line, 0usize);
    if (UNIT_POS as usize) < of.count {
        let at = of.token(of.kv_head, shape.kv_heads as usize, shape);
        gradients.beta[at + line] = d_beta;
    }

    // 3. Of w and k.
    let size = comptime!(config.over_tokens());
    start_product(arena, &mut sums.w, comptime!(Product::ab(dc, w, size)));
    start_product(arena, &mut sums.w, comptime!(Product::atb(dc, w, size)));
    start_product(arena, &mut sums.w, comptime!(Product::ab(c, k, size)));
    start_product(arena, &mut sums.k, comptime!(Product::atb(c, w, size)));
    wait(&mut sums.w, 0usize);
    wait(&mut sums.k, 0usize);
    store::<f32>(&mut gradients.w, &sums.w, &tile, of, of.kv_head, config);
    store::<bf16>(&mut gradients.k, &sums.k, &tile, of, of.kv_head, config);
}

/// Writes the rows of the block's tokens.
#[cube]
fn store<E: Numeric>(
    to: &mut HeadQuads<E>,
    acc: &Accumulator,
    tile: &WarpTile,
    of: &BlockOf,
    head: usize,
    #[comptime] config: BlockConfig,
) {
    let (base, stride) = of.rows(head, &to.strides);
    #[unroll]
    for r in 0..2usize {
        let row = tile.row(r);
        let at = (base + row * stride) * comptime!(CHUNK / 4);
        #[unroll]
        for two in 0..comptime!(acc.len().div_ceil(2)) {
            let quad = quad_of_row(acc, two, r);
            let column = tile.column_of_quad(two);
            if (row < of.count) & has_quad(two, acc.len()) & has_column(column, config) {
                to.quads[at + column / 4] = Vector::cast_from(quad);
            }
        }
    }
}
