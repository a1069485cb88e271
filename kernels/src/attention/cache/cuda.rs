//! The append to a cache's buffers on CUDA: keys and values in one launch.

use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use crate::cuda::{CudaTensor, WIDE, buffer, contiguous, narrow, unshare};
use crate::ops::cuda::{THREADS, as_u32, blocks, dim, dims, lanes, supported};
use crate::ops::rotary::{RotaryEmbedding, cuda as rotary};
use crate::tile::{RowStrides, RowStridesLaunch};

/// Whether [`write_rows`] serves these keys and values.
pub fn serves([k, v]: [&CudaTensor; 2]) -> bool {
    supported(k) && v.dtype == k.dtype
}

/// Writes new keys and values into the rows from `at` on, in place unless a buffer is shared.
///
/// - `buffers`: `[batch, heads, capacity, channels]`, whose rows burn may have padded
/// - `new`: `[batch, heads, n, channels]`; sizes and type are those of the buffers, and rows of an odd number of
///   channels are contiguous
pub fn write_rows(
    mut buffers: [CudaTensor; 2],
    new: [CudaTensor; 2],
    at: usize,
) -> [CudaTensor; 2] {
    buffers.iter_mut().for_each(unshare);
    let lanes = buffers.iter().map(most_lanes).min().expect("two buffers");
    let new = new.map(|x| if most_lanes(&x) >= lanes { x } else { contiguous(&x) });
    let [k, v] = [0, 1].map(|i| Copy::new(&new[i], &buffers[i], lanes));
    // SAFETY: each thread copies one vector of the new rows to its place in the buffer.
    unsafe {
        write::launch_unchecked(
            &new[0].client,
            blocks(k.vectors + v.vectors, THREADS),
            dim(THREADS),
            lanes,
            buffer(&new[0], lanes),
            buffer(&new[1], lanes),
            buffer(&buffers[0], lanes),
            buffer(&buffers[1], lanes),
            k.launch(),
            v.launch(),
            as_u32(at),
            new[0].dtype.into(),
        );
    }
    buffers
}

/// Whether [`write_rotated`] serves this q, k and v.
pub fn serves_rotated(op: &RotaryEmbedding, [q, k, v]: &[CudaTensor; 3]) -> bool {
    serves([k, v]) && rotary::serves_both(op, [q, k])
}

/// Writes keys, rotated, and values as [`write_rows`] does; returns the rotated q, and the buffers.
///
/// # Panics
/// Unless [`serves_rotated`] q, k and v.
pub fn write_rotated(
    op: &RotaryEmbedding,
    mut buffers: [CudaTensor; 2],
    [q, k, v]: [CudaTensor; 3],
    at: usize,
) -> (CudaTensor, [CudaTensor; 2]) {
    buffers.iter_mut().for_each(unshare);
    let rows = at..at + k.meta.shape()[2];
    let [keys, values] = buffers.each_ref().map(|buffer| narrow(buffer, 2, rows.clone()));
    let q = rotary::rotate_to(op, [&q, &k, &v], [&keys, &values]);
    (q, buffers)
}

/// The most channels, a power of two of up to 16 bytes, such that every row of `x` consists of aligned vectors
/// of them.
fn most_lanes(x: &CudaTensor) -> usize {
    let (dims, strides, offset) = (dims(x), x.meta.strides(), x.handle.offset_start.unwrap_or(0));
    let most = lanes(dims[3], x.dtype);
    if (strides[3] != 1 && dims[3] > 1) || !offset.is_multiple_of(WIDE as u64) {
        return 1;
    }
    (0..3).filter(|&d| dims[d] > 1).map(|d| lanes(strides[d], x.dtype)).fold(most, usize::min)
}

/// The copy of new rows into one buffer.
struct Copy {
    /// Vectors in all.
    vectors: usize,
    /// Heads, rows and vectors of a row.
    sizes: [u32; 3],
    /// The strides of sequences, heads and rows in vectors: of the new rows, and of the buffer.
    strides: [[u32; 3]; 2],
}

impl Copy {
    fn new(from: &CudaTensor, to: &CudaTensor, lanes: usize) -> Self {
        let [batch, heads, rows, channels] = from.meta.shape().dims();
        let sizes = [heads, rows, channels / lanes];
        let strides = |x: &CudaTensor| {
            let (dims, strides) = (dims(x), x.meta.strides());
            // The stride of a dimension of one element may be anything.
            [0, 1, 2].map(|d| if dims[d] == 1 { 0 } else { as_u32(strides[d] / lanes) })
        };
        let [of_from, of_to] = [strides(from), strides(to)];
        Copy {
            vectors: batch * sizes.iter().product::<usize>(),
            sizes: sizes.map(as_u32),
            strides: [of_from, of_to],
        }
    }

    fn launch(&self) -> RowsLaunch<CudaRuntime> {
        let ([heads, rows, vectors], [from, to]) = (self.sizes, self.strides);
        let [from, to] =
            [from, to].map(|[batch, head, row]| RowStridesLaunch::new(batch, head, row));
        RowsLaunch::new(as_u32(self.vectors), heads, rows, vectors, from, to)
    }
}

/// New rows `[batch, heads, rows, vectors]` of a buffer.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Rows {
    /// Vectors in all.
    count: u32,
    heads: u32,
    rows: u32,
    vectors: u32,
    /// The strides of the new rows and of the buffer, in vectors.
    from: RowStrides,
    to: RowStrides,
}

#[cube]
impl Rows {
    /// Where vector `own` of the new rows is.
    fn from(&self, own: usize) -> usize {
        let row = own / self.vectors as usize;
        self.place(&self.from, own, row % self.rows as usize)
    }

    /// Where it belongs in the buffer, whose row `at` is the first new one.
    fn to(&self, own: usize, at: u32) -> usize {
        let row = own / self.vectors as usize;
        self.place(&self.to, own, at as usize + row % self.rows as usize)
    }

    fn place(&self, strides: &RowStrides, own: usize, row: usize) -> usize {
        let head = own / self.vectors as usize / self.rows as usize;
        strides.base(head / self.heads as usize, head % self.heads as usize)
            + row * strides.row as usize
            + own % self.vectors as usize
    }
}

/// Writes keys and values; each thread handles one vector of the keys, then of the values.
#[cube(launch_unchecked)]
fn write<E: Float, N: Size>(
    k: &Array<Vector<E, N>>,
    v: &Array<Vector<E, N>>,
    k_buffer: &mut Array<Vector<E, N>>,
    v_buffer: &mut Array<Vector<E, N>>,
    k_rows: Rows,
    v_rows: Rows,
    at: u32,
    #[define(E)] _dtype: StorageType,
) {
    let own = ABSOLUTE_POS;
    let keys = k_rows.count as usize;
    if own < keys {
        k_buffer[k_rows.to(own, at)] = k[k_rows.from(own)];
    } else if own - keys < v_rows.count as usize {
        v_buffer[v_rows.to(own - keys, at)] = v[v_rows.from(own - keys)];
    }
}
