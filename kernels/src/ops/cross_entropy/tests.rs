use burn::tensor::ElementConversion;

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

/// Without z-loss and softcap, with each, and with both.
const OPS: [LinearCrossEntropy; 4] = [
    PLAIN,
    LinearCrossEntropy { softcap: Some(30.0), z_loss: 0.0 },
    LinearCrossEntropy { softcap: None, z_loss: 0.1 },
    BOTH,
];
const PLAIN: LinearCrossEntropy = LinearCrossEntropy { softcap: None, z_loss: 0.0 };
const BOTH: LinearCrossEntropy = LinearCrossEntropy { softcap: Some(30.0), z_loss: 0.2 };

fn total<B: OpBackend>(
    op: LinearCrossEntropy,
    x: Tensor<B, 3>,
    weight: Tensor<B, 2>,
    targets: Tensor<B, 2, Int>,
    weights: Tensor<B, 2>,
) -> Tensor<B, 1> {
    linear_cross_entropy(x, weight, targets, weights, op).total
}

/// The cross-entropy and the z-loss of one token by their definitions.
fn token_terms(
    op: LinearCrossEntropy,
    x: &Tensor64,
    weight: &Tensor64,
    [b, t]: [usize; 2],
    target: usize,
) -> [f64; 2] {
    let (vocab, width) = (weight.shape[0], weight.shape[1]);
    let logit = |v: usize| {
        let z: f64 = (0..width).map(|i| x.at(&[b, t, i]) * weight.at(&[v, i])).sum();
        op.softcap.map_or(z, |cap| f64::from(cap) * (z / f64::from(cap)).tanh())
    };
    let logits: Vec<f64> = (0..vocab).map(logit).collect();
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits.iter().map(|z| (z - largest).exp()).sum();
    let log_sum = largest + sum.ln();
    [log_sum - logits[target], f64::from(op.z_loss) * log_sum * log_sum]
}

/// A case of the three-way test, and its oracle.
fn case(
    op: LinearCrossEntropy,
    [batch, seq_len, width, vocab]: [usize; 4],
    size: f32,
) -> (Case<LinearCrossEntropy, 3>, impl Fn(&[Tensor64]) -> Tensor64) {
    let ids = ids(batch * seq_len, vocab);
    let shapes: [&[usize]; 3] = [&[batch, seq_len, width], &[vocab, width], &[batch, seq_len]];
    let case = Case::new(op, &shapes)
        .uniform(0, -size..size)
        .uniform(2, 0.0..0.1)
        .ints(&[batch, seq_len], ids.clone())
        .no_grad(2)
        .parameters(&[1])
        .equal_upstream();
    let oracle = move |inputs: &[Tensor64]| {
        let [x, weight, weights] = inputs else { panic!() };
        let mut sums = vec![0.0; if op.z_loss == 0.0 { 1 } else { 2 }];
        for at in 0..batch * seq_len {
            let place = [at / seq_len, at % seq_len];
            let terms = token_terms(op, x, weight, place, ids[at] as usize);
            for (sum, term) in sums.iter_mut().zip(terms) {
                *sum += weights.data[at] * term;
            }
        }
        Tensor64::new(&[sums.len()], sums)
    };
    (case, oracle)
}

