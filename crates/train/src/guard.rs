//! Decides which steps are skipped: NaN and infinity always, outliers on request.

use std::collections::VecDeque;
use std::fmt::{self, Display};

use serde::{Deserialize, Serialize};

use crate::config::SkipConfig;

/// Why a step is skipped.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SkipReason {
    /// The loss is NaN or infinite.
    LossNotFinite(f32),
    /// The gradient norm is NaN or infinite.
    GradNormNotFinite(f32),
    /// No position of the batch has a loss weight above 0.
    NoTargets,
    /// The loss is this many standard deviations above its mean.
    LossOutlier(f64),
    /// The gradient norm is this many standard deviations above its mean.
    GradNormOutlier(f64),
}

impl Display for SkipReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SkipReason::LossNotFinite(loss) => write!(f, "the loss is {loss}"),
            SkipReason::GradNormNotFinite(norm) => write!(f, "the gradient norm is {norm}"),
            SkipReason::NoTargets => {
                write!(f, "no position of the batch has a loss weight above 0")
            }
            SkipReason::LossOutlier(z) => {
                write!(f, "the loss is {z:.1} standard deviations above its mean")
            }
            SkipReason::GradNormOutlier(z) => {
                write!(f, "the gradient norm is {z:.1} standard deviations above its mean")
            }
        }
    }
}

/// What the guard remembers; part of a checkpoint, so that a resumed run skips the same steps.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuardState {
    /// Steps skipped since the run began.
    pub skipped: u64,
    /// Steps skipped in a row, up to now.
    pub in_a_row: u64,
    losses: VecDeque<f32>,
    grad_norms: VecDeque<f32>,
}

/// Checks every step before the optimiser takes it.
#[derive(Clone, Debug)]
pub struct StepGuard {
    config: SkipConfig,
    state: GuardState,
}

impl StepGuard {
    /// A guard that continues from `state`.
    pub fn new(config: &SkipConfig, state: GuardState) -> Self {
        StepGuard { config: config.clone(), state }
    }

    /// What the guard remembers.
    pub fn state(&self) -> &GuardState {
        &self.state
    }

    /// Checks a step by its `loss`, its gradient norm and the sum of its loss weights: `None` if the
    /// optimiser should take it, else why it is skipped.
    ///
    /// Only steps that are taken enter the window of the outlier test, so that a diverged loss does not
    /// become the new normal.
    pub fn judge(&mut self, loss: f32, grad_norm: f32, weight_sum: f64) -> Option<SkipReason> {
        let reason = self.reason(loss, grad_norm, weight_sum);
        if reason.is_some() {
            self.state.skipped += 1;
            self.state.in_a_row += 1;
            return reason;
        }
        self.state.in_a_row = 0;
        if self.config.outlier_z.0.is_some() {
            push(&mut self.state.losses, loss, self.config.window);
            push(&mut self.state.grad_norms, grad_norm, self.config.window);
        }
        None
    }

    /// Whether the run must stop because too many steps in a row were skipped.
    pub fn must_stop(&self) -> bool {
        self.state.in_a_row >= self.config.max_in_a_row
    }

    fn reason(&self, loss: f32, grad_norm: f32, weight_sum: f64) -> Option<SkipReason> {
        if weight_sum <= 0.0 {
            return Some(SkipReason::NoTargets);
        }
        if !loss.is_finite() {
            return Some(SkipReason::LossNotFinite(loss));
        }
        if !grad_norm.is_finite() {
            return Some(SkipReason::GradNormNotFinite(grad_norm));
        }
        let limit = self.config.outlier_z.0?;
        let z = |window, value| z_score(window, self.config.window, value);
        let loss_z = z(&self.state.losses, loss);
        if loss_z > limit {
            return Some(SkipReason::LossOutlier(loss_z));
        }
        let norm_z = z(&self.state.grad_norms, grad_norm);
        (norm_z > limit).then_some(SkipReason::GradNormOutlier(norm_z))
    }
}

fn push(window: &mut VecDeque<f32>, value: f32, length: usize) {
    while window.len() >= length {
        window.pop_front();
    }
    window.push_back(value);
}

