//! The sweep file.

use std::path::{Path, PathBuf};

use longwall_config::Problems;
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use crate::config::{ConfigError, is_folder_name, read_toml, validate_evals};

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
    /// The axes of the grid; the last one varies fastest.
    #[serde(default)]
    pub axes: Vec<Axis>,
    /// Every combination runs once with each of these as `run.seed`. Default `[0]`.
    #[serde(default = "default_seeds")]
    pub seeds: Vec<u64>,
    /// Evaluations after every run: the name of a `suite`, its options, and optionally the name of its
    /// results' folder (`out`).
    #[serde(default)]
    pub eval: Vec<Table>,
}

/// One axis of a sweep.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Axis {
    /// The dotted key it sets. Without one, every value is a table of overrides, as in `set`.
    #[serde(default)]
    pub key: Option<String>,
    /// Its values.
    pub values: Vec<Value>,
    /// Names of the values in run names and tables. Default: the value itself, or its `kind`.
    #[serde(default)]
    pub names: Vec<String>,
}

fn default_out_dir() -> PathBuf {
    "runs".into()
}

fn default_seeds() -> Vec<u64> {
    vec![0]
}

impl Axis {
    /// The axis's name in tables.
    pub fn title(&self) -> &str {
        self.key.as_deref().unwrap_or("variant")
    }

    /// The name of value `index`.
    pub fn label(&self, index: usize) -> String {
        if let Some(name) = self.names.get(index) {
            return name.clone();
        }
        match &self.values[index] {
            Value::String(text) => text.clone(),
            Value::Table(table) if self.key.is_some() => match table.get("kind") {
                Some(Value::String(kind)) => kind.clone(),
                _ => self.values[index].to_string(),
            },
            other => other.to_string(),
        }
    }

    /// The `key=value` overrides of value `index`.
    pub(super) fn sets(&self, index: usize) -> Vec<String> {
        match (&self.key, &self.values[index]) {
            (Some(key), value) => vec![format!("{key}={value}")],
            (None, Value::Table(table)) => overrides(table),
            (None, _) => Vec::new(),
        }
    }

    fn validate(&self, at: usize, problems: &mut Problems) {
        let key = format!("axes.{at}");
        problems.check(
            !self.values.is_empty(),
            format!("{key}.values"),
            "[]",
            "at least one value",
            "add values, or remove the axis",
        );
        problems.check(
            self.names.is_empty() || self.names.len() == self.values.len(),
            format!("{key}.names"),
            format!("{} names", self.names.len()),
            format!("as many as there are values ({})", self.values.len()),
            "name every value, or leave names out",
        );
        let reserved = ["run", "run.name", "run.out_dir", "run.seed"];
        problems.check(
            self.key.as_deref().is_none_or(|key| !reserved.contains(&key)),
            format!("{key}.key"),
            self.title(),
            "any key but the run's name, folder and seed, which the sweep sets",
            "give seeds in `seeds`",
        );
        problems.check(
            self.key.is_some() || self.values.iter().all(Value::is_table),
            format!("{key}.key"),
            "missing",
            "a dotted key, unless every value is a table of overrides",
            "add key = \"train.lr\", or write values = [{ \"train.lr\" = 1e-3 }]",
        );
        if self.names.is_empty() || self.names.len() == self.values.len() {
            let labels: Vec<String> = (0..self.values.len()).map(|i| self.label(i)).collect();
            let twice = labels.iter().enumerate().find(|(i, label)| labels[..*i].contains(label));
            problems.check(
                twice.is_none(),
                format!("{key}.names"),
                twice.map_or("", |(_, label)| label),
                "a different name for every value",
                "give names = [...] that differ",
            );
        }
    }
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
            "a folder name without `/` and without a leading `.`",
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
            axis.validate(at, problems);
        }
        validate_evals("eval", &self.eval.iter().collect::<Vec<_>>(), problems);
    }
}
