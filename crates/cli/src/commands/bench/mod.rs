//! `longwall bench …`: benchmarks on this machine.

mod parse;

use std::fmt::Display;
use std::path::PathBuf;

use anyhow::Result;
use clap::ValueEnum;
use longwall_bench::ops::Operation;
use longwall_bench::{
    KindOptions, ModelOptions, Options, decode, gemm, generate, kernels, ops, train,
};
use longwall_model::Precision;
use serde::Serialize;

use self::parse::{gemm_shape, kernel_shape, parse_context, parse_operation, parse_range};
use crate::commands::generate::SamplingArgs;
use crate::context::DeviceArg;
use crate::numbers::whole;
use crate::output::outln;
use crate::progress::BenchProgress;

/// Subcommands of `longwall bench`.
#[derive(clap::Subcommand)]
pub enum Command {
    /// Time training steps of a configuration's model on one random batch
    Train(TrainArgs),
    /// Time attention kinds' operations, forward only and with backward
    Kernels(KernelsArgs),
    /// Time the other operations of a model, forward only and with backward
    Ops(OpsArgs),
    /// Time the matrix products of linear layers, forward and backward
    Gemm(GemmArgs),
    /// Time each attention kind's decoding of one token after a long context
    Decode(DecodeArgs),
    /// Time generation with a configuration's model: the prefill and the steps after it
    Generate(GenerateArgs),
}

/// Runs a benchmark and prints its results.
pub fn run(command: Command) -> Result<()> {
    let progress = &BenchProgress::new();
    match command {
        Command::Train(args) => {
            let json = args.json;
            print(&train::run(&args.into(), progress)?, json)
        }
        Command::Kernels(args) => {
            let json = args.common.json;
            print(&kernels::run(&args.into(), progress)?, json)
        }
        Command::Ops(args) => {
            let json = args.common.json;
            print(&ops::run(&args.into(), progress)?, json)
        }
        Command::Gemm(args) => {
            let json = args.common.json;
            print(&gemm::run(&args.into(), progress)?, json)
        }
        Command::Decode(args) => {
            let json = args.common.json;
            print(&decode::run(&args.into(), progress)?, json)
        }
        Command::Generate(args) => {
            let json = args.json;
            print(&generate::run(&args.options()?, progress)?, json)
        }
    }
}

fn print<R: Serialize + Display>(report: &R, json: bool) -> Result<()> {
    if json { outln!("{}", serde_json::to_string_pretty(report)?) } else { outln!("{report}") }
}

/// Options of every benchmark of operations.
#[derive(clap::Args)]
struct CommonArgs {
    /// The device
    #[arg(long, default_value = "auto")]
    device: DeviceArg,

    /// What the inputs are rounded to; by default bf16 on CUDA, f32 on the CPU
    #[arg(long)]
    precision: Option<PrecisionArg>,

    /// Samples per measurement; a sample is as many calls as last 20 ms, at least one
    #[arg(long, default_value_t = 10, value_parser = whole::<u64>(1..=10_000))]
    samples: u64,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A precision on the command line.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum PrecisionArg {
    /// f32 throughout
    F32,
    /// f32, but linear layers round their factors to TF32
    Tf32,
    /// bf16, but linear layers round their factors to e4m3
    Fp8,
    /// bf16 with f32 sums and statistics
    Bf16,
}

impl From<CommonArgs> for Options {
    fn from(args: CommonArgs) -> Self {
        let precision = args.precision.map(|precision| match precision {
            PrecisionArg::F32 => Precision::F32,
            PrecisionArg::Tf32 => Precision::Tf32,
            PrecisionArg::Fp8 => Precision::Fp8,
            PrecisionArg::Bf16 => Precision::Bf16,
        });
        Options { device: args.device.into(), precision, samples: args.samples as usize }
    }
}

/// Which attention kinds to time.
#[derive(clap::Args)]
struct KindArgs {
    /// Attention kinds; by default every one that has a kernel on the device
    #[arg(long, value_name = "KIND", value_delimiter = ',')]
    kind: Vec<String>,

    /// A key of the kinds' tables: `--set theta=500000`
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,

