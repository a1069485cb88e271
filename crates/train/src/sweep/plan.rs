//! From a sweep file to its list of runs.

use std::fmt::Write;
use std::path::PathBuf;

use super::config::overrides;
use super::{SweepConfig, SweepError};
use crate::config::{ConfigError, RunConfig};
use crate::run_folder;

/// One run of a sweep.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedRun {
    /// Its name within the sweep.
    pub name: String,
    /// The name of its value on each axis.
    pub labels: Vec<String>,
    /// Its seed.
    pub seed: u64,
    /// The overrides of the base, in their order.
    pub sets: Vec<String>,
    /// The resulting configuration.
    pub config: RunConfig,
}

impl PlannedRun {
    /// The run's folder.
    pub fn dir(&self) -> PathBuf {
        self.config.run_dir()
    }
}

/// A sweep's runs, in order.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The sweep file.
    pub sweep: SweepConfig,
    /// The runs: all seeds of a combination one after another.
    pub runs: Vec<PlannedRun>,
}

impl Plan {
    /// Expands the axes and the seeds, and checks the configuration of every run.
    ///
    /// # Errors
    /// When the base or the configuration of a run is not valid; the first such run is named.
    pub fn new(sweep: SweepConfig) -> Result<Self, SweepError> {
        let sizes: Vec<usize> = sweep.axes.iter().map(|axis| axis.values.len()).collect();
        check_size(&sizes, sweep.seeds.len())?;
        let mut runs: Vec<PlannedRun> = Vec::new();
        for combination in 0..sizes.iter().product() {
            let indices = digits(combination, &sizes);
            for &seed in &sweep.seeds {
                let run = plan_run(&sweep, &indices, seed)?;
                if let Some(other) = runs.iter().find(|other| other.name == run.name) {
                    return Err(same_name(&run, other));
                }
                runs.push(run);
            }
        }
        Ok(Plan { sweep, runs })
    }

    /// The list that `--dry-run` prints: every run, its overrides, and what already exists.
    ///
    /// # Errors
    /// When a run folder cannot be read.
    pub fn describe(&self) -> Result<String, SweepError> {
        let mut text = format!("{} runs in {}\n", self.runs.len(), self.sweep.dir().display());
        for run in &self.runs {
            let state = if run_folder::finished(&run.dir())?.is_some() {
                "finished"
            } else if run.dir().join("config.toml").is_file() {
                "unfinished"
            } else {
                "new"
            };
            let sets: Vec<&str> = run
                .sets
                .iter()
                .map(String::as_str)
                .filter(|set| !set.starts_with("run.name=") && !set.starts_with("run.out_dir="))
                .collect();
            let _ = writeln!(text, "{} ({state}): {}", run.name, sets.join(", "));
        }
        Ok(text)
    }
}

/// The most runs of a sweep.
const MOST_RUNS: usize = 10_000;

/// Refuses a grid of too many runs before they are planned one by one.
fn check_size(sizes: &[usize], seeds: usize) -> Result<(), SweepError> {
    let runs = sizes.iter().try_fold(seeds, |runs, size| runs.checked_mul(*size));
    if runs.is_some_and(|runs| runs <= MOST_RUNS) {
        return Ok(());
    }
    let sizes: Vec<String> = sizes.iter().map(usize::to_string).collect();
    Err(SweepError::Config(ConfigError::Key {
        place: "the sweep".to_owned(),
        problem: format!(
            "the axes have {} values, with {seeds} seeds each; allowed: {MOST_RUNS} runs",
            sizes.join(" · ")
        ),
        hint: "remove values, or split the sweep into several files".to_owned(),
    }))
}

/// The index on each axis of a combination; the last axis varies fastest.
fn digits(mut combination: usize, sizes: &[usize]) -> Vec<usize> {
    let mut indices = vec![0; sizes.len()];
    for (index, size) in indices.iter_mut().zip(sizes).rev() {
        *index = combination % size;
        combination /= size;
    }
    indices
}

fn plan_run(sweep: &SweepConfig, indices: &[usize], seed: u64) -> Result<PlannedRun, SweepError> {
    let labels: Vec<String> =
        sweep.axes.iter().zip(indices).map(|(axis, &index)| axis.label(index)).collect();
    let parts = labels.iter().map(|label| file_name(label)).chain([format!("seed{seed}")]);
    let name = parts.collect::<Vec<_>>().join("-");
    let mut sets = overrides(&sweep.set);
    for (axis, &index) in sweep.axes.iter().zip(indices) {
        sets.extend(axis.sets(index));
    }
    let text = |value: String| toml::Value::String(value).to_string();
    sets.push(format!("run.seed={seed}"));
    sets.push(format!("run.name={}", text(name.clone())));
    sets.push(format!("run.out_dir={}", text(sweep.dir().display().to_string())));
    let config = RunConfig::load(&sweep.base, &sets).map_err(|source| match source {
        ConfigError::Read { .. } | ConfigError::Syntax { .. } => SweepError::Config(source),
        source => SweepError::Run { run: name.clone(), source },
    })?;
    Ok(PlannedRun { name, labels, seed, sets, config })
}

/// `label` with every character that does not belong in a folder name replaced by `-`.
fn file_name(label: &str) -> String {
    let keep = |c: char| c.is_alphanumeric() || "._+-=".contains(c);
    let replaced: String = label.chars().map(|c| if keep(c) { c } else { '-' }).collect();
    replaced.trim_matches(['-', '.']).to_owned()
}

fn same_name(run: &PlannedRun, other: &PlannedRun) -> SweepError {
    SweepError::Config(ConfigError::Key {
        place: "the sweep".to_owned(),
        problem: format!(
            "two runs would both be called {}: {:?} and {:?}",
            run.name, other.labels, run.labels
        ),
        hint: "give the axes names = [...] that differ in letters and digits".to_owned(),
    })
}
