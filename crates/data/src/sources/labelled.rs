//! Rows of generated sequences of symbols, each followed by an end of text, whose labels are the targets.

use std::fmt::{self, Debug};

use rand_chacha::ChaCha8Rng;

use super::{OpenContext, RowGenerator, SourceData};
use crate::synthetic::packing::{Example, Goal, pack};
use crate::synthetic::symbols::{Labelled, SymbolTokens};

/// Draws a sequence.
type Draw = dyn Fn(&mut ChaCha8Rng) -> Labelled + Send + Sync;

/// The rows of one split. Only labels count for the loss.
struct LabelledRows {
    draw: Box<Draw>,
    tokens: SymbolTokens,
    end_of_text: u32,
    seed: u64,
}

/// The rows of a source that draws sequences: those of the split that `context` opens.
pub(super) fn labelled_rows(
    context: &OpenContext<'_>,
    tokens: SymbolTokens,
    fingerprint: String,
    draw: impl Fn(&mut ChaCha8Rng) -> Labelled + Send + Sync + 'static,
) -> SourceData {
    let part = context.part();
    let draw = move |rng: &mut ChaCha8Rng| {
        part.draw(rng, |rng| {
            let sequence = draw(rng);
            let content = sequence.content();
            (sequence, content)
        })
    };
    let rows = LabelledRows {
        draw: Box::new(draw),
        tokens,
        end_of_text: context.tokenizer.end_of_text(),
        seed: context.generator_seed(),
    };
    SourceData::Generated { rows: Box::new(rows), fingerprint }
}

impl Debug for LabelledRows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LabelledRows").field("seed", &self.seed).finish_non_exhaustive()
    }
}

impl RowGenerator for LabelledRows {
    fn fill(&self, index: u64, tokens: &mut [i32], targets: &mut [i32], weights: &mut [f32]) {
        let example = |rng: &mut ChaCha8Rng| {
            let Labelled { symbols, labels } = (self.draw)(rng);
            let mut tokens = self.tokens.encode(&symbols);
            tokens.push(self.end_of_text);
            let label = |(place, symbol)| (place, self.tokens.token(symbol));
            Example { tokens, goal: Goal::Labels(labels.into_iter().map(label).collect()) }
        };
        let seed = (self.seed, index);
        pack(seed, self.end_of_text, example, (tokens, targets), weights);
    }
}

#[cfg(test)]
pub(super) mod testing {
    use std::collections::HashSet;

    use crate::sources::testing::{generator, labelled_row};
    use crate::synthetic::held_out::Part;
    use crate::{SourceConfig, Split};

    /// The sequences of rows: symbols, and the labels by position.
    pub(crate) type Sequences = Vec<(Vec<u32>, Vec<(usize, u32)>)>;

    /// The sequences in rows of `seq_len` byte tokens.
    pub(crate) fn sequences(source: &SourceConfig, split: Split, seq_len: usize) -> Sequences {
        let rows = generator(source, seq_len, 1, split).unwrap();
        let mut found = vec![];
        for index in 0..20 {
            let (tokens, targets, weights) = labelled_row(&*rows, index, seq_len);
            let mut start = 0;
            for end in (0..tokens.len()).filter(|&at| tokens[at] == 256) {
                let labelled = (start..end).filter(|&at| weights[at] == 1.0);
                let labels: Vec<_> = labelled.map(|at| (at - start, targets[at] as u32)).collect();
                if end > start {
                    let symbols = tokens[start..end].iter().map(|&token| token as u32).collect();
                    found.push((symbols, labels));
                }
                start = end + 1;
            }
            let ends = weights.iter().zip(&tokens).filter(|(_, token)| **token == 256);
            assert!(ends.into_iter().all(|(&weight, _)| weight == 0.0));
        }
        found
    }

    /// Sequences of the two splits are of the two parts, which have nothing in common.
    pub(crate) fn splits_are_disjoint(source: &SourceConfig, seq_len: usize) {
        let content = |split| -> HashSet<Vec<u8>> {
            let sequences = sequences(source, split, seq_len);
            assert!(!sequences.is_empty());
            let bytes = |symbols: &Vec<u32>| symbols.iter().flat_map(|s| s.to_le_bytes()).collect();
            sequences.iter().map(|(symbols, _)| bytes(symbols)).collect()
        };
        let (train, test) = (content(Split::Train), content(Split::Validation));
        assert!(train.iter().all(|content| Part::of(content) == Part::Train));
        assert!(test.iter().all(|content| Part::of(content) == Part::Test));
        assert!(train.is_disjoint(&test));
    }
}
