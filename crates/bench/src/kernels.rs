//! Attention kinds' operations, forward only and forward with backward.

use std::collections::BTreeMap;

use burn::backend::Autodiff;
use burn::tensor::{Int, Tensor, TensorData};
use longwall_kernels::attention::probe::Probe;
use longwall_kernels::attention::{AttentionShape, DocumentStarts};
use longwall_kernels::backend::OpBackend;
use longwall_kernels::device::OnDevice;
use longwall_kernels::ops::vjp_root::vjp_root;
use longwall_train::config::{SizeNames, check_kind};
use longwall_train::console::bytes as text_of_bytes;
use serde::Serialize;

use crate::attention::{
    Kind, KindOptions, Path, bytes, copied, leaves, random_heads, remarks, warn_of_references,
};
use crate::ceiling::Ceiling;
use crate::error::BenchError;
use crate::inputs::copies;
use crate::memory::Need;
use crate::progress::Progress;
use crate::report::{Measured, Report};
use crate::setup::{self, Setup, kv_heads, shape_text};
use crate::timed_pass::{TimedPass, Work};
use crate::timing::Clock;

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// The kinds.
    pub kinds: KindOptions,
    /// Batch, heads, seq_len and head_dim. If empty: five shapes on CUDA, one on the CPU.
    pub shapes: Vec<[usize; 4]>,
    /// Heads of k and v. Default: as many as q has.
    pub kv_heads: Option<usize>,
    /// A token attends to itself and the window − 1 tokens before it.
    pub window: Option<usize>,
    /// Packs documents of this many tokens, from 1 to [`MOST_TOKENS`], into each row.
    pub document_len: Option<u64>,
    /// Device, precision and samples.
    pub common: setup::Options,
}

/// The longest document: longer ones exceed the range of positions.
pub const MOST_TOKENS: u64 = 1 << 24;

const CUDA_SHAPES: &[[usize; 4]] = &[
    [8, 12, 1024, 64],
    [4, 16, 4096, 64],
    [4, 16, 4096, 128],
    [1, 16, 16_384, 128],
    [1, 16, 65_536, 64],
];

const CPU_SHAPES: &[[usize; 4]] = &[[1, 8, 1024, 64]];

/// What this command calls the sizes of a layer.
const SIZE_NAMES: SizeNames = SizeNames {
    given: "options",
    head_dim: "head_dim of --shape",
    width: "heads · head_dim of --shape",
};

/// The measurement of one kind at one shape.
#[derive(Debug, Serialize)]
pub struct Case {
    kind: &'static str,
    settings: Vec<String>,
    /// The range of the projections; `null` if they are normal around their bias.
    projections: Option<[f64; 2]>,
    path: Path,
    /// Batch, heads, seq_len, head_dim.
    shape: [usize; 4],
    kv_heads: usize,
    window: Option<usize>,
    document_len: Option<u64>,
    passes: [TimedPass; 2],
    /// Kept by the output and for the backward pass, without the inputs; `null` on the CPU.
    kept_bytes: Option<u64>,
    /// Reserved by one forward and backward pass with its inputs, in the allocator's pages; `null` on
    /// the CPU.
    peak_memory_bytes: Option<u64>,
    /// The metrics that the kind reports for these inputs.
    probe: BTreeMap<&'static str, f64>,
    #[serde(skip)]
    labels: Vec<String>,
}

impl Measured for Case {
    const COLUMNS: &'static [&'static str] = &["kind", "path", "shape"];

    fn labels(&self) -> Vec<String> {
        self.labels.clone()
    }

    fn passes(&self) -> &[TimedPass] {
        &self.passes
    }

    fn remark(&self) -> String {
        let memory = self.kept_bytes.zip(self.peak_memory_bytes).map(|(kept, peak)| {
            format!("kept {}, peak {}", text_of_bytes(kept), text_of_bytes(peak))
        });
        memory.into_iter().chain(remarks(&self.probe)).collect::<Vec<_>>().join(", ")
    }
}

