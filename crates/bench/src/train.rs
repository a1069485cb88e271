//! Training steps of a configuration's model on one random batch.

use std::fmt::{self, Display};

use longwall_kernels::backend::OpBackend;
use longwall_kernels::device::{DeviceKind, OnDevice};
use longwall_model::Precision;
use longwall_train::bench::{self, Bench};
use longwall_train::config::RunConfig;
use longwall_train::console::{bytes, count};
use longwall_train::device::Compute;
use longwall_train::distributed::World;
use longwall_train::memory::Estimate;
use longwall_train::meters::Meters;
use longwall_train::peak;
use longwall_train::run::peak_resident_bytes;
use serde::Serialize;

use crate::error::BenchError;
use crate::progress::Progress;
use crate::setup::ModelOptions;
use crate::timing::Spread;

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// The configuration whose model, batch and optimiser are timed.
    pub model: ModelOptions,
    /// Steps to time, at least 1.
    pub steps: u64,
    /// Steps before these that are not timed.
    pub warmup: u64,
}

/// The results. They serialise as JSON and display as a table.
#[derive(Debug, Serialize)]
pub struct Results {
    device: String,
    precision: Precision,
    attention: String,
    parameters: usize,
    seq_len: usize,
    batch_tokens: u64,
    micro_batch: usize,
    recompute: bool,
    warmup: u64,
    steps: u64,
    tokens_per_second: Spread,
    step_milliseconds: Spread,
    /// For the median step; `null` if the device's peak is not known.
    mfu: Option<f64>,
    peak_flops: Option<f64>,
    /// Reserved on a GPU; on the CPU, the process's peak resident size.
    peak_memory_bytes: Option<u64>,
    /// By [`Estimate`]; `null` on the CPU.
    estimated_memory: Option<Estimate>,
    estimated_memory_bytes: Option<u64>,
    /// `null` if a loss is not finite.
    first_loss: Option<f32>,
    last_loss: Option<f32>,
}

/// Times the steps.
///
/// # Errors
/// When the configuration, its tokenizer or its device cannot be opened, or when its rows need several GPUs.
pub fn run(options: &Options, progress: &dyn Progress) -> Result<Results, BenchError> {
    let (config, vocab_size, device) = options.model.open()?;
    let alone = config.base_stage().of_rank(World::ALONE);
    alone.map_err(|error| BenchError::Ranks(Box::new(error)))?;
    let compute = Compute::for_training(device, config.run.precision)?;
    Ok(compute.run(Job { config: &config, vocab_size, options, compute: &compute, progress }))
}

/// The work on the device.
struct Job<'a> {
    config: &'a RunConfig,
    vocab_size: usize,
    options: &'a Options,
    compute: &'a Compute,
    progress: &'a dyn Progress,
}

impl OnDevice for Job<'_> {
    type Output = Results;

    fn run<B: OpBackend>(self, device: B::Device) -> Results {
        let Job { config, vocab_size, options, compute, progress } = self;
        let precision = compute.precision;
        let meters = Meters::new(&compute.device);
        let measure =
            || (B::device_kind() == DeviceKind::Cpu).then(|| peak::of_this_machine::<B>(&device));
        let peak_flops = meters.peak_flops(precision).or_else(measure);
        let steps = options.warmup + options.steps;
        progress.start(steps as usize, "steps");
        progress.measuring("(the first ones may compile kernels)");
        let after = &mut |_: &bench::BenchStep| {
            meters.peak_memory();
            progress.measuring("");
            progress.done();
        };
        let bench = bench::run::<B>(config, vocab_size, precision, &device, steps, after);
        progress.finish();
        let memory = if meters.has_memory() { meters.peak_memory() } else { peak_resident_bytes() };
        self.results(&bench, peak_flops, memory)
    }
}

impl Job<'_> {
    fn results(&self, bench: &Bench, peak_flops: Option<f64>, memory: Option<u64>) -> Results {
        let Job { config, options, compute, .. } = self;
        let timed = &bench.steps[options.warmup as usize..];
        let tokens = config.train.batch_tokens as f64;
        let rate = Spread::of(timed.iter().map(|step| tokens / step.seconds));
        let finite = |loss: f32| Some(loss).filter(|loss| loss.is_finite());
        Results {
            device: compute.device.to_string(),
            precision: compute.precision,
            attention: config.model.attention_label(),
            parameters: bench.parameters,
            seq_len: config.data.seq_len,
            batch_tokens: config.train.batch_tokens,
            micro_batch: bench.rows.1,
            recompute: config.train.recompute,
            warmup: options.warmup,
            steps: options.steps,
            tokens_per_second: rate,
            step_milliseconds: Spread::of(timed.iter().map(|step| step.seconds * 1e3)),
            mfu: peak_flops.map(|peak| rate.median * bench.flops_per_token / peak),
            peak_flops,
            peak_memory_bytes: memory,
            estimated_memory: bench.memory,
            estimated_memory_bytes: bench.memory.map(|estimate| estimate.total()),
            first_loss: finite(bench.steps[0].loss),
            last_loss: bench.steps.last().and_then(|step| finite(step.loss)),
        }
    }
}

impl Display for Results {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unknown = || "unknown".to_owned();
        let loss = |loss: Option<f32>| loss.map_or_else(|| "nan".to_owned(), |x| format!("{x:.4}"));
        let (rate, time) = (&self.tokens_per_second, &self.step_milliseconds);
        let mfu = self.mfu.zip(self.peak_flops).map_or_else(unknown, |(mfu, peak)| {
            format!("{:.1} % of {:.3} TFLOP/s", mfu * 100.0, peak / 1e12)
        });
        let recompute = if self.recompute { ", blocks recomputed" } else { "" };
        writeln!(f, "device          {}", self.device)?;
        writeln!(f, "precision       {}", self.precision)?;
        writeln!(
            f,
            "model           {} parameters, {}",
            count(self.parameters as f64),
            self.attention
        )?;
        writeln!(
            f,
            "batch           {} tokens in rows of {}, micro-batches of {} rows{recompute}",
            self.batch_tokens, self.seq_len, self.micro_batch
        )?;
        writeln!(f, "steps           {} after {} to warm up", self.steps, self.warmup)?;
        writeln!(f, "                    median         min         max")?;
        writeln!(f, "tokens/s      {:>12.0}{:>12.0}{:>12.0}", rate.median, rate.min, rate.max)?;
        writeln!(f, "ms per step   {:>12.2}{:>12.2}{:>12.2}", time.median, time.min, time.max)?;
        writeln!(f, "MFU             {mfu}")?;
        writeln!(f, "peak memory     {}", self.peak_memory_bytes.map_or_else(unknown, bytes))?;
        if let Some(estimate) = self.estimated_memory {
            writeln!(f, "estimated       {estimate}")?;
        }
        let (first, last) = (loss(self.first_loss), loss(self.last_loss));
        write!(f, "loss            {first} at first, {last} at last")
    }
}
