//! The choice between a kind's kernels and its reference.
//!
//! A kind lists its kernels ([`VariantSpec::KERNELS`]) and the shapes they serve ([`VariantSpec::serves`]) and lengths
//! ([`VariantSpec::serves_length`]). Each call makes the choice once. The result, an [`ExecPath`], decides the type to
//! compute in and is passed to the kind's code, so that no other code inspects the device.

use std::fmt::{self, Display};

use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{DType, Tensor, TensorMetadata};

use super::probe::{Metric, Probe};
use super::{
    AttentionShape, DecodeState, DocumentStarts, Inputs, Variant, VariantSpec, retention, weights,
};
use crate::backend::{Op, OpBackend, StateOp, kernels_allowed, primitive};
use crate::cuda::CudaTensor;
use crate::device::DeviceKind;

/// A kernel of a kind: its device, and the type of q, k and v that it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// The device.
    pub device: DeviceKind,
    /// The type of q, k and v.
    pub dtype: DType,
}

impl Kernel {
    /// On the CPU, in f32.
    pub const CPU_F32: Kernel = Kernel { device: DeviceKind::Cpu, dtype: DType::F32 };

    /// On CUDA, in bf16.
    pub const CUDA_BF16: Kernel = Kernel { device: DeviceKind::Cuda, dtype: DType::BF16 };
}

/// The implementation that serves a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExecPath {
    /// The kind's kernel for this device.
    Kernel(DeviceKind),
    /// The kind's reference: plain tensor operations, in f32 where the inputs are bf16.
    Reference,
}

impl Display for ExecPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ExecPath::Kernel(device) => write!(f, "kernel for {device}"),
            ExecPath::Reference => f.write_str("reference"),
        }
    }
}

impl ExecPath {
    /// Bytes of an element of inputs of type `dtype` as the path keeps them: a reference casts them to f32.
    pub fn saved_size(self, dtype: DType) -> f64 {
        match self {
            ExecPath::Kernel(_) => dtype.size() as f64,
            ExecPath::Reference => 4.0,
        }
    }

    /// The path for `batch` sequences of a layer, of `seq_len` tokens or, with `None`, decoded: `kernel` if
    /// the kind has it and it serves them, else the reference.
    pub fn of<V: VariantSpec>(
        variant: &V,
        kernel: Kernel,
        shape: &AttentionShape,
        batch: usize,
        seq_len: Option<usize>,
    ) -> Self {
        let served = V::KERNELS.contains(&kernel)
            && variant.serves(kernel, shape, batch)
            && variant.serves_length(kernel, shape, seq_len);
        if served { ExecPath::Kernel(kernel.device) } else { ExecPath::Reference }
    }

    /// The path for these inputs, whole sequences or `decoding`; always the reference under
    /// [`with_reference`](crate::backend::with_reference).
    ///
    /// # Panics
    /// When q, k and v differ in type.
    pub(super) fn of_inputs<V: VariantSpec, B: OpBackend>(
        variant: &V,
        shape: &AttentionShape,
        Inputs { q, k, v, .. }: &Inputs<B>,
        decoding: bool,
    ) -> Self {
        let dtype = q.dtype();
        let types = [dtype, k.dtype(), v.dtype()];
        assert!(types.iter().all(|x| *x == dtype), "types of q, k and v: {types:?}");
        if !kernels_allowed() {
            return ExecPath::Reference;
        }
        let [batch, _, seq_len, _] = q.dims();
        let kernel = Kernel { device: B::device_kind(), dtype };
        Self::of(variant, kernel, shape, batch, (!decoding).then_some(seq_len))
    }

    /// The type in which the path computes, for q, k and v of type `dtype`.
    pub fn dtype(self, dtype: DType) -> DType {
        match self {
            ExecPath::Reference if dtype == DType::BF16 => DType::F32,
            _ => dtype,
        }
    }

