//! Elementwise activations, and the gated one of SwiGLU.

use burn::tensor::activation::sigmoid;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Tensor, TensorMetadata};
use burn_flex::FlexTensor;
use rayon::prelude::*;

use crate::backend::{Forward, Op, OpBackend, primitive, tensor};
use crate::cpu::{buffer, contiguous, dense, from_vec_like, math};
use crate::cuda::CudaTensor;
use crate::ops::cuda::elementwise::{self, Function};

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
        };
        B::float_reshape(primitive(y), shape)
    }

    fn cpu_forward(
        &self,
        [x]: &[FlexTensor; 1],
        _ints: &[FlexTensor],
        _needs: [bool; 1],
    ) -> Option<Forward<FlexTensor>> {
        let [x] = same_order([x]);
        let y = match self {
            Activation::Gelu => map([&x], |[x]| gelu_value(x)),
            Activation::ReluSquared => map([&x], |[x]| relu_value(x) * relu_value(x)),
            Activation::Silu => map([&x], |[x]| silu_value(x)),
            Activation::LogSigmoid => map([&x], |[x]| log_sigmoid_value(x)),
        };
        Some(Forward { output: y, saved: vec![x] })
    }

    fn cpu_backward(
        &self,
        saved: Vec<FlexTensor>,
        _ints: &[FlexTensor],
        grad: FlexTensor,
        _needs: [bool; 1],
    ) -> [Option<FlexTensor>; 1] {
        let [x, dy] = same_order([&saved[0], &grad]);
        let dx = match self {
            Activation::Gelu => map([&x, &dy], |[x, dy]| dy * gelu_slope(x)),
            Activation::ReluSquared => map([&x, &dy], |[x, dy]| dy * 2.0 * relu_value(x)),
            Activation::Silu => map([&x, &dy], |[x, dy]| dy * silu_slope(x)),
            Activation::LogSigmoid => map([&x, &dy], |[x, dy]| dy * math::sigmoid(-x)),
        };
        [Some(dx)]
    }

    fn cuda_forward(
        &self,
        [x]: &[CudaTensor; 1],
        _ints: &[CudaTensor],
        _needs: [bool; 1],
    ) -> Option<Forward<CudaTensor>> {
        let [output, x] = elementwise::activation(self.cuda(), x)?;
        Some(Forward { output, saved: vec![x] })
    }

    fn cuda_backward(
        &self,
        saved: Vec<CudaTensor>,
        _ints: &[CudaTensor],
        grad: CudaTensor,
        _needs: [bool; 1],
    ) -> [Option<CudaTensor>; 1] {
        [Some(elementwise::activation_backward(self.cuda(), &saved[0], &grad))]
    }
}

