//! The softmax core on CUDA's tensor cores, in bf16 with f32 sums: FlashAttention-2's passes (Dao,
//! 2023), with masks by position alone, so that no mask is ever in memory.

// Device code: cubecl gives `_v` beside an argument `v`, and has no `div_ceil` or `is_multiple_of`.
#[allow(clippy::duplicate_underscore_argument, clippy::manual_div_ceil)]
mod backward;
#[allow(clippy::duplicate_underscore_argument, clippy::manual_div_ceil)]
mod decode;
#[allow(clippy::duplicate_underscore_argument, clippy::manual_is_multiple_of)]
mod forward;
mod scores;

use burn::tensor::{DType, bf16};
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use self::scores::{Options, ProblemLaunch};
use super::Softmax;
use crate::backend::Forward;
use crate::cuda::{CudaTensor, array, contiguous, empty};
use crate::tile::{CHUNK, PANEL_DIM, RowsLaunch};

/// Elements that a kernel writes at a time.
const PAIR: usize = 2;

/// Most blocks that a grid has along y.
const MOST_HEADS: usize = 65_535;

/// A tensor `[batch, heads, rows, channels]` whose rows can be read in chunks.
struct Heads {
    tensor: CudaTensor,
    dims: [usize; 4],
}

impl Heads {
    /// `x` as it lies where chunks are whole and aligned, else a copy.
    fn new(x: &CudaTensor) -> Self {
        let dims: [usize; 4] = x.meta.shape().dims();
        let strides = x.meta.strides();
        let whole = |d: usize| dims[d] == 1 || (strides[d] > 0 && strides[d].is_multiple_of(CHUNK));
        let offset = x.handle.offset_start.unwrap_or(0);
        let fits = strides[3] == 1 && (0..3).all(whole) && offset.is_multiple_of(16);
        let tensor = if fits { x.clone() } else { contiguous(x) };
        Heads { tensor, dims }
    }

    /// A new tensor of this one's shape, which lies as `[batch, rows, heads, channels]`, the order
    /// of what projections give and take.
    fn like(&self) -> Self {
        let [batch, heads, rows, channels] = self.dims;
        let mut tensor = empty(&self.tensor, &[batch, rows, heads, channels], self.tensor.dtype);
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
    fn rows(&self) -> RowsLaunch<CudaRuntime> {
        let chunks = |d: usize| u32::try_from(self.strides()[d] / CHUNK);
        let chunks = |d| chunks(d).expect("strides below 2^32 chunks");
        RowsLaunch::new(chunks(0), chunks(1), chunks(2))
    }

    /// The tensor for a kernel that loads `rows` rows at a time.
    fn map(&self, rows: usize) -> TensorMapArg<CudaRuntime, Tiled> {
        let (handle, strides) = (self.tensor.handle.clone(), self.strides());
        // SAFETY: the buffer holds the tensor.
        let tensor = unsafe { TensorArg::from_raw_parts(handle, strides.into(), self.dims.into()) };
        let tile_size = [1, 1, rows, PANEL_DIM].into();
        TensorMapArg::new(TiledArgs { tile_size }, tensor, bf16::as_type_native_unchecked())
            .with_swizzle(TensorMapSwizzle::B128)
    }

    /// The buffer from the tensor's first element to its last, `lanes` elements at a time.
    fn arg(&self, lanes: usize) -> ArrayArg<CudaRuntime> {
        let last = |(&size, stride): (&usize, usize)| size.saturating_sub(1) * stride;
        let elements = self.dims.iter().zip(self.strides()).map(last).sum::<usize>() + 1;
        // SAFETY: the buffer holds as many: the last row ends with a whole chunk.
        unsafe { ArrayArg::from_raw_parts(self.tensor.handle.clone(), elements.div_ceil(lanes)) }
    }
}

/// What all passes of one call share.
struct Call<'a> {
    op: &'a Softmax,
    q: Heads,
    k: Heads,
    v: Heads,
    documents: Option<CudaTensor>,
    slopes: CudaTensor,
}

