//! The three-way test of every operation: an f64 oracle written from the definition, the f32
//! reference, and the kernel.
//!
//! The kernel's error against the oracle may be at most twice the reference's, plus rounding.
//! Gradients are held to the same budget against central differences of the oracle.
//!
//! Where a case has inputs in bf16, oracle and reference get the rounded values, so that bf16 itself
//! is no error; a result that is bf16 may further differ by its own rounding, half a unit in the
//! last of 8 bits, 2⁻⁸ of each element. A result in f32 may not.

#[cfg(test)]
mod gpu_record;
#[cfg(test)]
pub(crate) mod served;

use std::io::Write;
use std::ops::Range;

use burn::backend::{Autodiff, Flex};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::{FloatTensor, FloatTensorOps};
use burn::tensor::{DType, FloatDType, Shape, TensorData, TensorMetadata, bf16};
use rand::seq::index::sample;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::backend::{Op, OpBackend, tensor};

/// A dense f64 tensor for oracles.
#[derive(Clone, Debug, PartialEq)]
pub struct Oracle {
    /// Sizes of the dimensions.
    pub shape: Vec<usize>,
    /// Elements in row-major order.
    pub data: Vec<f64>,
}

impl Oracle {
    /// A tensor from its elements.
    ///
    /// # Panics
    /// When the number of elements is not the shape's.
    pub fn new(shape: &[usize], data: Vec<f64>) -> Self {
        assert_eq!(shape.iter().product::<usize>(), data.len(), "elements of shape {shape:?}");
        Oracle { shape: shape.to_vec(), data }
    }

    /// A tensor from a function of the index.
    pub fn from_fn(shape: &[usize], f: impl Fn(&[usize]) -> f64) -> Self {
        let mut index = vec![0; shape.len()];
        let len = shape.iter().product();
        let mut data = Vec::with_capacity(len);
        for _ in 0..len {
            data.push(f(&index));
            for dim in (0..shape.len()).rev() {
                index[dim] += 1;
                if index[dim] < shape[dim] {
                    break;
                }
                index[dim] = 0;
            }
        }
        Oracle { shape: shape.to_vec(), data }
    }

    /// The element at an index.
    pub fn at(&self, index: &[usize]) -> f64 {
        assert_eq!(index.len(), self.shape.len());
        let flat = index.iter().zip(&self.shape).fold(0, |flat, (i, size)| {
            assert!(i < size, "index {index:?} of shape {:?}", self.shape);
            flat * size + i
        });
        self.data[flat]
    }
}

/// One test case: an operation, the shapes of its inputs and how they are drawn.
pub struct Case<O, const N: usize> {
    op: O,
    inputs: Vec<Oracle>,
    ints: Vec<(Vec<usize>, Vec<i32>)>,
    no_grad: Vec<usize>,
    bf16: Vec<usize>,
    parameters: Vec<usize>,
    /// See [`Case::inside`].
    inside: [f64; 2],
}

impl<O: Op<N>, const N: usize> Case<O, N> {
    /// Inputs of the given shapes, uniform in −1.7..1.7 (unit variance).
    ///
    /// # Panics
    /// When the number of shapes is not `N`.
    pub fn new(op: O, shapes: &[&[usize]]) -> Self {
        assert_eq!(shapes.len(), N, "shapes for the inputs of {op:?}");
        let mut case = Case {
            op,
            inputs: vec![],
            ints: vec![],
            no_grad: vec![],
            bf16: vec![],
            parameters: vec![],
            inside: [0.0; 2],
        };
        for (input, shape) in shapes.iter().enumerate() {
            case.inputs.push(Oracle::new(shape, vec![0.0; shape.iter().product()]));
            case = case.uniform(input, -1.7..1.7);
        }
        case
    }

