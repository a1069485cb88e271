//! Log decays of a head or of its channels from logits, in f32, with the first token of each document set so low that
//! it clears the state.

use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{DType, FloatDType, Int, Tensor};
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use super::head_steps::HeadSteps;
use super::kernel::{
    Place, TokenSizes, Wide, all, is_first, load, of_head, sigmoids, steps, sums_of_tokens, zeros,
};
use super::{MOST_PARTS, Tokens, by_head as view_by_head, by_token, in_chunks, serves_on};
use crate::attention::DocumentStarts;
use crate::attention::recurrent::{FORGET, by_head, decay_of_steps, forget_at_starts, step_size};
use crate::backend::{Forward, Op, OpBackend, primitive, tensor};
use crate::cuda::{CudaTensor, buffer, empty};
use crate::device::DeviceKind;
use crate::ops::activation::kernel::{Function, value};
use crate::ops::activation::log_sigmoid;
use crate::ops::cuda::block::{HeadStrides, RowSplit, sum_row, sum_vector, write_sum};
use crate::ops::cuda::sums::columns;
use crate::ops::cuda::{THREADS, dim, dims, head_strides, integers, nothing, vector};
use crate::tile::{CHUNK, Chunk};

/// ln σ(x) / temperature of a forget gate's logits x, `[batch, seq_len, heads · channels]`:
/// `[batch, heads, seq_len, channels]` in f32.
pub fn decay_of_gate<B: OpBackend>(
    logits: Tensor<B, 3>,
    heads: usize,
    temperature: f32,
    documents: DocumentStarts<B>,
) -> Tensor<B, 4> {
    let op = GateDecay { heads, temperature };
    if !serves_on::<B>(logits.dtype(), logits.dims()[2] / heads) {
        return op.by_operations(logits, documents);
    }
    let ints = documents.into_iter().map(Tensor::into_primitive).collect();
    tensor(B::run(&op, [primitive(logits)], ints))
}

/// −e^a softplus(x + b) of logits x, `[batch, seq_len, heads · channels]`, with b `[heads · channels]` and a `[heads]`
/// in f32: `[batch, heads, seq_len, channels]` in f32.
pub fn decay_of_step_logits<B: OpBackend>(
    logits: Tensor<B, 3>,
    bias: Tensor<B, 1>,
    a: Tensor<B, 1>,
    documents: DocumentStarts<B>,
) -> Tensor<B, 4> {
    let channels = logits.dims()[2] / a.dims()[0];
    let of_heads = channels == 1 && B::device_kind() == DeviceKind::Cuda;
    let logits = if of_heads { logits.cast(FloatDType::F32) } else { logits };
    if !of_heads && !serves_on::<B>(logits.dtype(), channels) {
        return StepDecay::by_operations(logits, bias, a, documents);
    }
    let ints = documents.into_iter().map(Tensor::into_primitive).collect();
    tensor(B::run(&StepDecay, [primitive(logits), primitive(bias), primitive(a)], ints))
}

fn starts<B: OpBackend>(ints: &[IntTensor<B>]) -> DocumentStarts<B> {
    ints.first().map(|starts| Tensor::<B, 2, Int>::from_primitive(starts.clone()))
}

/// [`decay_of_gate`] as an operation.
#[derive(Clone, Debug)]
struct GateDecay {
    heads: usize,
    temperature: f32,
}

impl GateDecay {
    fn by_operations<B: OpBackend>(
        &self,
        logits: Tensor<B, 3>,
        documents: DocumentStarts<B>,
    ) -> Tensor<B, 4> {
        let logs = log_sigmoid(logits.cast(FloatDType::F32)) / self.temperature;
        forget_at_starts(by_head(logs, self.heads), documents)
    }
}

impl Op<1> for GateDecay {
    fn reference<B: OpBackend>(
        &self,
        [logits]: [FloatTensor<B>; 1],
        ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        primitive(self.by_operations(tensor::<B, 3>(logits), starts(ints)))
    }

