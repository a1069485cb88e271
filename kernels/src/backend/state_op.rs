//! Operations whose past is a state.

use burn::tensor::ops::{FloatTensor, IntTensor};
use burn_flex::FlexTensor;

use super::{Forward, Op, OpBackend};
use crate::cuda::CudaTensor;

/// An operation over sequences whose past is a state, and which can go on from a given one. [`Op`] starts from 0.
///
/// States are in f32 and have no gradient: the one before the first token is a constant, and nothing flows back through
/// the one after the last. So both have the same backward pass, from what either forward pass saved.
pub trait StateOp<const N: usize>: Op<N> {
    /// As [`Op::reference`], from the state `before` the first token; also the state after the last.
    fn reference_from<B: OpBackend>(
        &self,
        inputs: [FloatTensor<B>; N],
        ints: &[IntTensor<B>],
        before: FloatTensor<B>,
    ) -> [FloatTensor<B>; 2];

    /// As [`Op::cpu_forward`], from the state `before` the first token; also the state after the last.
    fn cpu_forward_from(
        &self,
        inputs: &[FlexTensor; N],
        ints: &[FlexTensor],
        before: &FlexTensor,
        needs: [bool; N],
    ) -> Option<(Forward<FlexTensor>, FlexTensor)> {
        let _ = (inputs, ints, before, needs);
        None
    }

    /// The CUDA kernel, as [`StateOp::cpu_forward_from`].
    fn cuda_forward_from(
        &self,
        inputs: &[CudaTensor; N],
        ints: &[CudaTensor],
        before: &CudaTensor,
        needs: [bool; N],
    ) -> Option<(Forward<CudaTensor>, CudaTensor)> {
        let _ = (inputs, ints, before, needs);
        None
    }
}
