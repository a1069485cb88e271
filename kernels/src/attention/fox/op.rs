//! The operation: softmax attention with a learned decay.

use burn::tensor::Tensor;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn_flex::FlexTensor;

use super::cuda;
use crate::attention::softmax::{Softmax, assert_shapes, cpu, reference};
use crate::attention::{DocumentStarts, ExecPath};
use crate::backend::{Forward, Op, OpBackend, primitive, tensor};
use crate::cuda::CudaTensor;

/// The operation's settings.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Forgetting {
    /// Scale, window and pruning; no softcap and no slopes.
    pub core: Softmax,
}

/// Softmax attention with S_ij = scale · q_iᵀk_j + Σ_{s=j+1..i} ℓ_s.
///
/// - q, k, v: as [`softmax`](crate::attention::softmax::softmax) takes them
/// - `log_decay`: ℓ ≤ 0, natural logarithm, f32 `[batch, heads, keys]`
/// - `sinks`: f32 `[heads]`
/// - `documents`: `[batch, keys]`
///
/// Returns `[batch, heads, queries, head_dim]`.
///
/// # Panics
/// When the shapes do not match.
pub(super) fn forgetting<B: OpBackend>(
    op: &Forgetting,
    qkv: [Tensor<B, 4>; 3],
    log_decay: Tensor<B, 3>,
    sinks: Option<Tensor<B, 1>>,
    documents: DocumentStarts<B>,
    path: ExecPath,
) -> Tensor<B, 4> {
    assert_shapes(&qkv);
    let ints = documents.into_iter().map(Tensor::into_primitive).collect();
    let ([q, k, v], log_decay) = (qkv.map(primitive), primitive(log_decay));
    tensor(match sinks {
        None => path.run::<B, _, 4>(op, [q, k, v, log_decay], ints),
        Some(sinks) => path.run::<B, _, 5>(op, [q, k, v, log_decay, primitive(sinks)], ints),
    })
}

/// q, k, v, the log decay and, with 5 inputs, the sinks.
impl<const N: usize> Op<N> for Forgetting {
    fn reference<B: OpBackend>(
        &self,
        inputs: [FloatTensor<B>; N],
        ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        let mut inputs = inputs.into_iter();
        let mut next = || inputs.next().expect("q, k, v and the log decay");
        let (qkv, log_decay) = ([next(), next(), next()], tensor::<B, 3>(next()));
        let sinks = inputs.next().map(tensor::<B, 1>);
        reference::attend::<B>(&self.core, qkv, Some(log_decay), sinks, ints.first())
    }

    fn cpu_forward(
        &self,
        inputs: &[FlexTensor; N],
        ints: &[FlexTensor],
        needs: [bool; N],
    ) -> Option<Forward<FlexTensor>> {
        let [q, k, v, log_decay, ..] = inputs.each_ref()[..] else { unreachable!("N is 4 or 5") };
        let optional = (Some(log_decay), inputs.get(4));
        Some(cpu::forward(&self.core, [q, k, v], optional, ints.first(), needs.contains(&true)))
    }

    fn cpu_backward(
        &self,
        saved: Vec<FlexTensor>,
        ints: &[FlexTensor],
        grad: FlexTensor,
        _needs: [bool; N],
    ) -> [Option<FlexTensor>; N] {
        cpu::backward(&self.core, cpu::Saved::unpack(saved, true), ints.first(), grad).in_order()
    }

    fn cuda_forward(
        &self,
        inputs: &[CudaTensor; N],
        ints: &[CudaTensor],
        needs: [bool; N],
    ) -> Option<Forward<CudaTensor>> {
        let [q, k, v, log_decay, ..] = inputs.each_ref()[..] else { unreachable!("N is 4 or 5") };
        let needs = needs.contains(&true);
        cuda::forward(self, [q, k, v], log_decay, inputs.get(4), ints.first(), needs)
    }

    fn cuda_backward(
        &self,
        saved: Vec<CudaTensor>,
        ints: &[CudaTensor],
        grad: CudaTensor,
        _needs: [bool; N],
    ) -> [Option<CudaTensor>; N] {
        cuda::backward(self, saved, ints.first(), &grad).in_order()
    }
}
