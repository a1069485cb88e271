//! The forward pass: one block per 16·warps queries of a head, which loops over the keys from the last to
//! the first (Dao, "FlashAttention-2", 2023, algorithm 1). Each warpgroup works on 64 queries at its own
//! pace and starts the next tile's scores before it waits for this tile's product with V (Shah et al.,
//! "FlashAttention-3", 2024, section 3).

mod loads;

use burn::tensor::bf16;
use cubecl::prelude::*;

use self::loads::{
    Tiles, changes_queries, load, load_later, load_queries, skip_tiles, start_first,
};
use super::heads::{HeadPairs, HeadQuads};
use super::hooks::{
    BiasArgs, Biases, BiasesOf, Hooks, OperandArgs, Operands, OperandsOf, Score, ScoreArgs,
    ScoreOf, StatisticsOf, Weight, WeightArgs, WeightOf, adds_something, sparse,
};
use super::in_order::{SavedCarries, nothing_carried, save_carries};
use super::mask::{Mask, QueryBlock, masked};
use super::problem::{KernelConfig, ProblemShape};
use crate::tile::roles::blocks_per_multiprocessor;
use crate::tile::warpgroup::{GROUP_WARPS, Pipeline, start_pb, to_a_frags, uninit, wait};
use crate::tile::{
    ALIGN, Accumulator, CHUNK, Chunk, MASKED, PANEL_DIM, Pair, all_of_block, define_exp2,
    release_tile, zeros,
};

/// q and k, `[batch, heads or kv_heads, tokens, head_dim]`, and v, `[batch, value heads, tokens, value_dim]`.
#[derive(CubeType, CubeLaunch)]
pub struct Qkv {
    /// Queries.
    pub q: TensorMap<bf16, Tiled>,
    /// Keys.
    pub k: TensorMap<bf16, Tiled>,
    /// Values.
    pub v: TensorMap<bf16, Tiled>,
}

