//! Layer normalisation over the last dimension.
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Tensor, TensorMetadata};
use burn_flex::FlexTensor;
use rayon::prelude::*;

use crate::backend::{Forward, Op, OpBackend, primitive, tensor};
use crate::cpu::{buffer, contiguous, dims, from_vec, math, rows_per_task, slice, sum_in_order};
use crate::cuda::CudaTensor;
use crate::ops::bias;
use crate::ops::cuda::norm::Norm;

/// Elements of a parallel task.
const TASK: usize = 1 << 14;

/// y = (x − mean(x)) / √(var(x) + eps) · weight + bias, with mean and variance over the last
/// dimension (Ba et al., 2016, equation 4). The variance is the biased one.
///
/// - `x`: `[…, width]`; on CUDA, a view with strides is read as it lies
/// - `weight`, `bias`: `[width]`
///
/// Returns the shape of `x`; on CUDA, in the memory order of `x`.
///
/// # Panics
/// When the sizes do not fit.
pub fn layer_norm<B: OpBackend, const D: usize>(
    x: Tensor<B, D>,
    weight: Tensor<B, 1>,
    bias: Option<Tensor<B, 1>>,
    eps: f32,
) -> Tensor<B, D> {
    let op = LayerNorm { eps };
    let (x, weight) = (primitive(x), primitive(weight));
    tensor(match bias {
        None => B::run(&op, [x, weight], vec![]),
        Some(bias) => B::run(&op, [x, weight, primitive(bias)], vec![]),
    })
}

/// The operation: inputs x, weight and, with three inputs, bias.
#[derive(Clone, Debug)]
pub struct LayerNorm {
    /// Added to the variance.
    pub eps: f32,
}

impl LayerNorm {
    /// `[mean, var + eps]` of a row, in two passes.
    fn statistics(&self, x: &[f32]) -> [f32; 2] {
        let scale = 1.0 / x.len() as f32;
        let mean = math::sum(x) * scale;
        let variance = math::square_deviation(x, mean) * scale;
        [mean, variance + self.eps]
    }

    fn forward(
        &self,
        x: &FlexTensor,
        weight: &FlexTensor,
        bias: Option<&FlexTensor>,
    ) -> Forward<FlexTensor> {
        let (x, weight, bias) = (contiguous(x), contiguous(weight), bias.map(contiguous));
        let (xs, w) = (slice(&x), slice(&weight));
        let width = width(&x, &weight);
        let zeros = vec![0.0; width];
        let b = bias.as_ref().map_or(&zeros[..], slice);
        assert_eq!(b.len(), width, "width of layer norm's bias and of x");
        let mut y = buffer(xs.len());
        let task = width * rows_per_task(width, TASK);
        y.par_chunks_mut(task).zip(xs.par_chunks(task)).for_each(|(y, x)| {
            for (y, x) in y.chunks_exact_mut(width).zip(x.chunks_exact(width)) {
                let [mean, variance] = self.statistics(x);
                // Divided by: the root's inverse would be rounded once more.
                let root = variance.sqrt();
                for (((y, x), w), b) in y.iter_mut().zip(x).zip(w).zip(b) {
                    *y = math::mul_add((x - mean) / root, *w, *b);
                }
            }
        });
        Forward { output: from_vec(y, &dims(&x)), saved: vec![x, weight] }
    }

    fn cuda(&self) -> Norm {
        Norm { centred: true, eps: self.eps }
    }

    /// With x̂ the normalised row and g = dy · weight: dx = (g − mean(g) − x̂ · mean(g · x̂)) / σ,
    /// dweight = Σ dy · x̂, dbias = Σ dy.
    fn backward(
        &self,
        saved: &[FlexTensor],
        grad: &FlexTensor,
        needs: [bool; 3],
    ) -> [Option<FlexTensor>; 3] {
        let [x, weight] = saved else { unreachable!("layer norm saves two tensors") };
        let grad = contiguous(grad);
        let (width, w) = (width(x, weight), slice(weight));
        let mut dx = buffer(slice(x).len());
        let task = width * rows_per_task(width, TASK);
        let parts: Vec<_> = dx
            .par_chunks_mut(task)
            .zip(slice(x).par_chunks(task))
            .zip(slice(&grad).par_chunks(task))
            .map(|((dx, x), dy)| {
                let (mut dw, mut db) = (vec![0.0; width], vec![0.0; width]);
                for ((dx, x), dy) in dx
                    .chunks_exact_mut(width)
                    .zip(x.chunks_exact(width))
                    .zip(dy.chunks_exact(width))
                {
                    self.backward_row(w, x, dy, dx, &mut dw);
                    math::add_to(&mut db, dy);
                }
                (dw, db)
            })
            .collect();
        let (dw, db): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
        let vector = |parts: &[Vec<f32>]| from_vec(sum_in_order(parts), &[width]);
        [
            needs[0].then(|| from_vec(dx, &dims(x))),
            needs[1].then(|| vector(&dw)),
            needs[2].then(|| vector(&db)),
        ]
    }

