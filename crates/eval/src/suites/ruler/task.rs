//! The tasks: their names, budgets and what they need.

use longwall_data::Tokenizer;
use serde::{Deserialize, Serialize};

/// A task of the suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Task {
    /// A number in a repeated sentence
    #[value(name = "niah_single_1")]
    #[serde(rename = "niah_single_1")]
    NiahSingle1,
    /// A number in text
    #[value(name = "niah_single_2")]
    #[serde(rename = "niah_single_2")]
    NiahSingle2,
    /// A UUID in text
    #[value(name = "niah_single_3")]
    #[serde(rename = "niah_single_3")]
    NiahSingle3,
    /// One of four numbers in text
    #[value(name = "niah_multikey_1")]
    #[serde(rename = "niah_multikey_1")]
    NiahMultikey1,
    /// A number among as many others as fit
    #[value(name = "niah_multikey_2")]
    #[serde(rename = "niah_multikey_2")]
    NiahMultikey2,
    /// A UUID of a UUID among as many others as fit
    #[value(name = "niah_multikey_3")]
    #[serde(rename = "niah_multikey_3")]
    NiahMultikey3,
    /// Four numbers of one key in text
    NiahMultivalue,
    /// The numbers of four keys in text
    NiahMultiquery,
    /// Variables of a chain of assignments
    Vt,
    /// The ten common words of a list
    Cwe,
    /// The three most frequent coded words
    Fwe,
    /// Questions of SQuAD
    #[value(name = "qa_1")]
    #[serde(rename = "qa_1")]
    Qa1,
    /// Questions of HotpotQA
    #[value(name = "qa_2")]
    #[serde(rename = "qa_2")]
    Qa2,
}

impl Task {
    /// All tasks.
    pub(super) const ALL: [Task; 13] = [
        Task::NiahSingle1,
        Task::NiahSingle2,
        Task::NiahSingle3,
        Task::NiahMultikey1,
        Task::NiahMultikey2,
        Task::NiahMultikey3,
        Task::NiahMultivalue,
        Task::NiahMultiquery,
        Task::Vt,
        Task::Cwe,
        Task::Fwe,
        Task::Qa1,
        Task::Qa2,
    ];

    /// Its name in the original.
    pub(super) fn name(self) -> String {
        serde_json::to_value(self)
            .ok()
            .and_then(|name| name.as_str().map(str::to_string))
            .unwrap_or_default()
    }

    /// The original's budget of generated tokens, and an answer as long as any.
    fn budget(self) -> (usize, String) {
        match self {
            Task::Vt => (30, " ABCDE, FGHIJ, KLMNO, PQRST, UVWXY".to_string()),
            Task::Cwe => (120, (1..=10).map(|n| format!(" {n}. mirovosu")).collect()),
            Task::Fwe => (50, " 1. abcdef 2. ghijkl 3. mnopqr".to_string()),
            Task::Qa1 | Task::Qa2 => (32, String::new()),
            _ => (128, " 1234567, 2345678, 3456789, and 4567890".to_string()),
        }
    }

    /// Tokens that are generated: the original's budget, or as many as the longest answer takes if a tokenizer of
    /// short tokens needs more.
    pub(super) fn max_tokens(self, tokenizer: &Tokenizer) -> usize {
        let (budget, answer) = self.budget();
        budget.max(tokenizer.encode(&answer).len() + 4)
    }

    /// Whether the needles are hidden in held-out text.
    pub(super) fn needs_text(self) -> bool {
        matches!(
            self,
            Task::NiahSingle2
                | Task::NiahSingle3
                | Task::NiahMultikey1
                | Task::NiahMultivalue
                | Task::NiahMultiquery
        )
    }

    /// Whether one of the references is enough.
    pub(super) fn takes_any(self) -> bool {
        matches!(self, Task::Qa1 | Task::Qa2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_have_the_originals_names_and_budgets() {
        let names: Vec<String> = Task::ALL.iter().map(|task| task.name()).collect();
        let expected = "niah_single_1 niah_single_2 niah_single_3 niah_multikey_1 niah_multikey_2 \
            niah_multikey_3 niah_multivalue niah_multiquery vt cwe fwe qa_1 qa_2";
        assert_eq!(names.join(" "), expected);
        let gpt2 = Tokenizer::load(&longwall_data::TokenizerConfig::Gpt2).unwrap();
        let budgets = Task::ALL.map(|task| task.max_tokens(&gpt2));
        assert_eq!(budgets, [128, 128, 128, 128, 128, 128, 128, 128, 30, 120, 50, 32, 32]);
    }
}
