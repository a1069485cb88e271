//! The short depthwise causal convolution over time.

use burn::tensor::activation::silu;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Int, Tensor};
use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::activation::{silu_slope, silu_value};
use super::cuda::short_conv as cuda;
use crate::backend::{Forward, Op, OpBackend, int_tensor, primitive, tensor};
use crate::cpu::{
    buffer, contiguous, dims, from_vec, int_vec, math, rows_per_task, slice, sum_in_order,
};
use crate::cuda::CudaTensor;

/// y_tc = f(Σ_{j < taps} weight_cj · x_{t − taps + 1 + j, c}), each channel by itself, with f = SiLU
/// or the identity.
///
/// The last tap multiplies the current row; rows before the first, or before the document's start,
/// count as 0. To decode, run it on the last taps − 1 rows followed by the new ones, and keep the
/// new ones' results.
///
/// - `x`: `[batch, seq_len, channels]`
/// - `weight`: `[channels, taps]`
/// - `silu`: whether f is x σ(x)
/// - `document_starts`: `[batch, seq_len]`, the row at which each position's document starts, which
///   never decreases along a sequence
///
/// Returns the shape of `x`.
///
/// # Panics
/// When the sizes do not fit.
pub fn short_conv<B: OpBackend>(
    x: Tensor<B, 3>,
    weight: Tensor<B, 2>,
    silu: bool,
    document_starts: Option<Tensor<B, 2, Int>>,
) -> Tensor<B, 3> {
    let ints = document_starts.map(Tensor::into_primitive);
    tensor(B::run(
        &ShortConv { silu },
        [primitive(x), primitive(weight)],
        ints.into_iter().collect(),
    ))
}

/// The operation: inputs x, weight; optional integer input document starts.
#[derive(Clone, Debug)]
pub struct ShortConv {
    /// Whether SiLU follows the convolution.
    pub silu: bool,
}

impl Op<2> for ShortConv {
    fn reference<B: OpBackend>(
        &self,
        [x, weight]: [FloatTensor<B>; 2],
        ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        let (x, weight) = (tensor::<B, 3>(x), tensor::<B, 2>(weight));
        let [batch, seq_len, channels] = x.dims();
        let taps = weight.dims()[1];
        let starts = ints.first().map(|starts| int_tensor::<B, 2>(starts.clone()));
        let mut y = x.zeros_like();
        for back in 0..taps.min(seq_len) {
            let mut shifted = x.clone();
            if back > 0 {
                let zeros = x.zeros_like().narrow(1, 0, back);
                shifted = Tensor::cat(vec![zeros, x.clone().narrow(1, 0, seq_len - back)], 1);
            }
            if let Some(starts) = &starts {
                let source = Tensor::<B, 1, Int>::arange(0..seq_len as i64, &x.device());
                let source = source.cast(starts.dtype()).unsqueeze::<2>() - back as i64;
                let outside = source.expand([batch, seq_len]).lower(starts.clone());
                shifted = shifted.mask_fill(outside.unsqueeze_dim(2), 0.0);
            }
            let tap = weight.clone().narrow(1, taps - 1 - back, 1);
            y = y + shifted * tap.reshape([1, 1, channels]);
        }
        primitive(if self.silu { silu(y) } else { y })
    }
    fn cpu_forward(
        &self,
        [x, weight]: &[FlexTensor; 2],
        ints: &[FlexTensor],
        _needs: [bool; 2],
    ) -> Option<Forward<FlexTensor>> {
        let (x, weight) = (contiguous(x), contiguous(weight));
        let call = Call::new(&x, &weight, ints);
        let mut y = buffer(slice(&x).len());
        let (channels, rows) = (call.channels, call.task_rows());
        y.par_chunks_mut(rows * channels).enumerate().for_each(|(task, y)| {
            for (i, y) in y.chunks_exact_mut(channels).enumerate() {
                call.convolve(task * rows + i, y);
                if self.silu {
                    y.iter_mut().for_each(|y| *y = silu_value(*y));
                }
            }
        });
        Some(Forward { output: from_vec(y, &dims(&x)), saved: vec![x, weight] })
    }

