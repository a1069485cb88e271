//! The rotary position embedding on CUDA.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::cuda::CudaRuntime;

use super::kernel::{HEADS_PER_THREAD, RotatedHeadsLaunch, rotate as kernel, rotate_both};
use super::{Angles, Frequencies, RotaryEmbedding};
use crate::cuda::{CudaTensor, WIDE, buffer, contiguous};
use crate::ops::cuda::rows::RowOrder;
use crate::ops::cuda::{
    THREADS, as_u32, blocks, dim, dims, head_strides, lanes, nothing, supported,
};

/// Tables hold the angles of whole pages of this many positions.
const PAGE: usize = 4096;
/// Most cached tables.
const CACHED: usize = 8;

/// cos and sin of some positions, times the amplitude, `[positions, 2, rotary_dims / 2]`.
struct Table {
    frequencies: Frequencies,
    rotary_dims: usize,
    positions: Range<usize>,
    angles: CudaTensor,
}

/// A cache of the tables of recent calls: the layers of a model use the same ones, step after step.
static RECENT: Mutex<Vec<Table>> = Mutex::new(vec![]);

/// The rotation, or with `direction` −1 its transpose, in the memory order of `x`.
///
/// - `x`: `[batch, heads, seq_len, head_dim]`
pub fn rotate(op: &RotaryEmbedding, x: &CudaTensor, direction: f32) -> Option<CudaTensor> {
    let [_, _, seq_len, head_dim] = dims(x)[..] else {
        panic!("rotary's x is {:?}, not [batch, heads, seq_len, head_dim]", dims(x))
    };
    if !supported(x) {
        return None;
    }
    if op.rotary_dims == 0 {
        return Some(x.clone());
    }
    let lanes = lanes(op.rotary_dims / 2, x.dtype).min(lanes(head_dim, x.dtype));
    let order = RowOrder::of(x);
    let x = order.readable(x, lanes);
    let y = order.empty(&x, x.dtype);
    let (angles, first) = angles(op, seq_len, &x);
    let part = Part { x, y, rotary_dims: op.rotary_dims };
    // SAFETY: the strides are those of the tensors; the table has `first + seq_len` positions.
    unsafe {
        kernel::launch_unchecked(
            &part.x.client,
            blocks(part.threads(lanes), THREADS),
            dim(THREADS),
            lanes,
            buffer(&part.x, lanes),
            buffer(&angles, lanes),
            buffer(&part.y, lanes),
            as_u32(first),
            direction,
            part.launch(lanes),
            part.x.dtype.into(),
        );
    }
    Some(part.y)
}

/// q and k rotated by one launch, each in its memory order; `None` unless their types and their numbers of rows and
/// channels agree.
pub fn both(op: &RotaryEmbedding, [q, k]: [&CudaTensor; 2]) -> Option<[CudaTensor; 2]> {
    if !serves_both(op, [q, k]) {
        return None;
    }
    let [q, k] = [q, k].map(|x| {
        let x = adjacent(x);
        let y = RowOrder::of(&x).empty(&x, x.dtype);
        Part { x, y, rotary_dims: op.rotary_dims }
    });
    launch_both(op, [&q, &k], None);
    Some([q.y, k.y])
}

/// q rotated, in its memory order; writes k rotated to `keys`, and v to `values`, which are views of the same sizes
/// and types with adjacent channels.
///
/// # Panics
/// Unless [`serves_both`] q and k.
pub fn rotate_to(
    op: &RotaryEmbedding,
    [q, k, v]: [&CudaTensor; 3],
    [keys, values]: [&CudaTensor; 2],
) -> CudaTensor {
    assert!(serves_both(op, [q, k]), "q {:?} and k {:?}, {:?}", dims(q), dims(k), q.dtype);
    assert_eq!((dims(k), k.dtype), (dims(keys), keys.dtype), "k and its place");
    assert_eq!((dims(v), v.dtype), (dims(values), values.dtype), "v and its place");
    assert_eq!(v.dtype, q.dtype, "types of v and q");
    let [q, k, v] = [q, k, v].map(adjacent);
    let rotary_dims = op.rotary_dims;
    let y = RowOrder::of(&q).empty(&q, q.dtype);
    let q = Part { x: q, y, rotary_dims };
    let k = Part { x: k, y: keys.clone(), rotary_dims };
    let v = Part { x: v, y: values.clone(), rotary_dims: 0 };
    launch_both(op, [&q, &k], Some(&v));
    q.y
}

/// Whether [`both`] serves these q and k.
pub fn serves_both(op: &RotaryEmbedding, [q, k]: [&CudaTensor; 2]) -> bool {
    let sizes = |x: &CudaTensor| dims(x)[2..].to_vec();
    let some = |x: &CudaTensor| !dims(x).contains(&0);
    let alike = q.dtype == k.dtype && sizes(q) == sizes(k);
    op.rotary_dims > 0 && supported(q) && alike && some(q) && some(k)
}

