//! The results of a suite: `results.json`, `grid.csv`, and the table for the terminal.

use std::collections::BTreeMap;
use std::fmt::{self, Display};
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

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
    /// Mean, standard error, samples.
    #[serde(flatten)]
    pub estimate: Estimate,
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
    /// Every score.
    pub scores: Vec<Score>,
    /// Further results specific to the suite.
    pub details: Value,
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
        let mut csv = String::from("metric,length,depth,value,standard_error,samples\n");
        for score in &self.scores {
            let Estimate { value, standard_error, samples } = score.estimate;
            csv += &format!(
                "{},{},{},{},{},{samples}\n",
                score.metric,
                cell(score.length),
                cell(score.depth),
                cell(value),
                cell(standard_error)
            );
        }
        csv
    }

    fn title(&self) -> String {
        let step = self.checkpoint_step.map(|step| format!(", step {step}")).unwrap_or_default();
        format!(
            "{} (version {}): run {}{step}, {} samples, seed {}, {}",
            self.suite, self.suite_version, self.run, self.samples, self.seed, self.device
        )
    }

    /// Rows of the terminal's table: one per length, with a column for each metric and depth.
    fn table(&self) -> Vec<Vec<String>> {
        let mut columns: Vec<(&str, Option<f64>)> = Vec::new();
        let mut lengths: Vec<Option<usize>> = Vec::new();
        for score in &self.scores {
            let column = (score.metric.as_str(), score.depth);
            if !columns.contains(&column) {
                columns.push(column);
            }
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
                found.map_or(String::new(), |score| show(&score.estimate, depth.is_none()))
            }));
            rows.push(row);
        }
        rows
    }
}

/// The title, the scores by length, and how to read them.
impl Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.title())?;
        let rows = self.table();
        let widths: Vec<usize> = (0..rows[0].len())
            .map(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0))
            .collect();
        for row in &rows {
            let mut line = String::new();
            for (text, width) in row.iter().zip(&widths) {
                let padding = width - text.chars().count();
                line += &format!("{}{text}  ", " ".repeat(padding));
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        write!(
            f,
            "lengths in tokens of the {} tokenizer (trained at {}); ± is the standard error",
            self.tokenizer.name, self.train_seq_len
        )
    }
}

fn show(estimate: &Estimate, with_error: bool) -> String {
    let digits = match estimate.value.map(f64::abs) {
        Some(value) if value >= 1000.0 => 1,
        Some(value) if value > 0.0 && value < 0.01 => 6,
        _ => 3,
    };
    match (estimate.value, estimate.standard_error) {
        (None, _) => "not finite".to_string(),
        (Some(value), Some(error)) if with_error => format!("{value:.digits$} ± {error:.digits$}"),
        (Some(value), _) => format!("{value:.digits$}"),
    }
}

fn cell<T: Display>(value: Option<T>) -> String {
    value.map_or(String::new(), |value| value.to_string())
}
