//! The contract between an optimiser kind and the trainer.

use std::fmt::Debug;

use burn::tensor::DType;
use burn::tensor::ops::FloatTensor;
use longwall_config::Problems;
use longwall_kernels::backend::OpBackend;
use longwall_model::HeadBlocks;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// An optimiser kind: its settings, which are the table `[train.optimiser]`, and its update.
///
/// The trainer keeps the state and the f32 masters of rounded parameters, and writes both to
/// checkpoints; a kind declares its state, and updates a parameter, or several at once.
pub trait OptimiserKind:
    Clone + Debug + Default + PartialEq + Serialize + DeserializeOwned
{
    /// Keys of its table that decide which tensors its state has: a resumed run cannot change them.
    const STATE_KEYS: &'static [&'static str] = &[];

    /// Records every problem of the settings; `table` is the dotted name of their table.
    fn validate(&self, table: &str, problems: &mut Problems);

    /// How `parameter` is updated, in words and numbers.
    fn method(&self, parameter: &Parameter) -> Method;

    /// The state of `parameter` between updates: f32, and zero before the first.
    fn state(&self, parameter: &Parameter) -> Vec<StateTensor>;

    /// FLOPs of the matrix products in an update of `parameter`; 0 if it treats elements on their own. Decides
    /// which of several ranks updates it.
    fn update_flops(&self, parameter: &Parameter) -> f64 {
        let _ = parameter;
        0.0
    }

    /// One update of `parameter`. Buffers with no other owner may be updated in place.
    fn step<B: OpBackend>(
        &self,
        parameter: &Parameter,
        update: &Update,
        inputs: StepInputs<B>,
    ) -> StepOutputs<B>;

    /// One update of several parameters, in their order; for kinds that compute part of it for all of them together.
    fn step_all<B: OpBackend>(&self, steps: Vec<Step<'_, B>>) -> Vec<StepOutputs<B>> {
        let one = |Step { parameter, update, inputs }| self.step(parameter, &update, inputs);
        steps.into_iter().map(one).collect()
    }
}

/// An update of one of several parameters.
#[derive(Debug)]
pub struct Step<'a, B: OpBackend> {
    /// The parameter.
    pub parameter: &'a Parameter,
    /// Its numbers.
    pub update: Update,
    /// Its tensors.
    pub inputs: StepInputs<B>,
}

/// A parameter of the model.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameter {
    /// Its place in the model: segments joined by dots, for example `blocks.0.mlp.up.weight`.
    pub path: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Factor on the kind's weight decay: 0 for a parameter that does not decay.
    pub decay: f64,
    /// Its blocks, if it is made of one block per head.
    pub heads: Option<HeadBlocks>,
}

impl Parameter {
    /// A parameter that is not made of heads' blocks, with the decay that its shape gives: that of matrices but not of
    /// embeddings.
    pub fn new(path: String, shape: Vec<usize>) -> Self {
        let decay = if is_decayed(&path, &shape) { 1.0 } else { 0.0 };
        Parameter { path, shape, decay, heads: None }
    }

    /// Whether it is the matrix of a linear layer: not an embedding, not the output layer, not the taps of a
    /// convolution.
    pub fn is_hidden_matrix(&self) -> bool {
        let other = ["embedding", "positions", "head", "conv"];
        self.shape.len() == 2 && !self.path.split('.').any(|part| other.contains(&part))
    }
}

/// Whether weight decay applies by default: to matrices, but not to token and position embeddings. Norms,
/// biases, gates' biases and the vectors of attention variants have one dimension.
fn is_decayed(path: &str, shape: &[usize]) -> bool {
    let embedding = |part: &str| part == "embedding" || part == "positions";
    shape.len() >= 2 && !path.split('.').any(embedding)
}

/// How a parameter is updated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Method {
    /// The update's name: the kind's, or that of another kind which this one applies to some parameters.
    pub name: &'static str,
    /// Learning rate, as a multiple of the schedule's.
    pub lr: f64,
    /// Weight decay, multiplied by the learning rate.
    pub weight_decay: f64,
}

/// One tensor of a parameter's state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateTensor {
    /// Its name, unique in the parameter's state. Checkpoints store it as `NAME.PATH`, where PATH is
    /// the parameter's path.
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
    /// The number of this update, from 1.
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
    /// The type of the copy that the model computes with, if it is not f32.
    pub copy: Option<DType>,
}

/// The tensors of one parameter after an update.
#[derive(Debug)]
pub struct StepOutputs<B: OpBackend> {
    /// The new parameter, f32.
    pub parameter: FloatTensor<B>,
    /// Its new state, in the order of [`OptimiserKind::state`].
    pub state: Vec<FloatTensor<B>>,
    /// The new parameter in the type of [`StepInputs::copy`], if the kind computes it in the same pass;
    /// otherwise the trainer rounds it.
    pub copy: Option<FloatTensor<B>>,
}
