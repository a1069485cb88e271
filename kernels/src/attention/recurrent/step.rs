//! One token of a state's recurrence, for decoding: by one kernel on CUDA, by plain tensor operations elsewhere.
//!
//! With a state S of head_dim × value_dim, the decay α and what a token writes, by one of the updates:
//!
//! - additive: S' = diag(α) S + kᵀ v
//! - delta rule: S' = diag(α) S + kᵀ β (v − k diag(α) S)
//! - replacement: S' = diag(α) S + kᵀ v − bᵀ (z S)
//!
//! and y = q S' of each query of the group. All is in f32.

use burn::tensor::{DType, Tensor};
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use crate::attention::chunked::diagonal::{Corrections, Update};
use crate::backend::{OpBackend, primitive, tensor};
use crate::cuda::{CudaTensor, buffer, contiguous, empty};
use crate::ops::cuda::{as_u32, dim, dims, elements, nothing};
use crate::ops::matmul::MatMul;

/// A token of each sequence.
#[derive(Clone, Debug)]
pub struct Token<B: OpBackend> {
    /// Scaled, `[batch, heads, 1, head_dim]`.
    pub q: Tensor<B, 4>,
    /// `[batch, kv_heads, 1, head_dim]`
    pub k: Tensor<B, 4>,
    /// `[batch, kv_heads, 1, value_dim]`
    pub v: Tensor<B, 4>,
    /// ln α, `[batch, kv_heads, 1, 1 or head_dim]`.
    pub log_decay: Tensor<B, 4>,
    /// How it corrects the state; of one token.
    pub corrections: Corrections<Tensor<B, 4>>,
}

impl<B: OpBackend> Token<B> {
    /// y `[batch, heads, 1, value_dim]`, and the state after the token; `state` `[batch · kv_heads, head_dim,
    /// value_dim]` is that before it.
    pub fn advance(self, state: Tensor<B, 3>) -> (Tensor<B, 4>, Tensor<B, 3>) {
        let Token { q, k, v, log_decay, corrections } = self;
        let ([batch, heads, _, d], [_, kv_heads, _, values]) = (q.dims(), v.dims());
        let rows = batch * kv_heads;
        let by_row = |x: Tensor<B, 4>| {
            let channels = x.dims()[3];
            x.reshape([rows, 1, channels])
        };
        let token = RowToken {
            q: q.reshape([rows, heads / kv_heads, d]),
            k: by_row(k),
            v: by_row(v),
            log_decay: by_row(log_decay),
            corrections: corrections.map(by_row),
        };
        let (y, state) = token.advance(state);
        (y.reshape([batch, heads, 1, values]), state)
    }
}

/// A token of all rows. A row is a kv head of a sequence: q `[rows, group, head_dim]`, the others `[rows, 1, …]`.
struct RowToken<B: OpBackend> {
    q: Tensor<B, 3>,
    k: Tensor<B, 3>,
    v: Tensor<B, 3>,
    log_decay: Tensor<B, 3>,
    corrections: Corrections<Tensor<B, 3>>,
}

impl<B: OpBackend> RowToken<B> {
    /// y `[rows, group, value_dim]`, and the state after the token.
    fn advance(self, state: Tensor<B, 3>) -> (Tensor<B, 3>, Tensor<B, 3>) {
        let (q, elements) = (primitive(self.q.clone()), state.shape().num_elements());
        if self.q.dtype() == DType::F32 && elements > 0 && B::into_cuda(q).is_some() {
            let on_cuda = |x: Tensor<B, 3>| {
                let x = B::into_cuda(primitive(x)).expect("all of a token is where q is");
                contiguous(&x)
            };
            let RowToken { q, k, v, log_decay, corrections } = self;
            let qkv = [q, k, v].map(on_cuda);
            let corrections = corrections.map(on_cuda);
            let results = by_kernel(qkv, &on_cuda(log_decay), &corrections, &on_cuda(state));
            let [y, state] = results.map(|x| tensor(B::from_cuda(x)));
            return (y, state);
        }
        self.by_operations(state)
    }

    fn by_operations(self, state: Tensor<B, 3>) -> (Tensor<B, 3>, Tensor<B, 3>) {
        let RowToken { q, k, v, log_decay, corrections } = self;
        let removed = match &corrections {
            Corrections::Vectors { removal, .. } => Some(removal.clone().mm(state.clone())),
            _ => None,
        };
        let decayed = state * log_decay.exp().swap_dims(1, 2);
        let w = match &corrections {
            Corrections::Weights(beta) => (v - k.clone().mm(decayed.clone())) * beta.clone(),
            _ => v,
        };
        let mut state = decayed + k.swap_dims(1, 2).mm(w);
        if let (Corrections::Vectors { correction, .. }, Some(removed)) = (corrections, removed) {
            state = state - correction.swap_dims(1, 2).mm(removed);
        }
        (q.mm(state.clone()), state)
    }
}

/// Columns of the state per block, one for each lane of a warp.
const COLUMNS: usize = 32;

/// Warps per block. Warp w has the rows w, w + `WARPS`, … of the state.
const WARPS: usize = 8;

