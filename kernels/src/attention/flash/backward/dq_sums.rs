//! The sum of dq over key blocks, which add their parts in turns, and dq and its row sums from it.

use cubecl::prelude::*;

use super::super::hooks::{Hooks, Operands, OperandsOf, sums_of_rows};
use super::super::problem::{KernelConfig, ProblemShape};
use super::GradientOutput;
use super::dqkv::CONSUMER_WARPS;
use crate::tile::warpgroup::GROUP_ROWS;
use crate::tile::{Accumulator, CHUNK, Pair, Quad};

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
    pub sums: Array<Quad>,
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

/// Threads of a block of [`dq_from_sums`].
pub const THREADS: usize = 256;

/// dq, `[batch, heads, queries, head_dim]`, and Σ_j dS_ij of each query if they are needed, from their sums.
///
/// Grid: query tiles, batch · heads.
#[cube(launch_unchecked, address_type = "u64")]
pub fn dq_from_sums<A: Hooks>(
    sums: &Array<Quad>,
    dq: &mut GradientOutput<A>,
    ds_rows: &mut ComptimeOption<Array<f32>>,
    problem: ProblemShape,
    #[comptime] config: KernelConfig,
) {
    let KernelConfig { head_dim, tile, .. } = comptime!(config);
    let with_sums = comptime!(sums_of_rows::<A>());
    let vectors = comptime!(vectors_per_tile(config, with_sums));
    let (queries, positions) = (problem.queries as usize, problem.positions as usize);
    let batch_head = CUBE_POS_Y as usize;
    // Divides in 32 bits, which is faster.
    let (batch, head) = (CUBE_POS_Y / problem.heads, CUBE_POS_Y % problem.heads);
    let first_query = CUBE_POS_X as usize * tile;
    let base = (batch_head * CUBE_COUNT_X as usize + CUBE_POS_X as usize) * vectors;
    let base_row = dq.strides.base(batch as usize, head as usize);

    let mut factor = 1f32;
    if comptime!(OperandsOf::<A>::SCALES_GRADIENTS) {
        factor = problem.scale;
    }
    // A unit is four channels of two rows. No load waits for a store.
    let rounds = comptime!(dq_vectors(config) / 2 / THREADS);
    let mut loaded = Array::<Quad>::new(comptime!(2 * rounds));
    #[unroll]
    for round in 0..rounds {
        let unit = Unit::new(UNIT_POS as usize + comptime!(round * THREADS), config);
        loaded[comptime!(2 * round)] = sums[base + unit.place];
        loaded[comptime!(2 * round + 1)] = sums[base + unit.place + 1];
    }
    #[unroll]
    for round in 0..rounds {
        let unit = Unit::new(UNIT_POS as usize + comptime!(round * THREADS), config);
        let (left, right) = (loaded[comptime!(2 * round)], loaded[comptime!(2 * round + 1)]);
        #[unroll]
        for r in 0..2usize {
            let row = first_query + unit.row + r * 8;
            if (row < queries) & (unit.channel < head_dim) {
                let mut four = Quad::empty();
                four[0] = left[comptime!(2 * r)] * factor;
                four[1] = left[comptime!(2 * r + 1)] * factor;
                four[2] = right[comptime!(2 * r)] * factor;
                four[3] = right[comptime!(2 * r + 1)] * factor;
                let at = (base_row + row * dq.strides.row as usize) * comptime!(CHUNK / 4);
                dq.quads[at + unit.channel / 4] = Vector::cast_from(four);
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

/// Four neighbouring channels of two rows of a tile, 8 rows apart, which two lanes of `dqkv` hold. Lanes of a warp have
/// 32 channels of four rows each.
#[derive(CubeType, Clone, Copy)]
struct Unit {
    /// The first of the two vectors in the tile's sums.
    place: usize,
    /// The first row.
    row: usize,
    /// The first channel.
    channel: usize,
}

#[cube]
impl Unit {
    fn new(number: usize, #[comptime] config: KernelConfig) -> Unit {
        let n_dq = comptime!(dq_fragments(config));
        let (half, lane_row) = (number % 2, number / 8 % 8);
        let fragment = number / 64 % comptime!(n_dq / 4) * 4 + number / 2 % 4;
        let warp = number / comptime!(64 * n_dq / 4);
        let (group, warp) = (warp / 4, warp % 4);
        let in_group = fragment * 128 + warp * 32 + lane_row * 4 + half * 2;
        let mut row = warp * 16 + lane_row;
        let mut channel = fragment * 8 + half * 4;
        if comptime!(config.tile > GROUP_ROWS) {
            row += group * GROUP_ROWS;
        } else {
            channel += group * comptime!(8 * n_dq);
        }
        Unit { place: group * comptime!(dq_vectors(config) / 2) + in_group, row, channel }
    }
}
