//! Multi-query associative recall: the value of each key of a sequence of key–value pairs.
//!
//! The protocol is that of Zoology (Arora et al., 2023): pairs of keys from the lower half of the vocabulary
//! and values from the upper half, then the keys in another order, at places that follow a power law. A
//! prediction at a key is correct if the value is the model's most likely token. The sequences come from
//! [`longwall_data::synthetic::mqar`], from which training can draw too: other sequences, by their hash.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;

use longwall_config::Problems;
use longwall_data::Tokenizer;
use longwall_data::synthetic::held_out::Part;
use longwall_data::synthetic::mqar::{Form, Mqar as Task};
use longwall_data::synthetic::symbols::{Labelled, SymbolTokens};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::counted::{self, Cell, Cells, Counted, Plot};
use super::labelled::{predicted, request, task_error};
use crate::EvalError;
use crate::options::{
    MOST_SAMPLES, check_count, check_lengths, optional_size, parse_size, sample_rng, sizes,
};
use crate::suite::{Answer, OpenContext, Outcome, Request, Scoring, Suite, Trial};

/// Options of `longwall eval mqar`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, clap::Args)]
#[serde(deny_unknown_fields, default)]
pub struct MqarOptions {
    /// Lengths of the sequences, even
    #[arg(long, value_delimiter = ',', value_name = "TOKENS", value_parser = parse_size,
          default_values_t = MqarOptions::default().lengths)]
    #[serde(deserialize_with = "sizes")]
    pub lengths: Vec<usize>,
    /// Numbers of pairs, each at the lengths that have room for it [default: a quarter of the length, and 4
    /// and 8 at length 64; in the other forms as many as fit]
    #[arg(long, value_delimiter = ',', value_name = "COUNT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pairs: Option<Vec<usize>>,
    /// Sequences at each length and number of pairs
    #[arg(long, default_value_t = MqarOptions::default().trials)]
    pub trials: usize,
    /// The form: standard, forgetting (half of the keys get a second value) or compositional (keys of two
    /// symbols)
    #[arg(long, default_value_t)]
    pub form: Form,
    /// Size of the vocabulary [default: 8192, or all tokens of a smaller tokenizer but the end of text]
    #[arg(long, value_parser = parse_size)]
    #[serde(deserialize_with = "optional_size", skip_serializing_if = "Option::is_none")]
    pub vocab: Option<usize>,
    /// Exponent of the power law of the queries' places, above 0; 1 is uniform
    #[arg(long, default_value_t = MqarOptions::default().power)]
    pub power: f64,
}

impl Default for MqarOptions {
    fn default() -> Self {
        MqarOptions {
            lengths: vec![64, 128, 256, 512, 1024],
            pairs: None,
            trials: 1000,
            form: Form::Standard,
            vocab: None,
            power: 0.01,
        }
    }
}

impl MqarOptions {
    fn task(&self, length: usize, pairs: usize, vocab: usize) -> Task {
        let MqarOptions { form, power, .. } = *self;
        Task { form, length, pairs, updates: Task::default_updates(form, pairs), vocab, power }
    }

    fn fits(&self, length: usize, pairs: usize) -> bool {
        pairs > 0 && self.task(length, pairs, 0).least_length() <= length
    }

    /// The numbers of pairs at a length.
    fn pairs(&self, length: usize) -> Vec<usize> {
        let most = |candidate: fn(u32) -> usize| {
            (0..).map(candidate).take_while(|&pairs| pairs == 0 || self.fits(length, pairs)).last()
        };
        let pairs = match (&self.pairs, self.form) {
            (Some(pairs), _) => pairs.clone(),
            (None, Form::Standard) if length == 64 => vec![4, 8, 16],
            (None, Form::Standard) => vec![length / 4],
            (None, Form::Forgetting) => most(|n| 1 << n).into_iter().collect(),
            (None, Form::Compositional) => most(|n| (n as usize).pow(2)).into_iter().collect(),
        };
        pairs.into_iter().filter(|&pairs| self.fits(length, pairs)).collect()
    }
}

/// The suite.
pub struct Mqar {
    options: MqarOptions,
    vocab: usize,
    tokens: SymbolTokens,
    cells: Cells,
    /// The number of pairs of each group.
    pairs: Vec<usize>,
    seed: u64,
    train_seq_len: usize,
}

impl Suite for Mqar {
    type Options = MqarOptions;
    type Verdict = Counted;

    const NAME: &'static str = "mqar";
    const VERSION: u32 = 1;
    /// One for each form.
    const STREAMS: Range<u64> = 22..25;
    const GENERATES: bool = false;

