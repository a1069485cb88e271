use super::*;
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
    for (batch, seq_len, width, hidden) in [(2, 7, 9, 20), (1, 33, 16, 64), (2, 50, 64, 256)] {
        check_on::<crate::Cuda, _, 4>(case(batch, seq_len, width, hidden), oracle);
        // The hidden layer and its gradient, before and after GELU, are rounded to bf16. Results are sums
        // over them, and no sum of independent errors exceeds five times their root mean square.
        let rounded = case(batch, seq_len, width, hidden).bf16(&[0, 1, 2, 3]);
        let rounded = rounded.parameters(&[1, 2]).inside(10.0, 2.0);
        check_on::<crate::Cuda, _, 4>(rounded, oracle);
    }
}