/// How many standard deviations `value` is above the mean of a full `window`; 0 while the window
/// fills, or if all its values are equal.
fn z_score(window: &VecDeque<f32>, length: usize, value: f32) -> f64 {
    if window.len() < length {
        return 0.0;
    }
    let count = window.len() as f64;
    let mean = window.iter().map(|&x| f64::from(x)).sum::<f64>() / count;
    let variance = window.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / count;
    let deviation = variance.sqrt();
    if deviation > 0.0 { (f64::from(value) - mean) / deviation } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::OrOff;

    fn guard(outlier_z: Option<f64>) -> StepGuard {
        let config = SkipConfig { outlier_z: OrOff(outlier_z), window: 8, max_in_a_row: 3 };
        StepGuard::new(&config, GuardState::default())
    }

    /// Takes eight steps of loss 1.9 to 2.1 and norm 0.9 to 1.1.
    fn filled() -> StepGuard {
        let mut guard = guard(Some(6.0));
        for i in 0..8 {
            let wobble = if i % 2 == 0 { 0.1 } else { -0.1 };
            assert_eq!(guard.judge(2.0 + wobble, 1.0 + wobble, 64.0), None);
        }
        guard
    }

    #[test]
    fn nan_and_infinity_are_skipped_and_counted() {
        let mut guard = guard(None);
        assert!(matches!(guard.judge(f32::NAN, 1.0, 1.0), Some(SkipReason::LossNotFinite(_))));
        let norm = guard.judge(1.0, f32::INFINITY, 1.0);
        assert!(matches!(norm, Some(SkipReason::GradNormNotFinite(_))));
        assert_eq!(guard.judge(0.0, 0.0, 0.0), Some(SkipReason::NoTargets));
        assert_eq!((guard.state().skipped, guard.state().in_a_row), (3, 3));
        assert!(guard.must_stop());
        assert_eq!(guard.judge(1.0, 1.0, 1.0), None);
        assert_eq!((guard.state().skipped, guard.state().in_a_row), (3, 0));
        assert!(!guard.must_stop());
    }

    #[test]
    fn outliers_are_taken_unless_the_test_is_on() {
        let mut guard = guard(None);
        for _ in 0..20 {
            assert_eq!(guard.judge(1.0, 1.0, 1.0), None);
        }
        assert_eq!(guard.judge(1e9, 1e9, 1.0), None);
    }

    #[test]
    fn outliers_upwards_are_skipped_and_stay_out_of_the_window() {
        let mut guard = filled();
        // Deviation 0.1: 2.5 is 5 deviations away, 2.7 is 7.
        assert_eq!(guard.clone().judge(2.5, 1.0, 64.0), None);
        assert_eq!(guard.clone().judge(0.0, 0.0, 64.0), None);
        for _ in 0..3 {
            let Some(SkipReason::LossOutlier(z)) = guard.judge(2.7, 1.0, 64.0) else {
                panic!("an outlier was taken");
            };
            assert!((z - 7.0).abs() < 1e-4, "{z}");
        }
        let norm = guard.judge(2.0, 3.0, 64.0);
        assert!(matches!(norm, Some(SkipReason::GradNormOutlier(_))));
    }

    #[test]
    fn no_step_is_an_outlier_before_the_window_is_full_or_when_it_is_flat() {
        let mut guard = guard(Some(6.0));
        assert_eq!(guard.judge(1.0, 1.0, 1.0), None);
        assert_eq!(guard.judge(1e6, 1e6, 1.0), None);
        let mut flat = self::guard(Some(6.0));
        for _ in 0..8 {
            flat.judge(1.0, 1.0, 1.0);
        }
        assert_eq!(flat.judge(1.5, 1.0, 1.0), None);
    }

    #[test]
    fn a_restored_guard_judges_alike() {
        let mut guard = filled();
        let text = serde_json::to_string(guard.state()).unwrap();
        let mut restored = StepGuard::new(&guard.config, serde_json::from_str(&text).unwrap());
        assert_eq!(restored.state(), guard.state());
        assert_eq!(restored.judge(2.7, 1.0, 64.0), guard.judge(2.7, 1.0, 64.0));
    }
}