    fn cuda_forward(
        &self,
        [logits]: &[CudaTensor; 1],
        ints: &[CudaTensor],
        needs: [bool; 1],
    ) -> Option<Forward<CudaTensor>> {
        let output = forward(logits, self.heads, Parameters::Temperature(self.temperature), ints)?;
        let saved = if needs[0] { vec![in_chunks(logits)] } else { vec![] };
        Some(Forward { output, saved })
    }

    fn cuda_backward(
        &self,
        saved: Vec<CudaTensor>,
        ints: &[CudaTensor],
        grad: CudaTensor,
        _needs: [bool; 1],
    ) -> [Option<CudaTensor>; 1] {
        let parameters = Parameters::Temperature(self.temperature);
        let (logits, _) = backward(&saved[0], self.heads, parameters, ints, &grad);
        [Some(logits)]
    }
}

/// [`decay_of_step_logits`] as an operation.
#[derive(Clone, Debug)]
struct StepDecay;

impl StepDecay {
    fn by_operations<B: OpBackend>(
        logits: Tensor<B, 3>,
        bias: Tensor<B, 1>,
        a: Tensor<B, 1>,
        documents: DocumentStarts<B>,
    ) -> Tensor<B, 4> {
        let steps = step_size(logits.cast(FloatDType::F32), bias);
        forget_at_starts(decay_of_steps(steps, a), documents)
    }
}

impl Op<3> for StepDecay {
    fn reference<B: OpBackend>(
        &self,
        [logits, bias, a]: [FloatTensor<B>; 3],
        ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        let (logits, documents) = (tensor::<B, 3>(logits), starts(ints));
        primitive(Self::by_operations(logits, tensor(bias), tensor(a), documents))
    }

    fn cuda_forward(
        &self,
        [logits, bias, a]: &[CudaTensor; 3],
        ints: &[CudaTensor],
        needs: [bool; 3],
    ) -> Option<Forward<CudaTensor>> {
        let heads = dims(a)[0];
        if dims(logits)[2] == heads {
            let call = HeadSteps::new(logits, bias, Some(a), ints)?;
            let output = call.forward();
            let saved = [call.logits, call.bias].into_iter().chain(call.a);
            let saved = if needs.contains(&true) { saved.collect() } else { vec![] };
            return Some(Forward { output, saved });
        }
        let bias = vector(bias, dims(logits)[2], "the bias of decays");
        let a = vector(a, heads, "the rate of decays");
        let output = forward(logits, heads, Parameters::Learned { bias: &bias, a: &a }, ints)?;
        let saved = if needs.contains(&true) { vec![in_chunks(logits), bias, a] } else { vec![] };
        Some(Forward { output, saved })
    }

    fn cuda_backward(
        &self,
        saved: Vec<CudaTensor>,
        ints: &[CudaTensor],
        grad: CudaTensor,
        _needs: [bool; 3],
    ) -> [Option<CudaTensor>; 3] {
        let [logits, bias, a] = &saved[..] else { unreachable!("three tensors are saved") };
        if dims(logits)[2] == dims(a)[0] {
            let call = HeadSteps::new(logits, bias, Some(a), ints);
            let (logits, bias, a) = call.expect("the forward pass has run").backward(&grad);
            return [Some(logits), Some(bias), a];
        }
        let parameters = Parameters::Learned { bias, a };
        let (logits, vectors) = backward(logits, dims(a)[0], parameters, ints, &grad);
        let [bias, a] = vectors.expect("gradients of what is learned");
        [logits, bias, a].map(Some)
    }
}

/// What decays depend on beside logits.
#[derive(Clone, Copy)]
enum Parameters<'a> {
    Temperature(f32),
    Learned { bias: &'a CudaTensor, a: &'a CudaTensor },
}

impl Parameters<'_> {
    fn launch(&self, like: &CudaTensor) -> DecayParametersLaunch<CudaRuntime> {
        match self {
            Parameters::Temperature(temperature) => {
                DecayParametersLaunch::new(nothing(like), nothing(like), 1.0 / temperature)
            }
            Parameters::Learned { bias, a } => {
                DecayParametersLaunch::new(buffer(bias, CHUNK), buffer(a, 1), 1.0)
            }
        }
    }

    fn are_learned(&self) -> bool {
        matches!(self, Parameters::Learned { .. })
    }
}

