//! AdamW (Loshchilov and Hutter 2019, "Decoupled weight decay regularization", algorithm 2).
//!
//! m ← β₁m + (1−β₁)g, v ← β₂v + (1−β₂)g², p ← p − lr·(m̂ / (√v̂ + ε) + λp), where m̂ = m / (1−β₁ᵗ)
//! and v̂ = v / (1−β₂ᵗ) at update t. λ is 0 for parameters without decay ([`Parameter::decays`]).

use longwall_config::Problems;
use longwall_kernels::backend::OpBackend;
use longwall_kernels::ops::adamw::{AdamwStep, adamw};
use serde::{Deserialize, Serialize};

use super::{OptimiserKind, Parameter, StateTensor, StepInputs, StepOutputs, Update};

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
}

impl Default for Config {
    fn default() -> Self {
        Config { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 }
    }
}

impl OptimiserKind for Config {
    fn validate(&self, table: &str, problems: &mut Problems) {
        for (key, beta) in [("beta1", self.beta1), ("beta2", self.beta2)] {
            problems.check(
                (0.0..1.0).contains(&beta),
                format!("{table}.{key}"),
                beta,
                "0 up to but not including 1",
                "use 0.9 for beta1 and 0.95 or 0.999 for beta2",
            );
        }
        problems.check(
            self.eps.is_finite() && self.eps > 0.0,
            format!("{table}.eps"),
            self.eps,
            "a number above 0",
            "use 1e-8",
        );
        problems.check(
            self.weight_decay.is_finite() && self.weight_decay >= 0.0,
            format!("{table}.weight_decay"),
            self.weight_decay,
            "0 or more",
            "use 0.1, or 0 for no decay",
        );
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
        let step = AdamwStep {
            lr: update.lr as f32,
            beta1: self.beta1 as f32,
            beta2: self.beta2 as f32,
            eps: self.eps as f32,
            weight_decay: if parameter.decays() { self.weight_decay as f32 } else { 0.0 },
            step: update.number,
            grad_scale: update.grad_scale,
        };
        let StepInputs { parameter, gradient, state, copy } = inputs;
        let [m, v] = state.try_into().expect("two moments");
        let ([parameter, m, v], copy) = adamw::<B>(&step, [parameter, gradient, m, v], copy);
        StepOutputs { parameter, state: vec![m, v], copy }
    }
}

#[cfg(test)]
mod tests;
