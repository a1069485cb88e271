//! The results of a sweep's runs: one row per run in `results.csv`, and a table over the seeds.

use std::fs;
use std::path::Path;

use super::{Plan, PlannedRun};
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
    /// Named figures, in the order of the columns.
    pub figures: Vec<(String, f64)>,
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

    /// Reads the figures of a finished training run and of its evaluations from its folder.
    pub(super) fn read_figures(&mut self, run_dir: &Path, finished: &Finished, evals: &[&str]) {
        let mut figures = Vec::new();
        if let Some(validation) = &finished.validation {
            figures.push(("validation_loss".to_owned(), validation.validation_loss));
            figures.push(("bits_per_byte".to_owned(), validation.bits_per_byte));
        }
        figures.push(("tokens_per_second".to_owned(), finished.tokens_per_second));
        figures.push(("skipped_steps".to_owned(), finished.skipped as f64));
        for eval in evals {
            for (name, value) in headline(&run_dir.join("eval").join(eval).join("results.json")) {
                figures.push((format!("{eval}.{name}"), value));
            }
        }
        self.figures = figures;
    }

    fn figure(&self, name: &str) -> Option<f64> {
        self.figures.iter().find(|(other, _)| other == name).map(|(_, value)| *value)
    }
}

/// The headline scores of an evaluation; none if its results cannot be read.
fn headline(path: &Path) -> Vec<(String, f64)> {
    let parsed = fs::read(path)
        .ok()
        .and_then(|bytes| serde_json::from_slice::<serde_json::Value>(&bytes).ok());
    let scores = parsed.as_ref().and_then(|results| results.get("headline")?.as_object());
    scores.map_or_else(Vec::new, |scores| {
        scores.iter().filter_map(|(name, value)| Some((name.clone(), value.as_f64()?))).collect()
    })
}

/// The outcome of a sweep.
#[derive(Clone, Debug, PartialEq)]
pub struct SweepResults {
    /// The axes' names.
    pub axes: Vec<String>,
    /// One entry per run, in the plan's order.
    pub runs: Vec<RunResult>,
}

impl SweepResults {
    /// All runs of `plan`, pending.
    pub(super) fn new(plan: &Plan) -> Self {
        SweepResults {
            axes: plan.sweep.axes.iter().map(|axis| axis.title().to_owned()).collect(),
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
        for (name, _) in self.runs.iter().flat_map(|run| &run.figures) {
            if !names.contains(&name.as_str()) {
                names.push(name);
            }
        }
        names
    }

    /// One row per run: name, axes, seed, status, figures.
    pub fn to_csv(&self) -> String {
        let figures = self.figure_names();
        let axes = self.axes.iter().map(String::as_str);
        let header: Vec<&str> = ["run"]
            .into_iter()
            .chain(axes)
            .chain(["seed", "status"])
            .chain(figures.iter().copied())
            .collect();
        let mut csv = row(&header.into_iter().map(str::to_owned).collect::<Vec<_>>());
        for run in &self.runs {
            let status = match &run.status {
                Status::Pending => "pending".to_owned(),
                Status::Finished => "finished".to_owned(),
                Status::Failed(reason) => format!("failed: {reason}"),
            };
            let mut cells = vec![run.name.clone()];
            cells.extend(run.labels.iter().cloned());
            cells.extend([run.seed.to_string(), status]);
            let figure = |name: &&str| run.figure(name).map_or_else(String::new, |v| v.to_string());
            cells.extend(figures.iter().map(figure));
            csv += &row(&cells);
        }
        csv
    }

    /// A table with one line for each combination of the axes: how many of its seeds are finished, and
    /// the mean ± standard error over these.
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
        for group in self.runs.chunk_by(|a, b| a.labels == b.labels) {
            let done: Vec<&RunResult> =
                group.iter().filter(|run| run.status == Status::Finished).collect();
            let mut cells = group[0].labels.clone();
            cells.push(format!("{}/{}", done.len(), group.len()));
            for name in &figures {
                let values: Vec<f64> = done.iter().filter_map(|run| run.figure(name)).collect();
                cells.push(mean_and_error(&values));
            }
            rows.push(cells);
        }
        aligned(&rows)
    }
}

/// `mean ± standard error` with digits that fit the error; for one value, only the mean.
fn mean_and_error(values: &[f64]) -> String {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    match values.len() {
        0 => "-".to_owned(),
        1 => format!("{mean:.*}", decimals(mean.abs() / 1000.0)),
        _ => {
            let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (count - 1.0);
            let error = (variance / count).sqrt();
            let digits = match error {
                e if e > 0.0 => decimals(e / 10.0),
                _ if mean.fract() == 0.0 => 0,
                _ => decimals(mean.abs() / 1000.0),
            };
            format!("{mean:.digits$} ± {error:.digits$}")
        }
    }
}

/// Decimals that show a quantity of size `smallest`, at most 6.
fn decimals(smallest: f64) -> usize {
    if smallest > 0.0 { (-smallest.log10().floor()).clamp(0.0, 6.0) as usize } else { 4 }
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
    fn standard_errors_are_those_of_the_mean() {
        // Deviation 1, so the error is 1 / sqrt(3).
        assert_eq!(mean_and_error(&[1.0, 2.0, 3.0]), "2.00 ± 0.58");
        assert_eq!(mean_and_error(&[2.5]), "2.500");
        assert_eq!(mean_and_error(&[2.0, 2.0]), "2 ± 0");
        assert_eq!(mean_and_error(&[]), "-");
        assert_eq!(mean_and_error(&[51_200.0, 51_900.0]), "51550 ± 350");
    }

    #[test]
    fn csv_cells_are_quoted_where_they_must_be() {
        let cells = ["a".to_owned(), "b,c".to_owned(), "d \"e\"".to_owned()];
        assert_eq!(row(&cells), "a,\"b,c\",\"d \"\"e\"\"\"\n");
    }
}
