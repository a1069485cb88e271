//! Rows of generated examples for training.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::fflm::{FlipFlop, FlipFlopTokens, read_bits};
use super::passkey::PasskeyFitter;
use crate::mixture::derive_key;
use crate::{DataError, Split, Tokenizer};

/// One example: its tokens, the end of text last, and which of them count for the loss.
struct Example {
    tokens: Vec<u32>,
    /// Their places, ascending; `None` for all of them.
    counted: Option<Vec<usize>>,
}

/// Packs whole examples into a row; what is left is filled with ends of text that do not count for
/// the loss. `weights` are those of each token but the first as a target.
///
/// A row is a function of the seed and its index. The seeds of a task's two splits come from
/// different hashes, and validation has the same rows whatever the run's seed.
fn pack(
    (seed, index): (u64, u64),
    end_of_text: u32,
    mut example: impl FnMut(&mut ChaCha8Rng) -> Example,
    tokens: &mut [i32],
    weights: &mut [f32],
) {
    tokens.fill(end_of_text as i32);
    weights.fill(0.0);
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(index);
    let mut at = 0;
    loop {
        let Example { tokens: new, counted } = example(&mut rng);
        let end = at + new.len();
        if end > tokens.len() {
            return;
        }
        for (token, new) in tokens[at..end].iter_mut().zip(&new) {
            *token = *new as i32;
        }
        // The weight of target t stands at the position in front of it.
        match counted {
            Some(places) => {
                for place in places {
                    weights[at + place - 1] = 1.0;
                }
            }
            None => weights[at.max(1) - 1..end - 1].fill(1.0),
        }
        at = end;
    }
}

/// Passkey examples: prompt, answer, full stop, end of text.
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
        let end_of_text = self.tokenizer.end_of_text();
        pack((self.seed, index), end_of_text, |rng| self.example(rng), tokens, weights);
    }

    /// An example, of which the answer may alone count, with the full stop that ends it.
    fn example(&self, rng: &mut ChaCha8Rng) -> Example {
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
        let counted = self.answer_only.then(|| (start..tokens.len()).collect());
        tokens.push(self.tokenizer.end_of_text());
        Example { tokens, counted }
    }
}

/// Flip-flop sequences, each followed by an end of text.
#[derive(Debug)]
pub(crate) struct FlipFlopRows {
    task: FlipFlop,
    tokens: FlipFlopTokens,
    end_of_text: u32,
    reads_only: bool,
    seed: u64,
}

impl FlipFlopRows {
    pub(crate) fn new(
        tokenizer: &Tokenizer,
        task: FlipFlop,
        reads_only: bool,
        seed: u64,
        split: Split,
    ) -> Result<Self, DataError> {
        let seed = match split {
            Split::Train => derive_key("fflm training", &[seed]),
            Split::Validation => derive_key("fflm validation", &[]),
        };
        let tokens = FlipFlopTokens::new(tokenizer)?;
        Ok(FlipFlopRows { task, tokens, end_of_text: tokenizer.end_of_text(), reads_only, seed })
    }

    /// As [`PasskeyRows::fill`].
    pub(crate) fn fill(&self, index: u64, tokens: &mut [i32], weights: &mut [f32]) {
        let example = |rng: &mut ChaCha8Rng| {
            let text = self.task.draw(rng);
            let mut tokens = self.tokens.encode(&text);
            tokens.push(self.end_of_text);
            Example { tokens, counted: self.reads_only.then(|| read_bits(&text).collect()) }
        };
        pack((self.seed, index), self.end_of_text, example, tokens, weights);
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

    fn flip_flops(reads_only: bool, seed: u64, split: Split) -> (Tokenizer, FlipFlopRows) {
        let tokenizer = Tokenizer::load(&TokenizerConfig::Bytes).unwrap();
        let task = FlipFlop::ignoring(256, 0.8);
        let rows = FlipFlopRows::new(&tokenizer, task, reads_only, seed, split).unwrap();
        (tokenizer, rows)
    }

    fn flip_flop_row(rows: &FlipFlopRows, index: u64, len: usize) -> (Vec<i32>, Vec<f32>) {
        let (mut tokens, mut weights) = (vec![-1; len + 1], vec![-1.0; len]);
        rows.fill(index, &mut tokens, &mut weights);
        (tokens, weights)
    }

    #[test]
    fn exactly_the_read_bits_count() {
        let (tokenizer, rows) = flip_flops(true, 1, Split::Train);
        for index in 0..20 {
            // Two sequences with their ends of text, and some filling.
            let (tokens, weights) = flip_flop_row(&rows, index, 1100);
            let tokens: Vec<u32> = tokens.iter().map(|&token| token as u32).collect();
            let text = tokenizer.decode(&tokens[..1026]);
            let sequences: Vec<&str> = text.split_terminator("<|endoftext|>").collect();
            assert!(sequences.len() == 2 && sequences.iter().all(|s| s.len() == 512), "{text}");
            for (t, &weight) in weights.iter().enumerate() {
                let read = tokens[t] == u32::from(b'r') && t < 1026;
                assert_eq!(weight, f32::from(u8::from(read)), "target {t}");
            }
        }
    }

    #[test]
    fn a_row_of_the_papers_length_is_one_sequence() {
        let (tokenizer, rows) = flip_flops(false, 1, Split::Train);
        let (tokens, weights) = flip_flop_row(&rows, 0, 512);
        let end = tokenizer.end_of_text() as i32;
        assert!(tokens[..512].iter().all(|&token| token != end) && tokens[512] == end);
        assert!(weights.iter().all(|&weight| weight == 1.0), "with all targets, all count");
    }

    #[test]
    fn flip_flop_rows_depend_on_index_and_seed_and_splits_are_disjoint() {
        let row = |seed, split, index| flip_flop_row(&flip_flops(true, seed, split).1, index, 512);
        let first = row(1, Split::Train, 7);
        assert_eq!(first, row(1, Split::Train, 7));
        for other in
            [row(1, Split::Train, 8), row(2, Split::Train, 7), row(1, Split::Validation, 7)]
        {
            assert_ne!(first, other);
        }
        assert_eq!(row(1, Split::Validation, 7), row(2, Split::Validation, 7));
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
