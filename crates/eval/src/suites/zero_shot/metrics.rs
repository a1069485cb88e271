//! The metrics of zero-shot tasks.
//!
//! With ln p_i of option i given its context, c_i the characters of the option without the space before it, u_i
//! its log-likelihood without the question, and g the right option:
//!
//! - `acc`: 1 if argmax_i ln p_i = g. For a task with one answer: 1 if greedy decoding gives it;
//! - `acc_norm`: 1 if argmax_i ln p_i / c_i = g;
//! - `acc_mutual_info`: 1 if argmax_i (ln p_i − u_i) = g;
//! - `bits_per_byte`: −ln p_g / (b_g · ln 2), with b_g the bytes whose probability ln p_g is, in UTF-8;
//! - `perplexity`: exp of the mean of −ln p_g over documents, for tasks with one answer.
//!
//! The first of equal options wins. These are the definitions of lm-evaluation-harness; bits per byte are its
//! own for rolling log-likelihoods, here of the right answer.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::document::{Document, Pair};
use super::encode::moved_space;
use crate::stats::Estimate;

/// What the model gave for a document.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Scored {
    /// ln p of the options, then of the unconditional requests; none if it is infinite or not a number.
    pub log_p: Vec<Option<f64>>,
    /// Whether greedy decoding gives each.
    pub greedy: Vec<bool>,
}

/// A metric of a document, whose mean is that of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Metric {
    Accuracy,
    AccuracyPerCharacter,
    AccuracyByMutualInformation,
    BitsPerByte,
    Perplexity,
}

use Metric::{
    Accuracy, AccuracyByMutualInformation, AccuracyPerCharacter, BitsPerByte, Perplexity,
};

impl Metric {
    pub(super) const ALL: [Metric; 5] =
        [Accuracy, AccuracyPerCharacter, AccuracyByMutualInformation, BitsPerByte, Perplexity];

    /// Those that a document has.
    pub(super) fn of(document: &Document) -> Vec<Metric> {
        match (document.is_choice(), document.unconditional.is_empty()) {
            (true, true) => vec![Accuracy, AccuracyPerCharacter, BitsPerByte],
            (true, false) => {
                vec![Accuracy, AccuracyPerCharacter, AccuracyByMutualInformation, BitsPerByte]
            }
            (false, _) => vec![Accuracy, BitsPerByte, Perplexity],
        }
    }

    /// As lm-evaluation-harness names it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Accuracy => "acc",
            AccuracyPerCharacter => "acc_norm",
            AccuracyByMutualInformation => "acc_mutual_info",
            BitsPerByte => "bits_per_byte",
            Perplexity => "perplexity",
        }
    }

    pub(super) fn higher_is_better(self) -> bool {
        self.is_share()
    }

    /// Whether it is 0 or 1 for each document.
    fn is_share(self) -> bool {
        matches!(self, Accuracy | AccuracyPerCharacter | AccuracyByMutualInformation)
    }

    /// Its value for a document; −ln p for perplexity. None if a log-likelihood it needs is not finite.
    pub(super) fn of_document(self, document: &Document, scored: &Scored) -> Option<f64> {
        let Document { options, gold, .. } = document;
        let log_p = |range: std::ops::Range<usize>| -> Option<Vec<f64>> {
            scored.log_p[range].iter().copied().collect()
        };
        let count = options.len();
        let right = |values: Vec<f64>| f64::from(u8::from(argmax(&values) == *gold));
        match self {
            Accuracy if !document.is_choice() => {
                scored.log_p[0].map(|_| f64::from(u8::from(scored.greedy[0])))
            }
            Accuracy => log_p(0..count).map(right),
            AccuracyPerCharacter => {
                let per = |(log_p, pair): (f64, &Pair)| log_p / characters(pair) as f64;
                let values = log_p(0..count)?.into_iter().zip(options).map(per);
                Some(right(values.collect()))
            }
            AccuracyByMutualInformation => {
                let (with, without) = (log_p(0..count)?, log_p(count..2 * count)?);
                Some(right(
                    with.iter().zip(&without).map(|(with, without)| with - without).collect(),
                ))
            }
            BitsPerByte => {
                let pair = &options[*gold];
                let bytes = moved_space(&pair.context).len() + pair.continuation.len();
                let bits = -scored.log_p[*gold]? / std::f64::consts::LN_2;
                Some(bits / bytes.max(1) as f64)
            }
            Perplexity => scored.log_p[*gold].map(|log_p| -log_p),
        }
    }

    /// Mean over documents, with the standard error of a mean.
    fn mean(self, values: &[Option<f64>]) -> Estimate {
        let values = values.iter().map(|value| value.unwrap_or(f64::NAN));
        let mean = Estimate::clustered(values.enumerate().map(|(at, value)| (at as u64, value)));
        if self == Perplexity { mean.exp() } else { mean }
    }

    /// [`mean`](Self::mean), for a share with Wilson's interval.
    fn estimate(self, values: &[Option<f64>]) -> Estimate {
        let right = values.iter().filter(|value| **value == Some(1.0)).count();
        match values.iter().all(Option::is_some) && self.is_share() {
            true => Estimate::proportion(right, values.len()),
            false => self.mean(values),
        }
    }
}

