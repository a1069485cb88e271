//! Rotary position embedding.

use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Tensor, TensorData};
use burn_flex::FlexTensor;
use rayon::prelude::*;

use crate::backend::{Forward, Op, OpBackend, primitive, tensor};
use crate::cpu::rows::{RowOrder, with_whole_rows};
use crate::cpu::{buffer, rows_per_task};
use crate::cuda::CudaTensor;
use crate::ops::cuda::rotary::rotate;

/// Rotates pairs of channels by an angle that grows with the position (Su et al., 2021, equation
/// 34), in the half-split pairing of GPT-NeoX and Llama:
///
/// y_i = x_i cos(pω_i) − x_{i+n/2} sin(pω_i), y_{i+n/2} = x_{i+n/2} cos(pω_i) + x_i sin(pω_i)
///
/// for i < n/2 with n = `rotary_dims`, ω_i = theta^(−2i/n) and p = `first_position` + t for row t.
/// Channels from `rotary_dims` on pass through.
///
/// - `x`: `[batch, heads, seq_len, head_dim]`; a view with strides is read as it lies
/// - `first_position`: position of row 0; the length of the cache when decoding
/// - `theta`: the base; scaling by NTK is a larger base
///
/// Returns the shape of `x`, in the memory order of `x`. Angles are computed in f64.
///
/// # Panics
/// When `rotary_dims` is odd or over head_dim.
pub fn rotary<B: OpBackend>(
    x: Tensor<B, 4>,
    first_position: usize,
    theta: f64,
    rotary_dims: usize,
) -> Tensor<B, 4> {
    let head_dim = x.dims()[3];
    assert!(
        rotary_dims.is_multiple_of(2) && rotary_dims <= head_dim,
        "rotary_dims is {rotary_dims}; it must be even and at most head_dim, {head_dim}"
    );
    let op = Rotary { first_position, theta, rotary_dims };
    tensor(B::run(&op, [primitive(x)], vec![]))
}

/// The operation of [`rotary`]: input x.
#[derive(Clone, Debug, PartialEq)]
pub struct Rotary {
    /// Position of row 0.
    pub first_position: usize,
    /// The base of the angular frequencies.
    pub theta: f64,
    /// Channels that rotate, even.
    pub rotary_dims: usize,
}

/// cos and sin of the angles of some rows: two row-major `[seq_len, rotary_dims / 2]`.
pub(super) struct Angles {
    pub(super) cos: Vec<f32>,
    pub(super) sin: Vec<f32>,
}

/// The angles of recent calls: the layers of a model ask for the same ones, step after step.
static RECENT: Mutex<Vec<(Rotary, usize, Arc<Angles>)>> = Mutex::new(vec![]);
/// How many of them are kept.
const KEPT: usize = 4;

impl Rotary {
    /// The angles of `seq_len` rows, computed in f64.
    pub(super) fn angles(&self, seq_len: usize) -> Angles {
        let half = self.rotary_dims / 2;
        let frequency = |i: usize| self.theta.powf(-(i as f64) / half as f64);
        let frequencies: Vec<f64> = (0..half).map(frequency).collect();
        let position = |t: usize| (self.first_position + t) as f64;
        let angle = |i: usize| position(i / half) * frequencies[i % half];
        let all = (0..seq_len * half).into_par_iter().with_min_len(1 << 10);
        let (sin, cos) = all.map(|i| angle(i).sin_cos()).map(|(s, c)| (s as f32, c as f32)).unzip();
        Angles { cos, sin }
    }

    /// As [`Rotary::angles`], kept for the next call. Single rows, as in decoding, are not.
    fn recent_angles(&self, seq_len: usize) -> Arc<Angles> {
        if seq_len == 1 {
            return Arc::new(self.angles(1));
        }
        // A panic elsewhere cannot leave the list half-changed.
        let recent = || RECENT.lock().unwrap_or_else(PoisonError::into_inner);
        let same = |(op, len, _): &&(Rotary, usize, Arc<Angles>)| op == self && *len == seq_len;
        if let Some((_, _, angles)) = recent().iter().find(same) {
            return angles.clone();
        }
        // Not under the lock: this takes all threads, which may themselves wait for it.
        let angles = Arc::new(self.angles(seq_len));
        let mut recent = recent();
        recent.truncate(KEPT - 1);
        recent.insert(0, (self.clone(), seq_len, angles.clone()));
        angles
    }

