//! The progress of a sweep: the runs under way, read from their `metrics.jsonl` as the files grow.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::PathBuf;

use super::{Plan, PlannedRun};
use crate::console::StepView;
use crate::metrics::{Record, SmoothedLoss, StepRecord};
use crate::run_folder;

/// Shows a sweep.
pub trait SweepConsole {
    /// Something worth a line happened.
    fn note(&mut self, text: &str);
    /// The run under way has finished further steps; this is the last.
    fn step(&mut self, step: SweepStep);
    /// The training of this run of the sweep, from 1, has ended.
    fn end_training(&mut self, run: usize);
}

/// A step of a run under way, for display.
#[derive(Clone, Debug, PartialEq)]
pub struct SweepStep {
    /// The run's name within the sweep.
    pub run: String,
    /// Which run of the sweep it is, from 1, and how many there are.
    pub place: (usize, usize),
    /// The step, as training shows it.
    pub view: StepView,
    /// Estimated seconds of training until all runs of the sweep are trained, evaluations not included.
    pub sweep_seconds_left: f64,
}

/// Follows the training of one run.
pub(super) struct Watch<'a> {
    run: &'a PlannedRun,
    place: (usize, usize),
    /// Runs at a time.
    slots: usize,
    /// Tokens of the runs that come later and are not trained yet.
    tokens_after: u64,
    /// Tokens and seconds of the runs that are trained.
    trained: (u64, f64),
    metrics: PathBuf,
    /// Bytes of `metrics` that were read.
    read: u64,
    smoothed: SmoothedLoss,
}

impl<'a> Watch<'a> {
    /// Follows run `at` of the plan, of which `slots` runs train at a time.
    pub fn new(plan: &'a Plan, at: usize, slots: usize) -> Self {
        let run = &plan.runs[at];
        let (mut tokens_after, mut trained) = (0, (0, 0.0));
        for (other, run) in plan.runs.iter().enumerate() {
            match run_folder::finished(&run.dir()) {
                Ok(Some(finished)) => {
                    trained = (trained.0 + finished.tokens, trained.1 + finished.seconds);
                }
                _ if other > at => tokens_after += run.config.train.tokens,
                _ => {}
            }
        }
        let metrics = run.dir().join("metrics.jsonl");
        let place = (at + 1, plan.runs.len());
        let smoothed = SmoothedLoss::default();
        Watch { run, place, slots, tokens_after, trained, metrics, read: 0, smoothed }
    }

    /// The last step, if there are new ones since the last call.
    pub fn poll(&mut self) -> Option<SweepStep> {
        let text = self.new_lines().ok()?;
        let mut last = None;
        for line in text.lines() {
            if let Ok(Record::Step(step)) = serde_json::from_str(line) {
                if let Some(loss) = step.loss.filter(|_| !step.skipped) {
                    self.smoothed.push(f64::from(loss));
                }
                last = Some(step);
            }
        }
        last.map(|record| self.show(record))
    }

    fn show(&self, record: StepRecord) -> SweepStep {
        let timeline = self.run.config.timeline();
        let total_steps = timeline.total_steps();
        let position = |step| timeline.position(step);
        let per_batch = record.seconds / position(record.step.max(1));
        let seconds_left = per_batch * (position(total_steps) - position(record.step)).max(0.0);
        let (tokens, seconds) = (self.trained.0 + record.tokens, self.trained.1 + record.seconds);
        let per_token = seconds / tokens.max(1) as f64;
        let seconds_after = per_token * self.tokens_after as f64 / self.slots as f64;
        SweepStep {
            run: self.run.name.clone(),
            place: self.place,
            sweep_seconds_left: seconds_left + seconds_after,
            view: StepView {
                total_steps,
                smoothed_loss: self.smoothed.value(),
                seconds_left,
                memory_bytes: None,
                skip: None,
                record,
            },
        }
    }

    /// The complete lines that were added since the last call.
    fn new_lines(&mut self) -> io::Result<String> {
        let mut file = File::open(&self.metrics)?;
        if file.metadata()?.len() < self.read {
            // A resumed run cuts what it wrote after its last checkpoint.
            self.read = 0;
            self.smoothed = SmoothedLoss::default();
        }
        file.seek(SeekFrom::Start(self.read))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        let whole = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
        self.read += whole as u64;
        bytes.truncate(whole);
        String::from_utf8(bytes).map_err(io::Error::other)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;
    use std::path::Path;

    use super::*;
    use crate::sweep::SweepConfig;
    use crate::testing::CONFIG;

    fn line(step: u64, loss: f32) -> String {
        let record = StepRecord {
            step,
            tokens: step * 1000,
            flops: None,
            loss: Some(loss),
            z_loss: None,
            grad_norm: Some(1.0),
            lr: 1e-3,
            batch_tokens: None,
            seq_len: None,
            window: None,
            tokens_per_second: 500.0,
            mfu: None,
            seconds: step as f64 * 2.0,
            skipped: false,
        };
        serde_json::to_string(&Record::Step(record)).unwrap() + "\n"
    }

    #[test]
    fn the_last_whole_line_is_shown_with_the_time_left() {
        let folder = tempfile::tempdir().unwrap();
        let base = folder.path().join("base.toml");
        fs::write(&base, CONFIG).unwrap();
        let out = folder.path().join("runs");
        let text = format!("base = {base:?}\nout_dir = {out:?}\nseeds = [0, 1, 2]");
        let sweep = SweepConfig::parse(&text, Path::new("s.toml")).unwrap();
        let plan = Plan::new(sweep).unwrap();
        let config = &plan.runs[1].config;
        let mut watch = Watch::new(&plan, 1, 1);
        assert_eq!(watch.poll(), None);

        fs::create_dir_all(plan.runs[1].dir()).unwrap();
        let metrics = plan.runs[1].dir().join("metrics.jsonl");
        fs::write(&metrics, line(1, 4.0) + &line(2, 2.0) + &line(3, 1.0)[..20]).unwrap();
        let step = watch.poll().unwrap();
        assert_eq!((step.run.as_str(), step.place), ("seed1", (2, 3)));
        assert_eq!((step.view.record.step, step.view.record.loss), (2, Some(2.0)));
        assert!(step.view.smoothed_loss > 2.0 && step.view.smoothed_loss < 4.0);
        let left = 2.0 * (config.total_steps() - 2) as f64;
        assert_eq!(step.view.seconds_left, left);
        // Only the last run comes after this one; 2 seconds per 1000 tokens.
        let after = 0.002 * config.train.tokens as f64;
        assert!((step.sweep_seconds_left - left - after).abs() < 1e-6 * after);
        assert_eq!(watch.poll(), None, "nothing is new");

        let mut file = fs::OpenOptions::new().append(true).open(&metrics).unwrap();
        file.write_all(&line(3, 1.0).as_bytes()[20..]).unwrap();
        assert_eq!(watch.poll().unwrap().view.record.step, 3);
        // A resume starts from a checkpoint after the first step.
        fs::write(&metrics, line(1, 4.0)).unwrap();
        let step = watch.poll().unwrap();
        assert_eq!((step.view.record.step, step.view.smoothed_loss), (1, 4.0));
    }
}
