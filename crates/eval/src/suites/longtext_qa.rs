//! Questions about long texts and summaries of them: the tasks of LongBench (Bai et al., 2024) and SCROLLS (Shaham et
//! al., 2022), from the files that they publish.
//!
//! A prompt longer than a length allows loses its middle, as in LongBench. Scores are by length and by bucket of words.

mod document;
mod estimates;
mod files;
mod scorers;
mod similarity;
mod tasks;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use longwall_config::Problems;
use longwall_data::Tokenizer;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use self::document::Document;
use self::estimates::{estimates, mean_of};
use self::files::{find_tasks, read_prompts};
use self::tasks::{Source, TASKS, Task, fill};
use super::fit::check_floor;
use crate::EvalError;
use crate::options::{MOST_SAMPLES, check_count, check_lengths, optional_sizes, parse_size};
use crate::plot::{DotChart, DotRow};
use crate::report::{Score, TextTable, show};
use crate::stats::Estimate;
use crate::suite::{Answer, ModelCall, OpenContext, Outcome, Request, Scoring, Suite, Trial};

/// The fewest tokens of a prompt: half of them are its end, with the question.
const LEAST_PROMPT: usize = 64;

/// Words of a text, as LongBench-E groups them: name and first number beyond.
const BUCKETS: [(&str, usize); 3] = [("0-4k", 4000), ("4-8k", 8000), ("8k+", usize::MAX)];

/// Options of `longwall eval longtext-qa`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, clap::Args)]
#[serde(deny_unknown_fields, default)]
pub struct LongtextQaOptions {
    /// LongBench's folder of files, TASK.jsonl
    #[arg(long, value_name = "FOLDER")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub longbench: Option<PathBuf>,
    /// SCROLLS' folder of unpacked files, TASK/validation.jsonl
    #[arg(long, value_name = "FOLDER")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scrolls: Option<PathBuf>,
    /// Tasks, such as longbench/qasper or scrolls/qmsum [default: those whose files are there]
    #[arg(long, value_delimiter = ',', value_name = "TASK")]
    pub tasks: Vec<String>,
    /// Take LongBench-E, TASK_e.jsonl, whose texts are spread evenly over the buckets
    #[arg(long)]
    pub even: bool,
    /// LongBench's own prompts, dataset2prompt.json, in place of short ones for base models
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompts: Option<PathBuf>,
    /// Lengths of prompt plus generation; longer prompts lose their middle [default: the training length]
    #[arg(long, value_delimiter = ',', value_name = "TOKENS", value_parser = parse_size)]
    #[serde(deserialize_with = "optional_sizes", skip_serializing_if = "Option::is_none")]
    pub lengths: Option<Vec<usize>>,
    /// Documents of each task, the first ones [default: all]
    #[arg(long, value_name = "DOCUMENTS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
    /// The most tokens generated for an answer [default: the task's own number]
    #[arg(long, value_name = "TOKENS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<usize>,
}

/// The metrics of one output, in the order of its task's scorer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Scores {
    /// Each from 0 to 1.
    pub values: Vec<f64>,
    /// Whether the prompt fills its length: longer ones have lost their middle.
    pub full: bool,
}

/// The suite.
pub struct LongtextQa {
    tasks: Vec<Task>,
    /// The prompt of each task.
    prompts: Vec<String>,
    documents: Vec<Document>,
    lengths: Vec<usize>,
    max_tokens: Option<usize>,
    hash: String,
    /// Tasks of the folders given whose files are not there.
    missing: Vec<String>,
}

impl Suite for LongtextQa {
    type Options = LongtextQaOptions;
    type Verdict = Scores;

    const NAME: &'static str = "longtext-qa";
    const VERSION: u32 = 1;
    /// Empty: it draws nothing.
    const STREAMS: Range<u64> = 0..0;
    const GENERATES: bool = true;

    fn validate(options: &LongtextQaOptions, problems: &mut Problems) {
        if let Some(lengths) = &options.lengths {
            check_lengths(Self::NAME, lengths, problems);
        }
        problems.check(
            options.longbench.is_some() || options.scrolls.is_some(),
            "longtext-qa.longbench",
            "missing, and so is longtext-qa.scrolls",
            "a folder for at least one of them",
            "docs/evaluation.md says where the files come from",
        );
        let names: Vec<String> = TASKS.iter().map(Task::id).collect();
        for (at, task) in options.tasks.iter().enumerate() {
            let (key, remedy) = ("longtext-qa.tasks", "use one of these");
            problems.check(names.contains(task), key, task, names.join(", "), remedy);
            let twice = options.tasks[..at].contains(task);
            problems.check(!twice, key, format!("{task} twice"), "each once", "remove one");
        }
        if let Some(limit) = options.limit {
            let remedy = "leave it out for all documents";
            check_count("longtext-qa.limit", limit, 1..=MOST_SAMPLES, remedy, problems);
        }
        if let Some(tokens) = options.max_tokens {
            let remedy = "leave it out for each task's own number";
            check_count("longtext-qa.max_tokens", tokens, 1..=4096, remedy, problems);
        }
    }

