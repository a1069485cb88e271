//! `longwall bench train --config FILE`.

use std::path::PathBuf;

use anyhow::Result;
use longwall_data::Tokenizer;
use longwall_kernels::backend::OpBackend;
use longwall_kernels::device::{Device, OnDevice};
use longwall_model::Precision;
use longwall_train::bench::{self, Bench};
use longwall_train::config::RunConfig;
use longwall_train::console::{bytes, count};
use longwall_train::peak;
use longwall_train::run::peak_resident_bytes;
use serde::Serialize;

use super::timing::Spread;
use crate::context::{DeviceArg, open_device, training_precision};
use crate::meters::Meters;
use crate::progress::bar;

/// Arguments of `longwall bench train`.
#[derive(clap::Args)]
pub struct Args {
    /// The configuration whose model, batch and optimiser are timed; its data is not read
    #[arg(long, value_name = "FILE")]
    config: PathBuf,

    /// Override a key: `--set model.layers=12`
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,

    /// The device, in place of run.device
    #[arg(long)]
    device: Option<DeviceArg>,

    /// Steps to time
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    steps: u64,

    /// Steps before these that are not timed
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(0..=1_000_000))]
    warmup: u64,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What was measured.
#[derive(Serialize)]
struct Results {
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
    /// Of the median step; `null` where the device's peak is not known.
    mfu: Option<f64>,
    peak_flops: Option<f64>,
    /// Reserved on a GPU; on the CPU, the process's greatest resident size.
    peak_memory_bytes: Option<u64>,
    /// `null` where a loss is not finite.
    first_loss: Option<f32>,
    last_loss: Option<f32>,
}

/// Times the steps and prints the results.
pub fn run(args: Args) -> Result<()> {
    let mut config = RunConfig::load(&args.config, &args.sets)?;
    if let Some(device) = args.device {
        config.run.device = device.into();
    }
    let vocab_size = Tokenizer::load(&config.tokenizer)?.vocab_size();
    let device = open_device(config.run.device, config.run.threads)?;
    let precision = training_precision(config.run.precision, &device)?;
    let job = Job { config: &config, vocab_size, precision, args: &args, device: &device };
    let results = device.clone().run(job);
    if args.json {
        println!("{}", serde_json::to_string_pretty(&results)?);
    } else {
        print(&results);
    }
    Ok(())
}

/// The work on the device.
struct Job<'a> {
    config: &'a RunConfig,
    vocab_size: usize,
    precision: Precision,
    args: &'a Args,
    device: &'a Device,
}

impl OnDevice for Job<'_> {
    type Output = Results;

    fn run<B: OpBackend>(self, device: B::Device) -> Results {
        let meters = Meters::new(self.device);
        let measure = || (B::device_kind() == "cpu").then(|| peak::measure::<B>(&device));
        let peak_flops = meters.peak_flops(self.precision).or_else(measure);
        let steps = self.args.warmup + self.args.steps;
        let bar = bar(Some(steps), "{wide_bar} {pos}/{len} steps {msg}");
        bar.set_message("(the first ones may compile kernels)");
        let after = &mut |_: &bench::BenchStep| {
            meters.peak_memory();
            bar.set_message("");
            bar.inc(1);
        };
        let (config, vocab_size, precision) = (self.config, self.vocab_size, self.precision);
        let bench = bench::run::<B>(config, vocab_size, precision, &device, steps, after);
        bar.finish_and_clear();
        let memory = if meters.has_memory() { meters.peak_memory() } else { peak_resident_bytes() };
        self.results(&bench, peak_flops, memory)
    }
}

impl Job<'_> {
    fn results(&self, bench: &Bench, peak_flops: Option<f64>, memory: Option<u64>) -> Results {
        let Job { config, args, .. } = self;
        let timed = &bench.steps[args.warmup as usize..];
        let tokens = config.train.batch_tokens as f64;
        let rate = Spread::of(timed.iter().map(|step| tokens / step.seconds));
        let finite = |loss: f32| Some(loss).filter(|loss| loss.is_finite());
        Results {
            device: self.device.to_string(),
            precision: self.precision,
            attention: config.model.attention_label(),
            parameters: bench.parameters,
            seq_len: config.data.seq_len,
            batch_tokens: config.train.batch_tokens,
            micro_batch: bench.rows.1,
            recompute: config.train.recompute,
            warmup: args.warmup,
            steps: args.steps,
            tokens_per_second: rate,
            step_milliseconds: Spread::of(timed.iter().map(|step| step.seconds * 1e3)),
            mfu: peak_flops.map(|peak| rate.median * bench.flops_per_token / peak),
            peak_flops,
            peak_memory_bytes: memory,
            first_loss: finite(bench.steps[0].loss),
            last_loss: bench.steps.last().and_then(|step| finite(step.loss)),
        }
    }
}

fn print(r: &Results) {
    let unknown = || "unknown".to_owned();
    let loss = |loss: Option<f32>| loss.map_or_else(|| "nan".to_owned(), |x| format!("{x:.4}"));
    let (rate, time) = (&r.tokens_per_second, &r.step_milliseconds);
    let mfu = r.mfu.zip(r.peak_flops).map_or_else(unknown, |(mfu, peak)| {
        format!("{:.1} % of {:.3} TFLOP/s", mfu * 100.0, peak / 1e12)
    });
    let recompute = if r.recompute { ", blocks recomputed" } else { "" };
    println!("device          {}", r.device);
    println!("precision       {}", r.precision);
    println!("model           {} parameters, {}", count(r.parameters as f64), r.attention);
    println!(
        "batch           {} tokens in rows of {}, micro-batches of {} rows{recompute}",
        r.batch_tokens, r.seq_len, r.micro_batch
    );
    println!("steps           {} after {} to warm up", r.steps, r.warmup);
    println!("                    median         min         max");
    println!("tokens/s      {:>12.0}{:>12.0}{:>12.0}", rate.median, rate.min, rate.max);
    println!("ms a step     {:>12.2}{:>12.2}{:>12.2}", time.median, time.min, time.max);
    println!("MFU             {mfu}");
    println!("peak memory     {}", r.peak_memory_bytes.map_or_else(unknown, bytes));
    println!("loss            {} at first, {} at last", loss(r.first_loss), loss(r.last_loss));
}
