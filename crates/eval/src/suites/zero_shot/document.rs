//! The documents of a task, read from request files or from samples of lm-evaluation-harness.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;

use super::harness;
use crate::EvalError;
use crate::json_lines::{JsonLine, for_each_line};

/// Unconditional requests have the number of their document plus this.
const UNCONDITIONAL: u64 = 1_000_000;

/// A text and the continuation of which the model gives the probability.
#[derive(Clone, Debug, PartialEq)]
pub struct Pair {
    /// The context; options of a document usually share it.
    pub context: Arc<str>,
    /// The continuation, with the space before it.
    pub continuation: String,
}

/// One question with its options, or one text with its continuation.
#[derive(Clone, Debug, PartialEq)]
pub struct Document {
    /// Index of its task.
    pub task: usize,
    /// Its number in the task.
    pub id: u64,
    /// The source's own record, as JSON.
    pub doc: String,
    /// The options; a single one for a task with one answer.
    pub options: Vec<Pair>,
    /// The options after a context without the question, for pointwise mutual information; may be empty.
    pub unconditional: Vec<Pair>,
    /// Index of the right option.
    pub gold: usize,
    /// The right answer, as the source writes it.
    pub target: String,
}

impl Document {
    /// Whether there is something to choose.
    pub fn is_choice(&self) -> bool {
        self.options.len() > 1
    }
}

/// A line of a request file.
#[derive(Deserialize)]
struct RequestLine {
    doc: Value,
    request: RequestText,
    idx: usize,
    doc_id: u64,
    #[serde(default)]
    label: Value,
}

#[derive(Deserialize)]
struct RequestText {
    context: String,
    continuation: String,
}

/// Collects the lines of a file into documents, at most `limit` of them: the first ones.
struct Collector {
    task: usize,
    limit: usize,
    found: BTreeMap<u64, Document>,
}

impl Collector {
    /// Without documents; all of a file's without a limit.
    fn new(task: usize, limit: Option<usize>) -> Self {
        Collector { task, limit: limit.unwrap_or(usize::MAX), found: BTreeMap::new() }
    }

    /// Whether a further document would be one too many.
    fn is_full(&self) -> bool {
        self.found.len() >= self.limit
    }

    /// Adds a request of a request file.
    fn add_request(&mut self, line: &JsonLine<'_>) -> Result<(), EvalError> {
        let RequestLine { doc, request, idx, doc_id, label } = line.parse()?;
        let unconditional = doc_id >= UNCONDITIONAL;
        let id = if unconditional { doc_id - UNCONDITIONAL } else { doc_id };
        if !self.found.contains_key(&id) {
            if self.is_full() {
                return Ok(());
            }
            if unconditional {
                return Err(line.error(format!(
                    "doc_id {doc_id} is the unconditional request of document {id}, which has no request before it"
                )));
            }
            let (task, doc) = (self.task, doc.to_string());
            let (options, unconditional) = (Vec::new(), Vec::new());
            let (gold, target) = (gold(&label), target(&label));
            let document = Document { task, id, doc, options, unconditional, gold, target };
            self.found.insert(id, document);
        }
        let document = self.found.get_mut(&id).expect("it was there or has been added");
        let list = match unconditional {
            true => &mut document.unconditional,
            false => &mut document.options,
        };
        if idx != list.len() {
            let allowed = list.len();
            return Err(line.error(format!("idx is {idx}; document {id} continues with {allowed}")));
        }
        push(list, request.context, request.continuation);
        Ok(())
    }

    /// The documents, by their numbers.
    fn finish(self, path: &Path) -> Result<Vec<Document>, EvalError> {
        let error = |what: String| EvalError::Text {
            what: format!("{}: {what}", path.display()),
            remedy: "fetch the file again, or leave the task out".to_string(),
        };
        if self.found.is_empty() {
            return Err(error("there is no request".to_string()));
        }
        for document in self.found.values() {
            let Document { id, options, unconditional, gold, target, .. } = document;
            let count = options.len();
            if document.is_choice() && *gold >= count {
                return Err(error(format!(
                    "the label of document {id} is {target}; allowed: 0 to {}",
                    count - 1
                )));
            }
            if !unconditional.is_empty() && unconditional.len() != count {
                let found = unconditional.len();
                return Err(error(format!(
                    "document {id} has {count} options and {found} unconditional requests"
                )));
            }
        }
        let single = |mut document: Document| {
            // The label of a single answer is its text.
            if !document.is_choice() {
                document.gold = 0;
            }
            document
        };
        Ok(self.found.into_values().map(single).collect())
    }
}

/// Adds a pair, whose context is shared with the one before if they are equal.
fn push(list: &mut Vec<Pair>, context: String, continuation: String) {
    let context = match list.last() {
        Some(last) if *last.context == *context => Arc::clone(&last.context),
        _ => context.into(),
    };
    list.push(Pair { context, continuation });
}

/// The index that a label gives; too large if it gives none.
fn gold(label: &Value) -> usize {
    label.as_u64().map_or(usize::MAX, |label| label as usize)
}

/// A label as text: that of the first of several.
fn target(label: &Value) -> String {
    match label {
        Value::String(text) => text.clone(),
        Value::Array(list) => list.first().map_or_else(String::new, target),
        other => other.to_string(),
    }
}

/// Reads a request file of OLMo's evaluations.
pub(super) fn read_requests(
    path: &Path,
    task: usize,
    limit: Option<usize>,
) -> Result<Vec<Document>, EvalError> {
    let mut collector = Collector::new(task, limit);
    let expected =
        "a request a line: doc, request.context, request.continuation, idx, doc_id, label";
    for_each_line(path, expected, |line| collector.add_request(line))?;
    collector.finish(path)
}

/// Reads a file that lm-evaluation-harness wrote with `--log_samples`.
pub(super) fn read_samples(
    path: &Path,
    task: usize,
    limit: Option<usize>,
) -> Result<Vec<Document>, EvalError> {
    let mut collector = Collector::new(task, limit);
    let expected =
        "samples of multiple choice or of log-likelihoods: doc_id, doc, target, arguments";
    for_each_line(path, expected, |line| {
        let sample: harness::Sample = line.parse()?;
        let id = sample.doc_id;
        // A document has a line for each filter of its answers, all with the same requests.
        if collector.found.contains_key(&id) || collector.is_full() {
            return Ok(());
        }
        let harness::Requests { options, unconditional, gold, target } =
            sample.requests().map_err(|reason| line.error(reason))?;
        let [options, unconditional] = [options, unconditional].map(|pairs| {
            let mut list = Vec::with_capacity(pairs.len());
            pairs.into_iter().for_each(|(context, text)| push(&mut list, context, text));
            list
        });
        let doc = sample.doc.to_string();
        let document = Document { task, id, doc, options, unconditional, gold, target };
        collector.found.insert(id, document);
        Ok(())
    })?;
    collector.finish(path)
}