fn tokens_of(logits: &CudaTensor, heads: usize) -> Tokens {
    let [batch, seq_len, features] = logits.meta.shape().dims();
    Tokens { batch, heads, seq_len, channels: features / heads }
}

fn starts_of(ints: &[CudaTensor], tokens: &Tokens, like: &CudaTensor) -> ArrayArg<CudaRuntime> {
    let shape = [tokens.batch, tokens.seq_len];
    let starts = ints.first().map(|starts| integers(starts, &shape, "the starts of documents"));
    starts.map_or_else(|| nothing(like), |starts| buffer(&starts, 1))
}

fn forward(
    logits: &CudaTensor,
    heads: usize,
    parameters: Parameters,
    ints: &[CudaTensor],
) -> Option<CudaTensor> {
    let tokens = tokens_of(logits, heads);
    if !tokens.served(logits) {
        return None;
    }
    let logits = view_by_head(logits, heads);
    let out = empty(&logits, &tokens.shape(), DType::F32);
    // SAFETY: threads stay within the tokens of the tensors, whose strides they get.
    unsafe {
        channel_decay::launch_unchecked::<CudaRuntime>(
            &logits.client,
            tokens.grid(usize::MAX),
            dim(THREADS),
            buffer(&logits, CHUNK),
            head_strides(&logits, CHUNK),
            parameters.launch(&logits),
            starts_of(ints, &tokens, &logits),
            buffer(&out, CHUNK),
            head_strides(&out, CHUNK),
            tokens.launch(),
            parameters.are_learned(),
            !ints.is_empty(),
            tokens.split(),
        );
    }
    Some(out)
}

/// The gradients of the logits, and of the bias and a if they are learned.
fn backward(
    logits: &CudaTensor,
    heads: usize,
    parameters: Parameters,
    ints: &[CudaTensor],
    grad: &CudaTensor,
) -> (CudaTensor, Option<[CudaTensor; 2]>) {
    let tokens = tokens_of(logits, heads);
    assert_eq!(dims(grad), tokens.shape(), "the shape of the gradient");
    assert_eq!(grad.dtype, DType::F32, "the type of the gradient");
    let (grad, of_logits) = (in_chunks(grad), view_by_head(logits, heads));
    let d_logits = tokens.empty_by_token(logits);
    let blocks = tokens.blocks(MOST_PARTS);
    let parts = parameters.are_learned().then(|| {
        [heads * tokens.channels, heads].map(|len| empty(logits, &[blocks, len], DType::F32))
    });
    let or_nothing = |at: usize, lanes| {
        parts.as_ref().map_or_else(|| nothing(logits), |parts| buffer(&parts[at], lanes))
    };
    // SAFETY: as in `forward`; a block writes its parts.
    unsafe {
        channel_decay_back::launch_unchecked::<CudaRuntime>(
            &logits.client,
            tokens.grid(MOST_PARTS),
            dim(THREADS),
            buffer(&of_logits, CHUNK),
            head_strides(&of_logits, CHUNK),
            parameters.launch(logits),
            starts_of(ints, &tokens, logits),
            buffer(&grad, CHUNK),
            head_strides(&grad, CHUNK),
            DecayGradsLaunch::new(
                buffer(&d_logits, CHUNK),
                head_strides(&d_logits, CHUNK),
                or_nothing(0, CHUNK),
                or_nothing(1, 1),
            ),
            tokens.launch(),
            parameters.are_learned(),
            !ints.is_empty(),
            tokens.split(),
        );
    }
    let vectors = parts.map(|parts| parts.map(|x| columns(&x, 0, &[dims(&x)[1]], 1)));
    (by_token(d_logits), vectors)
}

