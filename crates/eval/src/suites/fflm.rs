//! Flip-flop language modelling: the error rate of the bits after read instructions.
//!
//! The protocol is that of Liu et al. (2023), as in the PaTH paper (section 4.1): sequences of 256
//! instructions from three distributions: 80 % ignored (in distribution, as in training), 98 %
//! (sparse: long distances) and 10 % (dense: many writes to choose from); the other instructions are
//! half writes, half reads. The model reads the true sequence. A bit is correct if it has more than
//! half of the probability, more than all other tokens together; if the model gives nearly all of it
//! to the two bits, that is the greedy answer. The sequences come from
//! [`longwall_data::synthetic::fflm`], from which training can draw too: other sequences.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use longwall_config::Problems;
use longwall_data::Tokenizer;
use longwall_data::synthetic::fflm::{FlipFlop, FlipFlopTokens, read_bits};
use longwall_data::synthetic::held_out::Part;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::EvalError;
use crate::options::{MOST_SAMPLES, check_count, check_lengths, parse_size, sample_rng, sizes};
use crate::plot::{LineChart, Point, Scale, Series, WILSON_BARS};
use crate::report::Score;
use crate::stats::Estimate;
use crate::suite::{Answer, ModelCall, OpenContext, Outcome, Request, Scoring, Suite, Trial};

/// A distribution of sequences.
struct Set {
    name: &'static str,
    /// Its name in plots.
    label: &'static str,
    /// Share of instructions that are ignored.
    p_ignore: f64,
    /// Sequences at each length: those of the protocol, and fewer on a CPU.
    sequences: [usize; 2],
}

const SETS: [Set; 3] = [
    Set {
        name: "in_distribution",
        label: "in distribution (80 % ignored)",
        p_ignore: 0.8,
        sequences: [16_000, 1_000],
    },
    Set {
        name: "sparse",
        label: "sparse (98 % ignored)",
        p_ignore: 0.98,
        sequences: [160_000, 10_000],
    },
    Set { name: "dense", label: "dense (10 % ignored)", p_ignore: 0.1, sequences: [4_000, 250] },
];

/// The shortest sequences, in tokens, of which every set has many.
const LEAST_LENGTH: usize = 24;

/// Options of `longwall eval fflm`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, clap::Args)]
#[serde(deny_unknown_fields, default)]
pub struct FflmOptions {
    /// Lengths of the sequences in tokens, two for each instruction
    #[arg(long, value_delimiter = ',', value_name = "TOKENS", value_parser = parse_size,
          default_values_t = FflmOptions::default().lengths)]
    #[serde(deserialize_with = "sizes")]
    pub lengths: Vec<usize>,
    /// Sequences at each length, drawn as in training (80 % of the instructions ignored)
    /// [default: 16,000; 1,000 on a CPU]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sequences: Option<usize>,
    /// Sequences at each length with 98 % ignored [default: 160,000; 10,000 on a CPU]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sparse_sequences: Option<usize>,
    /// Sequences at each length with 10 % ignored [default: 4,000; 250 on a CPU]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dense_sequences: Option<usize>,
}

impl Default for FflmOptions {
    fn default() -> Self {
        FflmOptions {
            lengths: vec![512],
            sequences: None,
            sparse_sequences: None,
            dense_sequences: None,
        }
    }
}

impl FflmOptions {
    /// The requested numbers of sequences, in the order of [`SETS`].
    fn sequences(&self) -> [(&'static str, Option<usize>); SETS.len()] {
        [
            ("sequences", self.sequences),
            ("sparse_sequences", self.sparse_sequences),
            ("dense_sequences", self.dense_sequences),
        ]
    }
}

/// The read instructions of one sequence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reads {
    /// How many there are, at least 1.
    pub reads: usize,
    /// How many the model gets wrong.
    pub errors: usize,
}

/// The suite.
pub struct Fflm {
    options: FflmOptions,
    tokens: FlipFlopTokens,
    /// Sequences of each set at each length.
    sequences: [usize; SETS.len()],
    seed: u64,
    train_seq_len: usize,
}

impl Fflm {
    /// A trial's set, and the trial's index among the set's trials of this length: a trial's own index
    /// counts first those of the first set, then of the second, and so on.
    fn set_of(&self, trial: &Trial) -> (usize, usize) {
        let mut index = trial.index;
        for (set, &sequences) in self.sequences.iter().enumerate() {
            if index < sequences {
                return (set, index);
            }
            index -= sequences;
        }
        unreachable!("trial {} of {:?} sequences", trial.index, self.sequences)
    }

