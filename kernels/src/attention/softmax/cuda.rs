//! Softmax attention on CUDA: flash hooks for softcap, ALiBi and sinks.

use burn::tensor::{DType, Shape};
use cubecl::prelude::*;

use super::{Gradients, Softmax};
use crate::attention::flash::hooks::{Hooks, LaunchOf, NoBiases, PlainOperands, Score};
use crate::attention::flash::problem::ProblemShape;
use crate::attention::flash::weight::{SoftmaxArgs, SoftmaxOutput, SoftmaxWeight, sinks};
use crate::attention::flash::{FlashAttention, decode, serves_tensors};
use crate::backend::Forward;
use crate::cuda::{CudaTensor, buffer};
use crate::ops::cuda::dims;

/// The hooks and their tensors.
pub struct SoftmaxHooks {
    softcap: Option<f32>,
    /// ALiBi's slopes, `[heads]`.
    slopes: Option<CudaTensor>,
    /// `[heads]`
    sinks: Option<CudaTensor>,
}

impl SoftmaxHooks {
    fn new(op: &Softmax, like: &CudaTensor, sinks: Option<&CudaTensor>) -> Self {
        let slopes = (!op.slopes.is_empty()).then(|| {
            let bytes: Vec<u8> = op.slopes.iter().flat_map(|x| x.to_ne_bytes()).collect();
            let (client, device) = (like.client.clone(), like.device.clone());
            let buffer = client.create_from_slice(&bytes);
            let shape = Shape::new([op.slopes.len()]);
            CudaTensor::new_contiguous(client, device, shape, buffer, DType::F32)
        });
        SoftmaxHooks { softcap: op.softcap, slopes, sinks: sinks.cloned() }
    }
}

impl Hooks for SoftmaxHooks {
    type Operands = PlainOperands;
    type Biases = NoBiases;
    type Score = CappedScore;
    type Weight = SoftmaxWeight;

    fn operands(&self) {}

    fn biases(&self) {}

    fn score(&self) -> LaunchOf<CapAndSlopes> {
        let slopes = self.slopes.as_ref().map(|x| buffer(x, 1));
        let (cap, alibi) = (self.softcap.unwrap_or(1.0), slopes.is_some());
        CapAndSlopesLaunch::new(cap, slopes.into(), self.softcap.is_some(), alibi)
    }

    fn weight(&self) -> LaunchOf<SoftmaxArgs> {
        sinks(self.sinks.as_ref())
    }

    fn changes_scores(&self) -> [bool; 2] {
        [self.softcap.is_some() || self.slopes.is_some(), self.softcap.is_some()]
    }
}

/// c·tanh(scale · q·k / c), and ALiBi's penalty on distance.
pub struct CappedScore;

/// The launch arguments of [`CappedScore`].
#[derive(CubeType, CubeLaunch)]
pub struct CapAndSlopes {
    /// c.
    cap: f32,
    /// ALiBi's slopes, `[heads]`.
    slopes: ComptimeOption<Array<f32>>,
    /// Whether scores are capped.
    #[cube(comptime)]
    softcap: bool,
    /// Whether distance is penalised.
    #[cube(comptime)]
    alibi: bool,
}

#[cube]
impl Score for CappedScore {
    type Args = CapAndSlopes;
    /// ALiBi's slope.
    type Head = f32;

    const WEIGHS_PRODUCTS: bool = false;

    fn head(args: &CapAndSlopes, head: usize) -> f32 {
        let mut slope = 0f32;
        if comptime!(args.alibi) {
            slope = args.slopes.as_ref().unwrap()[head];
        }
        slope
    }

    fn scale(args: &CapAndSlopes, problem: &ProblemShape) -> f32 {
        let mut scale = problem.scale;
        if comptime!(args.softcap || args.alibi) {
            scale = f32::cast_from(1f32);
        }
        scale
    }

