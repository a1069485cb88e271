//! The softmax core in plain tensor operations.

use burn::tensor::activation;
use burn::tensor::backend::Backend;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Bool, Int, Tensor};

use super::Softmax;
use crate::backend::{int_tensor, primitive, tensor};

/// Score of a key that a query must not see: its weight is exactly 0 in f32, and no row is without
/// a key it may see.
const HIDDEN: f32 = -1e30;

pub(super) fn attend<B: Backend>(
    op: &Softmax,
    [q, k, v]: [FloatTensor<B>; 3],
    log_decay: Option<Tensor<B, 3>>,
    documents: Option<&IntTensor<B>>,
) -> FloatTensor<B> {
    let (q, k, v) = (tensor::<B, 4>(q), tensor::<B, 4>(k), tensor::<B, 4>(v));
    let device = q.device();
    let [_, heads, queries, _] = q.dims();
    let [_, kv_heads, keys, _] = k.dims();
    let [k, v] = [k, v].map(|x| repeat_heads(x, heads / kv_heads));

    let mut scores = q.matmul(k.transpose()) * op.scale; // [batch, heads, queries, keys]
    if let Some(cap) = op.softcap {
        scores = (scores / cap).tanh() * cap;
    }
    if let Some(log_decay) = log_decay {
        scores = scores + decay_between(log_decay, queries);
    }
    if !op.slopes.is_empty() {
        let slopes = Tensor::<B, 1>::from_floats(&op.slopes[..], &device);
        let slopes = slopes.reshape([1, heads, 1, 1]);
        scores = scores - distances::<B>(queries, keys, &device) * slopes;
    }
    let hidden = hidden::<B>(op, queries, keys, documents, &device).expand(scores.shape());
    primitive(activation::softmax(scores.mask_fill(hidden, HIDDEN), 3).matmul(v))
}

/// `[batch, kv_heads, …]` to `[batch, heads, …]`: each head repeated for its group.
fn repeat_heads<B: Backend>(x: Tensor<B, 4>, group: usize) -> Tensor<B, 4> {
    let [batch, kv_heads, keys, head_dim] = x.dims();
    x.reshape([batch, kv_heads, 1, keys * head_dim]).repeat_dim(2, group).reshape([
        batch,
        kv_heads * group,
        keys,
        head_dim,
    ])
}

/// Σ_{s=j+1..i} ℓ_s for each query position i and key j, `[batch, heads, queries, keys]`.
///
/// Each column j is summed from its own start, so that no large prefix sums cancel.
fn decay_between<B: Backend>(log_decay: Tensor<B, 3>, queries: usize) -> Tensor<B, 4> {
    let [batch, heads, keys] = log_decay.dims();
    // Row s, column j: ℓ_s where s > j. The mask is false in the strict lower triangle.
    let before = Tensor::<B, 2, Bool>::tril_mask([keys, keys], -1, &log_decay.device());
    let steps = log_decay.reshape([batch, heads, keys, 1]).repeat_dim(3, keys);
    let before = before.reshape([1, 1, keys, keys]).expand([batch, heads, keys, keys]);
    steps.mask_fill(before, 0.0).cumsum(2).narrow(2, keys - queries, queries)
}

/// i − j for each query position i and key j, `[1, 1, queries, keys]`.
fn distances<B: Backend>(queries: usize, keys: usize, device: &B::Device) -> Tensor<B, 4> {
    let [i, j] = positions::<B>(queries, keys, device);
    (i - j).float()
}

/// The positions of queries and keys, each `[1, 1, queries, keys]`.
fn positions<B: Backend>(
    queries: usize,
    keys: usize,
    device: &B::Device,
) -> [Tensor<B, 4, Int>; 2] {
    let i = Tensor::<B, 1, Int>::arange((keys - queries) as i64..keys as i64, device);
    let j = Tensor::<B, 1, Int>::arange(0..keys as i64, device);
    let shape = [1, 1, queries, keys];
    [i.reshape([1, 1, queries, 1]).expand(shape), j.reshape([1, 1, 1, keys]).expand(shape)]
}

/// True where a query must not see a key, `[batch or 1, 1, queries, keys]`.
fn hidden<B: Backend>(
    op: &Softmax,
    queries: usize,
    keys: usize,
    documents: Option<&IntTensor<B>>,
    device: &B::Device,
) -> Tensor<B, 4, Bool> {
    let [i, j] = positions::<B>(queries, keys, device);
    let mut hidden = j.clone().greater(i.clone());
    if let Some(window) = op.window {
        hidden = hidden.bool_or(j.clone().lower_equal(i - window as i64));
    }
    if let Some(documents) = documents {
        let starts = int_tensor::<B, 2>(documents.clone()).narrow(1, keys - queries, queries);
        let shape = [starts.dims()[0], 1, queries, keys];
        let starts = starts.reshape([shape[0], 1, queries, 1]).expand(shape);
        hidden = hidden.expand(shape).bool_or(j.expand(shape).lower(starts));
    }
    hidden
}
