//! What queries read from the states, and what keys read from their gradients.

use burn::tensor::bf16;
use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;

use super::slab::{
    SLAB, StateLayout, expand_rows, next_tiles, own_pair, place_of, slab_frags, tiles_of,
};
use crate::attention::flash::HeadPairs;
use crate::attention::power::cuda::join::{join, least_weight};
use crate::tile::warpgroup::{GROUP_WARPS, Pipeline, start_pb, wait};
use crate::tile::{
    ALIGN, Accumulator, CHUNK, Chunk, PANEL, Pair, bytes, define_exp2, load_a_frag, sum_of_four,
    zeros,
};

/// Warps of a block.
pub const WARPS: usize = 2 * GROUP_WARPS;

/// Tokens of a block.
pub const ROWS: usize = 16 * WARPS;

/// Threads of a block.
pub const THREADS: usize = 32 * WARPS;

/// The compile-time configuration of readers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ReadConfig {
    /// The layout of states.
    pub layout: StateLayout,
    /// Queries read the state two chunks back, and keys the gradient of their own chunk's state.
    pub of_queries: bool,
}

/// The sizes of a call.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct ReadSizes {
    /// Heads of the vectors.
    pub heads: u32,
    /// Heads that share a state.
    pub group: u32,
    /// Tokens of a row.
    pub tokens: u32,
    /// Tokens of a chunk.
    pub chunk: u32,
}

/// The tokens of a block.
#[derive(CubeType, Clone, Copy)]
pub struct Readers {
    /// The sequence.
    pub batch: usize,
    /// The head.
    pub head: usize,
    /// batch · heads + head.
    pub batch_head: usize,
    /// The row of states.
    pub row: usize,
    /// The state that the tokens read.
    pub state: usize,
    /// The first token.
    pub first: usize,
}

#[cube]
impl Readers {
    /// Those of this block: the grid is blocks of tokens by batch · heads.
    pub fn new(sizes: &ReadSizes, #[comptime] config: ReadConfig) -> Readers {
        let (batch_head, chunk) = (CUBE_POS_Y as usize, sizes.chunk as usize);
        let mut first = CUBE_POS_X as usize * ROWS;
        let state = first / chunk;
        if comptime!(config.of_queries) {
            first += 2 * chunk;
        }
        Readers {
            batch: batch_head / sizes.heads as usize,
            head: batch_head % sizes.heads as usize,
            batch_head,
            row: batch_head / sizes.group as usize,
            state,
            first,
        }
    }

    /// Starts the load of the `iteration`-th part of the state: with `with_moments` M's slabs come first. `others` is
    /// the number of bytes that the iteration also waits for.
    pub fn load(
        &self,
        pipeline: &mut Pipeline,
        states: &TensorMap<bf16, Tiled>,
        iteration: usize,
        others: u32,
        #[comptime] with_moments: bool,
        #[comptime] layout: StateLayout,
    ) {
        let mut slab = iteration * comptime!(layout.per_load());
        if comptime!(with_moments) {
            let moments = comptime!(layout.moments());
            if iteration < moments {
                slab = iteration + comptime!(layout.products());
            } else {
                slab = (iteration - moments) * comptime!(layout.per_load());
            }
        }
        pipeline.load_first(iteration, states, self.row, self.state, slab * SLAB, others);
    }
}

/// x · M for a warp's 16 rows, once M's slabs are the pipeline's first iterations; with the tile of the block's x.
#[cube]
pub fn by_moments(
    acc: &mut Accumulator,
    pipeline: &Pipeline,
    vectors: &SharedMemory<Chunk>,
    warp: usize,
    #[comptime] slab: usize,
) {
    let def = MmaDefinition::<bf16, bf16, f32>::new(16usize, 8usize, 16usize);
    let mut a_frags = Sequence::<Array<crate::tile::Bf16Pair>>::new();
    #[unroll]
    for step in 0..4usize {
        a_frags.push(load_a_frag(&def, vectors, warp * 16, comptime!(slab * 4 + step), ROWS));
    }
    start_pb(&a_frags, &pipeline.first_tiles, pipeline.first_tile(slab), acc);
    wait(acc, 0usize);
}

/// The tensors that [`read_states`] reads and changes.
#[derive(CubeType, CubeLaunch)]
pub struct ReadArrays {
    /// x: queries or keys, `[batch, heads, tokens, head_dim]`.
    pub x: TensorMap<bf16, Tiled>,
    /// `[rows, chunks − 2, layout.rows(), head_dim]`
    pub states: TensorMap<bf16, Tiled>,
    /// Of queries, log₂ of the decay of the state since its chunk's end, relative to the row's shift; of keys, their
    /// weights. `[rows, tokens]`.
    pub decays: Array<f32>,
    /// o or dv, `[batch, heads, tokens, head_dim]`.
    pub results: HeadPairs<bf16>,
    /// Log-sum-exp of queries, base 2, relative to the row's shift, `[batch, heads, tokens]`.
    pub lse: Array<f32>,
    /// The factors of what queries read from S in o, likewise: the state's decay over the sum of all weights.
    pub factors: Array<f32>,
}

