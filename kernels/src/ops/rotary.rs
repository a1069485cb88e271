//! Rotary position embedding.

use burn::tensor::backend::Backend;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Tensor, TensorData};

use crate::backend::{Op, OpBackend, primitive, tensor};

/// Rotates pairs of channels by an angle that grows with the position (Su et al., 2021, equation
/// 34), in the half-split pairing of GPT-NeoX and Llama:
///
/// y_i = x_i cos(pω_i) − x_{i+n/2} sin(pω_i), y_{i+n/2} = x_{i+n/2} cos(pω_i) + x_i sin(pω_i)
///
/// for i < n/2 with n = `rotary_dims`, ω_i = theta^(−2i/n) and p = `first_position` + t for row t.
/// Channels from `rotary_dims` on pass through.
///
/// - `x`: `[batch, heads, seq_len, head_dim]`; a view with strides is read as it lies
/// - `first_position`: position of row 0; the length of the cache when decoding
/// - `theta`: the base; scaling by NTK is a larger base
///
/// Returns the shape of `x`, in the memory order of `x`. Angles are computed in f64.
///
/// # Panics
/// When `rotary_dims` is odd or over head_dim.
pub fn rotary<B: OpBackend>(
    x: Tensor<B, 4>,
    first_position: usize,
    theta: f32,
    rotary_dims: usize,
) -> Tensor<B, 4> {
    let head_dim = x.dims()[3];
    assert!(
        rotary_dims.is_multiple_of(2) && rotary_dims <= head_dim,
        "rotary_dims is {rotary_dims}; it must be even and at most head_dim, {head_dim}"
    );
    let op = Rotary {
        first_position,
        theta,
        rotary_dims,
    };
    tensor(B::run(&op, [primitive(x)], vec![]))
}

/// The operation of [`rotary`]: input x.
#[derive(Clone, Debug)]
pub struct Rotary {
    /// Position of row 0.
    pub first_position: usize,
    /// The base of the angular frequencies.
    pub theta: f32,
    /// Channels that rotate, even.
    pub rotary_dims: usize,
}

impl Rotary {
    /// cos and sin of the angles of `seq_len` rows: two row-major `[seq_len, rotary_dims / 2]`.
    fn table(&self, seq_len: usize) -> [Vec<f32>; 2] {
        let half = self.rotary_dims / 2;
        let frequency = |i: usize| f64::from(self.theta).powf(-(i as f64) / half as f64);
        let frequencies: Vec<f64> = (0..half).map(frequency).collect();
        let mut table = [vec![0.0; seq_len * half], vec![0.0; seq_len * half]];
        for t in 0..seq_len {
            for (i, frequency) in frequencies.iter().enumerate() {
                let (sin, cos) = ((self.first_position + t) as f64 * frequency).sin_cos();
                table[0][t * half + i] = cos as f32;
                table[1][t * half + i] = sin as f32;
            }
        }
        table
    }
}

impl Op<1> for Rotary {
    fn reference<B: Backend>(
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
        let [cos, sin] = self.table(seq_len).map(|angles| {
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
}
