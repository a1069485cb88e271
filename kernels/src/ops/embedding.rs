//! The embedding table: rows of a matrix by token id.
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Int, Tensor};
use burn_flex::FlexTensor;
use rayon::prelude::*;

use crate::backend::{Forward, Op, OpBackend, int_tensor, primitive, tensor};
use crate::cpu::{buffer, contiguous, dims, from_vec, int_vec, math, rows_per_task, slice};
use crate::cuda::CudaTensor;
use crate::ops::cuda::embedding as cuda;

/// y_bt = row tokens_bt of `weight`.
///
/// - `weight`: `[vocab, width]`
/// - `tokens`: `[batch, seq_len]`, each in `0..vocab`
///
/// Returns `[batch, seq_len, width]`. The gradient of `weight` is dense, and the same bits at every
/// run; on CUDA it is f32 whatever the weight's type. There the row of a token id outside the
/// vocabulary is NaN.
///
/// # Panics
/// On the CPU, when a token id is outside the vocabulary.
pub fn embedding<B: OpBackend>(weight: Tensor<B, 2>, tokens: Tensor<B, 2, Int>) -> Tensor<B, 3> {
    tensor(B::run(&Embedding, [primitive(weight)], vec![tokens.into_primitive()]))
}

/// The operation: input weight; integer input tokens.
#[derive(Clone, Debug)]
pub struct Embedding;

impl Op<1> for Embedding {
    fn reference<B: OpBackend>(
        &self,
        [weight]: [FloatTensor<B>; 1],
        ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        let weight = tensor::<B, 2>(weight);
        let tokens = int_tensor::<B, 2>(ints[0].clone());
        let ([batch, seq_len], [_, width]) = (tokens.dims(), weight.dims());
        let y = weight.select(0, tokens.reshape([batch * seq_len]));
        primitive(y.reshape([batch, seq_len, width]))
    }

    fn cpu_forward(
        &self,
        [weight]: &[FlexTensor; 1],
        ints: &[FlexTensor],
        _needs: [bool; 1],
    ) -> Option<Forward<FlexTensor>> {
        let weight = contiguous(weight);
        let [vocab, width] = dims(&weight)[..] else {
            panic!("the embedding's weight is {:?}, not a matrix", dims(&weight))
        };
        let (table, tokens) = (slice(&weight), token_ids(&ints[0], vocab, "token id"));
        let mut y = buffer(tokens.len() * width);
        let rows = rows_per_task(width, TASK);
        y.par_chunks_mut(rows * width).zip(tokens.par_chunks(rows)).for_each(|(y, tokens)| {
            for (y, &token) in y.chunks_exact_mut(width).zip(tokens) {
                y.copy_from_slice(&table[token * width..][..width]);
            }
        });
        let shape = [&dims(&ints[0])[..], &[width]].concat();
        Some(Forward {
            output: from_vec(y, &shape),
            saved: vec![weight], // For its shape; it is alive anyway.
        })
    }

    /// dweight_v = Σ dy over the positions of token v, in order.
    fn cpu_backward(
        &self,
        saved: Vec<FlexTensor>,
        ints: &[FlexTensor],
        grad: FlexTensor,
        _needs: [bool; 1],
    ) -> [Option<FlexTensor>; 1] {
        let [vocab, width] = dims(&saved[0])[..] else {
            unreachable!("checked by the forward pass")
        };
        let grad = contiguous(&grad);
        let (dy, tokens) = (slice(&grad), token_ids(&ints[0], vocab, "token id"));
        let (places, ends) = places_by_token(&tokens, vocab);
        let mut dw = buffer(vocab * width);
        let rows = rows_per_task(width, TASK);
        dw.par_chunks_mut(rows * width).enumerate().for_each(|(task, dw)| {
            for (i, dw) in dw.chunks_exact_mut(width).enumerate() {
                let token = task * rows + i;
                let first = if token == 0 { 0 } else { ends[token - 1] };
                for &place in &places[first..ends[token]] {
                    math::add_to(dw, &dy[place * width..][..width]);
                }
            }
        });
        [Some(from_vec(dw, &[vocab, width]))]
    }

