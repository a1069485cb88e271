//! Step sizes and log decays of whole heads, one number for each token of a head, in f32.

use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{DType, FloatDType, Tensor};
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use super::MOST_PARTS;
use crate::attention::recurrent::{FORGET, by_head, step_size};
use crate::backend::{Forward, Op, OpBackend, primitive, tensor};
use crate::cuda::{CudaTensor, buffer, contiguous, empty};
use crate::device::DeviceKind;
use crate::ops::activation::kernel::{Function, sigmoid, value};
use crate::ops::cuda::block::sum_row;
use crate::ops::cuda::sums::columns;
use crate::ops::cuda::{THREADS, as_u32, dim, dims, elements, integers, nothing, vector};

/// softplus(x + b) of logits x, `[batch, seq_len, heads]`, with b `[heads]` in f32: `[batch, heads, seq_len, 1]` in
/// f32.
pub fn step_size_of_logits<B: OpBackend>(logits: Tensor<B, 3>, bias: Tensor<B, 1>) -> Tensor<B, 4> {
    let logits = logits.cast(FloatDType::F32);
    if B::device_kind() != DeviceKind::Cuda {
        return StepSize::by_operations(logits, bias);
    }
    tensor(B::run(&StepSize, [primitive(logits), primitive(bias)], vec![]))
}

/// [`step_size_of_logits`] as an operation.
#[derive(Clone, Debug)]
struct StepSize;

impl StepSize {
    fn by_operations<B: OpBackend>(logits: Tensor<B, 3>, bias: Tensor<B, 1>) -> Tensor<B, 4> {
        let [heads] = bias.dims();
        by_head(step_size(logits, bias), heads)
    }
}

impl Op<2> for StepSize {
    fn reference<B: OpBackend>(
        &self,
        [logits, bias]: [FloatTensor<B>; 2],
        _ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        primitive(Self::by_operations::<B>(tensor(logits), tensor(bias)))
    }

    fn cuda_forward(
        &self,
        [logits, bias]: &[CudaTensor; 2],
        ints: &[CudaTensor],
        needs: [bool; 2],
    ) -> Option<Forward<CudaTensor>> {
        let call = HeadSteps::new(logits, bias, None, ints)?;
        let saved = if needs.contains(&true) {
            vec![call.logits.clone(), call.bias.clone()]
        } else {
            vec![]
        };
        Some(Forward { output: call.forward(), saved })
    }

    fn cuda_backward(
        &self,
        saved: Vec<CudaTensor>,
        ints: &[CudaTensor],
        grad: CudaTensor,
        _needs: [bool; 2],
    ) -> [Option<CudaTensor>; 2] {
        let [logits, bias] = &saved[..] else { unreachable!("two tensors are saved") };
        let call = HeadSteps::new(logits, bias, None, ints).expect("the forward pass has run");
        let (logits, bias, _) = call.backward(&grad);
        [logits, bias].map(Some)
    }
}

/// One call.
pub(super) struct HeadSteps {
    /// x, `[batch, seq_len, heads]` in f32.
    pub logits: CudaTensor,
    /// b, `[heads]` in f32.
    pub bias: CudaTensor,
    /// a, `[heads]` in f32: the call is of log decays −e^a Δ, not of steps Δ.
    pub a: Option<CudaTensor>,
    /// The start of each token's document, `[batch, seq_len]`.
    starts: Option<CudaTensor>,
}

impl HeadSteps {
    /// `None` if there is nothing to compute, or the logits have another type than f32.
    pub fn new(
        logits: &CudaTensor,
        bias: &CudaTensor,
        a: Option<&CudaTensor>,
        ints: &[CudaTensor],
    ) -> Option<Self> {
        let [batch, seq_len, heads] = logits.meta.shape().dims();
        (logits.dtype == DType::F32 && elements(logits) > 0).then(|| HeadSteps {
            logits: contiguous(logits),
            bias: vector(bias, heads, "the bias of steps"),
            a: a.map(|a| vector(a, heads, "the rate of decays")),
            starts: ints.first().map(|starts| integers(starts, &[batch, seq_len], "documents")),
        })
    }

    /// Blocks for each head of a sequence: each thread has a token, or with at most `most` blocks they take turns.
    fn grid(&self, most: usize) -> [usize; 3] {
        let [batch, seq_len, heads] = self.logits.meta.shape().dims();
        [seq_len.div_ceil(THREADS).min(most), heads, batch]
    }

