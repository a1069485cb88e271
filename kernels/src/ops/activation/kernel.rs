//! The kernels of activations. Each thread handles one of the vectors from `first` to `end`.

use cubecl::prelude::*;

/// √(2/π), the factor of GELU's tanh form.
const GELU_SCALE: f32 = 0.797_884_6;
/// The cubic coefficient of GELU's tanh form.
const GELU_CUBIC: f32 = 0.044_715;

/// The activation functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Function {
    /// x σ(2u) with u = √(2/π) (x + 0.044715 x³).
    Gelu,
    /// max(x, 0)².
    ReluSquared,
    /// x σ(x).
    Silu,
    /// σ(x).
    Sigmoid,
    /// ln σ(x).
    LogSigmoid,
    /// x + 1 above 0, else e^x.
    EluPlusOne,
}

/// σ(x) to a few units in the last place, with fast exponential and division.
#[cube]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + Exp::exp(-x))
}

/// x σ(x).
#[cube]
pub fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// The derivative of [`silu`].
#[cube]
pub fn silu_slope(x: f32) -> f32 {
    let s = sigmoid(x);
    s * (1.0 + x * (1.0 - s))
}

/// 2u, where GELU(x) = x σ(2u).
#[cube]
fn gelu_argument(x: f32) -> f32 {
    let linear = comptime!(2.0 * GELU_SCALE);
    let cubic = comptime!(2.0 * GELU_SCALE * GELU_CUBIC);
    x * (x * x * cubic + linear)
}

/// max(x, 0); propagates NaN.
#[cube]
fn relu(x: f32) -> f32 {
    let mut y = x;
    if x < 0.0 {
        y = f32::cast_from(0f32);
    }
    y
}

/// `other` above 0, else e^x; propagates NaN.
#[cube]
fn exp_or(x: f32, other: f32) -> f32 {
    let mut y = Exp::exp(x);
    if x > 0.0 {
        y = other;
    }
    y
}

/// f(x).
#[cube]
pub fn value(x: f32, #[comptime] function: Function) -> f32 {
    match function {
        Function::Gelu => x * sigmoid(gelu_argument(x)),
        Function::ReluSquared => relu(x) * relu(x),
        Function::Silu => silu(x),
        Function::Sigmoid => sigmoid(x),
        // ln(1 + e^−|x|) neither overflows nor cancels.
        Function::LogSigmoid => min(x, 0.0) - f32::log1p(Exp::exp(-f32::abs(x))),
        Function::EluPlusOne => exp_or(x, x + 1.0),
    }
}

#[cube]
fn slope(x: f32, #[comptime] function: Function) -> f32 {
    match function {
        Function::Gelu => {
            let linear = comptime!(2.0 * GELU_SCALE);
            let cubic = comptime!(6.0 * GELU_SCALE * GELU_CUBIC);
            let s = sigmoid(gelu_argument(x));
            x * s * (1.0 - s) * (x * x * cubic + linear) + s
        }
        Function::ReluSquared => 2.0 * relu(x),
        Function::Silu => silu_slope(x),
        Function::Sigmoid => sigmoid(x) * sigmoid(-x),
        Function::LogSigmoid => sigmoid(-x),
        Function::EluPlusOne => exp_or(x, 1.0),
    }
}

/// y = f(x).
#[cube(launch_unchecked, fast_math = FastMath::all())]
pub fn activation<E: Float, N: Size>(
    x: &Array<Vector<E, N>>,
    y: &mut Array<Vector<E, N>>,
    first: u32,
    end: u32,
    #[comptime] function: Function,
    #[define(E)] _dtype: StorageType,
) {
    let at = first as usize + ABSOLUTE_POS;
    if at < end as usize {
        let x = Vector::<f32, N>::cast_from(x[at]);
        let mut out = Vector::<f32, N>::cast_from(0f32);
        #[unroll]
        for i in 0..N::value() {
            out[i] = value(x[i], function);
        }
        y[at] = Vector::cast_from(out);
    }
}

/// dx = dy · f'(x).
#[cube(launch_unchecked, fast_math = FastMath::all())]
pub fn activation_backward<E: Float, N: Size>(
    x: &Array<Vector<E, N>>,
    dy: &Array<Vector<E, N>>,
    dx: &mut Array<Vector<E, N>>,
    first: u32,
    end: u32,
    #[comptime] function: Function,
    #[define(E)] _dtype: StorageType,
) {
    let at = first as usize + ABSOLUTE_POS;
    if at < end as usize {
        let x = Vector::<f32, N>::cast_from(x[at]);
        let dy = Vector::<f32, N>::cast_from(dy[at]);
        let mut out = Vector::<f32, N>::cast_from(0f32);
        #[unroll]
        for i in 0..N::value() {
            out[i] = dy[i] * slope(x[i], function);
        }
        dx[at] = Vector::cast_from(out);
    }
}

/// y = f(gate) · up.
#[cube(launch_unchecked, fast_math = FastMath::all())]
pub fn gated<E: Float, N: Size>(
    gate: &Array<Vector<E, N>>,
    up: &Array<Vector<E, N>>,
    y: &mut Array<Vector<E, N>>,
    first: u32,
    end: u32,
    #[comptime] function: Function,
    #[define(E)] _dtype: StorageType,
) {
    let at = first as usize + ABSOLUTE_POS;
    if at < end as usize {
        let gate = Vector::<f32, N>::cast_from(gate[at]);
        let up = Vector::<f32, N>::cast_from(up[at]);
        let mut out = Vector::<f32, N>::cast_from(0f32);
        #[unroll]
        for i in 0..N::value() {
            out[i] = value(gate[i], function) * up[i];
        }
        y[at] = Vector::cast_from(out);
    }
}

/// d_gate = dy · up · f'(gate), d_up = dy · f(gate).
#[cube(launch_unchecked, fast_math = FastMath::all())]
pub fn gated_backward<E: Float, N: Size>(
    gate: &Array<Vector<E, N>>,
    up: &Array<Vector<E, N>>,
    dy: &Array<Vector<E, N>>,
    d_gate: &mut Array<Vector<E, N>>,
    d_up: &mut Array<Vector<E, N>>,
    first: u32,
    end: u32,
    #[comptime] function: Function,
    #[define(E)] _dtype: StorageType,
) {
    let at = first as usize + ABSOLUTE_POS;
    if at < end as usize {
        let gate = Vector::<f32, N>::cast_from(gate[at]);
        let up = Vector::<f32, N>::cast_from(up[at]);
        let dy = Vector::<f32, N>::cast_from(dy[at]);
        let mut out_gate = Vector::<f32, N>::cast_from(0f32);
        let mut out_up = Vector::<f32, N>::cast_from(0f32);
        #[unroll]
        for i in 0..N::value() {
            out_gate[i] = dy[i] * up[i] * slope(gate[i], function);
            out_up[i] = dy[i] * value(gate[i], function);
        }
        d_gate[at] = Vector::cast_from(out_gate);
        d_up[at] = Vector::cast_from(out_up);
    }
}