    /// Draw the projections besides q, k and v, such as gates' logits, uniformly from this range; by
    /// default they are normal around their initial bias
    #[arg(
        long,
        value_name = "LOW,HIGH",
        value_parser = parse_range,
        allow_hyphen_values = true
    )]
    projections: Option<[f64; 2]>,
}

impl From<KindArgs> for KindOptions {
    fn from(args: KindArgs) -> Self {
        KindOptions { kinds: args.kind, sets: args.sets, projections: args.projections }
    }
}

/// Arguments of `longwall bench kernels`.
#[derive(clap::Args)]
pub struct KernelsArgs {
    #[command(flatten)]
    kinds: KindArgs,

    /// Batch, heads, seq_len and head_dim; repeat for more shapes; by default 8,12,1024,64,
    /// 4,16,4096,64, 4,16,4096,128, 1,16,16384,128 and 1,16,65536,64 on CUDA, 1,8,1024,64 on the CPU
    #[arg(long, value_name = "B,H,T,D", value_parser = kernel_shape)]
    shape: Vec<[usize; 4]>,

    /// Heads of k and v; by default as many as q has
    #[arg(long, value_parser = whole::<usize>(1..=u64::MAX), value_name = "HEADS")]
    kv_heads: Option<usize>,

    /// A token attends to itself and the WINDOW − 1 tokens before it
    #[arg(long, value_parser = whole::<usize>(1..=u64::MAX), value_name = "TOKENS")]
    window: Option<usize>,

    /// Pack documents of this many tokens into each row; no token sees another document
    #[arg(
        long,
        value_name = "TOKENS",
        value_parser = whole::<u64>(1..=kernels::MOST_TOKENS)
    )]
    document_len: Option<u64>,

    #[command(flatten)]
    common: CommonArgs,
}

impl From<KernelsArgs> for kernels::Options {
    fn from(args: KernelsArgs) -> Self {
        kernels::Options {
            kinds: args.kinds.into(),
            shapes: args.shape,
            kv_heads: args.kv_heads,
            window: args.window,
            document_len: args.document_len,
            common: args.common.into(),
        }
    }
}

/// Arguments of `longwall bench ops`.
#[derive(clap::Args)]
pub struct OpsArgs {
    /// Operations; by default all
    #[arg(long, value_name = "OP", value_delimiter = ',', value_parser = parse_operation())]
    op: Vec<Operation>,

    /// Rows of the batch; by default 64 on CUDA, 4 on the CPU
    #[arg(long, value_name = "N", value_parser = whole::<usize>(1..=ops::MOST_SIZE as u64))]
    batch: Option<usize>,

    /// Tokens of a row; by default 1024 on CUDA, 256 on the CPU
    #[arg(long, value_name = "N", value_parser = whole::<usize>(1..=ops::MOST_SIZE as u64))]
    seq_len: Option<usize>,

    /// Width of the model, of heads with 64 channels; by default 768 on CUDA, 256 on the CPU
    #[arg(long, value_name = "N", value_parser = whole::<usize>(1..=ops::MOST_SIZE as u64))]
    width: Option<usize>,

    /// Tokens of the vocabulary; by default 50257 on CUDA, 4096 on the CPU
    #[arg(long, value_name = "N", value_parser = whole::<usize>(1..=ops::MOST_SIZE as u64))]
    vocab_size: Option<usize>,

    #[command(flatten)]
    common: CommonArgs,
}

impl From<OpsArgs> for ops::Options {
    fn from(args: OpsArgs) -> Self {
        ops::Options {
            operations: args.op,
            batch: args.batch,
            seq_len: args.seq_len,
            width: args.width,
            vocab_size: args.vocab_size,
            common: args.common.into(),
        }
    }
}

/// Arguments of `longwall bench gemm`.
#[derive(clap::Args)]
pub struct GemmArgs {
    /// Tokens, outputs and inputs of a linear layer; repeat for more; by default the layers of
    /// GPT-2 124M at 65,536 tokens on CUDA, and a small model's on the CPU
    #[arg(long, value_name = "M,N,K", value_parser = gemm_shape)]
    shape: Vec<[usize; 3]>,

    #[command(flatten)]
    common: CommonArgs,
}

impl From<GemmArgs> for gemm::Options {
    fn from(args: GemmArgs) -> Self {
        gemm::Options { shapes: args.shape, common: args.common.into() }
    }
}

