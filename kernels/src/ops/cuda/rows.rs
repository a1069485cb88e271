//! The rows of tensors in memory order.

use std::cmp::Reverse;

use burn::tensor::DType;
use cubecl::cuda::CudaRuntime;

use super::block::RowOffsetsLaunch;
use super::{CudaTensor, as_u32, contiguous, dims, elements, over};
use crate::cuda::empty;

/// Most nested loops of [`RowOffsets`](super::block::RowOffsets).
const STEPS: usize = 3;

/// The order in which a kernel visits the rows of tensors of one shape.
pub struct RowOrder {
    shape: Vec<usize>,
    /// The dimensions but the last, outermost first.
    order: Vec<usize>,
}

impl RowOrder {
    /// The memory order of the rows of `x`, if [`RowOrder::row_offsets`] can express it for every layout of
    /// the other tensors; else row-major.
    pub fn of(x: &CudaTensor) -> Self {
        let shape = dims(x);
        let strides = x.meta.strides();
        // The stride of a dimension of size 1 is meaningless.
        let (unit, mut wide): (Vec<_>, Vec<_>) =
            (0..shape.len() - 1).partition(|&dim| shape[dim] == 1);
        wide.sort_by_key(|&dim| Reverse(strides[dim]));
        let row_major = wide.is_sorted() || wide.len() > STEPS;
        let order = if row_major { (0..shape.len() - 1).collect() } else { [unit, wide].concat() };
        RowOrder { shape, order }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.order.iter().map(|&dim| self.shape[dim]).product()
    }

    /// Elements per row.
    pub fn width(&self) -> usize {
        self.shape[self.order.len()]
    }

    /// `x`, or a copy of it whose rows can be read in this order, `lanes` elements at a time.
    ///
    /// # Panics
    /// When its shape differs.
    pub fn readable(&self, x: &CudaTensor, lanes: usize) -> CudaTensor {
        assert_eq!(dims(x), self.shape, "shapes of tensors read together");
        let steps = self.steps(x);
        let adjacent = self.width() == 1 || x.meta.strides()[self.order.len()] == 1;
        let whole = steps.iter().all(|(_, stride)| stride.is_multiple_of(lanes));
        if adjacent && whole && steps.len() <= STEPS { x.clone() } else { contiguous(x) }
    }

    /// The row offsets of a tensor returned by [`RowOrder::readable`].
    pub fn row_offsets(&self, x: &CudaTensor, lanes: usize) -> RowOffsetsLaunch<CudaRuntime> {
        let mut steps = self.steps(x);
        assert!(steps.len() <= STEPS, "rows of {:?} in {} steps", self.shape, steps.len());
        steps.resize(STEPS, (1, 0));
        let [(inner, inner_stride), (middle, middle_stride), (outer, outer_stride)] = steps[..]
        else {
            unreachable!("resized to {STEPS}")
        };
        as_u32(inner * inner_stride + middle * middle_stride + outer * outer_stride);
        RowOffsetsLaunch::new(
            as_u32(inner),
            as_u32(inner_stride / lanes),
            as_u32(middle),
            as_u32(middle_stride / lanes),
            as_u32(outer_stride / lanes),
        )
    }

    /// Sizes and strides of the nested loops over the rows of `x`, innermost first.
    fn steps(&self, x: &CudaTensor) -> Vec<(usize, usize)> {
        let strides = x.meta.strides();
        let mut steps: Vec<(usize, usize)> = vec![];
        for &dim in self.order.iter().rev().filter(|&&dim| self.shape[dim] != 1) {
            let (size, stride) = (self.shape[dim], strides[dim]);
            match steps.last_mut() {
                // The outer loop continues where the inner one ends: merge both.
                Some((inner, step)) if stride == *inner * *step => *inner *= size,
                _ => steps.push((size, stride)),
            }
        }
        steps
    }

    /// An uninitialised dense tensor with its rows in this order.
    pub fn empty(&self, like: &CudaTensor, dtype: DType) -> CudaTensor {
        let made = empty(like, &self.shape, dtype);
        as_u32(elements(&made));
        over(&made, 0, &self.shape, &self.dense_strides())
    }

    /// Whether `x` has the strides of [`RowOrder::empty`].
    pub fn is_dense(&self, x: &CudaTensor) -> bool {
        dims(x) == self.shape && x.meta.strides().to_vec() == self.dense_strides()
    }

    fn dense_strides(&self) -> Vec<usize> {
        let mut strides = vec![1; self.shape.len()];
        let mut step = self.width();
        for &dim in self.order.iter().rev() {
            strides[dim] = step;
            step *= self.shape[dim];
        }
        strides
    }
}