fn launch_both(op: &RotaryEmbedding, [q, k]: [&Part; 2], v: Option<&Part>) {
    let parts = [Some(q), Some(k), v].into_iter().flatten();
    let lanes = parts.map(Part::most_lanes).min().expect("q and k");
    let (angles, first) = angles(op, dims(&q.x)[2], &q.x);
    let threads = [q.threads(lanes), k.threads(lanes), v.map_or(0, |v| v.threads(lanes))];
    // Without v, the threads past those of k find no sequence.
    let v_heads = v.map_or_else(|| k.heads(0, lanes), |v| v.launch(lanes));
    let array = |x: Option<&CudaTensor>| x.map_or_else(|| nothing(&k.x), |x| buffer(x, lanes));
    let [q_threads, k_threads, _] = threads.map(as_u32);
    // SAFETY: as in `rotate`.
    unsafe {
        rotate_both::launch_unchecked(
            &q.x.client,
            blocks(threads.iter().sum(), THREADS),
            dim(THREADS),
            lanes,
            buffer(&q.x, lanes),
            buffer(&k.x, lanes),
            array(v.map(|v| &v.x)),
            buffer(&angles, lanes),
            buffer(&q.y, lanes),
            buffer(&k.y, lanes),
            array(v.map(|v| &v.y)),
            as_u32(first),
            q_threads,
            k_threads,
            q.launch(lanes),
            k.launch(lanes),
            v_heads,
            q.x.dtype.into(),
        );
    }
}

/// `x`, or a copy of it whose channels are adjacent.
fn adjacent(x: &CudaTensor) -> CudaTensor {
    if x.meta.strides()[3] == 1 { x.clone() } else { contiguous(x) }
}

/// A tensor `[batch, heads, seq_len, head_dim]` to rotate, and where the result goes.
struct Part {
    x: CudaTensor,
    y: CudaTensor,
    /// Channels that rotate; the others are copied.
    rotary_dims: usize,
}

impl Part {
    /// Vectors of each half of the channels that rotate, and of the others.
    fn vectors(&self, lanes: usize) -> [usize; 2] {
        let rest = dims(&self.x)[3] - self.rotary_dims;
        [self.rotary_dims / 2, rest].map(|channels| channels / lanes)
    }

    /// The number of threads.
    fn threads(&self, lanes: usize) -> usize {
        let [batch, heads, seq_len, _] = self.x.meta.shape().dims();
        let [half, rest] = self.vectors(lanes);
        batch * heads.div_ceil(HEADS_PER_THREAD) * seq_len * (half + rest)
    }

    /// The most channels per vector, up to 16 bytes, such that both tensors' rows, their halves and the rest consist
    /// of aligned vectors.
    fn most_lanes(&self) -> usize {
        let most = |x: &CudaTensor| {
            let (shape, strides) = (dims(x), x.meta.strides());
            let aligned = x.handle.offset_start.unwrap_or(0).is_multiple_of(WIDE as u64);
            let most = if aligned { lanes(shape[3], x.dtype) } else { 1 };
            let apart = (0..3).filter(|&d| shape[d] > 1);
            apart.map(|d| lanes(strides[d], x.dtype)).fold(most, usize::min)
        };
        let half = match self.rotary_dims / 2 {
            0 => usize::MAX,
            half => lanes(half, self.x.dtype),
        };
        most(&self.x).min(most(&self.y)).min(half)
    }

    fn launch(&self, lanes: usize) -> RotatedHeadsLaunch<CudaRuntime> {
        self.heads(dims(&self.x)[0], lanes)
    }

    /// The heads of the first `batch` sequences.
    fn heads(&self, batch: usize, lanes: usize) -> RotatedHeadsLaunch<CudaRuntime> {
        let [_, heads, seq_len, _] = self.x.meta.shape().dims();
        let [half, rest] = self.vectors(lanes);
        let [batch, heads, seq_len, half, rest] = [batch, heads, seq_len, half, rest].map(as_u32);
        let [from, to] = [&self.x, &self.y].map(|x| head_strides(x, lanes));
        RotatedHeadsLaunch::new(batch, heads, seq_len, half, rest, from, to)
    }
}

/// A table with the angles of the call's positions, and the index of the first of them.
fn angles(op: &RotaryEmbedding, seq_len: usize, like: &CudaTensor) -> (CudaTensor, usize) {
    let &RotaryEmbedding { first_position, frequencies, rotary_dims } = op;
    let end = (first_position + seq_len).next_multiple_of(PAGE);
    let positions = first_position / PAGE * PAGE..end;
    // A panic while the lock was held cannot have left the list inconsistent.
    let recent = || RECENT.lock().unwrap_or_else(PoisonError::into_inner);
    let fits = |table: &Table| {
        table.frequencies == frequencies
            && table.rotary_dims == rotary_dims
            && table.positions.start <= positions.start
            && positions.end <= table.positions.end
            && table.angles.device == like.device
    };
    if let Some(table) = recent().iter().find(|table| fits(table)) {
        return (table.angles.clone(), first_position - table.positions.start);
    }
    // Computed without the lock: this uses all threads, which may themselves wait for the lock.
    let angles = upload(op, positions.clone(), like);
    let offset = first_position - positions.start;
    let mut recent = recent();
    recent.truncate(CACHED - 1);
    recent.insert(0, Table { frequencies, rotary_dims, positions, angles: angles.clone() });
    (angles, offset)
}

/// The angles of these positions, computed in f64.
fn upload(op: &RotaryEmbedding, positions: Range<usize>, like: &CudaTensor) -> CudaTensor {
    let half = op.rotary_dims / 2;
    let op = RotaryEmbedding { first_position: positions.start, ..op.clone() };
    let rows = positions.len();
    let Angles { cos, sin } = op.angles(rows);
    let rows_of = cos.chunks_exact(half).zip(sin.chunks_exact(half));
    let bytes: Vec<u8> =
        rows_of.flat_map(|(cos, sin)| [cos, sin]).flatten().flat_map(|x| x.to_ne_bytes()).collect();
    let handle = like.client.create_from_slice(&bytes);
    let shape = Shape::new([rows, 2, half]);
    CubeTensor::new_contiguous(like.client.clone(), like.device.clone(), shape, handle, DType::F32)
}