    /// Draws input `input` uniformly from `range`.
    pub fn uniform(mut self, input: usize, range: Range<f32>) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(1000 + input as u64);
        for x in &mut self.inputs[input].data {
            *x = f64::from(rng.random_range(range.clone()));
        }
        if self.bf16.contains(&input) { self.bf16(&[input]) } else { self }
    }

    /// Feeds these inputs to the kernel in bf16, and their values so rounded to the others. Their
    /// gradients may be bf16 or f32.
    pub fn bf16(mut self, inputs: &[usize]) -> Self {
        for &input in inputs {
            round(&mut self.inputs[input]);
        }
        self.bf16.extend(inputs);
        self
    }

    /// Requires f32 gradients of these inputs, whatever their own type.
    pub fn parameters(mut self, inputs: &[usize]) -> Self {
        self.parameters.extend(inputs);
        self
    }

    /// Allows for values that the kernel rounds to bf16 on its way: a result may further differ by
    /// `most`, and all of them in the root mean square by `mean`, in units of 2⁻⁹ of their root mean
    /// square. A rounding errs by at most 2⁻⁸ of what it rounds, and by 2⁻⁹ in the root mean square.
    /// Only for operations that have such values; the test says which.
    pub fn inside(mut self, most: f64, mean: f64) -> Self {
        self.inside = [most, mean];
        self
    }

    /// The type in which the kernel gets an input.
    fn dtype(&self, input: usize) -> DType {
        if self.bf16.contains(&input) { DType::BF16 } else { DType::F32 }
    }

    /// Adds an integer input.
    pub fn ints(mut self, shape: &[usize], data: Vec<i32>) -> Self {
        self.ints.push((shape.to_vec(), data));
        self
    }

    /// Leaves out the gradient of an input that the operation does not differentiate.
    pub fn no_grad(mut self, input: usize) -> Self {
        self.no_grad.push(input);
        self
    }
}

/// Rounds to bf16.
fn round(x: &mut Oracle) {
    for x in &mut x.data {
        *x = bf16::from_f64(*x).to_f64();
    }
}

/// Output and input gradients of one run, and their types.
struct Run {
    output: (Oracle, DType),
    grads: Vec<(Oracle, DType)>,
}

fn to_oracle<B: OpBackend>(x: FloatTensor<B>) -> (Oracle, DType) {
    let (shape, dtype) = (x.shape(), x.dtype());
    let flat = B::float_reshape(x, Shape::new([shape.num_elements()]));
    let data = tensor::<B, 1>(flat).into_data();
    (Oracle::new(shape.as_slice(), data.iter::<f64>().collect()), dtype)
}

fn from_oracle<B: OpBackend>(x: &Oracle, dtype: DType) -> FloatTensor<B> {
    let data: Vec<f32> = x.data.iter().map(|&x| x as f32).collect();
    let data = TensorData::new(data, x.shape.clone()).convert_dtype(dtype);
    B::float_from_data(data, &Default::default())
}

/// Runs the operation on `B` with an upstream gradient, through its kernel or its reference.
fn run<B: OpBackend, O: Op<N>, const N: usize>(
    case: &Case<O, N>,
    upstream: &Oracle,
    kernel: bool,
) -> Run {
    type Ad<B> = Autodiff<B>;
    let inputs: [_; N] = std::array::from_fn(|i| {
        let dtype = if kernel { case.dtype(i) } else { DType::F32 };
        let input = from_oracle::<B>(&case.inputs[i], dtype);
        let input = <Ad<B> as AutodiffBackend>::from_inner(input);
        Ad::<B>::float_set_require_grad(Ad::<B>::float_detach(input), true)
    });
    let ints: Vec<_> = case
        .ints
        .iter()
        .map(|(shape, data)| {
            let data = TensorData::new(data.clone(), shape.clone());
            B::int_from_data(data, &Default::default())
        })
        .collect();
    let output = if kernel {
        Ad::<B>::run(&case.op, inputs.clone(), ints)
    } else {
        case.op.reference::<Ad<B>>(inputs.clone(), &ints)
    };
    let result = to_oracle::<B>(<Ad<B> as AutodiffBackend>::inner(output.clone()));
    // The gradient of Σ upstream · output is the upstream gradient's pull-back.
    let output = match output.dtype() {
        DType::F32 => output,
        _ => Ad::<B>::float_cast(output, FloatDType::F32),
    };
    let weight = from_oracle::<B>(upstream, DType::F32);
    let weight = <Ad<B> as AutodiffBackend>::from_inner(weight);
    let loss = Ad::<B>::float_sum(Ad::<B>::float_mul(output, weight));
    let mut grads = <Ad<B> as AutodiffBackend>::backward(loss);
    let grads = inputs
        .iter()
        .enumerate()
        .map(|(i, input)| match <Ad<B> as AutodiffBackend>::grad_remove(input, &mut grads) {
            Some(grad) => to_oracle::<B>(grad),
            None => {
                assert!(case.no_grad.contains(&i), "input {i} of {:?} has no gradient", case.op);
                (Oracle::new(&[0], vec![]), DType::F32)
            }
        })
        .collect();
    Run { output: result, grads }
}

