//! `longwall info --config FILE`, `longwall info --run RUN`.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::ArgGroup;
use longwall_config::{Problems, parse_count};
use longwall_data::Tokenizer;
use longwall_kernels::attention::AttentionConfig;
use longwall_kernels::device::DeviceKind;
use longwall_model::config::Window;
use longwall_model::cost::{self, KindCost, Parameters};
use longwall_model::{ModelConfig, Precision};
use longwall_train::config::RunConfig;
use longwall_train::memory::{self, Estimate};
use longwall_train::optimiser::{Assigned, assignment};
use longwall_train::run_folder;
use longwall_train::timeline::Stage;
use serde::Serialize;

use super::eval::{suites_in_the_loop, suites_of};
use crate::costs::{ratio, state_bytes};
use crate::output::outln;

/// The greatest length to count costs at: beyond it those of one layer could overflow.
pub(crate) const LONGEST: usize = 1 << 40;

/// Arguments of `longwall info`.
#[derive(clap::Args)]
#[command(group(ArgGroup::new("model").required(true).args(["config", "run"])))]
pub struct Args {
    /// A run's configuration
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// A run's folder, instead of a configuration
    #[arg(long, value_name = "RUN")]
    run: Option<PathBuf>,

    /// Override a key: `--set model.layers=12`
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,