#[test]
fn agrees_with_the_oracle_and_its_gradients() {
    for op in OPS {
        for (sizes, size) in [
            ([1, 1, 1, 1], 1.7),
            ([1, 1, 3, 5], 1.7),
            ([2, 7, 17, 33], 1.7),
            ([1, 37, 8, 65], 9.0),  // Logits reach ±80 and beyond.
            ([1, 37, 8, 65], 40.0), // Logits reach ±200 and beyond.
        ] {
            let (case, oracle) = case(op, sizes, size);
            check(case, oracle);
        }
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
        let x = wave([2, 650, 12], 1.0);
        total(BOTH, x, w, targets.clone(), weights.clone())
    };
    let weighted = |w: Tensor<Ad, 2>, weights: Tensor<Ad, 2>| {
        let inputs = [primitive(wave([2, 650, 12], 1.0)), primitive(w), primitive(weights)];
        let terms = BOTH.reference::<Ad>(inputs, &[targets.clone().into_primitive()]);
        tensor::<Ad, 1>(terms).sum()
    };
    let plain = |w: Tensor<Ad, 2>| weighted(w, weights.clone());
    let (got, want) = (
        output_and_gradient(wave([9, 12], 0.0), &fused),
        output_and_gradient(wave([9, 12], 0.0), &plain),
    );
    // The terms have both signs; rounding grows with the sum of their magnitudes.
    let magnitude: f32 = weighted(wave([9, 12], 0.0), weights.clone().abs()).into_scalar();
    for (got, want) in got.iter().flatten().zip(want.iter().flatten()) {
        assert!((got - want).abs() < f32::EPSILON * magnitude, "{got} for {want}");
    }
}

#[test]
fn token_losses_agree_with_the_definition() {
    for (op, [batch, seq_len, width, vocab]) in
        [(PLAIN, [1, 1, 3, 5]), (PLAIN, [2, 601, 17, 33]), (OPS[1], [2, 601, 17, 33])]
    {
        let (x, weight) = (wave([batch, seq_len, width], 0.0), wave([vocab, width], 1.0));
        let oracle = |data: Vec<f32>, shape: &[usize]| {
            Tensor64::new(shape, data.iter().map(|&x| x.into()).collect())
        };
        let (xs, ws) = (
            oracle(values(x.clone()), &[batch, seq_len, width]),
            oracle(values(weight.clone()), &[vocab, width]),
        );
        let got = token_cross_entropy(x, weight, targets_of([batch, seq_len], vocab), op.softcap);
        assert_eq!(got.dims(), [batch, seq_len]);
        for (at, (got, target)) in
            values(got).into_iter().zip(ids(batch * seq_len, vocab)).enumerate()
        {
            let place = [at / seq_len, at % seq_len];
            let [want, _] = token_terms(op, &xs, &ws, place, target as usize);
            assert!((f64::from(got) - want).abs() < 2e-5, "{got} for {want} at {at}");
        }
    }
}

#[test]
fn the_total_is_the_sum_of_the_terms_and_z_loss_leaves_the_cross_entropy_as_it_is() {
    let loss = |op| {
        let inputs = (wave([2, 3, 4], 0.0), wave([5, 4], 1.0));
        let loss: Loss<Ad> = linear_cross_entropy(
            inputs.0,
            inputs.1,
            targets_of([2, 3], 5),
            wave([2, 3], 0.5).abs(),
            op,
        );
        (values(loss.total)[0], values(loss.terms))
    };
    for softcap in [None, Some(2.5)] {
        let (total, alone) = loss(LinearCrossEntropy { softcap, z_loss: 0.0 });
        assert_eq!(vec![total], alone);
        let (total, terms) = loss(LinearCrossEntropy { softcap, z_loss: 0.5 });
        assert_eq!((terms.len(), terms[0]), (2, alone[0]));
        assert!(terms[1] > 0.0);
        assert_eq!(total, terms[0] + terms[1]);
    }
}

#[test]
#[should_panic(expected = "only their sum has a gradient")]
fn a_gradient_of_one_term_is_refused() {
    let inputs = [primitive(wave([2, 3, 4], 0.0).require_grad()), primitive(wave([5, 4], 1.0))];
    let [x, w] = inputs;
    let targets = targets_of([2, 3], 5).into_primitive();
    let terms = Ad::run(&BOTH, [x, w, primitive(wave([2, 3], 0.5))], vec![targets]);
    tensor::<Ad, 1>(terms).slice(0..1).backward();
}