/// Index of the first of the largest values.
fn argmax(values: &[f64]) -> usize {
    (1..values.len()).fold(0, |best, at| if values[at] > values[best] { at } else { best })
}

/// Characters of an option without the space before it; at least 1.
fn characters(pair: &Pair) -> usize {
    let text = pair.continuation.strip_prefix(' ').unwrap_or(&pair.continuation);
    text.chars().count().max(1)
}

/// The scores of a task.
pub(super) struct TaskScores {
    pub name: String,
    /// Solved examples in the prompt, if known.
    pub shots: Option<u32>,
    pub documents: usize,
    /// Whether its documents have options.
    pub choice: bool,
    /// The accuracy of guessing among the options.
    pub chance: Option<f64>,
    /// Hash of its documents, prompts and targets.
    pub hash: String,
    /// Means with standard errors.
    pub means: BTreeMap<Metric, Estimate>,
    /// The same, shares with Wilson's interval.
    pub estimates: BTreeMap<Metric, Estimate>,
}

/// The means of the metrics that all of some documents have.
pub(super) fn score<'a>(
    documents: impl IntoIterator<Item = (&'a Document, &'a Scored)>,
) -> (BTreeMap<Metric, Estimate>, BTreeMap<Metric, Estimate>) {
    let documents: Vec<_> = documents.into_iter().collect();
    let shared = Metric::ALL.into_iter().filter(|metric| {
        documents.iter().all(|(document, _)| Metric::of(document).contains(metric))
    });
    let values = shared.map(|metric| {
        let value =
            |&(document, scored): &(&Document, &Scored)| metric.of_document(document, scored);
        (metric, documents.iter().map(value).collect::<Vec<_>>())
    });
    let values: Vec<(Metric, Vec<Option<f64>>)> = values.collect();
    let of = |estimate: fn(Metric, &[Option<f64>]) -> Estimate| {
        values.iter().map(|(metric, values)| (*metric, estimate(*metric, values))).collect()
    };
    (of(Metric::mean), of(Metric::estimate))
}

/// The unweighted mean of each metric over the tasks that have it, where two or more do, with the standard error
/// √(Σ error²) / tasks.
pub(super) fn group_means(tasks: &[&TaskScores]) -> BTreeMap<Metric, Estimate> {
    let mean = |metric: Metric| {
        let of: Vec<&Estimate> = tasks.iter().filter_map(|task| task.means.get(&metric)).collect();
        if of.len() < 2 {
            return None;
        }
        let count = of.len() as f64;
        let sum: Option<f64> = of.iter().map(|estimate| estimate.value).sum();
        let errors: Option<f64> =
            of.iter().map(|estimate| estimate.standard_error.map(|error| error * error)).sum();
        let samples = of.iter().map(|estimate| estimate.samples).sum();
        let value = sum.map(|sum| sum / count);
        let standard_error = errors.map(|sum| sum.sqrt() / count);
        Some((metric, Estimate { value, standard_error, samples, ..Estimate::default() }))
    };
    // Perplexities of different texts have no meaningful mean.
    Metric::ALL.into_iter().filter(|metric| *metric != Perplexity).filter_map(mean).collect()
}

#[cfg(test)]
mod tests {
    use std::f64::consts::LN_2;

    use super::*;

    fn document(context: &str, options: &[&str], unconditional: bool, gold: usize) -> Document {
        let pair = |context: &str, option: &&str| Pair {
            context: context.into(),
            continuation: option.to_string(),
        };
        Document {
            task: 0,
            id: 0,
            doc: "{}".to_string(),
            options: options.iter().map(|option| pair(context, option)).collect(),
            unconditional: options
                .iter()
                .filter(|_| unconditional)
                .map(|option| pair("Answer:", option))
                .collect(),
            gold,
            target: gold.to_string(),
        }
    }

