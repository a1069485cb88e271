//! Elementwise activations, and those that gate another tensor.

pub(super) mod cpu;
pub(super) mod cuda;
pub(crate) mod kernel;

use burn::tensor::activation::sigmoid as burn_sigmoid;
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

/// σ(x) = 1 / (1 + e^−x), elementwise.
pub fn sigmoid<B: OpBackend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    activation(Activation::Sigmoid, x)
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
    gated(GateActivation::Silu, gate, up)
}

/// σ(gate) · x, elementwise (Dauphin et al., 2017, equation 1).
///
/// # Panics
/// When the shapes differ.
pub fn glu<B: OpBackend, const D: usize>(gate: Tensor<B, D>, x: Tensor<B, D>) -> Tensor<B, D> {
    gated(GateActivation::Sigmoid, gate, x)
}

fn gated<B: OpBackend, const D: usize>(
    f: GateActivation,
    gate: Tensor<B, D>,
    x: Tensor<B, D>,
) -> Tensor<B, D> {
    assert_eq!(gate.dims(), x.dims(), "shapes of a gate and what it multiplies");
    tensor(B::run(&Gated(f), [primitive(gate), primitive(x)], vec![]))
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
    /// See [`sigmoid`].
    Sigmoid,
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
                x * burn_sigmoid(u * 2.0)
            }
            Activation::ReluSquared => {
                let negative = x.clone().lower_elem(0.0);
                let positive = x.mask_fill(negative, 0.0);
                positive.clone() * positive
            }
            Activation::Silu => x.clone() * burn_sigmoid(x),
            Activation::Sigmoid => burn_sigmoid(x),
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
            Activation::Sigmoid => Function::Sigmoid,
            Activation::LogSigmoid => Function::LogSigmoid,
            Activation::EluPlusOne => Function::EluPlusOne,
        }
    }
}

/// What is applied to a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GateActivation {
    /// σ(g)
    Sigmoid,
    /// g σ(g)
    Silu,
}

impl GateActivation {
    fn activation(self) -> Activation {
        match self {
            GateActivation::Sigmoid => Activation::Sigmoid,
            GateActivation::Silu => Activation::Silu,
        }
    }
}

/// The operation of [`swiglu`] and [`glu`]: inputs are the gate and what it multiplies.
#[derive(Clone, Debug)]
pub struct Gated(pub GateActivation);

impl Op<2> for Gated {
    fn reference<B: OpBackend>(
        &self,
        [gate, x]: [FloatTensor<B>; 2],
        ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        B::float_mul(self.0.activation().reference::<B>([gate], ints), x)
    }

    fn cpu_forward(
        &self,
        [gate, x]: &[FlexTensor; 2],
        _ints: &[FlexTensor],
        _needs: [bool; 2],
    ) -> Option<Forward<FlexTensor>> {
        let [output, gate, x] = cpu::gated(self.0, gate, x);
        Some(Forward { output, saved: vec![gate, x] })
    }

    fn cpu_backward(
        &self,
        saved: Vec<FlexTensor>,
        _ints: &[FlexTensor],
        grad: FlexTensor,
        needs: [bool; 2],
    ) -> [Option<FlexTensor>; 2] {
        cpu::gated_backward(self.0, &saved[0], &saved[1], &grad, needs)
    }

    fn cuda_forward(
        &self,
        [gate, x]: &[CudaTensor; 2],
        _ints: &[CudaTensor],
        _needs: [bool; 2],
    ) -> Option<Forward<CudaTensor>> {
        let [output, gate, x] = cuda::gated(self.0.activation().cuda(), gate, x)?;
        Some(Forward { output, saved: vec![gate, x] })
    }

    fn cuda_backward(
        &self,
        saved: Vec<CudaTensor>,
        _ints: &[CudaTensor],
        grad: CudaTensor,
        needs: [bool; 2],
    ) -> [Option<CudaTensor>; 2] {
        let function = self.0.activation().cuda();
        let [d_gate, d_x] = cuda::gated_backward(function, &saved[0], &saved[1], &grad);
        [needs[0].then_some(d_gate), needs[1].then_some(d_x)]
    }
}

#[cfg(test)]
mod tests;