#[test]
fn token_losses_and_weights_leave_no_trace_in_the_graph() {
    let (x, w) = (wave([1, 3, 4], 0.0).require_grad(), wave([5, 4], 1.0).require_grad());
    let weights = wave([1, 3], 0.5).require_grad();
    let losses = token_cross_entropy(x.clone(), w.clone(), targets_of([1, 3], 5), None);
    let loss = total(PLAIN, x.clone(), w, targets_of([1, 3], 5), weights.clone());
    let alone =
        total(PLAIN, x.clone(), wave([5, 4], 1.0), targets_of([1, 3], 5), wave([1, 3], 0.5));
    let grads = (loss + losses.sum()).backward();
    assert!(weights.grad(&grads).is_none());
    let dx = values(Tensor::from_inner(x.grad(&grads).expect("a gradient of x")));
    let grads = alone.backward();
    assert_eq!(dx, values(Tensor::from_inner(x.grad(&grads).expect("a gradient of x"))));
}

/// The loss of positions 0 and 3 of the first sequence.
fn kept_loss<B: OpBackend>(
    op: LinearCrossEntropy,
    x: Tensor<B, 3>,
    weight: Tensor<B, 2>,
    targets: Tensor<B, 2, Int>,
    weights: Tensor<B, 2>,
) -> f32 {
    let kept = Tensor::<B, 1, Int>::from_ints([0, 3], &x.device());
    let x = x.slice(0..1).select(1, kept.clone());
    let targets = targets.slice(0..1).select(1, kept.clone());
    let weights = weights.slice(0..1).select(1, kept);
    total(op, x, weight, targets, weights).into_scalar().elem()
}

#[test]
fn positions_of_weight_zero_have_no_part() {
    let (x, w) = (wave([2, 5, 7], 0.0), wave([11, 7], 1.0));
    let mask =
        Tensor::<Ad, 2>::from_floats([[0.5, 0.0, 0.0, 2.0, 0.0], [0.0; 5]], &Default::default());
    let targets = targets_of([2, 5], 11);
    let none = Tensor::<Ad, 2>::zeros([2, 5], &Default::default());
    for op in [PLAIN, BOTH] {
        let loss = |x: Tensor<Ad, 3>, mask: &Tensor<Ad, 2>| {
            total(op, x, w.clone(), targets.clone(), mask.clone())
        };
        let [got, dx] = output_and_gradient(x.clone(), &|x| loss(x, &mask));
        let want = kept_loss(op, x.clone(), w.clone(), targets.clone(), mask.clone());
        assert!((got[0] - want).abs() < 1e-5, "{} for {want}", got[0]);
        for (row, dx) in dx.chunks(7).enumerate() {
            assert_eq!(dx.iter().any(|&x| x != 0.0), row == 0 || row == 3, "row {row}");
        }
        let [got, dx] = output_and_gradient(x.clone(), &|x| loss(x, &none));
        assert!(got == [0.0] && dx == [0.0; 70]);
    }
}

/// The loss and gradient under [`BOTH`] of two tokens whose logits are all at the softcap: 30, −30, 30 and
/// −30, 30, −30, of which the second is the target's.
fn assert_saturated(loss: f32, dx: &[f32]) {
    let (ln_2, z_loss) = (2f32.ln(), |log_sum: f32| BOTH.z_loss * log_sum * log_sum);
    let want = (60.0 + ln_2 + z_loss(30.0 + ln_2)) + z_loss(30.0);
    assert!((loss - want).abs() < 1e-4, "{loss} for {want}");
    assert!(dx.iter().all(|x| x.abs() < 1e-4), "{dx:?}");
}

