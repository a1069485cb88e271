//! The states of chunks, forwards, and their gradients, backwards.

use burn::tensor::bf16;
use cubecl::prelude::*;

use super::slab::{
    SLAB, StateLayout, expand_tokens, place_of_channels, place_of_lane, slab_frags, tiles_of,
    transpose_tokens,
};
use crate::tile::roles::{Ring, blocks_per_multiprocessor};
use crate::tile::warpgroup::{
    GROUP_WARPS, set_a_frag, start_pb, store_a_frags, uninit_a_frags, wait,
};
use crate::tile::{
    ALIGN, Accumulator, CHUNK, Chunk, PANEL, Pair, bytes, define_exp2, exp2, place, scale, zeros,
};

/// The compile-time configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ScanConfig {
    /// The layout of states.
    pub layout: StateLayout,
    /// Warpgroups that compute, with a slab each.
    pub groups: usize,
    /// From the last chunk to the first: gradients.
    pub backwards: bool,
}

impl ScanConfig {
    /// The fastest for `rows` rows of states.
    pub fn new(
        layout: StateLayout,
        backwards: bool,
        rows: usize,
        multiprocessors: usize,
    ) -> ScanConfig {
        // What fits into registers and shared memory.
        let most = if layout.head_dim > 64 { 4 } else { 6 };
        let of = |groups| ScanConfig { layout, groups, backwards };
        // A step takes time for each slab of a block, and about as much as for one of them in any case. Of equally fast
        // ones, more warpgroups share what is loaded.
        let time = |config: &ScanConfig| {
            let blocks = rows * config.blocks();
            blocks.div_ceil(multiprocessors) * (config.groups + 1)
        };
        (1..=most).rev().map(of).min_by_key(time).expect("at least one warpgroup")
    }

    /// Blocks of a row.
    pub const fn blocks(&self) -> usize {
        self.layout.slabs().div_ceil(self.groups)
    }

    const fn stages(&self) -> usize {
        if self.layout.head_dim > 64 { 3 } else { 4 }
    }

    const fn consumers(&self) -> usize {
        self.groups * GROUP_WARPS
    }

