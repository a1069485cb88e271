//! NorMuon (Li et al. 2025, "NorMuon: making Muon more efficient and scalable", algorithm 1): Muon, with the
//! rows of the orthogonal factor brought to equal size by a second moment of each row.
//!
//! With O from the momentum as in [`muon`](super::muon), of m rows and n columns: v ← β₂v + (1−β₂)·mean(O²)
//! over the columns, Ô = O / (√v + ε), and W ← W − lr·(0.2·√(mn)/‖Ô‖·Ô + λW). The root mean square of an update
//! is 0.2, about AdamW's, so that AdamW's learning rate and weight decay can be kept.

use burn::tensor::Tensor;
use longwall_config::Problems;
use longwall_kernels::backend::OpBackend;
use serde::{Deserialize, Serialize};

use super::elementwise::{check_decay, check_rate, decayed, shaped, unflat};
use super::muon::{Coefficients, Direction, Matrix, Others, join, layout, step_matrices};
use super::{
    Method, OptimiserKind, Parameter, StateTensor, Step, StepInputs, StepOutputs, Update, adamw,
};

/// ε, added to the root of a row's second moment.
const EPS: f64 = 1e-8;

/// The keys of `kind = "normuon"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// μ, decay rate of the momentum. Default 0.95.
    pub momentum: f64,
    /// β₂, decay rate of the rows' second moment. Default 0.95.
    pub beta2: f64,
    /// Nesterov momentum. Default true.
    pub nesterov: bool,
    /// The polynomials that orthogonalise. Default `newton-schulz`.
    pub coefficients: Coefficients,
    /// How many of them. Default 5.
    pub steps: usize,
    /// Whether the block of each head in q, k, v and output projections is a matrix of its own. Default false.
    pub per_head: bool,
    /// λ, decoupled weight decay, multiplied by the step's learning rate. Default 0.1.
    pub weight_decay: f64,
    /// Cautious weight decay: only elements decay that the update moves towards zero. Default false.
    pub cautious_decay: bool,
    /// AdamW for embeddings, output layer, convolutions and vectors.
    pub adamw: adamw::Config,
    /// Its learning rate, as a multiple of the schedule's. Default 1.
    pub adamw_lr: f64,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            momentum: 0.95,
            beta2: 0.95,
            nesterov: true,
            coefficients: Coefficients::default(),
            steps: 5,
            per_head: false,
            weight_decay: 0.1,
            cautious_decay: false,
            adamw: adamw::Config::default(),
            adamw_lr: 1.0,
        }
    }
}

impl OptimiserKind for Config {
    const STATE_KEYS: &'static [&'static str] = &["per_head"];

    fn validate(&self, table: &str, problems: &mut Problems) {
        self.direction().validate(table, problems);
        check_rate(table, "beta2", self.beta2, "use 0.95", problems);
        check_decay(table, self.weight_decay, problems);
        self.others().validate(table, problems);
    }

    fn method(&self, parameter: &Parameter) -> Method {
        if !parameter.is_hidden_matrix() {
            return self.others().method(parameter);
        }
        let weight_decay = self.weight_decay * parameter.decay;
        Method { name: "normuon", lr: 1.0, weight_decay }
    }

    /// The momentum and the rows' second moment of a matrix; AdamW's moments of other parameters.
    fn state(&self, parameter: &Parameter) -> Vec<StateTensor> {
        if !parameter.is_hidden_matrix() {
            return self.adamw.state(parameter);
        }
        let [blocks, rows, _] = self.layout(parameter);
        let second = StateTensor { name: "v", shape: vec![blocks, rows] };
        vec![StateTensor::like(parameter, "m"), second]
    }

    fn update_flops(&self, parameter: &Parameter) -> f64 {
        if parameter.is_hidden_matrix() { self.direction().flops(parameter) } else { 0.0 }
    }

    fn step<B: OpBackend>(
        &self,
        parameter: &Parameter,
        update: &Update,
        inputs: StepInputs<B>,
    ) -> StepOutputs<B> {
        self.step_all(vec![Step { parameter, update: *update, inputs }]).swap_remove(0)
    }

    fn step_all<B: OpBackend>(&self, steps: Vec<Step<'_, B>>) -> Vec<StepOutputs<B>> {
        let finish = |matrix: Matrix<'_, B>, o: Tensor<B, 3>| {
            let Matrix { parameter, update, shape, w, m, state } = matrix;
            let [v] = state.try_into().expect("a second moment");
            let [blocks, rows, _] = o.dims();
            let (o, v) = self.normalised(o, shaped::<B, 3>(v, [blocks, rows, 1]));
            let o = join(o, shape, self.direction().heads(parameter));
            let rate = update.lr * self.weight_decay * parameter.decay;
            let w = decayed(w, &o, rate, self.cautious_decay) - o * update.lr;
            let state = vec![unflat(m, &shape), unflat(v, &[blocks, rows])];
            StepOutputs { parameter: unflat(w, &shape), state, copy: None }
        };
        step_matrices(self.direction(), self.others(), steps, finish)
    }
}

impl Config {
    /// The update 0.2·√(mn)/‖Ô‖·Ô of each of the blocks `o` `[blocks, rows, columns]`, and the new second moment
    /// `v` `[blocks, rows, 1]` of its rows.
    fn normalised<B: OpBackend>(
        &self,
        o: Tensor<B, 3>,
        v: Tensor<B, 3>,
    ) -> (Tensor<B, 3>, Tensor<B, 3>) {
        let [_, rows, columns] = o.dims();
        let v = v * self.beta2 + (o.clone() * o.clone()).mean_dim(2) * (1.0 - self.beta2);
        let o = o / (v.clone().sqrt() + EPS);
        let norm = (o.clone() * o.clone()).sum_dim(2).sum_dim(1).sqrt().clamp_min(1e-20);
        (o / norm * (0.2 * ((rows * columns) as f64).sqrt()), v)
    }

    fn layout(&self, parameter: &Parameter) -> [usize; 3] {
        let shape = [parameter.shape[0], parameter.shape[1]];
        layout(shape, self.direction().heads(parameter))
    }

    fn direction(&self) -> Direction {
        let Config { momentum, nesterov, coefficients, steps, per_head, .. } = *self;
        Direction { momentum, nesterov, coefficients, steps, per_head }
    }

    fn others(&self) -> Others<'_> {
        Others { adamw: &self.adamw, lr: self.adamw_lr }
    }
}

#[cfg(test)]
mod tests;
