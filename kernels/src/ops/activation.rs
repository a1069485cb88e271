//! Elementwise activations, and the gated one of SwiGLU.

use burn::tensor::Tensor;
use burn::tensor::activation::sigmoid;
use burn::tensor::backend::Backend;
use burn::tensor::ops::{FloatTensor, IntTensor};

use crate::backend::{Op, OpBackend, primitive, tensor};

/// √(2/π), the factor of GELU's tanh form.
const GELU_SCALE: f32 = 0.797_884_6;
/// The cubic coefficient of GELU's tanh form.
const GELU_CUBIC: f32 = 0.044_715;

/// GELU(x) = x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³))), elementwise.
///
/// The tanh form of Hendrycks and Gimpel (2016, section 2), which GPT-2 uses. The exact form, with
/// the error function, differs by up to 5e-4 and is not offered.
pub fn gelu<B: OpBackend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    activation(Activation::Gelu, x)
}

/// max(x, 0)², elementwise (So et al., "Primer", 2021, section 3.1).
pub fn relu_squared<B: OpBackend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    activation(Activation::ReluSquared, x)
}

/// x σ(x), elementwise, also called swish (Elfwing et al., 2017).
pub fn silu<B: OpBackend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    activation(Activation::Silu, x)
}

/// ln σ(x) = min(x, 0) − ln(1 + e^−|x|), elementwise, which neither overflows nor cancels.
pub fn log_sigmoid<B: OpBackend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    activation(Activation::LogSigmoid, x)
}

/// Applies an activation to every element; the result has the shape of `x`.
pub fn activation<B: OpBackend, const D: usize>(kind: Activation, x: Tensor<B, D>) -> Tensor<B, D> {
    tensor(B::run(&kind, [primitive(x)], vec![]))
}

/// silu(gate) · up, elementwise: the hidden layer of SwiGLU (Shazeer, 2020, equation 6).
///
/// # Panics
/// When the shapes differ.
pub fn swiglu<B: OpBackend, const D: usize>(
    gate: Tensor<B, D>,
    up: Tensor<B, D>,
) -> Tensor<B, D> {
    assert_eq!(gate.dims(), up.dims(), "shapes of SwiGLU's gate and up");
    tensor(B::run(&SwiGlu, [primitive(gate), primitive(up)], vec![]))
}

/// The elementwise activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// See [`gelu`].
    Gelu,
    /// See [`relu_squared`].
    ReluSquared,
    /// See [`silu`].
    Silu,
    /// See [`log_sigmoid`].
    LogSigmoid,
}

impl Op<1> for Activation {
    fn reference<B: Backend>(
        &self,
        [x]: [FloatTensor<B>; 1],
        _ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        let shape = burn::tensor::TensorMetadata::shape(&x);
        let x = tensor::<B, 1>(B::float_reshape(x, [shape.num_elements()].into()));
        let y = match self {
            Activation::Gelu => {
                let cubic = x.clone() * x.clone() * x.clone() * GELU_CUBIC;
                let u = (x.clone() + cubic) * GELU_SCALE;
                x * 0.5 * (u.tanh() + 1.0)
            }
            Activation::ReluSquared => {
                let negative = x.clone().lower_elem(0.0);
                let positive = x.mask_fill(negative, 0.0);
                positive.clone() * positive
            }
            Activation::Silu => x.clone() * sigmoid(x),
            Activation::LogSigmoid => {
                let tail = x.clone().abs().neg().exp().log1p();
                x.clamp_max(0.0) - tail
            }
        };
        B::float_reshape(primitive(y), shape)
    }
}

/// The operation of [`swiglu`]: inputs gate and up.
#[derive(Clone, Debug)]
pub struct SwiGlu;

impl Op<2> for SwiGlu {
    fn reference<B: Backend>(
        &self,
        [gate, up]: [FloatTensor<B>; 2],
        ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        let gate = Activation::Silu.reference::<B>([gate], ints);
        B::float_mul(gate, up)
    }
}
