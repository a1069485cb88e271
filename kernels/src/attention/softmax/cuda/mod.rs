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
#[allow(
    clippy::duplicate_underscore_argument,
    clippy::manual_div_ceil,
    clippy::manual_is_multiple_of
)]
mod decaying;
#[allow(clippy::duplicate_underscore_argument, clippy::manual_div_ceil)]
mod decode;
#[allow(
    clippy::duplicate_underscore_argument,
    clippy::manual_div_ceil,
    clippy::manual_is_multiple_of
)]
mod forward;
mod gates;
mod heads;
mod kept;
#[allow(clippy::manual_div_ceil)]
mod prune;
mod scores;
mod sight;

use burn::tensor::{DType, Shape, bf16};
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use self::backward::keys::Parts;
use self::decay::Decay;
use self::decode::decode;
use self::scores::{Options, ProblemLaunch};
use super::{Softmax, cuda_serves};
use crate::backend::Forward;
use crate::cuda::{CudaTensor, buffer, empty, zeros};
use crate::ops::cuda::integers;
use crate::ops::prefix_sum::cuda::prefix_sum;
use crate::tile::warpgroup::{GROUP_ROWS, GROUP_WARPS};
use crate::tile::{CHUNK, PANEL_DIM};

/// Elements that a kernel writes at a time.
const PAIR: usize = 2;

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
    /// E_{−1}, E_0, …, `[batch, kv_heads, tiles + 1, padded(head_dim)]`, 32-bit integers; there may be room
    /// for more in decoding.
    pub ends: CudaTensor,
    /// Whether keys are relative to the starts of their tiles, as in decoding; else to their ends.
    pub from_starts: bool,
    /// Channels with a gate, the first ones.
    pub channels: usize,
}

pub use self::decay::{Steps, StepsLaunch};
pub use self::decaying::Decaying;
pub use self::gates::{TILE as GATE_TILE, power};
pub use self::heads::Heads;
pub use self::kept::{Kept, room, unseen};
pub use self::prune::Pruned;
pub use self::scores::first_above;

/// Channels of a head in the kernels.
pub fn padded(head_dim: usize) -> usize {
    head_dim.next_multiple_of(PANEL_DIM)
}

/// Where the elements of `[batch, heads, tokens]` lie, or rows of channels of `[batch, heads, tokens, channels]`.
pub fn steps(x: &CudaTensor) -> StepsLaunch<CudaRuntime> {
    let strides = x.meta.strides();
    StepsLaunch::new(number(strides[0]), number(strides[1]), number(strides[2]))
}

/// A size or a stride as kernels take it.
fn number(size: usize) -> u32 {
    u32::try_from(size).expect("sizes below 2^32")
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
        let (queries, keys) = (call.q.dims[2], call.k.dims[2]);
        let whole = match gates.from_starts {
            true => queries == 1 || (keys - queries).is_multiple_of(GATE_TILE),
            false => keys == queries,
        };
        assert!(plain && whole, "gates with {op:?}, {queries} queries on {keys} keys");
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
            from_starts: self.gates.as_ref().is_some_and(|gates| gates.from_starts),
            window: self.op.window.is_some(),
            documents: self.documents.is_some(),
            prune: self.pruned.is_some(),
        }
    }

    fn problem(&self) -> ProblemLaunch<CudaRuntime> {
        let [heads, kv_heads] = [self.q.dims[1], self.k.dims[1]];
        ProblemLaunch::new(
            number(heads),
            number(heads / kv_heads),
            number(self.q.dims[2]),
            number(self.k.dims[2]),
            self.op.window.map_or(u32::MAX, number),
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
        let [o, _] = decode(&call, None);
        return Some(Forward { output: o, saved: vec![] });
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
/// Where [`cuda_serves`] says no, with softcap or slopes; with fewer queries than keys, but where these are
/// relative to the starts of their tiles and the queries begin with one.
pub fn forward_gated(
    op: &Softmax,
    inputs: [&CudaTensor; 3],
    gates: &Gates,
    pruned: Option<&Pruned>,
    documents: Option<&CudaTensor>,
) -> [CudaTensor; 2] {
    let pruned = pruned.cloned();
    attend(&Call { pruned, ..Call::gated(op, inputs, gates, documents) })
}

/// o and lse of one query a head, relative to `gates` as the keys are, to the starts of their tiles. Heads of
/// k may share one of v.
///
/// # Panics
/// As [`forward_gated`].
pub fn decode_gated(op: &Softmax, inputs: [&CudaTensor; 3], gates: &Gates) -> [CudaTensor; 2] {
    assert!(gates.from_starts, "keys relative to the ends of their tiles");
    decode(&Call::gated(op, inputs, gates, None), None)
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
        let shape = decay.within.meta.shape().dims::<3>();
        [(); 2].map(|()| zeros(&q, &shape, DType::F32))
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
    pruned: Option<&Pruned>,
    documents: Option<&CudaTensor>,
    [o, lse, grad]: [&CudaTensor; 3],
) -> [CudaTensor; 3] {
    let pruned = pruned.cloned();
    let call = Call { pruned, ..Call::gated(op, inputs, gates, documents) };
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
