//! Attention kinds' decoding of one token after a long context.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::iter;

use longwall_kernels::attention::probe::Probe;
use longwall_kernels::attention::{AttentionShape, DecodeState, Inputs, Kernel};
use longwall_kernels::backend::OpBackend;
use longwall_kernels::device::OnDevice;
use longwall_train::config::{SizeNames, check_kind};
use serde::Serialize;

use crate::attention::{Kind, KindOptions, Path, kernel, remarks, warn_of_references};
use crate::ceiling::Ceiling;
use crate::error::BenchError;
use crate::memory::Need;
use crate::progress::Progress;
use crate::report::{Measured, Report};
use crate::setup::{self, Setup, kv_heads};
use crate::timed_pass::{TimedPass, Work};
use crate::timing::Clock;

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// The kinds.
    pub kinds: KindOptions,
    /// Tokens before the decoded one, from 1 to [`MOST_TOKENS`]. If empty: three contexts on CUDA, two
    /// on the CPU, except those that the device cannot hold.
    pub contexts: Vec<usize>,
    /// Sequences, up to [`MOST_SIZE`] like all sizes. Default: 8 on CUDA, 1 on the CPU.
    pub batch: Option<usize>,
    /// Query heads. Default: 16 on CUDA, 4 on the CPU.
    pub heads: Option<usize>,
    /// Heads of k and v. Default: as many as q has.
    pub kv_heads: Option<usize>,
    /// Channels of a head. Default: 128 on CUDA, 64 on the CPU.
    pub head_dim: Option<usize>,
    /// Device, precision and samples.
    pub common: setup::Options,
}

/// The longest context.
pub const MOST_TOKENS: u64 = 1 << 24;

/// The largest batch, number of heads and number of channels.
pub const MOST_SIZE: usize = 1 << 16;

/// Tokens that enter the state at once while it is filled.
const PREFILL_CHUNK: usize = 1024;

/// What this command calls the sizes of a layer.
const SIZE_NAMES: SizeNames =
    SizeNames { given: "options", head_dim: "--head-dim", width: "--heads · --head-dim" };

/// The measurement of one kind at one context.
#[derive(Debug, Serialize)]
pub struct Case {
    kind: &'static str,
    settings: Vec<String>,
    /// The range of the projections; `null` if they are normal around their bias.
    projections: Option<[f64; 2]>,
    path: Path,
    batch: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    context: usize,
    passes: [TimedPass; 1],
    /// Elements in all sequences' states at the end, unused capacity included.
    held_elements: usize,
    /// The metrics that the state reports of the last step.
    probe: BTreeMap<&'static str, f64>,
    #[serde(skip)]
    labels: Vec<String>,
}

impl Measured for Case {
    const COLUMNS: &'static [&'static str] = &["kind", "path", "batch, heads, context, head_dim"];

    fn labels(&self) -> Vec<String> {
        self.labels.clone()
    }

    fn passes(&self) -> &[TimedPass] {
        &self.passes
    }

    fn remark(&self) -> String {
        let held = format!("{:.3}M elements held", self.held_elements as f64 / 1e6);
        iter::once(held).chain(remarks(&self.probe)).collect::<Vec<_>>().join(", ")
    }
}

/// Times the kinds after each context.
///
/// # Errors
/// When the device, a kind or a key does not exist, sizes do not fit each other or a kind, or the
/// device cannot hold a requested context.
pub fn run(options: &Options, progress: &dyn Progress) -> Result<Report<Case>, BenchError> {
    let setup = options.common.open()?;
    let kinds = options.kinds.choose(&setup)?;
    let sizes = Sizes::new(options, &setup)?;
    for kind in &kinds {
        check_kind(&kind.config, &sizes.layer, SIZE_NAMES)?;
    }
    warn_of_references(&setup, kinds.iter().map(|kind| (kind, sizes.batch, sizes.layer, None)));
    let contexts = contexts(options, &setup, &kinds, &sizes)?;
    let job =
        Job { options: &options.kinds, setup: &setup, kinds: &kinds, sizes, contexts, progress };
    let (ceiling, results) = setup.compute.run(job);
    Ok(Report::new(&setup, ceiling, results))
}

