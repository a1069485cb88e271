//! The time mix from a layer's projections to its gated output: in plain tensor operations around any form of the
//! recurrence, and as an operation.

use burn::tensor::activation::sigmoid;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Int, Tensor};

use super::recurrence::{WkvInputs, wkv};
use super::{KEY_EPS, MAX_DECAY, NORM_EPS, cuda};
use crate::attention::Inputs;
use crate::attention::recurrent::{by_head, by_token, unit};
use crate::backend::{Forward, Op, OpBackend, StateOp, primitive, tensor};
use crate::cuda::CudaTensor;
use crate::ops::layer_norm::layer_norm;

/// Outputs of the tokens, `[batch, heads, seq_len, head_dim]`, where `recurrence` gives r_t S_tᵀ of each.
///
/// All but the recurrence runs in the memory order of the layer's projections,
/// `[batch, seq_len, heads · head_dim]`, where products with the learned vectors, and their gradients,
/// act on whole rows.
pub(super) fn time_mix<B: OpBackend>(
    inputs: Inputs<B>,
    recurrence: impl FnOnce(WkvInputs<B>) -> Tensor<B, 4>,
) -> Tensor<B, 4> {
    let Inputs { q, k, v, projections, parameters } = inputs;
    let [d, rate, gate] = &projections[..] else { panic!("decay, learning rate and gate") };
    let [xi, alpha, rho, scale, bias] = &parameters[..] else { panic!("five vectors") };
    let ([_, heads, _, head_dim], kv_heads) = (q.dims(), k.dims()[1]);
    let row = |x: &Tensor<B, 1>| x.clone().reshape([1, 1, -1]);

    let [r, k] = [q.clone(), k].map(by_token);
    let rate = sigmoid(rate.clone());
    let key = k.clone() * ((rate.clone() - 1.0) * row(alpha) + 1.0);
    let removal = unit_heads(k * row(xi), kv_heads);
    let o = recurrence(WkvInputs {
        r: q,
        log_decay: by_head(sigmoid(d.clone()) * -MAX_DECAY, kv_heads),
        correction: by_head(rate * removal.clone(), kv_heads),
        removal: by_head(removal, kv_heads),
        key: by_head(key.clone(), kv_heads),
        v: v.clone(),
    });

    let ones = Tensor::ones([head_dim], &o.device());
    let o = by_token(layer_norm(o, ones, None, NORM_EPS * head_dim as f32));
    let weight = r * repeat(key, kv_heads, heads / kv_heads) * row(rho);
    let v = repeat(by_token(v), kv_heads, heads / kv_heads);
    let o = o * row(scale) + row(bias) + times_head_sums(v, weight, heads);
    by_head(o * gate.clone(), heads)
}

/// Each head of `[batch, seq_len, heads · channels]`, divided by its norm.
fn unit_heads<B: OpBackend>(x: Tensor<B, 3>, heads: usize) -> Tensor<B, 3> {
    let [batch, seq_len, features] = x.dims();
    let x = x.reshape([batch, seq_len, heads, features / heads]);
    unit(x, 1.0, KEY_EPS).reshape([batch, seq_len, features])
}

/// Repeats each head of `[batch, seq_len, heads · channels]` `group` times.
fn repeat<B: OpBackend>(x: Tensor<B, 3>, heads: usize, group: usize) -> Tensor<B, 3> {
    if group == 1 {
        return x;
    }
    let [batch, seq_len, features] = x.dims();
    x.reshape([batch, seq_len, heads, 1, features / heads]).repeat_dim(3, group).reshape([
        batch,
        seq_len,
        group * features,
    ])
}

/// Each head of `x` times the sum over the same head of `weight`; both are
/// `[batch, seq_len, heads · channels]`.
fn times_head_sums<B: OpBackend>(
    x: Tensor<B, 3>,
    weight: Tensor<B, 3>,
    heads: usize,
) -> Tensor<B, 3> {
    let [batch, seq_len, features] = x.dims();
    let [x, weight] = [x, weight].map(|x| x.reshape([batch, seq_len, heads, features / heads]));
    (x * weight.sum_dim(3)).reshape([batch, seq_len, features])
}

/// [`time_mix`] of whole rows as an operation: inputs r, k, v, the logits of decay and learning rate, the gate, ξ, α,
/// ρ, the norm's scale and bias, as in [`Inputs`]; the starts of documents, if any, as integers.
#[derive(Clone, Debug)]
pub(super) struct TimeMix;

impl TimeMix {
    /// The outputs, and Sᵀ after the last token.
    fn by_operations<B: OpBackend>(
        [r, k, v, decay, rate, gate, xi, alpha, rho, scale, bias]: [FloatTensor<B>; 11],
        ints: &[IntTensor<B>],
        before: Option<FloatTensor<B>>,
    ) -> (Tensor<B, 4>, Tensor<B, 4>) {
        let [q, k, v] = [r, k, v].map(tensor::<B, 4>);
        let projections = [decay, rate, gate].map(tensor::<B, 3>).into();
        let parameters = [xi, alpha, rho, scale, bias].map(tensor::<B, 1>).into();
        let documents =
            ints.first().map(|starts| Tensor::<B, 2, Int>::from_primitive(starts.clone()));
        let inputs = Inputs { q, k, v, projections, parameters };
        let mut after = None;
        let o = time_mix(inputs, |inputs| {
            let (o, end) = wkv(inputs, documents, before.map(tensor));
            after = Some(end);
            o
        });
        (o, after.expect("the recurrence has run"))
    }
}

impl Op<11> for TimeMix {
    fn reference<B: OpBackend>(
        &self,
        inputs: [FloatTensor<B>; 11],
        ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        primitive(Self::by_operations::<B>(inputs, ints, None).0)
    }

    fn cuda_forward(
        &self,
        inputs: &[CudaTensor; 11],
        ints: &[CudaTensor],
        needs: [bool; 11],
    ) -> Option<Forward<CudaTensor>> {
        cuda::forward(inputs, ints, needs.contains(&true))
    }

    fn cuda_backward(
        &self,
        saved: Vec<CudaTensor>,
        ints: &[CudaTensor],
        grad: CudaTensor,
        _needs: [bool; 11],
    ) -> [Option<CudaTensor>; 11] {
        cuda::backward(&saved, ints, &grad).map(Some)
    }
}

/// States are Sᵀ, `[batch, kv_heads, head_dim, value_dim]`.
impl StateOp<11> for TimeMix {
    fn reference_from<B: OpBackend>(
        &self,
        inputs: [FloatTensor<B>; 11],
        ints: &[IntTensor<B>],
        before: FloatTensor<B>,
    ) -> [FloatTensor<B>; 2] {
        let (o, after) = Self::by_operations::<B>(inputs, ints, Some(before));
        [primitive(o), primitive(after)]
    }

    fn cuda_forward_from(
        &self,
        inputs: &[CudaTensor; 11],
        ints: &[CudaTensor],
        before: &CudaTensor,
        needs: [bool; 11],
    ) -> Option<(Forward<CudaTensor>, CudaTensor)> {
        cuda::forward_from(inputs, ints, Some(before), needs.contains(&true))
    }
}