    fn open(options: &LongtextQaOptions, context: &OpenContext<'_>) -> Result<Self, EvalError> {
        let (tasks, paths, missing) = find_tasks(options)?;
        let prompts = read_prompts(options, &tasks)?;
        let limit = options.limit.unwrap_or(usize::MAX);
        let (mut documents, mut hash) = (Vec::new(), Sha256::new());
        for (at, (task, path)) in tasks.iter().zip(&paths).enumerate() {
            documents.extend(document::read(path, task, at, limit)?);
        }
        for document in &documents {
            hash.update(&document.context);
            hash.update(&document.input);
            document.references.iter().for_each(|reference| hash.update(reference));
        }
        let mut lengths = options.lengths.clone().unwrap_or(vec![context.train_seq_len]);
        lengths.sort_unstable();
        let generation = tasks.iter().map(|task| options.max_tokens.unwrap_or(task.max_tokens));
        let longest = generation.max().unwrap_or_default();
        check_floor(Self::NAME, &lengths, LEAST_PROMPT, longest, context.tokenizer)?;
        let hash = format!("{:x}", hash.finalize());
        let max_tokens = options.max_tokens;
        Ok(LongtextQa { tasks, prompts, documents, lengths, max_tokens, hash, missing })
    }

    fn resolved(&self) -> Value {
        json!({
            "lengths": self.lengths,
            "tasks": self.tasks.iter().map(Task::id).collect::<Vec<_>>(),
            "prompts": self.prompts,
            "documents": self.documents.len(),
            "documents_sha256": self.hash,
        })
    }

    fn trials(&self) -> Vec<Trial> {
        let mut list = Vec::with_capacity(self.lengths.len() * self.documents.len());
        for &length in &self.lengths {
            for index in 0..self.documents.len() {
                list.push(Trial { id: list.len() as u64, length, depth: None, index });
            }
        }
        list
    }

    fn request(&self, trial: &Trial, tokenizer: &Tokenizer) -> Result<Request, EvalError> {
        let document = &self.documents[trial.index];
        let prompt = fill(&self.prompts[document.task], &document.context, &document.input);
        let max_tokens = self.generation(document);
        let prompt = without_middle(tokenizer.encode(&prompt), trial.length - max_tokens);
        Ok(Request {
            prompt: tokenizer.decode(&prompt),
            call: ModelCall::Generate { prompt, max_tokens },
            expected: Some(document.references.join("\n")),
            depth: None,
        })
    }

    fn judge(&self, trial: &Trial, request: &Request, answer: &Answer) -> Scores {
        let Answer::Text(output) = answer else {
            unreachable!("a generation was answered by {answer:?}");
        };
        let document = &self.documents[trial.index];
        let task = &self.tasks[document.task];
        let values = task.scorer.score(task.cut(output), &document.references, &document.classes);
        let most = trial.length - self.generation(document);
        Scores { values, full: request.call.input_len() >= most / 2 * 2 }
    }

    fn fields(&self, trial: &Trial, _request: &Request, _scores: &Scores) -> Map<String, Value> {
        let document = &self.documents[trial.index];
        let fields = [
            ("task", json!(self.tasks[document.task].id())),
            ("doc_id", json!(document.id)),
            ("words", json!(document.words)),
        ];
        fields.into_iter().map(|(name, value)| (name.to_string(), value)).collect()
    }

    fn score(&self, outcomes: &[Outcome<Scores>]) -> Scoring {
        let mut results = Results::default();
        for outcomes in outcomes.chunk_by(|a, b| a.trial.length == b.trial.length) {
            let length = outcomes[0].trial.length;
            let mut mains = BTreeMap::<Source, Vec<Estimate>>::new();
            for (at, task) in self.tasks.iter().enumerate() {
                let of = |o: &&Outcome<Scores>| self.documents[o.trial.index].task == at;
                let of: Vec<&Outcome<Scores>> = outcomes.iter().filter(of).collect();
                mains.entry(task.source).or_default().extend(self.score_task(
                    task,
                    length,
                    &of,
                    &mut results,
                ));
            }
            for (source, mains) in mains.into_iter().filter(|(_, mains)| mains.len() > 1) {
                results.push_mean(source, length, &mains);
            }
        }
        Scoring {
            headline: results.headline,
            scores: results.scores,
            tables: vec![TextTable { title: String::new(), rows: results.rows }],
            tables_only: true,
            details: json!({ "buckets": results.buckets }),
            notes: self.notes(outcomes),
            ..Scoring::default()
        }
    }

    fn draw(&self, scoring: &Scoring, title: &str, dir: &Path) -> Result<(), EvalError> {
        let longest = self.lengths.last().copied();
        let row = |task: &Task| {
            let of = |score: &&Score| {
                score.length == longest && score.metric.starts_with(&format!("{}:", task.id()))
            };
            let score = scoring.scores.iter().rfind(of)?;
            let (value, bar) = (score.estimate.value, score.estimate.bar());
            Some(DotRow { name: score.metric.clone(), value, bar, parts: Vec::new() })
        };
        let chart = DotChart {
            title: format!("Questions about long texts: {title}"),
            x_label: format!("score at length {}", longest.unwrap_or_default()),
            x_range: Some((0.0, 1.0)),
            note: "bars: one standard error".to_string(),
            rows: self.tasks.iter().filter_map(row).collect(),
        };
        chart.save(&dir.join("scores.svg"))
    }
}

