//! The kernel of dq, dk and dv in five products, where the split kernels need seven.
//!
//! A key block holds 128 keys and loops over query tiles, from the last to the first. Beside dk and dv it computes
//! each tile's part of dq, and adds it to a sum in f32. Key blocks add in turns, from the first one that a tile
//! attends to, so that results are the same in every run. (After the deterministic mode of FlashAttention's
//! releases; Shah et al., "FlashAttention-3", 2024, for the roles of warpgroups.)
//!
//! Each multiprocessor runs one block, which takes key blocks by tickets until none is left. It loads the next
//! key block's tiles while it stores dk and dv and adds the last parts of dq. A key block waits only for those
//! with smaller tickets, and a block works on its tickets in order, so the smallest ticket in work never waits.
//!
//! The first key blocks of some heads come first: they attend to all queries and take longest, and the short
//! ones fill the multiprocessors at the end. As all key blocks of a head begin with the last query tile, one
//! waits for the one before it for a tile's time once, not at every tile.

use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

use super::super::hooks::{
    BiasArgs, Biases, BiasesOf, Hooks, OperandArgs, Operands, OperandsOf, SavedRows, Score,
    ScoreArgs, ScoreOf, Weight, WeightOf, four_statistics, sums_of_columns, sums_of_rows,
};
use super::super::mask::Mask;
use super::super::problem::{Causality, KernelConfig, ProblemShape};
use super::BackwardInputs;
use super::dkv::KeyGradientsOf;
use super::dq_sums::{DqSums, dq_fragments, dq_vectors, store_row_sums, vectors_per_tile};
use super::of_keys::{Passes, make_scores_of_keys, slopes_to_ds, weigh_scores};
use super::query_tile::QueryTile;
use crate::tile::roles::{
    Ring, Tickets, blocks_per_multiprocessor, set_registers, sync_first_threads,
};
use crate::tile::turns::{pass_turn, start_add, wait_for_adds, wait_for_turn};
use crate::tile::warpgroup::{
    GROUP_ROWS, GROUP_WARPS, start_pb, start_tile_abt, store_a_frags, to_a_frags, uninit,
    uninit_a_frags, wait,
};
use crate::tile::{
    ALIGN, CHUNK, Chunk, PANEL, PANEL_DIM, Pair, Quad, bytes, define_exp2, load_rows, sum_of_four,
    wait_parity, zeros,
};

/// Warps that compute; a further warpgroup loads and adds.
pub const CONSUMER_WARPS: usize = 2 * GROUP_WARPS;

/// Threads per block.
pub const THREADS: usize = 32 * (CONSUMER_WARPS + GROUP_WARPS);

/// Registers per thread of a consumer and of a producer; with a block per multiprocessor they fit.
const REGISTERS: (usize, usize) = (232, 40);

/// [`DqSums::heads_at_once`] for `heads` heads of k with `blocks` key blocks each. With fewer, more key blocks of
/// a head are in work at the same time and wait for one another; with more, the tiles in use at a time take more
/// memory. In a simulation with 132 multiprocessors, the whole takes 1 % longer than its work would at 4,096
/// keys in 64 heads, and 3 % at 1,024 keys in 96 heads.
pub fn heads_at_once(processors: usize, heads: usize, blocks: usize) -> u32 {
    let least = (4 * processors).div_ceil(blocks + 1);
    heads.div_ceil(heads.div_ceil(least)) as u32
}

/// What a role needs to know of a key block.
#[derive(CubeType, Clone, Copy)]
struct KeyBlock {
    /// The head of k, counted over the batch.
    batch_kv_head: usize,
    /// Its place among the head's key blocks.
    block: usize,
}

#[cube]
impl KeyBlock {
    /// The key block of a ticket: of a few heads at once, block by block.
    fn of_ticket(ticket: usize, dq: &DqSums, blocks: usize) -> KeyBlock {
        let at_once = dq.heads_at_once as usize;
        let first_head = ticket / (blocks * at_once) * at_once;
        let heads_at_once = min(dq.tickets as usize / blocks - first_head, at_once);
        let place = ticket - first_head * blocks;
        KeyBlock { batch_kv_head: first_head + place % heads_at_once, block: place / heads_at_once }
    }
}

