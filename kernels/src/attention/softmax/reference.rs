//! Softmax attention in plain tensor operations.

use burn::tensor::Tensor;
use burn::tensor::activation;
use burn::tensor::ops::{FloatTensor, IntTensor};

use super::Softmax;
use crate::attention::blocks::{
    MASKED, attention_mask, by_query_blocks, decay_between, positions, query_blocks, repeat_heads,
    repeat_views,
};
use crate::backend::{OpBackend, int_tensor, primitive, tensor};
use crate::ops::matmul::MatMul;

/// The operation; `log_decay` is `[batch, heads, keys]`, `sinks` is `[heads]`.
pub(in crate::attention) fn attend<B: OpBackend>(
    op: &Softmax,
    [q, k, v]: [FloatTensor<B>; 3],
    log_decay: Option<Tensor<B, 3>>,
    sinks: Option<Tensor<B, 1>>,
    documents: Option<&IntTensor<B>>,
) -> FloatTensor<B> {
    let (q, k, v) = (tensor::<B, 4>(q), tensor::<B, 4>(k), tensor::<B, 4>(v));
    let device = q.device();
    let [batch, heads, queries, _] = q.dims();
    let [_, kv_heads, keys, _] = k.dims();
    let views = kv_heads / v.dims()[1];
    let [k, v] = [k, repeat_views(v, views)].map(|x| repeat_heads(x, heads / kv_heads));
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
        let mask =
            attention_mask(&block, op.window, documents.as_ref(), &device).expand(scores.shape());
        // Every row has a visible key: the query's own.
        let scores = scores.mask_fill(mask, MASKED);
        weights(scores, sinks.clone()).mm(block.keys_of(&v))
    }))
}

/// The softmax of each row, with the sink of its head in the denominator.
fn weights<B: OpBackend>(scores: Tensor<B, 4>, sinks: Option<Tensor<B, 1>>) -> Tensor<B, 4> {
    let Some(sinks) = sinks else { return activation::softmax(scores, 3) };
    let [batch, heads, queries, keys] = scores.dims();
    let sinks = sinks.reshape([1, heads, 1, 1]).expand([batch, heads, queries, 1]);
    activation::softmax(Tensor::cat(vec![scores, sinks], 3), 3).narrow(3, 0, keys)
}