    fn task(&self, set: usize, length: usize) -> FlipFlop {
        FlipFlop::ignoring(length / 2, SETS[set].p_ignore)
    }

    /// The error rate of one set at one length. Bits of one sequence are not independent: the
    /// interval is over sequences.
    fn error_rate(&self, outcomes: &[&Outcome<Reads>]) -> Estimate {
        Estimate::clustered_proportion(outcomes.iter().flat_map(|outcome| {
            let Reads { reads, errors } = outcome.verdict;
            let id = outcome.trial.id;
            (0..reads).map(move |read| (id, f64::from(u8::from(read < errors))))
        }))
    }
}

impl Suite for Fflm {
    type Options = FflmOptions;
    type Verdict = Reads;

    const NAME: &'static str = "fflm";
    const VERSION: u32 = 2;
    /// One for each set.
    const STREAMS: Range<u64> = 10..10 + SETS.len() as u64;
    const GENERATES: bool = false;

    fn validate(options: &FflmOptions, problems: &mut Problems) {
        check_lengths(Self::NAME, &options.lengths, problems);
        for &length in options.lengths.iter().filter(|&&length| length > 0) {
            problems.check(
                length >= LEAST_LENGTH && length.is_multiple_of(2),
                "fflm.lengths",
                length,
                format!(
                    "even lengths of {LEAST_LENGTH} or more: an instruction is two tokens, and shorter sequences \
                     are too few to keep some from training"
                ),
                "the paper's is 512",
            );
        }
        for (name, sequences) in options.sequences() {
            let remedy = "leave it out for the default";
            let value = sequences.unwrap_or(1);
            check_count(format!("fflm.{name}"), value, 1..=MOST_SAMPLES, remedy, problems);
        }
    }

    fn open(options: &FflmOptions, context: &OpenContext<'_>) -> Result<Self, EvalError> {
        let tokens = FlipFlopTokens::new(context.tokenizer).map_err(|error| {
            // The error's own hint is for training.
            let error = error.to_string();
            EvalError::Text {
                what: format!("fflm: {}", error.split("\n  hint: ").next().unwrap_or(&error)),
                remedy: "evaluate a model with another tokenizer, for example bytes".to_string(),
            }
        })?;
        let asked = options.sequences();
        let share = usize::from(context.device == "cpu");
        let sequences =
            std::array::from_fn(|set| asked[set].1.unwrap_or(SETS[set].sequences[share]));
        let OpenContext { seed, train_seq_len, .. } = *context;
        Ok(Fflm { options: options.clone(), tokens, sequences, seed, train_seq_len })
    }

    fn resolved(&self) -> Value {
        let sequences: BTreeMap<&str, usize> =
            SETS.iter().map(|set| set.name).zip(self.sequences).collect();
        json!({ "sequences": sequences })
    }

    fn trials(&self) -> Vec<Trial> {
        let mut lengths = self.options.lengths.clone();
        lengths.sort_unstable();
        // The options' bounds keep this far from overflow.
        let sequences: usize = self.sequences.iter().sum();
        let mut list = Vec::new();
        for length in lengths {
            for index in 0..sequences {
                list.push(Trial { id: list.len() as u64, length, depth: None, index });
            }
        }
        list
    }

    fn request(&self, trial: &Trial, _tokenizer: &Tokenizer) -> Result<Request, EvalError> {
        let (set, index) = self.set_of(trial);
        let place = Trial { index, ..trial.clone() };
        let mut rng = sample_rng(self.seed, Self::STREAMS.start + set as u64, &place);
        let prompt = self.task(set, trial.length).draw(&mut rng, Part::Test);
        let tokens = self.tokens.encode(&prompt);
        Ok(Request {
            call: ModelCall::RollingLogLikelihood { tokens },
            prompt,
            expected: None,
            depth: None,
        })
    }

    fn judge(&self, _trial: &Trial, request: &Request, answer: &Answer) -> Reads {
        let Answer::TokenLogProbs(values) = answer else {
            unreachable!("a rolling log-likelihood was answered by {answer:?}");
        };
        let mut verdict = Reads { reads: 0, errors: 0 };
        for place in read_bits(&request.prompt) {
            verdict.reads += 1;
            // The first token has no value. NaN counts as wrong.
            let right = f64::from(values[place - 1]) > 0.5f64.ln();
            verdict.errors += usize::from(!right);
        }
        verdict
    }