/// The compile-time configuration of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct StepConfig {
    head_dim: usize,
    update: Update,
    /// Whether each channel of a key has its own decay.
    per_channel: bool,
}

impl StepConfig {
    /// Rows of the state per warp.
    const fn held(&self) -> usize {
        self.head_dim.div_ceil(WARPS)
    }
}

/// y and the state after the token.
fn by_kernel(
    [q, k, v]: [CudaTensor; 3],
    log_decay: &CudaTensor,
    corrections: &Corrections,
    state: &CudaTensor,
) -> [CudaTensor; 2] {
    let [rows, group, d] = q.meta.shape().dims();
    let values = dims(&v)[2];
    assert_eq!(dims(state), [rows, d, values], "the shape of the state");
    for x in [&q, &k, &v, log_decay, state] {
        assert_eq!(x.dtype, DType::F32, "the type of a token's tensors");
    }
    as_u32(elements(state));
    let (beta_or_removal, correction) = match corrections {
        Corrections::None => (None, None),
        Corrections::Weights(beta) => (Some(beta), None),
        Corrections::Vectors { removal, correction } => (Some(removal), Some(correction)),
    };
    let or_nothing = |x: Option<&CudaTensor>| x.map_or_else(|| nothing(&q), |x| buffer(x, 1));
    let y = empty(&q, &[rows, group, values], q.dtype);
    let next = empty(&q, &[rows, d, values], q.dtype);
    let config = StepConfig {
        head_dim: d,
        update: corrections.update(),
        per_channel: dims(log_decay)[2] > 1,
    };
    // SAFETY: a block stays within its row, and threads past the last column write nothing.
    unsafe {
        advance_state::launch_unchecked::<CudaRuntime>(
            &q.client,
            CubeCount::Static(as_u32(rows), as_u32(values.div_ceil(COLUMNS)), 1),
            dim(COLUMNS * WARPS),
            TokenArraysLaunch::new(
                buffer(&q, 1),
                buffer(&k, 1),
                buffer(&v, 1),
                buffer(log_decay, 1),
                or_nothing(beta_or_removal),
                or_nothing(correction),
            ),
            buffer(state, 1),
            buffer(&y, 1),
            buffer(&next, 1),
            as_u32(group),
            as_u32(values),
            config,
        );
    }
    [y, next]
}

/// A token's tensors, as in [`Token`].
#[derive(CubeType, CubeLaunch)]
struct TokenArrays {
    q: Array<f32>,
    k: Array<f32>,
    v: Array<f32>,
    log_decay: Array<f32>,
    /// β, or z.
    beta_or_removal: Array<f32>,
    /// b
    correction: Array<f32>,
}

/// The sum over the block's warps of each lane's value.
#[cube]
fn sum_of_warps(value: f32, scratch: &mut SharedMemory<f32>) -> f32 {
    let lane = UNIT_POS as usize % COLUMNS;
    sync_cube(); // Threads may still read the previous values.
    scratch[UNIT_POS as usize] = value;
    sync_cube();
    let mut sum = scratch[lane];
    #[unroll]
    for warp in 1..WARPS {
        sum += scratch[warp * COLUMNS + lane];
    }
    sum
}

