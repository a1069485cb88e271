//! 1.5-entmax attention on CUDA: a search finds each row's threshold τ, and the flash core computes with the
//! weights max(S/2 − τ, 0)², divided by their sum, which is 1 up to rounding.
//!
//! dS_ij = r_ij (dP_ij − Σ_j r_ij dP_ij / Σ_j r_ij) with r = max(S/2 − τ, 0). As dP_ij = dO_i · v_j, the mean is
//! dO_i · u_i, where u is the output of attention with the weights r / Σ r: another forward pass.

#[cfg(test)]
mod tests;
mod threshold;

use burn::tensor::DType;
use cubecl::prelude::*;

use self::threshold::Threshold;
use super::Entmax;
use crate::attention::flash::hooks::{
    Hooks, LaunchOf, NoBiases, PlainOperands, ScaledScore, Weight,
};
use crate::attention::flash::summed::{finish_summed_split, inverse, positive_part};
use crate::attention::flash::{FlashAttention, Heads, decode, row_dots, serves_tensors};
use crate::attention::rowwise::Rowwise;
use crate::backend::Forward;
use crate::cuda::{CudaTensor, buffer, empty};
use crate::tile::{AFragments, Accumulator, sum_of_four};

/// The hooks: the defaults but for the weight.
struct EntmaxHooks<const SLOPES: bool> {
    /// τ, `[batch, heads, queries]`.
    tau: CudaTensor,
}

impl<const SLOPES: bool> EntmaxHooks<SLOPES> {
    fn flash(
        op: &Rowwise<Entmax>,
        inputs: [&CudaTensor; 3],
        documents: Option<&CudaTensor>,
        tau: CudaTensor,
    ) -> FlashAttention<Self> {
        let hooks = EntmaxHooks { tau };
        FlashAttention::new(inputs, op.scale, hooks).window(op.window).documents(documents)
    }
}

impl<const SLOPES: bool> Hooks for EntmaxHooks<SLOPES> {
    type Operands = PlainOperands;
    type Biases = NoBiases;
    type Score = ScaledScore;
    type Weight = EntmaxWeight<SLOPES>;

    fn operands(&self) {}

    fn biases(&self) {}

    fn score(&self) {}

    fn weight(&self) -> LaunchOf<Thresholds> {
        ThresholdsLaunch::new(buffer(&self.tau, 1))
    }
}

/// r² / Σ r² with r = max(S/2 − τ, 0), or, with `SLOPES`, r / Σ r.
struct EntmaxWeight<const SLOPES: bool>;

/// The rows' thresholds.
#[derive(CubeType, CubeLaunch)]
struct Thresholds {
    /// τ, `[batch, heads, queries]`.
    tau: Array<f32>,
}

/// What the backward pass reads for each row, `[batch, heads, queries]`.
#[derive(CubeType, CubeLaunch)]
struct SavedThresholds {
    /// τ.
    tau: Array<f32>,
    /// The mean of dP with the weights r.
    delta: Array<f32>,
}

/// A lane's state for its two rows.
#[derive(CubeType)]
struct EntmaxRowState {
    /// τ.
    tau: Array<f32>,
    /// The lane's part of the sum of weights.
    sum: Array<f32>,
}

#[cube]
impl<const SLOPES: bool> Weight for EntmaxWeight<SLOPES> {
    type Args = Thresholds;
    type RowState = EntmaxRowState;
    type Statistics = ();
    type SavedRows = SavedThresholds;

    const SCORE_FACTOR: f32 = 0.5;
    const HAS_STATISTICS: bool = true;
    const NEEDS_DS_ROW_SUMS: bool = false;
    const HAS_FOUR_STATISTICS: bool = false;
    const SPARSE: bool = true;
    const SEES_ITSELF: bool = true;
    const IN_ORDER: bool = false;

    fn init_rows(args: &Thresholds, rows: &Array<usize>, _scale: f32) -> EntmaxRowState {
        let mut tau = Array::<f32>::new(2usize);
        let mut sum = Array::<f32>::new(2usize);
        #[unroll]
        for r in 0..2usize {
            tau[r] = args.tau[rows[r]];
            sum[r] = 0f32;
        }
        EntmaxRowState { tau, sum }
    }

