//! The linear layer, y = x Wᵀ + b, alone and added to a residual stream.

pub(super) mod cuda;

use burn::tensor::Tensor;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn_flex::FlexTensor;

use crate::backend::{Forward, Op, OpBackend, primitive, tensor};
use crate::cpu::gemm::{Mat, matmul, matmul_into};
use crate::cpu::{contiguous, dims, from_vec, slice};
use crate::cuda::CudaTensor;
use crate::ops::bias;
use crate::ops::matmul::MatMul;

/// y = x Wᵀ + b.
///
/// - `x`: `[batch, seq_len, in_features]`
/// - `weight`: `[out_features, in_features]`
/// - `bias`: `[out_features]`
///
/// Returns `[batch, seq_len, out_features]`.
///
/// # Panics
/// When the sizes do not fit.
pub fn linear<B: OpBackend>(
    x: Tensor<B, 3>,
    weight: Tensor<B, 2>,
    bias: Option<Tensor<B, 1>>,
) -> Tensor<B, 3> {
    let (x, weight) = (primitive(x), primitive(weight));
    tensor(match bias {
        None => B::run(&Linear, [x, weight], vec![]),
        Some(bias) => B::run(&Linear, [x, weight, primitive(bias)], vec![]),
    })
}

/// y = r + x Wᵀ, in one pass where the device can.
///
/// - `x`: `[batch, seq_len, in_features]`
/// - `weight`: `[out_features, in_features]`
/// - `residual`: `[batch, seq_len, out_features]`
///
/// Returns `[batch, seq_len, out_features]`.
///
/// # Panics
/// When the sizes do not fit.
pub fn linear_add<B: OpBackend>(
    x: Tensor<B, 3>,
    weight: Tensor<B, 2>,
    residual: Tensor<B, 3>,
) -> Tensor<B, 3> {
    let inputs = [primitive(x), primitive(weight), primitive(residual)];
    tensor(B::run(&LinearAdd, inputs, vec![]))
}

/// The operation: inputs x, W and, with three inputs, b.
#[derive(Clone, Debug)]
pub struct Linear;

/// The operation of [`linear_add`]: inputs x, W and r.
#[derive(Clone, Debug)]
pub struct LinearAdd;

impl Op<3> for LinearAdd {
    fn reference<B: OpBackend>(
        &self,
        [x, weight, residual]: [FloatTensor<B>; 3],
        _ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        B::float_add(residual, B::run(&Linear, [x, weight], vec![]))
    }

    fn cuda_forward(
        &self,
        [x, weight, residual]: &[CudaTensor; 3],
        _ints: &[CudaTensor],
        _needs: [bool; 3],
    ) -> Option<Forward<CudaTensor>> {
        Some(cuda::forward(x, weight, cuda::Then::Add(residual)))
    }

    fn cuda_backward_accumulating(
        &self,
        saved: Vec<CudaTensor>,
        _ints: &[CudaTensor],
        grad: CudaTensor,
        needs: [bool; 3],
        [x_accum, weight_accum, ..]: &mut [Option<CudaTensor>; 3],
    ) -> [Option<CudaTensor>; 3] {
        let [dx, dw, _] =
            cuda::backward(&saved, &grad, [needs[0], needs[1], false], [x_accum, weight_accum]);
        [dx, dw, Some(grad)]
    }
}

impl<const N: usize> Op<N> for Linear {
    fn reference<B: OpBackend>(
        &self,
        inputs: [FloatTensor<B>; N],
        _ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        let (x, weight, bias) = bias::inputs(&inputs);
        let (x, weight) = (tensor::<B, 3>(x.clone()), tensor::<B, 2>(weight.clone()));
        let [batch, seq_len, features] = x.dims();
        let outputs = weight.dims()[0];
        let y = x.reshape([batch * seq_len, features]).mm(weight.transpose());
        let y = y.reshape([batch, seq_len, outputs]);
        primitive(match bias {
            None => y,
            Some(bias) => y + tensor::<B, 1>(bias.clone()).unsqueeze(),
        })
    }

    fn cpu_forward(
        &self,
        inputs: &[FlexTensor; N],
        _ints: &[FlexTensor],
        _needs: [bool; N],
    ) -> Option<Forward<FlexTensor>> {
        let (x, weight, bias) = bias::inputs(inputs);
        Some(forward(x, weight, bias))
    }

