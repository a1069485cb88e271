//! The formats of lm-evaluation-harness (version 0.4): samples that it wrote, and the fields of its results.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::document::Document;
use super::metrics::{Metric, Scored, TaskScores};
use super::tasks::Group;
use crate::stats::Estimate;

/// A line of a file of samples.
#[derive(Deserialize)]
pub(super) struct Sample {
    pub doc_id: u64,
    pub doc: Value,
    target: Value,
    arguments: Value,
}

/// Contexts with their continuations.
type Pairs = Vec<(String, String)>;

/// What a sample asks.
#[derive(Debug, PartialEq)]
pub(super) struct Requests {
    pub options: Pairs,
    /// The options without a context; may be empty.
    pub unconditional: Pairs,
    /// Index of the right option.
    pub gold: usize,
    /// The target's text.
    pub target: String,
}

impl Sample {
    /// The sample's requests, or what is wrong with them.
    pub(super) fn requests(&self) -> Result<Requests, String> {
        let mut options: Pairs = match &self.arguments {
            Value::Array(list) => list.iter().map(list_pair).collect::<Result<_, _>>()?,
            Value::Object(map) => {
                let of = |at| map.get(&format!("gen_args_{at}"));
                (0..map.len()).map_while(of).map(object_pair).collect::<Result<_, _>>()?
            }
            _ => return Err("arguments are neither a list nor an object".to_string()),
        };
        if options.is_empty() {
            return Err("arguments hold no request".to_string());
        }
        // With acc_mutual_info, the options come a second time, without a context.
        let half = options.len() / 2;
        let (first, second) = options.split_at(half);
        let is_repeated = first.len() == second.len()
            && first.iter().zip(second).all(|(a, b)| a.1 == b.1 && b.0.is_empty());
        let unconditional = if is_repeated { options.split_off(half) } else { Pairs::new() };
        let target = match &self.target {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        let gold = right_option(&options, target.trim()).ok_or_else(|| {
            format!("target {target:?} is neither the index nor the text of one continuation")
        })?;
        Ok(Requests { options, unconditional, gold, target })
    }
}

/// The index that a target gives, or that of the only option with its text; that of a single option.
fn right_option(options: &[(String, String)], target: &str) -> Option<usize> {
    if let Some(index) = target.parse().ok().filter(|index| *index < options.len()) {
        return Some(index);
    }
    let mut same = (0..options.len()).filter(|&at| options[at].1.trim() == target);
    match (options.len(), same.next(), same.next()) {
        (1, _, _) => Some(0),
        (_, Some(index), None) => Some(index),
        _ => None,
    }
}

fn list_pair(pair: &Value) -> Result<(String, String), String> {
    pair_of(pair.get(0), pair.get(1))
}

fn object_pair(pair: &Value) -> Result<(String, String), String> {
    pair_of(pair.get("arg_0"), pair.get("arg_1"))
}

fn pair_of(
    context: Option<&Value>,
    continuation: Option<&Value>,
) -> Result<(String, String), String> {
    match (context.and_then(Value::as_str), continuation.and_then(Value::as_str)) {
        (Some(context), Some(continuation)) => Ok((context.to_string(), continuation.to_string())),
        _ => Err("a request is no pair of texts; generation tasks cannot be scored so".to_string()),
    }
}

/// SHA-256 in hexadecimal digits.
pub(super) fn hash(text: &str) -> String {
    format!("{:x}", Sha256::digest(text))
}

/// Hashes of a document's record, of its first context, and of its target.
pub(super) fn hashes(document: &Document) -> [String; 3] {
    [hash(&document.doc), hash(&document.options[0].context), hash(&document.target)]
}

/// The fields of a sample: what was asked, the answers, and the metrics.
pub(super) fn sample_fields(
    task: &str,
    document: &Document,
    scored: &Scored,
) -> Map<String, Value> {
    let Document { options, unconditional, .. } = document;
    let requests = options.iter().chain(unconditional).enumerate();
    let arguments: Map<String, Value> = requests
        .map(|(at, pair)| {
            let argument = json!({ "arg_0": &*pair.context, "arg_1": pair.continuation });
            (format!("gen_args_{at}"), argument)
        })
        .collect();
    // The harness writes every answer as text.
    let answer = |(log_p, greedy): (&Option<f64>, &bool)| {
        let log_p = log_p.map_or_else(|| "nan".to_string(), |log_p| log_p.to_string());
        json!([log_p, if *greedy { "True" } else { "False" }])
    };
    let answers: Vec<Value> = scored.log_p.iter().zip(&scored.greedy).map(answer).collect();
    let metrics = Metric::of(document);
    let [doc_hash, prompt_hash, target_hash] = hashes(document);
    let mut fields = json!({
        "task": task,
        "doc_id": document.id,
        "doc": serde_json::from_str::<Value>(&document.doc).unwrap_or_default(),
        "target": document.target,
        "arguments": arguments,
        "resps": answers.iter().map(|answer| json!([answer])).collect::<Vec<_>>(),
        "filtered_resps": answers,
        "filter": "none",
        "metrics": metrics.iter().map(|metric| metric.name()).collect::<Vec<_>>(),
        "doc_hash": doc_hash,
        "prompt_hash": prompt_hash,
        "target_hash": target_hash,
    });
    for metric in metrics {
        fields[metric.name()] = json!(metric.of_document(document, scored));
    }
    match fields {
        Value::Object(fields) => fields,
        other => unreachable!("an object was made, not {other}"),
    }
}

/// Metrics as the harness writes them: value and standard error, each followed by the filter.
fn measured(alias: &str, estimates: &BTreeMap<Metric, Estimate>) -> Value {
    let mut fields = json!({ "alias": alias });
    for (metric, estimate) in estimates {
        fields[format!("{},none", metric.name())] = json!(estimate.value);
        fields[format!("{}_stderr,none", metric.name())] = json!(estimate.standard_error);
    }
    fields
}

/// A group and its means.
pub(super) type GroupMeans<'a> = (&'a Group, BTreeMap<Metric, Estimate>);

