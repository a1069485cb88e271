//! Linear attention that divides by the sum of the weights of values.

use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{DType, Tensor};

use super::reference::LinearInputs;
use super::{GatedLinear, SUM_EPS};
use crate::Cuda;
use crate::attention::ExecPath;
use crate::attention::blocks::repeat_heads;
use crate::attention::chunked::{self, Grads, NewTokens, Update};
use crate::attention::recurrent::run_rows;
use crate::backend::{Forward, Op, OpBackend, StateOp, primitive, tensor};
use crate::cuda::{CudaTensor, narrow};
use crate::device::DeviceKind;
use crate::ops::cuda::dims;

/// Channels of ones behind those of values on CUDA: the gradient of the sum of weights has two parts.
const ONES: usize = 2;

/// Channels of values on CUDA with those of ones, and zeros up to a number that the core serves well.
pub fn channels(values: usize) -> usize {
    (values + ONES).next_multiple_of(32)
}

/// o_t = Σ_{s≤t} w_ts v_s / (Σ_{s≤t} w_ts + 1e-6), with the inputs of [`GatedLinear`]. States have one more channel of
/// values, that of the sum: `[batch · kv_heads, head_dim, value_dim + 1]`.
///
/// On CUDA the core's outputs are in f32 here. With g = do / (Σ w + 1e-6), the gradient of a weight is g·v − g·o. The two
/// nearly cancel where values are alike, so the backward pass runs the forward pass again with the row's mean taken from
/// all values (`docs/chunked.md`).
#[derive(Clone, Debug)]
pub struct LinearMean {
    /// The operation that sums weighted values.
    pub linear: GatedLinear,
}

impl LinearMean {
    /// o over whole rows, as [`GatedLinear::attend`].
    pub fn attend<B: OpBackend>(
        &self,
        inputs: LinearInputs<B>,
        state: Option<&mut Tensor<B, 2>>,
        path: ExecPath,
    ) -> Tensor<B, 4> {
        let [rows, d, values] = inputs.state_shape();
        if path == ExecPath::Kernel(DeviceKind::Cuda) {
            let LinearInputs { q, k, v, log_decay } = inputs;
            let inputs = [primitive(q), primitive(k), primitive(v), primitive(log_decay)];
            return run_rows::<B, _, 4>(path, self, inputs, state, [rows, d, values + 1]);
        }
        let inputs = LinearInputs { v: extended(inputs.v, 1, values + 1), ..inputs };
        let [o, _] = quotient(self.linear.attend(inputs, None, state, path), values);
        o
    }

    /// o of the tokens after those in the state `start`, and the state after them, as [`GatedLinear::extend`].
    pub fn extend<B: OpBackend>(
        &self,
        inputs: LinearInputs<B>,
        start: Option<Tensor<B, 3>>,
        path: ExecPath,
    ) -> (Tensor<B, 4>, Tensor<B, 3>) {
        let LinearInputs { q, k, v, log_decay } = inputs;
        let values = v.dims()[3];
        if path == ExecPath::Kernel(DeviceKind::Cuda) {
            let (v, dtype) = (extended(v, ONES, channels(values)), q.dtype());
            let tokens = NewTokens { q, k, v, log_decay, beta: None };
            let start = start.map(of_core);
            let (y, after) = tokens.extend(Update::Additive, DType::F32, start);
            let [o, _] = quotient(y, values);
            return (o.cast(dtype), after.narrow(2, 0, values + 1));
        }
        let inputs = LinearInputs { q, k, v: extended(v, 1, values + 1), log_decay };
        let (y, after) = self.linear.extend(inputs, None, start, path);
        let [o, _] = quotient(y, values);
        (o, after)
    }

    fn by_operations<B: OpBackend>(
        &self,
        [q, k, v, log_decay]: [FloatTensor<B>; 4],
        before: Option<FloatTensor<B>>,
    ) -> (Tensor<B, 4>, Tensor<B, 3>) {
        let [q, k, v, log_decay] = [q, k, v, log_decay].map(tensor::<B, 4>);
        let values = v.dims()[3];
        let inputs = LinearInputs { q, k, v: extended(v, 1, values + 1), log_decay };
        let (y, after) = self.linear.forward(inputs, before.map(tensor));
        let [o, _] = quotient(y, values);
        (o, after)
    }
}

/// The core's forward pass on CUDA, with v `[batch, kv_heads, seq_len, values]`, and its state after the last token.
fn run_core(
    [q, k, v, log_decay]: [&CudaTensor; 4],
    before: Option<Tensor<Cuda, 3>>,
    needs: bool,
) -> Option<(Forward<CudaTensor>, Option<CudaTensor>)> {
    let v = extended(tensor::<Cuda, 4>(v.clone()), ONES, channels(dims(v)[3]));
    let v = primitive(v);
    let inputs = [q, k, &v, log_decay];
    match before {
        None => Some((chunked::forward(Update::Additive, inputs, None, DType::F32, needs)?, None)),
        Some(before) => {
            let (add, before) = (Update::Additive, primitive(of_core(before)));
            let (y, after) = chunked::forward_from(add, inputs, None, DType::F32, &before, needs)?;
            Some((y, Some(after)))
        }
    }
}

impl Op<4> for LinearMean {
    fn reference<B: OpBackend>(
        &self,
        inputs: [FloatTensor<B>; 4],
        _ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        primitive(self.by_operations::<B>(inputs, None).0)
    }

