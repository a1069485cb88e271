//! The three-way test of one case.

use std::ops::Range;

use burn::backend::{Autodiff, Flex};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::{FloatTensor, FloatTensorOps};
use burn::tensor::{DType, FloatDType, Shape, TensorData, TensorMetadata, bf16};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::budget::{Slack, assert_rounded_budget, errors};
use super::{Tensor64, differences, root_mean_square};
use crate::backend::{Op, OpBackend, tensor};

/// One test case: an operation, the shapes of its inputs and how they are drawn.
pub struct Case<O, const N: usize> {
    op: O,
    inputs: Vec<Tensor64>,
    ints: Vec<(Vec<usize>, Vec<i32>)>,
    no_grad: Vec<usize>,
    bf16: Vec<usize>,
    parameters: Vec<usize>,
    equal_upstream: bool,
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
            equal_upstream: false,
            inside: [0.0; 2],
        };
        for (input, shape) in shapes.iter().enumerate() {
            case.inputs.push(Tensor64::new(shape, vec![0.0; shape.iter().product()]));
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

    /// Passes these inputs to the kernel in bf16, and the rounded values to oracle and reference. Their
    /// gradients may be bf16 or f32.
    pub fn bf16(mut self, inputs: &[usize]) -> Self {
        for &input in inputs {
            round(&mut self.inputs[input]);
        }
        self.bf16.extend(inputs);
        self
    }

    /// Requires f32 gradients of these inputs, also if they are bf16.
    pub fn parameters(mut self, inputs: &[usize]) -> Self {
        self.parameters.extend(inputs);
        self
    }

    /// Allows for intermediate values that the kernel rounds to bf16: each result may further differ by
    /// `most`, and the root mean square of all by `mean`, in units of 2⁻⁹ of their root mean square. A
    /// rounding has an error of at most 2⁻⁸ of the value, and 2⁻⁹ in the root mean square. Only for
    /// operations with such values; the test says which.
    pub fn inside(mut self, most: f64, mean: f64) -> Self {
        self.inside = [most, mean];
        self
    }

    /// Gives all results the same upstream gradient, for an operation that differentiates only their sum.
    pub fn equal_upstream(mut self) -> Self {
        self.equal_upstream = true;
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
fn round(x: &mut Tensor64) {
    for x in &mut x.data {
        *x = bf16::from_f64(*x).to_f64();
    }
}

/// Output and input gradients of one run, and their types.
struct Run {
    output: (Tensor64, DType),
    grads: Vec<(Tensor64, DType)>,
}

fn to_tensor64<B: OpBackend>(x: FloatTensor<B>) -> (Tensor64, DType) {
    let (shape, dtype) = (x.shape(), x.dtype());
    let flat = B::float_reshape(x, Shape::new([shape.num_elements()]));
    let data = tensor::<B, 1>(flat).into_data();
    (Tensor64::new(shape.as_slice(), data.iter::<f64>().collect()), dtype)
}

fn from_tensor64<B: OpBackend>(x: &Tensor64, dtype: DType) -> FloatTensor<B> {
    let data: Vec<f32> = x.data.iter().map(|&x| x as f32).collect();
    let data = TensorData::new(data, x.shape.clone()).convert_dtype(dtype);
    B::float_from_data(data, &Default::default())
}

/// Runs the operation on `B` with an upstream gradient, through its kernel or its reference.
fn run<B: OpBackend, O: Op<N>, const N: usize>(
    case: &Case<O, N>,
    upstream: &Tensor64,
    kernel: bool,
) -> Run {
    type Ad<B> = Autodiff<B>;
    let inputs: [_; N] = std::array::from_fn(|i| {
        let dtype = if kernel { case.dtype(i) } else { DType::F32 };
        let input = from_tensor64::<B>(&case.inputs[i], dtype);
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
    let result = to_tensor64::<B>(<Ad<B> as AutodiffBackend>::inner(output.clone()));
    // The gradient of Σ upstream · output is the vector-Jacobian product of `upstream`.
    let output = match output.dtype() {
        DType::F32 => output,
        _ => Ad::<B>::float_cast(output, FloatDType::F32),
    };
    let weight = from_tensor64::<B>(upstream, DType::F32);
    let weight = <Ad<B> as AutodiffBackend>::from_inner(weight);
    let loss = Ad::<B>::float_sum(Ad::<B>::float_mul(output, weight));
    let mut grads = <Ad<B> as AutodiffBackend>::backward(loss);
    let grads = inputs
        .iter()
        .enumerate()
        .map(|(i, input)| match <Ad<B> as AutodiffBackend>::grad_remove(input, &mut grads) {
            Some(grad) => to_tensor64::<B>(grad),
            None => {
                assert!(case.no_grad.contains(&i), "input {i} of {:?} has no gradient", case.op);
                (Tensor64::new(&[0], vec![]), DType::F32)
            }
        })
        .collect();
    Run { output: result, grads }
}

/// The three-way test of one case on the CPU: output and every gradient, and the same bits in two
/// runs.
///
/// # Panics
/// When anything is outside the budget.
pub fn check<O: Op<N>, const N: usize>(case: Case<O, N>, oracle: impl Fn(&[Tensor64]) -> Tensor64) {
    check_on::<Flex, _, _>(case, oracle);
}

/// [`check`] of the kernel on `B`; the reference runs on the CPU.
///
/// # Panics
/// When anything is outside the budget.
pub fn check_on<B: OpBackend, O: Op<N>, const N: usize>(
    case: Case<O, N>,
    oracle: impl Fn(&[Tensor64]) -> Tensor64,
) {
    let what =
        format!("{:?} on {:?}", case.op, case.inputs.iter().map(|x| &x.shape).collect::<Vec<_>>());
    let want = oracle(&case.inputs);
    let mut rng = ChaCha8Rng::seed_from_u64(99);
    let mut upstream = Tensor64::new(
        &want.shape,
        want.data.iter().map(|_| f64::from(rng.random_range(-1.0f32..1.0))).collect(),
    );
    if case.equal_upstream {
        let first = upstream.data[0];
        upstream.data.fill(first);
    }
    if !case.bf16.is_empty() {
        round(&mut upstream);
    }
    // The allowance for bf16.
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
        let pick = |grads: &Tensor64| places.iter().map(|&p| grads.data[p]).collect::<Vec<_>>();
        let allowed = slack(*dtype, root_mean_square(&reference.data));
        assert_rounded_budget(&what, &pick(grad), &[&pick(reference)], &want, allowed);
        // Elements that were not sampled are compared with the reference.
        let scale = reference.data.iter().fold(1e-3f64, |a, x| a.max(x.abs()));
        let (worst, _) = errors(&grad.data, &reference.data, allowed.own);
        let most = 4e-5 * scale + allowed.inside[0];
        assert!(worst <= most, "{what}: kernel and reference differ by {worst:.2e} > {most:.2e}");
    }
    let again = run::<B, _, _>(&case, &upstream, true);
    assert_eq!(again.output, kernel.output, "{what}: two runs differ");
    assert_eq!(again.grads, kernel.grads, "{what}: gradients of two runs differ");
}
