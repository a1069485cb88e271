//! The root of a vector-Jacobian product: a backward pass that starts in the middle of a model.

use burn::tensor::Tensor;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn_flex::FlexTensor;

use crate::backend::{Forward, Op, OpBackend, primitive, tensor};
use crate::cpu::from_vec;
use crate::cuda::{CudaTensor, empty};

/// A scalar whose gradient with respect to `y` is exactly `dy`: its backward pass continues from `y` with
/// the upstream gradient `dy`, which has y's shape and type. Its value is meaningless.
///
/// Returns `[1]`.
pub fn vjp_root<B: OpBackend, const D: usize>(y: Tensor<B, D>, dy: Tensor<B, D>) -> Tensor<B, 1> {
    assert_eq!(y.dims(), dy.dims(), "shapes of y and dy");
    tensor(B::run(&VjpRoot, [primitive(y), primitive(dy.detach())], vec![]))
}

/// The operation of [`vjp_root`]: inputs y and dy, which has no gradient.
#[derive(Clone, Debug)]
pub struct VjpRoot;

impl Op<2> for VjpRoot {
    fn reference<B: OpBackend>(
        &self,
        [y, dy]: [FloatTensor<B>; 2],
        _ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        B::float_sum(B::float_mul(y, dy))
    }

    fn cpu_forward(
        &self,
        [_, dy]: &[FlexTensor; 2],
        _ints: &[FlexTensor],
        _needs: [bool; 2],
    ) -> Option<Forward<FlexTensor>> {
        Some(Forward { output: from_vec(vec![0.0], &[1]), saved: vec![dy.clone()] })
    }

    fn cpu_backward(
        &self,
        saved: Vec<FlexTensor>,
        _ints: &[FlexTensor],
        _grad: FlexTensor,
        _needs: [bool; 2],
    ) -> [Option<FlexTensor>; 2] {
        [saved.into_iter().next(), None]
    }

    fn cuda_forward(
        &self,
        [_, dy]: &[CudaTensor; 2],
        _ints: &[CudaTensor],
        _needs: [bool; 2],
    ) -> Option<Forward<CudaTensor>> {
        Some(Forward { output: empty(dy, &[1], dy.dtype), saved: vec![dy.clone()] })
    }

    fn cuda_backward(
        &self,
        saved: Vec<CudaTensor>,
        _ints: &[CudaTensor],
        _grad: CudaTensor,
        _needs: [bool; 2],
    ) -> [Option<CudaTensor>; 2] {
        [saved.into_iter().next(), None]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::backend::{Autodiff, Flex};

    #[test]
    fn the_gradient_is_the_upstream_gradient() {
        type Ad = Autodiff<Flex>;
        let device = Default::default();
        let x = Tensor::<Ad, 2>::from_floats([[1.5, -2.0], [0.3, 7.0]], &device).require_grad();
        let dy = Tensor::<Ad, 2>::from_floats([[0.1, 0.2], [-0.3, 1e-9]], &device);
        let grads = vjp_root(x.clone() * 2.0, dy).backward();
        let got = x.grad(&grads).unwrap().into_data().to_vec::<f32>().unwrap();
        assert_eq!(got, [0.2, 0.4, -0.6, 2e-9]);
    }
}
