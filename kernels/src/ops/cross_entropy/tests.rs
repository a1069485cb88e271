use super::*;
use crate::ops::support::{Ad, assert_nan_shows, assert_threads_agree, assert_views_agree};
use crate::ops::support::{output_and_gradient, values, wave};
use crate::testing::{Case, Tensor64, check};

fn ids(len: usize, vocab: usize) -> Vec<i32> {
    (0..len).map(|i| ((i * i * 7 + i / 3) % vocab) as i32).collect()
}

fn targets_of(shape: [usize; 2], vocab: usize) -> Tensor<Ad, 2, Int> {
    let data = burn::tensor::TensorData::new(ids(shape[0] * shape[1], vocab), shape);
    Tensor::from_data(data, &Default::default())
}

/// The loss of one token by its definition.
fn token_loss(x: &Tensor64, weight: &Tensor64, b: usize, t: usize, target: usize) -> f64 {
    let (vocab, width) = (weight.shape[0], weight.shape[1]);
    let logit = |v: usize| (0..width).map(|i| x.at(&[b, t, i]) * weight.at(&[v, i])).sum::<f64>();
    let logits: Vec<f64> = (0..vocab).map(logit).collect();
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits.iter().map(|z| (z - largest).exp()).sum();
    largest + sum.ln() - logits[target]
}

#[test]
fn agrees_with_the_oracle_and_its_gradients() {
    for (batch, seq_len, width, vocab, size) in [
        (1, 1, 1, 1, 1.7),
        (1, 1, 3, 5, 1.7),
        (2, 7, 17, 33, 1.7),
        (1, 37, 8, 65, 9.0), // Logits reach ±80 and beyond.
    ] {
        let ids = ids(batch * seq_len, vocab);
        let shapes: [&[usize]; 3] = [&[batch, seq_len, width], &[vocab, width], &[batch, seq_len]];
        let case = Case::new(LinearCrossEntropy, &shapes)
            .uniform(0, -size..size)
            .uniform(2, 0.0..0.1)
            .ints(&[batch, seq_len], ids.clone())
            .no_grad(2);
        check(case, |inputs| {
            let [x, weight, weights] = inputs else { panic!() };
            let row = |at: usize| {
                let (b, t) = (at / seq_len, at % seq_len);
                weights.data[at] * token_loss(x, weight, b, t, ids[at] as usize)
            };
            Tensor64::new(&[1], vec![(0..batch * seq_len).map(row).sum()])
        });
    }
}

#[test]
fn several_chunks_agree_with_the_reference() {
    // 1300 rows at a vocabulary of 9 are two chunks.
    let (shape, vocab) = ([2, 650], 9);
    assert!(cpu::chunk_rows(vocab) < 1300);
    let weights = wave(shape, 0.0) * 0.01;
    let targets = targets_of(shape, vocab);
    let fused = |w: Tensor<Ad, 2>| {
        linear_cross_entropy(wave([2, 650, 12], 1.0), w, targets.clone(), weights.clone())
    };
    let plain = |w: Tensor<Ad, 2>| {
        let x = primitive(wave([2, 650, 12], 1.0));
        let losses = token_losses::<Ad>(x, primitive(w), &targets.clone().into_primitive());
        (losses * weights.clone()).sum()
    };
    let (got, want) = (
        output_and_gradient(wave([9, 12], 0.0), &fused),
        output_and_gradient(wave([9, 12], 0.0), &plain),
    );
    for (got, want) in got.iter().flatten().zip(want.iter().flatten()) {
        assert!((got - want).abs() < 2e-6, "{got} for {want}");
    }
}

#[test]
fn token_losses_agree_with_the_definition() {
    for (batch, seq_len, width, vocab) in [(1, 1, 3, 5), (2, 601, 17, 33)] {
        let (x, weight) = (wave([batch, seq_len, width], 0.0), wave([vocab, width], 1.0));
        let oracle = |data: Vec<f32>, shape: &[usize]| {
            Tensor64::new(shape, data.iter().map(|&x| x.into()).collect())
        };
        let (xs, ws) = (
            oracle(values(x.clone()), &[batch, seq_len, width]),
            oracle(values(weight.clone()), &[vocab, width]),
        );
        let got = token_cross_entropy(x, weight, targets_of([batch, seq_len], vocab));
        assert_eq!(got.dims(), [batch, seq_len]);
        for (at, (got, target)) in
            values(got).into_iter().zip(ids(batch * seq_len, vocab)).enumerate()
        {
            let want = token_loss(&xs, &ws, at / seq_len, at % seq_len, target as usize);
            assert!((f64::from(got) - want).abs() < 2e-5, "{got} for {want} at {at}");
        }
    }
}

