//! What a run shows while it trains: a progress bar on a terminal, plain lines elsewhere.
//!
//! All of it goes to stderr; stdout is for data.

mod bar;
mod format;
mod lines;

use std::io::IsTerminal;
use std::path::PathBuf;

pub use bar::BarConsole;
pub use format::{bytes, count, duration, step as step_numbers};
pub use lines::LineConsole;

use crate::guard::SkipReason;
use crate::metrics::{StepRecord, ValidationRecord};
use crate::optimiser::Assigned;
use crate::timeline::OpenStage;

/// What is known when a run begins.
#[derive(Clone, Debug, PartialEq)]
pub struct RunInfo {
    /// The run's folder.
    pub run_dir: PathBuf,
    /// The device, in words.
    pub device: String,
    /// Parameters of the model.
    pub parameters: u64,
    /// Training tokens that the data holds.
    pub data_tokens: u64,
    /// Steps of the whole run.
    pub total_steps: u64,
    /// Steps already finished: 0 unless the run is resumed.
    pub first_step: u64,
    /// The run's stages, in their order.
    pub stages: Vec<OpenStage>,
    /// The peak FLOP/s that model FLOPs utilisation is relative to.
    pub peak_flops: Option<f64>,
    /// Whether the first step must compile the device's kernels.
    pub compiles: bool,
    /// Which parameters are updated in which way.
    pub optimiser: Vec<Assigned>,
    /// The peak learning rate.
    pub lr: f64,
}

/// One step, for display.
#[derive(Clone, Debug, PartialEq)]
pub struct StepView {
    /// The line in `metrics.jsonl`.
    pub record: StepRecord,
    /// Steps of the whole run.
    pub total_steps: u64,
    /// Exponential moving average of the loss since the run was started or resumed.
    pub smoothed_loss: f64,
    /// Estimated seconds until the run ends.
    pub seconds_left: f64,
    /// Memory in use, in bytes: the device's where it has its own, else the process's peak.
    pub memory_bytes: Option<u64>,
    /// Why the step was skipped, if it was.
    pub skip: Option<SkipReason>,
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Ending {
    /// Finished steps.
    pub step: u64,
    /// Steps of the whole run.
    pub total_steps: u64,
    /// Skipped steps.
    pub skipped: u64,
    /// Seconds of training, over all resumed parts.
    pub seconds: f64,
    /// The last validation.
    pub validation: Option<ValidationRecord>,
    /// The run's folder.
    pub run_dir: PathBuf,
}

/// Shows a run. Every method but [`Console::step`] is called rarely.
pub trait Console {
    /// The run begins.
    fn begin(&mut self, info: &RunInfo);
    /// A step is finished.
    fn step(&mut self, view: &StepView);
    /// A validation is finished; `best` when its loss is the lowest so far.
    fn validation(&mut self, record: &ValidationRecord, best: bool);
    /// The model generated `text` after `prompt`.
    fn sample(&mut self, step: u64, prompt: &str, text: &str);
    /// Something worth a line happened.
    fn note(&mut self, text: &str);
    /// The run has ended.
    fn end(&mut self, ending: &Ending);
}

/// A bar when stdout and stderr are both terminals, else plain lines.
pub fn for_terminal() -> Box<dyn Console> {
    if std::io::stdout().is_terminal() && std::io::stderr().is_terminal() {
        Box::new(BarConsole::new())
    } else {
        Box::new(LineConsole::new(std::io::stderr()))
    }
}

/// Shows nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct SilentConsole;

impl Console for SilentConsole {
    fn begin(&mut self, _info: &RunInfo) {}
    fn step(&mut self, _view: &StepView) {}
    fn validation(&mut self, _record: &ValidationRecord, _best: bool) {}
    fn sample(&mut self, _step: u64, _prompt: &str, _text: &str) {}
    fn note(&mut self, _text: &str) {}
    fn end(&mut self, _ending: &Ending) {}
}