    fn validate(options: &MqarOptions, problems: &mut Problems) {
        check_lengths(Self::NAME, &options.lengths, problems);
        for &length in &options.lengths {
            let pairs = options.pairs(length);
            problems.check(
                !pairs.is_empty() && length.is_multiple_of(2),
                "mqar.lengths",
                length,
                "even lengths with room for the pairs: 4 tokens for each, 5 in the form forgetting, 6 \
                 in the form compositional",
                "the paper's are 64 to 1024",
            );
        }
        for &pairs in options.pairs.iter().flatten() {
            let fits = options.lengths.iter().any(|&length| options.fits(length, pairs));
            problems.check(
                fits && (options.form != Form::Compositional || pairs.isqrt().pow(2) == pairs),
                "mqar.pairs",
                pairs,
                match options.form {
                    Form::Compositional => "square numbers that fit into a length",
                    _ => "1 or more, as fit into a length",
                },
                "the paper's are 4, 8, 16, 64, 128 and 256",
            );
        }
        let remedy = "the paper has 1000";
        check_count("mqar.trials", options.trials, 1..=MOST_SAMPLES, remedy, problems);
        problems.check(
            options.power > 0.0 && options.power <= 1.0,
            "mqar.power",
            options.power,
            "above 0, up to 1",
            "the paper's is 0.01",
        );
    }

    fn open(options: &MqarOptions, context: &OpenContext<'_>) -> Result<Self, EvalError> {
        let OpenContext { tokenizer, seed, train_seq_len, .. } = *context;
        let vocab = options.vocab.unwrap_or(Task::default_vocab(tokenizer));
        let of = |&length: &usize| options.pairs(length).into_iter().map(move |p| (length, p));
        let sizes: Vec<(usize, usize)> = options.lengths.iter().flat_map(of).collect();
        let pairs: Vec<usize> =
            sizes.iter().map(|&(_, pairs)| pairs).collect::<BTreeSet<_>>().into_iter().collect();
        let most = pairs.last().copied().unwrap_or_default();
        let task = options.task(0, most, vocab);
        if task.least_vocab() > vocab {
            return Err(EvalError::Text {
                what: format!(
                    "mqar: {most} pairs need a vocabulary of {} symbols; here it has {vocab}, of the {} \
                     tokens of the tokenizer {}",
                    task.least_vocab(),
                    tokenizer.vocab_size(),
                    tokenizer.name()
                ),
                remedy: "ask for shorter --lengths or fewer --pairs, or evaluate a model with more tokens"
                    .to_string(),
            });
        }
        let tokens = task.tokens(tokenizer).map_err(task_error)?;
        let group = |count| pairs.iter().position(|&pairs| pairs == count).unwrap_or_default();
        let cells = sizes.iter().map(|&(length, count)| Cell { length, group: group(count) });
        Ok(Mqar {
            cells: Cells::new(cells.collect(), options.trials),
            options: options.clone(),
            vocab,
            tokens,
            pairs,
            seed,
            train_seq_len,
        })
    }

    fn resolved(&self) -> Value {
        let pairs = self.cells.iter().map(|cell| json!([cell.length, self.pairs[cell.group]]));
        json!({ "vocab": self.vocab, "lengths_and_pairs": pairs.collect::<Vec<_>>() })
    }

    fn trials(&self) -> Vec<Trial> {
        self.cells.trials()
    }

    fn request(&self, trial: &Trial, _tokenizer: &Tokenizer) -> Result<Request, EvalError> {
        Ok(request(&self.sequence(trial), &self.tokens))
    }

    fn judge(&self, trial: &Trial, _request: &Request, answer: &Answer) -> Counted {
        predicted(answer, &self.sequence(trial), &self.tokens)
    }

    fn sample_score(verdict: &Counted) -> Option<f64> {
        Some(verdict.share())
    }

    fn score(&self, outcomes: &[Outcome<Counted>]) -> Scoring {
        counted::score(outcomes, &self.cells, &self.names())
    }

    fn draw(&self, scoring: &Scoring, title: &str, dir: &Path) -> Result<(), EvalError> {
        let metrics = counted::metrics(&self.names(), |name| name.replace('_', " "));
        let plot = Plot::accuracy("Multi-query associative recall", title);
        counted::draw(scoring, &metrics, &plot, self.train_seq_len, dir)
    }
}

impl Mqar {
    fn names(&self) -> Vec<String> {
        self.pairs.iter().map(|pairs| format!("{pairs}_pairs")).collect()
    }

    fn sequence(&self, trial: &Trial) -> Labelled {
        let (group, place) = self.cells.locate(trial);
        let pairs = self.pairs[group];
        // The number of pairs takes the place of the depth, so that no two groups share their draws.
        let place = Trial { depth: Some(pairs as f64), ..place };
        let mut rng = sample_rng(self.seed, Self::STREAMS.start + self.options.form as u64, &place);
        let task = self.options.task(trial.length, pairs, self.vocab);
        Part::Test.draw(&mut rng, |rng| {
            let sequence = task.draw(rng);
            let content = sequence.content();
            (sequence, content)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_sizes_are_the_papers() {
        let sizes = |options: MqarOptions| -> Vec<(usize, Vec<usize>)> {
            options.lengths.iter().map(|&length| (length, options.pairs(length))).collect()
        };
        let standard = sizes(MqarOptions::default());
        let expected = [(64, vec![4, 8, 16]), (128, vec![32]), (256, vec![64]), (512, vec![128])];
        assert_eq!(standard[..4], expected);
        assert_eq!(standard[4], (1024, vec![256]));
        let form = |form| sizes(MqarOptions { form, ..MqarOptions::default() });
        assert_eq!(form(Form::Forgetting)[..2], [(64, vec![8]), (128, vec![16])]);
        assert_eq!(form(Form::Compositional)[..2], [(64, vec![9]), (128, vec![16])]);
    }
}
