//! Tensors of heads as kernels read and write them.

use burn::tensor::{DType, bf16};
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use super::PAIR;
use super::problem::Config;
use crate::cuda::{CudaTensor, WIDE, buffer, contiguous, empty};
use crate::tile::{Accumulator, CHUNK, PANEL_DIM, Rows, RowsLaunch, store_rows};

/// A tensor `[batch, heads, rows, channels]` whose rows can be read in chunks.
pub struct Heads {
    /// The tensor.
    pub tensor: CudaTensor,
    /// Its shape.
    pub dims: [usize; 4],
}

impl Heads {
    /// `x` as it lies where chunks are whole and aligned, else a copy.
    pub fn new(x: &CudaTensor) -> Self {
        let tensor = if fits(x) { x.clone() } else { contiguous(x) };
        Heads { tensor, dims: x.meta.shape().dims() }
    }

    /// `x` as it lies, for a kernel that changes it.
    ///
    /// # Panics
    /// Where chunks are not whole and aligned.
    pub fn in_place(x: &CudaTensor) -> Self {
        assert!(fits(x), "rows of {:?} at strides {:?}", x.meta.shape(), x.meta.strides());
        Heads { tensor: x.clone(), dims: x.meta.shape().dims() }
    }

    /// A new tensor of this one's shape, which lies as `[batch, rows, heads, channels]`, the order
    /// of what projections give and take.
    pub fn like(&self) -> Self {
        self.of(self.tensor.dtype)
    }

    /// [`Heads::like`] in another type.
    pub(super) fn of(&self, dtype: DType) -> Self {
        let [batch, heads, rows, channels] = self.dims;
        let mut tensor = empty(&self.tensor, &[batch, rows, heads, channels], dtype);
        tensor.meta.swap(1, 2);
        Heads { tensor, dims: self.dims }
    }

    /// The strides, a whole row where a dimension of one element may have any.
    fn strides(&self) -> [usize; 4] {
        let strides = self.tensor.meta.strides();
        let row = self.dims[3].next_multiple_of(CHUNK);
        std::array::from_fn(|d| if d < 3 && self.dims[d] == 1 { row } else { strides[d] })
    }

    /// Where rows lie, for a kernel that writes them.
    pub fn rows(&self) -> RowsLaunch<CudaRuntime> {
        let chunks = |d: usize| u32::try_from(self.strides()[d] / CHUNK);
        let chunks = |d| chunks(d).expect("strides below 2^32 chunks");
        RowsLaunch::new(chunks(0), chunks(1), chunks(2))
    }

    /// The tensor in pairs of channels.
    pub fn pairs<O: Numeric>(&self) -> HeadPairsLaunch<O, CudaRuntime> {
        HeadPairsLaunch::new(buffer(&self.tensor, PAIR), self.rows())
    }

    /// The tensor for a kernel that loads `rows` rows at a time.
    pub(super) fn map(&self, rows: usize) -> TensorMapArg<CudaRuntime, Tiled> {
        let (handle, strides) = (self.tensor.handle.clone(), self.strides());
        // SAFETY: the buffer holds the tensor.
        let tensor = unsafe { TensorArg::from_raw_parts(handle, strides.into(), self.dims.into()) };
        let tile_size = [1, 1, rows, PANEL_DIM].into();
        TensorMapArg::new(TiledArgs { tile_size }, tensor, bf16::as_type_native_unchecked())
            .with_swizzle(TensorMapSwizzle::B128)
    }
}

/// A tensor `[batch, heads, rows, channels]` in pairs of channels.
#[derive(CubeType, CubeLaunch)]
pub struct HeadPairs<O: Numeric> {
    /// Its elements.
    pub pairs: Array<Vector<O, Const<2>>>,
    /// Where its rows lie.
    pub rows: Rows,
}

#[cube]
impl<O: Numeric> HeadPairs<O> {
    /// The place of a row's pair of channels 2·`unit` and 2·`unit` + 1.
    pub fn at(&self, batch: usize, head: usize, row: usize, unit: usize) -> usize {
        (self.rows.base(batch, head) + row * self.rows.row as usize) * comptime!(CHUNK / 2) + unit
    }

    /// Writes a warp's 16 rows from `row` on, times their factors, as far as there are `total`.
    pub fn store(
        &mut self,
        acc: &Accumulator,
        factors: &Array<f32>,
        batch: usize,
        head: usize,
        row: usize,
        total: usize,
        #[comptime] config: Config,
    ) {
        let (base, stride) = (self.rows.base(batch, head), self.rows.row as usize);
        let (n, chunks) = comptime!((config.padded_head_dim / 8, config.head_dim / CHUNK));
        store_rows::<O>(acc, factors, &mut self.pairs, base, stride, row, total, n, chunks);
    }
}

/// Whether chunks of `[batch, heads, rows, channels]` are whole and aligned.
fn fits(x: &CudaTensor) -> bool {
    let dims: [usize; 4] = x.meta.shape().dims();
    let strides = x.meta.strides();
    let whole = |d: usize| dims[d] == 1 || (strides[d] > 0 && strides[d].is_multiple_of(CHUNK));
    let offset = x.handle.offset_start.unwrap_or(0);
    strides[3] == 1 && (0..3).all(whole) && offset.is_multiple_of(WIDE as u64)
}
