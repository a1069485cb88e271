//! The gradient of values that several heads of k share.

use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use super::hooks::Hooks;
use super::{FlashAttention, as_u32};
use crate::cuda::{CudaTensor, buffer};
use crate::ops::cuda::{THREADS, blocks, dim};
use crate::tile::{CHUNK, Chunk};

impl<A: Hooks> FlashAttention<A> {
    /// dv from the parts of the heads of k, summed where several share their values.
    pub(super) fn of_shared_values(&self, parts: CudaTensor) -> CudaTensor {
        if self.shares_values() { self.sum_over_shared_values(&parts) } else { parts }
    }

    /// dv, `[batch, value heads, keys, value_dim]`, from the parts of the heads of k.
    ///
    /// - `parts`: `[batch, kv_heads, keys, value_dim]` in the memory order `[batch, keys, kv_heads, value_dim]`
    fn sum_over_shared_values(&self, parts: &CudaTensor) -> CudaTensor {
        let [batch, value_heads, keys, value_dim] = self.v.dims;
        let dv = self.v.like();
        let chunks = value_dim / CHUNK;
        let tokens = batch * keys;
        let k_heads_per_v_head = self.k.dims[1] / (self.views * value_heads);
        // SAFETY: a thread writes one chunk of dv, and reads those of the same channels.
        unsafe {
            sum_shared::launch_unchecked::<CudaRuntime>(
                &parts.client,
                blocks(tokens * value_heads * chunks, THREADS),
                dim(THREADS),
                buffer(parts, CHUNK),
                buffer(&dv.tensor, CHUNK),
                as_u32(tokens * value_heads * chunks),
                as_u32(value_heads),
                as_u32(chunks),
                as_u32(self.views),
                as_u32(k_heads_per_v_head),
            );
        }
        dv.tensor
    }
}

/// The sum over views and over the neighbouring heads of k that share a head of v, in that order.
///
/// - `parts`: `[tokens, views, value_heads, neighbours, chunks]`
/// - `sums`: `[tokens, value_heads, chunks]`, `count` in all
#[cube(launch_unchecked)]
fn sum_shared(
    parts: &Array<Chunk>,
    sums: &mut Array<Chunk>,
    count: u32,
    value_heads: u32,
    chunks: u32,
    views: u32,
    neighbours: u32,
) {
    let at = ABSOLUTE_POS;
    if at < count as usize {
        let (value_heads, chunks) = (value_heads as usize, chunks as usize);
        let (views, neighbours) = (views as usize, neighbours as usize);
        let (chunk, head) = (at % chunks, at / chunks % value_heads);
        let token = at / (chunks * value_heads);
        let mut sum = Vector::<f32, Const<CHUNK>>::cast_from(0f32);
        for view in 0..views {
            let from = ((token * views + view) * value_heads + head) * neighbours;
            for neighbour in 0..neighbours {
                let part = parts[(from + neighbour) * chunks + chunk];
                sum += Vector::<f32, Const<CHUNK>>::cast_from(part);
            }
        }
        sums[at] = Vector::cast_from(sum);
    }
}
