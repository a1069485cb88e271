//! Views of `[batch, heads, seq_len, head_dim]` tensors in the memory order
//! `[batch, seq_len, heads, head_dim]` of the projections: kernels read and write them without transposing
//! copies.

use std::borrow::Cow;
use std::marker::PhantomData;

use burn_flex::FlexTensor;

use super::gemm::Mat;
use super::{dims, from_vec_strided};

/// A tensor that is read head by head.
pub struct HeadView<'a> {
    tensor: Cow<'a, FlexTensor>,
    head_dim: usize,
    strides: [usize; 3],
    offset: usize,
}

impl<'a> HeadView<'a> {
    /// A view of a 4-dimensional f32 tensor; copied only if a head's channels are not adjacent.
    ///
    /// # Panics
    /// When the tensor does not have 4 dimensions.
    pub fn new(tensor: &'a FlexTensor) -> Self {
        let strides = tensor.layout().strides();
        let usable = strides[3] == 1 && strides.iter().all(|&s| s >= 0);
        let tensor =
            if usable { Cow::Borrowed(tensor) } else { Cow::Owned(tensor.to_contiguous()) };
        let layout = tensor.layout();
        let [b, h, t, _] = layout.strides()[..] else { panic!("a tensor of 4 dimensions") };
        let strides = [b as usize, h as usize, t as usize];
        let offset = layout.start_offset();
        let head_dim = dims(&tensor)[3];
        HeadView { head_dim, strides, offset, tensor }
    }

    fn start(&self, batch: usize, head: usize, row: usize) -> usize {
        let [b, h, t] = self.strides;
        self.offset + batch * b + head * h + row * t
    }

    /// Rows `first..first + rows` of one head as a matrix `[rows, head_dim]`.
    pub fn rows(&self, batch: usize, head: usize, first: usize, rows: usize) -> Mat<'_> {
        let data = &self.tensor.storage::<f32>()[self.start(batch, head, first)..];
        Mat::new(data, rows, self.head_dim, self.strides[2])
    }

    /// One row of one head.
    pub fn row(&self, batch: usize, head: usize, row: usize) -> &[f32] {
        &self.tensor.storage::<f32>()[self.start(batch, head, row)..][..self.head_dim]
    }
}

/// An output in `[batch, seq_len, heads, head_dim]` memory that parallel tasks write head by head.
pub struct HeadsOut {
    data: *mut f32,
    shape: [usize; 4],
    _owner: PhantomData<Vec<f32>>,
}

// SAFETY: `write` is the only access while tasks run; each row of a head is written by one task
// (see there), and the buffer is read only by `into_tensor`, which owns it.
unsafe impl Sync for HeadsOut {}

impl HeadsOut {
    /// A zero-filled buffer for a tensor of shape `[batch, heads, seq_len, head_dim]`.
    pub fn new(batch: usize, heads: usize, seq_len: usize, head_dim: usize) -> Self {
        let data = vec![0.0; batch * heads * seq_len * head_dim].into_boxed_slice();
        let data = Box::into_raw(data).cast();
        HeadsOut { data, shape: [batch, heads, seq_len, head_dim], _owner: PhantomData }
    }

    /// Writes rows `first..` of one head.
    ///
    /// # Safety
    /// Concurrent calls must write different rows or heads.
    ///
    /// # Panics
    /// When the rows are outside the tensor.
    pub unsafe fn write(&self, batch: usize, head: usize, first: usize, rows: &[f32]) {
        let [batches, heads, seq_len, head_dim] = self.shape;
        let count = rows.len() / head_dim;
        assert!(batch < batches && head < heads && first + count <= seq_len);
        for (row, values) in rows.chunks_exact(head_dim).enumerate() {
            let at = ((batch * seq_len + first + row) * heads + head) * head_dim;
            // SAFETY: the assertion keeps `at + head_dim` inside the buffer; `values` is another
            // allocation; no other task writes this row of this head.
            unsafe { self.data.add(at).copy_from_nonoverlapping(values.as_ptr(), head_dim) };
        }
    }

    fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// The finished tensor, a view `[batch, heads, seq_len, head_dim]`.
    pub fn into_tensor(self) -> FlexTensor {
        let [batch, heads, seq_len, head_dim] = self.shape;
        let out = std::mem::ManuallyDrop::new(self);
        // SAFETY: `data` came from a boxed slice of this length, and `out` is not dropped.
        let data = unsafe { Vec::from_raw_parts(out.data, out.len(), out.len()) };
        let strides = [seq_len * heads * head_dim, head_dim, heads * head_dim, 1];
        from_vec_strided(data, &[batch, heads, seq_len, head_dim], &strides)
    }
}

impl Drop for HeadsOut {
    fn drop(&mut self) {
        // SAFETY: as in `into_tensor`; reached only when a task panicked before it.
        drop(unsafe { Vec::from_raw_parts(self.data, self.len(), self.len()) });
    }
}
