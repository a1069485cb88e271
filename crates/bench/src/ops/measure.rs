//! Each operation with its inputs and its work.

use burn::backend::Autodiff;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::{FloatTensor, FloatTensorOps, IntTensor};
use burn::tensor::{DType, Distribution, Int, Tensor, TensorData, TensorMetadata};
use longwall_kernels::backend::{Op, OpBackend, tensor};
use longwall_kernels::ops::activation::{Activation, GateActivation, Gated};
use longwall_kernels::ops::adamw::{AdamwStep, adamw};
use longwall_kernels::ops::cross_entropy::LinearCrossEntropy;
use longwall_kernels::ops::embedding::Embedding;
use longwall_kernels::ops::layer_norm::LayerNorm;
use longwall_kernels::ops::linear::Linear;
use longwall_kernels::ops::mlp::GeluMlp;
use longwall_kernels::ops::prefix_sum::PrefixSum;
use longwall_kernels::ops::rms_norm::RmsNorm;
use longwall_kernels::ops::rotary::{Frequencies, RotaryEmbedding};
use longwall_kernels::ops::short_conv::ShortConv;
use longwall_kernels::ops::vjp_root::VjpRoot;

use super::{HEAD_DIM, Operation, Sizes};
use crate::ceiling::Ceiling;
use crate::inputs::{copies, copy, distributed, random};
use crate::timed_pass::{TimedPass, Work};
use crate::timing::{Clock, Spread};

/// A random input of an operation.
struct Input {
    shape: Vec<usize>,
    deviation: f64,
    dtype: DType,
    /// Whether it gets a gradient.
    grad: bool,
}

/// The settings that operations are measured with.
pub(super) struct Bench<B: OpBackend> {
    pub sizes: Sizes,
    /// The type of activations and matrices.
    pub dtype: DType,
    pub ceiling: Ceiling,
    pub clock: Clock<B>,
    pub device: B::Device,
}

/// The shape of the main input, and what was timed.
pub(super) type Timed = (Vec<usize>, Vec<TimedPass>);

impl<B: OpBackend> Bench<B> {
    /// Bytes are those of tensors that must be read or written once, without vectors: x and y forward;
    /// dy, dx and, if the gradient depends on it, x backward.
    pub fn measure(&self, operation: Operation) -> Timed {
        let Sizes { batch, seq_len, width, .. } = self.sizes;
        let (x, hidden) = ([batch, seq_len, width], [batch, seq_len, 4 * width]);
        let in_type =
            |shape: &[usize]| (shape.iter().product::<usize>() * self.dtype.size()) as f64;
        let bytes = |shape: &[usize], [forward, both]: [usize; 2]| {
            [forward, both].map(|times| Work::Bytes(times as f64 * in_type(shape)))
        };
        let activation = |kind: Activation| {
            self.time(kind, [self.activation(&hidden)], &[], bytes(&hidden, [2, 5]))
        };
        match operation {
            Operation::LayerNorm => {
                let inputs = [self.activation(&x), self.vector(width)];
                self.time::<_, 2>(LayerNorm { eps: 1e-5 }, inputs, &[], bytes(&x, [2, 5]))
            }
            Operation::RmsNorm => {
                let inputs = [self.activation(&x), self.vector(width)];
                self.time(RmsNorm { eps: 1e-5 }, inputs, &[], bytes(&x, [2, 5]))
            }
            Operation::Rotary => {
                let q = [batch, width / HEAD_DIM, seq_len, HEAD_DIM];
                let op = RotaryEmbedding::new(0, Frequencies::new(10_000.0), HEAD_DIM, HEAD_DIM);
                self.time(op, [self.activation(&q)], &[], bytes(&q, [2, 4]))
            }
            Operation::Swiglu => {
                let inputs = [self.activation(&hidden), self.activation(&hidden)];
                self.time(Gated(GateActivation::Silu), inputs, &[], bytes(&hidden, [3, 8]))
            }
            Operation::Gelu => activation(Activation::Gelu),
            Operation::ReluSquared => activation(Activation::ReluSquared),
            Operation::ShortConv => {
                let inputs = [self.activation(&x), self.matrix([width, 4])];
                self.time(ShortConv { silu: true }, inputs, &[], bytes(&x, [2, 5]))
            }
            Operation::PrefixSum => self.prefix_sum(),
            Operation::Embedding => self.embedding(),
            Operation::Linear => {
                let inputs = [self.activation(&x), self.matrix([3 * width, width])];
                self.time::<_, 2>(Linear, inputs, &[], self.products(3 * width * width))
            }
            Operation::GeluMlp => {
                let [up, down] = [[4 * width, width], [width, 4 * width]];
                let inputs =
                    [self.activation(&x), self.matrix(up), self.matrix(down), self.activation(&x)];
                self.time(GeluMlp, inputs, &[], self.products(8 * width * width))
            }
            Operation::LinearCrossEntropy => self.cross_entropy(),
            Operation::Adamw => self.adamw(),
        }
    }

