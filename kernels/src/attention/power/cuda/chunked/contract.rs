//! What the states, or their gradients, contribute to the gradients of queries and keys.

use burn::tensor::bf16;
use cubecl::prelude::*;

use super::read::{ROWS, ReadConfig, ReadSizes, Readers, WARPS, by_moments};
use super::slab::{SLAB, next_tiles, own_pair, place_of, tiles_of};
use crate::attention::flash::HeadPairs;
use crate::tile::warpgroup::{Pipeline, start_abt, uninit, uninit_a_frags, wait};
use crate::tile::{ALIGN, Accumulator, CHUNK, Chunk, PANEL, Pair, bytes, sum_of_four, zeros};

/// The tensors that [`contract`] reads and changes.
#[derive(CubeType, CubeLaunch)]
pub struct ContractArrays<O: Numeric> {
    /// x: queries or keys, `[batch, heads, tokens, head_dim]`.
    pub x: TensorMap<bf16, Tiled>,
    /// `[rows, chunks − 2, layout.rows(), head_dim]`
    pub states: TensorMap<bf16, Tiled>,
    /// v: the gradients of outputs, or values, shaped as x.
    pub values: HeadPairs<bf16>,
    /// The factor of Sv, `[batch, heads, tokens]`.
    pub factors: Array<f32>,
    /// That of Mx, likewise.
    pub moment_factors: Array<f32>,
    /// The gradient of x, shaped as x.
    pub gradients: HeadPairs<O>,
}

/// Adds to the gradient of x that of f · φ(x)ᵀ S v + g · xᵀ M x, where f and g are the token's two factors.
///
/// Grid: as that of [`read_states`](super::read::read_states), for x.
#[cube(launch_unchecked, fast_math = FastMath::all(), address_type = "u64")]
pub fn contract<O: Numeric>(
    arrays: &mut ContractArrays<O>,
    sizes: ReadSizes,
    #[comptime] config: ReadConfig,
) {
    let layout = comptime!(config.layout);
    let (dim, fragments) = comptime!((layout.padded(), layout.head_dim / 8));
    let (per_load, moments) = comptime!((layout.per_load(), layout.moments()));
    let total = comptime!(moments + layout.products() / per_load);
    let warp = plane_shuffle(UNIT_POS / 32, 0u32) as usize;
    let lane = UNIT_POS_PLANE as usize;
    let own = Readers::new(&sizes, config);

    let mut pipeline = Pipeline::new(comptime!(per_load * SLAB), (dim, 0usize), WARPS);
    let mut vectors = SharedMemory::<Chunk>::new_aligned(comptime!(ROWS * dim / CHUNK), ALIGN);
    // The gradients so far, `[tiles, ROWS, 4]`: each pair is one lane's.
    let mut sums = SharedMemory::<Pair>::new_aligned(comptime!(fragments * ROWS * 4), 16usize);
    sync_cube();
    if UNIT_POS == 0 {
        let others = comptime!(bytes(ROWS, dim));
        own.load(&mut pipeline, &arrays.states, 0usize, others, true, layout);
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
        own.load(&mut pipeline, &arrays.states, 1usize, 0u32, true, layout);
    }
    let row = warp * 16;
    let tokens = sizes.tokens as usize;

    // v, and the factors.
    let mut values = uninit_a_frags(comptime!(layout.head_dim / 16));
    let mut factors = Array::<f32>::new(2usize);
    let mut moment_factors = Array::<f32>::new(2usize);
    #[unroll]
    for r in 0..2usize {
        let token = min(own.first + row + r * 8 + lane / 4, tokens - 1);
        let at = arrays.values.at(own.batch, own.head, token, lane % 4);
        #[unroll]
        for f in 0..fragments {
            let to = comptime!(f % 2 * 2 + r);
            values.index_mut(comptime!(f / 2))[to] = arrays.values.pairs[at + comptime!(4 * f)];
        }
        factors[r] = arrays.factors[own.batch_head * tokens + token];
        moment_factors[r] = arrays.moment_factors[own.batch_head * tokens + token];
    }

    // 1. 2 g M x.
    let mut acc = zeros(fragments);
    #[unroll]
    for slab in 0..moments {
        pipeline.wait(slab);
        by_moments(&mut acc, &pipeline, &vectors, warp, slab);
        if pipeline.release(slab) & (slab + 2 < total) {
            own.load(&mut pipeline, &arrays.states, slab + 2, 0u32, true, layout);
        }
    }
    #[unroll]
    for f in 0..fragments {
        #[unroll]
        for r in 0..2usize {
            let factor = Pair::cast_from(2f32 * moment_factors[r]);
            sums[place_of_sum(row, f, r)] = acc.index(f)[r] * factor;
        }
    }

    // 2. The slabs of S v, times the other tile's channels of x.
    let mut of_slab = uninit(8usize);
    let mut xs = Array::<f32>::new(16usize);
    let mut of_first = Array::<f32>::new(16usize);
    let (mut first, mut second) = tiles_of(0usize.runtime(), layout);
    for iteration in moments.runtime()..total.runtime() {
        pipeline.wait(iteration);
        let at = pipeline.first_tile(iteration);
        #[unroll]
        for slab in 0..per_load {
            let from = at + slab * SLAB * PANEL;
            start_abt(&values, &pipeline.first_tiles, from, &mut of_slab, true, 8usize);
            if first == second {
                read_channels(&mut xs, &vectors, row, first);
                #[unroll]
                for i in 0..16usize {
                    of_first[i] = 0f32;
                }
            }
            wait(&mut of_slab, 0usize);
            add_slab(&mut of_first, &mut sums, &of_slab, &xs, &factors, &vectors, row, second);
            if second == comptime!(layout.tiles() - 1) {
                add_first(&of_first, &mut sums, &factors, row, first);
            }
            (first, second) = next_tiles(first, second, layout);
        }
        if pipeline.release(iteration) & (iteration + 2 < total) {
            own.load(&mut pipeline, &arrays.states, iteration + 2, 0u32, true, layout);
        }
    }

    // 3. To the gradients.
    #[unroll]
    for r in 0..2usize {
        let token = own.first + row + r * 8 + lane / 4;
        if token < tokens {
            let base = arrays.gradients.at(own.batch, own.head, token, lane % 4);
            #[unroll]
            for f in 0..fragments {
                let at = base + comptime!(4 * f);
                let near = Pair::cast_from(arrays.gradients.pairs[at]);
                let sum = near + sums[place_of_sum(row, f, r)];
                arrays.gradients.pairs[at] = Vector::cast_from(sum);
            }
        }
    }
}