impl Activation {
    fn cuda(self) -> Function {
        match self {
            Activation::Gelu => Function::Gelu,
            Activation::ReluSquared => Function::ReluSquared,
            Activation::Silu => Function::Silu,
            Activation::LogSigmoid => Function::LogSigmoid,
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
        let [gate, up] = same_order([gate, up]);
        Some(Forward {
            output: map([&gate, &up], |[gate, up]| silu_value(gate) * up),
            saved: vec![gate, up],
        })
    }

    fn cpu_backward(
        &self,
        saved: Vec<FlexTensor>,
        _ints: &[FlexTensor],
        grad: FlexTensor,
        needs: [bool; 2],
    ) -> [Option<FlexTensor>; 2] {
        let [gate, up, dy] = same_order([&saved[0], &saved[1], &grad]);
        let d_gate = || map([&gate, &up, &dy], |[gate, up, dy]| dy * up * silu_slope(gate));
        let d_up = || map([&gate, &dy], |[gate, dy]| dy * silu_value(gate));
        [needs[0].then(d_gate), needs[1].then(d_up)]
    }

    fn cuda_forward(
        &self,
        [gate, up]: &[CudaTensor; 2],
        _ints: &[CudaTensor],
        _needs: [bool; 2],
    ) -> Option<Forward<CudaTensor>> {
        let [output, gate, up] = elementwise::swiglu(gate, up)?;
        Some(Forward { output, saved: vec![gate, up] })
    }

    fn cuda_backward(
        &self,
        saved: Vec<CudaTensor>,
        _ints: &[CudaTensor],
        grad: CudaTensor,
        needs: [bool; 2],
    ) -> [Option<CudaTensor>; 2] {
        let [d_gate, d_up] = elementwise::swiglu_backward(&saved[0], &saved[1], &grad);
        [needs[0].then_some(d_gate), needs[1].then_some(d_up)]
    }
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

/// max(x, 0); a NaN stays a NaN.
#[inline(always)]
fn relu_value(x: f32) -> f32 {
    if x < 0.0 { 0.0 } else { x }
}

#[inline(always)]
pub(super) fn silu_value(x: f32) -> f32 {
    x * math::sigmoid(x)
}

#[inline(always)]
pub(super) fn silu_slope(x: f32) -> f32 {
    let s = math::sigmoid(x);
    s * (1.0 + x * (1.0 - s))
}

#[inline(always)]
fn log_sigmoid_value(x: f32) -> f32 {
    x.min(0.0) - math::ln_1p_unit(math::exp(-x.abs()))
}

/// The tensors with one memory order, without gaps: as they are where they agree, else row-major.
fn same_order<const K: usize>(tensors: [&FlexTensor; K]) -> [FlexTensor; K] {
    let strides = tensors[0].layout().strides();
    let agree = |t: &&FlexTensor| t.layout().strides() == strides && dense(t).is_some();
    if tensors.iter().all(agree) { tensors.map(FlexTensor::clone) } else { tensors.map(contiguous) }
}

/// `f` of the elements of tensors that [`same_order`] gave, in their order.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::support::{Ad, assert_nan_shows, assert_views_agree, strides, values, wave};
    use crate::testing::{Case, Oracle, check};

    const KINDS: [Activation; 4] =
        [Activation::Gelu, Activation::ReluSquared, Activation::Silu, Activation::LogSigmoid];

    fn definition(kind: Activation, x: f64) -> f64 {
        match kind {
            Activation::Gelu => {
                let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
                x / 2.0 * (1.0 + u.tanh())
            }
            Activation::ReluSquared => x.max(0.0).powi(2),
            Activation::Silu => x / (1.0 + (-x).exp()),
            Activation::LogSigmoid => x.min(0.0) - (-x.abs()).exp().ln_1p(),
        }
    }

    #[test]
    fn agree_with_the_oracle_and_its_gradients() {
        for kind in KINDS {
            for shape in [&[1][..], &[3, 7], &[2, 65, 33], &[1, 2, 3, 4097]] {
                for range in [1.7, 12.0] {
                    let case = Case::new(kind, &[shape]).uniform(0, -range..range);
                    check(case, |inputs| {
                        let x = &inputs[0];
                        Oracle::new(&x.shape, x.data.iter().map(|&x| definition(kind, x)).collect())
                    });
                }
            }
        }
    }

    #[test]
    fn swiglu_agrees_with_the_oracle_and_its_gradients() {
        for shape in [&[1, 1, 1][..], &[2, 7, 33], &[3, 4099]] {
            check(Case::new(SwiGlu, &[shape, shape]), |inputs| {
                let [gate, up] = inputs else { panic!() };
                let value = |(&g, u): (&f64, &f64)| definition(Activation::Silu, g) * u;
                Oracle::new(&gate.shape, gate.data.iter().zip(&up.data).map(value).collect())
            });
        }
    }

    #[test]
    fn a_view_gives_what_its_copy_gives_and_keeps_its_order() {
        let view = || wave([2, 5, 3, 7], 0.0).swap_dims(1, 2);
        for kind in KINDS {
            assert_views_agree(view(), |x| activation(kind, x));
            assert_eq!(strides(&activation(kind, view())), strides(&view()));
        }
        let up = wave([2, 3, 5, 7], 1.0);
        assert_views_agree(view(), |gate| swiglu(gate, up.clone()));
        assert_views_agree(wave([3, 20], 0.0).narrow(1, 5, 10), |x| swiglu(x.clone(), x));
    }

    #[test]
    fn extreme_values_stay_finite_and_a_nan_shows() {
        let x = Tensor::<Ad, 1>::from_floats([-1e6, -90.0, 90.0, 1e6], &Default::default());
        assert_eq!(values(gelu(x.clone())), [0.0, 0.0, 90.0, 1e6]);
        assert_eq!(values(silu(x.clone())), [0.0, 0.0, 90.0, 1e6]);
        let tail = values(log_sigmoid(x));
        assert_eq!(tail[..2], [-1e6, -90.0]);
        assert!(tail[2..].iter().all(|&x| (-1e-30..=0.0).contains(&x)), "{tail:?}");
        for kind in KINDS {
            assert_nan_shows([5, 9], |x| activation(kind, x));
        }
        assert_nan_shows([5, 9], |x| swiglu(x, wave([5, 9], 1.0)));
    }

    mod cuda {
        use super::*;
        use crate::ops::support::gpu::{assert_nan_shows, assert_views_agree, floats, strides};
        use crate::ops::support::gpu::{values, wave};
        use crate::testing::check_on;

        #[test]
        #[ignore = "needs a GPU"]
        fn agree_with_the_oracle_and_its_gradients() {
            for kind in KINDS {
                for shape in [&[1][..], &[3, 7], &[2, 65, 33], &[1, 2, 3, 4097]] {
                    for range in [1.7, 12.0] {
                        let oracle = |inputs: &[Oracle]| {
                            let x = &inputs[0];
                            let y = x.data.iter().map(|&x| definition(kind, x)).collect();
                            Oracle::new(&x.shape, y)
                        };
                        let case = || Case::new(kind, &[shape]).uniform(0, -range..range);
                        check_on::<crate::Cuda, _, 1>(case(), oracle);
                        check_on::<crate::Cuda, _, 1>(case().bf16(&[0]), oracle);
                    }
                }
            }
        }

        #[test]
        #[ignore = "needs a GPU"]
        fn swiglu_agrees_with_the_oracle_and_its_gradients() {
            for shape in [&[1, 1, 1][..], &[2, 7, 33], &[3, 4099]] {
                let oracle = |inputs: &[Oracle]| {
                    let [gate, up] = inputs else { panic!() };
                    let value = |(&g, u): (&f64, &f64)| definition(Activation::Silu, g) * u;
                    Oracle::new(&gate.shape, gate.data.iter().zip(&up.data).map(value).collect())
                };
                check_on::<crate::Cuda, _, 2>(Case::new(SwiGlu, &[shape, shape]), oracle);
                let rounded = Case::new(SwiGlu, &[shape, shape]).bf16(&[0, 1]);
                check_on::<crate::Cuda, _, 2>(rounded, oracle);
            }
        }

        #[test]
        #[ignore = "needs a GPU"]
        fn a_view_gives_what_its_copy_gives_and_keeps_its_order() {
            // 8 channels, since memory has gaps after rows of 7.
            let view = || wave([2, 5, 3, 8], 0.0).swap_dims(1, 2);
            for kind in KINDS {
                assert_views_agree(view(), |x| activation(kind, x));
                assert_eq!(strides(&activation(kind, view())), strides(&view()));
            }
            let up = wave([2, 3, 5, 8], 1.0);
            assert_views_agree(view(), |gate| swiglu(gate, up.clone()));
        }

        #[test]
        #[ignore = "needs a GPU"]
        fn extreme_values_stay_finite_and_a_nan_shows() {
            let x = || floats(vec![-1e6, -90.0, 90.0, 1e6], [4]);
            for smooth in [values(gelu(x())), values(silu(x()))] {
                assert!(smooth[..2].iter().all(|x| x.abs() < 1e-30), "{smooth:?}");
                assert_eq!(smooth[2..], [90.0, 1e6]);
            }
            let tail = values(log_sigmoid(x()));
            assert_eq!(tail[..2], [-1e6, -90.0]);
            assert!(tail[2..].iter().all(|&x| (-1e-30..=0.0).contains(&x)), "{tail:?}");
            for kind in KINDS {
                assert_nan_shows([5, 9], |x| activation(kind, x));
            }
            assert_nan_shows([5, 9], |x| swiglu(x, wave([5, 9], 1.0)));
        }
    }
}