/// Arguments of `longwall bench decode`.
#[derive(clap::Args)]
pub struct DecodeArgs {
    #[command(flatten)]
    kinds: KindArgs,

    /// Tokens before the decoded one; by default 4096, 32768 and 131072 on CUDA, 512 and
    /// 2048 on the CPU
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', value_parser = parse_context)]
    context: Vec<usize>,

    /// Sequences; by default 8 on CUDA, 1 on the CPU
    #[arg(long, value_name = "N", value_parser = whole::<usize>(1..=decode::MOST_SIZE as u64))]
    batch: Option<usize>,

    /// Query heads; by default 16 on CUDA, 4 on the CPU
    #[arg(long, value_name = "N", value_parser = whole::<usize>(1..=decode::MOST_SIZE as u64))]
    heads: Option<usize>,

    /// Heads of k and v; by default as many as q has
    #[arg(long, value_name = "N", value_parser = whole::<usize>(1..=decode::MOST_SIZE as u64))]
    kv_heads: Option<usize>,

    /// Channels of a head; by default 128 on CUDA, 64 on the CPU
    #[arg(long, value_name = "N", value_parser = whole::<usize>(1..=decode::MOST_SIZE as u64))]
    head_dim: Option<usize>,

    #[command(flatten)]
    common: CommonArgs,
}

impl From<DecodeArgs> for decode::Options {
    fn from(args: DecodeArgs) -> Self {
        decode::Options {
            kinds: args.kinds.into(),
            contexts: args.context,
            batch: args.batch,
            heads: args.heads,
            kv_heads: args.kv_heads,
            head_dim: args.head_dim,
            common: args.common.into(),
        }
    }
}

/// The configuration of a benchmark that runs a whole model.
#[derive(clap::Args)]
struct ModelArgs {
    /// The configuration whose model is timed, with initial weights; its data is not read
    #[arg(long, value_name = "FILE")]
    config: PathBuf,

    /// Override a key: `--set model.layers=12`
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,

    /// The device, overriding run.device
    #[arg(long)]
    device: Option<DeviceArg>,
}

impl From<ModelArgs> for ModelOptions {
    fn from(args: ModelArgs) -> Self {
        let ModelArgs { config, sets, device } = args;
        ModelOptions { config, sets, device: device.map(Into::into) }
    }
}

/// Arguments of `longwall bench generate`.
#[derive(clap::Args)]
pub struct GenerateArgs {
    #[command(flatten)]
    model: ModelArgs,

    /// Prompts that are continued together
    #[arg(long, value_name = "N", default_value = "1", value_parser = whole::<usize>(1..=decode::MOST_SIZE as u64))]
    batch: usize,

    /// Random tokens of a prompt
    #[arg(long, value_name = "N", default_value = "128", value_parser = parse_context)]
    prompt_tokens: usize,

    /// Tokens to generate for each prompt, at least 2: the prefill yields the first
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = whole::<u64>(2..=decode::MOST_TOKENS))]
    tokens: u64,

    #[command(flatten)]
    sampling: SamplingArgs,

    /// Samples of each measurement, after one that is not timed
    #[arg(long, default_value = "5", value_parser = whole::<usize>(1..=10_000))]
    samples: usize,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl GenerateArgs {
    fn options(self) -> Result<generate::Options> {
        Ok(generate::Options {
            sampling: self.sampling.sampling()?,
            model: self.model.into(),
            batch: self.batch,
            prompt_tokens: self.prompt_tokens,
            tokens: self.tokens as usize,
            samples: self.samples,
        })
    }
}

/// Arguments of `longwall bench train`.
#[derive(clap::Args)]
pub struct TrainArgs {
    #[command(flatten)]
    model: ModelArgs,

    /// Steps to time
    #[arg(long, default_value_t = 20, value_parser = whole::<u64>(1..=1_000_000))]
    steps: u64,

    /// Untimed steps before these
    #[arg(long, default_value_t = 5, value_parser = whole::<u64>(0..=1_000_000))]
    warmup: u64,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl From<TrainArgs> for train::Options {
    fn from(args: TrainArgs) -> Self {
        train::Options { model: args.model.into(), steps: args.steps, warmup: args.warmup }
    }
}
