//! The linear layer, y = x Wᵀ + b, alone and added to a residual stream.

pub(super) mod cuda;

use burn::tensor::Tensor;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn_flex::FlexTensor;

use crate::backend::{Forward, Op, OpBackend, primitive, tensor};
use crate::cpu::gemm::{Mat, matmul, matmul_into};
use crate::cpu::{contiguous, dims, from_vec, slice};
use crate::cuda::CudaTensor;
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

    fn cuda_backward_onto(
        &self,
        saved: Vec<CudaTensor>,
        _ints: &[CudaTensor],
        grad: CudaTensor,
        needs: [bool; 3],
        [onto_x, onto_weight, ..]: &mut [Option<CudaTensor>; 3],
    ) -> [Option<CudaTensor>; 3] {
        let [dx, dw, _] =
            cuda::backward(&saved, &grad, [needs[0], needs[1], false], [onto_x, onto_weight]);
        [dx, dw, Some(grad)]
    }
}

fn product<B: OpBackend>(x: FloatTensor<B>, weight: FloatTensor<B>) -> Tensor<B, 3> {
    let (x, weight) = (tensor::<B, 3>(x), tensor::<B, 2>(weight));
    let [batch, seq_len, inputs] = x.dims();
    let outputs = weight.dims()[0];
    x.reshape([batch * seq_len, inputs]).mm(weight.transpose()).reshape([batch, seq_len, outputs])
}

impl Op<2> for Linear {
    fn reference<B: OpBackend>(
        &self,
        [x, weight]: [FloatTensor<B>; 2],
        _ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        primitive(product::<B>(x, weight))
    }

    fn cpu_forward(
        &self,
        [x, weight]: &[FlexTensor; 2],
        _ints: &[FlexTensor],
        _needs: [bool; 2],
    ) -> Option<Forward<FlexTensor>> {
        Some(forward(x, weight, None))
    }

    fn cpu_backward(
        &self,
        saved: Vec<FlexTensor>,
        _ints: &[FlexTensor],
        grad: FlexTensor,
        needs: [bool; 2],
    ) -> [Option<FlexTensor>; 2] {
        let [dx, dw, _] = backward(&saved, &grad, [needs[0], needs[1], false]);
        [dx, dw]
    }

    fn cuda_forward(
        &self,
        [x, weight]: &[CudaTensor; 2],
        _ints: &[CudaTensor],
        _needs: [bool; 2],
    ) -> Option<Forward<CudaTensor>> {
        Some(cuda::forward(x, weight, cuda::Then::Nothing))
    }

    fn cuda_backward_onto(
        &self,
        saved: Vec<CudaTensor>,
        _ints: &[CudaTensor],
        grad: CudaTensor,
        needs: [bool; 2],
        [onto_x, onto_weight, ..]: &mut [Option<CudaTensor>; 2],
    ) -> [Option<CudaTensor>; 2] {
        let [dx, dw, _] =
            cuda::backward(&saved, &grad, [needs[0], needs[1], false], [onto_x, onto_weight]);
        [dx, dw]
    }
}

impl Op<3> for Linear {
    fn reference<B: OpBackend>(
        &self,
        [x, weight, bias]: [FloatTensor<B>; 3],
        _ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        primitive(product::<B>(x, weight) + tensor::<B, 1>(bias).unsqueeze())
    }

    fn cpu_forward(
        &self,
        [x, weight, bias]: &[FlexTensor; 3],
        _ints: &[FlexTensor],
        _needs: [bool; 3],
    ) -> Option<Forward<FlexTensor>> {
        Some(forward(x, weight, Some(bias)))
    }

    fn cpu_backward(
        &self,
        saved: Vec<FlexTensor>,
        _ints: &[FlexTensor],
        grad: FlexTensor,
        needs: [bool; 3],
    ) -> [Option<FlexTensor>; 3] {
        backward(&saved, &grad, needs)
    }

    fn cuda_forward(
        &self,
        [x, weight, bias]: &[CudaTensor; 3],
        _ints: &[CudaTensor],
        _needs: [bool; 3],
    ) -> Option<Forward<CudaTensor>> {
        Some(cuda::forward(x, weight, cuda::Then::Bias(bias)))
    }

    fn cuda_backward_onto(
        &self,
        saved: Vec<CudaTensor>,
        _ints: &[CudaTensor],
        grad: CudaTensor,
        needs: [bool; 3],
        [onto_x, onto_weight, ..]: &mut [Option<CudaTensor>; 3],
    ) -> [Option<CudaTensor>; 3] {
        cuda::backward(&saved, &grad, needs, [onto_x, onto_weight])
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
    use crate::backend::{add_to_earlier, leaf_id};
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
        let earlier = [(leaf_id::<crate::Cuda>(&primitive(weight.clone())), once)].into();
        let (graph, left) = add_to_earlier::<crate::Cuda, _>(earlier, || loss().backward());
        assert!(left.is_empty(), "the earlier gradient was not taken");
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
