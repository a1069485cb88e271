//! Shared by suites that count right answers within a sample: trials of several groups, accuracy by group and
//! length, and its plot.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::retrieval::{boundary_x, length_scale};
use crate::EvalError;
use crate::plot::{LineChart, Point, Scale, Series, WILSON_BARS};
use crate::report::Score;
use crate::stats::Estimate;
use crate::suite::{Outcome, Scoring, Trial};

/// How many of a sample's answers are right.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counted {
    /// Right answers.
    pub right: usize,
    /// All answers, at least 1.
    pub of: usize,
}

impl Counted {
    /// Counts the answers that equal the expected ones, place by place.
    pub(super) fn equal<T: PartialEq>(answers: &[T], expected: &[T]) -> Self {
        let right = answers.iter().zip(expected).filter(|(answer, expected)| answer == expected);
        Counted { right: right.count(), of: expected.len() }
    }

    /// The share of right answers.
    pub(super) fn share(self) -> f64 {
        self.right as f64 / self.of as f64
    }

    /// Counts the texts that `output` contains.
    pub(super) fn contained(output: &str, expected: &[String]) -> Self {
        let right = expected.iter().filter(|text| output.contains(text.as_str())).count();
        Counted { right, of: expected.len() }
    }
}

/// A length and a group of samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Cell {
    pub length: usize,
    pub group: usize,
}

/// The cells of a suite, with the same number of samples in each.
pub(super) struct Cells {
    cells: Vec<Cell>,
    samples: usize,
    /// Whether a sample is the same at every length.
    same_at_every_length: bool,
}

impl Cells {
    pub(super) fn new(mut cells: Vec<Cell>, samples: usize) -> Self {
        cells.sort_unstable();
        Cells { cells, samples, same_at_every_length: false }
    }

    /// The same cells, whose samples depend on their group and index and not on the length: what is alike at
    /// several lengths counts as one sample for intervals over lengths.
    pub(super) fn same_at_every_length(self) -> Self {
        Cells { same_at_every_length: true, ..self }
    }

    /// Samples of each group at each length.
    pub(super) fn samples(&self) -> usize {
        self.samples
    }

    /// Trials with the same number depend on each other.
    fn cluster(&self, trial: &Trial) -> u64 {
        if !self.same_at_every_length {
            return trial.id;
        }
        let (group, place) = self.locate(trial);
        (group * self.samples + place.index) as u64
    }