/// The place of a lane's sum of a tile of its row `r`.
#[cube]
fn place_of_sum(row: usize, tile: usize, #[comptime] r: usize) -> usize {
    (tile * ROWS + row + r * 8) * 4 + UNIT_POS_PLANE as usize
}

/// Reads the 8 channels of a tile of a lane's two rows: element 2i + r.
#[cube]
fn read_channels(xs: &mut Array<f32>, vectors: &SharedMemory<Chunk>, row: usize, tile: usize) {
    #[unroll]
    for r in 0..2usize {
        let own = row + r * 8 + UNIT_POS_PLANE as usize / 4;
        let chunk = vectors[place_of(own, tile, ROWS)];
        #[unroll]
        for i in 0..8usize {
            xs[comptime!(2 * i + r)] = f32::cast_from(chunk[i]);
        }
    }
}

/// Adds a slab's part of the gradient of its second tile to the sums, and the lane's part of that of its first, whose
/// channels are `xs`, to `of_first`.
#[cube]
fn add_slab(
    of_first: &mut Array<f32>,
    sums: &mut SharedMemory<Pair>,
    of_slab: &Accumulator,
    xs: &Array<f32>,
    factors: &Array<f32>,
    vectors: &SharedMemory<Chunk>,
    row: usize,
    second: usize,
) {
    #[unroll]
    for r in 0..2usize {
        let own = row + r * 8 + UNIT_POS_PLANE as usize / 4;
        let y = Pair::cast_from(own_pair(vectors, own, second, ROWS));
        let mut of_second = Pair::cast_from(0f32);
        #[unroll]
        for i in 0..8usize {
            let products = of_slab.index(i)[r];
            let at = comptime!(2 * i + r);
            of_second += products * Pair::cast_from(xs[at]);
            of_first[at] = fma(products[0], y[0], fma(products[1], y[1], of_first[at]));
        }
        sums[place_of_sum(row, second, r)] += of_second * Pair::cast_from(factors[r]);
    }
}

/// Adds the gradient of a first tile to the sums.
#[cube]
fn add_first(
    of_first: &Array<f32>,
    sums: &mut SharedMemory<Pair>,
    factors: &Array<f32>,
    row: usize,
    first: usize,
) {
    let quarter = UNIT_POS_PLANE as usize % 4;
    #[unroll]
    for r in 0..2usize {
        let mut own = Pair::cast_from(0f32);
        #[unroll]
        for pair in 0..4usize {
            let even = sum_of_four(of_first[comptime!(4 * pair + r)]);
            let odd = sum_of_four(of_first[comptime!(4 * pair + 2 + r)]);
            if quarter == pair {
                own[0] = even;
                own[1] = odd;
            }
        }
        sums[place_of_sum(row, first, r)] += own * Pair::cast_from(factors[r]);
    }
}
