//! Generation with a configuration's model: the prefill of a prompt, and steps of one token.

use std::fmt::{self, Display};
use std::time::Instant;

use burn::module::Module;
use longwall_kernels::backend::OpBackend;
use longwall_kernels::device::OnDevice;
use longwall_model::generate::{GenerateError, Sampling, generate};
use longwall_model::{LanguageModel, Precision};
use longwall_train::config::RunConfig;
use longwall_train::console::count;
use longwall_train::device::Compute;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Serialize;

use crate::error::BenchError;
use crate::progress::Progress;
use crate::setup::ModelOptions;
use crate::timing::Spread;

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// The configuration whose model generates, with initial weights.
    pub model: ModelOptions,
    /// Prompts that are continued together, at least 1.
    pub batch: usize,
    /// Random tokens of a prompt, at least 1.
    pub prompt_tokens: usize,
    /// Tokens to generate for each prompt, at least 2: the prefill yields the first.
    pub tokens: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Samples, at least 1, after one that is not timed.
    pub samples: usize,
}

/// The results. They serialise as JSON and display as a table.
#[derive(Debug, Serialize)]
pub struct Results {
    device: String,
    precision: Precision,
    attention: String,
    parameters: usize,
    batch: usize,
    prompt_tokens: usize,
    tokens: usize,
    sampling: Sampling,
    samples: usize,
    /// From the prompt to the first token after it, the loading of kernels excluded.
    prefill_milliseconds: Spread,
    prefill_tokens_per_second: Spread,
    /// A sample's mean over its steps.
    step_milliseconds: Spread,
    /// New tokens of all sequences.
    tokens_per_second: Spread,
}

/// Times the generation.
///
/// # Errors
/// When the configuration, its tokenizer or its device cannot be opened, or the sequence exceeds the
/// learned positions.
pub fn run(options: &Options, progress: &dyn Progress) -> Result<Results, BenchError> {
    let (config, vocab_size, device) = options.model.open()?;
    let compute = Compute::for_trained(device, config.run.precision);
    Ok(compute.run(Job { config: &config, vocab_size, options, compute: &compute, progress })?)
}

/// The work on the device.
struct Job<'a> {
    config: &'a RunConfig,
    vocab_size: usize,
    options: &'a Options,
    compute: &'a Compute,
    progress: &'a dyn Progress,
}

/// Seconds of one sample.
struct Sample {
    prefill: f64,
    /// The mean over the steps after the first token.
    step: f64,
}

impl OnDevice for Job<'_> {
    type Output = Result<Results, GenerateError>;

    fn run<B: OpBackend>(self, device: B::Device) -> Self::Output {
        let Job { config, vocab_size, options, compute, progress } = self;
        let seed = config.run.seed;
        let model =
            LanguageModel::<B>::new(&config.model, vocab_size, config.data.seq_len, seed, &device);
        let model = compute.precision.convert(model);
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let prompt = |_| -> Vec<u32> {
            let tokens = 0..options.prompt_tokens;
            tokens.map(|_| rng.random_range(0..vocab_size as u32)).collect()
        };
        let prompts: Vec<Vec<u32>> = (0..options.batch).map(prompt).collect();
        progress.start(options.samples + 1, "samples");
        progress.measuring("(the first one may compile kernels)");
        let mut samples = vec![];
        for _ in 0..=options.samples {
            samples.push(sample(&model, &prompts, options, &device)?);
            progress.measuring("");
            progress.done();
        }
        progress.finish();
        Ok(self.results(model.num_params(), &samples[1..]))
    }
}

/// Continues the prompts once.
fn sample<B: OpBackend>(
    model: &LanguageModel<B>,
    prompts: &[Vec<u32>],
    options: &Options,
    device: &B::Device,
) -> Result<Sample, GenerateError> {
    let started = Instant::now();
    let mut first = None;
    let note_first = |_, _| {
        first.get_or_insert_with(|| started.elapsed().as_secs_f64());
    };
    generate(model, prompts, options.tokens, &options.sampling, None, device, note_first)?;
    let (all, prefill) = (started.elapsed().as_secs_f64(), first.expect("a token was generated"));
    Ok(Sample { prefill, step: (all - prefill) / (options.tokens - 1) as f64 })
}

impl Job<'_> {
    fn results(&self, parameters: usize, samples: &[Sample]) -> Results {
        let Job { config, options, compute, .. } = self;
        let prompt_tokens = (options.batch * options.prompt_tokens) as f64;
        let of = |f: &dyn Fn(&Sample) -> f64| Spread::of(samples.iter().map(f));
        Results {
            device: compute.device.to_string(),
            precision: compute.precision,
            attention: config.model.attention_label(),
            parameters,
            batch: options.batch,
            prompt_tokens: options.prompt_tokens,
            tokens: options.tokens,
            sampling: options.sampling,
            samples: options.samples,
            prefill_milliseconds: of(&|sample| sample.prefill * 1e3),
            prefill_tokens_per_second: of(&|sample| prompt_tokens / sample.prefill),
            step_milliseconds: of(&|sample| sample.step * 1e3),
            tokens_per_second: of(&|sample| options.batch as f64 / sample.step),
        }
    }
}

impl Display for Results {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parameters = count(self.parameters as f64);
        writeln!(f, "device              {}", self.device)?;
        writeln!(f, "precision           {}", self.precision)?;
        writeln!(f, "model               {parameters} parameters, {}", self.attention)?;
        writeln!(
            f,
            "batch               {} prompts of {} tokens, each continued by {}",
            self.batch, self.prompt_tokens, self.tokens
        )?;
        let Sampling { temperature, top_k, top_p, .. } = self.sampling;
        let top_k = top_k.map_or(String::new(), |k| format!(", top-k {k}"));
        let top_p = top_p.map_or(String::new(), |p| format!(", top-p {p}"));
        writeln!(f, "sampling            temperature {temperature}{top_k}{top_p}")?;
        writeln!(f, "samples             {}", self.samples)?;
        writeln!(f, "                          median         min         max")?;
        for (name, digits, spread) in [
            ("prefill, ms", 2, &self.prefill_milliseconds),
            ("prefill, tokens/s", 0, &self.prefill_tokens_per_second),
            ("step, ms", 3, &self.step_milliseconds),
        ] {
            let Spread { median, min, max } = spread;
            writeln!(f, "{name:<20}{median:>12.digits$}{min:>12.digits$}{max:>12.digits$}")?;
        }
        let Spread { median, min, max } = self.tokens_per_second;
        write!(f, "{:<20}{median:>12.0}{min:>12.0}{max:>12.0}", "tokens/s")
    }
}
