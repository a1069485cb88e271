//! Tokens that leave the cache enter the sums.

use cubecl::prelude::*;

use super::{PRODUCTS, fill_ends, places, stride, threads};
use crate::attention::decay::{SPAN, Sums, bias, difference};
use crate::attention::flash::HeadChunks;
use crate::attention::power::cuda::chunked::{SLAB, StateLayout, tiles_of};
use crate::tile::product::{quads, quads_mut};
use crate::tile::{CHUNK, LOG2_E, Quad, define_exp2, exp2};

/// Tokens in shared memory at a time, a divisor of a span.
const TILE: usize = 32;

const _: () = assert!(SPAN.is_multiple_of(TILE));

/// The oldest tokens of a cache.
#[derive(CubeType, CubeLaunch)]
pub struct OldTokens {
    /// `[batch, kv_heads, tokens, head_dim]`
    pub k: HeadChunks,
    /// `[batch, kv_heads, tokens, head_dim]`
    pub v: HeadChunks,
    /// The prefix sums of ℓ of each query head.
    pub decay: ComptimeOption<Sums>,
}

/// The sizes of [`fold`].
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct FoldSizes {
    /// Kv heads of a sequence.
    pub kv_heads: u32,
    /// Query heads of a kv head, which have its decay.
    pub group: u32,
    /// Tokens, whole spans.
    pub tokens: u32,
}

/// Adds tokens to the sums: see [`FarSums::add`](super::FarSums::add).
///
/// - `sums`: `[batch · kv_heads, layout.rows(), head_dim]`
///
/// Grid: batch · kv_heads · slabs; [`threads`] threads.
#[cube(launch_unchecked, fast_math = FastMath::all(), address_type = "u64")]
pub fn fold(
    tokens: &OldTokens,
    sums: &mut Array<Quad>,
    sizes: FoldSizes,
    #[comptime] layout: StateLayout,
    #[comptime] gated: bool,
) {
    define_exp2();
    let (dim, stride, block) = comptime!((layout.head_dim, stride(layout), threads(layout)));
    let (chunks, own_quads) = comptime!((dim / CHUNK, dim / 4));
    let slabs = comptime!(layout.slabs() as u32);
    let (row, slab) = (CUBE_POS_X / slabs, (CUBE_POS_X % slabs) as usize);
    let (batch, kv_head) = ((row / sizes.kv_heads) as usize, (row % sizes.kv_heads) as usize);
    let row = row as usize;
    let unit = UNIT_POS as usize;
    let (i, quad) = (unit / own_quads, unit % own_quads);

    let of_m = slab >= comptime!(layout.products());
    let tiles = tiles_of(select(of_m, usize::cast_from(0u32), slab), layout);
    let (first, second) = places(slab, tiles, i, layout);
    // φ holds x_a x_b once; (qᵀk)² has it twice.
    let times = select(of_m | (tiles.0 == tiles.1), 1f32, 2f32);

    let mut x = SharedMemory::<f32>::new_aligned(comptime!(TILE * stride), 16usize);
    // What the products enter the sums with: values, or for M the keys, times their weights.
    let mut y = SharedMemory::<f32>::new_aligned(comptime!(TILE * dim), 16usize);
    fill_ends(&mut x, TILE, layout);

    let end = sizes.tokens as usize;
    let sums_row = row * sizes.group as usize;
    let k_at = tokens.k.strides.base(batch, kv_head);
    let v_at = tokens.v.strides.base(batch, kv_head);
    let mut acc = Array::<Quad>::new(PRODUCTS);
    #[unroll]
    for j in 0..PRODUCTS {
        acc[j] = Quad::cast_from(0f32);
    }
    for tile in 0..sizes.tokens / comptime!(TILE as u32) {
        let from = tile as usize * TILE;
        #[unroll]
        for part in 0..comptime!(TILE * chunks / block) {
            let at = part * block + unit;
            let (own, chunk) = (at / chunks, at % chunks);
            let token = from + own;
            let mut weight = times;
            if gated {
                let decay = tokens.decay.as_ref().unwrap();
                let until_end = decay.before_span(sums_row, end);
                let between = difference(until_end, decay.before_span(sums_row, token));
                weight *= exp2(bias(between, decay.within_span(sums_row, token), LOG2_E));
            }
            let key = tokens.k.chunks[k_at + token * tokens.k.strides.row as usize + chunk];
            let value = tokens.v.chunks[v_at + token * tokens.v.strides.row as usize + chunk];
            let mut x_quads = quads_mut(&mut x);
            let mut y_quads = quads_mut(&mut y);
            #[unroll]
            for half in 0..comptime!(CHUNK / 4) {
                let mut of_x = Quad::empty();
                let mut of_y = Quad::empty();
                #[unroll]
                for c in 0..4usize {
                    let channel = comptime!(half * 4 + c);
                    let from_key = f32::cast_from(key[channel]);
                    of_x[c] = from_key;
                    of_y[c] = select(of_m, from_key, f32::cast_from(value[channel])) * weight;
                }
                let to = chunk * comptime!(CHUNK / 4) + half;
                x_quads[own * comptime!(stride / 4) + to] = of_x;
                y_quads[own * own_quads + to] = of_y;
            }
        }
        sync_cube();
        let x_quads = quads(&x);
        let y_quads = quads(&y);
        for token in 0..TILE {
            let factor = Quad::cast_from(x[token * stride + first]);
            let scaled = factor * y_quads[token * own_quads + quad];
            #[unroll]
            for half in 0..comptime!(PRODUCTS / 4) {
                let four = x_quads[token * comptime!(stride / 4) + second / 4 + half];
                #[unroll]
                for c in 0..4usize {
                    let j = comptime!(half * 4 + c);
                    acc[j] += Quad::cast_from(four[c]) * scaled;
                }
            }
        }
        sync_cube();
    }

    let mut kept = f32::cast_from(1f32);
    if gated {
        let decay = tokens.decay.as_ref().unwrap();
        let start = decay.before_span(sums_row, 0usize);
        kept = exp2(difference(decay.before_span(sums_row, end), start) * LOG2_E);
    }
    let at = (row * comptime!(layout.rows()) + slab * SLAB + i * PRODUCTS) * own_quads + quad;
    #[unroll]
    for j in 0..PRODUCTS {
        let to = at + comptime!(j * own_quads);
        sums[to] = sums[to] * Quad::cast_from(kept) + acc[j];
    }
}
