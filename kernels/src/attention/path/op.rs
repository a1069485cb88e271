//! The operation with prepared inputs: directions of norm at most 1, β and log decays.

use burn::tensor::Tensor;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn_flex::FlexTensor;

use super::cpu;
use super::reference::{self, Tokens, Visible};
use crate::attention::{DocumentStarts, ExecPath};
use crate::backend::{Forward, Op, OpBackend, primitive, tensor};

/// The operation's settings.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Path {
    /// With a window w, a query sees its own key and the w − 1 before it.
    pub window: Option<usize>,
    /// kv heads of a sequence.
    pub kv_heads: usize,
}

/// PaTH attention over whole sequences; `documents` is `[batch, seq_len]`.
///
/// Returns `[rows, group, seq_len, head_dim]`.
pub(super) fn path_attention<B: OpBackend>(
    op: &Path,
    Tokens { q, k, v, w, beta, log_decay }: Tokens<B>,
    documents: DocumentStarts<B>,
    path: ExecPath,
) -> Tensor<B, 4> {
    let ints = documents.into_iter().map(Tensor::into_primitive).collect();
    let [q, k, v, w, beta] = [q, k, v, w, beta].map(primitive);
    tensor(match log_decay {
        None => path.run::<B, _, 5>(op, [q, k, v, w, beta], ints),
        Some(decay) => path.run::<B, _, 6>(op, [q, k, v, w, beta, primitive(decay)], ints),
    })
}

/// q, k, v, w, β and, with 6 inputs, the log decay.
impl<const N: usize> Op<N> for Path {
    fn reference<B: OpBackend>(
        &self,
        inputs: [FloatTensor<B>; N],
        ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        let mut inputs = inputs.into_iter();
        let mut next = || tensor::<B, 4>(inputs.next().expect("q, k, v, w and β"));
        let [q, k, v, w, beta] = [next(), next(), next(), next(), next()];
        let log_decay = inputs.next().map(tensor::<B, 3>);
        let documents = ints.first().cloned().map(Tensor::from_primitive);
        let visible = Visible { window: self.window, documents, kv_heads: self.kv_heads };
        let tokens = Tokens { q, k, v, w, beta, log_decay };
        let (out, _) = reference::attend(&tokens, &visible, &[], 0);
        if tokens.len() > 1 && self.window != Some(1) {
            return primitive(out);
        }
        // No transform lies between a token and itself: give w and β a gradient of 0, rather than none.
        let none = (tokens.w.sum() + tokens.beta.sum()).reshape([1, 1, 1, 1]) * 0.0;
        primitive(out + none)
    }

    fn cpu_forward(
        &self,
        inputs: &[FlexTensor; N],
        ints: &[FlexTensor],
        needs: [bool; N],
    ) -> Option<Forward<FlexTensor>> {
        Some(cpu::forward(self, inputs, ints.first(), needs.contains(&true)))
    }

    fn cpu_backward(
        &self,
        saved: Vec<FlexTensor>,
        ints: &[FlexTensor],
        grad: FlexTensor,
        _needs: [bool; N],
    ) -> [Option<FlexTensor>; N] {
        let mut gradients = cpu::backward(self, saved, ints.first(), &grad).into_iter();
        std::array::from_fn(|_| gradients.next())
    }
}
