//! `longwall generate --run RUN --prompt TEXT`.

use std::path::PathBuf;

use anyhow::{Result, anyhow, bail};
use longwall_data::Tokenizer;
use longwall_kernels::backend::OpBackend;
use longwall_kernels::device::OnDevice;
use longwall_model::generate::{Sampling, generate};

use crate::context::{OpenRun, RunArgs};
use crate::numbers::whole;
use crate::output::print;

/// Arguments of `longwall generate`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    run: RunArgs,

    /// The text to continue; without one, a document from its beginning
    #[arg(long, default_value = "", conflicts_with = "prompt_file")]
    prompt: String,

    /// A file with the text to continue
    #[arg(long, value_name = "FILE")]
    prompt_file: Option<PathBuf>,

    /// The most tokens to generate
    #[arg(long, value_parser = whole::<usize>(0..=u64::MAX), default_value_t = 256)]
    max_tokens: usize,

    #[command(flatten)]
    sampling: SamplingArgs,
}

/// How tokens are chosen.
#[derive(clap::Args)]
pub struct SamplingArgs {
    /// Divides the logits: above 1 is more varied, 0 always takes the most likely token
    #[arg(long, default_value_t = 0.8)]
    temperature: f32,

    /// Draw from the K most likely tokens only
    #[arg(long, value_parser = whole::<usize>(0..=u64::MAX), value_name = "K")]
    top_k: Option<usize>,

    /// Draw from the most likely tokens that together reach probability P
    #[arg(long, value_name = "P")]
    top_p: Option<f32>,

    /// Seed of the draws
    #[arg(long, value_parser = whole::<u64>(0..=u64::MAX), default_value_t = 0)]
    seed: u64,
}

/// Streams the continuation to stdout.
pub fn run(mut args: Args) -> Result<()> {
    let sampling = args.sampling.sampling()?;
    if let Some(path) = &args.prompt_file {
        args.prompt = std::fs::read_to_string(path).map_err(|error| {
            let path = path.display();
            anyhow!("cannot read --prompt-file {path}: {error}\n  hint: give a UTF-8 text file")
        })?;
    }
    let run = args.run.open()?;
    struct Generate(OpenRun, Args, Sampling);
    impl OnDevice for Generate {
        type Output = Result<()>;
        fn run<B: OpBackend>(self, device: B::Device) -> Self::Output {
            stream::<B>(&self.0, &self.1, &self.2, &device)
        }
    }
    run.compute.clone().run(Generate(run, args, sampling))
}

impl SamplingArgs {
    /// The settings, checked.
    pub fn sampling(&self) -> Result<Sampling> {
        let SamplingArgs { temperature, top_k, top_p, seed } = *self;
        if !(temperature >= 0.0 && temperature.is_finite()) {
            bail!("--temperature is {temperature}; allowed: 0 or above\n  hint: 0.8 is usual");
        }
        if top_k == Some(0) {
            bail!("--top-k is 0; allowed: 1 or more\n  hint: leave it out to draw from all tokens");
        }
        if let Some(p) = top_p.filter(|p| !(*p > 0.0 && *p <= 1.0)) {
            bail!("--top-p is {p}; allowed: above 0, at most 1\n  hint: 0.95 is usual");
        }
        Ok(Sampling { temperature, top_k, top_p, seed })
    }
}

fn stream<B: OpBackend>(
    run: &OpenRun,
    args: &Args,
    sampling: &Sampling,
    device: &B::Device,
) -> Result<()> {
    let model = run.load::<B>(device)?;
    let tokenizer = &run.tokenizer;
    let mut prompt = tokenizer.encode(&args.prompt);
    if prompt.is_empty() {
        // A document starts after an end of text.
        prompt.push(tokenizer.end_of_text());
    }
    let trained = run.checkpoint.config.data.seq_len;
    let longest = prompt.len().saturating_add(args.max_tokens);
    if longest > trained {
        tracing::warn!(
            "the text may reach {longest} tokens (a prompt of {} and --max-tokens {}); the model was trained on \
             {trained}, and may get worse beyond them",
            prompt.len(),
            args.max_tokens
        );
    }
    let mut out = Stream { tokenizer, pending: vec![], failed: None };
    out.write(&args.prompt);
    let stop = Some(tokenizer.end_of_text());
    generate(&model, &[prompt], args.max_tokens, sampling, stop, device, |_, token| {
        out.push(token);
    })?;
    out.finish()
}

/// Writes tokens as text as soon as they complete characters.
struct Stream<'a> {
    tokenizer: &'a Tokenizer,
    pending: Vec<u8>,
    failed: Option<anyhow::Error>,
}

impl Stream<'_> {
    fn push(&mut self, token: u32) {
        self.pending.extend(self.tokenizer.decode_bytes(&[token]));
        // Up to three bytes of an incomplete character wait for the rest of it.
        let ready = match std::str::from_utf8(&self.pending) {
            Err(error) if error.error_len().is_none() => error.valid_up_to(),
            _ => self.pending.len(),
        };
        let text: Vec<u8> = self.pending.drain(..ready).collect();
        self.write(&String::from_utf8_lossy(&text));
    }

    fn write(&mut self, text: &str) {
        if let Err(error) = print(format_args!("{text}")) {
            self.failed.get_or_insert(error);
        }
    }

    fn finish(mut self) -> Result<()> {
        let rest = String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned();
        self.write(&rest);
        self.write("\n");
        self.failed.map_or(Ok(()), Err)
    }
}
