//! Attention whose weights are another function of a query's row of scores than softmax:
//!
//! S_ij = scale · q_iᵀk_j − offset_i, o_i = Σ_j f(S_i)_j v_j,
//!
//! over the keys j ≤ i inside the window and the document of i. A variant supplies f and its
//! gradient, a few tensor operations each ([`Weights`]). This module adds blocks of queries, masks,
//! grouped heads and the gradients of q, k, v and the offsets.
//!
//! On the CPU, when the scores do not fit into one block, the backward pass recomputes them block by
//! block: the saved tensors grow with seq_len, not with its square.

mod gradients;
pub mod sparsity;
#[cfg(test)]
mod tests;

use std::fmt::Debug;

use burn::backend::Flex;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Bool, Int, Tensor};
use burn_flex::FlexTensor;

use super::blocks::{
    Block, attention_mask, by_query_blocks, copied, positions, query_blocks, repeat_heads,
    repeat_views, sum_groups, sum_views,
};
use super::{DocumentStarts, ExecPath};
use crate::backend::{Forward, Op, OpBackend, int_tensor, primitive, tensor};
use crate::cuda::CudaTensor;
use crate::ops::matmul::MatMul;

/// How a query's row of scores becomes the weights of its keys.
///
/// All shapes are `[batch, heads, queries, keys]`. `mask` is true where the query must not see the
/// key; scores there are finite but meaningless, and weights must be 0.
pub trait Weights: Clone + Debug + Send + Sync + 'static {
    /// Whether a query sees its own key.
    const SEES_ITSELF: bool = true;

    /// The weights, differentiable by autodiff.
    fn weigh<B: OpBackend>(&self, scores: Tensor<B, 4>, mask: Tensor<B, 4, Bool>) -> Tensor<B, 4>;

    /// The weights, and the gradient of the scores given `d_weights`, the gradient of the weights.
    fn vjp<B: OpBackend>(
        &self,
        scores: Tensor<B, 4>,
        mask: Tensor<B, 4, Bool>,
        d_weights: Tensor<B, 4>,
    ) -> [Tensor<B, 4>; 2];

    /// The CUDA kernel, as [`Op::cuda_forward`], for q, k and v, and offsets if there are any.
    fn cuda_forward(
        op: &Rowwise<Self>,
        inputs: [&CudaTensor; 3],
        offsets: Option<&CudaTensor>,
        documents: Option<&CudaTensor>,
        needs: bool,
    ) -> Option<Forward<CudaTensor>> {
        let _ = (op, inputs, offsets, documents, needs);
        None
    }

    /// The gradients of q, k, v and the offsets, from what [`Weights::cuda_forward`] saved.
    fn cuda_backward(
        op: &Rowwise<Self>,
        saved: &[CudaTensor],
        documents: Option<&CudaTensor>,
        grad: &CudaTensor,
    ) -> Vec<CudaTensor> {
        let _ = (saved, documents, grad);
        unreachable!("{op:?} has no kernel for CUDA")
    }
}

/// The operation's settings.
#[derive(Clone, Debug, PartialEq)]
pub struct Rowwise<W> {
    /// f.
    pub weights: W,
    /// Factor on q·k.
    pub scale: f32,
    /// With a window w, a query sees its own key and the w − 1 before it.
    pub window: Option<usize>,
}

/// Attention with the weights of `op`.
///
/// - `q`: `[batch, heads, queries, head_dim]`
/// - `k`: `[batch, kv_heads, keys, head_dim]`, `kv_heads` divides `heads`, `keys ≥ queries`: query
///   i is at position keys − queries + i
/// - `v`: `[batch, kv_heads / views, keys, value_dim]`: q and k may have the heads of several views, one view
///   after the other, which all have v's values
/// - `offsets`: `[batch or 1, queries]`, subtracted from the scores of a query
/// - `documents`: `[batch, keys]`
///
/// Returns `[batch, heads, queries, value_dim]`.
///
/// # Panics
/// When the shapes do not match.
pub fn rowwise<B: OpBackend, W: Weights>(
    op: &Rowwise<W>,
    q: Tensor<B, 4>,
    k: Tensor<B, 4>,
    v: Tensor<B, 4>,
    offsets: Option<Tensor<B, 2>>,
    documents: DocumentStarts<B>,
    path: ExecPath,
) -> Tensor<B, 4> {
    let [[batch, heads, queries, head_dim], [_, kv_heads, keys, _]] = [q.dims(), k.dims()];
    let [_, value_heads, _, value_dim] = v.dims();
    assert_eq!(k.dims(), [batch, kv_heads, keys, head_dim], "shape of k for q {:?}", q.dims());
    assert_eq!(v.dims(), [batch, value_heads, keys, value_dim], "shape of v for k {:?}", k.dims());
    assert!(kv_heads % value_heads == 0, "{value_heads} heads of v must divide {kv_heads} of k");
    assert!(heads % kv_heads == 0, "{kv_heads} kv_heads must divide {heads} heads");
    assert!(keys >= queries, "{queries} queries but only {keys} keys");
    let ints = documents.into_iter().map(Tensor::into_primitive).collect();
    let (q, k, v) = (primitive(q), primitive(k), primitive(v));
    tensor(match offsets {
        None => path.run::<B, _, 3>(op, [q, k, v], ints),
        Some(offsets) => path.run::<B, _, 4>(op, [q, k, v, primitive(offsets)], ints),
    })
}

