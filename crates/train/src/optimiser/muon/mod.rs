//! Muon (Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"): the matrices of
//! hidden layers move along the orthogonal factor of their momentum; all other parameters follow AdamW.
//!
//! M ← μM + (1−μ)G, U = (1−μ)G + μM (Nesterov) or U = M, O ≈ UVᵀ for the singular value decomposition
//! U = UΣVᵀ (`orthogonal`), and W ← W − lr·(s·O + λW). For a matrix of m rows and n columns the factor s is
//! 0.2·√max(m, n), or √max(1, m/n) ([`Scale`]).
//!
//! O is computed in the type that the model holds the matrix in, all else in f32.

mod blocks;
pub(super) mod orthogonal;

use burn::tensor::ops::FloatTensor;
use burn::tensor::{DType, Tensor};
use longwall_config::Problems;
use longwall_kernels::backend::OpBackend;
use serde::{Deserialize, Serialize};

use self::blocks::split;
pub(super) use self::blocks::{join, layout};
pub use self::orthogonal::Coefficients;
use self::orthogonal::orthogonal_all;
use super::elementwise::{check_decay, check_rate, decayed, shaped, unflat};
use super::{
    Method, OptimiserKind, Parameter, StateTensor, Step, StepInputs, StepOutputs, Update, adamw,
};

/// How far a matrix moves at a learning rate of 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scale {
    /// 0.2·√max(m, n): the root mean square of an update is 0.2, about AdamW's, so that AdamW's learning rate
    /// and weight decay can be kept (Liu et al. 2025, "Muon is scalable for LLM training", equation 4).
    #[default]
    MatchRms,
    /// √max(1, m/n) (Jordan et al. 2024). Learning rates near 0.02 are usual.
    Spectral,
}

impl Scale {
    /// The factor for a matrix of `rows` outputs and `columns` inputs.
    fn of(self, rows: usize, columns: usize) -> f64 {
        let (rows, columns) = (rows as f64, columns as f64);
        match self {
            Scale::MatchRms => 0.2 * rows.max(columns).sqrt(),
            Scale::Spectral => (rows / columns).max(1.0).sqrt(),
        }
    }
}

/// The keys of `kind = "muon"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// μ, decay rate of the momentum. Default 0.95.
    pub momentum: f64,
    /// Nesterov momentum. Default true.
    pub nesterov: bool,
    /// The polynomials that orthogonalise. Default `newton-schulz`.
    pub coefficients: Coefficients,
    /// How many of them. Default 5.
    pub steps: usize,
    /// Whether the block of each head in q, k, v and output projections is a matrix of its own. Default false.
    pub per_head: bool,
    /// How far a matrix moves. Default `match-rms`.
    pub scale: Scale,
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
            nesterov: true,
            coefficients: Coefficients::default(),
            steps: 5,
            per_head: false,
            scale: Scale::default(),
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
        check_decay(table, self.weight_decay, problems);
        self.others().validate(table, problems);
    }

    fn method(&self, parameter: &Parameter) -> Method {
        if !parameter.is_hidden_matrix() {
            return self.others().method(parameter);
        }
        let weight_decay = self.weight_decay * parameter.decay;
        Method { name: "muon", lr: 1.0, weight_decay }
    }

    /// The momentum of a matrix; AdamW's moments of other parameters.
    fn state(&self, parameter: &Parameter) -> Vec<StateTensor> {
        match parameter.is_hidden_matrix() {
            true => vec![StateTensor::like(parameter, "m")],
            false => self.adamw.state(parameter),
        }
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
            let Matrix { parameter, update, shape, w, m, .. } = matrix;
            let [_, rows, columns] = o.dims();
            let o = join(o, shape, self.direction().heads(parameter));
            let rate = update.lr * self.weight_decay * parameter.decay;
            let w = decayed(w, &o, rate, self.cautious_decay)
                - o * (update.lr * self.scale.of(rows, columns));
            let state = vec![unflat(m, &shape)];
            StepOutputs { parameter: unflat(w, &shape), state, copy: None }
        };
        step_matrices(self.direction(), self.others(), steps, finish)
    }
}

/// A hidden matrix in an update.
pub(super) struct Matrix<'a, B: OpBackend> {
    pub parameter: &'a Parameter,
    pub update: Update,
    pub shape: [usize; 2],
    pub w: Tensor<B, 2>,
    /// The new momentum.
    pub m: Tensor<B, 2>,
    /// The rest of its state.
    pub state: Vec<FloatTensor<B>>,
}

