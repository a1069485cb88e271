//! The attention form on CUDA: softmax attention on the flash core with the scores p·ln|q·k|, and the decay as
//! biases. The scale of scores cancels, so it is 1 here.
//!
//! The forward pass takes the logarithm of each product. The backward pass needs the product's sign, which its
//! logarithm lacks. It forms t = s · exp((c_i − c_j − lse_i) / p), whose p-th power is the weight, and whose
//! derivative p·t^(p−1)·∂t/∂s needs no division by s.
//!
//! dS_ij, the gradient of the product s_ij = q_iᵀk_j, also gives the gradient of ℓ. That of ln a_ij is
//! s_ij·dS_ij / p, and its sums over keys and over queries are q_iᵀdq_i / p and k_jᵀdk_j / p. With a gate the
//! kernels therefore write dq and dk in f32.

// Device code has no `div_ceil`.
#![allow(clippy::manual_div_ceil)]

mod decode;
mod gradients;
mod score;

use burn::tensor::{DType, Shape};
use cubecl::zspace::metadata::Metadata;

pub(super) use self::decode::PowerKvCache;
use self::gradients::{of_log_decay, rounded_with_dots};
use self::score::{Exponent, ExponentLaunch, PowerScore};
use super::op::PowerAttention;
use crate::attention::decay::{DecayBiases, DecaySums, Sums};
use crate::attention::flash::hooks::{Hooks, LaunchOf, NoBiases, PlainOperands};
use crate::attention::flash::weight::{Sinks, SoftmaxOutput, SoftmaxWeight, sinks};
use crate::attention::flash::{FlashAttention, Gradients, decode as decode_one, serves_tensors};
use crate::backend::Forward;
use crate::cuda::{CudaTensor, reshaped};

/// The hooks without a gate.
struct PowerHooks {
    p: u32,
}

impl Hooks for PowerHooks {
    type Operands = PlainOperands;
    type Biases = NoBiases;
    type Score = PowerScore;
    type Weight = SoftmaxWeight;

    fn operands(&self) {}

    fn biases(&self) {}

    fn score(&self) -> LaunchOf<Exponent> {
        ExponentLaunch::new(self.p)
    }

    fn weight(&self) -> LaunchOf<Sinks> {
        sinks(None)
    }

    fn changes_scores(&self) -> [bool; 2] {
        [true, false]
    }
}

/// The hooks with a gate.
struct GatedPowerHooks {
    p: u32,
    sums: DecaySums,
}

impl Hooks for GatedPowerHooks {
    type Operands = PlainOperands<f32>;
    type Biases = DecayBiases<false>;
    type Score = PowerScore;
    type Weight = SoftmaxWeight;

    fn operands(&self) {}

    fn biases(&self) -> LaunchOf<Sums> {
        self.sums.launch()
    }

    fn score(&self) -> LaunchOf<Exponent> {
        ExponentLaunch::new(self.p)
    }

    fn weight(&self) -> LaunchOf<Sinks> {
        sinks(None)
    }

    fn changes_scores(&self) -> [bool; 2] {
        [true, false]
    }
}

impl PowerAttention {
    fn flash<A: Hooks>(
        &self,
        inputs: [&CudaTensor; 3],
        hooks: A,
        documents: Option<&CudaTensor>,
    ) -> FlashAttention<A> {
        FlashAttention::new(inputs, 1.0, hooks).window(self.window).documents(documents)
    }

    /// o and its log-sum-exp, which is only made to be saved if `needs`. The queries are those of the last
    /// keys.
    fn run(
        &self,
        inputs: [&CudaTensor; 3],
        sums: Option<DecaySums>,
        documents: Option<&CudaTensor>,
        needs: bool,
    ) -> [CudaTensor; 2] {
        fn run<A: Hooks<Weight = SoftmaxWeight>>(
            flash: &FlashAttention<A>,
            needs: bool,
        ) -> [CudaTensor; 2] {
            if flash.q().dims[2] == 1 && !needs {
                return decode_one(flash, None);
            }
            let SoftmaxOutput { o, lse, .. } = flash.softmax(false);
            [o, lse]
        }
        let p = self.p;
        match sums {
            None => run(&self.flash(inputs, PowerHooks { p }, documents), needs),
            Some(sums) => run(&self.flash(inputs, GatedPowerHooks { p, sums }, documents), needs),
        }
    }
}

/// ℓ of each query head, `[batch · kv_heads, group, tokens]`, from that of each kv head,
/// `[batch, kv_heads, tokens]`: a view in which the heads of a group share their memory.
fn by_query_head(log_decay: &CudaTensor, group: usize) -> CudaTensor {
    let [batch, kv_heads, tokens]: [usize; 3] = log_decay.meta.shape().dims();
    let rows = batch * kv_heads;
    let mut view = reshaped(log_decay, &[rows, 1, tokens]);
    *view.meta = Metadata::new(Shape::new([rows, group, tokens]), [tokens, 0, 1]);
    view
}

/// Query heads per kv head.
fn group(q: &CudaTensor, k: &CudaTensor) -> usize {
    q.meta.shape()[1] / k.meta.shape()[1]
}

/// See [`Op::cuda_forward`](crate::backend::Op::cuda_forward).
pub(super) fn forward(
    op: &PowerAttention,
    inputs: [&CudaTensor; 3],
    log_decay: Option<&CudaTensor>,
    documents: Option<&CudaTensor>,
    needs: bool,
) -> Option<Forward<CudaTensor>> {
    if !serves_tensors(inputs) || log_decay.is_some_and(|x| x.dtype != DType::F32) {
        return None;
    }
    let [q, k, _] = inputs;
    let sums = log_decay.map(|x| DecaySums::new(&by_query_head(x, group(q, k))));
    let [o, lse] = op.run(inputs, sums.clone(), documents, needs);
    let output = o.clone();
    let saved = if needs {
        let sums = sums.map(|DecaySums { within, before }| [within, before]);
        let all = inputs.map(Clone::clone).into_iter().chain([o, lse]);
        all.chain(sums.into_iter().flatten()).collect()
    } else {
        vec![]
    };
    Some(Forward { output, saved })
}

/// The gradients of q, k, v and, with a gate, ℓ, from what [`forward`] saved.
pub(super) fn backward(
    op: &PowerAttention,
    saved: Vec<CudaTensor>,
    documents: Option<&CudaTensor>,
    grad: &CudaTensor,
) -> Vec<CudaTensor> {
    let mut saved = saved.into_iter();
    let mut next = || saved.next().expect("the forward pass saves five tensors");
    let inputs = [next(), next(), next()];
    let result = SoftmaxOutput { o: next(), lse: next(), sink: None };
    let [q, k, _] = inputs.each_ref();
    let p = op.p;
    let (Some(within), Some(before)) = (saved.next(), saved.next()) else {
        let flash = op.flash(inputs.each_ref(), PowerHooks { p }, documents);
        let (Gradients { dq, dk, dv, .. }, _) = flash.softmax_backward(&result, grad);
        return vec![dq, dk, dv];
    };
    let hooks = GatedPowerHooks { p, sums: DecaySums { within, before } };
    let flash = op.flash(inputs.each_ref(), hooks, documents);
    let (Gradients { dq, dk, dv, .. }, _) = flash.softmax_backward(&result, grad);
    let [dq, rows] = rounded_with_dots(q, &dq);
    let [dk, columns] = rounded_with_dots(k, &dk);
    vec![dq, dk, dv, of_log_decay(rows, columns, p)]
}
