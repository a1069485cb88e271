//! The results of a sweep's runs: one row per run in `results.csv`, and a table over the seeds.

use std::fmt::{self, Display};
use std::path::Path;

use serde_json::{Map, Value, json};

use super::figures::{Comparison, Figure, VALIDATION_LOSS, VariantFigure, cell, headline};
use super::{Plan, PlannedRun};
use crate::checkpoint::WeightsSelector;
use crate::config::{eval_name, eval_weights};
use crate::run_folder::Finished;

/// How far a run of a sweep got.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Status {
    /// Not started, or stopped by the user.
    Pending,
    /// Trained and evaluated.
    Finished,
    /// Training or an evaluation failed, with the reason.
    Failed(String),
}

impl Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Status::Pending => f.write_str("pending"),
            Status::Finished => f.write_str("finished"),
            Status::Failed(reason) => write!(f, "failed: {reason}"),
        }
    }
}

/// One run's outcome.
#[derive(Clone, Debug, PartialEq)]
pub struct RunResult {
    /// The run's name within the sweep.
    pub name: String,
    /// The name of its value on each axis.
    pub labels: Vec<String>,
    /// Its seed.
    pub seed: u64,
    /// How far it got.
    pub status: Status,
    /// Its figures, in the order of the columns.
    pub figures: Vec<Figure>,
}

impl RunResult {
    /// A run without results.
    pub(super) fn pending(run: &PlannedRun) -> Self {
        RunResult {
            name: run.name.clone(),
            labels: run.labels.clone(),
            seed: run.seed,
            status: Status::Pending,
            figures: Vec::new(),
        }
    }

    /// The names of its values, one after another; without axes, all runs are one variant.
    pub fn variant(&self) -> String {
        if self.labels.is_empty() { "all seeds".to_owned() } else { self.labels.join(", ") }
    }

    /// Reads the figures of a finished training run and of its evaluations from its folder.
    pub(super) fn read_figures(&mut self, run_dir: &Path, finished: &Finished, evals: &[&str]) {
        let mut figures = Vec::new();
        if let Some(validation) = &finished.validation {
            figures.push(Figure::exact(VALIDATION_LOSS, validation.validation_loss));
            figures.push(Figure::exact("bits_per_byte", validation.bits_per_byte));
        }
        figures.push(Figure::exact("tokens_per_second", finished.tokens_per_second));
        figures.push(Figure::exact("skipped_steps", finished.skipped as f64));
        for eval in evals {
            figures.extend(headline(eval, &run_dir.join("eval").join(eval).join("results.json")));
        }
        self.figures = figures;
    }

    fn figure(&self, name: &str) -> Option<&Figure> {
        self.figures.iter().find(|figure| figure.name == name)
    }
}

/// The outcome of a sweep.
#[derive(Clone, Debug, PartialEq)]
pub struct SweepResults {
    /// The axes' names.
    pub axes: Vec<String>,
    /// The names of the evaluations that read the averaged weights.
    pub averaged: Vec<String>,
    /// One entry per run, in the plan's order.
    pub runs: Vec<RunResult>,
}

impl SweepResults {
    /// All runs of `plan`, pending.
    pub(super) fn new(plan: &Plan) -> Self {
        SweepResults {
            axes: plan.sweep.axes.iter().map(|axis| axis.title().to_owned()).collect(),
            averaged: {
                let averaged =
                    plan.sweep.eval.iter().filter(|e| eval_weights(e) == WeightsSelector::Ema);
                averaged.filter_map(eval_name).map(str::to_owned).collect()
            },
            runs: plan.runs.iter().map(RunResult::pending).collect(),
        }
    }

    /// Whether every run is finished.
    pub fn is_complete(&self) -> bool {
        self.runs.iter().all(|run| run.status == Status::Finished)
    }

    /// The runs that failed, with their reasons.
    pub fn failures(&self) -> impl Iterator<Item = (&str, &str)> {
        self.runs.iter().filter_map(|run| match &run.status {
            Status::Failed(reason) => Some((run.name.as_str(), reason.as_str())),
            _ => None,
        })
    }

