//! Online softmax with attention sinks.

use burn::tensor::DType;
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use super::hooks::{Hooks, Weight};
use super::{FlashAttention, Gradients, Heads, row_dots};
use crate::cuda::{CudaTensor, buffer, empty};
use crate::tile::{AFragments, Accumulator, LOG2_E, MASKED, exp2, sum_of_four};

/// Weights exp(S_ij) / (Σ_j exp(S_ij) + exp(sink)). A sink is a learned logit of each query head without a
/// value vector (gpt-oss, OpenAI, 2025; "off-by-one" attention with sink = 0).
pub struct SoftmaxWeight;

/// The launch arguments of [`SoftmaxWeight`].
#[derive(CubeType, CubeLaunch)]
pub struct SoftmaxArgs {
    /// The sinks, `[heads]`, logits to base e.
    pub sinks: ComptimeOption<Array<f32>>,
    /// Log-sum-exps, base 2, of a softmax over other keys, from which rows go on, `[batch, heads, queries]`.
    pub earlier: ComptimeOption<Array<f32>>,
    /// Whether there are sinks.
    #[cube(comptime)]
    pub has_sinks: bool,
    /// Whether rows go on.
    #[cube(comptime)]
    pub goes_on: bool,
}

/// The statistics that the forward pass writes for each row, `[batch, heads, queries]`.
#[derive(CubeType, CubeLaunch)]
pub struct SoftmaxStatistics {
    /// Log-sum-exp, base 2, relative to the row's shift.
    pub lse: Array<f32>,
    /// The weight of the row's sink.
    pub sink: ComptimeOption<Array<f32>>,
}

/// The statistics that the backward pass reads for each row, `[batch, heads, queries]`.
#[derive(CubeType, CubeLaunch)]
pub struct SoftmaxSavedRows {
    /// As in [`SoftmaxStatistics`].
    pub lse: Array<f32>,
    /// rowsum(dO ⊙ O).
    pub delta: Array<f32>,
}

/// A lane's online softmax state for its two rows.
#[derive(CubeType)]
pub struct SoftmaxRowState {
    /// The score that exponentials are relative to, at most [`RESCALE_THRESHOLD`] below the row maximum.
    row_max: Array<f32>,
    /// The lane's part of the row sum.
    row_sum: Array<f32>,
}

/// The launch argument of rows that begin with their sinks, if there are any.
pub fn sinks(logits: Option<&CudaTensor>) -> SoftmaxArgsLaunch<CudaRuntime> {
    let of_sinks = logits.map(|x| buffer(x, 1));
    SoftmaxArgsLaunch::new(of_sinks.into(), None.into(), logits.is_some(), false)
}

/// That of rows that go on from a softmax over other keys with these log-sum-exps, base 2 and relative to the same
/// shifts, `[batch, heads, queries]` in f32.
pub fn after(lse: &CudaTensor) -> SoftmaxArgsLaunch<CudaRuntime> {
    SoftmaxArgsLaunch::new(None.into(), Some(buffer(lse, 1)).into(), false, true)
}

/// The results of a softmax forward pass, which its backward pass needs.
#[derive(Clone, Debug)]
pub struct SoftmaxOutput {
    /// `[batch, heads, queries, head_dim]`
    pub o: CudaTensor,
    /// Log-sum-exp of rows, base 2, `[batch, heads, queries]`, each relative to its row's shift.
    pub lse: CudaTensor,
    /// Weights of the rows' sinks, `[batch, heads, queries]`.
    pub sink: Option<CudaTensor>,
}

impl<A: Hooks<Weight = SoftmaxWeight>> FlashAttention<A> {
    /// The forward pass; `with_sinks` says whether the hooks have sinks.
    pub fn softmax(&self, with_sinks: bool) -> SoftmaxOutput {
        let lse = self.statistic();
        let sink = with_sinks.then(|| self.statistic());
        let of_sink = sink.as_ref().map(|x| buffer(x, 1));
        let o = self.forward(SoftmaxStatisticsLaunch::new(buffer(&lse, 1), of_sink.into()));
        SoftmaxOutput { o, lse, sink }
    }

    /// The forward pass where rows go on from a softmax over other keys ([`after`]), of which `o` is the output,
    /// `[batch, heads, queries, value_dim]` in f32. The results are those over all keys.
    ///
    /// # Panics
    /// When `o` has another shape or type.
    pub fn softmax_after(&self, o: &CudaTensor) -> SoftmaxOutput {
        let o = Heads::new(o);
        assert_eq!((o.tensor.dtype, o.dims), (DType::F32, self.output_dims()), "earlier outputs");
        let lse = self.statistic();
        let statistics = SoftmaxStatisticsLaunch::new(buffer(&lse, 1), None.into());
        let o = self.forward_saving(statistics, Some(&o), None);
        SoftmaxOutput { o, lse, sink: None }
    }

