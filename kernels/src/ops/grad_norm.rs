//! Σ x², for the global gradient norm.

use burn::tensor::ops::FloatTensor;
use burn_flex::FlexTensor;
use rayon::prelude::*;

use crate::backend::{NoGradOp, OpBackend};
use crate::cpu::{contiguous, from_vec, math, slice};
use crate::cuda::CudaTensor;
use crate::ops::cuda::sums;

/// f32 tensors of shape `[1]` that add up to Σ x² over all of `tensors`: one a tensor on the CPU, so
/// that they can be added up in f64; on a GPU a single one, which is one number to read back. The
/// same bits at every call, whatever the number of threads. Not differentiable.
pub fn square_sums<B: OpBackend>(tensors: Vec<FloatTensor<B>>) -> Vec<FloatTensor<B>> {
    B::run_no_grad(&SquareSums, tensors)
}

/// The operation of [`square_sums`].
#[derive(Clone, Copy, Debug)]
pub struct SquareSums;

impl NoGradOp for SquareSums {
    type Inputs<T> = Vec<T>;
    type Outputs<T> = Vec<T>;

    fn reference<B: OpBackend>(&self, tensors: Vec<FloatTensor<B>>) -> Vec<FloatTensor<B>> {
        let square_sum = |x: FloatTensor<B>| {
            let x = B::to_f32(x);
            B::float_sum(B::float_mul(x.clone(), x))
        };
        tensors.into_iter().map(square_sum).collect()
    }

    fn cpu(&self, tensors: Vec<FlexTensor>) -> Vec<FlexTensor> {
        tensors.iter().map(square_sum).collect()
    }

    fn cuda(&self, tensors: Vec<CudaTensor>) -> Vec<CudaTensor> {
        if tensors.is_empty() { vec![] } else { vec![sums::squares(&tensors)] }
    }
}

/// The sum on the CPU: chunks of fixed size, joined in order.
fn square_sum(x: &FlexTensor) -> FlexTensor {
    let x = contiguous(x);
    let chunks: Vec<f32> = slice(&x).par_chunks(1 << 14).map(|c| math::dot(c, c)).collect();
    let total: f64 = chunks.iter().map(|&c| f64::from(c)).sum();
    from_vec(vec![total as f32], &[1])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{primitive, tensor};
    use burn::backend::Flex;
    use burn::tensor::Tensor;

    #[test]
    fn sums_squares_like_f64() {
        for n in [1, 17, 100_003] {
            let x: Vec<f32> = (0..n).map(|i| (i as f32 * 0.37).sin()).collect();
            let want: f64 = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
            let x = vec![primitive(Tensor::<Flex, 1>::from_floats(&x[..], &Default::default()))];
            for got in [SquareSums.cpu(x.clone()), SquareSums.reference::<Flex>(x)] {
                assert_eq!(got.len(), 1);
                let got = f64::from(slice(&got[0])[0]);
                assert!((got - want).abs() <= 1e-6 * want, "{got} for {want}");
            }
        }
    }

    mod cuda {
        use burn::tensor::backend::AutodiffBackend;

        use super::*;
        use crate::ops::support::gpu::{Gpu, floats, values};

        /// The one sum over all tensors.
        fn sum_over(tensors: Vec<FloatTensor<Gpu>>) -> f32 {
            let sums = square_sums::<crate::Cuda>(tensors.into_iter().map(Gpu::inner).collect());
            let [sum] = sums.try_into().expect("one sum");
            values(Tensor::<Gpu, 1>::from_inner(tensor(sum)))[0]
        }

        fn wave(n: usize) -> Vec<f32> {
            (0..n).map(|i| (i as f32 * 0.37).sin()).collect()
        }

        #[test]
        #[ignore = "needs a GPU"]
        fn sums_squares_like_f64() {
            let mut total = 0.0;
            let mut all = vec![];
            for n in [1, 3, 17, 4_099, 100_003, 5_000_001] {
                let x = floats(wave(n), [n]);
                let want: f64 = wave(n).iter().map(|&x| f64::from(x) * f64::from(x)).sum();
                let got = f64::from(sum_over(vec![primitive(x.clone())]));
                assert!((got - want).abs() <= 1e-6 * want, "{got} for {want}, {n} elements");
                total += want;
                all.push(primitive(x));
            }
            let got = || sum_over(all.clone());
            assert!((f64::from(got()) - total).abs() <= 1e-6 * total, "{} for {total}", got());
            assert_eq!(got().to_bits(), got().to_bits());
        }
    }
}
