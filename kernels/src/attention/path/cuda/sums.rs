//! Sums over all levels.

use burn::tensor::DType;
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use super::blocks::BLOCK;
use crate::attention::flash::{HeadChunks, Heads, as_u32};
use crate::cuda::{CudaTensor, buffer, empty};
use crate::ops::cuda::{THREADS, blocks, dim, elements};
use crate::tile::{CHUNK, Chunk, Quad};

/// The sums over all levels, from parts of one block on, of what their first parts have,
/// `[batch · pairs, heads, part, channels]` in bf16 each. Returns a tensor `shape`, `[batch, tokens, heads, channels]`,
/// in f32.
pub fn sum_of_levels(like: &CudaTensor, shape: [usize; 4], of_levels: &[CudaTensor]) -> CudaTensor {
    let [_, tokens, heads, channels] = shape;
    let sums = empty(like, &shape, DType::F32);
    let count = elements(&sums) / CHUNK;
    // SAFETY: a thread writes one chunk, and reads those of its token.
    unsafe {
        sum_parts::launch_unchecked::<CudaRuntime>(
            &like.client,
            blocks(count, THREADS),
            dim(THREADS),
            of_levels.iter().map(|x| Heads::new(x).chunks()).collect(),
            buffer(&sums, 4),
            as_u32(count),
            as_u32(tokens),
            as_u32(heads),
            as_u32(channels / CHUNK),
        );
    }
    sums
}

/// See [`sum_of_levels`].
#[cube(launch_unchecked, address_type = "u64")]
fn sum_parts(
    levels: &Sequence<HeadChunks>,
    sums: &mut Array<Quad>,
    count: u32,
    tokens: u32,
    heads: u32,
    chunks: u32,
) {
    let at = ABSOLUTE_POS;
    if at < count as usize {
        let (row, chunk) = (at as u32 / chunks, at as u32 % chunks);
        let (head, token, batch) = (row % heads, row / heads % tokens, row / heads / tokens);
        // Loads of all levels first, so that none waits for another.
        let mut of_levels = Array::<Chunk>::new(comptime!(levels.len() + 1));
        #[unroll]
        for i in 0..levels.len() {
            let HeadChunks { chunks, strides } = levels.index(i);
            let part = comptime!((BLOCK << i) as u32);
            let pairs = (tokens + comptime!(part - 1)) / part / 2;
            let pair = token / part / 2;
            let mut value = Chunk::cast_from(0f32);
            if (pair < pairs) & (token / part % 2 == 0) {
                let sequence = (batch * pairs + pair) as usize;
                let row = (token % part) as usize * strides.row as usize;
                value = chunks[strides.base(sequence, head as usize) + row + chunk as usize];
            }
            of_levels[i] = value;
        }
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
