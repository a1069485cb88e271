//! Progress bars on stderr for reading data, evaluations, sweeps and benchmarks; no bar if stderr is not a
//! terminal.

use std::collections::HashMap;
use std::io::IsTerminal;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use longwall_eval::ProgressUpdate;
use longwall_train::console;
use longwall_train::signals::StopFlag;
use longwall_train::sweep::{SweepConsole, SweepStep};

/// A bar of `total` on stderr, or a spinner; hidden if stderr is not a terminal.
fn bar(total: Option<u64>, template: &str) -> ProgressBar {
    let bar = match total {
        Some(total) => ProgressBar::new(total),
        None => ProgressBar::new_spinner(),
    };
    if !std::io::stderr().is_terminal() {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    bar.set_style(ProgressStyle::with_template(template).expect("a valid template"));
    bar
}

/// Progress of reading and encoding text.
pub struct DataProgress {
    bar: Mutex<ProgressBar>,
    stop: Option<StopFlag>,
}

impl DataProgress {
    /// With `stop`, work that can be interrupted ends when the flag is raised.
    pub fn new(stop: Option<StopFlag>) -> Self {
        DataProgress { bar: Mutex::new(ProgressBar::hidden()), stop }
    }

    fn current(&self) -> ProgressBar {
        self.bar.lock().expect("no thread panicked while drawing").clone()
    }
}

impl longwall_data::Progress for DataProgress {
    fn start(&self, task: &str, total: Option<u64>) {
        let template = match total {
            Some(_) => "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec}, {eta} left",
            None => "{spinner} {msg} {bytes} {bytes_per_sec}",
        };
        let new = bar(total, template);
        if new.is_hidden() {
            tracing::info!("{task}");
        }
        new.set_message(task.to_owned());
        *self.bar.lock().expect("no thread panicked while drawing") = new;
    }

    fn advance(&self, bytes: u64) {
        self.current().inc(bytes);
    }

    fn finish(&self, summary: &str) {
        self.current().finish_and_clear();
        tracing::info!("{summary}");
    }

    fn cancelled(&self) -> bool {
        self.stop.as_ref().is_some_and(StopFlag::is_raised)
    }
}

/// Progress of an evaluation.
pub struct EvalProgress {
    bar: Mutex<ProgressBar>,
    announced: AtomicBool,
}

impl EvalProgress {
    /// No evaluation yet.
    pub fn new() -> Self {
        EvalProgress { bar: Mutex::new(ProgressBar::hidden()), announced: AtomicBool::new(false) }
    }
}

impl longwall_eval::Progress for EvalProgress {
    fn start(&self, suite: &str, done: u64, total: u64) {
        let new = bar(Some(total), "{prefix} {wide_bar} {pos}/{len} {msg}");
        new.set_prefix(suite.to_owned());
        new.set_position(done);
        if new.is_hidden() && !self.announced.swap(true, Ordering::Relaxed) {
            tracing::info!("{suite}: {done} of {total} samples are there");
        }
        *self.bar.lock().expect("no thread panicked while drawing") = new;
    }

    fn update(&self, update: &ProgressUpdate) {
        let bar = self.bar.lock().expect("no thread panicked while drawing");
        bar.set_position(update.done);
        let rate =
            update.samples_per_second.map_or_else(String::new, |r| format!("{r:.1} samples/s"));
        let left = update.time_left.map_or_else(String::new, |left| {
            format!(", {} left", longwall_train::console::duration(left.as_secs_f64()))
        });
        bar.set_message(format!("length {} {rate}{left}", update.length));
    }

    fn finish(&self) {
        self.bar.lock().expect("no thread panicked while drawing").finish_and_clear();
    }
}

/// Progress of a sweep: a bar for each run under way, with its numbers, or a line for each every ten seconds if
/// stderr is not a terminal.
pub struct SweepProgress {
    bars: MultiProgress,
    /// By the run's place in the sweep.
    runs: HashMap<usize, RunBar>,
}

/// A run under way.
struct RunBar {
    bar: ProgressBar,
    last: Option<Instant>,
}

/// Time between two lines of steps.
const PAUSE: Duration = Duration::from_secs(10);

impl SweepProgress {
    /// No run yet.
    pub fn new() -> Self {
        SweepProgress { bars: MultiProgress::new(), runs: HashMap::new() }
    }
}

impl SweepConsole for SweepProgress {
    fn note(&mut self, text: &str) {
        self.bars.suspend(|| tracing::info!("{text}"));
    }

    fn step(&mut self, step: SweepStep) {
        let (record, total) = (&step.view.record, step.view.total_steps);
        let (at, runs) = step.place;
        let left = console::duration(step.sweep_seconds_left);
        let numbers = format!("{} | sweep {left}", console::step_numbers(&step.view));
        let RunBar { bar, last } = self.runs.entry(at).or_insert_with(|| {
            let bar = bar(Some(total), "{prefix} {pos}/{len} {bar:20} {wide_msg}");
            bar.set_prefix(format!("[{at}/{runs}] {}", step.run));
            let bar = if bar.is_hidden() { bar } else { self.bars.add(bar) };
            RunBar { bar, last: None }
        });
        if !bar.is_hidden() {
            bar.set_message(numbers);
            bar.set_position(record.step);
        } else if record.step == total || last.is_none_or(|last| last.elapsed() >= PAUSE) {
            *last = Some(Instant::now());
            tracing::info!("[{at}/{runs}] {} step {}/{total} | {numbers}", step.run, record.step);
        }
    }

    fn end_training(&mut self, run: usize) {
        if let Some(RunBar { bar, .. }) = self.runs.remove(&run) {
            bar.finish_and_clear();
        }
    }
}

/// Progress of a benchmark.
pub struct BenchProgress {
    bar: Mutex<ProgressBar>,
}

impl BenchProgress {
    /// No benchmark yet.
    pub fn new() -> Self {
        BenchProgress { bar: Mutex::new(ProgressBar::hidden()) }
    }

    fn current(&self) -> ProgressBar {
        self.bar.lock().expect("no thread panicked while drawing").clone()
    }
}

impl longwall_bench::Progress for BenchProgress {
    fn start(&self, total: usize, unit: &str) {
        let unit = if unit.is_empty() { String::new() } else { format!(" {unit}") };
        let new = bar(Some(total as u64), &format!("{{wide_bar}} {{pos}}/{{len}}{unit} {{msg}}"));
        *self.bar.lock().expect("no thread panicked while drawing") = new;
    }

    fn measuring(&self, what: &str) {
        self.current().set_message(what.to_owned());
    }

    fn done(&self) {
        self.current().inc(1);
    }

    fn finish(&self) {
        self.current().finish_and_clear();
    }
}
