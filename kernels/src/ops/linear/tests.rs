use super::*;
use crate::backend::{leaf_id, take_accumulated_grad, with_accumulated_grads};
use crate::ops::support::{Ad, gpu, values, wave};
use crate::testing::{Case, Tensor64, check, check_on};

/// y = x Wᵀ + b by its definition.
fn oracle(inputs: &[Tensor64]) -> Tensor64 {
    let [x, weight] = [&inputs[0], &inputs[1]];
    let [batch, seq_len, features] = x.shape[..] else { panic!() };
    let outputs = weight.shape[0];
    Tensor64::from_fn(&[batch, seq_len, outputs], |at| {
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
fn sum_oracle(inputs: &[Tensor64]) -> Tensor64 {
    let product = oracle(&inputs[..2]);
    let sums = product.data.iter().zip(&inputs[2].data).map(|(a, b)| a + b);
    Tensor64::new(&product.shape, sums.collect())
}

#[test]
#[ignore = "needs a GPU"]
fn cuda_adds_the_weights_gradient_to_that_of_an_earlier_pass() {
    let x = || gpu::wave([2, 33, 16], 0.0);
    let weight = gpu::wave([24, 16], 1.0).require_grad();
    let loss = || (linear(x(), weight.clone(), None) * gpu::wave([2, 33, 24], 0.3)).sum();
    let gradient = |mut graph| primitive(weight.grad_remove(&mut graph).expect("a gradient"));
    let once = gradient(loss().backward());
    let values = |x| values(Tensor::<gpu::Gpu, 2>::from_inner(tensor(x)));
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
    let few_rows = [(1, 1, 64, 72), (1, 7, 96, 33), (4, 16, 160, 50), (3, 11, 2048, 16)];
    for (batch, seq_len, inputs, outputs) in
        [(1, 1, 3, 5), (2, 7, 16, 9), (1, 65, 33, 17), (2, 100, 64, 72), (3, 50, 192, 96)]
            .into_iter()
            .chain(few_rows)
    {
        let (x, w, sum) = ([batch, seq_len, inputs], [outputs, inputs], [batch, seq_len, outputs]);
        let on = check_on::<crate::Cuda, _, 2>;
        on(Case::new(Linear, &[&x, &w]), oracle);
        on(Case::new(Linear, &[&x, &w]).bf16(&[0, 1]).parameters(&[1]), oracle);
        let on = check_on::<crate::Cuda, _, 3>;
        on(Case::new(Linear, &[&x, &w, &[outputs]]), oracle);
        // The bias and, for odd sizes, the product are rounded to bf16 before they are added; the product
        // is at most five times its root mean square, and the smaller bias √3 times its own.
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

#[test]
#[ignore = "needs a GPU"]
fn cuda_keeps_products_of_bf16_in_f32() {
    for (rows, inputs, outputs) in [(1, 64, 50), (64, 96, 33), (65, 64, 24), (3, 33, 5)] {
        let bf16 = |x: Tensor<gpu::Gpu, 3>| x.inner().cast(DType::BF16);
        let x = bf16(gpu::wave([1, rows, inputs], 0.0));
        let weight = bf16(gpu::wave([1, outputs, inputs], 1.0)).reshape([outputs, inputs]);
        let got = linear_f32(x.clone(), weight.clone());
        assert_eq!(got.dtype(), DType::F32);
        let want = linear(x.cast(DType::F32), weight.cast(DType::F32), None);
        let numbers = |x: Tensor<crate::Cuda, 3>| values(Tensor::<gpu::Gpu, 3>::from_inner(x));
        for (got, want) in numbers(got).iter().zip(numbers(want)) {
            assert!((got - want).abs() <= 1e-6 * inputs as f32, "{got} for {want}");
        }
    }
}

/// Layers of 64 inputs, as q, k, v and a gate of grouped heads; the last has a bias.
fn layers<B: OpBackend>(
    matrix: impl Fn([usize; 2], f32) -> Tensor<B, 2>,
    vector: impl Fn(usize, f32) -> Tensor<B, 1>,
) -> Vec<(Tensor<B, 2>, Option<Tensor<B, 1>>)> {
    let outputs = [96, 33, 32, 5];
    let layer = |(at, outputs): (usize, usize)| {
        let bias = (at == 3).then(|| vector(outputs, 0.5));
        (matrix([outputs, 64], at as f32), bias)
    };
    outputs.into_iter().enumerate().map(layer).collect()
}

/// A layer norm with a bias, an RMS norm, and none.
fn norms<B: OpBackend>(vector: impl Fn(usize, f32) -> Tensor<B, 1>) -> [Option<InputNorm<B>>; 3] {
    let norm = |centred: bool| InputNorm {
        weight: vector(64, 0.1) + 1.0,
        bias: centred.then(|| vector(64, 0.7)),
        centred,
        eps: 1e-5,
    };
    [Some(norm(true)), Some(norm(false)), None]
}

fn normed<B: OpBackend>(x: &Tensor<B, 3>, norm: &Option<InputNorm<B>>) -> Tensor<B, 3> {
    norm.clone().map_or_else(|| x.clone(), |norm| norm.forward(x.clone()))
}

#[test]
fn several_layers_equal_each_alone() {
    let vector = |len: usize, phase| wave([len], phase);
    let x = wave([2, 9, 64], 0.0).require_grad();
    for norm in norms(vector) {
        let all = linears(x.clone(), norm.clone(), layers(wave, vector));
        let alone = layers(wave, vector)
            .into_iter()
            .map(|(weight, bias)| linear(normed(&x, &norm), weight, bias))
            .collect();
        let numbers = |ys: Vec<Tensor<Ad, 3>>| {
            let outputs: Vec<_> = ys.iter().cloned().flat_map(values).collect();
            let loss = ys.into_iter().map(|y| y.powi_scalar(2).sum()).reduce(|a, b| a + b);
            let dx = x.grad(&loss.expect("four layers").backward()).expect("a gradient");
            (outputs, values(Tensor::<Ad, 3>::from_inner(dx)))
        };
        let ((got, got_gradient), (want, want_gradient)) = (numbers(all), numbers(alone));
        assert_eq!(got, want);
        // Alone, each layer has its own norm, and their gradients are added: in another order.
        let largest = want_gradient.iter().fold(0.0f32, |a, x| a.max(x.abs()));
        for (got, want) in got_gradient.iter().zip(&want_gradient) {
            assert!((got - want).abs() <= 1e-5 * largest, "{got} for {want}, {largest} at most");
        }
    }
    assert!(gelu_of_few_rows(&x, None, wave([8, 64], 0.0)).is_none(), "a gradient is needed");
}

/// On CUDA in bf16, x from a row that is not the buffer's first.
mod of_few_rows {
    use super::*;
    use crate::Cuda;
    use crate::ops::activation::gelu;

    fn vector(len: usize, phase: f32) -> Tensor<Cuda, 1> {
        gpu::wave([len], phase).inner()
    }

    fn matrix(shape: [usize; 2], phase: f32) -> Tensor<Cuda, 2> {
        (gpu::wave(shape, phase).inner() * 0.3).cast(DType::BF16)
    }

    fn input(rows: usize) -> Tensor<Cuda, 3> {
        let x = gpu::wave([rows + 4, 1, 64], 0.0).inner().cast(DType::BF16);
        x.narrow(0, 4, rows).reshape([1, rows, 64])
    }

    fn numbers(x: Tensor<Cuda, 3>) -> Vec<f32> {
        values(Tensor::<gpu::Gpu, 3>::from_inner(x))
    }

    /// Equal but for the rounding of the norm, of which each row has 64 elements.
    fn assert_close(got: &[f32], want: &[f32], exact: bool, what: &str) {
        assert_eq!(got.len(), want.len(), "{what}");
        let rms = (want.iter().map(|x| x * x).sum::<f32>() / want.len() as f32).sqrt();
        for (got, want) in got.iter().zip(want) {
            let allowed = if exact { 0.0 } else { want.abs() / 128.0 + rms / 256.0 };
            assert!((got - want).abs() <= allowed, "{what}: {got} for {want}");
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn several_layers_equal_each_alone() {
        for rows in [1, 3, 16, 17, 64, 65] {
            for norm in norms(vector) {
                let x = input(rows);
                let all = linears(x.clone(), norm.clone(), layers(matrix, vector));
                let alone = layers(matrix, vector)
                    .into_iter()
                    .map(|(weight, bias)| linear(normed(&x, &norm), weight, bias));
                for (at, (got, want)) in all.into_iter().zip(alone).enumerate() {
                    assert_eq!(got.dims(), want.dims());
                    let what = format!("layer {at} of {rows} rows, norm {}", norm.is_some());
                    assert_close(&numbers(got), &numbers(want), norm.is_none(), &what);
                }
            }
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn gelu_equals_that_of_the_layer() {
        for (rows, served) in [(1, true), (3, true), (16, true), (17, false), (64, false)] {
            for norm in norms(vector) {
                let (x, weight) = (input(rows), matrix([96, 64], 1.0));
                let got = gelu_of_few_rows(&x, norm.as_ref(), weight.clone());
                assert_eq!(got.is_some(), served || norm.is_none(), "{rows} rows");
                let Some(got) = got else { continue };
                // Here GELU is applied to the rounded product.
                let want = gelu(linear(normed(&x, &norm), weight, None));
                let what = format!("{rows} rows, norm {}", norm.is_some());
                assert_close(&numbers(got), &numbers(want), false, &what);
            }
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn sizes_and_types_without_a_kernel_take_the_layers_alone() {
        let odd = gpu::wave([1, 3, 40], 0.0).inner().cast(DType::BF16);
        let weight = || matrix([8, 40], 1.0);
        let all = linears(odd.clone(), None, vec![(weight(), None), (weight(), None)]);
        let want = numbers(linear(odd, weight(), None));
        assert!(all.into_iter().all(|y| numbers(y) == want));
        let floats = gpu::wave([1, 3, 64], 0.0).inner();
        assert!(gelu_of_few_rows(&floats, None, vector(64, 0.0).reshape([1, 64])).is_none());
    }
}
