//! Learning-rate schedules as pure functions of the step.
//!
//! A schedule is a *shape*: it maps a step to a factor in `0..=1` of the peak learning rate.
//! Where `train.stages` change the batch size, every `step` below is the tokens up to it, in batches of the first
//! stage: the rate is a function of the tokens.
//! Steps count from 0. The warm-up of `w` steps rises in a straight line, from `1 / w` on the first
//! step, or from the ratio that the configuration sets, to the peak on its last step: `(step + 1) / w`,
//! or `r + (1 - r) * step / (w - 1)` with an initial ratio `r`. After it the shape is
//! evaluated at `progress = (step - w) / (total - w)`, which is 0 on the first step after the
//! warm-up and reaches 1, the final rate, only at `total`, one past the last step: a schedule that
//! falls to zero wastes no step.

use std::f64::consts::PI;

use longwall_config::Problems;
use serde::{Deserialize, Serialize};

use crate::config::PhaseLength;
use crate::timeline::Timeline;

/// How the learning rate falls in the decay phase of [`ScheduleConfig::Wsd`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DecayShape {
    /// `1 - progress`.
    Linear,
    /// `1 - sqrt(progress)` (Hägele et al. 2024, "Scaling laws and compute-optimal training beyond
    /// fixed training durations", section 4).
    #[default]
    OneMinusSqrt,
    /// Half a cosine wave, `(1 + cos(pi * progress)) / 2`.
    Cosine,
}

impl DecayShape {
    /// The factor at `progress` in `0..=1`: 1 at 0, 0 at 1.
    fn at(self, progress: f64) -> f64 {
        match self {
            DecayShape::Linear => 1.0 - progress,
            DecayShape::OneMinusSqrt => 1.0 - progress.sqrt(),
            DecayShape::Cosine => 0.5 * (1.0 + (PI * progress).cos()),
        }
    }
}

/// The table `[train.schedule]`.
///
/// `initial_lr_ratio` and `final_lr_ratio` are the ratios of the first and of the final to the peak
/// learning rate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum ScheduleConfig {
    /// Linear warm-up, then half a cosine wave down to the final rate.
    Cosine {
        /// Length of the warm-up. Default: 1 % of the run.
        #[serde(default = "default_warmup")]
        warmup: PhaseLength,
        /// Ratio of the first step's to the peak rate. Default: 1 over the warm-up's steps.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        initial_lr_ratio: Option<f64>,
        /// Ratio of the final to the peak rate. Default 0.1.
        #[serde(default = "default_cosine_ratio")]
        final_lr_ratio: f64,
    },
    /// Warm-up, stable, decay: linear warm-up, constant, then a decay at the end of the run.
    Wsd {
        /// Length of the warm-up. Default: 1 % of the run.
        #[serde(default = "default_warmup")]
        warmup: PhaseLength,
        /// Ratio of the first step's to the peak rate. Default: 1 over the warm-up's steps.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        initial_lr_ratio: Option<f64>,
        /// Length of the decay. Default: the last 20 % of the run.
        #[serde(default = "default_decay")]
        decay: PhaseLength,
        /// Shape of the decay. Default `one-minus-sqrt`.
        #[serde(default)]
        shape: DecayShape,
        /// Ratio of the final to the peak rate. Default 0.
        #[serde(default)]
        final_lr_ratio: f64,
    },
    /// Linear warm-up, then a straight line down to the final rate.
    Linear {
        /// Length of the warm-up. Default: 1 % of the run.
        #[serde(default = "default_warmup")]
        warmup: PhaseLength,
        /// Ratio of the first step's to the peak rate. Default: 1 over the warm-up's steps.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        initial_lr_ratio: Option<f64>,
        /// Ratio of the final to the peak rate. Default 0.
        #[serde(default)]
        final_lr_ratio: f64,
    },
    /// Linear warm-up, then the peak rate to the end.
    Constant {
        /// Length of the warm-up. Default: 1 % of the run.
        #[serde(default = "default_warmup")]
        warmup: PhaseLength,
        /// Ratio of the first step's to the peak rate. Default: 1 over the warm-up's steps.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        initial_lr_ratio: Option<f64>,
    },
}

fn default_warmup() -> PhaseLength {
    PhaseLength::Fraction(0.01)
}

fn default_decay() -> PhaseLength {
    PhaseLength::Fraction(0.2)
}

fn default_cosine_ratio() -> f64 {
    0.1
}

impl Default for ScheduleConfig {
    fn default() -> Self {
        ScheduleConfig::Cosine {
            warmup: default_warmup(),
            initial_lr_ratio: None,
            final_lr_ratio: default_cosine_ratio(),
        }
    }
}

