//! Layer norm and RMS norm by one pair of kernels.

mod kernel;

use burn::tensor::DType;

use self::kernel::{NormConfig, backward as backward_kernel, forward as forward_kernel};
use super::block::RowSplit;
use super::rows::RowOrder;
use super::sums::columns;
use super::{CudaTensor, as_u32, blocks, buffer, dim, elements, lanes, supported, vector};
use crate::backend::Forward;
use crate::cuda::empty;

/// Multiprocessors of an H100 or H200. Sums are split into this many parts on every GPU, so that results
/// do not depend on the GPU.
const PROCESSORS: usize = 132;
/// Most vectors of a row that is handled by at most a warp.
const MAX_WARP_VECTORS: usize = 128;
/// Threads per block that handles several rows.
const MULTI_ROW_THREADS: usize = 128;
/// Most threads per block.
const MAX_THREADS: usize = 1024;

/// One of the two norms.
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    /// Whether the mean is subtracted, as in layer norm.
    pub centred: bool,
    /// Added to the mean square.
    pub eps: f32,
}

impl Norm {
    /// The configuration for rows of `vectors` vectors. If a row takes a whole block, a thread holds about
    /// `held` of them.
    fn config(&self, vectors: usize, held: usize, biased: bool) -> NormConfig {
        let (threads, groups) = if vectors <= MAX_WARP_VECTORS {
            let threads = vectors.next_power_of_two().min(32);
            (threads, MULTI_ROW_THREADS / threads)
        } else {
            (vectors.div_ceil(held).next_multiple_of(32).min(MAX_THREADS), 1)
        };
        let held = vectors.div_ceil(threads);
        let even = vectors == threads * held;
        let split = RowSplit { threads, held, groups, even };
        NormConfig { split, centred: self.centred, biased, adds: false }
    }

    /// The norm of each row, in the memory order of `x`. Saves `x`, `weight` and statistics.
    ///
    /// - `x`: `[…, width]`
    /// - `weight`, `bias`: `[width]`
    pub fn forward(
        &self,
        x: &CudaTensor,
        weight: &CudaTensor,
        bias: Option<&CudaTensor>,
    ) -> Option<Forward<CudaTensor>> {
        if !supported(x) || elements(x) == 0 {
            return None;
        }
        let order = RowOrder::of(x);
        let (rows, width) = (order.rows(), order.width());
        let weight = vector(weight, width, "the norm's weight");
        let bias = bias.map(|bias| vector(bias, width, "the norm's bias"));
        let lanes = lanes(width, x.dtype);
        let x = order.readable(x, lanes);
        // The backward pass visits the rows in the order of the saved tensor, which may be a copy.
        let order = RowOrder::of(&x);
        let y = order.empty(&x, x.dtype);
        let statistics = empty(&x, &[rows, 2], DType::F32);
        let config = self.config(width / lanes, 4, bias.is_some());
        // SAFETY: the arguments have the sizes that the kernel's documentation asks for.
        unsafe {
            forward_kernel::launch_unchecked(
                &x.client,
                blocks(rows, config.split.groups),
                dim(config.split.threads * config.split.groups),
                lanes,
                buffer(&x, lanes),
                buffer(&weight, lanes),
                bias.as_ref().map_or(buffer(&weight, lanes), |bias| buffer(bias, lanes)),
                buffer(&y, lanes),
                buffer(&statistics, 1),
                as_u32(rows),
                as_u32(width / lanes),
                1.0 / width as f32,
                self.eps,
                order.row_offsets(&x, lanes),
                config,
                x.dtype.into(),
            );
        }
        Some(Forward { output: y, saved: vec![x, weight, statistics] })
    }

    /// The gradients of x, weight and, if `biased`, bias. Takes a gradient of x from `grad_accum` and adds to
    /// it in place, unless its buffer is shared.
    pub fn backward(
        &self,
        saved: &[CudaTensor],
        grad: &CudaTensor,
        biased: bool,
        grad_accum: &mut Option<CudaTensor>,
    ) -> [CudaTensor; 3] {
        let [x, weight, statistics] = saved else { unreachable!("norms save three tensors") };
        assert_eq!(grad.dtype, x.dtype, "types of the norm's input and of its gradient");
        let order = RowOrder::of(x);
        let (rows, width) = (order.rows(), order.width());
        let lanes = lanes(width, x.dtype);
        let grad = order.readable(grad, lanes);
        let sum =
            grad_accum.take_if(|sum| sum.dtype == x.dtype && order.is_dense(sum) && sum.can_mut());
        let mut config = self.config(width / lanes, 1, biased);
        config.adds = sum.is_some();
        let dx = sum.unwrap_or_else(|| order.empty(x, x.dtype));
        let most = PROCESSORS * (512 / (config.split.threads * config.split.groups)).max(1);
        let parts = rows.div_ceil(config.split.groups).min(most);
        let row = if biased { 2 * width } else { width };
        let sums = empty(x, &[parts, row], DType::F32);
        // SAFETY: the arguments have the sizes that the kernel's documentation asks for.
        unsafe {
            backward_kernel::launch_unchecked(
                &x.client,
                blocks(parts, 1),
                dim(config.split.threads * config.split.groups),
                lanes,
                buffer(x, lanes),
                buffer(&grad, lanes),
                buffer(weight, lanes),
                buffer(statistics, 1),
                buffer(&dx, lanes),
                buffer(&sums, lanes),
                as_u32(rows),
                as_u32(width / lanes),
                1.0 / width as f32,
                order.row_offsets(x, lanes),
                order.row_offsets(&grad, lanes),
                config,
                x.dtype.into(),
            );
        }
        let dw = columns(&sums, 0, &[width], 1);
        let db = if biased { columns(&sums, width, &[width], 1) } else { dw.clone() };
        [dx, dw, db]
    }
}