    fn cpu_backward(
        &self,
        saved: Vec<FlexTensor>,
        _ints: &[FlexTensor],
        grad: FlexTensor,
        needs: [bool; N],
    ) -> [Option<FlexTensor>; N] {
        bias::gradients(backward(&saved, &grad, bias::needs(needs)))
    }

    fn cuda_forward(
        &self,
        inputs: &[CudaTensor; N],
        _ints: &[CudaTensor],
        _needs: [bool; N],
    ) -> Option<Forward<CudaTensor>> {
        let (x, weight, bias) = bias::inputs(inputs);
        Some(cuda::forward(x, weight, bias.map_or(cuda::Then::Nothing, cuda::Then::Bias)))
    }

    fn cuda_backward_accumulating(
        &self,
        saved: Vec<CudaTensor>,
        _ints: &[CudaTensor],
        grad: CudaTensor,
        needs: [bool; N],
        grad_accum: &mut [Option<CudaTensor>; N],
    ) -> [Option<CudaTensor>; N] {
        let [x_accum, weight_accum, ..] = &mut grad_accum[..] else { unreachable!("x and W") };
        let needs = bias::needs(needs);
        bias::gradients(cuda::backward(&saved, &grad, needs, [x_accum, weight_accum]))
    }
}

/// `[rows, inputs, outputs]` of a call.
fn sizes(x: &FlexTensor, weight: &FlexTensor) -> [usize; 3] {
    let (x, weight) = (dims(x), dims(weight));
    let inputs = x[x.len() - 1];
    assert_eq!(inputs, weight[1], "in_features of x {x:?} and weight {weight:?}");
    [x.iter().product::<usize>() / inputs, inputs, weight[0]]
}

fn forward(x: &FlexTensor, weight: &FlexTensor, bias: Option<&FlexTensor>) -> Forward<FlexTensor> {
    let (x, weight) = (contiguous(x), contiguous(weight));
    let [rows, inputs, outputs] = sizes(&x, &weight);
    let a = Mat::new(slice(&x), rows, inputs, inputs);
    let b = Mat::new(slice(&weight), outputs, inputs, inputs).t();
    let mut shape = dims(&x);
    *shape.last_mut().expect("x has dimensions") = outputs;
    let y = match bias {
        None => matmul(a, b),
        Some(bias) => {
            // The product is added to rows that hold the bias already.
            let mut y = slice(&contiguous(bias)).repeat(rows);
            matmul_into(&mut y, a, b, 1.0);
            y
        }
    };
    Forward { output: from_vec(y, &shape), saved: vec![x, weight] }
}

/// dx = dy W, dW = dyᵀ x, db = Σ dy.
fn backward(saved: &[FlexTensor], grad: &FlexTensor, needs: [bool; 3]) -> [Option<FlexTensor>; 3] {
    let [x, weight] = saved else { unreachable!("linear saves two tensors") };
    let [rows, inputs, outputs] = sizes(x, weight);
    let grad = contiguous(grad);
    let dy = Mat::new(slice(&grad), rows, outputs, outputs);
    let dx = needs[0].then(|| {
        let weight = Mat::new(slice(weight), outputs, inputs, inputs);
        from_vec(matmul(dy, weight), &dims(x))
    });
    let dw = needs[1].then(|| {
        let x = Mat::new(slice(x), rows, inputs, inputs);
        from_vec(matmul(dy.t(), x), &[outputs, inputs])
    });
    let db = needs[2].then(|| from_vec(column_sums(slice(&grad), outputs), &[outputs]));
    [dx, dw, db]
}