impl ScheduleConfig {
    /// The length and the initial ratio of the warm-up, which every kind has.
    fn warmup(&self) -> (PhaseLength, Option<f64>) {
        match self {
            ScheduleConfig::Cosine { warmup, initial_lr_ratio, .. }
            | ScheduleConfig::Wsd { warmup, initial_lr_ratio, .. }
            | ScheduleConfig::Linear { warmup, initial_lr_ratio, .. }
            | ScheduleConfig::Constant { warmup, initial_lr_ratio } => (*warmup, *initial_lr_ratio),
        }
    }

    /// Records every problem of the schedule of a run with these stages.
    pub fn validate(&self, timeline: &Timeline, problems: &mut Problems) {
        let total_steps = timeline.total_steps();
        let ratio = match self {
            ScheduleConfig::Cosine { final_lr_ratio, .. }
            | ScheduleConfig::Wsd { final_lr_ratio, .. }
            | ScheduleConfig::Linear { final_lr_ratio, .. } => *final_lr_ratio,
            ScheduleConfig::Constant { .. } => 1.0,
        };
        problems.check(
            (0.0..=1.0).contains(&ratio),
            "train.schedule.final_lr_ratio",
            ratio,
            "0 to 1",
            "give the final learning rate as a share of train.lr, for example 0.1",
        );
        let (length, initial) = self.warmup();
        let warmup = timeline.steps_of_first(length);
        problems.check(
            warmup < total_steps,
            "train.schedule.warmup",
            in_steps(length, warmup),
            format!("less than the run's {total_steps} steps"),
            "shorten the warm-up, or raise train.tokens",
        );
        if let Some(ratio) = initial {
            validate_initial(ratio, warmup, problems);
        }
        if let ScheduleConfig::Wsd { decay, .. } = self {
            let steps = timeline.steps_of_last(*decay);
            problems.check(
                warmup.saturating_add(steps) <= total_steps,
                "train.schedule.decay",
                in_steps(*decay, steps),
                format!("warm-up ({warmup} steps) and decay within the run's {total_steps} steps"),
                "shorten the decay or the warm-up, or raise train.tokens",
            );
        }
    }

    /// Resolves the lengths for a run with these stages.
    pub fn schedule(&self, peak_lr: f64, timeline: &Timeline) -> Schedule {
        let total_steps = timeline.total_steps();
        let (warmup, initial_ratio) = self.warmup();
        let warmup_steps = timeline.steps_of_first(warmup).min(total_steps);
        let after_warmup = total_steps - warmup_steps;
        let (decay_steps, shape, final_ratio) = match self {
            ScheduleConfig::Cosine { final_lr_ratio, .. } => {
                (after_warmup, DecayShape::Cosine, *final_lr_ratio)
            }
            ScheduleConfig::Linear { final_lr_ratio, .. } => {
                (after_warmup, DecayShape::Linear, *final_lr_ratio)
            }
            ScheduleConfig::Wsd { decay, shape, final_lr_ratio, .. } => {
                (timeline.steps_of_last(*decay).min(after_warmup), *shape, *final_lr_ratio)
            }
            ScheduleConfig::Constant { .. } => (0, DecayShape::Linear, 1.0),
        };
        Schedule {
            peak_lr,
            timeline: timeline.clone(),
            warmup_steps,
            initial_ratio,
            decay_steps,
            shape,
            final_ratio,
        }
    }
}

/// Records the problems of an initial ratio of a warm-up of `warmup` steps.
fn validate_initial(ratio: f64, warmup: u64, problems: &mut Problems) {
    let key = "train.schedule.initial_lr_ratio";
    problems.check(
        (0.0..=1.0).contains(&ratio),
        key,
        ratio,
        "0 to 1",
        "give the first learning rate as a share of train.lr, for example 0.03",
    );
    problems.check(
        warmup >= 2,
        key,
        format!("{ratio} with a warm-up of {warmup} steps"),
        "a warm-up of at least 2 steps, from the initial rate to the peak",
        "lengthen train.schedule.warmup, or leave initial_lr_ratio out",
    );
}

/// `length` as it was written, and its number of steps unless it is given in steps.
fn in_steps(length: PhaseLength, steps: u64) -> String {
    match length {
        PhaseLength::Steps(_) => length.to_string(),
        _ => format!("{length} ({steps} steps)"),
    }
}

/// A schedule with its lengths in steps: a pure function of the step.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    peak_lr: f64,
    timeline: Timeline,
    warmup_steps: u64,
    initial_ratio: Option<f64>,
    decay_steps: u64,
    shape: DecayShape,
    final_ratio: f64,
}

