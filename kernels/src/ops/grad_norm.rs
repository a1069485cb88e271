//! Σ x² of one tensor, for the global gradient norm.

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
}