/// The sum of each column of a row-major matrix, rows added in order.
pub(crate) fn column_sums(matrix: &[f32], cols: usize) -> Vec<f32> {
    let mut sums = vec![0.0; cols];
    for row in matrix.chunks_exact(cols) {
        for (sum, x) in sums.iter_mut().zip(row) {
            *sum += x;
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{leaf_id, take_accumulated_grad, with_accumulated_grads};
    use crate::ops::support::gpu;
    use crate::testing::{Case, Oracle, check, check_on};

    /// y = x Wᵀ + b by its definition.
    fn oracle(inputs: &[Oracle]) -> Oracle {
        let [x, weight] = [&inputs[0], &inputs[1]];
        let [batch, seq_len, features] = x.shape[..] else { panic!() };
        let outputs = weight.shape[0];
        Oracle::from_fn(&[batch, seq_len, outputs], |at| {
            let [b, t, o] = at[..] else { panic!() };
            let bias = inputs.get(2).map_or(0.0, |bias| bias.at(&[o]));
            bias + (0..features).map(|i| x.at(&[b, t, i]) * weight.at(&[o, i])).sum::<f64>()
        })
    }

    #[test]
    fn agrees_with_the_oracle_and_its_gradients() {
        for (batch, seq_len, inputs, outputs) in [(1, 1, 3, 5), (2, 7, 16, 9), (1, 65, 33, 17)] {
            let x = [batch, seq_len, inputs];
            check(Case::<_, 2>::new(Linear, &[&x, &[outputs, inputs]]), oracle);
            check(Case::<_, 3>::new(Linear, &[&x, &[outputs, inputs], &[outputs]]), oracle);
            let sum = [batch, seq_len, outputs];
            check(Case::<_, 3>::new(LinearAdd, &[&x, &[outputs, inputs], &sum]), sum_oracle);
        }
    }

    /// y = r + x Wᵀ by its definition.
    fn sum_oracle(inputs: &[Oracle]) -> Oracle {
        let product = oracle(&inputs[..2]);
        let sums = product.data.iter().zip(&inputs[2].data).map(|(a, b)| a + b);
        Oracle::new(&product.shape, sums.collect())
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn cuda_adds_the_weights_gradient_to_that_of_an_earlier_pass() {
        let x = || gpu::wave([2, 33, 16], 0.0);
        let weight = gpu::wave([24, 16], 1.0).require_grad();
        let loss = || (linear(x(), weight.clone(), None) * gpu::wave([2, 33, 24], 0.3)).sum();
        let gradient = |mut graph| primitive(weight.grad_remove(&mut graph).expect("a gradient"));
        let once = gradient(loss().backward());
        let values = |x| gpu::values(Tensor::<gpu::Gpu, 2>::from_inner(tensor(x)));
        let want: Vec<f32> = values(once.clone()).iter().map(|x| 2.0 * x).collect();
        let leaf = primitive(weight.clone());
        let sums = vec![(leaf_id::<crate::Cuda>(&leaf), once)];
        let mut graph = with_accumulated_grads::<crate::Cuda>(loss(), sums).backward();
        let left = take_accumulated_grad::<crate::Cuda>(&leaf, &mut graph);
        assert!(left.is_none(), "the earlier gradient was not taken");
        let sum = gradient(graph);
        for (sum, want) in values(sum).iter().zip(want) {
            assert!((sum - want).abs() <= 1e-4, "{sum} for {want}");
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn cuda_agrees_with_the_oracle_and_its_gradients() {
        for (batch, seq_len, inputs, outputs) in
            [(1, 1, 3, 5), (2, 7, 16, 9), (1, 65, 33, 17), (2, 100, 64, 72), (3, 50, 192, 96)]
        {
            let (x, w, sum) =
                ([batch, seq_len, inputs], [outputs, inputs], [batch, seq_len, outputs]);
            let on = check_on::<crate::Cuda, _, 2>;
            on(Case::new(Linear, &[&x, &w]), oracle);
            on(Case::new(Linear, &[&x, &w]).bf16(&[0, 1]).parameters(&[1]), oracle);
            let on = check_on::<crate::Cuda, _, 3>;
            on(Case::new(Linear, &[&x, &w, &[outputs]]), oracle);
            // The bias and, for odd sizes, the product are rounded to bf16 before they are added; the
            // product is at most five times its root mean square, the bias √3 times its own, less.
            let rounded = Case::new(Linear, &[&x, &w, &[outputs]]).bf16(&[0, 1]);
            let rounded = rounded.inside(10.0 + 2.0 * 3f64.sqrt(), 2f64.sqrt());
            on(rounded.parameters(&[1, 2]), oracle);
            let on = check_on::<crate::Cuda, _, 3>;
            on(Case::new(LinearAdd, &[&x, &w, &sum]), sum_oracle);
            // Some of cuBLASLt's algorithms, chosen for small sizes, round the product first.
            let rounded = Case::new(LinearAdd, &[&x, &w, &sum]).bf16(&[0, 1, 2]).inside(10.0, 1.0);
            on(rounded.parameters(&[1]), sum_oracle);
        }
    }
}