    fn cpu_backward(
        &self,
        saved: Vec<FlexTensor>,
        ints: &[FlexTensor],
        grad: FlexTensor,
        needs: [bool; 2],
    ) -> [Option<FlexTensor>; 2] {
        let [x, weight] = &saved[..] else { unreachable!("the convolution saves two tensors") };
        let grad = contiguous(&grad);
        let call = Call::new(x, weight, ints);
        let mut dx = buffer(slice(x).len());
        let (channels, rows) = (call.channels, call.task_rows());
        let parts: Vec<_> = dx
            .par_chunks_mut(rows * channels)
            .enumerate()
            .map_init(Vec::new, |scratch, (task, dx)| {
                self.backward_task(&call, slice(&grad), task * rows, dx, scratch)
            })
            .collect();
        let dw = || {
            // Tasks sum tap by tap; the weight lies channel by channel.
            let dw = from_vec(sum_in_order(&parts), &[call.taps, channels]);
            contiguous(&dw.transpose(0, 1))
        };
        [needs[0].then(|| from_vec(dx, &dims(x))), needs[1].then(dw)]
    }

    fn cuda_forward(
        &self,
        [x, weight]: &[CudaTensor; 2],
        ints: &[CudaTensor],
        _needs: [bool; 2],
    ) -> Option<Forward<CudaTensor>> {
        let [output, x, weight] = cuda::forward(x, weight, ints, self.silu)?;
        Some(Forward { output, saved: vec![x, weight] })
    }

    fn cuda_backward(
        &self,
        saved: Vec<CudaTensor>,
        ints: &[CudaTensor],
        grad: CudaTensor,
        needs: [bool; 2],
    ) -> [Option<CudaTensor>; 2] {
        let [dx, dw] = cuda::backward(&saved[0], &saved[1], ints, self.silu, &grad);
        [needs[0].then_some(dx), needs[1].then_some(dw)]
    }
}

impl ShortConv {
    /// The gradient of the rows from `first` on, and their part of the weight's, `[taps, channels]`.
    ///
    /// With dz the gradient of the convolution: dx_t = Σ_back w_back · dz_{t + back}, so the task
    /// computes dz for the taps − 1 rows after its own too.
    fn backward_task(
        &self,
        call: &Call,
        dy: &[f32],
        first: usize,
        dx: &mut [f32],
        scratch: &mut Vec<f32>,
    ) -> Vec<f32> {
        let channels = call.channels;
        let end = first + dx.len() / channels;
        let last = (end + call.taps - 1).min(call.reach.len());
        scratch.resize((last - first) * channels, 0.0);
        for (i, dz) in scratch.chunks_exact_mut(channels).enumerate() {
            let dy = &dy[(first + i) * channels..][..channels];
            if self.silu {
                call.convolve(first + i, dz);
                dz.iter_mut().zip(dy).for_each(|(z, dy)| *z = dy * silu_slope(*z));
            } else {
                dz.copy_from_slice(dy);
            }
        }
        let dz = |row: usize| &scratch[(row - first) * channels..][..channels];
        let mut dw = vec![0.0; call.taps * channels];
        for (row, dx) in (first..end).zip(dx.chunks_exact_mut(channels)) {
            let later = (row..last.min(row + call.taps)).take_while(|&t| t - row < call.reach[t]);
            weighted_sum(dx, later.clone().count(), |back| (call.tap(back), dz(row + back)));
            for back in 0..call.reach[row] {
                let dw = &mut dw[back * channels..][..channels];
                for ((dw, x), dz) in dw.iter_mut().zip(call.row(row - back)).zip(dz(row)) {
                    *dw = math::mul_add(*x, *dz, *dw);
                }
            }
        }
        // By distance from the current row so far; the last tap is the one at distance 0.
        dw.chunks_exact(channels).rev().flatten().copied().collect()
    }
}

