//! Layer norm and RMS norm, by one pair of kernels.

mod kernel;

use burn::tensor::DType;

use self::kernel::{Plan, backward as backward_kernel, forward as forward_kernel};
use super::rows::RowOrder;
use super::sums::columns;
use super::{CudaTensor, blocks, buffer, dim, elements, lanes, number, supported, vector};
use crate::backend::Forward;
use crate::cuda::empty;

/// Multiprocessors of an H100 or H200. Sums are split by it whatever the GPU, so that they do not
/// depend on it.
const PROCESSORS: usize = 132;
/// Vectors of a row that a warp handles, at most.
const WARP: usize = 128;
/// Threads of a block of several rows.
const SMALL: usize = 128;
/// Threads of a block, at most.
const LARGE: usize = 1024;

/// One of the two norms.
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    /// Whether the mean is subtracted, as in layer norm.
    pub centred: bool,
    /// Added to the mean square.
    pub eps: f32,
}

impl Norm {
    /// The threads for rows of so many vectors, of which a thread holds about `held` where a row
    /// takes a block.
    fn plan(&self, vectors: usize, held: usize, biased: bool) -> Plan {
        let (threads, groups) = if vectors <= WARP {
            let threads = vectors.next_power_of_two().min(32);
            (threads, SMALL / threads)
        } else {
            (vectors.div_ceil(held).next_multiple_of(32).min(LARGE), 1)
        };
        let held = vectors.div_ceil(threads);
        let even = vectors == threads * held;
        Plan { threads, held, groups, even, centred: self.centred, biased, adds: false }
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
        // The backward pass has the rows in the order of what is saved, which may be a copy.
        let order = RowOrder::of(&x);
        let y = order.empty(&x, x.dtype);
        let statistics = empty(&x, &[rows, 2], DType::F32);
        let plan = self.plan(width / lanes, 4, bias.is_some());
        // SAFETY: the arguments have the sizes that the kernel's documentation asks for.
        unsafe {
            forward_kernel::launch_unchecked(
                &x.client,
                blocks(rows, plan.groups),
                dim(plan.threads * plan.groups),
                lanes,
                buffer(&x, lanes),
                buffer(&weight, lanes),
                bias.as_ref().map_or(buffer(&weight, lanes), |bias| buffer(bias, lanes)),
                buffer(&y, lanes),
                buffer(&statistics, 1),
                number(rows),
                number(width / lanes),
                1.0 / width as f32,
                self.eps,
                order.places(&x, lanes),
                plan,
                x.dtype.into(),
            );
        }
        Some(Forward { output: y, saved: vec![x, weight, statistics] })
    }

    /// The gradients of x, weight and, where `biased`, bias. A gradient of x in `grad_accum` is
    /// taken and added to, unless others own it too.
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
        let mut plan = self.plan(width / lanes, 1, biased);
        plan.adds = sum.is_some();
        let dx = sum.unwrap_or_else(|| order.empty(x, x.dtype));
        let most = PROCESSORS * (512 / (plan.threads * plan.groups)).max(1);
        let parts = rows.div_ceil(plan.groups).min(most);
        let row = if biased { 2 * width } else { width };
        let sums = empty(x, &[parts, row], DType::F32);
        // SAFETY: the arguments have the sizes that the kernel's documentation asks for.
        unsafe {
            backward_kernel::launch_unchecked(
                &x.client,
                blocks(parts, 1),
                dim(plan.threads * plan.groups),
                lanes,
                buffer(x, lanes),
                buffer(&grad, lanes),
                buffer(weight, lanes),
                buffer(statistics, 1),
                buffer(&dx, lanes),
                buffer(&sums, lanes),
                number(rows),
                number(width / lanes),
                1.0 / width as f32,
                order.places(x, lanes),
                order.places(&grad, lanes),
                plan,
                x.dtype.into(),
            );
        }
        let dw = columns(&sums, 0, &[width], 1);
        let db = if biased { columns(&sums, width, &[width], 1) } else { dw.clone() };
        [dx, dw, db]
    }
}
