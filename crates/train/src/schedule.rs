//! Learning-rate schedules as pure functions of the step.
//!
//! A schedule is a *shape*: it maps a step to a factor in `0..=1` of the peak learning rate.
//! Steps count from 0. The warm-up of `w` steps rises linearly, `(step + 1) / w`, so that no step
//! has a rate of zero; the last step of the warm-up runs at the peak. After it the shape is
//! evaluated at `progress = (step - w) / (total - w)`, which is 0 on the first step after the
//! warm-up and reaches 1, the final rate, only at `total`, one past the last step: a schedule that
//! falls to zero wastes no step.

use std::f64::consts::PI;

use longwall_config::Problems;
use serde::{Deserialize, Serialize};

use crate::config::PhaseLength;

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
/// `final_lr_ratio` is the ratio of the final to the peak learning rate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum ScheduleConfig {
    /// Linear warm-up, then half a cosine wave down to the final rate.
    Cosine {
        /// Length of the warm-up. Default: 1 % of the run.
        #[serde(default = "default_warmup")]
        warmup: PhaseLength,
        /// Ratio of the final to the peak rate. Default 0.1.
        #[serde(default = "default_cosine_ratio")]
        final_lr_ratio: f64,
    },
    /// Warm-up, stable, decay: linear warm-up, constant, then a decay at the end of the run.
    Wsd {
        /// Length of the warm-up. Default: 1 % of the run.
        #[serde(default = "default_warmup")]
        warmup: PhaseLength,
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
        /// Ratio of the final to the peak rate. Default 0.
        #[serde(default)]
        final_lr_ratio: f64,
    },
    /// Linear warm-up, then the peak rate to the end.
    Constant {
        /// Length of the warm-up. Default: 1 % of the run.
        #[serde(default = "default_warmup")]
        warmup: PhaseLength,
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
        ScheduleConfig::Cosine { warmup: default_warmup(), final_lr_ratio: default_cosine_ratio() }
    }
}

impl ScheduleConfig {
    /// The warm-up, which every kind has.
    fn warmup(&self) -> PhaseLength {
        match self {
            ScheduleConfig::Cosine { warmup, .. }
            | ScheduleConfig::Wsd { warmup, .. }
            | ScheduleConfig::Linear { warmup, .. }
            | ScheduleConfig::Constant { warmup } => *warmup,
        }
    }

    /// Records every problem of the schedule of a run of `total_steps` steps.
    pub fn validate(&self, total_steps: u64, batch_tokens: u64, problems: &mut Problems) {
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
        let warmup = self.warmup().steps(total_steps, batch_tokens);
        problems.check(
            warmup < total_steps,
            "train.schedule.warmup",
            in_steps(self.warmup(), warmup),
            format!("less than the run's {total_steps} steps"),
            "shorten the warm-up, or raise train.tokens",
        );
        if let ScheduleConfig::Wsd { decay, .. } = self {
            let steps = decay.steps(total_steps, batch_tokens);
            problems.check(
                warmup.saturating_add(steps) <= total_steps,
                "train.schedule.decay",
                in_steps(*decay, steps),
                format!("warm-up ({warmup} steps) and decay within the run's {total_steps} steps"),
                "shorten the decay or the warm-up, or raise train.tokens",
            );
        }
    }

    /// Resolves the lengths for a run of `total_steps` steps of `batch_tokens` tokens.
    pub fn schedule(&self, peak_lr: f64, total_steps: u64, batch_tokens: u64) -> Schedule {
        let warmup_steps = self.warmup().steps(total_steps, batch_tokens).min(total_steps);
        let after_warmup = total_steps - warmup_steps;
        let (decay_steps, shape, final_ratio) = match self {
            ScheduleConfig::Cosine { final_lr_ratio, .. } => {
                (after_warmup, DecayShape::Cosine, *final_lr_ratio)
            }
            ScheduleConfig::Linear { final_lr_ratio, .. } => {
                (after_warmup, DecayShape::Linear, *final_lr_ratio)
            }
            ScheduleConfig::Wsd { decay, shape, final_lr_ratio, .. } => {
                (decay.steps(total_steps, batch_tokens).min(after_warmup), *shape, *final_lr_ratio)
            }
            ScheduleConfig::Constant { .. } => (0, DecayShape::Linear, 1.0),
        };
        Schedule { peak_lr, total_steps, warmup_steps, decay_steps, shape, final_ratio }
    }
}