/// The sizes of a layer and its batch.
#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    layer: AttentionShape,
}

impl Sizes {
    fn new(options: &Options, setup: &Setup) -> Result<Self, BenchError> {
        let batch = options.batch.unwrap_or(setup.choose(8, 1));
        let heads = options.heads.unwrap_or(setup.choose(16, 4));
        let head_dim = options.head_dim.unwrap_or(setup.choose(128, 64));
        let kv_heads = kv_heads(options.kv_heads, heads)?;
        Ok(Sizes { batch, layer: AttentionShape::new(heads * head_dim, heads, kv_heads, head_dim) })
    }

    /// Memory for a state of full capacity, a copy of one of its tensors (appending may make one), and
    /// the tokens that fill the state and enter it.
    fn need(&self, kind: &Kind, context: usize, kernel: Kernel) -> Need {
        let (Sizes { batch, layer }, config) = (self, &kind.config);
        let tokens = most_tokens(context, most_steps(context));
        let path = config.path(kernel, layer, *batch, None);
        let bytes = path.dtype(kernel.dtype).size() as u128 * *batch as u128;
        let state = |tokens: usize| {
            let of_one = config.state_bytes(layer, tokens, path, kernel.dtype);
            u128::from(of_one) * *batch as u128
        };
        // A cache's keys or values; a state of fixed size may be one tensor.
        let channels = (config.views() * layer.head_dim).max(config.value_dim(layer));
        let half = bytes * (channels * layer.kv_heads) as u128 * tokens as u128;
        let largest = half.max(state(1)).min(state(tokens));
        let inputs =
            [PREFILL_CHUNK.min(context), 1].map(|tokens| kind.elements(layer, [*batch, tokens]));
        Need::of(inputs.concat()).and(largest, state(tokens) + largest)
    }
}

/// The contexts whose states the device can hold; an error if it cannot hold a requested one.
fn contexts(
    options: &Options,
    setup: &Setup,
    kinds: &[Kind],
    sizes: &Sizes,
) -> Result<Vec<usize>, BenchError> {
    let default: &[usize] = setup.choose(&[4096, 32_768, 131_072], &[512, 2048]);
    let asked = if options.contexts.is_empty() { default } else { &options.contexts };
    let mut fitting = vec![];
    for &context in asked {
        let excess = kinds.iter().find_map(|kind| {
            let AttentionShape { heads, head_dim, .. } = sizes.layer;
            let asked = format!(
                "--kind {} --batch {} --heads {heads} --head-dim {head_dim} --context {context}",
                kind.config.kind(),
                sizes.batch
            );
            setup.excess(&asked, &sizes.need(kind, context, kernel(setup)))
        });
        match excess {
            None => fitting.push(context),
            Some(excess) if options.contexts.is_empty() => {
                tracing::warn!("{excess}; this context is left out");
            }
            Some(excess) => {
                let remedy = "choose a smaller --batch, or a shorter --context";
                return Err(BenchError::TooLarge { excess, remedy });
            }
        }
    }
    Ok(fitting)
}

/// The work on the device.
struct Job<'a> {
    options: &'a KindOptions,
    setup: &'a Setup,
    kinds: &'a [Kind],
    sizes: Sizes,
    contexts: Vec<usize>,
    progress: &'a dyn Progress,
}

