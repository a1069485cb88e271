use super::*;
use crate::cpu::math;
use crate::ops::support::{Ad, assert_nan_shows, assert_threads_agree, assert_views_agree};
use crate::ops::support::{output_and_gradient, wave};
use crate::testing::{Case, Tensor64, check};

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
        let case = Case::new(Embedding, &[&[vocab, width]]).ints(&[batch, seq_len], ids.clone());
        check(case, |inputs| {
            Tensor64::from_fn(&[batch, seq_len, width], |at| {
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
    assert_nan_shows(wave([6, 3], 0.0), weight_sum);
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
    use crate::ops::support::gpu::{Gpu, floats, ints, wave};
    use crate::ops::support::values;
    use crate::testing::check_on;

    #[test]
    #[ignore = "needs a GPU"]
    fn agrees_with_the_oracle_and_its_gradients() {
        for (batch, seq_len, vocab, width) in
            [(1, 1, 1, 1), (2, 7, 5, 9), (3, 101, 257, 33), (2, 1500, 1100, 64), (1, 1030, 3, 40)]
        {
            let ids = ids(batch * seq_len, vocab);
            let case =
                || Case::new(Embedding, &[&[vocab, width]]).ints(&[batch, seq_len], ids.clone());
            let oracle = |inputs: &[Tensor64]| {
                Tensor64::from_fn(&[batch, seq_len, width], |at| {
                    inputs[0].at(&[ids[at[0] * seq_len + at[1]] as usize, at[2]])
                })
            };
            check_on::<crate::Cuda, _, 1>(case(), oracle);
            check_on::<crate::Cuda, _, 1>(case().bf16(&[0]).parameters(&[0]), oracle);
        }
    }

    /// The gradient for an upstream gradient of small integers, and the expected one: all sums are exact.
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
        // Tokens across the vocabulary; mostly one token; only one token; two alternating.
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
        assert!(rows[..2].iter().all(|x| x.is_finite()) && rows[2..].iter().all(|x| x.is_nan()));
    }
}
