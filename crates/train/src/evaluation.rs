//! Evaluations of the model in the loop. The trainer knows when they are due, and nothing else about them.

use longwall_data::Tokenizer;
use longwall_kernels::backend::OpBackend;
use longwall_model::LanguageModel;

/// Why an evaluation failed.
pub type EvaluationError = Box<dyn std::error::Error + Send + Sync>;

/// The headline scores of an evaluation.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluated {
    /// The evaluation's name.
    pub name: String,
    /// Its scores, by name.
    pub scores: Vec<(String, f64)>,
}

/// Runs the evaluations of `train.evaluate`, which it knows by their place there.
///
/// It must not change the model, nor anything else that training depends on.
pub trait Evaluator<B: OpBackend> {
    /// Checks, before the run's folder is made, that every evaluation can run on a model such as this one. All ranks
    /// call it, rank 0 first.
    ///
    /// # Errors
    /// When one cannot.
    fn check(
        &mut self,
        tokenizer: &Tokenizer,
        model: &LanguageModel<B>,
    ) -> Result<(), EvaluationError>;

    /// Discards the results of steps after `step`, from which the run goes on: they will be trained again, as
    /// their lines in `metrics.jsonl` are written again.
    ///
    /// # Errors
    /// When they cannot be removed.
    fn discard_after(&mut self, step: u64) -> Result<(), EvaluationError>;

    /// Runs evaluation `at` on the model after `step`, with the weights that its table names. All ranks call it
    /// together. None on all but rank 0, if there are results of this step already, or if it was asked to stop: then it
    /// goes on when it is called again for this step.
    ///
    /// # Errors
    /// When it fails.
    fn evaluate(
        &mut self,
        at: usize,
        step: u64,
        model: &LanguageModel<B>,
    ) -> Result<Option<Evaluated>, EvaluationError>;
}

/// For runs without evaluations.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoEvaluations;

impl<B: OpBackend> Evaluator<B> for NoEvaluations {
    fn check(
        &mut self,
        _tokenizer: &Tokenizer,
        _model: &LanguageModel<B>,
    ) -> Result<(), EvaluationError> {
        Err("train.evaluate or eval lists evaluations, but nothing here runs them".into())
    }

    fn discard_after(&mut self, _step: u64) -> Result<(), EvaluationError> {
        Ok(())
    }

    fn evaluate(
        &mut self,
        at: usize,
        _step: u64,
        _model: &LanguageModel<B>,
    ) -> Result<Option<Evaluated>, EvaluationError> {
        unreachable!("check refused evaluation {at}")
    }
}
