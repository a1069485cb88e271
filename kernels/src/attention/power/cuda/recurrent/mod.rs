//! The chunked form token by token, for decoding (Gelada et al., 2025, §2 and appendix F): S and M of the
//! [`chunked`](super::chunked) form over the tokens that have left the cache, in f32 and of constant size.
//!
//! With k and v of the oldest cached tokens, whole chunks, and w_j the decay from token j to the last of them:
//!
//! - [`fold`]: S ← decay · S + Σ_j w_j φ(k_j)ᵀ v_j and M ← decay · M + Σ_j w_j k_jᵀ k_j.
//! - [`read`]: φ(q) S and q M, as sums over slices of the slabs, then o over all keys from these and from o and the
//!   log-sum-exp over the cached keys.
//!
//! After a prefill, S and M begin as the last state of the chunked form. Both kernels are plain f32. The time to read is
//! that of loading S, once for up to 8 queries of a kv head. A thread has a row of a slab's products, x_i y_0, …, x_i y_7,
//! and four columns of S. Every sum has one owner and a fixed order.

mod fold;
mod read;

use burn::tensor::DType;
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use self::fold::{FoldSizesLaunch, OldTokensLaunch};
use self::read::{
    ExactKeysLaunch, JoinConfig, OutputsLaunch, QueriesLaunch, SliceConfig, SlicesLaunch,
};
use super::chunked::{SLAB, StateLayout, States};
use crate::Cuda;
use crate::attention::decay::{DecaySums, SPAN};
use crate::attention::flash::Heads;
use crate::backend::{primitive, tensor};
use crate::cuda::{CudaTensor, buffer, empty, multiprocessors, narrow, reshaped, unshare, zeros};
use crate::ops::cuda::{as_u32, dim, elements};

/// Products x_i y_j of a thread, with one i.
const PRODUCTS: usize = 8;

/// Threads of a block that adds to slabs, or reads them: one for each row of products and four channels.
const fn threads(layout: StateLayout) -> usize {
    SLAB / PRODUCTS * layout.head_dim / 4
}

/// Numbers from one vector to the next in shared memory: its channels, zeros up to whole slabs of M, and a 1, which is
/// the factor of M's channels.
const fn stride(layout: StateLayout) -> usize {
    layout.padded() + 4
}

/// The places of the thread's factors of slab `slab`, in a vector in shared memory: of x_i, and of y_0. `i` is the
/// thread's row of products, and `tiles` are those of a slab of S; a slab of M has channels, 1 · y_j.
#[cube]
fn places(
    slab: usize,
    tiles: (usize, usize),
    i: usize,
    #[comptime] layout: StateLayout,
) -> (usize, usize) {
    let products = comptime!(layout.products());
    let of_m = slab >= products;
    let channel = (slab - select(of_m, products, slab)) * SLAB;
    (
        select(of_m, comptime!(layout.padded()), tiles.0 * PRODUCTS + i),
        select(of_m, channel + i * PRODUCTS, tiles.1 * PRODUCTS),
    )
}

/// Fills the rest of vectors in shared memory, `vectors` of them, after their channels: see [`stride`].
#[cube]
fn fill_ends(
    x: &mut SharedMemory<f32>,
    #[comptime] vectors: usize,
    #[comptime] layout: StateLayout,
) {
    let stride = comptime!(stride(layout));
    let rest = comptime!(stride - layout.head_dim);
    let mut at = UNIT_POS as usize;
    while at < comptime!(vectors * rest) {
        let channel = layout.head_dim + at % rest;
        x[at / rest * stride + channel] = select(channel == layout.padded(), 1f32, 0f32);
        at += comptime!(threads(layout));
    }
}

/// The sums over the tokens that have left the cache, relative to the last of them.
#[derive(Clone, Debug)]
pub struct FarSums {
    layout: StateLayout,
    /// S, then M, `[batch · kv_heads, layout.rows(), head_dim]` in f32: slabs of two different tiles times 2.
    sums: CudaTensor,
    /// Tokens so far.
    tokens: usize,
}

impl FarSums {
    /// Those of no token, for keys like `k`, `[batch, kv_heads, tokens, head_dim]`.
    pub fn new(k: &CudaTensor) -> Self {
        let [batch, kv_heads, _, head_dim]: [usize; 4] = k.meta.shape().dims();
        let layout = StateLayout { head_dim };
        let sums = zeros(k, &[batch * kv_heads, layout.rows(), head_dim], DType::F32);
        FarSums { layout, sums, tokens: 0 }
    }

    /// Those that a prefill in chunks of `chunk` tokens ends with: the last of its `states`, which is in bf16.
    pub fn after(states: &States, chunk: usize) -> Self {
        let last = states.last();
        let shape: [usize; 3] = last.meta.shape().dims();
        let sums = primitive(tensor::<Cuda, 3>(last).cast(DType::F32));
        let layout = StateLayout { head_dim: shape[2] };
        FarSums { layout, sums: reshaped(&sums, &shape), tokens: states.count() * chunk }
    }

