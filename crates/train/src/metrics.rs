//! `metrics.jsonl`: one JSON object per line, one line for each step, each validation, and each step whose norms
//! or whose gradient noise scale are measured.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Deserializer, Serialize};

use crate::optimiser::LayerNorm;

/// The line of one optimiser step.
///
/// A loss or gradient norm that is not finite is `null`: JSON has no NaN.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepRecord {
    /// Finished steps, this one included.
    pub step: u64,
    /// Tokens seen, this step's included.
    pub tokens: u64,
    /// FLOPs of training so far: tokens times the model's FLOPs per token, skipped steps included. None in
    /// files of earlier versions.
    #[serde(default)]
    pub flops: Option<f64>,
    /// Mean loss of the batch's weighted tokens, in nats, without the z-loss.
    pub loss: Option<f32>,
    /// Mean z-loss of these tokens, in runs with `train.z_loss`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub z_loss: Option<f32>,
    /// Global gradient norm before clipping.
    pub grad_norm: Option<f32>,
    /// Learning rate of the step.
    pub lr: f64,
    /// Tokens of the step, in runs with `train.stages`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch_tokens: Option<u64>,
    /// Tokens of its rows, in runs with `train.stages`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seq_len: Option<usize>,
    /// Its window in tokens, in runs with `train.stages`; none while attention has no window.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<usize>,
    /// Training throughput of the step, tokens over wall-clock seconds.
    pub tokens_per_second: f64,
    /// Model FLOPs utilisation: the model's training FLOPs over those that the device's peak rate
    /// allows in the same time. `null` if the peak is not known.
    pub mfu: Option<f64>,
    /// Seconds of training so far, over all resumed parts; validation and checkpoints included.
    pub seconds: f64,
    /// Whether the step was skipped: the weights did not change.
    pub skipped: bool,
}

/// The line of one validation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ValidationRecord {
    /// Finished steps.
    pub step: u64,
    /// Tokens seen.
    pub tokens: u64,
    /// As [`StepRecord::flops`].
    #[serde(default)]
    pub flops: Option<f64>,
    /// Mean loss of the validation tokens, in nats.
    #[serde(deserialize_with = "null_as_nan")]
    pub validation_loss: f64,
    /// `exp(validation_loss)`.
    #[serde(deserialize_with = "null_as_nan")]
    pub perplexity: f64,
    /// Total nats over `ln 2` and over the bytes that the counted targets encode.
    #[serde(deserialize_with = "null_as_nan")]
    pub bits_per_byte: f64,
    /// Mean loss by the number of tokens read, in logarithmic bins: the in-context-learning curve.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub loss_by_position: Vec<PositionLoss>,
    /// The lowest mean loss of a linear bucket of positions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub best_context_loss: Option<f64>,
    /// Metrics that layers report on the first validation row, by name: each is the mean over the
    /// layers that report it. Values of single layers and heads are not kept: `longwall eval attention-stats`
    /// measures them.
    #[serde(default, deserialize_with = "nulls_as_nan")]
    pub probe: BTreeMap<String, f64>,
    /// As `validation_loss`, of the moving average of the weights, if the run keeps one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ema_validation_loss: Option<f64>,
    /// Seconds of training so far.
    pub seconds: f64,
}

/// The mean loss of the positions `from..to` of a context; position 0 has read one token.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PositionLoss {
    /// The first position.
    pub from: usize,
    /// One past the last position.
    pub to: usize,
    /// Mean loss, in nats per token.
    #[serde(deserialize_with = "null_as_nan")]
    pub loss: f64,
}

/// The line of the norms of one update, by layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NormsRecord {
    /// Finished steps, this one included.
    pub step: u64,
    /// Tokens seen, this step's included.
    pub tokens: u64,
    /// The norms of each layer: `embedding`, `blocks.0.attention`, and so on.
    pub layers: BTreeMap<String, LayerNorm>,
}

/// The line of the estimates of the gradient noise scale from one step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NoiseRecord {
    /// Finished steps, this one included.
    pub step: u64,
    /// Tokens seen, this step's included.
    pub tokens: u64,
    /// The noise scale in tokens: the ratio of the estimates' moving averages. `null` while they are not both above 0.
    pub noise_scale: Option<f64>,
    /// The step's estimate of the trace of the covariance of one token's gradient.
    pub noise_trace: f64,
    /// The step's estimate of the square of the true gradient's norm.
    pub gradient_square: f64,
}

/// JSON has no NaN: what is not finite is written as `null`.
fn null_as_nan<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

