//! Power attention on CUDA. The attention form is softmax attention on the flash core: its scores are p·ln|q·k|, and
//! the decay is a bias. The [chunked form](chunked), and what decodes [token by token](recurrent) from its sums, use it
//! for the near keys. The scale of scores cancels, so it is 1 here.
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

pub(super) mod chunked;
mod decode;
mod gradients;
mod join;
mod recurrent;
mod score;

use burn::tensor::{DType, Shape};
use cubecl::zspace::metadata::Metadata;

use self::chunked::{Chunked, Saved, States};
pub(super) use self::decode::{PowerKvCache, PowerTokens};
use self::gradients::{of_log_decay, rounded_with_dots};
use self::score::{Exponent, ExponentLaunch, PowerScore};
use super::op::PowerAttention;
use crate::attention::decay::{DecayBiases, DecaySums, Sums};
use crate::attention::flash::hooks::{Hooks, LaunchOf, NoBiases, PlainOperands};
use crate::attention::flash::weight::{SoftmaxArgs, SoftmaxOutput, SoftmaxWeight, sinks};
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

    fn weight(&self) -> LaunchOf<SoftmaxArgs> {
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

    fn weight(&self) -> LaunchOf<SoftmaxArgs> {
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

    /// The gradients from o and its log-sum-exp: with a gate those of q and k in f32, and without that of ℓ.
    fn gradients(
        &self,
        inputs: [&CudaTensor; 3],
        result: &SoftmaxOutput,
        sums: Option<DecaySums>,
        documents: Option<&CudaTensor>,
        grad: &CudaTensor,
    ) -> Gradients {
        let p = self.p;
        let (gradients, _) = match sums {
            None => {
                let flash = self.flash(inputs, PowerHooks { p }, documents);
                flash.softmax_backward(result, grad)
            }
            Some(sums) => {
                let flash = self.flash(inputs, GatedPowerHooks { p, sums }, documents);
                flash.softmax_backward(result, grad)
            }
        };
        gradients
    }

    /// The chunked form, where it is asked for and q and k have more than two chunks.
    fn chunked(&self, q: &CudaTensor, k: &CudaTensor) -> Option<Chunked> {
        let chunk = self.chunk.filter(|chunk| q.meta.shape()[2] > 2 * chunk);
        chunk.map(|chunk| Chunked::new(q, k, chunk))
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

/// Outputs of whole sequences.
struct Whole {
    /// `[batch, heads, tokens, head_dim]`
    o: CudaTensor,
    /// As in [`SoftmaxOutput`].
    lse: CudaTensor,
    /// With a gate.
    sums: Option<DecaySums>,
    /// In the chunked form.
    far: Option<(Saved, States)>,
}

/// Attention over whole sequences, where the kernels serve them. The arguments are those of [`forward`].
fn whole(
    op: &PowerAttention,
    inputs: [&CudaTensor; 3],
    log_decay: Option<&CudaTensor>,
    documents: Option<&CudaTensor>,
    needs: bool,
) -> Option<Whole> {
    if !serves_tensors(inputs) || log_decay.is_some_and(|x| x.dtype != DType::F32) {
        return None;
    }
    let [q, k, _] = inputs;
    let sums = log_decay.map(|x| DecaySums::new(&by_query_head(x, group(q, k))));
    let Some(chunked) = op.chunked(q, k) else {
        let [o, lse] = op.run(inputs, sums.clone(), documents, needs);
        return Some(Whole { o, lse, sums, far: None });
    };
    let starts = chunked.near_starts(q, documents);
    let [o, lse] = op.run(inputs, sums.clone(), Some(&starts), true);
    let far = chunked.add_far(inputs, log_decay, documents, [&o, &lse]);
    Some(Whole { o, lse, sums, far: Some(far) })
}

/// See [`Op::cuda_forward`](crate::backend::Op::cuda_forward).
pub(super) fn forward(
    op: &PowerAttention,
    inputs: [&CudaTensor; 3],
    log_decay: Option<&CudaTensor>,
    documents: Option<&CudaTensor>,
    needs: bool,
) -> Option<Forward<CudaTensor>> {
    let Whole { o, lse, sums, far } = whole(op, inputs, log_decay, documents, needs)?;
    let output = o.clone();
    let saved = if needs {
        let sums = sums.map(|DecaySums { within, before }| [within, before]);
        let far = far.map(|(Saved { factors, until_end, totals }, _)| [factors, until_end, totals]);
        let all = inputs.map(Clone::clone).into_iter().chain([o, lse]);
        all.chain(far.into_iter().flatten()).chain(sums.into_iter().flatten()).collect()
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
    let mut next = || saved.next().expect("the forward pass saves its inputs and results");
    let inputs = [next(), next(), next()];
    let [o, lse] = [next(), next()];
    let inputs = inputs.each_ref();
    let [q, k, _] = inputs;
    let far = op.chunked(q, k).map(|chunked| {
        let starts = chunked.near_starts(q, documents);
        let saved = Saved { factors: next(), until_end: next(), totals: next() };
        (chunked, starts, saved)
    });
    let documents = far.as_ref().map(|(_, starts, _)| starts).or(documents);
    let sums = saved.next().zip(saved.next());
    let sums = sums.map(|(within, before)| DecaySums { within, before });
    let with_gate = sums.is_some();
    let result = SoftmaxOutput { o, lse, sink: None };
    let gradients = op.gradients(inputs, &result, sums, documents, grad);
    if let Some((chunked, _, saved)) = far {
        chunked.add_far_gradients(inputs, &saved, &result.o, grad, &gradients);
    }
    let Gradients { dq, dk, dv, .. } = gradients;
    if !with_gate {
        return vec![dq, dk, dv];
    }
    let [dq, rows] = rounded_with_dots(q, &dq);
    let [dk, columns] = rounded_with_dots(k, &dk);
    vec![dq, dk, dv, of_log_decay(rows, columns, op.p)]
}