#[test]
fn token_losses_and_weights_leave_no_trace_in_the_graph() {
    let (x, w) = (wave([1, 3, 4], 0.0).require_grad(), wave([5, 4], 1.0).require_grad());
    let weights = wave([1, 3], 0.5).require_grad();
    let losses = token_cross_entropy(x.clone(), w.clone(), targets_of([1, 3], 5));
    let loss = linear_cross_entropy(x.clone(), w, targets_of([1, 3], 5), weights.clone());
    let alone = linear_cross_entropy(
        x.clone(),
        wave([5, 4], 1.0),
        targets_of([1, 3], 5),
        wave([1, 3], 0.5),
    );
    let grads = (loss + losses.sum()).backward();
    assert!(weights.grad(&grads).is_none());
    let dx = values(Tensor::from_inner(x.grad(&grads).expect("a gradient of x")));
    let grads = alone.backward();
    assert_eq!(dx, values(Tensor::from_inner(x.grad(&grads).expect("a gradient of x"))));
}

#[test]
fn positions_of_weight_zero_have_no_part() {
    let (x, w) = (wave([2, 5, 7], 0.0), wave([11, 7], 1.0));
    let mask =
        Tensor::<Ad, 2>::from_floats([[0.5, 0.0, 0.0, 2.0, 0.0], [0.0; 5]], &Default::default());
    let targets = targets_of([2, 5], 11);
    let [loss, dx] = output_and_gradient(x.clone(), &|x| {
        linear_cross_entropy(x, w.clone(), targets.clone(), mask.clone())
    });
    let want = token_cross_entropy(x, w, targets.clone()) * mask;
    let want: f32 = values(want).iter().sum();
    assert!((loss[0] - want).abs() < 1e-5, "{} for {want}", loss[0]);
    for (row, dx) in dx.chunks(7).enumerate() {
        assert_eq!(dx.iter().any(|&x| x != 0.0), row == 0 || row == 3, "row {row}");
    }
    let none = Tensor::zeros([2, 5], &Default::default());
    let [loss, dx] = output_and_gradient(wave([2, 5, 7], 0.0), &|x| {
        linear_cross_entropy(x, wave([11, 7], 1.0), targets.clone(), none.clone())
    });
    assert!(loss == [0.0] && dx == [0.0; 70]);
}

#[test]
fn large_logits_stay_finite() {
    // Logits are ±80 · 40.
    let x = Tensor::<Ad, 3>::from_floats([[[80.0], [-80.0]]], &Default::default());
    let w = Tensor::<Ad, 2>::from_floats([[40.0], [-40.0], [39.0]], &Default::default());
    let targets = Tensor::<Ad, 2, Int>::from_ints([[1, 1]], &Default::default());
    let ones = Tensor::<Ad, 2>::ones([1, 2], &Default::default());
    let [loss, dx] = output_and_gradient(x, &|x| {
        linear_cross_entropy(x, w.clone(), targets.clone(), ones.clone())
    });
    assert_eq!(loss, [6400.0]);
    assert!(dx.iter().all(|x| x.is_finite()), "{dx:?}");
}

#[test]
fn a_view_gives_what_its_copy_gives_and_a_nan_shows() {
    let loss = |x: Tensor<Ad, 3>| {
        let [batch, seq_len, _] = x.dims();
        let targets = targets_of([batch, seq_len], 11);
        linear_cross_entropy(
            x,
            wave([7, 11], 1.0).transpose(),
            targets,
            wave([batch, seq_len], 2.0),
        )
    };
    assert_views_agree(wave([5, 3, 7], 0.0).swap_dims(0, 1), loss);
    assert_nan_shows(wave([2, 3, 7], 0.0), loss);
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    assert_threads_agree(|| {
        let loss = |w| {
            let x = wave([3, 500, 48], 0.0);
            linear_cross_entropy(x, w, targets_of([3, 500], 301), wave([3, 500], 1.0))
        };
        output_and_gradient(wave([301, 48], 0.0), &loss).concat()
    });
}