/// One update of several parameters: `finish` moves each hidden matrix, given its orthogonal blocks `[blocks, rows,
/// columns]`; the others follow AdamW. The first tensor of a matrix's state is its momentum.
pub(super) fn step_matrices<'a, B: OpBackend>(
    direction: Direction,
    others: Others<'_>,
    steps: Vec<Step<'a, B>>,
    finish: impl Fn(Matrix<'a, B>, Tensor<B, 3>) -> StepOutputs<B>,
) -> Vec<StepOutputs<B>> {
    let (mut outputs, mut matrices, mut momenta) = (vec![], vec![], vec![]);
    for Step { parameter, update, inputs } in steps {
        if !parameter.is_hidden_matrix() {
            outputs.push(Some(others.step(parameter, &update, inputs)));
            continue;
        }
        let StepInputs { parameter: w, gradient, mut state, copy } = inputs;
        let shape = [parameter.shape[0], parameter.shape[1]];
        let [w, g, m] = [w, gradient, state.remove(0)].map(|x| shaped::<B, 2>(x, shape));
        let (u, m) = direction.of(g * update.grad_scale, m);
        momenta.push((split(u, direction.heads(parameter)), copy.unwrap_or(DType::F32)));
        matrices.push((outputs.len(), Matrix { parameter, update, shape, w, m, state }));
        outputs.push(None);
    }
    let blocks = orthogonal_all(momenta, direction.coefficients, direction.steps);
    for ((at, matrix), o) in matrices.into_iter().zip(blocks) {
        outputs[at] = Some(finish(matrix, o));
    }
    outputs.into_iter().map(|outputs| outputs.expect("an update of each")).collect()
}

impl Config {
    fn direction(&self) -> Direction {
        let Config { momentum, nesterov, coefficients, steps, per_head, .. } = *self;
        Direction { momentum, nesterov, coefficients, steps, per_head }
    }

    fn others(&self) -> Others<'_> {
        Others { adamw: &self.adamw, lr: self.adamw_lr }
    }
}

/// The direction in which a matrix moves: its momentum, made orthogonal.
#[derive(Clone, Copy)]
pub(super) struct Direction {
    pub momentum: f64,
    pub nesterov: bool,
    pub coefficients: Coefficients,
    pub steps: usize,
    pub per_head: bool,
}

/// The most polynomials that a step may apply: f32 does not get closer with more.
const MOST_STEPS: usize = 20;

impl Direction {
    pub fn validate(&self, table: &str, problems: &mut Problems) {
        check_rate(table, "momentum", self.momentum, "use 0.95", problems);
        problems.check(
            (1..=MOST_STEPS).contains(&self.steps),
            format!("{table}.steps"),
            self.steps,
            format!("1 to {MOST_STEPS}"),
            "use 5",
        );
    }

    /// The blocks that `parameter` is split into.
    pub fn heads(&self, parameter: &Parameter) -> Option<longwall_model::HeadBlocks> {
        parameter.heads.filter(|_| self.per_head)
    }

    /// FLOPs of the polynomials for `parameter`.
    pub fn flops(&self, parameter: &Parameter) -> f64 {
        let shape = [parameter.shape[0], parameter.shape[1]];
        let [blocks, rows, columns] = layout(shape, self.heads(parameter)).map(|size| size as f64);
        // XXᵀ, its square, and the product with X; X has no more rows than columns.
        let (few, many) = (rows.min(columns), rows.max(columns));
        blocks * self.steps as f64 * 2.0 * few * few * (2.0 * many + few)
    }

    /// U and the new momentum of a matrix with gradient `g` and momentum `m`.
    fn of<B: OpBackend>(&self, g: Tensor<B, 2>, m: Tensor<B, 2>) -> (Tensor<B, 2>, Tensor<B, 2>) {
        let g = g * (1.0 - self.momentum);
        let m = m * self.momentum + g.clone();
        let u = if self.nesterov { g + m.clone() * self.momentum } else { m.clone() };
        (u, m)
    }
}

/// AdamW for the parameters that are no hidden matrices.
#[derive(Clone, Copy)]
pub(super) struct Others<'a> {
    pub adamw: &'a adamw::Config,
    pub lr: f64,
}

impl Others<'_> {
    pub fn validate(&self, table: &str, problems: &mut Problems) {
        self.adamw.validate(&format!("{table}.adamw"), problems);
        problems.check(
            self.lr.is_finite() && self.lr >= 0.0,
            format!("{table}.adamw_lr"),
            self.lr,
            "0 or more",
            "give AdamW's learning rate as a multiple of train.lr, for example 1",
        );
    }

    pub fn method(&self, parameter: &Parameter) -> Method {
        Method { lr: self.lr, ..self.adamw.method(parameter) }
    }

    pub fn step<B: OpBackend>(
        &self,
        parameter: &Parameter,
        update: &Update,
        inputs: StepInputs<B>,
    ) -> StepOutputs<B> {
        let update = Update { lr: update.lr * self.lr, ..*update };
        self.adamw.step(parameter, &update, inputs)
    }
}

#[cfg(test)]
pub(super) mod tests;
