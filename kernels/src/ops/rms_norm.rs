//! Root-mean-square normalisation over the last dimension.
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Tensor, TensorMetadata};
use burn_flex::FlexTensor;
use rayon::prelude::*;

use crate::backend::{Forward, Op, OpBackend, primitive, tensor};
use crate::cpu::rows::{RowOrder, with_whole_rows};
use crate::cpu::{buffer, contiguous, dims, from_vec, math, rows_per_task, slice, sum_in_order};
use crate::cuda::CudaTensor;
use crate::ops::cuda::norm::Norm;

/// Elements of a parallel task.
const TASK: usize = 1 << 14;

/// y = x / √(mean(x²) + eps) · weight, with the mean over the last dimension (Zhang and Sennrich,
/// 2019, equation 4).
///
/// - `x`: `[…, width]`; a view with strides is read as it lies
/// - `weight`: `[width]`
///
/// Returns the shape of `x`, in the memory order of `x`.
///
/// # Panics
/// When the sizes do not fit.
pub fn rms_norm<B: OpBackend, const D: usize>(
    x: Tensor<B, D>,
    weight: Tensor<B, 1>,
    eps: f32,
) -> Tensor<B, D> {
    let op = RmsNorm { eps };
    tensor(B::run(&op, [primitive(x), primitive(weight)], vec![]))
}

/// The operation: inputs x, weight.
#[derive(Clone, Debug)]
pub struct RmsNorm {
    /// Added to the mean square.
    pub eps: f32,
}

impl Op<2> for RmsNorm {
    fn reference<B: OpBackend>(
        &self,
        [x, weight]: [FloatTensor<B>; 2],
        _ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        let shape = x.shape();
        let width = shape[shape.num_dims() - 1];
        let rows = shape.num_elements() / width;
        let x = tensor::<B, 2>(B::float_reshape(x, [rows, width].into()));
        let square = (x.clone() * x.clone()).mean_dim(1);
        let y = x / (square + self.eps).sqrt() * tensor::<B, 1>(weight).unsqueeze();
        B::float_reshape(primitive(y), shape)
    }
    fn cpu_forward(
        &self,
        [x, weight]: &[FlexTensor; 2],
        _ints: &[FlexTensor],
        _needs: [bool; 2],
    ) -> Option<Forward<FlexTensor>> {
        let (x, weight) = (with_whole_rows(x), contiguous(weight));
        let order = RowOrder::of(&x);
        let (xs, w, width) = (order.view(&x), slice(&weight), order.width());
        assert_eq!(dims(&weight), [width], "shape of RMS norm's weight and width of x");
        let mut y = buffer(order.rows() * width);
        let rows = rows_per_task(width, TASK);
        y.par_chunks_mut(rows * width).enumerate().for_each(|(task, y)| {
            for (i, y) in y.chunks_exact_mut(width).enumerate() {
                let x = xs.row(task * rows + i);
                // Divided by: the root's inverse would be rounded once more.
                let root = self.square(x).sqrt();
                for ((y, x), w) in y.iter_mut().zip(x).zip(w) {
                    *y = x / root * w;
                }
            }
        });
        Some(Forward { output: order.tensor(y), saved: vec![x, weight] })
    }

    fn cpu_backward(
        &self,
        saved: Vec<FlexTensor>,
        _ints: &[FlexTensor],
        grad: FlexTensor,
        needs: [bool; 2],
    ) -> [Option<FlexTensor>; 2] {
        let [x, weight] = &saved[..] else { unreachable!("RMS norm saves two tensors") };
        let grad = with_whole_rows(&grad);
        let order = RowOrder::of(x);
        let (xs, dys, w) = (order.view(x), order.view(&grad), slice(weight));
        let width = order.width();
        let mut dx = buffer(order.rows() * width);
        let rows = rows_per_task(width, TASK);
        let parts: Vec<_> = dx
            .par_chunks_mut(rows * width)
            .enumerate()
            .map(|(task, dx)| {
                let mut dw = vec![0.0; width];
                for (i, dx) in dx.chunks_exact_mut(width).enumerate() {
                    let row = task * rows + i;
                    self.backward_row(w, xs.row(row), dys.row(row), dx, &mut dw);
                }
                dw
            })
            .collect();
        [
            needs[0].then(|| order.tensor(dx)),
            needs[1].then(|| from_vec(sum_in_order(&parts), &[width])),
        ]
    }

    fn cuda_forward(
        &self,
        [x, weight]: &[CudaTensor; 2],
        _ints: &[CudaTensor],
        _needs: [bool; 2],
    ) -> Option<Forward<CudaTensor>> {
        self.cuda().forward(x, weight, None)
    }

    fn cuda_backward_accumulating(
        &self,
        saved: Vec<CudaTensor>,
        _ints: &[CudaTensor],
        grad: CudaTensor,
        needs: [bool; 2],
        [grad_accum, ..]: &mut [Option<CudaTensor>; 2],
    ) -> [Option<CudaTensor>; 2] {
        let [dx, dw, _] = self.cuda().backward(&saved, &grad, false, grad_accum);
        [needs[0].then_some(dx), needs[1].then_some(dw)]
    }
}

impl RmsNorm {
    fn cuda(&self) -> Norm {
        Norm { centred: false, eps: self.eps }
    }

    /// mean(x²) + eps.
    fn square(&self, x: &[f32]) -> f32 {
        math::dot(x, x) / x.len() as f32 + self.eps
    }