fn nulls_as_nan<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<BTreeMap<String, f64>, D::Error> {
    let values: BTreeMap<String, Option<f64>> = BTreeMap::deserialize(deserializer)?;
    Ok(values.into_iter().map(|(name, x)| (name, x.unwrap_or(f64::NAN))).collect())
}

/// One line of `metrics.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Record {
    /// A validation.
    Validation(ValidationRecord),
    /// A step.
    Step(StepRecord),
    /// Norms by layer.
    Norms(NormsRecord),
    /// Estimates of the gradient noise scale.
    Noise(NoiseRecord),
}

impl Record {
    /// The finished steps when it was written.
    pub fn step(&self) -> u64 {
        match self {
            Record::Step(record) => record.step,
            Record::Validation(record) => record.step,
            Record::Norms(record) => record.step,
            Record::Noise(record) => record.step,
        }
    }
}

/// Why metrics cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum MetricsError {
    /// Reading or writing failed.
    #[error("cannot write {}: {source}\n  hint: check that the disk has room and the folder can be written", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file of a run cannot be read.
    #[error("cannot read {}: {source}\n  hint: give the folder of a run that has trained, for example runs/NAME", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A line is no record.
    #[error("{}:{line}: no metrics record: {source}\n  hint: every line must be one that training wrote; remove this one if its numbers may be lost, which `longwall verify` notes until the next checkpoint", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The parser's message.
        source: serde_json::Error,
    },
}

/// A text file that grows by whole entries. A resume truncates it to its length at the checkpoint.
#[derive(Debug)]
pub struct AppendLog {
    path: PathBuf,
    file: File,
    length: u64,
}

impl AppendLog {
    /// Opens `path` for appending, truncated to the whole lines of its first `length` bytes; creates it if it does not
    /// exist.
    ///
    /// A file shorter than `length` has lost entries: this is logged.
    ///
    /// # Errors
    /// When the file cannot be opened or truncated.
    pub fn open(path: &Path, length: u64) -> Result<Self, MetricsError> {
        let io = |source| MetricsError::Io { path: path.to_owned(), source };
        let mut options = OpenOptions::new();
        options.create(true).read(true).write(true).truncate(false);
        let mut file = options.open(path).map_err(io)?;
        let found = file.metadata().map_err(io)?.len();
        if found < length {
            tracing::warn!(
                "{} has {found} bytes but had {length} at the checkpoint: earlier entries are lost",
                path.display()
            );
        }
        let mut text = Vec::new();
        (&mut file).take(length).read_to_end(&mut text).map_err(io)?;
        let length = text.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end as u64 + 1);
        file.set_len(length).map_err(io)?;
        file.seek(SeekFrom::Start(length)).map_err(io)?;
        Ok(AppendLog { path: path.to_owned(), file, length })
    }

    /// Appends `text` in one write.
    ///
    /// # Errors
    /// When the write fails.
    pub fn append(&mut self, text: &str) -> Result<(), MetricsError> {
        self.file.write_all(text.as_bytes()).map_err(|source| self.error(source))?;
        self.length += text.len() as u64;
        Ok(())
    }

    /// Appends `record` as one line.
    ///
    /// # Errors
    /// When the write fails.
    pub fn append_record(&mut self, record: &Record) -> Result<(), MetricsError> {
        let mut line = serde_json::to_string(record).map_err(|e| self.error(e.into()))?;
        line.push('\n');
        self.append(&line)
    }

    /// Flushes everything appended to disk, and returns the length in bytes.
    ///
    /// # Errors
    /// When the flush fails.
    pub fn sync(&mut self) -> Result<u64, MetricsError> {
        self.file.sync_data().map_err(|source| self.error(source))?;
        Ok(self.length)
    }

    fn error(&self, source: std::io::Error) -> MetricsError {
        MetricsError::Io { path: self.path.clone(), source }
    }
}

/// Reads every record of `path`. Skips an incomplete last line, which a killed run may leave.
///
/// # Errors
/// When the file cannot be read, or a line is no record.
pub fn read(path: &Path) -> Result<Vec<Record>, MetricsError> {
    let mut records = Vec::new();
    read_lines(path, u64::MAX, |_, record| {
        records.push(record);
        true
    })?;
    Ok(records)
}

/// Bytes of the lines that belong to a run of `steps` steps, whose checkpoint was written when the file had `length`
/// bytes: a file that has lost lines may hold others there by now. 0 for a file that is not there.
///
/// # Errors
/// As [`read`], of these lines.
pub fn bytes_until(path: &Path, length: u64, steps: u64) -> Result<u64, MetricsError> {
    if !path.exists() {
        return Ok(0);
    }
    let mut bytes = 0;
    read_lines(path, length, |line, record| {
        let belongs = record.step() <= steps;
        bytes += if belongs { line as u64 } else { 0 };
        belongs
    })?;
    Ok(bytes)
}