/// o, and the row statistics of the weights; `earlier` is the output over other keys, from which rows go on.
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
    earlier: &ComptimeOption<HeadPairs<f32>>,
    o: &mut HeadQuads<bf16>,
    statistics: &mut StatisticsOf<A>,
    carries: &mut ComptimeOption<SavedCarries>,
    problem: ProblemShape,
    #[comptime] config: KernelConfig,
) {
    define_exp2();
    let KernelConfig { padded_head_dim: dim, padded_value_dim: value_dim, warps, tile, .. } =
        comptime!(config);
    let changes = comptime!(OperandsOf::<A>::CHANGES_QUERIES);
    let with_biases = comptime!(BiasesOf::<A>::ENABLED);
    let limited = comptime!(sparse::<A>() || changes && !with_biases);
    if comptime!(limited && warps == GROUP_WARPS && dim.max(value_dim) == PANEL_DIM) {
        // As many blocks as without votes or queries in registers. With biases too, three do not fit.
        blocks_per_multiprocessor(comptime!("forward".to_string()), comptime!(32 * warps), 3usize);
    }
    let rows = comptime!(config.rows());
    let (n_keys, n_dim) = comptime!((tile / 8, value_dim / 8));
    let biased = comptime!(with_biases && !config.changes_scores);
    let biases_after = comptime!(with_biases && config.changes_scores);
    let fresh = comptime!(!biased);
    let in_order = comptime!(WeightOf::<A>::IN_ORDER);
    let saves_carries = comptime!(config.saves_carries);

    let lane = UNIT_POS_PLANE as usize;
    // The shuffle tells the compiler that the value is warp-uniform.
    let warp = plane_shuffle(UNIT_POS / 32, 0u32) as usize;
    let block = QueryBlock::new(&problem, mask, config);
    let (batch, batch_head) = (block.batch, block.batch_head);
    let (offset, from, visited) = (block.offset, block.from, block.tiles);
    let queries = problem.queries as usize;

    let mut tiles = Tiles {
        pipeline: Pipeline::new(tile, (dim, value_dim), warps),
        queries: SharedMemory::<Chunk>::new_aligned(comptime!(rows * dim / CHUNK), ALIGN),
    };
    sync_cube();

    let last = from + visited - 1;
    if UNIT_POS == 0 {
        if visited > 0 {
            let first = 0usize.runtime();
            load::<A>(&mut tiles, qkv, operands, &block, first, true.runtime(), config);
            load_queries::<A>(&mut tiles, qkv, operands, &block, first, config);
        }
        if visited > 1 {
            let second = 1usize.runtime();
            let others = changes_queries::<A>(&block, second, config);
            load::<A>(&mut tiles, qkv, operands, &block, second, others, config);
        }
    }

    let group = block.group(&problem, mask, warp, config);
    let own = block.first_query + warp * 16;
    // The warpgroup's first tile, and the range of the block's iterations that it takes part in.
    let start = group.last_key / tile * tile;
    let mut seen_from = last - start / tile;
    let mut seen_to = last + 1 - group.from / tile;
    if group.empty {
        seen_from = visited;
        seen_to = visited;
    }
    if comptime!(OperandsOf::<A>::Q_IN_REGISTERS) {
        if visited > 0 {
            tiles.pipeline.wait(0);
        }
    }
    let mut operand_state = OperandsOf::<A>::forward(
        operands,
        &problem,
        &block,
        &group,
        &tiles.queries,
        start,
        warp,
        config,
    );
    let mut bias_state = BiasesOf::<A>::init_key_loop(biases, &problem, &block, &group, config);
    let head_params = ScoreOf::<A>::head(score, block.head);
    let scale = ScoreOf::<A>::scale(score, &problem) * WeightOf::<A>::SCORE_FACTOR;
    let inverse = WeightOf::<A>::SCORE_FACTOR / scale;
    let mut own_rows = Array::<usize>::new(2usize);
    #[unroll]
    for r in 0..2usize {
        own_rows[r] = batch_head * queries + min(own + r * 8 + lane / 4, queries - 1);
    }
    let mut row_state = WeightOf::<A>::init_rows(weight, &own_rows, scale);
    let first = block.first_keys(&problem, mask, own);

    let mut o_acc = zeros(n_dim);
    let mut s = uninit(n_keys);
    if comptime!(config.goes_on) {
        let earlier = earlier.as_ref().unwrap();
        #[unroll]
        for r in 0..2usize {
            let row = min(own + r * 8 + lane / 4, queries - 1);
            let base = earlier.at(batch, block.head, row, lane % 4);
            #[unroll]
            for n in 0..comptime!(config.value_dim / 8) {
                o_acc.index_mut(n)[r] = earlier.pairs[base + comptime!(n * 4)];
            }
        }
    }
    if with_biases {
        BiasesOf::<A>::read_keys(&mut bias_state, biases, &problem, &block, start, config);
    }
    if biased {
        start_from_biases::<A>(&mut bias_state, &mut s, inverse, warp, config);
        if start > group.from {
            let next = start - tile;
            BiasesOf::<A>::read_keys(&mut bias_state, biases, &problem, &block, next, config);
        }
    }
    let after_start = start - tile;
    let ahead = start > group.from;
    let mut waiting = seen_from < seen_to;
    if changes {
        if waiting & (seen_from == 0) {
            start_first::<A>(
                &tiles,
                &mut operand_state,
                &mut s,
                operands,
                seen_from,
                after_start,
                ahead,
                warp,
                fresh,
                config,
            );
            waiting = false;
        }
        // The queries of the second tile take the place of those of the first.
        release_tile();
        if (UNIT_POS == 0) & (visited > 1) {
            let second = 1usize.runtime();
            if changes_queries::<A>(&block, second, config) {
                load_queries::<A>(&mut tiles, qkv, operands, &block, second, config);
            }
        }
    }
    if !changes {
        skip_tiles::<A>(&mut tiles, qkv, operands, &block, 0usize, seen_from, config);
    }
    if waiting {
        start_first::<A>(
            &tiles,
            &mut operand_state,
            &mut s,
            operands,
            seen_from,
            after_start,
            ahead,
            warp,
            fresh,
            config,
        );
    }
    if changes {
        // Only now, so that the queries of a later tile do not replace the warpgroup's first ones.
        skip_tiles::<A>(&mut tiles, qkv, operands, &block, 0usize, seen_from, config);
    }
    // The last tile visited.
    let mut reached = start;
    for back in seen_from..seen_to {
        let first_column = (last - back) * tile;
        let at = tiles.pipeline.second_tile(back);
        wait(&mut s, 0usize);

        make_scores::<A>(
            &mut s,
            score,
            &problem,
            &head_params,
            (offset + own + lane / 4) as u32,
            (first_column + (lane % 4) * 2) as u32,
            &first,
            group.at_edge(first_column, tile, WeightOf::<A>::SEES_ITSELF),
            false,
            config,
        );
        if biases_after {
            add_biases::<A>(&mut bias_state, &mut s, inverse, warp, config);
            if back + 1 < seen_to {
                let next = first_column - tile;
                BiasesOf::<A>::read_keys(&mut bias_state, biases, &problem, &block, next, config);
            }
        }
        if saves_carries {
            let carries = carries.as_mut().unwrap();
            save_carries::<A>(carries, &row_state, &problem, batch_head, own, first_column / tile);
        }
        WeightOf::<A>::add_tile(&mut row_state, &mut s, &mut o_acc, scale, n_keys, n_dim);
        // Once no row of the block carries anything on, all further weights are 0.
        let mut done = false;
        if in_order {
            reached = first_column;
            done = all_of_block(nothing_carried::<A>(&row_state, own, queries));
        }
        if adds_something::<A>(&s, warp / GROUP_WARPS) {
            let p = to_a_frags(&s, n_keys);
            start_pb(&p, &tiles.pipeline.second_tiles, at, &mut o_acc);
        }
        // Start the next tile's scores before waiting for this tile's product.
        if (back + 1 < seen_to) & !done {
            let next = first_column - tile;
            if biased {
                start_from_biases::<A>(&mut bias_state, &mut s, inverse, warp, config);
            }
            tiles.pipeline.wait(back + 1);
            let next_at = tiles.pipeline.first_tile(back + 1);
            OperandsOf::<A>::start_scores(
                &mut operand_state,
                &mut s,
                &tiles.queries,
                &tiles.pipeline.first_tiles,
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
        if in_order {
            if done {
                // A block must not end before its loads.
                if back + 1 < visited {
                    tiles.pipeline.wait(back + 1);
                }
                break;
            }
        }
        if tiles.pipeline.release(back) & (back + 2 < visited) {
            load_later::<A>(&mut tiles, qkv, operands, &block, back + 2, config);
        }
    }
    skip_tiles::<A>(&mut tiles, qkv, operands, &block, seen_to, visited, config);

    let mut factors = Array::<f32>::new(2usize);
    #[unroll]
    for r in 0..2usize {
        let query = own + r * 8 + lane / 4;
        let write = (lane % 4 == 0) & (query < queries);
        if saves_carries {
            if write {
                let carries = carries.as_mut().unwrap();
                carries.first[batch_head * queries + query] = i32::cast_from(reached as u32);
            }
        }
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
    if saves_carries {
        if UNIT_POS == 0 {
            let carries = carries.as_mut().unwrap();
            let blocks = (queries + rows - 1) / rows;
            let to = (batch_head * blocks + block.first_query / rows) * 2;
            carries.bounds[to] = i32::cast_from(reached as u32);
            carries.bounds[to + 1] = i32::cast_from(reached as u32);
        }
    }
    o.store(&o_acc, &factors, batch, block.head, own, queries, config.value_dim);
}

/// Initialises the accumulator of scores with the biases of the tile that was read, times `factor`.
#[cube]
pub fn start_from_biases<A: Hooks>(
    state: &mut <A::Biases as Biases>::KeyLoop,
    s: &mut Accumulator,
    factor: f32,
    warp: usize,
    #[comptime] config: KernelConfig,
) {
    BiasesOf::<A>::begin_keys(state, factor, warp, config);
    #[unroll]
    for n in 0..comptime!(config.tile / 8) {
        let biases = BiasesOf::<A>::of_keys(state, warp, n, config);
        #[unroll]
        for r in 0..2usize {
            let mut pair = Pair::empty();
            pair[0] = biases[0];
            pair[1] = biases[1];
            s.index_mut(n)[r] = pair;
        }
    }
}

/// Adds the biases of the tile that was read, times `factor`, to scores.
#[cube]
fn add_biases<A: Hooks>(
    state: &mut <A::Biases as Biases>::KeyLoop,
    s: &mut Accumulator,
    factor: f32,
    warp: usize,
    #[comptime] config: KernelConfig,
) {
    BiasesOf::<A>::begin_keys(state, factor, warp, config);
    #[unroll]
    for n in 0..comptime!(config.tile / 8) {
        let biases = BiasesOf::<A>::of_keys(state, warp, n, config);
        #[unroll]
        for r in 0..2usize {
            let mut pair = s.index(n)[r];
            pair[0] += biases[0];
            pair[1] += biases[1];
            s.index_mut(n)[r] = pair;
        }
    }
}

/// Turns 16 rows of products into scores, up to [`Score::scale`]: applies [`Score::score`] and, if `edge` says
/// that the tile needs masking, the mask. `row` and `column` are a lane's first row and column, `first` the
/// first keys of its rows. With `products`, leaves products as they are, and masks them with 0.
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
    #[comptime] products: bool,
    #[comptime] config: KernelConfig,
) {
    let n_keys = comptime!(config.tile / 8);
    let hidden = comptime!(if products { 0f32 } else { MASKED });
    if comptime!(config.changes_scores && !products) {
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
            let last = problem.last_key(row as usize, config) as u32;
            #[unroll]
            for n in 0..n_keys {
                let fragment = s.index_mut(n);
                let mut pair = fragment[r];
                #[unroll]
                for e in 0..2usize {
                    let column = column + comptime!((n * 8 + e) as u32);
                    let mut value = select(masked(last, column, first[r]), hidden, pair[e]);
                    if comptime!(!WeightOf::<A>::SEES_ITSELF) {
                        // Not replaced: a NaN must show even where a query has no key.
                        value = select(row == column, fma(value, 0f32, hidden), value);
                    }
                    pair[e] = value;
                }
                fragment[r] = pair;
            }
        }
    }
}
