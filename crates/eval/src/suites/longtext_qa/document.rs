//! The documents of a task, read from the files that LongBench and SCROLLS publish.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;

use super::tasks::{Source, Task};
use crate::EvalError;
use crate::json_lines::{JsonLine, for_each_line};

/// A text with a question.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Document {
    /// Index of its task.
    pub task: usize,
    /// The source's name for it.
    pub id: String,
    pub context: String,
    /// The question; empty for a summary.
    pub input: String,
    /// Correct answers, at least one.
    pub references: Vec<String>,
    /// All answers of a classification.
    pub classes: Vec<String>,
    /// Words of the text, which decide its bucket.
    pub words: usize,
}

#[derive(Deserialize)]
struct LongBenchLine {
    input: String,
    context: String,
    answers: Vec<String>,
    length: usize,
    #[serde(default)]
    all_classes: Option<Vec<String>>,
    #[serde(rename = "_id")]
    id: String,
}

#[derive(Deserialize)]
struct ScrollsLine {
    id: String,
    input: String,
    output: Option<String>,
}

/// Reads the first documents of a task, at most `limit`.
pub(super) fn read(
    path: &Path,
    task: &Task,
    at: usize,
    limit: usize,
) -> Result<Vec<Document>, EvalError> {
    let documents = match task.source {
        Source::LongBench => longbench(path, at, limit)?,
        Source::Scrolls => scrolls(path, task, at, limit)?,
    };
    if documents.is_empty() {
        return Err(EvalError::Text {
            what: format!("{} holds no document", path.display()),
            remedy: "fetch the file again, or leave the task out".to_string(),
        });
    }
    Ok(documents)
}

fn longbench(path: &Path, task: usize, limit: usize) -> Result<Vec<Document>, EvalError> {
    let mut documents = Vec::new();
    let expected = "LongBench's lines: input, context, answers, length, all_classes, _id";
    for_each_line(path, expected, |line| {
        if documents.len() >= limit {
            return Ok(());
        }
        let LongBenchLine { input, context, answers: references, length, all_classes, id } =
            line.parse()?;
        if references.is_empty() {
            return Err(line.error(format!("document {id} has no answer")));
        }
        let classes = all_classes.unwrap_or_default();
        let words = length;
        documents.push(Document { task, id, context, input, references, classes, words });
        Ok(())
    })?;
    Ok(documents)
}

/// Lines with the same id are one document with several answers.
fn scrolls(path: &Path, task: &Task, at: usize, limit: usize) -> Result<Vec<Document>, EvalError> {
    let (mut documents, mut places) = (Vec::<Document>::new(), BTreeMap::<String, usize>::new());
    let expected = "SCROLLS' lines of the validation split: id, input, output";
    for_each_line(path, expected, |line| {
        let ScrollsLine { id, input, output } = line.parse()?;
        let output = output.ok_or_else(|| {
            line.error(format!("document {id} has no output, as in the test split"))
        })?;
        if let Some(&place) = places.get(&id) {
            documents[place].references.push(output);
            return Ok(());
        }
        if documents.len() >= limit {
            return Ok(());
        }
        let (question, context) = question_and_text(task, &input, line)?;
        let words = context.split_whitespace().count();
        places.insert(id.clone(), documents.len());
        let (references, classes) = (vec![output], Vec::new());
        let (context, input) = (context.to_string(), question.to_string());
        documents.push(Document { task: at, id, context, input, references, classes, words });
        Ok(())
    })?;
    Ok(documents)
}

/// An input of SCROLLS is a question, a blank line and a text; for a summary it is the text.
fn question_and_text<'a>(
    task: &Task,
    input: &'a str,
    line: &JsonLine<'_>,
) -> Result<(&'a str, &'a str), EvalError> {
    if !task.prompt.contains("{input}") {
        return Ok(("", input));
    }
    // The question of QuALITY has its options behind a blank line.
    let from = match task.name {
        "quality" => input.find("(D)").unwrap_or(0),
        _ => 0,
    };
    let end = input[from..].find("\n\n").map(|end| from + end);
    let end =
        end.ok_or_else(|| line.error("input has no blank line between the question and the text"))?;
    Ok((input[..end].trim(), input[end..].trim()))
}