    fn cuda_forward(
        &self,
        inputs: &[CudaTensor; 4],
        _ints: &[CudaTensor],
        needs: [bool; 4],
    ) -> Option<Forward<CudaTensor>> {
        let (y, _) = run_core(inputs.each_ref(), None, false)?;
        let [o, _] = quotient(tensor::<Cuda, 4>(y.output), dims(&inputs[2])[3]);
        let saved = if needs.contains(&true) { inputs.to_vec() } else { vec![] };
        Some(Forward { output: primitive(o.cast(inputs[0].dtype)), saved })
    }

    /// From the inputs and, if it is not 0, the state before the first token.
    fn cuda_backward(
        &self,
        saved: Vec<CudaTensor>,
        _ints: &[CudaTensor],
        grad: CudaTensor,
        _needs: [bool; 4],
    ) -> [Option<CudaTensor>; 4] {
        let (inputs, before) = saved.split_at(4);
        let [q, k, v, log_decay] = inputs else { unreachable!("four inputs saved") };
        let (v, dtype) = (tensor::<Cuda, 4>(v.clone()), v.dtype);
        let [batch, kv_heads, _, values] = v.dims();
        let v = v.cast(DType::F32);
        let mean = v.clone().mean_dim(2);
        let centred = primitive((v - mean.clone()).cast(dtype));
        let before = before.first().map(|before| {
            let before = tensor::<Cuda, 3>(before.clone());
            let mean = mean.clone().reshape([batch * kv_heads, 1, values]);
            let sums = before.clone().narrow(2, values, 1);
            let states = before.narrow(2, 0, values) - sums.clone() * mean;
            Tensor::cat(vec![states, sums], 2)
        });
        let (y, _) = run_core([q, k, &centred, log_decay], before, true).expect("it ran before");
        let [o, sum] = quotient(tensor::<Cuda, 4>(y.output), values);

        let g = (tensor::<Cuda, 4>(grad).cast(DType::F32) / sum.clone()).cast(dtype);
        let rounded = g.clone().cast(DType::F32);
        // Outputs of all values have n / (n + 1e-6) of the mean.
        let missing = repeat_heads(mean, g.dims()[1] / kv_heads) * SUM_EPS / sum;
        let of_sum = ((missing - o) * rounded).sum_dim(3);
        let first = of_sum.clone().cast(dtype);
        let second = (of_sum - first.clone().cast(DType::F32)).cast(dtype);
        let all = Tensor::cat(vec![g, first, second], 3);
        let grad = primitive(with_zeros(all, channels(values)));
        let Grads { q, k, v, log_decay, .. } = chunked::backward(Update::Additive, &y.saved, &grad);
        [q, k, narrow(&v, 3, 0..values), log_decay].map(Some)
    }
}

impl StateOp<4> for LinearMean {
    fn reference_from<B: OpBackend>(
        &self,
        inputs: [FloatTensor<B>; 4],
        _ints: &[IntTensor<B>],
        before: FloatTensor<B>,
    ) -> [FloatTensor<B>; 2] {
        let (o, after) = self.by_operations::<B>(inputs, Some(before));
        [primitive(o), primitive(after)]
    }

    fn cuda_forward_from(
        &self,
        inputs: &[CudaTensor; 4],
        _ints: &[CudaTensor],
        before: &CudaTensor,
        needs: [bool; 4],
    ) -> Option<(Forward<CudaTensor>, CudaTensor)> {
        let (y, after) = run_core(inputs.each_ref(), Some(tensor(before.clone())), false)?;
        let values = dims(&inputs[2])[3];
        let [o, _] = quotient(tensor::<Cuda, 4>(y.output), values);
        let saved = match needs.contains(&true) {
            true => inputs.iter().chain([before]).cloned().collect(),
            false => vec![],
        };
        let output = primitive(o.cast(inputs[0].dtype));
        Some((Forward { output, saved }, narrow(&after?, 2, 0..values + 1)))
    }
}

/// The quotient and its divisor; `y` has the sum of weights in channel `values`.
fn quotient<B: OpBackend>(y: Tensor<B, 4>, values: usize) -> [Tensor<B, 4>; 2] {
    let sum = y.clone().narrow(3, values, 1) + SUM_EPS;
    [y.narrow(3, 0, values) / sum.clone(), sum]
}

/// A state for CUDA's core, which has [`ONES`] channels of the sum, and [`channels`] in all.
fn of_core<B: OpBackend>(state: Tensor<B, 3>) -> Tensor<B, 3> {
    let values = state.dims()[2] - 1;
    let again = state.clone().narrow(2, values, 1);
    with_zeros(Tensor::cat(vec![state, again], 2), channels(values))
}

/// `x` with `ones` channels of ones behind its own, and zeros up to `channels`.
fn extended<B: OpBackend>(x: Tensor<B, 4>, ones: usize, channels: usize) -> Tensor<B, 4> {
    let [batch, heads, seq_len, _] = x.dims();
    let like = (&x.device(), x.dtype());
    let ones = Tensor::ones([batch, heads, seq_len, ones], like);
    with_zeros(Tensor::cat(vec![x, ones], 3), channels)
}

/// `x` with zeros behind its own channels, up to `channels`.
fn with_zeros<B: OpBackend, const D: usize>(x: Tensor<B, D>, channels: usize) -> Tensor<B, D> {
    let mut shape = x.dims();
    shape[D - 1] = channels - shape[D - 1];
    if shape[D - 1] == 0 {
        return x;
    }
    let zeros = Tensor::zeros(shape, (&x.device(), x.dtype()));
    Tensor::cat(vec![x, zeros], D - 1)
}
