//! `longwall bench decode`.

use std::cell::RefCell;

use anyhow::{Result, bail};
use burn::tensor::DType;
use longwall_config::parse_count;
use longwall_kernels::attention::{AttentionShape, DecodeState, Inputs};
use longwall_kernels::backend::OpBackend;
use longwall_kernels::device::OnDevice;
use serde::Serialize;

use super::attention::{Kind, KindArgs, Path};
use super::ceiling::Ceiling;
use super::report::{Measured, Report};
use super::setup::{CommonArgs, Setup};
use super::timing::{Clock, Pass, Work};
use crate::progress::bar;

/// Arguments of `longwall bench decode`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    kinds: KindArgs,

    /// Tokens before the one that is decoded; by default 4096, 32768 and 131072 on CUDA, 512 and
    /// 2048 on the CPU
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', value_parser = parse_context)]
    context: Vec<usize>,

    /// Sequences; by default 8 on CUDA, 1 on the CPU
    #[arg(long, value_name = "N", value_parser = parse_size)]
    batch: Option<usize>,

    /// Query heads; by default 16 on CUDA, 4 on the CPU
    #[arg(long, value_name = "N", value_parser = parse_size)]
    heads: Option<usize>,

    /// Heads of k and v; by default as many as q has
    #[arg(long, value_name = "N", value_parser = parse_size)]
    kv_heads: Option<usize>,

    /// Channels of a head; by default 128 on CUDA, 64 on the CPU
    #[arg(long, value_name = "N", value_parser = parse_size)]
    head_dim: Option<usize>,

    #[command(flatten)]
    common: CommonArgs,
}

/// The longest context.
const MOST_TOKENS: u64 = 1 << 24;

/// The greatest batch, number of heads and number of channels.
const MOST_SIZE: usize = 1 << 16;

/// Tokens that enter the state at once while it is filled.
const PIECE: usize = 1024;

fn parse_context(text: &str) -> Result<usize, String> {
    match parse_count(text)? {
        tokens @ 1..=MOST_TOKENS => Ok(tokens as usize),
        _ => Err(format!("`{text}` is out of range; allowed: from 1 to {MOST_TOKENS} tokens")),
    }
}

fn parse_size(text: &str) -> Result<usize, String> {
    let size = text.parse().ok().filter(|size| (1..=MOST_SIZE).contains(size));
    size.ok_or_else(|| format!("`{text}`; allowed: a whole number from 1 to {MOST_SIZE}"))
}

/// What was measured of one kind at one context.
#[derive(Serialize)]
struct Case {
    kind: &'static str,
    settings: Vec<String>,
    /// The range of the projections; `null` where they are normal around their bias.
    projections: Option<[f64; 2]>,
    path: Path,
    batch: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    context: usize,
    passes: [Pass; 1],
    #[serde(skip)]
    labels: Vec<String>,
}

impl Measured for Case {
    const COLUMNS: &'static [&'static str] = &["kind", "path", "batch, heads, context, head_dim"];

    fn labels(&self) -> Vec<String> {
        self.labels.clone()
    }

    fn passes(&self) -> &[Pass] {
        &self.passes
    }
}

/// Times the kinds and prints the results.
pub fn run(args: Args) -> Result<()> {
    let setup = args.common.open()?;
    let kinds = args.kinds.choose(&setup)?;
    let sizes = Sizes::new(&args, &setup)?;
    for kind in &kinds {
        kind.check(&sizes.layer, "--head-dim")?;
    }
    let contexts = contexts(&args, &setup, &kinds, &sizes)?;
    let job = Job { args: &args.kinds, setup: &setup, kinds: &kinds, sizes, contexts };
    let (ceiling, results) = setup.device.clone().run(job);
    Report::new(&setup, ceiling, results).print(args.common.json)
}

/// The sizes of a layer and its batch.
#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    layer: AttentionShape,
}

