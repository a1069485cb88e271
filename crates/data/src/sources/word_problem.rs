//! Generated words of a group, with the products of those of their prefixes that are no words of the other split;
//! rows hold whole words.
//! [`synthetic::word_problem`](crate::synthetic::word_problem) draws them.

use longwall_config::Problems;
use rand::Rng;
use serde::{Deserialize, Serialize};

use super::labelled::labelled_rows;
use super::{OpenContext, Source, SourceData};
use crate::synthetic::held_out::Part;
use crate::synthetic::symbols::{Labelled, SymbolTokens, content};
use crate::synthetic::word_problem::{Group, WordProblem};
use crate::{DataConfig, DataError};

/// The keys of `kind = "word-problem"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// The group, `a5` or `s5`. Default `a5`.
    pub group: Group,
    /// Elements of the shortest word, at least 2. Default 2.
    pub min_len: usize,
    /// Elements of the longest word, at most `seq_len`. Default 20.
    pub max_len: usize,
}

impl Default for Config {
    fn default() -> Self {
        Config { group: Group::A5, min_len: 2, max_len: 20 }
    }
}

impl Source for Config {
    fn is_generated(&self) -> bool {
        true
    }

    fn validate(&self, key: &str, data: &DataConfig, problems: &mut Problems) {
        problems.check(
            self.max_len <= data.seq_len,
            format!("{key}.max_len"),
            self.max_len,
            format!("at most data.seq_len = {}", data.seq_len),
            "lower it, or raise data.seq_len",
        );
        problems.check(
            (2..=self.max_len).contains(&self.min_len),
            format!("{key}.min_len"),
            self.min_len,
            format!("2 to max_len = {}", self.max_len),
            "the paper's words have 2 to 20 elements",
        );
    }

    fn open(&self, context: &OpenContext<'_>) -> Result<SourceData, DataError> {
        let Config { group, min_len, max_len } = *self;
        let tokens = SymbolTokens::new(context.tokenizer, group.order(), "word-problem")?;
        let problem = WordProblem::new(group);
        let part = context.part();
        let draw = move |rng: &mut _| {
            let length = Rng::random_range(rng, min_len..=max_len);
            let mut word = problem.draw(rng, length);
            // The product so far is that of a word, too: training has no label for words of the tests.
            let Labelled { symbols, labels } = &mut word;
            labels.retain(|&(at, _)| at == 0 || Part::of(&content(&symbols[..=at])) == part);
            word
        };
        let fingerprint = format!("word-problem 2 {group} {min_len} {max_len}");
        Ok(labelled_rows(context, tokens, fingerprint, draw))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::path::Path;

    use super::*;
    use crate::Split;
    use crate::sources::labelled::testing::{sequences, splits_are_disjoint};
    use crate::sources::testing::Example;

    impl Example for Config {
        fn example(_folder: &Path) -> Self {
            Config { group: Group::S5, min_len: 3, max_len: 30 }
        }

        fn held_out(example: &[u32]) -> Vec<Vec<u8>> {
            // Symbols are byte tokens.
            vec![content(example)]
        }
    }

    #[test]
    fn steps_have_the_product_so_far_unless_it_is_that_of_a_test_word() {
        let problem = WordProblem::new(Group::A5);
        let (mut lengths, mut left_out) = (HashSet::new(), false);
        for (word, labels) in sequences(&Config::default().into(), Split::Train, 300) {
            let mut product = 0;
            let mut want = vec![];
            for (at, &element) in word.iter().enumerate() {
                product = problem.product(product, element);
                if at == 0 || Part::of(&content(&word[..=at])) == Part::Train {
                    want.push((at, product));
                }
            }
            assert_eq!(labels, want);
            left_out |= labels.len() < word.len();
            assert_eq!(labels.last().unwrap().0, word.len() - 1, "the whole word counts");
            lengths.insert(word.len());
        }
        assert_eq!(lengths, (2..=20).collect());
        assert!(left_out, "a fifth of all prefixes are words of the tests");
    }

    #[test]
    fn training_and_validation_have_no_word_in_common() {
        // Of two elements, so that random words would coincide.
        splits_are_disjoint(&Config { max_len: 2, ..Config::default() }.into(), 260);
    }
}
