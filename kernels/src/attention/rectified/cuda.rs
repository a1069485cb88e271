//! Rectified attention on CUDA: a flash hook with the weights max(scale · q·k, 0), not normalised.

use cubecl::prelude::*;

use super::Rectified;
use crate::attention::flash::hooks::{Hooks, NoBiases, PlainOperands, ScaledScore, Weight};
use crate::attention::flash::{FlashAttention, decode, serves_tensors};
use crate::attention::rowwise::Rowwise;
use crate::backend::Forward;
use crate::cuda::CudaTensor;
use crate::tile::Accumulator;

/// The hooks: the defaults but for the weight.
struct RectifiedHooks;

impl Hooks for RectifiedHooks {
    type Operands = PlainOperands;
    type Biases = NoBiases;
    type Score = ScaledScore;
    type Weight = RectifiedWeight;

    fn operands(&self) {}

    fn biases(&self) {}

    fn score(&self) {}

    fn weight(&self) {}
}

/// max(S, 0).
struct RectifiedWeight;

/// max(x, 0); propagates NaN.
#[cube]
fn positive(x: f32) -> f32 {
    select(x <= 0f32, 0f32, x)
}

#[cube]
impl Weight for RectifiedWeight {
    type Args = ();
    type RowState = ();
    type Statistics = ();
    type SavedRows = ();

    const SCORE_FACTOR: f32 = 1.0;
    const HAS_STATISTICS: bool = false;

    fn init_rows() {}

    fn add_tile(
        _rows: &mut (),
        s: &mut Accumulator,
        _o: &mut Accumulator,
        scale: f32,
        #[comptime] n_keys: usize,
        #[comptime] _n_dim: usize,
    ) {
        #[unroll]
        for r in 0..2usize {
            #[unroll]
            for n in 0..n_keys {
                let fragment = s.index_mut(n);
                let mut pair = fragment[r];
                pair[0] = positive(pair[0]) * scale;
                pair[1] = positive(pair[1]) * scale;
                fragment[r] = pair;
            }
        }
    }

    fn finish(
        _rows: &(),
        _args: &(),
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

    fn finish_split(_rows: &(), _scale: f32, #[comptime] _r: usize) -> (f32, f32) {
        (f32::cast_from(1u32), f32::cast_from(0u32))
    }

    fn split_factor(_statistic: f32, _max_statistic: f32) -> f32 {
        f32::cast_from(1u32)
    }

    fn combine(
        _args: &(),
        _head: usize,
        _max_statistic: f32,
        _total: f32,
        _shift: f32,
    ) -> (f32, f32) {
        (f32::cast_from(1u32), f32::cast_from(0u32))
    }

    fn saved(_saved: &(), _at: usize) -> (f32, f32) {
        (f32::cast_from(0u32), f32::cast_from(0u32))
    }

    fn weigh(score: f32, scale: f32, _shift: f32) -> f32 {
        positive(score) * scale
    }

    /// 0 at 0, as in the reference.
    fn slope(score: f32, _weight: f32) -> f32 {
        select(score <= 0f32, 0f32, 1f32)
    }
}

fn flash(
    op: &Rowwise<Rectified>,
    inputs: [&CudaTensor; 3],
    documents: Option<&CudaTensor>,
) -> FlashAttention<RectifiedHooks> {
    FlashAttention::new(inputs, op.scale, RectifiedHooks).window(op.window).documents(documents)
}

/// See [`Op::cuda_forward`](crate::backend::Op::cuda_forward): serves p = 1. Saves q, k and v.
pub(super) fn forward(
    op: &Rowwise<Rectified>,
    inputs: [&CudaTensor; 3],
    documents: Option<&CudaTensor>,
    needs: bool,
) -> Option<Forward<CudaTensor>> {
    if op.weights.power != 1 || !serves_tensors(inputs) {
        return None;
    }
    let flash = flash(op, inputs, documents);
    if flash.q().dims[2] == 1 && !needs {
        let [output, _] = decode(&flash, None);
        return Some(Forward { output, saved: vec![] });
    }
    Some(Forward { output: flash.forward(()), saved: inputs.map(Clone::clone).to_vec() })
}

/// The gradients of q, k and v from what [`forward`] saved.
pub(super) fn backward(
    op: &Rowwise<Rectified>,
    saved: &[CudaTensor; 3],
    documents: Option<&CudaTensor>,
    grad: &CudaTensor,
) -> [CudaTensor; 3] {
    let gradients = flash(op, saved.each_ref(), documents).backward(grad, || ());
    [gradients.dq, gradients.dk, gradients.dv]
}
