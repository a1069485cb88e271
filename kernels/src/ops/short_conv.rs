//! The short depthwise causal convolution over time.

use burn::tensor::activation::silu;
use burn::tensor::backend::Backend;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Int, Tensor};

use crate::backend::{Op, OpBackend, int_tensor, primitive, tensor};

/// y_tc = f(Σ_{j < taps} weight_cj · x_{t − taps + 1 + j, c}), each channel by itself, with f = SiLU
/// or the identity.
///
/// The last tap multiplies the current row; rows before the first, or before the document's start,
/// count as 0. To decode, run it on the last taps − 1 rows followed by the new ones, and keep the
/// new ones' results.
///
/// - `x`: `[batch, seq_len, channels]`
/// - `weight`: `[channels, taps]`
/// - `silu`: whether f is x σ(x)
/// - `document_starts`: `[batch, seq_len]`, the row at which each position's document starts
///
/// Returns the shape of `x`.
///
/// # Panics
/// When the sizes do not fit.
pub fn short_conv<B: OpBackend>(
    x: Tensor<B, 3>,
    weight: Tensor<B, 2>,
    silu: bool,
    document_starts: Option<Tensor<B, 2, Int>>,
) -> Tensor<B, 3> {
    let ints = document_starts.map(Tensor::into_primitive);
    tensor(B::run(
        &ShortConv { silu },
        [primitive(x), primitive(weight)],
        ints.into_iter().collect(),
    ))
}

/// The operation: inputs x, weight; optional integer input document starts.
#[derive(Clone, Debug)]
pub struct ShortConv {
    /// Whether SiLU follows the convolution.
    pub silu: bool,
}

impl Op<2> for ShortConv {
    fn reference<B: Backend>(
        &self,
        [x, weight]: [FloatTensor<B>; 2],
        ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        let (x, weight) = (tensor::<B, 3>(x), tensor::<B, 2>(weight));
        let [batch, seq_len, channels] = x.dims();
        let taps = weight.dims()[1];
        let starts = ints.first().map(|starts| int_tensor::<B, 2>(starts.clone()));
        let mut y = x.zeros_like();
        for back in 0..taps.min(seq_len) {
            let zeros = x.zeros_like().narrow(1, 0, back);
            let mut shifted = Tensor::cat(vec![zeros, x.clone().narrow(1, 0, seq_len - back)], 1);
            if let Some(starts) = &starts {
                let source = Tensor::<B, 1, Int>::arange(0..seq_len as i64, &x.device());
                let source = source.cast(starts.dtype()).unsqueeze::<2>() - back as i64;
                let outside = source.expand([batch, seq_len]).lower(starts.clone());
                shifted = shifted.mask_fill(outside.unsqueeze_dim(2), 0.0);
            }
            let tap = weight.clone().narrow(1, taps - 1 - back, 1);
            y = y + shifted * tap.reshape([1, 1, channels]);
        }
        primitive(if self.silu { silu(y) } else { y })
    }
}
