//! FoX on CUDA: softmax attention on the flash core, with the decay as biases.

// Device code has no `div_ceil` or `is_multiple_of`.
#![allow(clippy::manual_div_ceil, clippy::manual_is_multiple_of)]

mod decode;
mod prune;

use burn::tensor::DType;

pub use self::decode::DecayKvCache;
use self::prune::prune;
use super::op::Forgetting;
use crate::attention::decay::{self, DecayBiases, DecaySums, Sums};
use crate::attention::flash::hooks::{Hooks, LaunchOf, PlainOperands, ScaledScore};
use crate::attention::flash::mask::Pruned;
use crate::attention::flash::weight::{SoftmaxArgs, SoftmaxOutput, SoftmaxWeight, sinks};
use crate::attention::flash::{FlashAttention, decode as decode_one, serves_tensors};
use crate::attention::softmax::Gradients;
use crate::backend::Forward;
use crate::cuda::CudaTensor;

/// The hooks and their tensors.
struct DecayHooks {
    sums: DecaySums,
    /// `[heads]`
    sinks: Option<CudaTensor>,
}

impl Hooks for DecayHooks {
    type Operands = PlainOperands;
    type Biases = DecayBiases;
    type Score = ScaledScore;
    type Weight = SoftmaxWeight;

    fn operands(&self) {}

    fn biases(&self) -> LaunchOf<Sums> {
        self.sums.launch()
    }

    fn score(&self) {}

    fn weight(&self) -> LaunchOf<SoftmaxArgs> {
        sinks(self.sinks.as_ref())
    }
}

fn flash(
    op: &Forgetting,
    inputs: [&CudaTensor; 3],
    hooks: DecayHooks,
    documents: Option<&CudaTensor>,
) -> FlashAttention<DecayHooks> {
    FlashAttention::new(inputs, op.core.scale, hooks).window(op.core.window).documents(documents)
}

/// See [`Op::cuda_forward`](crate::backend::Op::cuda_forward).
pub(super) fn forward(
    op: &Forgetting,
    inputs: [&CudaTensor; 3],
    log_decay: &CudaTensor,
    sinks: Option<&CudaTensor>,
    documents: Option<&CudaTensor>,
    needs: bool,
) -> Option<Forward<CudaTensor>> {
    if !serves_tensors(inputs) || log_decay.dtype != DType::F32 {
        return None;
    }
    let sums = DecaySums::new(log_decay);
    let hooks = DecayHooks { sums: sums.clone(), sinks: sinks.cloned() };
    let flash = flash(op, inputs, hooks, documents);
    if flash.q().dims[2] == 1 && !needs {
        let [output, _] = decode_one(&flash, None);
        return Some(Forward { output, saved: vec![] });
    }
    let pruned = op.core.prune.then(|| prune(&flash, &sums));
    let result = flash.pruned(pruned.clone()).softmax(sinks.is_some());
    let output = result.o.clone();
    let inputs = inputs.map(Clone::clone);
    let saved = Saved { inputs, sums, sinks: sinks.cloned(), result, pruned };
    Some(Forward { output, saved: saved.pack() })
}

/// The gradients from what [`forward`] saved.
pub(super) fn backward(
    op: &Forgetting,
    saved: Vec<CudaTensor>,
    documents: Option<&CudaTensor>,
    grad: &CudaTensor,
) -> Gradients<CudaTensor> {
    let Saved { inputs, sums, sinks, result, pruned } = Saved::unpack(op, saved);
    let hooks = DecayHooks { sums, sinks };
    let flash = flash(op, inputs.each_ref(), hooks, documents).pruned(pruned);
    let (gradients, sinks) = flash.softmax_backward(&result, grad);
    let [rows, columns] = [gradients.ds_rows, gradients.ds_columns]
        .map(|sums| sums.expect("a decay's biases want sums"));
    let log_decay = Some(decay::gradient(rows, columns));
    Gradients { q: gradients.dq, k: gradients.dk, v: gradients.dv, log_decay, sinks }
}

/// What the forward pass keeps for the backward pass.
struct Saved {
    /// q, k and v.
    inputs: [CudaTensor; 3],
    sums: DecaySums,
    sinks: Option<CudaTensor>,
    result: SoftmaxOutput,
    pruned: Option<Pruned>,
}

impl Saved {
    fn pack(self) -> Vec<CudaTensor> {
        let SoftmaxOutput { o, lse, sink } = self.result;
        let [q, k, v] = self.inputs;
        let DecaySums { within, before } = self.sums;
        let pruned = self.pruned.map(|Pruned { first, bounds, least }| [first, bounds, least]);
        let all = [q, k, v, within, before, o, lse].into_iter();
        all.chain(pruned.into_iter().flatten()).chain(self.sinks).chain(sink).collect()
    }

    fn unpack(op: &Forgetting, saved: Vec<CudaTensor>) -> Self {
        let mut saved = saved.into_iter();
        let mut next = || saved.next().expect("what the forward pass saves");
        let inputs = [next(), next(), next()];
        let sums = DecaySums { within: next(), before: next() };
        let (o, lse) = (next(), next());
        let pruned = op.core.prune.then(|| Pruned { first: next(), bounds: next(), least: next() });
        let (sinks, sink) = (saved.next(), saved.next());
        Saved { inputs, sums, sinks, result: SoftmaxOutput { o, lse, sink }, pruned }
    }
}