/// Calls `each` with the bytes and the record of each whole line of the first `length` bytes, until it returns false.
fn read_lines(
    path: &Path,
    length: u64,
    mut each: impl FnMut(usize, Record) -> bool,
) -> Result<(), MetricsError> {
    let io = |source| MetricsError::Read { path: path.to_owned(), source };
    let mut reader = BufReader::new(File::open(path).map_err(io)?.take(length));
    let mut line = String::new();
    for number in 1.. {
        line.clear();
        reader.read_line(&mut line).map_err(io)?;
        if !line.ends_with('\n') {
            break;
        }
        let record = serde_json::from_str(&line).map_err(|source| MetricsError::Line {
            path: path.to_owned(),
            line: number,
            source,
        })?;
        if !each(line.len(), record) {
            break;
        }
    }
    Ok(())
}

/// The last step that the run in `run_dir` recorded.
pub(crate) fn last_step(run_dir: &Path) -> Option<u64> {
    let records = read(&run_dir.join("metrics.jsonl")).unwrap_or_default();
    records.iter().rev().find(|record| matches!(record, Record::Step(_))).map(Record::step)
}

/// Weight of the past in the console's smoothed loss.
const SMOOTHING: f64 = 0.98;

/// An exponential moving average that starts unbiased.
#[derive(Debug, Default)]
pub struct SmoothedLoss {
    sum: f64,
    weight: f64,
}

impl SmoothedLoss {
    /// Adds the loss of the next step.
    pub fn push(&mut self, value: f64) {
        self.sum = SMOOTHING * self.sum + value;
        self.weight = SMOOTHING * self.weight + 1.0;
    }

