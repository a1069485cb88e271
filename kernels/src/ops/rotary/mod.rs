//! Rotary position embedding.

mod cpu;
pub(crate) mod cuda;
mod frequencies;
mod kernel;

use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Tensor, TensorData};
use burn_flex::FlexTensor;
use rayon::prelude::*;

pub use self::frequencies::{Frequencies, Scaling};
use crate::backend::{Forward, Op, OpBackend, primitive, tensor};
use crate::cuda::CudaTensor;

/// Rotates pairs of channels by an angle that grows with the position (Su et al., 2021, equation
/// 34), in the half-split pairing of GPT-NeoX and Llama:
///
/// y_i = a (x_i cos(pω_i) − x_{i+n/2} sin(pω_i)), y_{i+n/2} = a (x_{i+n/2} cos(pω_i) + x_i sin(pω_i))
///
/// for i < n/2 with n = `rotary_dims` and p = `first_position` + t for row t. Without scaling,
/// ω_i = theta^(−2i/n) and a = 1; a is [`Frequencies::amplitude`]. Channels from `rotary_dims` on pass
/// through, and are not multiplied.
///
/// - `x`: `[batch, heads, seq_len, head_dim]`; a strided view is read without a copy
/// - `first_position`: position of row 0; the length of the cache when decoding
/// - `frequencies`: the base and its scaling
///
/// Returns the shape of `x`, in the memory order of `x`. Angles are computed in f64.
///
/// # Panics
/// When `rotary_dims` is odd or above head_dim.
pub fn rotary<B: OpBackend>(
    x: Tensor<B, 4>,
    first_position: usize,
    frequencies: Frequencies,
    rotary_dims: usize,
) -> Tensor<B, 4> {
    let op = RotaryEmbedding::new(first_position, frequencies, rotary_dims, x.dims()[3]);
    tensor(B::run(&op, [primitive(x)], vec![]))
}

/// [`rotary`] of q and of k; by one launch where the device supports it and no gradient is needed.
///
/// - `q`, `k`: `[batch, heads, seq_len, head_dim]`, where heads may differ
///
/// # Panics
/// As [`rotary`].
pub fn rotary_both<B: OpBackend>(
    [q, k]: [Tensor<B, 4>; 2],
    first_position: usize,
    frequencies: Frequencies,
    rotary_dims: usize,
) -> [Tensor<B, 4>; 2] {
    let op = RotaryEmbedding::new(first_position, frequencies, rotary_dims, q.dims()[3]);
    assert_eq!(q.dims()[3], k.dims()[3], "head_dim of q and k");
    let on_cuda = |x: &Tensor<B, 4>| B::into_cuda(primitive(x.clone()));
    if let [Some(q), Some(k)] = [&q, &k].map(on_cuda)
        && let Some(both) = cuda::both(&op, [&q, &k])
    {
        return both.map(|x| tensor(B::from_cuda(x)));
    }
    [q, k].map(|x| tensor(B::run(&op, [primitive(x)], vec![])))
}

/// The operation of [`rotary`]: input x.
#[derive(Clone, Debug, PartialEq)]
pub struct RotaryEmbedding {
    /// Position of row 0.
    pub first_position: usize,
    /// The angular frequencies.
    pub frequencies: Frequencies,
    /// Channels that rotate, even.
    pub rotary_dims: usize,
}

/// cos and sin of the angles of some rows, times the amplitude: two row-major
/// `[seq_len, rotary_dims / 2]`.
struct Angles {
    cos: Vec<f32>,
    sin: Vec<f32>,
}

/// A cache of the angles of recent calls: the layers of a model use the same ones, step after step.
static RECENT: Mutex<Vec<(RotaryEmbedding, usize, Arc<Angles>)>> = Mutex::new(vec![]);
/// Most cached entries.
const CACHED: usize = 4;

impl RotaryEmbedding {
    /// The rotation of heads of `head_dim` channels.
    ///
    /// # Panics
    /// When `rotary_dims` is odd or above head_dim.
    pub fn new(
        first_position: usize,
        frequencies: Frequencies,
        rotary_dims: usize,
        head_dim: usize,
    ) -> Self {
        assert!(
            rotary_dims.is_multiple_of(2) && rotary_dims <= head_dim,
            "rotary_dims is {rotary_dims}; it must be even and at most head_dim, {head_dim}"
        );
        RotaryEmbedding { first_position, frequencies, rotary_dims }
    }