/// `length` as it was written, and its number of steps unless it is given in steps.
fn in_steps(length: PhaseLength, steps: u64) -> String {
    match length {
        PhaseLength::Steps(_) => length.to_string(),
        _ => format!("{length} ({steps} steps)"),
    }
}

/// A schedule with its lengths in steps: a pure function of the step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    peak_lr: f64,
    total_steps: u64,
    warmup_steps: u64,
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
            return self.peak_lr * (step + 1) as f64 / self.warmup_steps as f64;
        }
        let decay_start = self.total_steps - self.decay_steps;
        if step < decay_start {
            return self.peak_lr;
        }
        let progress = if self.decay_steps == 0 {
            1.0
        } else {
            ((step - decay_start) as f64 / self.decay_steps as f64).min(1.0)
        };
        let factor = self.final_ratio + (1.0 - self.final_ratio) * self.shape.at(progress);
        self.peak_lr * factor
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STEPS: PhaseLength = PhaseLength::Fraction(0.1);

    fn schedule(config: ScheduleConfig) -> Schedule {
        config.schedule(2.0, 100, 64)
    }

    #[test]
    fn warmup_rises_in_a_line_and_ends_at_the_peak() {
        let schedule = schedule(ScheduleConfig::Constant { warmup: STEPS });
        assert_eq!(schedule.lr(0), 0.2);
        assert_eq!(schedule.lr(4), 1.0);
        assert_eq!(schedule.lr(9), 2.0);
        assert_eq!(schedule.lr(10), 2.0);
        assert_eq!(schedule.lr(99), 2.0);
        assert_eq!(schedule.lr(1000), 2.0);
    }

    #[test]
    fn cosine_starts_at_the_peak_passes_the_middle_and_ends_at_the_final_rate() {
        let schedule = schedule(ScheduleConfig::Cosine { warmup: STEPS, final_lr_ratio: 0.1 });
        assert_eq!(schedule.lr(10), 2.0);
        assert!((schedule.lr(55) - 1.1).abs() < 1e-12);
        assert!(schedule.lr(99) > 0.2);
        assert!((schedule.lr(100) - 0.2).abs() < 1e-12);
    }

    #[test]
    fn linear_falls_in_a_line_and_never_spends_a_step_at_zero() {
        let config = ScheduleConfig::Linear { warmup: PhaseLength::Steps(0), final_lr_ratio: 0.0 };
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
        ScheduleConfig::Linear { warmup: PhaseLength::Steps(100), final_lr_ratio: 1.5 }.validate(
            100,
            64,
            &mut problems,
        );
        let keys: Vec<_> = problems.as_slice().iter().map(|p| p.key.as_str()).collect();
        assert_eq!(keys, ["train.schedule.final_lr_ratio", "train.schedule.warmup"]);
    }

    #[test]
    fn decay_and_warmup_must_fit_the_run() {
        let mut problems = Problems::new();
        let config = ScheduleConfig::Wsd {
            warmup: PhaseLength::Fraction(0.5),
            decay: PhaseLength::Fraction(0.6),
            shape: DecayShape::Linear,
            final_lr_ratio: 0.0,
        };
        config.validate(100, 64, &mut problems);
        assert_eq!(problems.as_slice()[0].key, "train.schedule.decay");
    }

    proptest! {
        #[test]
        fn every_rate_lies_between_zero_and_the_peak(
            total in 1u64..500,
            warmup in 0.0f64..0.9,
            decay in 0.0f64..1.0,
            ratio in 0.0f64..=1.0,
            step in 0u64..600,
        ) {
            let warmup = PhaseLength::Fraction(warmup);
            let configs = [
                ScheduleConfig::Cosine { warmup, final_lr_ratio: ratio },
                ScheduleConfig::Linear { warmup, final_lr_ratio: ratio },
                ScheduleConfig::Constant { warmup },
                ScheduleConfig::Wsd {
                    warmup,
                    decay: PhaseLength::Fraction(decay),
                    shape: DecayShape::OneMinusSqrt,
                    final_lr_ratio: ratio,
                },
            ];
            for config in configs {
                let lr = config.schedule(1.0, total, 1).lr(step);
                prop_assert!((0.0..=1.0 + 1e-12).contains(&lr), "{config:?} gives {lr}");
            }
        }
    }
}
