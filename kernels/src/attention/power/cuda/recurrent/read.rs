//! What queries read from the sums, and their outputs over all keys.

use burn::tensor::bf16;
use cubecl::prelude::*;

use super::{PRODUCTS, fill_ends, places, stride, threads};
use crate::attention::decay::{Sums, difference};
use crate::attention::power::cuda::chunked::{SLAB, StateLayout, next_tiles, tiles_of};
use crate::attention::power::cuda::join::{join, least_weight};
use crate::ops::cuda::block::sum_row;
use crate::tile::product::quads;
use crate::tile::warpgroup::GROUP_ROWS;
use crate::tile::{CHUNK, LOG2_E, Quad, RowStrides, define_exp2};

/// The most queries of a block of [`read_slices`].
const MOST_QUERIES: usize = 8;

/// Threads of [`join_slices`] that share a channel, each with a part of the slices.
pub const PARTS: usize = 4;

/// Blocks of [`read_slices`] that keep a multiprocessor's share of the memory busy: each thread loads 128 bytes at a
/// time.
pub const fn blocks_per_multiprocessor(layout: StateLayout) -> usize {
    512 / threads(layout)
}

/// The compile-time configuration of [`read_slices`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SliceConfig {
    /// The layout of the sums.
    pub layout: StateLayout,
    /// Queries of a block.
    pub queries: usize,
}

impl SliceConfig {
    /// For rows with this many queries.
    pub fn new(layout: StateLayout, queries: usize) -> Self {
        SliceConfig { layout, queries: queries.next_power_of_two().min(MOST_QUERIES) }
    }
}

/// The compile-time configuration of [`join_slices`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct JoinConfig {
    /// The layout of the sums.
    pub layout: StateLayout,
    /// A gate.
    pub gated: bool,
}

/// The queries, `[batch, heads, tokens, head_dim]`. Those of a kv head are a row of group · tokens.
#[derive(CubeType, CubeLaunch)]
pub struct Queries {
    /// Their elements.
    pub q: Array<bf16>,
    /// The strides of rows.
    pub strides: RowStrides,
    /// Kv heads of a sequence.
    pub kv_heads: u32,
    /// Query heads of a kv head.
    pub group: u32,
    /// Tokens of a query head.
    pub tokens: u32,
}

/// How S is cut.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Slices {
    /// Slices of S; each slab of M is one more.
    pub of_s: u32,
    /// Slabs of a slice of S.
    pub slabs: u32,
}

#[cube]
impl Queries {
    /// The index of the first channel of query `number` of a row.
    fn at(&self, row: u32, number: u32) -> usize {
        let (batch, kv_head) = (row / self.kv_heads, row % self.kv_heads);
        let head = kv_head * self.group + number / self.tokens;
        let base = self.strides.base(batch as usize, head as usize);
        (base + (number % self.tokens) as usize * self.strides.row as usize) * CHUNK
    }
}

