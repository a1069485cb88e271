//! Tensors read row by row in memory order.
//!
//! Heads are `[batch, heads, seq_len, head_dim]` views of `[batch, seq_len, heads, head_dim]` memory. A
//! kernel that works on one row (last dimension) at a time needs no copy of them. Its result keeps their
//! memory order, so that swapping the dimensions back is free.

use burn_flex::FlexTensor;

use super::{contiguous, dims, from_vec_strided};

/// `tensor` with adjacent elements in each row; copied only if needed.
pub fn with_whole_rows(tensor: &FlexTensor) -> FlexTensor {
    let last = tensor.layout().num_dims() - 1;
    if tensor.layout().strides()[last] == 1 { tensor.clone() } else { contiguous(tensor) }
}

/// The order in which a kernel visits the rows of tensors of one shape.
pub struct RowOrder {
    shape: Vec<usize>,
    /// The dimensions but the last, outermost first.
    order: Vec<usize>,
}

impl RowOrder {
    /// The memory order of the rows of `tensor`.
    pub fn of(tensor: &FlexTensor) -> Self {
        let shape = dims(tensor);
        let strides = tensor.layout().strides();
        // The stride of a dimension of size 1 is meaningless.
        let (unit, mut wide): (Vec<_>, Vec<_>) =
            (0..shape.len() - 1).partition(|&dim| shape[dim] == 1);
        wide.sort_by_key(|&dim| std::cmp::Reverse(strides[dim]));
        let order =
            if wide.is_sorted() { (0..shape.len() - 1).collect() } else { [unit, wide].concat() };
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

    /// The index along `dim` of each row, as a function of the row's number.
    pub fn index(&self, dim: usize) -> impl Fn(usize) -> usize + use<> {
        let place = self.order.iter().position(|&d| d == dim);
        let place = place.expect("a dimension before the last");
        let inner: usize = self.order[place + 1..].iter().map(|&d| self.shape[d]).product();
        let size = self.shape[dim];
        move |row| row / inner % size
    }

    /// The rows of a tensor from [`with_whole_rows`], numbered in this order.
    ///
    /// # Panics
    /// When its shape differs, or a row's elements are not adjacent.
    pub fn view<'a>(&self, tensor: &'a FlexTensor) -> RowView<'a> {
        assert_eq!(dims(tensor), self.shape, "shapes of tensors read together");
        let strides = tensor.layout().strides();
        assert_eq!(strides[self.order.len()], 1, "stride of the last dimension");
        let mut steps: Vec<(usize, isize)> = vec![];
        for &dim in self.order.iter().filter(|&&dim| self.shape[dim] != 1) {
            let (size, stride) = (self.shape[dim], strides[dim]);
            match steps.last_mut() {
                // The outer loop continues where the inner one ends: merge both.
                Some(outer) if outer.1 == size as isize * stride => {
                    *outer = (outer.0 * size, stride)
                }
                _ => steps.push((size, stride)),
            }
        }
        RowView {
            data: tensor.storage::<f32>(),
            width: self.width(),
            start: tensor.layout().start_offset() as isize,
            outer: steps.first().map_or(0, |step| step.1),
            inner: steps.into_iter().skip(1).rev().collect(),
        }
    }

    /// A tensor from rows in this order.
    pub fn tensor(&self, data: Vec<f32>) -> FlexTensor {
        let mut strides = vec![1; self.shape.len()];
        let mut step = self.width();
        for &dim in self.order.iter().rev() {
            strides[dim] = step;
            step *= self.shape[dim];
        }
        from_vec_strided(data, &self.shape, &strides)
    }
}

/// The rows of one tensor in some [`RowOrder`].
pub struct RowView<'a> {
    data: &'a [f32],
    width: usize,
    start: isize,
    /// Stride of the outermost loop.
    outer: isize,
    /// Sizes and strides of the other loops, innermost first; empty for contiguous memory.
    inner: Vec<(usize, isize)>,
}

impl RowView<'_> {
    /// Row number `row`.
    #[inline]
    pub fn row(&self, row: usize) -> &[f32] {
        let (mut at, mut rest) = (self.start, row);
        for &(size, stride) in &self.inner {
            at += (rest % size) as isize * stride;
            rest /= size;
        }
        at += rest as isize * self.outer;
        &self.data[at as usize..][..self.width]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{from_vec, slice};

    fn counted(shape: &[usize]) -> FlexTensor {
        let len: usize = shape.iter().product();
        from_vec((0..len).map(|i| i as f32).collect(), shape)
    }

    /// The tensor read through `order` and written back.
    fn copied(order: &RowOrder, tensor: &FlexTensor) -> FlexTensor {
        let tensor = with_whole_rows(tensor);
        let view = order.view(&tensor);
        order.tensor((0..order.rows()).flat_map(|row| view.row(row).to_vec()).collect())
    }

    fn elements(tensor: &FlexTensor) -> Vec<f32> {
        slice(&contiguous(tensor)).to_vec()
    }

    #[test]
    fn a_copy_in_any_order_has_the_same_elements() {
        let whole = counted(&[2, 3, 4, 5]);
        let views = [
            whole.clone(),
            counted(&[2, 4, 3, 5]).transpose(1, 2),
            counted(&[4, 3, 2, 5]).permute(&[2, 1, 0, 3]),
            counted(&[2, 3, 4, 15]).narrow(3, 5, 5),
            counted(&[2, 9, 4, 5]).narrow(1, 2, 3),
            counted(&[2, 3, 5, 4]).transpose(2, 3),
        ];
        for of in &views {
            let order = RowOrder::of(of);
            for view in &views {
                let copy = copied(&order, view);
                assert_eq!(
                    elements(&copy),
                    elements(view),
                    "{:?} as {:?}",
                    view.layout(),
                    of.layout()
                );
            }
        }
    }

    #[test]
    fn a_copy_keeps_the_order_of_memory() {
        let swapped = counted(&[2, 4, 3, 5]).transpose(1, 2);
        let copy = copied(&RowOrder::of(&swapped), &swapped);
        assert_eq!(copy.layout().strides(), swapped.layout().strides());
        // One row of one batch: swapped or not, memory is the same.
        let one = counted(&[1, 1, 3, 5]).transpose(1, 2);
        assert!(copied(&RowOrder::of(&one), &one).is_contiguous());
    }

    #[test]
    fn the_index_of_a_row_follows_the_order() {
        let swapped = counted(&[2, 4, 3, 5]).transpose(1, 2);
        let order = RowOrder::of(&swapped);
        let (head, time) = (order.index(1), order.index(2));
        let places: Vec<_> = (0..7).map(|row| (time(row), head(row))).collect();
        assert_eq!(places, [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]);
    }
}
