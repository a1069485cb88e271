//! Decoding under a learned decay: what it keeps, and how a token joins it.

use burn::tensor::{DType, Int, Tensor, bf16};
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use super::decay::{Decay, SPAN, Steps, Sums};
use super::decode::decode;
use super::kept::{Kept, unseen};
use super::prune::Pruned;
use super::{Call, Heads, attend, number, row_sums, steps};
use crate::Cuda;
use crate::attention::softmax::{PRUNED, Softmax};
use crate::backend::{primitive, tensor};
use crate::cuda::{CudaTensor, buffer, contiguous, empty, unshare, zeros};
use crate::tile::{CHUNK, Rows};

/// Keys, values and the decay's sums of the tokens so far.
#[derive(Clone, Debug)]
pub struct Decaying {
    keys: Kept,
    values: Kept,
    /// Σ ℓ within spans, `[batch, heads, tokens, 1]`.
    within: Kept,
    /// Σ ℓ before spans, `[batch, heads, spans + 1, 1]`.
    before: Kept,
    /// The largest |k|² so far, `[batch, kv_heads, 1]`, where keys are pruned.
    largest: CudaTensor,
    /// If the last call was a pruned one of one token: the first keys that still mattered to its queries,
    /// `[batch, heads]`, and the first one inside the window.
    starts: Option<(CudaTensor, usize)>,
}

impl Decaying {
    /// No tokens yet, of `heads` query heads and keys like `k`, with `room` for so many.
    pub fn new(k: &CudaTensor, heads: usize, room: usize) -> Self {
        let [batch, kv_heads, _, head_dim]: [usize; 4] = k.meta.shape().dims();
        let tokens = |heads, channels, dtype| Kept::new(k, [batch, heads, channels], dtype, room);
        Decaying {
            keys: tokens(kv_heads, head_dim, k.dtype),
            values: tokens(kv_heads, head_dim, k.dtype),
            within: tokens(heads, 1, DType::F32),
            before: Kept::new(k, [batch, heads, 1], DType::F64, room.div_ceil(SPAN) + 1),
            largest: zeros(k, &[batch, kv_heads, 1], DType::F32),
            starts: None,
        }
    }

    /// Elements of all buffers that grow, and of the largest norms.
    pub fn elements(&self) -> usize {
        let kept = [&self.keys, &self.values, &self.within, &self.before];
        kept.map(Kept::elements).iter().sum::<usize>() + self.largest.meta.shape().num_elements()
    }

    /// See [`DecodeState::share_left_out`](crate::attention::DecodeState::share_left_out).
    pub fn share_left_out(&self) -> Option<f64> {
        let (starts, seen_from) = self.starts.clone()?;
        let starts = Tensor::<Cuda, 2, Int>::from_primitive(starts).into_data();
        let seen = starts.num_elements() * (self.keys.rows() - seen_from);
        let left_out = starts.iter::<i64>().map(|start| (start as usize).saturating_sub(seen_from));
        Some(left_out.sum::<usize>() as f64 / seen as f64)
    }

    /// Appends tokens and returns their outputs, `[batch, heads, tokens, head_dim]`.
    ///
    /// - `log_decay`: ℓ, `[batch, heads, tokens]` in f32
    pub fn extend(
        &mut self,
        op: &Softmax,
        [q, k, v]: [&CudaTensor; 3],
        log_decay: &CudaTensor,
    ) -> CudaTensor {
        let tokens = k.meta.shape()[2];
        let old = unseen(op.window, self.keys.rows(), tokens);
        for (kept, rows) in [(&mut self.keys, old), (&mut self.values, old)]
            .into_iter()
            .chain([(&mut self.within, old), (&mut self.before, old / SPAN)])
        {
            kept.drop_first(rows);
        }
        let held = self.keys.rows();
        self.within.add(tokens);
        self.before.add((held + tokens).div_ceil(SPAN) + 1 - self.before.rows());
        if tokens == 1 {
            let starts = self.append(op, [q, k, v], log_decay);
            let call = self.call(op, q, self.sums());
            let [o, _] = decode(&call, op.prune.then_some(&starts));
            let seen_from = op.window.map_or(0, |window| self.keys.rows().saturating_sub(window));
            self.starts = op.prune.then_some((starts, seen_from));
            return o;
        }
        self.starts = None;
        self.keys.append(k.clone());
        self.values.append(v.clone());
        self.sums().add(log_decay, held);
        // Without room for more, as the kernels for many queries want it.
        let Decay { within, before } = self.sums();
        let call =
            self.call(op, q, Decay { within: contiguous(&within), before: contiguous(&before) });
        let pruned = call.decay.as_ref().filter(|_| op.prune).map(|x| Pruned::new(&call, x));
        let [o, _] = attend(&Call { pruned, ..call });
        if op.prune {
            let k = Heads::new(k);
            let new = tensor::<Cuda, 3>(row_sums(&k, &k)).max_dim(2);
            self.largest = primitive(tensor::<Cuda, 3>(self.largest.clone()).max_pair(new));
        }
        o
    }

    /// The sums held, views.
    fn sums(&self) -> Decay {
        Decay { within: self.within.held(), before: self.before.held() }
    }

