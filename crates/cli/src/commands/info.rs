//! `longwall info --config FILE`.

use std::path::PathBuf;

use anyhow::{Result, bail};
use longwall_config::parse_count;
use longwall_data::Tokenizer;
use longwall_model::cost::{self, Parameters};
use longwall_train::config::RunConfig;
use serde::Serialize;

/// Arguments of `longwall info`.
#[derive(clap::Args)]
pub struct Args {
    /// The run's configuration
    #[arg(long, value_name = "FILE")]
    config: PathBuf,

    /// Override a key: `--set model.layers=12`
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,

    /// Length in tokens that FLOPs and cache are counted at; by default data.seq_len
    #[arg(long, value_parser = parse_count, value_name = "TOKENS")]
    seq_len: Option<u64>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What a model costs.
#[derive(Serialize)]
struct Info {
    attention: &'static str,
    vocab_size: usize,
    parameters: Parameters,
    parameters_total: usize,
    seq_len: usize,
    forward_flops_per_token: f64,
    attention_flops_per_token: f64,
    train_flops_per_token: f64,
    cache_bytes_per_sequence: u64,
    cache_bytes_per_token: f64,
    steps: u64,
    train_flops: f64,
}

/// Prints the costs.
pub fn run(args: Args) -> Result<()> {
    let config = RunConfig::load(&args.config, &args.sets)?;
    let vocab = Tokenizer::load(&config.tokenizer)?.vocab_size();
    let seq_len = args.seq_len.map_or(config.data.seq_len, |n| n as usize);
    if seq_len == 0 {
        bail!("--seq-len is 0; allowed: 1 or more tokens\n  hint: leave it out for data.seq_len");
    }
    let model = &config.model;
    let parameters = Parameters::of(model, vocab, config.data.seq_len);
    let trained = cost::train_flops_per_token(model, vocab, config.data.seq_len);
    // The cache holds f32.
    let cache = 4 * cost::state_elements(model, seq_len);
    let info = Info {
        attention: model.attention.kind(),
        vocab_size: vocab,
        parameters,
        parameters_total: parameters.total(),
        seq_len,
        forward_flops_per_token: cost::forward_flops_per_token(model, vocab, seq_len),
        attention_flops_per_token: model.layers as f64
            * cost::attention_flops_per_token(model, seq_len),
        train_flops_per_token: cost::train_flops_per_token(model, vocab, seq_len),
        cache_bytes_per_sequence: cache,
        cache_bytes_per_token: cache as f64 / seq_len as f64,
        steps: config.train.total_steps(),
        train_flops: trained * (config.train.total_steps() * config.train.batch_tokens) as f64,
    };
    if args.json {
        println!("{}", serde_json::to_string_pretty(&info)?);
    } else {
        print(&info);
    }
    Ok(())
}

fn print(info: &Info) {
    let p = &info.parameters;
    let share = info.attention_flops_per_token / info.forward_flops_per_token * 100.0;
    println!("attention                {}", info.attention);
    println!("vocabulary               {}", info.vocab_size);
    println!("parameters               {}", info.parameters_total);
    println!("  embedding              {}", p.embedding);
    println!("  attention              {}", p.attention);
    println!("  mlp                    {}", p.mlp);
    println!("  norms                  {}", p.norms);
    println!("  head                   {}", p.head);
    println!("at a length of           {} tokens", info.seq_len);
    println!("  forward, per token     {:.3} MFLOP", info.forward_flops_per_token / 1e6);
    println!(
        "    of it attention      {:.3} MFLOP ({share:.1} %)",
        info.attention_flops_per_token / 1e6
    );
    println!("  training, per token    {:.3} MFLOP", info.train_flops_per_token / 1e6);
    println!(
        "  cache, per sequence    {} bytes (f32; buffers grow by doubling)",
        info.cache_bytes_per_sequence
    );
    println!("  cache, per token       {:.0} bytes", info.cache_bytes_per_token);
    println!("the run                  {} steps, {:.3e} FLOP", info.steps, info.train_flops);
}
