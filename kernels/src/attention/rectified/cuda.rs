//! Rectified attention on CUDA: a flash hook with the weights max(scale · q·k − τ, 0)^p, not normalised.
//!
//! The threshold τ is a statistic of each row. Its gradient is −Σ dS over the row, summed over the heads.

use burn::tensor::DType;
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use super::Rectified;
use crate::attention::flash::hooks::{
    Hooks, LaunchOf, NoBiases, PlainOperands, ScaledScore, Weight,
};
use crate::attention::flash::{FlashAttention, decode, serves_tensors};
use crate::attention::rowwise::Rowwise;
use crate::backend::Forward;
use crate::cuda::{CudaTensor, buffer, contiguous, empty};
use crate::ops::cuda::{THREADS, as_u32, blocks, dim, dims, over};
use crate::tile::{AFragments, Accumulator};

/// The hooks: the defaults but for the weight. `OFFSETS` says whether there are thresholds.
#[derive(Clone)]
struct RectifiedHooks<const OFFSETS: bool> {
    power: u32,
    /// τ, `[batch, heads, queries]`.
    offsets: Option<CudaTensor>,
}

impl<const OFFSETS: bool> RectifiedHooks<OFFSETS> {
    /// - `q`: `[batch, heads, queries, head_dim]`
    /// - `offsets`: `[batch or 1, queries]`
    fn new(op: &Rowwise<Rectified>, q: &CudaTensor, offsets: Option<&CudaTensor>) -> Self {
        let [batch, heads, queries, _] = q.meta.shape().dims();
        let offsets = offsets.map(|x| {
            let row = if dims(x)[0] == 1 { 0 } else { queries };
            contiguous(&over(&contiguous(x), 0, &[batch, heads, queries], &[row, 0, 1]))
        });
        RectifiedHooks { power: op.weights.power, offsets }
    }

    fn flash(
        &self,
        op: &Rowwise<Rectified>,
        inputs: [&CudaTensor; 3],
        documents: Option<&CudaTensor>,
    ) -> FlashAttention<Self> {
        FlashAttention::new(inputs, op.scale, self.clone())
            .views(dims(inputs[1])[1] / dims(inputs[2])[1])
            .window(op.window)
            .documents(documents)
    }
}

impl<const OFFSETS: bool> Hooks for RectifiedHooks<OFFSETS> {
    type Operands = PlainOperands;
    type Biases = NoBiases;
    type Score = ScaledScore;
    type Weight = RectifiedWeight<OFFSETS>;

    fn operands(&self) {}

    fn biases(&self) {}

    fn score(&self) {}

    fn weight(&self) -> LaunchOf<RectifiedRows> {
        RectifiedRowsLaunch::new(self.offsets.as_ref().map(|x| buffer(x, 1)).into(), self.power)
    }
}

/// max(S − τ, 0)^p, or without `OFFSETS` max(S, 0)^p.
struct RectifiedWeight<const OFFSETS: bool>;

/// p and the rows' thresholds, which all passes read.
#[derive(CubeType, CubeLaunch)]
struct RectifiedRows {
    /// τ, `[batch, heads, queries]`.
    offsets: ComptimeOption<Array<f32>>,
    /// p, from 1 to 16.
    #[cube(comptime)]
    power: u32,
}

/// A lane's thresholds, and p.
#[derive(CubeType)]
struct RectifiedRowState {
    /// τ of its two rows.
    offsets: Array<f32>,
    #[cube(comptime)]
    power: u32,
}

/// max(x, 0)^p and its derivative, which is 0 at 0 as in the reference; both propagate NaN, but for the
/// derivative with p = 1.
#[cube]
fn rectified(x: f32, #[comptime] power: u32) -> (f32, f32) {
    let excess = select(x <= 0f32, 0f32, x);
    let below = raised(excess, comptime!(power - 1));
    let mut slope = below * comptime!(power as f32);
    if comptime!(power == 1) {
        slope = select(excess <= 0f32, 0f32, 1f32);
    }
    (below * excess, slope)
}

/// x to a power from 0 to 15.
#[cube]
fn raised(x: f32, #[comptime] power: u32) -> f32 {
    let mut result = 1f32;
    let mut square = x;
    #[unroll]
    for bit in 0..4usize {
        if comptime!(power >> bit as u32 & 1 == 1) {
            result *= square;
        }
        square = square * square;
    }
    result
}

