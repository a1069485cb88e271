//! Estimated time and memory of a sweep's runs, for `--dry-run`.

use std::collections::HashMap;

use longwall_data::{DataError, Tokenizer, TokenizerConfig};
use longwall_kernels::device::DeviceKind;
use longwall_model::Precision;

use super::{Plan, PlannedRun};
use crate::config::RunConfig;
use crate::memory::{self, Estimate, largest_micro_batch};
use crate::run_folder::{self, RunFolderError};
use crate::timeline::Stage;

/// The share of the peak that training is taken to reach, as long as no run of the sweep is finished.
const EXPECTED_MFU: f64 = 0.4;

/// Tokens of a micro-batch on the CPU, if the configuration does not set its size.
const CPU_MICRO_BATCH_TOKENS: usize = 1 << 13;

/// The machine that the runs are meant for.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    /// Its kind of device.
    pub device: DeviceKind,
    /// The precision of runs that do not set one.
    pub precision: Precision,
    /// Bytes of memory that a run may take, if known.
    pub available_memory: Option<u64>,
    /// Peak FLOP/s, if known.
    pub peak_flops: Option<f64>,
}

/// What one run is estimated to take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RunEstimate {
    /// Seconds of training in all; `None` where the rate is not known.
    pub seconds: Option<f64>,
    /// Bytes of memory: on a GPU at the peak, on the CPU at least.
    pub memory_bytes: u64,
    /// Whether the run is trained already.
    pub finished: bool,
}

/// The rate of training that times are estimated with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rate {
    /// Of the finished runs of the sweep, in FLOP/s.
    Measured(f64),
    /// 40 % of the machine's peak.
    Expected(f64),
    /// Neither is known.
    Unknown,
}

impl Rate {
    /// FLOP/s, if known.
    pub fn flops(self) -> Option<f64> {
        match self {
            Rate::Measured(rate) | Rate::Expected(rate) => Some(rate),
            Rate::Unknown => None,
        }
    }
}

/// Why estimates cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum EstimateError {
    /// A tokenizer cannot be loaded.
    #[error(transparent)]
    Tokenizer(#[from] DataError),
    /// A run folder cannot be read.
    #[error(transparent)]
    Folder(#[from] RunFolderError),
}

impl Plan {
    /// The estimates of all runs, in their order, and the rate behind them.
    ///
    /// # Errors
    /// When a tokenizer or a run folder cannot be read.
    pub fn estimates(&self, machine: &Machine) -> Result<(Vec<RunEstimate>, Rate), EstimateError> {
        let mut vocab_sizes = VocabSizes::default();
        let mut costs = Vec::with_capacity(self.runs.len());
        let (mut flops_done, mut seconds_done) = (0.0, 0.0);
        for PlannedRun { config, .. } in &self.runs {
            let vocab_size = vocab_sizes.of(&config.tokenizer)?;
            let flops = config.train_flops(vocab_size);
            let finished = run_folder::finished(&config.run_dir())?;
            if let Some(finished) = &finished {
                flops_done += flops;
                seconds_done += finished.seconds;
            }
            let memory_bytes = machine.memory(config, vocab_size);
            costs.push((flops, memory_bytes, finished.is_some()));
        }
        let rate = match machine.peak_flops {
            _ if seconds_done > 0.0 => Rate::Measured(flops_done / seconds_done),
            Some(peak) => Rate::Expected(EXPECTED_MFU * peak),
            None => Rate::Unknown,
        };
        let estimate = |(flops, memory_bytes, finished)| {
            let seconds = rate.flops().map(|rate| flops / rate);
            RunEstimate { seconds, memory_bytes, finished }
        };
        Ok((costs.into_iter().map(estimate).collect(), rate))
    }
}

impl Machine {
    /// Bytes that training takes on this machine.
    fn memory(&self, config: &RunConfig, vocab_size: usize) -> u64 {
        let precision = config.run.precision.unwrap_or(self.precision);
        let of = |stage: &Stage| {
            if self.device == DeviceKind::Cpu {
                let shape = [stage.micro_batch_rows(CPU_MICRO_BATCH_TOKENS), stage.seq_len];
                let device = self.device;
                let least =
                    memory::least_for_training(config, vocab_size, shape, precision, device);
                return u64::try_from(least).unwrap_or(u64::MAX);
            }
            let available = self.available_memory;
            let fitting =
                || largest_micro_batch(config, stage, vocab_size, precision, 1, available);
            let rows = stage.micro_batch.or_else(fitting).unwrap_or(1);
            Estimate::of(config, vocab_size, stage.open(rows), precision).total()
        };
        config.timeline().stages().iter().map(of).max().unwrap_or_default()
    }
}

/// Sizes of vocabularies, each tokenizer loaded once.
#[derive(Default)]
struct VocabSizes(HashMap<String, usize>);

impl VocabSizes {
    fn of(&mut self, config: &TokenizerConfig) -> Result<usize, DataError> {
        let key = format!("{config:?}");
        if let Some(size) = self.0.get(&key) {
            return Ok(*size);
        }
        let size = Tokenizer::load(config)?.vocab_size();
        self.0.insert(key, size);
        Ok(size)
    }
}