/// Arrives at `kv_empty` for the `taken`-th ticket, which the role has read. It may be ahead of the consumers: it first
/// waits until the phase of the ticket before has ended, to which the arrival would else be counted.
#[cube]
fn confirm_ticket(kv_empty: &Barrier, taken: usize) {
    if taken > 0 {
        wait_parity(kv_empty, (taken + 1) as u32 % 2);
    }
    if UNIT_POS_PLANE == 0 {
        kv_empty.arrive();
    }
}

/// dk and dv, and dq's sums, over all query heads of each kv head.
///
/// Grid: at most one block per multiprocessor.
#[cube(launch_unchecked, fast_math = FastMath::all(), address_type = "u64")]
pub fn dqkv<A: Hooks>(
    inputs: &BackwardInputs,
    mask: &Mask,
    operands: &OperandArgs<A>,
    biases: &BiasArgs<A>,
    score: &ScoreArgs<A>,
    saved: &SavedRows<A>,
    gradients: &mut KeyGradientsOf<A>,
    dq: &mut DqSums,
    problem: ProblemShape,
    #[comptime] config: KernelConfig,
) {
    blocks_per_multiprocessor(comptime!("dqkv".to_string()), THREADS, 1usize);
    define_exp2();
    let KernelConfig { padded_head_dim: dim, padded_value_dim: value_dim, tile, .. } =
        comptime!(config);
    let with_sums = comptime!(sums_of_rows::<A>());
    let with_column_sums = comptime!(sums_of_columns::<A>());
    let rows = comptime!(config.rows());
    let n_queries = comptime!(tile / 8);
    let vectors = comptime!(vectors_per_tile(config, with_sums));
    let by_tile = comptime!(OperandsOf::<A>::DK_IN_REVERSE);

    let lane = UNIT_POS_PLANE as usize;
    // The shuffle tells the compiler that the value is warp-uniform.
    let warp = plane_shuffle(UNIT_POS / 32, 0u32) as usize;
    let queries = problem.queries as usize;
    let keys = problem.keys as usize;
    let offset = problem.offset();

    let kv_full = Barrier::shared(1, UNIT_POS == 0);
    // Released by the consumers, and by the two roles that read a ticket and not K and V.
    let kv_empty = Barrier::shared(comptime!(CONSUMER_WARPS as u32 + 2), UNIT_POS == 0);
    let dq_full = Barrier::shared(comptime!(CONSUMER_WARPS as u32), UNIT_POS == 0);
    let dq_empty = Barrier::shared(1, UNIT_POS == 0);
    // A stage of q also holds its statistics.
    let mut q_ring = Ring::new(tile, dim, 2u32, comptime!(CONSUMER_WARPS as u32));
    let mut grad_ring = Ring::new(tile, value_dim, 1u32, comptime!(CONSUMER_WARPS as u32));
    let mut k_tile = SharedMemory::<Chunk>::new_aligned(comptime!(rows * dim / CHUNK), ALIGN);
    let mut v_tile = SharedMemory::<Chunk>::new_aligned(comptime!(rows * value_dim / CHUNK), ALIGN);
    // Two tiles of dSᵀ, and of each warp's part of Σ_j dS_ij.
    let ds_chunks = comptime!(rows * tile / CHUNK);
    let mut ds_tiles = SharedMemory::<Chunk>::new_aligned(comptime!(2 * ds_chunks), ALIGN);
    let row_pairs = comptime!(if with_sums { CONSUMER_WARPS * tile / 2 } else { 1 });
    let mut row_sums = SharedMemory::<Pair>::new_aligned(comptime!(2 * row_pairs), 8usize);
    let mut dq_tile = SharedMemory::<Quad>::new_aligned(vectors, 128usize);
    let mut query_tile = QueryTile::new(2usize, comptime!(four_statistics::<A>()), config);
    let mut most_first_key = SharedMemory::<u32>::new(2usize);
    let mut tickets = Tickets::new();
    if UNIT_POS == 0 {
        // cubecl places what it sees used, here and not in one role alone.
        ds_tiles[0] = Chunk::cast_from(0f32);
        row_sums[0] = Pair::cast_from(0f32);
        dq_tile[0] = Quad::cast_from(0f32);
        most_first_key[0] = 0u32;
        tickets.taken[0] = 0u32;
    }
    sync_async_proxy_shared();
    sync_cube();

    let blocks = (keys + rows - 1) / rows;
    let all = dq.tickets as usize;
    // Key blocks and query tiles that this block has worked on.
    let mut taken = usize::cast_from(0u32);
    let mut done = usize::cast_from(0u32);
    if warp >= CONSUMER_WARPS {
        set_registers(REGISTERS.1, false);
        let role = warp - CONSUMER_WARPS;
        if (role == 0) & (lane == 0) {
            let mut ticket = dq.turns[0].fetch_add(1u32) as usize;
            tickets.publish(taken, ticket);
            while ticket < all {
                let own = KeyBlock::of_ticket(ticket, dq, blocks);
                let first_column = own.block * rows;
                let passes = Passes::new(&problem, mask, own.batch_kv_head, first_column, config);
                let (batch, kv_head, total) = (passes.batch, passes.kv_head, passes.total);
                let (mut head, mut first_query) = passes.start(tile);
                if total > 0 {
                    q_ring.wait_empty(done);
                    q_ring.load(done, &inputs.q, batch, head, first_query);
                }
                if taken > 0 {
                    wait_parity(&kv_empty, (taken + 1) as u32 % 2);
                }
                // K and V of keys that no query attends to are not loaded, but their phase of the barrier ends.
                let mut kv_bytes = 0u32;
                if total > 0 {
                    kv_bytes += comptime!(bytes(rows, dim) + bytes(rows, value_dim));
                }
                kv_full.arrive_and_expect_tx(1, kv_bytes);
                if total > 0 {
                    let zero = usize::cast_from(0u32);
                    load_rows(
                        &kv_full,
                        &inputs.k,
                        batch,
                        kv_head,
                        first_column,
                        &mut k_tile,
                        zero,
                        rows,
                        dim,
                    );
                    load_rows(
                        &kv_full,
                        &inputs.v,
                        batch,
                        problem.value_head(kv_head, config),
                        first_column,
                        &mut v_tile,
                        zero,
                        rows,
                        value_dim,
                    );
                }
                for iteration in 0..total {
                    let at = done + iteration;
                    if iteration > 0 {
                        q_ring.wait_empty(at);
                        q_ring.load(at, &inputs.q, batch, head, first_query);
                    }
                    grad_ring.wait_empty(at);
                    grad_ring.load(at, &inputs.grad, batch, head, first_query);
                    (head, first_query) = passes.next(head, first_query, by_tile, tile);
                }
                done += total;
                taken += 1;
                ticket = dq.turns[0].fetch_add(1u32) as usize;
                tickets.publish(taken, ticket);
            }
        }
        if role == 1 {
            let mut ticket = plane_shuffle(tickets.wait(taken) as u32, 0u32) as usize;
            while ticket < all {
                let own = KeyBlock::of_ticket(ticket, dq, blocks);
                let first_column = own.block * rows;
                let passes = Passes::new(&problem, mask, own.batch_kv_head, first_column, config);
                let (batch, total) = (passes.batch, passes.total);
                let (mut head, mut first_query) = passes.start(tile);
                if total == 0 {
                    confirm_ticket(&kv_empty, taken);
                }
                for iteration in 0..total {
                    let at = done + iteration;
                    query_tile.read::<A>(saved, mask, &problem, batch, head, first_query, config);
                    // While the first tile is on its way.
                    if iteration == 0 {
                        confirm_ticket(&kv_empty, taken);
                    }
                    q_ring.wait_empty(at);
                    query_tile.put::<A>(mask, at % 2, config);
                    let mut most = 0usize;
                    if comptime!(mask.limits.any()) {
                        let (_, found) = query_tile.min_and_max_first_key(config);
                        most = found;
                    }
                    if lane == 0 {
                        most_first_key[at % 2] = most as u32;
                        q_ring.arrive(at);
                    }
                    (head, first_query) = passes.next(head, first_query, by_tile, tile);
                }
                done += total;
                taken += 1;
                ticket = plane_shuffle(tickets.wait(taken) as u32, 0u32) as usize;
            }
        }
        if (role == 2) & (lane == 0) {
            let query_tiles = (queries + tile - 1) / tile;
            let mut ticket = tickets.wait(taken);
            while ticket < all {
                confirm_ticket(&kv_empty, taken);
                let own = KeyBlock::of_ticket(ticket, dq, blocks);
                let first_column = own.block * rows;
                let passes = Passes::new(&problem, mask, own.batch_kv_head, first_column, config);
                let (batch, kv_head, total) = (passes.batch, passes.kv_head, passes.total);
                let (mut head, mut first_query) = passes.start(tile);
                for iteration in 0..total {
                    let at =
                        (batch * problem.heads as usize + head) * query_tiles + first_query / tile;
                    // The first key block that the tile attends to has the first turn.
                    let first_key = mask.first_key_from(&problem, batch, kv_head, first_query);
                    let turn = own.block - first_key / rows;
                    wait_parity(&dq_full, (done + iteration) as u32 % 2);
                    wait_for_turn(&dq.turns, at + 1, turn);
                    start_add(&dq_tile, &dq.sums, at * vectors, turn == 0, comptime!(16 * vectors));
                    wait_for_adds(false);
                    dq_empty.arrive();
                    wait_for_adds(true);
                    pass_turn(&dq.turns, at + 1);
                    (head, first_query) = passes.next(head, first_query, by_tile, tile);
                }
                done += total;
                taken += 1;
                ticket = tickets.wait(taken);
            }
        }
    } else {
        set_registers(REGISTERS.0, true);
        let group = warp / GROUP_WARPS;
        let group_row = group * GROUP_ROWS;
        // Of dq, a warpgroup computes 64 queries, or 64 or 32 channels.
        let n_dq = comptime!(dq_fragments(config));
        let mut ds_panel = usize::cast_from(0u32);
        let mut k_panel = usize::cast_from(0u32);
        if comptime!(tile > GROUP_ROWS) {
            ds_panel = group * comptime!(rows * PANEL);
        } else if comptime!(dim > PANEL_DIM) {
            k_panel = group * comptime!(rows * PANEL);
        } else {
            k_panel = group * comptime!(PANEL / 2);
        }

        let mut ticket = plane_shuffle(tickets.wait(taken) as u32, 0u32) as usize;
        while ticket < all {
            let key_block = KeyBlock::of_ticket(ticket, dq, blocks);
            let (batch_kv_head, first_column) = (key_block.batch_kv_head, key_block.block * rows);
            let passes = Passes::new(&problem, mask, batch_kv_head, first_column, config);
            let (batch, kv_head, total) = (passes.batch, passes.kv_head, passes.total);
            let group_column = first_column + group_row;
            let group_last = min(group_column + GROUP_ROWS, keys) - 1;
            let own = first_column + warp * 16;

            let mut dk_acc = zeros(comptime!(dim / 8));
            let mut dv_acc = zeros(comptime!(value_dim / 8));
            let mut s = uninit(n_queries);
            let mut dp = uninit(n_queries);
            let scale = ScoreOf::<A>::scale(score, &problem) * WeightOf::<A>::SCORE_FACTOR;
            let mut ds_sum = Array::<f32>::new(2usize);
            ds_sum[0] = 0f32;
            ds_sum[1] = 0f32;
            let mut operand_state =
                OperandsOf::<A>::dkv(operands, &problem, batch_kv_head, group_column, warp, config);
            let mut dq_parts =
                OperandsOf::<A>::dq_parts(operands, batch_kv_head, first_column, warp, config);
            let mut bias_state = BiasesOf::<A>::init_query_loop(config);

            let (mut head, mut first_query) = passes.start(tile);
            if total > 0 {
                OperandsOf::<A>::read_queries(
                    &mut operand_state,
                    operands,
                    first_query,
                    warp,
                    true,
                    config,
                );
                OperandsOf::<A>::read_queries_of_dq(&mut dq_parts, operands, first_query, config);
                BiasesOf::<A>::read_queries(
                    &mut bias_state,
                    biases,
                    &problem,
                    batch * problem.heads as usize + head,
                    first_query,
                    own,
                    config,
                );
            }
            wait_parity(&kv_full, taken as u32 % 2);
            for iteration in 0..total {
                let last = iteration + 1 == total;
                let slot = done % 2;
                let (q_at, grad_at) = (q_ring.stage_offset(done), grad_ring.stage_offset(done));
                let (next_head, next_query) = passes.next(head, first_query, by_tile, tile);
                OperandsOf::<A>::begin_tile_of_dkv(&mut operand_state, warp, config);
                OperandsOf::<A>::begin_dq_part(&mut dq_parts, first_query, warp, config);
                if !last {
                    OperandsOf::<A>::read_queries(
                        &mut operand_state,
                        operands,
                        next_query,
                        warp,
                        false,
                        config,
                    );
                    OperandsOf::<A>::read_queries_of_dq(
                        &mut dq_parts,
                        operands,
                        next_query,
                        config,
                    );
                }

                q_ring.wait(done);
                OperandsOf::<A>::start_scores_of_dkv(
                    &mut operand_state,
                    &mut s,
                    &k_tile,
                    &q_ring.tiles,
                    q_at,
                    warp,
                    config,
                );
                grad_ring.wait(done);
                start_tile_abt(
                    &v_tile,
                    group_row,
                    rows,
                    &grad_ring.tiles,
                    grad_at,
                    &mut dp,
                    true,
                    n_queries,
                    comptime!(value_dim / 16),
                );
                BiasesOf::<A>::begin_tile(&mut bias_state, config);
                // Read the next tile's data while this one is computed.
                if !last {
                    BiasesOf::<A>::read_queries(
                        &mut bias_state,
                        biases,
                        &problem,
                        batch * problem.heads as usize + next_head,
                        next_query,
                        own,
                        config,
                    );
                }
                let head_params = ScoreOf::<A>::head(score, head);
                wait(&mut s, 1usize);

                let mut edge = (group_last > offset + first_query) | (first_query + tile > queries);
                if comptime!(config.causality == Causality::AllKeys) {
                    edge |= group_column + GROUP_ROWS > keys;
                }
                if comptime!(mask.limits.any()) {
                    edge |= most_first_key[slot] as usize > group_column;
                }
                let lane_row = (offset + first_query + (lane % 4) * 2) as u32;
                let lane_column = (own + lane / 4) as u32;
                make_scores_of_keys::<A>(
                    &mut s,
                    score,
                    &problem,
                    &head_params,
                    lane_row,
                    lane_column,
                    mask,
                    &query_tile,
                    slot,
                    edge,
                    config,
                );
                let mut p = uninit_a_frags(comptime!(n_queries / 2));
                weigh_scores::<A>(
                    &mut s,
                    &mut p,
                    saved,
                    score,
                    &problem,
                    &head_params,
                    lane_row,
                    lane_column,
                    scale,
                    &bias_state,
                    &query_tile,
                    slot,
                    true,
                    config,
                );
                // Also makes the compiler compute P before it waits for dP.
                start_pb(&p, &grad_ring.tiles, grad_at, &mut dv_acc);
                wait(&mut dp, 1usize);
                slopes_to_ds::<A>(
                    &s,
                    &mut dp,
                    saved,
                    &query_tile,
                    slot,
                    &mut ds_sum,
                    with_column_sums,
                    config,
                );

                let ds = to_a_frags(&dp, n_queries);
                let ds_at = slot * ds_chunks;
                store_a_frags(&ds, &mut ds_tiles, ds_at, warp * 16, rows);
                if with_sums {
                    store_row_sums(
                        &dp,
                        &mut row_sums,
                        slot * row_pairs + warp * (tile / 2),
                        n_queries,
                    );
                }
                sync_async_proxy_shared();
                sync_first_threads(comptime!(32 * CONSUMER_WARPS));
                let mut dq_acc = uninit(n_dq);
                OperandsOf::<A>::start_dq_part(
                    &dq_parts,
                    &mut dq_acc,
                    &ds_tiles,
                    ds_at + ds_panel,
                    &k_tile,
                    k_panel,
                    warp,
                    config,
                );
                OperandsOf::<A>::rescale_dk(&operand_state, &mut dk_acc, warp, config);
                start_pb(&ds, &q_ring.tiles, q_at, &mut dk_acc);
                wait(&mut dv_acc, 2usize);
                if lane == 0 {
                    grad_ring.release(done);
                }
                OperandsOf::<A>::finish_dq_part(&dq_parts, &mut dq_acc, warp, config);
                if done > 0 {
                    wait_parity(&dq_empty, (done + 1) as u32 % 2);
                }
                let place = group * comptime!(dq_vectors(config) / 2) + UNIT_POS as usize % 128;
                #[unroll]
                for n in 0..n_dq {
                    let fragment = dq_acc.index(n);
                    let mut four = Quad::empty();
                    #[unroll]
                    for r in 0..2usize {
                        let pair = fragment[r];
                        four[comptime!(2 * r)] = pair[0];
                        four[comptime!(2 * r + 1)] = pair[1];
                    }
                    dq_tile[place + n * 128] = four;
                }
                if with_sums {
                    if (UNIT_POS as usize) < comptime!(tile / 4) {
                        let mut four = Quad::cast_from(0f32);
                        #[unroll]
                        for w in 0..CONSUMER_WARPS {
                            let from = slot * row_pairs + w * (tile / 2) + UNIT_POS as usize * 2;
                            #[unroll]
                            for i in 0..2usize {
                                let pair = row_sums[from + i];
                                four[comptime!(2 * i)] += pair[0];
                                four[comptime!(2 * i + 1)] += pair[1];
                            }
                        }
                        dq_tile[comptime!(dq_vectors(config)) + UNIT_POS as usize] = four;
                    }
                }
                sync_async_proxy_shared();
                sync_plane();
                if lane == 0 {
                    dq_full.arrive();
                }
                wait(&mut dk_acc, 0usize);
                if lane == 0 {
                    q_ring.release(done);
                }
                if with_column_sums {
                    // After the head's last tile; by tile, after each of its tiles.
                    let head_ends = last | (next_head != head);
                    #[unroll]
                    for r in 0..2usize {
                        let column = own + r * 8 + lane / 4;
                        let sum = sum_of_four(ds_sum[r]);
                        if head_ends & (lane % 4 == 0) & (column < keys) {
                            let at = (batch * problem.heads as usize + head) * keys + column;
                            let mut all = sum;
                            if by_tile {
                                all += gradients.ds_columns.as_ref().unwrap()[at];
                            }
                            gradients.ds_columns.as_mut().unwrap()[at] = all;
                        }
                        ds_sum[r] = select(head_ends, 0f32, ds_sum[r]);
                    }
                }
                head = next_head;
                first_query = next_query;
                done += 1;
            }
            if lane == 0 {
                kv_empty.arrive();
            }

            let mut factors = Array::<f32>::new(2usize);
            factors[0] = 1f32;
            factors[1] = 1f32;
            gradients.dv.store(&dv_acc, &factors, batch, kv_head, own, keys, config.value_dim);
            if comptime!(OperandsOf::<A>::SCALES_GRADIENTS) {
                factors[0] = problem.scale;
                factors[1] = problem.scale;
            }
            gradients.dk.store(&dk_acc, &factors, batch, kv_head, own, keys, config.head_dim);
            taken += 1;
            ticket = plane_shuffle(tickets.wait(taken) as u32, 0u32) as usize;
        }
    }
}
