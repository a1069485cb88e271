//! The softmax core on CUDA's tensor cores, in bf16 with f32 sums: FlashAttention-2's passes (Dao,
//! 2023), with masks by position alone, so that no mask is ever in memory.

// Device code: cubecl gives `_v` beside an argument `v`, and has no `div_ceil`, `is_multiple_of` or
// `saturating_sub`.
#[allow(
    clippy::duplicate_underscore_argument,
    clippy::implicit_saturating_sub,
    clippy::manual_div_ceil
)]
mod backward;
#[allow(clippy::manual_div_ceil)]
mod decay;
#[allow(clippy::duplicate_underscore_argument, clippy::manual_div_ceil)]
mod decode;
#[allow(
    clippy::duplicate_underscore_argument,
    clippy::manual_div_ceil,
    clippy::manual_is_multiple_of
)]
mod forward;
mod gates;
#[allow(clippy::manual_div_ceil)]
mod prune;
mod scores;

use burn::tensor::{DType, Shape, bf16};
use burn_cubecl::ops::numeric::zeros_client;
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use self::backward::keys::Parts;
use self::scores::{Options, ProblemLaunch};
use super::{PRUNED, Softmax, cuda_serves};
use crate::backend::Forward;
use crate::cuda::{CudaTensor, WIDE, buffer, contiguous, empty, reshaped};
use crate::ops::cuda::integers;
use crate::ops::cuda::prefix_sum::prefix_sum;
use crate::tile::warpgroup::{GROUP_ROWS, GROUP_WARPS};
use crate::tile::{self, CHUNK, PANEL_DIM, RowsLaunch};

/// Elements that a kernel writes at a time.
const PAIR: usize = 2;

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
        let dims: [usize; 4] = x.meta.shape().dims();
        let strides = x.meta.strides();
        let whole = |d: usize| dims[d] == 1 || (strides[d] > 0 && strides[d].is_multiple_of(CHUNK));
        let offset = x.handle.offset_start.unwrap_or(0);
        let fits = strides[3] == 1 && (0..3).all(whole) && offset.is_multiple_of(WIDE as u64);
        let tensor = if fits { x.clone() } else { contiguous(x) };
        Heads { tensor, dims }
    }

    /// A new tensor of this one's shape, which lies as `[batch, rows, heads, channels]`, the order
    /// of what projections give and take.
    pub fn like(&self) -> Self {
        self.of(self.tensor.dtype)
    }

    /// [`Heads::like`] in another type.
    fn of(&self, dtype: DType) -> Self {
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

    /// The tensor for a kernel that loads `rows` rows at a time.
    fn map(&self, rows: usize) -> TensorMapArg<CudaRuntime, Tiled> {
        let (handle, strides) = (self.tensor.handle.clone(), self.strides());
        // SAFETY: the buffer holds the tensor.
        let tensor = unsafe { TensorArg::from_raw_parts(handle, strides.into(), self.dims.into()) };
        let tile_size = [1, 1, rows, PANEL_DIM].into();
        TensorMapArg::new(TiledArgs { tile_size }, tensor, bf16::as_type_native_unchecked())
            .with_swizzle(TensorMapSwizzle::B128)
    }
}

/// What all passes of one call share.
struct Call<'a> {
    op: &'a Softmax,
    q: Heads,
    k: Heads,
    v: Heads,
    documents: Option<CudaTensor>,
    slopes: Option<CudaTensor>,
    decay: Option<Decay>,
    gates: Option<Gates>,
    pruned: Option<Pruned>,
}

/// Gates by channel, to which q and k are relative already, see [`gates`].
#[derive(Clone)]
pub struct Gates {
    /// E_{−1}, E_0, …, `[batch, kv_heads, tiles + 1, padded(head_dim)]`, 32-bit integers.
    pub ends: CudaTensor,
    /// Channels with a gate, the first ones.
    pub channels: usize,
}

