//! The tables `[[train.stages]]`: changes of the batch size, the length of rows and the window during a run.

use longwall_config::{Problems, count};
use longwall_model::ModelConfig;
use longwall_model::config::Window;
use serde::{Deserialize, Deserializer, Serialize};

use super::scalars::PhaseLength;
use super::train::{MOST_BATCH_TOKENS, nearest_divisor};
use crate::timeline::Stage;

/// A table `[[train.stages]]`: from some step on, batches of another size, rows of another length or another window.
/// What a table leaves out stays as it was before.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StageConfig {
    /// When it begins: a share of the run's tokens, steps, or tokens. 0 in the first table replaces
    /// `train.batch_tokens`, `data.seq_len` and `model.window` from the start.
    pub from: PhaseLength,
    /// Tokens of one optimiser step: a multiple of `data.seq_len`.
    #[serde(default, deserialize_with = "optional_count", skip_serializing_if = "Option::is_none")]
    pub batch_tokens: Option<u64>,
    /// Tokens of a row: a divisor of `data.seq_len`. Rows are cut from those of `data.seq_len`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seq_len: Option<usize>,
    /// Rows of one forward and backward pass.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub micro_batch: Option<usize>,
    /// What `model.window` becomes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<Window>,
}

fn optional_count<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    count(deserializer).map(Some)
}

impl StageConfig {
    /// Records the problems of table `at`, which begins `stage`, in a run of `tokens` tokens with rows of up to
    /// `seq_len`; `before` is the stage before it.
    pub(super) fn validate(
        &self,
        at: usize,
        stage: &Stage,
        before: &Stage,
        (tokens, seq_len): (u64, usize),
        problems: &mut Problems,
    ) {
        let key = |name: &str| format!("train.stages.{at}.{name}");
        let in_steps = |step: u64| match self.from {
            PhaseLength::Steps(_) => self.from.to_string(),
            _ => format!("{} (step {step})", self.from),
        };
        problems.check(
            at == 0 || stage.first_step > before.first_step,
            key("from"),
            in_steps(stage.first_step),
            format!("after step {}, where the stage before it begins", before.first_step),
            "list the stages in their order, each at least one step long",
        );
        problems.check(
            stage.first_token < tokens || tokens == 0,
            key("from"),
            in_steps(stage.first_step),
            format!("before the end of the run, {tokens} tokens"),
            "give it as a share of the run, for example 0.1, or raise train.tokens",
        );
        let changes = self.batch_tokens.is_some() || self.seq_len.is_some();
        problems.check(
            changes || self.micro_batch.is_some() || self.window.is_some(),
            format!("train.stages.{at}"),
            "a table with from alone",
            "batch_tokens, seq_len, micro_batch or window beside it",
            "say what changes, or remove the table",
        );
        if let Some(len) = self.seq_len {
            problems.check(
                len >= 2 && seq_len.is_multiple_of(len),
                key("seq_len"),
                len,
                format!("a divisor of data.seq_len ({seq_len}), at least 2"),
                format!("use {}", nearest_divisor(seq_len, len, 2)),
            );
        }
        if let Some(batch) = self.batch_tokens {
            problems.check(
                batch > 0 && batch.is_multiple_of(seq_len.max(1) as u64),
                key("batch_tokens"),
                batch,
                format!("a multiple of data.seq_len ({seq_len}) above 0"),
                format!("use {}", batch.next_multiple_of(seq_len.max(1) as u64).max(1)),
            );
            problems.check(
                batch <= MOST_BATCH_TOKENS,
                key("batch_tokens"),
                batch,
                format!("up to {MOST_BATCH_TOKENS}: a step's tokens are in memory at once"),
                "set it lower; large runs use a few million",
            );
        }
        let remedy = match self.micro_batch {
            Some(_) => "leave it out",
            None => "remove the micro_batch that it keeps from before",
        };
        check_micro_batch(stage, &key("micro_batch"), remedy, problems);
    }

    /// Records a window of table `at` that the valid `model` cannot have, by the checks of `model.window`.
    pub(super) fn validate_window(&self, at: usize, model: &ModelConfig, problems: &mut Problems) {
        let Some(window) = self.window else { return };
        let key = format!("train.stages.{at}.window");
        problems.check(
            model.has_layer_without_own_window(),
            &key,
            window,
            "a window that some layer takes: every table of model.kinds has its own",
            format!(
                "leave {key} out, or remove window from the tables of the layers that it is for"
            ),
        );
        let mut found = Problems::new();
        model.with_window(window.tokens()).validate(&mut found);
        let place = |text: &str| text.replace("model.window", &key);
        for p in found.as_slice() {
            problems.check(false, place(&p.key), &p.value, &p.allowed, place(&p.remedy));
        }
    }
}

/// Records a micro-batch of `stage` that does not divide its rows; `key` is the one that would change it, `remedy` what
/// to do beside using another.
pub(super) fn check_micro_batch(stage: &Stage, key: &str, remedy: &str, problems: &mut Problems) {
    let rows = stage.rows();
    let fits = |micro| (1..=rows).contains(&micro) && rows.is_multiple_of(micro);
    if let Some(micro) = stage.micro_batch.filter(|micro| !fits(*micro)) {
        problems.check(
            false,
            key,
            micro,
            format!("a divisor of the batch's {rows} rows (batch_tokens / seq_len)"),
            format!("use {}, or {remedy}", nearest_divisor(rows, micro, 1)),
        );
    }
}
