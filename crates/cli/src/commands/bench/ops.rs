//! `longwall bench ops`.

use anyhow::{Result, bail};
use burn::backend::Autodiff;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::{FloatTensor, FloatTensorOps, IntTensor};
use burn::tensor::{DType, Distribution, Int, Tensor, TensorData, TensorMetadata};
use clap::ValueEnum;
use longwall_kernels::backend::{Op, OpBackend, tensor};
use longwall_kernels::device::OnDevice;
use longwall_kernels::ops::activation::{Activation, SwiGlu};
use longwall_kernels::ops::adamw::{AdamwStep, adamw};
use longwall_kernels::ops::cross_entropy::LinearCrossEntropy;
use longwall_kernels::ops::embedding::Embedding;
use longwall_kernels::ops::layer_norm::LayerNorm;
use longwall_kernels::ops::linear::Linear;
use longwall_kernels::ops::mlp::GeluMlp;
use longwall_kernels::ops::prefix_sum::PrefixSum;
use longwall_kernels::ops::rms_norm::RmsNorm;
use longwall_kernels::ops::rotary::Rotary;
use longwall_kernels::ops::short_conv::ShortConv;
use longwall_kernels::ops::vjp_root::VjpRoot;
use serde::Serialize;

use super::ceiling::Ceiling;
use super::inputs::{copies, copy, distributed, random};
use super::report::{Measured, Report};
use super::setup::{CommonArgs, Need, Setup, parse_size};
use super::timing::{Clock, Pass, Spread, Work};
use crate::progress::bar;

/// Arguments of `longwall bench ops`.
#[derive(clap::Args)]
pub struct Args {
    /// Operations; by default all
    #[arg(long, value_name = "OP", value_delimiter = ',')]
    op: Vec<Name>,

    /// Rows of the batch; by default 64 on CUDA, 4 on the CPU
    #[arg(long, value_name = "N", value_parser = parse_size::<MOST_SIZE>)]
    batch: Option<usize>,

    /// Tokens of a row; by default 1024 on CUDA, 256 on the CPU
    #[arg(long, value_name = "N", value_parser = parse_size::<MOST_SIZE>)]
    seq_len: Option<usize>,

    /// Width of the model, of heads with 64 channels; by default 768 on CUDA, 256 on the CPU
    #[arg(long, value_name = "N", value_parser = parse_size::<MOST_SIZE>)]
    width: Option<usize>,

    /// Tokens of the vocabulary; by default 50257 on CUDA, 4096 on the CPU
    #[arg(long, value_name = "N", value_parser = parse_size::<MOST_SIZE>)]
    vocab_size: Option<usize>,

    #[command(flatten)]
    common: CommonArgs,
}

/// The operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
enum Name {
    LayerNorm,
    RmsNorm,
    Rotary,
    Swiglu,
    Gelu,
    ReluSquared,
    ShortConv,
    PrefixSum,
    Embedding,
    Linear,
    GeluMlp,
    LinearCrossEntropy,
    Adamw,
}

impl Name {
    /// As on the command line.
    fn text(self) -> String {
        self.to_possible_value().expect("every operation has a name").get_name().to_owned()
    }
}

/// Channels of a head.
const HEAD_DIM: usize = 64;

/// The greatest of each size.
const MOST_SIZE: usize = 1 << 20;

/// The sizes of a step.
#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    seq_len: usize,
    width: usize,
    vocab: usize,
}

impl Sizes {
    fn new(args: &Args, setup: &Setup) -> Result<Self> {
        let sizes = Sizes {
            batch: args.batch.unwrap_or(setup.choose(64, 4)),
            seq_len: args.seq_len.unwrap_or(setup.choose(1024, 256)),
            width: args.width.unwrap_or(setup.choose(768, 256)),
            vocab: args.vocab_size.unwrap_or(setup.choose(50_257, 4096)),
        };
        let width = sizes.width;
        if !width.is_multiple_of(HEAD_DIM) {
            bail!(
                "--width is {width}; allowed: multiples of {HEAD_DIM}, the channels of a head\n  \
                 hint: --width {}",
                width.next_multiple_of(HEAD_DIM)
            );
        }
        Ok(sizes)
    }

