//! The table of results: means and standard errors over seeds, and differences that a paired test shows.

use std::collections::BTreeMap;

use longwall_eval::paired::{PairedDifference, holm};
use longwall_eval::stats::Estimate;
use serde::Serialize;

use crate::evaluations::{Evaluation, Samples, finals};
use crate::groups::Group;
use crate::runs::Run;

/// A difference is marked if its adjusted p-value is below this.
const LEVEL: f64 = 0.05;

/// One number of every group.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Row {
    pub metric: String,
    pub cells: Vec<Cell>,
}

/// A number of one group.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Cell {
    pub mean: Option<f64>,
    /// Standard error over the seeds, if there are several.
    pub error: Option<f64>,
    /// Seeds.
    pub n: usize,
    /// With one seed, the uncertainty of its value over the evaluation's samples.
    pub estimate: Option<Estimate>,
    /// The difference from the first group.
    pub difference: Option<Compared>,
}

/// A paired difference from the first group.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Compared {
    #[serde(flatten)]
    pub difference: PairedDifference,
    /// What the pairs are: seeds, or samples.
    pub of: &'static str,
    /// The p-value, adjusted for the number of comparisons in the table.
    pub adjusted: Option<f64>,
    pub marked: bool,
}

/// A number of one run.
struct Value<'a> {
    value: f64,
    estimate: Option<Estimate>,
    /// The evaluation that it is from.
    evaluation: Option<&'a Evaluation>,
    /// The step of the model.
    step: Option<u64>,
    /// Whether differences are tested.
    tested: bool,
}

/// The samples of each run's final evaluations, by run and name.
pub(crate) type AllSamples = BTreeMap<(usize, String), Samples>;

/// The rows of the table; names come in the order of the first run that has them.
pub(crate) fn rows(runs: &[Run], groups: &[Group], samples: &AllSamples) -> Vec<Row> {
    let values: Vec<Vec<(String, Value<'_>)>> = runs.iter().map(values).collect();
    let mut names: Vec<&String> = Vec::new();
    for (name, _) in values.iter().flatten() {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let table = Table { runs, groups, samples, values: &values };
    let mut rows: Vec<Row> = names.into_iter().map(|name| table.row(name)).collect();
    mark(&mut rows);
    rows
}

/// The numbers of a run, by name.
fn values(run: &Run) -> Vec<(String, Value<'_>)> {
    let mut values = Vec::new();
    let validations = run.validations();
    let mut push = |name: &str, value: Option<f64>, step: u64, tested: bool| {
        let Some(value) = value.filter(|value| value.is_finite()) else { return };
        let value = Value { value, estimate: None, evaluation: None, step: Some(step), tested };
        values.push((name.to_owned(), value));
    };
    if let Some(last) = validations.last() {
        push("validation loss", Some(last.validation_loss), last.step, true);
        push("best-context loss", last.best_context_loss, last.step, true);
        push("bits per byte", Some(last.bits_per_byte), last.step, true);
        for (name, value) in &last.probe {
            push(name, Some(*value), last.step, true);
        }
    }
    if let Some(finished) = &run.finished {
        push("tokens per second", Some(finished.tokens_per_second), finished.step, false);
        push("hours of training", Some(finished.seconds / 3600.0), finished.step, false);
    }
    for (name, evaluation) in finals(&run.evaluations) {
        let mut scores: Vec<_> = evaluation.report.headline_estimates.iter().collect();
        scores.sort_by_key(|(score, _)| by_length(score));
        for (score, estimate) in scores {
            let Some(value) = estimate.value else { continue };
            let (step, estimate) = (evaluation.report.checkpoint_step, Some(*estimate));
            let evaluation = Some(evaluation);
            let value = Value { value, estimate, evaluation, step, tested: true };
            values.push((format!("{name}: {score}"), value));
        }
    }
    values
}

/// The key by which scores such as `loss@128` and `loss@1024` come in the order of their lengths.
fn by_length(score: &str) -> (&str, u64) {
    let (name, length) = score.split_once('@').unwrap_or((score, ""));
    (name, length.parse().unwrap_or(0))
}

struct Table<'a> {
    runs: &'a [Run],
    groups: &'a [Group],
    samples: &'a AllSamples,
    values: &'a [Vec<(String, Value<'a>)>],
}