    fn score(
        args: &CapAndSlopes,
        problem: &ProblemShape,
        slope: &f32,
        product: f32,
        row: u32,
        column: u32,
    ) -> f32 {
        let mut score = product;
        if comptime!(args.softcap) {
            // c·tanh(x/c) = c − 2c/(1 + e^(2x/c)).
            let e = Exp::exp(score * (problem.scale * 2.0 / args.cap));
            score = args.cap - 2.0 * args.cap / (1.0 + e);
        } else if comptime!(args.alibi) {
            score *= problem.scale;
        }
        if comptime!(args.alibi) {
            score += penalty(*slope, row, column);
        }
        score
    }

    fn slope(
        args: &CapAndSlopes,
        _problem: &ProblemShape,
        slope: &f32,
        score: f32,
        row: u32,
        column: u32,
    ) -> f32 {
        let mut result = 1f32;
        if comptime!(args.softcap) {
            let mut capped = score;
            if comptime!(args.alibi) {
                capped -= penalty(*slope, row, column);
            }
            let t = capped / args.cap;
            result = max(1f32 - t * t, 0f32);
        }
        result
    }

    fn weigh(_args: &CapAndSlopes, _product: f32, _shift: f32) -> (f32, f32) {
        (f32::cast_from(0u32), f32::cast_from(0u32))
    }
}

/// ALiBi's penalty for the query at `row` and the key at `column`.
#[cube]
fn penalty(slope: f32, row: u32, column: u32) -> f32 {
    slope * (f32::cast_from(column) - f32::cast_from(row))
}

fn flash(
    op: &Softmax,
    inputs: [&CudaTensor; 3],
    sinks: Option<&CudaTensor>,
    documents: Option<&CudaTensor>,
) -> FlashAttention<SoftmaxHooks> {
    FlashAttention::new(inputs, op.scale, SoftmaxHooks::new(op, inputs[0], sinks))
        .views(dims(inputs[1])[1] / dims(inputs[2])[1])
        .window(op.window)
        .documents(documents)
}

/// See [`Op::cuda_forward`](crate::backend::Op::cuda_forward).
pub(super) fn forward(
    op: &Softmax,
    inputs: [&CudaTensor; 3],
    sinks: Option<&CudaTensor>,
    documents: Option<&CudaTensor>,
    needs: bool,
) -> Option<Forward<CudaTensor>> {
    if !serves_tensors(inputs) {
        return None;
    }
    let flash = flash(op, inputs, sinks, documents);
    if flash.q().dims[2] == 1 && !needs {
        let [output, _] = decode(&flash, None);
        return Some(Forward { output, saved: vec![] });
    }
    let result = flash.softmax(sinks.is_some());
    let output = result.o.clone();
    let inputs = inputs.map(Clone::clone);
    Some(Forward { output, saved: Saved { inputs, sinks: sinks.cloned(), result }.pack() })
}

/// The gradients from what [`forward`] saved.
pub(super) fn backward(
    op: &Softmax,
    saved: Vec<CudaTensor>,
    documents: Option<&CudaTensor>,
    grad: &CudaTensor,
) -> Gradients<CudaTensor> {
    let Saved { inputs, sinks, result } = Saved::unpack(saved);
    let flash = flash(op, inputs.each_ref(), sinks.as_ref(), documents);
    let (gradients, sinks) = flash.softmax_backward(&result, grad);
    Gradients { q: gradients.dq, k: gradients.dk, v: gradients.dv, log_decay: None, sinks }
}

/// What the forward pass keeps for the backward pass.
struct Saved {
    /// q, k and v.
    inputs: [CudaTensor; 3],
    sinks: Option<CudaTensor>,
    result: SoftmaxOutput,
}

impl Saved {
    fn pack(self) -> Vec<CudaTensor> {
        let SoftmaxOutput { o, lse, sink } = self.result;
        let [q, k, v] = self.inputs;
        [q, k, v, o, lse].into_iter().chain(self.sinks).chain(sink).collect()
    }

    fn unpack(saved: Vec<CudaTensor>) -> Self {
        let mut saved = saved.into_iter();
        let mut next = || saved.next().expect("the forward pass saves five tensors");
        let (inputs, o, lse) = ([next(), next(), next()], next(), next());
        let (sinks, sink) = (saved.next(), saved.next());
        Saved { inputs, sinks, result: SoftmaxOutput { o, lse, sink } }
    }
}