#[cube]
impl<const OFFSETS: bool> Weight for RectifiedWeight<OFFSETS> {
    type Args = RectifiedRows;
    type RowState = RectifiedRowState;
    type Statistics = ();
    type SavedRows = RectifiedRows;

    const SCORE_FACTOR: f32 = 1.0;
    const HAS_STATISTICS: bool = OFFSETS;
    const NEEDS_DS_ROW_SUMS: bool = OFFSETS;
    const HAS_FOUR_STATISTICS: bool = false;
    const SPARSE: bool = true;
    const SEES_ITSELF: bool = true;
    const IN_ORDER: bool = false;

    fn init_rows(args: &RectifiedRows, rows: &Array<usize>, _scale: f32) -> RectifiedRowState {
        let mut offsets = Array::<f32>::new(2usize);
        #[unroll]
        for r in 0..2usize {
            offsets[r] = 0f32;
            if comptime!(OFFSETS) {
                offsets[r] = args.offsets.as_ref().unwrap()[rows[r]];
            }
        }
        let power = comptime!(args.power);
        RectifiedRowState { offsets, power }
    }

    fn add_tile(
        rows: &mut RectifiedRowState,
        s: &mut Accumulator,
        _o: &mut Accumulator,
        scale: f32,
        #[comptime] n_keys: usize,
        #[comptime] _n_dim: usize,
    ) {
        #[unroll]
        for r in 0..2usize {
            let shift = -rows.offsets[r];
            #[unroll]
            for n in 0..n_keys {
                let fragment = s.index_mut(n);
                let mut pair = fragment[r];
                #[unroll]
                for e in 0..2usize {
                    let (weight, _) = rectified(fma(pair[e], scale, shift), comptime!(rows.power));
                    pair[e] = weight;
                }
                fragment[r] = pair;
            }
        }
    }

    fn finish(
        _rows: &RectifiedRowState,
        _args: &RectifiedRows,
        _statistics: &mut (),
        _head: usize,
        _at: usize,
        _write: bool,
        _scale: f32,
        _shift: f32,
        #[comptime] _r: usize,
    ) -> f32 {
        f32::cast_from(1u32)
    }

    fn finish_split(_rows: &RectifiedRowState, _scale: f32, #[comptime] _r: usize) -> (f32, f32) {
        (f32::cast_from(1u32), f32::cast_from(0u32))
    }

    fn split_factor(_statistic: f32, _max_statistic: f32) -> f32 {
        f32::cast_from(1u32)
    }

    fn combine(
        _args: &RectifiedRows,
        _head: usize,
        _max_statistic: f32,
        _total: f32,
        _shift: f32,
    ) -> (f32, f32) {
        (f32::cast_from(1u32), f32::cast_from(0u32))
    }

    fn saved(saved: &RectifiedRows, at: usize) -> (f32, f32) {
        let mut offset = 0f32;
        if comptime!(OFFSETS) {
            offset = saved.offsets.as_ref().unwrap()[at];
        }
        (offset, f32::cast_from(0u32))
    }

    fn weigh(saved: &RectifiedRows, score: f32, scale: f32, shift: f32) -> (f32, f32) {
        rectified(fma(score, scale, shift), comptime!(saved.power))
    }

    fn saved_more(_saved: &RectifiedRows, _at: usize) -> (f32, f32) {
        (f32::cast_from(0u32), f32::cast_from(0u32))
    }

    fn weight_of(
        _saved: &RectifiedRows,
        _score: f32,
        _scale: f32,
        _statistics: Vector<f32, Const<4>>,
    ) -> (f32, f32) {
        (f32::cast_from(0u32), f32::cast_from(0u32))
    }

    fn ds_of(
        _saved: &RectifiedRows,
        _kept: f32,
        _statistics: Vector<f32, Const<4>>,
        _dp: f32,
    ) -> f32 {
        f32::cast_from(0u32)
    }

