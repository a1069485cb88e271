//! The output projection fused with the cross-entropy loss, so that the logits of a whole batch
//! never exist.

use burn::tensor::activation::log_softmax;
use burn::tensor::backend::Backend;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Int, Tensor};
use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::embedding::token_ids;
use crate::backend::{Forward, Op, OpBackend, int_tensor, primitive, tensor};
use crate::cpu::gemm::{Mat, matmul_into};
use crate::cpu::{buffer, contiguous, dims, from_vec, math, slice};

/// Σ weights · (ln Σ_v exp(z_v) − z_target) with z = x Wᵀ, in nats.
///
/// - `x`: `[batch, seq_len, width]`
/// - `weight`: `[vocab, width]`
/// - `targets`: `[batch, seq_len]`, each in `0..vocab`
/// - `weights`: `[batch, seq_len]`, for example 1 / (number of tokens) for a mean, 0 to leave a
///   position out; no gradient flows to it
///
/// Returns `[1]`. Where a gradient is wanted, it is computed together with the loss, from one
/// chunk of logits at a time, and the backward pass only scales it. Positions of weight 0 are not
/// computed at all on the CPU; their targets must be in the vocabulary all the same.
///
/// # Panics
/// When the sizes do not fit; on the CPU, when a target is outside the vocabulary.
pub fn linear_cross_entropy<B: OpBackend>(
    x: Tensor<B, 3>,
    weight: Tensor<B, 2>,
    targets: Tensor<B, 2, Int>,
    weights: Tensor<B, 2>,
) -> Tensor<B, 1> {
    let inputs = [primitive(x), primitive(weight), primitive(constant(weights))];
    tensor(B::run(&LinearCrossEntropy, inputs, vec![targets.into_primitive()]))
}

/// ln Σ_v exp(z_v) − z_target with z = x Wᵀ for every token, in nats, without gradients.
///
/// - `x`: `[batch, seq_len, width]`
/// - `weight`: `[vocab, width]`
/// - `targets`: `[batch, seq_len]`, each in `0..vocab`
///
/// Returns `[batch, seq_len]`.
///
/// # Panics
/// When the sizes do not fit; on the CPU, when a target is outside the vocabulary.
pub fn token_cross_entropy<B: OpBackend>(
    x: Tensor<B, 3>,
    weight: Tensor<B, 2>,
    targets: Tensor<B, 2, Int>,
) -> Tensor<B, 2> {
    let inputs = [primitive(constant(x)), primitive(constant(weight))];
    tensor(B::run(&TokenCrossEntropy, inputs, vec![targets.into_primitive()]))
}

/// `tensor` outside the graph. Detaching alone leaves a parameter wanting its gradient.
fn constant<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Tensor<B, D> {
    tensor.detach().set_require_grad(false)
}

/// The operation of [`linear_cross_entropy`]: inputs x, weight, weights; integer input targets.
#[derive(Clone, Debug)]
pub struct LinearCrossEntropy;

/// The operation of [`token_cross_entropy`]: inputs x, weight; integer input targets.
#[derive(Clone, Debug)]
pub struct TokenCrossEntropy;

/// The loss of every token, `[batch, seq_len]`, by way of all logits.
fn token_losses<B: Backend>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    targets: &IntTensor<B>,
) -> Tensor<B, 2> {
    let (x, weight) = (tensor::<B, 3>(x), tensor::<B, 2>(weight));
    let [batch, seq_len, width] = x.dims();
    let rows = batch * seq_len;
    let targets = int_tensor::<B, 2>(targets.clone()).reshape([rows, 1]);
    let logits = x.reshape([rows, width]).matmul(weight.transpose());
    let picked = log_softmax(logits, 1).gather(1, targets);
    picked.neg().reshape([batch, seq_len])
}

impl Op<3> for LinearCrossEntropy {
    fn reference<B: Backend>(
        &self,
        [x, weight, weights]: [FloatTensor<B>; 3],
        ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        let losses = token_losses::<B>(x, weight, &ints[0]);
        primitive((losses * tensor::<B, 2>(weights)).sum())
    }

