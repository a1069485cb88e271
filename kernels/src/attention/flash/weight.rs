//! Softmax, by the online algorithm, with attention sinks.

use burn::tensor::DType;
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use super::hooks::{Hooks, Weight};
use super::{Call, Gradients, Heads, row_dots};
use crate::cuda::{CudaTensor, buffer, empty};
use crate::tile::{Accumulator, LOG2_E, MASKED, exp2, sum_of_four};

/// Weights exp(S_ij) / (Σ_j exp(S_ij) + exp(sink)): a sink is a learned logit of each query head that takes
/// part in the sum and has no value (gpt-oss, OpenAI, 2025; "off-by-one" attention with sink = 0).
pub struct SoftmaxWeight;

/// The sinks, `[heads]`, natural logarithms.
#[derive(CubeType, CubeLaunch)]
pub struct Sinks {
    /// Their values.
    pub logits: ComptimeOption<Array<f32>>,
    /// Whether there are any.
    #[cube(comptime)]
    pub some: bool,
}

/// What the forward pass writes of each row, `[batch, heads, queries]`.
#[derive(CubeType, CubeLaunch)]
pub struct SoftmaxStatistics {
    /// The logarithm of the sum to base 2, relative to the row's shift.
    pub lse: Array<f32>,
    /// The weight of the row's sink.
    pub sink: ComptimeOption<Array<f32>>,
}

/// What the backward pass reads of each row, `[batch, heads, queries]`.
#[derive(CubeType, CubeLaunch)]
pub struct SoftmaxRows {
    /// As in [`SoftmaxStatistics`].
    pub lse: Array<f32>,
    /// rowsum(dO ⊙ O).
    pub delta: Array<f32>,
}

/// What a lane keeps of its two rows.
#[derive(CubeType)]
pub struct OnlineRows {
    /// What exponentials are relative to, a score.
    max: Array<f32>,
    /// The lane's part of the sum.
    sum: Array<f32>,
}

/// The launch argument of [`SoftmaxWeight`].
pub fn sinks(logits: Option<&CudaTensor>) -> SinksLaunch<CudaRuntime> {
    SinksLaunch::new(logits.map(|x| buffer(x, 1)).into(), logits.is_some())
}

/// What a softmax's forward pass gives, and its backward pass needs.
#[derive(Clone, Debug)]
pub struct SoftmaxOutput {
    /// `[batch, heads, queries, head_dim]`
    pub o: CudaTensor,
    /// Logarithms of the rows' sums to base 2, `[batch, heads, queries]`, each relative to its row's shift.
    pub lse: CudaTensor,
    /// Weights of the rows' sinks, `[batch, heads, queries]`.
    pub sink: Option<CudaTensor>,
}

impl<A: Hooks<Weight = SoftmaxWeight>> Call<A> {
    /// Attention, with sinks where `with_sinks` says that the hooks have some.
    pub fn softmax(&self, with_sinks: bool) -> SoftmaxOutput {
        let lse = self.statistic();
        let sink = with_sinks.then(|| self.statistic());
        let of_sink = sink.as_ref().map(|x| buffer(x, 1));
        let o = self.forward(SoftmaxStatisticsLaunch::new(buffer(&lse, 1), of_sink.into()));
        SoftmaxOutput { o, lse, sink }
    }

    /// The gradients for dO = `grad`, and those of the sinks, `[heads]`, where there are any.
    pub fn softmax_backward(
        &self,
        SoftmaxOutput { o, lse, sink }: &SoftmaxOutput,
        grad: &CudaTensor,
    ) -> (Gradients, Option<CudaTensor>) {
        let delta = row_dots(&Heads::new(o), &Heads::new(grad));
        let saved = || SoftmaxRowsLaunch::new(buffer(lse, 1), buffer(&delta, 1));
        let gradients = self.backward(grad, saved);
        (gradients, sink.as_ref().map(|sink| gradients_of_sinks(sink, &delta)))
    }
}

/// d(sink)_h = −Σ p_sink · δ over the head's rows: a sink has no value, so that it only takes weight from keys.
///
/// - `sink`, `delta`: `[batch, heads, queries]`
fn gradients_of_sinks(sink: &CudaTensor, delta: &CudaTensor) -> CudaTensor {
    let [batch, heads, queries]: [usize; 3] = sink.meta.shape().dims();
    let gradients = empty(sink, &[heads], DType::F32);
    // SAFETY: a block reads the rows of its head, and writes one element.
    unsafe {
        sum_sinks::launch_unchecked::<CudaRuntime>(
            &sink.client,
            CubeCount::Static(heads as u32, 1, 1),
            CubeDim::new_1d(SINK_THREADS as u32),
            buffer(sink, 1),
            buffer(delta, 1),
            buffer(&gradients, 1),
            batch as u32,
            queries as u32,
        );
    }
    gradients
}

/// Threads of a block of [`sum_sinks`].
const SINK_THREADS: usize = 256;

/// See [`gradients_of_sinks`]; sums have a fixed order.
///
/// Grid: heads.
#[cube(launch_unchecked)]
fn sum_sinks(
    sink: &Array<f32>,
    delta: &Array<f32>,
    gradients: &mut Array<f32>,
    batch: u32,
    queries: u32,
) {
    let (head, heads, queries) = (CUBE_POS_X as usize, CUBE_COUNT_X as usize, queries as usize);
    let mut sum = 0f32;
    for b in 0..batch as usize {
        let base = (b * heads + head) * queries;
        let mut at = UNIT_POS as usize;
        while at < queries {
            sum += sink[base + at] * delta[base + at];
            at += SINK_THREADS;
        }
    }
    let mut sums = SharedMemory::<f32>::new(comptime!(SINK_THREADS / 32));
    let of_warp = plane_sum(sum);
    if UNIT_POS_PLANE == 0 {
        sums[UNIT_POS as usize / 32] = of_warp;
    }
    sync_cube();
    if UNIT_POS == 0 {
        let mut total = 0f32;
        #[unroll]
        for warp in 0..comptime!(SINK_THREADS / 32) {
            total += sums[warp];
        }
        gradients[head] = -total;
    }
}

