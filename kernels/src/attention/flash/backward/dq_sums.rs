//! The sum of dq over key blocks, which add their parts in turns, and dq and its row sums from it.

use cubecl::prelude::*;

use super::super::heads::HeadPairs;
use super::super::hooks::{GradientOf, Hooks, Operands, OperandsOf, sums_of_rows};
use super::super::problem::{KernelConfig, ProblemShape};
use super::dqkv::CONSUMER_WARPS;
use crate::tile::turns::Vec4;
use crate::tile::warpgroup::GROUP_ROWS;
use crate::tile::{Accumulator, Pair};

/// Vectors of four that a query tile has in [`DqSums::sums`].
pub const fn vectors_per_tile(config: KernelConfig, with_sums: bool) -> usize {
    dq_vectors(config) + if with_sums { config.tile / 4 } else { 0 }
}

/// Vectors of four in a tile of dq.
pub const fn dq_vectors(config: KernelConfig) -> usize {
    config.tile * config.padded_head_dim / 4
}

/// Fragments of 8 columns of a tile of dq in each warpgroup.
pub const fn dq_fragments(config: KernelConfig) -> usize {
    dq_vectors(config) / (32 * CONSUMER_WARPS)
}

/// Where key blocks add their parts of dq.
#[derive(CubeType, CubeLaunch)]
pub struct DqSums {
    /// dq of each query tile, `[batch, heads, query tiles, vectors_per_tile]`: the accumulators' registers, and
    /// with [`sums_of_rows`] Σ_j dS_ij of its queries.
    pub sums: Array<Vec4>,
    /// The next ticket, then how many key blocks have added to each tile, `[batch, heads, query tiles]`;
    /// zero-initialised.
    pub turns: Array<Atomic<u32>>,
    /// Key blocks of all heads of k.
    pub tickets: u32,
    /// Heads of k whose key blocks alternate.
    pub heads_at_once: u32,
}

/// Writes the sums over a warp's 16 keys, in pairs of neighbouring queries from `at` on.
#[cube]
pub fn store_row_sums(
    ds: &Accumulator,
    row_sums: &mut SharedMemory<Pair>,
    at: usize,
    #[comptime] n_queries: usize,
) {
    let mut sums = Array::<f32>::new(comptime!(2 * n_queries));
    #[unroll]
    for n in 0..n_queries {
        #[unroll]
        for e in 0..2usize {
            sums[comptime!(2 * n + e)] = ds.index(n)[0][e] + ds.index(n)[1][e];
        }
    }
    // Lanes that differ in one bit each pass on half of their sums, so that each query ends in one lane.
    let lane = UNIT_POS_PLANE;
    #[unroll]
    for step in 0..3usize {
        let half = comptime!(n_queries >> step);
        let bit = comptime!(16u32 >> step as u32);
        let upper = lane & bit != 0;
        #[unroll]
        for i in 0..half {
            let (low, high) = (sums[i], sums[comptime!(i + half)]);
            let kept = select(upper, high, low);
            sums[i] = kept + plane_shuffle_xor(select(upper, low, high), bit);
        }
    }
    // The lane's first query fragment.
    let count = comptime!(n_queries / 8);
    let first = lane as usize / 16 * comptime!(4 * count)
        + lane as usize / 8 % 2 * comptime!(2 * count)
        + lane as usize / 4 % 2 * count;
    #[unroll]
    for i in 0..count {
        let mut pair = Pair::empty();
        pair[0] = sums[comptime!(2 * i)];
        pair[1] = sums[comptime!(2 * i + 1)];
        row_sums[at + (first + i) * 4 + lane as usize % 4] = pair;
    }
}

/// dq, and Σ_j dS_ij of each query if they are needed, from their sums.
///
/// Grid: query tiles, batch · heads.
#[cube(launch_unchecked, address_type = "u64")]
pub fn dq_from_sums<A: Hooks>(
    sums: &Array<Vec4>,
    dq: &mut HeadPairs<GradientOf<A>>,
    ds_rows: &mut ComptimeOption<Array<f32>>,
    problem: ProblemShape,
    #[comptime] config: KernelConfig,
) {
    let KernelConfig { head_dim, tile, .. } = comptime!(config);
    let with_sums = comptime!(sums_of_rows::<A>());
    let vectors = comptime!(vectors_per_tile(config, with_sums));
    let (queries, positions) = (problem.queries as usize, problem.positions as usize);
    let batch_head = CUBE_POS_Y as usize;
    let (batch, head) = (batch_head / problem.heads as usize, batch_head % problem.heads as usize);
    let first_query = CUBE_POS_X as usize * tile;
    let base = (batch_head * CUBE_COUNT_X as usize + CUBE_POS_X as usize) * vectors;

    let (group, thread) = (UNIT_POS as usize / 128, UNIT_POS as usize % 128);
    let mut row = first_query + thread / 32 * 16 + thread % 32 / 4;
    let mut channel = thread % 4 * 2;
    let n_dq = comptime!(dq_fragments(config));
    if comptime!(tile > GROUP_ROWS) {
        row += group * GROUP_ROWS;
    } else {
        channel += group * comptime!(8 * n_dq);
    }
    let mut factor = 1f32;
    if comptime!(OperandsOf::<A>::SCALES_GRADIENTS) {
        factor = problem.scale;
    }
    #[unroll]
    for n in 0..n_dq {
        let four = sums[base + group * comptime!(dq_vectors(config) / 2) + n * 128 + thread];
        let channel = channel + n * 8;
        #[unroll]
        for r in 0..2usize {
            let row = row + r * 8;
            if (row < queries) & (channel < head_dim) {
                let mut pair = Pair::empty();
                pair[0] = four[comptime!(2 * r)] * factor;
                pair[1] = four[comptime!(2 * r + 1)] * factor;
                let at = dq.at(batch, head, row, channel / 2);
                dq.pairs[at] = Vector::cast_from(pair);
            }
        }
    }
    if with_sums {
        let place = UNIT_POS as usize;
        if place < comptime!(tile / 4) {
            let four = sums[base + comptime!(dq_vectors(config)) + place];
            #[unroll]
            for i in 0..4usize {
                let query = first_query + place * 4 + i;
                if query < queries {
                    let at = batch_head * positions + problem.offset() + query;
                    ds_rows.as_mut().unwrap()[at] = four[i];
                }
            }
        }
    }
}