impl OnDevice for Job<'_> {
    type Output = (Ceiling, Vec<Case>);

    fn run<B: OpBackend>(self, device: B::Device) -> Self::Output {
        B::seed(&device, 0);
        let ceiling = Ceiling::of_bytes::<B>(self.setup, &device);
        let clock = self.setup.clock::<B>(&device);
        self.progress.start(self.kinds.len() * self.contexts.len(), "");
        let mut cases = vec![];
        for &context in &self.contexts {
            for kind in self.kinds {
                self.progress.measuring(&format!("{} {context}", kind.config.kind()));
                B::memory_cleanup(&device);
                cases.push(self.case(kind, context, &ceiling, &clock, &device));
                self.progress.done();
            }
        }
        self.progress.finish();
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
        let path = kind.path(self.setup, batch, &layer, None);
        let of_state = config.path(kernel(self.setup), &layer, batch, None);
        let bytes = config.state_bytes(&layer, context, of_state, dtype) as f64 * batch as f64;
        let inputs = |tokens: usize| kind.inputs::<B>(&layer, [batch, tokens], dtype, device);
        let (token, chunk) = (inputs(1), inputs(PREFILL_CHUNK.min(context)));
        let fill = |tokens: usize, capacity: usize| {
            let mut state = config.init_state::<B>(capacity);
            for first in (0..tokens).step_by(PREFILL_CHUNK) {
                let chunk = first_tokens(&chunk, PREFILL_CHUNK.min(tokens - first));
                config.extend(&layer, chunk, &mut state);
            }
            state
        };
        let state = RefCell::new(RefilledState { context, tokens: 0, state: None });
        let time = clock.clone().with_max_calls(most_steps(context)).time_after(
            |steps| state.borrow_mut().prepare(steps, &fill),
            |_| {
                let mut held = state.borrow_mut();
                let state = held.state.as_mut().expect("filled before the first step");
                config.extend(&layer, token.clone(), state);
            },
        );
        let held = state.into_inner().state.expect("filled before the first step");
        let mut probe = Probe::default();
        held.observe(&mut probe);
        let shape = [batch, layer.heads, context, layer.head_dim];
        Case {
            kind: config.kind(),
            settings: self.options.sets.clone(),
            projections: self.options.projections,
            path,
            batch,
            heads: layer.heads,
            kv_heads: layer.kv_heads,
            head_dim: layer.head_dim,
            context,
            passes: [TimedPass::new("step", time, Work::Bytes(bytes), ceiling)],
            held_elements: held.elements(),
            probe: probe.means(),
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
    // This many take at least 20 ms on any device.
    (context / 2).clamp(1, 4096)
}

/// The most tokens of a state that holds `context` tokens on average over `steps` steps.
fn most_tokens(context: usize, steps: usize) -> usize {
    context + steps.div_ceil(2).max(context / 64)
}

/// A state of about `context` tokens. Each step appends one; the state is refilled before it is too
/// long.
struct RefilledState<S> {
    context: usize,
    tokens: usize,
    state: Option<S>,
}

impl<S> RefilledState<S> {
    /// Refills the state if `steps` more steps would take it too far from the context. `fill` gets the
    /// number of tokens and the capacity to reserve.
    fn prepare(&mut self, steps: usize, fill: &impl Fn(usize, usize) -> S) {
        let most = most_tokens(self.context, steps);
        if self.state.is_none() || self.tokens + steps > most {
            self.state = None; // Frees its memory for the new one.
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
    use longwall_train::config::parse_kind;

    #[test]
    fn a_state_is_filled_anew_before_it_leaves_the_context() {
        let filled = RefCell::new(vec![]);
        let fill = |tokens, capacity| filled.borrow_mut().push((tokens, capacity));
        let mut held = RefilledState { context: 640, tokens: 0, state: None };
        held.prepare(1, &fill);
        assert_eq!(filled.take(), [(640, 650)]);
        held.prepare(9, &fill);
        assert_eq!((filled.take(), held.tokens), (vec![], 650));
        held.prepare(1, &fill);
        assert_eq!((filled.take().len(), held.tokens), (1, 641));
        // Many steps are centred on the context.
        for _ in 0..2 {
            held.prepare(101, &fill);
            assert_eq!((filled.take(), held.tokens), (vec![(590, 691)], 691));
        }
    }

    #[test]
    fn a_state_of_one_token_is_possible() {
        let mut held = RefilledState { context: 1, tokens: 0, state: None };
        held.prepare(1, &|tokens, capacity| assert_eq!((tokens, capacity), (1, 2)));
        assert_eq!(held.tokens, 2);
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
        // Two keys per value. References keep f32; a state of fixed size is one tensor.
        let (tda, inputs) = need("tda", DType::BF16);
        assert_eq!(tda, inputs.and(2 * 2 * half, 5 * 2 * half));
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
            Need::of(kind.elements(&layer, [MOST_SIZE, PREFILL_CHUNK]))
                .and(half, 3 * half)
                .and(0, 4 * 3 * (1 << 48))
        );
    }
}
