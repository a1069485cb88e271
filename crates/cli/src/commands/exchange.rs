//! `longwall export --run RUN --hf DIR` and `longwall import --hf DIR --out RUN`.

use std::path::PathBuf;

use anyhow::{Result, bail};
use longwall_config::shell_quoted;
use longwall_kernels::Cpu;
use longwall_model::LanguageModel;
use longwall_model::exchange::{LAYOUTS, WriteHf, layout_of, to_layout};
use longwall_model::start::ModelSpec;
use longwall_model::weights::{EarlierNames, read_tensors};
use longwall_train::import::import_hugging_face;
use serde_json::json;

use crate::context::RunArgs;
use crate::numbers::whole;
use crate::output::outln;

/// Arguments of `longwall export`.
#[derive(clap::Args)]
pub struct ExportArgs {
    #[command(flatten)]
    run: RunArgs,

    /// The folder to write: config.json, tokenizer.json and safetensors, in f32
    #[arg(long, value_name = "DIR")]
    hf: PathBuf,

    /// The layout, by the model_type in config.json; by default the one that can express the model
    #[arg(long, value_parser = layout_name, long_help = layout_help())]
    layout: Option<String>,

    /// Largest size of a file of weights, in MB; a larger model is sharded
    #[arg(long, value_name = "MB", default_value_t = 5000, value_parser = whole::<u64>(1..=u64::MAX))]
    max_shard: u64,
}

/// Arguments of `longwall import`.
#[derive(clap::Args)]
pub struct ImportArgs {
    /// The folder with config.json, tokenizer.json and safetensors, in a layout that `longwall export --help` lists
    #[arg(long, value_name = "DIR")]
    hf: PathBuf,

    /// The run folder to make
    #[arg(long, value_name = "RUN")]
    out: PathBuf,
}

fn layout_help() -> String {
    let lines = LAYOUTS.iter().map(|layout| {
        let (name, kind) = (layout.model_type(), layout.kind());
        format!("\n  {name:24}attention kind {kind}")
    });
    let lines: String = lines.collect();
    format!(
        "The layout, by the model_type in config.json; by default the one that can express the model.{lines}\n\
         gpt2 and llama are those of transformers, the others of flash-linear-attention, where \
         \"import fla\" comes before AutoModelForCausalLM.from_pretrained."
    )
}

fn layout_name(name: &str) -> Result<String, String> {
    let known: Vec<_> = LAYOUTS.iter().map(|layout| layout.model_type()).collect();
    match known.contains(&name) {
        true => Ok(name.to_owned()),
        false => Err(format!("allowed: {}", known.join(", "))),
    }
}

/// Writes the folder and prints its name.
pub fn export(args: ExportArgs) -> Result<()> {
    let run = args.run.open()?;
    let (config, vocab_size) = (&run.config, run.tokenizer.vocab_size());
    let spec = ModelSpec { config: &config.model, vocab_size, seq_len: config.data.seq_len };
    let (layout, mut json) = layout_of(&spec, args.layout.as_deref())?;
    let end_of_text = run.tokenizer.end_of_text();
    for key in ["bos_token_id", "eos_token_id"] {
        json[key] = end_of_text.into();
    }
    let name = run.tokenizer.decode(&[end_of_text]);
    let tokenizer_config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": name,
        "eos_token": name,
        "unk_token": name,
        "model_max_length": spec.seq_len,
    });
    let blank =
        LanguageModel::<Cpu>::blank(spec.config, vocab_size, spec.seq_len, &Default::default());
    let weights = read_tensors(&run.checkpoint.selected(run.weights)?)?;
    let weights = EarlierNames::of(&blank).replace(weights);
    let folder = WriteHf {
        config: &json,
        others: vec![
            ("tokenizer.json", run.tokenizer.to_hugging_face()?),
            ("tokenizer_config.json", serde_json::to_vec_pretty(&tokenizer_config)?),
        ],
        max_shard_bytes: args.max_shard.saturating_mul(1_000_000),
    };
    folder.write(&args.hf, &to_layout(layout, &spec, &weights))?;
    tracing::info!("the layout is that of {}", layout.model_type());
    outln!("{}", args.hf.display())
}

/// Makes the run folder and prints what can be done with it.
pub fn import(args: ImportArgs) -> Result<()> {
    if args.out.file_name().is_none() {
        bail!("--out is {}; allowed: the name of a new folder", args.out.display());
    }
    let config = import_hugging_face(&args.hf, &args.out)?;
    let run = shell_quoted(&args.out);
    outln!("{run}: {}", config.model.attention_label())?;
    outln!("\nNext, for example:")?;
    outln!("  longwall generate --run {run} --prompt \"Once upon a time\"")?;
    outln!("  longwall train --from {run} --config FILE   # with its [model] and [tokenizer]")
}
