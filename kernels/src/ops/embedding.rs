//! The embedding table: rows of a matrix by token id.

use burn::tensor::backend::Backend;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Int, Tensor};

use crate::backend::{Op, OpBackend, int_tensor, primitive, tensor};

/// y_bt = weight[tokens_bt].
///
/// - `weight`: `[vocab, width]`
/// - `tokens`: `[batch, seq_len]`, each in `0..vocab`
///
/// Returns `[batch, seq_len, width]`. The gradient of `weight` is dense, and the same bits at every
/// run.
///
/// # Panics
/// On the CPU, when a token id is outside the vocabulary.
pub fn embedding<B: OpBackend>(weight: Tensor<B, 2>, tokens: Tensor<B, 2, Int>) -> Tensor<B, 3> {
    tensor(B::run(
        &Embedding,
        [primitive(weight)],
        vec![tokens.into_primitive()],
    ))
}

/// The operation: input weight; integer input tokens.
#[derive(Clone, Debug)]
pub struct Embedding;

impl Op<1> for Embedding {
    fn reference<B: Backend>(
        &self,
        [weight]: [FloatTensor<B>; 1],
        ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        let weight = tensor::<B, 2>(weight);
        let tokens = int_tensor::<B, 2>(ints[0].clone());
        let ([batch, seq_len], [_, width]) = (tokens.dims(), weight.dims());
        let y = weight.select(0, tokens.reshape([batch * seq_len]));
        primitive(y.reshape([batch, seq_len, width]))
    }
}