pub use self::decay::{Steps, StepsLaunch};
pub use self::gates::{TILE as GATE_TILE, power};

/// Channels of a head in the kernels.
pub fn padded(head_dim: usize) -> usize {
    head_dim.next_multiple_of(PANEL_DIM)
}

/// A learned decay's prefix sums, see [`decay::prefix_sums`].
struct Decay {
    within: CudaTensor,
    before: CudaTensor,
}

impl Decay {
    /// Of ℓ, `[batch, heads, keys]` in f32.
    fn new(log_decay: &CudaTensor) -> Self {
        let [batch, heads, keys]: [usize; 3] = log_decay.meta.shape().dims();
        let within = empty(log_decay, &[batch, heads, keys], DType::F32);
        let spans = keys.div_ceil(decay::SPAN);
        let before = empty(log_decay, &[batch, heads, spans], DType::F64);
        let strides = log_decay.meta.strides();
        let step = |d: usize| u32::try_from(strides[d]).expect("strides below 2^32");
        // SAFETY: a block handles one of the rows, and stays within its tokens.
        unsafe {
            decay::prefix_sums::launch_unchecked::<CudaRuntime>(
                &log_decay.client,
                CubeCount::Static((batch * heads) as u32, 1, 1),
                CubeDim::new_1d(decay::THREADS as u32),
                buffer(log_decay, 1),
                buffer(&within, 1),
                buffer(&before, 1),
                heads as u32,
                keys as u32,
                decay::StepsLaunch::new(step(0), step(1), step(2)),
            );
        }
        Decay { within, before }
    }
}

/// Where queries begin to see keys under pruning, 32-bit integers, see [`prune`].
struct Pruned {
    starts: CudaTensor,
    bounds: CudaTensor,
    least: CudaTensor,
}

impl Pruned {
    /// Of a call with a decay.
    fn new(call: &Call, decay: &Decay) -> Self {
        let [batch, heads, queries, _] = call.q.dims;
        let [_, kv_heads, keys, _] = call.k.dims;
        let client = &call.q.tensor.client;
        let (q_norms, k_norms) = (row_sums(&call.q, &call.q), row_sums(&call.k, &call.k));
        let groups = queries.div_ceil(decay::SPAN);
        let integers = |shape: &[usize]| empty(&call.q.tensor, shape, DType::I32);
        let starts = integers(&[batch, heads, queries]);
        let bounds = integers(&[batch, heads, groups, 2]);
        let least = integers(&[batch, heads, groups]);
        // SAFETY: every row and group of the tensors has its thread, which stays within it.
        unsafe {
            prune::largest_norms::launch_unchecked::<CudaRuntime>(
                client,
                CubeCount::Static((batch * kv_heads) as u32, 1, 1),
                CubeDim::new_1d(prune::THREADS as u32),
                buffer(&k_norms, 1),
                keys as u32,
            );
            prune::first_keys::launch_unchecked::<CudaRuntime>(
                client,
                grid(queries, decay::SPAN, batch * heads),
                CubeDim::new_1d(decay::SPAN as u32),
                buffer(&q_norms, 1),
                buffer(&k_norms, 1),
                buffer(&decay.within, 1),
                buffer(&decay.before, 1),
                buffer(&starts, 1),
                buffer(&bounds, 1),
                queries as u32,
                keys as u32,
                (heads / kv_heads) as u32,
                call.op.scale,
                PRUNED.ln(),
            );
            prune::least_after::launch_unchecked::<CudaRuntime>(
                client,
                CubeCount::Static((batch * heads) as u32, 1, 1),
                CubeDim::new_1d(32),
                buffer(&bounds, 1),
                buffer(&least, 1),
                groups as u32,
            );
        }
        Pruned { starts, bounds, least }
    }
}

