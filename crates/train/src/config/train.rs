//! The table `[train]`.

use longwall_config::{Problems, count};
use serde::{Deserialize, Serialize};
use toml::Table;

use super::evals::{EvaluateConfig, validate_evals, validate_without_average};
use super::scalars::{Every, OrOff};
use super::stages::{StageConfig, check_micro_batch};
use crate::optimiser::{GroupConfig, OptimiserConfig, validate_groups};
use crate::schedule::{Schedule, ScheduleConfig};
use crate::timeline::{Stage, Timeline};

/// The table `[train]`: length of the run, batch and optimiser.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainConfig {
    /// Length of the run in tokens; rounded up to whole steps.
    #[serde(deserialize_with = "count")]
    pub tokens: u64,
    /// Tokens of one optimiser step, over all its micro-batches: a multiple of `data.seq_len`.
    #[serde(deserialize_with = "count")]
    pub batch_tokens: u64,
    /// Rows of one forward and backward pass; determines the gradient accumulation steps. Default: the
    /// largest divisor of the batch's rows within the device's default token budget and, on a GPU, within its
    /// memory by an estimate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub micro_batch: Option<usize>,
    /// Activation checkpointing: the backward pass recomputes each block's forward pass instead of
    /// keeping its activations. Less memory, about a third more work, the same numbers. Default false.
    #[serde(default)]
    pub recompute: bool,
    /// Ranks that share each row: each computes a part of its tokens, for rows that are too long for one GPU. It
    /// divides the number of GPUs, the heads and the tokens of a row. Default 1.
    #[serde(default = "one")]
    pub context_parallel: usize,
    /// Peak learning rate.
    pub lr: f64,
    /// Coefficient of the z-loss, which training adds to the loss of each token: z_loss · ln² Σ exp(logit)
    /// (Chowdhery et al., 2022, section 5). Default 0: off.
    #[serde(default)]
    pub z_loss: f64,
    /// Largest global gradient norm; larger gradients are scaled down to it. Default 1; `"off"`.
    #[serde(default = "default_clip")]
    pub clip: OrOff,
    /// The optimiser. Default AdamW.
    #[serde(default)]
    pub optimiser: OptimiserConfig,
    /// Parameters with a learning rate, a weight decay or an optimiser of their own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<GroupConfig>,
    /// Changes of the batch size, the length of rows and the window during the run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stages: Vec<StageConfig>,
    /// Learning rate over the run. Default cosine.
    #[serde(default)]
    pub schedule: ScheduleConfig,
    /// Decay rate of an exponential moving average of the weights, which is validated beside them and
    /// written into checkpoints. Default `"off"`.
    #[serde(default = "off")]
    pub ema: OrOff,
    /// Which steps are skipped.
    #[serde(default)]
    pub skip: SkipConfig,
    /// Norms of gradients, weights and updates by layer.
    #[serde(default)]
    pub norms: NormsConfig,
    /// The gradient noise scale.
    #[serde(default)]
    pub noise_scale: NoiseScaleConfig,
    /// Validation in the loop.
    #[serde(default)]
    pub validate: ValidateConfig,
    /// Evaluations in the loop.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub evaluate: Vec<EvaluateConfig>,
    /// Samples from the model in the loop.
    #[serde(default)]
    pub sample: SampleConfig,
    /// Checkpoints.
    #[serde(default)]
    pub checkpoint: CheckpointConfig,
}

/// The largest learning rate: it fits into an f32.
const LARGEST_LR: f64 = 1e38;
/// The fewest tokens of a row that a rank computes: more than short convolutions read back.
const LEAST_SHARED_TOKENS: usize = 16;
/// The most tokens of a step.
pub(super) const MOST_BATCH_TOKENS: u64 = 1 << 32;
/// The largest coefficient of the z-loss.
const MOST_Z_LOSS: f64 = 1.0;
/// The most tokens of a sample.
const MOST_SAMPLE_TOKENS: usize = 1 << 24;

fn default_clip() -> OrOff {
    OrOff(Some(1.0))
}

fn one() -> usize {
    1
}

fn off() -> OrOff {
    OrOff(None)
}

