//! The forward pass: one block for 16·warps queries of a head, which passes over the keys from the
//! last to the first (Dao, "FlashAttention-2", 2023, algorithm 1). Each warpgroup works on 64 queries, at
//! its own pace, and has the next tile's scores computed while it waits for this tile's product (Shah et
//! al., "FlashAttention-3", 2024, section 3).

use burn::tensor::bf16;
use cubecl::prelude::*;

use super::heads::HeadPairs;
use super::hooks::{
    BiasArgs, Biases, BiasesOf, Hooks, OperandArgs, Operands, OperandsOf, Score, ScoreArgs,
    ScoreOf, StatisticsOf, Weight, WeightArgs, WeightOf,
};
use super::mask::{Mask, QueryBlock, masked};
use super::problem::{Config, Problem};
use crate::tile::warpgroup::{Pipeline, start_pb, to_a_frags, uninit, wait};
use crate::tile::{ALIGN, Accumulator, CHUNK, Chunk, MASKED, bytes, define_exp2, zeros};

/// q, k and v, `[batch, heads or kv_heads, tokens, head_dim]`.
#[derive(CubeType, CubeLaunch)]
pub struct Qkv {
    /// Queries.
    pub q: TensorMap<bf16, Tiled>,
    /// Keys.
    pub k: TensorMap<bf16, Tiled>,
    /// Values.
    pub v: TensorMap<bf16, Tiled>,
}

/// o, and what the weights keep of each row.
///
/// Grid: blocks of queries, batch · heads.
#[cube(launch_unchecked, fast_math = FastMath::all(), address_type = "u64")]
pub fn forward<A: Hooks>(
    qkv: &Qkv,
    mask: &Mask,
    operands: &OperandArgs<A>,
    biases: &BiasArgs<A>,
    score: &ScoreArgs<A>,
    weight: &WeightArgs<A>,
    o: &mut HeadPairs<bf16>,
    statistics: &mut StatisticsOf<A>,
    problem: Problem,
    #[comptime] config: Config,
) {
    define_exp2();
    let Config { padded_head_dim: dim, warps, tile, .. } = comptime!(config);
    let rows = comptime!(config.rows());
    let (n_keys, n_dim) = comptime!((tile / 8, dim / 8));
    let biased = comptime!(BiasesOf::<A>::SOME);
    let fresh = comptime!(!biased);

    let lane = UNIT_POS_PLANE as usize;
    // Shuffled, the compiler knows that it is one for the warp.
    let warp = plane_shuffle(UNIT_POS / 32, 0u32) as usize;
    let block = QueryBlock::new(&problem, mask, config);
    let (batch, kv_head, row) = (block.batch, block.kv_head, block.row);
    let (offset, from, tiles) = (block.offset, block.from, block.tiles);
    let queries = problem.queries as usize;

    // Two tiles of K and of V, in turns.
    let mut pipeline = Pipeline::new(tile, dim, warps);
    let mut q_tile = SharedMemory::<Chunk>::new_aligned(comptime!(rows * dim / CHUNK), ALIGN);
    sync_cube();

    let last = from + tiles - 1;
    if UNIT_POS == 0 {
        for back in 0..2usize {
            if back < tiles {
                let mut others = 0u32;
                if back == 0 {
                    others += comptime!(bytes(rows, dim));
                }
                let column = (last - back) * tile;
                pipeline.load(back, &qkv.k, &qkv.v, batch, kv_head, column, others);
                if back == 0 {
                    let (head, first) = (block.head, block.first_query);
                    pipeline.load_also(back, &qkv.q, batch, head, first, &mut q_tile, rows);
                }
            }
        }
    }

    let group = block.group(&problem, mask, warp);
    let own = block.first_query + warp * 16;
    // The first tile that the warpgroup attends to, and which of the block's it attends to.
    let start = group.last / tile * tile;
    let mut seen_from = last - start / tile;
    let mut seen_to = last + 1 - group.from / tile;
    if group.empty {
        seen_from = tiles;
        seen_to = tiles;
    }
    if comptime!(OperandsOf::<A>::QUERIES_IN_REGISTERS) {
        pipeline.wait(0);
    }
    let mut of_operands =
        OperandsOf::<A>::forward(operands, &problem, &block, &group, &q_tile, start, warp, config);
    let mut of_biases = BiasesOf::<A>::over_keys(biases, &problem, &block, &group, config);
    let of_head = ScoreOf::<A>::head(score, block.head);
    let scale = ScoreOf::<A>::scale(score, &problem) * WeightOf::<A>::UNIT;
    let inverse = WeightOf::<A>::UNIT / scale;
    let mut of_rows = WeightOf::<A>::rows();
    let first = block.first_keys(&problem, mask, own);

    let mut o_acc = zeros(n_dim);
    let mut s = uninit(n_keys);
    if biased {
        BiasesOf::<A>::read_keys(&mut of_biases, biases, &problem, &block, start, config);
        BiasesOf::<A>::start_from_biases(&mut of_biases, &mut s, inverse, warp, config);
        if start > group.from {
            let next = start - tile;
            BiasesOf::<A>::read_keys(&mut of_biases, biases, &problem, &block, next, config);
        }
    }
    skip_tiles(&mut pipeline, qkv, 0usize, seen_from, tiles, batch, kv_head, last, config);
    if seen_from < seen_to {
        pipeline.wait(seen_from);
        let at = pipeline.place(seen_from);
        OperandsOf::<A>::start_scores(
            &mut of_operands,
            &mut s,
            &q_tile,
            &pipeline.one,
            at,
            warp,
            fresh,
            config,
        );
        if start > group.from {
            let next = start - tile;
            OperandsOf::<A>::read_ahead(&mut of_operands, operands, next, config);
        }
    }
    for back in seen_from..seen_to {
        let first_column = (last - back) * tile;
        let at = pipeline.place(back);
        wait(&mut s, 0usize);

        make_scores::<A>(
            &mut s,
            score,
            &problem,
            &of_head,
            (offset + own + lane / 4) as u32,
            (first_column + (lane % 4) * 2) as u32,
            &first,
            group.at_edge(first_column, tile),
            config,
        );
        WeightOf::<A>::add_tile(&mut of_rows, &mut s, &mut o_acc, scale, n_keys, n_dim);
        let p = to_a_frags(&s, n_keys);
        start_pb(&p, &pipeline.two, at, &mut o_acc);
        // The next tile's scores are under way before this tile's product is waited for.
        if back + 1 < seen_to {
            let next = first_column - tile;
            if biased {
                BiasesOf::<A>::start_from_biases(&mut of_biases, &mut s, inverse, warp, config);
            }
            pipeline.wait(back + 1);
            let next_at = pipeline.place(back + 1);
            OperandsOf::<A>::start_scores(
                &mut of_operands,
                &mut s,
                &q_tile,
                &pipeline.one,
                next_at,
                warp,
                fresh,
                config,
            );
            if next > group.from {
                let after = next - tile;
                if biased {
                    BiasesOf::<A>::read_keys(
                        &mut of_biases,
                        biases,
                        &problem,
                        &block,
                        after,
                        config,
                    );
                }
                OperandsOf::<A>::read_ahead(&mut of_operands, operands, after, config);
            }
            wait(&mut o_acc, 1usize);
        } else {
            wait(&mut o_acc, 0usize);
        }
        if pipeline.release(back) & (back + 2 < tiles) {
            let column = first_column - 2 * tile;
            pipeline.load(back + 2, &qkv.k, &qkv.v, batch, kv_head, column, 0u32);
        }
    }
    skip_tiles(&mut pipeline, qkv, seen_to, tiles, tiles, batch, kv_head, last, config);

    let mut factors = Array::<f32>::new(2usize);
    #[unroll]
    for r in 0..2usize {
        let query = own + r * 8 + lane / 4;
        let write = (lane % 4 == 0) & (query < queries);
        let shift = BiasesOf::<A>::shift(
            biases,
            &problem,
            row,
            group.first,
            offset + min(query, queries - 1),
        );
        factors[r] = WeightOf::<A>::finish(
            &of_rows,
            weight,
            statistics,
            block.head,
            row * queries + query,
            write,
            scale,
            shift,
            r,
        );
    }
    o.store(&o_acc, &factors, batch, block.head, own, queries, config);
}