    /// With x̂ = x / r the normalised row and g = dy · weight: dx = (g − x̂ · mean(g · x̂)) / r,
    /// dweight += dy · x̂.
    fn backward_row(&self, w: &[f32], x: &[f32], dy: &[f32], dx: &mut [f32], dw: &mut [f32]) {
        let width = w.len();
        let (x, dy, dx, dw) = (&x[..width], &dy[..width], &mut dx[..width], &mut dw[..width]);
        let square = self.square(x);
        let root = square.sqrt();
        for i in 0..width {
            dx[i] = dy[i] * w[i];
            dw[i] += dy[i] * (x[i] / root);
        }
        let slope = math::dot(x, dx) / (square * width as f32);
        for i in 0..width {
            dx[i] = (dx[i] - x[i] * slope) / root;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::support::{assert_nan_shows, assert_threads_agree, assert_views_agree};
    use crate::ops::support::{output_and_gradient, strides, wave};
    use crate::testing::{Case, Oracle, check};

    const EPS: f32 = 1e-6;

    /// RMS norm by its definition.
    fn oracle(inputs: &[Oracle]) -> Oracle {
        let [x, weight] = inputs else { panic!() };
        let width = weight.data.len();
        let rows = x.data.chunks_exact(width).flat_map(|row| {
            let square = row.iter().map(|x| x * x).sum::<f64>() / width as f64;
            let root = (square + f64::from(EPS)).sqrt();
            (0..width).map(|i| row[i] / root * weight.data[i]).collect::<Vec<_>>()
        });
        Oracle::new(&x.shape, rows.collect())
    }

    #[test]
    fn agrees_with_the_oracle_and_its_gradients() {
        let shapes: [&[usize]; 5] = [&[7], &[1, 1, 9], &[3, 5, 33], &[2, 3, 65, 32], &[101, 257]];
        for shape in shapes {
            let width = [shape[shape.len() - 1]];
            check(Case::new(RmsNorm { eps: EPS }, &[shape, &width]), oracle);
        }
    }

    #[test]
    fn a_view_gives_what_its_copy_gives_and_keeps_its_order() {
        let norm = |x| rms_norm(x, wave([8], 1.0), EPS);
        let view = || wave([2, 5, 3, 8], 0.0).swap_dims(1, 2);
        assert_views_agree(view(), norm);
        assert_eq!(strides(&norm(view())), strides(&view()));
        // Queries out of a joint projection, and memory whose rows are not whole.
        assert_views_agree(wave([2, 5, 3, 24], 0.0).narrow(3, 8, 8).swap_dims(1, 2), norm);
        assert_views_agree(wave([2, 3, 8, 5], 0.0).swap_dims(2, 3), norm);
    }

    #[test]
    fn a_nan_shows() {
        assert_nan_shows([3, 9], |x| rms_norm(x, wave([9], 1.0), EPS));
    }

    #[test]
    fn results_do_not_depend_on_the_number_of_threads() {
        assert_threads_agree(|| {
            // The gradient of the weight is the sum over tasks.
            let norm = |w| rms_norm(wave([3, 200, 64], 0.0), w, EPS);
            output_and_gradient(wave([64], 1.0), &norm).concat()
        });
    }

    mod cuda {
        use super::*;
        use crate::ops::support::gpu::{assert_nan_shows, assert_views_agree, strides, wave};
        use crate::testing::check_on;

        #[test]
        #[ignore = "needs a GPU"]
        fn agrees_with_the_oracle_and_its_gradients() {
            let shapes: [&[usize]; 9] = [
                &[7],
                &[1, 1, 9],
                &[3, 5, 33],
                &[2, 3, 65, 32],
                &[101, 257],
                &[2, 4, 300, 128],
                &[66_000, 4],
                &[4, 2049],
                &[3, 4096],
            ];
            for shape in shapes {
                let width = [shape[shape.len() - 1]];
                let case = || Case::new(RmsNorm { eps: EPS }, &[shape, &width]);
                check_on::<crate::Cuda, _, 2>(case(), oracle);
                check_on::<crate::Cuda, _, 2>(case().bf16(&[0]).parameters(&[1]), oracle);
            }
        }

        #[test]
        #[ignore = "needs a GPU"]
        fn a_view_gives_what_its_copy_gives_and_keeps_its_order() {
            let norm = |x: Tensor<_, 4>| rms_norm(x.clone(), wave([x.dims()[3]], 1.0), EPS);
            let view = || wave([2, 5, 3, 8], 0.0).swap_dims(1, 2);
            assert_views_agree(view(), norm);
            assert_eq!(strides(&norm(view())), strides(&view()));
            // Queries out of a joint projection, and memory whose rows are not whole.
            let joint = || wave([2, 5, 3, 384], 0.0).narrow(3, 128, 128).swap_dims(1, 2);
            assert_views_agree(joint(), norm);
            assert_views_agree(wave([2, 3, 8, 5], 0.0).swap_dims(2, 3), norm);
            // Rows in another order than those of the copy that is made of them.
            assert_views_agree(wave([2, 8, 5, 3], 0.0).swap_dims(1, 3), norm);
            let unaligned = wave([2, 5, 3, 385], 0.0).narrow(3, 128, 128).swap_dims(1, 2);
            assert_views_agree(unaligned, norm);
        }

        #[test]
        #[ignore = "needs a GPU"]
        fn a_nan_shows() {
            assert_nan_shows([3, 9], |x| rms_norm(x, wave([9], 1.0), EPS));
        }
    }
}