/// Largest absolute and root-mean-square error of `got` where `want` is known, beyond `own` times
/// each element.
fn errors(got: &[f64], want: &[f64], own: f64) -> (f64, f64) {
    let mut worst: f64 = 0.0;
    let mut square = 0.0;
    for (&got, &want) in got.iter().zip(want) {
        // `max` would pass over a NaN.
        let error = (got - want).abs();
        assert!(error.is_finite(), "found {got} where {want} is right");
        let error = (error - own * want.abs()).max(0.0);
        worst = worst.max(error);
        square += error * error;
    }
    (worst, (square / want.len().max(1) as f64).sqrt())
}

pub(crate) fn root_mean_square(x: &[f64]) -> f64 {
    (x.iter().map(|x| x * x).sum::<f64>() / x.len().max(1) as f64).sqrt()
}

/// Notes the error of the running test, relative to the largest value compared, in the file that
/// scripts/gpu_test.sh asks for.
pub(crate) fn record(error: f64) {
    let Some(path) = std::env::var_os("LONGWALL_TEST_ERRORS") else { return };
    let test = std::thread::current().name().unwrap_or("unnamed").to_owned();
    let file = std::fs::OpenOptions::new().append(true).create(true).open(path);
    // One write, since several tests share the file.
    let line = format!("{test} {error:e}\n");
    file.and_then(|mut file| file.write_all(line.as_bytes())).expect("the file can be written");
}

/// Holds `kernel` to twice the error of `reference`, plus rounding; holds `reference` to f32's own
/// accuracy, so that a wrong reference fails too.
///
/// # Panics
/// When either is outside its budget.
pub fn assert_budget(what: &str, kernel: &[f64], reference: &[f64], want: &[f64]) {
    assert_rounded_budget(what, kernel, &[reference], want, Slack::default());
}

/// [`assert_budget`] with the larger of two references' errors: on the inputs, and on inputs that
/// differ in their last bit. What that does to an ill-conditioned result, any rounding does.
#[cfg(test)]
pub(crate) fn assert_conditioned_budget(
    what: &str,
    kernel: &[f64],
    references: [&[f64]; 2],
    want: &[f64],
) {
    assert_rounded_budget(what, kernel, &references, want, Slack::default());
}

/// What roundings to bf16 may add to errors.
#[derive(Clone, Copy, Default)]
struct Slack {
    /// To each element, relative to it: the result's own rounding.
    own: f64,
    /// To each element, and to the root mean square of all: those on the way.
    inside: [f64; 2],
}

/// [`assert_budget`] with `slack` for the kernel.
fn assert_rounded_budget(
    what: &str,
    kernel: &[f64],
    references: &[&[f64]],
    want: &[f64],
    slack: Slack,
) {
    assert_eq!(kernel.len(), want.len(), "{what}: number of elements");
    let scale = want.iter().fold(0.0f64, |a, x| a.max(x.abs())).max(1e-3);
    let rms = root_mean_square(want);
    let epsilon = f64::from(f32::EPSILON);
    let (mut reference_max, mut reference_rms) = (0.0f64, 0.0f64);
    for reference in references {
        assert_eq!(reference.len(), want.len(), "{what}: number of elements");
        let (worst, rms) = errors(reference, want, 0.0);
        (reference_max, reference_rms) = (reference_max.max(worst), reference_rms.max(rms));
    }
    let (kernel_max, kernel_rms) = errors(kernel, want, slack.own);
    record(errors(kernel, want, 0.0).0 / scale);
    assert!(
        reference_max <= 2e-5 * scale,
        "{what}: the reference is off by {reference_max:.2e}, largest value {scale:.2e}"
    );
    let [most, mean] = slack.inside;
    assert!(
        kernel_max <= 2.0 * reference_max + 8.0 * epsilon * scale + most
            && kernel_rms <= 2.0 * reference_rms + 4.0 * epsilon * rms.max(1e-3) + mean,
        "{what}: the kernel is off by {kernel_max:.2e} (rms {kernel_rms:.2e}), the reference by \
         {reference_max:.2e} (rms {reference_rms:.2e}), roundings by {most:.2e} (rms {mean:.2e}), \
         largest value {scale:.2e}"
    );
}

/// How many elements of an input have their gradient checked by central differences.
pub(crate) const CHECKED: usize = 48;

