//! Elementwise activations, and SwiGLU's gated one.

pub(super) mod cpu;
pub(super) mod cuda;
pub(crate) mod kernel;

use burn::tensor::activation::sigmoid;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Tensor, TensorMetadata};
use burn_flex::FlexTensor;

use self::kernel::Function;
use crate::backend::{Forward, Op, OpBackend, primitive, tensor};
use crate::cuda::CudaTensor;

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

/// elu(x) + 1 = x + 1 above 0, else e^x, elementwise: a positive feature map (Katharopoulos et al., 2020, equation 7).
pub fn elu_plus_one<B: OpBackend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    activation(Activation::EluPlusOne, x)
}

/// Applies an activation to every element; the result has the shape of `x`.
pub fn activation<B: OpBackend, const D: usize>(kind: Activation, x: Tensor<B, D>) -> Tensor<B, D> {
    tensor(B::run(&kind, [primitive(x)], vec![]))
}

/// silu(gate) · up, elementwise: the hidden layer of SwiGLU (Shazeer, 2020, equation 6).
///
/// # Panics
/// When the shapes differ.
pub fn swiglu<B: OpBackend, const D: usize>(gate: Tensor<B, D>, up: Tensor<B, D>) -> Tensor<B, D> {
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
    /// See [`elu_plus_one`].
    EluPlusOne,
}

impl Op<1> for Activation {
    fn reference<B: OpBackend>(
        &self,
        [x]: [FloatTensor<B>; 1],
        _ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        let shape = x.shape();
        let x = tensor::<B, 1>(B::float_reshape(x, [shape.num_elements()].into()));
        let y = match self {
            Activation::Gelu => {
                let cubic = x.clone() * x.clone() * x.clone() * GELU_CUBIC;
                let u = (x.clone() + cubic) * GELU_SCALE;
                // (1 + tanh(u)) / 2 = σ(2u), which does not cancel for x far below 0.
                x * sigmoid(u * 2.0)
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
            Activation::EluPlusOne => {
                let positive = x.clone().greater_elem(0.0);
                let tail = x.clone().mask_fill(positive.clone(), 0.0).exp();
                tail.mask_where(positive, x + 1.0)
            }
        };
        B::float_reshape(primitive(y), shape)
    }

    fn cpu_forward(
        &self,
        [x]: &[FlexTensor; 1],
        _ints: &[FlexTensor],
        _needs: [bool; 1],
    ) -> Option<Forward<FlexTensor>> {
        let [y, x] = cpu::activation(*self, x);
        Some(Forward { output: y, saved: vec![x] })
    }

    fn cpu_backward(
        &self,
        saved: Vec<FlexTensor>,
        _ints: &[FlexTensor],
        grad: FlexTensor,
        _needs: [bool; 1],
    ) -> [Option<FlexTensor>; 1] {
        [Some(cpu::activation_backward(*self, &saved[0], &grad))]
    }

    fn cuda_forward(
        &self,
        [x]: &[CudaTensor; 1],
        _ints: &[CudaTensor],
        _needs: [bool; 1],
    ) -> Option<Forward<CudaTensor>> {
        let [output, x] = cuda::activation(self.cuda(), x)?;
        Some(Forward { output, saved: vec![x] })
    }

    fn cuda_backward(
        &self,
        saved: Vec<CudaTensor>,
        _ints: &[CudaTensor],
        grad: CudaTensor,
        _needs: [bool; 1],
    ) -> [Option<CudaTensor>; 1] {
        [Some(cuda::activation_backward(self.cuda(), &saved[0], &grad))]
    }
}

impl Activation {
    fn cuda(self) -> Function {
        match self {
            Activation::Gelu => Function::Gelu,
            Activation::ReluSquared => Function::ReluSquared,
            Activation::Silu => Function::Silu,
            Activation::LogSigmoid => Function::LogSigmoid,
            Activation::EluPlusOne => Function::EluPlusOne,
        }
    }
}

/// The operation of [`swiglu`]: inputs gate and up.
#[derive(Clone, Debug)]
pub struct SwiGlu;

impl Op<2> for SwiGlu {
    fn reference<B: OpBackend>(
        &self,
        [gate, up]: [FloatTensor<B>; 2],
        ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        let gate = Activation::Silu.reference::<B>([gate], ints);
        B::float_mul(gate, up)
    }

    fn cpu_forward(
        &self,
        [gate, up]: &[FlexTensor; 2],
        _ints: &[FlexTensor],
        _needs: [bool; 2],
    ) -> Option<Forward<FlexTensor>> {
        let [output, gate, up] = cpu::swiglu(gate, up);
        Some(Forward { output, saved: vec![gate, up] })
    }

    fn cpu_backward(
        &self,
        saved: Vec<FlexTensor>,
        _ints: &[FlexTensor],
        grad: FlexTensor,
        needs: [bool; 2],
    ) -> [Option<FlexTensor>; 2] {
        cpu::swiglu_backward(&saved[0], &saved[1], &grad, needs)
    }

    fn cuda_forward(
        &self,
        [gate, up]: &[CudaTensor; 2],
        _ints: &[CudaTensor],
        _needs: [bool; 2],
    ) -> Option<Forward<CudaTensor>> {
        let [output, gate, up] = cuda::swiglu(gate, up)?;
        Some(Forward { output, saved: vec![gate, up] })
    }

    fn cuda_backward(
        &self,
        saved: Vec<CudaTensor>,
        _ints: &[CudaTensor],
        grad: CudaTensor,
        needs: [bool; 2],
    ) -> [Option<CudaTensor>; 2] {
        let [d_gate, d_up] = cuda::swiglu_backward(&saved[0], &saved[1], &grad);
        [needs[0].then_some(d_gate), needs[1].then_some(d_up)]
    }
}

#[cfg(test)]
mod tests;
