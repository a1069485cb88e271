//! Held-out text for suites that read the same tokens at several context lengths: stretches of the longest length,
//! from single or joined documents.

use std::path::PathBuf;

use longwall_config::Problems;
use longwall_data::Tokenizer;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::EvalError;
use crate::options::check_lengths;
use crate::suite::{OpenContext, Trial};
use crate::text::{Document, list_files, no_text, read_document, source_of};

/// Default lengths stop where the text has fewer stretches than this, or than requested.
const FEWEST: usize = 4;

/// What a suite's options say about its text.
pub(super) struct TextOptions<'a> {
    /// The suite's name.
    pub suite: &'static str,
    /// The lengths, if the user set them.
    pub lengths: Option<&'a [usize]>,
    /// Stretches to read.
    pub sequences: usize,
    /// Files or folders; if none, the run's validation split.
    pub text: &'a [PathBuf],
    /// Whether documents of `text` are joined.
    pub packed: bool,
}

impl TextOptions<'_> {
    /// Records lengths that do not divide the longest, and `packed` without `text`.
    pub(super) fn validate(&self, problems: &mut Problems) {
        let suite = self.suite;
        if let Some(lengths) = self.lengths {
            check_lengths(suite, lengths, problems);
            let longest = lengths.iter().copied().max().unwrap_or(0);
            for &length in lengths.iter().filter(|&&length| length > 0) {
                problems.check(
                    longest % length == 0,
                    format!("{suite}.lengths"),
                    length,
                    format!("divisors of the longest length, {longest}"),
                    "use powers of two: all lengths are scored on the same tokens",
                );
            }
        }
        problems.check(
            !self.packed || !self.text.is_empty(),
            format!("{suite}.packed"),
            format!("true without {suite}.text"),
            "only beside --text",
            "leave out --packed: the validation split is packed anyway",
        );
    }
}

/// The stretches, each of the longest length plus one token.
pub(super) struct Stretches {
    lengths: Vec<usize>,
    left_out: Vec<usize>,
    stretches: Vec<Stretch>,
    source: String,
    packed: bool,
}

struct Stretch {
    /// Index of its document; a stretch of joined documents counts as one document.
    document: usize,
    name: String,
    tokens: Vec<u32>,
}

impl Stretches {
    /// Reads as much text as the options need. Without lengths, they are those of `default_lengths` for which the
    /// text is long enough.
    pub(super) fn open(
        options: &TextOptions<'_>,
        default_lengths: Vec<usize>,
        context: &OpenContext<'_>,
    ) -> Result<Self, EvalError> {
        let mut lengths = options.lengths.map_or(default_lengths, <[usize]>::to_vec);
        lengths.sort_unstable();
        let longest = lengths.last().copied().unwrap_or(1);
        let text = Text::read(options, context, longest)?;

        let mut left_out = Vec::new();
        if options.lengths.is_none() {
            let enough = options.sequences.min(FEWEST);
            while lengths.len() > 1 && text.slots(lengths[lengths.len() - 1]) < enough {
                left_out.extend(lengths.pop());
            }
        }
        let longest = lengths.last().copied().unwrap_or(1);
        if text.slots(longest) == 0 {
            return Err(text.too_short(options.suite, longest));
        }
        left_out.reverse();
        if !left_out.is_empty() {
            tracing::warn!(
                "the text is too short for lengths {left_out:?}: the longest here is {longest}"
            );
        }
        let stretches = text.stretches(longest, options.sequences, context.seed);
        if stretches.len() < options.sequences {
            tracing::warn!(
                "the text has {} stretches of {longest} tokens; {} were asked for",
                stretches.len(),
                options.sequences
            );
        }
        Ok(Stretches { lengths, left_out, stretches, source: text.source, packed: text.packed })
    }

    /// A trial for each window of each length, by increasing length. A trial's index counts windows: first those of
    /// the first stretch, then of the second, and so on.
    pub(super) fn trials(&self) -> Vec<Trial> {
        let mut list = Vec::new();
        for &length in &self.lengths {
            for index in 0..self.windows(length) {
                list.push(Trial { id: list.len() as u64, length, depth: None, index });
            }
        }
        list
    }