    /// A sum for each channel in f32, as gates use it.
    fn prefix_sum(&self) -> Timed {
        let Sizes { batch, seq_len, width, .. } = self.sizes;
        let x = Input { dtype: DType::F32, ..self.activation(&[batch, width, seq_len]) };
        let bytes = (4 * batch * width * seq_len) as f64;
        self.time(PrefixSum, [x], &[], [2.0, 4.0].map(|times| Work::Bytes(times * bytes)))
    }

    /// The table's gradient is as large as the table, in f32.
    fn embedding(&self) -> Timed {
        let Sizes { batch, seq_len, width, vocab } = self.sizes;
        let rows = (batch * seq_len * width * self.dtype.size()) as f64;
        let table = (4 * vocab * width) as f64;
        let work = [Work::Bytes(2.0 * rows), Work::Bytes(3.0 * rows + table)];
        let (_, passes) =
            self.time(Embedding, [self.matrix([vocab, width])], &[self.tokens()], work);
        (vec![batch, seq_len, width], passes)
    }

    fn cross_entropy(&self) -> Timed {
        let Sizes { batch, seq_len, width, vocab } = self.sizes;
        let weights = Input {
            deviation: 1.0 / (batch * seq_len) as f64,
            grad: false,
            dtype: DType::F32,
            ..self.activation(&[batch, seq_len])
        };
        let x = self.activation(&[batch, seq_len, width]);
        let inputs = [x, self.matrix([vocab, width]), weights];
        let op = LinearCrossEntropy::default();
        self.time(op, inputs, &[self.tokens()], self.products(vocab * width))
    }

    /// A step on the output matrix. It reads the parameter, its gradient and two moments and writes all
    /// but the gradient, in f32; if activations are not f32, it also writes a rounded copy.
    fn adamw(&self) -> Timed {
        let shape = [self.sizes.vocab, self.sizes.width];
        let elements = self.sizes.vocab * self.sizes.width;
        let copy_type = (self.dtype != DType::F32).then_some(self.dtype);
        let step = AdamwStep {
            lr: 1e-4,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            step: 1000,
            grad_scale: 0.5,
        };
        let normal = |deviation| random::<B>(&shape, deviation, DType::F32, &self.device);
        let uniform = Distribution::Uniform(1e-4, 1e-2);
        let set = || {
            let v = distributed::<B>(&shape, uniform, DType::F32, &self.device);
            (normal(0.1), Some([normal(1.0), normal(0.01), v]))
        };
        let copies = copies::<B>(16 * elements as u64);
        let mut sets: Vec<_> = (0..copies).map(|_| set()).collect();
        let time = self.clock.time(|at| {
            let (grad, state) = &mut sets[at % copies];
            // They have no other owner, so they are updated in place.
            let [p, m, v] = state.take().expect("put back by the step before");
            let (new, _) = adamw::<B>(&step, [p, grad.clone(), m, v], copy_type);
            *state = Some(new);
        });
        let bytes = 28 + copy_type.map_or(0, |dtype| dtype.size());
        let work = Work::Bytes((bytes * elements) as f64);
        (shape.to_vec(), vec![TimedPass::new("step", time, work, &self.ceiling)])
    }

