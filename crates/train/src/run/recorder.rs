//! Everything a run records as it goes: metrics, samples, TensorBoard, console.

use std::path::PathBuf;
use std::time::Instant;

use crate::console::{Console, StepView};
use crate::error::TrainError;
use crate::evaluation::Evaluated;
use crate::grad_accumulation::BatchScalars;
use crate::guard::SkipReason;
use crate::metrics::{
    AppendLog, NoiseRecord, NormsRecord, Record, SmoothedLoss, StepRecord, ValidationRecord,
};
use crate::run_folder::RunFolder;
use crate::scalars::{place, scalars};
use crate::tensorboard::EventWriter;
use crate::timeline::Timeline;

/// How a recorder starts.
pub(super) struct RecorderStart {
    pub step: u64,
    pub metrics_bytes: u64,
    pub samples_bytes: u64,
    pub seconds: f64,
    pub timeline: Timeline,
    pub tensorboard: bool,
    /// Of each stage.
    pub flops_per_token: Vec<f64>,
    pub peak_flops: Option<f64>,
}

/// What is known of a finished step.
pub(super) struct StepFacts {
    pub step: u64,
    pub scalars: BatchScalars,
    pub lr: f64,
    pub seconds: f64,
    pub skip: Option<SkipReason>,
}

/// Records what happens.
pub(super) struct Recorder {
    start: RecorderStart,
    /// `metrics.jsonl` and `samples.txt`; none on ranks other than the first.
    logs: Option<[AppendLog; 2]>,
    tensorboard: Option<(PathBuf, EventWriter)>,
    began: Instant,
    smoothed: SmoothedLoss,
}

impl Recorder {
    /// Opens the run's files, truncated to their lengths at the checkpoint. Without a folder, nothing is written.
    pub fn open(folder: Option<&RunFolder>, start: RecorderStart) -> Result<Self, TrainError> {
        let tensorboard = match folder.filter(|_| start.tensorboard) {
            Some(folder) => {
                let path = folder.tensorboard();
                let writer = EventWriter::create(&path, start.step)
                    .map_err(|source| TrainError::TensorBoard { path: path.clone(), source })?;
                Some((path, writer))
            }
            None => None,
        };
        let logs = match folder {
            Some(folder) => Some([
                AppendLog::open(&folder.metrics(), start.metrics_bytes)?,
                AppendLog::open(&folder.samples(), start.samples_bytes)?,
            ]),
            None => None,
        };
        Ok(Recorder {
            logs,
            tensorboard,
            began: Instant::now(),
            smoothed: SmoothedLoss::default(),
            start,
        })
    }

    /// Seconds of training, over all resumed parts.
    pub fn seconds(&self) -> f64 {
        self.start.seconds + self.began.elapsed().as_secs_f64()
    }

    /// FLOPs of training up to the end of `step`.
    pub fn flops(&self, step: u64) -> f64 {
        let tokens = self.start.timeline.tokens_by_stage(step);
        tokens.zip(&self.start.flops_per_token).map(|(tokens, each)| tokens as f64 * each).sum()
    }

    /// The peak FLOP/s that MFU is relative to.
    pub fn peak_flops(&self) -> Option<f64> {
        self.start.peak_flops
    }

    /// Records a step.
    pub fn step(
        &mut self,
        facts: &StepFacts,
        memory_bytes: Option<u64>,
        console: &mut dyn Console,
    ) -> Result<(), TrainError> {
        let timeline = &self.start.timeline;
        let at = timeline.index(facts.step - 1);
        let stage = &timeline.stages()[at];
        let has_stages = timeline.is_staged();
        let tokens_per_second = stage.batch_tokens as f64 / facts.seconds;
        let flops_per_token = self.start.flops_per_token[at];
        let mfu = self.start.peak_flops.map(|peak| tokens_per_second * flops_per_token / peak);
        let BatchScalars { loss, z_loss, grad_norm } = facts.scalars;
        let record = StepRecord {
            step: facts.step,
            tokens: timeline.tokens(facts.step),
            flops: Some(self.flops(facts.step)),
            loss: Some(loss).filter(|loss| loss.is_finite()),
            z_loss: z_loss.filter(|loss| loss.is_finite()),
            grad_norm: Some(grad_norm).filter(|norm| norm.is_finite()),
            lr: facts.lr,
            batch_tokens: has_stages.then_some(stage.batch_tokens),
            seq_len: has_stages.then_some(stage.seq_len),
            window: stage.window.filter(|_| has_stages),
            tokens_per_second,
            mfu,
            seconds: self.seconds(),
            skipped: facts.skip.is_some(),
        };
        let total_steps = timeline.total_steps();
        let now = timeline.position(facts.step);
        let done = now - timeline.position(self.start.step);
        let left = timeline.position(total_steps) - now;
        self.record(&Record::Step(record.clone()))?;
        if facts.skip.is_none() {
            self.smoothed.push(f64::from(loss));
        }
        console.step(&StepView {
            record,
            total_steps,
            smoothed_loss: self.smoothed.value(),
            seconds_left: self.began.elapsed().as_secs_f64() / done * left,
            memory_bytes,
            skip: facts.skip,
        });
        Ok(())
    }

