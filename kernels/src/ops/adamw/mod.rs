//! One AdamW step (Loshchilov and Hutter, 2019, algorithm 2), with the gradient's clipping factor
//! folded in.

mod cpu;
mod cuda;
mod kernel;

use burn::backend::Flex;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{DType, FloatDType};
use burn_flex::FlexTensor;

use crate::backend::{NoGradOp, OpBackend};
use crate::cuda::CudaTensor;

/// The hyperparameters of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamwStep {
    /// Learning rate.
    pub lr: f32,
    /// Decay of the first moment, in `0..1`.
    pub beta1: f32,
    /// Decay of the second moment, in `0..1`.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay, per unit of learning rate.
    pub weight_decay: f32,
    /// Number of this step, from 1.
    pub step: u64,
    /// Factor on the gradient: 1, or the clipping factor.
    pub grad_scale: f32,
}

impl AdamwStep {
    /// `[1 − β₁ᵗ, 1 − β₂ᵗ]`.
    fn corrections(&self) -> [f32; 2] {
        [self.beta1, self.beta2].map(|b| (1.0 - f64::from(b).powf(self.step as f64)) as f32)
    }
}

/// One step on one parameter: m ← β₁m + (1−β₁)g, v ← β₂v + (1−β₂)g²,
/// p ← p − lr·(m̂ / (√v̂ + ε) + λp). Not differentiable.
///
/// - `tensors`: the parameter, its gradient, m and v, all of one shape; updated in place if their buffers
///   are not shared
/// - `copy`: the type of a copy of the new parameter, for the next forward pass
pub fn adamw<B: OpBackend>(
    step: &AdamwStep,
    tensors: [FloatTensor<B>; 4],
    copy: Option<DType>,
) -> Stepped<FloatTensor<B>> {
    B::run_no_grad(&Adamw { step: *step, copy }, tensors)
}

/// The results of a step: the new parameter, m and v, and the copy of the parameter if requested.
pub type Stepped<T> = ([T; 3], Option<T>);

/// The operation of [`adamw`].
#[derive(Clone, Copy, Debug)]
pub struct Adamw {
    /// The step's numbers.
    pub step: AdamwStep,
    /// The type of the new parameter's copy.
    pub copy: Option<DType>,
}

impl NoGradOp for Adamw {
    type Inputs<T> = [T; 4];
    type Outputs<T> = Stepped<T>;

    fn reference<B: OpBackend>(
        &self,
        [p, g, m, v]: [FloatTensor<B>; 4],
    ) -> Stepped<FloatTensor<B>> {
        let add = |x, y| B::float_add(x, y);
        let scale = |x, s: f32| B::float_mul_scalar(x, s.into());
        let AdamwStep { lr, beta1, beta2, eps, weight_decay, grad_scale, .. } = self.step;
        let [c1, c2] = self.step.corrections();
        let g = scale(B::to_f32(g), grad_scale);
        let m = add(scale(m, beta1), scale(g.clone(), 1.0 - beta1));
        let v = add(scale(v, beta2), scale(B::float_mul(g.clone(), g), 1.0 - beta2));
        let denominator = B::float_sqrt(scale(v.clone(), 1.0 / c2));
        let denominator = B::float_add_scalar(denominator, eps.into());
        let update = B::float_div(scale(m.clone(), lr / c1), denominator);
        let p = B::float_sub(scale(p, 1.0 - lr * weight_decay), update);
        self.with_copy::<B>([p, m, v])
    }

    fn cpu(&self, tensors: [FlexTensor; 4]) -> Stepped<FlexTensor> {
        self.with_copy::<Flex>(cpu::adamw(&self.step, tensors))
    }

    fn cuda(&self, tensors: [CudaTensor; 4]) -> Stepped<CudaTensor> {
        cuda::adamw(&self.step, tensors, self.copy)
    }
}

impl Adamw {
    /// `new` with the requested copy, made after the step.
    fn with_copy<B: OpBackend>(&self, new: [FloatTensor<B>; 3]) -> Stepped<FloatTensor<B>> {
        let cast = |dtype: DType| B::float_cast(new[0].clone(), FloatDType::from(dtype));
        let copy = self.copy.map(cast);
        (new, copy)
    }
}

#[cfg(test)]
mod tests;
