//! `state.json`: where a run stands, except for its tensors.

use std::fs;
use std::path::Path;

use longwall_data::{Cursor, Tokenizer};
use longwall_model::ModelConfig;
use serde::{Deserialize, Serialize};

use super::{Best, CheckpointError};
use crate::config::RunConfig;
use crate::guard::GuardState;
use crate::metrics::ValidationRecord;

/// Where a run stood when its checkpoint was written.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// Finished steps.
    pub step: u64,
    /// Tokens seen.
    pub tokens: u64,
    /// Optimiser updates: finished steps minus skipped ones.
    pub updates: u64,
    /// The run's seed. All randomness is a function of it and of the step, so no other random state is
    /// needed.
    pub seed: u64,
    /// The loader's position.
    pub cursor: Cursor,
    /// Skipped steps, and the window of the outlier test.
    pub guard: GuardState,
    /// Loss of the last step, unless it was skipped.
    pub loss: Option<f32>,
    /// The best validation so far.
    pub best: Option<Best>,
    /// The last validation.
    pub validation: Option<ValidationRecord>,
    /// Length of `metrics.jsonl`: a resume truncates the file to it.
    pub metrics_bytes: u64,
    /// Length of `samples.txt`: a resume truncates the file to it.
    pub samples_bytes: u64,
    /// Seconds of training so far.
    pub seconds: f64,
    /// Rows of one forward and backward pass: decides the order in which gradients are summed.
    pub micro_batch: usize,
    /// The tokenizer.
    pub tokenizer: TokenizerIdentity,
    /// The model.
    pub model: ModelConfig,
}

impl State {
    /// Reads a state file.
    ///
    /// # Errors
    /// When it cannot be read, or is damaged.
    pub fn read(path: &Path) -> Result<Self, CheckpointError> {
        let bytes = fs::read(path)
            .map_err(|source| CheckpointError::Read { path: path.to_owned(), source })?;
        serde_json::from_slice(&bytes)
            .map_err(|error| CheckpointError::damaged(path, error.to_string()))
    }

    /// Why no run of `config` writes this state, if there is a reason: a resume would count on from
    /// impossible numbers.
    pub(super) fn impossible(&self, config: &RunConfig) -> Option<String> {
        let rows = config.train.batch_rows(config.data.seq_len);
        if !(1..=rows).contains(&self.micro_batch) {
            let micro = self.micro_batch;
            return Some(format!("micro_batch is {micro}; allowed: 1 to a step's {rows} rows"));
        }
        let step = self.step;
        let &GuardState { skipped, in_a_row, .. } = &self.guard;
        let tokens = step.checked_mul(config.train.batch_tokens);
        if tokens.is_none_or(|tokens| tokens != self.tokens) {
            let (tokens, batch) = (self.tokens, config.train.batch_tokens);
            return Some(format!("it has {tokens} tokens after {step} steps of {batch}"));
        }
        if skipped.checked_add(self.updates) != Some(step) || in_a_row > skipped {
            let updates = self.updates;
            return Some(format!(
                "of {step} steps {updates} were taken and {skipped} skipped, {in_a_row} in a row"
            ));
        }
        None
    }

    /// The best checkpoint, if it is this one and `config` keeps the best.
    pub(crate) fn best_here(&self, config: &RunConfig) -> Option<Best> {
        self.best.filter(|best| config.train.checkpoint.best && best.step == self.step)
    }

    /// The file's bytes.
    pub(super) fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec_pretty(self).expect("a state has a JSON form")
    }
}

/// Identifies a tokenizer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenizerIdentity {
    /// Its name.
    pub name: String,
    /// SHA-256 of its vocabulary.
    pub fingerprint: String,
    /// How many tokens it has.
    pub vocab_size: usize,
}

impl TokenizerIdentity {
    /// The identity of `tokenizer`.
    pub fn of(tokenizer: &Tokenizer) -> Self {
        TokenizerIdentity {
            name: tokenizer.name().to_owned(),
            fingerprint: tokenizer.fingerprint(),
            vocab_size: tokenizer.vocab_size(),
        }
    }

    /// The first digits of the fingerprint.
    pub(super) fn short(&self) -> &str {
        self.fingerprint.get(..12).unwrap_or(&self.fingerprint)
    }
}