    /// Records a validation.
    pub fn validation(
        &mut self,
        record: &ValidationRecord,
        is_best: bool,
        console: &mut dyn Console,
    ) -> Result<(), TrainError> {
        self.record(&Record::Validation(record.clone()))?;
        console.validation(record, is_best);
        Ok(())
    }

    /// Records the headline scores of an evaluation of the model after `step`.
    pub fn evaluation(
        &mut self,
        step: u64,
        evaluated: &Evaluated,
        console: &mut dyn Console,
    ) -> Result<(), TrainError> {
        let Evaluated { name, scores } = evaluated;
        let tagged: Vec<(String, f64)> =
            scores.iter().map(|(score, x)| (format!("eval/{name}/{score}"), *x)).collect();
        self.write_scalars(step, &tagged)?;
        let shown: Vec<String> =
            scores.iter().map(|(score, x)| format!("{score} {x:.3}")).collect();
        console.note(&format!("step {step}: {name}: {}", shown.join(", ")));
        Ok(())
    }

    /// Records the norms of an update.
    pub fn norms(&mut self, record: NormsRecord) -> Result<(), TrainError> {
        self.record(&Record::Norms(record))
    }

    /// Records a step's estimates of the gradient noise scale.
    pub fn noise(&mut self, record: NoiseRecord) -> Result<(), TrainError> {
        self.record(&Record::Noise(record))
    }

    /// Records what the model generated after each prompt.
    pub fn samples(
        &mut self,
        step: u64,
        samples: &[(String, String)],
        console: &mut dyn Console,
    ) -> Result<(), TrainError> {
        for (prompt, text) in samples {
            if let Some([_, samples]) = &mut self.logs {
                samples.append(&format!("=== step {step}, prompt {prompt:?}\n{text}\n\n"))?;
            }
            console.sample(step, prompt, text);
        }
        Ok(())
    }

    /// Flushes to disk; returns the lengths of `metrics.jsonl` and `samples.txt`.
    pub fn sync(&mut self) -> Result<(u64, u64), TrainError> {
        let Some([metrics, samples]) = &mut self.logs else { return Ok((0, 0)) };
        Ok((metrics.sync()?, samples.sync()?))
    }

    /// Appends a line to the metrics, and its scalars to TensorBoard's events.
    fn record(&mut self, record: &Record) -> Result<(), TrainError> {
        if let Some([metrics, _]) = &mut self.logs {
            metrics.append_record(record)?;
        }
        self.write_scalars(place(record).0, &scalars(record))
    }

    /// Writes TensorBoard's events, if the run has them.
    fn write_scalars(&mut self, step: u64, named: &[(String, f64)]) -> Result<(), TrainError> {
        let Some((path, writer)) = &mut self.tensorboard else { return Ok(()) };
        let scalars: Vec<_> = named.iter().map(|(tag, value)| (tag.as_str(), *value)).collect();
        writer
            .scalars(step, &scalars)
            .map_err(|source| TrainError::TensorBoard { path: path.clone(), source })
    }
}

/// The peak resident size of this process so far, if the system reports it.
pub fn peak_resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kilobytes * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn the_resident_size_is_known() {
        assert!(peak_resident_bytes().is_some_and(|bytes| bytes > 100_000));
    }
}