    fn backward_row(&self, w: &[f32], x: &[f32], dy: &[f32], dx: &mut [f32], dw: &mut [f32]) {
        let width = w.len();
        let (x, dy, dx, dw) = (&x[..width], &dy[..width], &mut dx[..width], &mut dw[..width]);
        let [mean, variance] = self.statistics(x);
        let root = variance.sqrt();
        for i in 0..width {
            dx[i] = dy[i] * w[i];
            dw[i] += dy[i] * ((x[i] - mean) / root);
        }
        let scale = 1.0 / width as f32;
        let shift = math::sum(dx) * scale;
        let slope = math::dot_shifted(x, mean, dx) / (variance * width as f32);
        for i in 0..width {
            dx[i] = (dx[i] - shift - (x[i] - mean) * slope) / root;
        }
    }
}

/// The size of the last dimension of `x`, which is the weight's.
fn width(x: &FlexTensor, weight: &FlexTensor) -> usize {
    let width = dims(weight)[0];
    assert_eq!(dims(x).last(), Some(&width), "width of x and of layer norm's weight");
    width
}

impl<const N: usize> Op<N> for LayerNorm {
    fn reference<B: OpBackend>(
        &self,
        inputs: [FloatTensor<B>; N],
        _ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        let (x, weight, bias) = bias::inputs(&inputs);
        let shape = x.shape();
        let width = shape[shape.num_dims() - 1];
        let rows = shape.num_elements() / width;
        let x = tensor::<B, 2>(B::float_reshape(x.clone(), [rows, width].into()));
        let centred = x.clone() - x.mean_dim(1);
        let variance = (centred.clone() * centred.clone()).mean_dim(1);
        let weight = tensor::<B, 1>(weight.clone());
        let y = centred / (variance + self.eps).sqrt() * weight.unsqueeze();
        let y = match bias {
            None => y,
            Some(bias) => y + tensor::<B, 1>(bias.clone()).unsqueeze(),
        };
        B::float_reshape(primitive(y), shape)
    }

    fn cpu_forward(
        &self,
        inputs: &[FlexTensor; N],
        _ints: &[FlexTensor],
        _needs: [bool; N],
    ) -> Option<Forward<FlexTensor>> {
        let (x, weight, bias) = bias::inputs(inputs);
        Some(self.forward(x, weight, bias))
    }

    fn cpu_backward(
        &self,
        saved: Vec<FlexTensor>,
        _ints: &[FlexTensor],
        grad: FlexTensor,
        needs: [bool; N],
    ) -> [Option<FlexTensor>; N] {
        bias::gradients(self.backward(&saved, &grad, bias::needs(needs)))
    }

    fn cuda_forward(
        &self,
        inputs: &[CudaTensor; N],
        _ints: &[CudaTensor],
        _needs: [bool; N],
    ) -> Option<Forward<CudaTensor>> {
        let (x, weight, bias) = bias::inputs(inputs);
        self.cuda().forward(x, weight, bias)
    }

