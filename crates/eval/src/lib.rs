//! Evaluations of a language model as its context grows: suites behind one trait, scores with
//! standard errors or intervals, reports and plots.
//!
//! A caller gives [`run`] a [`SuiteConfig`] (from the command line or a configuration file), an
//! [`EvalModel`] and a [`RunContext`]. The suite's folder then holds
//!
//! - `results.json`: the [`Report`], every score with its standard error or interval, and what is needed
//!   to reproduce it;
//! - `samples.jsonl`: one line per sample (prompt, output, verdict), appended as samples finish; with
//!   `settings.json` an interrupted evaluation can continue from it;
//! - `grid.csv`: the scores by length and depth;
//! - SVG plots.
//!
//! All lengths are in tokens of the model's own tokenizer; prompt plus generation fit into them.

mod error;
mod files;
mod index;
mod journal;
mod json_lines;
mod language_model;
pub mod memory;
mod model;
mod options;
pub mod paired;
pub mod plot;
mod presets;
mod ranks;
mod report;
mod runner;
pub mod stats;
mod suite;
pub mod suites;
mod text;

pub use error::EvalError;
pub use index::{IN_LOOP, write_index};
pub use language_model::TrainedModel;
pub use model::{EvalModel, LogLikelihood};
pub use options::{SamplingOptions, SuiteOptions};
pub use plot::{
    Curve, CurveGroup, DotChart, DotRow, XAxis, plot_group_losses, plot_losses, plot_scalar,
};
pub use presets::{Preset, Summary, SummaryRow};
pub use ranks::{Exchange, Ranks};
pub use report::{Report, Score, TextTable, TokenizerReport};
pub use suite::{
    Answer, Discard, HeldOut, Inspection, ModelCall, OpenContext, Outcome, Progress,
    ProgressUpdate, Request, RunContext, Scoring, Silent, StopRequest, Suite, Trial,
};
pub use suites::{SuiteConfig, check, run, run_on_rank};
