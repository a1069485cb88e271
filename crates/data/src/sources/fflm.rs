//! Generated flip-flop sequences, each followed by an end of text; rows hold whole sequences.
//! [`synthetic::fflm`](crate::synthetic::fflm) draws them.

use longwall_config::Problems;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use super::{OpenContext, RowGenerator, Source, SourceData};
use crate::synthetic::fflm::{FlipFlop, FlipFlopTokens, read_bits};
use crate::synthetic::held_out::Part;
use crate::synthetic::packing::{Example, Goal, pack};
use crate::{DataConfig, DataError};

/// How far from 1 the sum of the probabilities may be: users write them as decimals.
const SUM_TOLERANCE: f64 = 1e-9;

/// The keys of `kind = "fflm"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Instructions in a sequence, two tokens each; 2 to `seq_len` / 2. Default 256.
    pub instructions: usize,
    /// Probability that an instruction writes, 0 to 1. Default 0.1.
    pub p_write: f64,
    /// Probability that it reads, 0 to 1. Default 0.1.
    pub p_read: f64,
    /// Probability that it is ignored, 0 to 1; the three sum to 1. Default 0.8.
    pub p_ignore: f64,
    /// Whether only the bits that are read count for the loss: no other token can be predicted.
    /// Default true.
    pub reads_only: bool,
}

impl Default for Config {
    fn default() -> Self {
        Config { instructions: 256, p_write: 0.1, p_read: 0.1, p_ignore: 0.8, reads_only: true }
    }
}

impl Config {
    fn task(&self) -> FlipFlop {
        let Config { instructions, p_write, p_read, .. } = *self;
        FlipFlop { instructions, p_write, p_read }
    }
}

impl Source for Config {
    fn is_generated(&self) -> bool {
        true
    }

    fn validate(&self, key: &str, data: &DataConfig, problems: &mut Problems) {
        problems.check(
            (2..=data.seq_len / 2).contains(&self.instructions),
            format!("{key}.instructions"),
            self.instructions,
            format!("2 to half of data.seq_len = {}", data.seq_len),
            "two tokens are an instruction: lower it, or raise data.seq_len",
        );
        let probabilities =
            [("p_write", self.p_write), ("p_read", self.p_read), ("p_ignore", self.p_ignore)];
        for (name, probability) in probabilities {
            problems.check(
                (0.0..=1.0).contains(&probability),
                format!("{key}.{name}"),
                probability,
                "a probability, 0 to 1",
                "the usual ones are p_write = 0.1, p_read = 0.1, p_ignore = 0.8",
            );
        }
        let sum: f64 = probabilities.iter().map(|(_, probability)| probability).sum();
        problems.check(
            (sum - 1.0).abs() <= SUM_TOLERANCE,
            format!("{key}.p_write + p_read + p_ignore"),
            sum,
            "1",
            "set all three; the defaults are 0.1, 0.1 and 0.8",
        );
        let are_valid = probabilities.iter().all(|(_, p)| (0.0..=1.0).contains(p));
        let entropy = self.task().entropy();
        problems.check(
            entropy >= FlipFlop::LEAST_BITS || !are_valid || self.instructions < 2,
            key,
            format!("a source of sequences with {entropy:.1} bits of randomness"),
            format!("{} bits or more, so that some can be kept for tests", FlipFlop::LEAST_BITS),
            "raise instructions, or lower p_read",
        );
    }

    fn open(&self, context: &OpenContext<'_>) -> Result<SourceData, DataError> {
        let Config { instructions, p_write, p_read, reads_only, .. } = *self;
        let rows = FlipFlopRows {
            task: self.task(),
            tokens: FlipFlopTokens::new(context.tokenizer)?,
            end_of_text: context.tokenizer.end_of_text(),
            reads_only,
            part: context.part(),
            seed: context.generator_seed(),
        };
        let fingerprint = format!("fflm 2 {instructions} {p_write} {p_read} {reads_only}");
        Ok(SourceData::Generated { rows: Box::new(rows), fingerprint })
    }
}

#[derive(Debug)]
struct FlipFlopRows {
    task: FlipFlop,
    tokens: FlipFlopTokens,
    end_of_text: u32,
    reads_only: bool,
    part: Part,
    seed: u64,
}

impl RowGenerator for FlipFlopRows {
    fn fill(&self, index: u64, tokens: &mut [i32], targets: &mut [i32], weights: &mut [f32]) {
        let example = |rng: &mut ChaCha8Rng| {
            let text = self.task.draw(rng, self.part);
            let mut tokens = self.tokens.encode(&text);
            tokens.push(self.end_of_text);
            let goal = match self.reads_only {
                true => Goal::Tokens(read_bits(&text).collect()),
                false => Goal::AllTokens,
            };
            Example { tokens, goal }
        };
        pack((self.seed, index), self.end_of_text, example, (tokens, targets), weights);
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::sources::testing::{Example, generator, row, tokenizer};
    use crate::{SourceConfig, Split};

    impl Example for Config {
        fn example(_folder: &Path) -> Self {
            Config { instructions: 100, p_write: 0.2, p_ignore: 0.7, ..Config::default() }
        }

        fn held_out(example: &[u32]) -> Vec<Vec<u8>> {
            vec![tokenizer().decode(example).into_bytes()]
        }
    }

    fn rows(reads_only: bool, seed: u64, split: Split) -> Box<dyn RowGenerator> {
        let source = Config { reads_only, ..Config::default() };
        generator(&SourceConfig::from(source), 512, seed, split).unwrap()
    }

    #[test]
    fn too_few_different_sequences_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let error = |config: Config| {
            let mut problems = Problems::new();
            let data = crate::sources::testing::config(&dir, 512, Vec::new());
            config.validate("source", &data, &mut problems);
            problems.into_result().map_err(|problems| problems.to_string())
        };
        let only_reads = Config { p_write: 0.0, p_read: 1.0, p_ignore: 0.0, ..Config::default() };
        insta::assert_snapshot!(error(only_reads).unwrap_err(), @r"
        the configuration has 1 problem:
        source is a source of sequences with 1.0 bits of randomness; allowed: 12 bits or more, so that some can be kept for tests
          hint: raise instructions, or lower p_read
        ");
        assert!(error(Config { instructions: 4, ..Config::default() }).is_err());
        assert_eq!(error(Config { instructions: 16, ..Config::default() }), Ok(()));
    }

    #[test]
    fn exactly_the_read_bits_count() {
        let rows = rows(true, 1, Split::Train);
        for index in 0..20 {
            // Two sequences with their ends of text, and some padding.
            let (tokens, weights) = row(&*rows, index, 1100);
            let tokens: Vec<u32> = tokens.iter().map(|&token| token as u32).collect();
            let text = tokenizer().decode(&tokens[..1026]);
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
        let (tokens, weights) = row(&*rows(false, 1, Split::Train), 0, 512);
        let end = tokenizer().end_of_text() as i32;
        assert!(tokens[..512].iter().all(|&token| token != end) && tokens[512] == end);
        assert!(weights.iter().all(|&weight| weight == 1.0), "with all targets, all count");
    }

    #[test]
    fn rows_depend_on_index_and_seed_and_splits_are_disjoint() {
        let row = |seed, split, index| row(&*rows(true, seed, split), index, 512);
        let first = row(1, Split::Train, 7);
        assert_eq!(first, row(1, Split::Train, 7));
        for other in
            [row(1, Split::Train, 8), row(2, Split::Train, 7), row(1, Split::Validation, 7)]
        {
            assert_ne!(first, other);
        }
        assert_eq!(row(1, Split::Validation, 7), row(2, Split::Validation, 7));
    }
}