    /// The rotation, or with `direction` −1 its inverse, in the memory order of `x`.
    fn rotate(&self, x: &FlexTensor, direction: f32) -> FlexTensor {
        let x = with_whole_rows(x);
        let order = RowOrder::of(&x);
        let (xs, time) = (order.view(&x), order.index(2));
        let (width, half) = (order.width(), self.rotary_dims / 2);
        let angles = self.recent_angles(x.layout().shape()[2]);
        let mut y = buffer(order.rows() * width);
        let rows = rows_per_task(width, 1 << 14);
        y.par_chunks_mut(rows * width).enumerate().for_each(|(task, y)| {
            for (i, y) in y.chunks_exact_mut(width).enumerate() {
                let row = task * rows + i;
                let (x, t) = (xs.row(row), time(row));
                let [cos, sin] = [&angles.cos, &angles.sin].map(|a| &a[t * half..][..half]);
                let (a, b) = x[..2 * half].split_at(half);
                let (first, second) = y[..2 * half].split_at_mut(half);
                for i in 0..half {
                    let sin = sin[i] * direction;
                    first[i] = a[i] * cos[i] - b[i] * sin;
                    second[i] = b[i] * cos[i] + a[i] * sin;
                }
                y[2 * half..].copy_from_slice(&x[2 * half..]);
            }
        });
        order.tensor(y)
    }
}

impl Op<1> for Rotary {
    fn reference<B: OpBackend>(
        &self,
        [x]: [FloatTensor<B>; 1],
        _ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        let x = tensor::<B, 4>(x);
        let [_, _, seq_len, head_dim] = x.dims();
        let half = self.rotary_dims / 2;
        if half == 0 {
            return primitive(x);
        }
        let options = (&x.device(), x.dtype());
        let Angles { cos, sin } = self.angles(seq_len);
        let [cos, sin] = [cos, sin].map(|angles| {
            let angles = TensorData::new(angles, [1, 1, seq_len, half]);
            Tensor::<B, 4>::from_data(angles, options)
        });
        let a = x.clone().narrow(3, 0, half);
        let b = x.clone().narrow(3, half, half);
        let first = a.clone() * cos.clone() - b.clone() * sin.clone();
        let second = b * cos + a * sin;
        let mut parts = vec![first, second];
        if self.rotary_dims < head_dim {
            parts.push(x.narrow(3, self.rotary_dims, head_dim - self.rotary_dims));
        }
        primitive(Tensor::cat(parts, 3))
    }
    fn cpu_forward(
        &self,
        [x]: &[FlexTensor; 1],
        _ints: &[FlexTensor],
        _needs: [bool; 1],
    ) -> Option<Forward<FlexTensor>> {
        Some(Forward { output: self.rotate(x, 1.0), saved: vec![] })
    }

    fn cpu_backward(
        &self,
        _saved: Vec<FlexTensor>,
        _ints: &[FlexTensor],
        grad: FlexTensor,
        _needs: [bool; 1],
    ) -> [Option<FlexTensor>; 1] {
        [Some(self.rotate(&grad, -1.0))]
    }

    fn cuda_forward(
        &self,
        [x]: &[CudaTensor; 1],
        _ints: &[CudaTensor],
        _needs: [bool; 1],
    ) -> Option<Forward<CudaTensor>> {
        Some(Forward { output: rotate(self, x, 1.0)?, saved: vec![] })
    }

