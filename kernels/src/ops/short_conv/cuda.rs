//! The short convolution.

use burn::tensor::DType;

use super::kernel::{Plan, RUN, backward as backward_kernel, forward as forward_kernel};
use crate::cuda::{CudaTensor, buffer, contiguous, empty};
use crate::ops::cuda::sums::columns;
use crate::ops::cuda::{blocks, dim, dims, elements, integers, lanes, nothing, number, supported};

/// Threads of a block.
const THREADS: usize = 128;
/// Values of the window that a thread holds, at most.
const WINDOW: usize = 32;

/// One call: its inputs, contiguous, and how they are read.
struct Call {
    x: CudaTensor,
    weight: CudaTensor,
    documents: Option<CudaTensor>,
    sizes: [usize; 3],
    lanes: usize,
    plan: Plan,
}

impl Call {
    fn new(x: &CudaTensor, weight: &CudaTensor, ints: &[CudaTensor], silu: bool) -> Self {
        let [batch, seq_len, channels] = dims(x)[..] else {
            panic!("the convolution's x is {:?}, not [batch, seq_len, channels]", dims(x))
        };
        assert!(supported(weight), "the convolution's weight is {:?}", weight.dtype);
        let taps = dims(weight)[1];
        assert_eq!(dims(weight)[0], channels, "channels of the convolution's weight and of x");
        let documents =
            ints.first().map(|starts| integers(starts, &[batch, seq_len], "document_starts"));
        let plan = Plan { taps, silu, documents: documents.is_some() };
        let fitting = 1 << (WINDOW / taps).max(1).ilog2();
        Call {
            x: contiguous(x),
            weight: contiguous(weight),
            documents,
            sizes: [batch, seq_len, channels],
            lanes: lanes(channels, x.dtype).min(fitting),
            plan,
        }
    }

    /// Runs of rows in the whole batch.
    fn runs(&self) -> usize {
        self.sizes[0] * self.sizes[1].div_ceil(RUN)
    }

    fn vectors(&self) -> usize {
        self.sizes[2] / self.lanes
    }

    fn documents(&self) -> cubecl::prelude::ArrayArg<cubecl::cuda::CudaRuntime> {
        self.documents.as_ref().map_or_else(|| nothing(&self.x), |starts| buffer(starts, 1))
    }
}

/// The convolution, and the inputs that [`backward`] needs.
///
/// - `x`: `[batch, seq_len, channels]`
/// - `weight`: `[channels, taps]`
/// - `ints`: nothing, or document starts, `[batch, seq_len]`
pub fn forward(
    x: &CudaTensor,
    weight: &CudaTensor,
    ints: &[CudaTensor],
    silu: bool,
) -> Option<[CudaTensor; 3]> {
    if !supported(x) {
        return None;
    }
    let call = Call::new(x, weight, ints, silu);
    let Call { x, weight, lanes, .. } = &call;
    let lanes = *lanes;
    let y = empty(x, &call.sizes, x.dtype);
    number(elements(x));
    // SAFETY: the arguments have the sizes that the kernel's documentation asks for.
    unsafe {
        forward_kernel::launch_unchecked(
            &x.client,
            blocks(call.runs() * call.vectors(), THREADS),
            dim(THREADS),
            lanes,
            buffer(x, lanes),
            buffer(weight, 1),
            call.documents(),
            buffer(&y, lanes),
            number(call.sizes[0]),
            number(call.sizes[1]),
            number(call.vectors()),
            call.plan,
            [x.dtype.into(), weight.dtype.into()],
        );
    }
    Some([y, call.x, call.weight])
}

/// The gradients of x and weight.
pub fn backward(
    x: &CudaTensor,
    weight: &CudaTensor,
    ints: &[CudaTensor],
    silu: bool,
    grad: &CudaTensor,
) -> [CudaTensor; 2] {
    assert_eq!(grad.dtype, x.dtype, "types of the convolution's input and of its gradient");
    let call = Call::new(x, weight, ints, silu);
    let (grad, lanes) = (contiguous(grad), call.lanes);
    let Call { x, weight, sizes: [_, _, channels], plan, .. } = &call;
    let dx = empty(x, &call.sizes, x.dtype);
    let parts = empty(x, &[call.runs(), plan.taps * channels], DType::F32);
    // SAFETY: the arguments have the sizes that the kernel's documentation asks for.
    unsafe {
        backward_kernel::launch_unchecked(
            &x.client,
            blocks(call.runs() * call.vectors(), THREADS),
            dim(THREADS),
            lanes,
            buffer(x, lanes),
            buffer(weight, 1),
            call.documents(),
            buffer(&grad, lanes),
            buffer(&dx, lanes),
            buffer(&parts, lanes),
            number(call.sizes[0]),
            number(call.sizes[1]),
            number(call.vectors()),
            *plan,
            [x.dtype.into(), weight.dtype.into()],
        );
    }
    [dx, columns(&parts, 0, &[*channels, plan.taps], plan.taps)]
}
