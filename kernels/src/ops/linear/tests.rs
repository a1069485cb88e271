use super::*;
use crate::backend::{leaf_id, take_accumulated_grad, with_accumulated_grads};
use crate::ops::support::{gpu, values};
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