    fn activation(&self, shape: &[usize]) -> Input {
        Input { shape: shape.to_vec(), deviation: 1.0, dtype: self.dtype, grad: true }
    }

    /// Weights that preserve the scale of their input.
    fn matrix(&self, shape: [usize; 2]) -> Input {
        Input { deviation: 1.0 / (shape[1] as f64).sqrt(), ..self.activation(&shape) }
    }

    fn vector(&self, elements: usize) -> Input {
        Input { dtype: DType::F32, ..self.activation(&[elements]) }
    }

    /// Work of products with matrices of `elements` elements in total: one forward, two more backward.
    fn products(&self, elements: usize) -> [Work; 2] {
        let forward = 2.0 * (self.sizes.batch * self.sizes.seq_len) as f64 * elements as f64;
        [Work::Flops(forward), Work::Flops(3.0 * forward)]
    }

    /// Uniform token ids, `[batch, seq_len]`.
    fn tokens(&self) -> IntTensor<B> {
        let Sizes { batch, seq_len, vocab, .. } = self.sizes;
        // Multiples of a prime modulo a prime spread over the vocabulary.
        let id = |at: usize| ((at as u64 * 48_271 % 2_147_483_647) % vocab as u64) as i32;
        let ids: Vec<i32> = (1..=batch * seq_len).map(id).collect();
        let data = TensorData::new(ids, [batch, seq_len]);
        Tensor::<B, 2, Int>::from_data(data, &self.device).into_primitive()
    }

    /// Times the operation without gradients, and with its backward pass.
    fn time<O: Op<N>, const N: usize>(
        &self,
        op: O,
        inputs: [Input; N],
        ints: &[IntTensor<B>],
        work: [Work; 2],
    ) -> Timed {
        let make = |i: &Input| random::<B>(&i.shape, i.deviation, i.dtype, &self.device);
        let mut sets = vec![inputs.each_ref().map(make)];
        let bytes = inputs.iter().map(|i| i.shape.iter().product::<usize>() * i.dtype.size());
        let copies = copies::<B>(bytes.sum::<usize>() as u64);
        for _ in 1..copies {
            sets.push(sets[0].each_ref().map(copy::<B>));
        }
        let forward = |at: usize| B::run(&op, sets[at % copies].clone(), ints.to_vec());
        let dy = self.upstream(forward(0));
        let alone = self.clock.time(|at| drop(forward(at)));
        let wanted = inputs.each_ref().map(|input| input.grad);
        let both = self.clock.time(|at| {
            let set = &sets[at % copies];
            let leaf = |i: usize| {
                let x = Autodiff::<B>::from_inner(set[i].clone());
                if wanted[i] { Autodiff::<B>::float_set_require_grad(x, true) } else { x }
            };
            let y = Autodiff::<B>::run(&op, std::array::from_fn(leaf), ints.to_vec());
            let start = Autodiff::<B>::run(&VjpRoot, [y, dy.clone()], vec![]);
            tensor::<Autodiff<B>, 1>(start).backward();
        });
        let pass = |name, time: Spread, work| TimedPass::new(name, time, work, &self.ceiling);
        let passes = vec![pass("forward", alone, work[0]), pass("forward_backward", both, work[1])];
        (inputs[0].shape.clone(), passes)
    }

    /// A random upstream gradient of an output; a constant of the graph.
    fn upstream(&self, y: FloatTensor<B>) -> FloatTensor<Autodiff<B>> {
        let shape: Vec<usize> = y.shape().iter().copied().collect();
        Autodiff::<B>::from_inner(random::<B>(&shape, 1.0, y.dtype(), &self.device))
    }
}