    /// The longest length.
    pub(super) fn longest(&self) -> usize {
        self.lengths[self.lengths.len() - 1]
    }

    fn per_stretch(&self, length: usize) -> usize {
        self.longest() / length
    }

    /// Number of windows of a length.
    fn windows(&self, length: usize) -> usize {
        self.stretches.len() * self.per_stretch(length)
    }

    /// The `length + 1` tokens of a window.
    pub(super) fn window(&self, length: usize, index: usize) -> &[u32] {
        let count = self.per_stretch(length);
        let start = index % count * length;
        &self.stretches[index / count].tokens[start..start + length + 1]
    }

    /// The document of a window.
    pub(super) fn document(&self, length: usize, index: usize) -> usize {
        self.stretches[index / self.per_stretch(length)].document
    }

    /// Describes the text for the report; its hash ensures that a resumed evaluation has the same.
    pub(super) fn describe(&self) -> Value {
        let mut hash = Sha256::new();
        for stretch in &self.stretches {
            let bytes: Vec<u8> = stretch.tokens.iter().flat_map(|t| t.to_le_bytes()).collect();
            hash.update(&bytes);
        }
        let mut documents: Vec<&str> = self.stretches.iter().map(|s| s.name.as_str()).collect();
        documents.sort_unstable();
        documents.dedup();
        json!({
            "lengths": self.lengths,
            "lengths_left_out": self.left_out,
            "sequences": self.stretches.len(),
            "text": self.source,
            "packed": self.packed,
            "documents": if self.packed { Vec::new() } else { documents },
            "text_sha256": format!("{:x}", hash.finalize()),
        })
    }
}

/// The documents the stretches come from; joined text is a single one.
struct Text {
    documents: Vec<Document>,
    source: String,
    packed: bool,
}

impl Text {
    fn read(
        options: &TextOptions<'_>,
        context: &OpenContext<'_>,
        longest: usize,
    ) -> Result<Self, EvalError> {
        let tokenizer = context.tokenizer;
        let wanted = options.sequences.saturating_mul(longest).saturating_add(1);
        if options.text.is_empty() {
            let held_out = context.held_out.ok_or_else(|| no_text(options.suite))?;
            let source = held_out.describe();
            let tokens = held_out.validation_tokens(wanted)?;
            let documents = vec![Document { name: source.clone(), tokens }];
            return Ok(Text { documents, source, packed: true });
        }
        let mut files = list_files(options.text)?;
        let source = source_of(&files);
        files.shuffle(&mut ChaCha8Rng::seed_from_u64(context.seed));
        let mut documents = Vec::new();
        if options.packed {
            let name = source.clone();
            documents.push(Document { name, tokens: joined(&files, tokenizer, wanted)? });
        } else {
            let mut long_ones = 0;
            for file in files {
                let document = read_document(&file, tokenizer)?;
                long_ones += usize::from(document.tokens.len() > longest);
                documents.push(document);
                if long_ones == options.sequences {
                    break;
                }
            }
        }
        Ok(Text { documents, source, packed: options.packed })
    }

    /// How many adjacent stretches of a length fit into the text.
    fn slots(&self, length: usize) -> usize {
        self.documents.iter().map(|document| slots(document, length)).sum()
    }

    fn too_short(&self, suite: &str, length: usize) -> EvalError {
        let most = self.documents.iter().map(|d| d.tokens.len()).max().unwrap_or(0);
        let (what, remedy) = match self.packed {
            true => ("the text", "give more text, or shorter --lengths"),
            false => (
                "the longest document",
                "give longer documents, shorter --lengths, or --packed to join short documents",
            ),
        };
        EvalError::Text {
            what: format!(
                "{suite}: {what} has {most} tokens ({}); length {length} needs {}",
                self.source,
                length + 1
            ),
            remedy: remedy.to_string(),
        }
    }