    fn cuda_backward(
        &self,
        _saved: Vec<CudaTensor>,
        _ints: &[CudaTensor],
        grad: CudaTensor,
        _needs: [bool; 1],
    ) -> [Option<CudaTensor>; 1] {
        [rotate(self, &grad, -1.0)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::support::{Ad, assert_nan_shows, assert_views_agree, strides, values, wave};
    use crate::testing::{Case, Oracle, check};

    /// The rotation by its definition, pair by pair.
    fn oracle(op: &Rotary, x: &Oracle) -> Oracle {
        let half = op.rotary_dims / 2;
        Oracle::from_fn(&x.shape, |at| {
            let [b, h, t, i] = at[..] else { panic!() };
            if i >= 2 * half {
                return x.at(at);
            }
            let pair = i % half;
            let omega = op.theta.powf(-2.0 * pair as f64 / op.rotary_dims as f64);
            let (sin, cos) = ((op.first_position + t) as f64 * omega).sin_cos();
            let [first, second] = [pair, pair + half].map(|i| x.at(&[b, h, t, i]));
            if i < half { first * cos - second * sin } else { second * cos + first * sin }
        })
    }

    #[test]
    fn agrees_with_the_oracle_and_its_gradient() {
        for (shape, first_position, theta, rotary_dims) in [
            ([1, 1, 1, 2], 0, 10_000.0, 2),
            ([2, 3, 65, 32], 0, 10_000.0, 32),
            ([1, 2, 7, 33], 1000, 500_000.0, 14),
            ([1, 2, 1, 64], 123_456, 10_000.0, 64),
            ([1, 2, 3, 5], 7, 10_000.0, 0),
        ] {
            let op = Rotary { first_position, theta, rotary_dims };
            check(Case::new(op.clone(), &[&shape]), |inputs| oracle(&op, &inputs[0]));
        }
    }

    #[test]
    fn a_view_gives_what_its_copy_gives_and_keeps_its_order() {
        let view = || wave([2, 5, 3, 8], 0.0).swap_dims(1, 2);
        assert_views_agree(view(), |x| rotary(x, 3, 10_000.0, 6));
        assert_eq!(strides(&rotary(view(), 3, 10_000.0, 6)), strides(&view()));
        // Queries out of a joint projection, and memory whose rows are not whole.
        let joint = wave([2, 5, 3, 24], 0.0).narrow(3, 8, 8).swap_dims(1, 2);
        assert_views_agree(joint, |x| rotary(x, 3, 10_000.0, 8));
        assert_views_agree(wave([2, 3, 8, 5], 0.0).swap_dims(2, 3), |x| rotary(x, 3, 10_000.0, 8));
    }

    #[test]
    fn rows_one_at_a_time_equal_all_at_once() {
        let x = wave([1, 2, 9, 16], 0.0);
        let whole = rotary(x.clone(), 0, 10_000.0, 16);
        for t in 0..9 {
            let row = rotary(x.clone().narrow(2, t, 1), t, 10_000.0, 16);
            assert_eq!(values(row), values(whole.clone().narrow(2, t, 1)), "row {t}");
        }
    }

    #[test]
    fn kept_angles_belong_to_their_call() {
        let x = || wave([1, 1, 6, 8], 0.0);
        let run = |first, theta, dims| values(rotary(x(), first, theta, dims));
        let calls = [(0, 1e4, 8), (1, 1e4, 8), (0, 1e5, 8), (0, 1e4, 4), (2, 1e4, 8), (3, 1e4, 8)];
        let first: Vec<_> = calls.iter().map(|&(p, theta, dims)| run(p, theta, dims)).collect();
        for (i, &(p, theta, dims)) in calls.iter().enumerate().rev() {
            assert_eq!(run(p, theta, dims), first[i]);
            assert!((0..i).all(|j| first[j] != first[i]));
        }
    }

    #[test]
    fn a_nan_shows() {
        assert_nan_shows([1, 2, 3, 4], |x| rotary(x.clone(), 1, 10_000.0, 4) * x);
    }

    #[test]
    #[should_panic(expected = "rotary_dims is 7; it must be even and at most head_dim, 8")]
    fn an_odd_number_of_channels_is_refused() {
        let _: Tensor<Ad, 4> = rotary(wave([1, 1, 2, 8], 0.0), 0, 10_000.0, 7);
    }

    mod cuda {
        use super::*;
        use crate::ops::support::gpu::{assert_views_agree, strides, values, wave};
        use crate::testing::check_on;

        #[test]
        #[ignore = "needs a GPU"]
        fn agrees_with_the_oracle_and_its_gradient() {
            for (shape, first_position, theta, rotary_dims) in [
                ([1, 1, 1, 2], 0, 10_000.0, 2),
                ([2, 3, 65, 32], 0, 10_000.0, 32),
                ([2, 5, 130, 64], 0, 10_000.0, 64),
                ([1, 9, 33, 128], 4090, 10_000.0, 32),
                ([1, 2, 7, 33], 1000, 500_000.0, 14),
                ([1, 2, 1, 64], 123_456, 10_000.0, 64),
                ([1, 2, 3, 5], 7, 10_000.0, 0),
            ] {
                let op = Rotary { first_position, theta, rotary_dims };
                let case = || Case::new(op.clone(), &[&shape]);
                check_on::<crate::Cuda, _, 1>(case(), |inputs| oracle(&op, &inputs[0]));
                check_on::<crate::Cuda, _, 1>(case().bf16(&[0]), |inputs| oracle(&op, &inputs[0]));
            }
        }

        #[test]
        #[ignore = "needs a GPU"]
        fn a_view_gives_what_its_copy_gives_and_keeps_its_order() {
            let view = || wave([2, 5, 3, 8], 0.0).swap_dims(1, 2);
            assert_views_agree(view(), |x| rotary(x, 3, 10_000.0, 6));
            assert_views_agree(view(), |x| rotary(x, 3, 10_000.0, 8));
            assert_eq!(strides(&rotary(view(), 3, 10_000.0, 8)), strides(&view()));
            // Queries out of a joint projection, and memory whose rows are not whole.
            let joint = wave([2, 5, 3, 384], 0.0).narrow(3, 128, 128).swap_dims(1, 2);
            assert_views_agree(joint, |x| rotary(x, 3, 10_000.0, 128));
            assert_views_agree(wave([2, 3, 8, 5], 0.0).swap_dims(2, 3), |x| {
                rotary(x, 3, 10_000.0, 8)
            });
        }

        #[test]
        #[ignore = "needs a GPU"]
        fn kept_angles_belong_to_their_call() {
            let run = |(first, theta, dims): (usize, f64, usize)| {
                values(rotary(wave([1, 1, 6, 8], 0.0), first, theta, dims))
            };
            let calls = [
                (0, 1e4, 8),
                (1, 1e4, 8),
                (4093, 1e4, 8),
                (0, 1e5, 8),
                (0, 1e4, 4),
                (9000, 1e4, 8),
            ];
            let first: Vec<_> = calls.iter().map(|&call| run(call)).collect();
            for (i, &call) in calls.iter().enumerate().rev() {
                assert_eq!(run(call), first[i]);
                assert!((0..i).all(|j| first[j] != first[i]));
            }
        }
    }
}