/// The table `[train.norms]`: norms of each layer's gradients, weights and updates in the metrics.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NormsConfig {
    /// How often. Default never.
    pub every: Every,
}

impl Default for NormsConfig {
    fn default() -> Self {
        NormsConfig { every: Every(None) }
    }
}

/// The table `[train.noise_scale]`: the gradient noise scale in the metrics.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NoiseScaleConfig {
    /// How often. Default never.
    pub every: Every,
    /// Weight of the past in the moving averages of its two estimates.
    pub decay: f64,
}

impl Default for NoiseScaleConfig {
    fn default() -> Self {
        NoiseScaleConfig { every: Every(None), decay: 0.95 }
    }
}

impl NoiseScaleConfig {
    /// Records its problems in a run with these stages.
    fn validate(&self, timeline: &Timeline, problems: &mut Problems) {
        problems.check(
            (0.0..1.0).contains(&self.decay),
            "train.noise_scale.decay",
            self.decay,
            "0 to below 1",
            "use 0.95, an average over about 20 measurements",
        );
        let single = |stage: &&Stage| {
            let rows = stage.rows();
            rows < 2 || stage.micro_batch.is_some_and(|micro| micro >= rows)
        };
        let single = timeline.stages().iter().find(single).filter(|_| self.every.is_on());
        if let Some(stage) = single {
            problems.check(
                false,
                "train.noise_scale.every",
                format!("set, and all {} rows of a step are one micro-batch", stage.rows()),
                "two micro-batches a step or more, whose gradients are compared with the step's",
                "lower micro_batch or raise batch_tokens, or set every = \"never\"",
            );
        }
    }
}

/// The table `[train.skip]`: steps whose loss or gradient norm is not finite are always skipped;
/// outliers on request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SkipConfig {
    /// A step is skipped when its loss or gradient norm is more than this many standard
    /// deviations above the mean of the last `window` unskipped steps. Default `"off"`; 6 is usual.
    pub outlier_z: OrOff,
    /// Steps that mean and deviation are over; until there are that many, no step is an outlier.
    pub window: usize,
    /// The run stops after this many skipped steps in a row.
    pub max_in_a_row: u64,
}

impl Default for SkipConfig {
    fn default() -> Self {
        SkipConfig { outlier_z: OrOff(None), window: 128, max_in_a_row: 10 }
    }
}

/// The table `[train.validate]`. The last step is always validated unless `every = "never"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ValidateConfig {
    /// How often. Default every 250 steps.
    pub every: Every,
}

impl Default for ValidateConfig {
    fn default() -> Self {
        ValidateConfig { every: Every::steps(250) }
    }
}

/// The table `[train.sample]`: text sampled from the model in the loop, appended to `samples.txt`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SampleConfig {
    /// How often. Default never.
    pub every: Every,
    /// One sample per prompt. An empty prompt starts a document.
    pub prompts: Vec<String>,
    /// Tokens generated after each prompt.
    pub tokens: usize,
    /// Softmax temperature; 0 is greedy.
    pub temperature: f64,
}

impl Default for SampleConfig {
    fn default() -> Self {
        SampleConfig {
            every: Every(None),
            prompts: vec![String::new()],
            tokens: 64,
            temperature: 0.8,
        }
    }
}

/// The table `[train.checkpoint]`. The last step and a stop on Ctrl-C or TERM always write one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointConfig {
    /// How often. Default every 1000 steps.
    pub every: Every,
    /// How many of the newest to keep.
    pub keep_last: usize,
    /// Whether to write a checkpoint also at each new lowest validation loss, and keep it until a
    /// better one.
    pub best: bool,
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        CheckpointConfig { every: Every::steps(1000), keep_last: 2, best: true }
    }
}

impl TrainConfig {
    /// The stages of a run that begins with rows of `seq_len` tokens, the longest, and with `window`.
    pub(crate) fn timeline(&self, seq_len: usize, window: Option<usize>) -> Timeline {
        Timeline::new(self.base_stage(seq_len, window), &self.stages, self.tokens).0
    }

