//! From a sweep file to its list of runs.

use std::fmt::Write;
use std::path::PathBuf;

use longwall_config::{Problem, Problems};

use super::axis::{Axis, Point, matches};
use super::config::overrides;
use super::{SweepConfig, SweepError};
use crate::config::{ConfigError, RunConfig, validate_without_average};
use crate::run_folder;

/// One run of a sweep.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedRun {
    /// Its name within the sweep.
    pub name: String,
    /// The name of its value on each axis; `-` for an axis that does not apply.
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

    /// The overrides of the base, `key=value`, but those that every run has.
    pub fn settings(&self) -> Vec<&str> {
        let is_own = |set: &&str| !set.starts_with("run.name=") && !set.starts_with("run.out_dir=");
        self.sets.iter().map(String::as_str).filter(is_own).collect()
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
        let mut runs: Vec<PlannedRun> = Vec::new();
        for points in combinations(&sweep)? {
            for &seed in &sweep.seeds {
                let run = plan_run(&sweep, &points, seed)?;
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
            let _ = writeln!(text, "{} ({state}): {}", run.name, run.settings().join(", "));
        }
        Ok(text)
    }
}

/// The most runs of a sweep.
const MOST_RUNS: usize = 10_000;

/// The point of each axis; `None` for an axis that does not apply.
type Combination = Vec<Option<Point>>;

/// All combinations of the axes' points, but those that are excluded; the last axis varies fastest.
fn combinations(sweep: &SweepConfig) -> Result<Vec<Combination>, SweepError> {
    let mut combinations: Vec<Combination> = vec![vec![]];
    for axis in &sweep.axes {
        let points: Combination = axis.points().into_iter().map(Some).collect();
        let mut longer = Vec::new();
        for combination in combinations {
            let choices = match axis.applies(&named(&sweep.axes, &combination)) {
                true => &points[..],
                false => &[None],
            };
            let add =
                |choice: &Option<Point>| [&combination[..], std::slice::from_ref(choice)].concat();
            longer.extend(choices.iter().map(add));
            if longer.len().saturating_mul(sweep.seeds.len()) > MOST_RUNS {
                return Err(too_many(&points_of_axes(sweep), sweep.seeds.len()));
            }
        }
        combinations = longer;
    }
    combinations.retain(|combination| {
        let named = named(&sweep.axes, combination);
        !sweep.exclude.iter().any(|entry| matches(entry, &named))
    });
    Ok(combinations)
}

/// The axes' names with the names of their points.
fn named<'a>(
    axes: &'a [Axis],
    combination: &'a [Option<Point>],
) -> Vec<(&'a str, Option<&'a str>)> {
    let label = |point: &'a Option<Point>| point.as_ref().map(|point| point.label.as_str());
    axes.iter().map(Axis::title).zip(combination.iter().map(label)).collect()
}

/// How many points each axis has.
fn points_of_axes(sweep: &SweepConfig) -> Vec<String> {
    sweep.axes.iter().map(|axis| axis.points().len().to_string()).collect()
}

/// A sweep of too many runs, found before they are planned one by one.
fn too_many(sizes: &[String], seeds: usize) -> SweepError {
    SweepError::Config(ConfigError::Key {
        place: "the sweep".to_owned(),
        problem: format!(
            "the axes have {} values, with {seeds} seeds each; allowed: {MOST_RUNS} runs",
            sizes.join(" · ")
        ),
        hint: "remove values, or split the sweep into several files".to_owned(),
    })
}

fn plan_run(
    sweep: &SweepConfig,
    points: &[Option<Point>],
    seed: u64,
) -> Result<PlannedRun, SweepError> {
    let parts = points.iter().flatten().map(|point| file_name(&point.label));
    let name = parts.chain([format!("seed{seed}")]).collect::<Vec<_>>().join("-");
    let mut sets = overrides(&sweep.set);
    sets.extend(points.iter().flatten().flat_map(|point| point.sets.clone()));
    let label = |point: &Option<Point>| point.as_ref().map_or("-".to_owned(), |p| p.label.clone());
    let labels = points.iter().map(label).collect();
    let text = |value: String| toml::Value::String(value).to_string();
    sets.push(format!("run.seed={seed}"));
    sets.push(format!("run.name={}", text(name.clone())));
    sets.push(format!("run.out_dir={}", text(sweep.dir().display().to_string())));
    let config = RunConfig::load(&sweep.base, &sets).map_err(|source| match source {
        ConfigError::Read { .. } | ConfigError::Syntax { .. } => SweepError::Config(source),
        source => SweepError::Run { run: name.clone(), source },
    })?;
    check_weights(sweep, &name, &config)?;
    check_ranks(&name, &config)?;
    Ok(PlannedRun { name, labels, seed, sets, config })
}

/// Refuses the run `name` if its rows need several GPUs: a run of a sweep has one.
fn check_ranks(name: &str, config: &RunConfig) -> Result<(), SweepError> {
    match config.train.context_parallel {
        1 => Ok(()),
        ranks => Err(SweepError::Config(ConfigError::Key {
            place: "the sweep".to_owned(),
            problem: format!(
                "train.context_parallel is {ranks} ({name}); allowed: 1, a run of a sweep has one GPU"
            ),
            hint: "set \"train.context_parallel\" = 1, or train the runs one by one with --gpus"
                .to_owned(),
        })),
    }
}

/// Refuses an evaluation of the averaged weights of the run `name`, if it keeps no average.
fn check_weights(sweep: &SweepConfig, name: &str, config: &RunConfig) -> Result<(), SweepError> {
    if config.train.ema.0.is_some() {
        return Ok(());
    }
    let mut problems = Problems::new();
    validate_without_average("eval", &sweep.eval.iter().collect::<Vec<_>>(), &mut problems);
    let Some(Problem { key, value, allowed, .. }) = problems.as_slice().first() else {
        return Ok(());
    };
    Err(SweepError::Config(ConfigError::Key {
        place: "the sweep".to_owned(),
        problem: format!("{key} is {value} ({name}); allowed: {allowed}"),
        hint: "add \"train.ema\" = 0.999 to set, or leave weights out".to_owned(),
    }))
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
