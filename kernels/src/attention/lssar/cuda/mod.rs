//! LSSAR on CUDA: a search finds each row's mean and maximum of φ, and the flash core computes with the weights
//! max(φ · gain − offset, 0)^p, divided by their sum. With u = φ / mean and O the offset of shares, gain and
//! offset are 1 / (mean · (max u − O)) and O / (max u − O), so that the largest weight is 1. φ and its mean are to
//! base 2: shares do not depend on the base.
//!
//! The backward pass takes gain and offset such that the weights W sum to 1, and with δ_i = Σ_j W_ij dP_ij
//!
//! dS_ij = σ(S_ij) (p · log₂ e · gain_i · W_ij^((p−1)/p) · (dP_ij − δ_i) − pull_i), σ(S_ij) = 1 − 2^−φ_ij,
//!
//! with 0 for the first product where W_ij is 0. Between weights and dS, φ takes the place of scores. The pull is the
//! gradient through the mean, which every key raises: Σ_j u_j du_j / (N · mean) with the gradients du of shares.
//! There, what u_j has above O cancels; O leaves a sum of W^((p−1)/p) (dP − δ), which needs the output u of attention
//! with the weights W^((p−1)/p): another forward pass.

mod phi;
mod rows;

use burn::tensor::DType;
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use self::phi::{slope_of, softplus};
use self::rows::{FoundRows, Mean};
use super::Lssar;
use crate::attention::flash::hooks::{
    Hooks, LaunchOf, NoBiases, PlainOperands, ScaledScore, Weight,
};
use crate::attention::flash::summed::{finish_summed_split, inverse};
use crate::attention::flash::{FlashAttention, Heads, decode, row_dots, serves_tensors};
use crate::attention::rowwise::Rowwise;
use crate::backend::Forward;
use crate::cuda::{CudaTensor, buffer, empty};
use crate::tile::{AFragments, Accumulator, LOG2_E, saturated_fma, sum_of_four};

/// The hooks: the defaults but for the weight.
struct LssarHooks {
    rows: FoundRows,
    power: u32,
}

impl LssarHooks {
    /// Attention with the weights to this `power`; 0 is 1 for keys that the row selects.
    fn flash(
        op: &Rowwise<Lssar>,
        inputs: [&CudaTensor; 3],
        documents: Option<&CudaTensor>,
        rows: &FoundRows,
        power: u32,
    ) -> FlashAttention<Self> {
        let hooks = LssarHooks { rows: rows.clone(), power };
        FlashAttention::new(inputs, op.scale, hooks).window(op.window).documents(documents)
    }
}

impl Hooks for LssarHooks {
    type Operands = PlainOperands;
    type Biases = NoBiases;
    type Score = ScaledScore;
    type Weight = LssarWeight;

    fn operands(&self) {}

    fn biases(&self) {}

    fn score(&self) {}

    fn weight(&self) -> LaunchOf<LssarRows> {
        let FoundRows { gain, offset, .. } = &self.rows;
        LssarRowsLaunch::new(buffer(gain, 1), buffer(offset, 1), self.power)
    }
}

/// max(φ · gain − offset, 0)^power over its sum.
struct LssarWeight;

/// The rows' gains and offsets, and the power.
#[derive(CubeType, CubeLaunch)]
struct LssarRows {
    /// `[batch, heads, queries]`
    gain: Array<f32>,
    /// `[batch, heads, queries]`
    offset: Array<f32>,
    /// From 0 to 32.
    #[cube(comptime)]
    power: u32,
}

/// What the forward pass writes for each row, `[batch, heads, queries]`.
#[derive(CubeType, CubeLaunch)]
struct WeightSums {
    /// The sum of weights.
    total: Array<f32>,
}

/// What the backward pass reads for each row, `[batch, heads, queries]`.
#[derive(CubeType, CubeLaunch)]
struct SavedLssarRows {
    /// The gain with which weights sum to 1.
    gain: Array<f32>,
    /// The offset with which weights sum to 1.
    offset: Array<f32>,
    /// p · log₂ e · gain times δ, the mean of dP by the weights.
    centre: Array<f32>,
    /// The pull.
    pull: Array<f32>,
    /// p, from 1 to 32.
    #[cube(comptime)]
    power: u32,
}