/// Times the kinds at each shape.
///
/// # Errors
/// When the device, a kind or a key does not exist, sizes do not fit each other or a kind, or the
/// device cannot hold them.
pub fn run(options: &Options, progress: &dyn Progress) -> Result<Report<Case>, BenchError> {
    let setup = options.common.open()?;
    let kinds = options.kinds.choose(&setup)?;
    let default = setup.choose(CUDA_SHAPES, CPU_SHAPES);
    let shapes = if options.shapes.is_empty() { default } else { &options.shapes };
    let mut cases = vec![];
    for &shape in shapes {
        let [batch, _, seq_len, _] = shape;
        let layer = options.layer(shape)?;
        for kind in &kinds {
            check_kind(&kind.config, &layer, SIZE_NAMES)?;
            let asked = format!("--kind {} --shape {}", kind.config.kind(), shape_text(&shape));
            let need = need(kind, &layer, [batch, seq_len]);
            setup.check(&asked, &need, "choose a smaller --shape")?;
            cases.push((kind, batch, layer, Some(seq_len)));
        }
    }
    warn_of_references(&setup, cases.into_iter());
    let job = Job { options, setup: &setup, kinds: &kinds, shapes, progress };
    let (ceiling, results) = setup.compute.run(job);
    Ok(Report::new(&setup, ceiling, results))
}

/// Memory for the inputs, the output, and their gradients.
fn need(kind: &Kind, layer: &AttentionShape, sizes: [usize; 2]) -> Need {
    let [batch, seq_len] = sizes.map(|n| n as u128);
    let out = batch * seq_len * layer.heads as u128 * kind.config.value_dim(layer) as u128;
    Need::of(kind.elements(layer, sizes).into_iter().chain([out])).with_gradients()
}

impl Options {
    fn layer(&self, [_, heads, _, head_dim]: [usize; 4]) -> Result<AttentionShape, BenchError> {
        let kv_heads = kv_heads(self.kv_heads, heads)?;
        let layer = AttentionShape::new(heads * head_dim, heads, kv_heads, head_dim);
        Ok(AttentionShape { window: self.window, ..layer })
    }
}

/// The work on the device.
struct Job<'a> {
    options: &'a Options,
    setup: &'a Setup,
    kinds: &'a [Kind],
    shapes: &'a [[usize; 4]],
    progress: &'a dyn Progress,
}