/// y ← Σ_i a_i · b_i, elementwise, for the `terms` pairs of rows that `pair` gives.
fn weighted_sum<'a>(y: &mut [f32], terms: usize, pair: impl Fn(usize) -> (&'a [f32], &'a [f32])) {
    // A block's sums stay in registers.
    const BLOCK: usize = 32;
    let whole = y.len() - y.len() % BLOCK;
    let (blocks, rest) = y.split_at_mut(whole);
    for (block, y) in blocks.chunks_exact_mut(BLOCK).enumerate() {
        let mut sums = [0.0; BLOCK];
        for term in 0..terms {
            let (a, b) = pair(term);
            let [a, b] = [a, b].map(|row| &row[block * BLOCK..][..BLOCK]);
            for i in 0..BLOCK {
                sums[i] = math::mul_add(a[i], b[i], sums[i]);
            }
        }
        y.copy_from_slice(&sums);
    }
    for (i, y) in rest.iter_mut().enumerate() {
        let product =
            |sum: f32, (a, b): (&[f32], &[f32])| math::mul_add(a[whole + i], b[whole + i], sum);
        *y = (0..terms).map(&pair).fold(0.0, product);
    }
}

/// One call's sizes and inputs; rows are those of `[batch · seq_len, channels]`.
struct Call<'a> {
    x: &'a [f32],
    /// `[taps, channels]`, by distance from the current row.
    weight: Vec<f32>,
    /// How many rows each row takes in: itself and those before it that its document has.
    reach: Vec<usize>,
    channels: usize,
    taps: usize,
}

impl<'a> Call<'a> {
    fn new(x: &'a FlexTensor, weight: &FlexTensor, ints: &[FlexTensor]) -> Self {
        let [batch, seq_len, channels] = dims(x)[..] else {
            panic!("the convolution's x is {:?}, not [batch, seq_len, channels]", dims(x))
        };
        let taps = dims(weight)[1];
        assert_eq!(dims(weight)[0], channels, "channels of the convolution's weight and of x");
        let documents = ints.first().map(|starts| {
            assert_eq!(dims(starts), [batch, seq_len], "shape of document_starts");
            int_vec(starts)
        });
        let start = |row: usize| documents.as_ref().map_or(0, |starts| starts[row].max(0) as usize);
        let reach = |row: usize| taps.min((row % seq_len + 1).saturating_sub(start(row)));
        let w = slice(weight);
        let by_distance = |i: usize| w[i % channels * taps + (taps - 1 - i / channels)];
        Call {
            x: slice(x),
            weight: (0..taps * channels).map(by_distance).collect(),
            reach: (0..batch * seq_len).map(reach).collect(),
            channels,
            taps,
        }
    }

    /// Rows of a parallel task: enough that the rows of the next task it reads cost little.
    fn task_rows(&self) -> usize {
        rows_per_task(self.channels, 1 << 14).max(8 * self.taps)
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.x[row * self.channels..][..self.channels]
    }

    fn tap(&self, back: usize) -> &[f32] {
        &self.weight[back * self.channels..][..self.channels]
    }