/// The arguments of [`rowwise`], for the output and for what a probe asks of its weights.
#[derive(Clone, Debug)]
pub struct RowwiseCall<B: OpBackend, W> {
    /// The operation.
    pub op: Rowwise<W>,
    /// Queries, `[batch, heads, queries, head_dim]`.
    pub q: Tensor<B, 4>,
    /// Keys, `[batch, kv_heads, keys, head_dim]`.
    pub k: Tensor<B, 4>,
    /// Values, `[batch, kv_heads / views, keys, value_dim]`.
    pub v: Tensor<B, 4>,
    /// Subtracted from the scores of a query, `[batch or 1, queries]`.
    pub offsets: Option<Tensor<B, 2>>,
    /// Document starts, `[batch, keys]`.
    pub documents: DocumentStarts<B>,
    /// The path that serves the call.
    pub path: ExecPath,
}

impl<B: OpBackend, W: Weights> RowwiseCall<B, W> {
    /// As [`rowwise`].
    pub fn attend(self) -> Tensor<B, 4> {
        let RowwiseCall { op, q, k, v, offsets, documents, path } = self;
        rowwise(&op, q, k, v, offsets, documents, path)
    }
}

/// The inputs as tensors: q, k, v, the offsets, the document starts.
struct RowwiseInputs<B: OpBackend> {
    q: Tensor<B, 4>,
    k: Tensor<B, 4>,
    v: Tensor<B, 4>,
    offsets: Option<Tensor<B, 2>>,
    documents: Option<Tensor<B, 2, Int>>,
}

impl<B: OpBackend> RowwiseInputs<B> {
    fn new<const N: usize>(inputs: [FloatTensor<B>; N], ints: &[IntTensor<B>]) -> Self {
        let documents = ints.first().map(|starts| int_tensor(starts.clone()));
        let mut inputs = inputs.into_iter();
        let mut next = || inputs.next().expect("q, k and v");
        let (q, k, v) = (tensor(next()), tensor(next()), tensor(next()));
        RowwiseInputs { q, k, v, offsets: inputs.next().map(tensor), documents }
    }

    fn keys(&self) -> usize {
        self.k.dims()[2]
    }

    /// Heads of k that share one of v, one in each view.
    fn views(&self) -> usize {
        self.k.dims()[1] / self.v.dims()[1]
    }

    /// Query heads that share one key head.
    fn group(&self) -> usize {
        self.q.dims()[1] / self.k.dims()[1]
    }
}

impl<W: Weights> Rowwise<W> {
    fn blocks<B: OpBackend>(
        &self,
        inputs: &RowwiseInputs<B>,
    ) -> impl Iterator<Item = Block> + use<B, W> {
        let [batch, heads, queries, _] = inputs.q.dims();
        query_blocks(batch * heads, queries, inputs.keys(), self.window)
    }

    /// A block's queries, times the scale.
    fn queries<B: OpBackend>(&self, inputs: &RowwiseInputs<B>, block: &Block) -> Tensor<B, 4> {
        block.queries_of(&inputs.q, inputs.keys()) * self.scale
    }

