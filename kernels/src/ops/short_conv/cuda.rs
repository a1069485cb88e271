//! The short convolution on CUDA.

use burn::tensor::DType;

use super::kernel::{ConvConfig, RUN_ROWS, backward as backward_kernel, forward as forward_kernel};
use crate::cuda::{CudaTensor, buffer, contiguous, empty};
use crate::ops::cuda::sums::columns;
use crate::ops::cuda::{as_u32, blocks, dim, dims, elements, integers, lanes, nothing, supported};

/// Threads per block.
const THREADS: usize = 128;
/// Most elements of the window per thread.
const WINDOW: usize = 32;

/// The contiguous inputs of one call, its sizes and its configuration.
struct ConvParams {
    x: CudaTensor,
    weight: CudaTensor,
    documents: Option<CudaTensor>,
    sizes: [usize; 3],
    lanes: usize,
    config: ConvConfig,
}

impl ConvParams {
    fn new(x: &CudaTensor, weight: &CudaTensor, ints: &[CudaTensor], silu: bool) -> Self {
        let [batch, seq_len, channels] = dims(x)[..] else {
            panic!("the convolution's x is {:?}, not [batch, seq_len, channels]", dims(x))
        };
        assert!(supported(weight), "the convolution's weight is {:?}", weight.dtype);
        let taps = dims(weight)[1];
        assert_eq!(dims(weight)[0], channels, "channels of the convolution's weight and of x");
        let documents =
            ints.first().map(|starts| integers(starts, &[batch, seq_len], "document_starts"));
        let config = ConvConfig { taps, silu, documents: documents.is_some() };
        let fitting = 1 << (WINDOW / taps).max(1).ilog2();
        ConvParams {
            x: contiguous(x),
            weight: contiguous(weight),
            documents,
            sizes: [batch, seq_len, channels],
            lanes: lanes(channels, x.dtype).min(fitting),
            config,
        }
    }

    /// Runs of rows in the whole batch.
    fn runs(&self) -> usize {
        self.sizes[0] * self.sizes[1].div_ceil(RUN_ROWS)
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
/// - `ints`: empty, or document starts, `[batch, seq_len]`
pub fn forward(
    x: &CudaTensor,
    weight: &CudaTensor,
    ints: &[CudaTensor],
    silu: bool,
) -> Option<[CudaTensor; 3]> {
    if !supported(x) {
        return None;
    }
    let params = ConvParams::new(x, weight, ints, silu);
    let ConvParams { x, weight, lanes, .. } = &params;
    let lanes = *lanes;
    let y = empty(x, &params.sizes, x.dtype);
    as_u32(elements(x));
    // SAFETY: the arguments have the sizes that the kernel's documentation asks for.
    unsafe {
        forward_kernel::launch_unchecked(
            &x.client,
            blocks(params.runs() * params.vectors(), THREADS),
            dim(THREADS),
            lanes,
            buffer(x, lanes),
            buffer(weight, 1),
            params.documents(),
            buffer(&y, lanes),
            as_u32(params.sizes[0]),
            as_u32(params.sizes[1]),
            as_u32(params.vectors()),
            params.config,
            [x.dtype.into(), weight.dtype.into()],
        );
    }
    Some([y, params.x, params.weight])
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
    let params = ConvParams::new(x, weight, ints, silu);
    let (grad, lanes) = (contiguous(grad), params.lanes);
    let ConvParams { x, weight, sizes: [_, _, channels], config, .. } = &params;
    let dx = empty(x, &params.sizes, x.dtype);
    let parts = empty(x, &[params.runs(), config.taps * channels], DType::F32);
    // SAFETY: the arguments have the sizes that the kernel's documentation asks for.
    unsafe {
        backward_kernel::launch_unchecked(
            &x.client,
            blocks(params.runs() * params.vectors(), THREADS),
            dim(THREADS),
            lanes,
            buffer(x, lanes),
            buffer(weight, 1),
            params.documents(),
            buffer(&grad, lanes),
            buffer(&dx, lanes),
            buffer(&parts, lanes),
            as_u32(params.sizes[0]),
            as_u32(params.sizes[1]),
            as_u32(params.vectors()),
            *config,
            [x.dtype.into(), weight.dtype.into()],
        );
    }
    [dx, columns(&parts, 0, &[*channels, config.taps], config.taps)]
}