impl OnDevice for Job<'_> {
    type Output = (Ceiling, Vec<Case>);

    fn run<B: OpBackend>(self, device: B::Device) -> Self::Output {
        B::seed(&device, 0);
        let ceiling = Ceiling::of_flops::<B>(self.setup, &device);
        let clock = self.setup.clock::<B>(&device);
        self.progress.start(self.kinds.len() * self.shapes.len(), "");
        let mut cases = vec![];
        for &shape in self.shapes {
            for kind in self.kinds {
                self.progress.measuring(&format!("{} {shape:?}", kind.config.kind()));
                cases.push(self.case(kind, shape, &ceiling, &clock, &device));
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
        shape: [usize; 4],
        ceiling: &Ceiling,
        clock: &Clock<B>,
        device: &B::Device,
    ) -> Case {
        let [batch, heads, seq_len, head_dim] = shape;
        let (options, config) = (self.options, &kind.config);
        let layer = options.layer(shape).expect("checked before the device was used");
        B::memory_cleanup(device);
        let sizes = [batch, seq_len];
        let mut inputs = vec![kind.inputs::<B>(&layer, sizes, self.setup.dtype(), device)];
        let out = [batch, heads, seq_len, config.value_dim(&layer)];
        let dy = random_heads::<B>(out, self.setup.dtype(), device);
        let dy = Tensor::<Autodiff<B>, 4>::from_inner(dy);
        let documents = documents::<B>(options.document_len, sizes, device);
        let tracked = documents.clone().map(Tensor::from_inner);
        let forward = |at: &_| config.attend(&layer, leaves::<B>(at), tracked.clone());
        let (kept, peak) = self.memory(
            clock,
            || forward(&inputs[0]),
            |o| {
                vjp_root(o, dy.clone()).backward();
            },
        );
        let copies = copies::<B>(bytes(&inputs[0]));
        inputs.extend((1..copies).map(|_| copied(&inputs[0])).collect::<Vec<_>>());
        let alone = clock.time(|at| {
            config.attend(&layer, inputs[at % copies].clone(), documents.clone());
        });
        let both = clock.time(|at| {
            vjp_root(forward(&inputs[at % copies]), dy.clone()).backward();
        });
        let mut probe = Probe::default();
        config.observe(&layer, inputs[0].clone(), documents, &mut probe);
        // The FLOPs of causal softmax attention, for every kind.
        let flops = 2.0 * (batch * heads * head_dim) as f64 * (seq_len as f64).powi(2);
        let path = kind.path(self.setup, batch, &layer, Some(seq_len));
        let labels = kind.labels(path).into_iter().chain([format!("{shape:?}")]).collect();
        Case {
            kind: config.kind(),
            settings: options.kinds.sets.clone(),
            projections: options.kinds.projections,
            path,
            shape,
            kv_heads: layer.kv_heads,
            window: layer.window,
            document_len: options.document_len,
            passes: [
                TimedPass::new("forward", alone, Work::Flops(flops), ceiling),
                TimedPass::new("forward_backward", both, Work::Flops(3.5 * flops), ceiling),
            ],
            kept_bytes: kept,
            peak_memory_bytes: peak,
            probe: probe.means(),
            labels,
        }
    }

    /// Bytes kept from a forward pass for its backward pass, and bytes reserved at the end.
    fn memory<B: OpBackend, T>(
        &self,
        clock: &Clock<B>,
        forward: impl FnOnce() -> T,
        backward: impl FnOnce(T),
    ) -> (Option<u64>, Option<u64>) {
        let memory = || {
            clock.wait();
            self.setup.compute.device.memory()
        };
        let before = memory();
        let output = forward();
        let after = memory();
        backward(output);
        let kept =
            after.zip(before).map(|(after, before)| after.in_use.saturating_sub(before.in_use));
        (kept, memory().map(|memory| memory.reserved))
    }
}

/// Documents of `len` tokens each; the last of a row may be shorter.
fn documents<B: OpBackend>(
    len: Option<u64>,
    [batch, seq_len]: [usize; 2],
    device: &B::Device,
) -> DocumentStarts<B> {
    let len = len? as usize;
    let row = (0..seq_len).map(|at| (at / len * len) as i32);
    let starts: Vec<i32> = (0..batch).flat_map(|_| row.clone()).collect();
    Some(Tensor::<B, 2, Int>::from_data(TensorData::new(starts, [batch, seq_len]), device))
}

#[cfg(test)]
mod tests {
    use super::*;
    use longwall_kernels::Cpu;
    use longwall_train::config::parse_kind;

    #[test]
    fn both_views_and_all_value_channels_are_counted() {
        let need = |kind: &str| {
            let kind = Kind { config: parse_kind(kind, &[]).unwrap(), projections: None };
            need(&kind, &AttentionShape::new(32, 2, 1, 16), [3, 50])
        };
        let [q, k] = [3 * 50 * 32, 3 * 50 * 16];
        assert_eq!(need("rope"), Need::of([q, k, k, q]).with_gradients());
        assert_eq!(need("tda"), Need::of([2 * q, 2 * k, k, q]).with_gradients());
    }

    #[test]
    fn documents_start_at_multiples_of_their_length() {
        let starts = documents::<Cpu>(Some(3), [2, 7], &Default::default()).unwrap();
        let starts: Vec<i64> = starts.into_data().iter::<i64>().collect();
        assert_eq!(starts, [[0, 0, 0, 3, 3, 3, 6]; 2].concat());
        assert!(documents::<Cpu>(None, [2, 7], &Default::default()).is_none());
    }
}