/// A lane's state for its two rows.
#[derive(CubeType)]
struct LssarRowState {
    gain: Array<f32>,
    offset: Array<f32>,
    /// The lane's part of the sum of weights.
    sum: Array<f32>,
    #[cube(comptime)]
    power: u32,
}

/// max(φ · gain − offset, 0), which is at most 1; 0 for a NaN.
#[cube]
fn excess(phi: f32, gain: f32, offset: f32) -> f32 {
    saturated_fma(phi, gain, -offset)
}

/// The smallest factor of a number, beside 1.
fn smallest_factor(number: u32) -> u32 {
    (2..=number).find(|factor| number.is_multiple_of(*factor)).unwrap_or(1)
}

/// x ≥ 0 to a power, where 0 to the power of 0 is 0: to its factors one after the other, in at most 7 products.
#[cube]
fn raised(x: f32, #[comptime] power: u32) -> f32 {
    let factor = comptime!(smallest_factor(power));
    if comptime!(power == 0) {
        select(x > 0f32, 1f32, 0f32)
    } else if comptime!(power == 1) {
        x
    } else if comptime!(factor == power) {
        x * raised(x, comptime!(power - 1))
    } else {
        raised(raised(x, factor), comptime!(power / factor))
    }
}

#[cube]
impl Weight for LssarWeight {
    type Args = LssarRows;
    type RowState = LssarRowState;
    type Statistics = WeightSums;
    type SavedRows = SavedLssarRows;

    const SCORE_FACTOR: f32 = LOG2_E;
    const HAS_STATISTICS: bool = true;
    const NEEDS_DS_ROW_SUMS: bool = false;
    const HAS_FOUR_STATISTICS: bool = true;
    const SPARSE: bool = true;
    const SEES_ITSELF: bool = true;
    const IN_ORDER: bool = false;

    fn init_rows(args: &LssarRows, rows: &Array<usize>, _scale: f32) -> LssarRowState {
        let mut gain = Array::<f32>::new(2usize);
        let mut offset = Array::<f32>::new(2usize);
        let mut sum = Array::<f32>::new(2usize);
        #[unroll]
        for r in 0..2usize {
            gain[r] = args.gain[rows[r]];
            offset[r] = args.offset[rows[r]];
            // A NaN among the row's scores makes its gain one, and must show: the weights are 0.
            sum[r] = gain[r] * 0f32;
        }
        let power = comptime!(args.power);
        LssarRowState { gain, offset, sum, power }
    }

    fn add_tile(
        rows: &mut LssarRowState,
        s: &mut Accumulator,
        _o: &mut Accumulator,
        scale: f32,
        #[comptime] n_keys: usize,
        #[comptime] _n_dim: usize,
    ) {
        #[unroll]
        for r in 0..2usize {
            let (gain, offset) = (rows.gain[r], rows.offset[r]);
            let mut total = rows.sum[r];
            #[unroll]
            for n in 0..n_keys {
                let fragment = s.index_mut(n);
                let mut pair = fragment[r];
                #[unroll]
                for e in 0..2usize {
                    let phi = softplus(pair[e] * scale);
                    pair[e] = raised(excess(phi, gain, offset), comptime!(rows.power));
                }
                total += pair[0] + pair[1];
                fragment[r] = pair;
            }
            rows.sum[r] = total;
        }
    }

    fn finish(
        rows: &LssarRowState,
        _args: &LssarRows,
        statistics: &mut WeightSums,
        _head: usize,
        at: usize,
        write: bool,
        _scale: f32,
        _shift: f32,
        #[comptime] r: usize,
    ) -> f32 {
        let total = sum_of_four(rows.sum[r]);
        if write {
            statistics.total[at] = total;
        }
        inverse(total)
    }

    fn finish_split(rows: &LssarRowState, _scale: f32, #[comptime] r: usize) -> (f32, f32) {
        finish_summed_split(rows.sum[r])
    }

    fn split_factor(statistic: f32, _max_statistic: f32) -> f32 {
        statistic
    }

    fn combine(
        _args: &LssarRows,
        _head: usize,
        _max_statistic: f32,
        total: f32,
        _shift: f32,
    ) -> (f32, f32) {
        (inverse(total), total)
    }

    fn saved(saved: &SavedLssarRows, at: usize) -> (f32, f32) {
        (saved.gain[at], saved.offset[at])
    }