/// Lets tiles pass that the warpgroup does not attend to.
#[cube]
fn skip_tiles(
    pipeline: &mut Pipeline,
    qkv: &Qkv,
    from: usize,
    to: usize,
    tiles: usize,
    batch: usize,
    kv_head: usize,
    last: usize,
    #[comptime] config: Config,
) {
    for back in from..to {
        pipeline.wait(back);
        if pipeline.release(back) & (back + 2 < tiles) {
            let column = (last - back - 2) * config.tile;
            pipeline.load(back + 2, &qkv.k, &qkv.v, batch, kv_head, column, 0u32);
        }
    }
}

/// Sixteen rows of products become scores, up to [`Score::scale`]: changed as the kind says and, where `edge`
/// says that the mask hides some key, [`MASKED`]. A lane's first row and column are `row` and `column`, and the
/// first keys of its rows are in `first`.
#[cube]
pub fn make_scores<A: Hooks>(
    s: &mut Accumulator,
    args: &ScoreArgs<A>,
    problem: &Problem,
    head: &<A::Score as Score>::Head,
    row: u32,
    column: u32,
    first: &Array<u32>,
    edge: bool,
    #[comptime] config: Config,
) {
    let n_keys = comptime!(config.tile / 8);
    if comptime!(config.changes_scores) {
        #[unroll]
        for r in 0..2usize {
            let row = row + comptime!((r * 8) as u32);
            #[unroll]
            for n in 0..n_keys {
                let fragment = s.index_mut(n);
                let mut pair = fragment[r];
                #[unroll]
                for e in 0..2usize {
                    let column = column + comptime!((n * 8 + e) as u32);
                    pair[e] = ScoreOf::<A>::score(args, problem, head, pair[e], row, column);
                }
                fragment[r] = pair;
            }
        }
    }
    if edge {
        #[unroll]
        for r in 0..2usize {
            let row = row + comptime!((r * 8) as u32);
            #[unroll]
            for n in 0..n_keys {
                let fragment = s.index_mut(n);
                let mut pair = fragment[r];
                #[unroll]
                for e in 0..2usize {
                    let hide = masked(row, column + comptime!((n * 8 + e) as u32), first[r]);
                    pair[e] = select(hide, MASKED, pair[e]);
                }
                fragment[r] = pair;
            }
        }
    }
}
