//! The evaluations of a run.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};

use longwall_eval::{IN_LOOP, Report, SamplingOptions, Score, stats::Estimate};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::ReportError;
use crate::find::subfolders;
use crate::maps::{self, Maps};

/// One finished evaluation of a run.
pub(crate) struct Evaluation {
    /// Its name, without the step of an evaluation in the loop.
    pub name: String,
    /// The step after which the loop ran it; none for evaluations of a checkpoint.
    pub in_loop: Option<u64>,
    pub folder: PathBuf,
    pub report: Report,
}

/// The evaluations of the run in `dir`, by name and step. Folders without a readable `results.json` are left out.
pub(crate) fn load(dir: &Path) -> Result<Vec<Evaluation>, ReportError> {
    let folder = dir.join("eval");
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let mut found = Vec::new();
    for folder in subfolders(&folder)? {
        let results = folder.join("results.json");
        if !results.is_file() {
            continue;
        }
        match Report::load(&results) {
            Ok(report) => found.push(Evaluation::new(folder, report)),
            Err(error) => tracing::warn!("left out of the report: {error}"),
        }
    }
    found.sort_by(|a, b| (&a.name, a.in_loop).cmp(&(&b.name, b.in_loop)));
    Ok(found)
}

impl Evaluation {
    fn new(folder: PathBuf, report: Report) -> Self {
        let whole = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let suffix = report.checkpoint_step.map(|step| format!("{IN_LOOP}{step}"));
        let stem = suffix.and_then(|suffix| whole.strip_suffix(&suffix));
        let (name, in_loop) = match stem {
            Some(stem) => (stem.to_owned(), report.checkpoint_step),
            None => (whole.clone(), None),
        };
        Evaluation { name, in_loop, folder, report }
    }

    /// Whether the numbers of two evaluations can be compared: suite, version, options, text and seed are the same.
    pub fn is_comparable(&self, other: &Self) -> bool {
        let key = |evaluation: &Self| {
            let report = &evaluation.report;
            let mut options = report.config.clone();
            if let Some(options) = options.as_object_mut() {
                SamplingOptions::SPEED_KEYS.iter().for_each(|key| drop(options.remove(*key)));
            }
            let (resolved, tokenizer) = (report.resolved.clone(), report.tokenizer.clone());
            (report.suite.clone(), report.suite_version, options, resolved, report.seed, tokenizer)
        };
        key(self) == key(other)
    }
}

/// The evaluation that stands for each name: of a checkpoint, or the last one in the loop.
pub(crate) fn finals(evaluations: &[Evaluation]) -> BTreeMap<&str, &Evaluation> {
    let mut finals = BTreeMap::new();
    // In the order of steps, with that of a checkpoint first.
    for evaluation in evaluations {
        let known: Option<&&Evaluation> = finals.get(evaluation.name.as_str());
        if known.is_none_or(|known| known.in_loop.is_some()) {
            finals.insert(evaluation.name.as_str(), evaluation);
        }
    }
    finals
}

/// What the page shows of an evaluation.
#[derive(Serialize)]
pub(crate) struct EvaluationView {
    /// Index of the run.
    pub run: usize,
    pub name: String,
    pub step: Option<u64>,
    pub in_loop: bool,
    /// Whether it stands for its name: only then are there scores and details.
    pub is_final: bool,
    pub suite: String,
    pub suite_version: u32,
    pub samples: u64,
    pub train_seq_len: usize,
    pub headline: BTreeMap<String, Estimate>,
    pub scores: Vec<Score>,
    pub notes: Vec<String>,
    /// Losses by position, if the suite has them.
    pub positions: Value,
    /// Metrics by layer, if the suite has them.
    pub layers: Value,
    /// Weights of attention, if the suite wrote them.
    pub maps: Option<Maps>,
}

/// The views of a run's evaluations.
pub(crate) fn views(run: usize, evaluations: &[Evaluation]) -> Vec<EvaluationView> {
    let finals = finals(evaluations);
    let view = |evaluation: &Evaluation| {
        let report = &evaluation.report;
        let is_final = finals
            .get(evaluation.name.as_str())
            .is_some_and(|last| std::ptr::eq(*last, evaluation));
        let detail = |key: &str| match is_final {
            true => report.details.get(key).cloned().unwrap_or_default(),
            false => Value::Null,
        };
        EvaluationView {
            run,
            name: evaluation.name.clone(),
            step: report.checkpoint_step,
            in_loop: evaluation.in_loop.is_some(),
            is_final,
            suite: report.suite.clone(),
            suite_version: report.suite_version,
            samples: report.samples,
            train_seq_len: report.train_seq_len,
            headline: report.headline_estimates.clone(),
            scores: if is_final { report.scores.clone() } else { Vec::new() },
            notes: if is_final { report.notes.clone() } else { Vec::new() },
            positions: detail("positions"),
            layers: detail("layers"),
            maps: if is_final { maps::load(&evaluation.folder) } else { None },
        }
    };
    evaluations.iter().map(view).collect()
}

