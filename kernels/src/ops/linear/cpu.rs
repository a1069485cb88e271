//! Linear layers on the CPU.

use burn_flex::FlexTensor;

use crate::backend::Forward;
use crate::cpu::gemm::{Mat, matmul, matmul_into};
use crate::cpu::{contiguous, dims, from_vec, slice};

/// The sizes `[rows, inputs, outputs]` of a call.
fn sizes(x: &FlexTensor, weight: &FlexTensor) -> [usize; 3] {
    let (x, weight) = (dims(x), dims(weight));
    let inputs = x[x.len() - 1];
    assert_eq!(inputs, weight[1], "in_features of x {x:?} and weight {weight:?}");
    [x.iter().product::<usize>() / inputs, inputs, weight[0]]
}

/// y = x Wᵀ + b; saves x and W.
pub fn forward(
    x: &FlexTensor,
    weight: &FlexTensor,
    bias: Option<&FlexTensor>,
) -> Forward<FlexTensor> {
    let (x, weight) = (contiguous(x), contiguous(weight));
    let [rows, inputs, outputs] = sizes(&x, &weight);
    let a = Mat::new(slice(&x), rows, inputs, inputs);
    let b = Mat::new(slice(&weight), outputs, inputs, inputs).t();
    let mut shape = dims(&x);
    *shape.last_mut().expect("x has dimensions") = outputs;
    let y = match bias {
        None => matmul(a, b),
        Some(bias) => {
            // The rows are initialised with the bias; the product is added.
            let mut y = slice(&contiguous(bias)).repeat(rows);
            matmul_into(&mut y, a, b, 1.0);
            y
        }
    };
    Forward { output: from_vec(y, &shape), saved: vec![x, weight] }
}

/// dx = dy W, dW = dyᵀ x, db = Σ dy.
pub fn backward(
    saved: &[FlexTensor],
    grad: &FlexTensor,
    needs: [bool; 3],
) -> [Option<FlexTensor>; 3] {
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
fn column_sums(matrix: &[f32], cols: usize) -> Vec<f32> {
    let mut sums = vec![0.0; cols];
    for row in matrix.chunks_exact(cols) {
        for (sum, x) in sums.iter_mut().zip(row) {
            *sum += x;
        }
    }
    sums
}
