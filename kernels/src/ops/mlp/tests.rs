use burn::tensor::DType;

use super::*;
use crate::ops::support::gpu;
use crate::testing::{Case, Tensor64, check, check_on};

fn oracle(inputs: &[Tensor64]) -> Tensor64 {
    let [x, up, down, residual] = inputs else { panic!() };
    let [hidden, width] = up.shape[..] else { panic!() };
    let gelu = |x: f64| {
        let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
        x / 2.0 * (1.0 + u.tanh())
    };
    let mut y = residual.clone();
    for (x, y) in x.data.chunks_exact(width).zip(y.data.chunks_exact_mut(width)) {
        for h in 0..hidden {
            let a = gelu((0..width).map(|i| x[i] * up.at(&[h, i])).sum());
            for (o, y) in y.iter_mut().enumerate() {
                *y += a * down.at(&[o, h]);
            }
        }
    }
    y
}

fn case(batch: usize, seq_len: usize, width: usize, hidden: usize) -> Case<GeluMlp, 4> {
    let x = [batch, seq_len, width];
    Case::new(GeluMlp, &[&x, &[hidden, width], &[width, hidden], &x])
        .uniform(1, -0.5..0.5)
        .uniform(2, -0.5..0.5)
}

#[test]
fn agrees_with_the_oracle_and_its_gradients() {
    check(case(2, 7, 9, 20), oracle);
    check(case(1, 33, 16, 64), oracle);
}

#[test]
#[ignore = "needs a GPU"]
fn cuda_agrees_with_the_oracle_and_its_gradients() {
    // The last two have few rows.
    for (batch, seq_len, width, hidden) in
        [(2, 7, 9, 20), (1, 33, 16, 64), (2, 50, 64, 256), (3, 21, 64, 256), (4, 9, 96, 128)]
    {
        check_on::<crate::Cuda, _, 4>(case(batch, seq_len, width, hidden), oracle);
        // The hidden layer and its gradient, before and after GELU, are rounded to bf16. Results are sums
        // over them, and no sum of independent errors exceeds five times their root mean square.
        let rounded = case(batch, seq_len, width, hidden).bf16(&[0, 1, 2, 3]);
        let rounded = rounded.parameters(&[1, 2]).inside(10.0, 2.0);
        check_on::<crate::Cuda, _, 4>(rounded, oracle);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn cuda_computes_a_row_alone_as_among_many() {
    let [rows, width, hidden] = [70, 96, 128];
    let wave = |shape, phase| gpu::wave::<3>(shape, phase).inner().cast(DType::BF16);
    let [x, residual] = [0.0, 0.7].map(|phase| wave([1, rows, width], phase));
    let matrix = |outputs, inputs, phase| {
        (wave([1, outputs, inputs], phase) * 0.3).reshape([outputs, inputs])
    };
    let (up, down) = (matrix(hidden, width, 1.0), matrix(width, hidden, 2.0));
    let run = |first, count| {
        let part = |x: &Tensor<crate::Cuda, 3>| x.clone().narrow(1, first, count);
        let y = gelu_mlp(part(&x), up.clone(), down.clone(), part(&residual));
        y.cast(DType::F32).into_data().to_vec::<f32>().unwrap()
    };
    let all = run(0, rows);
    let rms = (all.iter().map(|y| y * y).sum::<f32>() / all.len() as f32).sqrt();
    for row in 0..rows {
        for (alone, among) in run(row, 1).iter().zip(&all[row * width..]) {
            // Both round the hidden layer and the result to bf16.
            let allowed = among.abs() / 128.0 + 10.0 / 512.0 * rms;
            assert!((alone - among).abs() <= allowed, "row {row}: {alone} for {among}");
        }
    }
}
