//! Lion (Chen et al. 2023, "Symbolic discovery of optimization algorithms", program 1).
//!
//! u = sign(β₁m + (1−β₁)g), p ← p − lr·(u + λp), m ← β₂m + (1−β₂)g. λ is multiplied by the parameter's own
//! factor ([`Parameter::decay`]).

use longwall_config::Problems;
use longwall_kernels::backend::OpBackend;
use serde::{Deserialize, Serialize};

use super::elementwise::{check_decay, check_rate, decayed, flat, unflat};
use super::{Method, OptimiserKind, Parameter, StateTensor, StepInputs, StepOutputs, Update};

/// The keys of `kind = "lion"`. Its steps are larger than AdamW's: the paper suggests a learning rate 3 to 10
/// times smaller and a weight decay as many times larger.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// β₁, the momentum's weight in the update. Default 0.9.
    pub beta1: f64,
    /// β₂, decay rate of the momentum. Default 0.99.
    pub beta2: f64,
    /// λ, decoupled weight decay, multiplied by the step's learning rate. Default 0.1.
    pub weight_decay: f64,
    /// Cautious weight decay: only elements decay that the update moves towards zero. Default false.
    pub cautious_decay: bool,
}

impl Default for Config {
    fn default() -> Self {
        Config { beta1: 0.9, beta2: 0.99, weight_decay: 0.1, cautious_decay: false }
    }
}

impl OptimiserKind for Config {
    fn validate(&self, table: &str, problems: &mut Problems) {
        let remedy = "use 0.9 for beta1 and 0.99 for beta2";
        check_rate(table, "beta1", self.beta1, remedy, problems);
        check_rate(table, "beta2", self.beta2, remedy, problems);
        check_decay(table, self.weight_decay, problems);
    }

    fn method(&self, parameter: &Parameter) -> Method {
        let weight_decay = self.weight_decay * parameter.decay;
        Method { name: "lion", lr: 1.0, weight_decay }
    }

    /// The momentum.
    fn state(&self, parameter: &Parameter) -> Vec<StateTensor> {
        vec![StateTensor::like(parameter, "m")]
    }

    fn step<B: OpBackend>(
        &self,
        parameter: &Parameter,
        update: &Update,
        inputs: StepInputs<B>,
    ) -> StepOutputs<B> {
        let StepInputs { parameter: p, gradient, state, .. } = inputs;
        let [m] = state.try_into().expect("a momentum");
        let shape = &parameter.shape;
        let [p, g, m] = [p, gradient, m].map(|x| flat::<B>(x, shape));
        let g = g * update.grad_scale;
        let direction = (m.clone() * self.beta1 + g.clone() * (1.0 - self.beta1)).sign();
        let rate = update.lr * self.weight_decay * parameter.decay;
        let p = decayed(p, &direction, rate, self.cautious_decay) - direction * update.lr;
        let m = m * self.beta2 + g * (1.0 - self.beta2);
        StepOutputs { parameter: unflat(p, shape), state: vec![unflat(m, shape)], copy: None }
    }
}

#[cfg(test)]
mod tests;