    /// Steps of `batch_tokens` tokens in rows of `seq_len`, with `window`.
    pub(super) fn base_stage(&self, seq_len: usize, window: Option<usize>) -> Stage {
        let (batch_tokens, micro_batch) = (self.batch_tokens, self.micro_batch);
        let least_micro_batches = if self.noise_scale.every.is_on() { 2 } else { 1 };
        Stage {
            batch_tokens,
            seq_len,
            micro_batch,
            window,
            least_micro_batches,
            // 0 is refused.
            context_parallel: self.context_parallel.max(1),
            ..Stage::default()
        }
    }

    /// The places in `evaluate` of the evaluations that are due after `step` finished steps.
    pub fn evaluations_due(&self, step: u64, timeline: &Timeline) -> Vec<usize> {
        let due = |at: &usize| self.evaluate[*at].is_due(step, timeline);
        (0..self.evaluate.len()).filter(due).collect()
    }

    /// The learning rate as a function of the step.
    pub fn lr_schedule(&self, timeline: &Timeline) -> Schedule {
        self.schedule.schedule(self.lr, timeline)
    }

    /// Records every problem of the table, for rows of `seq_len` tokens.
    pub fn validate(&self, seq_len: usize, problems: &mut Problems) {
        self.validate_batch(seq_len, problems);
        let timeline = self.validate_stages(seq_len, problems);
        self.validate_shared_rows(&timeline, problems);
        problems.check(
            self.lr > 0.0 && self.lr <= LARGEST_LR,
            "train.lr",
            self.lr,
            format!("a number above 0, at most {LARGEST_LR:e}"),
            "use for example 6e-4",
        );
        problems.check(
            (0.0..=MOST_Z_LOSS).contains(&self.z_loss),
            "train.z_loss",
            self.z_loss,
            format!("a number from 0 to {MOST_Z_LOSS}"),
            "use 1e-4, or leave it out for no z-loss",
        );
        problems.check(
            self.clip.0.is_none_or(|clip| clip.is_finite() && clip > 0.0),
            "train.clip",
            self.clip,
            "a number above 0, or \"off\"",
            "use 1.0, the usual norm, or \"off\" for no clipping",
        );
        problems.check(
            self.ema.0.is_none_or(|decay| decay > 0.0 && decay < 1.0),
            "train.ema",
            self.ema,
            "a number above 0 and below 1, or \"off\"",
            "use 0.999, an average over about 1,000 steps, or \"off\"",
        );
        self.optimiser.validate("train.optimiser", problems);
        validate_groups(&self.groups, problems);
        self.schedule.validate(&timeline, problems);
        self.skip.validate(problems);
        self.noise_scale.validate(&timeline, problems);
        self.sample.validate(problems);
        for (at, evaluate) in self.evaluate.iter().enumerate() {
            evaluate.validate(at, timeline.total_steps(), problems);
        }
        let evals: Vec<&Table> = self.evaluate.iter().map(|evaluate| &evaluate.eval).collect();
        validate_evals("train.evaluate", &evals, problems);
        if self.ema.0.is_none() {
            validate_without_average("train.evaluate", &evals, problems);
        }
        problems.check(
            self.checkpoint.keep_last > 0,
            "train.checkpoint.keep_last",
            self.checkpoint.keep_last,
            "1 or more",
            "keep at least one checkpoint, so that the run can be resumed",
        );
    }

    /// Records rows that cannot be shared by the ranks.
    fn validate_shared_rows(&self, timeline: &Timeline, problems: &mut Problems) {
        let shared = self.context_parallel;
        let fits = |stage: &Stage| {
            shared > 0
                && stage.seq_len.is_multiple_of(shared)
                && stage.seq_len / shared >= LEAST_SHARED_TOKENS
        };
        if let Some(stage) = timeline.stages().iter().find(|stage| shared != 1 && !fits(stage)) {
            problems.check(
                false,
                "train.context_parallel",
                shared,
                format!(
                    "a divisor of the {} tokens of a row that leaves each rank {LEAST_SHARED_TOKENS} or more",
                    stage.seq_len
                ),
                "leave it out, or set 2, 4 or 8 for as many GPUs",
            );
        }
        problems.check(
            shared <= 1 || !self.noise_scale.every.is_on(),
            "train.noise_scale.every",
            format!("set, with train.context_parallel = {shared}"),
            "\"never\": no rank has the gradient of a micro-batch",
            "set it to \"never\", or leave context_parallel out",
        );
    }

