//! Prefix sums of rows.

use burn::tensor::DType;
use cubecl::cuda::CudaRuntime;

use super::kernel::{THREADS, prefix_sum as kernel};
use crate::cuda::{CudaTensor, buffer, contiguous, empty};
use crate::ops::cuda::{as_u32, blocks, dim, dims, elements};

/// The inclusive prefix sums of each row of an f32 tensor, or with `backwards` those from its end;
/// `None` for other types.
///
/// - `x`: `[…, n]`
pub fn prefix_sum(x: &CudaTensor, backwards: bool) -> Option<CudaTensor> {
    let len = *dims(x).last()?;
    if x.dtype != DType::F32 || elements(x) == 0 {
        return None;
    }
    let x = contiguous(x);
    let y = empty(&x, &dims(&x), DType::F32);
    as_u32(elements(&x));
    // SAFETY: both buffers hold all rows; a block handles one.
    unsafe {
        kernel::launch_unchecked::<CudaRuntime>(
            &x.client,
            blocks(elements(&x) / len, 1),
            dim(THREADS),
            buffer(&x, 1),
            buffer(&y, 1),
            as_u32(len),
            backwards,
        );
    }
    Some(y)
}