impl<'a> Call<'a> {
    /// `None` where the kernels do not serve these inputs.
    fn new(
        op: &'a Softmax,
        [q, k, v]: [&CudaTensor; 3],
        decay: Option<Decay>,
        documents: Option<&CudaTensor>,
    ) -> Option<Self> {
        let head_dim = q.meta.shape()[3];
        let batch_heads = q.meta.shape()[0] * q.meta.shape()[1];
        let served = [q, k, v].iter().all(|x| cuda_serves(x.dtype, batch_heads, head_dim))
            && [q, k, v].iter().all(|x| !x.meta.shape().to_vec().contains(&0))
            && (decay.is_none() || (op.softcap.is_none() && op.slopes.is_empty()));
        if !served {
            return None;
        }
        let slopes = (!op.slopes.is_empty()).then(|| {
            let bytes: Vec<u8> = op.slopes.iter().flat_map(|x| x.to_ne_bytes()).collect();
            let (client, device) = (q.client.clone(), q.device.clone());
            let buffer = client.create_from_slice(&bytes);
            let shape = Shape::new([op.slopes.len()]);
            CudaTensor::new_contiguous(client, device, shape, buffer, DType::F32)
        });
        let [batch, keys] = [k.meta.shape()[0], k.meta.shape()[2]];
        let documents = documents.map(|x| integers(x, &[batch, keys], "document starts"));
        let [q, k, v] = [q, k, v].map(Heads::new);
        Some(Call { op, q, k, v, documents, slopes, decay, gates: None, pruned: None })
    }

    /// With q and k that are relative to `gates`.
    fn gated(
        op: &'a Softmax,
        inputs: [&CudaTensor; 3],
        gates: &Gates,
        documents: Option<&CudaTensor>,
    ) -> Self {
        let call = Call::new(op, inputs, None, documents).expect("inputs that the kernels serve");
        let plain = op.softcap.is_none() && op.slopes.is_empty();
        assert!(plain && call.q.dims[2] == call.k.dims[2], "gates with {op:?}, {:?}", call.q.dims);
        Call { gates: Some(gates.clone()), ..call }
    }

