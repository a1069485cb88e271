//! Power attention as an operation on whole heads, for the CUDA kernels.

use burn::tensor::Tensor;
use burn::tensor::ops::{FloatTensor, IntTensor};

use super::Power;
use super::cuda;
use super::reference::PowerInputs;
use crate::attention::recurrent::forget_at_starts;
use crate::attention::softmax::assert_shapes;
use crate::attention::{DocumentStarts, ExecPath};
use crate::backend::{Forward, Op, OpBackend, primitive, tensor};
use crate::cuda::CudaTensor;

/// The operation's settings.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct PowerAttention {
    /// p, 2 or 4.
    pub p: u32,
    /// With a window w, a query attends to its own key and the w − 1 before it.
    pub window: Option<usize>,
    /// Tokens per chunk of the chunked form; `None` for the attention form.
    pub chunk: Option<usize>,
}

/// Power attention.
///
/// - q: `[batch, heads, seq_len, head_dim]`, of any length: the scale of scores cancels
/// - k, v: `[batch, kv_heads, seq_len, head_dim]`
/// - `log_decay`: ℓ ≤ 0, natural logarithm, f32 `[batch, kv_heads, seq_len]`; `None` without a gate
/// - `documents`: `[batch, seq_len]`
///
/// Returns `[batch, heads, seq_len, head_dim]`.
///
/// # Panics
/// When the shapes do not match.
pub(super) fn power_attention<B: OpBackend>(
    op: &PowerAttention,
    qkv: [Tensor<B, 4>; 3],
    log_decay: Option<Tensor<B, 3>>,
    documents: DocumentStarts<B>,
    path: ExecPath,
) -> Tensor<B, 4> {
    assert_shapes(&qkv);
    assert_eq!(qkv[0].dims()[2], qkv[1].dims()[2], "tokens of q and of k");
    let ints = documents.into_iter().map(Tensor::into_primitive).collect();
    let [q, k, v] = qkv.map(primitive);
    tensor(match log_decay {
        None => path.run::<B, _, 3>(op, [q, k, v], ints),
        Some(decay) => path.run::<B, _, 4>(op, [q, k, v, primitive(decay)], ints),
    })
}

/// q, k, v and, with 4 inputs, the log decay.
impl<const N: usize> Op<N> for PowerAttention {
    fn reference<B: OpBackend>(
        &self,
        inputs: [FloatTensor<B>; N],
        ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        let mut inputs = inputs.into_iter();
        let mut next = || tensor::<B, 4>(inputs.next().expect("q, k and v"));
        let [q, k, v] = [next(), next(), next()];
        let dims = q.dims();
        let log_decay = match inputs.next() {
            Some(decay) => tensor::<B, 3>(decay).unsqueeze_dim::<4>(3),
            None => Tensor::zeros([dims[0], k.dims()[1], dims[2], 1], &q.device()),
        };
        let documents = ints.first().cloned().map(Tensor::from_primitive);
        let rows = PowerInputs::of_heads([q, k, v], forget_at_starts(log_decay, documents));
        let PowerAttention { p, window, chunk } = *self;
        let op = Power { p, window, chunk, head_dim: dims[3] };
        primitive(op.forward(&rows).reshape(dims))
    }

    fn cuda_forward(
        &self,
        inputs: &[CudaTensor; N],
        ints: &[CudaTensor],
        needs: [bool; N],
    ) -> Option<Forward<CudaTensor>> {
        let [q, k, v, ..] = inputs.each_ref()[..] else { unreachable!("N is 3 or 4") };
        cuda::forward(self, [q, k, v], inputs.get(3), ints.first(), needs.contains(&true))
    }

    fn cuda_backward(
        &self,
        saved: Vec<CudaTensor>,
        ints: &[CudaTensor],
        grad: CudaTensor,
        _needs: [bool; N],
    ) -> [Option<CudaTensor>; N] {
        let mut gradients = cuda::backward(self, saved, ints.first(), &grad).into_iter();
        std::array::from_fn(|_| gradients.next())
    }
}