impl Table<'_> {
    fn value(&self, run: usize, name: &str) -> Option<&Value<'_>> {
        self.values[run].iter().find(|(found, _)| found == name).map(|(_, value)| value)
    }

    fn row(&self, name: &str) -> Row {
        let cells = self.groups.iter().enumerate().map(|(at, group)| {
            let found: Vec<&Value<'_>> =
                group.runs.iter().filter_map(|&run| self.value(run, name)).collect();
            let numbers: Vec<(u64, f64)> =
                (0..).zip(&found).map(|(at, value)| (at, value.value)).collect();
            let over_seeds = Estimate::clustered(numbers);
            Cell {
                mean: over_seeds.value,
                error: over_seeds.standard_error,
                n: found.len(),
                estimate: found.first().filter(|_| found.len() == 1).and_then(|v| v.estimate),
                difference: if at == 0 { None } else { self.compare(name, group) },
            }
        });
        Row { metric: name.to_owned(), cells: cells.collect() }
    }

    /// Compares a group with the first one: seed by seed if they share two or more, else sample by sample if
    /// each has one run.
    fn compare(&self, name: &str, group: &Group) -> Option<Compared> {
        let first = &self.groups[0];
        let pairs: Vec<(usize, usize)> = match (first.runs.as_slice(), group.runs.as_slice()) {
            ([a], [b]) => vec![(*a, *b)],
            _ => {
                let seed = |run: usize| self.runs[run].config.run.seed;
                let partner =
                    |&a: &usize| Some((a, *group.runs.iter().find(|&&b| seed(a) == seed(b))?));
                first.runs.iter().filter_map(partner).collect()
            }
        };
        let comparable = |&(a, b): &(usize, usize)| {
            let (x, y) = (self.value(a, name)?, self.value(b, name)?);
            let same = match (x.evaluation, y.evaluation) {
                (Some(x), Some(y)) => x.is_comparable(y),
                _ => self.same_text(a, b),
            };
            (x.tested && same && x.step == y.step).then_some((x, y))
        };
        let values: Vec<_> = pairs.iter().filter_map(comparable).collect();
        let (difference, of) = match (values.as_slice(), pairs.as_slice()) {
            ([_, _, ..], _) => {
                let numbers: Vec<_> = values.iter().map(|(x, y)| (x.value, y.value)).collect();
                (PairedDifference::of(&numbers)?, "seeds")
            }
            ([_], [(a, b)]) => (self.by_sample(name, *a, *b)?, "samples"),
            _ => return None,
        };
        Some(Compared { difference, of, adjusted: None, marked: false })
    }

    /// Whether the validations of two runs score the same tokens.
    fn same_text(&self, a: usize, b: usize) -> bool {
        let (a, b) = (&self.runs[a].config, &self.runs[b].config);
        a.data == b.data && a.tokenizer == b.tokenizer
    }

    /// The difference of two runs' samples, for the score that is their mean.
    fn by_sample(&self, name: &str, a: usize, b: usize) -> Option<PairedDifference> {
        let evaluation = name.strip_suffix(": accuracy")?;
        let scores = |run| Some(&self.samples.get(&(run, evaluation.to_owned()))?.scores);
        let (a, b) = (scores(a)?, scores(b)?);
        let pairs: Vec<(f64, f64)> =
            a.iter().filter_map(|(id, x)| Some((*x, *b.get(id)?))).collect();
        PairedDifference::of(&pairs)
    }
}

/// Adjusts the p-values of the table for their number, and marks the differences.
fn mark(rows: &mut [Row]) {
    let compared = rows.iter_mut().flat_map(|row| &mut row.cells);
    let mut compared: Vec<&mut Compared> = compared
        .filter_map(|cell| cell.difference.as_mut())
        .filter(|compared| compared.difference.p.is_some())
        .collect();
    let p_values: Vec<f64> = compared.iter().filter_map(|compared| compared.difference.p).collect();
    for (compared, adjusted) in compared.iter_mut().zip(holm(&p_values)) {
        compared.adjusted = Some(adjusted);
        compared.marked = adjusted < LEVEL;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::groups::groups;
    use crate::testing::run;

    /// The row of the validation loss of `rope` and `fox` with these losses by seed.
    fn losses(rope: &[(u64, f64)], fox: &[(u64, f64)], sets: &[&str]) -> Row {
        let of = |kind: &str, losses: &[(u64, f64)], sets: &[&str]| -> Vec<Run> {
            let own = format!("model.attention.kind={kind}");
            let sets: Vec<&str> = [own.as_str()].into_iter().chain(sets.iter().copied()).collect();
            losses.iter().map(|(seed, loss)| run(kind, *seed, *loss, &sets)).collect()
        };
        let mut runs = of("rope", rope, &[]);
        runs.extend(of("fox", fox, sets));
        let rows = rows(&runs, &groups(&runs), &AllSamples::new());
        rows.into_iter().find(|row| row.metric == "validation loss").unwrap()
    }

    #[test]
    fn seeds_are_paired_whatever_their_order() {
        let row = losses(&[(0, 2.0), (1, 3.0), (2, 4.0)], &[(2, 3.5), (0, 1.49), (1, 2.51)], &[]);
        assert_eq!(
            (row.cells[0].mean, row.cells[0].n, row.cells[0].difference),
            (Some(3.0), 3, None)
        );
        assert!((row.cells[0].error.unwrap() - (1.0f64 / 3.0).sqrt()).abs() < 1e-12);
        let compared = row.cells[1].difference.unwrap();
        assert_eq!((compared.difference.n, compared.of), (3, "seeds"));
        assert!((compared.difference.mean + 0.5).abs() < 1e-9);
        // The seeds differ by more than the kinds, but not within a pair.
        assert!(compared.marked && compared.adjusted >= compared.difference.p, "{compared:?}");
    }

    #[test]
    fn noise_is_not_marked() {
        let row = losses(&[(0, 2.0), (1, 3.0), (2, 4.0)], &[(0, 2.5), (1, 2.0), (2, 4.1)], &[]);
        let compared = row.cells[1].difference.unwrap();
        assert!(!compared.marked && compared.difference.p.is_some_and(|p| p > 0.5), "{compared:?}");
    }

    #[test]
    fn what_is_not_comparable_is_not_compared() {
        let seeds = [(0, 2.0), (1, 3.0)];
        let compared = |row: Row| row.cells[1].difference;
        assert!(compared(losses(&seeds, &[(0, 1.0), (1, 2.1)], &[])).is_some());
        assert_eq!(compared(losses(&seeds, &[(5, 1.0), (6, 2.1)], &[])), None, "other seeds");
        assert_eq!(compared(losses(&seeds[..1], &[(0, 1.0)], &[])), None, "one seed");
        let other = ["data.validation_tokens=64"];
        assert_eq!(compared(losses(&seeds, &[(0, 1.0), (1, 2.1)], &other)), None, "other text");
    }
}
