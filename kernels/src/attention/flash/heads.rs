//! Tensors `[batch, heads, rows, channels]` as kernel arguments.

use burn::tensor::{DType, bf16};
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use super::{PAIR, QUAD};
use crate::cuda::{CudaTensor, WIDE, buffer, contiguous, empty};
use crate::tile::{Accumulator, CHUNK, Chunk, PANEL_DIM, RowStrides, RowStridesLaunch, store_rows};

/// A tensor `[batch, heads, rows, channels]` whose rows consist of whole, aligned chunks.
#[derive(Clone, Debug)]
pub struct Heads {
    /// The tensor.
    pub tensor: CudaTensor,
    /// Its shape.
    pub dims: [usize; 4],
}

impl Heads {
    /// `x` itself if its chunks are whole and aligned, else a contiguous copy.
    pub fn new(x: &CudaTensor) -> Self {
        let tensor = if fits(x) { x.clone() } else { contiguous(x) };
        Heads { tensor, dims: x.meta.shape().dims() }
    }

    /// `x` itself, for a kernel that writes it.
    ///
    /// # Panics
    /// Unless its chunks are whole and aligned.
    pub fn in_place(x: &CudaTensor) -> Self {
        assert!(fits(x), "rows of {:?} at strides {:?}", x.meta.shape(), x.meta.strides());
        Heads { tensor: x.clone(), dims: x.meta.shape().dims() }
    }

    /// An uninitialised tensor of the same shape in the memory order `[batch, rows, heads, channels]`, the
    /// order of the projections' inputs and outputs.
    pub fn like(&self) -> Self {
        self.like_with(self.tensor.dtype, self.dims[3])
    }

    /// [`Heads::like`] in another type, and with another number of channels.
    pub fn like_with(&self, dtype: DType, channels: usize) -> Self {
        let [batch, heads, rows, _] = self.dims;
        let mut tensor = empty(&self.tensor, &[batch, rows, heads, channels], dtype);
        tensor.meta.swap(1, 2);
        Heads { tensor, dims: [batch, heads, rows, channels] }
    }

    /// The strides; a dimension of one element gets that of a whole row, because its own is arbitrary.
    fn strides(&self) -> [usize; 4] {
        let strides = self.tensor.meta.strides();
        let row = self.dims[3].next_multiple_of(CHUNK);
        std::array::from_fn(|d| if d < 3 && self.dims[d] == 1 { row } else { strides[d] })
    }

    /// The strides of rows, in chunks.
    pub fn row_strides(&self) -> RowStridesLaunch<CudaRuntime> {
        let chunks = |d: usize| u32::try_from(self.strides()[d] / CHUNK);
        let chunks = |d| chunks(d).expect("strides below 2^32 chunks");
        RowStridesLaunch::new(chunks(0), chunks(1), chunks(2))
    }

    /// The tensor as chunks of channels.
    pub fn chunks(&self) -> HeadChunksLaunch<CudaRuntime> {
        HeadChunksLaunch::new(buffer(&self.tensor, CHUNK), self.row_strides())
    }

    /// The tensor as numbers.
    pub fn numbers(&self) -> HeadNumbersLaunch<CudaRuntime> {
        HeadNumbersLaunch::new(buffer(&self.tensor, 1), self.row_strides())
    }

    /// The tensor as pairs of channels.
    pub fn pairs<O: Numeric>(&self) -> HeadPairsLaunch<O, CudaRuntime> {
        HeadPairsLaunch::new(buffer(&self.tensor, PAIR), self.row_strides())
    }

    /// The tensor as quads of channels.
    pub fn quads<O: Numeric>(&self) -> HeadQuadsLaunch<O, CudaRuntime> {
        HeadQuadsLaunch::new(buffer(&self.tensor, QUAD), self.row_strides())
    }

    /// A tensor map for TMA loads of `rows` rows.
    pub fn tensor_map(&self, rows: usize) -> TensorMapArg<CudaRuntime, Tiled> {
        let (handle, strides) = (self.tensor.handle.clone(), self.strides());
        // SAFETY: the buffer holds the tensor.
        let tensor = unsafe { TensorArg::from_raw_parts(handle, strides.into(), self.dims.into()) };
        let tile_size = [1, 1, rows, PANEL_DIM].into();
        TensorMapArg::new(TiledArgs { tile_size }, tensor, bf16::as_type_native_unchecked())
            .with_swizzle(TensorMapSwizzle::B128)
    }
}

/// A tensor `[batch, heads, rows, channels]` in bf16 as chunks of channels.
#[derive(CubeType, CubeLaunch)]
pub struct HeadChunks {
    /// Its elements.
    pub chunks: Array<Chunk>,
    /// The strides of its rows.
    pub strides: RowStrides,
}

/// A tensor `[batch, heads, rows, channels]` in f32 as numbers.
#[derive(CubeType, CubeLaunch)]
pub struct HeadNumbers {
    /// Its elements.
    pub numbers: Array<f32>,
    /// The strides of its rows, in chunks.
    pub strides: RowStrides,
}

/// A tensor `[batch, heads, rows, channels]` as pairs of channels.
#[derive(CubeType, CubeLaunch)]
pub struct HeadPairs<O: Numeric> {
    /// Its elements.
    pub pairs: Array<Vector<O, Const<2>>>,
    /// The strides of its rows.
    pub strides: RowStrides,
}

#[cube]
impl<O: Numeric> HeadPairs<O> {
    /// The index of a row's pair of channels 2·`unit` and 2·`unit` + 1.
    pub fn at(&self, batch: usize, head: usize, row: usize, unit: usize) -> usize {
        (self.strides.base(batch, head) + row * self.strides.row as usize) * comptime!(CHUNK / 2)
            + unit
    }
}

/// A tensor `[batch, heads, rows, channels]` as quads of channels.
#[derive(CubeType, CubeLaunch)]
pub struct HeadQuads<O: Numeric> {
    /// Its elements.
    pub quads: Array<Vector<O, Const<4>>>,
    /// The strides of its rows.
    pub strides: RowStrides,
}

#[cube]
impl<O: Numeric> HeadQuads<O> {
    /// Writes a warp's 16 rows from `row` on, `channels` each, times their factors, except those from `total` on.
    pub fn store(
        &mut self,
        acc: &Accumulator,
        factors: &Array<f32>,
        batch: usize,
        head: usize,
        row: usize,
        total: usize,
        #[comptime] channels: usize,
    ) {
        let (base, stride) = (self.strides.base(batch, head), self.strides.row as usize);
        let chunks = comptime!(channels / CHUNK);
        store_rows::<O>(acc, factors, &mut self.quads, base, stride, row, total, chunks);
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