    fn weigh(_saved: &SavedLssarRows, _score: f32, _scale: f32, _shift: f32) -> (f32, f32) {
        (f32::cast_from(0u32), f32::cast_from(0u32))
    }

    fn saved_more(saved: &SavedLssarRows, at: usize) -> (f32, f32) {
        (saved.centre[at], saved.pull[at])
    }

    fn weight_of(
        saved: &SavedLssarRows,
        score: f32,
        scale: f32,
        statistics: Vector<f32, Const<4>>,
    ) -> (f32, f32) {
        let phi = softplus(score * scale);
        (raised(excess(phi, statistics[0], statistics[1]), comptime!(saved.power)), phi)
    }

    fn ds_of(saved: &SavedLssarRows, kept: f32, statistics: Vector<f32, Const<4>>, dp: f32) -> f32 {
        let gain = statistics[0] * comptime!(saved.power as f32 * LOG2_E);
        let below = raised(excess(kept, statistics[0], statistics[1]), comptime!(saved.power - 1));
        slope_of(kept) * fma(below, fma(dp, gain, -statistics[2]), -statistics[3])
    }

    fn carry(_rows: &LssarRowState, #[comptime] _r: usize) -> f32 {
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

/// See [`Op::cuda_forward`](crate::backend::Op::cuda_forward). Saves the inputs, o, and what the rows found.
pub(super) fn forward(
    op: &Rowwise<Lssar>,
    inputs: [&CudaTensor; 3],
    documents: Option<&CudaTensor>,
    needs: bool,
) -> Option<Forward<CudaTensor>> {
    if !serves_tensors(inputs) {
        return None;
    }
    let [batch, heads, queries, _]: [usize; 4] = inputs[0].meta.shape().dims();
    let rows = FoundRows::uninit(inputs[0], [batch, heads, queries]);
    let flash = LssarHooks::flash(op, inputs, documents, &rows, op.weights.power);
    flash.search::<Mean>(rows.launch());
    if queries == 1 && !needs {
        let [output, _] = decode(&flash, None);
        return Some(Forward { output, saved: vec![] });
    }
    let total = flash.statistic();
    let output = flash.forward(WeightSumsLaunch::new(buffer(&total, 1)));
    let FoundRows { gain, offset, share } = rows;
    let saved = match needs {
        true => inputs.into_iter().cloned().chain([output.clone(), gain, offset, share, total]),
        false => return Some(Forward { output, saved: vec![] }),
    };
    Some(Forward { output, saved: saved.collect() })
}

/// The gradients of q, k and v, from what [`forward`] saved.
pub(super) fn backward(
    op: &Rowwise<Lssar>,
    saved: &[CudaTensor],
    documents: Option<&CudaTensor>,
    grad: &CudaTensor,
) -> Vec<CudaTensor> {
    let [q, k, v, o, gain, offset, share, total] = saved else {
        unreachable!("the inputs, o, three statistics and the sum of weights are saved")
    };
    let rows = FoundRows { gain: gain.clone(), offset: offset.clone(), share: share.clone() };
    let power = op.weights.power;
    let grad_heads = Heads::new(grad);
    let below = LssarHooks::flash(op, [q, k, v], documents, &rows, power - 1);
    let total_below = below.statistic();
    let means = below.forward(WeightSumsLaunch::new(buffer(&total_below, 1)));
    let delta = row_dots(&Heads::new(o), &grad_heads);
    let delta_below = row_dots(&Heads::new(&means), &grad_heads);
    let [gain, offset, centre, pull] =
        rows.normalised(power, [total, &total_below], [&delta, &delta_below]);
    let flash = LssarHooks::flash(op, [q, k, v], documents, &rows, power);
    let saved = || {
        let [gain, offset, centre, pull] = [&gain, &offset, &centre, &pull].map(|x| buffer(x, 1));
        SavedLssarRowsLaunch::<CudaRuntime>::new(gain, offset, centre, pull, power)
    };
    let all = flash.backward(grad, saved);
    vec![all.dq, all.dk, all.dv]
}

impl FoundRows {
    /// Uninitialised, for `[batch, heads, queries]`.
    fn uninit(like: &CudaTensor, shape: [usize; 3]) -> Self {
        let statistic = || empty(like, &shape, DType::F32);
        FoundRows { gain: statistic(), offset: statistic(), share: statistic() }
    }
}