    fn cuda_backward_accumulating(
        &self,
        saved: Vec<CudaTensor>,
        _ints: &[CudaTensor],
        grad: CudaTensor,
        needs: [bool; N],
        grad_accum: &mut [Option<CudaTensor>; N],
    ) -> [Option<CudaTensor>; N] {
        let gradients = self.cuda().backward(&saved, &grad, N == 3, &mut grad_accum[0]);
        let needs = bias::needs(needs);
        let mut wanted = gradients.into_iter().zip(needs).map(|(dx, needs)| needs.then_some(dx));
        std::array::from_fn(|_| wanted.next().flatten())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::support::{assert_nan_shows, assert_threads_agree, assert_views_agree};
    use crate::ops::support::{output_and_gradient, wave};
    use crate::testing::{Case, Oracle, check};

    const EPS: f32 = 1e-5;

    /// Layer norm by its definition.
    fn oracle(inputs: &[Oracle]) -> Oracle {
        let (x, weight) = (&inputs[0], &inputs[1]);
        let width = weight.data.len();
        let rows = x.data.chunks_exact(width).flat_map(|row| {
            let mean = row.iter().sum::<f64>() / width as f64;
            let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / width as f64;
            let root = (variance + f64::from(EPS)).sqrt();
            let bias = |i: usize| inputs.get(2).map_or(0.0, |bias| bias.data[i]);
            (0..width)
                .map(|i| (row[i] - mean) / root * weight.data[i] + bias(i))
                .collect::<Vec<_>>()
        });
        Oracle::new(&x.shape, rows.collect())
    }

    #[test]
    fn agrees_with_the_oracle_and_its_gradients() {
        let op = LayerNorm { eps: EPS };
        for (shape, range) in [
            (&[1, 1, 7][..], -1.7..1.7),
            (&[3, 5, 33], -1.7..1.7),
            (&[2, 65, 192], 4.0..7.0),
            (&[101, 257], -1.7..1.7),
        ] {
            let width = [shape[shape.len() - 1]];
            let two = Case::<_, 2>::new(op.clone(), &[shape, &width]);
            check(two.uniform(0, range.clone()), oracle);
            let three = Case::<_, 3>::new(op.clone(), &[shape, &width, &width]);
            check(three.uniform(0, range), oracle);
        }
    }

    #[test]
    fn a_view_gives_what_its_copy_gives() {
        let norm = |x| layer_norm(x, wave([7], 1.0), Some(wave([7], 2.0)), EPS);
        assert_views_agree(wave([2, 5, 3, 7], 0.0).swap_dims(1, 2), norm);
        assert_views_agree(wave([2, 5, 7, 3], 0.0).swap_dims(2, 3), norm);
    }

    #[test]
    fn a_nan_shows() {
        assert_nan_shows([3, 9], |x| layer_norm(x, wave([9], 1.0), None, EPS));
    }

    #[test]
    fn results_do_not_depend_on_the_number_of_threads() {
        assert_threads_agree(|| {
            // The gradient of the weight is the sum over tasks.
            let norm = |w| layer_norm(wave([3, 200, 64], 0.0), w, None, EPS);
            output_and_gradient(wave([64], 1.0), &norm).concat()
        });
    }

    mod cuda {
        use super::*;
        use crate::ops::linear::{linear, linear_add};
        use crate::ops::support::gpu::{
            assert_nan_shows, assert_views_agree, output_and_gradient, strides, values, wave,
        };
        use crate::testing::check_on;

        /// The residual's gradient is there when the norm's own is added to it.
        #[test]
        #[ignore = "needs a GPU"]
        fn the_gradient_of_a_residual_block_is_the_sum_over_its_two_paths() {
            // More rows than blocks, and a last block whose threads have too few.
            for shape in [[3, 5, 32], [1, 1001, 64], [2, 700, 768]] {
                let width = shape[2];
                let weight = || wave([width, width], 0.1) * 0.05;
                let norm = |x| layer_norm(x, wave([width], 1.0), None, EPS);
                let plain = |x| linear(norm(x), weight(), None);
                let block = |x: Tensor<_, 3>| linear_add(norm(x.clone()), weight(), x);
                let [_, dx] = output_and_gradient(wave(shape, 0.0), &plain);
                let [_, sum] = output_and_gradient(wave(shape, 0.0), &block);
                let upstream = values(wave(shape, 0.3));
                for ((dx, upstream), sum) in dx.iter().zip(upstream).zip(&sum) {
                    assert!((dx + upstream - sum).abs() <= 1e-5, "{dx} + {upstream}, {sum}");
                }
            }
        }

        #[test]
        #[ignore = "needs a GPU"]
        fn agrees_with_the_oracle_and_its_gradients() {
            let op = LayerNorm { eps: EPS };
            // Parts of a warp, warps and blocks for a row; odd and even shares; more rows than 2^16.
            for (shape, range) in [
                (&[1, 1, 7][..], -1.7..1.7),
                (&[3, 5, 33], -1.7..1.7),
                (&[2, 65, 192], 4.0..7.0),
                (&[101, 257], -1.7..1.7),
                (&[600, 768], -1.7..1.7),
                (&[70_001, 8], -1.7..1.7),
                (&[5, 1032], -1.7..1.7),
                (&[3, 2049], -1.7..1.7),
                (&[3, 8192], -1.7..1.7),
            ] {
                let width = [shape[shape.len() - 1]];
                let two =
                    || Case::<_, 2>::new(op.clone(), &[shape, &width]).uniform(0, range.clone());
                check_on::<crate::Cuda, _, 2>(two(), oracle);
                check_on::<crate::Cuda, _, 2>(two().bf16(&[0]).parameters(&[1]), oracle);
                let three = || Case::<_, 3>::new(op.clone(), &[shape, &width, &width]);
                let three = || three().uniform(0, range.clone());
                check_on::<crate::Cuda, _, 3>(three(), oracle);
                check_on::<crate::Cuda, _, 3>(three().bf16(&[0]).parameters(&[1, 2]), oracle);
            }
        }

        #[test]
        #[ignore = "needs a GPU"]
        fn a_view_gives_what_its_copy_gives_and_keeps_its_order() {
            let norm = |x| layer_norm(x, wave([8], 1.0), Some(wave([8], 2.0)), EPS);
            let view = || wave([2, 5, 3, 8], 0.0).swap_dims(1, 2);
            assert_views_agree(view(), norm);
            assert_eq!(strides(&norm(view())), strides(&view()));
            assert_views_agree(wave([2, 5, 8, 3], 0.0).swap_dims(2, 3), norm);
            // Rows in another order than those of the copy that is made of them.
            assert_views_agree(wave([2, 8, 5, 3], 0.0).swap_dims(1, 3), norm);
        }

        #[test]
        #[ignore = "needs a GPU"]
        fn a_nan_shows() {
            assert_nan_shows([3, 9], |x| layer_norm(x, wave([9], 1.0), None, EPS));
            assert_nan_shows([3, 2048], |x| layer_norm(x, wave([2048], 1.0), None, EPS));
        }
    }
}