    fn inputs(&self) -> StepInputsLaunch<CudaRuntime> {
        let or_nothing = |x: &Option<CudaTensor>| {
            x.as_ref().map_or_else(|| nothing(&self.bias), |x| buffer(x, 1))
        };
        StepInputsLaunch::new(
            buffer(&self.logits, 1),
            buffer(&self.bias, 1),
            or_nothing(&self.a),
            or_nothing(&self.starts),
            as_u32(dims(&self.logits)[1]),
        )
    }

    /// Steps, or log decays with the first token of each document set so low that it clears the state:
    /// `[batch, heads, seq_len, 1]` in f32.
    pub fn forward(&self) -> CudaTensor {
        let [batch, seq_len, heads] = self.logits.meta.shape().dims();
        let out = empty(&self.logits, &[batch, heads, seq_len, 1], DType::F32);
        // SAFETY: threads stay within the tokens of their sequence.
        unsafe {
            head_steps::launch_unchecked::<CudaRuntime>(
                &out.client,
                count(self.grid(usize::MAX)),
                dim(THREADS),
                self.inputs(),
                buffer(&out, 1),
                self.a.is_some(),
                self.starts.is_some(),
            );
        }
        out
    }

    /// The gradients of the logits, the bias and, if there is one, a, where `grad` is that of the result.
    pub fn backward(&self, grad: &CudaTensor) -> (CudaTensor, CudaTensor, Option<CudaTensor>) {
        let [batch, seq_len, heads] = self.logits.meta.shape().dims();
        assert_eq!(dims(grad), [batch, heads, seq_len, 1], "the shape of the gradient");
        assert_eq!(grad.dtype, DType::F32, "the type of the gradient");
        let (grad, grid) = (contiguous(grad), self.grid(MOST_PARTS));
        let d_logits = empty(&grad, &[batch, seq_len, heads], DType::F32);
        let sums = sums_of_block(self.a.is_some());
        let parts = empty(&grad, &[grid[0] * batch, sums * heads], DType::F32);
        // SAFETY: as in `forward`; a block writes its parts.
        unsafe {
            head_steps_back::launch_unchecked::<CudaRuntime>(
                &grad.client,
                count(grid),
                dim(THREADS),
                self.inputs(),
                buffer(&grad, 1),
                buffer(&d_logits, 1),
                buffer(&parts, 1),
                self.a.is_some(),
                self.starts.is_some(),
            );
        }
        let sum = |first| columns(&parts, first, &[heads], 1);
        (d_logits, sum(0), self.a.is_some().then(|| sum(heads)))
    }
}

/// Sums that a block of the backward pass forms: the gradient of the bias and, of `decays`, that of a.
const fn sums_of_block(decays: bool) -> usize {
    if decays { 2 } else { 1 }
}

fn count([x, y, z]: [usize; 3]) -> CubeCount {
    CubeCount::Static(as_u32(x), as_u32(y), as_u32(z))
}

#[derive(CubeType, CubeLaunch)]
struct StepInputs {
    /// `[batch, seq_len, heads]`
    logits: Array<f32>,
    /// `[heads]`
    bias: Array<f32>,
    /// `[heads]`
    a: Array<f32>,
    /// `[batch, seq_len]`
    starts: Array<i32>,
    seq_len: u32,
}

#[cube]
impl StepInputs {
    /// x + b of a token of the block's sequence and head.
    fn logit(&self, token: u32) -> f32 {
        let at = (CUBE_POS_Z * self.seq_len + token) * CUBE_COUNT_Y + CUBE_POS_Y;
        self.logits[at as usize] + self.bias[CUBE_POS_Y as usize]
    }

    /// Whether a token is the first of a document.
    fn is_first(&self, token: u32, #[comptime] packed: bool) -> bool {
        let mut first = false;
        if comptime!(packed) {
            let at = CUBE_POS_Z * self.seq_len + token;
            first = self.starts[at as usize] == token as i32;
        }
        first
    }

    /// What multiplies softplus(x + b): −e^a, or 1 for steps.
    fn factor(&self, #[comptime] decays: bool) -> f32 {
        let mut factor = f32::cast_from(1f32);
        if comptime!(decays) {
            factor = -Exp::exp(self.a[CUBE_POS_Y as usize]);
        }
        factor
    }
}