    fn cuda_forward(
        &self,
        [weight]: &[CudaTensor; 1],
        ints: &[CudaTensor],
        _needs: [bool; 1],
    ) -> Option<Forward<CudaTensor>> {
        let output = cuda::gather(weight, &ints[0])?;
        Some(Forward { output, saved: vec![weight.clone()] }) // For its shape.
    }

    fn cuda_backward(
        &self,
        saved: Vec<CudaTensor>,
        ints: &[CudaTensor],
        grad: CudaTensor,
        _needs: [bool; 1],
    ) -> [Option<CudaTensor>; 1] {
        [Some(cuda::backward(saved[0].meta.shape()[0], &ints[0], &grad))]
    }
}

/// Elements of a parallel task: small, since some tokens are far more frequent than others.
const TASK: usize = 1 << 12;

/// The elements of an integer tensor as indices into the vocabulary; `what` names them in errors.
///
/// # Panics
/// When one is outside `0..vocab`.
pub(super) fn token_ids(tokens: &FlexTensor, vocab: usize, what: &str) -> Vec<usize> {
    let index = |(place, token): (usize, i32)| {
        let index = usize::try_from(token).ok().filter(|&index| index < vocab);
        index.unwrap_or_else(|| {
            panic!(
                "{what} {token} at place {place} of the batch is outside the vocabulary, 0..{vocab}"
            )
        })
    };
    int_vec(tokens).into_iter().enumerate().map(index).collect()
}