    /// A block's scores and its mask, for its queries and keys, both with all `heads`.
    fn scores<B: OpBackend>(
        &self,
        inputs: &RowwiseInputs<B>,
        block: &Block,
        [q, k]: [&Tensor<B, 4>; 2],
    ) -> (Tensor<B, 4>, Tensor<B, 4, Bool>) {
        let device = q.device();
        let mut scores = q.clone().mm(k.clone().transpose());
        if let Some(offsets) = &inputs.offsets {
            let first = inputs.keys() - inputs.q.dims()[2];
            let queries = block.queries.len();
            let first = block.queries.start - first;
            let offsets = copied(offsets.clone().narrow(1, first, queries));
            let [batch, heads, ..] = q.dims();
            let rows = offsets.dims()[0];
            // Materialised for all heads: broadcasting is slower.
            let offsets = offsets.reshape([rows, 1, queries, 1]).repeat_dim(1, heads);
            scores = scores - offsets.repeat_dim(0, batch / rows);
        }
        let mut mask = attention_mask(block, self.window, inputs.documents.as_ref(), &device);
        if !W::SEES_ITSELF {
            let [i, j] = positions::<B>(block, &device);
            mask = mask.clone().bool_or(i.equal(j).expand(mask.dims()));
        }
        let shape = scores.dims();
        (scores, mask.expand(shape))
    }

    fn attend<B: OpBackend>(&self, inputs: &RowwiseInputs<B>) -> Tensor<B, 4> {
        let group = inputs.group();
        let k = repeat_heads(inputs.k.clone(), group);
        let v = repeat_heads(repeat_views(inputs.v.clone(), inputs.views()), group);
        by_query_blocks(self.blocks(inputs), |block| {
            let q = self.queries(inputs, &block);
            let (scores, mask) = self.scores(inputs, &block, [&q, &block.keys_of(&k)]);
            self.weights.weigh(scores, mask).mm(block.keys_of(&v))
        })
    }

    /// As [`Op::cpu_forward`]. If a gradient is needed and the scores take more than one block, saves
    /// only the inputs; otherwise returns `None`, and autodiff saves the scores.
    fn forward<const N: usize>(
        &self,
        inputs: &[FlexTensor; N],
        ints: &[FlexTensor],
        needs: [bool; N],
    ) -> Option<Forward<FlexTensor>> {
        let tensors = RowwiseInputs::<Flex>::new(inputs.clone(), ints);
        let large = self.blocks(&tensors).nth(1).is_some();
        (large && needs.contains(&true)).then(|| {
            let output = primitive(self.attend(&tensors));
            Forward { output, saved: inputs.to_vec() }
        })
    }
}

/// q, k, v and, with 4 inputs, the offsets.
impl<W: Weights, const N: usize> Op<N> for Rowwise<W> {
    fn reference<B: OpBackend>(
        &self,
        inputs: [FloatTensor<B>; N],
        ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        primitive(self.attend(&RowwiseInputs::<B>::new(inputs, ints)))
    }

    fn cpu_forward(
        &self,
        inputs: &[FlexTensor; N],
        ints: &[FlexTensor],
        needs: [bool; N],
    ) -> Option<Forward<FlexTensor>> {
        self.forward(inputs, ints, needs)
    }

    fn cpu_backward(
        &self,
        saved: Vec<FlexTensor>,
        ints: &[FlexTensor],
        grad: FlexTensor,
        _needs: [bool; N],
    ) -> [Option<FlexTensor>; N] {
        self.backward(saved, ints, grad)
    }

    fn cuda_forward(
        &self,
        inputs: &[CudaTensor; N],
        ints: &[CudaTensor],
        needs: [bool; N],
    ) -> Option<Forward<CudaTensor>> {
        let [q, k, v, ..] = inputs.each_ref()[..] else { unreachable!("N is 3 or 4") };
        W::cuda_forward(self, [q, k, v], inputs.get(3), ints.first(), needs.contains(&true))
    }

    fn cuda_backward(
        &self,
        saved: Vec<CudaTensor>,
        ints: &[CudaTensor],
        grad: CudaTensor,
        _needs: [bool; N],
    ) -> [Option<CudaTensor>; N] {
        let mut gradients = W::cuda_backward(self, &saved, ints.first(), &grad).into_iter();
        std::array::from_fn(|_| gradients.next())
    }
}

/// max(x, 0), and 0 where `mask`; a NaN stays a NaN.
pub fn positive<B: OpBackend>(x: Tensor<B, 4>, mask: Tensor<B, 4, Bool>) -> Tensor<B, 4> {
    let none = x.clone().lower_equal_elem(0.0);
    x.mask_fill(none, 0.0).mask_fill(mask, 0.0)
}

/// xᵖ for p ≥ 1, by repeated squaring.
pub fn power<B: OpBackend>(x: Tensor<B, 4>, p: u32) -> Tensor<B, 4> {
    if p == 1 {
        return x;
    }
    let half = power(x.clone(), p / 2);
    let square = half.clone() * half;
    if p.is_multiple_of(2) { square } else { square * x }
}
