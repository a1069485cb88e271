//! Means of a task's metrics.

use super::Scores;
use super::scorers::Scorer;
use crate::stats::Estimate;
use crate::suite::Outcome;

/// The metric that the mean over a source's tasks takes from a task with ROUGE-1, 2 and L.
const GEOMETRIC_MEAN: &str = "rouge_geometric_mean";

/// The mean of each metric, and for ROUGE-1, 2 and L the geometric mean of the three; the last is the task's main one.
pub(super) fn estimates(
    scorer: Scorer,
    outcomes: &[&Outcome<Scores>],
) -> Vec<(&'static str, Estimate)> {
    if outcomes.is_empty() {
        return Vec::new();
    }
    let metrics = scorer.metrics();
    let mean = |(n, metric): (usize, &&'static str)| {
        let values = outcomes.iter().map(|o| (o.trial.index as u64, o.verdict.values[n]));
        (*metric, Estimate::clustered(values))
    };
    let mut estimates: Vec<_> = metrics.iter().enumerate().map(mean).collect();
    if metrics.len() > 1 {
        let rows: Vec<&[f64]> = outcomes.iter().map(|o| &o.verdict.values[..]).collect();
        estimates.push((GEOMETRIC_MEAN, geometric_mean(&rows)));
    }
    estimates
}

/// The geometric mean of the means of columns, with its jackknife standard error over rows,
/// √((n − 1) / n · Σ (G without row i − their mean)²).
fn geometric_mean(rows: &[&[f64]]) -> Estimate {
    let (samples, columns) = (rows.len(), rows.first().map_or(0, |row| row.len()));
    let sums: Vec<f64> = (0..columns).map(|n| rows.iter().map(|row| row[n]).sum()).collect();
    let without = |row: Option<&[f64]>| {
        let count = samples - usize::from(row.is_some());
        let mean = |n: usize| (sums[n] - row.map_or(0.0, |row| row[n])).max(0.0) / count as f64;
        (0..columns).map(mean).product::<f64>().powf(1.0 / columns as f64)
    };
    let standard_error = (samples > 1).then(|| {
        let parts: Vec<f64> = rows.iter().map(|row| without(Some(row))).collect();
        let mean = parts.iter().sum::<f64>() / samples as f64;
        let squares: f64 = parts.iter().map(|part| (part - mean).powi(2)).sum();
        ((samples - 1) as f64 / samples as f64 * squares).sqrt()
    });
    Estimate { value: Some(without(None)), standard_error, samples, ..Estimate::default() }
}

/// The unweighted mean over tasks, with the standard error √(Σ error²) / tasks.
pub(super) fn mean_of(tasks: &[Estimate]) -> Estimate {
    let count = tasks.len() as f64;
    let value = tasks.iter().map(|task| task.value).sum::<Option<f64>>().map(|sum| sum / count);
    let squares = tasks.iter().map(|task| task.standard_error.map(|error| error * error));
    let standard_error = squares.sum::<Option<f64>>().map(|sum| sum.sqrt() / count);
    let samples = tasks.iter().map(|task| task.samples).sum();
    Estimate { value, standard_error, samples, ..Estimate::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn geometric_means_by_hand() {
        // Means 0.4 and 0.1: √0.04. Without one row each: √(0.2 · 0.2) and √(0.6 · 0).
        let mean = geometric_mean(&[&[0.6, 0.0], &[0.2, 0.2]]);
        assert!((mean.value.unwrap() - 0.2).abs() < 1e-12);
        // Parts 0.2 and 0: √(1/2 · 2 · 0.1²).
        assert!((mean.standard_error.unwrap() - 0.1).abs() < 1e-12);
        assert_eq!(geometric_mean(&[&[0.5, 0.5]]).standard_error, None);
    }
}
