//! `state.json`: where a run stands, except for its tensors.

use std::fs;
use std::path::Path;

use longwall_data::{Cursor, Tokenizer};
use longwall_model::ModelConfig;
use longwall_model::config::Window;
use serde::{Deserialize, Serialize};

use super::{Best, CheckpointError};
use crate::config::RunConfig;
use crate::guard::GuardState;
use crate::metrics::ValidationRecord;
use crate::noise_scale::NoiseAverages;
use crate::timeline::{OpenStage, Stage};

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
    /// Averages of what the gradient noise scale is computed from.
    #[serde(default, skip_serializing_if = "is_default")]
    pub noise: NoiseAverages,
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
    /// As `micro_batch`, of each stage of a run that has several: `micro_batch` is that of the next step.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub micro_batches: Vec<StageMicroBatch>,
    /// The tokenizer.
    pub tokenizer: TokenizerIdentity,
    /// The model, with the window of the last step.
    pub model: ModelConfig,
}

fn is_default(noise: &NoiseAverages) -> bool {
    *noise == NoiseAverages::default()
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
        let timeline = config.timeline();
        let next = &timeline.stages()[timeline.index(self.step)];
        let next = (next.rows(), self.micro_batch);
        let of_stages = self.micro_batches.iter().map(|of| (of.rows(), of.micro_batch));
        for (rows, micro) in of_stages.chain([next]) {
            if !(1..=rows).contains(&micro) {
                return Some(format!("micro_batch is {micro}; allowed: 1 to a step's {rows} rows"));
            }
        }
        let step = self.step;
        let &GuardState { skipped, in_a_row, .. } = &self.guard;
        if timeline.checked_tokens(step) != Some(self.tokens) {
            let tokens = self.tokens;
            let batches = match timeline.stages() {
                [stage] => format!("of {}", stage.batch_tokens),
                _ => "of its stages".to_owned(),
            };
            return Some(format!("it has {tokens} tokens after {step} steps {batches}"));
        }
        if skipped.checked_add(self.updates) != Some(step) || in_a_row > skipped {
            let updates = self.updates;
            return Some(format!(
                "of {step} steps {updates} were taken and {skipped} skipped, {in_a_row} in a row"
            ));
        }
        None
    }

    /// Rows of the micro-batches of a stage of the resumed run, if the run had such batches before.
    pub(crate) fn micro_batch_of(&self, stage: &Stage) -> Option<usize> {
        match &self.micro_batches[..] {
            // The only stage so far.
            [] => Some(self.micro_batch).filter(|_| stage.first_step == 0),
            known => known.iter().find(|of| of.is_of(stage)).map(|of| of.micro_batch),
        }
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

/// The micro-batches of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StageMicroBatch {
    /// Tokens of a step.
    pub batch_tokens: u64,
    /// Tokens of a row.
    pub seq_len: usize,
    /// Its window; unknown if an earlier version wrote the checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<Window>,
    /// Rows of one forward and backward pass.
    pub micro_batch: usize,
}

impl StageMicroBatch {
    /// The micro-batches of an open stage.
    pub fn of(OpenStage { stage, micro_batch }: &OpenStage) -> Self {
        let Stage { batch_tokens, seq_len, window, .. } = *stage;
        let window = Some(Window::of(window));
        StageMicroBatch { batch_tokens, seq_len, window, micro_batch: *micro_batch }
    }

    fn is_of(&self, stage: &Stage) -> bool {
        (self.batch_tokens, self.seq_len) == (stage.batch_tokens, stage.seq_len)
            && self.window.is_none_or(|window| window.tokens() == stage.window)
    }

    fn rows(&self) -> usize {
        self.batch_tokens as usize / self.seq_len.max(1)
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