/// Central differences of Σ upstream · oracle(inputs) at up to [`CHECKED`] elements of one input:
/// their places and derivatives. `step` is relative to elements above 1.
pub(crate) fn differences(
    inputs: &[Oracle],
    input: usize,
    upstream: &Oracle,
    step: f64,
    oracle: &impl Fn(&[Oracle]) -> Oracle,
) -> (Vec<usize>, Vec<f64>) {
    let len = inputs[input].data.len();
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    let mut places = sample(&mut rng, len, len.min(CHECKED)).into_vec();
    places.sort_unstable();
    let mut shifted = inputs.to_vec();
    let mut loss = |place: usize, value: f64| {
        shifted[input].data[place] = value;
        let output = oracle(&shifted);
        output.data.iter().zip(&upstream.data).map(|(x, w)| x * w).sum::<f64>()
    };
    let derivatives = places
        .iter()
        .map(|&place| {
            let x = inputs[input].data[place];
            let step = step * x.abs().max(1.0);
            let derivative = (loss(place, x + step) - loss(place, x - step)) / (2.0 * step);
            loss(place, x);
            derivative
        })
        .collect();
    (places, derivatives)
}

/// The three-way test of one case on the CPU: output and every gradient, and the same bits in two
/// runs.
///
/// # Panics
/// When anything is outside the budget.
pub fn check<O: Op<N>, const N: usize>(case: Case<O, N>, oracle: impl Fn(&[Oracle]) -> Oracle) {
    check_on::<Flex, _, _>(case, oracle);
}

/// [`check`] of the kernel on `B`; the reference runs on the CPU.
///
/// # Panics
/// When anything is outside the budget.
pub fn check_on<B: OpBackend, O: Op<N>, const N: usize>(
    case: Case<O, N>,
    oracle: impl Fn(&[Oracle]) -> Oracle,
) {
    let what =
        format!("{:?} on {:?}", case.op, case.inputs.iter().map(|x| &x.shape).collect::<Vec<_>>());
    let want = oracle(&case.inputs);
    let mut rng = ChaCha8Rng::seed_from_u64(99);
    let mut upstream = Oracle::new(
        &want.shape,
        want.data.iter().map(|_| f64::from(rng.random_range(-1.0f32..1.0))).collect(),
    );
    if !case.bf16.is_empty() {
        round(&mut upstream);
    }
    // What results of the kernel may differ by for bf16's sake.
    let slack = |dtype: DType, rms: f64| Slack {
        own: if dtype == DType::BF16 { 2f64.powi(-8) } else { 0.0 },
        inside: case.inside.map(|times| times * 2f64.powi(-9) * rms),
    };
    let reference = run::<Flex, _, _>(&case, &upstream, false);
    let kernel = run::<B, _, _>(&case, &upstream, true);
    let (output, dtype) = &kernel.output;
    assert_eq!(output.shape, want.shape, "{what}: shape of the output");
    let allowed = slack(*dtype, root_mean_square(&want.data));
    let references = &[&reference.output.0.data[..]];
    assert_rounded_budget(&what, &output.data, references, &want.data, allowed);
    for input in (0..N).filter(|i| !case.no_grad.contains(i)) {
        let what = format!("{what}, gradient of input {input}");
        let ((grad, dtype), (reference, _)) = (&kernel.grads[input], &reference.grads[input]);
        assert_eq!(grad.shape, case.inputs[input].shape, "{what}: shape");
        let full = *dtype == DType::F32;
        let own = *dtype == case.dtype(input) && !case.parameters.contains(&input);
        assert!(full || own, "{what}: its type is {dtype:?}");
        let (places, want) = differences(&case.inputs, input, &upstream, 1e-5, &oracle);
        let pick = |grads: &Oracle| places.iter().map(|&p| grads.data[p]).collect::<Vec<_>>();
        let allowed = slack(*dtype, root_mean_square(&reference.data));
        assert_rounded_budget(&what, &pick(grad), &[&pick(reference)], &want, allowed);
        // Elements that were not sampled are held to the reference.
        let scale = reference.data.iter().fold(1e-3f64, |a, x| a.max(x.abs()));
        let (worst, _) = errors(&grad.data, &reference.data, allowed.own);
        let most = 4e-5 * scale + allowed.inside[0];
        assert!(worst <= most, "{what}: kernel and reference differ by {worst:.2e} > {most:.2e}");
    }
    let again = run::<B, _, _>(&case, &upstream, true);
    assert_eq!(again.output, kernel.output, "{what}: two runs differ");
    assert_eq!(again.grads, kernel.grads, "{what}: gradients of two runs differ");
}