    fn cpu_forward(
        &self,
        [x, weight, weights]: &[FlexTensor; 3],
        ints: &[FlexTensor],
        needs: [bool; 3],
    ) -> Option<Forward<FlexTensor>> {
        let (x, weight, weights) = (contiguous(x), contiguous(weight), contiguous(weights));
        let targets = targets(&x, &weight, &ints[0]);
        let width = dims(&weight)[1];
        let row_weights = slice(&weights);
        assert_eq!(
            dims(&weights),
            dims(&ints[0]),
            "shapes of the cross-entropy's weights and targets"
        );
        // A NaN weight is not 0, so it counts and shows.
        let counted: Vec<usize> =
            (0..targets.len()).filter(|&row| row_weights[row] != 0.0).collect();
        let picked: Vec<f32>;
        let rows = if counted.len() == targets.len() {
            slice(&x)
        } else {
            picked =
                counted.iter().flat_map(|&row| row_of(slice(&x), row, width)).copied().collect();
            &picked
        };
        let pass = Pass::run(
            rows,
            slice(&weight),
            width,
            &counted.iter().map(|&row| targets[row]).collect::<Vec<_>>(),
            &counted.iter().map(|&row| row_weights[row]).collect::<Vec<_>>(),
            [needs[0], needs[1]],
        );
        let terms = pass.losses.iter().zip(&counted);
        let loss: f64 = terms.map(|(loss, &row)| f64::from(loss * row_weights[row])).sum();
        let dx = pass.dx.map(|dx| from_vec(spread(dx, &counted, targets.len(), width), &dims(&x)));
        let dw = pass.dw.map(|dw| from_vec(dw, &dims(&weight)));
        Some(Forward {
            output: from_vec(vec![loss as f32], &[1]),
            saved: dx.into_iter().chain(dw).collect(),
        })
    }

    fn cpu_backward(
        &self,
        saved: Vec<FlexTensor>,
        _ints: &[FlexTensor],
        grad: FlexTensor,
        needs: [bool; 3],
    ) -> [Option<FlexTensor>; 3] {
        let factor = slice(&contiguous(&grad))[0];
        let mut saved = saved.into_iter().map(|grad| scaled(grad, factor));
        let [x, weight, _] = needs;
        let mut next = |wanted: bool| wanted.then(|| saved.next().expect("a gradient per need"));
        [next(x), next(weight), None]
    }
}

impl Op<2> for TokenCrossEntropy {
    fn reference<B: Backend>(
        &self,
        [x, weight]: [FloatTensor<B>; 2],
        ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        primitive(token_losses::<B>(x, weight, &ints[0]))
    }

    fn cpu_forward(
        &self,
        [x, weight]: &[FlexTensor; 2],
        ints: &[FlexTensor],
        needs: [bool; 2],
    ) -> Option<Forward<FlexTensor>> {
        if needs != [false; 2] {
            return None;
        }
        let (x, weight) = (contiguous(x), contiguous(weight));
        let targets = targets(&x, &weight, &ints[0]);
        let width = dims(&weight)[1];
        let pass = Pass::run(slice(&x), slice(&weight), width, &targets, &[], [false; 2]);
        Some(Forward { output: from_vec(pass.losses, &dims(&ints[0])), saved: vec![] })
    }
}

/// The targets as indices, with every size checked.
fn targets(x: &FlexTensor, weight: &FlexTensor, targets: &FlexTensor) -> Vec<usize> {
    let (x, weight) = (dims(x), dims(weight));
    let (width, rows) = x.split_last().expect("x has dimensions");
    assert_eq!(*width, weight[1], "width of x {x:?} and weight {weight:?}");
    assert_eq!(rows, dims(targets), "rows of x {x:?} and shape of the targets");
    token_ids(targets, weight[0], "target")
}

fn row_of(matrix: &[f32], row: usize, width: usize) -> &[f32] {
    &matrix[row * width..][..width]
}

/// The rows of `dx` at their places among `rows`, zeros elsewhere.
fn spread(dx: Vec<f32>, places: &[usize], rows: usize, width: usize) -> Vec<f32> {
    if places.len() == rows {
        return dx;
    }
    let mut whole = buffer(rows * width);
    for (row, &place) in dx.chunks_exact(width).zip(places) {
        whole[place * width..][..width].copy_from_slice(row);
    }
    whole
}

/// `factor` · `grad`, in place.
fn scaled(mut grad: FlexTensor, factor: f32) -> FlexTensor {
    if factor != 1.0 {
        let scale = |part: &mut [f32]| part.iter_mut().for_each(|x| *x *= factor);
        grad.storage_mut::<f32>().par_chunks_mut(1 << 14).for_each(scale);
    }
    grad
}

/// Rows of logits that exist at a time: at most 32 MiB of them, so that they stay near the
/// processor at small vocabularies, and enough rows for the products' speed at large ones.
///
/// Depends on the vocabulary alone, so that sums over chunks have one order.
fn chunk_rows(vocab: usize) -> usize {
    ((1 << 23) / vocab).next_multiple_of(64).clamp(256, 1024)
}

