//! The softmax core in plain tensor operations.

use burn::tensor::Tensor;
use burn::tensor::activation;
use burn::tensor::ops::{FloatTensor, IntTensor};

use super::Softmax;
use crate::attention::blocks::{
    HIDDEN, by_query_blocks, decay_between, hidden, positions, query_blocks, repeat_heads,
};
use crate::backend::{OpBackend, int_tensor, primitive, tensor};
use crate::ops::matmul::MatMul;

pub(super) fn attend<B: OpBackend>(
    op: &Softmax,
    [q, k, v]: [FloatTensor<B>; 3],
    log_decay: Option<Tensor<B, 3>>,
    documents: Option<&IntTensor<B>>,
) -> FloatTensor<B> {
    let (q, k, v) = (tensor::<B, 4>(q), tensor::<B, 4>(k), tensor::<B, 4>(v));
    let device = q.device();
    let [batch, heads, queries, _] = q.dims();
    let [_, kv_heads, keys, _] = k.dims();
    let [k, v] = [k, v].map(|x| repeat_heads(x, heads / kv_heads));
    let documents = documents.map(|starts| int_tensor::<B, 2>(starts.clone()));
    let slopes = (!op.slopes.is_empty())
        .then(|| Tensor::<B, 1>::from_floats(&op.slopes[..], &device).reshape([1, heads, 1, 1]));

    let blocks = query_blocks(batch * heads, queries, keys, op.window);
    primitive(by_query_blocks(blocks, |block| {
        let q = block.queries_of(&q, keys);
        let mut scores = q.mm(block.keys_of(&k).transpose()) * op.scale;
        if let Some(cap) = op.softcap {
            scores = (scores / cap).tanh() * cap;
        }
        if let Some(log_decay) = &log_decay {
            scores = scores + decay_between(log_decay, &block);
        }
        if let Some(slopes) = &slopes {
            let [i, j] = positions::<B>(&block, &device);
            scores = scores - (i - j).float() * slopes.clone();
        }
        let hidden = hidden(&block, op.window, documents.as_ref(), &device).expand(scores.shape());
        // No row is without a key it may see: the query's own.
        activation::softmax(scores.mask_fill(hidden, HIDDEN), 3).mm(block.keys_of(&v))
    }))
}
