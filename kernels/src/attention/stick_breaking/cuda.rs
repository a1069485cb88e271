//! Stick-breaking attention on CUDA: a flash hook whose weights depend on the keys after them.
//!
//! A row carries what is left of its stick. In a tile of keys, from the last to the first, each key takes the share
//! σ(z) = 2ˣ/(1 + 2ˣ), x = z·log₂ e, and passes on 1/(1 + 2ˣ). Products of what is passed on need no logarithms, and
//! where they underflow, nothing is left. All of this is in f32; only the finished weights are rounded to bf16.

use cubecl::prelude::*;

use super::StickBreaking;
use crate::attention::flash::hooks::{Hooks, NoBiases, PlainOperands, ScaledScore, Weight};
use crate::attention::flash::in_order::{SavedOrder, TILE};
use crate::attention::flash::mask::Pruned;
use crate::attention::flash::{FlashAttention, Gradients, decode, serves_tensors};
use crate::attention::rowwise::Rowwise;
use crate::backend::Forward;
use crate::cuda::CudaTensor;
use crate::tile::warpgroup::set_a_frag;
use crate::tile::{
    AFragments, Accumulator, LOG2_E, Pair, exp2, products_of_four, reciprocal, sums_of_four,
};

/// The hooks: the defaults but for the weight.
struct StickHooks;

impl Hooks for StickHooks {
    type Operands = PlainOperands;
    type Biases = NoBiases;
    type Score = ScaledScore;
    type Weight = StickWeight;

    fn operands(&self) {}

    fn biases(&self) {}

    fn score(&self) {}

    fn weight(&self) {}

    /// The forward pass ends when a block's rows have nothing left: one warpgroup per block.
    fn block_shape(&self, _shape: (usize, usize), _head_dim: usize) -> (usize, usize) {
        (1, TILE)
    }
}

/// σ(z_j) Π_{j<m<i} (1 − σ(z_m)).
struct StickWeight;

/// What is left of the sticks of a lane's two rows.
#[derive(CubeType)]
struct Sticks {
    left: Array<f32>,
}

/// Scores, base 2, are bounded by this, so that 2ˣ and its reciprocal are normal numbers: a key with this score
/// takes all of the stick in f32.
const MOST_SCORE: f32 = 120.0;

/// σ and 1 − σ of a score, base 2, both to f32's relative precision. A NaN stays a NaN.
#[cube]
fn taken_and_passed(x: f32) -> (f32, f32) {
    let odds = exp2(select(x > MOST_SCORE, MOST_SCORE, x));
    let passed = reciprocal(1f32 + odds);
    (odds * passed, passed)
}

#[cube]
impl Weight for StickWeight {
    type Args = ();
    type RowState = Sticks;
    type Statistics = ();
    type SavedRows = ();

    const SCORE_FACTOR: f32 = LOG2_E;
    const HAS_STATISTICS: bool = false;
    const NEEDS_DS_ROW_SUMS: bool = false;
    const HAS_FOUR_STATISTICS: bool = false;
    const SPARSE: bool = false;
    const SEES_ITSELF: bool = false;
    const IN_ORDER: bool = true;

    fn init_rows(_args: &(), _rows: &Array<usize>, _scale: f32) -> Sticks {
        let mut left = Array::<f32>::new(2usize);
        left[0] = 1f32;
        left[1] = 1f32;
        Sticks { left }
    }

    fn add_tile(
        rows: &mut Sticks,
        s: &mut Accumulator,
        _o: &mut Accumulator,
        scale: f32,
        #[comptime] n_keys: usize,
        #[comptime] _n_dim: usize,
    ) {
        #[unroll]
        for r in 0..2usize {
            let mut left = rows.left[r];
            #[unroll]
            for back in 0..n_keys {
                let fragment = s.index_mut(comptime!(n_keys - 1 - back));
                let mut pair = fragment[r];
                let (taken_0, passed_0) = taken_and_passed(pair[0] * scale);
                let (taken_1, passed_1) = taken_and_passed(pair[1] * scale);
                let (after, all) = products_of_four(passed_0 * passed_1);
                let of_last = left * after;
                pair[0] = taken_0 * (passed_1 * of_last);
                pair[1] = taken_1 * of_last;
                fragment[r] = pair;
                left *= all;
            }
            rows.left[r] = left;
        }
    }

