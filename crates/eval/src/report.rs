//! The results of a suite: `results.json`, `grid.csv`, and the table for the terminal.

use std::collections::BTreeMap;
use std::fmt::{self, Display};
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::EvalError;
use crate::files::write_atomically;
use crate::stats::Estimate;

/// One number of a suite.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Score {
    /// What it measures: "accuracy", "loss".
    pub metric: String,
    /// Length in tokens; none for a score over all lengths.
    pub length: Option<usize>,
    /// Depth, 0 to 1; none for a score over all depths.
    pub depth: Option<f64>,
    /// Mean or proportion, standard error, 95 % interval, samples.
    #[serde(flatten)]
    pub estimate: Estimate,
}

/// A table for the terminal.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TextTable {
    /// What it shows.
    pub title: String,
    /// Rows of cells, all of the same number; the first names the columns.
    pub rows: Vec<Vec<String>>,
}

/// Right-aligned columns.
impl Display for TextTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.title.is_empty() {
            writeln!(f, "{}", self.title)?;
        }
        let columns = self.rows.first().map_or(0, Vec::len);
        let widths: Vec<usize> = (0..columns)
            .map(|column| {
                self.rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0)
            })
            .collect();
        for row in &self.rows {
            let mut line = String::new();
            for (text, width) in row.iter().zip(&widths) {
                let padding = width - text.chars().count();
                line += &format!("{}{text}  ", " ".repeat(padding));
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// The tokenizer an evaluation counted its lengths in.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenizerReport {
    /// Its name.
    pub name: String,
    /// Hash of its vocabulary.
    pub fingerprint: String,
    /// Tokens in its vocabulary.
    pub vocab_size: usize,
}

/// The contents of `results.json`: the scores, and what is needed to reproduce them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The suite.
    pub suite: String,
    /// The suite's version; numbers of different versions are not comparable.
    pub suite_version: u32,
    /// Name of the run.
    pub run: String,
    /// Step of the checkpoint.
    pub checkpoint_step: Option<u64>,
    /// How the model differs from the checkpoint's: other weights or settings, as `key=value`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub model_changes: Vec<String>,
    /// Git commit of the working tree.
    pub git_hash: Option<String>,
    /// Version of Longwall.
    pub longwall_version: String,
    /// Device the model ran on.
    pub device: String,
    /// The tokenizer.
    pub tokenizer: TokenizerReport,
    /// Length of the sequences the model was trained on, in tokens.
    pub train_seq_len: usize,
    /// Seed of the samples.
    pub seed: u64,
    /// The suite's options as the user set them.
    pub config: Value,
    /// Values chosen by default: lengths, the text read.
    pub resolved: Value,
    /// Samples taken.
    pub samples: u64,
    /// The few numbers that sweeps compare.
    pub headline: BTreeMap<String, Option<f64>>,
    /// The same numbers with their standard errors or intervals.
    #[serde(default)]
    pub headline_estimates: BTreeMap<String, Estimate>,
    /// Every score.
    pub scores: Vec<Score>,
    /// Further tables for the terminal; their numbers are in `details`.
    #[serde(skip)]
    pub tables: Vec<TextTable>,
    /// Whether the further tables show all scores.
    #[serde(skip)]
    pub tables_only: bool,
    /// What a reader must know about the scores, a sentence each.
    #[serde(default)]
    pub notes: Vec<String>,
    /// Further results specific to the suite.
    pub details: Value,
    /// Fields for other programs to read.
    #[serde(flatten)]
    pub shared: Map<String, Value>,
}

impl Report {
    /// Reads a `results.json`.
    ///
    /// # Errors
    /// [`EvalError::Io`] when it cannot be read, [`EvalError::Damaged`] when it is not a report.
    pub fn load(path: &Path) -> Result<Self, EvalError> {
        let text = std::fs::read_to_string(path).map_err(EvalError::read(path))?;
        serde_json::from_str(&text).map_err(|error| EvalError::Damaged {
            path: path.to_path_buf(),
            line: error.line(),
            reason: format!("not a results.json of an evaluation: {error}"),
        })
    }

    /// Writes `results.json` and `grid.csv` into `dir`.
    pub(crate) fn save(&self, dir: &Path) -> Result<(), EvalError> {
        write_atomically(&dir.join("grid.csv"), self.csv().as_bytes())?;
        let json = serde_json::to_string_pretty(self).expect("a report is plain data");
        write_atomically(&dir.join("results.json"), (json + "\n").as_bytes())
    }

    /// The scores as CSV, one per line.
    pub fn csv(&self) -> String {
        let mut csv = String::from("metric,length,depth,value,standard_error,low,high,samples\n");
        for score in &self.scores {
            let Estimate { value, standard_error, low, high, samples } = score.estimate;
            csv += &format!(
                "{},{},{},{},{},{},{},{samples}\n",
                score.metric,
                cell(score.length),
                cell(score.depth),
                cell(value),
                cell(standard_error),
                cell(low),
                cell(high)
            );
        }
        csv
    }