/// How far scores, to base 2, may grow above what exponentials are relative to.
const GROWTH: f32 = 8.0;

#[cube]
impl Weight for SoftmaxWeight {
    type Args = Sinks;
    type Rows = OnlineRows;
    type Statistics = SoftmaxStatistics;
    type SavedRows = SoftmaxRows;

    const UNIT: f32 = LOG2_E;
    const STATISTICS: bool = true;

    fn rows() -> OnlineRows {
        let mut max = Array::<f32>::new(2usize);
        let mut sum = Array::<f32>::new(2usize);
        #[unroll]
        for r in 0..2usize {
            max[r] = MASKED;
            sum[r] = 0f32;
        }
        OnlineRows { max, sum }
    }

    /// One step of the online softmax (Milakov and Gimelshein, 2018, algorithm 3): scores become
    /// exponentials relative to the row's maximum. Where a score has outgrown that by [`GROWTH`], it becomes
    /// the largest score so far, and what was summed before is brought down to it.
    fn add_tile(
        rows: &mut OnlineRows,
        s: &mut Accumulator,
        o: &mut Accumulator,
        scale: f32,
        #[comptime] n_keys: usize,
        #[comptime] n_dim: usize,
    ) {
        let mut tops = Array::<f32>::new(2usize);
        let mut grown = false;
        #[unroll]
        for r in 0..2usize {
            let mut top = rows.max[r];
            #[unroll]
            for n in 0..n_keys {
                let pair = s.index(n)[r];
                top = max(top, max(pair[0], pair[1]));
            }
            top = max(top, plane_shuffle_xor(top, 1));
            top = max(top, plane_shuffle_xor(top, 2));
            grown |= (top - rows.max[r]) * scale > GROWTH;
            tops[r] = top;
        }
        if plane_any(grown) {
            #[unroll]
            for r in 0..2usize {
                let down = exp2((rows.max[r] - tops[r]) * scale);
                rows.max[r] = tops[r];
                rows.sum[r] *= down;
                #[unroll]
                for n in 0..n_dim {
                    let fragment = o.index_mut(n);
                    let mut pair = fragment[r];
                    pair[0] *= down;
                    pair[1] *= down;
                    fragment[r] = pair;
                }
            }
        }
        #[unroll]
        for r in 0..2usize {
            // A row that has seen no key yet: a shift of MASKED's size would not cancel in rounding.
            let shift = select(rows.max[r] > MASKED, rows.max[r] * scale, 0f32);
            let mut total = rows.sum[r];
            #[unroll]
            for n in 0..n_keys {
                let fragment = s.index_mut(n);
                let mut pair = fragment[r];
                pair[0] = exp2(fma(pair[0], scale, -shift));
                pair[1] = exp2(fma(pair[1], scale, -shift));
                total += pair[0] + pair[1];
                fragment[r] = pair;
            }
            rows.sum[r] = total;
        }
    }

    fn finish(
        rows: &OnlineRows,
        args: &Sinks,
        statistics: &mut SoftmaxStatistics,
        head: usize,
        at: usize,
        write: bool,
        scale: f32,
        shift: f32,
        #[comptime] r: usize,
    ) -> f32 {
        let total = sum_of_four(rows.sum[r]);
        let mut factor = 1f32 / total;
        if comptime!(args.some) {
            let top = rows.max[r] * scale;
            let (with_sink, lse) = SoftmaxWeight::join(args, head, top, total, shift);
            factor = with_sink;
            if write {
                statistics.lse[at] = lse;
                let sink = args.logits.as_ref().unwrap()[head];
                let weight = exp2((sink - shift) * LOG2_E - lse);
                statistics.sink.as_mut().unwrap()[at] = weight;
            }
        } else {
            if write {
                statistics.lse[at] = fma(rows.max[r], scale, Log::ln(total) * LOG2_E);
            }
        }
        factor
    }

    fn finish_part(rows: &OnlineRows, scale: f32, #[comptime] r: usize) -> (f32, f32) {
        let total = sum_of_four(rows.sum[r]);
        let seen = rows.max[r] > MASKED;
        let lse = fma(rows.max[r], scale, Log::ln(total) * LOG2_E);
        (select(seen, 1f32 / total, 0f32), select(seen, lse, MASKED))
    }

    fn part(statistic: f32, top: f32) -> f32 {
        exp2(statistic - top)
    }

    fn join(args: &Sinks, head: usize, top: f32, total: f32, shift: f32) -> (f32, f32) {
        let mut factor = 1f32 / total;
        let mut lse = top + Log::ln(total) * LOG2_E;
        if comptime!(args.some) {
            // Relative to the larger of both.
            let sink = (args.logits.as_ref().unwrap()[head] - shift) * LOG2_E;
            let new_top = max(top, sink);
            let down = exp2(top - new_top);
            let with_sink = fma(total, down, exp2(sink - new_top));
            factor = down / with_sink;
            lse = new_top + Log::ln(with_sink) * LOG2_E;
        }
        (factor, lse)
    }

    fn saved(saved: &SoftmaxRows, at: usize) -> (f32, f32) {
        (saved.lse[at], saved.delta[at])
    }

    fn weigh(score: f32, scale: f32, shift: f32) -> f32 {
        exp2(fma(score, scale, shift))
    }

    fn slope(_score: f32, weight: f32) -> f32 {
        weight
    }
}
