//! Shared by the retrieval suites: the verdict, accuracy by length and depth, heat maps.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::EvalError;
use crate::plot::{Heatmap, LineChart, Point, Scale, Series, WILSON_BARS};
use crate::report::Score;
use crate::stats::Estimate;
use crate::suite::{Outcome, Scoring, Trial};

/// Random positions are grouped by tenths of the depth.
const TENTHS: usize = 10;

/// Whether the answer was found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Found {
    /// Whether the answer is right.
    pub correct: bool,
}

impl Found {
    /// 1 if the answer is right, else 0.
    pub(super) fn share(&self) -> f64 {
        f64::from(u8::from(self.correct))
    }
}

/// The depth at which a trial is counted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Depths {
    /// A grid: the trial's own depth.
    Grid,
    /// Random positions: the middle of the tenth of the depth that the position is in.
    Random,
}

impl Depths {
    fn of(self, outcome: &Outcome<Found>) -> Option<f64> {
        match self {
            Depths::Grid => outcome.trial.depth,
            Depths::Random => outcome.depth.map(|depth| {
                let tenth = ((depth * TENTHS as f64) as usize).min(TENTHS - 1);
                (tenth as f64 + 0.5) / TENTHS as f64
            }),
        }
    }
}

/// `trials` for each length and depth, lengths growing.
pub(super) fn grid_trials(lengths: &[usize], depths: &[Option<f64>], trials: usize) -> Vec<Trial> {
    let mut lengths = lengths.to_vec();
    lengths.sort_unstable();
    let mut list = Vec::with_capacity(lengths.len() * depths.len() * trials);
    for length in lengths {
        for &depth in depths {
            for index in 0..trials {
                list.push(Trial { id: list.len() as u64, length, depth, index });
            }
        }
    }
    list
}

/// Accuracy by length and depth, by length, and over all trials.
///
/// `train_seq_len` splits the headline: lengths up to the training length, and lengths past it.
pub(super) fn score(outcomes: &[Outcome<Found>], depths: Depths, train_seq_len: usize) -> Scoring {
    let mut scores = Vec::new();
    for outcomes in outcomes.chunk_by(|a, b| a.trial.length == b.trial.length) {
        scores.extend(score_length(outcomes, depths));
    }
    let within: Tally =
        outcomes.iter().filter(|outcome| outcome.trial.length <= train_seq_len).collect();
    let past: Tally =
        outcomes.iter().filter(|outcome| outcome.trial.length > train_seq_len).collect();
    let all = outcomes.iter().collect::<Tally>().estimate();
    scores.push(accuracy(None, None, all));
    let mut headline = BTreeMap::from([("accuracy".to_string(), all)]);
    for (name, tally) in
        [("accuracy_to_train_length", within), ("accuracy_past_train_length", past)]
    {
        if tally.samples > 0 {
            headline.insert(name.to_string(), tally.estimate());
        }
    }
    Scoring { headline, scores, details: details(depths), ..Scoring::default() }
}

/// Accuracy at one length, and at each of its depths.
fn score_length(outcomes: &[Outcome<Found>], depths: Depths) -> Vec<Score> {
    let length = Some(outcomes[0].trial.length);
    let mut cells = BTreeMap::<u64, Tally>::new();
    for outcome in outcomes {
        if let Some(depth) = depths.of(outcome) {
            // Depths are not negative, so their bits sort like the numbers.
            cells.entry(depth.to_bits()).or_default().add(outcome);
        }
    }
    let whole = accuracy(length, None, outcomes.iter().collect::<Tally>().estimate());
    let cells = cells
        .into_iter()
        .map(|(depth, tally)| accuracy(length, Some(f64::from_bits(depth)), tally.estimate()));
    std::iter::once(whole).chain(cells).collect()
}

fn accuracy(length: Option<usize>, depth: Option<f64>, estimate: Estimate) -> Score {
    Score { metric: "accuracy".to_string(), length, depth, estimate }
}

/// Correct answers among samples.
#[derive(Clone, Copy, Default)]
struct Tally {
    correct: usize,
    samples: usize,
}

impl Tally {
    fn add(&mut self, outcome: &Outcome<Found>) {
        self.correct += usize::from(outcome.verdict.correct);
        self.samples += 1;
    }