#[test]
fn large_logits_stay_finite() {
    // Logits are ±80 · 40.
    let x = Tensor::<Ad, 3>::from_floats([[[80.0], [-80.0]]], &Default::default());
    let w = Tensor::<Ad, 2>::from_floats([[40.0], [-40.0], [39.0]], &Default::default());
    let targets = Tensor::<Ad, 2, Int>::from_ints([[1, 1]], &Default::default());
    let ones = Tensor::<Ad, 2>::ones([1, 2], &Default::default());
    let [loss, dx] = output_and_gradient(x.clone(), &|x| {
        total(PLAIN, x, w.clone(), targets.clone(), ones.clone())
    });
    assert_eq!(loss, [6400.0]);
    assert!(dx.iter().all(|x| x.is_finite()), "{dx:?}");
    let [loss, dx] =
        output_and_gradient(x, &|x| total(BOTH, x, w.clone(), targets.clone(), ones.clone()));
    assert_saturated(loss[0], &dx);
}

#[test]
fn a_view_gives_what_its_copy_gives_and_a_nan_shows() {
    let loss = |x: Tensor<Ad, 3>| {
        let [batch, seq_len, _] = x.dims();
        let targets = targets_of([batch, seq_len], 11);
        total(BOTH, x, wave([7, 11], 1.0).transpose(), targets, wave([batch, seq_len], 2.0))
    };
    assert_views_agree(wave([5, 3, 7], 0.0).swap_dims(0, 1), loss);
    assert_nan_shows(wave([2, 3, 7], 0.0), loss);
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    assert_threads_agree(|| {
        let loss = |w| {
            let x = wave([3, 500, 48], 0.0);
            total(BOTH, x, w, targets_of([3, 500], 301), wave([3, 500], 1.0))
        };
        output_and_gradient(wave([301, 48], 0.0), &loss).concat()
    });
}

#[test]
#[should_panic(expected = "target -1 at place 1 of the batch is outside the vocabulary, 0..3")]
fn a_target_outside_the_vocabulary_is_named() {
    let targets = Tensor::<Ad, 2, Int>::from_ints([[0, -1]], &Default::default());
    token_cross_entropy(wave([1, 2, 4], 0.0), wave([3, 4], 0.0), targets, None);
}

mod cuda {
    use super::*;
    use crate::ops::cross_entropy::cuda::weighted;
    use crate::ops::support::gpu::{self, Gpu, floats, ints};
    use crate::testing::check_on;

    type Inner = crate::Cuda;

    #[test]
    #[ignore = "needs a GPU"]
    fn agrees_with_the_oracle_and_its_gradients() {
        for op in OPS {
            for (sizes, size) in [
                ([1, 1, 1, 1], 1.7),
                ([1, 1, 3, 5], 1.7),
                ([2, 7, 17, 33], 1.7),
                ([1, 37, 8, 65], 9.0),  // Logits reach ±80 and beyond.
                ([1, 37, 8, 65], 40.0), // Logits reach ±200 and beyond.
                ([1, 9, 16, 1000], 1.7),
            ] {
                let (case, oracle) = case(op, sizes, size);
                check_on::<Inner, _, 3>(case, oracle);
            }
        }
    }

