//! The tasks: their names, budgets and what they need.

use super::super::choices::choices;
use crate::Tokenizer;

choices! {
    /// A task.
    pub enum Task {
        /// A number in a repeated sentence
        NiahSingle1 = "niah_single_1",
        /// A number in text
        NiahSingle2 = "niah_single_2",
        /// A UUID in text
        NiahSingle3 = "niah_single_3",
        /// One of four numbers in text
        NiahMultikey1 = "niah_multikey_1",
        /// A number among as many others as fit
        NiahMultikey2 = "niah_multikey_2",
        /// A UUID of a UUID among as many others as fit
        NiahMultikey3 = "niah_multikey_3",
        /// Four numbers of one key in text
        NiahMultivalue = "niah_multivalue",
        /// The numbers of four keys in text
        NiahMultiquery = "niah_multiquery",
        /// Variables of a chain of assignments
        Vt = "vt",
        /// The ten common words of a list
        Cwe = "cwe",
        /// The three most frequent coded words
        Fwe = "fwe",
        /// Questions of SQuAD
        Qa1 = "qa_1",
        /// Questions of HotpotQA
        Qa2 = "qa_2",
    }
}

impl Task {
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
    pub fn max_tokens(self, tokenizer: &Tokenizer) -> usize {
        let (budget, answer) = self.budget();
        budget.max(tokenizer.encode(&answer).len() + 4)
    }

    /// What follows a prompt in training: the answers, and a full stop that ends them.
    pub fn completion(self, answers: &[String]) -> String {
        format!(" {}.", answers.join(", "))
    }

    /// Whether the needles are hidden in held-out text.
    pub fn needs_text(self) -> bool {
        matches!(
            self,
            Task::NiahSingle2
                | Task::NiahSingle3
                | Task::NiahMultikey1
                | Task::NiahMultivalue
                | Task::NiahMultiquery
        )
    }

    /// Whether its questions come from a file; of their references, one is enough.
    pub fn takes_any(self) -> bool {
        matches!(self, Task::Qa1 | Task::Qa2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_have_the_originals_names_and_budgets() {
        let names = Task::ALL.map(Task::name);
        let expected = "niah_single_1 niah_single_2 niah_single_3 niah_multikey_1 niah_multikey_2 \
            niah_multikey_3 niah_multivalue niah_multiquery vt cwe fwe qa_1 qa_2";
        assert_eq!(names.join(" "), expected);
        let gpt2 = Tokenizer::load(&crate::TokenizerConfig::Gpt2).unwrap();
        let budgets = Task::ALL.map(|task| task.max_tokens(&gpt2));
        assert_eq!(budgets, [128, 128, 128, 128, 128, 128, 128, 128, 30, 120, 50, 32, 32]);
    }
}
