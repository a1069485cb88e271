//! `longwall bench decode`.

use std::cell::RefCell;

use anyhow::{Result, bail};
use longwall_config::parse_count;
use longwall_kernels::attention::{AttentionShape, DecodeState, Inputs, Kernel};
use longwall_kernels::backend::OpBackend;
use longwall_kernels::device::OnDevice;
use serde::Serialize;

use super::attention::{Kind, KindArgs, Path, kernel, warn_of_references};
use super::ceiling::Ceiling;
use super::report::{Measured, Report};
use super::setup::{CommonArgs, Need, Setup, kv_heads, parse_size};
use super::timing::{Clock, Pass, Work};
use crate::commands::op::options::SizeNames;
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
    #[arg(long, value_name = "N", value_parser = parse_size::<MOST_SIZE>)]
    batch: Option<usize>,

    /// Query heads; by default 16 on CUDA, 4 on the CPU
    #[arg(long, value_name = "N", value_parser = parse_size::<MOST_SIZE>)]
    heads: Option<usize>,

    /// Heads of k and v; by default as many as q has
    #[arg(long, value_name = "N", value_parser = parse_size::<MOST_SIZE>)]
    kv_heads: Option<usize>,

    /// Channels of a head; by default 128 on CUDA, 64 on the CPU
    #[arg(long, value_name = "N", value_parser = parse_size::<MOST_SIZE>)]
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

/// What this command calls the sizes of a layer.
const SIZE_NAMES: SizeNames = SizeNames { head_dim: "--head-dim", width: "--heads · --head-dim" };

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
    /// In the buffers of all sequences' states at the end, with their spare room.
    held_elements: usize,
    /// The share of the keys that pruning left out of the last step; `null` where nothing is to be left out,
    /// and where no kernel for CUDA serves.
    share_left_out: Option<f64>,
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

    fn remark(&self) -> String {
        let held = format!("{:.3}M elements held", self.held_elements as f64 / 1e6);
        let share = self.share_left_out.map(|share| format!(", {:.1} % left out", 100.0 * share));
        held + &share.unwrap_or_default()
    }
}

/// Times the kinds and prints the results.
pub fn run(args: Args) -> Result<()> {
    let setup = args.common.open()?;
    let kinds = args.kinds.choose(&setup)?;
    let sizes = Sizes::new(&args, &setup)?;
    for kind in &kinds {
        kind.check(&sizes.layer, SIZE_NAMES)?;
    }
    warn_of_references(&setup, kinds.iter().map(|kind| (kind, sizes.batch, sizes.layer)));
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
        let kv_heads = kv_heads(args.kv_heads, heads)?;
        Ok(Sizes { batch, layer: AttentionShape::new(heads * head_dim, heads, kv_heads, head_dim) })
    }

    /// A state with the most room, a copy of one of its tensors, as appending may make it, and the
    /// tokens that fill the state and enter it.
    fn need(&self, kind: &Kind, context: usize, kernel: Kernel) -> Need {
        let (Sizes { batch, layer }, config) = (self, &kind.config);
        let tokens = most_tokens(context, most_steps(context));
        let dtype = config.path(kernel, layer, *batch).dtype(kernel.dtype);
        let bytes = dtype.size() as u128 * *batch as u128;
        let state = |tokens: usize| bytes * u128::from(config.state_elements(layer, tokens));
        // A cache's keys or values; a state that does not grow may be one tensor.
        let channels = (config.views() * layer.head_dim).max(config.value_dim(layer));
        let half = bytes * (channels * layer.kv_heads) as u128 * tokens as u128;
        let largest = half.max(state(1)).min(state(tokens));
        let inputs = [PIECE.min(context), 1].map(|tokens| kind.elements(layer, [*batch, tokens]));
        Need::of(inputs.concat()).and(largest, state(tokens) + largest)
    }
}