/// The most samples of an evaluation that a page shows.
const MOST_SAMPLES: u64 = 24;
/// The most characters at the beginning and the end of a prompt that a page shows.
const PROMPT_ENDS: (usize, usize) = (2400, 1600);

/// The samples of an evaluation: the scores of all, and some in full.
#[derive(Default)]
pub(crate) struct Samples {
    /// By sample, for suites whose accuracy is their mean.
    pub scores: BTreeMap<u64, f64>,
    pub shown: Vec<Sample>,
}

/// A line of `samples.jsonl`, as far as a report reads it.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct Sample {
    pub id: u64,
    pub length: usize,
    pub depth: Option<f64>,
    #[serde(default)]
    pub expected: Option<String>,
    #[serde(default)]
    pub output: Option<String>,
    #[serde(default)]
    pub score: Option<f64>,
    pub prompt: String,
}

impl Samples {
    /// Reads the samples of an evaluation, evenly spaced ones in full. A run may have been copied without them.
    pub fn load(evaluation: &Evaluation) -> Result<Self, ReportError> {
        let path = evaluation.folder.join("samples.jsonl");
        let every = evaluation.report.samples.div_ceil(MOST_SAMPLES).max(1);
        let mut samples = Samples::default();
        let file = match File::open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(samples),
            opened => opened.map_err(ReportError::read(&path))?,
        };
        for (number, line) in BufReader::new(file).lines().enumerate() {
            let line = line.map_err(ReportError::read(&path))?;
            let mut sample: Sample = serde_json::from_str(&line).map_err(|error| {
                let reason = format!("line {} is no sample: {error}", number + 1);
                ReportError::Read { path: path.clone(), source: io::Error::other(reason) }
            })?;
            samples.scores.extend(sample.score.map(|score| (sample.id, score)));
            if sample.id.is_multiple_of(every) {
                sample.prompt = shortened(&sample.prompt);
                samples.shown.push(sample);
            }
        }
        samples.shown.sort_by_key(|sample| sample.id);
        Ok(samples)
    }
}

/// The beginning and the end of a long prompt.
fn shortened(prompt: &str) -> String {
    let count = prompt.chars().count();
    let (head, tail) = PROMPT_ENDS;
    if count <= head + tail {
        return prompt.to_owned();
    }
    let start: String = prompt.chars().take(head).collect();
    let end: String = prompt.chars().skip(count - tail).collect();
    format!("{start}\n[… {} characters left out …]\n{end}", count - head - tail)
}

/// The answers of all runs to a sample.
#[derive(Serialize)]
pub(crate) struct SampleView {
    #[serde(flatten)]
    sample: Sample,
    answers: Vec<AnswerView>,
}

#[derive(Serialize)]
struct AnswerView {
    run: usize,
    output: Option<String>,
    score: Option<f64>,
}

/// The samples of the runs' evaluations of one name beside each other. Those with another prompt than the first
/// run's are left out.
pub(crate) fn side_by_side(of_runs: &[(usize, &Samples)]) -> Vec<SampleView> {
    let Some((_, first)) = of_runs.first() else { return Vec::new() };
    let view = |sample: &Sample| {
        let answer = |(run, samples): &(usize, &Samples)| {
            let same = |other: &&Sample| (other.id, &other.prompt) == (sample.id, &sample.prompt);
            let Sample { output, score, .. } = samples.shown.iter().find(same)?.clone();
            Some(AnswerView { run: *run, output, score })
        };
        SampleView {
            sample: Sample { output: None, score: None, ..sample.clone() },
            answers: of_runs.iter().filter_map(answer).collect(),
        }
    };
    let views = first.shown.iter().map(view);
    // Suites that score text without answering have nothing to look at.
    views.filter(|view| view.answers.iter().any(|answer| answer.output.is_some())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_prompts_keep_both_ends() {
        assert_eq!(shortened("ä b"), "ä b");
        let long = "ä".repeat(5000);
        let short = shortened(&long);
        assert!(short.contains("[… 1000 characters left out …]"), "{short}");
        assert_eq!(short.matches('ä').count(), 4000);
    }

    fn sample(id: u64, prompt: &str, output: &str) -> Sample {
        Sample {
            id,
            length: 300,
            depth: Some(0.5),
            expected: Some("7".to_owned()),
            output: Some(output.to_owned()),
            score: Some(1.0),
            prompt: prompt.to_owned(),
        }
    }

    #[test]
    fn answers_stand_beside_each_other_only_for_the_same_prompt() {
        let of = |shown| Samples { shown, ..Samples::default() };
        let first = of(vec![sample(0, "a", "7"), sample(1, "b", "8")]);
        let second = of(vec![sample(0, "a", "6"), sample(1, "other", "8")]);
        let views = side_by_side(&[(0, &first), (3, &second)]);
        let runs =
            |at: usize| views[at].answers.iter().map(|answer| answer.run).collect::<Vec<_>>();
        assert_eq!((runs(0), runs(1)), (vec![0, 3], vec![0]));
    }
}
