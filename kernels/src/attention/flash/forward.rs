//! The forward pass: one block per 16·warps queries of a head, which loops over the keys from the last to
//! the first (Dao, "FlashAttention-2", 2023, algorithm 1). Each warpgroup works on 64 queries at its own
//! pace and starts the next tile's scores before it waits for this tile's product with V (Shah et al.,
//! "FlashAttention-3", 2024, section 3).

use burn::tensor::bf16;
use cubecl::prelude::*;

use super::heads::HeadPairs;
use super::hooks::{
    BiasArgs, Biases, BiasesOf, Hooks, OperandArgs, Operands, OperandsOf, Score, ScoreArgs,
    ScoreOf, StatisticsOf, Weight, WeightArgs, WeightOf,
};
use super::mask::{Mask, QueryBlock, masked};
use super::problem::{KernelConfig, ProblemShape};
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

/// o, and the row statistics of the weights.
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
    problem: ProblemShape,
    #[comptime] config: KernelConfig,
) {
    define_exp2();
    let KernelConfig { padded_head_dim: dim, warps, tile, .. } = comptime!(config);
    let rows = comptime!(config.rows());
    let (n_keys, n_dim) = comptime!((tile / 8, dim / 8));
    let biased = comptime!(BiasesOf::<A>::ENABLED);
    let fresh = comptime!(!biased);

    let lane = UNIT_POS_PLANE as usize;
    // The shuffle tells the compiler that the value is warp-uniform.
    let warp = plane_shuffle(UNIT_POS / 32, 0u32) as usize;
    let block = QueryBlock::new(&problem, mask, config);
    let (batch, kv_head, batch_head) = (block.batch, block.kv_head, block.batch_head);
    let (offset, from, tiles) = (block.offset, block.from, block.tiles);
    let queries = problem.queries as usize;

    // Double-buffered tiles of K and V.
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
    // The warpgroup's first tile, and the range of the block's iterations that it takes part in.
    let start = group.last / tile * tile;
    let mut seen_from = last - start / tile;
    let mut seen_to = last + 1 - group.from / tile;
    if group.empty {
        seen_from = tiles;
        seen_to = tiles;
    }
    if comptime!(OperandsOf::<A>::Q_IN_REGISTERS) {
        pipeline.wait(0);
    }
    let mut operand_state =
        OperandsOf::<A>::forward(operands, &problem, &block, &group, &q_tile, start, warp, config);
    let mut bias_state = BiasesOf::<A>::init_key_loop(biases, &problem, &block, &group, config);
    let head_params = ScoreOf::<A>::head(score, block.head);
    let scale = ScoreOf::<A>::scale(score, &problem) * WeightOf::<A>::SCORE_FACTOR;
    let inverse = WeightOf::<A>::SCORE_FACTOR / scale;
    let mut row_state = WeightOf::<A>::init_rows();
    let first = block.first_keys(&problem, mask, own);

    let mut o_acc = zeros(n_dim);
    let mut s = uninit(n_keys);
    if biased {
        BiasesOf::<A>::read_keys(&mut bias_state, biases, &problem, &block, start, config);
        BiasesOf::<A>::start_from_biases(&mut bias_state, &mut s, inverse, warp, config);
        if start > group.from {
            let next = start - tile;
            BiasesOf::<A>::read_keys(&mut bias_state, biases, &problem, &block, next, config);
        }
    }
    skip_tiles(&mut pipeline, qkv, 0usize, seen_from, tiles, batch, kv_head, last, config);
    if seen_from < seen_to {
        pipeline.wait(seen_from);
        let at = pipeline.stage_offset(seen_from);
        OperandsOf::<A>::start_scores(
            &mut operand_state,
            &mut s,
            &q_tile,
            &pipeline.first_tiles,
            at,
            warp,
            fresh,
            config,
        );
        if start > group.from {
            let next = start - tile;
            OperandsOf::<A>::read_ahead(&mut operand_state, operands, next, config);
        }
    }
    for back in seen_from..seen_to {
        let first_column = (last - back) * tile;
        let at = pipeline.stage_offset(back);
        wait(&mut s, 0usize);

        make_scores::<A>(
            &mut s,
            score,
            &problem,
            &head_params,
            (offset + own + lane / 4) as u32,
            (first_column + (lane % 4) * 2) as u32,
            &first,
            group.at_edge(first_column, tile),
            config,
        );
        WeightOf::<A>::add_tile(&mut row_state, &mut s, &mut o_acc, scale, n_keys, n_dim);
        let p = to_a_frags(&s, n_keys);
        start_pb(&p, &pipeline.second_tiles, at, &mut o_acc);
        // Start the next tile's scores before waiting for this tile's product.
        if back + 1 < seen_to {
            let next = first_column - tile;
            if biased {
                BiasesOf::<A>::start_from_biases(&mut bias_state, &mut s, inverse, warp, config);
            }
            pipeline.wait(back + 1);
            let next_at = pipeline.stage_offset(back + 1);
            OperandsOf::<A>::start_scores(
                &mut operand_state,
                &mut s,
                &q_tile,
                &pipeline.first_tiles,
                next_at,
                warp,
                fresh,
                config,
            );
            if next > group.from {
                let after = next - tile;
                if biased {
                    BiasesOf::<A>::read_keys(
                        &mut bias_state,
                        biases,
                        &problem,
                        &block,
                        after,
                        config,
                    );
                }
                OperandsOf::<A>::read_ahead(&mut operand_state, operands, after, config);
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
            batch_head,
            group.first,
            offset + min(query, queries - 1),
        );
        factors[r] = WeightOf::<A>::finish(
            &row_state,
            weight,
            statistics,
            block.head,
            batch_head * queries + query,
            write,
            scale,
            shift,
            r,
        );
    }
    o.store(&o_acc, &factors, batch, block.head, own, queries, config);
}

/// Releases tiles that the warpgroup does not attend to, loading later ones for the others.
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
    #[comptime] config: KernelConfig,
) {
    for back in from..to {
        pipeline.wait(back);
        if pipeline.release(back) & (back + 2 < tiles) {
            let column = (last - back - 2) * config.tile;
            pipeline.load(back + 2, &qkv.k, &qkv.v, batch, kv_head, column, 0u32);
        }
    }
}

/// Turns 16 rows of products into scores, up to [`Score::scale`]: applies [`Score::score`] and, if `edge` says
/// that the tile needs masking, the mask. `row` and `column` are a lane's first row and column, `first` the
/// first keys of its rows.
#[cube]
pub fn make_scores<A: Hooks>(
    s: &mut Accumulator,
    args: &ScoreArgs<A>,
    problem: &ProblemShape,
    head: &<A::Score as Score>::Head,
    row: u32,
    column: u32,
    first: &Array<u32>,
    edge: bool,
    #[comptime] config: KernelConfig,
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