    /// The angles of `seq_len` rows, computed in f64.
    fn angles(&self, seq_len: usize) -> Angles {
        let half = self.rotary_dims / 2;
        let frequencies = self.frequencies.of_pairs(self.rotary_dims);
        let amplitude = self.frequencies.amplitude();
        let position = |t: usize| (self.first_position + t) as f64;
        let angle = |i: usize| position(i / half) * frequencies[i % half];
        let all = (0..seq_len * half).into_par_iter().with_min_len(1 << 10);
        let scaled = |x: f64| (amplitude * x) as f32;
        let (sin, cos) =
            all.map(|i| angle(i).sin_cos()).map(|(s, c)| (scaled(s), scaled(c))).unzip();
        Angles { cos, sin }
    }

    /// As [`RotaryEmbedding::angles`], cached; single rows, as in decoding, are not cached.
    fn recent_angles(&self, seq_len: usize) -> Arc<Angles> {
        if seq_len == 1 {
            return Arc::new(self.angles(1));
        }
        // A panic while the lock was held cannot have left the list inconsistent.
        let recent = || RECENT.lock().unwrap_or_else(PoisonError::into_inner);
        let same =
            |(op, len, _): &&(RotaryEmbedding, usize, Arc<Angles>)| op == self && *len == seq_len;
        if let Some((_, _, angles)) = recent().iter().find(same) {
            return angles.clone();
        }
        // Computed without the lock: this uses all threads, which may themselves wait for the lock.
        let angles = Arc::new(self.angles(seq_len));
        let mut recent = recent();
        recent.truncate(CACHED - 1);
        recent.insert(0, (self.clone(), seq_len, angles.clone()));
        angles
    }
}

impl Op<1> for RotaryEmbedding {
    fn reference<B: OpBackend>(
        &self,
        [x]: [FloatTensor<B>; 1],
        _ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        let x = tensor::<B, 4>(x);
        let [_, _, seq_len, head_dim] = x.dims();
        let half = self.rotary_dims / 2;
        if half == 0 {
            return primitive(x);
        }
        let options = (&x.device(), x.dtype());
        let Angles { cos, sin } = self.angles(seq_len);
        let [cos, sin] = [cos, sin].map(|angles| {
            let angles = TensorData::new(angles, [1, 1, seq_len, half]);
            Tensor::<B, 4>::from_data(angles, options)
        });
        let a = x.clone().narrow(3, 0, half);
        let b = x.clone().narrow(3, half, half);
        let first = a.clone() * cos.clone() - b.clone() * sin.clone();
        let second = b * cos + a * sin;
        let mut parts = vec![first, second];
        if self.rotary_dims < head_dim {
            parts.push(x.narrow(3, self.rotary_dims, head_dim - self.rotary_dims));
        }
        primitive(Tensor::cat(parts, 3))
    }

    fn cpu_forward(
        &self,
        [x]: &[FlexTensor; 1],
        _ints: &[FlexTensor],
        _needs: [bool; 1],
    ) -> Option<Forward<FlexTensor>> {
        Some(Forward { output: cpu::rotate(self, x, 1.0), saved: vec![] })
    }

    fn cpu_backward(
        &self,
        _saved: Vec<FlexTensor>,
        _ints: &[FlexTensor],
        grad: FlexTensor,
        _needs: [bool; 1],
    ) -> [Option<FlexTensor>; 1] {
        [Some(cpu::rotate(self, &grad, -1.0))]
    }

    fn cuda_forward(
        &self,
        [x]: &[CudaTensor; 1],
        _ints: &[CudaTensor],
        _needs: [bool; 1],
    ) -> Option<Forward<CudaTensor>> {
        Some(Forward { output: cuda::rotate(self, x, 1.0)?, saved: vec![] })
    }

    fn cuda_backward(
        &self,
        _saved: Vec<CudaTensor>,
        _ints: &[CudaTensor],
        grad: CudaTensor,
        _needs: [bool; 1],
    ) -> [Option<CudaTensor>; 1] {
        [cuda::rotate(self, &grad, -1.0)]
    }
}

#[cfg(test)]
pub(crate) mod tests;
