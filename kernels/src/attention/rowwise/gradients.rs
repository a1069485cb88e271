//! The backward pass, which recomputes the scores block by block.
//!
//! With W = f(S), O = W V and dO given: dV = Wᵀ dO, dW = dO Vᵀ, dS from the weights' own
//! gradient, dQ = scale · dS K, dK = dSᵀ (scale · Q), d_offset_i = −Σ_j dS_ij.

use burn::backend::Flex;
use burn::tensor::{Tensor, s};
use burn_flex::FlexTensor;

use super::{
    Block, Rowwise, RowwiseInputs, Weights, repeat_heads, repeat_views, sum_groups, sum_views,
};
use crate::backend::{OpBackend, primitive, tensor};
use crate::ops::matmul::MatMul;

/// A block's contributions to the gradients of q and the offsets (its queries), k and v (its keys).
struct BlockGrads<B: OpBackend> {
    q: Tensor<B, 4>,
    offsets: Tensor<B, 2>,
    k: Tensor<B, 4>,
    v: Tensor<B, 4>,
}

impl<W: Weights> Rowwise<W> {
    /// As [`Op::cpu_backward`](crate::backend::Op::cpu_backward).
    pub(super) fn backward<const N: usize>(
        &self,
        saved: Vec<FlexTensor>,
        ints: &[FlexTensor],
        grad: FlexTensor,
    ) -> [Option<FlexTensor>; N] {
        let saved: [FlexTensor; N] = saved.try_into().expect("the inputs were saved");
        let inputs = RowwiseInputs::<Flex>::new(saved, ints);
        let grad = tensor(grad);
        let (mut q, mut offsets) = (vec![], vec![]);
        let (mut k, mut v) = (inputs.k.zeros_like(), inputs.v.zeros_like());
        for block in self.blocks(&inputs) {
            let grads = self.block_grads(&inputs, &block, &grad);
            q.push(grads.q);
            offsets.push(grads.offsets);
            k = add(k, &block, grads.k);
            v = add(v, &block, grads.v);
        }
        let offsets = Tensor::cat(offsets, 1);
        let gradients = [primitive(Tensor::cat(q, 2)), primitive(k), primitive(v)];
        let mut gradients = gradients.into_iter().chain([primitive(offsets)]);
        std::array::from_fn(|_| gradients.next())
    }

    fn block_grads<B: OpBackend>(
        &self,
        inputs: &RowwiseInputs<B>,
        block: &Block,
        grad: &Tensor<B, 4>,
    ) -> BlockGrads<B> {
        let (views, group) = (inputs.views(), inputs.group());
        let q = self.queries(inputs, block);
        let k = repeat_heads(block.keys_of(&inputs.k), group);
        let v = repeat_heads(repeat_views(block.keys_of(&inputs.v), views), group);
        let grad = block.queries_of(grad, inputs.keys());
        let (scores, mask) = self.scores(inputs, block, [&q, &k]);
        let d_weights = grad.clone().mm(v.transpose());
        let [weights, d_scores] = self.weights.vjp(scores, mask, d_weights);
        let [batch, _, queries, _] = q.dims();
        let offsets = d_scores.clone().sum_dim(3).sum_dim(1).neg().reshape([batch, queries]);
        let one_row = inputs.offsets.as_ref().is_some_and(|offsets| offsets.dims()[0] == 1);
        BlockGrads {
            offsets: if one_row { offsets.sum_dim(0) } else { offsets },
            k: sum_groups(d_scores.clone().transpose().mm(q), group),
            v: sum_views(sum_groups(weights.transpose().mm(grad), group), views),
            q: d_scores.mm(k) * self.scale,
        }
    }
}

/// Adds a block's contribution to the gradient of all keys or values.
fn add<B: OpBackend>(total: Tensor<B, 4>, block: &Block, part: Tensor<B, 4>) -> Tensor<B, 4> {
    let rows = s![.., .., block.keys.clone(), ..];
    let sum = total.clone().slice(rows) + part;
    total.slice_assign(s![.., .., block.keys.clone(), ..], sum)
}
