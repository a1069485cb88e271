//! The states of chunks, forwards, and their gradients, backwards.

use burn::tensor::bf16;
use cubecl::prelude::*;

use super::slab::{SLAB, StateLayout, expand_tokens, place_of_channels, place_of_lane, slab_frags, tiles_of,
    transpose_tokens};
use crate::tile::warpgroup::{
    GROUP_WARPS, Pipeline, set_a_frag, start_pb, store_a_frags, uninit_a_frags, wait,
};
use crate::tile::{
    ALIGN, Accumulator, CHUNK, Chunk, PANEL, Pair, define_exp2, exp2, place, zeros,
};

/// Warpgroups of a block.
const GROUPS: usize = 2;

/// Warps of a block.
const WARPS: usize = GROUPS * GROUP_WARPS;

/// Threads of a block.
pub const THREADS: usize = 32 * WARPS;

/// The compile-time configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ScanConfig {
    /// The layout of states.
    pub layout: StateLayout,
    /// Slabs of a warpgroup.
    pub slabs: usize,
    /// From the last chunk to the first: gradients.
    pub backwards: bool,
}

impl ScanConfig {
    const fn per_block(&self) -> usize {
        GROUPS * self.slabs
    }

    /// Stages of loads, as many as leave room for two blocks on a multiprocessor.
    const fn stages(&self) -> usize {
        if self.layout.head_dim > 64 { 2 } else { 4 }
    }

    /// Blocks of a row that make S.
    const fn of_products(&self) -> usize {
        self.layout.products().div_ceil(self.per_block())
    }

    /// Blocks of a row.
    pub const fn blocks(&self) -> usize {
        self.of_products() + self.layout.moments().div_ceil(self.per_block())
    }
}

/// What the scan reads: vectors `[batch, heads, tokens, head_dim]`, where `group` heads share a state.
#[derive(CubeType, CubeLaunch)]
pub struct ScanInputs {
    /// x: the keys, or the queries.
    pub x: TensorMap<bf16, Tiled>,
    /// What φ(x) enters S with: the values, or the gradients of outputs, times their weights.
    pub values: TensorMap<bf16, Tiled>,
    /// What x enters M with: itself times its weight.
    pub weighted: TensorMap<bf16, Tiled>,
    /// The log decays over chunks, base 2, `[rows, chunks]`.
    pub totals: Array<f32>,
}

/// The sizes of the scan.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct ScanSizes {
    /// Kv heads of a sequence.
    pub kv_heads: u32,
    /// Heads of x that share a state.
    pub group: u32,
    /// Chunks of a row: the first two have no state to read.
    pub chunks: u32,
    /// Tokens of a chunk.
    pub chunk: u32,
}

/// The tokens of one iteration.
#[derive(CubeType, Clone, Copy)]
struct Step {
    head: usize,
    first: usize,
}

#[cube]
impl Step {
    fn new(
        iteration: usize,
        kv_head: usize,
        sizes: &ScanSizes,
        #[comptime] config: ScanConfig,
    ) -> Step {
        let (chunk_tokens, group) = (sizes.chunk, sizes.group);
        let (tiles, iteration) = (chunk_tokens / SLAB as u32, iteration as u32);
        let number = iteration / (tiles * group);
        let within = iteration % (tiles * group);
        let mut chunk = number;
        if comptime!(config.backwards) {
            chunk = sizes.chunks - 1 - number;
        }
        Step {
            head: kv_head * group as usize + (within / tiles) as usize,
            first: (chunk * chunk_tokens + within % tiles * SLAB as u32) as usize,
        }
    }
}

#[cube]
fn load(
    pipeline: &mut Pipeline,
    inputs: &ScanInputs,
    iteration: usize,
    row: usize,
    of_moments: bool,
    sizes: &ScanSizes,
    #[comptime] config: ScanConfig,
) {
    let kv_heads = sizes.kv_heads as usize;
    let (batch, step) =
        (row / kv_heads, Step::new(iteration, row % kv_heads, sizes, config));
    let heads = (step.head, step.head);
    if of_moments {
        pipeline.load(iteration, &inputs.x, &inputs.weighted, batch, heads, step.first, 0u32);
    } else {
        pipeline.load(iteration, &inputs.x, &inputs.values, batch, heads, step.first, 0u32);
    }
}

