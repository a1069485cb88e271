//! The interface between suites and a model.

use longwall_data::Tokenizer;
use longwall_kernels::attention::probe::{Metric, Observation};
use longwall_model::layers::LayerWeights;

use crate::EvalError;

/// How likely a continuation is after its context.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogLikelihood {
    /// Sum of ln p over the continuation's tokens, in nats, at most 0.
    pub sum: f64,
    /// Whether greedy decoding after the context would give exactly this continuation.
    pub greedy: bool,
}

/// A language model under evaluation. Suites of what it predicts need four calls: the log-likelihood of a
/// continuation, the rolling log-likelihood of a text, the most likely token at some places, and greedy generation.
/// A fifth asks what its layers measure.
///
/// A call gets one batch, whose size the caller chooses; all its sequences have the same length if the
/// method says so. Answers are in the order of the requests.
pub trait EvalModel {
    /// The tokenizer the model was trained with.
    fn tokenizer(&self) -> &Tokenizer;

    /// Length of the sequences the model was trained on, in tokens.
    fn train_seq_len(&self) -> usize;

    /// The longest context the model can read, if learned absolute positions limit it; `None` for any
    /// length.
    fn max_len(&self) -> Option<usize>;

    /// The device, as the reports name it.
    fn device(&self) -> String;

    /// The least bytes, besides the weights, that a call with `rows` sequences of `tokens` tokens needs;
    /// none if it is not known.
    fn least_memory(&self, _rows: usize, _tokens: usize, _generates: bool) -> Option<u64> {
        None
    }

    /// The bytes that are free on the model's device; none if they are not known.
    fn available_memory(&self) -> Option<u64> {
        None
    }

    /// Sum of ln p(continuation | context) for each `(context, continuation)`, and whether greedy
    /// decoding would give it. Neither part is empty; lengths may differ.
    ///
    /// # Errors
    /// [`EvalError::Model`] when the model cannot run.
    fn log_likelihood(
        &mut self,
        requests: &[(Vec<u32>, Vec<u32>)],
    ) -> Result<Vec<LogLikelihood>, EvalError>;

    /// ln p of every token but the first, for each sequence, in nats: rolling log-likelihood.
    ///
    /// All sequences have the same length `n + 1`. The model reads the first `n` tokens, so `n` may be
    /// up to [`max_len`](Self::max_len), and returns `n` values for each sequence.
    ///
    /// # Errors
    /// [`EvalError::Model`] when the model cannot run.
    fn token_log_likelihoods(&mut self, sequences: &[Vec<u32>])
    -> Result<Vec<Vec<f32>>, EvalError>;

    /// The most likely token after each of the places of each sequence, indices of its tokens, given the
    /// tokens up to and with the place. All sequences have the same length; none is without places.
    ///
    /// # Errors
    /// [`EvalError::Model`] when the model cannot run.
    fn predict(
        &mut self,
        sequences: &[Vec<u32>],
        places: &[Vec<usize>],
    ) -> Result<Vec<Vec<u32>>, EvalError>;

    /// Greedy continuation of each prompt, at most `max_tokens` tokens each; it stops at the end-of-text token,
    /// which it does not include. Prompts of like lengths take least time.
    ///
    /// # Errors
    /// [`EvalError::Model`] when the model cannot run.
    fn generate(
        &mut self,
        prompts: &[Vec<u32>],
        max_tokens: usize,
    ) -> Result<Vec<Vec<u32>>, EvalError>;

    /// What the model's layers can measure, each metric once.
    fn metrics(&self) -> Vec<Metric>;

    /// What the layers measure while the model reads each sequence. All sequences have the same length. A metric
    /// that no code here measures is left out.
    ///
    /// # Errors
    /// [`EvalError::Model`] when the model cannot run.
    fn observe(&mut self, sequences: &[Vec<u32>]) -> Result<Vec<Vec<Observation>>, EvalError>;

    /// The weights that each layer's queries give to the keys of a sequence.
    ///
    /// # Errors
    /// [`EvalError::Model`] when the model cannot run.
    fn attention_weights(&mut self, tokens: &[u32]) -> Result<Vec<LayerWeights>, EvalError>;
}
