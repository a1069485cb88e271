//! The registry of suites: one file and one line each.

pub mod attention_stats;
pub mod babilong;
pub mod counted;
pub mod extrapolate;
pub mod fflm;
mod fit;
mod labelled;
pub mod longtext_qa;
pub mod mqar;
pub mod mqrar;
pub mod mrcr;
pub mod multi_needle;
pub mod niah;
pub mod passkey;
pub mod perplexity;
pub mod phonebook;
mod retrieval;
pub mod ruler;
mod stretches;
pub mod word_problem;
pub mod zero_shot;

use clap::Subcommand;
use serde::{Deserialize, Serialize};

use crate::options::SuiteOptions;
use crate::runner::{check_suite, run_suite, validate};
use crate::suite::{RunContext, Suite};
use crate::{EvalError, EvalModel, Report};

/// Generates [`SuiteConfig`] (subcommands for clap, tagged tables for serde), [`check`], [`run`] and [`run_on_rank`].
macro_rules! suites {
    ($($(#[$doc:meta])* $variant:ident => $suite:ty;)*) => {
        /// A suite and its options: a subcommand of `longwall eval`, or a table
        /// `[[eval]] suite = "passkey"` with the same options as keys.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, clap::Subcommand)]
        #[serde(tag = "suite", rename_all = "kebab-case")]
        pub enum SuiteConfig {
            $($(#[$doc])* $variant(SuiteOptions<<$suite as Suite>::Options>),)*
        }

        impl SuiteConfig {
            /// Name and description of every suite.
            pub fn list() -> Vec<(String, String)> {
                let command = SuiteConfig::augment_subcommands(clap::Command::new("eval"));
                let about = |suite: &clap::Command| {
                    suite.get_about().map(ToString::to_string).unwrap_or_default()
                };
                command.get_subcommands().map(|s| (s.get_name().to_string(), about(s))).collect()
            }

            /// Names of all suites.
            pub const NAMES: &[&str] = &[$(<$suite as Suite>::NAME),*];

            /// Names of the suites that need text: the run's validation split, or files.
            pub fn text_readers() -> impl Iterator<Item = &'static str> {
                let all = [$((<$suite as Suite>::NAME, <$suite as Suite>::READS_TEXT)),*];
                all.into_iter().filter(|(_, reads)| *reads).map(|(name, _)| name)
            }

            /// The suite's name: of its subcommand and its folder.
            pub fn name(&self) -> &'static str {
                match self {
                    $(SuiteConfig::$variant(_) => <$suite as Suite>::NAME,)*
                }
            }

            /// Records every option that is out of range.
            pub fn validate(&self, problems: &mut longwall_config::Problems) {
                match self {
                    $(SuiteConfig::$variant(options) => validate::<$suite>(options, problems),)*
                }
            }
        }

        $(impl From<<$suite as Suite>::Options> for SuiteConfig {
            fn from(options: <$suite as Suite>::Options) -> Self {
                SuiteConfig::$variant(options.into())
            }
        })*

        #[cfg(test)]
        const STREAMS: &[std::ops::Range<u64>] = &[$(<$suite as Suite>::STREAMS),*];

        /// Checks that a suite can run on a model, before any of its files is written: options, text,
        /// lengths and memory.
        ///
        /// # Errors
        /// As [`run`], but for those of its files and of the model's calls.
        pub fn check(
            config: &SuiteConfig,
            model: &dyn EvalModel,
            context: &RunContext<'_>,
        ) -> Result<(), EvalError> {
            match config {
                $(SuiteConfig::$variant(options) => check_suite::<$suite>(options, model, context),)*
            }
        }

        /// Runs a suite on a model, or the rest of an interrupted one, and writes its files into the
        /// context's folder.
        ///
        /// # Errors
        /// Options out of range, lengths that do not fit the prompt or the model, missing text, a
        /// folder with other settings, files that cannot be written, a model that fails, and
        /// [`EvalError::Stopped`] when the context's stop flag was set.
        ///
        /// # Panics
        /// On another rank than the first.
        pub fn run(
            config: &SuiteConfig,
            model: &mut dyn EvalModel,
            context: &RunContext<'_>,
        ) -> Result<Report, EvalError> {
            Ok(run_on_rank(config, model, context)?.expect("rank 0 writes the report"))
        }

        /// As [`run`], on one of several ranks, all of which call it. Rank 0 writes the files and has the report.
        ///
        /// # Errors
        /// As [`run`]; [`EvalError::Rank`] when another rank fails, and [`EvalError::Lost`] when one has ended.
        pub fn run_on_rank(
            config: &SuiteConfig,
            model: &mut dyn EvalModel,
            context: &RunContext<'_>,
        ) -> Result<Option<Report>, EvalError> {
            match config {
                $(SuiteConfig::$variant(options) => run_suite::<$suite>(options, model, context),)*
            }
        }
    };
}

suites! {
    /// Passkey retrieval: a number hidden in repeated text, asked for at the end
    Passkey => passkey::Passkey;
    /// Needle in a haystack: a magic number in long text, by length and depth
    Niah => niah::Niah;
    /// Several needles: two or four numbers far apart in repeated text, asked for together
    MultiNeedle => multi_needle::MultiNeedle;
    /// RULER: thirteen tasks of retrieval, tracing, counting and question answering
    Ruler => ruler::Ruler;
    /// BABILong: facts of five bAbI tasks hidden in long text
    Babilong => babilong::Babilong;
    /// Multi-round coreference: repeat the n-th text that answered a request
    Mrcr => mrcr::Mrcr;
    /// Phone book lookup: the number of a name among as many lines as fit
    Phonebook => phonebook::Phonebook;
    /// Length extrapolation: loss by context length and by position on held-out text
    Extrapolate => extrapolate::Extrapolate;
    /// Word and byte perplexity and bits per byte of text, with a strided window
    Perplexity => perplexity::Perplexity;
    /// Zero-shot and few-shot tasks for base models: accuracies and bits per byte of given answers
    ZeroShot => zero_shot::ZeroShot;
    /// Questions about long texts and summaries: the tasks of LongBench and SCROLLS
    LongtextQa => longtext_qa::LongtextQa;
    /// Flip-flop language modelling: errors in reading back the last bit written
    Fflm => fflm::Fflm;
    /// Multi-query associative recall: the values of keys, in three forms
    Mqar => mqar::Mqar;
    /// N-back recall: the value that a variable had N assignments ago
    Mqrar => mqrar::Mqrar;
    /// The word problem of A5 or S5: products of permutations, at every step
    WordProblem => word_problem::WordProblem;
    /// What attention layers measure of themselves, by layer, head and context length
    AttentionStats => attention_stats::AttentionStats;
}

#[cfg(test)]
mod tests {
    use super::STREAMS;

    #[test]
    fn no_two_suites_share_a_random_stream() {
        let mut all: Vec<u64> = STREAMS.iter().cloned().flatten().collect();
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count, "{STREAMS:?}");
    }
}