impl<'a> Call<'a> {
    /// `None` where the kernels do not serve these inputs.
    fn new(
        op: &'a Softmax,
        [q, k, v]: [&CudaTensor; 3],
        documents: Option<&CudaTensor>,
    ) -> Option<Self> {
        let head_dim = q.meta.shape()[3];
        let batch_heads = q.meta.shape()[0] * q.meta.shape()[1];
        let served = [q, k, v].iter().all(|x| x.dtype == DType::BF16)
            && [q, k, v].iter().all(|x| !x.meta.shape().to_vec().contains(&0))
            && head_dim.is_multiple_of(CHUNK)
            && head_dim <= 256
            && batch_heads <= MOST_HEADS;
        if !served {
            return None;
        }
        let bytes: Vec<u8> = op.slopes.iter().flat_map(|x| x.to_ne_bytes()).collect();
        let slopes = CudaTensor::new_contiguous(
            q.client.clone(),
            q.device.clone(),
            burn::tensor::Shape::new([op.slopes.len().max(1)]),
            q.client.create_from_slice(if bytes.is_empty() { &[0; 4] } else { &bytes }),
            DType::F32,
        );
        let documents = documents.map(contiguous);
        let [q, k, v] = [q, k, v].map(Heads::new);
        Some(Call { op, q, k, v, documents, slopes })
    }

    fn options(&self, shapes: &'static [Shape; 3]) -> Options {
        let real = self.q.dims[3];
        let &Shape { warps, m, span } = shape(shapes, real);
        Options {
            dim: real.next_multiple_of(64),
            real,
            warps,
            m,
            span,
            softcap: self.op.softcap.is_some(),
            alibi: !self.op.slopes.is_empty(),
            window: self.op.window.is_some(),
            documents: self.documents.is_some(),
        }
    }

    fn problem(&self) -> ProblemLaunch<CudaRuntime> {
        let count = |n: usize| u32::try_from(n).expect("sizes below 2^32");
        let [heads, kv_heads] = [self.q.dims[1], self.k.dims[1]];
        ProblemLaunch::new(
            count(heads),
            count(heads / kv_heads),
            count(self.q.dims[2]),
            count(self.k.dims[2]),
            self.op.window.map_or(u32::MAX, count),
            self.op.scale,
            self.op.softcap.unwrap_or(1.0),
        )
    }

    /// Document starts; any buffer where there are none.
    fn documents(&self) -> ArrayArg<CudaRuntime> {
        array(self.documents.as_ref().unwrap_or(&self.slopes), 1)
    }

    /// A statistic of every query, `[batch, heads, queries]`.
    fn statistic(&self) -> CudaTensor {
        let [batch, heads, queries, _] = self.q.dims;
        empty(&self.q.tensor, &[batch, heads, queries], DType::F32)
    }
}

/// One block for `rows` rows of each of `heads` heads.
fn grid(total: usize, rows: usize, heads: usize) -> CubeCount {
    CubeCount::Static(total.div_ceil(rows) as u32, heads as u32, 1)
}

/// How a kernel's work is cut.
struct Shape {
    /// Warps of a block.
    warps: usize,
    /// Rows of a warp, in 16s.
    m: usize,
    /// Rows of the tiles that a block passes over.
    span: usize,
}

/// The fastest shapes found on an H200, for heads of up to 64, 128 and 256 channels.
const FORWARD: [Shape; 3] = [
    Shape { warps: 4, m: 1, span: 64 },
    Shape { warps: 4, m: 1, span: 64 },
    Shape { warps: 4, m: 1, span: 32 },
];
const QUERIES: [Shape; 3] = FORWARD;
const KEYS: [Shape; 3] = [
    Shape { warps: 4, m: 1, span: 64 },
    Shape { warps: 4, m: 1, span: 64 },
    Shape { warps: 4, m: 1, span: 16 },
];