    /// The inputs in the path's type.
    fn cast<B: OpBackend>(self, inputs: Inputs<B>) -> Inputs<B> {
        match self {
            ExecPath::Kernel(_) => inputs,
            ExecPath::Reference => inputs.in_f32(),
        }
    }

    /// Runs a kind's operation on this path. A reference may have its own kernel that computes the
    /// same in less memory, as [`Rowwise`](super::rowwise::Rowwise) has on the CPU.
    ///
    /// # Panics
    /// When the path is a kernel and the operation has none for these inputs: then
    /// [`VariantSpec::serves`] disagrees with the kernel.
    pub(crate) fn run<B: OpBackend, O: Op<N>, const N: usize>(
        self,
        op: &O,
        inputs: [FloatTensor<B>; N],
        ints: Vec<IntTensor<B>>,
    ) -> FloatTensor<B> {
        match self {
            ExecPath::Reference => B::run(op, inputs, ints),
            ExecPath::Kernel(device) => B::run_kernel(op, &inputs, &ints)
                .unwrap_or_else(|| declined::<B, O, N>(op, device, &inputs)),
        }
    }

    /// As [`ExecPath::run`], from the state `before` the first token; also the state after the last.
    ///
    /// # Panics
    /// As [`ExecPath::run`].
    pub(crate) fn run_from<B: OpBackend, O: StateOp<N>, const N: usize>(
        self,
        op: &O,
        inputs: [FloatTensor<B>; N],
        ints: Vec<IntTensor<B>>,
        before: FloatTensor<B>,
    ) -> [FloatTensor<B>; 2] {
        match self {
            ExecPath::Reference => B::run_from(op, inputs, ints, before),
            ExecPath::Kernel(device) => B::run_kernel_from(op, &inputs, &ints, &before)
                .unwrap_or_else(|| declined::<B, O, N>(op, device, &inputs)),
        }
    }
}

fn declined<B: OpBackend, O: Op<N>, const N: usize>(
    op: &O,
    device: DeviceKind,
    inputs: &[FloatTensor<B>; N],
) -> ! {
    let inputs = inputs.each_ref().map(|x| (x.shape(), x.dtype()));
    panic!("{op:?} has no kernel on {device} for {inputs:?}, which its kind serves")
}

/// `x` as a CUDA tensor, for code without a gradient, such as decoding.
///
/// # Panics
/// On other devices, and under autodiff.
pub(super) fn on_cuda<B: OpBackend, const D: usize>(x: Tensor<B, D>) -> CudaTensor {
    B::into_cuda(primitive(x)).unwrap_or_else(|| {
        panic!("{} gives no tensors for work on CUDA itself", std::any::type_name::<B>())
    })
}

/// [`Variant::attend`] on the path that serves these inputs; the output has q's type.
pub fn attend<V: Variant, B: OpBackend>(
    variant: &V,
    shape: &AttentionShape,
    inputs: Inputs<B>,
    documents: DocumentStarts<B>,
) -> Tensor<B, 4> {
    let path = ExecPath::of_inputs(variant, shape, &inputs, false);
    attend_on(path, variant, shape, inputs, documents)
}

/// [`attend`] on a path that the caller chooses.
pub(super) fn attend_on<V: Variant, B: OpBackend>(
    path: ExecPath,
    variant: &V,
    shape: &AttentionShape,
    inputs: Inputs<B>,
    documents: DocumentStarts<B>,
) -> Tensor<B, 4> {
    let dtype = inputs.q.dtype();
    variant.attend(shape, path.cast(inputs), documents, path).cast(dtype)
}

