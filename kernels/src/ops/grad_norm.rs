//! Σ x², for the global gradient norm.

use burn::tensor::Tensor;
use burn::tensor::ops::FloatTensor;
use burn_flex::FlexTensor;
use rayon::prelude::*;

use crate::backend::{OpBackend, primitive, tensor};
use crate::cpu::{contiguous, from_vec, math, slice};

/// Σ x², shape `[1]`. The same bits at every call, whatever the number of threads.
pub fn square_sum<B: OpBackend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, 1> {
    tensor(B::square_sum(primitive(x)))
}

/// Σ x² over all tensors together, shape `[1]`: a model's squared gradient norm, in one number to
/// read back. The same bits at every call.
///
/// # Panics
/// When there are no tensors.
pub fn square_sums<B: OpBackend>(tensors: Vec<FloatTensor<B>>) -> Tensor<B, 1> {
    assert!(!tensors.is_empty(), "square sums of no tensors");
    tensor(B::square_sums(tensors))
}

/// The sum over all tensors, one after the other.
pub(crate) fn one_by_one<B: OpBackend>(tensors: Vec<FloatTensor<B>>) -> FloatTensor<B> {
    let sums = tensors.into_iter().map(|x| B::square_sum(x));
    sums.reduce(|a, b| B::float_add(a, b)).expect("at least one tensor")
}

/// The sum in plain tensor operations.
pub(crate) fn reference<B: OpBackend>(x: FloatTensor<B>) -> FloatTensor<B> {
    B::float_sum(B::float_mul(x.clone(), x))
}

/// The sum on the CPU: chunks of fixed size, joined in order.
pub(crate) fn cpu(x: FlexTensor) -> FlexTensor {
    let x = contiguous(&x);
    let chunks: Vec<f32> = slice(&x).par_chunks(1 << 14).map(|c| math::dot(c, c)).collect();
    let total: f64 = chunks.iter().map(|&c| f64::from(c)).sum();
    from_vec(vec![total as f32], &[1])
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::backend::Flex;

    #[test]
    fn sums_squares_like_f64() {
        for n in [1, 17, 100_003] {
            let x: Vec<f32> = (0..n).map(|i| (i as f32 * 0.37).sin()).collect();
            let want: f64 = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
            let x = Tensor::<Flex, 1>::from_floats(&x[..], &Default::default());
            for got in [cpu(primitive(x.clone())), reference::<Flex>(primitive(x))] {
                let got = f64::from(slice(&got)[0]);
                assert!((got - want).abs() <= 1e-6 * want, "{got} for {want}");
            }
        }
    }

    mod cuda {
        use super::*;
        use crate::ops::support::gpu::{Gpu, floats, values};

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
                let got = f64::from(values(square_sum(x.clone()))[0]);
                assert!((got - want).abs() <= 1e-6 * want, "{got} for {want}, {n} elements");
                total += want;
                all.push(primitive(x));
            }
            let got = || values(square_sums::<Gpu>(all.clone()))[0];
            assert!((f64::from(got()) - total).abs() <= 1e-6 * total, "{} for {total}", got());
            assert_eq!(got().to_bits(), got().to_bits());
        }
    }
}