/// The shape for heads of `dim` channels.
fn shape(shapes: &'static [Shape; 3], dim: usize) -> &'static Shape {
    &shapes[if dim <= 64 { 0 } else { usize::from(dim > 128) + 1 }]
}

/// See [`Op::cuda_forward`](crate::backend::Op::cuda_forward): saves q, k, v, o and lse.
pub fn forward(
    op: &Softmax,
    inputs: [&CudaTensor; 3],
    documents: Option<&CudaTensor>,
    needs: bool,
) -> Option<Forward<CudaTensor>> {
    let call = Call::new(op, inputs, documents)?;
    let [batch, heads, queries, _] = call.q.dims;
    if queries == 1 && !needs {
        return Some(Forward { output: decode(&call), saved: vec![] });
    }
    let (o, lse) = (call.q.like(), call.statistic());
    let options = call.options(&FORWARD);
    // SAFETY: grid and options are the kernel's own, and every row and chunk it reads is one of the
    // tensors' given here.
    unsafe {
        forward::forward::launch_unchecked::<bf16, CudaRuntime>(
            &call.q.tensor.client,
            grid(queries, options.rows(), batch * heads),
            CubeDim::new_1d(options.threads() as u32),
            CHUNK,
            PAIR,
            call.q.map(options.rows()),
            call.k.map(options.span),
            call.v.map(options.span),
            call.documents(),
            array(&call.slopes, 1),
            o.arg(PAIR),
            array(&lse, 1),
            call.problem(),
            o.rows(),
            options,
        );
    }
    let Call { q, k, v, .. } = call;
    let saved = vec![q.tensor, k.tensor, v.tensor, o.tensor.clone(), lse];
    Some(Forward { output: o.tensor, saved })
}

/// Most keys that one block of [`decode`] reads when there are blocks enough.
const KEYS_OF_A_SPLIT: usize = 256;

/// o of one query a head.
fn decode(call: &Call) -> CudaTensor {
    const WARPS: usize = 4;
    let [batch, heads, _, head_dim] = call.q.dims;
    let [_, kv_heads, keys, _] = call.k.dims;
    let client = &call.q.tensor.client;
    let rows = batch * kv_heads * (heads / kv_heads).div_ceil(decode::ROWS);
    // Four blocks for each multiprocessor, as long as each has enough to do.
    let processors = client.properties().hardware.num_streaming_multiprocessors.unwrap_or(132);
    let wanted = (4 * processors as usize).div_ceil(rows);
    let span = WARPS * decode::KEYS_OF_A_WARP;
    let of_a_split = keys.div_ceil(wanted).max(KEYS_OF_A_SPLIT).next_multiple_of(span);
    let splits = keys.div_ceil(of_a_split);
    let parts = empty(&call.q.tensor, &[splits, batch, heads, head_dim], DType::F32);
    let lse = empty(&call.q.tensor, &[splits, batch, heads], DType::F32);
    let options = Options { warps: WARPS, m: 1, span, ..call.options(&FORWARD) };
    // Heads take the rows' place: [batch, 1, heads, head_dim].
    let mut q = call.q.tensor.clone();
    q.meta.swap(1, 2);
    let q = Heads::new(&q);
    // SAFETY: as in `forward`.
    unsafe {
        decode::split::launch_unchecked::<bf16, CudaRuntime>(
            client,
            CubeCount::Static(splits as u32, rows as u32, 1),
            CubeDim::new_1d(options.threads() as u32),
            CHUNK,
            q.map(decode::ROWS),
            call.k.map(span),
            call.v.map(span),
            call.documents(),
            array(&call.slopes, 1),
            array(&parts, 1),
            array(&lse, 1),
            call.problem(),
            of_a_split as u32,
            options,
        );
    }
    let o = call.q.like();
    // SAFETY: as in `forward`.
    unsafe {
        decode::join::launch_unchecked::<bf16, CudaRuntime>(
            client,
            CubeCount::Static((batch * heads) as u32, 1, 1),
            CubeDim::new_1d(head_dim.next_multiple_of(32) as u32),
            array(&parts, 1),
            array(&lse, 1),
            o.arg(1),
            splits as u32,
            heads as u32,
            o.rows(),
            head_dim,
        );
    }
    o.tensor
}

/// The gradients of q, k and v from what [`forward`] saved.
pub fn backward(
    op: &Softmax,
    saved: Vec<CudaTensor>,
    documents: Option<&CudaTensor>,
    grad: CudaTensor,
) -> [CudaTensor; 3] {
    let [q, k, v, o, lse] = saved.try_into().expect("the forward pass saves five tensors");
    let call = Call::new(op, [&q, &k, &v], documents).expect("served in the forward pass");
    let (o, grad) = (Heads::new(&o), Heads::new(&grad));
    let sums = row_sums(&call, &o, &grad);
    let dq = grad_of_queries(&call, &grad, &lse, &sums);
    let [dk, dv] = grad_of_keys(&call, &grad, &lse, &sums);
    [dq, dk, dv]
}

/// rowsum(dO ⊙ O), `[batch, heads, queries]`.
fn row_sums(call: &Call, o: &Heads, grad: &Heads) -> CudaTensor {
    const ROWS: usize = 32;
    let sums = call.statistic();
    let [batch, heads, queries, head_dim] = call.q.dims;
    // SAFETY: as in `forward`.
    unsafe {
        backward::row_sums::launch_unchecked::<bf16, CudaRuntime>(
            &o.tensor.client,
            grid(queries, ROWS, batch * heads),
            CubeDim::new_1d((ROWS * backward::LANES_OF_A_ROW) as u32),
            CHUNK,
            o.arg(CHUNK),
            grad.arg(CHUNK),
            array(&sums, 1),
            heads as u32,
            queries as u32,
            o.rows(),
            grad.rows(),
            head_dim / CHUNK,
        );
    }
    sums
}

fn grad_of_queries(call: &Call, grad: &Heads, lse: &CudaTensor, sums: &CudaTensor) -> CudaTensor {
    let dq = call.q.like();
    let [batch, heads, queries, _] = call.q.dims;
    let options = call.options(&QUERIES);
    // SAFETY: as in `forward`.
    unsafe {
        backward::queries::launch_unchecked::<bf16, CudaRuntime>(
            &dq.tensor.client,
            grid(queries, options.rows(), batch * heads),
            CubeDim::new_1d(options.threads() as u32),
            CHUNK,
            PAIR,
            call.q.map(options.rows()),
            call.k.map(options.span),
            call.v.map(options.span),
            grad.map(options.rows()),
            array(lse, 1),
            array(sums, 1),
            call.documents(),
            array(&call.slopes, 1),
            dq.arg(PAIR),
            call.problem(),
            dq.rows(),
            options,
        );
    }
    dq.tensor
}

fn grad_of_keys(call: &Call, grad: &Heads, lse: &CudaTensor, sums: &CudaTensor) -> [CudaTensor; 2] {
    let (dk, dv) = (call.k.like(), call.v.like());
    let [batch, kv_heads, keys, _] = call.k.dims;
    let options = call.options(&KEYS);
    // SAFETY: as in `forward`.
    unsafe {
        backward::keys::launch_unchecked::<bf16, CudaRuntime>(
            &dk.tensor.client,
            grid(keys, options.rows(), batch * kv_heads),
            CubeDim::new_1d(options.threads() as u32),
            CHUNK,
            PAIR,
            call.q.map(options.span),
            call.k.map(options.rows()),
            call.v.map(options.rows()),
            grad.map(options.span),
            array(lse, 1),
            array(sums, 1),
            call.documents(),
            array(&call.slopes, 1),
            dk.arg(PAIR),
            dv.arg(PAIR),
            call.problem(),
            dk.rows(),
            dv.rows(),
            options,
        );
    }
    [dk.tensor, dv.tensor]
}
