//! The rotary position embedding on CUDA.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::cuda::CudaRuntime;

use super::kernel::{HEADS_PER_THREAD, HeadStridesLaunch, rotate as kernel};
use super::{Angles, RotaryEmbedding};
use crate::cuda::{CudaTensor, buffer};
use crate::ops::cuda::rows::RowOrder;
use crate::ops::cuda::{THREADS, as_u32, blocks, dim, dims, lanes, supported};

/// Tables hold the angles of whole pages of this many positions.
const PAGE: usize = 4096;
/// Most cached tables.
const CACHED: usize = 8;

/// cos and sin of some positions, `[positions, 2, rotary_dims / 2]`.
struct Table {
    theta: f64,
    rotary_dims: usize,
    positions: Range<usize>,
    angles: CudaTensor,
}

/// A cache of the tables of recent calls: the layers of a model use the same ones, step after step.
static RECENT: Mutex<Vec<Table>> = Mutex::new(vec![]);

/// The rotation, or with `direction` −1 its inverse, in the memory order of `x`.
///
/// - `x`: `[batch, heads, seq_len, head_dim]`
pub fn rotate(op: &RotaryEmbedding, x: &CudaTensor, direction: f32) -> Option<CudaTensor> {
    let [batch, heads, seq_len, head_dim] = dims(x)[..] else {
        panic!("rotary's x is {:?}, not [batch, heads, seq_len, head_dim]", dims(x))
    };
    if !supported(x) {
        return None;
    }
    if op.rotary_dims == 0 {
        return Some(x.clone());
    }
    let half = op.rotary_dims / 2;
    let order = RowOrder::of(x);
    let lanes = lanes(half, x.dtype).min(lanes(head_dim, x.dtype));
    let x = order.readable(x, lanes);
    let y = order.empty(&x, x.dtype);
    let (angles, first) = angles(op, seq_len, &x);
    // Vectors of each half, and of the channels that are copied.
    let [half, rest] = [half, head_dim - op.rotary_dims].map(|channels| channels / lanes);
    let threads = batch * heads.div_ceil(HEADS_PER_THREAD) * seq_len * (half + rest);
    // SAFETY: the strides are those of the tensors; the table has `first + seq_len` positions.
    unsafe {
        kernel::launch_unchecked(
            &x.client,
            blocks(threads, THREADS),
            dim(THREADS),
            lanes,
            buffer(&x, lanes),
            buffer(&angles, lanes),
            buffer(&y, lanes),
            as_u32(first),
            as_u32(batch),
            as_u32(heads),
            as_u32(seq_len),
            as_u32(half),
            as_u32(rest),
            direction,
            strides(&x, lanes),
            strides(&y, lanes),
            x.dtype.into(),
        );
    }
    Some(y)
}

fn strides(x: &CudaTensor, lanes: usize) -> HeadStridesLaunch<CudaRuntime> {
    let (strides, shape) = (x.meta.strides(), dims(x));
    let stride = |dim: usize| {
        as_u32(shape[dim] * strides[dim]);
        // A dimension of size 1 may have any stride.
        as_u32(if shape[dim] == 1 { 0 } else { strides[dim] / lanes })
    };
    HeadStridesLaunch::new(stride(0), stride(1), stride(2))
}

/// A table with the angles of the call's positions, and the index of the first of them.
fn angles(op: &RotaryEmbedding, seq_len: usize, like: &CudaTensor) -> (CudaTensor, usize) {
    let &RotaryEmbedding { first_position, theta, rotary_dims } = op;
    let end = (first_position + seq_len).next_multiple_of(PAGE);
    let positions = first_position / PAGE * PAGE..end;
    // A panic while the lock was held cannot have left the list inconsistent.
    let recent = || RECENT.lock().unwrap_or_else(PoisonError::into_inner);
    let fits = |table: &Table| {
        table.theta == theta
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
    recent.insert(0, Table { theta, rotary_dims, positions, angles: angles.clone() });
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
