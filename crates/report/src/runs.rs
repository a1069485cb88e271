//! The runs of a report.

use std::path::{Path, PathBuf};

use longwall_train::config::RunConfig;
use longwall_train::metrics::{self, Record, ValidationRecord};
use longwall_train::run_folder::{self, Finished};
use serde::Serialize;

use crate::ReportError;
use crate::curves::{ByPosition, Curve};
use crate::evaluations::{self, Evaluation};

/// A run as its folder holds it.
pub(crate) struct Run {
    pub dir: PathBuf,
    pub config: RunConfig,
    pub finished: Option<Finished>,
    pub records: Vec<Record>,
    pub evaluations: Vec<Evaluation>,
}

/// What the page shows of a run.
#[derive(Serialize)]
pub(crate) struct RunView {
    pub name: String,
    pub folder: String,
    pub seed: u64,
    /// Index of its group.
    pub group: usize,
    pub step: u64,
    pub total_steps: u64,
    pub finished: bool,
    pub skipped: usize,
    pub parameters: Option<u64>,
    pub device: Option<String>,
    pub config: String,
    pub training: Curve,
    pub validation: Curve,
    pub best_context: Curve,
    pub positions: Option<ByPosition>,
    pub samples: Vec<Generated>,
}

/// A text that the model generated during training.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Generated {
    /// The step and the prompt, as `samples.txt` has them.
    pub title: String,
    pub text: String,
}

impl Run {
    pub fn load(dir: &Path) -> Result<Self, ReportError> {
        let path = dir.join("metrics.jsonl");
        Ok(Run {
            dir: dir.to_owned(),
            config: run_folder::config_of(dir, &[])?,
            finished: run_folder::finished(dir)?,
            // A run that has just begun has none.
            records: if path.is_file() { metrics::read(&path)? } else { Vec::new() },
            evaluations: evaluations::load(dir)?,
        })
    }

    pub fn validations(&self) -> Vec<&ValidationRecord> {
        let validations = self.records.iter().filter_map(|record| match record {
            Record::Validation(validation) => Some(validation),
            _ => None,
        });
        validations.collect()
    }

    /// What the page shows of it, as a member of `group`.
    pub fn view(&self, name: String, group: usize) -> Result<RunView, ReportError> {
        let validations = self.validations();
        let steps = || {
            self.records.iter().filter_map(|record| match record {
                Record::Step(step) => Some(step),
                _ => None,
            })
        };
        let best = |record: &ValidationRecord| record.best_context_loss.unwrap_or(f64::NAN);
        Ok(RunView {
            name,
            folder: self.dir.display().to_string(),
            seed: self.config.run.seed,
            group,
            step: steps().next_back().map_or(0, |step| step.step),
            total_steps: self.config.total_steps(),
            finished: self.finished.is_some(),
            skipped: steps().filter(|step| step.skipped).count(),
            parameters: self.finished.as_ref().map(|finished| finished.parameters),
            device: self.finished.as_ref().map(|finished| finished.device.clone()),
            config: self.config.to_toml(),
            training: Curve::of_training(&self.records),
            validation: Curve::of_validations(&validations, |record| record.validation_loss),
            best_context: Curve::of_validations(&validations, best),
            positions: validations.last().and_then(|last| ByPosition::of(last)),
            samples: generated(&self.dir)?,
        })
    }
}

/// The most generated texts of a run that a page holds: the last ones.
const MOST_SAMPLES: usize = 12;

fn generated(dir: &Path) -> Result<Vec<Generated>, ReportError> {
    let path = dir.join("samples.txt");
    if !path.is_file() {
        return Ok(Vec::new());
    }
    let bytes = std::fs::read(&path).map_err(ReportError::read(&path))?;
    let mut all = split(&String::from_utf8_lossy(&bytes));
    Ok(all.split_off(all.len().saturating_sub(MOST_SAMPLES)))
}

/// The entries of a `samples.txt`.
fn split(text: &str) -> Vec<Generated> {
    let mut entries: Vec<Generated> = Vec::new();
    for line in text.lines() {
        match (line.strip_prefix("=== "), entries.last_mut()) {
            (Some(title), _) if title.starts_with("step ") => {
                entries.push(Generated { title: title.to_owned(), text: String::new() });
            }
            (_, Some(entry)) => {
                entry.text += line;
                entry.text.push('\n');
            }
            (_, None) => {}
        }
    }
    entries.iter_mut().for_each(|entry| entry.text.truncate(entry.text.trim_end().len()));
    entries
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_split_at_their_titles() {
        let text = "=== step 5, prompt \"\"\none\n\ntwo\n\n=== step 10, prompt \"a\"\n=== 3\n\n";
        let found: Vec<(String, String)> =
            split(text).into_iter().map(|entry| (entry.title, entry.text)).collect();
        let expected = [("step 5, prompt \"\"", "one\n\ntwo"), ("step 10, prompt \"a\"", "=== 3")];
        assert_eq!(found, expected.map(|(title, text)| (title.to_owned(), text.to_owned())));
    }
}