impl Schedule {
    /// The learning rate of `step`, counted from 0.
    ///
    /// Past the end of the run it stays at the final rate.
    pub fn lr(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return self.warmup_lr(step);
        }
        let total_steps = self.timeline.total_steps();
        let decay_start = total_steps - self.decay_steps;
        if step < decay_start {
            return self.peak_lr;
        }
        let progress = if self.decay_steps == 0 {
            1.0
        } else {
            self.between(decay_start, step) / self.between(decay_start, total_steps)
        };
        let factor = self.final_ratio + (1.0 - self.final_ratio) * self.shape.at(progress.min(1.0));
        self.peak_lr * factor
    }

    /// The learning rate of a step of the warm-up.
    fn warmup_lr(&self, step: u64) -> f64 {
        let Some(ratio) = self.initial_ratio else {
            return self.peak_lr * self.between(0, step + 1) / self.between(0, self.warmup_steps);
        };
        let last = self.warmup_steps.saturating_sub(1).max(1);
        self.peak_lr * (ratio + (1.0 - ratio) * self.between(0, step) / self.between(0, last))
    }

    /// What lies between two steps, in batches of the first stage.
    fn between(&self, first: u64, last: u64) -> f64 {
        self.timeline.position(last) - self.timeline.position(first)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STEPS: PhaseLength = PhaseLength::Fraction(0.1);

    /// A hundred steps of 64 tokens.
    fn timeline() -> Timeline {
        crate::testing::timeline(64, 6400)
    }

    fn schedule(config: ScheduleConfig) -> Schedule {
        config.schedule(2.0, &timeline())
    }

    #[test]
    fn warmup_rises_in_a_line_and_ends_at_the_peak() {
        let schedule = schedule(ScheduleConfig::Constant { warmup: STEPS, initial_lr_ratio: None });
        assert_eq!(schedule.lr(0), 0.2);
        assert_eq!(schedule.lr(4), 1.0);
        assert_eq!(schedule.lr(9), 2.0);
        assert_eq!(schedule.lr(10), 2.0);
        assert_eq!(schedule.lr(99), 2.0);
        assert_eq!(schedule.lr(1000), 2.0);
    }

    #[test]
    fn an_initial_ratio_is_that_of_the_first_step() {
        for kind in ["cosine", "wsd", "linear", "constant"] {
            let table = format!("kind = \"{kind}\"\nwarmup = 5\ninitial_lr_ratio = 0.2");
            let schedule = schedule(toml::from_str(&table).unwrap());
            let rates: Vec<f64> = (0..6).map(|step| schedule.lr(step)).collect();
            for (rate, expected) in rates.iter().zip([0.4, 0.8, 1.2, 1.6, 2.0, 2.0]) {
                assert!((rate - expected).abs() < 1e-12, "{kind}: {rates:?}");
            }
        }
    }

    #[test]
    fn an_initial_ratio_needs_a_warm_up_to_rise_in() {
        let found = |warmup: u64, ratio: f64| {
            let mut problems = Problems::new();
            let config = ScheduleConfig::Constant {
                warmup: PhaseLength::Steps(warmup),
                initial_lr_ratio: Some(ratio),
            };
            config.validate(&timeline(), &mut problems);
            problems.as_slice().iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert!(found(2, 0.03).is_empty());
        assert!(found(10, 1.5)[0].starts_with("train.schedule.initial_lr_ratio is 1.5; allowed"));
        assert_eq!(found(10, f64::NAN).len(), 1);
        let short = &found(1, 0.03)[0];
        assert!(short.contains("initial_lr_ratio is 0.03 with a warm-up of 1 steps"), "{short}");
    }

    #[test]
    fn cosine_starts_at_the_peak_passes_the_middle_and_ends_at_the_final_rate() {
        let schedule = schedule(ScheduleConfig::Cosine {
            warmup: STEPS,
            initial_lr_ratio: None,
            final_lr_ratio: 0.1,
        });
        assert_eq!(schedule.lr(10), 2.0);
        assert!((schedule.lr(55) - 1.1).abs() < 1e-12);
        assert!(schedule.lr(99) > 0.2);
        assert!((schedule.lr(100) - 0.2).abs() < 1e-12);
    }

    #[test]
    fn linear_falls_in_a_line_and_never_spends_a_step_at_zero() {
        let config = ScheduleConfig::Linear {
            warmup: PhaseLength::Steps(0),
            initial_lr_ratio: None,
            final_lr_ratio: 0.0,
        };
        let schedule = schedule(config);
        assert_eq!(schedule.lr(0), 2.0);
        assert_eq!(schedule.lr(50), 1.0);
        assert!(schedule.lr(99) > 0.0);
        assert_eq!(schedule.lr(100), 0.0);
    }

    #[test]
    fn wsd_is_stable_until_its_decay() {
        let config = |shape| ScheduleConfig::Wsd {
            warmup: STEPS,
            initial_lr_ratio: None,
            decay: PhaseLength::Fraction(0.2),
            shape,
            final_lr_ratio: 0.0,
        };
        for shape in [DecayShape::Linear, DecayShape::OneMinusSqrt, DecayShape::Cosine] {
            let schedule = schedule(config(shape));
            assert_eq!((schedule.lr(10), schedule.lr(79), schedule.lr(80)), (2.0, 2.0, 2.0));
            assert!(schedule.lr(81) < 2.0);
            assert!(schedule.lr(100).abs() < 1e-12, "{shape:?}");
        }
        assert!((schedule(config(DecayShape::OneMinusSqrt)).lr(85) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn warmup_longer_than_the_run_is_a_problem() {
        let mut problems = Problems::new();
        ScheduleConfig::Linear {
            warmup: PhaseLength::Steps(100),
            initial_lr_ratio: None,
            final_lr_ratio: 1.5,
        }
        .validate(&timeline(), &mut problems);
        let keys: Vec<_> = problems.as_slice().iter().map(|p| p.key.as_str()).collect();
        assert_eq!(keys, ["train.schedule.final_lr_ratio", "train.schedule.warmup"]);
    }

    /// With batches that double after a fifth and after half of the tokens, the rate at a token is that of batches
    /// which never change.
    #[test]
    fn with_stages_the_rate_is_a_function_of_the_tokens() {
        let changes = ["from = 0.2\nbatch_tokens = 128", "from = 0.5\nbatch_tokens = 256"];
        let changes = changes.map(|table| toml::from_str(table).unwrap());
        let base = timeline().stages()[0];
        let staged = Timeline::new(base, &changes, 6400).0;
        assert_eq!(staged.total_steps(), 20 + 15 + 13);
        for kind in ["cosine", "wsd", "linear", "constant"] {
            let config: ScheduleConfig =
                toml::from_str(&format!("kind = \"{kind}\"\nwarmup = 0.1")).unwrap();
            let plain = config.schedule(2.0, &Timeline::new(base, &[], staged.tokens(48)).0);
            let staged_rate = config.schedule(2.0, &staged);
            for step in 10..staged.total_steps() {
                let (rate, same) = (staged_rate.lr(step), plain.lr(staged.tokens(step) / 64));
                assert!((rate - same).abs() < 1e-12, "{kind}, {step}: {rate} and {same}");
            }
        }
        // The warm-up reaches the peak with the last token of its last step.
        let config =
            ScheduleConfig::Constant { warmup: PhaseLength::Tokens(2560), initial_lr_ratio: None };
        let schedule = config.schedule(2.0, &staged);
        assert_eq!([19, 24, 29, 30].map(|step| schedule.lr(step)), [1.0, 1.5, 2.0, 2.0]);
    }

    #[test]
    fn decay_and_warmup_must_fit_the_run() {
        let mut problems = Problems::new();
        let config = ScheduleConfig::Wsd {
            warmup: PhaseLength::Fraction(0.5),
            initial_lr_ratio: None,
            decay: PhaseLength::Fraction(0.6),
            shape: DecayShape::Linear,
            final_lr_ratio: 0.0,
        };
        config.validate(&timeline(), &mut problems);
        assert_eq!(problems.as_slice()[0].key, "train.schedule.decay");
    }

    proptest! {
        #[test]
        fn every_rate_lies_between_zero_and_the_peak(
            total in 1u64..500,
            warmup in 0.0f64..0.9,
            decay in 0.0f64..1.0,
            ratio in 0.0f64..=1.0,
            initial in prop::option::of(0.0f64..=1.0),
            step in 0u64..600,
        ) {
            let warmup = PhaseLength::Fraction(warmup);
            let configs = [
                ScheduleConfig::Cosine { warmup, initial_lr_ratio: initial, final_lr_ratio: ratio },
                ScheduleConfig::Linear { warmup, initial_lr_ratio: initial, final_lr_ratio: ratio },
                ScheduleConfig::Constant { warmup, initial_lr_ratio: initial },
                ScheduleConfig::Wsd {
                    warmup,
                    initial_lr_ratio: initial,
                    decay: PhaseLength::Fraction(decay),
                    shape: DecayShape::OneMinusSqrt,
                    final_lr_ratio: ratio,
                },
            ];
            for config in configs {
                let lr = config.schedule(1.0, &crate::testing::timeline(1, total)).lr(step);
                prop_assert!((0.0..=1.0 + 1e-12).contains(&lr), "{config:?} gives {lr}");
            }
        }
    }
}