    /// Inputs and outputs, and their gradients; of GELU's MLP, a layer inside as well.
    fn need(self, name: Name) -> Need {
        let [batch, seq_len, width, vocab] =
            [self.batch, self.seq_len, self.width, self.vocab].map(|size| size as u128);
        let (x, square, table) = (batch * seq_len * width, width * width, vocab * width);
        let held = match name {
            Name::LayerNorm | Name::RmsNorm | Name::Rotary | Name::ShortConv | Name::PrefixSum => {
                vec![x; 2]
            }
            Name::Swiglu => vec![4 * x; 3],
            Name::Gelu | Name::ReluSquared => vec![4 * x; 2],
            Name::Embedding => vec![x, table],
            Name::Linear => vec![x, 3 * x, 3 * square],
            Name::GeluMlp => vec![x, x, x, 4 * x, 4 * square, 4 * square],
            Name::LinearCrossEntropy => vec![x, table],
            Name::Adamw => vec![table; 2], // As large as the moments.
        };
        Need::of(held).with_gradients()
    }

    /// The device can hold what the operation needs.
    fn check(self, name: Name, setup: &Setup) -> Result<()> {
        let Sizes { batch, seq_len, width, vocab } = self;
        let options = format!(
            "--op {} --batch {batch} --seq-len {seq_len} --width {width} --vocab-size {vocab}",
            name.text()
        );
        setup.check(&options, &self.need(name), "choose smaller sizes")
    }
}

/// What was measured of one operation.
#[derive(Serialize)]
struct Case {
    op: String,
    /// Of the input that the operation is applied to.
    shape: Vec<usize>,
    passes: Vec<Pass>,
}

impl Measured for Case {
    const COLUMNS: &'static [&'static str] = &["operation", "shape"];

    fn labels(&self) -> Vec<String> {
        vec![self.op.clone(), format!("{:?}", self.shape)]
    }

    fn passes(&self) -> &[Pass] {
        &self.passes
    }
}

/// Times the operations and prints the results.
pub fn run(args: Args) -> Result<()> {
    let setup = args.common.open()?;
    let sizes = Sizes::new(&args, &setup)?;
    let names = if args.op.is_empty() { Name::value_variants() } else { &args.op };
    for name in names {
        sizes.check(*name, &setup)?;
    }
    let (ceiling, results) = setup.device.clone().run(Job { setup: &setup, sizes, names });
    Report::new(&setup, ceiling, results).print(args.common.json)
}

/// The work on the device.
struct Job<'a> {
    setup: &'a Setup,
    sizes: Sizes,
    names: &'a [Name],
}

impl OnDevice for Job<'_> {
    type Output = (Ceiling, Vec<Case>);

    fn run<B: OpBackend>(self, device: B::Device) -> Self::Output {
        B::seed(&device, 0);
        let ceiling = Ceiling::of_both::<B>(self.setup, &device);
        let clock = self.setup.clock::<B>(&device);
        let dtype = self.setup.dtype();
        let bench = Bench::<B> { sizes: self.sizes, dtype, ceiling, clock, device };
        let bar = bar(Some(self.names.len() as u64), "{wide_bar} {pos}/{len} {msg}");
        let mut cases = vec![];
        for &name in self.names {
            let op = name.text();
            bar.set_message(op.clone());
            B::memory_cleanup(&bench.device);
            let (shape, passes) = bench.measure(name);
            cases.push(Case { op, shape, passes });
            bar.inc(1);
        }
        bar.finish_and_clear();
        (ceiling, cases)
    }
}

/// A random input of an operation.
struct Input {
    shape: Vec<usize>,
    deviation: f64,
    dtype: DType,
    /// Whether it gets a gradient.
    grad: bool,
}

/// What the operations are measured with.
struct Bench<B: OpBackend> {
    sizes: Sizes,
    dtype: DType,
    ceiling: Ceiling,
    clock: Clock<B>,
    device: B::Device,
}

/// The shape of the main input, and what was timed.
type Timed = (Vec<usize>, Vec<Pass>);