/// The fields of `results.json`. Standard errors are those of means, also for shares.
pub(super) fn results(
    version: u32,
    limit: Option<usize>,
    tasks: &[TaskScores],
    groups: &[GroupMeans<'_>],
) -> Map<String, Value> {
    let by_task = |value: &dyn Fn(&TaskScores) -> Value| -> Value {
        tasks.iter().map(|task| (task.name.clone(), value(task))).collect::<Map<_, _>>().into()
    };
    let by_group = |value: &dyn Fn(&GroupMeans<'_>) -> Value| -> Value {
        groups
            .iter()
            .map(|group| (group.0.name.clone(), value(group)))
            .collect::<Map<_, _>>()
            .into()
    };
    let names = |group: &Group| -> Vec<&str> {
        group.tasks.iter().map(|&task| tasks[task].name.as_str()).collect()
    };
    let higher = |task: &TaskScores| -> Value {
        let metrics = task.means.keys();
        metrics
            .map(|m| (m.name().to_string(), m.higher_is_better().into()))
            .collect::<Map<_, _>>()
            .into()
    };
    let config = |task: &TaskScores| {
        let output_type = if task.choice { "multiple_choice" } else { "loglikelihood" };
        json!({ "task": task.name, "output_type": output_type, "num_fewshot": task.shots })
    };
    let fields = json!({
        "results": by_task(&|task| measured(&task.name, &task.means)),
        "groups": by_group(&|(group, means)| measured(&group.name, means)),
        "group_subtasks": by_group(&|(group, _)| json!(names(group))),
        "configs": by_task(&config),
        "versions": by_task(&|_| json!(version)),
        "n-shot": by_task(&|task| json!(task.shots)),
        "n-samples": by_task(&|task| {
            json!({ "original": if limit.is_none() { Some(task.documents) } else { None }, "effective": task.documents })
        }),
        "higher_is_better": by_task(&higher),
        "task_hashes": by_task(&|task| json!(task.hash)),
    });
    match fields {
        Value::Object(fields) => fields,
        other => unreachable!("an object was made, not {other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requests(arguments: Value, target: Value) -> Result<Requests, String> {
        Sample { doc_id: 0, doc: Value::Null, target, arguments }.requests()
    }

    #[test]
    fn both_forms_of_arguments_are_read() {
        let object = json!({ "gen_args_0": { "arg_0": "a", "arg_1": " b" },
                             "gen_args_1": { "arg_0": "a", "arg_1": " c" } });
        let list = json!([["a", " b"], ["a", " c"]]);
        for arguments in [object, list] {
            for target in [json!(1), json!("1"), json!("c")] {
                let found = requests(arguments.clone(), target).unwrap();
                assert_eq!(found.options[1], ("a".to_string(), " c".to_string()));
                assert_eq!((found.options.len(), found.gold), (2, 1));
            }
        }
    }

    #[test]
    fn what_cannot_be_scored_is_said() {
        let generation = json!({ "gen_args_0": { "arg_0": "a", "arg_1": { "until": ["\n"] } } });
        let error = requests(generation, json!("x")).unwrap_err();
        assert!(error.contains("generation tasks"), "{error}");
        let error = requests(json!([["a", " b"], ["a", " c"]]), json!("d")).unwrap_err();
        assert!(error.contains("target \"d\" is neither"), "{error}");
        assert!(requests(json!([]), json!(0)).is_err() && requests(json!(1), json!(0)).is_err());
    }

    #[test]
    fn hashes_are_those_of_sha256sum() {
        let expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(hash("abc"), expected);
    }
}