/// Queries: o and its log-sum-exp over the near keys become those over all keys. Keys: adds what later chunks
/// contribute to dv.
///
/// Grid: blocks of [`ROWS`] tokens, from the third chunk on for queries and without the last two for keys, by batch ·
/// heads; [`THREADS`] threads.
#[cube(launch_unchecked, fast_math = FastMath::all(), address_type = "u64")]
pub fn read_states(arrays: &mut ReadArrays, sizes: ReadSizes, #[comptime] config: ReadConfig) {
    define_exp2();
    let layout = comptime!(config.layout);
    let with_moments = comptime!(config.of_queries);
    let (dim, fragments) = comptime!((layout.padded(), layout.head_dim / 8));
    let per_load = comptime!(layout.per_load());
    let moments = comptime!(if with_moments { layout.moments() } else { 0 });
    let total = comptime!(moments + layout.products() / per_load);
    let warp = plane_shuffle(UNIT_POS / 32, 0u32) as usize;
    let lane = UNIT_POS_PLANE as usize;
    let own = Readers::new(&sizes, config);

    let mut pipeline = Pipeline::new(comptime!(per_load * SLAB), (dim, 0usize), WARPS);
    let mut vectors = SharedMemory::<Chunk>::new_aligned(comptime!(ROWS * dim / CHUNK), ALIGN);
    sync_cube();
    if UNIT_POS == 0 {
        let others = comptime!(bytes(ROWS, dim));
        own.load(&mut pipeline, &arrays.states, 0usize, others, with_moments, layout);
        pipeline.load_also(
            0usize,
            &arrays.x,
            own.batch,
            own.head,
            own.first,
            &mut vectors,
            ROWS,
            dim,
        );
        own.load(&mut pipeline, &arrays.states, 1usize, 0u32, with_moments, layout);
    }
    let row = warp * 16;

    // The sum of far weights, xᵀ M x, and the least one that counts.
    let mut weights = Array::<f32>::new(2usize);
    let mut least = Array::<f32>::new(2usize);
    if with_moments {
        let mut acc = zeros(fragments);
        let mut trace = f32::cast_from(0f32);
        #[unroll]
        for slab in 0..moments {
            pipeline.wait(slab);
            trace += trace_of(&pipeline, slab, layout);
            by_moments(&mut acc, &pipeline, &vectors, warp, slab);
            if pipeline.release(slab) & (slab + 2 < total) {
                own.load(&mut pipeline, &arrays.states, slab + 2, 0u32, with_moments, layout);
            }
        }
        #[unroll]
        for r in 0..2usize {
            let mut sum = 0f32;
            let mut square = 0f32;
            #[unroll]
            for f in 0..fragments {
                let x = own_pair(&vectors, row + r * 8 + lane / 4, f, ROWS);
                let (x, y) = (Pair::cast_from(x), acc.index(f)[r]);
                sum += x[0] * y[0] + x[1] * y[1];
                square += x[0] * x[0] + x[1] * x[1];
            }
            weights[r] = sum_of_four(sum);
            least[r] = least_weight(sum_of_four(square), trace);
        }
    }

    let mut acc = zeros(fragments);
    let (mut first, mut second) = tiles_of(0usize.runtime(), layout);
    for iteration in moments.runtime()..total.runtime() {
        pipeline.wait(iteration);
        let at = pipeline.first_tile(iteration);
        #[unroll]
        for slab in 0..per_load {
            let mut a_frags = slab_frags();
            expand_rows(&mut a_frags, &vectors, row, (first, second), ROWS);
            start_pb(&a_frags, &pipeline.first_tiles, at + slab * SLAB * PANEL, &mut acc);
            (first, second) = next_tiles(first, second, layout);
        }
        wait(&mut acc, 0usize);
        if pipeline.release(iteration) & (iteration + 2 < total) {
            own.load(&mut pipeline, &arrays.states, iteration + 2, 0u32, with_moments, layout);
        }
    }

    let tokens = sizes.tokens as usize;
    #[unroll]
    for r in 0..2usize {
        let token = own.first + row + r * 8 + lane / 4;
        let exists = token < tokens;
        let from = min(token, tokens - 1);
        let mut of_result = f32::cast_from(1f32);
        let mut of_state = arrays.decays[own.row * tokens + from];
        if comptime!(config.of_queries) {
            let at = own.batch_head * tokens + from;
            let (near, far, lse) = join(arrays.lse[at], of_state, weights[r], least[r]);
            of_result = near;
            of_state = far;
            // All lanes of the row have read it.
            sync_plane();
            if exists & (lane % 4 == 0) {
                arrays.lse[at] = lse;
                arrays.factors[at] = far;
            }
        }
        if exists {
            let base = arrays.results.at(own.batch, own.head, token, lane % 4);
            #[unroll]
            for f in 0..fragments {
                let at = base + comptime!(4 * f);
                let near = Pair::cast_from(arrays.results.pairs[at]);
                let far = acc.index(f)[r];
                let sum = near * Pair::cast_from(of_result) + far * Pair::cast_from(of_state);
                arrays.results.pairs[at] = Vector::cast_from(sum);
            }
        }
    }
}

/// The sum over the diagonal of a slab of M that has been loaded.
#[cube]
fn trace_of(pipeline: &Pipeline, #[comptime] slab: usize, #[comptime] layout: StateLayout) -> f32 {
    let lane = UNIT_POS_PLANE as usize;
    let at = pipeline.first_tile(slab);
    let mut sum = f32::cast_from(0f32);
    #[unroll]
    for half in 0..comptime!(layout.head_dim.min(SLAB) / 32) {
        let row = half * 32 + lane;
        let tile = comptime!(slab * PANEL) + row / CHUNK;
        let rows = comptime!(layout.per_load() * SLAB);
        let chunk = pipeline.first_tiles[at + place_of(row, tile, rows)];
        #[unroll]
        for i in 0..CHUNK {
            sum += select(row % CHUNK == i, f32::cast_from(chunk[i]), 0f32);
        }
    }
    plane_sum(sum)
}
