//! The softmax over the keys of a query's own block and of all levels.

use burn::tensor::{DType, bf16};
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use super::parts::Level;
use crate::attention::flash::weight::SoftmaxOutput;
use crate::attention::flash::{Heads, as_u32};
use crate::cuda::{CudaTensor, buffer, empty};
use crate::ops::cuda::{THREADS, blocks, dim, dims, elements};
use crate::tile::product::Quad;
use crate::tile::{CHUNK, Chunk, LOG2_E, MASKED, RowStrides, exp2};

/// Lanes that join a row's attention.
const LANES_PER_ROW: usize = 8;

/// Softmax attention over the keys of one level, `[batch · pairs, heads, part]` rows.
#[derive(CubeType, CubeLaunch)]
struct OfLevel {
    o: Array<Chunk>,
    strides: RowStrides,
    lse: Array<f32>,
}

/// Joins softmax attention over the queries' own blocks, `o` `[batch, tokens, heads, channels]` and `lse` `[batch, heads,
/// tokens]` in f32 and base 2, with that over the levels' keys. Returns the outputs, like `o` in bf16; `lse` becomes the
/// log-sum-exp over all keys.
pub fn join_attention(
    o: &CudaTensor,
    lse: &CudaTensor,
    levels: &[Level],
    of_levels: &[SoftmaxOutput],
) -> CudaTensor {
    let [_, tokens, heads, channels]: [usize; 4] = o.meta.shape().dims();
    let joined = empty(o, &dims(o), DType::BF16);
    let rows = elements(o) / channels;
    let of_levels = of_levels.iter().map(|of_level| {
        let heads = Heads::new(&of_level.o);
        OfLevelLaunch::new(
            buffer(&heads.tensor, CHUNK),
            heads.row_strides(),
            buffer(&of_level.lse, 1),
        )
    });
    // SAFETY: lanes of one warp write one row, and read those of its token.
    unsafe {
        join::launch_unchecked::<CudaRuntime>(
            &o.client,
            blocks(rows * LANES_PER_ROW, THREADS),
            dim(THREADS),
            buffer(o, 4),
            buffer(lse, 1),
            of_levels.collect(),
            buffer(&joined, CHUNK),
            levels.first().map_or(1, |level| as_u32(level.part)),
            as_u32(rows),
            as_u32(tokens),
            heads as u32,
            as_u32(channels / CHUNK),
        );
    }
    joined
}

/// A token's place in the second part of a pair.
#[derive(CubeType, Clone, Copy)]
struct Second {
    /// Whether it is in one.
    exists: bool,
    /// The pair, in `[batch, pairs]`.
    sequence: usize,
    /// The token in the part.
    in_part: usize,
}

#[cube]
impl Second {
    fn new(batch: u32, token: u32, part: u32, tokens: u32) -> Second {
        let pairs = (tokens + part - 1) / part / 2;
        let position = token / part;
        Second {
            exists: position % 2 == 1,
            sequence: (batch * pairs + position / 2) as usize,
            in_part: (token % part) as usize,
        }
    }
}

/// See [`join_attention`]; `part` is the number of tokens of a part at the first level.
#[cube(launch_unchecked, address_type = "u64")]
fn join(
    o: &Array<Quad>,
    lse: &mut Array<f32>,
    levels: &Sequence<OfLevel>,
    joined: &mut Array<Chunk>,
    part: u32,
    rows: u32,
    tokens: u32,
    heads: u32,
    chunks: u32,
) {
    // Divides in 32 bits, which is faster. A row past the last one reads that, and writes nothing.
    let own_row = (ABSOLUTE_POS / LANES_PER_ROW) as u32;
    let exists = own_row < rows;
    let row = min(own_row, rows - 1);
    let (head, token, batch) = (row % heads, row / heads % tokens, row / heads / tokens);
    let at = ((batch * heads + head) * tokens + token) as usize;
    let own = lse[at];
    let mut most = own;
    let mut weights = Array::<f32>::new(comptime!(levels.len() + 1));
    #[unroll]
    for i in 0..levels.len() {
        let level = levels.index(i);
        let of_level = Second::new(batch, token, part << comptime!(i as u32), tokens);
        // A query that sees no key of the level has an lse of −MASKED.
        let mut other = f32::cast_from(MASKED);
        if of_level.exists {
            let sequence = of_level.sequence * heads as usize + head as usize;
            let found =
                level.lse[sequence * (part << comptime!(i as u32)) as usize + of_level.in_part];
            other = select(found < comptime!(-MASKED), found, MASKED);
        }
        weights[i] = other;
        most = max(most, other);
    }
    let weight = exp2(own - most);
    let mut sum = weight;
    #[unroll]
    for i in 0..levels.len() {
        weights[i] = exp2(weights[i] - most);
        sum += weights[i];
    }
    let lane = ABSOLUTE_POS % LANES_PER_ROW;
    let chunks = chunks as usize;
    let mut chunk = lane;
    while exists & (chunk < chunks) {
        let place = row as usize * chunks + chunk;
        let mut values = Array::<f32>::new(CHUNK);
        #[unroll]
        for half in 0..2usize {
            let four = o[place * 2 + half];
            #[unroll]
            for c in 0..4usize {
                values[comptime!(4 * half + c)] = four[c] * weight;
            }
        }
        #[unroll]
        for i in 0..levels.len() {
            let level = levels.index(i);
            let of_level = Second::new(batch, token, part << comptime!(i as u32), tokens);
            if of_level.exists {
                let from = level.strides.base(of_level.sequence, head as usize)
                    + of_level.in_part * level.strides.row as usize;
                let further = level.o[from + chunk];
                #[unroll]
                for c in 0..CHUNK {
                    values[c] += f32::cast_from(further[c]) * weights[i];
                }
            }
        }
        let mut rounded = Chunk::cast_from(0f32);
        #[unroll]
        for c in 0..CHUNK {
            rounded[c] = bf16::cast_from(values[c] / sum);
        }
        joined[place] = rounded;
        chunk += LANES_PER_ROW;
    }
    // All lanes of the row have read it.
    sync_plane();
    if exists & (lane == 0) {
        lse[at] = most + Log::ln(sum) * LOG2_E;
    }
}