/// φ(q) S over the slabs of a slice, or q M over a slab of M.
///
/// - `sums`: `[rows, layout.rows(), head_dim]`
/// - `parts`: `[slices, rows · queries of a row, head_dim]`
///
/// Grid: rows · slices, blocks of `config.queries` queries of a row; [`threads`] threads.
#[cube(launch_unchecked, fast_math = FastMath::all(), address_type = "u64")]
pub fn read_slices(
    queries: &Queries,
    sums: &Array<Quad>,
    parts: &mut Array<Quad>,
    slices: Slices,
    #[comptime] config: SliceConfig,
) {
    let SliceConfig { layout, queries: count } = comptime!(config);
    let (dim, stride, block) = comptime!((layout.head_dim, stride(layout), threads(layout)));
    let (own_quads, products) = comptime!((dim / 4, layout.products()));
    let all = slices.of_s + comptime!(layout.moments() as u32);
    let (row, slice) = (CUBE_POS_X / all, CUBE_POS_X % all);
    let unit = UNIT_POS as usize;
    let (i, quad) = (unit / own_quads, unit % own_quads);
    let of_row = queries.group * queries.tokens;
    let first_query = CUBE_POS_Y * comptime!(count as u32);

    let mut x = SharedMemory::<f32>::new_aligned(comptime!(count * stride), 16usize);
    fill_ends(&mut x, count, layout);
    let mut at = unit;
    while at < comptime!(count * dim) {
        let (own, channel) = (at / dim, at % dim);
        // A query that does not exist repeats the last one.
        let number = min(first_query + own as u32, of_row - 1);
        let value = queries.q[queries.at(row, number) + channel];
        x[own * stride + channel] = f32::cast_from(value);
        at += block;
    }
    sync_cube();

    // The slice's slabs.
    let of_m = slice >= slices.of_s;
    let mut slab = (slice * slices.slabs) as usize;
    let mut end = slab + slices.slabs as usize;
    if end > products {
        end = products.runtime();
    }
    if of_m {
        slab = (slice - slices.of_s) as usize + products;
        end = slab + 1;
    }
    let (mut tile, mut other) = tiles_of(select(of_m, usize::cast_from(0u32), slab), layout);
    let mut acc = Array::<Quad>::new(count);
    #[unroll]
    for query in 0..count {
        acc[query] = Quad::cast_from(0f32);
    }
    let x_quads = quads(&x);
    let row_at = row as usize * comptime!(layout.rows()) + i * PRODUCTS;
    let mut own = Array::<Quad>::new(PRODUCTS);
    let from = (row_at + slab * SLAB) * own_quads + quad;
    #[unroll]
    for j in 0..PRODUCTS {
        own[j] = sums[from + comptime!(j * own_quads)];
    }
    while slab < end {
        // The next slab, while this one is multiplied.
        let mut next = Array::<Quad>::new(PRODUCTS);
        let from = (row_at + select(slab + 1 < end, slab + 1, slab) * SLAB) * own_quads + quad;
        #[unroll]
        for j in 0..PRODUCTS {
            next[j] = sums[from + comptime!(j * own_quads)];
        }
        let (first, second) = places(slab, (tile, other), i, layout);
        #[unroll]
        for query in 0..count {
            let mut read = Quad::cast_from(0f32);
            #[unroll]
            for half in 0..comptime!(PRODUCTS / 4) {
                let four = x_quads[comptime!(query * stride / 4) + second / 4 + half];
                #[unroll]
                for c in 0..4usize {
                    read += Quad::cast_from(four[c]) * own[comptime!(half * 4 + c)];
                }
            }
            acc[query] += Quad::cast_from(x[comptime!(query * stride) + first]) * read;
        }
        (tile, other) = next_tiles(tile, other, layout);
        slab += 1;
        #[unroll]
        for j in 0..PRODUCTS {
            own[j] = next[j];
        }
    }

    // The sum over rows of products.
    let mut rows = SharedMemory::<Quad>::new(comptime!(SLAB / PRODUCTS * count * own_quads));
    #[unroll]
    for query in 0..count {
        rows[(i * count + query) * own_quads + quad] = acc[query];
    }
    sync_cube();
    let of_all = (CUBE_COUNT_X / all * of_row) as usize;
    let to = slice as usize * of_all + (row * of_row + first_query) as usize;
    let mut at = unit;
    while at < comptime!(count * own_quads) {
        let query = (at / own_quads) as u32;
        if first_query + query < of_row {
            let mut sum = rows[at];
            #[unroll]
            for i in 1..comptime!(SLAB / PRODUCTS) {
                sum += rows[comptime!(i * count * own_quads) + at];
            }
            parts[to * own_quads + at] = sum;
        }
        at += block;
    }
}

/// The keys that queries have read one by one.
#[derive(CubeType, CubeLaunch)]
pub struct ExactKeys {
    /// Log-sum-exp of queries over these keys, base 2, relative to the row's shift, `[batch, heads, tokens]`.
    pub lse: Array<f32>,
    /// The prefix sums of ℓ of these keys, of each query head.
    pub decay: ComptimeOption<Sums>,
    /// Their number.
    pub count: u32,
}