    /// Tokens in the sums.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Elements of the sums.
    pub fn elements(&self) -> usize {
        elements(&self.sums)
    }

    fn rows(&self) -> usize {
        self.sums.meta.shape()[0]
    }

    /// Adds the first `tokens` of cached ones.
    ///
    /// - k, v: `[batch, kv_heads, keys, head_dim]` in bf16
    /// - `decay`: the prefix sums of ℓ of these keys, of each query head
    ///
    /// # Panics
    /// Unless these tokens are whole spans.
    pub fn add(&mut self, [k, v]: [&CudaTensor; 2], decay: Option<&DecaySums>, tokens: usize) {
        assert!(tokens.is_multiple_of(SPAN), "{tokens} tokens are no whole spans");
        unshare(&mut self.sums);
        let [k, v] = [k, v].map(|x| Heads::new(&narrow(x, 2, 0..tokens)));
        let kv_heads = k.dims[1];
        let group = decay.map_or(1, |sums| sums.within.meta.shape()[1] / kv_heads);
        // SAFETY: a block changes one slab, and stays within the tokens.
        unsafe {
            fold::fold::launch_unchecked::<CudaRuntime>(
                &self.sums.client,
                CubeCount::Static(as_u32(self.rows() * self.layout.slabs()), 1, 1),
                dim(threads(self.layout)),
                OldTokensLaunch::new(k.chunks(), v.chunks(), decay.map(DecaySums::launch).into()),
                buffer(&self.sums, 4),
                FoldSizesLaunch::new(as_u32(kv_heads), as_u32(group), as_u32(tokens)),
                self.layout,
                decay.is_some(),
            );
        }
        self.tokens += tokens;
    }

    /// Makes the outputs of queries over the cached keys those over all keys.
    ///
    /// - q: `[batch, heads, tokens, head_dim]` in bf16, of the last of the `keys` cached tokens
    /// - o, lse: their output, which is changed, and its log-sum-exp over the cached keys, base 2 and relative to the
    ///   shifts of [`DecayBiases`](crate::attention::decay::DecayBiases)
    /// - `decay`: the prefix sums of ℓ of the cached keys
    pub fn join(
        &self,
        q: &CudaTensor,
        [o, lse]: [&CudaTensor; 2],
        decay: Option<&DecaySums>,
        keys: usize,
    ) {
        let (layout, rows) = (self.layout, self.rows());
        let [batch, heads, tokens, head_dim]: [usize; 4] = q.meta.shape().dims();
        let kv_heads = rows / batch;
        let (group, count) = (heads / kv_heads, batch * heads * tokens);
        let config = SliceConfig::new(layout, group * tokens);
        let tiles = (group * tokens).div_ceil(config.queries);
        let slots = multiprocessors(&q.client) * read::blocks_per_multiprocessor(layout);
        let per_slice = (layout.products() * rows * tiles).div_ceil(slots).min(layout.products());
        let slices = layout.products().div_ceil(per_slice);
        let all = slices + layout.moments();
        let parts = empty(q, &[all, count, head_dim], DType::F32);
        let (q, o) = (Heads::new(q), Heads::in_place(o));
        let queries = || {
            QueriesLaunch::new(
                buffer(&q.tensor, 1),
                q.row_strides(),
                as_u32(kv_heads),
                as_u32(group),
                as_u32(tokens),
            )
        };
        let sizes = || SlicesLaunch::new(as_u32(slices), as_u32(per_slice));
        // SAFETY: a block writes the parts of its queries in its slice.
        unsafe {
            read::read_slices::launch_unchecked::<CudaRuntime>(
                &self.sums.client,
                CubeCount::Static(as_u32(rows * all), as_u32(tiles), 1),
                dim(threads(layout)),
                queries(),
                buffer(&self.sums, 4),
                buffer(&parts, 4),
                sizes(),
                config,
            );
        }
        // SAFETY: a block reads the parts of its query, and changes its output.
        unsafe {
            read::join_slices::launch_unchecked::<CudaRuntime>(
                &self.sums.client,
                CubeCount::Static(as_u32(count), 1, 1),
                dim(read::PARTS * head_dim),
                queries(),
                buffer(&self.sums, 1),
                buffer(&parts, 1),
                ExactKeysLaunch::new(
                    buffer(lse, 1),
                    decay.map(DecaySums::launch).into(),
                    as_u32(keys),
                ),
                OutputsLaunch::new(buffer(&o.tensor, 1), o.row_strides()),
                sizes(),
                JoinConfig { layout, gated: decay.is_some() },
            );
        }
    }
}
