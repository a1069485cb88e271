//! Σ x², for the global gradient norm.

mod cuda;
mod kernel;

use burn::tensor::ops::FloatTensor;
use burn_flex::FlexTensor;
use rayon::prelude::*;

use crate::backend::{NoGradOp, OpBackend};
use crate::cpu::{contiguous, from_vec, math, slice};
use crate::cuda::CudaTensor;

/// f32 tensors of shape `[1]` that add up to Σ x² over all of `tensors`: on the CPU one per tensor, so
/// that they can be added in f64; on a GPU a single one, to read back one number. The bits do not depend on
/// the number of threads. Not differentiable.
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
        if tensors.is_empty() { vec![] } else { vec![cuda::squares(&tensors)] }
    }
}

/// The sum on the CPU: over chunks of fixed size, added in order.
fn square_sum(x: &FlexTensor) -> FlexTensor {
    let x = contiguous(x);
    let chunks: Vec<f32> = slice(&x).par_chunks(1 << 14).map(|c| math::dot(c, c)).collect();
    let total: f64 = chunks.iter().map(|&c| f64::from(c)).sum();
    from_vec(vec![total as f32], &[1])
}

#[cfg(test)]
mod tests;