/// The contexts whose states the device can hold; an error where one was asked for that it cannot.
fn contexts(args: &Args, setup: &Setup, kinds: &[Kind], sizes: &Sizes) -> Result<Vec<usize>> {
    let default: &[usize] = setup.choose(&[4096, 32_768, 131_072], &[512, 2048]);
    let asked = if args.context.is_empty() { default } else { &args.context };
    let mut fitting = vec![];
    for &context in asked {
        let excess = kinds.iter().find_map(|kind| {
            let AttentionShape { heads, head_dim, .. } = sizes.layer;
            let options = format!(
                "--kind {} --batch {} --heads {heads} --head-dim {head_dim} --context {context}",
                kind.config.kind(),
                sizes.batch
            );
            setup.excess(&options, &sizes.need(kind, context, kernel(setup)))
        });
        match excess {
            None => fitting.push(context),
            Some(excess) if args.context.is_empty() => {
                tracing::warn!("{excess}; this context is left out");
            }
            Some(excess) => {
                bail!("{excess}\n  hint: choose a smaller --batch, or a shorter --context")
            }
        }
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
        let path = kind.path(self.setup, batch, &layer);
        let elements = config.state_elements(&layer, context) as f64 * batch as f64;
        let state_type = config.path(kernel(self.setup), &layer, batch).dtype(dtype);
        let bytes = elements * state_type.size() as f64;
        let inputs = |tokens: usize| kind.inputs::<B>(&layer, [batch, tokens], dtype, device);
        let (token, piece) = (inputs(1), inputs(PIECE.min(context)));
        let fill = |tokens: usize, room: usize| {
            let mut state = config.init_state::<B>(room);
            for first in (0..tokens).step_by(PIECE) {
                let piece = first_tokens(&piece, PIECE.min(tokens - first));
                config.extend(&layer, piece, &mut state);
            }
            state
        };
        let state = RefCell::new(Held { context, tokens: 0, state: None });
        let time = clock.clone().of_at_most(most_steps(context)).time_after(
            |steps| state.borrow_mut().prepare(steps, &fill),
            |_| {
                let mut held = state.borrow_mut();
                let state = held.state.as_mut().expect("filled before the first step");
                config.extend(&layer, token.clone(), state);
            },
        );
        let held = state.into_inner().state.expect("filled before the first step");
        let shape = [batch, layer.heads, context, layer.head_dim];
        Case {
            kind: config.kind(),
            settings: self.args.sets.clone(),
            projections: self.args.projections,
            path,
            batch,
            heads: layer.heads,
            kv_heads: layer.kv_heads,
            head_dim: layer.head_dim,
            context,
            passes: [Pass::new("step", time, Work::Bytes(bytes), ceiling)],
            held_elements: held.elements(),
            share_left_out: held.share_left_out(),
            labels: kind.labels(path).into_iter().chain([format!("{shape:?}")]).collect(),
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

/// The most steps of a sample.
fn most_steps(context: usize) -> usize {
    // So many take 20 ms on any device.
    (context / 2).clamp(1, 4096)
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
    use burn::tensor::DType;
    use longwall_kernels::device::DeviceKind;

    use super::*;
    use crate::commands::op::parse_kind;

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
    fn contexts_have_a_range() {
        assert_eq!(parse_context("32k"), Ok(32_000));
        assert!(parse_context("0").unwrap_err().contains("from 1 to"));
        assert!(parse_context("17M").is_err() && parse_context("x").is_err());
    }

    fn on_cuda(dtype: DType) -> Kernel {
        Kernel { device: DeviceKind::Cuda, dtype }
    }

    #[test]
    fn the_state_is_counted_in_its_own_type() {
        let sizes = Sizes { batch: 3, layer: AttentionShape::new(32, 2, 1, 16) };
        let need = |kind: &str, dtype| {
            let kind = Kind { config: parse_kind(kind, &[]).unwrap(), projections: None };
            let inputs = kind.elements(&sizes.layer, [3, 40]);
            let token = kind.elements(&sizes.layer, [3, 1]);
            (sizes.need(&kind, 40, on_cuda(dtype)), Need::of([inputs, token].concat()))
        };
        // 40 tokens and half of a sample's 20 steps.
        let half = 3 * 16 * (40 + 10);
        let (rope, inputs) = need("rope", DType::BF16);
        assert_eq!(rope, inputs.and(2 * half, 3 * 2 * half));
        assert_eq!(need("rope", DType::F32).0, inputs.and(4 * half, 3 * 4 * half));
        // References keep f32, here two keys a value; a state that does not grow is one tensor.
        let (tda, inputs) = need("tda", DType::BF16);
        assert_eq!(tda, inputs.and(2 * 4 * half, 5 * 4 * half));
        let (rwkv7, inputs) = need("rwkv7", DType::BF16);
        assert_eq!(rwkv7, inputs.and(4 * 3 * 16 * 16, 2 * 4 * 3 * 16 * 16));
    }

    #[test]
    fn the_largest_sizes_are_counted() {
        let layer = AttentionShape::new(MOST_SIZE * MOST_SIZE, MOST_SIZE, MOST_SIZE, MOST_SIZE);
        let sizes = Sizes { batch: MOST_SIZE, layer };
        let kind = Kind { config: parse_kind("rope", &[]).unwrap(), projections: None };
        let need = sizes.need(&kind, MOST_TOKENS as usize, on_cuda(DType::F32));
        let half = 4 * (1u128 << 48) * ((1 << 24) + (1 << 18));
        assert_eq!(
            need,
            Need::of(kind.elements(&layer, [MOST_SIZE, PIECE]))
                .and(half, 3 * half)
                .and(0, 4 * 3 * (1 << 48))
        );
    }
}