    /// Every group at every length.
    pub(super) fn grid(lengths: &[usize], groups: usize, samples: usize) -> Self {
        let at = |&length| (0..groups).map(move |group| Cell { length, group });
        Cells::new(lengths.iter().flat_map(at).collect(), samples)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = Cell> {
        self.cells.iter().copied()
    }

    /// The groups that `length` has.
    fn groups(&self, length: usize) -> impl Iterator<Item = usize> {
        self.iter().filter(move |cell| cell.length == length).map(|cell| cell.group)
    }

    /// All trials. The index of a trial counts the samples of its length: first those of the first group,
    /// then of the second, and so on.
    pub(super) fn trials(&self) -> Vec<Trial> {
        let mut list = Vec::with_capacity(self.cells.len() * self.samples);
        for cells in self.cells.chunk_by(|a, b| a.length == b.length) {
            for index in 0..cells.len() * self.samples {
                let (id, length) = (list.len() as u64, cells[0].length);
                list.push(Trial { id, length, depth: None, index });
            }
        }
        list
    }

    /// A trial's group, and the trial with its index within the group, which its sample depends on: not on how
    /// many samples other groups have.
    pub(super) fn locate(&self, trial: &Trial) -> (usize, Trial) {
        let group = self.groups(trial.length).nth(trial.index / self.samples);
        let group = group.expect("a trial has one of the groups of its length");
        (group, Trial { index: trial.index % self.samples, ..trial.clone() })
    }
}

/// The share of right answers over samples; the interval allows for the dependence of the answers of a sample.
pub(super) fn share(counts: impl IntoIterator<Item = (u64, Counted)>) -> Estimate {
    Estimate::clustered_proportion(counts.into_iter().flat_map(|(id, Counted { right, of })| {
        (0..of).map(move |answer| (id, f64::from(u8::from(answer < right))))
    }))
}

/// The mean over samples of their shares of right answers.
fn mean_share(outcomes: &[Outcome<Counted>], cells: &Cells) -> Estimate {
    Estimate::clustered_proportion(
        outcomes.iter().map(|outcome| (cells.cluster(&outcome.trial), outcome.verdict.share())),
    )
}

/// Accuracy at each length: of each group, and over all samples, `accuracy`. With several groups a last row has
/// each over all lengths.
///
/// `names` are the groups' names; the metric of a group is `accuracy_NAME`.
pub(super) fn score(outcomes: &[Outcome<Counted>], cells: &Cells, names: &[String]) -> Scoring {
    let mut scoring = Scoring::default();
    let mut push = |metric: String, length: Option<usize>, estimate: Estimate| {
        scoring.scores.push(Score { metric, length, depth: None, estimate });
    };
    let of_group = |outcomes: &[Outcome<Counted>], group: usize| {
        let outcomes = outcomes.iter().filter(|o| cells.locate(&o.trial).0 == group);
        share(outcomes.map(|outcome| (cells.cluster(&outcome.trial), outcome.verdict)))
    };
    let mut headline = BTreeMap::new();
    for outcomes in outcomes.chunk_by(|a, b| a.trial.length == b.trial.length) {
        let length = outcomes[0].trial.length;
        let all = mean_share(outcomes, cells);
        headline.insert(format!("accuracy@{length}"), all);
        push("accuracy".to_string(), Some(length), all);
        for group in cells.groups(length).filter(|_| names.len() > 1) {
            push(format!("accuracy_{}", names[group]), Some(length), of_group(outcomes, group));
        }
    }
    let all = mean_share(outcomes, cells);
    headline.insert("accuracy".to_string(), all);
    push("accuracy".to_string(), None, all);
    for (group, name) in names.iter().enumerate().filter(|_| names.len() > 1) {
        let estimate = of_group(outcomes, group);
        headline.insert(format!("accuracy_{name}"), estimate);
        push(format!("accuracy_{name}"), None, estimate);
    }
    Scoring { headline, ..scoring }
}

/// What a plot over lengths shows.
pub(super) struct Plot<'a> {
    /// The task, in the title.
    pub task: &'a str,
    /// The run, in the title.
    pub title: &'a str,
    /// What the metrics measure; with `.svg`, the file's name.
    pub y_label: &'a str,
    /// What the bars are.
    pub bars: &'a str,
}

impl<'a> Plot<'a> {
    /// Accuracies, with Wilson intervals.
    pub(super) fn accuracy(task: &'a str, title: &'a str) -> Self {
        Plot { task, title, y_label: "accuracy", bars: WILSON_BARS }
    }
}

/// A line over lengths for each of the metrics, which are given with their labels.
pub(super) fn draw(
    scoring: &Scoring,
    metrics: &[(String, String)],
    plot: &Plot<'_>,
    train_seq_len: usize,
    dir: &Path,
) -> Result<(), EvalError> {
    let series = metrics.iter().enumerate().map(|(colour, (metric, label))| {
        let scores = scoring.scores.iter().filter(|score| score.metric == *metric);
        let points = scores.filter_map(|score| {
            let (x, y) = (score.length? as f64, score.estimate.value?);
            Some(Point { x, y, bar: score.estimate.bar() })
        });
        let (name, points) = (label.clone(), points.collect());
        Series { name, points, colour, faint: false, dots: true, band: false }
    });
    let mut lengths: Vec<usize> = scoring.scores.iter().filter_map(|score| score.length).collect();
    lengths.dedup();
    let chart = LineChart {
        title: format!("{}: {}", plot.task, plot.title),
        x_label: "length (tokens)".to_string(),
        y_label: plot.y_label.to_string(),
        x_scale: length_scale(&lengths),
        y_scale: Scale::Linear,
        y_range: Some((0.0, 1.0)),
        note: Some(plot.bars.to_string()),
        series: series.collect(),
        boundary: boundary_x(&lengths, train_seq_len),
    };
    chart.save(&dir.join(format!("{}.svg", plot.y_label)))
}