impl Sizes {
    fn new(args: &Args, setup: &Setup) -> Result<Self> {
        let batch = args.batch.unwrap_or(setup.choose(8, 1));
        let heads = args.heads.unwrap_or(setup.choose(16, 4));
        let head_dim = args.head_dim.unwrap_or(setup.choose(128, 64));
        let kv_heads = args.kv_heads.unwrap_or(heads);
        if !heads.is_multiple_of(kv_heads) {
            bail!(
                "--kv-heads is {kv_heads}; allowed: a divisor of the {heads} heads\n  \
                 hint: leave it out for {heads}"
            );
        }
        Ok(Sizes { batch, layer: AttentionShape::new(heads * head_dim, heads, kv_heads, head_dim) })
    }

    /// Bytes of the larger of a cache's keys and values.
    fn cache_half(&self, kind: &Kind, tokens: usize, dtype: DType) -> u64 {
        let Sizes { batch, layer } = self;
        let keys = kind.config.views() * layer.head_dim;
        let channels = keys.max(kind.config.value_dim(layer)) * layer.kv_heads;
        [*batch, channels, tokens, dtype.size()].iter().map(|n| *n as u64).product()
    }
}

/// The contexts whose caches the device can hold; an error where one was asked for that it cannot.
fn contexts(args: &Args, setup: &Setup, kinds: &[Kind], sizes: &Sizes) -> Result<Vec<usize>> {
    let default: &[usize] = setup.choose(&[4096, 32_768, 131_072], &[512, 2048]);
    let asked = if args.context.is_empty() { default } else { &args.context };
    let most = setup.device.largest_tensor().unwrap_or(u64::MAX);
    let mut fitting = vec![];
    for &context in asked {
        let bytes =
            kinds.iter().map(|k| sizes.cache_half(k, most_tokens(context, 0), setup.dtype()));
        let bytes = bytes.max().unwrap_or(0);
        if bytes <= most {
            fitting.push(context);
            continue;
        }
        let problem = format!(
            "--context {context} needs {:.1} GB for keys, and as much for values; allowed on this \
             device: up to {:.1} GB",
            bytes as f64 / 1e9,
            most as f64 / 1e9
        );
        if !args.context.is_empty() {
            bail!("{problem}\n  hint: decode fewer sequences with --batch, or a shorter context");
        }
        tracing::warn!("{problem}; it is left out");
    }
    Ok(fitting)
}

/// The work on the device.
struct Job<'a> {
    args: &'a KindArgs,
    setup: &'a Setup,
    kinds: &'a [Kind],
    sizes: Sizes,
    contexts: Vec<usize>,
}

impl OnDevice for Job<'_> {
    type Output = (Ceiling, Vec<Case>);

    fn run<B: OpBackend>(self, device: B::Device) -> Self::Output {
        B::seed(&device, 0);
        let ceiling = Ceiling::of_bytes::<B>(self.setup, &device);
        let clock = self.setup.clock::<B>(&device);
        let total = (self.kinds.len() * self.contexts.len()) as u64;
        let bar = bar(Some(total), "{wide_bar} {pos}/{len} {msg}");
        let mut cases = vec![];
        for &context in &self.contexts {
            for kind in self.kinds {
                bar.set_message(format!("{} {context}", kind.config.kind()));
                B::memory_cleanup(&device);
                cases.push(self.case(kind, context, &ceiling, &clock, &device));
                bar.inc(1);
            }
        }
        bar.finish_and_clear();
        (ceiling, cases)
    }
}

