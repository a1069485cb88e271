//! The MLP of a block with GELU, added to the residual stream.

mod cuda;

use burn::tensor::Tensor;
use burn::tensor::ops::{FloatTensor, IntTensor};

use crate::backend::{Forward, Op, OpBackend, primitive, tensor};
use crate::cuda::CudaTensor;
use crate::ops::activation::Activation;
use crate::ops::linear::{Linear, LinearAdd};

/// y = r + GELU(x Uᵀ) Dᵀ, GELU in its tanh form. Where the device can, GELU and the sum are
/// parts of the products.
///
/// - `x`, `residual`: `[batch, seq_len, width]`
/// - `up`: U, `[hidden, width]`
/// - `down`: D, `[width, hidden]`
///
/// Returns `[batch, seq_len, width]`.
///
/// # Panics
/// When the sizes do not fit.
pub fn gelu_mlp<B: OpBackend>(
    x: Tensor<B, 3>,
    up: Tensor<B, 2>,
    down: Tensor<B, 2>,
    residual: Tensor<B, 3>,
) -> Tensor<B, 3> {
    let inputs = [primitive(x), primitive(up), primitive(down), primitive(residual)];
    tensor(B::run(&GeluMlp, inputs, vec![]))
}

/// The operation of [`gelu_mlp`]: inputs x, U, D and r.
#[derive(Clone, Debug)]
pub struct GeluMlp;

impl Op<4> for GeluMlp {
    fn reference<B: OpBackend>(
        &self,
        [x, up, down, residual]: [FloatTensor<B>; 4],
        _ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        let hidden = B::run(&Activation::Gelu, [B::run(&Linear, [x, up], vec![])], vec![]);
        B::run(&LinearAdd, [hidden, down, residual], vec![])
    }

    fn cuda_forward(
        &self,
        inputs: &[CudaTensor; 4],
        _ints: &[CudaTensor],
        _needs: [bool; 4],
    ) -> Option<Forward<CudaTensor>> {
        cuda::forward(inputs)
    }

    fn cuda_backward_accumulating(
        &self,
        saved: Vec<CudaTensor>,
        _ints: &[CudaTensor],
        grad: CudaTensor,
        needs: [bool; 4],
        grad_accum: &mut [Option<CudaTensor>; 4],
    ) -> [Option<CudaTensor>; 4] {
        cuda::backward(saved, grad, needs, grad_accum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Case, Oracle, check, check_on};

    fn oracle(inputs: &[Oracle]) -> Oracle {
        let [x, up, down, residual] = inputs else { panic!() };
        let [hidden, width] = up.shape[..] else { panic!() };
        let gelu = |x: f64| {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
            x / 2.0 * (1.0 + u.tanh())
        };
        let mut y = residual.clone();
        for (x, y) in x.data.chunks_exact(width).zip(y.data.chunks_exact_mut(width)) {
            for h in 0..hidden {
                let a = gelu((0..width).map(|i| x[i] * up.at(&[h, i])).sum());
                for (o, y) in y.iter_mut().enumerate() {
                    *y += a * down.at(&[o, h]);
                }
            }
        }
        y
    }

    fn case(batch: usize, seq_len: usize, width: usize, hidden: usize) -> Case<GeluMlp, 4> {
        let x = [batch, seq_len, width];
        Case::new(GeluMlp, &[&x, &[hidden, width], &[width, hidden], &x])
            .uniform(1, -0.5..0.5)
            .uniform(2, -0.5..0.5)
    }

    #[test]
    fn agrees_with_the_oracle_and_its_gradients() {
        check(case(2, 7, 9, 20), oracle);
        check(case(1, 33, 16, 64), oracle);
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn cuda_agrees_with_the_oracle_and_its_gradients() {
        for (batch, seq_len, width, hidden) in [(2, 7, 9, 20), (1, 33, 16, 64), (2, 50, 64, 256)] {
            check_on::<crate::Cuda, _, 4>(case(batch, seq_len, width, hidden), oracle);
            // The hidden layer and its gradient, before and after GELU, are rounded to bf16: results
            // are sums over them, and no sum of independent errors is five times their mean.
            let rounded = case(batch, seq_len, width, hidden).bf16(&[0, 1, 2, 3]);
            let rounded = rounded.parameters(&[1, 2]).inside(10.0, 2.0);
            check_on::<crate::Cuda, _, 4>(rounded, oracle);
        }
    }
}