    fn title(&self) -> String {
        format!(
            "{} (version {}): run {}, {} samples, seed {}, {}",
            self.suite,
            self.suite_version,
            self.model(),
            self.samples,
            self.seed,
            self.device
        )
    }

    /// The run, its step, and how the model differs from the checkpoint's.
    pub(crate) fn model(&self) -> String {
        let step = self.checkpoint_step.map(|step| format!(", step {step}"));
        let changes = self.model_changes.iter().map(|change| format!(", {change}"));
        step.into_iter().chain(changes).fold(self.run.clone(), |text, part| text + &part)
    }

    /// The table's columns, metric and depth: metrics in the order of their first scores, and the depths
    /// of each from the start of the text to its end.
    fn columns(&self) -> Vec<(&str, Option<f64>)> {
        let mut metrics: Vec<&str> = Vec::new();
        let mut columns: Vec<(&str, Option<f64>)> = Vec::new();
        for score in &self.scores {
            let column = (score.metric.as_str(), score.depth);
            if !metrics.contains(&column.0) {
                metrics.push(column.0);
            }
            if !columns.contains(&column) {
                columns.push(column);
            }
        }
        let place = |metric| metrics.iter().position(|&other| other == metric);
        columns.sort_by(|a, b| {
            let depths = a.1.unwrap_or(-1.0).total_cmp(&b.1.unwrap_or(-1.0));
            place(a.0).cmp(&place(b.0)).then(depths)
        });
        columns
    }

    /// Rows of the terminal's table: one per length, with a column for each metric and depth.
    fn table(&self) -> Vec<Vec<String>> {
        let columns = self.columns();
        let mut lengths: Vec<Option<usize>> = Vec::new();
        for score in &self.scores {
            if !lengths.contains(&score.length) {
                lengths.push(score.length);
            }
        }
        let mut header = vec!["length".to_string()];
        header.extend(columns.iter().map(|(metric, depth)| match depth {
            Some(depth) => format!("at {:.0} %", depth * 100.0),
            None => metric.to_string(),
        }));
        let mut rows = vec![header];
        for length in lengths {
            let mut row = vec![length.map_or("all".to_string(), |length| length.to_string())];
            row.extend(columns.iter().map(|&(metric, depth)| {
                let found = self.scores.iter().find(|score| {
                    score.metric == metric && score.depth == depth && score.length == length
                });
                found.map_or(String::new(), |score| match depth {
                    Some(_) => counted(&score.estimate),
                    None => show(&score.estimate),
                })
            }));
            rows.push(row);
        }
        rows
    }

    /// What the table's brackets and signs mean.
    fn legend(&self) -> String {
        let estimates = || self.scores.iter().map(|score| &score.estimate);
        let mut parts = Vec::new();
        if estimates().any(|estimate| estimate.standard_error.is_some()) {
            parts.push("± is the standard error");
        }
        if estimates().any(Estimate::is_proportion) {
            parts.push("brackets hold the 95 % interval (Wilson)");
        }
        if self.scores.iter().any(|score| score.depth.is_some()) {
            parts.push("depths show correct/samples, their intervals are in grid.csv");
        }
        if estimates().any(|estimate| estimate.value.is_some() && estimate.bar().is_none()) {
            parts.push("± ? where a single sample or document gives no standard error");
        }
        let (name, trained) = (&self.tokenizer.name, self.train_seq_len);
        let lengths = format!("lengths in tokens of the {name} tokenizer (trained at {trained})");
        std::iter::once(lengths.as_str()).chain(parts).collect::<Vec<_>>().join("; ")
    }
}

/// The title, the scores by length, further tables, how to read the scores, and the notes.
impl Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.title())?;
        if !self.tables_only {
            write!(f, "{}", TextTable { title: String::new(), rows: self.table() })?;
        }
        for table in &self.tables {
            write!(f, "\n{table}")?;
        }
        write!(f, "{}", self.legend())?;
        for note in &self.notes {
            write!(f, "\nnote: {note}")?;
        }
        Ok(())
    }
}

/// An estimate with its uncertainty: `2.310 ± 0.021`, or `0.900 [0.699, 0.972]` for a proportion.
pub(crate) fn show(estimate: &Estimate) -> String {
    let Some(value) = estimate.value else { return "not finite".to_string() };
    let digits = match value.abs() {
        value if value >= 1000.0 => 1,
        value if value > 0.0 && value < 0.01 => 6,
        _ => 3,
    };
    match (estimate.standard_error, estimate.low.zip(estimate.high)) {
        (Some(error), _) => format!("{value:.digits$} ± {error:.digits$}"),
        (None, Some((low, high))) => format!("{value:.digits$} [{low:.3}, {high:.3}]"),
        (None, None) => format!("{value:.digits$} ± ?"),
    }
}

/// A proportion as its counts, `18/20`, which show how few the samples are.
fn counted(estimate: &Estimate) -> String {
    let count = |share: f64| (share * estimate.samples as f64).round();
    estimate.value.map_or(String::new(), |share| format!("{}/{}", count(share), estimate.samples))
}

fn cell<T: Display>(value: Option<T>) -> String {
    value.map_or(String::new(), |value| value.to_string())
}
