//! The evaluations that a configuration lists: their names, and when those in the loop are due.

use longwall_config::Problems;
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use super::scalars::Every;
use crate::checkpoint::WeightsSelector;
use crate::timeline::Timeline;

/// A table `[[train.evaluate]]`: an evaluation of the model during training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvaluateConfig {
    /// How often. The last step is also evaluated, unless `"never"`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every: Option<Every>,
    /// Steps after which to evaluate, besides those of `every`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub steps: Vec<u64>,
    /// The other keys, as in a table `[[eval]]`: `suite`, `out`, `weights` and the suite's own.
    #[serde(flatten)]
    pub eval: Table,
}

impl EvaluateConfig {
    /// Whether it is due after `step` finished steps.
    pub fn is_due(&self, step: u64, timeline: &Timeline) -> bool {
        let every = |every: Every| {
            timeline.is_due(every, step) || (every.is_on() && step == timeline.total_steps())
        };
        self.every.is_some_and(every) || self.steps.contains(&step)
    }

    /// Records what is wrong with the steps of table `at` in a run of `total_steps`.
    pub(super) fn validate(&self, at: usize, total_steps: u64, problems: &mut Problems) {
        problems.check(
            self.every.is_some() || !self.steps.is_empty(),
            format!("train.evaluate.{at}.every"),
            "missing",
            "an interval, or steps = [...]",
            "add for example every = 500",
        );
        let outside = self.steps.iter().find(|step| !(1..=total_steps).contains(*step));
        problems.check(
            outside.is_none(),
            format!("train.evaluate.{at}.steps"),
            outside.copied().unwrap_or_default(),
            format!("steps of the run, 1 to {total_steps}"),
            "remove the step, or raise train.tokens",
        );
    }
}

/// The names that [`is_folder_name`] allows, in words.
pub const FOLDER_NAME: &str =
    "the name of a folder, which holds no / or \\ and does not begin with a dot";

/// Whether `name` names a folder that stays within the one it is for.
pub fn is_folder_name(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', '\0'])
}

/// The name of an evaluation, and of its folder in the run's `eval/`: the table's `out`, else its `suite`.
pub fn eval_name(eval: &Table) -> Option<&str> {
    eval.get("out").or_else(|| eval.get("suite")).and_then(Value::as_str)
}

/// The weights that an evaluation reads: the table's `weights`, by default the model's. `None` if the value names none.
fn named_weights(eval: &Table) -> Option<WeightsSelector> {
    match eval.get("weights") {
        Some(name) => name.as_str()?.parse().ok(),
        None => Some(WeightsSelector::default()),
    }
}

/// The weights that the evaluation of a valid table reads.
pub fn eval_weights(eval: &Table) -> WeightsSelector {
    named_weights(eval).unwrap_or_default()
}

/// Records every table of the list `key` that reads the averaged weights, in a run that keeps no average.
pub fn validate_without_average(key: &str, evals: &[&Table], problems: &mut Problems) {
    for (at, eval) in evals.iter().enumerate() {
        let weights = eval_weights(eval);
        problems.check(
            weights == WeightsSelector::Model,
            format!("{key}.{at}.weights"),
            format!("\"{weights}\" in a run that keeps no average"),
            "\"model\", or \"ema\" with train.ema",
            "set for example train.ema = 0.999, or leave weights out",
        );
    }
}

/// Records every table of the list `key` (`eval`, for `[[eval]]`) without a suite or with unknown weights, and every
/// name that is no folder's or is there twice.
pub fn validate_evals(key: &str, evals: &[&Table], problems: &mut Problems) {
    let show = |value: Option<&Value>| value.map_or_else(|| "missing".to_owned(), Value::to_string);
    for (at, &eval) in evals.iter().enumerate() {
        let (suite, out) = (eval.get("suite"), eval.get("out"));
        problems.check(
            suite.is_some_and(Value::is_str),
            format!("{key}.{at}.suite"),
            show(suite),
            "the name of a suite",
            "add for example suite = \"passkey\"",
        );
        problems.check(
            out.is_none_or(|out| out.as_str().is_some_and(is_folder_name)),
            format!("{key}.{at}.out"),
            show(out),
            FOLDER_NAME,
            "use for example out = \"passkey-long\"",
        );
        problems.check(
            named_weights(eval).is_some(),
            format!("{key}.{at}.weights"),
            show(eval.get("weights")),
            "\"model\", \"ema\"",
            "use \"ema\" for the moving average that train.ema keeps, or leave weights out",
        );
        let Some(name) = eval_name(eval) else { continue };
        let earlier = evals[..at].iter().position(|earlier| eval_name(earlier) == Some(name));
        problems.check(
            earlier.is_none(),
            format!("{key}.{at}.out"),
            show(out),
            format!(
                "a name of its own: {key}.{} has the name {name} already",
                earlier.unwrap_or_default()
            ),
            format!("add for example out = \"{name}-2\", or join the two tables"),
        );
    }
}