    fn options(&self, shapes: [(usize, usize); 3]) -> Options {
        let real = self.q.dims[3];
        let mut shape = shapes[usize::from(real > 64) + usize::from(real > 128)];
        if self.gates.is_some() {
            // One warpgroup is faster, and its rows are scaled for one tile of gates at a time; with wide
            // heads their factors take the registers of half a tile.
            let most = if real > 128 { shape.1 / 2 } else { gates::TILE };
            shape = (1, shape.1.min(most));
        }
        let (groups, span) = shape;
        Options {
            dim: padded(real),
            real,
            warps: groups * GROUP_WARPS,
            span,
            softcap: self.op.softcap.is_some(),
            alibi: !self.op.slopes.is_empty(),
            decay: self.decay.is_some(),
            gated: self.gates.as_ref().map_or(0, |gates| gates.channels.div_ceil(16)),
            window: self.op.window.is_some(),
            documents: self.documents.is_some(),
            prune: self.pruned.is_some(),
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

    /// Document starts; any buffer where there are none, which is not read.
    fn documents(&self) -> ArrayArg<CudaRuntime> {
        buffer(self.documents.as_ref().unwrap_or(&self.q.tensor), 1)
    }

    /// ALiBi's slopes; any buffer where there are none, which is not read.
    fn slopes(&self) -> ArrayArg<CudaRuntime> {
        buffer(self.slopes.as_ref().unwrap_or(&self.q.tensor), 1)
    }

    /// The decay's sums within spans and before them; any buffer where there are none, which is not
    /// read.
    fn decay(&self) -> [ArrayArg<CudaRuntime>; 2] {
        match &self.decay {
            Some(Decay { within, before }) => [buffer(within, 1), buffer(before, 1)],
            None => [buffer(&self.q.tensor, 1), buffer(&self.q.tensor, 1)],
        }
    }

    /// Ends of the gates' tiles; any buffer where there are none, which is not read.
    fn ends(&self) -> ArrayArg<CudaRuntime> {
        buffer(self.gates.as_ref().map_or(&self.q.tensor, |gates| &gates.ends), 1)
    }

    /// Starts, bounds and least starts of a pruned call; any buffer where there are none, which is not
    /// read.
    fn pruned(&self) -> [ArrayArg<CudaRuntime>; 3] {
        let any = &self.q.tensor;
        let of =
            |part: fn(&Pruned) -> &CudaTensor| buffer(self.pruned.as_ref().map_or(any, part), 1);
        [of(|x| &x.starts), of(|x| &x.bounds), of(|x| &x.least)]
    }

    /// A gradient of q or k: with gates in f32, as it is not complete.
    fn gradient(&self, of: &Heads) -> Heads {
        if self.gates.is_some() { of.of(DType::F32) } else { of.like() }
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

/// Warpgroups of a block, and rows of the tiles that it passes over, for heads of up to 64 channels,
/// up to 128 (each the fastest on an H200), and more (what registers and shared memory hold): in the
/// forward pass, for dq, and for dk and dv.
const SHAPES: [(usize, usize); 3] = [(1, 128), (2, 128), (1, 64)];
const SHAPES_OF_QUERIES: [(usize, usize); 3] = [(1, 128), (2, 128), (1, 32)];
const SHAPES_OF_KEYS: [(usize, usize); 3] = [(1, 128), (1, 64), (1, 32)];

// A warpgroup's rows are one tile of gates and one span of decays, of which a tile of queries has a whole
// number or is a part.
const _: () = {
    assert!(GROUP_ROWS == gates::TILE && GROUP_ROWS == decay::SPAN);
    let mut i = 0;
    while i < SHAPES_OF_KEYS.len() {
        let (_, span) = SHAPES_OF_KEYS[i];
        assert!(span.is_multiple_of(decay::SPAN) || decay::SPAN.is_multiple_of(span));
        i += 1;
    }
};

/// See [`Op::cuda_forward`](crate::backend::Op::cuda_forward): saves q, k, v, o, lse and, where there is
/// a decay, its sums and what pruning has found.
pub fn forward(
    op: &Softmax,
    inputs: [&CudaTensor; 3],
    log_decay: Option<&CudaTensor>,
    documents: Option<&CudaTensor>,
    needs: bool,
) -> Option<Forward<CudaTensor>> {
    if log_decay.is_some_and(|x| x.dtype != DType::F32) {
        return None;
    }
    let call = Call::new(op, inputs, log_decay.map(Decay::new), documents)?;
    if call.q.dims[2] == 1 && !needs {
        return Some(Forward { output: decode(&call), saved: vec![] });
    }
    let pruned = call.decay.as_ref().filter(|_| op.prune).map(|decay| Pruned::new(&call, decay));
    let call = Call { pruned, ..call };
    let [o, lse] = attend(&call);
    let Call { q, k, v, decay, pruned, .. } = call;
    let mut saved = vec![q.tensor, k.tensor, v.tensor, o.clone(), lse];
    saved.extend(decay.map(|Decay { within, before }| [within, before]).into_iter().flatten());
    let parts = pruned.map(|Pruned { starts, bounds, least }| [starts, bounds, least]);
    saved.extend(parts.into_iter().flatten());
    Some(Forward { output: o, saved })
}

/// o and lse of q and k relative to `gates`.
///
/// # Panics
/// Where [`cuda_serves`] says no, with softcap or slopes, or fewer queries than keys.
pub fn forward_gated(
    op: &Softmax,
    inputs: [&CudaTensor; 3],
    gates: &Gates,
    documents: Option<&CudaTensor>,
) -> [CudaTensor; 2] {
    attend(&Call::gated(op, inputs, gates, documents))
}

/// o and lse.
fn attend(call: &Call) -> [CudaTensor; 2] {
    let [batch, heads, queries, _] = call.q.dims;
    let (o, lse) = (call.q.like(), call.statistic());
    let options = call.options(SHAPES);
    let [within, before] = call.decay();
    let [starts, bounds, _] = call.pruned();
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
            call.slopes(),
            within,
            before,
            call.ends(),
            starts,
            bounds,
            buffer(&o.tensor, PAIR),
            buffer(&lse, 1),
            call.problem(),
            o.rows(),
            options,
        );
    }
    [o.tensor, lse]
}

/// Fewest keys that one block of [`decode`] reads, as long as there are as many.
const KEYS_OF_A_SPLIT: usize = 256;

/// Bytes of a Hopper multiprocessor's shared memory that blocks can use.
const SHARED_MEMORY: usize = 227 << 10;

/// Parts that the keys are split into, up to `most`, where each makes `rows` blocks: few, and hardly
/// any of the device's `slots` for blocks is empty while the last ones run.
fn splits(rows: usize, slots: usize, most: usize) -> usize {
    let full = |splits: usize| {
        let blocks = rows * splits;
        blocks as f64 / blocks.next_multiple_of(slots) as f64
    };
    let choices = 1..=most.min(4 * slots.div_ceil(rows));
    let best = choices.clone().map(full).fold(0.0, f64::max);
    choices.into_iter().find(|&splits| full(splits) >= best - 0.05).unwrap_or(1)
}

/// o of one query a head.
fn decode(call: &Call) -> CudaTensor {
    let [batch, heads, _, head_dim] = call.q.dims;
    let [_, kv_heads, keys, _] = call.k.dims;
    let client = &call.q.tensor.client;
    let rows = batch * kv_heads * (heads / kv_heads).div_ceil(decode::ROWS);
    let processors = client.properties().hardware.num_streaming_multiprocessors.unwrap_or(132);
    let warps = decode::WARPS;
    let span = warps * decode::KEYS_OF_A_WARP;
    let options = Options { warps, span, ..call.options(SHAPES) };
    // A tile of q, and two of k and of v, in bf16.
    let tiles = (decode::ROWS + 4 * span) * options.dim * 2;
    let resident = (SHARED_MEMORY / (tiles + tile::ALIGN)).clamp(1, 4);
    let slots = processors as usize * resident;
    let splits = splits(rows, slots, keys.div_ceil(KEYS_OF_A_SPLIT));
    let of_a_split = keys.div_ceil(splits).next_multiple_of(span);
    let splits = keys.div_ceil(of_a_split);
    let count = splits * warps;
    let parts = empty(&call.q.tensor, &[count, batch, heads, head_dim], DType::F32);
    let lse = empty(&call.q.tensor, &[count, batch, heads], DType::F32);
    // Heads take the rows' place: [batch, 1, heads, head_dim].
    let mut q = call.q.tensor.clone();
    q.meta.swap(1, 2);
    let q = Heads::new(&q);
    let [within, before] = call.decay();
    // SAFETY: as in `attend`.
    unsafe {
        decode::split::launch_unchecked::<bf16, CudaRuntime>(
            client,
            CubeCount::Static(splits as u32, rows as u32, 1),
            CubeDim::new_1d(32 * warps as u32),
            CHUNK,
            q.map(decode::ROWS),
            call.k.map(span),
            call.v.map(span),
            call.documents(),
            call.slopes(),
            within,
            before,
            buffer(&parts, 1),
            buffer(&lse, 1),
            call.problem(),
            of_a_split as u32,
            options,
        );
    }
    let o = call.q.like();
    // SAFETY: as in `attend`.
    unsafe {
        decode::join::launch_unchecked::<bf16, CudaRuntime>(
            client,
            CubeCount::Static((batch * heads) as u32, 1, 1),
            CubeDim::new_1d(head_dim.next_multiple_of(32) as u32),
            buffer(&parts, 1),
            buffer(&lse, 1),
            buffer(&o.tensor, 1),
            count as u32,
            heads as u32,
            o.rows(),
            head_dim,
        );
    }
    o.tensor
}

/// The gradients of q, k, v and, where there is one, the decay from what [`forward`] saved.
pub fn backward(
    op: &Softmax,
    saved: Vec<CudaTensor>,
    documents: Option<&CudaTensor>,
    grad: CudaTensor,
) -> [Option<CudaTensor>; 4] {
    let mut saved = saved.into_iter();
    let mut next = || saved.next();
    let [q, k, v, o, lse] = [(); 5].map(|()| next().expect("the forward pass saves five tensors"));
    let decay = next().zip(next()).map(|(within, before)| Decay { within, before });
    let pruned = next().zip(next()).zip(next());
    let pruned = pruned.map(|((starts, bounds), least)| Pruned { starts, bounds, least });
    let call = Call::new(op, [&q, &k, &v], decay, documents).expect("served in the forward pass");
    let call = Call { pruned, ..call };
    let (o, grad) = (Heads::new(&o), Heads::new(&grad));
    let sums = row_sums(&o, &grad);
    // Σ dS of each query and of each key, where there is a decay.
    let d_scores = call.decay.as_ref().map(|decay| {
        let shape = decay.within.meta.shape();
        // As one row: burn may leave gaps between rows.
        let row = Shape::new([shape.num_elements()]);
        let zeros = |_| zeros_client(q.client.clone(), q.device.clone(), row.clone(), DType::F32);
        [(); 2].map(zeros).map(|sums| reshaped(&sums, &shape.dims::<3>()))
    });
    let [d_rows, d_columns] = d_scores.clone().unwrap_or_else(|| [lse.clone(), lse.clone()]);
    let dq = grad_of_queries(&call, &grad, &lse, &sums, &d_rows);
    let [dk, dv] = grad_of_keys(&call, &grad, &lse, &sums, &d_columns);
    // ℓ_t is a part of all scores between a query at t or later and a key before it.
    let d_decay = d_scores.map(|[rows, columns]| {
        let summed = prefix_sum(&burn_cubecl::ops::numeric::sub(rows, columns), true);
        summed.expect("f32 has prefix sums")
    });
    [Some(dq), Some(dk), Some(dv), d_decay]
}

/// The gradients of q and k relative to the gates' tiles, in f32 and without the scale, and that of
/// v: with I the tile of token t, q's times scale · 2^(p_t − E_I) and k's times
/// scale · 2^(E_{I−1} − p_t) are dq and dk.
pub fn backward_gated(
    op: &Softmax,
    inputs: [&CudaTensor; 3],
    gates: &Gates,
    documents: Option<&CudaTensor>,
    [o, lse, grad]: [&CudaTensor; 3],
) -> [CudaTensor; 3] {
    let call = Call::gated(op, inputs, gates, documents);
    let (o, grad) = (Heads::new(o), Heads::new(grad));
    let sums = row_sums(&o, &grad);
    let dq = grad_of_queries(&call, &grad, lse, &sums, lse);
    let [dk, dv] = grad_of_keys(&call, &grad, lse, &sums, lse);
    [dq, dk, dv]
}

/// rowsum(x ⊙ y), `[batch, heads, rows]`.
fn row_sums(x: &Heads, y: &Heads) -> CudaTensor {
    const ROWS: usize = 32;
    let [batch, heads, rows, head_dim] = x.dims;
    let sums = empty(&x.tensor, &[batch, heads, rows], DType::F32);
    // SAFETY: as in `attend`.
    unsafe {
        backward::row_sums::launch_unchecked::<bf16, CudaRuntime>(
            &x.tensor.client,
            grid(rows, ROWS, batch * heads),
            CubeDim::new_1d((ROWS * backward::LANES_OF_A_ROW) as u32),
            CHUNK,
            buffer(&x.tensor, CHUNK),
            buffer(&y.tensor, CHUNK),
            buffer(&sums, 1),
            heads as u32,
            rows as u32,
            x.rows(),
            y.rows(),
            head_dim / CHUNK,
        );
    }
    sums
}

fn grad_of_queries(
    call: &Call,
    grad: &Heads,
    lse: &CudaTensor,
    sums: &CudaTensor,
    d_rows: &CudaTensor,
) -> CudaTensor {
    let [within, before] = call.decay();
    let [starts, bounds, _] = call.pruned();
    let dq = call.gradient(&call.q);
    let [batch, heads, queries, _] = call.q.dims;
    let options = call.options(SHAPES_OF_QUERIES);
    let launch = match call.gates {
        None => backward::queries::queries::launch_unchecked::<bf16, bf16, CudaRuntime>,
        Some(_) => backward::queries::queries::launch_unchecked::<bf16, f32, CudaRuntime>,
    };
    // SAFETY: as in `attend`.
    unsafe {
        launch(
            &dq.tensor.client,
            grid(queries, options.rows(), batch * heads),
            CubeDim::new_1d(options.threads() as u32),
            CHUNK,
            PAIR,
            call.q.map(options.rows()),
            call.k.map(options.span),
            call.v.map(options.span),
            grad.map(options.rows()),
            buffer(lse, 1),
            buffer(sums, 1),
            call.documents(),
            call.slopes(),
            within,
            before,
            buffer(d_rows, 1),
            call.ends(),
            starts,
            bounds,
            buffer(&dq.tensor, PAIR),
            call.problem(),
            dq.rows(),
            options,
        );
    }
    dq.tensor
}

fn grad_of_keys(
    call: &Call,
    grad: &Heads,
    lse: &CudaTensor,
    sums: &CudaTensor,
    d_columns: &CudaTensor,
) -> [CudaTensor; 2] {
    let (dk, dv) = (call.gradient(&call.k), call.v.like());
    let [batch, kv_heads, keys, _] = call.k.dims;
    let options = call.options(SHAPES_OF_KEYS);
    let launch = match call.gates {
        None => backward::keys::keys::launch_unchecked::<bf16, bf16, CudaRuntime>,
        Some(_) => backward::keys::keys::launch_unchecked::<bf16, f32, CudaRuntime>,
    };
    let parts = if options.dim > 128 { &[Parts::Dk, Parts::Dv][..] } else { &[Parts::Both] };
    for &parts in parts {
        let [within, before] = call.decay();
        let [starts, _, least] = call.pruned();
        // SAFETY: as in `attend`.
        unsafe {
            launch(
                &dk.tensor.client,
                grid(keys, options.rows(), batch * kv_heads),
                CubeDim::new_1d(options.threads() as u32),
                CHUNK,
                PAIR,
                call.q.map(options.span),
                call.k.map(options.rows()),
                call.v.map(options.rows()),
                grad.map(options.span),
                buffer(lse, 1),
                buffer(sums, 1),
                call.documents(),
                call.slopes(),
                within,
                before,
                buffer(d_columns, 1),
                call.ends(),
                starts,
                least,
                buffer(&dk.tensor, PAIR),
                buffer(&dv.tensor, PAIR),
                call.problem(),
                dk.rows(),
                dv.rows(),
                options,
                parts,
            );
        }
    }
    [dk.tensor, dv.tensor]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_keys_are_split_so_that_blocks_fill_the_device() {
        // Rows of blocks, slots, most splits: splits.
        for (rows, slots, most, want) in [
            (128, 396, 128, 3), // 384 blocks at once.
            (128, 396, 2, 2),   // A short cache.
            (16, 396, 512, 24),
            (200, 396, 100, 5), // 1,000 blocks in three rounds.
            (512, 396, 100, 3), // 1,536 in four.
        ] {
            assert_eq!(splits(rows, slots, most), want, "{rows} rows, {slots} slots, {most}");
        }
    }
}