/// The places sorted by token, in order within one, and the end of each token's stretch.
fn places_by_token(tokens: &[usize], vocab: usize) -> (Vec<usize>, Vec<usize>) {
    let mut ends = vec![0; vocab];
    for &token in tokens {
        ends[token] += 1;
    }
    let mut next = 0;
    for end in &mut ends {
        // For now the start of the stretch; placing the tokens moves it to the end.
        next += std::mem::replace(end, next);
    }
    let mut places = vec![0; tokens.len()];
    for (place, &token) in tokens.iter().enumerate() {
        places[ends[token]] = place;
        ends[token] += 1;
    }
    (places, ends)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::support::{Ad, assert_nan_shows, assert_threads_agree, assert_views_agree};
    use crate::ops::support::{output_and_gradient, wave};
    use crate::testing::{Case, Oracle, check};

    /// Token ids with repeats, and some that never occur.
    fn ids(len: usize, vocab: usize) -> Vec<i32> {
        (0..len).map(|i| ((i * i * 7 + i / 3) % vocab) as i32).collect()
    }

    fn tokens<const D: usize>(shape: [usize; D], vocab: usize) -> Tensor<Ad, D, Int> {
        let data = burn::tensor::TensorData::new(ids(shape.iter().product(), vocab), shape);
        Tensor::from_data(data, &Default::default())
    }

    #[test]
    fn agrees_with_the_oracle_and_its_gradients() {
        for (batch, seq_len, vocab, width) in [(1, 1, 1, 1), (2, 7, 5, 9), (3, 101, 257, 33)] {
            let ids = ids(batch * seq_len, vocab);
            let case =
                Case::new(Embedding, &[&[vocab, width]]).ints(&[batch, seq_len], ids.clone());
            check(case, |inputs| {
                Oracle::from_fn(&[batch, seq_len, width], |at| {
                    inputs[0].at(&[ids[at[0] * seq_len + at[1]] as usize, at[2]])
                })
            });
        }
    }

    #[test]
    fn a_view_gives_what_its_copy_gives() {
        let look_up = |weight| embedding(weight, tokens([7, 3], 11).swap_dims(0, 1));
        assert_views_agree(wave([5, 11], 0.0).swap_dims(0, 1), look_up);
    }

    #[test]
    fn a_nan_shows() {
        // Every row of the weight is used.
        let data: Vec<i32> = (0..6).collect();
        let all = Tensor::<Ad, 1, Int>::from_ints(&data[..], &Default::default()).reshape([2, 3]);
        let weight_sum = |w: Tensor<Ad, 2>| embedding(w.clone(), all.clone()) * w.sum().unsqueeze();
        assert_nan_shows([6, 3], weight_sum);
    }

    #[test]
    fn results_do_not_depend_on_the_number_of_threads() {
        assert_threads_agree(|| {
            let look_up = |weight| embedding(weight, tokens([4, 500], 97));
            output_and_gradient(wave([97, 70], 0.0), &look_up).concat()
        });
    }

    #[test]
    #[should_panic(expected = "token id 9 at place 1 of the batch is outside the vocabulary, 0..9")]
    fn a_token_outside_the_vocabulary_is_named() {
        let tokens = Tensor::<Ad, 2, Int>::from_ints([[0, 9]], &Default::default());
        embedding(wave([9, 2], 0.0), tokens);
    }

    mod cuda {
        use super::*;
        use crate::ops::support::gpu::{Gpu, floats, ints, values, wave};
        use crate::testing::check_on;

        #[test]
        #[ignore = "needs a GPU"]
        fn agrees_with_the_oracle_and_its_gradients() {
            for (batch, seq_len, vocab, width) in [
                (1, 1, 1, 1),
                (2, 7, 5, 9),
                (3, 101, 257, 33),
                (2, 1500, 1100, 64),
                (1, 1030, 3, 40),
            ] {
                let ids = ids(batch * seq_len, vocab);
                let case = || {
                    Case::new(Embedding, &[&[vocab, width]]).ints(&[batch, seq_len], ids.clone())
                };
                let oracle = |inputs: &[Oracle]| {
                    Oracle::from_fn(&[batch, seq_len, width], |at| {
                        inputs[0].at(&[ids[at[0] * seq_len + at[1]] as usize, at[2]])
                    })
                };
                check_on::<crate::Cuda, _, 1>(case(), oracle);
                check_on::<crate::Cuda, _, 1>(case().bf16(&[0]).parameters(&[0]), oracle);
            }
        }

        /// The gradient under an upstream gradient of small whole numbers, and what it has to be: all
        /// sums are exact.
        fn whole_gradient(tokens: &[i32], vocab: usize, width: usize) -> [Vec<f32>; 2] {
            let whole = |i: usize| ((i * 7919 + i / width) % 9) as f32 - 4.0;
            let upstream: Vec<f32> = (0..tokens.len() * width).map(whole).collect();
            let weight = wave([vocab, width], 0.0).require_grad();
            let y = embedding(weight.clone(), ints(tokens.to_vec(), [1, tokens.len()]));
            let grads = (y * floats(upstream.clone(), [1, tokens.len(), width])).sum().backward();
            let got = values(Tensor::<Gpu, 2>::from_inner(weight.grad(&grads).unwrap()));
            let mut want = vec![0.0; vocab * width];
            for (&token, row) in tokens.iter().zip(upstream.chunks_exact(width)) {
                math::add_to(&mut want[token as usize * width..][..width], row);
            }
            [got, want]
        }

        #[test]
        #[ignore = "needs a GPU"]
        fn gradients_of_a_large_batch_are_exact() {
            let (len, vocab, width) = (65_536, 50_304, 96);
            let spread = |i: usize| (i * 48_271 % vocab) as i32;
            // Tokens all over the vocabulary; one token most of the time; one token only; two in turns.
            let batches: [&dyn Fn(usize) -> i32; 4] =
                [&spread, &|i| if i % 7 == 0 { spread(i) } else { 50_000 }, &|_| 3, &|i| {
                    if i < 600 { (i % 2) as i32 } else { 2 + (i / 300 % 3) as i32 }
                }];
            for (name, token) in batches.iter().enumerate() {
                let tokens: Vec<i32> = (0..len).map(token).collect();
                let [got, want] = whole_gradient(&tokens, vocab, width);
                assert!(got == want, "batch {name}");
            }
        }

        #[test]
        #[ignore = "needs a GPU"]
        fn a_token_outside_the_vocabulary_shows() {
            let rows = values(embedding(wave([9, 2], 0.0), ints(vec![0, 9, -1], [1, 3])));
            assert!(
                rows[..2].iter().all(|x| x.is_finite()) && rows[2..].iter().all(|x| x.is_nan())
            );
        }
    }
}