    fn score(&self, outcomes: &[Outcome<Reads>]) -> Scoring {
        let mut scores = Vec::new();
        let mut headline = BTreeMap::new();
        let mut intervals = Vec::new();
        for outcomes in outcomes.chunk_by(|a, b| a.trial.length == b.trial.length) {
            let length = outcomes[0].trial.length;
            for (set, Set { name, .. }) in SETS.iter().enumerate() {
                let outcomes: Vec<&Outcome<Reads>> =
                    outcomes.iter().filter(|o| self.set_of(&o.trial).0 == set).collect();
                let estimate = self.error_rate(&outcomes);
                headline.insert(format!("error_{name}@{length}"), estimate);
                intervals.push(json!({
                    "set": name,
                    "length": length,
                    "sequences": outcomes.len(),
                    "errors": outcomes.iter().map(|o| o.verdict.errors).sum::<usize>(),
                    "confidence_95": [estimate.low, estimate.high],
                }));
                let metric = format!("error_{name}");
                scores.push(Score { metric, length: Some(length), depth: None, estimate });
            }
        }
        let details = json!({ "error_rates": intervals });
        Scoring { headline, scores, details, ..Scoring::default() }
    }

    fn draw(&self, scoring: &Scoring, title: &str, dir: &Path) -> Result<(), EvalError> {
        let series = SETS.iter().enumerate().map(|(colour, set)| {
            let metric = format!("error_{}", set.name);
            let scores = scoring.scores.iter().filter(|score| score.metric == metric);
            let points = scores.filter_map(|score| {
                Some(Point {
                    x: score.length? as f64,
                    y: score.estimate.value?,
                    bar: score.estimate.bar(),
                })
            });
            let points = points.collect();
            let name = set.label.to_string();
            Series { name, points, colour, faint: false, dots: true, band: false }
        });
        let chart = LineChart {
            title: format!("Flip-flop read errors: {title}"),
            x_label: "length (tokens)".to_string(),
            y_label: "error rate of the bits read".to_string(),
            x_scale: Scale::Log2,
            y_scale: Scale::Linear,
            y_range: Some((0.0, 1.0)),
            note: Some(WILSON_BARS.to_string()),
            series: series.collect(),
            boundary: Some((self.train_seq_len as f64, "training length".to_string())),
        };
        chart.save(&dir.join("errors.svg"))
    }
}

#[cfg(test)]
mod tests {
    use longwall_data::TokenizerConfig;

    use super::*;

    fn open(options: &FflmOptions, device: &str) -> Fflm {
        let tokenizer = &Tokenizer::load(&TokenizerConfig::Bytes).unwrap();
        let context = OpenContext {
            tokenizer,
            train_seq_len: 512,
            max_len: None,
            device,
            seed: 0,
            held_out: None,
            metrics: &[],
        };
        Fflm::open(options, &context).unwrap()
    }

    #[test]
    fn a_cpu_takes_a_sixteenth_unless_told_otherwise() {
        let options = FflmOptions::default();
        assert_eq!(open(&options, "cuda").sequences, [16_000, 160_000, 4_000]);
        assert_eq!(open(&options, "cpu").sequences, [1_000, 10_000, 250]);
        let options = FflmOptions { sparse_sequences: Some(7), ..options };
        assert_eq!(open(&options, "cpu").sequences, [1_000, 7, 250]);
    }

    #[test]
    fn the_shortest_sequences_are_many() {
        for set in SETS {
            let entropy = |length| FlipFlop::ignoring(length / 2, set.p_ignore).entropy();
            assert!(entropy(LEAST_LENGTH) >= FlipFlop::LEAST_BITS, "{}", entropy(LEAST_LENGTH));
        }
    }

    #[test]
    fn sequences_do_not_depend_on_how_many_there_are_of_other_sets() {
        let request = |sequences, index| {
            let suite = open(&FflmOptions { sequences: Some(sequences), ..Default::default() }, "");
            let trial = Trial { id: 0, length: 64, depth: None, index };
            suite.request(&trial, &Tokenizer::load(&TokenizerConfig::Bytes).unwrap()).unwrap()
        };
        assert_eq!(request(5, 5 + 3), request(9, 9 + 3));
        assert_ne!(request(5, 5 + 3), request(9, 3));
    }
}