impl LongtextQa {
    /// The most tokens generated for a document.
    fn generation(&self, document: &Document) -> usize {
        self.max_tokens.unwrap_or(self.tasks[document.task].max_tokens)
    }

    /// Adds the scores of a task at a length; returns its main one.
    fn score_task(
        &self,
        task: &Task,
        length: usize,
        outcomes: &[&Outcome<Scores>],
        results: &mut Results,
    ) -> Option<Estimate> {
        let (id, all) = (task.id(), estimates(task.scorer, outcomes));
        let buckets =
            BUCKETS.map(|(name, _)| (name, estimates(task.scorer, &self.bucket(outcomes, name))));
        let main = all.last().map(|(_, main)| *main);
        for (n, (metric, estimate)) in all.into_iter().enumerate() {
            let (count, shown) = (outcomes.len().to_string(), show(&estimate));
            let mut row = vec![id.clone(), metric.to_string(), length.to_string(), count, shown];
            for (bucket, of_bucket) in &buckets {
                let estimate = of_bucket.get(n).map(|(_, estimate)| *estimate);
                row.push(estimate.as_ref().map_or_else(String::new, show));
                results.buckets.push(json!({
                    "task": id, "metric": metric, "length": length, "words": bucket, "estimate": estimate,
                }));
            }
            results.push(format!("{id}:{metric}"), length, estimate, row);
        }
        main
    }

    /// The outcomes whose texts are in a bucket.
    fn bucket<'a>(&self, outcomes: &[&'a Outcome<Scores>], name: &str) -> Vec<&'a Outcome<Scores>> {
        let bucket = |words: usize| BUCKETS.iter().find(|(_, end)| words < *end);
        let is_in = |outcome: &&&Outcome<Scores>| {
            bucket(self.documents[outcome.trial.index].words)
                .is_some_and(|(found, _)| *found == name)
        };
        outcomes.iter().filter(is_in).copied().collect()
    }

    fn notes(&self, outcomes: &[Outcome<Scores>]) -> Vec<String> {
        let mut notes = Vec::new();
        for outcomes in outcomes.chunk_by(|a, b| a.trial.length == b.trial.length) {
            let full = outcomes.iter().filter(|outcome| outcome.verdict.full).count();
            if full > 0 {
                let (all, length) = (outcomes.len(), outcomes[0].trial.length);
                notes.push(format!(
                    "{full} of {all} prompts fill length {length}: they have lost their middle, where they are longer"
                ));
            }
        }
        if !self.missing.is_empty() {
            notes.push(format!(
                "not run, because their files are not there: {}",
                self.missing.join(", ")
            ));
        }
        notes
    }
}

/// What the scores are collected in.
struct Results {
    headline: BTreeMap<String, Estimate>,
    scores: Vec<Score>,
    rows: Vec<Vec<String>>,
    buckets: Vec<Value>,
}

impl Default for Results {
    fn default() -> Self {
        let mut header =
            ["task", "metric", "length", "documents", "all"].map(String::from).to_vec();
        header.extend(BUCKETS.iter().map(|(name, _)| format!("{name} words")));
        let (headline, scores, buckets) = Default::default();
        Results { headline, scores, rows: vec![header], buckets }
    }
}

impl Results {
    fn push(&mut self, metric: String, length: usize, estimate: Estimate, row: Vec<String>) {
        self.headline.insert(format!("{metric}@{length}"), estimate);
        self.scores.push(Score { metric, length: Some(length), depth: None, estimate });
        self.rows.push(row);
    }

    /// Adds the mean of the main metrics of a source's tasks.
    fn push_mean(&mut self, source: Source, length: usize, mains: &[Estimate]) {
        let (mean, name) = (mean_of(mains), source.name());
        let metric = format!("mean of {} tasks", mains.len());
        let documents = mean.samples.to_string();
        let mut row = vec![name.to_string(), metric, length.to_string(), documents, show(&mean)];
        row.resize(self.rows[0].len(), String::new());
        self.push(format!("{name}:mean"), length, mean, row);
    }
}

/// Cuts the middle out of more than `most` tokens: half of `most` stay at the start and at the end.
fn without_middle(tokens: Vec<u32>, most: usize) -> Vec<u32> {
    if tokens.len() <= most {
        return tokens;
    }
    let half = most / 2;
    [&tokens[..half], &tokens[tokens.len() - half..]].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_is_what_is_lost() {
        let cut = |most| without_middle((0..10).collect(), most);
        assert_eq!(cut(10), (0..10).collect::<Vec<_>>());
        assert_eq!(cut(6), [0, 1, 2, 7, 8, 9]);
        assert_eq!(cut(5), [0, 1, 8, 9]);
    }
}
