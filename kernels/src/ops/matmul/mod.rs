//! Matrix products for references and linear layers.

use burn::tensor::Tensor;
use burn::tensor::ops::{FloatTensor, IntTensor};

use crate::backend::{Forward, Op, OpBackend, primitive, tensor};
use crate::cuda::{CudaTensor, blas};

/// The matrix product, in full f32 on f32 tensors. burn's own `Tensor::matmul` computes in TF32 on CUDA,
/// and autotunes for many seconds at each new shape.
pub trait MatMul {
    /// self · other, of `[…, m, k]` and `[…, k, n]`: `[…, m, n]`. Leading sizes of 1 are repeated.
    ///
    /// # Panics
    /// When the sizes do not match.
    fn mm(self, other: Self) -> Self;
}

impl<B: OpBackend, const D: usize> MatMul for Tensor<B, D> {
    fn mm(self, other: Self) -> Self {
        let (mut a, mut b) = (self.dims(), other.dims());
        for at in 0..D - 2 {
            let size = if a[at] == 1 { b[at] } else { a[at] };
            (a[at], b[at]) = (size, size);
        }
        let inputs = [self.expand(a), other.expand(b)].map(primitive);
        tensor(B::run(&Product::<D>, inputs, vec![]))
    }
}

/// The operation, on tensors of `D` dimensions.
#[derive(Clone, Debug)]
struct Product<const D: usize>;

impl<const D: usize> Op<2> for Product<D> {
    const PART_OF_REFERENCES: bool = true;

    #[allow(clippy::disallowed_methods)] // The one place for it.
    fn reference<B: OpBackend>(
        &self,
        [a, b]: [FloatTensor<B>; 2],
        _ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        primitive(tensor::<B, D>(a).matmul(tensor::<B, D>(b)))
    }

    fn cuda_forward(
        &self,
        [a, b]: &[CudaTensor; 2],
        _ints: &[CudaTensor],
        _needs: [bool; 2],
    ) -> Option<Forward<CudaTensor>> {
        let [a, b] = [a.clone(), b.clone()];
        Some(Forward { output: blas::matmul(a.clone(), b.clone()), saved: vec![a, b] })
    }

    fn cuda_backward(
        &self,
        saved: Vec<CudaTensor>,
        _ints: &[CudaTensor],
        grad: CudaTensor,
        needs: [bool; 2],
    ) -> [Option<CudaTensor>; 2] {
        let transposed = |x: &CudaTensor| {
            let mut x = x.clone();
            x.meta.swap(D - 2, D - 1);
            x
        };
        let [a, b] = &saved[..] else { unreachable!("a and b were saved") };
        [
            needs[0].then(|| blas::matmul(grad.clone(), transposed(b))),
            needs[1].then(|| blas::matmul(transposed(a), grad.clone())),
        ]
    }
}

#[cfg(test)]
mod tests;