/// What one pass over the rows gives.
struct Pass {
    /// The unweighted loss of each row.
    losses: Vec<f32>,
    /// Σ weights · d loss / dx, where wanted.
    dx: Option<Vec<f32>>,
    /// Σ weights · d loss / dW, where wanted.
    dw: Option<Vec<f32>>,
}

impl Pass {
    /// Losses of the rows of `x`, and the gradients wanted for x and W under `row_weights`, which
    /// may be empty when none is.
    fn run(
        x: &[f32],
        weight: &[f32],
        width: usize,
        targets: &[usize],
        row_weights: &[f32],
        [want_dx, want_dw]: [bool; 2],
    ) -> Self {
        let (rows, vocab) = (targets.len(), weight.len() / width);
        let w = Mat::new(weight, vocab, width, width);
        let chunk = chunk_rows(vocab).min(rows);
        let mut logits = buffer(chunk * vocab);
        let mut losses = buffer(rows);
        let mut dx = want_dx.then(|| buffer(rows * width));
        let mut dw = want_dw.then(|| buffer(vocab * width));
        for first in (0..rows).step_by(chunk.max(1)) {
            let rows = chunk.min(rows - first);
            let part = first..first + rows;
            let x = Mat::new(&x[first * width..], rows, width, width);
            let logits = &mut logits[..rows * vocab];
            matmul_into(logits, x, w.t(), 0.0);
            let row_weights = (want_dx || want_dw).then(|| &row_weights[part.clone()]);
            softmax_rows(logits, vocab, &targets[part.clone()], row_weights, &mut losses[part]);
            let d_logits = Mat::new(logits, rows, vocab, vocab);
            if let Some(dx) = &mut dx {
                matmul_into(&mut dx[first * width..][..rows * width], d_logits, w, 0.0);
            }
            if let Some(dw) = &mut dw {
                let beta = if first == 0 { 0.0 } else { 1.0 };
                matmul_into(dw, d_logits.t(), x, beta);
            }
        }
        Pass { losses, dx, dw }
    }
}

/// The loss of every row of logits. With weights, the logits become the gradients with respect to
/// them, weight · (softmax(z) − onehot(target)).
fn softmax_rows(
    logits: &mut [f32],
    vocab: usize,
    targets: &[usize],
    row_weights: Option<&[f32]>,
    losses: &mut [f32],
) {
    logits.par_chunks_mut(vocab).zip(losses.par_iter_mut().enumerate()).for_each(
        |(z, (row, loss))| {
            let target = targets[row];
            let shift = math::max(z);
            let picked = z[target] - shift;
            let sum = math::exp_shifted(z, shift);
            *loss = sum.ln() - picked;
            if let Some(weights) = row_weights {
                let factor = weights[row] / sum;
                z.iter_mut().for_each(|z| *z *= factor);
                z[target] -= weights[row];
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::support::{Ad, assert_nan_shows, assert_threads_agree, assert_views_agree};
    use crate::ops::support::{output_and_gradient, values, wave};
    use crate::testing::{Case, Oracle, check};

    fn ids(len: usize, vocab: usize) -> Vec<i32> {
        (0..len).map(|i| ((i * i * 7 + i / 3) % vocab) as i32).collect()
    }

    fn targets_of(shape: [usize; 2], vocab: usize) -> Tensor<Ad, 2, Int> {
        let data = burn::tensor::TensorData::new(ids(shape[0] * shape[1], vocab), shape);
        Tensor::from_data(data, &Default::default())
    }

    /// The loss of one token by its definition.
    fn token_loss(x: &Oracle, weight: &Oracle, b: usize, t: usize, target: usize) -> f64 {
        let (vocab, width) = (weight.shape[0], weight.shape[1]);
        let logit =
            |v: usize| (0..width).map(|i| x.at(&[b, t, i]) * weight.at(&[v, i])).sum::<f64>();
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
            let shapes: [&[usize]; 3] =
                [&[batch, seq_len, width], &[vocab, width], &[batch, seq_len]];
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
                Oracle::new(&[1], vec![(0..batch * seq_len).map(row).sum()])
            });
        }
    }

    #[test]
    fn several_chunks_agree_with_the_reference() {
        // 1300 rows at a vocabulary of 9 are two chunks.
        let (shape, vocab) = ([2, 650], 9);
        assert!(chunk_rows(vocab) < 1300);
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
                Oracle::new(shape, data.iter().map(|&x| x.into()).collect())
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
        let mask = Tensor::<Ad, 2>::from_floats(
            [[0.5, 0.0, 0.0, 2.0, 0.0], [0.0; 5]],
            &Default::default(),
        );
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
        assert_nan_shows([2, 3, 7], loss);
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
}