    fn add_tile(
        rows: &mut EntmaxRowState,
        s: &mut Accumulator,
        _o: &mut Accumulator,
        scale: f32,
        #[comptime] n_keys: usize,
        #[comptime] _n_dim: usize,
    ) {
        #[unroll]
        for r in 0..2usize {
            let shift = -rows.tau[r];
            let mut total = rows.sum[r];
            #[unroll]
            for n in 0..n_keys {
                let fragment = s.index_mut(n);
                let mut pair = fragment[r];
                #[unroll]
                for e in 0..2usize {
                    let mut weight = positive_part(fma(pair[e], scale, shift));
                    if comptime!(!SLOPES) {
                        weight = weight * weight;
                    }
                    pair[e] = weight;
                }
                total += pair[0] + pair[1];
                fragment[r] = pair;
            }
            rows.sum[r] = total;
        }
    }

    fn finish(
        rows: &EntmaxRowState,
        _args: &Thresholds,
        _statistics: &mut (),
        _head: usize,
        _at: usize,
        _write: bool,
        _scale: f32,
        _shift: f32,
        #[comptime] r: usize,
    ) -> f32 {
        inverse(sum_of_four(rows.sum[r]))
    }

    fn finish_split(rows: &EntmaxRowState, _scale: f32, #[comptime] r: usize) -> (f32, f32) {
        finish_summed_split(rows.sum[r])
    }

    fn split_factor(statistic: f32, _max_statistic: f32) -> f32 {
        statistic
    }

    fn combine(
        _args: &Thresholds,
        _head: usize,
        _max_statistic: f32,
        total: f32,
        _shift: f32,
    ) -> (f32, f32) {
        (inverse(total), total)
    }

    fn saved(saved: &SavedThresholds, at: usize) -> (f32, f32) {
        (saved.tau[at], saved.delta[at])
    }

    fn weigh(_saved: &SavedThresholds, score: f32, scale: f32, shift: f32) -> (f32, f32) {
        let slope = positive_part(fma(score, scale, shift));
        (slope * slope, slope)
    }

    fn saved_more(_saved: &SavedThresholds, _at: usize) -> (f32, f32) {
        (f32::cast_from(0u32), f32::cast_from(0u32))
    }

    fn weight_of(
        _saved: &SavedThresholds,
        _score: f32,
        _scale: f32,
        _statistics: Vector<f32, Const<4>>,
    ) -> (f32, f32) {
        (f32::cast_from(0u32), f32::cast_from(0u32))
    }

    fn ds_of(
        _saved: &SavedThresholds,
        _kept: f32,
        _statistics: Vector<f32, Const<4>>,
        _dp: f32,
    ) -> f32 {
        f32::cast_from(0u32)
    }

    fn carry(_rows: &EntmaxRowState, #[comptime] _r: usize) -> f32 {
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

/// See [`Op::cuda_forward`](crate::backend::Op::cuda_forward). Saves the inputs and τ.
pub(super) fn forward(
    op: &Rowwise<Entmax>,
    inputs: [&CudaTensor; 3],
    documents: Option<&CudaTensor>,
    needs: bool,
) -> Option<Forward<CudaTensor>> {
    if !serves_tensors(inputs) {
        return None;
    }
    let [batch, heads, queries, _]: [usize; 4] = inputs[0].meta.shape().dims();
    let tau = empty(inputs[0], &[batch, heads, queries], DType::F32);
    let flash = EntmaxHooks::<false>::flash(op, inputs, documents, tau.clone());
    flash.search_candidates::<Threshold>(|| threshold::results(&tau));
    let output = if queries == 1 && !needs {
        let [output, _] = decode(&flash, None);
        output
    } else {
        flash.forward(())
    };
    let saved = if needs { inputs.into_iter().chain([&tau]).cloned().collect() } else { vec![] };
    Some(Forward { output, saved })
}

/// The gradients of q, k and v, from what [`forward`] saved.
pub(super) fn backward(
    op: &Rowwise<Entmax>,
    saved: &[CudaTensor],
    documents: Option<&CudaTensor>,
    grad: &CudaTensor,
) -> Vec<CudaTensor> {
    let [q, k, v, tau] = saved else { unreachable!("the inputs and τ are saved") };
    let means = EntmaxHooks::<true>::flash(op, [q, k, v], documents, tau.clone()).forward(());
    let delta = row_dots(&Heads::new(&means), &Heads::new(grad));
    let flash = EntmaxHooks::<false>::flash(op, [q, k, v], documents, tau.clone());
    let saved = || SavedThresholdsLaunch::new(buffer(tau, 1), buffer(&delta, 1));
    let all = flash.backward(grad, saved);
    vec![all.dq, all.dk, all.dv]
}