/// One token.
///
/// Grid: rows, parts of [`COLUMNS`] columns of the state; [`WARPS`] warps.
#[cube(launch_unchecked)]
fn advance_state(
    token: &TokenArrays,
    state: &Array<f32>,
    y: &mut Array<f32>,
    next: &mut Array<f32>,
    group: u32,
    values: u32,
    #[comptime] config: StepConfig,
) {
    let (d, held, update) = comptime!((config.head_dim, config.held(), config.update));
    let (row, values) = (CUBE_POS_X as usize, values as usize);
    let (warp, lane) = (UNIT_POS as usize / COLUMNS, UNIT_POS as usize % COLUMNS);
    let column = CUBE_POS_Y as usize * COLUMNS + lane;
    let exists = column < values;
    let mut scratch = SharedMemory::<f32>::new(comptime!(COLUMNS * WARPS));

    // 1. The decayed state, and what it holds for the key.
    let mut s = Array::<f32>::new(held);
    let mut read = f32::cast_from(0f32);
    #[unroll]
    for i in 0..held {
        let n = warp + i * WARPS;
        s[i] = f32::cast_from(0f32);
        if exists && n < d {
            let before = state[(row * d + n) * values + column];
            let mut at = row;
            if comptime!(config.per_channel) {
                at = row * d + n;
            }
            s[i] = before * Exp::exp(token.log_decay[at]);
            if comptime!(update == Update::Delta) {
                read += token.k[row * d + n] * s[i];
            }
            if comptime!(update == Update::Replace) {
                read += token.beta_or_removal[row * d + n] * before;
            }
        }
    }
    let mut w = f32::cast_from(0f32);
    if exists {
        w = token.v[row * values + column];
    }
    if comptime!(update != Update::Additive) {
        read = sum_of_warps(read, &mut scratch);
    }
    if comptime!(update == Update::Delta) {
        w = token.beta_or_removal[row] * (w - read);
    }

    // 2. The state after it.
    #[unroll]
    for i in 0..held {
        let n = warp + i * WARPS;
        if exists && n < d {
            s[i] += token.k[row * d + n] * w;
            if comptime!(update == Update::Replace) {
                s[i] -= token.correction[row * d + n] * read;
            }
            next[(row * d + n) * values + column] = s[i];
        }
    }

    // 3. What the queries read.
    for g in 0..group as usize {
        let query = row * group as usize + g;
        let mut sum = f32::cast_from(0f32);
        #[unroll]
        for i in 0..held {
            let n = warp + i * WARPS;
            if n < d {
                sum += token.q[query * d + n] * s[i];
            }
        }
        let sum = sum_of_warps(sum, &mut scratch);
        if exists && warp == 0 {
            y[query * values + column] = sum;
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::backend::Flex;
    use burn::tensor::TensorData;

    use super::*;
    use crate::Cuda;
    use crate::testing::record;

    /// Values from −1 to 1.
    fn wave(len: usize, phase: f64) -> Vec<f64> {
        (0..len).map(|i| (i as f64 * 0.731 + phase).sin()).collect()
    }

    fn tensor_of<B: OpBackend, const D: usize>(x: &[f64], shape: [usize; D]) -> Tensor<B, D> {
        let data: Vec<f32> = x.iter().map(|&x| x as f32).collect();
        Tensor::from_data(TensorData::new(data, shape), &Default::default())
    }

    /// Compares one step with the definition in f64.
    fn check<B: OpBackend>(update: Update, [rows, group, d, values]: [usize; 4], channels: usize) {
        let [q, k, v] = [(rows * group * d, 0.1), (rows * d, 0.2), (rows * values, 0.3)]
            .map(|(n, p)| wave(n, p));
        let [z, b, state] =
            [(rows * d, 0.4), (rows * d, 0.5), (rows * d * values, 0.6)].map(|(n, p)| wave(n, p));
        let log_decay: Vec<f64> = wave(rows * channels, 0.7).iter().map(|x| x - 1.0).collect();
        let beta: Vec<f64> = wave(rows, 0.8).iter().map(|x| x + 1.0).collect();

        let (mut end, mut y) = (state.clone(), vec![0.0; rows * group * values]);
        for row in 0..rows {
            for m in 0..values {
                let cell = |n: usize| (row * d + n) * values + m;
                let decayed = |n: usize| {
                    state[cell(n)] * log_decay[row * channels + n.min(channels - 1)].exp()
                };
                let of_key: f64 = (0..d).map(|n| k[row * d + n] * decayed(n)).sum();
                let removed: f64 = (0..d).map(|n| z[row * d + n] * state[cell(n)]).sum();
                let value = v[row * values + m];
                for n in 0..d {
                    let at = row * d + n;
                    end[cell(n)] = decayed(n)
                        + match update {
                            Update::Additive => k[at] * value,
                            Update::Delta => k[at] * beta[row] * (value - of_key),
                            Update::Replace => k[at] * value - b[at] * removed,
                        };
                }
                for g in 0..group {
                    let query = row * group + g;
                    y[query * values + m] = (0..d).map(|n| q[query * d + n] * end[cell(n)]).sum();
                }
            }
        }

        let corrections = match update {
            Update::Additive => Corrections::None,
            Update::Delta => Corrections::Weights(tensor_of(&beta, [rows, 1, 1, 1])),
            Update::Replace => Corrections::Vectors {
                removal: tensor_of(&z, [rows, 1, 1, d]),
                correction: tensor_of(&b, [rows, 1, 1, d]),
            },
        };
        let token = Token::<B> {
            q: tensor_of(&q, [rows, group, 1, d]),
            k: tensor_of(&k, [rows, 1, 1, d]),
            v: tensor_of(&v, [rows, 1, 1, values]),
            log_decay: tensor_of(&log_decay, [rows, 1, 1, channels]),
            corrections,
        };
        let (got_y, got_end) = token.advance(tensor_of(&state, [rows, d, values]));
        let got_y = got_y.reshape([rows, group, values]);
        for (what, got, want) in [("y", got_y, y), ("the state", got_end, end)] {
            let largest = want.iter().fold(0f64, |most, x| most.max(x.abs()));
            for (got, want) in got.into_data().iter::<f64>().zip(&want) {
                let error = (got - want).abs() / largest;
                record(error);
                assert!(error < 1e-6, "{what} of {update:?}: {got} for {want}");
            }
        }
    }

    fn check_all<B: OpBackend>() {
        for update in [Update::Additive, Update::Delta, Update::Replace] {
            for channels_per_token in [false, true] {
                for sizes in [[1, 1, 1, 1], [3, 2, 16, 16], [2, 3, 43, 70], [1, 1, 128, 256]] {
                    let channels = if channels_per_token { sizes[2] } else { 1 };
                    check::<B>(update, sizes, channels);
                }
            }
        }
    }

    #[test]
    fn a_step_is_as_defined() {
        check_all::<Flex>();
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn the_kernels_step_is_as_defined() {
        check_all::<Cuda>();
    }
}