    /// Logits of up to 2 have an error of 2·2⁻⁹, and so probabilities a relative error of 4·2⁻⁹; rounding
    /// the logits' gradients adds 2·2⁻⁹. A gradient is a sum of products with these, whose magnitudes add up
    /// to at most twice the largest weight of a row times the largest factor, each √3 times its root mean
    /// square: 6 · 2 · 3 times 2⁻⁹ of the gradient's root mean square. A weight in f32 is also rounded, which
    /// changes logits by as much again and the gradients by 2·2⁻⁹: 12 · 2 · 3. Softcap and z-loss are computed
    /// in f32: a softcap lessens a logit's error.
    #[test]
    #[ignore = "needs a GPU"]
    fn agrees_with_the_oracle_in_bf16() {
        for op in [PLAIN, LinearCrossEntropy { softcap: Some(1.5), z_loss: 0.1 }] {
            for sizes in [[2, 7, 16, 33], [1, 50, 24, 65], [3, 50, 8, 40]] {
                for (rounded, times) in [(&[0][..], 72.0), (&[0, 1], 36.0)] {
                    let (case, oracle) = case(op, sizes, 0.5);
                    let case = case.uniform(1, -0.5..0.5).bf16(rounded).inside(times, times);
                    check_on::<Inner, _, 3>(case, oracle);
                }
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
            let all =
                weighted(BOTH, &x, &w, &targets, &weights, [true; 2], chunk).expect("a kernel");
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
        for op in [PLAIN, BOTH] {
            let loss = |x| {
                let w = wave([vocab, 4], 0.0);
                total(op, x, w, targets_of(shape, vocab), wave(shape, 1.0))
            };
            let want = output_and_gradient(wave([1, 3, 4], 0.5), &loss);
            let got = output_and_gradient(gpu::wave([1, 3, 4], 0.5), &|x| {
                let targets = ints(ids(3, vocab), shape);
                total(op, x, gpu::wave([vocab, 4], 0.0), targets, gpu::wave(shape, 1.0))
            });
            near(&got[0], &want[0], "loss");
            near(&got[1], &want[1], "gradient of x");
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn token_losses_agree_with_the_cpu() {
        for (softcap, [batch, seq_len, width, vocab]) in
            [(None, [1, 1, 3, 5]), (None, [2, 601, 17, 33]), (Some(2.5), [2, 601, 17, 33])]
        {
            let want = token_cross_entropy(
                wave([batch, seq_len, width], 0.0),
                wave([vocab, width], 1.0),
                targets_of([batch, seq_len], vocab),
                softcap,
            );
            let got = token_cross_entropy(
                gpu::wave([batch, seq_len, width], 0.0),
                gpu::wave([vocab, width], 1.0),
                ints(ids(batch * seq_len, vocab), [batch, seq_len]),
                softcap,
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
        for op in [PLAIN, BOTH] {
            let [loss, dx] = output_and_gradient(x.clone(), &|x| {
                total(op, x, w.clone(), targets.clone(), mask.clone())
            });
            let want = kept_loss(op, x.clone(), w.clone(), targets.clone(), mask.clone());
            assert!((loss[0] - want).abs() < 1e-5, "{} for {want}", loss[0]);
            for (row, dx) in dx.chunks(7).enumerate() {
                assert_eq!(dx.iter().any(|&x| x != 0.0), row == 0 || row == 3, "row {row}");
            }
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn large_logits_stay_finite() {
        let w = floats(vec![40.0, -40.0, 39.0], [3, 1]);
        let run = |op| {
            output_and_gradient(floats(vec![80.0, -80.0], [1, 2, 1]), &|x| {
                let ones = floats(vec![1.0, 1.0], [1, 2]);
                total(op, x, w.clone(), ints(vec![1, 1], [1, 2]), ones)
            })
        };
        let [loss, dx] = run(PLAIN);
        assert_eq!(loss, [6400.0]);
        assert!(dx.iter().all(|x| x.is_finite()), "{dx:?}");
        let [loss, dx] = run(BOTH);
        assert_saturated(loss[0], &dx);
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn a_target_outside_the_vocabulary_and_a_nan_show() {
        let targets = ints(vec![0, 3, -1, 2], [1, 4]);
        let losses =
            token_cross_entropy(gpu::wave([1, 4, 4], 0.0), gpu::wave([3, 4], 0.0), targets, None);
        let nan: Vec<bool> = values(losses).iter().map(|x| x.is_nan()).collect();
        assert_eq!(nan, [false, true, true, false]);
        assert_nan_shows(gpu::wave([2, 3, 7], 0.0), |x: Tensor<Gpu, 3>| {
            let targets = ints(ids(6, 11), [2, 3]);
            total(BOTH, x, gpu::wave([11, 7], 0.0), targets, gpu::wave([2, 3], 2.0))
        });
    }
}
