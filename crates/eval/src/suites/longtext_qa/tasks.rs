//! The tasks: where their files are, what the prompt says, and how outputs are scored.

use self::Source::{LongBench, Scrolls};
use super::scorers::Scorer;

/// Where a task comes from, which decides the format of its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Source {
    LongBench,
    Scrolls,
}

impl Source {
    pub(super) const ALL: [Source; 2] = [LongBench, Scrolls];

    pub(super) fn name(self) -> &'static str {
        match self {
            LongBench => "longbench",
            Scrolls => "scrolls",
        }
    }
}

/// A task.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Task {
    pub source: Source,
    /// The name of its file or folder.
    pub name: &'static str,
    /// The most tokens generated: LongBench's own; for SCROLLS enough for most references.
    pub max_tokens: usize,
    pub scorer: Scorer,
    /// Whether only the first line of the output counts.
    pub first_line: bool,
    /// The prompt; `{context}` and `{input}` stand for the text and the question.
    pub prompt: &'static str,
}

impl Task {
    /// `longbench/qasper`.
    pub(super) fn id(&self) -> String {
        format!("{}/{}", self.source.name(), self.name)
    }

    /// The part of an output that is scored.
    pub(super) fn cut<'a>(&self, output: &'a str) -> &'a str {
        match self.first_line {
            true => output.trim_start_matches('\n').split('\n').next().unwrap_or_default(),
            false => output,
        }
    }
}

/// Fills in a prompt; what stands in the text is never replaced.
pub(super) fn fill(prompt: &str, context: &str, input: &str) -> String {
    let parts: Vec<String> =
        prompt.split("{context}").map(|part| part.replace("{input}", input)).collect();
    parts.join(context)
}

const QUESTION: &str = "{context}\n\nQuestion: {input}\nAnswer:";
const SUMMARY: &str = "{context}\n\nSummary of the text above:";
const EXAMPLES: &str = "{context}\n{input}";

const fn task(
    source: Source,
    name: &'static str,
    max_tokens: usize,
    scorer: Scorer,
    first_line: bool,
    prompt: &'static str,
) -> Task {
    Task { source, name, max_tokens, scorer, first_line, prompt }
}

/// All tasks: LongBench's in English and code, and SCROLLS'.
pub(super) const TASKS: [Task; 23] = [
    task(LongBench, "narrativeqa", 128, Scorer::F1, false, QUESTION),
    task(LongBench, "qasper", 128, Scorer::F1, false, QUESTION),
    task(LongBench, "multifieldqa_en", 64, Scorer::F1, false, QUESTION),
    task(LongBench, "hotpotqa", 32, Scorer::F1, false, QUESTION),
    task(LongBench, "2wikimqa", 32, Scorer::F1, false, QUESTION),
    task(LongBench, "musique", 32, Scorer::F1, false, QUESTION),
    task(LongBench, "gov_report", 512, Scorer::RougeLOfSets, false, SUMMARY),
    task(LongBench, "qmsum", 512, Scorer::RougeLOfSets, false, QUESTION),
    task(LongBench, "multi_news", 512, Scorer::RougeLOfSets, false, SUMMARY),
    task(LongBench, "trec", 64, Scorer::Classification, true, EXAMPLES),
    task(LongBench, "triviaqa", 32, Scorer::F1, true, EXAMPLES),
    task(LongBench, "samsum", 128, Scorer::RougeLOfSets, true, EXAMPLES),
    task(
        LongBench,
        "passage_count",
        32,
        Scorer::Count,
        false,
        "{context}\n\nSome of the paragraphs above are repeated. The number of different paragraphs is",
    ),
    task(
        LongBench,
        "passage_retrieval_en",
        32,
        Scorer::Retrieval,
        false,
        "{context}\n\nSummary of one of the paragraphs above: {input}\nThe summary is of Paragraph",
    ),
    task(LongBench, "lcc", 64, Scorer::Code, false, "{context}"),
    task(LongBench, "repobench-p", 64, Scorer::Code, false, "{context}{input}"),
    task(Scrolls, "gov_report", 512, Scorer::Rouge, false, SUMMARY),
    task(Scrolls, "summ_screen_fd", 256, Scorer::Rouge, false, SUMMARY),
    task(Scrolls, "qmsum", 256, Scorer::Rouge, false, QUESTION),
    task(Scrolls, "narrative_qa", 32, Scorer::F1, true, QUESTION),
    task(Scrolls, "qasper", 64, Scorer::F1, true, QUESTION),
    task(Scrolls, "quality", 64, Scorer::ExactMatch, true, QUESTION),
    task(
        Scrolls,
        "contract_nli",
        8,
        Scorer::ExactMatch,
        true,
        "{context}\n\nHypothesis: {input}\nEntailment, Contradiction or Not mentioned?\nAnswer:",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_every_prompt_has_its_text() {
        let mut names: Vec<String> = TASKS.iter().map(Task::id).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), TASKS.len());
        assert!(TASKS.iter().all(|task| task.prompt.matches("{context}").count() == 1));
    }

    #[test]
    fn text_that_looks_like_a_placeholder_stays() {
        let filled = fill("{context} Q: {input}?", "see {input}", "{context}");
        assert_eq!(filled, "see {input} Q: {context}?");
    }

    #[test]
    fn the_first_line_is_that_after_blank_ones() {
        let task = TASKS.iter().find(|task| task.first_line).unwrap();
        assert_eq!(task.cut("\n\nDate\nQuestion: x"), "Date");
        assert_eq!(task.cut(""), "");
    }
}