#[test]
#[should_panic(expected = "target -1 at place 1 of the batch is outside the vocabulary, 0..3")]
fn a_target_outside_the_vocabulary_is_named() {
    let targets = Tensor::<Ad, 2, Int>::from_ints([[0, -1]], &Default::default());
    token_cross_entropy(wave([1, 2, 4], 0.0), wave([3, 4], 0.0), targets);
}

mod cuda {
    use super::*;
    use crate::ops::cross_entropy::cuda::weighted;
    use crate::ops::support::gpu::{self, Gpu, floats, ints};
    use crate::testing::check_on;

    type Inner = crate::Cuda;

    /// A case of the three-way test, and its oracle.
    fn case(
        [batch, seq_len, width, vocab]: [usize; 4],
        size: f32,
    ) -> (Case<LinearCrossEntropy, 3>, impl Fn(&[Tensor64]) -> Tensor64) {
        let ids = ids(batch * seq_len, vocab);
        let shapes: [&[usize]; 3] = [&[batch, seq_len, width], &[vocab, width], &[batch, seq_len]];
        let case = Case::new(LinearCrossEntropy, &shapes)
            .uniform(0, -size..size)
            .uniform(2, 0.0..0.1)
            .ints(&[batch, seq_len], ids.clone())
            .no_grad(2)
            .parameters(&[1]);
        let oracle = move |inputs: &[Tensor64]| {
            let [x, weight, weights] = inputs else { panic!() };
            let row = |at: usize| {
                let (b, t) = (at / seq_len, at % seq_len);
                weights.data[at] * token_loss(x, weight, b, t, ids[at] as usize)
            };
            Tensor64::new(&[1], vec![(0..batch * seq_len).map(row).sum()])
        };
        (case, oracle)
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn agrees_with_the_oracle_and_its_gradients() {
        for (sizes, size) in [
            ([1, 1, 1, 1], 1.7),
            ([1, 1, 3, 5], 1.7),
            ([2, 7, 17, 33], 1.7),
            ([1, 37, 8, 65], 9.0), // Logits reach ±80 and beyond.
            ([1, 9, 16, 1000], 1.7),
        ] {
            let (case, oracle) = case(sizes, size);
            check_on::<Inner, _, 3>(case, oracle);
        }
    }

    /// Logits of up to 2 have an error of 2·2⁻⁹, and so probabilities a relative error of 4·2⁻⁹; rounding
    /// the logits' gradients adds 2·2⁻⁹. A gradient is a sum of products with these, whose magnitudes add up
    /// to at most twice the largest weight of a row times the largest factor, each √3 times its root mean
    /// square: 6 · 2 · 3 times 2⁻⁹ of the gradient's root mean square. A weight in f32 is also rounded, which
    /// changes logits by as much again and the gradients by 2·2⁻⁹: 12 · 2 · 3.
    #[test]
    #[ignore = "needs a GPU"]
    fn agrees_with_the_oracle_in_bf16() {
        for sizes in [[2, 7, 16, 33], [1, 50, 24, 65], [3, 50, 8, 40]] {
            for (rounded, times) in [(&[0][..], 72.0), (&[0, 1], 36.0)] {
                let (case, oracle) = case(sizes, 0.5);
                let case = case.uniform(1, -0.5..0.5).bf16(rounded).inside(times, times);
                check_on::<Inner, _, 3>(case, oracle);
            }
        }
    }

    fn near(got: &[f32], want: &[f32], what: &str) {
        let scale = want.iter().fold(1e-3f32, |a, x| a.max(x.abs()));
        assert_eq!(got.len(), want.len(), "{what}");
        for (got, want) in got.iter().zip(want) {
            assert!((got - want).abs() <= 1e-5 * scale, "{what}: {got} for {want}");
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn several_chunks_give_what_one_gives() {
        let inner = |x: Tensor<Gpu, 3>| primitive(x.inner());
        let x = inner(gpu::wave([2, 65, 12], 1.0));
        let w = primitive(gpu::wave([33, 12], 0.0).inner());
        let weights = primitive((gpu::wave([2, 65], 0.0) * 0.01).inner());
        let targets = ints(ids(130, 33), [2, 65]).inner().into_primitive();
        let run = |chunk| {
            let all = weighted(&x, &w, &targets, &weights, [true; 2], chunk).expect("a kernel");
            let flat = |x| tensor::<Inner, 1>(x).into_data().iter::<f32>().collect::<Vec<_>>();
            let flat2 = |x| tensor::<Inner, 2>(x).into_data().iter::<f32>().collect::<Vec<_>>();
            let flat3 = |x| tensor::<Inner, 3>(x).into_data().iter::<f32>().collect::<Vec<_>>();
            let [dx, dw] = &all.saved[..] else { panic!() };
            [flat(all.output.clone()), flat3(dx.clone()), flat2(dw.clone())]
        };
        for (got, want) in run(32).iter().zip(&run(130)) {
            near(got, want, "chunks of 32 rows");
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn rows_that_shared_memory_does_not_hold_agree_with_the_cpu() {
        let (shape, vocab) = ([1, 3], 30_001);
        let loss = |x| {
            let w = wave([vocab, 4], 0.0);
            linear_cross_entropy(x, w, targets_of(shape, vocab), wave(shape, 1.0))
        };
        let want = output_and_gradient(wave([1, 3, 4], 0.5), &loss);
        let got = output_and_gradient(gpu::wave([1, 3, 4], 0.5), &|x| {
            let targets = ints(ids(3, vocab), shape);
            linear_cross_entropy(x, gpu::wave([vocab, 4], 0.0), targets, gpu::wave(shape, 1.0))
        });
        near(&got[0], &want[0], "loss");
        near(&got[1], &want[1], "gradient of x");
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn token_losses_agree_with_the_cpu() {
        for (batch, seq_len, width, vocab) in [(1, 1, 3, 5), (2, 601, 17, 33)] {
            let want = token_cross_entropy(
                wave([batch, seq_len, width], 0.0),
                wave([vocab, width], 1.0),
                targets_of([batch, seq_len], vocab),
            );
            let got = token_cross_entropy(
                gpu::wave([batch, seq_len, width], 0.0),
                gpu::wave([vocab, width], 1.0),
                ints(ids(batch * seq_len, vocab), [batch, seq_len]),
            );
            assert_eq!(got.dims(), [batch, seq_len]);
            near(&values(got), &values(want), "losses");
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn positions_of_weight_zero_have_no_part() {
        let (x, w) = (gpu::wave([2, 5, 7], 0.0), gpu::wave([11, 7], 1.0));
        let weights = vec![0.5, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
        let mask = floats(weights, [2, 5]);
        let targets = ints(ids(10, 11), [2, 5]);
        let [loss, dx] = output_and_gradient(x.clone(), &|x| {
            linear_cross_entropy(x, w.clone(), targets.clone(), mask.clone())
        });
        let want = token_cross_entropy(x, w, targets) * mask;
        let want: f32 = values(want).iter().sum();
        assert!((loss[0] - want).abs() < 1e-5, "{} for {want}", loss[0]);
        for (row, dx) in dx.chunks(7).enumerate() {
            assert_eq!(dx.iter().any(|&x| x != 0.0), row == 0 || row == 3, "row {row}");
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn large_logits_stay_finite() {
        let w = floats(vec![40.0, -40.0, 39.0], [3, 1]);
        let [loss, dx] = output_and_gradient(floats(vec![80.0, -80.0], [1, 2, 1]), &|x| {
            let ones = floats(vec![1.0, 1.0], [1, 2]);
            linear_cross_entropy(x, w.clone(), ints(vec![1, 1], [1, 2]), ones)
        });
        assert_eq!(loss, [6400.0]);
        assert!(dx.iter().all(|x| x.is_finite()), "{dx:?}");
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn a_target_outside_the_vocabulary_and_a_nan_show() {
        let targets = ints(vec![0, 3, -1, 2], [1, 4]);
        let losses =
            token_cross_entropy(gpu::wave([1, 4, 4], 0.0), gpu::wave([3, 4], 0.0), targets);
        let nan: Vec<bool> = values(losses).iter().map(|x| x.is_nan()).collect();
        assert_eq!(nan, [false, true, true, false]);
        assert_nan_shows(gpu::wave([2, 3, 7], 0.0), |x: Tensor<Gpu, 3>| {
            let targets = ints(ids(6, 11), [2, 3]);
            linear_cross_entropy(x, gpu::wave([11, 7], 0.0), targets, gpu::wave([2, 3], 2.0))
        });
    }
}
