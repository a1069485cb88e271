//! Decoding under a learned decay: the cache, and the kernel that appends a token.

use burn::tensor::{DType, Int, Tensor, bf16};
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use super::{DecayHooks, flash, prune};
use crate::Cuda;
use crate::attention::decay::{DecaySumsCache, Sums, log_decay};
use crate::attention::flash::{
    CacheBuffer, FlashAttention, HeadChunks, Heads, as_u32, decode, expired, row_dots,
};
use crate::attention::fox::op::Forgetting;
use crate::attention::softmax::PRUNED;
use crate::backend::{primitive, tensor};
use crate::cuda::{CudaTensor, buffer, contiguous, empty, unshare, zeros};
use crate::ops::activation::kernel::{Function, value};
use crate::ops::cuda::nothing;
use crate::tile::CHUNK;

/// Keys, values and the decay's prefix sums of the tokens so far.
#[derive(Clone, Debug)]
pub struct DecayKvCache {
    keys: CacheBuffer,
    values: CacheBuffer,
    sums: DecaySumsCache,
    /// The largest |k|² so far, `[batch, kv_heads, 1]`; updated only with pruning.
    largest: CudaTensor,
    /// If the last call was a pruned one of one token: the first keys that still mattered to its queries,
    /// `[batch, heads]`, and the first one inside the window.
    starts: Option<(CudaTensor, usize)>,
}

impl DecayKvCache {
    /// An empty cache for `heads` query heads and keys like `k`, with room for `capacity` tokens.
    pub fn new(k: &CudaTensor, heads: usize, capacity: usize) -> Self {
        let [batch, kv_heads, _, head_dim]: [usize; 4] = k.meta.shape().dims();
        let tokens = || CacheBuffer::new(k, [batch, kv_heads, head_dim], k.dtype, capacity);
        DecayKvCache {
            keys: tokens(),
            values: tokens(),
            sums: DecaySumsCache::new(k, [batch, heads], capacity),
            largest: zeros(k, &[batch, kv_heads, 1], DType::F32),
            starts: None,
        }
    }

    /// Elements of all buffers.
    pub fn elements(&self) -> usize {
        self.keys.elements()
            + self.values.elements()
            + self.sums.elements()
            + self.largest.meta.shape().num_elements()
    }

    /// [`PRUNED_FRACTION`](crate::attention::probe::PRUNED_FRACTION) of the last step.
    pub fn pruned_fraction(&self) -> Option<f64> {
        let (starts, seen_from) = self.starts.clone()?;
        let starts = Tensor::<Cuda, 2, Int>::from_primitive(starts).into_data();
        let seen = starts.num_elements() * (self.keys.rows() - seen_from);
        let left_out = starts.iter::<i64>().map(|start| (start as usize).saturating_sub(seen_from));
        Some(left_out.sum::<usize>() as f64 / seen as f64)
    }

    /// Appends tokens and returns their outputs, `[batch, heads, tokens, head_dim]`.
    ///
    /// - `logits`: the gate's, `[batch, tokens, heads]` in f32 or bf16
    /// - `sinks`: `[heads]`
    pub fn extend(
        &mut self,
        op: &Forgetting,
        [q, k, v]: [&CudaTensor; 3],
        logits: CudaTensor,
        sinks: Option<&CudaTensor>,
    ) -> CudaTensor {
        let (tokens, window) = (k.meta.shape()[2], op.core.window);
        let old = expired(window, self.keys.rows(), tokens);
        self.keys.drop_first(old);
        self.values.drop_first(old);
        self.sums.drop_first(old);
        if tokens == 1 {
            self.sums.add(1);
            let starts = match logits.dtype {
                DType::BF16 => self.append::<bf16>(op, [q, k, v], &logits),
                _ => self.append::<f32>(op, [q, k, v], &logits),
            };
            let flash = self.flash(op, q, sinks);
            let [o, _] = decode(&flash, starts.as_ref());
            let seen_from = window.map_or(0, |window| self.keys.rows().saturating_sub(window));
            self.starts = starts.map(|starts| (starts, seen_from));
            return o;
        }
        self.starts = None;
        self.keys.append(k.clone());
        self.values.append(v.clone());
        self.sums.append(&primitive(log_decay(tensor::<Cuda, 3>(logits))));
        let flash = self.flash(op, q, sinks);
        let pruned = op.core.prune.then(|| prune(&flash, &self.sums.held()));
        let o = flash.pruned(pruned).softmax(sinks.is_some()).o;
        if op.core.prune {
            let k = Heads::new(k);
            let new = tensor::<Cuda, 3>(row_dots(&k, &k)).max_dim(2);
            self.largest = primitive(tensor::<Cuda, 3>(self.largest.clone()).max_pair(new));
        }
        o
    }

    /// Attention of `q` over the keys held.
    fn flash(
        &self,
        op: &Forgetting,
        q: &CudaTensor,
        sinks: Option<&CudaTensor>,
    ) -> FlashAttention<DecayHooks> {
        let hooks = DecayHooks { sums: self.sums.held(), sinks: sinks.cloned() };
        flash(op, [q, &self.keys.held(), &self.values.held()], hooks, None)
    }