/// [`Variant::attend_from`] on the path that serves these inputs; the output has q's type.
///
/// # Panics
/// When the kind carries no state, or `state` has another shape.
pub fn attend_from<V: Variant, B: OpBackend>(
    variant: &V,
    shape: &AttentionShape,
    inputs: Inputs<B>,
    documents: DocumentStarts<B>,
    state: &mut Tensor<B, 2>,
) -> Tensor<B, 4> {
    assert!(variant.carries_state(), "{variant:?} carries no state");
    let path = ExecPath::of_inputs(variant, shape, &inputs, false);
    let (dtype, [batch, _, seq_len, _]) = (inputs.q.dtype(), inputs.q.dims());
    let elements = variant.state_elements(shape, seq_len) as usize;
    assert_eq!(state.dims(), [batch, elements], "the shape of the state");
    variant.attend_from(shape, path.cast(inputs), documents, state, path).cast(dtype)
}

/// What [`observe`] can report to a [thorough](Probe::thorough) probe.
pub fn thorough_metrics<V: Variant>(variant: &V) -> Vec<Metric> {
    let mut metrics = variant.metrics();
    if V::WEIGHS_VALUES {
        metrics.extend(weights::metrics(variant.views()));
    }
    if variant.has_retention() {
        metrics.extend(retention::METRICS);
    }
    metrics
}

/// As [`Variant::observe`], on the path that serves these inputs; for a [thorough](Probe::thorough) probe also the
/// weights of keys and the retention of gates. Weights count keys as without `documents`.
pub fn observe<V: Variant, B: OpBackend>(
    variant: &V,
    shape: &AttentionShape,
    inputs: Inputs<B>,
    documents: DocumentStarts<B>,
    probe: &mut Probe,
) {
    let path = ExecPath::of_inputs(variant, shape, &inputs, false);
    let inputs = path.cast(inputs);
    variant.observe(shape, inputs.clone(), documents.clone(), path, probe);
    if !probe.is_thorough() {
        return;
    }
    if V::WEIGHS_VALUES {
        weights::report(variant.views(), &inputs.v, shape.window, probe, |v| {
            variant.weigh_values(shape, Inputs { v, ..inputs.clone() }, documents.clone(), path)
        });
    }
    if let Some(log_retention) = variant.log_retention(shape, inputs) {
        retention::report(log_retention, probe);
    }
}

/// The state that decoding keeps between calls. The first tokens decide its path.
#[derive(Clone, Debug)]
pub struct State<V: Variant, B: OpBackend> {
    /// The path and the kind's state on it, from the first tokens on.
    begun: Option<(ExecPath, V::State<B>)>,
    /// Tokens to reserve room for.
    capacity: usize,
}

impl<V: Variant, B: OpBackend> State<V, B> {
    /// The state before the first token; `capacity` as in [`Variant::init_state`].
    pub fn new(capacity: usize) -> Self {
        State { begun: None, capacity }
    }

    /// The path that the first tokens took; `None` before them.
    pub fn path(&self) -> Option<ExecPath> {
        self.begun.as_ref().map(|(path, _)| *path)
    }
}

impl<V: Variant, B: OpBackend> DecodeState for State<V, B> {
    fn elements(&self) -> usize {
        self.begun.as_ref().map_or(0, |(_, state)| state.elements())
    }

    fn observe(&self, probe: &mut Probe) {
        if let Some((_, state)) = &self.begun {
            state.observe(probe);
        }
    }
}

/// [`Variant::extend`] on the path of the state's first tokens; the output has q's type.
///
/// # Panics
/// When these inputs take another path than the first tokens.
pub fn extend<V: Variant, B: OpBackend>(
    variant: &V,
    shape: &AttentionShape,
    inputs: Inputs<B>,
    state: &mut State<V, B>,
) -> Tensor<B, 4> {
    let path = ExecPath::of_inputs(variant, shape, &inputs, true);
    let (dtype, batch) = (inputs.q.dtype(), inputs.q.dims()[0]);
    let capacity = state.capacity;
    let (begun, state) =
        state.begun.get_or_insert_with(|| (path, variant.init_state(shape, path, capacity)));
    assert!(
        *begun == path,
        "the state was made for the {begun}, and {dtype:?} inputs of {batch} sequences take the {path}"
    );
    variant.extend(shape, path.cast(inputs), state, path).cast(dtype)
}