    fn carry(_rows: &RectifiedRowState, #[comptime] _r: usize) -> f32 {
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

/// See [`Op::cuda_forward`](crate::backend::Op::cuda_forward). Saves the inputs.
pub(super) fn forward(
    op: &Rowwise<Rectified>,
    inputs: [&CudaTensor; 3],
    offsets: Option<&CudaTensor>,
    documents: Option<&CudaTensor>,
    needs: bool,
) -> Option<Forward<CudaTensor>> {
    if !serves_tensors(inputs) || offsets.is_some_and(|x| x.dtype != DType::F32) {
        return None;
    }
    let output = match offsets {
        None => attend::<false>(op, inputs, None, documents, needs),
        Some(_) => attend::<true>(op, inputs, offsets, documents, needs),
    };
    let saved = inputs.into_iter().chain(offsets).cloned().collect();
    Some(Forward { output, saved })
}

fn attend<const OFFSETS: bool>(
    op: &Rowwise<Rectified>,
    inputs: [&CudaTensor; 3],
    offsets: Option<&CudaTensor>,
    documents: Option<&CudaTensor>,
    needs: bool,
) -> CudaTensor {
    let hooks = RectifiedHooks::<OFFSETS>::new(op, inputs[0], offsets);
    let flash = hooks.flash(op, inputs, documents);
    if flash.q().dims[2] == 1 && !needs {
        let [output, _] = decode(&flash, None);
        return output;
    }
    flash.forward(())
}

/// The gradients of q, k, v and the offsets, if there are any, from what [`forward`] saved.
pub(super) fn backward(
    op: &Rowwise<Rectified>,
    saved: &[CudaTensor],
    documents: Option<&CudaTensor>,
    grad: &CudaTensor,
) -> Vec<CudaTensor> {
    let [q, k, v, offsets @ ..] = saved else { unreachable!("q, k and v are saved") };
    match offsets.first() {
        None => gradients::<false>(op, [q, k, v], None, documents, grad),
        offsets => gradients::<true>(op, [q, k, v], offsets, documents, grad),
    }
}

fn gradients<const OFFSETS: bool>(
    op: &Rowwise<Rectified>,
    inputs: [&CudaTensor; 3],
    offsets: Option<&CudaTensor>,
    documents: Option<&CudaTensor>,
    grad: &CudaTensor,
) -> Vec<CudaTensor> {
    let hooks = RectifiedHooks::<OFFSETS>::new(op, inputs[0], offsets);
    let all = hooks.flash(op, inputs, documents).backward(grad, || hooks.weight());
    let of_offsets = offsets.map(|x| {
        let sums = all.ds_rows.as_ref().expect("thresholds want sums of dS");
        gradients_of_offsets(sums, x)
    });
    [all.dq, all.dk, all.dv].into_iter().chain(of_offsets).collect()
}

/// −Σ_h Σ_j dS_ij, `[batch or 1, queries]` like `offsets`, from Σ_j dS_ij at the queries' positions,
/// `[batch, heads, keys]`.
fn gradients_of_offsets(ds_rows: &CudaTensor, offsets: &CudaTensor) -> CudaTensor {
    let [batch, heads, keys]: [usize; 3] = ds_rows.meta.shape().dims();
    let [rows, queries]: [usize; 2] = offsets.meta.shape().dims();
    let gradients = empty(ds_rows, &[rows, queries], DType::F32);
    // SAFETY: a thread writes one gradient, and reads within the rows that share its offset.
    unsafe {
        sum_of_shared_rows::launch_unchecked::<CudaRuntime>(
            &ds_rows.client,
            blocks(rows * queries, THREADS),
            dim(THREADS),
            buffer(ds_rows, 1),
            buffer(&gradients, 1),
            as_u32(batch * heads / rows),
            as_u32(rows),
            as_u32(queries),
            as_u32(keys),
        );
    }
    gradients
}

/// The gradients of offsets, `[rows, queries]`, from `ds_rows`, `[rows, shared, keys]`; sums have a fixed
/// order.
///
/// Grid: a thread for each offset.
#[cube(launch_unchecked)]
fn sum_of_shared_rows(
    ds_rows: &Array<f32>,
    gradients: &mut Array<f32>,
    shared: u32,
    rows: u32,
    queries: u32,
    keys: u32,
) {
    let (shared, queries, keys) = (shared as usize, queries as usize, keys as usize);
    let at = ABSOLUTE_POS;
    if at < rows as usize * queries {
        let first = at / queries * shared * keys + keys - queries + at % queries;
        let mut sum = 0f32;
        for i in 0..shared {
            sum += ds_rows[first + i * keys];
        }
        gradients[at] = -sum;
    }
}