    fn call<'a>(&self, op: &'a Softmax, q: &CudaTensor, sums: Decay) -> Call<'a> {
        let inputs = [q, &self.keys.held(), &self.values.held()];
        Call::new(op, inputs, Some(sums), None).expect("served before")
    }

    /// Appends one token; returns where its queries begin to see keys, `[batch, heads]`, which is defined
    /// where keys are pruned.
    fn append(
        &mut self,
        op: &Softmax,
        [q, k, v]: [&CudaTensor; 3],
        log_decay: &CudaTensor,
    ) -> CudaTensor {
        let held = self.keys.rows();
        self.keys.add(1);
        self.values.add(1);
        unshare(&mut self.largest);
        let [q, k, v] = [q, k, v].map(Heads::new);
        let [keys, values] = [self.keys.buffer(), self.values.buffer()].map(Heads::in_place);
        let [batch, heads, _, head_dim] = q.dims;
        let starts = empty(&q.tensor, &[batch, heads], DType::I32);
        // SAFETY: a warp handles a row of the decay, and the token of its head.
        unsafe {
            append::launch_unchecked::<bf16, CudaRuntime>(
                &q.tensor.client,
                CubeCount::Static((batch * heads) as u32, 1, 1),
                CubeDim::new_1d(32),
                CHUNK,
                buffer(&q.tensor, CHUNK),
                buffer(&k.tensor, CHUNK),
                buffer(&v.tensor, CHUNK),
                buffer(log_decay, 1),
                buffer(&keys.tensor, CHUNK),
                buffer(&values.tensor, CHUNK),
                buffer(self.within.buffer(), 1),
                buffer(self.before.buffer(), 1),
                buffer(&self.largest, 1),
                buffer(&starts, 1),
                q.rows(),
                k.rows(),
                v.rows(),
                keys.rows(),
                values.rows(),
                steps(log_decay),
                self.sums().sums(held),
                number(heads),
                number(heads / k.dims[1]),
                op.scale,
                PRUNED.ln(),
                head_dim / CHUNK,
                op.prune,
            );
        }
        starts
    }
}

/// A token joins those held: its key and value, and the decay's sums up to it. With pruning, the first key
/// that still matters to each of its queries, as [`first_keys`](super::prune::first_keys) has it.
///
/// - `q`, `k`, `v`: `[batch, heads or kv_heads, 1, channels]`
/// - `log_decay`: `[batch, heads, 1]`
/// - `largest`: max |k_j|², `[batch, kv_heads]`
/// - `starts`: `[batch, heads]`
///
/// Grid: batch · heads; a warp.
#[cube(launch_unchecked, address_type = "u64")]
fn append<E: Numeric, V: Size>(
    q: &Array<Vector<E, V>>,
    k: &Array<Vector<E, V>>,
    v: &Array<Vector<E, V>>,
    log_decay: &Array<f32>,
    keys: &mut Array<Vector<E, V>>,
    values: &mut Array<Vector<E, V>>,
    within: &mut Array<f32>,
    before: &mut Array<f64>,
    largest: &mut Array<f32>,
    starts: &mut Array<i32>,
    q_rows: Rows,
    k_rows: Rows,
    v_rows: Rows,
    keys_rows: Rows,
    values_rows: Rows,
    steps: Steps,
    sums: Sums,
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
    let position = sums.held as usize;

    let mut q_norm = 0f32;
    let mut k_norm = 0f32;
    if lane < chunks {
        let key = k[k_rows.base(batch, kv_head) + lane];
        if head % group == 0 {
            let to = keys_rows.base(batch, kv_head) + position * keys_rows.row as usize + lane;
            keys[to] = key;
            let to = values_rows.base(batch, kv_head) + position * values_rows.row as usize + lane;
            values[to] = v[v_rows.base(batch, kv_head) + lane];
        }
        if prune {
            let query = Vector::<f32, V>::cast_from(q[q_rows.base(batch, head) + lane]);
            let key = Vector::<f32, V>::cast_from(key);
            #[unroll]
            for e in 0..CHUNK {
                q_norm += query[e] * query[e];
                k_norm += key[e] * key[e];
            }
        }
    }

    let span = position / SPAN;
    let within_at = row * sums.within as usize + position;
    let before_at = row * sums.before as usize + span;
    let mut own = log_decay[batch * steps.batch as usize + head * steps.head as usize];
    let mut start = f64::cast_from(0f32);
    if position % SPAN != 0 {
        own += within[within_at - 1];
    }
    if position > 0 {
        start = before[before_at];
    }
    let sum = start + f64::cast_from(own);
    if lane == 0 {
        within[within_at] = own;
        before[before_at + 1] = sum;
        if position == 0 {
            before[before_at] = start;
        }
    }

    if prune {
        let at = row / group;
        let most = max(largest[at], plane_sum(k_norm));
        if (lane == 0) & (head % group == 0) {
            largest[at] = most;
        }
        let bound = 2.001f32 * f32::abs(scale) * Sqrt::sqrt(plane_sum(q_norm) * most);
        let least = log_pruned - bound - Log::ln(f32::cast_from(position as u32 + 1));
        // The range in which the decay passes the bound, parted in 32.
        let mut low = 0usize;
        let mut high = position;
        while low < high {
            let step = (high - low + 31) / 32;
            let at = low + lane * step;
            let mut passed = 0u32;
            if at < high {
                let decay = f32::cast_from(sum - sums.at(row, within, before, at));
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
