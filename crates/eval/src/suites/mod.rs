//! The registry of suites: one file and one line each.

pub mod attention_stats;
pub mod extrapolate;
pub mod fflm;
pub mod niah;
pub mod passkey;
mod retrieval;
mod stretches;

use serde::{Deserialize, Serialize};

use crate::options::SuiteOptions;
use crate::runner::{run_suite, validate};
use crate::suite::{RunContext, Suite};
use crate::{EvalError, EvalModel, Report};

/// Generates [`SuiteConfig`] (subcommands for clap, tagged tables for serde) and [`run`].
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
            /// Names of all suites.
            pub const NAMES: &[&str] = &[$(<$suite as Suite>::NAME),*];

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

        /// Runs a suite on a model, or the rest of an interrupted one, and writes its files into the
        /// context's folder.
        ///
        /// # Errors
        /// Options out of range, lengths that do not fit the prompt or the model, missing text, a
        /// folder with other settings, files that cannot be written, a model that fails, and
        /// [`EvalError::Stopped`] when the context's stop flag was set.
        pub fn run(
            config: &SuiteConfig,
            model: &mut dyn EvalModel,
            context: &RunContext<'_>,
        ) -> Result<Report, EvalError> {
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
    /// Length extrapolation: loss by context length and by position on held-out text
    Extrapolate => extrapolate::Extrapolate;
    /// Flip-flop language modelling: errors in reading back the last bit written
    Fflm => fflm::Fflm;
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