    fn scored(log_p: &[f64]) -> Scored {
        let greedy = log_p.iter().map(|log_p| *log_p > -1.0).collect();
        Scored { log_p: log_p.iter().copied().map(Some).collect(), greedy }
    }

    fn values(document: &Document, scored: &Scored) -> Vec<(&'static str, Option<f64>)> {
        let of = |metric: Metric| (metric.name(), metric.of_document(document, scored));
        Metric::of(document).into_iter().map(of).collect()
    }

    #[test]
    fn metrics_of_choices_by_hand() {
        // ln p / characters: −6/2 = −3 against −10/4 = −2.5. ln p − u: −6 + 4 = −2 against −10 + 7 = −3.
        let found =
            values(&document("Q", &[" ab", " cdef"], true, 1), &scored(&[-6.0, -10.0, -4.0, -7.0]));
        let bits = 10.0 / LN_2 / 5.0;
        let expected = [
            ("acc", Some(0.0)),
            ("acc_norm", Some(1.0)),
            ("acc_mutual_info", Some(0.0)),
            ("bits_per_byte", Some(bits)),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn characters_and_bytes_differ_beyond_ascii() {
        // Two characters, four bytes: −6/2 against −4/1.
        let document = document("Q", &[" éé", " x"], false, 0);
        let found = values(&document, &scored(&[-6.0, -4.0]));
        let bits = 6.0 / LN_2 / 5.0;
        assert_eq!(
            found,
            [("acc", Some(0.0)), ("acc_norm", Some(1.0)), ("bits_per_byte", Some(bits))]
        );
    }

    #[test]
    fn equal_options_are_won_by_the_first() {
        let acc =
            |gold| values(&document("Q", &[" a", " b"], false, gold), &scored(&[-1.0, -1.0]))[0].1;
        assert_eq!((acc(0), acc(1)), (Some(1.0), Some(0.0)));
    }

    #[test]
    fn a_single_answer_is_right_if_it_is_greedy() {
        // The line end of the context is scored with the answer: 4 bytes.
        let document = document("Q\n", &["abc"], false, 0);
        let found = values(&document, &scored(&[-2.0 * LN_2]));
        assert_eq!(
            found,
            [("acc", Some(0.0)), ("bits_per_byte", Some(0.5)), ("perplexity", Some(2.0 * LN_2))]
        );
        assert_eq!(values(&document, &scored(&[-0.5]))[0].1, Some(1.0));
    }

    #[test]
    fn perplexity_is_that_of_the_mean_and_infinite_scores_are_seen() {
        let document = document("Q", &[" a"], false, 0);
        let (low, high) = (scored(&[-1.0]), scored(&[-3.0]));
        let (means, estimates) = score([(&document, &low), (&document, &high)]);
        assert!((means[&Perplexity].value.unwrap() - 2f64.exp()).abs() < 1e-12);
        assert!(estimates[&Accuracy].is_proportion());
        let none = Scored { log_p: vec![None], greedy: vec![false] };
        let (means, estimates) = score([(&document, &none), (&document, &high)]);
        assert_eq!((means[&Perplexity].value, estimates[&Accuracy].value), (None, None));
    }

    #[test]
    fn groups_are_means_over_tasks_whatever_their_sizes() {
        let task = |values: &[Option<f64>]| TaskScores {
            name: String::new(),
            shots: None,
            documents: values.len(),
            choice: true,
            chance: None,
            hash: String::new(),
            means: BTreeMap::from([(Accuracy, Accuracy.mean(values))]),
            estimates: BTreeMap::new(),
        };
        let first = task(&[Some(1.0), Some(0.0)]);
        let second = task(&[Some(1.0), Some(1.0), Some(1.0), Some(0.0)]);
        let means = group_means(&[&first, &second]);
        // Standard errors 0.5 and 0.25: √(0.25 + 0.0625) / 2.
        let accuracy = means[&Accuracy];
        assert_eq!((accuracy.value, accuracy.samples), (Some(0.625), 6));
        assert!((accuracy.standard_error.unwrap() - 0.3125f64.sqrt() / 2.0).abs() < 1e-12);
        assert!(group_means(&[&first]).is_empty());
    }
}
