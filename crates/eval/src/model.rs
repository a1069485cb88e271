//! What a suite asks of a model.

use longwall_data::Tokenizer;

use crate::EvalError;

/// How likely a continuation is after its context.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogLikelihood {
    /// Sum of ln p over the continuation's tokens, in nats, at most 0.
    pub sum: f64,
    /// Whether greedy decoding of the context would give exactly this continuation.
    pub greedy: bool,
}

/// A language model under evaluation. Three calls answer every suite: the log-likelihood of a
/// continuation, the rolling log-likelihood of a text, and greedy generation.
///
/// A call gets one batch: the caller has chosen its size, and all its sequences have one length
/// where the method says so. Answers come back in the order of the requests.
pub trait EvalModel {
    /// The tokenizer the model was trained with.
    fn tokenizer(&self) -> &Tokenizer;

    /// Length of the sequences the model was trained on, in tokens.
    fn train_seq_len(&self) -> usize;

    /// The longest context the model can read, where learned absolute positions bound it. None:
    /// any length.
    fn max_len(&self) -> Option<usize>;

    /// The device, as the reports name it.
    fn device(&self) -> String;

    /// Sum of ln p(continuation | context) for each `(context, continuation)`, and whether greedy
    /// decoding would give it. Neither part is empty.
    ///
    /// # Errors
    /// [`EvalError::Model`] when the model cannot run.
    fn log_likelihood(
        &mut self,
        requests: &[(Vec<u32>, Vec<u32>)],
    ) -> Result<Vec<LogLikelihood>, EvalError>;

    /// ln p of every token but the first, for each sequence, in nats: rolling log-likelihood.
    ///
    /// All sequences have one length `n + 1`; the model reads the first `n` tokens, so that `n` up
    /// to [`max_len`](Self::max_len) is fine; `n` values come back for each.
    ///
    /// # Errors
    /// [`EvalError::Model`] when the model cannot run.
    fn token_log_likelihoods(&mut self, sequences: &[Vec<u32>])
    -> Result<Vec<Vec<f32>>, EvalError>;

    /// Greedy continuation of each prompt (all prompts of one length), at most `max_tokens` tokens
    /// each; it ends before the end-of-text token, which is not part of it.
    ///
    /// # Errors
    /// [`EvalError::Model`] when the model cannot run.
    fn generate(
        &mut self,
        prompts: &[Vec<u32>],
        max_tokens: usize,
    ) -> Result<Vec<Vec<u32>>, EvalError>;
}
