//! A progress bar on a terminal.

use std::io::{self, Write};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::{Console, Ending, RunInfo, StepView, format};
use crate::metrics::ValidationRecord;

/// A bar with the numbers of the last step; everything else scrolls above it.
#[derive(Debug)]
pub struct BarConsole {
    bar: ProgressBar,
}

impl BarConsole {
    /// A bar on stderr.
    ///
    /// # Panics
    /// Never: the bar's template is fixed.
    pub fn new() -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(5));
        let template = "{pos}/{len} {bar:20} {wide_msg}";
        bar.set_style(ProgressStyle::with_template(template).expect("the template is valid"));
        BarConsole { bar }
    }
}

impl Default for BarConsole {
    fn default() -> Self {
        Self::new()
    }
}

impl Console for BarConsole {
    fn begin(&mut self, info: &RunInfo) {
        self.bar.set_length(info.total_steps);
        self.bar.set_position(info.first_step);
        self.bar.println(format::begin(info));
        if info.compiles {
            self.bar.set_message("compiling kernels");
        }
    }

    fn step(&mut self, view: &StepView) {
        if let Some(line) = format::skip(view) {
            self.bar.println(line);
        }
        self.bar.set_message(format::step(view));
        self.bar.set_position(view.record.step);
    }

    fn validation(&mut self, record: &ValidationRecord, best: bool) {
        self.bar.println(format::validation(record, best));
    }

    fn sample(&mut self, step: u64, prompt: &str, text: &str) {
        self.bar.println(format::sample(step, prompt, text));
    }

    fn note(&mut self, text: &str) {
        self.bar.println(text);
    }

    fn end(&mut self, ending: &Ending) {
        self.bar.finish_and_clear();
        // Nobody may read it any more.
        let _ = writeln!(io::stderr(), "{}", format::end(ending));
    }
}
