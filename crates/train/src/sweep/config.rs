//! The sweep file.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use longwall_config::Problems;
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use super::axis::{Axis, check_condition};
use crate::config::{ConfigError, FOLDER_NAME, is_folder_name, read_toml, validate_evals};

/// A sweep file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SweepConfig {
    /// Name of the sweep and of its folder. Default: the file's name without its extension.
    #[serde(default)]
    pub name: String,
    /// The run configuration that all runs start from, relative to the current folder or, failing that,
    /// to the sweep file's folder.
    pub base: PathBuf,
    /// The folder that the sweep's folder goes into. Default `runs`.
    #[serde(default = "default_out_dir")]
    pub out_dir: PathBuf,
    /// Overrides of the base for all runs: a quoted dotted key replaces that key's value as a
    /// whole (`"model.attention" = { kind = "fox" }`), a bare dotted key sets one entry.
    #[serde(default)]
    pub set: Table,
    /// The axes, whose points are combined; the last one varies fastest.
    #[serde(default)]
    pub axes: Vec<Axis>,
    /// Combinations that are left out: each entry names axes, and points of them.
    #[serde(default)]
    pub exclude: Vec<BTreeMap<String, Vec<String>>>,
    /// Every combination runs once with each of these as `run.seed`. Default `[0]`.
    #[serde(default = "default_seeds")]
    pub seeds: Vec<u64>,
    /// Evaluations after every run: the name of a `suite`, its options, and optionally the name of its
    /// results' folder (`out`) and which weights it reads (`weights`).
    #[serde(default)]
    pub eval: Vec<Table>,
}

fn default_out_dir() -> PathBuf {
    "runs".into()
}

fn default_seeds() -> Vec<u64> {
    vec![0]
}

/// `table` as `key=value` overrides. A quoted dotted key, or a key whose value is not a table, becomes
/// one override; other tables are flattened.
pub(super) fn overrides(table: &Table) -> Vec<String> {
    fn descend(key: &str, value: &Value, sets: &mut Vec<String>) {
        match value {
            Value::Table(table) if !table.is_empty() => {
                for (name, inner) in table {
                    descend(&format!("{key}.{name}"), inner, sets);
                }
            }
            leaf => sets.push(format!("{key}={leaf}")),
        }
    }
    let mut sets = Vec::new();
    for (key, value) in table {
        if key.contains('.') {
            sets.push(format!("{key}={value}"));
        } else {
            descend(key, value, &mut sets);
        }
    }
    sets
}

impl SweepConfig {
    /// Reads and validates a sweep file.
    ///
    /// # Errors
    /// As [`RunConfig::load`](crate::config::RunConfig::load).
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let source = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        let mut sweep = Self::parse(&source, path)?;
        let beside = path.parent().unwrap_or(Path::new("")).join(&sweep.base);
        if !sweep.base.exists() && beside.exists() {
            sweep.base = beside;
        }
        Ok(sweep)
    }

    /// As [`SweepConfig::load`], from the text `source` of the file `path`.
    ///
    /// # Errors
    /// As [`SweepConfig::load`].
    pub fn parse(source: &str, path: &Path) -> Result<Self, ConfigError> {
        let mut config: SweepConfig = read_toml(source, path)?;
        if config.name.is_empty() {
            config.name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        }
        let mut problems = Problems::new();
        config.validate(&mut problems);
        problems
            .into_result()
            .map_err(|problems| ConfigError::Invalid { path: path.to_owned(), problems })?;
        Ok(config)
    }

    /// The sweep's folder.
    pub fn dir(&self) -> PathBuf {
        self.out_dir.join(&self.name)
    }

    fn validate(&self, problems: &mut Problems) {
        problems.check(
            is_folder_name(&self.name),
            "name",
            format!("\"{}\"", self.name),
            FOLDER_NAME,
            "use for example \"attention-kinds\"; out_dir says where the folder goes",
        );
        let repeated = self.seeds.iter().enumerate().find(|(i, s)| self.seeds[..*i].contains(s));
        problems.check(
            !self.seeds.is_empty() && repeated.is_none(),
            "seeds",
            format!("{:?}", self.seeds),
            "one or more seeds, each once",
            "use for example seeds = [0, 1, 2]",
        );
        for (at, axis) in self.axes.iter().enumerate() {
            axis.validate(at, &self.axes[..at], problems);
        }
        for (at, condition) in self.exclude.iter().enumerate() {
            let key = format!("exclude.{at}");
            problems.check(
                !condition.is_empty(),
                key.clone(),
                "empty",
                "names of axes with lists of their values' names",
                "write for example [[exclude]] with \"model.attention\" = [\"rope\"]",
            );
            check_condition(&key, condition, &self.axes, problems);
        }
        validate_evals("eval", &self.eval.iter().collect::<Vec<_>>(), problems);
    }
}