    /// Length in tokens that FLOPs and state are counted at; by default data.seq_len
    #[arg(long, value_parser = parse_count, value_name = "TOKENS")]
    seq_len: Option<u64>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What a model costs.
#[derive(Serialize)]
pub(crate) struct Info {
    /// The kind; for a hybrid, its kinds with their numbers of layers.
    attention: String,
    vocab_size: usize,
    /// Rows of the embedding and of the output layer.
    padded_vocab_size: usize,
    parameters: Parameters,
    parameters_total: usize,
    seq_len: usize,
    forward_flops_per_token: f64,
    attention_flops_per_token: f64,
    train_flops_per_token: f64,
    state_bytes_per_sequence: u64,
    state_bytes_per_token: f64,
    weight_state_ratio: f64,
    steps: u64,
    /// Its stages: one, unless `train.stages` lists further ones.
    stages: Vec<StageCosts>,
    /// Whether the configuration has stages.
    #[serde(skip)]
    staged: bool,
    /// The window of the last stage, if the stages differ in theirs: that of the model that these figures are of.
    #[serde(skip_serializing_if = "Option::is_none")]
    window: Option<Window>,
    train_flops: f64,
    /// On a GPU, in bf16, at least: see [`memory::least_for_training`].
    train_memory_bytes: u64,
    /// Rows of a micro-batch on a GPU with room for it, in the stage that needs most memory.
    micro_batch: usize,
    /// On a GPU, in the configured precision or else bf16, with micro-batches of that many rows.
    train_memory_estimate: Estimate,
    train_memory_precision: Precision,
    train_memory_estimate_bytes: u64,
    /// Which parameters the optimiser updates in which way.
    optimiser: Vec<Assigned>,
    layers: Vec<Layers>,
    kinds: Vec<Kind>,
}

impl Info {
    /// The figures of a valid configuration, with a vocabulary of `vocab` tokens, at a length of `seq_len`.
    pub(crate) fn of(config: &RunConfig, vocab: usize, seq_len: usize) -> Self {
        let timeline = config.timeline();
        let model = &config.model_after(timeline.total_steps());
        let parameters = Parameters::of(model, vocab, config.data.seq_len);
        let costs = Costs::of(model, &parameters, seq_len);
        let precision = config.run.precision.unwrap_or(Precision::Bf16);
        let of_stage = |stage: &Stage| StageCosts::of(config, stage, vocab, precision);
        let stages: Vec<StageCosts> = timeline.stages().iter().map(of_stage).collect();
        let largest = stages.iter().max_by_key(|stage| stage.train_memory_estimate_bytes);
        let StageCosts { micro_batch, estimate, .. } = *largest.expect("a run has a stage");
        Info {
            attention: model.attention_label(),
            vocab_size: vocab,
            padded_vocab_size: model.padded_vocab(vocab),
            parameters,
            parameters_total: costs.parameters,
            seq_len,
            forward_flops_per_token: cost::forward_flops_per_token(model, vocab, seq_len),
            attention_flops_per_token: costs.attention_flops_per_token,
            train_flops_per_token: cost::train_flops_per_token(model, vocab, seq_len),
            state_bytes_per_sequence: costs.state_bytes_per_sequence,
            state_bytes_per_token: costs.state_bytes_per_token,
            weight_state_ratio: costs.weight_state_ratio,
            layers: cost::by_kind(model, seq_len).into_iter().map(Layers::of).collect(),
            kinds: kinds(model, costs, vocab, [config.data.seq_len, seq_len]),
            steps: timeline.total_steps(),
            stages,
            staged: timeline.is_staged(),
            window: timeline.has_windows().then(|| Window::of(model.window)),
            train_flops: config.train_flops(vocab),
            train_memory_bytes: least_gpu_memory(config, vocab),
            micro_batch,
            train_memory_estimate: estimate,
            train_memory_precision: precision,
            train_memory_estimate_bytes: estimate.total(),
            optimiser: assignment(&config.rules().all(vocab, config.data.seq_len)),
        }
    }
}

/// A stage, and what it costs.
#[derive(Serialize)]
struct StageCosts {
    #[serde(flatten)]
    stage: Stage,
    train_flops_per_token: f64,
    /// Rows of a micro-batch on a GPU with room for it.
    #[serde(rename = "gpu_micro_batch")]
    micro_batch: usize,
    #[serde(skip)]
    estimate: Estimate,
    train_memory_estimate_bytes: u64,
}

impl StageCosts {
    fn of(config: &RunConfig, stage: &Stage, vocab: usize, precision: Precision) -> Self {
        let micro_batch = stage.micro_batch_rows(memory::GPU_MICRO_BATCH_TOKENS);
        let estimate = Estimate::of(config, vocab, stage.open(micro_batch), precision)
            .on_ranks(stage.context_parallel, precision);
        StageCosts {
            stage: *stage,
            train_flops_per_token: config.flops_per_token(stage, vocab),
            micro_batch,
            estimate,
            train_memory_estimate_bytes: estimate.total(),
        }
    }
}

/// The layers of one kind, and what they cost together.
#[derive(Serialize)]
struct Layers {
    name: String,
    kind: &'static str,
    window: Option<usize>,
    /// Indices, from 0.
    layers: Vec<usize>,
    attention_parameters: usize,
    attention_flops_per_token: f64,
    state_bytes_per_sequence: u64,
}

impl Layers {
    fn of(cost: KindCost<'_>) -> Self {
        let KindCost { kind, parameters, flops_per_token, state_elements } = cost;
        Layers {
            name: kind.name.to_owned(),
            kind: kind.attention.kind(),
            window: kind.window,
            layers: kind.layers,
            attention_parameters: parameters,
            attention_flops_per_token: flops_per_token,
            state_bytes_per_sequence: state_elements.saturating_mul(4),
        }
    }
}

/// The same model with another attention kind, with its default settings or as configured.
#[derive(Serialize)]
struct Kind {
    kind: &'static str,
    /// Why the model cannot have this kind; then there are no costs.
    problem: Option<String>,
    costs: Option<Costs>,
}

#[derive(Clone, Copy, Serialize)]
struct Costs {
    parameters: usize,
    attention_parameters: usize,
    attention_flops_per_token: f64,
    state_bytes_per_sequence: u64,
    state_bytes_per_token: f64,
    weight_state_ratio: f64,
}

impl Costs {
    fn of(model: &ModelConfig, parameters: &Parameters, seq_len: usize) -> Self {
        let state = state_bytes(model, seq_len);
        Costs {
            parameters: parameters.total(),
            attention_parameters: parameters.attention,
            attention_flops_per_token: cost::attention_flops_per_token(model, seq_len),
            state_bytes_per_sequence: state,
            state_bytes_per_token: state as f64 / seq_len as f64,
            weight_state_ratio: cost::weight_state_ratio(model, seq_len),
        }
    }
}

/// The name in [`Kind`] of a model with a pattern of kinds.
const PATTERN: &str = "pattern";

/// The model with each registered kind in all layers; the configured kind keeps its settings and has
/// the costs `own`. A model with a pattern comes first.
fn kinds(
    model: &ModelConfig,
    own: Costs,
    vocab: usize,
    [trained_len, seq_len]: [usize; 2],
) -> Vec<Kind> {
    let configured = |kind| Kind { kind, problem: None, costs: Some(own) };
    let with = |config: AttentionConfig| {
        let kind = config.kind();
        if model.attention.as_ref().is_some_and(|attention| attention.kind() == kind) {
            return configured(kind);
        }
        let model = model.with_attention(config);
        let mut problems = Problems::new();
        model.validate(&mut problems);
        let problem = problems.as_slice().first().map(|p| format!("{} is {}", p.key, p.value));
        let costs = problem
            .is_none()
            .then(|| Costs::of(&model, &Parameters::of(&model, vocab, trained_len), seq_len));
        Kind { kind, problem, costs }
    };
    let pattern = model.pattern.as_ref().map(|_| configured(PATTERN));
    pattern.into_iter().chain(AttentionConfig::defaults().into_iter().map(with)).collect()
}

/// The configuration, checked as `train` checks it, and its tokenizer.
fn open(args: &Args) -> Result<(RunConfig, Tokenizer)> {
    let (config, tokenizer, source) = match (&args.run, &args.config) {
        (Some(run), _) => {
            let config = run_folder::config_of(run, &args.sets)?;
            let tokenizer = run_folder::load_tokenizer(run, &config.tokenizer)?;
            (config, tokenizer, run.join("config.toml"))
        }
        (None, Some(path)) => {
            let config = RunConfig::load(path, &args.sets)?;
            let tokenizer = Tokenizer::load(&config.tokenizer)?;
            (config, tokenizer, path.clone())
        }
        (None, None) => unreachable!("the parser asks for one of them"),
    };
    suites_of("eval", &config.eval, &source)?;
    suites_in_the_loop(&config, &source)?;
    Ok((config, tokenizer))
}

/// Prints the costs.
pub fn run(args: Args) -> Result<()> {
    let (config, tokenizer) = open(&args)?;
    let vocab = tokenizer.vocab_size();
    let seq_len = args.seq_len.map_or(config.data.seq_len, |n| n as usize);
    if !(1..=LONGEST).contains(&seq_len) {
        bail!(
            "--seq-len is {seq_len}; allowed: from 1 to {LONGEST} tokens\n  \
             hint: leave it out for data.seq_len"
        );
    }
    let info = Info::of(&config, vocab, seq_len);
    if args.json {
        return outln!("{}", serde_json::to_string_pretty(&info)?);
    }
    print(&info)?;
    print_optimiser(&info.optimiser, config.train.lr)?;
    if config.model.pattern.is_some() {
        print_layers(&info.layers)?;
    }
    print_kinds(&info.kinds)
}

/// Bytes of GPU memory that training in bf16, one row at a time, needs at least.
fn least_gpu_memory(config: &RunConfig, vocab_size: usize) -> u64 {
    let (precision, device) = (Precision::Bf16, DeviceKind::Cuda);
    let of = |stage: &Stage| {
        let row = [1, stage.tokens_of_rank()];
        memory::least_for_training(config, vocab_size, row, precision, device)
    };
    let bytes = config.timeline().stages().iter().map(of).max().unwrap_or_default();
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

fn print(info: &Info) -> Result<()> {
    let p = &info.parameters;
    let share = info.attention_flops_per_token / info.forward_flops_per_token * 100.0;
    outln!("attention                {}", info.attention)?;
    let (vocab, padded) = (info.vocab_size, info.padded_vocab_size);
    let padding = if padded > vocab { format!(", padded to {padded}") } else { String::new() };
    outln!("vocabulary               {vocab}{padding}")?;
    outln!("parameters               {}", info.parameters_total)?;
    outln!("  embedding              {}", p.embedding)?;
    outln!("  attention              {}", p.attention)?;
    outln!("  mlp                    {}", p.mlp)?;
    outln!("  norms                  {}", p.norms)?;
    outln!("  head                   {}", p.head)?;
    let window = info.window.map(|window| format!(", with the last stage's window ({window})"));
    outln!("at a length of           {} tokens{}", info.seq_len, window.unwrap_or_default())?;
    outln!("  forward, per token     {:.3} MFLOP", info.forward_flops_per_token / 1e6)?;
    outln!(
        "    of it attention      {:.3} MFLOP ({share:.1} %)",
        info.attention_flops_per_token / 1e6
    )?;
    outln!("  training, per token    {:.3} MFLOP", info.train_flops_per_token / 1e6)?;
    outln!(
        "  state, per sequence    {} bytes (f32; buffers grow by doubling)",
        info.state_bytes_per_sequence
    )?;
    outln!("  state, per token       {:.0} bytes", info.state_bytes_per_token)?;
    outln!("  weight : state FLOPs   {}", ratio(info.weight_state_ratio))?;
    outln!("the run                  {} steps, {:.3e} FLOP", info.steps, info.train_flops)?;
    if info.staged {
        for costs in &info.stages {
            let Stage { first_step, first_token, batch_tokens, seq_len, window, .. } = costs.stage;
            let window = info.window.map(|_| format!(", window {}", Window::of(window)));
            outln!(
                "  from step {:<12} batches of {batch_tokens} tokens, rows of {seq_len}{}, after {first_token} tokens: \
                 {:.3} MFLOP per token, an estimated {:.1} GB on a GPU",
                first_step + 1,
                window.unwrap_or_default(),
                costs.train_flops_per_token / 1e6,
                costs.train_memory_estimate_bytes as f64 / 1e9,
            )?;
        }
    }
    let gigabytes = info.train_memory_bytes as f64 / 1e9;
    outln!(
        "  GPU memory, at least   {gigabytes:.3} GB (weights, gradients, optimiser, block inputs)"
    )?;
    let (rows, estimate) = (info.micro_batch, info.train_memory_estimate);
    outln!(
        "    estimated            {estimate}, in {} with micro-batches of {rows} rows",
        info.train_memory_precision
    )
}

/// Which parameters are updated in which way. `lr` is the peak learning rate.
fn print_optimiser(assigned: &[Assigned], lr: f64) -> Result<()> {
    outln!("the optimiser, by update, peak learning rate and weight decay:")?;
    outln!(
        "  update      lr          decay       tensors   parameters  names, * is the block's number"
    )?;
    for a in assigned {
        let group = a.group.map(|at| format!("train.groups.{at}: ")).unwrap_or_default();
        outln!(
            "  {:<10}  {:<10.3e}  {:<10.3e}  {:>7}  {:>11}  {group}{}",
            a.method,
            a.lr * lr,
            a.weight_decay,
            a.tensors,
            a.parameters,
            a.names.join(", "),
        )?;
    }
    Ok(())
}

/// The costs of the layers of each kind of a pattern.
fn print_layers(layers: &[Layers]) -> Result<()> {
    outln!("attention by kind, summed over the layers of each, which are counted from 0:")?;
    outln!(
        "  name              kind              window   parameters  MFLOP/token  state bytes  layers"
    )?;
    for group in layers {
        outln!(
            "  {:<16}  {:<16} {:>7}  {:>11}  {:>11.3}  {:>11}  {}",
            group.name,
            group.kind,
            group.window.map_or_else(|| "none".to_owned(), |tokens| tokens.to_string()),
            group.attention_parameters,
            group.attention_flops_per_token / 1e6,
            group.state_bytes_per_sequence,
            ranges(&group.layers),
        )?;
    }
    Ok(())
}

/// Ascending numbers, with runs as ranges: `0-4, 6`.
fn ranges(numbers: &[usize]) -> String {
    let runs = numbers.chunk_by(|a, b| a + 1 == *b).map(|run| match run {
        [first, .., last] => format!("{first}-{last}"),
        _ => run[0].to_string(),
    });
    runs.collect::<Vec<_>>().join(", ")
}

fn print_kinds(kinds: &[Kind]) -> Result<()> {
    outln!("the same model with each kind of attention (default keys where not configured):")?;
    outln!("  kind              parameters  attention MFLOP/token  state bytes/token  ratio")?;
    for Kind { kind, problem, costs } in kinds {
        match costs {
            Some(costs) => outln!(
                "  {kind:<16} {:>11}  {:>21.3}  {:>17.0}  {}",
                costs.parameters,
                costs.attention_flops_per_token / 1e6,
                costs.state_bytes_per_token,
                ratio(costs.weight_state_ratio)
            )?,
            None => {
                outln!("  {kind:<16} not possible: {}", problem.as_deref().unwrap_or_default())?
            }
        }
    }
    Ok(())
}
