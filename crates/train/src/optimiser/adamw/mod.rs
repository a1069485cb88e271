//! AdamW (Loshchilov and Hutter 2019, "Decoupled weight decay regularization", algorithm 2).
//!
//! m ← β₁m + (1−β₁)g, v ← β₂v + (1−β₂)g², p ← p − lr·(m̂ / (√v̂ + ε) + λp), where m̂ = m / (1−β₁ᵗ)
//! and v̂ = v / (1−β₂ᵗ) at update t. λ is multiplied by the parameter's own factor ([`Parameter::decay`]).

use longwall_config::Problems;
use longwall_kernels::backend::OpBackend;
use longwall_kernels::ops::adamw::{AdamwStep, adamw};
use serde::{Deserialize, Serialize};

use super::elementwise::{check_decay, check_rate, decayed, flat, unflat};
use super::{Method, OptimiserKind, Parameter, StateTensor, StepInputs, StepOutputs, Update};

/// The keys of `kind = "adamw"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// β₁, decay rate of the first moment. Default 0.9.
    pub beta1: f64,
    /// β₂, decay rate of the second moment. Default 0.95.
    pub beta2: f64,
    /// ε, added to the square root of the second moment. Default 1e-8.
    pub eps: f64,
    /// λ, decoupled weight decay, multiplied by the step's learning rate. Default 0.1.
    pub weight_decay: f64,
    /// Cautious weight decay: only elements decay that the update moves towards zero. Default false.
    pub cautious_decay: bool,
}

impl Default for Config {
    fn default() -> Self {
        Config { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, cautious_decay: false }
    }
}

impl OptimiserKind for Config {
    fn validate(&self, table: &str, problems: &mut Problems) {
        let remedy = "use 0.9 for beta1 and 0.95 or 0.999 for beta2";
        check_rate(table, "beta1", self.beta1, remedy, problems);
        check_rate(table, "beta2", self.beta2, remedy, problems);
        problems.check(
            self.eps.is_finite() && self.eps > 0.0,
            format!("{table}.eps"),
            self.eps,
            "a number above 0",
            "use 1e-8",
        );
        check_decay(table, self.weight_decay, problems);
    }

    fn method(&self, parameter: &Parameter) -> Method {
        let weight_decay = self.weight_decay * parameter.decay;
        Method { name: "adamw", lr: 1.0, weight_decay }
    }

    /// The two moments.
    fn state(&self, parameter: &Parameter) -> Vec<StateTensor> {
        ["m", "v"].map(|name| StateTensor::like(parameter, name)).to_vec()
    }

    fn step<B: OpBackend>(
        &self,
        parameter: &Parameter,
        update: &Update,
        inputs: StepInputs<B>,
    ) -> StepOutputs<B> {
        let weight_decay = self.weight_decay * parameter.decay;
        if self.cautious_decay && weight_decay != 0.0 {
            return self.cautious_step(weight_decay, &parameter.shape, update, inputs);
        }
        let StepInputs { parameter, gradient, state, copy } = inputs;
        let [m, v] = state.try_into().expect("two moments");
        let step = self.fused(weight_decay, update);
        let ([parameter, m, v], copy) = adamw::<B>(&step, [parameter, gradient, m, v], copy);
        StepOutputs { parameter, state: vec![m, v], copy }
    }
}

impl Config {
    fn fused(&self, weight_decay: f64, update: &Update) -> AdamwStep {
        AdamwStep {
            lr: update.lr as f32,
            beta1: self.beta1 as f32,
            beta2: self.beta2 as f32,
            eps: self.eps as f32,
            weight_decay: weight_decay as f32,
            step: update.number,
            grad_scale: update.grad_scale,
        }
    }

    /// The step without decay, then the decay, which depends on the step's direction: the sign of m.
    fn cautious_step<B: OpBackend>(
        &self,
        weight_decay: f64,
        shape: &[usize],
        update: &Update,
        inputs: StepInputs<B>,
    ) -> StepOutputs<B> {
        let StepInputs { parameter: old, gradient, state, .. } = inputs;
        let [m, v] = state.try_into().expect("two moments");
        let step = self.fused(0.0, update);
        let ([new, m, v], _) = adamw::<B>(&step, [old.clone(), gradient, m, v], None);
        let [old, new, direction] = [old, new, m.clone()].map(|x| flat::<B>(x, shape));
        let kept = decayed(old.clone(), &direction, update.lr * weight_decay, true);
        let parameter = unflat(new + (kept - old), shape);
        StepOutputs { parameter, state: vec![m, v], copy: None }
    }
}

#[cfg(test)]
mod tests;