    /// The average; not a number before the first loss.
    pub fn value(&self) -> f64 {
        self.sum / self.weight
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(step: u64, loss: f32) -> Record {
        Record::Step(StepRecord {
            step,
            tokens: step * 64,
            flops: Some(step as f64 * 1e9),
            loss: loss.is_finite().then_some(loss),
            z_loss: None,
            grad_norm: Some(0.1),
            lr: 1e-3,
            batch_tokens: None,
            seq_len: None,
            window: None,
            tokens_per_second: 5000.0,
            mfu: None,
            seconds: 0.5,
            skipped: !loss.is_finite(),
        })
    }

    fn validation(step: u64) -> Record {
        Record::Validation(ValidationRecord {
            step,
            tokens: step * 64,
            flops: Some(step as f64 * 1e9),
            validation_loss: 2.5,
            perplexity: 2.5f64.exp(),
            bits_per_byte: 1.2,
            loss_by_position: vec![PositionLoss { from: 0, to: 1, loss: 3.5 }],
            best_context_loss: Some(2.25),
            probe: BTreeMap::from([("pruned_fraction".to_owned(), 0.5)]),
            ema_validation_loss: Some(2.25),
            seconds: 0.6,
        })
    }

    #[test]
    fn records_read_back_as_written_nan_as_null() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let norm = LayerNorm { grad_norm: Some(0.1), weight_norm: Some(2.0), update_ratio: None };
        let layers = BTreeMap::from([("blocks.0.mlp".to_owned(), norm)]);
        let norms = Record::Norms(NormsRecord { step: 2, tokens: 128, layers });
        let noise = Record::Noise(NoiseRecord {
            step: 2,
            tokens: 128,
            noise_scale: None,
            noise_trace: -0.5,
            gradient_square: 0.25,
        });
        let records = [step(1, 0.1), validation(1), norms, step(2, f32::NAN), noise];
        let mut log = AppendLog::open(&path, 0).unwrap();
        for record in &records {
            log.append_record(record).unwrap();
        }
        assert_eq!(read(&path).unwrap(), records);
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.lines().nth(3).unwrap().contains("\"loss\":null"), "{text}");
    }

    #[test]
    fn a_probes_nan_is_null_and_lines_without_a_probe_are_read() {
        let Record::Validation(mut record) = validation(1) else { unreachable!("a validation") };
        record.probe.insert("entropy".to_owned(), f64::NAN);
        let line = serde_json::to_string(&record).unwrap();
        assert!(line.contains("\"entropy\":null"), "{line}");
        let again: ValidationRecord = serde_json::from_str(&line).unwrap();
        assert!(again.probe["entropy"].is_nan());
        assert_eq!(again.probe["pruned_fraction"], record.probe["pruned_fraction"]);
        // As earlier versions wrote it.
        let mut old: serde_json::Value = serde_json::from_str(&line).unwrap();
        let fields = old.as_object_mut().unwrap();
        fields.remove("probe");
        for key in ["ema_validation_loss", "flops", "loss_by_position", "best_context_loss"] {
            fields.remove(key);
        }
        fields.insert("share_left_out".to_owned(), 0.5.into());
        let old: ValidationRecord = serde_json::from_value(old).unwrap();
        assert_eq!(
            old,
            ValidationRecord {
                flops: None,
                loss_by_position: vec![],
                best_context_loss: None,
                probe: BTreeMap::new(),
                ema_validation_loss: None,
                ..record
            }
        );
    }

    #[test]
    fn a_resume_cuts_the_lines_after_the_checkpoint() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut log = AppendLog::open(&path, 0).unwrap();
        log.append_record(&step(1, 3.0)).unwrap();
        let at_checkpoint = log.sync().unwrap();
        log.append_record(&step(2, 2.0)).unwrap();
        log.append("{\"step\":3,\"tok").unwrap();
        drop(log);
        let mut log = AppendLog::open(&path, at_checkpoint).unwrap();
        log.append_record(&step(2, 1.5)).unwrap();
        assert_eq!(read(&path).unwrap(), [step(1, 3.0), step(2, 1.5)]);
    }

    #[test]
    fn a_file_that_lost_its_lines_grows_from_what_is_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut log = AppendLog::open(&path, 1000).unwrap();
        log.append_record(&step(1, 3.0)).unwrap();
        assert_eq!(log.sync().unwrap(), std::fs::metadata(&path).unwrap().len());
    }

    #[test]
    fn a_file_that_was_cut_in_a_line_grows_from_the_last_whole_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut log = AppendLog::open(&path, 0).unwrap();
        log.append_record(&step(1, 3.0)).unwrap();
        log.append_record(&step(2, 2.0)).unwrap();
        let at_checkpoint = log.sync().unwrap();
        log.file.set_len(at_checkpoint - 10).unwrap();
        drop(log);
        let mut log = AppendLog::open(&path, at_checkpoint).unwrap();
        log.append_record(&step(3, 1.5)).unwrap();
        assert_eq!(read(&path).unwrap(), [step(1, 3.0), step(3, 1.5)]);
    }

    /// A line was removed, and the file has outgrown its length at the checkpoint.
    #[test]
    fn a_file_whose_lines_have_moved_is_cut_after_the_checkpoints_step() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut log = AppendLog::open(&path, 0).unwrap();
        for at in 1..=3 {
            log.append_record(&step(at, 3.0)).unwrap();
        }
        let at_checkpoint = log.sync().unwrap();
        for at in 4..=6 {
            log.append_record(&step(at, 2.0)).unwrap();
        }
        assert_eq!(bytes_until(&path, at_checkpoint, 3).unwrap(), at_checkpoint);
        let text = std::fs::read_to_string(&path).unwrap();
        let (first, rest) = text.split_once('\n').unwrap();
        std::fs::write(&path, rest).unwrap();
        let left = at_checkpoint - first.len() as u64 - 1;
        assert_eq!(bytes_until(&path, at_checkpoint, 3).unwrap(), left);
        // One byte into the next line.
        let mut log = AppendLog::open(&path, left + 1).unwrap();
        log.append_record(&step(4, 1.5)).unwrap();
        assert_eq!(read(&path).unwrap(), [step(2, 3.0), step(3, 3.0), step(4, 1.5)]);
        assert_eq!(bytes_until(&folder.path().join("absent"), 9, 3).unwrap(), 0);
    }

    #[test]
    fn a_bad_line_is_named_and_a_cut_last_line_is_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let good = serde_json::to_string(&step(1, 3.0)).unwrap();
        std::fs::write(&path, format!("{good}\n{}", &good[..20])).unwrap();
        assert_eq!(read(&path).unwrap().len(), 1);
        std::fs::write(&path, format!("{good}\nnonsense\n")).unwrap();
        let error = read(&path).unwrap_err().to_string();
        assert!(error.contains("metrics.jsonl:2"), "{error}");
    }

    #[test]
    fn the_smoothed_loss_starts_at_the_first_one() {
        let mut smoothed = SmoothedLoss::default();
        smoothed.push(3.0);
        assert_eq!(smoothed.value(), 3.0);
        for _ in 0..1000 {
            smoothed.push(1.0);
        }
        assert!((smoothed.value() - 1.0).abs() < 1e-6);
    }
}