    /// The gradients for dO = `grad`, and that of the sinks, `[heads]`, if there are any.
    pub fn softmax_backward(
        &self,
        SoftmaxOutput { o, lse, sink }: &SoftmaxOutput,
        grad: &CudaTensor,
    ) -> (Gradients, Option<CudaTensor>) {
        let delta = row_dots(&Heads::new(o), &Heads::new(grad));
        let saved = || SoftmaxSavedRowsLaunch::new(buffer(lse, 1), buffer(&delta, 1));
        let gradients = self.backward(grad, saved);
        (gradients, sink.as_ref().map(|sink| gradients_of_sinks(sink, &delta)))
    }
}

/// d(sink)_h = −Σ p_sink · δ over the head's rows: a sink has no value vector, so its dP is 0.
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

/// Threads per block of [`sum_sinks`].
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

/// How far scores, base 2, may exceed the score that exponentials are relative to before the row is
/// rescaled.
const RESCALE_THRESHOLD: f32 = 8.0;

#[cube]
impl Weight for SoftmaxWeight {
    type Args = SoftmaxArgs;
    type RowState = SoftmaxRowState;
    type Statistics = SoftmaxStatistics;
    type SavedRows = SoftmaxSavedRows;

    const SCORE_FACTOR: f32 = LOG2_E;
    const HAS_STATISTICS: bool = true;
    const NEEDS_DS_ROW_SUMS: bool = false;
    const HAS_FOUR_STATISTICS: bool = false;
    const SPARSE: bool = false;
    const SEES_ITSELF: bool = true;
    const IN_ORDER: bool = false;

    fn init_rows(args: &SoftmaxArgs, rows: &Array<usize>, scale: f32) -> SoftmaxRowState {
        let mut row_max = Array::<f32>::new(2usize);
        let mut row_sum = Array::<f32>::new(2usize);
        #[unroll]
        for r in 0..2usize {
            row_max[r] = MASKED;
            row_sum[r] = 0f32;
            if comptime!(args.goes_on) {
                // Relative to the log-sum-exp, the sum of weights is 1: one of the row's lanes has it.
                row_max[r] = args.earlier.as_ref().unwrap()[rows[r]] / scale;
                row_sum[r] = select(UNIT_POS_PLANE % 4 == 0, 1f32, 0f32);
            }
        }
        SoftmaxRowState { row_max, row_sum }
    }

    /// One step of the online softmax (Milakov and Gimelshein, 2018, algorithm 3): scores become
    /// exponentials relative to a row maximum. When a score exceeds it by [`RESCALE_THRESHOLD`], it becomes
    /// the largest score so far, and the sums so far are rescaled.
    fn add_tile(
        rows: &mut SoftmaxRowState,
        s: &mut Accumulator,
        o: &mut Accumulator,
        scale: f32,
        #[comptime] n_keys: usize,
        #[comptime] n_dim: usize,
    ) {
        let mut new_max = Array::<f32>::new(2usize);
        let mut outgrown = false;
        #[unroll]
        for r in 0..2usize {
            let mut row_max = rows.row_max[r];
            #[unroll]
            for n in 0..n_keys {
                let pair = s.index(n)[r];
                row_max = max(row_max, max(pair[0], pair[1]));
            }
            row_max = max(row_max, plane_shuffle_xor(row_max, 1));
            row_max = max(row_max, plane_shuffle_xor(row_max, 2));
            outgrown |= (row_max - rows.row_max[r]) * scale > RESCALE_THRESHOLD;
            new_max[r] = row_max;
        }
        if plane_any(outgrown) {
            #[unroll]
            for r in 0..2usize {
                let correction = exp2((rows.row_max[r] - new_max[r]) * scale);
                rows.row_max[r] = new_max[r];
                rows.row_sum[r] *= correction;
                #[unroll]
                for n in 0..n_dim {
                    let fragment = o.index_mut(n);
                    let mut pair = fragment[r];
                    pair[0] *= correction;
                    pair[1] *= correction;
                    fragment[r] = pair;
                }
            }
        }
        #[unroll]
        for r in 0..2usize {
            // For a row without a visible key so far: with a shift of MASKED, rounding would not cancel.
            let shift = select(rows.row_max[r] > MASKED, rows.row_max[r] * scale, 0f32);
            let mut total = rows.row_sum[r];
            #[unroll]
            for n in 0..n_keys {
                let fragment = s.index_mut(n);
                let mut pair = fragment[r];
                pair[0] = exp2(fma(pair[0], scale, -shift));
                pair[1] = exp2(fma(pair[1], scale, -shift));
                total += pair[0] + pair[1];
                fragment[r] = pair;
            }
            rows.row_sum[r] = total;
        }
    }

