use burn::tensor::DType;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::cuda::blas::Rounding;
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

/// A matrix of rows in f64.
#[derive(Clone)]
struct Matrix {
    rows: usize,
    columns: usize,
    data: Vec<f64>,
}

impl Matrix {
    /// Of a function of the row and the column.
    fn new(rows: usize, columns: usize, f: impl Fn(usize, usize) -> f64) -> Self {
        let data = (0..rows * columns).map(|i| f(i / columns, i % columns)).collect();
        Matrix { rows, columns, data }
    }

    fn of(x: &CudaTensor) -> Self {
        let [.., columns] = x.meta.shape()[..] else { panic!("{:?}", x.meta.shape()) };
        let rows = x.meta.shape().num_elements() / columns;
        let x = tensor::<crate::Cuda, 2>(crate::cuda::reshaped(x, &[rows, columns]));
        let data = x.cast(DType::F32).into_data().iter::<f64>().collect();
        Matrix { rows, columns, data }
    }

    fn at(&self, row: usize, column: usize) -> f64 {
        self.data[row * self.columns + column]
    }

    fn transposed(&self) -> Self {
        Matrix::new(self.columns, self.rows, |row, column| self.at(column, row))
    }

    fn times(&self, other: &Matrix) -> Self {
        let inner = 0..self.columns;
        Matrix::new(self.rows, other.columns, |row, column| {
            inner.clone().map(|k| self.at(row, k) * other.at(k, column)).sum()
        })
    }

    /// f of its elements and those of another.
    fn with(&self, other: &Matrix, f: impl Fn(f64, f64) -> f64) -> Self {
        Matrix::new(self.rows, self.columns, |row, column| {
            f(self.at(row, column), other.at(row, column))
        })
    }
}

/// GELU and its derivative.
fn gelu_and_slope(x: f64) -> [f64; 2] {
    let c = (2.0 / std::f64::consts::PI).sqrt();
    let s = 1.0 / (1.0 + (-2.0 * c * (x + 0.044715 * x.powi(3))).exp());
    [x * s, s + x * s * (1.0 - s) * 2.0 * c * (1.0 + 3.0 * 0.044715 * x * x)]
}

/// Gradients in bf16 and e4m3, of sums of earlier gradients too.
#[test]
#[ignore = "needs a GPU"]
fn cuda_agrees_with_the_oracle_in_both_roundings() {
    for (batch, seq_len, width, hidden) in [(1, 96, 64, 128), (2, 264, 80, 336)] {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let mut random = |shape: &[usize], size: f32| {
            let data = (0..shape.iter().product()).map(|_| rng.random_range(-size..size)).collect();
            let flat = gpu::floats(data, [shape.iter().product()]).inner().cast(DType::BF16);
            crate::cuda::reshaped(&primitive(flat), shape)
        };
        let shape = [batch, seq_len, width];
        let inputs = [
            random(&shape, 1.5),
            random(&[hidden, width], 0.3),
            random(&[width, hidden], 0.3),
            random(&shape, 0.15),
        ];
        let grad = random(&shape, 1e-3);
        let [x, up, down, residual] = inputs.each_ref().map(Matrix::of);
        let dy = Matrix::of(&grad);
        let before = x.times(&up.transposed());
        let after = before.with(&before, |x, _| gelu_and_slope(x)[0]);
        let y = after.times(&down.transposed()).with(&residual, |a, b| a + b);
        let d_before = dy.times(&down).with(&before, |dy, x| dy * gelu_and_slope(x)[1]);
        let want = [
            y,
            d_before.times(&up),
            d_before.transposed().times(&x),
            dy.transposed().times(&after),
        ];
        // A factor in e4m3 has an error of 2⁻⁴ at most, about 0.026 in the root mean square; four are
        // rounded on the way to a gradient of x. The output's own error is smaller: it has a residual.
        for (rounding, saved, allowed) in [(Rounding::None, 5, 0.01), (Rounding::E4m3, 9, 0.08)] {
            let run = |sums: &mut [Option<CudaTensor>; 4]| {
                let forward = cuda::forward(&inputs, rounding, true).expect("a kernel");
                assert_eq!(forward.saved.len(), saved, "{rounding:?}");
                let grads = cuda::backward(forward.saved, grad.clone(), [true; 4], sums);
                let [dx, d_up, d_down, _] = grads.map(|x| x.expect("a gradient"));
                [forward.output, dx, d_up, d_down]
            };
            let once = run(&mut [const { None }; 4]);
            assert_eq!(
                once.each_ref().map(|x| x.dtype)[1..],
                [DType::BF16, DType::F32, DType::F32]
            );
            let [_, dx, d_up, d_down] = once.clone();
            let mut sums = [Some(dx), Some(d_up), Some(d_down), None];
            let twice = run(&mut sums);
            assert!(sums.iter().all(Option::is_none), "a sum was not taken");
            for (i, want) in want.iter().enumerate() {
                let square = |x: &Matrix| x.data.iter().map(|x| x * x).sum::<f64>();
                for (got, times) in [(&once[i], 1.0), (&twice[i], if i == 0 { 1.0 } else { 2.0 })] {
                    let error = Matrix::of(got).with(want, |got, want| got - times * want);
                    let error = (square(&error) / square(want)).sqrt() / times;
                    assert!(error <= allowed, "{rounding:?}, tensor {i}: an error of {error}");
                }
            }
        }
    }
}
