//! What a kind of optimiser is to the trainer.

use std::fmt::Debug;

use burn::tensor::DType;
use burn::tensor::ops::FloatTensor;
use longwall_config::Problems;
use longwall_kernels::backend::OpBackend;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// A kind of optimiser: its settings, which are the table `[train.optimiser]`, and its update.
///
/// The trainer keeps the state, holds f32 masters of rounded parameters, and writes both to
/// checkpoints; a kind says what its state is, and updates one parameter at a time.
pub trait OptimiserKind:
    Clone + Debug + Default + PartialEq + Serialize + DeserializeOwned
{
    /// Records every problem of the settings; `table` is the dotted name of their table.
    fn validate(&self, table: &str, problems: &mut Problems);

    /// What is kept for `parameter` between updates. All of it is f32 and zero before the first.
    fn state(&self, parameter: &Parameter) -> Vec<StateTensor>;

    /// One update of `parameter`. Buffers that nobody else owns may be updated in place.
    fn step<B: OpBackend>(
        &self,
        parameter: &Parameter,
        update: &Update,
        inputs: StepInputs<B>,
    ) -> StepOutputs<B>;
}

/// A parameter of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Its place in the model: segments joined by dots, for example `blocks.0.mlp.up.weight`.
    pub path: String,
    /// Its shape.
    pub shape: Vec<usize>,
}

impl Parameter {
    /// Whether weight decay applies: to matrices, but not to token and position embeddings. Norms,
    /// biases, gates' biases and the vectors of attention variants have one dimension.
    pub fn decays(&self) -> bool {
        let embedding = |part: &str| part == "embedding" || part == "positions";
        self.shape.len() >= 2 && !self.path.split('.').any(embedding)
    }
}

/// One tensor of a parameter's state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateTensor {
    /// Its name, which no other tensor of the parameter's state has: checkpoints hold it as
    /// `NAME.PATH`, the path being the parameter's.
    pub name: &'static str,
    /// Its shape.
    pub shape: Vec<usize>,
}

impl StateTensor {
    /// A tensor of the parameter's shape.
    pub fn like(parameter: &Parameter, name: &'static str) -> Self {
        StateTensor { name, shape: parameter.shape.clone() }
    }
}

/// The numbers of one update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Update {
    /// Learning rate.
    pub lr: f64,
    /// How many updates there were, this one included: 1 for the first.
    pub number: u64,
    /// Factor on the gradients.
    pub grad_scale: f32,
}

/// The tensors of one parameter before an update.
#[derive(Debug)]
pub struct StepInputs<B: OpBackend> {
    /// The parameter, f32.
    pub parameter: FloatTensor<B>,
    /// Its gradient, f32, before [`Update::grad_scale`].
    pub gradient: FloatTensor<B>,
    /// Its state, in the order of [`OptimiserKind::state`].
    pub state: Vec<FloatTensor<B>>,
    /// The type of the copy that the model computes with, where it is not f32.
    pub copy: Option<DType>,
}

/// The tensors of one parameter after an update.
#[derive(Debug)]
pub struct StepOutputs<B: OpBackend> {
    /// The new parameter, f32.
    pub parameter: FloatTensor<B>,
    /// Its new state, in the order of [`OptimiserKind::state`].
    pub state: Vec<FloatTensor<B>>,
    /// The new parameter as [`StepInputs::copy`], from a kind that makes it in the same pass;
    /// otherwise the trainer makes it.
    pub copy: Option<FloatTensor<B>>,
}