    /// Threads of a block: a further warp loads.
    pub const fn threads(&self) -> usize {
        32 * (self.consumers() + 1)
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

/// State n is that after chunk n, decayed to its end:
/// S_n = decay_n · S_(n−1) + Σ_j φ(x_j) w_j v_jᵀ, and M_n likewise with x for φ(x) and for v. Backwards, it is the
/// gradient of that state: dS_n = decay_(n+1) · dS_(n+1) + Σ_i φ(x_i) w_i v_iᵀ over chunk n + 2, which reads the state.
/// The last two chunks' states are read by none.
///
/// - `states`: `[rows, chunks − 2, layout.rows(), head_dim]`; slabs of two different tiles times 2
///
/// Grid: rows · blocks of slabs.
#[cube(launch_unchecked, fast_math = FastMath::all(), address_type = "u64")]
pub fn scan(
    inputs: &ScanInputs,
    states: &mut Array<Chunk>,
    sizes: ScanSizes,
    #[comptime] config: ScanConfig,
) {
    blocks_per_multiprocessor(comptime!("scan".to_string()), comptime!(config.threads()), 1usize);
    define_exp2();
    let layout = comptime!(config.layout);
    let (dim, products) = comptime!((layout.padded(), layout.products()));
    let consumers = comptime!(config.consumers());
    // The tiles of a stage: x, values, weighted x.
    let tile = comptime!(SLAB * dim / CHUNK);
    // The shuffle tells the compiler that the value is warp-uniform.
    let warp = plane_shuffle(UNIT_POS / 32, 0u32) as usize;
    let blocks = comptime!(config.blocks());
    let (row, block) = (CUBE_POS_X as usize / blocks, CUBE_POS_X as usize % blocks);
    let first_slab = block * config.groups;
    let (chunks, chunk_tokens) = (sizes.chunks as usize, sizes.chunk as usize);
    let (group, steps) = (sizes.group as usize, chunk_tokens / SLAB);

    let mut ring = Ring::of_stages(
        comptime!(config.stages()),
        comptime!(3 * SLAB),
        dim,
        1u32,
        comptime!(consumers as u32),
    );
    let mut staging =
        SharedMemory::<Chunk>::new_aligned(comptime!(consumers * 16 * dim / CHUNK), ALIGN);
    if UNIT_POS == 0 {
        // cubecl places what it sees used, here and not in one role alone.
        staging[0] = Chunk::cast_from(0f32);
    }
    sync_async_proxy_shared();
    sync_cube();
    let mut iteration = usize::cast_from(0u32);
    if warp == consumers {
        if UNIT_POS_PLANE == 0 {
            let kv_heads = sizes.kv_heads as usize;
            let (batch, first_head) = (row / kv_heads, row % kv_heads * group);
            let of_products = first_slab < products;
            let of_moments = first_slab + config.groups > products;
            let of_tile = comptime!(bytes(SLAB, dim));
            let of_values = select(of_products, of_tile, 0u32);
            let expected = of_tile + of_values + select(of_moments, of_tile, 0u32);
            for number in 0..chunks - 2 {
                let mut chunk = number;
                if comptime!(config.backwards) {
                    chunk = chunks - 1 - number;
                }
                for head in first_head..first_head + group {
                    for step in 0..steps {
                        let first = chunk * chunk_tokens + step * SLAB;
                        ring.wait_empty(iteration);
                        ring.expect(iteration, expected);
                        ring.load_part(iteration, &inputs.x, batch, head, first, 0usize, SLAB);
                        if of_products {
                            let source = &inputs.values;
                            ring.load_part(iteration, source, batch, head, first, tile, SLAB);
                        }
                        if of_moments {
                            let (source, at) = (&inputs.weighted, comptime!(2 * tile));
                            ring.load_part(iteration, source, batch, head, first, at, SLAB);
                        }
                        iteration += 1;
                    }
                }
            }
        }
    } else {
        let fragments = comptime!(layout.head_dim / 8);
        let (slab, of_group) = (first_slab + warp / GROUP_WARPS, warp % GROUP_WARPS);
        let exists = slab < comptime!(layout.slabs());
        let is_moment = slab >= products;
        let tiles = tiles_of(select(is_moment, usize::cast_from(0u32), slab), layout);
        let (mut first, second) = (place_of_lane(tiles.0), place_of_lane(tiles.1));
        // φ holds x_a x_b once; (qᵀk)² has it twice.
        let mut weight = select(tiles.0 == tiles.1, 1f32, 2f32);
        let mut values = usize::cast_from(comptime!(tile as u32));
        if is_moment {
            first = place_of_channels(slab - products, of_group);
            weight = f32::cast_from(1f32);
            values = usize::cast_from(comptime!(2 * tile as u32));
        }

        let mut acc = zeros(fragments);
        let mut log_decay = inputs.totals[row * chunks + decaying(0usize, chunks, config)];
        for number in 0..chunks - 2 {
            let decay = exp2(log_decay);
            // The next one, while this chunk is computed.
            log_decay = inputs.totals[row * chunks + decaying(number + 1, chunks, config)];
            scale(&mut acc, decay);
            for _ in 0..steps * group {
                ring.wait(iteration);
                if exists {
                    let at = ring.stage_offset(iteration);
                    let mut a_frags = slab_frags();
                    if is_moment {
                        transpose_tokens(&mut a_frags, &ring.tiles, at, first);
                    } else {
                        let places = (first, second);
                        expand_tokens(&mut a_frags, &ring.tiles, at, of_group, places);
                    }
                    start_pb(&a_frags, &ring.tiles, at + values, &mut acc);
                    wait(&mut acc, 0usize);
                }
                if UNIT_POS_PLANE == 0 {
                    ring.release(iteration);
                }
                iteration += 1;
            }
            if exists {
                let mut state = number;
                if comptime!(config.backwards) {
                    state = chunks - 3 - number;
                }
                let from = (row * (chunks - 2) + state) * comptime!(layout.rows())
                    + slab * SLAB
                    + of_group * 16;
                store(&acc, weight, &mut staging, states, from, warp, config);
            }
        }
    }
}

/// The chunk whose decay the state takes before the `number`-th step. Before the first one the state is 0, so any chunk
/// will do.
#[cube]
fn decaying(number: usize, chunks: usize, #[comptime] config: ScanConfig) -> usize {
    let mut chunk = number;
    if comptime!(config.backwards) {
        chunk = chunks - 2 - number;
    }
    chunk
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
    #[comptime] config: ScanConfig,
) {
    let head_dim = comptime!(config.layout.head_dim);
    let (fragments, rows) = comptime!((head_dim / 8, config.consumers() * 16));
    let per_row = comptime!(head_dim / CHUNK);
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
        let at =
            place(own as u32, (chunk % PANEL) as u32) + (warp * 16 + chunk / PANEL * rows) * PANEL;
        states[(first + own) * per_row + chunk] = staging[at];
    }
    sync_plane();
}