impl<B: OpBackend> Bench<B> {
    /// Bytes are those of tensors that must be read or written once, vectors left out: x and y
    /// forward; backward x, dy and dx again, where the gradient depends on x.
    fn measure(&self, name: Name) -> Timed {
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
        match name {
            Name::LayerNorm => {
                let inputs = [self.activation(&x), self.vector(width)];
                self.time::<_, 2>(LayerNorm { eps: 1e-5 }, inputs, &[], bytes(&x, [2, 5]))
            }
            Name::RmsNorm => {
                let inputs = [self.activation(&x), self.vector(width)];
                self.time(RmsNorm { eps: 1e-5 }, inputs, &[], bytes(&x, [2, 5]))
            }
            Name::Rotary => {
                let q = [batch, width / HEAD_DIM, seq_len, HEAD_DIM];
                let op = Rotary { first_position: 0, theta: 10_000.0, rotary_dims: HEAD_DIM };
                self.time(op, [self.activation(&q)], &[], bytes(&q, [2, 4]))
            }
            Name::Swiglu => {
                let inputs = [self.activation(&hidden), self.activation(&hidden)];
                self.time(SwiGlu, inputs, &[], bytes(&hidden, [3, 8]))
            }
            Name::Gelu => activation(Activation::Gelu),
            Name::ReluSquared => activation(Activation::ReluSquared),
            Name::ShortConv => {
                let inputs = [self.activation(&x), self.matrix([width, 4])];
                self.time(ShortConv { silu: true }, inputs, &[], bytes(&x, [2, 5]))
            }
            Name::PrefixSum => self.prefix_sum(),
            Name::Embedding => self.embedding(),
            Name::Linear => {
                let inputs = [self.activation(&x), self.matrix([3 * width, width])];
                self.time::<_, 2>(Linear, inputs, &[], self.products(3 * width * width))
            }
            Name::GeluMlp => {
                let [up, down] = [[4 * width, width], [width, 4 * width]];
                let inputs =
                    [self.activation(&x), self.matrix(up), self.matrix(down), self.activation(&x)];
                self.time(GeluMlp, inputs, &[], self.products(8 * width * width))
            }
            Name::LinearCrossEntropy => self.cross_entropy(),
            Name::Adamw => self.adamw(),
        }
    }

    /// A sum for each channel, as gates take it: f32.
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
        self.time(LinearCrossEntropy, inputs, &[self.tokens()], self.products(vocab * width))
    }

    /// A step on the vocabulary's matrix. It reads the parameter, its gradient and two moments and
    /// writes all but the gradient, in f32; where activations are not f32, it writes a rounded copy.
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
            // Nobody else owns them, so they are updated in place.
            let [p, m, v] = state.take().expect("put back by the step before");
            let (new, _) = adamw::<B>(&step, [p, grad.clone(), m, v], copy_type);
            *state = Some(new);
        });
        let bytes = 28 + copy_type.map_or(0, |dtype| dtype.size());
        let work = Work::Bytes((bytes * elements) as f64);
        (shape.to_vec(), vec![Pass::new("step", time, work, &self.ceiling)])
    }

    fn activation(&self, shape: &[usize]) -> Input {
        Input { shape: shape.to_vec(), deviation: 1.0, dtype: self.dtype, grad: true }
    }

    /// Weights that keep the scale of what they are multiplied with.
    fn matrix(&self, shape: [usize; 2]) -> Input {
        Input { deviation: 1.0 / (shape[1] as f64).sqrt(), ..self.activation(&shape) }
    }

    fn vector(&self, elements: usize) -> Input {
        Input { dtype: DType::F32, ..self.activation(&[elements]) }
    }

    /// Of products with matrices of so many elements: one forward, two more backward.
    fn products(&self, elements: usize) -> [Work; 2] {
        let forward = 2.0 * (self.sizes.batch * self.sizes.seq_len) as f64 * elements as f64;
        [Work::Flops(forward), Work::Flops(3.0 * forward)]
    }

    /// Uniform token ids, `[batch, seq_len]`.
    fn tokens(&self) -> IntTensor<B> {
        let Sizes { batch, seq_len, vocab, .. } = self.sizes;
        // Multiples of a prime modulo a prime fall all over the vocabulary.
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
        let pass = |name, time: Spread, work| Pass::new(name, time, work, &self.ceiling);
        let passes = vec![pass("forward", alone, work[0]), pass("forward_backward", both, work[1])];
        (inputs[0].shape.clone(), passes)
    }

    /// A random upstream gradient of an output, without a gradient of its own.
    fn upstream(&self, y: FloatTensor<B>) -> FloatTensor<Autodiff<B>> {
        let shape: Vec<usize> = y.shape().iter().copied().collect();
        Autodiff::<B>::from_inner(random::<B>(&shape, 1.0, y.dtype(), &self.device))
    }
}