impl Job<'_> {
    fn case<B: OpBackend>(
        &self,
        kind: &Kind,
        context: usize,
        ceiling: &Ceiling,
        clock: &Clock<B>,
        device: &B::Device,
    ) -> Case {
        let Sizes { batch, layer } = self.sizes;
        let (config, dtype) = (&kind.config, self.setup.dtype());
        let state_type = if kind.path == Path::Kernel { dtype } else { DType::F32 };
        let elements = config.state_elements(&layer, context) * batch as u64;
        let bytes = elements * state_type.size() as u64;
        let inputs = |tokens: usize| kind.inputs::<B>(&layer, [batch, tokens], dtype, device);
        let (token, piece) = (inputs(1), inputs(PIECE.min(context)));
        let fill = |tokens: usize, room: usize| {
            let mut state = config.start::<B>(&layer);
            state.reserve(room);
            for first in (0..tokens).step_by(PIECE) {
                let piece = first_tokens(&piece, PIECE.min(tokens - first));
                config.extend(&layer, piece, &mut state);
            }
            state
        };
        let state = RefCell::new(Held { context, tokens: 0, state: None });
        let time = clock.clone().of_at_most((context / 2).max(1)).time_after(
            |steps| state.borrow_mut().prepare(steps, &fill),
            |_| {
                let mut held = state.borrow_mut();
                let state = held.state.as_mut().expect("filled before the first step");
                config.extend(&layer, token.clone(), state);
            },
        );
        let shape = [batch, layer.heads, context, layer.head_dim];
        Case {
            kind: config.kind(),
            settings: self.args.sets.clone(),
            projections: self.args.projections,
            path: kind.path,
            batch,
            heads: layer.heads,
            kv_heads: layer.kv_heads,
            head_dim: layer.head_dim,
            context,
            passes: [Pass::new("step", time, Work::Bytes(bytes as f64), ceiling)],
            labels: kind.labels().into_iter().chain([format!("{shape:?}")]).collect(),
        }
    }
}

/// The first `tokens` tokens of inputs.
fn first_tokens<B: OpBackend>(inputs: &Inputs<B>, tokens: usize) -> Inputs<B> {
    let Inputs { q, k, v, projections, parameters } = inputs.clone();
    let [q, k, v] = [q, k, v].map(|x| x.narrow(2, 0, tokens));
    let projections = projections.into_iter().map(|x| x.narrow(1, 0, tokens)).collect();
    Inputs { q, k, v, projections, parameters }
}

/// The most tokens that a state takes which is to hold `context` in the mean of `steps` steps.
fn most_tokens(context: usize, steps: usize) -> usize {
    context + steps.div_ceil(2).max(context / 64)
}

/// A state of `context` tokens, or nearly so: each step appends one.
struct Held<S> {
    context: usize,
    tokens: usize,
    state: Option<S>,
}

impl<S> Held<S> {
    /// Fills the state anew where `steps` more steps would take it too far from the context. `fill`
    /// gets its tokens, and those to make room for.
    fn prepare(&mut self, steps: usize, fill: &impl Fn(usize, usize) -> S) {
        let most = most_tokens(self.context, steps);
        if self.state.is_none() || self.tokens + steps > most {
            self.state = None; // Its memory serves the new one.
            self.tokens = self.context.saturating_sub(steps / 2).max(1);
            self.state = Some(fill(self.tokens, most));
        }
        self.tokens += steps;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_is_filled_anew_before_it_leaves_the_context() {
        let filled = RefCell::new(vec![]);
        let fill = |tokens, room| filled.borrow_mut().push((tokens, room));
        let mut held = Held { context: 640, tokens: 0, state: None };
        held.prepare(1, &fill);
        assert_eq!(filled.take(), [(640, 650)]);
        held.prepare(9, &fill);
        assert_eq!((filled.take(), held.tokens), (vec![], 650));
        held.prepare(1, &fill);
        assert_eq!((filled.take().len(), held.tokens), (1, 641));
        // Many steps stand around the context.
        for _ in 0..2 {
            held.prepare(101, &fill);
            assert_eq!((filled.take(), held.tokens), (vec![(590, 691)], 691));
        }
    }

    #[test]
    fn a_state_of_one_token_is_possible() {
        let mut held = Held { context: 1, tokens: 0, state: None };
        held.prepare(1, &|tokens, room| assert_eq!((tokens, room), (1, 2)));
        assert_eq!(held.tokens, 2);
    }

    #[test]
    fn sizes_and_contexts_have_ranges() {
        assert_eq!((parse_context("32k"), parse_size("16")), (Ok(32_000), Ok(16)));
        assert!(parse_context("0").unwrap_err().contains("from 1 to"));
        assert!(parse_context("17M").is_err() && parse_context("x").is_err());
        assert!(["0", "-1", "65537", "a"].iter().all(|text| parse_size(text).is_err()));
    }
}