/// softplus(x) = −ln σ(−x).
#[cube]
fn softplus(x: f32) -> f32 {
    -value(-x, Function::LogSigmoid)
}

/// See [`step_size_of_logits`]; `decays` are [`decay_of_step_logits`](super::channel_decay::decay_of_step_logits).
///
/// Grid: all tokens by the threads of a block, heads, sequences.
#[cube(launch_unchecked)]
fn head_steps(
    inputs: &StepInputs,
    out: &mut Array<f32>,
    #[comptime] decays: bool,
    #[comptime] packed: bool,
) {
    let token = CUBE_POS_X * CUBE_DIM + UNIT_POS;
    if token < inputs.seq_len {
        let mut result = softplus(inputs.logit(token)) * inputs.factor(decays);
        if inputs.is_first(token, packed) {
            result = f32::cast_from(FORGET);
        }
        out[((CUBE_POS_Z * CUBE_COUNT_Y + CUBE_POS_Y) * inputs.seq_len + token) as usize] = result;
    }
}

/// The gradients. With f what multiplies softplus(x + b) and d that of the result, dx = d f σ(x + b), db = Σ dx and
/// da = Σ d f softplus(x + b).
///
/// Grid: parts of a sequence's tokens, heads, sequences.
#[cube(launch_unchecked)]
fn head_steps_back(
    inputs: &StepInputs,
    grad: &Array<f32>,
    d_logits: &mut Array<f32>,
    parts: &mut Array<f32>,
    #[comptime] decays: bool,
    #[comptime] packed: bool,
) {
    let factor = inputs.factor(decays);
    let counts = comptime!(sums_of_block(decays));
    let mut sums = Array::<f32>::new(counts);
    #[unroll]
    for i in 0..counts {
        sums[i] = 0f32;
    }
    for step in 0..inputs.seq_len.div_ceil(CUBE_COUNT_X * CUBE_DIM) {
        let token = (step * CUBE_COUNT_X + CUBE_POS_X) * CUBE_DIM + UNIT_POS;
        if token < inputs.seq_len {
            let at = (CUBE_POS_Z * CUBE_COUNT_Y + CUBE_POS_Y) * inputs.seq_len + token;
            let mut d_steps = grad[at as usize] * factor;
            if inputs.is_first(token, packed) {
                d_steps = 0f32;
            }
            let x = inputs.logit(token);
            let d_x = d_steps * sigmoid(x);
            let at = (CUBE_POS_Z * inputs.seq_len + token) * CUBE_COUNT_Y + CUBE_POS_Y;
            d_logits[at as usize] = d_x;
            sums[0] += d_x;
            if comptime!(decays) {
                sums[1] += d_steps * softplus(x);
            }
        }
    }
    let mut scratch = SharedMemory::<f32>::new(comptime!(counts * THREADS / 32));
    sum_row(&mut sums, &mut scratch, counts, THREADS);
    if UNIT_POS == 0 {
        let first = (CUBE_POS_Z * CUBE_COUNT_X + CUBE_POS_X) * counts as u32;
        #[unroll]
        for i in 0..counts {
            parts[((first + i as u32) * CUBE_COUNT_Y + CUBE_POS_Y) as usize] = sums[i];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cuda;
    use crate::testing::{Case, Tensor64, check, check_on};

    fn oracle(inputs: &[Tensor64]) -> Tensor64 {
        let [logits, bias] = inputs else { panic!("logits and bias") };
        let [batch, seq_len, heads] = logits.shape[..] else { panic!("three dimensions") };
        Tensor64::from_fn(&[batch, heads, seq_len, 1], |at| {
            let x = logits.at(&[at[0], at[2], at[1]]) + bias.data[at[1]];
            x.max(0.0) + (-x.abs()).exp().ln_1p()
        })
    }

    #[test]
    fn agrees_with_the_oracle_and_its_gradients() {
        check(Case::new(StepSize, &[&[2, 5, 3], &[3]]), oracle);
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn agrees_with_the_oracle_on_cuda() {
        // One token, a sequence shorter than a block, and blocks that take turns.
        for [batch, seq_len, heads] in [[1, 1, 1], [3, 70, 5], [1, 20_000, 2]] {
            let case = Case::new(StepSize, &[&[batch, seq_len, heads], &[heads]]);
            check_on::<Cuda, _, 2>(case, oracle);
        }
    }
}