    fn estimate(self) -> Estimate {
        Estimate::proportion(self.correct, self.samples)
    }
}

impl<'a> FromIterator<&'a Outcome<Found>> for Tally {
    fn from_iter<I: IntoIterator<Item = &'a Outcome<Found>>>(outcomes: I) -> Self {
        let mut tally = Tally::default();
        outcomes.into_iter().for_each(|outcome| tally.add(outcome));
        tally
    }
}

fn details(depths: Depths) -> Value {
    match depths {
        Depths::Grid => json!({ "depths": "grid" }),
        Depths::Random => json!({
            "depths": "random; a score's depth is the middle of the tenth it is over"
        }),
    }
}

/// `accuracy.svg`, a line over lengths, and `heatmap.svg`, length by depth.
pub(super) fn draw(
    scoring: &Scoring,
    task: &str,
    title: &str,
    train_seq_len: usize,
    dir: &Path,
) -> Result<(), EvalError> {
    let by_length: Vec<(usize, &Score)> = scoring
        .scores
        .iter()
        .filter(|score| score.depth.is_none())
        .filter_map(|score| Some((score.length?, score)))
        .collect();
    let lengths: Vec<usize> = by_length.iter().map(|(length, _)| *length).collect();
    let points = by_length.iter().map(|(length, score)| Point {
        x: *length as f64,
        y: score.estimate.value.unwrap_or(f64::NAN),
        bar: score.estimate.bar(),
    });
    let chart = LineChart {
        title: format!("{task}: {title}"),
        x_label: "length (tokens)".to_string(),
        y_label: "accuracy".to_string(),
        x_scale: length_scale(&lengths),
        y_scale: Scale::Linear,
        y_range: Some((0.0, 1.0)),
        note: Some(WILSON_BARS.to_string()),
        series: vec![Series {
            name: String::new(),
            points: points.collect(),
            colour: 0,
            faint: false,
            dots: true,
            band: false,
        }],
        boundary: boundary_x(&lengths, train_seq_len),
    };
    chart.save(&dir.join("accuracy.svg"))?;
    heatmap(scoring, &lengths, task, title, train_seq_len).save(&dir.join("heatmap.svg"))
}

fn heatmap(
    scoring: &Scoring,
    lengths: &[usize],
    task: &str,
    title: &str,
    train_seq_len: usize,
) -> Heatmap {
    let mut depths: Vec<f64> = scoring.scores.iter().filter_map(|score| score.depth).collect();
    depths.sort_by(f64::total_cmp);
    depths.dedup();
    let value = |depth: f64, length: usize| {
        let cell = scoring
            .scores
            .iter()
            .find(|score| score.depth == Some(depth) && score.length == Some(length));
        cell.and_then(|score| score.estimate.value)
    };
    Heatmap {
        title: format!("{task}: {title}"),
        x_label: "length (tokens)".to_string(),
        y_label: "depth of the needle (%)".to_string(),
        value_label: "accuracy".to_string(),
        x: lengths.iter().map(|length| length.to_string()).collect(),
        y: depths.iter().map(|depth| format!("{:.0}", depth * 100.0)).collect(),
        values: depths
            .iter()
            .map(|&depth| lengths.iter().map(|&length| value(depth, length)).collect())
            .collect(),
        boundary: lengths
            .iter()
            .position(|&length| length > train_seq_len)
            .filter(|&column| column > 0)
            .map(|column| (column, "training length".to_string())),
    }
}

/// A logarithmic axis if lengths span more than a factor of 16.
pub(super) fn length_scale(lengths: &[usize]) -> Scale {
    let (least, most) = (lengths.iter().min(), lengths.iter().max());
    match least.zip(most) {
        Some((least, most)) if *most > 16 * least => Scale::Log2,
        _ => Scale::Linear,
    }
}

/// The training length on the x axis, if it is within or near the lengths.
pub(super) fn boundary_x(lengths: &[usize], train_seq_len: usize) -> Option<(f64, String)> {
    let least = lengths.iter().min()?;
    let most = lengths.iter().max()?;
    (train_seq_len * 2 >= *least && train_seq_len <= most * 2)
        .then(|| (train_seq_len as f64, "training length".to_string()))
}
