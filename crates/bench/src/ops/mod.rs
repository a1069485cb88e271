//! The operations of a model besides attention, forward only and with backward.

mod measure;

use longwall_kernels::backend::OpBackend;
use longwall_kernels::device::OnDevice;
use serde::{Serialize, Serializer};

use self::measure::Bench;
use crate::ceiling::Ceiling;
use crate::error::BenchError;
use crate::memory::Need;
use crate::progress::Progress;
use crate::report::{Measured, Report};
use crate::setup::{self, Setup};
use crate::timed_pass::TimedPass;

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// The operations. If empty: all.
    pub operations: Vec<Operation>,
    /// Rows of the batch, up to [`MOST_SIZE`] like all sizes. Default: 64 on CUDA, 4 on the CPU.
    pub batch: Option<usize>,
    /// Tokens of a row. Default: 1024 on CUDA, 256 on the CPU.
    pub seq_len: Option<usize>,
    /// Width of the model, of heads with 64 channels. Default: 768 on CUDA, 256 on the CPU.
    pub width: Option<usize>,
    /// Tokens of the vocabulary. Default: 50257 on CUDA, 4096 on the CPU.
    pub vocab_size: Option<usize>,
    /// Device, precision and samples.
    pub common: setup::Options,
}

macro_rules! operations {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)+) => {
        /// An operation.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Operation {
            $($(#[$doc])* $variant,)+
        }

        impl Operation {
            /// Every operation.
            pub const ALL: &[Operation] = &[$(Operation::$variant,)+];

            /// Its name.
            pub fn name(self) -> &'static str {
                match self { $(Operation::$variant => $name,)+ }
            }
        }
    };
}

operations! {
    /// Layer normalisation.
    LayerNorm = "layer_norm",
    /// Normalisation by the root mean square.
    RmsNorm = "rms_norm",
    /// Rotary positions.
    Rotary = "rotary",
    /// SwiGLU.
    Swiglu = "swiglu",
    /// GELU.
    Gelu = "gelu",
    /// The square of the rectified input.
    ReluSquared = "relu_squared",
    /// A causal convolution of four tokens, then SiLU.
    ShortConv = "short_conv",
    /// The prefix sum over a row.
    PrefixSum = "prefix_sum",
    /// The embedding of tokens.
    Embedding = "embedding",
    /// A linear layer with the shape of attention's joint q, k and v projection.
    Linear = "linear",
    /// GPT-2's MLP.
    GeluMlp = "gelu_mlp",
    /// The output layer with its loss.
    LinearCrossEntropy = "linear_cross_entropy",
    /// A step of AdamW.
    Adamw = "adamw",
}

impl Serialize for Operation {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// Channels of a head.
const HEAD_DIM: usize = 64;

/// The largest value of each size.
pub const MOST_SIZE: usize = 1 << 20;

/// The sizes of a step.
#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    seq_len: usize,
    width: usize,
    vocab: usize,
}

impl Sizes {
    fn new(options: &Options, setup: &Setup) -> Result<Self, BenchError> {
        let sizes = Sizes {
            batch: options.batch.unwrap_or(setup.choose(64, 4)),
            seq_len: options.seq_len.unwrap_or(setup.choose(1024, 256)),
            width: options.width.unwrap_or(setup.choose(768, 256)),
            vocab: options.vocab_size.unwrap_or(setup.choose(50_257, 4096)),
        };
        if !sizes.width.is_multiple_of(HEAD_DIM) {
            return Err(BenchError::Width { width: sizes.width, head_dim: HEAD_DIM });
        }
        Ok(sizes)
    }

    /// Memory for inputs and outputs and their gradients; for GELU's MLP also the hidden layer.
    fn need(self, operation: Operation) -> Need {
        let [batch, seq_len, width, vocab] =
            [self.batch, self.seq_len, self.width, self.vocab].map(|size| size as u128);
        let (x, square, table) = (batch * seq_len * width, width * width, vocab * width);
        let held = match operation {
            Operation::LayerNorm
            | Operation::RmsNorm
            | Operation::Rotary
            | Operation::ShortConv
            | Operation::PrefixSum => vec![x; 2],
            Operation::Swiglu => vec![4 * x; 3],
            Operation::Gelu | Operation::ReluSquared => vec![4 * x; 2],
            Operation::Embedding => vec![x, table],
            Operation::Linear => vec![x, 3 * x, 3 * square],
            Operation::GeluMlp => vec![x, x, x, 4 * x, 4 * square, 4 * square],
            Operation::LinearCrossEntropy => vec![x, table],
            Operation::Adamw => vec![table; 2], // For the two moments.
        };
        Need::of(held).with_gradients()
    }

    /// Checks that the device can hold what the operation needs.
    fn check(self, operation: Operation, setup: &Setup) -> Result<(), BenchError> {
        let Sizes { batch, seq_len, width, vocab } = self;
        let asked = format!(
            "--op {} --batch {batch} --seq-len {seq_len} --width {width} --vocab-size {vocab}",
            operation.name()
        );
        setup.check(&asked, &self.need(operation), "choose smaller sizes")
    }
}

/// The measurement of one operation.
#[derive(Debug, Serialize)]
pub struct Case {
    op: Operation,
    /// Shape of the main input.
    shape: Vec<usize>,
    passes: Vec<TimedPass>,
}

impl Measured for Case {
    const COLUMNS: &'static [&'static str] = &["operation", "shape"];

    fn labels(&self) -> Vec<String> {
        vec![self.op.name().to_owned(), format!("{:?}", self.shape)]
    }

    fn passes(&self) -> &[TimedPass] {
        &self.passes
    }
}

/// Times the operations.
///
/// # Errors
/// When the device does not exist, the width is not a multiple of the head size, or the device cannot
/// hold an operation's tensors.
pub fn run(options: &Options, progress: &dyn Progress) -> Result<Report<Case>, BenchError> {
    let setup = options.common.open()?;
    let sizes = Sizes::new(options, &setup)?;
    let asked = &options.operations;
    let operations = if asked.is_empty() { Operation::ALL } else { asked };
    for operation in operations {
        sizes.check(*operation, &setup)?;
    }
    let job = Job { setup: &setup, sizes, operations, progress };
    let (ceiling, results) = setup.compute.run(job);
    Ok(Report::new(&setup, ceiling, results))
}

/// The work on the device.
struct Job<'a> {
    setup: &'a Setup,
    sizes: Sizes,
    operations: &'a [Operation],
    progress: &'a dyn Progress,
}

impl OnDevice for Job<'_> {
    type Output = (Ceiling, Vec<Case>);

    fn run<B: OpBackend>(self, device: B::Device) -> Self::Output {
        B::seed(&device, 0);
        let ceiling = Ceiling::of_both::<B>(self.setup, &device);
        let clock = self.setup.clock::<B>(&device);
        let dtype = self.setup.dtype();
        let bench = Bench::<B> { sizes: self.sizes, dtype, ceiling, clock, device };
        self.progress.start(self.operations.len(), "");
        let mut cases = vec![];
        for &op in self.operations {
            self.progress.measuring(op.name());
            B::memory_cleanup(&bench.device);
            let (shape, passes) = bench.measure(op);
            cases.push(Case { op, shape, passes });
            self.progress.done();
        }
        self.progress.finish();
        (ceiling, cases)
    }
}
