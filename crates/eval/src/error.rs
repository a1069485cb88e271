//! What can go wrong in an evaluation.

use std::path::{Path, PathBuf};

use longwall_config::Problems;

use crate::memory::show_bytes;

/// Why an evaluation failed. Every message says what, where, what is allowed and what to do.
#[derive(Debug, thiserror::Error)]
pub enum EvalError {
    /// Options outside their range; all of them at once.
    #[error(transparent)]
    Options(#[from] Problems),

    /// A file or folder could not be read or written.
    #[error("cannot {action} {}: {source}\n  hint: {remedy}", path.display())]
    Io {
        /// What was tried, for example "read".
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
        /// What the user can do.
        remedy: &'static str,
    },

    /// The model failed: out of memory, for example.
    #[error(
        "the model failed on {what}: {source}\n  hint: lower --batch or --batch-tokens if memory ran out"
    )]
    Model {
        /// What was requested of the model.
        what: String,
        /// The model's reason.
        source: Box<dyn std::error::Error + Send + Sync>,
    },

    /// The model broke the contract of [`EvalModel`](crate::EvalModel).
    #[error("the model gave {found} for {what}; expected {expected}")]
    ModelContract {
        /// What was requested of the model.
        what: String,
        /// What came back.
        found: String,
        /// What the contract requires.
        expected: String,
    },

    /// A length that cannot hold the shortest prompt and the answer.
    #[error(
        "{suite}: length {length} is too short; allowed: at least {minimum} tokens of the {tokenizer} tokenizer ({prompt} for the shortest prompt, {generation} for the answer)\n  hint: ask for --lengths of {minimum} or more"
    )]
    TooShort {
        /// The suite.
        suite: &'static str,
        /// The requested length, in tokens.
        length: usize,
        /// The smallest length allowed, in tokens.
        minimum: usize,
        /// Tokens of the shortest prompt.
        prompt: usize,
        /// Tokens kept for the generated answer.
        generation: usize,
        /// The tokenizer's name.
        tokenizer: String,
    },

    /// A length that is longer than the model's context.
    #[error(
        "{suite}: length {length} is longer than the model can read; allowed: at most {max_len} tokens, because its positions are learned\n  hint: ask for --lengths of {max_len} or less, or train a model with relative positions"
    )]
    TooLong {
        /// The suite.
        suite: &'static str,
        /// The requested length, in tokens.
        length: usize,
        /// The longest context of the model.
        max_len: usize,
    },

    /// A call that needs more memory than there is.
    #[error(
        "{suite}: length {length} needs at least {} of memory, besides the weights, for {rows} sequence{} at a time; {} are free\n  hint: {remedy}",
        show_bytes(*needed),
        if *rows == 1 { "" } else { "s" },
        show_bytes(*available)
    )]
    OutOfMemory {
        /// The suite.
        suite: &'static str,
        /// The length, in tokens.
        length: usize,
        /// Sequences in a forward pass.
        rows: usize,
        /// A lower bound of the memory for them, in bytes.
        needed: u64,
        /// Free memory, in bytes.
        available: u64,
        /// What the user can do.
        remedy: String,
    },

    /// A model none of whose layers measures what is asked for.
    #[error(
        "{suite}: no layer of the model {lacks}; allowed: models with a layer of a kind that does, such as {}\n  hint: docs/evaluation.md lists the metrics, and which settings of a kind report them",
        kinds.join(", ")
    )]
    NoMetrics {
        /// The suite.
        suite: &'static str,
        /// What no layer does.
        lacks: &'static str,
        /// Kinds that do it with their default settings.
        kinds: Vec<&'static str>,
    },

    /// The text to evaluate on is missing, empty, unreadable or too short.
    #[error("{what}\n  hint: {remedy}")]
    Text {
        /// What is wrong, with path and value.
        what: String,
        /// What the user can do.
        remedy: String,
    },

    /// The folder holds an evaluation with other settings.
    #[error(
        "{} holds an evaluation with other settings:\n{}\n  hint: use the same settings to resume it, --force to throw its samples away, or --out NAME to keep both",
        folder.display(),
        differences.join("\n")
    )]
    OtherSettings {
        /// The evaluation's folder.
        folder: PathBuf,
        /// One line per setting: name, what was, what is asked now.
        differences: Vec<String>,
    },

    /// Another process evaluates into the folder.
    #[error("{} is in use by another evaluation\n  hint: wait until it has ended, or use another folder", folder.display())]
    Busy {
        /// The evaluation's folder.
        folder: PathBuf,
    },

    /// A file of an earlier run of the suite is damaged.
    #[error("{}:{line}: {reason}\n  hint: {}", path.display(), after_damage(path))]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// What is wrong with it.
        reason: String,
    },

    /// The evaluation was asked to stop; what is done is kept.
    #[error("{done} of {total} samples are done; {} keeps them\n  hint: run the same command again to go on", folder.display())]
    Stopped {
        /// Samples done.
        done: u64,
        /// All samples.
        total: u64,
        /// The evaluation's folder.
        folder: PathBuf,
    },

    /// The evaluation was asked to stop while its suite read its text.
    #[error("the suite {suite} took no sample\n  hint: run the same command again to go on")]
    StoppedEarly {
        /// The suite.
        suite: &'static str,
    },

    /// Another rank of the evaluation failed.
    #[error("rank {rank} failed: {reason}")]
    Rank {
        /// The rank.
        rank: usize,
        /// Its error.
        reason: String,
    },

    /// The ranks of the evaluation are no longer connected.
    #[error("{source}")]
    Lost {
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },

    /// A plot could not be drawn.
    #[error("cannot draw {}: {reason}\n  hint: {remedy}", path.display())]
    Plot {
        /// The picture's path.
        path: PathBuf,
        /// What is wrong.
        reason: String,
        /// What the user can do.
        remedy: &'static str,
    },
}

/// What to do about a damaged file of an evaluation. Only the samples are written line by line.
fn after_damage(path: &Path) -> &'static str {
    match path.extension().is_some_and(|extension| extension == "jsonl") {
        true => "remove the line, or start again with --force",
        false => "the evaluation writes this file whole: run `longwall eval` again with --force",
    }
}

impl EvalError {
    /// An error of the model itself, for those who implement [`EvalModel`](crate::EvalModel).
    pub fn model(
        what: impl Into<String>,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        EvalError::Model { what: what.into(), source: source.into() }
    }

    /// Turns an IO error into one that names the file it was reading.
    pub(crate) fn read(path: &Path) -> impl FnOnce(std::io::Error) -> EvalError {
        let path = path.to_path_buf();
        move |source| EvalError::Io {
            action: "read",
            path,
            source,
            remedy: "check that the path exists and that you may read it",
        }
    }

    /// Turns an IO error into one that names the file it was writing.
    pub(crate) fn write(path: &Path) -> impl FnOnce(std::io::Error) -> EvalError {
        let path = path.to_path_buf();
        move |source| EvalError::Io {
            action: "write",
            path,
            source,
            remedy: "check that the folder may be written and that the disk has room",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_of_a_damaged_journal_a_line_may_go() {
        let message = |file: &str| {
            let error = EvalError::Damaged { path: file.into(), line: 3, reason: "cut".to_owned() };
            error.to_string()
        };
        assert!(message("a/samples.jsonl").contains("hint: remove the line"));
        for file in ["a/results.json", "a/settings.json"] {
            let hint = "hint: the evaluation writes this file whole: run `longwall eval` again with --force";
            assert!(message(file).ends_with(hint), "{}", message(file));
        }
    }
}
