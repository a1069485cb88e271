//! The growing buffers of decoding caches.

use std::ops::Range;

use burn::tensor::ops::FloatTensorOps;
use burn::tensor::{DType, Slice};

use crate::Cuda;
use crate::cuda::{CudaTensor, narrow, zeros};

/// Rows `[batch, heads, rows, channels]` of any type in a buffer that grows by doubling.
#[derive(Clone, Debug)]
pub struct CacheBuffer {
    /// `[batch, heads, capacity, channels]`, where the capacity is a multiple of [`GRANULE`].
    buffer: CudaTensor,
    rows: usize,
}

/// Capacities and dropped rows are multiples of this, so that tiles of gates and spans of decays stay whole.
pub(super) const GRANULE: usize = 64;

impl CacheBuffer {
    /// An empty buffer with room for `capacity` rows, zero-filled.
    pub fn new(
        like: &CudaTensor,
        [batch, heads, channels]: [usize; 3],
        dtype: DType,
        capacity: usize,
    ) -> Self {
        let capacity = capacity.next_multiple_of(GRANULE).max(GRANULE);
        CacheBuffer { buffer: zeros(like, &[batch, heads, capacity, channels], dtype), rows: 0 }
    }

    /// Rows held.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The capacity in rows, which is also the stride between heads.
    pub fn capacity(&self) -> u32 {
        u32::try_from(self.buffer.meta.shape()[2]).expect("rows below 2^32")
    }

    /// Elements of the buffer.
    pub fn elements(&self) -> usize {
        self.buffer.meta.shape().num_elements()
    }

    /// The whole buffer.
    pub fn buffer(&self) -> &CudaTensor {
        &self.buffer
    }

    /// A view of the rows held.
    pub fn held(&self) -> CudaTensor {
        narrow(&self.buffer, 2, 0..self.rows)
    }

    /// Adds `new` uninitialised rows, which the caller writes; afterwards the buffer is not shared.
    pub fn add(&mut self, new: usize) {
        let rows = self.rows + new;
        if rows > self.capacity() as usize {
            self.move_to(2 * rows, 0);
        } else if !self.buffer.can_mut() {
            self.move_to(self.capacity() as usize, 0);
        }
        self.rows = rows;
    }

    /// Appends rows `[batch, heads, rows, channels]`.
    pub fn append(&mut self, new: CudaTensor) {
        let (at, rows) = (self.rows, new.meta.shape()[2]);
        self.add(rows);
        self.write(at, new);
    }

    /// Replaces the rows in a range by others.
    pub fn update(&mut self, range: Range<usize>, new: impl FnOnce(CudaTensor) -> CudaTensor) {
        let rows = new(narrow(&self.buffer, 2, range.clone()));
        self.write(range.start, rows);
    }

    /// Drops the first `rows` rows and frees their memory.
    pub fn drop_first(&mut self, rows: usize) {
        if rows > 0 {
            self.move_to(self.rows - rows, rows);
        }
    }

    /// Moves the rows from `from` on to a new buffer.
    fn move_to(&mut self, capacity: usize, from: usize) {
        let [batch, heads, _, channels]: [usize; 4] = self.buffer.meta.shape().dims();
        let rows = self.rows - from;
        let old = narrow(&self.buffer, 2, from..self.rows);
        *self = CacheBuffer::new(&old, [batch, heads, channels], old.dtype, capacity);
        if rows > 0 {
            self.write(0, old);
        }
        self.rows = rows;
    }

    fn write(&mut self, at: usize, new: CudaTensor) {
        let [batch, heads, rows, channels]: [usize; 4] = new.meta.shape().dims();
        let slices = [0..batch, 0..heads, at..at + rows, 0..channels].map(Slice::from);
        // Take the buffer out, so that it has one owner and is written in place.
        let buffer = std::mem::replace(&mut self.buffer, new.clone());
        self.buffer = Cuda::float_slice_assign(buffer, &slices, new);
    }
}

/// The initial capacity: `reserved` tokens, at most what a window can hold, and at least the first
/// `tokens`.
pub fn capacity(window: Option<usize>, reserved: usize, tokens: usize) -> usize {
    window.map_or(reserved, |w| reserved.min(2 * w.max(GRANULE))).max(tokens)
}

/// The number of oldest rows to drop under a window before `new` rows are appended to those `held`:
/// whole granules that no later token sees, once there are as many of them as rows inside the window.
pub fn expired(window: Option<usize>, held: usize, new: usize) -> usize {
    let Some(window) = window else { return 0 };
    let seen = window - 1;
    if held + new < 2 * window.max(GRANULE) || held < seen {
        return 0;
    }
    (held - seen) / GRANULE * GRANULE
}