    fn finish(
        rows: &SoftmaxRowState,
        args: &SoftmaxArgs,
        statistics: &mut SoftmaxStatistics,
        head: usize,
        at: usize,
        write: bool,
        scale: f32,
        shift: f32,
        #[comptime] r: usize,
    ) -> f32 {
        let total = sum_of_four(rows.row_sum[r]);
        // Without a weight: o = 0, and the weights that the backward pass recomputes are 0.
        let nothing = total <= 0f32;
        let mut factor = select(nothing, 0f32, 1f32 / total);
        if comptime!(args.has_sinks) {
            let row_max = rows.row_max[r] * scale;
            let (with_sink, lse) = SoftmaxWeight::combine(args, head, row_max, total, shift);
            factor = with_sink;
            if write {
                statistics.lse[at] = lse;
                let sink = args.sinks.as_ref().unwrap()[head];
                let weight = exp2((sink - shift) * LOG2_E - lse);
                statistics.sink.as_mut().unwrap()[at] = weight;
            }
        } else {
            if write {
                let lse = fma(rows.row_max[r], scale, Log::ln(total) * LOG2_E);
                statistics.lse[at] = select(nothing, -MASKED, lse);
            }
        }
        factor
    }

    fn finish_split(rows: &SoftmaxRowState, scale: f32, #[comptime] r: usize) -> (f32, f32) {
        let total = sum_of_four(rows.row_sum[r]);
        let seen = rows.row_max[r] > MASKED;
        let lse = fma(rows.row_max[r], scale, Log::ln(total) * LOG2_E);
        (select(seen, 1f32 / total, 0f32), select(seen, lse, MASKED))
    }

    fn split_factor(statistic: f32, max_statistic: f32) -> f32 {
        exp2(statistic - max_statistic)
    }

    fn combine(
        args: &SoftmaxArgs,
        head: usize,
        max_statistic: f32,
        total: f32,
        shift: f32,
    ) -> (f32, f32) {
        let mut factor = 1f32 / total;
        let mut lse = max_statistic + Log::ln(total) * LOG2_E;
        if comptime!(args.has_sinks) {
            // Relative to the larger of both.
            let sink = (args.sinks.as_ref().unwrap()[head] - shift) * LOG2_E;
            let new_max = max(max_statistic, sink);
            let correction = exp2(max_statistic - new_max);
            let with_sink = fma(total, correction, exp2(sink - new_max));
            factor = correction / with_sink;
            lse = new_max + Log::ln(with_sink) * LOG2_E;
        }
        (factor, lse)
    }

    fn saved(saved: &SoftmaxSavedRows, at: usize) -> (f32, f32) {
        (saved.lse[at], saved.delta[at])
    }

    fn weigh(_saved: &SoftmaxSavedRows, score: f32, scale: f32, shift: f32) -> (f32, f32) {
        let weight = exp2(fma(score, scale, shift));
        (weight, weight)
    }

    fn saved_more(_saved: &SoftmaxSavedRows, _at: usize) -> (f32, f32) {
        (f32::cast_from(0u32), f32::cast_from(0u32))
    }

    fn weight_of(
        _saved: &SoftmaxSavedRows,
        _score: f32,
        _scale: f32,
        _statistics: Vector<f32, Const<4>>,
    ) -> (f32, f32) {
        (f32::cast_from(0u32), f32::cast_from(0u32))
    }

    fn ds_of(
        _saved: &SoftmaxSavedRows,
        _kept: f32,
        _statistics: Vector<f32, Const<4>>,
        _dp: f32,
    ) -> f32 {
        f32::cast_from(0u32)
    }

    fn carry(_rows: &SoftmaxRowState, #[comptime] _r: usize) -> f32 {
        f32::cast_from(1u32)
    }

    fn gradients_in_order(
        _s: &mut Accumulator,
        _dp: &mut Accumulator,
        _p: &mut AFragments,
        _carries: &Array<f32>,
        _sums: &mut Array<f32>,
        _scale: f32,
        #[comptime] _with_p: bool,
        #[comptime] _n_keys: usize,
    ) {
    }
}