/// The metrics of [`score`] and their labels in the plot.
pub(super) fn metrics(names: &[String], label: impl Fn(&str) -> String) -> Vec<(String, String)> {
    if names.len() == 1 {
        return vec![("accuracy".to_string(), String::new())];
    }
    names.iter().map(|name| (format!("accuracy_{name}"), label(name))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trials_are_found_again_by_their_index() {
        let at = |length, group| Cell { length, group };
        let cells = Cells::new(vec![at(20, 0), at(10, 2), at(10, 1)], 3);
        let trials = cells.trials();
        let found: Vec<(usize, usize, usize)> = trials
            .iter()
            .map(|trial| {
                let (group, place) = cells.locate(trial);
                (place.length, group, place.index)
            })
            .collect();
        let expected: Vec<_> = [(10, 1), (10, 2), (20, 0)]
            .into_iter()
            .flat_map(|(length, group)| (0..3).map(move |index| (length, group, index)))
            .collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn answers_count_by_place_and_by_content() {
        assert_eq!(Counted::equal(&[1, 2, 3], &[1, 3, 3]), Counted { right: 2, of: 3 });
        assert_eq!(Counted::equal(&[], &[1]), Counted { right: 0, of: 1 });
        let wanted = ["123".to_string(), "45".to_string()];
        assert_eq!(Counted::contained("are 45, and 12", &wanted), Counted { right: 1, of: 2 });
        assert_eq!(Counted::contained("", &wanted).right, 0);
    }

    #[test]
    fn every_sample_weighs_the_same_in_the_mean() {
        let outcome = |id, right, of| Outcome {
            trial: Trial { id, length: 8, depth: None, index: id as usize },
            depth: None,
            verdict: Counted { right, of },
        };
        let outcomes = [outcome(0, 1, 2), outcome(1, 4, 4)];
        let cells = Cells::grid(&[8], 2, 1);
        assert_eq!(mean_share(&outcomes, &cells).value, Some(0.75));
        let names = ["a".to_string(), "b".to_string()];
        let scoring = score(&outcomes, &cells, &names);
        let value = |metric: &str| scoring.headline[metric].value;
        assert_eq!((value("accuracy_a"), value("accuracy_b")), (Some(0.5), Some(1.0)));
        assert_eq!((value("accuracy"), value("accuracy@8")), (Some(0.75), Some(0.75)));
    }

    /// Two lengths with the same answers tell no more than one, if the samples are the same.
    #[test]
    fn the_same_samples_at_two_lengths_do_not_narrow_the_interval() {
        let width = |lengths: &[usize], same: bool| {
            let cells = Cells::grid(lengths, 1, 40);
            let cells = if same { cells.same_at_every_length() } else { cells };
            let outcome = |trial: Trial| Outcome {
                verdict: Counted { right: usize::from(trial.index.is_multiple_of(4)), of: 1 },
                trial,
                depth: None,
            };
            let outcomes: Vec<_> = cells.trials().into_iter().map(outcome).collect();
            let all = score(&outcomes, &cells, &["a".to_string()]).headline["accuracy"];
            all.high.unwrap() - all.low.unwrap()
        };
        let one = width(&[8], false);
        assert!((width(&[8, 16], true) - one).abs() < 1e-9);
        assert!(width(&[8, 16], false) < 0.8 * one);
    }
}
