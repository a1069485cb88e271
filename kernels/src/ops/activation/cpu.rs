//! Activations on the CPU.

use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::{Activation, GELU_CUBIC, GELU_SCALE, GateActivation};
use crate::cpu::{buffer, contiguous, dense, from_vec_like, math};

/// y = f(x), and `x` to save for the backward pass.
pub fn activation(kind: Activation, x: &FlexTensor) -> [FlexTensor; 2] {
    let [x] = same_order([x]);
    let y = match kind {
        Activation::Gelu => map([&x], |[x]| gelu_value(x)),
        Activation::ReluSquared => map([&x], |[x]| relu_value(x) * relu_value(x)),
        Activation::Silu => map([&x], |[x]| silu_value(x)),
        Activation::Sigmoid => map([&x], |[x]| math::sigmoid(x)),
        Activation::LogSigmoid => map([&x], |[x]| log_sigmoid_value(x)),
        Activation::EluPlusOne => map([&x], |[x]| exp_or(x, x + 1.0)),
    };
    [y, x]
}

/// dx = dy · f'(x).
pub fn activation_backward(kind: Activation, x: &FlexTensor, dy: &FlexTensor) -> FlexTensor {
    let [x, dy] = same_order([x, dy]);
    match kind {
        Activation::Gelu => map([&x, &dy], |[x, dy]| dy * gelu_slope(x)),
        Activation::ReluSquared => map([&x, &dy], |[x, dy]| dy * 2.0 * relu_value(x)),
        Activation::Silu => map([&x, &dy], |[x, dy]| dy * silu_slope(x)),
        Activation::Sigmoid => map([&x, &dy], |[x, dy]| dy * sigmoid_slope(x)),
        Activation::LogSigmoid => map([&x, &dy], |[x, dy]| dy * math::sigmoid(-x)),
        Activation::EluPlusOne => map([&x, &dy], |[x, dy]| dy * exp_or(x, 1.0)),
    }
}

/// f(gate) · up, and both inputs to save for the backward pass.
pub fn gated(f: GateActivation, gate: &FlexTensor, up: &FlexTensor) -> [FlexTensor; 3] {
    let [gate, up] = same_order([gate, up]);
    let y = match f {
        GateActivation::Silu => map([&gate, &up], |[gate, up]| silu_value(gate) * up),
        GateActivation::Sigmoid => map([&gate, &up], |[gate, up]| math::sigmoid(gate) * up),
    };
    [y, gate, up]
}

/// The gradients of gate and up.
pub fn gated_backward(
    f: GateActivation,
    gate: &FlexTensor,
    up: &FlexTensor,
    dy: &FlexTensor,
    needs: [bool; 2],
) -> [Option<FlexTensor>; 2] {
    let inputs @ [gate, _, dy] = &same_order([gate, up, dy]);
    let inputs = inputs.each_ref();
    let d_gate = || match f {
        GateActivation::Silu => map(inputs, |[gate, up, dy]| dy * up * silu_slope(gate)),
        GateActivation::Sigmoid => map(inputs, |[gate, up, dy]| dy * up * sigmoid_slope(gate)),
    };
    let d_up = || match f {
        GateActivation::Silu => map([gate, dy], |[gate, dy]| dy * silu_value(gate)),
        GateActivation::Sigmoid => map([gate, dy], |[gate, dy]| dy * math::sigmoid(gate)),
    };
    [needs[0].then(d_gate), needs[1].then(d_up)]
}

/// 2u, where GELU(x) = x σ(2u).
#[inline(always)]
fn gelu_argument(x: f32) -> f32 {
    x * math::mul_add(x * x, 2.0 * GELU_SCALE * GELU_CUBIC, 2.0 * GELU_SCALE)
}

#[inline(always)]
fn gelu_value(x: f32) -> f32 {
    x * math::sigmoid(gelu_argument(x))
}

#[inline(always)]
fn gelu_slope(x: f32) -> f32 {
    let s = math::sigmoid(gelu_argument(x));
    let inner = math::mul_add(x * x, 6.0 * GELU_SCALE * GELU_CUBIC, 2.0 * GELU_SCALE);
    math::mul_add(x * s * (1.0 - s), inner, s)
}

/// max(x, 0); propagates NaN.
#[inline(always)]
fn relu_value(x: f32) -> f32 {
    if x < 0.0 { 0.0 } else { x }
}

#[inline(always)]
pub fn silu_value(x: f32) -> f32 {
    x * math::sigmoid(x)
}

#[inline(always)]
pub fn silu_slope(x: f32) -> f32 {
    let s = math::sigmoid(x);
    s * (1.0 + x * (1.0 - s))
}

#[inline(always)]
fn sigmoid_slope(x: f32) -> f32 {
    math::sigmoid(x) * math::sigmoid(-x)
}

#[inline(always)]
fn log_sigmoid_value(x: f32) -> f32 {
    x.min(0.0) - math::ln_1p_unit(math::exp(-x.abs()))
}

/// `other` above 0, else e^x; propagates NaN.
#[inline(always)]
fn exp_or(x: f32, other: f32) -> f32 {
    if x > 0.0 { other } else { math::exp(x) }
}

/// The tensors in one dense memory order: unchanged if they agree on one, else contiguous copies.
fn same_order<const K: usize>(tensors: [&FlexTensor; K]) -> [FlexTensor; K] {
    let strides = tensors[0].layout().strides();
    let agree = |t: &&FlexTensor| t.layout().strides() == strides && dense(t).is_some();
    if tensors.iter().all(agree) { tensors.map(FlexTensor::clone) } else { tensors.map(contiguous) }
}

/// Applies `f` to the elements of tensors from [`same_order`], in their memory order.
fn map<const K: usize>(
    tensors: [&FlexTensor; K],
    f: impl Fn([f32; K]) -> f32 + Sync,
) -> FlexTensor {
    const TASK: usize = 1 << 14;
    let data = tensors.map(|t| dense(t).expect("tensors without gaps"));
    let mut out = buffer(data[0].len());
    out.par_chunks_mut(TASK).enumerate().for_each(|(task, out)| {
        let data = data.map(|data| &data[task * TASK..][..out.len()]);
        for i in 0..out.len() {
            out[i] = f(data.map(|data| data[i]));
        }
    });
    from_vec_like(out, tensors[0])
}