#[derive(CubeType, CubeLaunch)]
struct DecayParameters {
    /// b, `[heads, channels]`, if it is learned, as a.
    bias: Array<Wide>,
    /// `[heads]`
    a: Array<f32>,
    /// What multiplies ln σ of a forget gate.
    factor: f32,
}

#[derive(CubeType, CubeLaunch)]
struct DecayGrads {
    logits: Array<Chunk>,
    logits_strides: HeadStrides,
    /// A block's sums, `[blocks, heads, channels]`.
    bias: Array<Wide>,
    /// Likewise, `[blocks, heads]`.
    a: Array<f32>,
}

/// ln σ of each element.
#[cube]
fn log_sigmoids(x: Wide) -> Wide {
    let mut y = x;
    #[unroll]
    for i in 0..CHUNK {
        y[i] = value(x[i], Function::LogSigmoid);
    }
    y
}

/// A token's forget gates and what multiplies the logarithm of their σ: x and the factor, or −(x + b) and e^a, since
/// −softplus(z) = ln σ(−z).
#[cube]
fn forget_gate(
    logits: Wide,
    parameters: &DecayParameters,
    head: usize,
    place: &Place,
    sizes: &TokenSizes,
    #[comptime] learned: bool,
) -> (Wide, f32) {
    let mut gate = logits;
    let mut factor = parameters.factor;
    if comptime!(learned) {
        gate = zeros() - (logits + of_head(&parameters.bias, head, place, sizes));
        factor = Exp::exp(parameters.a[head]);
    }
    (gate, factor)
}

/// See [`decay_of_gate`] and, `learned`, [`decay_of_step_logits`].
///
/// Grid: all tokens by the groups of a block, heads.
#[cube(launch_unchecked)]
fn channel_decay(
    logits: &Array<Chunk>,
    strides: HeadStrides,
    parameters: &DecayParameters,
    starts: &Array<i32>,
    out: &mut Array<Wide>,
    out_strides: HeadStrides,
    sizes: TokenSizes,
    #[comptime] learned: bool,
    #[comptime] packed: bool,
    #[comptime] split: RowSplit,
) {
    let head = CUBE_POS_Y as usize;
    let place = Place::new(0, &sizes, split);
    if place.exists {
        let logits = load(logits, place.of(&strides, head), true);
        let (gate, factor) = forget_gate(logits, parameters, head, &place, &sizes, learned);
        let mut log_decay = log_sigmoids(gate) * all(factor);
        if is_first(starts, &place, &sizes, packed) {
            log_decay = all(FORGET);
        }
        out[place.of(&out_strides, head)] = log_decay;
    }
}

