//! What all levels give together: the softmax over a query's keys, and sums of gradients.

use burn::tensor::{DType, bf16};
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use super::parts::{Half, Level};
use crate::attention::flash::weight::SoftmaxOutput;
use crate::attention::flash::{Heads, as_u32};
use crate::cuda::{CudaTensor, buffer, empty};
use crate::ops::cuda::{THREADS, blocks, dim, dims, elements};
use crate::tile::{CHUNK, Chunk, MASKED, Quad, RowStrides, define_exp2, exp2, log2};

/// Lanes that join a row's attention.
const LANES_PER_ROW: usize = 4;

/// Vectors of one level's parts, `[batch · pairs, heads, part, channels]`.
#[derive(CubeType, CubeLaunch)]
struct PartVectors {
    chunks: Array<Chunk>,
    strides: RowStrides,
}

impl PartVectors {
    fn launch_of(x: &CudaTensor) -> PartVectorsLaunch<CudaRuntime> {
        let x = Heads::new(x);
        PartVectorsLaunch::new(buffer(&x.tensor, CHUNK), x.row_strides())
    }
}

/// Joins softmax attention over the queries' own blocks, `o` `[batch, tokens, heads, channels]` and `lse`
/// `[batch, heads, tokens]` in f32 and base 2, with that over the levels' keys. Returns the outputs, like `o` in bf16;
/// `lse` becomes the log-sum-exp over all keys.
pub fn join_attention(
    o: &CudaTensor,
    lse: &CudaTensor,
    levels: &[Level],
    of_levels: &[SoftmaxOutput],
) -> CudaTensor {
    let [_, tokens, heads, channels]: [usize; 4] = o.meta.shape().dims();
    let joined = empty(o, &dims(o), DType::BF16);
    let rows = elements(o) / channels;
    // SAFETY: lanes of one warp write one row, and read those of its token.
    unsafe {
        join::launch_unchecked::<CudaRuntime>(
            &o.client,
            blocks(rows * LANES_PER_ROW, THREADS),
            dim(THREADS),
            buffer(o, 4),
            buffer(lse, 1),
            of_levels.iter().map(|x| PartVectors::launch_of(&x.o)).collect(),
            of_levels.iter().map(|x| buffer(&x.lse, 1)).collect(),
            buffer(&joined, CHUNK),
            as_u32(rows),
            as_u32(tokens),
            heads as u32,
            as_u32(channels / CHUNK),
            first_part(levels),
        );
    }
    joined
}

/// A token's place in a part of a level.
#[derive(CubeType, Clone, Copy)]
struct InPart {
    /// Whether it is in such a part, of a pair.
    exists: bool,
    /// The pair, in `[batch, pairs]`.
    sequence: usize,
    /// The token in the part.
    token: usize,
}

#[cube]
impl InPart {
    /// In the `half` of the pairs of level `level`, if parts of the first level have `part` tokens.
    fn new(
        batch: u32,
        token: u32,
        tokens: u32,
        #[comptime] part: usize,
        #[comptime] level: usize,
        #[comptime] half: Half,
    ) -> InPart {
        let part = comptime!((part << level) as u32);
        let pairs = (tokens + comptime!(part - 1)) / part / 2;
        let (pair, position) = (token / part / 2, token / part % 2);
        let exists = (pair < pairs) & (position == comptime!(half as u32));
        InPart { exists, sequence: (batch * pairs + pair) as usize, token: (token % part) as usize }
    }
}

/// Reads a chunk of a token's row at each level, 0 where it is in no such part. No load waits for another.
#[cube]
fn load_parts(
    levels: &Sequence<PartVectors>,
    batch: u32,
    token: u32,
    tokens: u32,
    head: u32,
    chunk: usize,
    #[comptime] part: usize,
    #[comptime] half: Half,
) -> Array<Chunk> {
    let mut loaded = Array::<Chunk>::new(comptime!(levels.len() + 1));
    #[unroll]
    for i in 0..levels.len() {
        let PartVectors { chunks, strides } = levels.index(i);
        let at = InPart::new(batch, token, tokens, part, i, half);
        let mut value = Chunk::cast_from(0f32);
        if at.exists {
            let row = strides.base(at.sequence, head as usize) + at.token * strides.row as usize;
            value = chunks[row + chunk];
        }
        loaded[i] = value;
    }
    loaded
}

