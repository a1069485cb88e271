//! The exchange of equal blocks between ranks, each of which has a part of the same rows.

use std::fmt::Debug;
use std::sync::Arc;

use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{DType, FloatDType, Tensor};
use burn_flex::FlexTensor;

use crate::backend::{Forward, Op, OpBackend, primitive, tensor};
use crate::cuda::CudaTensor;
use crate::device::DeviceKind;

/// One of several ranks that exchange tensors. All call the same functions in the same order, with tensors of equal
/// shapes and types.
///
/// An exchange cannot fail: a rank whose connection is lost keeps the error for its caller to ask for, and returns the
/// blocks that it was given.
pub trait Peers: Debug + Send + Sync {
    /// This rank, from 0.
    fn rank(&self) -> usize;

    /// How many ranks there are.
    fn size(&self) -> usize;

    /// [`all_to_all`] on the CPU.
    fn all_to_all_cpu(&self, x: FlexTensor) -> FlexTensor;

    /// [`all_to_all`] on CUDA.
    fn all_to_all_cuda(&self, x: CudaTensor) -> CudaTensor;
}

/// Sends block n of `x` to rank n. Block n of the result, which has the shape and type of `x`, is what rank n sent
/// here. It is its own transpose, so gradients take the same way.
///
/// - `x`: `[peers.size(), …]`
///
/// # Panics
/// When the first dimension has another size.
pub fn all_to_all<B: OpBackend, const D: usize>(
    x: Tensor<B, D>,
    peers: &Arc<dyn Peers>,
) -> Tensor<B, D> {
    assert_eq!(x.dims()[0], peers.size(), "a block for each rank");
    let dtype = x.dtype();
    // The CPU's kernels are for f32.
    let cast = B::device_kind() == DeviceKind::Cpu && dtype != DType::F32;
    let x = if cast { x.cast(FloatDType::F32) } else { x };
    let op = AllToAll { peers: Arc::clone(peers) };
    let y = tensor::<B, D>(B::run(&op, [primitive(x)], vec![]));
    if cast { y.cast(dtype) } else { y }
}

/// The operation of [`all_to_all`].
#[derive(Clone, Debug)]
pub struct AllToAll {
    /// The ranks.
    pub peers: Arc<dyn Peers>,
}

impl Op<1> for AllToAll {
    // What other ranks have cannot be computed here.
    const PART_OF_REFERENCES: bool = true;

    fn reference<B: OpBackend>(
        &self,
        [x]: [FloatTensor<B>; 1],
        _ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        unreachable!("ranks exchange tensors of CPUs and GPUs, not {x:?}")
    }

    fn cpu_forward(
        &self,
        [x]: &[FlexTensor; 1],
        _ints: &[FlexTensor],
        _needs: [bool; 1],
    ) -> Option<Forward<FlexTensor>> {
        Some(Forward { output: self.peers.all_to_all_cpu(x.clone()), saved: vec![] })
    }

    fn cpu_backward(
        &self,
        _saved: Vec<FlexTensor>,
        _ints: &[FlexTensor],
        grad: FlexTensor,
        _needs: [bool; 1],
    ) -> [Option<FlexTensor>; 1] {
        [Some(self.peers.all_to_all_cpu(grad))]
    }

    fn cuda_forward(
        &self,
        [x]: &[CudaTensor; 1],
        _ints: &[CudaTensor],
        _needs: [bool; 1],
    ) -> Option<Forward<CudaTensor>> {
        Some(Forward { output: self.peers.all_to_all_cuda(x.clone()), saved: vec![] })
    }

    fn cuda_backward(
        &self,
        _saved: Vec<CudaTensor>,
        _ints: &[CudaTensor],
        grad: CudaTensor,
        _needs: [bool; 1],
    ) -> [Option<CudaTensor>; 1] {
        [Some(self.peers.all_to_all_cuda(grad))]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::backend::{Autodiff, Flex};
    use burn::tensor::ops::FloatTensorOps;

    /// Two ranks of equal data: this one gets block n of rank n, which is its own, and is rank 1 of the two.
    #[derive(Debug)]
    struct Twins;

    impl Peers for Twins {
        fn rank(&self) -> usize {
            1
        }

        fn size(&self) -> usize {
            2
        }

        fn all_to_all_cpu(&self, x: FlexTensor) -> FlexTensor {
            // Both send their block 1 here.
            let block = tensor::<Flex, 2>(x).narrow(0, 1, 1);
            Flex::float_cat(vec![primitive(block.clone()), primitive(block)], 0)
        }

        fn all_to_all_cuda(&self, _x: CudaTensor) -> CudaTensor {
            unreachable!("a test on the CPU")
        }
    }

    #[test]
    fn outputs_and_gradients_are_exchanged_in_any_type() {
        type Ad = Autodiff<Flex>;
        let device = Default::default();
        let peers: Arc<dyn Peers> = Arc::new(Twins);
        for dtype in [FloatDType::F32, FloatDType::BF16] {
            let x = Tensor::<Ad, 2>::from_floats([[1.0, 2.0], [3.0, 4.0]], &device).require_grad();
            let y = all_to_all(x.clone().cast(dtype), &peers);
            assert_eq!(y.dtype(), dtype.into());
            let y = y.cast(FloatDType::F32);
            let weights = Tensor::<Ad, 2>::from_floats([[0.5, 1.0], [2.0, 4.0]], &device);
            let grads = (y.clone() * weights).sum().backward();
            let numbers = |x: Tensor<Flex, 2>| x.into_data().to_vec::<f32>().unwrap();
            assert_eq!(numbers(y.inner()), [3.0, 4.0, 3.0, 4.0]);
            assert_eq!(numbers(x.grad(&grads).unwrap()), [2.0, 4.0, 2.0, 4.0]);
        }
    }
}