/// The outputs, `[batch, heads, tokens, head_dim]`.
#[derive(CubeType, CubeLaunch)]
pub struct Outputs {
    /// Their elements.
    pub o: Array<bf16>,
    /// The strides of rows.
    pub strides: RowStrides,
}

/// The sums over slices, and the outputs over all keys from those over the exact ones.
///
/// - `sums`: `[rows, layout.rows(), head_dim]`, for the trace of M
/// - `parts`: `[slices, batch · heads · tokens, head_dim]`
///
/// Grid: batch · heads · tokens; [`PARTS`] · head_dim threads.
#[cube(launch_unchecked, fast_math = FastMath::all(), address_type = "u64")]
pub fn join_slices(
    queries: &Queries,
    sums: &Array<f32>,
    parts: &Array<f32>,
    exact: &ExactKeys,
    outputs: &mut Outputs,
    slices: Slices,
    #[comptime] config: JoinConfig,
) {
    define_exp2();
    let JoinConfig { layout, gated } = comptime!(config);
    let dim = comptime!(layout.head_dim);
    let query = CUBE_POS_X;
    let of_row = queries.group * queries.tokens;
    let (row, number) = (query / of_row, query % of_row);
    let (part, channel) = (UNIT_POS as usize / dim, UNIT_POS as usize % dim);
    let own = query as usize * dim + channel;
    let of_slice = CUBE_COUNT_X as usize * dim;

    // 1. φ(q) S, each part's own.
    let mut far = SharedMemory::<f32>::new(comptime!(PARTS * dim));
    let mut sum = 0f32;
    let mut slice = part;
    while slice < slices.of_s as usize {
        sum += parts[slice * of_slice + own];
        slice += PARTS;
    }
    far[UNIT_POS as usize] = sum;

    // 2. q M qᵀ, |q|² and the trace of M.
    let x = f32::cast_from(queries.q[queries.at(row, number) + channel]);
    let mut by_m = 0f32;
    #[unroll]
    for slab in 0..comptime!(layout.moments()) {
        by_m += parts[(slices.of_s as usize + slab) * of_slice + own];
    }
    let m_at = row as usize * comptime!(layout.rows()) + comptime!(layout.products() * SLAB);
    let counts = part == 0;
    let mut products = Array::<f32>::new(3usize);
    products[0] = select(counts, x * by_m, 0f32);
    products[1] = select(counts, x * x, 0f32);
    products[2] = select(counts, sums[(m_at + channel) * dim + channel], 0f32);
    let warps = comptime!(PARTS * dim / 32);
    let mut scratch = SharedMemory::<f32>::new(comptime!(3 * warps));
    // It also waits for all parts of φ(q) S.
    sum_row(&mut products, &mut scratch, 3usize, comptime!(PARTS * dim));

    // 3. Both kinds of keys. The decay is that from the first exact key's predecessor to the start of the span that
    //    the query's log-sum-exp is relative to.
    let mut decay = f32::cast_from(0f32);
    if gated {
        let of_keys = exact.decay.as_ref().unwrap();
        let head = (query / queries.tokens) as usize;
        let token = query % queries.tokens;
        let first = token - token % comptime!(GROUP_ROWS as u32);
        let position = (exact.count - queries.tokens + first) as usize;
        let start = of_keys.before_span(head, 0usize);
        decay = difference(of_keys.before_span(head, position), start) * LOG2_E;
    }
    let least = least_weight(products[1], products[2]);
    let (of_near, of_far, _) = join(exact.lse[query as usize], decay, products[0], least);
    if counts {
        let mut sum = far[channel];
        #[unroll]
        for part in 1..PARTS {
            sum += far[comptime!(part * dim) + channel];
        }
        let head = query / queries.tokens;
        let heads = queries.kv_heads * queries.group;
        let base = outputs.strides.base((head / heads) as usize, (head % heads) as usize);
        let token = (query % queries.tokens) as usize;
        let at = (base + token * outputs.strides.row as usize) * CHUNK + channel;
        let near = f32::cast_from(outputs.o[at]);
        outputs.o[at] = bf16::cast_from(near * of_near + sum * of_far);
    }
}