/// See [`join_attention`]; `part` is the number of tokens of a part at the first level.
#[cube(launch_unchecked, fast_math = FastMath::all(), address_type = "u64")]
fn join(
    o: &Array<Quad>,
    lse: &mut Array<f32>,
    levels: &Sequence<PartVectors>,
    of_lse: &Sequence<Array<f32>>,
    joined: &mut Array<Chunk>,
    rows: u32,
    tokens: u32,
    heads: u32,
    chunks: u32,
    #[comptime] part: usize,
) {
    define_exp2();
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
        let of_level = InPart::new(batch, token, tokens, part, i, Half::Second);
        let sequence = of_level.sequence * heads as usize + head as usize;
        let mut found = f32::cast_from(MASKED);
        if of_level.exists {
            found = of_lse.index(i)[sequence * comptime!(part << i) + of_level.token];
        }
        weights[i] = found;
    }
    #[unroll]
    for i in 0..levels.len() {
        // A query that sees no key of the level has an lse of −MASKED.
        weights[i] = select(weights[i] < comptime!(-MASKED), weights[i], MASKED);
        most = max(most, weights[i]);
    }
    let mut sum = exp2(own - most);
    #[unroll]
    for i in 0..levels.len() {
        weights[i] = exp2(weights[i] - most);
        sum += weights[i];
    }
    let factor = 1f32 / sum;
    let weight = exp2(own - most) * factor;
    #[unroll]
    for i in 0..levels.len() {
        weights[i] *= factor;
    }
    let lane = ABSOLUTE_POS % LANES_PER_ROW;
    let chunks = chunks as usize;
    let mut chunk = lane;
    while exists & (chunk < chunks) {
        let place = row as usize * chunks + chunk;
        let of_levels = load_parts(levels, batch, token, tokens, head, chunk, part, Half::Second);
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
            let further = of_levels[i];
            #[unroll]
            for c in 0..CHUNK {
                values[c] += f32::cast_from(further[c]) * weights[i];
            }
        }
        let mut rounded = Chunk::cast_from(0f32);
        #[unroll]
        for c in 0..CHUNK {
            rounded[c] = bf16::cast_from(values[c]);
        }
        joined[place] = rounded;
        chunk += LANES_PER_ROW;
    }
    // All lanes of the row have read it.
    sync_plane();
    if exists & (lane == 0) {
        lse[at] = most + log2(sum);
    }
}

/// The sums over all levels of what their first parts have, `[batch · pairs, heads, part, channels]` in bf16 each.
/// Returns a tensor `shape`, `[batch, tokens, heads, channels]`, in f32.
pub fn sum_of_levels(
    like: &CudaTensor,
    shape: [usize; 4],
    levels: &[Level],
    of_levels: &[CudaTensor],
) -> CudaTensor {
    let [_, tokens, heads, channels] = shape;
    let sums = empty(like, &shape, DType::F32);
    let count = elements(&sums) / CHUNK;
    // SAFETY: a thread writes one chunk, and reads those of its token.
    unsafe {
        sum_parts::launch_unchecked::<CudaRuntime>(
            &like.client,
            blocks(count, THREADS),
            dim(THREADS),
            of_levels.iter().map(PartVectors::launch_of).collect(),
            buffer(&sums, 4),
            as_u32(count),
            as_u32(tokens),
            as_u32(heads),
            as_u32(channels / CHUNK),
            first_part(levels),
        );
    }
    sums
}

/// Tokens of a part of the first level.
fn first_part(levels: &[Level]) -> usize {
    levels.first().map_or(1, |level| level.part)
}

/// See [`sum_of_levels`]; `part` is the number of tokens of a part at the first level.
#[cube(launch_unchecked, address_type = "u64")]
fn sum_parts(
    levels: &Sequence<PartVectors>,
    sums: &mut Array<Quad>,
    count: u32,
    tokens: u32,
    heads: u32,
    chunks: u32,
    #[comptime] part: usize,
) {
    let at = ABSOLUTE_POS;
    if at < count as usize {
        let (row, chunk) = (at as u32 / chunks, at as u32 % chunks);
        let (head, token, batch) = (row % heads, row / heads % tokens, row / heads / tokens);
        let of_levels =
            load_parts(levels, batch, token, tokens, head, chunk as usize, part, Half::First);
        let mut values = Array::<f32>::new(CHUNK);
        #[unroll]
        for c in 0..CHUNK {
            values[c] = 0f32;
        }
        #[unroll]
        for i in 0..levels.len() {
            let further = of_levels[i];
            #[unroll]
            for c in 0..CHUNK {
                values[c] += f32::cast_from(further[c]);
            }
        }
        #[unroll]
        for half in 0..2usize {
            let mut four = Quad::cast_from(0f32);
            #[unroll]
            for c in 0..4usize {
                four[c] = values[comptime!(4 * half + c)];
            }
            sums[at * 2 + half] = four;
        }
    }
}
