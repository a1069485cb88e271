//! `longwall variants`.

use anyhow::{Context, Result};
use longwall_kernels::attention::AttentionConfig;
use longwall_kernels::device::DeviceKind;
use longwall_model::{ModelConfig, cost};
use serde::Serialize;

use crate::costs::{ratio, short, state_bytes};
use crate::output::{outln, print};

/// Arguments of `longwall variants`.
#[derive(clap::Args)]
pub struct Args {
    /// Print docs/variants.md, which has costs too
    #[arg(long)]
    markdown: bool,

    /// Print JSON, with costs
    #[arg(long, conflicts_with = "markdown")]
    json: bool,
}

/// The sequence lengths to give costs at.
const LENGTHS: [usize; 3] = [1024, 8192, 65_536];

/// One kind with its default settings, in a model of GPT-2's 124M shape.
#[derive(Serialize)]
struct Row {
    kind: &'static str,
    source: &'static str,
    /// The keys of its table, with their defaults if they have any.
    keys: Vec<String>,
    /// The devices with a kernel.
    kernels: Vec<DeviceKind>,
    /// What its layers measure with these settings.
    metrics: Vec<&'static str>,
    costs: Vec<Cost>,
}

/// Costs at one length.
#[derive(Serialize)]
struct Cost {
    seq_len: usize,
    /// Of all layers, forward, per token.
    attention_flops_per_token: f64,
    weight_state_ratio: f64,
    /// Of all layers, f32.
    state_bytes_per_sequence: u64,
}

/// Prints the registered kinds.
pub fn run(args: Args) -> Result<()> {
    let rows = rows()?;
    if args.json {
        outln!("{}", serde_json::to_string_pretty(&rows)?)?;
    } else if args.markdown {
        print(format_args!("{}", markdown(&rows)))?;
    } else {
        for row in &rows {
            let kernels = list(&row.kernels, "none");
            outln!("{:<16} {}", row.kind, row.source)?;
            outln!("{:<16} keys: {}; kernels: {kernels}", "", list(&row.keys, "none"))?;
        }
    }
    Ok(())
}

fn rows() -> Result<Vec<Row>> {
    AttentionConfig::KINDS
        .iter()
        .zip(AttentionConfig::defaults())
        .map(|(kind, config)| {
            // Through text: f32 values converted to a table directly would show the digits of f64.
            let defaults = toml::to_string(&config).context("a kind's defaults are no table")?;
            let defaults: toml::Table =
                toml::from_str(&defaults).context("a kind's defaults are no TOML")?;
            let key = |&key: &&str| match defaults.get(key) {
                Some(value) => format!("{key} = {value}"),
                None => key.to_owned(),
            };
            let model = gpt2_124m(&defaults)?;
            let cost = |seq_len| Cost {
                seq_len,
                attention_flops_per_token: cost::attention_flops_per_token(&model, seq_len),
                weight_state_ratio: cost::weight_state_ratio(&model, seq_len),
                state_bytes_per_sequence: state_bytes(&model, seq_len),
            };
            Ok(Row {
                kind: kind.kind,
                source: kind.source,
                keys: (kind.keys)().iter().map(key).collect(),
                kernels: kind.devices(),
                metrics: config.thorough_metrics().iter().map(|metric| metric.0).collect(),
                costs: LENGTHS.map(cost).into(),
            })
        })
        .collect()
}

/// GPT-2's 124M shape with a kind's default settings.
fn gpt2_124m(attention: &toml::Table) -> Result<ModelConfig> {
    let mut model = toml::toml! {
        layers = 12
        width = 768
        heads = 12
    };
    model.insert("attention".to_owned(), attention.clone().into());
    model.try_into().context("a kind's defaults do not fit GPT-2's shape")
}

fn list(items: &[impl ToString], none: &str) -> String {
    if items.is_empty() {
        return none.to_owned();
    }
    items.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn markdown(rows: &[Row]) -> String {
    let mut text = String::from(HEAD);
    text.push_str("| kind | source | keys and defaults | kernels |\n|---|---|---|---|\n");
    for row in rows {
        let keys: Vec<_> = row.keys.iter().map(|key| format!("`{key}`")).collect();
        let kernels = list(&row.kernels, "reference only");
        text +=
            &format!("| `{}` | {} | {} | {kernels} |\n", row.kind, row.source, list(&keys, "–"));
    }
    text.push_str(METRICS);
    for metric in metrics(rows) {
        let reporting = rows.iter().filter(|row| row.metrics.contains(&metric));
        let kinds: Vec<_> = reporting.map(|row| format!("`{}`", row.kind)).collect();
        text += &format!("| `{metric}` | {} |\n", list(&kinds, "–"));
    }
    text.push_str(COSTS);
    for row in rows {
        text += &format!("| `{}`", row.kind);
        for cost in &row.costs {
            text += &format!(
                " | {} | {} | {}",
                bytes(cost.state_bytes_per_sequence),
                short(cost.attention_flops_per_token / 1e6),
                ratio(cost.weight_state_ratio),
            );
        }
        text.push_str(" |\n");
    }
    text
}

/// The metrics of all kinds, each once.
fn metrics(rows: &[Row]) -> Vec<&'static str> {
    let mut metrics = vec![];
    for &metric in rows.iter().flat_map(|row| &row.metrics) {
        if !metrics.contains(&metric) {
            metrics.push(metric);
        }
    }
    metrics
}

/// A size with a binary unit.
fn bytes(n: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB"];
    let unit = (n.max(1).ilog2() as usize / 10).min(3);
    format!("{} {}", short(n as f64 / (1u64 << (10 * unit)) as f64), units[unit])
}

const HEAD: &str = "\
# Attention variants

Made by `longwall variants --markdown` from the registry; a test compares the two. Each kind's module
documentation, `kernels/src/attention/<kind>/mod.rs`, gives its equations, the initial values of its
parameters and its decoding state; [configuration.md](configuration.md) describes the keys, and
[op-files.md](op-files.md) the tensors that `longwall op` reads.

A key without a value has no default: it is off, or follows from the model's sizes. Where a kind has
no kernel for a device, its reference in plain tensor operations runs there.

";

const METRICS: &str = "
## Metrics

What layers measure of themselves with the default settings, at validations and in
`longwall eval attention-stats`; other settings may add to it (`prune`).
[configuration.md](configuration.md#a-run-folder) describes every metric.

| metric | kinds |
|---|---|
";

const COSTS: &str = "
## Costs

With the default settings in a model of GPT-2's 124M shape (12 layers, 12 heads of 64 channels), at
three context lengths: what decoding keeps per sequence (f32), the operation's forward MFLOP per
token, averaged over a causal sequence, and the weight-to-state FLOP ratio (Gelada et al., 2025,
section 3.2; without the output projection). `longwall info --config FILE --seq-len N` gives the
same for any configuration.

| kind | state, 1,024 | MFLOP | ratio | state, 8,192 | MFLOP | ratio | state, 65,536 | MFLOP | ratio |
|---|---|---|---|---|---|---|---|---|---|
";