    /// z ← Σ_back w_back · x_{row − back}.
    fn convolve(&self, row: usize, z: &mut [f32]) {
        weighted_sum(z, self.reach[row], |back| (self.tap(back), self.row(row - back)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::support::{Ad, assert_nan_shows, assert_threads_agree, assert_views_agree};
    use crate::ops::support::{output_and_gradient, values, wave};
    use crate::testing::{Case, Oracle, check};

    /// The convolution by its definition.
    fn oracle(op: &ShortConv, starts: Option<&[i32]>, inputs: &[Oracle]) -> Oracle {
        let [x, weight] = inputs else { panic!() };
        let (seq_len, taps) = (x.shape[1], weight.shape[1]);
        Oracle::from_fn(&x.shape, |at| {
            let [b, t, c] = at[..] else { panic!() };
            let start = starts.map_or(0, |starts| starts[b * seq_len + t] as usize);
            let z: f64 = (0..taps)
                .filter(|j| t + j + 1 >= taps + start)
                .map(|j| weight.at(&[c, j]) * x.at(&[b, t + j + 1 - taps, c]))
                .sum();
            if op.silu { z / (1.0 + (-z).exp()) } else { z }
        })
    }

    /// Starts of documents of 1, 2, 3, … rows, anew in each row of the batch.
    fn starts(batch: usize, seq_len: usize) -> Vec<i32> {
        let (mut row, mut length) = (vec![], 1);
        while row.len() < seq_len {
            row.extend(vec![row.len() as i32; length]);
            length += 1;
        }
        row[..seq_len].repeat(batch)
    }

    #[test]
    fn agrees_with_the_oracle_and_its_gradients() {
        for silu in [false, true] {
            for ([batch, seq_len, channels], taps) in [
                ([1, 1, 1], 4),
                ([2, 2, 3], 4),
                ([2, 65, 33], 4),
                ([1, 70, 513], 3),
                ([3, 9, 5], 1),
            ] {
                let op = ShortConv { silu };
                let x = [batch, seq_len, channels];
                let case = || Case::new(op.clone(), &[&x, &[channels, taps]]);
                check(case(), |inputs| oracle(&op, None, inputs));
                let starts = starts(batch, seq_len);
                check(case().ints(&[batch, seq_len], starts.clone()), |inputs| {
                    oracle(&op, Some(&starts), inputs)
                });
            }
        }
    }

    #[test]
    fn a_window_of_the_last_rows_gives_the_new_row() {
        let (x, weight) = (wave([2, 9, 5], 0.0), wave([5, 4], 1.0));
        let whole = short_conv(x.clone(), weight.clone(), true, None);
        for t in 3..9 {
            let window = x.clone().narrow(1, t - 3, 4);
            let row = short_conv(window, weight.clone(), true, None).narrow(1, 3, 1);
            assert_eq!(values(row), values(whole.clone().narrow(1, t, 1)), "row {t}");
        }
    }

    #[test]
    fn a_view_gives_what_its_copy_gives_and_a_nan_shows() {
        let conv = |x: Tensor<Ad, 3>| {
            let channels = x.dims()[2];
            short_conv(x, wave([4, channels], 1.0).transpose(), true, None)
        };
        assert_views_agree(wave([9, 2, 5], 0.0).swap_dims(0, 1), conv);
        assert_views_agree(wave([2, 5, 9], 0.0).swap_dims(1, 2), conv);
        assert_nan_shows([2, 9, 5], conv);
    }

    #[test]
    fn results_do_not_depend_on_the_number_of_threads() {
        assert_threads_agree(|| {
            let conv = |w| short_conv(wave([3, 300, 70], 0.0), w, true, None);
            output_and_gradient(wave([70, 4], 1.0), &conv).concat()
        });
    }

    mod cuda {
        use super::*;
        use crate::ops::support::gpu::{Gpu, assert_nan_shows, assert_views_agree, wave};
        use crate::testing::check_on;

        #[test]
        #[ignore = "needs a GPU"]
        fn agrees_with_the_oracle_and_its_gradients() {
            for silu in [false, true] {
                for ([batch, seq_len, channels], taps) in [
                    ([1, 1, 1], 4),
                    ([2, 2, 3], 4),
                    ([2, 65, 33], 4),
                    ([1, 70, 513], 3),
                    ([3, 9, 5], 1),
                    ([2, 200, 24], 4),
                    ([1, 129, 16], 9),
                ] {
                    let op = ShortConv { silu };
                    let x = [batch, seq_len, channels];
                    let documents = starts(batch, seq_len);
                    // In f32; x alone in bf16; both.
                    for rounded in [&[][..], &[0], &[0, 1]] {
                        let case = || Case::new(op.clone(), &[&x, &[channels, taps]]);
                        let case = || case().bf16(rounded).parameters(&[1]);
                        check_on::<crate::Cuda, _, 2>(case(), |inputs| oracle(&op, None, inputs));
                        let case = case().ints(&[batch, seq_len], documents.clone());
                        check_on::<crate::Cuda, _, 2>(case, |inputs| {
                            oracle(&op, Some(&documents), inputs)
                        });
                    }
                }
            }
        }

        #[test]
        #[ignore = "needs a GPU"]
        fn a_view_gives_what_its_copy_gives_and_a_nan_shows() {
            let conv = |x: Tensor<Gpu, 3>| {
                let channels = x.dims()[2];
                short_conv(x, wave([4, channels], 1.0).transpose(), true, None)
            };
            assert_views_agree(wave([9, 2, 5], 0.0).swap_dims(0, 1), conv);
            assert_views_agree(wave([2, 5, 9], 0.0).swap_dims(1, 2), conv);
            assert_nan_shows([2, 9, 5], conv);
        }
    }
}