    fn finish(
        _rows: &Sticks,
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

    fn finish_split(rows: &Sticks, _scale: f32, #[comptime] r: usize) -> (f32, f32) {
        (f32::cast_from(1u32), rows.left[r])
    }

    fn split_factor(_statistic: f32, _max_statistic: f32) -> f32 {
        f32::cast_from(1u32)
    }

    fn combine(
        _args: &(),
        _head: usize,
        max_statistic: f32,
        _total: f32,
        _shift: f32,
    ) -> (f32, f32) {
        (f32::cast_from(1u32), max_statistic)
    }

    fn saved(_saved: &(), _at: usize) -> (f32, f32) {
        (f32::cast_from(0u32), f32::cast_from(0u32))
    }

    fn weigh(_saved: &(), _score: f32, _scale: f32, _shift: f32) -> (f32, f32) {
        (f32::cast_from(0u32), f32::cast_from(0u32))
    }

    fn saved_more(_saved: &(), _at: usize) -> (f32, f32) {
        (f32::cast_from(0u32), f32::cast_from(0u32))
    }

    fn weight_of(
        _saved: &(),
        _score: f32,
        _scale: f32,
        _statistics: Vector<f32, Const<4>>,
    ) -> (f32, f32) {
        (f32::cast_from(0u32), f32::cast_from(0u32))
    }

    fn ds_of(_saved: &(), _kept: f32, _statistics: Vector<f32, Const<4>>, _dp: f32) -> f32 {
        f32::cast_from(0u32)
    }

    fn carry(rows: &Sticks, #[comptime] r: usize) -> f32 {
        rows.left[r]
    }

    /// With g_j = A_j dA_j and G_j = Σ_{m≤j} g_m: z_j enters its own weight with ∂ ln A_j/∂z_j = 1 − σ(z_j) and
    /// those of all keys before it with −σ(z_j), so dz_j = g_j − σ(z_j) G_j. G is summed from the first key, so
    /// that it does not cancel where nothing is left.
    fn gradients_in_order(
        s: &mut Accumulator,
        dp: &mut Accumulator,
        p: &mut AFragments,
        carries: &Array<f32>,
        sums: &mut Array<f32>,
        scale: f32,
        #[comptime] with_p: bool,
        #[comptime] n_keys: usize,
    ) {
        #[unroll]
        for r in 0..2usize {
            let mut left = carries[r];
            // Scores become σ, and dA becomes g.
            #[unroll]
            for back in 0..n_keys {
                let n = comptime!(n_keys - 1 - back);
                let mut pair = s.index(n)[r];
                let mut grads = dp.index(n)[r];
                let (taken_0, passed_0) = taken_and_passed(pair[0] * scale);
                let (taken_1, passed_1) = taken_and_passed(pair[1] * scale);
                let (after, all) = products_of_four(passed_0 * passed_1);
                let of_last = left * after;
                let mut weights = Pair::empty();
                weights[0] = taken_0 * (passed_1 * of_last);
                weights[1] = taken_1 * of_last;
                if with_p {
                    set_a_frag(p, n, r, weights);
                }
                grads[0] *= weights[0];
                grads[1] *= weights[1];
                pair[0] = taken_0;
                pair[1] = taken_1;
                s.index_mut(n)[r] = pair;
                dp.index_mut(n)[r] = grads;
                left *= all;
            }
            let mut sum = sums[r];
            #[unroll]
            for n in 0..n_keys {
                let mut pair = s.index(n)[r];
                let grads = dp.index(n)[r];
                let (before, all) = sums_of_four(grads[0] + grads[1]);
                let up_to_0 = sum + before + grads[0];
                let up_to_1 = up_to_0 + grads[1];
                pair[0] = grads[0] - pair[0] * up_to_0;
                pair[1] = grads[1] - pair[1] * up_to_1;
                s.index_mut(n)[r] = pair;
                sum += all;
            }
            sums[r] = sum;
        }
    }
}

fn flash(
    op: &Rowwise<StickBreaking>,
    inputs: [&CudaTensor; 3],
    documents: Option<&CudaTensor>,
) -> FlashAttention<StickHooks> {
    FlashAttention::new(inputs, op.scale, StickHooks).window(op.window).documents(documents)
}

/// Carries are kept until the backward pass if they take at most this many times the output's memory; else it
/// computes them again.
const CARRIES_PER_OUTPUT: usize = 4;

/// Whether to keep the carries. They take 4 bytes per query and tile, and the output 2 per channel.
fn keeps_carries(keys: usize, head_dim: usize) -> bool {
    keys.div_ceil(TILE) * 4 <= CARRIES_PER_OUTPUT * head_dim * 2
}

/// Bytes that are kept of a query for the backward pass beside inputs and output, in one head.
pub(super) fn saved_bytes_per_row(keys: usize, head_dim: usize) -> usize {
    if keeps_carries(keys, head_dim) { keys.div_ceil(TILE) * 4 + 4 } else { 0 }
}

/// See [`Op::cuda_forward`](crate::backend::Op::cuda_forward). There are no offsets.
pub(super) fn forward(
    op: &Rowwise<StickBreaking>,
    inputs: [&CudaTensor; 3],
    documents: Option<&CudaTensor>,
    needs: bool,
) -> Option<Forward<CudaTensor>> {
    if !serves_tensors(inputs) {
        return None;
    }
    let flash = flash(op, inputs, documents);
    let saved = inputs.map(Clone::clone).into_iter();
    if needs && keeps_carries(flash.k().dims[2], flash.q().dims[3]) {
        let (output, SavedOrder { carries, reached }) = flash.forward_in_order(());
        let Pruned { first, bounds, least } = reached;
        let saved = saved.chain([carries, first, bounds, least]).collect();
        return Some(Forward { output, saved });
    }
    let output = if flash.q().dims[2] == 1 && !needs {
        let [output, _] = decode(&flash, None);
        output
    } else {
        flash.forward(())
    };
    Some(Forward { output, saved: saved.collect() })
}

/// The gradients of q, k and v, from what [`forward`] saved.
pub(super) fn backward(
    op: &Rowwise<StickBreaking>,
    saved: &[CudaTensor],
    documents: Option<&CudaTensor>,
    grad: &CudaTensor,
) -> Vec<CudaTensor> {
    let [q, k, v, order @ ..] = saved else { unreachable!("q, k and v are saved") };
    let flash = flash(op, [q, k, v], documents);
    let order = match order {
        [carries, first, bounds, least] => {
            let [carries, first, bounds, least] = [carries, first, bounds, least].map(Clone::clone);
            SavedOrder { carries, reached: Pruned { first, bounds, least } }
        }
        _ => flash.forward_in_order(()).1,
    };
    let Gradients { dq, dk, dv, .. } = flash.backward_in_order(order, grad, ());
    vec![dq, dk, dv]
}

#[cfg(test)]
mod tests {
    use super::keeps_carries;

    #[test]
    fn long_rows_compute_their_carries_again() {
        for (keys, head_dim, keeps) in
            [(1, 8, true), (8192, 64, true), (8193, 64, false), (16_384, 128, true)]
        {
            assert_eq!(keeps_carries(keys, head_dim), keeps, "{keys} keys of {head_dim} channels");
        }
    }
}