/// The gradients: with g the forget gate and f what multiplies ln σ(g), dg = dℓ f σ(−g), dx = ±dg, and if they are
/// learned db = −Σ dg, da = Σ dℓ ℓ.
///
/// Grid: parts of all tokens, heads.
#[cube(launch_unchecked)]
fn channel_decay_back(
    logits: &Array<Chunk>,
    strides: HeadStrides,
    parameters: &DecayParameters,
    starts: &Array<i32>,
    grad: &Array<Wide>,
    grad_strides: HeadStrides,
    grads: &mut DecayGrads,
    sizes: TokenSizes,
    #[comptime] learned: bool,
    #[comptime] packed: bool,
    #[comptime] split: RowSplit,
) {
    let head = CUBE_POS_Y as usize;
    let mut d_bias = sums_of_tokens();
    let mut d_a = zeros();
    for step in 0..steps(&sizes, split) {
        let place = Place::new(step, &sizes, split);
        if place.exists {
            let logits = load(logits, place.of(&strides, head), true);
            let (gate, factor) = forget_gate(logits, parameters, head, &place, &sizes, learned);
            let mut d_log_decay = grad[place.of(&grad_strides, head)];
            if is_first(starts, &place, &sizes, packed) {
                d_log_decay = zeros();
            }
            let mut d_logits = d_log_decay * all(factor) * sigmoids(zeros() - gate);
            if comptime!(learned) {
                d_logits = zeros() - d_logits;
                d_bias[0] = d_bias[0] + d_logits;
                d_a += d_log_decay * log_sigmoids(gate) * all(factor);
            }
            grads.logits[place.of(&grads.logits_strides, head)] = Chunk::cast_from(d_logits);
        }
    }
    if comptime!(learned) {
        let chunks = sizes.chunks as usize;
        let part = CUBE_POS_X as usize * CUBE_COUNT_Y as usize + head;
        write_sum(&d_bias, &mut grads.bias, part * chunks, chunks, split);
        let mut sum = Array::<f32>::new(1usize);
        sum[0] = sum_vector(d_a);
        let mut scratch = SharedMemory::<f32>::new(comptime!(THREADS / 32));
        sum_row(&mut sum, &mut scratch, 1usize, THREADS);
        if UNIT_POS == 0 {
            grads.a[part] = sum[0];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cuda;
    use crate::testing::{Case, Tensor64, check, check_on};

    fn log_sigmoid(x: f64) -> f64 {
        x.min(0.0) - (-x.abs()).exp().ln_1p()
    }

    const TEMPERATURE: f32 = 16.0;

    /// The shape of the decays, `[batch, heads, seq_len, channels]`, and of their logits.
    fn shapes([batch, heads, seq_len, channels]: [usize; 4]) -> [Vec<usize>; 2] {
        [vec![batch, heads, seq_len, channels], vec![batch, seq_len, heads * channels]]
    }

    fn of_gate(inputs: &[Tensor64], heads: usize) -> Tensor64 {
        let [batch, seq_len, features] = inputs[0].shape[..] else { panic!("three dimensions") };
        let channels = features / heads;
        Tensor64::from_fn(&[batch, heads, seq_len, channels], |at| {
            let logit = inputs[0].at(&[at[0], at[2], at[1] * channels + at[3]]);
            log_sigmoid(logit) / f64::from(TEMPERATURE)
        })
    }

    fn of_steps(inputs: &[Tensor64]) -> Tensor64 {
        let [logits, bias, a] = inputs else { panic!("logits, bias and a") };
        let (heads, [batch, seq_len, features]) =
            (a.shape[0], logits.shape[..].try_into().unwrap());
        let channels = features / heads;
        Tensor64::from_fn(&[batch, heads, seq_len, channels], |at| {
            let feature = at[1] * channels + at[3];
            let step = logits.at(&[at[0], at[2], feature]) + bias.data[feature];
            a.data[at[1]].exp() * log_sigmoid(-step)
        })
    }

    const SHAPES: [[usize; 4]; 4] =
        [[1, 1, 1, 16], [2, 3, 37, 48], [1, 2, 70, 256], [1, 1, 2_500, 64]];

    #[test]
    fn agrees_with_the_oracle_and_its_gradients() {
        let [_, logits] = shapes([2, 3, 5, 8]);
        let gate = GateDecay { heads: 3, temperature: TEMPERATURE };
        check(Case::new(gate, &[&logits]), |inputs| of_gate(inputs, 3));
        check(Case::new(StepDecay, &[&logits, &[24], &[3]]), of_steps);
        check(Case::new(StepDecay, &[&[2, 5, 3], &[3], &[3]]), of_steps);
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn agrees_with_the_oracle_on_cuda() {
        for shape in SHAPES {
            let ([_, heads, _, channels], [_, logits]) = (shape, shapes(shape));
            let gate = GateDecay { heads, temperature: TEMPERATURE };
            let case = Case::new(gate, &[&logits]).bf16(&[0]);
            check_on::<Cuda, _, 1>(case, |inputs| of_gate(inputs, heads));
            let case = Case::new(StepDecay, &[&logits, &[heads * channels], &[heads]]);
            check_on::<Cuda, _, 3>(case.bf16(&[0]).parameters(&[1, 2]), of_steps);
        }
        for [batch, heads, seq_len] in [[1, 1, 1], [2, 3, 70], [1, 2, 20_000]] {
            let case = Case::new(StepDecay, &[&[batch, seq_len, heads], &[heads], &[heads]]);
            check_on::<Cuda, _, 3>(case, of_steps);
        }
    }
}