    /// Appends one token; with pruning, returns its queries' first keys, `[batch, heads]`.
    fn append<Z: Float>(
        &mut self,
        op: &Forgetting,
        [q, k, v]: [&CudaTensor; 3],
        logits: &CudaTensor,
    ) -> Option<CudaTensor> {
        let held = self.keys.rows();
        self.keys.add(1);
        self.values.add(1);
        unshare(&mut self.largest);
        let [q, k, v] = [q, k, v].map(Heads::new);
        let [keys, values] = [self.keys.buffer(), self.values.buffer()].map(Heads::in_place);
        let [batch, heads, _, head_dim] = q.dims;
        let starts = op.core.prune.then(|| empty(&q.tensor, &[batch, heads], DType::I32));
        let logits = contiguous(logits);
        let sums = self.sums.buffers();
        // SAFETY: a warp handles the token of one head.
        unsafe {
            append::launch_unchecked::<Z, CudaRuntime>(
                &q.tensor.client,
                CubeCount::Static((batch * heads) as u32, 1, 1),
                CubeDim::new_1d(32),
                TokenLaunch::new(q.chunks(), k.chunks(), v.chunks(), buffer(&logits, 1)),
                CacheLaunch::new(
                    keys.chunks(),
                    values.chunks(),
                    sums.launch(),
                    buffer(&self.largest, 1),
                    held as u32,
                ),
                // Without pruning, they are not written.
                starts.as_ref().map_or_else(|| nothing(&logits), |starts| buffer(starts, 1)),
                as_u32(heads),
                as_u32(heads / k.dims[1]),
                op.core.scale,
                PRUNED.ln(),
                head_dim / CHUNK,
                op.core.prune,
            );
        }
        starts
    }
}

/// A new token.
#[derive(CubeType, CubeLaunch)]
struct Token<Z: Float> {
    /// `[batch, heads, 1, head_dim]`
    q: HeadChunks,
    /// `[batch, kv_heads, 1, head_dim]`
    k: HeadChunks,
    /// `[batch, kv_heads, 1, head_dim]`
    v: HeadChunks,
    /// The gate's, `[batch, 1, heads]`.
    logits: Array<Z>,
}

/// The cache of the tokens before.
#[derive(CubeType, CubeLaunch)]
struct Cache {
    /// `[batch, kv_heads, tokens, head_dim]`
    keys: HeadChunks,
    /// `[batch, kv_heads, tokens, head_dim]`
    values: HeadChunks,
    sums: Sums,
    /// max |k_j|², `[batch, kv_heads]`.
    largest: Array<f32>,
    /// Number of tokens.
    held: u32,
}

/// Appends a token to the cache: its key and value, and the sums of ℓ = ln σ(logit) up to it. With pruning, also
/// computes the first key of each of its queries, `[batch, heads]`, as
/// [`first_keys`](super::prune::first_keys) does.
///
/// Grid: batch · heads; one warp per block.
#[cube(launch_unchecked, address_type = "u64")]
fn append<Z: Float>(
    token: &Token<Z>,
    cache: &mut Cache,
    starts: &mut Array<i32>,
    heads: u32,
    group: u32,
    scale: f32,
    log_pruned: f32,
    #[comptime] chunks: usize,
    #[comptime] prune: bool,
) {
    let row = CUBE_POS_X as usize;
    let (heads, group) = (heads as usize, group as usize);
    let (batch, head) = (row / heads, row % heads);
    let kv_head = head / group;
    let lane = UNIT_POS as usize;
    let position = cache.held as usize;

    let mut q_norm = 0f32;
    let mut k_norm = 0f32;
    if lane < chunks {
        let key = token.k.chunks[token.k.strides.base(batch, kv_head) + lane];
        if head % group == 0 {
            let strides = cache.keys.strides;
            let to = strides.base(batch, kv_head) + position * strides.row as usize + lane;
            cache.keys.chunks[to] = key;
            let strides = cache.values.strides;
            let to = strides.base(batch, kv_head) + position * strides.row as usize + lane;
            cache.values.chunks[to] = token.v.chunks[token.v.strides.base(batch, kv_head) + lane];
        }
        if prune {
            let at = token.q.strides.base(batch, head) + lane;
            let query = Vector::<f32, Const<CHUNK>>::cast_from(token.q.chunks[at]);
            let key = Vector::<f32, Const<CHUNK>>::cast_from(key);
            #[unroll]
            for e in 0..CHUNK {
                q_norm += query[e] * query[e];
                k_norm += key[e] * key[e];
            }
        }
    }

    let own = value(f32::cast_from(token.logits[row]), Function::LogSigmoid);
    let sum = cache.sums.append(row, position, own, lane == 0);

    if prune {
        let at = row / group;
        let most = max(cache.largest[at], plane_sum(k_norm));
        if (lane == 0) & (head % group == 0) {
            cache.largest[at] = most;
        }
        let bound = 2.001f32 * f32::abs(scale) * Sqrt::sqrt(plane_sum(q_norm) * most);
        let least = log_pruned - bound - Log::ln(f32::cast_from(position as u32 + 1));
        // Search for the first key whose decay passes the bound, 32 candidates at a time.
        let mut low = 0usize;
        let mut high = position;
        while low < high {
            let step = (high - low + 31) / 32;
            let at = low + lane * step;
            let mut passed = 0u32;
            if at < high {
                let decay = f32::cast_from(sum - cache.sums.at(row, at));
                passed = select(decay > least, 0u32, 1u32);
            }
            let count = plane_sum(passed) as usize;
            if count == 0 {
                high = low;
            } else {
                high = min(high, low + count * step);
                low += (count - 1) * step + 1;
            }
        }
        if lane == 0 {
            starts[row] = low as i32;
        }
    }
}
