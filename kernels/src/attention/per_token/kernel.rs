//! Device code of kernels that handle each token of each head by itself.

use cubecl::prelude::*;

use crate::ops::activation::kernel::sigmoid;
use crate::ops::cuda::block::{HeadStrides, RowSplit, sum_lanes, sum_vector};
use crate::tile::{CHUNK, Chunk};

/// A chunk of channels in f32.
pub type Wide = Vector<f32, Const<CHUNK>>;

/// The sizes of a call.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct TokenSizes {
    /// Tokens of all sequences.
    pub tokens: u32,
    /// Tokens of a sequence.
    pub seq_len: u32,
    /// Chunks of a head.
    pub chunks: u32,
}

/// A thread's chunk of a token.
#[derive(CubeType, Clone, Copy)]
pub struct Place {
    /// The sequence.
    pub sequence: usize,
    /// The token's number in its sequence.
    pub token: usize,
    /// The chunk of the token.
    pub chunk: usize,
    /// Whether there is such a token and such a chunk; if not, it is the last.
    pub exists: bool,
}

#[cube]
impl Place {
    /// That of step `step` of the block.
    pub fn new(step: usize, sizes: &TokenSizes, #[comptime] split: RowSplit) -> Place {
        let (own, lane) = (UNIT_POS / split.threads as u32, UNIT_POS % split.threads as u32);
        let number = (step as u32 * CUBE_COUNT_X + CUBE_POS_X) * split.groups as u32 + own;
        let token = min(number, sizes.tokens - 1);
        Place {
            sequence: (token / sizes.seq_len) as usize,
            token: (token % sizes.seq_len) as usize,
            chunk: min(lane, sizes.chunks - 1) as usize,
            exists: number < sizes.tokens && lane < sizes.chunks,
        }
    }

    /// Its index in a tensor with these strides.
    pub fn of(&self, strides: &HeadStrides, head: usize) -> usize {
        self.sequence * strides.batch as usize
            + head * strides.head as usize
            + self.token * strides.row as usize
            + self.chunk
    }
}

/// Steps of a block over all tokens.
#[cube]
pub fn steps(sizes: &TokenSizes, #[comptime] split: RowSplit) -> usize {
    let share = CUBE_COUNT_X * split.groups as u32;
    sizes.tokens.div_ceil(share) as usize
}

/// The chunk at a [`Place`] in f32; zeros unless it `exists`.
///
/// The read does not depend on a condition: the compiler would join its value with the other one, and wait for it, at
/// once.
#[cube]
pub fn load(x: &Array<Chunk>, at: usize, exists: bool) -> Wide {
    select(exists, Wide::cast_from(x[at]), zeros())
}

#[cube]
pub fn zeros() -> Wide {
    Wide::cast_from(0f32)
}

#[cube]
pub fn all(x: f32) -> Wide {
    Wide::cast_from(x)
}

#[cube]
pub fn sigmoids(x: Wide) -> Wide {
    let mut y = x;
    #[unroll]
    for i in 0..CHUNK {
        y[i] = sigmoid(x[i]);
    }
    y
}

/// The sum of a token's elements.
#[cube]
pub fn sum(x: Wide, #[comptime] split: RowSplit) -> f32 {
    sum_lanes(sum_vector(x), split.threads)
}

/// The chunk at a token's place in parameters `[heads, head_dim]`.
#[cube]
pub fn of_head(x: &Array<Wide>, head: usize, place: &Place, sizes: &TokenSizes) -> Wide {
    x[head * sizes.chunks as usize + place.chunk]
}

/// Whether the token is the first of a document; without `packed` documents, `starts` is not read, and the state before
/// a row's first token is 0.
#[cube]
pub fn is_first(
    starts: &Array<i32>,
    place: &Place,
    sizes: &TokenSizes,
    #[comptime] packed: bool,
) -> bool {
    let mut first = false;
    if comptime!(packed) {
        let at = place.sequence * sizes.seq_len as usize + place.token;
        first = starts[at] == place.token as i32;
    }
    first
}

#[cube]
pub fn sums_of_tokens() -> Array<Wide> {
    let mut sums = Array::<Wide>::new(1usize);
    sums[0] = zeros();
    sums
}
