//! Rows of generated examples for training.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::passkey::PasskeyFitter;
use crate::mixture::derive_key;
use crate::{DataError, Split, Tokenizer};

/// Passkey examples, packed whole into rows: prompt, answer, full stop, end of text. What is left
/// of a row is filled with ends of text that do not count for the loss.
///
/// A row is a function of the seed, the split and its index. The seeds of the two splits come from
/// different hashes, and validation has the same rows whatever the run's seed.
#[derive(Debug)]
pub(crate) struct PasskeyRows {
    fitter: PasskeyFitter,
    tokenizer: Tokenizer,
    min_len: usize,
    max_len: usize,
    answer_only: bool,
    seed: u64,
}

impl PasskeyRows {
    pub(crate) fn new(
        tokenizer: &Tokenizer,
        min_len: Option<usize>,
        max_len: usize,
        answer_only: bool,
        seed: u64,
        split: Split,
    ) -> Result<Self, DataError> {
        let fitter = PasskeyFitter::new(tokenizer);
        let needed = fitter.shortest_example();
        let too_short = |budget, key| {
            Err(DataError::PromptTooLong {
                budget,
                key,
                needed,
                tokenizer: tokenizer.name().into(),
            })
        };
        if max_len < needed {
            return too_short(max_len, "max_len (by default data.seq_len)");
        }
        let min_len = min_len.unwrap_or(needed);
        if min_len < needed {
            return too_short(min_len, "min_len");
        }
        let seed = match split {
            Split::Train => derive_key("passkey training", &[seed]),
            Split::Validation => derive_key("passkey validation", &[]),
        };
        Ok(PasskeyRows {
            fitter,
            tokenizer: tokenizer.clone(),
            min_len,
            max_len,
            answer_only,
            seed,
        })
    }

    /// Fills row `index`: its tokens, and the weight of each token but the first as a target.
    pub(crate) fn fill(&self, index: u64, tokens: &mut [i32], weights: &mut [f32]) {
        let end_of_text = self.tokenizer.end_of_text() as i32;
        tokens.fill(end_of_text);
        weights.fill(0.0);
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(index);
        let mut at = 0;
        loop {
            let (example, answer) = self.example(&mut rng);
            let end = at + example.len();
            if end > tokens.len() {
                return;
            }
            for (token, example) in tokens[at..end].iter_mut().zip(&example) {
                *token = *example as i32;
            }
            // The weight of target t stands at the position in front of it.
            let counted =
                if self.answer_only { at + answer.start..at + answer.end } else { at.max(1)..end };
            weights[counted.start - 1..counted.end - 1].fill(1.0);
            at = end;
        }
    }

    /// An example's tokens, and which of them are the answer (with the full stop that ends it).
    fn example(&self, rng: &mut ChaCha8Rng) -> (Vec<u32>, std::ops::Range<usize>) {
        let length = rng.random_range(self.min_len..=self.max_len);
        // The longest answer's tokens, so that the example fits whatever the answer.
        let reserved = self.fitter.shortest_example() - self.fitter.shortest_prompt();
        let prompt = match self.fitter.fit(rng, length - reserved, None, "min_len") {
            Ok(prompt) => prompt,
            Err(error) => unreachable!("min_len was checked: {error}"),
        };
        let mut tokens = self.tokenizer.encode(&prompt.prompt);
        let start = tokens.len();
        tokens.extend(self.tokenizer.encode(&prompt.completion()));
        let answer = start..tokens.len();
        tokens.push(self.tokenizer.end_of_text());
        (tokens, answer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TokenizerConfig;

    const SEQ_LEN: usize = 1024;

    fn rows(answer_only: bool, seed: u64, split: Split) -> (Tokenizer, PasskeyRows) {
        let tokenizer = Tokenizer::load(&TokenizerConfig::Bytes).unwrap();
        let rows = PasskeyRows::new(&tokenizer, None, 500, answer_only, seed, split).unwrap();
        (tokenizer, rows)
    }

    fn fill(rows: &PasskeyRows, index: u64) -> (Vec<i32>, Vec<f32>) {
        let (mut tokens, mut weights) = (vec![-1; SEQ_LEN + 1], vec![-1.0; SEQ_LEN]);
        rows.fill(index, &mut tokens, &mut weights);
        (tokens, weights)
    }

    #[test]
    fn exactly_the_answers_count() {
        let (tokenizer, rows) = rows(true, 1, Split::Train);
        for index in 0..50 {
            let (tokens, weights) = fill(&rows, index);
            let tokens: Vec<u32> = tokens.iter().map(|&token| token as u32).collect();
            let text = tokenizer.decode(&tokens);
            let examples: Vec<&str> =
                text.split("<|endoftext|>").filter(|text| !text.is_empty()).collect();
            let expected: String = examples
                .iter()
                .map(|example| {
                    let answer = example.rsplit("The pass key is").next().unwrap();
                    let needle = format!("The pass key is{} Remember it.", answer);
                    assert!(example.contains(&needle), "{example}");
                    answer
                })
                .collect();
            let counted: Vec<u32> =
                (0..SEQ_LEN).filter(|&t| weights[t] == 1.0).map(|t| tokens[t + 1]).collect();
            assert_eq!(tokenizer.decode(&counted), expected);
            assert!(
                !examples.is_empty()
                    && weights.iter().all(|&weight| weight == 0.0 || weight == 1.0)
            );
        }
    }

    #[test]
    fn with_all_targets_only_the_filling_does_not_count() {
        let (tokenizer, rows) = rows(false, 1, Split::Train);
        let (tokens, weights) = fill(&rows, 0);
        let end = tokenizer.end_of_text() as i32;
        let text = tokens.iter().rposition(|&token| token != end).unwrap();
        assert!(weights[..=text].iter().all(|&weight| weight == 1.0));
        assert!(weights[text + 1..].iter().all(|&weight| weight == 0.0));
    }

    #[test]
    fn rows_depend_on_index_and_seed_and_splits_are_disjoint() {
        let train = rows(true, 1, Split::Train).1;
        assert_eq!(fill(&train, 7), fill(&rows(true, 1, Split::Train).1, 7));
        assert_ne!(fill(&train, 7), fill(&train, 8));
        assert_ne!(fill(&train, 7), fill(&rows(true, 2, Split::Train).1, 7));
        let validation = rows(true, 1, Split::Validation).1;
        assert_eq!(fill(&validation, 7), fill(&rows(true, 2, Split::Validation).1, 7));
        assert_ne!(fill(&train, 7), fill(&validation, 7));
    }

    #[test]
    fn lengths_below_the_shortest_example_are_refused() {
        let tokenizer = Tokenizer::load(&TokenizerConfig::Bytes).unwrap();
        let message = |min_len, max_len| {
            PasskeyRows::new(&tokenizer, min_len, max_len, true, 0, Split::Train)
                .unwrap_err()
                .to_string()
        };
        insta::assert_snapshot!(message(None, 128), @r"
        a passkey example takes at least 255 tokens with the tokenizer bytes; max_len (by default data.seq_len) is 128
          hint: raise max_len (by default data.seq_len) to 255 or more, or use a tokenizer with longer tokens
        ");
        insta::assert_snapshot!(message(Some(10), 512), @r"
        a passkey example takes at least 255 tokens with the tokenizer bytes; min_len is 10
          hint: raise min_len to 255 or more, or use a tokenizer with longer tokens
        ");
    }
}