    /// `count` stretches, or as many as there are: first one of every document, then a second one of
    /// each, and so on.
    ///
    /// Within a document, stretches start at a random place, so that they are not all beginnings.
    fn stretches(&self, length: usize, count: usize, seed: u64) -> Vec<Stretch> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(1);
        let mut starts: Vec<Vec<usize>> = Vec::new();
        for document in &self.documents {
            let slots = slots(document, length);
            let spare = (document.tokens.len().saturating_sub(1)) - slots * length;
            let offset = rng.random_range(0..=spare);
            let mut places: Vec<usize> = (0..slots).map(|slot| offset + slot * length).collect();
            places.shuffle(&mut rng);
            starts.push(places);
        }
        let rounds = starts.iter().map(Vec::len).max().unwrap_or(0);
        let mut stretches = Vec::new();
        for round in 0..rounds {
            for (at, (document, starts)) in self.documents.iter().zip(&starts).enumerate() {
                if let Some(&start) = starts.get(round).filter(|_| stretches.len() < count) {
                    stretches.push(Stretch {
                        document: if self.packed { stretches.len() } else { at },
                        name: document.name.clone(),
                        tokens: document.tokens[start..start + length + 1].to_vec(),
                    });
                }
            }
        }
        stretches
    }
}

fn slots(document: &Document, length: usize) -> usize {
    document.tokens.len().saturating_sub(1) / length
}

/// Documents in the order of `files`, each followed by end of text, until there are enough tokens. Empty
/// files are left out: a text of nothing but end of text is none.
fn joined(
    files: &[std::path::PathBuf],
    tokenizer: &Tokenizer,
    wanted: usize,
) -> Result<Vec<u32>, EvalError> {
    let mut tokens = Vec::new();
    for file in files {
        if tokens.len() >= wanted {
            break;
        }
        let document = read_document(file, tokenizer)?.tokens;
        if !document.is_empty() {
            tokens.extend(document);
            tokens.push(tokenizer.end_of_text());
        }
    }
    Ok(tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(lengths: &[usize]) -> Text {
        let documents = lengths.iter().enumerate().map(|(n, &length)| Document {
            name: format!("{n}.txt"),
            tokens: (0..length as u32).map(|t| t + 10_000 * n as u32).collect(),
        });
        Text { documents: documents.collect(), source: "test".to_string(), packed: false }
    }

    #[test]
    fn every_document_gives_one_stretch_before_any_gives_two() {
        let stretches = text(&[350, 90, 101, 201]).stretches(100, 4, 0);
        let documents: Vec<usize> = stretches.iter().map(|s| s.document).collect();
        assert_eq!(documents, [0, 2, 3, 0]);
        for stretch in &stretches {
            assert_eq!(stretch.tokens.len(), 101);
            assert!(stretch.tokens.iter().all(|t| (t / 10_000) as usize == stretch.document));
        }
        assert_eq!(text(&[350, 90, 101, 201]).stretches(100, 99, 0).len(), 6);
    }

    #[test]
    fn stretches_of_a_document_do_not_overlap() {
        let stretches = text(&[1050]).stretches(100, 10, 7);
        assert_eq!(stretches.len(), 10);
        // The last token of one may be the first of the next, and is predicted only once.
        let mut predicted: Vec<u32> =
            stretches.iter().flat_map(|s| s.tokens[1..].iter().copied()).collect();
        predicted.sort_unstable();
        predicted.dedup();
        assert_eq!(predicted.len(), 1000);
    }

    #[test]
    fn windows_of_all_lengths_predict_the_same_tokens() {
        let text = text(&[401, 401]);
        let stretches = Stretches {
            lengths: vec![25, 100, 400],
            left_out: Vec::new(),
            stretches: text.stretches(400, 2, 0),
            source: String::new(),
            packed: false,
        };
        let predicted = |length: usize| -> Vec<u32> {
            (0..stretches.windows(length))
                .flat_map(|index| stretches.window(length, index)[1..].to_vec())
                .collect()
        };
        assert_eq!(predicted(25), predicted(400));
        assert_eq!(predicted(100), predicted(400));
        assert_eq!((stretches.document(100, 3), stretches.document(100, 4)), (0, 1));
    }
}