/// State n is that after chunk n, decayed to its end:
/// S_n = decay_n · S_(n−1) + Σ_j φ(x_j) w_j v_jᵀ, and M_n likewise with x for φ(x) and for v. Backwards, it is the
/// gradient of that state: dS_n = decay_(n+1) · dS_(n+1) + Σ_i φ(x_i) w_i v_iᵀ over chunk n + 2, which reads the state.
/// The last two chunks' states are read by none.
///
/// - `states`: `[rows, chunks − 2, layout.rows(), head_dim]`; off the diagonal of tiles S counts twice, as the products
///   of two tiles do that φ holds once
///
/// Grid: rows · blocks of slabs; [`THREADS`] threads.
#[cube(launch_unchecked, fast_math = FastMath::all(), address_type = "u64")]
pub fn scan(
    inputs: &ScanInputs,
    states: &mut Array<Chunk>,
    sizes: ScanSizes,
    #[comptime] config: ScanConfig,
) {
    define_exp2();
    let layout = comptime!(config.layout);
    let (dim, fragments) = comptime!((layout.padded(), layout.head_dim / 8));
    let (of_products, per_block) = comptime!((config.of_products(), config.per_block()));
    let blocks = comptime!(config.blocks());
    // The shuffle tells the compiler that the value is warp-uniform.
    let warp = plane_shuffle(UNIT_POS / 32, 0u32) as usize;
    let (row, block) = (CUBE_POS_X as usize / blocks, CUBE_POS_X as usize % blocks);
    let of_moments = block >= of_products;
    let mut first_slab = block * per_block;
    let mut last_slab = usize::cast_from(comptime!(layout.products() as u32));
    if of_moments {
        first_slab = (block - of_products) * per_block;
        last_slab = usize::cast_from(comptime!(layout.moments() as u32));
    }
    let first_slab = first_slab + warp / GROUP_WARPS * comptime!(config.slabs);

    let stages = comptime!(config.stages());
    let mut pipeline = Pipeline::of_stages(stages, SLAB, (dim, dim), WARPS);
    let mut staging =
        SharedMemory::<Chunk>::new_aligned(comptime!(WARPS * 16 * dim / CHUNK), ALIGN);
    sync_cube();
    let (chunks, group) = (sizes.chunks as usize, sizes.group as usize);
    let per_chunk = sizes.chunk as usize / SLAB * group;
    let total = (chunks - 2) * per_chunk;
    if UNIT_POS == 0 {
        for iteration in 0..stages {
            if iteration < total {
                load(&mut pipeline, inputs, iteration, row, of_moments, &sizes, config);
            }
        }
    }

    let of_group = warp % GROUP_WARPS;
    let mut accs = Sequence::<Accumulator>::new();
    let mut places = Array::<usize>::new(comptime!(2 * config.slabs));
    #[unroll]
    for s in 0..comptime!(config.slabs) {
        accs.push(zeros(fragments));
        let tiles = tiles_of(first_slab + s, layout);
        places[comptime!(2 * s)] = place_of_lane(tiles.0);
        places[comptime!(2 * s + 1)] = place_of_lane(tiles.1);
        if of_moments {
            places[comptime!(2 * s)] = place_of_channels(first_slab + s, of_group);
        }
    }
    for number in 0..chunks - 2 {
        let mut state = number;
        let mut decaying = number;
        if comptime!(config.backwards) {
            state = chunks - 3 - number;
            decaying = state + 1;
        }
        let decay = exp2(inputs.totals[row * chunks + decaying]);
        #[unroll]
        for s in 0..comptime!(config.slabs) {
            scale(accs.index_mut(s), decay, fragments);
        }
        for within in 0..per_chunk {
            let iteration = number * per_chunk + within;
            pipeline.wait(iteration);
            let x_at = pipeline.first_tile(iteration);
            let values_at = pipeline.second_tile(iteration);
            #[unroll]
            for s in 0..comptime!(config.slabs) {
                let slab = first_slab + s;
                if slab < last_slab {
                    let mut a_frags = slab_frags();
                    let vectors = &pipeline.first_tiles;
                    let (first, second) =
                        (places[comptime!(2 * s)], places[comptime!(2 * s + 1)]);
                    if of_moments {
                        transpose_tokens(&mut a_frags, vectors, x_at, first);
                    } else {
                        expand_tokens(&mut a_frags, vectors, x_at, of_group, (first, second));
                    }
                    let acc = accs.index_mut(s);
                    start_pb(&a_frags, &pipeline.second_tiles, values_at, acc);
                }
            }
            #[unroll]
            for s in 0..comptime!(config.slabs) {
                wait(accs.index_mut(s), 0usize);
            }
            if pipeline.release(iteration) & (iteration + stages < total) {
                load(&mut pipeline, inputs, iteration + stages, row, of_moments, &sizes, config);
            }
        }
        #[unroll]
        for s in 0..comptime!(config.slabs) {
            let slab = first_slab + s;
            if slab < last_slab {
                let mut weight = f32::cast_from(1f32);
                let mut of_state = slab;
                if of_moments {
                    of_state += comptime!(layout.products());
                } else {
                    let tiles = tiles_of(slab, layout);
                    weight = select(tiles.0 == tiles.1, 1f32, 2f32);
                }
                let first = (row * (chunks - 2) + state) * comptime!(layout.rows())
                    + of_state * SLAB
                    + of_group * 16;
                store(accs.index(s), weight, &mut staging, states, first, warp, layout);
            }
        }
    }
}

/// Multiplies an accumulator by a number.
#[cube]
fn scale(acc: &mut Accumulator, factor: f32, #[comptime] fragments: usize) {
    #[unroll]
    for f in 0..fragments {
        let fragment = acc.index_mut(f);
        #[unroll]
        for r in 0..2usize {
            fragment[r] = fragment[r] * Pair::cast_from(factor);
        }
    }
}

/// Writes a warp's 16 rows of a state times `weight`, rounded to bf16, from row `first` on.
#[cube]
fn store(
    acc: &Accumulator,
    weight: f32,
    staging: &mut SharedMemory<Chunk>,
    states: &mut Array<Chunk>,
    first: usize,
    warp: usize,
    #[comptime] layout: StateLayout,
) {
    let (fragments, rows) = comptime!((layout.head_dim / 8, WARPS * 16));
    let per_row = comptime!(layout.head_dim / CHUNK);
    let mut rounded = uninit_a_frags(comptime!(fragments / 2));
    #[unroll]
    for f in 0..fragments {
        #[unroll]
        for r in 0..2usize {
            set_a_frag(&mut rounded, f, r, acc.index(f)[r] * Pair::cast_from(weight));
        }
    }
    store_a_frags(&rounded, staging, 0usize, warp * 16, rows);
    sync_plane();
    #[unroll]
    for i in 0..comptime!(16 * per_row / 32) {
        let index = i * 32 + UNIT_POS_PLANE as usize;
        let (own, chunk) = (index / per_row, index % per_row);
        let at = place(own as u32, (chunk % PANEL) as u32)
            + (warp * 16 + chunk / PANEL * rows) * PANEL;
        states[(first + own) * per_row + chunk] = staging[at];
    }
    sync_plane();
}