    fn validate_batch(&self, seq_len: usize, problems: &mut Problems) {
        let seq = seq_len.max(1) as u64;
        let below = self.batch_tokens / seq * seq;
        let nearest = if below == 0 {
            format!("use {seq}")
        } else {
            format!("use {below} or {}", below + seq)
        };
        problems.check(
            self.batch_tokens > 0 && self.batch_tokens.is_multiple_of(seq),
            "train.batch_tokens",
            self.batch_tokens,
            format!("a multiple of data.seq_len ({seq_len}) above 0"),
            nearest,
        );
        problems.check(
            self.batch_tokens <= MOST_BATCH_TOKENS,
            "train.batch_tokens",
            self.batch_tokens,
            format!("up to {MOST_BATCH_TOKENS}: a step's tokens are in memory at once"),
            "set it lower; large runs use a few million",
        );
        problems.check(
            self.tokens > 0,
            "train.tokens",
            self.tokens,
            "1 or more",
            "say how many tokens to train on, for example \"10M\"",
        );
    }

    /// Records the problems of the stages but for their windows, which are the model's matter, and returns them.
    fn validate_stages(&self, seq_len: usize, problems: &mut Problems) -> Timeline {
        let base = self.base_stage(seq_len, None);
        let (timeline, begun) = Timeline::new(base, &self.stages, self.tokens);
        if begun.first().is_none_or(|first| first.first_step > 0) {
            check_micro_batch(&base, "train.micro_batch", "leave it out", problems);
        }
        for (at, stage) in begun.iter().enumerate() {
            let before = if at == 0 { &base } else { &begun[at - 1] };
            self.stages[at].validate(at, stage, before, (self.tokens, seq_len), problems);
        }
        timeline
    }
}

/// The divisor of `n`, `least` or more, that is nearest to `wanted`; the smaller one of two equally near.
pub(super) fn nearest_divisor(n: usize, wanted: usize, least: usize) -> usize {
    let small = (1..=n.isqrt()).filter(|d| n.is_multiple_of(*d));
    let divisors = small.flat_map(|d| [d, n / d]);
    divisors.filter(|d| *d >= least).min_by_key(|d| (d.abs_diff(wanted), *d)).unwrap_or(n)
}

impl SkipConfig {
    fn validate(&self, problems: &mut Problems) {
        problems.check(
            self.outlier_z.0.is_none_or(|z| z.is_finite() && z > 0.0),
            "train.skip.outlier_z",
            self.outlier_z,
            "a number above 0, or \"off\"",
            "use 6, or \"off\"",
        );
        problems.check(
            self.window >= 8,
            "train.skip.window",
            self.window,
            "8 or more steps",
            "use 128: a deviation over fewer steps says little",
        );
        problems.check(
            self.max_in_a_row > 0,
            "train.skip.max_in_a_row",
            self.max_in_a_row,
            "1 or more",
            "use 10",
        );
    }
}

impl SampleConfig {
    fn validate(&self, problems: &mut Problems) {
        problems.check(
            self.temperature.is_finite() && self.temperature >= 0.0,
            "train.sample.temperature",
            self.temperature,
            "0 or more",
            "use 0.8, or 0 for greedy decoding",
        );
        problems.check(
            self.tokens <= MOST_SAMPLE_TOKENS,
            "train.sample.tokens",
            self.tokens,
            format!("up to {MOST_SAMPLE_TOKENS}"),
            "use 64",
        );
        problems.check(
            !self.every.is_on() || (self.tokens > 0 && !self.prompts.is_empty()),
            "train.sample",
            format!("{} prompts of {} tokens", self.prompts.len(), self.tokens),
            "at least one prompt and one token",
            "set prompts = [\"\"] and tokens = 64, or every = \"never\"",
        );
    }
}

#[cfg(test)]
mod tests;
