//! The rows of tensors, in the order of memory.

use std::cmp::Reverse;

use burn::tensor::DType;
use cubecl::cuda::CudaRuntime;

use super::block::RowsLaunch;
use super::{CudaTensor, contiguous, dims, elements, number, over};
use crate::cuda::empty;

/// Steps through memory that a kernel follows.
const STEPS: usize = 3;

/// The order in which a kernel visits the rows of tensors of one shape.
pub struct RowOrder {
    shape: Vec<usize>,
    /// The dimensions but the last, outermost first.
    order: Vec<usize>,
}

impl RowOrder {
    /// The order of the rows of `x` in memory, if [`RowOrder::places`] can follow it whatever the
    /// layout of the other tensors; row-major otherwise.
    pub fn of(x: &CudaTensor) -> Self {
        let shape = dims(x);
        let strides = x.meta.strides();
        // A dimension of size 1 has no place in memory, whatever its stride.
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

    /// Elements of a row.
    pub fn width(&self) -> usize {
        self.shape[self.order.len()]
    }

    /// `x`, or a copy of it whose rows can be read in this order, `lanes` elements at a time.
    ///
    /// # Panics
    /// When its shape is another.
    pub fn readable(&self, x: &CudaTensor, lanes: usize) -> CudaTensor {
        assert_eq!(dims(x), self.shape, "shapes of tensors read together");
        let steps = self.steps(x);
        let adjacent = self.width() == 1 || x.meta.strides()[self.order.len()] == 1;
        let whole = steps.iter().all(|(_, stride)| stride.is_multiple_of(lanes));
        if adjacent && whole && steps.len() <= STEPS { x.clone() } else { contiguous(x) }
    }

    /// Where the rows of a tensor that [`RowOrder::readable`] gave start.
    pub fn places(&self, x: &CudaTensor, lanes: usize) -> RowsLaunch<CudaRuntime> {
        let mut steps = self.steps(x);
        assert!(steps.len() <= STEPS, "rows of {:?} in {} steps", self.shape, steps.len());
        steps.resize(STEPS, (1, 0));
        let [(inner, inner_stride), (middle, middle_stride), (outer, outer_stride)] = steps[..]
        else {
            unreachable!("resized to {STEPS}")
        };
        number(inner * inner_stride + middle * middle_stride + outer * outer_stride);
        RowsLaunch::new(
            number(inner),
            number(inner_stride / lanes),
            number(middle),
            number(middle_stride / lanes),
            number(outer_stride / lanes),
        )
    }

    /// Sizes and strides of the steps through the rows of `x`, innermost first.
    fn steps(&self, x: &CudaTensor) -> Vec<(usize, usize)> {
        let strides = x.meta.strides();
        let mut steps: Vec<(usize, usize)> = vec![];
        for &dim in self.order.iter().rev().filter(|&&dim| self.shape[dim] != 1) {
            let (size, stride) = (self.shape[dim], strides[dim]);
            match steps.last_mut() {
                // The outer step goes on where the inner one ends: one step for both.
                Some((inner, step)) if stride == *inner * *step => *inner *= size,
                _ => steps.push((size, stride)),
            }
        }
        steps
    }

    /// A tensor without gaps, its rows in this order and its elements undefined.
    pub fn empty(&self, like: &CudaTensor, dtype: DType) -> CudaTensor {
        let made = empty(like, &self.shape, dtype);
        number(elements(&made));
        over(&made, 0, &self.shape, &self.dense_strides())
    }

    /// Whether `x` lies as what [`RowOrder::empty`] makes.
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