    /// The names of all figures that any run has, in the order of their first appearance.
    fn figure_names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        for figure in self.runs.iter().flat_map(|run| &run.figures) {
            if !names.contains(&figure.name.as_str()) {
                names.push(&figure.name);
            }
        }
        names
    }

    /// One row per run: name, axes, seed, status, figures; a figure with an interval is followed by its ends.
    pub fn to_csv(&self) -> String {
        let figures = self.figure_names();
        let has_interval = |name: &str| {
            self.runs.iter().filter_map(|run| run.figure(name)).any(|f| f.interval.is_some())
        };
        let with_interval: Vec<(&str, bool)> =
            figures.into_iter().map(|name| (name, has_interval(name))).collect();
        let mut header = vec!["run".to_owned()];
        header.extend(self.axes.iter().cloned());
        header.extend(["seed".to_owned(), "status".to_owned()]);
        for (name, interval) in &with_interval {
            header.push((*name).to_owned());
            if *interval {
                header.extend([format!("{name}.low"), format!("{name}.high")]);
            }
        }
        let mut csv = row(&header);
        for run in &self.runs {
            let status = run.status.to_string();
            let mut cells = vec![run.name.clone()];
            cells.extend(run.labels.iter().cloned());
            cells.extend([run.seed.to_string(), status]);
            for (name, interval) in &with_interval {
                let show = |value: Option<f64>| value.map_or_else(String::new, |v| v.to_string());
                let figure = run.figure(name);
                cells.push(show(figure.map(|figure| figure.value)));
                if *interval {
                    let ends = figure.and_then(|figure| figure.interval);
                    cells.extend([show(ends.map(|ends| ends.0)), show(ends.map(|ends| ends.1))]);
                }
            }
            csv += &row(&cells);
        }
        csv
    }

    /// One JSON object per run: name, the name of its value on each axis, the settings that differ from the base,
    /// seed, status and figures.
    pub fn to_jsonl(&self, plan: &Plan) -> String {
        let line = |(run, planned): (&RunResult, &PlannedRun)| {
            let axes: Map<String, Value> = self
                .axes
                .iter()
                .zip(&run.labels)
                .map(|(axis, label)| (axis.clone(), label.clone().into()))
                .collect();
            let figure = |figure: &Figure| {
                let (low, high) = figure.interval.unzip();
                let value = json!({
                    "value": figure.value,
                    "standard_error": figure.standard_error,
                    "low": low,
                    "high": high,
                });
                (figure.name.clone(), value)
            };
            let figures: Map<String, Value> = run.figures.iter().map(figure).collect();
            json!({
                "run": run.name,
                "axes": axes,
                "settings": planned.settings(),
                "seed": run.seed,
                "status": run.status.to_string(),
                "figures": figures,
            })
        };
        self.runs.iter().zip(&plan.runs).map(|pair| format!("{}\n", line(pair))).collect()
    }

    /// The runs by combination of the axes, with those that are finished.
    fn groups(&self) -> impl Iterator<Item = (&[RunResult], Vec<&RunResult>)> {
        self.runs.chunk_by(|a, b| a.labels == b.labels).map(|group| {
            (group, group.iter().filter(|run| run.status == Status::Finished).collect())
        })
    }

    /// A table with one line for each combination of the axes: how many of its seeds are finished, and
    /// their figures, as [`SweepResults::legend`] explains.
    pub fn table(&self) -> String {
        let figures = self.figure_names();
        let mut rows = vec![
            self.axes
                .iter()
                .cloned()
                .chain(["seeds".to_owned()])
                .chain(figures.iter().map(|name| (*name).to_owned()))
                .collect::<Vec<_>>(),
        ];
        for (group, done) in self.groups() {
            let mut cells = group[0].labels.clone();
            cells.push(format!("{}/{}", done.len(), group.len()));
            for name in &figures {
                let values: Vec<&Figure> = done.iter().filter_map(|run| run.figure(name)).collect();
                cells.push(cell(&values));
            }
            rows.push(cells);
        }
        aligned(&rows)
    }

    /// What the table's signs mean; empty if it has none.
    pub fn legend(&self) -> String {
        let mut parts: Vec<&str> = Vec::new();
        let seeds = self.groups().map(|(_, done)| done.len()).max().unwrap_or(0);
        let figures = || self.runs.iter().flat_map(|run| &run.figures);
        if seeds > 1 {
            parts.push("± is the standard error over the seeds");
        } else if figures().any(|figure| figure.standard_error.is_some()) {
            parts.push("± is the standard error over the evaluation's samples");
        }
        if figures().any(Figure::is_proportion) {
            parts.push(match seeds > 1 {
                true => "brackets hold the 95 % interval of the evaluation's samples (Wilson), its ends averaged over the seeds",
                false => "brackets hold the 95 % interval of the evaluation's samples (Wilson)",
            });
        }
        let averaged = format!("{}: of the averaged weights", self.averaged.join(", "));
        if !self.averaged.is_empty() {
            parts.push(&averaged);
        }
        parts.join("; ")
    }

    /// The final validation loss and the headline scores of the evaluations, by combination of the axes.
    pub fn comparisons(&self) -> Vec<Comparison> {
        let compared = |name: &&str| *name == VALIDATION_LOSS || name.contains('.');
        let comparison = |name: &str| {
            let variant = |(group, done): (&[RunResult], Vec<&RunResult>)| {
                let figures: Vec<&Figure> =
                    done.iter().filter_map(|run| run.figure(name)).collect();
                VariantFigure::new(group[0].variant(), &figures)
            };
            let figures = self.runs.iter().filter_map(|run| run.figure(name));
            Comparison {
                figure: name.to_owned(),
                is_proportion: figures.into_iter().all(Figure::is_proportion),
                variants: self.groups().map(variant).collect(),
            }
        };
        let names = self.figure_names().into_iter().filter(compared);
        let known = |c: &Comparison| c.variants.iter().any(|variant| variant.mean.is_some());
        names.map(comparison).filter(known).collect()
    }
}

/// One CSV line.
fn row(cells: &[String]) -> String {
    let quoted = |cell: &String| {
        if cell.contains([',', '"', '\n', '\r']) {
            format!("\"{}\"", cell.replace('"', "\"\""))
        } else {
            cell.clone()
        }
    };
    cells.iter().map(quoted).collect::<Vec<_>>().join(",") + "\n"
}

/// Columns padded to their widest cell.
fn aligned(rows: &[Vec<String>]) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths: Vec<usize> = (0..rows[0].len()).map(|c| width(c).unwrap_or(0)).collect();
    rows.iter()
        .map(|row| {
            let cells = row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:<width$}"));
            cells.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn csv_cells_are_quoted_where_they_must_be() {
        let cells = ["a".to_owned(), "b,c".to_owned(), "d \"e\"".to_owned()];
        assert_eq!(row(&cells), "a,\"b,c\",\"d \"\"e\"\"\"\n");
    }
}
